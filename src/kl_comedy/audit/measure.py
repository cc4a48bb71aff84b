"""Audit KL terms on blocks of completions: gradients of every loss, their products, and what those say.

    select_terms -> audit_blocks: gradients per block -> GradientProducts -> one TermResult per term -> AuditReport

``check_beta`` takes the gradient of the training step at 0 and at twice a term's beta: a term can be configured,
logged and without effect (a mask that is never open, a clamp that always acts, a cost that the baseline removes).

Legend: ``C`` losses, ``K`` disjoint blocks of completions, ``w`` the width of a sketch. :mod:`grams` has the
statistics.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kl_comedy.audit import grams
from kl_comedy.audit.gradients import (
    AuditedTerm,
    BlockGradients,
    GradientSketch,
    block_gradients,
    differentiate,
    layer_groups,
    reference_term,
)
from kl_comedy.audit.report import SIGNIFICANT, UNDEFINED, AuditReport, BetaCheck, Estimate, TermResult
from kl_comedy.audit.source import check_term_names
from kl_comedy.config import Config
from kl_comedy.config.combinations import is_off_policy
from kl_comedy.errors import UserError
from kl_comedy.kl import BetaState, KLTerm, resolve_terms
from kl_comedy.records import Scored
from kl_comedy.registry import RECIPES
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

POLICY = "policy"
"""The key of the policy loss among the losses."""


def equal_blocks(rows: Sequence[Scored], blocks: int) -> list[list[Scored]]:
    """At most ``blocks`` blocks, each of the same number of whole groups; groups that are left over are left out.

    Rows of a group must be adjacent. Blocks must be equal, for their gradients are means over completions.
    """
    # Whole groups, because rewards are compared within a group: a part of one has other advantages.
    groups = [list(group) for _, group in itertools.groupby(rows, lambda row: row.rollout.group_id)]
    count = min(blocks, len(groups))
    size = len(groups) // count
    split = []
    for start in range(0, count * size, size):
        groups_of_block = groups[start : start + size]
        split.append(list(itertools.chain.from_iterable(groups_of_block)))
    return split


# --- which terms ----------------------------------------------------------------------------------------------------
def select_terms(
    names: Sequence[str], config: Config, *, key: str, betas: Mapping[str, float] | None = None
) -> list[AuditedTerm]:
    """The terms that ``names`` ask for: ``own`` (all of the config), ``panel``, or recipes.

    The config's terms come first; a term that differs from an earlier one in beta only is left out. On-policy the
    panel has no corrections: their ratios are 1 there. ``betas`` are those in force (default: at the first update).
    Raises :class:`UserError` under ``key`` for another name.
    """
    check_term_names(names, key)
    terms = named_terms(resolve_terms(config.kl))
    if betas is None:
        betas = {name: BetaState(term.beta).value for name, term in terms.items()}

    config_terms: list[AuditedTerm] = []
    other_terms: list[AuditedTerm] = []
    for name in names:
        if name == "own":
            config_terms += _terms_of_config(terms, betas)
        elif name == "panel":
            # That of the config's first term, so that its row and the panel's rows weigh the same.
            beta = next(iter(betas.values()), PANEL_BETA)
            other_terms += _terms_of_panel(beta, off_policy=is_off_policy(config))
        else:
            other_terms += _terms_of_recipe(name)

    selected = list(config_terms)
    selected_shapes: set[KLTerm] = set()
    if config_terms:
        selected_shapes.update(_without_beta(term) for term in terms.values())
    for item in other_terms:
        assert item.term is not None
        # The config's terms and those of panel and recipes overlap; each gradient is measured once.
        shape = _without_beta(item.term)
        if shape not in selected_shapes:
            selected_shapes.add(shape)
            selected.append(item)
    return selected


def _terms_of_config(terms: Mapping[str, KLTerm], betas: Mapping[str, float]) -> list[AuditedTerm]:
    items = []
    for position, (key, term) in enumerate(terms.items()):
        label = f"kl.{position}: {term.label()}"
        items.append(AuditedTerm(key=key, label=label, term=term, beta=betas[key], position=position))
    return items


def _terms_of_panel(beta: float, *, off_policy: bool) -> list[AuditedTerm]:
    items = []
    for term in PANEL:
        # On-policy every ratio is 1, and a corrected term is the uncorrected one.
        if term.correction == "none" or off_policy:
            items.append(_term_outside_config(term.label(), term.label(), term, beta))
    return items


def _terms_of_recipe(name: str) -> list[AuditedTerm]:
    terms: tuple[KLTerm, ...] = RECIPES.get(name).fn()
    items = []
    for n, term in enumerate(terms):
        title = name
        if len(terms) > 1:
            title = f"{name} {n}"
        beta = BetaState(term.beta).value
        items.append(_term_outside_config(title, f"{title}: {term.label()}", term, beta))
    return items


def _term_outside_config(title: str, label: str, term: KLTerm, beta: float) -> AuditedTerm:
    """A term that the config does not have; its key is the title as part of a metric's name."""
    # It is part of a metric's name, in which stores allow few characters.
    key = "".join(c if c.isalnum() or c in "_-." else "_" for c in title)
    return AuditedTerm(key=key, label=label, term=term, beta=beta)


