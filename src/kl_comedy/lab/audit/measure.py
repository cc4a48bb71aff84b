"""Audit KL terms on blocks of completions: gradients of every loss, their products, and what those say.

``select_terms`` chooses what is audited: the config's own terms, a panel of well-known ones, recipes by name.
``audit_blocks`` measures. ``check_beta`` takes the gradient of the training step at 0 and at twice a term's beta: a
term can be configured, logged and without effect (a mask that is never open, a clamp that always acts, a cost that the
baseline removes).

Legend: ``C`` losses, ``K`` blocks. A gram is ``[C, C, K, K]``: ``gram[a, b, j, k]`` is the inner product of the
gradient of loss a on block j with that of loss b on block k, in float64.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl import BetaState, KLTerm
from kl_comedy.lab.audit.gradients import (
    AuditedLoss,
    BlockGradients,
    GradientSketch,
    block_gradients,
    layer_groups,
    reference_term,
)
from kl_comedy.lab.audit.report import SIGNIFICANT, AuditReport, BetaCheck, LayerResult, TermResult
from kl_comedy.lab.audit.statistics import (
    MINIMUM_BLOCKS,
    Estimate,
    cosine,
    delivered,
    difference_gram,
    estimate,
    mean_product,
    noise,
    p_of_zero_mean,
    rooted,
    squared_bias,
)
from kl_comedy.records import Scored
from kl_comedy.registry import RECIPES
from kl_comedy.training.loss import micro_loss
from kl_comedy.training.metrics import MetricAccumulator
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.prepare import prepare


def equal_blocks(rows: Sequence[Scored], blocks: int) -> list[list[Scored]]:
    """At most ``blocks`` blocks of as many whole groups each; groups that are left over are left out.

    Rows of a group stand together. Blocks must be equal, for their gradients are means over completions.
    """
    groups: list[list[Scored]] = []
    for row in rows:
        if not groups or groups[-1][0].rollout.group_id != row.rollout.group_id:
            groups.append([])
        groups[-1].append(row)
    count = min(blocks, len(groups))
    size = len(groups) // count
    return [[row for group in groups[n * size : (n + 1) * size] for row in group] for n in range(count)]


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


@dataclass(frozen=True, kw_only=True)
class AuditedTerm:
    """A term under audit. ``key`` names it in metrics: a config term by position, others by recipe or label.

    ``beta`` is the coefficient in force; ``position`` is that among the config's terms, None for others.
    """

    key: str
    label: str
    term: KLTerm
    beta: float
    position: int | None = None


def select_terms(
    names: Sequence[str], terms: Sequence[KLTerm], betas: Sequence[float], *, on_policy: bool, key: str
) -> list[AuditedTerm]:
    """The terms that ``names`` ask for: ``own`` (all of the config), ``panel``, or recipes.

    The config's come first; others that differ from an earlier one in beta only are left out. On-policy the panel has
    no corrections, which are one there. Raises :class:`UserError` under ``key`` for another name.
    """
    allowed = ["own", "panel", *RECIPES.names()]
    config_terms: list[AuditedTerm] = []
    others: list[AuditedTerm] = []
    for name in names:
        if name not in allowed:
            raise bad_value(key, name, allowed)
        if name == "own":
            config_terms += [
                AuditedTerm(key=f"kl_{n}", label=f"kl.{n}: {term.label()}", term=term, beta=beta, position=n)
                for n, (term, beta) in enumerate(zip(terms, betas, strict=True))
            ]
        elif name == "panel":
            beta = betas[0] if betas else PANEL_BETA
            others += [
                AuditedTerm(key=_metric_name(term.label()), label=term.label(), term=term, beta=beta)
                for term in PANEL
                if not (on_policy and term.correction != "none")
            ]
        else:
            recipe: tuple[KLTerm, ...] = RECIPES.get(name).fn()
            for n, term in enumerate(recipe):
                label = name if len(recipe) == 1 else f"{name} {n}"
                beta = BetaState(term.beta).value
                others.append(
                    AuditedTerm(key=_metric_name(label), label=f"{label}: {term.label()}", term=term, beta=beta)
                )
    selected = config_terms
    shapes = [dataclasses.replace(item.term, beta=1.0) for item in config_terms]
    for item in others:
        shape = dataclasses.replace(item.term, beta=1.0)
        if shape not in shapes:
            selected.append(item)
            shapes.append(shape)
    return selected


def _metric_name(label: str) -> str:
    """A label as part of a metric's name."""
    return "".join(c if c.isalnum() or c in "_-." else "_" for c in label)


