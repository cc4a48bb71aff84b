"""Audit KL terms on blocks of completions: gradients of every loss, their products, and what those say.

``audit_blocks`` measures. ``check_beta`` takes the gradient of the training step at 0 and at twice a term's beta: a
term can be configured, logged and without effect (a mask that is never open, a clamp that always acts, a cost that the
baseline removes).

Legend: ``C`` losses, ``K`` disjoint blocks of completions; ``gram_KK[j, k]`` is the inner product of block j's gradient
of one loss with block k's of another, in float64. Blocks are independent, so products of *different* blocks estimate
products of expectations without bias, also where both gradients were taken on the same completions. Intervals are
delete-one jackknife (Tukey 1958) with Student's t of K - 1 degrees of freedom; for a squared norm near zero they are
wide rather than narrow.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kl_comedy.config import Config
from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl import BetaState, KLTerm, resolve_terms
from kl_comedy.lab.audit.gradients import (
    AuditedTerm,
    GradientSketch,
    block_gradients,
    differentiate,
    layer_groups,
    reference_term,
)
from kl_comedy.lab.audit.report import SIGNIFICANT, UNDEFINED, AuditReport, BetaCheck, Estimate, TermResult
from kl_comedy.records import Scored
from kl_comedy.registry import OWN_PART, RECIPES
from kl_comedy.training.build import is_off_policy
from kl_comedy.training.loss import micro_loss, named_terms, prepare
from kl_comedy.training.metrics import MetricAccumulator
from kl_comedy.training.module import PolicyModule

MINIMUM_BLOCKS = 3
"""Two blocks have one product of different blocks; leaving one out leaves none."""

PANEL_BETA = 0.05
"""The coefficient at which a panel term is weighed against the policy loss where the config has no term of its own."""

PANEL = (
    KLTerm("k1", placement="reward", credit="total"),
    KLTerm("k1", placement="reward"),
    KLTerm("k1", placement="reward", correction="prefix"),
    KLTerm("k1", placement="loss"),
    KLTerm("k2", placement="loss"),
    KLTerm("k3", placement="loss"),
    KLTerm("k3", placement="reward"),
    KLTerm("k3", placement="loss", correction="token"),
    KLTerm("exact", placement="loss"),
    KLTerm("exact", placement="reward"),
    KLTerm("exact", placement="loss", correction="prefix_previous"),
)
"""The paper's cells, the corrected ones, and the Rao-Blackwellized ones."""


def equal_blocks(rows: Sequence[Scored], blocks: int) -> list[list[Scored]]:
    """At most ``blocks`` blocks of as many whole groups each; groups that are left over are left out.

    Rows of a group stand together. Blocks must be equal, for their gradients are means over completions.
    """
    groups = [list(group) for _, group in itertools.groupby(rows, lambda row: row.rollout.group_id)]
    count = min(blocks, len(groups))
    size = len(groups) // count
    return [[row for group in groups[n * size : (n + 1) * size] for row in group] for n in range(count)]


def select_terms(
    names: Sequence[str], config: Config, *, key: str, betas: Mapping[str, float] | None = None
) -> list[AuditedTerm]:
    """The terms that ``names`` ask for: ``own`` (all of the config), ``panel``, or recipes.

    The config's come first; others that differ from an earlier one in beta only are left out. On-policy the panel has
    no corrections, which are one there. ``betas`` are those in force (default: at the first update). Raises
    :class:`UserError` under ``key`` for another name.
    """
    terms = named_terms(resolve_terms(config.kl))
    if betas is None:
        betas = {name: BetaState(term.beta).value for name, term in terms.items()}
    config_terms: list[AuditedTerm] = []
    others: list[AuditedTerm] = []
    for name in names:
        if name == "own":
            for n, (key, term) in enumerate(terms.items()):
                label = f"kl.{n}: {term.label()}"
                config_terms.append(AuditedTerm(key=key, label=label, term=term, beta=betas[key], position=n))
        elif name == "panel":
            beta = next(iter(betas.values()), PANEL_BETA)
            shown = [term for term in PANEL if term.correction == "none" or is_off_policy(config)]
            others += [_other(term.label(), term.label(), term, beta) for term in shown]
        elif name in RECIPES:
            recipe: tuple[KLTerm, ...] = RECIPES.get(name).fn()
            for n, term in enumerate(recipe):
                title = name if len(recipe) == 1 else f"{name} {n}"
                others.append(_other(title, f"{title}: {term.label()}", term, BetaState(term.beta).value))
        else:
            raise bad_value(key, name, ["own", "panel", *RECIPES.names()], OWN_PART)
    selected: dict[KLTerm | int, AuditedTerm] = dict(enumerate(config_terms))
    shapes = {dataclasses.replace(term, beta=1.0) for term in terms.values()} if config_terms else set()
    for item in others:
        assert item.term is not None
        shape = dataclasses.replace(item.term, beta=1.0)
        if shape not in shapes:
            selected.setdefault(shape, item)
    return list(selected.values())