def _without_beta(term: KLTerm) -> KLTerm:
    """Terms that differ in beta only have the same gradient up to a factor."""
    return dataclasses.replace(term, beta=1.0)


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
    micro_batches = prepare(
        rows,
        module.plan,
        betas=betas,
        references=module.references,
        policy_pass=module.policy_pass,
        old_policy=module.record(rows),
    )
    gradients = []
    for micro in micro_batches:
        passes = module.passes(micro)
        loss = micro_loss(micro, passes, terms=module.terms, betas=betas, algorithm=module.config.algorithm).loss
        gradients.append(torch.cat(sketch.fold(differentiate([loss], None, sketch.parameters))))
    return module.ranks.sum(sum(gradients[1:], gradients[0])).double()


def check_beta(
    module: PolicyModule, rows: Sequence[Scored], item: AuditedTerm, term_gradient: Tensor, sketch: GradientSketch
) -> BetaCheck:
    """What the beta of one term of the config does to the training gradient on ``rows``.

    ``term_gradient`` is the gradient of the term alone on the same rows, at beta = 1, summed over them and projected by
    ``sketch``, which is linear. With ``G(beta)`` for the training gradient, ``(G(2 beta) - G(0)) / (2 beta)`` must
    equal it. A beta without effect is ``inert``, which is reported apart from ``wrong``; a gradient that is not finite
    is wrong.
    """
    assert item.term is not None
    # Twice the beta: the larger the difference, the less of it is rounding. In place of a beta of 0 (a warm-up, or a KL
    # at its target) 1 is taken, because the question is what the term would do.
    high_beta = 2.0 * item.beta or 1.0
    betas = module.beta_values
    # By a difference and not by the term alone: that is the way by which a beta acts in training.
    without = training_gradient(module, rows, {**betas, item.key: 0.0}, sketch)
    with_high_beta = training_gradient(module, rows, {**betas, item.key: high_beta}, sketch)

    change = with_high_beta - without
    scale = float(without.norm() + with_high_beta.norm())
    change_share = 0.0
    # NaN is not 0: then the share is NaN, which is not inert.
    if scale != 0.0:
        change_share = float(change.norm()) / scale
    # Not exactly 0: two passes may add up in another order.
    inert = change_share <= ROUNDING

    size = float(term_gradient.norm())
    disagreement = math.nan
    if size > 0:
        disagreement = float((change / high_beta - term_gradient).norm()) / size
    # The difference of two gradients of size `scale` is only known to the rounding of both, which counts for more
    # the smaller the term's own part is.
    tolerance = DISAGREEMENT + ROUNDING * scale / max(high_beta * size, 1e-300)
    agrees = disagreement <= tolerance  # False for NaN: a term without a gradient must not change training's
    # Advantages may be divided by their deviation, which a cost before the baseline is part of. The gradient is then
    # not linear in beta, and the quotient above is not the gradient at beta = 1.
    is_linear = item.term.baseline != "before"
    wrong = is_linear and not inert and not agrees
    return BetaCheck(change=change_share, disagreement=disagreement, inert=inert, wrong=wrong)