ROUNDING = 1e-6
"""A change of the gradient by less than this share of it is rounding, in float32."""

DISAGREEMENT = 0.05
"""Relative distance beyond which the difference quotient is not the term's gradient. In float32 it is near 1e-5 where
the KL part is as large as the policy's, and grows as that share shrinks; bfloat16 takes most of the rest."""


def training_gradient(
    module: PolicyModule, rows: Sequence[Scored], betas: Sequence[float], sketch: GradientSketch
) -> Tensor:
    """The gradient that the training step would give the optimizer for ``rows``, sketched, in float64."""
    micros = prepare(
        rows,
        module.plan,
        betas=betas,
        references=module.references,
        policy_pass=module.policy_pass,
        old_policy=module.record(rows),
    )
    total: Tensor | None = None
    for micro in micros:
        loss = micro_loss(
            micro, module.passes(micro), terms=module.terms, betas=betas, algorithm=module.config.algorithm
        ).loss
        gradients = torch.autograd.grad(loss, sketch.parameters, allow_unused=True)
        flat = torch.cat(sketch.fold(gradients))
        total = flat if total is None else total + flat
    assert total is not None
    return total.double()


def check_beta(
    module: PolicyModule,
    rows: Sequence[Scored],
    item: AuditedTerm,
    term_gradient: Tensor,
    sketch: GradientSketch,
) -> BetaCheck:
    """What the beta of one term of the config does to the training gradient on ``rows``.

    ``term_gradient`` is the gradient of the term alone on the same rows, at beta = 1, summed and sketched.
    """
    betas = [beta.value for beta in module.betas]
    high = 2.0 * item.beta or 1.0

    def gradient_at(value: float) -> Tensor:
        changed = [value if n == item.position else beta for n, beta in enumerate(betas)]
        return training_gradient(module, rows, changed, sketch)

    without, doubled = gradient_at(0.0), gradient_at(high)
    change = doubled - without
    scale = float(without.norm() + doubled.norm())
    share = float(change.norm()) / scale if scale > 0 else 0.0
    inert = share <= ROUNDING
    size = float(term_gradient.norm())
    disagreement = float((change / high - term_gradient).norm()) / size if size > 0 else math.nan
    tolerance = DISAGREEMENT + ROUNDING * scale / max(high * size, 1e-300)
    linear = item.term.baseline != "before"  # advantages are not linear in a cost before the baseline
    return BetaCheck(
        change=share,
        disagreement=disagreement,
        inert=inert,
        wrong=not inert and linear and not disagreement <= tolerance,
    )


POLICY = "policy"
_UNDEFINED = Estimate(value=math.nan, low=math.nan, high=math.nan)