def _other(title: str, label: str, term: KLTerm, beta: float) -> AuditedTerm:
    """A term that is not the config's; its key is the title as part of a metric's name."""
    key = "".join(c if c.isalnum() or c in "_-." else "_" for c in title)
    return AuditedTerm(key=key, label=label, term=term, beta=beta)


# --- statistics of grams ------------------------------------------------------------------------------------------
def mean_product(gram_KK: Tensor) -> Tensor:
    """Unbiased ``<E x, E y>``: the mean of the products of different blocks.

    >>> float(mean_product(torch.tensor([[9.0, 1.0], [3.0, 9.0]])))
    2.0
    """
    k = gram_KK.shape[0]
    return (gram_KK.sum() - gram_KK.diagonal().sum()) / (k * (k - 1))


def noise(gram_KK: Tensor) -> Tensor:
    """Unbiased trace of the covariance of one block's gradient, from its products with itself."""
    return gram_KK.diagonal().mean() - mean_product(gram_KK)


def estimate(statistic: Callable[..., Tensor], *grams_KK: Tensor) -> Estimate:
    """``statistic(*grams)`` with the interval of leaving out one block at a time. NaN where it is undefined."""
    from scipy.stats import t

    k, value = grams_KK[0].shape[0], float(statistic(*grams_KK))
    rests = [torch.tensor([m for m in range(k) if m != n]) for n in range(k)]
    left_out = [float(statistic(*(gram[rest][:, rest] for gram in grams_KK))) for rest in rests]
    mean = sum(left_out) / k
    width = float(t.ppf(0.975, k - 1)) * math.sqrt((k - 1) / k * sum((item - mean) ** 2 for item in left_out))
    return Estimate(value=value, low=value - width, high=value + width)


def delivered(with_reference_KK: Tensor, reference_KK: Tensor) -> Tensor:
    """``<E g, E r> / |E r|^2``: the share of the reference gradient that a term delivers; 1 is all, 0 nothing."""
    return mean_product(with_reference_KK) / mean_product(reference_KK)


def cosine(term_KK: Tensor, with_reference_KK: Tensor, reference_KK: Tensor) -> Tensor:
    """Cosine of the expected gradients; NaN where a squared norm is estimated at or below zero."""
    squares = mean_product(term_KK), mean_product(reference_KK)
    if min(float(square) for square in squares) <= 0:
        return torch.tensor(math.nan)
    return mean_product(with_reference_KK) / (squares[0] * squares[1]).sqrt()


def squared_bias(difference_KK: Tensor, reference_KK: Tensor) -> Tensor:
    """``|E(g - r)|^2 / |E r|^2``. Unbiased above the line, so it may come out below zero."""
    return mean_product(difference_KK) / mean_product(reference_KK)


def difference_gram(term_KK: Tensor, with_reference_KK: Tensor, reference_KK: Tensor) -> Tensor:
    """Products of ``g_j - r_j`` with ``g_k - r_k``; ``with_reference_KK[j, k]`` is ``<g_j, r_k>``."""
    return term_KK - with_reference_KK - with_reference_KK.T + reference_KK


def kl_projection(
    update_KK: Tensor,
    policy_KK: Tensor,
    update_reference_KK: Tensor,
    policy_reference_KK: Tensor,
    reference_KK: Tensor,
    *,
    scale: float,
    bound: float,
) -> Tensor:
    """What the KL part adds to a clipped update along the reference gradient, over the clipped policy gradient's norm.

    Products of ``u = p + beta g`` and of the policy gradient ``p`` with themselves and, their blocks in rows, with
    ``r``. With ``c(x) = x min(1, bound / |x|)``: ``<E c(u) - E c(p), E r> / (|E r| rms |c(p)|)``. ``bound``: the
    largest norm of an update's gradient. ``scale``: a block over an update; from a smaller block the norm is that of an
    update with this block's noise. NaN where noise hides the reference gradient.
    """
    square = mean_product(reference_KK)
    if square <= 0:
        return torch.tensor(math.nan)

    def norms(gram_KK: Tensor) -> Tensor:
        mean = mean_product(gram_KK).clamp(min=0.0)
        return (mean * (1.0 - scale) + scale * gram_KK.diagonal()).clamp(min=1e-30).sqrt()

    update_K, policy_K = norms(update_KK), norms(policy_KK)
    update_clip_K1, policy_clip_K1 = ((bound / each[:, None]).clamp(max=1.0) for each in (update_K, policy_K))
    added_KK = update_clip_K1 * update_reference_KK - policy_clip_K1 * policy_reference_KK
    return mean_product(added_KK) / (square.sqrt() * policy_K.clamp(max=bound).square().mean().sqrt())