# --- the audit ------------------------------------------------------------------------------------------------------
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
    """Audit ``audited`` on blocks of whole groups, each with the same number of completions.

    ``check`` adds the check of beta for the terms of the config, on the first block. ``progress`` is called with the
    number of blocks done. Leaves weights, ``.grad`` and random state alone. All ranks call, with the same blocks, and
    have the same report.

    Where noise hides the reference gradient nothing is compared with it, and ``reference_noise`` is NaN. Raises
    :class:`UserError` for too few blocks, and for a policy that still equals its reference.
    """
    if len(blocks) < MINIMUM_BLOCKS:
        raise UserError(f"audit: intervals need at least {MINIMUM_BLOCKS} blocks of whole groups, got {len(blocks)}")
    started = time.perf_counter()
    # They are differentiated together with the audited terms: one pass of the policy serves all losses.
    references = _reference_terms(audited, module.config, blocks[0])
    losses = _losses(audited, references)
    sketches = GradientSketch(layer_groups(module.policy), sketch)
    gradients, values = _differentiate_blocks(module, blocks, losses, sketches, progress)

    # A block may be larger or smaller than an update, whose noise is what counts for a run.
    scale = len(blocks[0]) / _completions_per_update(module.config, blocks[0])
    products = GradientProducts([loss.key for loss in losses], sketches.names, gradients, seed, scale)
    results = []
    for item in audited:
        result = products.result(item, values)
        # A beta of the training step exists only for the config's terms.
        if check and item.position is not None:
            term_gradient = _summed_gradient(gradients[0], losses.index(item))
            result = dataclasses.replace(result, check=check_beta(module, blocks[0], item, term_gradient, sketches))
        results.append(result)

    config_terms = [item for item in audited if item.position is not None]
    return AuditReport(
        name=module.config.name,
        version=module.version,
        regime="off_policy" if is_off_policy(module.config) else "on_policy",
        completions=sum(len(rows) for rows in blocks),
        blocks=len(blocks),
        length=values["length"],
        exact_kl_token=values["exact_kl_token"],
        exact_kl_sequence=values["exact_kl_sequence"],
        reference_term=references["initial"].label(),
        reference_noise=products.reference_noise(_reference_key("initial")),
        policy_silent_share=values[f"silent/{POLICY}"],
        clip_share=values.get("clipped"),
        total_kl_to_policy=products.kl_to_policy(config_terms),
        kl_projection=products.kl_projection(config_terms, _clip_bound(module.config, gradients[0].weight)),
        sketch=sketch,
        seconds=time.perf_counter() - started,
        terms=results,
    )


def _losses(audited: Sequence[AuditedTerm], references: Mapping[str, KLTerm]) -> list[AuditedTerm]:
    """Everything that is differentiated: the policy loss, the reference terms by name, and the audited terms."""
    losses = [AuditedTerm(key=POLICY, term=None)]
    for name, term in references.items():
        losses.append(AuditedTerm(key=_reference_key(name), term=term))
    return [*losses, *audited]


def _differentiate_blocks(
    module: PolicyModule,
    blocks: Sequence[Sequence[Scored]],
    losses: Sequence[AuditedTerm],
    sketches: GradientSketch,
    progress: Callable[[int], None],
) -> tuple[list[BlockGradients], dict[str, float]]:
    """The gradients of each block, and the metrics of all. Raises :class:`UserError` for an untrained policy."""
    metrics = MetricAccumulator()  # filled by each block
    gradients: list[BlockGradients] = []
    for rows in blocks:
        gradients.append(block_gradients(module, rows, losses, sketches, metrics))
        progress(len(gradients))
    # Over all ranks, so that all of them raise.
    values = metrics.merged(module.ranks).values()
    # Without a tolerance: equal weights give exactly 0, and any other KL, however small, has a gradient to audit.
    if values["exact_kl_token"] == 0.0:
        raise UserError(
            "audit: the policy is still identical to its initial reference, so every KL gradient is zero; train it "
            "first (more --updates, or audit the folder of a run)"
        )
    return gradients, values


def _first_group_size(rows: Sequence[Scored]) -> int:
    """Completions per prompt, counted: the rows of a run may be of another group size than the config's."""
    first = rows[0].rollout.group_id
    return sum(row.rollout.group_id == first for row in rows)


def _reference_terms(audited: Sequence[AuditedTerm], config: Config, rows: Sequence[Scored]) -> dict[str, KLTerm]:
    """The term that others are measured against, by the name of each reference that an audited term reads.

    There is always one for the initial reference, for the whole report's headline. The sampler is not a model whose
    exact KL could be computed, so terms against it are compared with nothing.
    """
    on_policy = not is_off_policy(config)
    group_size = _first_group_size(rows)
    # The initial reference always: the headline is about it, whatever the terms read.
    names = {"initial"}
    for item in audited:
        if item.term is not None and item.term.reference != "sampler":
            names.add(item.term.reference)
    return {name: reference_term(name, on_policy=on_policy, group_size=group_size) for name in sorted(names)}