def audit_blocks(
    module: PolicyModule,
    blocks: Sequence[Sequence[Scored]],
    audited: Sequence[AuditedTerm],
    *,
    on_policy: bool,
    sketch: int,
    seed: int,
    check: bool = True,
    progress: Callable[[], None] = lambda: None,
) -> AuditReport:
    """Audit ``audited`` on blocks of whole groups, each of as many completions.

    ``check`` adds the check of beta for the terms of the config, on the first block. ``progress`` is called after
    each block. Leaves weights, ``.grad`` and random state alone.

    Where noise hides the reference gradient nothing is compared with it, and ``reference_noise`` is NaN. Raises
    :class:`UserError` for too few blocks, or a policy that is its reference still.
    """
    if len(blocks) < MINIMUM_BLOCKS:
        raise UserError(f"audit: intervals need at least {MINIMUM_BLOCKS} blocks of whole groups, got {len(blocks)}")
    started = time.perf_counter()
    group_size = sum(row.rollout.group_id == blocks[0][0].rollout.group_id for row in blocks[0])
    losses = _losses(audited, on_policy=on_policy, group_size=group_size)
    sketches, metrics = GradientSketch.of(layer_groups(module.policy), sketch), MetricAccumulator()
    gradients: list[BlockGradients] = []
    for rows in blocks:
        gradients.append(block_gradients(module, rows, losses, sketches, metrics))
        progress()
    values = metrics.values()
    if values["exact_kl_token"] == 0.0:
        raise UserError(
            "audit: the policy is its initial reference still, so every KL gradient is zero; train it first "
            "(more --updates, or audit the folder of a run)"
        )
    names = [loss.name for loss in losses]
    grams = {group.name: _gram([block.vectors[n] for block in gradients]) for n, group in enumerate(sketches.groups)}
    update = module.config.rollout.prompts_per_batch * group_size // module.config.algorithm.updates_per_batch
    products = _Products(names=names, grams=grams, values=values, seed=seed, scale=len(blocks[0]) / update)
    terms = [products.result(item) for item in audited]
    for n, item in enumerate(audited):
        if check and item.position is not None:
            sketched = torch.cat([vectors[names.index(item.key)] for vectors in gradients[0].vectors])
            term_gradient = sketched.double() * gradients[0].weight
            checked = check_beta(module, blocks[0], item, term_gradient, sketches)
            terms[n] = dataclasses.replace(terms[n], check=checked)
    main = reference_term("initial", on_policy=on_policy, group_size=group_size)
    return AuditReport(
        name=module.config.name,
        version=module.version,
        regime="on_policy" if on_policy else "off_policy",
        completions=sum(len(rows) for rows in blocks),
        blocks=len(blocks),
        length=values["length"],
        exact_kl_token=values["exact_kl_token"],
        exact_kl_sequence=values["exact_kl_sequence"],
        reference_term=main.label(),
        reference_noise=products.reference_noise(_reference_name(main)),
        policy_silent_share=values[f"silent/{POLICY}"],
        clip_share=values.get("clipped"),
        total_kl_to_policy=products.kl_to_policy([(i.key, i.beta) for i in audited if i.position is not None]),
        sketch=sketch,
        seconds=time.perf_counter() - started,
        terms=terms,
    )


def _reference_name(term: KLTerm) -> str:
    return f"reference/{term.reference}"


def _losses(audited: Sequence[AuditedTerm], *, on_policy: bool, group_size: int) -> list[AuditedLoss]:
    """The policy loss, the reference gradient of each reference policy, the audited terms."""
    names = sorted({"initial", *(item.term.reference for item in audited)} - {"sampler"})
    references = [reference_term(name, on_policy=on_policy, group_size=group_size) for name in names]
    return [
        AuditedLoss(name=POLICY, term=None),
        *(AuditedLoss(name=_reference_name(term), term=term) for term in references),
        *(AuditedLoss(name=item.key, term=item.term, beta=item.beta or 1.0) for item in audited),
    ]


def _gram(blocks: Sequence[Tensor]) -> Tensor:
    """``K`` tensors ``[C, w]`` to ``[C, C, K, K]``."""
    stacked = torch.stack(list(blocks)).double().cpu()
    k, c, _ = stacked.shape
    flat = stacked.transpose(0, 1).reshape(c * k, -1)
    return (flat @ flat.T).reshape(c, k, c, k).permute(0, 2, 1, 3)