FLIPS = 2000
"""Sign flips of a test: p-values are resolved to 0.0005."""


def p_of_zero_mean(gram_KK: Tensor, generator: torch.Generator) -> float:
    """How often blocks of mean zero would give a ``|E x|^2`` as large as this, by flipping the signs of whole blocks.

    Exact for blocks whose distribution is symmetric when their mean is zero (Fisher's randomization test), which
    means over many completions nearly are. Sharper than the jackknife of a squared norm, which is for its size.
    """
    k = gram_KK.shape[0]
    signs_FK = torch.randint(0, 2, (FLIPS, k), generator=generator).to(gram_KK) * 2 - 1
    apart_KK = gram_KK - gram_KK.diagonal().diag()
    flipped_F = ((signs_FK @ apart_KK) * signs_FK).sum(-1)
    return float((1 + (flipped_F >= apart_KK.sum()).sum()) / (1 + FLIPS))


# --- does beta change the training gradient? ------------------------------------------------------------------------
ROUNDING = 1e-6
"""A change of the gradient by less than this share of it is rounding, in float32."""

DISAGREEMENT = 0.05
"""Relative distance beyond which the difference quotient is not the term's gradient. In float32 it is near 1e-5 where
the KL part is as large as the policy's, and grows as that share shrinks; bfloat16 takes most of the rest."""


def training_gradient(
    module: PolicyModule, rows: Sequence[Scored], betas: Mapping[str, float], sketch: GradientSketch
) -> Tensor:
    """The gradient that the training step would give the optimizer for ``rows``, sketched, in float64."""
    passes = {"references": module.references, "policy_pass": module.policy_pass, "old_policy": module.record(rows)}
    settings = {"terms": module.terms, "betas": betas, "algorithm": module.config.algorithm}
    gradients = []
    for micro in prepare(rows, module.plan, betas=betas, **passes):
        loss = micro_loss(micro, module.passes(micro), **settings).loss
        gradients.append(torch.cat(sketch.fold(differentiate([loss], None, sketch.parameters))))
    return module.ranks.sum(sum(gradients[1:], gradients[0])).double()


def check_beta(
    module: PolicyModule, rows: Sequence[Scored], item: AuditedTerm, term_gradient: Tensor, sketch: GradientSketch
) -> BetaCheck:
    """What the beta of one term of the config does to the training gradient on ``rows``.

    ``term_gradient`` is the gradient of the term alone on the same rows, at beta = 1, summed and sketched.
    """
    assert item.term is not None
    betas = module.beta_values
    high = 2.0 * item.beta or 1.0
    without, doubled = (training_gradient(module, rows, {**betas, item.key: value}, sketch) for value in (0.0, high))
    change = doubled - without
    scale = float(without.norm() + doubled.norm())
    share = float(change.norm()) / scale if scale > 0 else 0.0
    inert = share <= ROUNDING
    size = float(term_gradient.norm())
    disagreement = float((change / high - term_gradient).norm()) / size if size > 0 else math.nan
    tolerance = DISAGREEMENT + ROUNDING * scale / max(high * size, 1e-300)
    linear = item.term.baseline != "before"  # advantages are not linear in a cost before the baseline
    wrong = not inert and linear and not disagreement <= tolerance
    return BetaCheck(change=share, disagreement=disagreement, inert=inert, wrong=wrong)


# --- the audit ------------------------------------------------------------------------------------------------------
POLICY = "policy"