def _reference_key(name: str) -> str:
    return f"reference/{name}"


def _completions_per_update(config: Config, rows: Sequence[Scored]) -> int:
    return config.rollout.prompts_per_batch * _first_group_size(rows) // config.algorithm.updates_per_batch


def _clip_bound(config: Config, weight: float) -> float:
    """``optimizer.clip_norm`` in the unit of the audited gradients, which are means over completions.

    ``weight`` is the sum of a block's sequence weights: what a mean is multiplied by to be a gradient of training.
    Infinite where nothing is clipped, or the block has no weight.
    """
    if config.optimizer.clip_norm is None or weight <= 0:
        return math.inf
    # The weights have the block's own denominator, so that their sum is that of a whole update up to the lengths: a
    # block's size does not enter.
    return config.optimizer.clip_norm / weight


def _summed_gradient(gradients: BlockGradients, loss_index: int) -> Tensor:
    """The sketched gradient of one loss, as a sum over the block's weighted completions instead of a mean."""
    parts = [of_layer[loss_index] for of_layer in gradients.by_layer]
    return torch.cat(parts).double() * gradients.weight


class GradientProducts:
    """Estimates from inner products of gradients.

    ``keys`` name the losses in the order of each block's gradients, and ``layers`` the layer groups. ``seed`` is that
    of the sign flips. ``scale`` is the size of a block over that of the run's updates.
    """

    def __init__(
        self,
        keys: Sequence[str],
        layers: Sequence[str],
        gradients: Sequence[BlockGradients],
        seed: int,
        scale: float,
    ) -> None:
        self._index = {key: n for n, key in enumerate(keys)}
        self._by_layer: dict[str, Tensor] = {}
        for n, layer in enumerate(layers):
            # Products only: from here on no gradient is needed, however large the model.
            self._by_layer[layer] = grams.gram([block.by_layer[n] for block in gradients])
        # Layer groups are disjoint sets of parameters, so products of whole gradients are sums over the groups.
        self._whole = torch.stack(list(self._by_layer.values())).sum(0)
        self._generator = torch.Generator().manual_seed(seed)
        self._scale = scale

    def _gram_of(self, left: str, right: str) -> Tensor:
        return self._whole[self._index[left], self._index[right]]

    def _gram_of_sums(self, left: Mapping[str, float], right: Mapping[str, float]) -> Tensor:
        """Products of two sums of losses, given by the coefficient of each."""
        total_KK = torch.zeros(self._whole.shape[-2:], dtype=torch.float64)
        for left_key, left_coefficient in left.items():
            for right_key, right_coefficient in right.items():
                total_KK += left_coefficient * right_coefficient * self._gram_of(left_key, right_key)
        return total_KK

    def reference_noise(self, key: str) -> float:
        """Standard error of a reference gradient over its norm; NaN where noise hides it."""
        gram_KK = self._gram_of(key, key)
        # Over different blocks, or the noise of each would count as gradient.
        square = float(grams.mean_product(gram_KK))
        variance = max(float(grams.noise(gram_KK)) / len(gram_KK), 0.0)
        if square <= variance:
            return math.nan
        return math.sqrt(variance / square)

    def kl_projection(self, items: Sequence[AuditedTerm], bound: float) -> Estimate:
        """:func:`grams.kl_projection` of the sum of the items; undefined without any, or against another reference.

        ``bound``: the largest norm of an update's gradient, in the unit of the gradients: a mean over completions.
        """
        if not items:
            return UNDEFINED
        if any(item.term is None or item.term.reference != "initial" for item in items):
            return UNDEFINED
        reference_key = _reference_key("initial")
        if math.isnan(self.reference_noise(reference_key)):
            return UNDEFINED

        # The update as training takes it: the policy gradient plus beta times each term.
        policy = {POLICY: 1.0}
        update = {POLICY: 1.0}
        for item in items:
            update[item.key] = item.beta
        reference = {reference_key: 1.0}
        return grams.estimate(
            functools.partial(grams.kl_projection, scale=self._scale, bound=bound),
            self._gram_of_sums(update, update),
            self._gram_of_sums(policy, policy),
            self._gram_of_sums(update, reference),
            self._gram_of_sums(policy, reference),
            self._gram_of_sums(reference, reference),
        )

    def kl_to_policy(self, items: Sequence[AuditedTerm]) -> float:
        """Norm of ``sum beta g`` over that of the policy gradient, each of an update's size; NaN without either."""
        betas = {item.key: item.beta for item in items}
        kl_square = self._update_square(self._gram_of_sums(betas, betas))
        policy_square = self._update_square(self._gram_of(POLICY, POLICY))
        # Estimates of squares, which noise can make negative.
        if kl_square >= 0 and policy_square > 0:
            return math.sqrt(kl_square / policy_square)
        return math.nan

    def _update_square(self, gram_KK: Tensor) -> float:
        """The expected squared gradient norm of an update, which has less noise than a smaller block."""
        return float(grams.mean_product(gram_KK) + grams.noise(gram_KK) * self._scale)

    def result(self, item: AuditedTerm, values: Mapping[str, float]) -> TermResult:
        """Everything about one term except the check of beta. ``values`` are the metrics of the blocks."""
        assert item.term is not None
        result = TermResult(
            key=item.key,
            label=item.label,
            position=item.position,
            beta=item.beta,
            p_no_mean=grams.p_of_zero_mean(self._gram_of(item.key, item.key), self._generator),
            kl_to_policy=self.kl_to_policy([item]),
            silent_share=values.get(f"silent/{item.key}", 0.0),
            clamped_share=values.get(f"clamped/{item.key}"),
            capped_share=values.get(f"capped/{item.key}"),
        )
        reference_key = _reference_key(item.term.reference)
        if reference_key not in self._index or math.isnan(self.reference_noise(reference_key)):
            return result
        return self._compare(result, reference_key)

    def _compare(self, result: TermResult, reference_key: str) -> TermResult:
        """``result`` with what its term's gradient has in common with the reference gradient."""
        term_KK = self._gram_of(result.key, result.key)
        with_reference_KK = self._gram_of(result.key, reference_key)
        reference_KK = self._gram_of(reference_key, reference_key)
        difference_KK = grams.difference_gram(term_KK, with_reference_KK, reference_KK)

        # The reference term itself, under another name: the difference is rounding, whose sign flips mean nothing.
        is_reference = float(difference_KK.diagonal().sum()) <= 1e-10 * float(reference_KK.diagonal().sum())
        p_unbiased = 1.0
        if not is_reference:
            p_unbiased = grams.p_of_zero_mean(difference_KK, self._generator)

        cosine = grams.estimate(grams.cosine, term_KK, with_reference_KK, reference_KK)
        # Noise has a direction too, but it says nothing about the term.
        direction = None
        has_interval = math.isfinite(cosine.value) and math.isfinite(cosine.half_width)
        if has_interval and result.p_no_mean < SIGNIFICANT:
            direction = cosine
        # Squared, because that has an unbiased estimate; the root of its interval is the bias's.
        squared_bias = grams.estimate(grams.squared_bias, difference_KK, reference_KK)
        term_index = self._index[result.key]
        reference_index = self._index[reference_key]
        layers = {}
        for layer, layer_gram in self._by_layer.items():
            layers[layer] = _compare_layer(
                layer_gram[term_index, term_index],
                layer_gram[term_index, reference_index],
                layer_gram[reference_index, reference_index],
            )
        return dataclasses.replace(
            result,
            delivered=grams.estimate(grams.delivered, with_reference_KK, reference_KK),
            cosine=direction,
            bias=Estimate(
                value=grams.bias_of_square(squared_bias.value),
                low=grams.bias_of_square(squared_bias.low),
                high=grams.bias_of_square(squared_bias.high),
            ),
            p_unbiased=p_unbiased,
            variance=float(grams.noise(term_KK) / grams.noise(reference_KK)),
            layers=layers,
        )


def _compare_layer(term_KK: Tensor, with_reference_KK: Tensor, reference_KK: Tensor) -> dict[str, float]:
    """``cosine``, ``delivered`` and ``bias`` over the parameters of one layer group; NaN where noise hides them."""
    # A layer can hide its part of the gradient where the whole model does not.
    if float(grams.mean_product(reference_KK)) <= 0:
        return dict.fromkeys(("cosine", "delivered", "bias"), math.nan)
    difference_KK = grams.difference_gram(term_KK, with_reference_KK, reference_KK)
    return {
        "cosine": float(grams.cosine(term_KK, with_reference_KK, reference_KK)),
        "delivered": float(grams.delivered(with_reference_KK, reference_KK)),
        "bias": grams.bias_of_square(float(grams.squared_bias(difference_KK, reference_KK))),
    }