class _Products:
    """Estimates from inner products of gradients. ``scale`` is the size of a block over that of the run's updates."""

    def __init__(
        self, *, names: Sequence[str], grams: Mapping[str, Tensor], values: Mapping[str, float], seed: int, scale: float
    ) -> None:
        self._at = {name: n for n, name in enumerate(names)}
        self._layers = grams
        self._whole = torch.stack(list(grams.values())).sum(0)
        self._values = values
        self._generator = torch.Generator().manual_seed(seed)
        self._scale = scale

    def _products(self, gram: Tensor, term: str, reference: str) -> tuple[Tensor, Tensor, Tensor]:
        left, right = self._at[term], self._at[reference]
        return gram[left, left], gram[left, right], gram[right, right]

    def reference_noise(self, name: str) -> float:
        """Standard error of a reference gradient over its norm; NaN where noise hides it."""
        at = self._at[name]
        gram = self._whole[at, at]
        square, spread = float(mean_product(gram)), float(noise(gram)) / len(gram)
        return math.sqrt(max(spread, 0.0) / square) if square > max(spread, 0.0) else math.nan

    def kl_to_policy(self, parts: Sequence[tuple[str, float]]) -> float:
        """Norm of ``sum beta g`` over that of the policy gradient, each of an update's size; NaN without either."""
        k = self._whole.shape[-1]
        total = torch.zeros(k, k, dtype=torch.float64)
        for left, left_beta in parts:
            for right, right_beta in parts:
                total += left_beta * right_beta * self._whole[self._at[left], self._at[right]]
        kl, policy = self._of_an_update(total), self._of_an_update(self._whole[self._at[POLICY], self._at[POLICY]])
        return math.sqrt(kl / policy) if kl >= 0 and policy > 0 else math.nan

    def _of_an_update(self, gram: Tensor) -> float:
        """Mean square norm of the gradient of a batch of the run's size."""
        return float(mean_product(gram) + noise(gram) * self._scale)

    def result(self, item: AuditedTerm) -> TermResult:
        """Everything about one term but the check of beta."""
        at = self._at[item.key]
        products = None
        if item.term.reference != "sampler" and math.isfinite(self.reference_noise(_reference_name(item.term))):
            products = self._products(self._whole, item.key, _reference_name(item.term))
        own_KK = self._whole[at, at]
        p_no_mean = p_of_zero_mean(own_KK, self._generator)
        share = {name: self._values.get(f"{name}/{item.key}") for name in ("silent", "clamped", "capped")}
        return TermResult(
            key=item.key,
            label=item.label,
            position=item.position,
            beta=item.beta,
            p_no_mean=p_no_mean,
            **self._against(products, p_no_mean),
            kl_to_policy=self.kl_to_policy([(item.key, item.beta)]),
            silent_share=share["silent"] or 0.0,
            clamped_share=share["clamped"],
            capped_share=share["capped"],
            layers={} if products is None else {name: self._layer(name, item) for name in self._layers},
        )

    def _against(self, products: tuple[Tensor, Tensor, Tensor] | None, p_no_mean: float) -> dict[str, Any]:
        if products is None:
            undefined = {"delivered": _UNDEFINED, "bias": _UNDEFINED, "p_unbiased": math.nan, "variance": math.nan}
            return {"cosine": None, **undefined}
        own_KK, with_KK, ref_KK = products
        difference_KK = difference_gram(own_KK, with_KK, ref_KK)
        same = float(difference_KK.diagonal().sum()) <= 1e-10 * float(ref_KK.diagonal().sum())
        direction = estimate(cosine, own_KK, with_KK, ref_KK)
        has_mean = p_no_mean < SIGNIFICANT and math.isfinite(direction.value) and math.isfinite(direction.half_width)
        return {
            "delivered": estimate(delivered, with_KK, ref_KK),
            "cosine": direction if has_mean else None,
            "bias": rooted(estimate(squared_bias, difference_KK, ref_KK)),
            "p_unbiased": 1.0 if same else p_of_zero_mean(difference_KK, self._generator),
            "variance": float(noise(own_KK) / noise(ref_KK)),
        }

    def _layer(self, name: str, item: AuditedTerm) -> LayerResult:
        own_KK, with_KK, ref_KK = self._products(self._layers[name], item.key, _reference_name(item.term))
        square = float(mean_product(ref_KK))
        if square <= 0:
            return LayerResult(cosine=math.nan, delivered=math.nan, bias=math.nan)
        bias = float(squared_bias(difference_gram(own_KK, with_KK, ref_KK), ref_KK))
        return LayerResult(
            cosine=float(cosine(own_KK, with_KK, ref_KK)),
            delivered=float(delivered(with_KK, ref_KK)),
            bias=math.sqrt(max(bias, 0.0)),
        )