def audit_blocks(
    module: PolicyModule,
    blocks: Sequence[Sequence[Scored]],
    audited: Sequence[AuditedTerm],
    *,
    sketch: int,
    seed: int,
    check: bool = True,
    progress: Callable[[int], None] = lambda done: None,
) -> AuditReport:
    """Audit ``audited`` on blocks of whole groups, each of as many completions.

    ``check`` adds the check of beta for the terms of the config, on the first block. ``progress`` is called with the
    number of blocks done. Leaves weights, ``.grad`` and random state alone. All ranks call, with the same blocks, and
    have the same report.

    Where noise hides the reference gradient nothing is compared with it, and ``reference_noise`` is NaN. Raises
    :class:`UserError` for too few blocks, or a policy that is its reference still.
    """
    if len(blocks) < MINIMUM_BLOCKS:
        raise UserError(f"audit: intervals need at least {MINIMUM_BLOCKS} blocks of whole groups, got {len(blocks)}")
    started, config = time.perf_counter(), module.config
    on_policy = not is_off_policy(config)
    group_size = sum(row.rollout.group_id == blocks[0][0].rollout.group_id for row in blocks[0])
    names = sorted({"initial", *(item.term.reference for item in audited if item.term)} - {"sampler"})
    references = {name: reference_term(name, on_policy=on_policy, group_size=group_size) for name in names}
    losses = [
        AuditedTerm(key=POLICY, term=None),
        *(AuditedTerm(key=f"reference/{name}", term=term) for name, term in references.items()),
        *audited,
    ]
    sketches, metrics = GradientSketch(layer_groups(module.policy), sketch), MetricAccumulator()
    gradients: list[tuple[list[Tensor], float]] = []
    for rows in blocks:
        gradients.append(block_gradients(module, rows, losses, sketches, metrics))
        progress(len(gradients))
    values = metrics.merged(module.ranks).values()
    if values["exact_kl_token"] == 0.0:
        raise UserError(
            "audit: the policy is its initial reference still, so every KL gradient is zero; train it first "
            "(more --updates, or audit the folder of a run)"
        )
    update = config.rollout.prompts_per_batch * group_size // config.algorithm.updates_per_batch
    scale = len(blocks[0]) / update
    products = _Products([loss.key for loss in losses], sketches.names, gradients, seed, scale)
    terms = [products.result(item, values) for item in audited]
    own = [item for item in audited if item.position is not None]
    first, weight = gradients[0]
    bound = (config.optimizer.clip_norm or math.inf) * scale / weight if weight > 0 else math.inf
    for n, item in enumerate(audited):
        if check and item.position is not None:
            sketched = torch.cat([of_group[losses.index(item)] for of_group in first]).double() * weight
            terms[n] = dataclasses.replace(terms[n], check=check_beta(module, blocks[0], item, sketched, sketches))
    return AuditReport(
        name=config.name,
        version=module.version,
        regime="on_policy" if on_policy else "off_policy",
        completions=sum(len(rows) for rows in blocks),
        blocks=len(blocks),
        reference_term=references["initial"].label(),
        reference_noise=products.reference_noise("reference/initial"),
        policy_silent_share=values[f"silent/{POLICY}"],
        clip_share=values.get("clipped"),
        total_kl_to_policy=products.kl_to_policy(own),
        kl_projection=products.kl_projection(own, bound),
        sketch=sketch,
        seconds=time.perf_counter() - started,
        terms=terms,
        **{name: values[name] for name in ("length", "exact_kl_token", "exact_kl_sequence")},
    )


class _Products:
    """Estimates from inner products of gradients. ``scale`` is the size of a block over that of the run's updates."""

    def __init__(
        self,
        keys: list[str],
        layers: list[str],
        gradients: Sequence[tuple[list[Tensor], float]],
        seed: int,
        scale: float,
    ) -> None:
        self._at = {key: n for n, key in enumerate(keys)}
        by_layer = zip(*(vectors for vectors, _ in gradients), strict=True)
        self._layers = {name: _gram(blocks) for name, blocks in zip(layers, by_layer, strict=True)}
        self._whole = torch.stack(list(self._layers.values())).sum(0)
        self._generator, self._scale = torch.Generator().manual_seed(seed), scale

    def _gram_of(self, left: str, right: str) -> Tensor:
        return self._whole[self._at[left], self._at[right]]

    def reference_noise(self, key: str) -> float:
        """Standard error of a reference gradient over its norm; NaN where noise hides it."""
        gram_KK = self._gram_of(key, key)
        square, spread = float(mean_product(gram_KK)), float(noise(gram_KK)) / len(gram_KK)
        return math.sqrt(max(spread, 0.0) / square) if square > max(spread, 0.0) else math.nan

    def _gram_of_sums(self, left: Mapping[str, float], right: Mapping[str, float]) -> Tensor:
        """Products of two sums of losses, given by the coefficient of each."""
        total_KK = torch.zeros(self._whole.shape[-2:], dtype=torch.float64)
        for (key, a), (other, b) in itertools.product(left.items(), right.items()):
            total_KK += a * b * self._gram_of(key, other)
        return total_KK

    def kl_projection(self, items: Sequence[AuditedTerm], bound: float) -> Estimate:
        """:func:`kl_projection` of the sum of the items; undefined without any, or against another reference.

        ``bound``: the largest norm of an update's gradient, in the unit of the gradients: a mean over completions.
        """
        reference = "reference/initial"
        if any(item.term is None or item.term.reference != "initial" for item in items) or not items:
            return UNDEFINED
        if not math.isfinite(self.reference_noise(reference)):
            return UNDEFINED
        policy, kl = {POLICY: 1.0}, {item.key: item.beta for item in items}
        update, exact = policy | kl, {reference: 1.0}
        pairs = (update, update), (policy, policy), (update, exact), (policy, exact), (exact, exact)
        statistic = functools.partial(kl_projection, scale=self._scale, bound=bound)
        return estimate(statistic, *(self._gram_of_sums(*pair) for pair in pairs))

    def kl_to_policy(self, items: Sequence[AuditedTerm]) -> float:
        """Norm of ``sum beta g`` over that of the policy gradient, each of an update's size; NaN without either."""
        kl = {item.key: item.beta for item in items}
        grams = self._gram_of_sums(kl, kl), self._gram_of(POLICY, POLICY)
        kl, policy = (float(mean_product(gram) + noise(gram) * self._scale) for gram in grams)
        return math.sqrt(kl / policy) if kl >= 0 and policy > 0 else math.nan

    def result(self, item: AuditedTerm, values: Mapping[str, float]) -> TermResult:
        """Everything about one term but the check of beta."""
        assert item.term is not None
        reference = f"reference/{item.term.reference}"
        p_no_mean = p_of_zero_mean(self._gram_of(item.key, item.key), self._generator)
        compared: dict[str, Any] = {}
        if reference in self._at and math.isfinite(self.reference_noise(reference)):
            term, ref = self._at[item.key], self._at[reference]
            whole, *layers = (
                (gram[term, term], gram[term, ref], gram[ref, ref]) for gram in (self._whole, *self._layers.values())
            )
            compared = self._compared(*whole, p_no_mean)
            compared["layers"] = {name: _layer(*grams) for name, grams in zip(self._layers, layers, strict=True)}
        return TermResult(
            **{name: getattr(item, name) for name in ("key", "label", "position", "beta")},
            p_no_mean=p_no_mean,
            kl_to_policy=self.kl_to_policy([item]),
            silent_share=values.get(f"silent/{item.key}", 0.0),
            clamped_share=values.get(f"clamped/{item.key}"),
            capped_share=values.get(f"capped/{item.key}"),
            **compared,
        )

    def _compared(self, term_KK: Tensor, with_KK: Tensor, ref_KK: Tensor, p_no_mean: float) -> dict[str, Any]:
        difference_KK = difference_gram(term_KK, with_KK, ref_KK)
        same = float(difference_KK.diagonal().sum()) <= 1e-10 * float(ref_KK.diagonal().sum())
        direction = estimate(cosine, term_KK, with_KK, ref_KK)
        has_mean = p_no_mean < SIGNIFICANT and math.isfinite(direction.value) and math.isfinite(direction.half_width)
        square = estimate(squared_bias, difference_KK, ref_KK)
        return {
            "delivered": estimate(delivered, with_KK, ref_KK),
            "cosine": direction if has_mean else None,
            "bias": Estimate(**{end: math.sqrt(max(value, 0.0)) for end, value in vars(square).items()}),
            "p_unbiased": 1.0 if same else p_of_zero_mean(difference_KK, self._generator),
            "variance": float(noise(term_KK) / noise(ref_KK)),
        }


def _gram(blocks: Sequence[Tensor]) -> Tensor:
    """``K`` tensors ``[C, w]`` to ``[C, C, K, K]``."""
    stacked = torch.stack(list(blocks)).double().cpu()
    k, c, _ = stacked.shape
    flat = stacked.transpose(0, 1).reshape(c * k, -1)
    return (flat @ flat.T).reshape(c, k, c, k).permute(0, 2, 1, 3)


def _layer(term_KK: Tensor, with_KK: Tensor, ref_KK: Tensor) -> dict[str, float]:
    if float(mean_product(ref_KK)) <= 0:
        return dict.fromkeys(("cosine", "delivered", "bias"), math.nan)
    bias = float(squared_bias(difference_gram(term_KK, with_KK, ref_KK), ref_KK))
    return {
        "cosine": float(cosine(term_KK, with_KK, ref_KK)),
        "delivered": float(delivered(with_KK, ref_KK)),
        "bias": math.sqrt(max(bias, 0.0)),
    }
