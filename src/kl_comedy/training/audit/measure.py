"""From blocks of completions to findings: gradients of every channel, their products, and what those say.

Legend: ``C`` channels, ``K`` blocks. A gram is ``[C, C, K, K]``: ``gram[a, b, j, k]`` is the inner product of channel
a on block j with channel b on block k, in float64.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm
from kl_comedy.records import Scored
from kl_comedy.training.audit.beta_check import check_beta
from kl_comedy.training.audit.channels import Channel, reference_term
from kl_comedy.training.audit.gradients import BlockGradients, Layout, block_gradients
from kl_comedy.training.audit.layers import layer_groups
from kl_comedy.training.audit.panel import Audited
from kl_comedy.training.audit.report import SIGNIFICANT, AuditReport, LayerFinding, TermFinding
from kl_comedy.training.audit.statistics import (
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
from kl_comedy.training.measure import Tally
from kl_comedy.training.module import PolicyModule

POLICY = "policy"
_NOWHERE = Estimate(value=math.nan, low=math.nan, high=math.nan)


def audit_blocks(
    module: PolicyModule, blocks: Sequence[Sequence[Scored]], audited: Sequence[Audited], *, on_policy: bool,
    sketch: int, seed: int, check: bool = True, progress: Callable[[], None] = lambda: None,
) -> AuditReport:  # fmt: skip
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
    channels = _channels(audited, on_policy=on_policy, group_size=group_size)
    layout, tally = Layout.of(layer_groups(module.policy), sketch), Tally()
    found: list[BlockGradients] = []
    for rows in blocks:
        found.append(block_gradients(module, rows, channels, layout, tally))
        progress()
    values = tally.values()
    if values["exact_kl_token"] == 0.0:
        raise UserError(
            "audit: the policy is its initial reference still, so every KL gradient is zero; train it first "
            "(more --updates, or audit the folder of a run)"
        )
    names = [channel.name for channel in channels]
    grams = {group.name: _gram([block.vectors[n] for block in found]) for n, group in enumerate(layout.groups)}
    update = module.config.rollout.prompts_per_batch * group_size // module.config.algorithm.updates_per_batch
    findings = _Findings(names=names, grams=grams, values=values, seed=seed, scale=len(blocks[0]) / update)
    terms = [findings.of(item) for item in audited]
    if check:
        terms = [
            check_beta(module, blocks[0], term, item, found[0], names, layout) if item.position is not None else term
            for term, item in zip(terms, audited, strict=True)
        ]
    main = reference_term("initial", on_policy=on_policy, group_size=group_size)
    return AuditReport(
        name=module.config.name, version=module.version, regime="on_policy" if on_policy else "off_policy",
        completions=sum(len(rows) for rows in blocks), blocks=len(blocks), length=values["length"],
        exact_kl_token=values["exact_kl_token"], exact_kl_sequence=values["exact_kl_sequence"],
        reference_term=main.label(), reference_noise=findings.reference_noise(_reference_name(main)),
        policy_silent_share=values[f"silent/{POLICY}"], clip_share=values.get("clipped"),
        total_kl_to_policy=findings.kl_to_policy([(i.key, i.beta) for i in audited if i.position is not None]),
        sketch=sketch, seconds=time.perf_counter() - started, terms=terms,
    )  # fmt: skip


def _reference_name(term: KLTerm) -> str:
    return f"reference/{term.reference}"


def _channels(audited: Sequence[Audited], *, on_policy: bool, group_size: int) -> list[Channel]:
    """The policy loss, a reference gradient per reference policy, the audited terms."""
    kept = sorted({"initial", *(item.term.reference for item in audited)} - {"sampler"})
    references = [reference_term(name, on_policy=on_policy, group_size=group_size) for name in kept]
    return [
        Channel(name=POLICY, term=None),
        *(Channel(name=_reference_name(term), term=term) for term in references),
        *(Channel(name=item.key, term=item.term, beta=item.beta or 1.0) for item in audited),
    ]


def _gram(blocks: Sequence[Tensor]) -> Tensor:
    """``K`` tensors ``[C, w]`` to ``[C, C, K, K]``."""
    stacked = torch.stack(list(blocks)).double().cpu()
    k, c, _ = stacked.shape
    flat = stacked.transpose(0, 1).reshape(c * k, -1)
    return (flat @ flat.T).reshape(c, k, c, k).permute(0, 2, 1, 3)


class _Findings:
    """Reads estimates off the products. ``scale`` is the size of a block over that of the run's updates."""

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
        own, ref = self._at[term], self._at[reference]
        return gram[own, own], gram[own, ref], gram[ref, ref]

    def reference_noise(self, name: str) -> float:
        """Standard error of a reference gradient over its norm; NaN where the gradient is not to be told from it."""
        at = self._at[name]
        gram = self._whole[at, at]
        square, spread = float(mean_product(gram)), float(noise(gram)) / len(gram)
        return math.sqrt(max(spread, 0.0) / square) if square > max(spread, 0.0) else math.nan

    def kl_to_policy(self, parts: Sequence[tuple[str, float]]) -> float:
        """Norm of ``sum beta g`` over that of the policy gradient, each of an update's size; NaN without either."""
        k = self._whole.shape[-1]
        total = torch.zeros(k, k, dtype=torch.float64)
        for one, beta in parts:
            for other, gamma in parts:
                total += beta * gamma * self._whole[self._at[one], self._at[other]]
        kl, policy = self._of_an_update(total), self._of_an_update(self._whole[self._at[POLICY], self._at[POLICY]])
        return math.sqrt(kl / policy) if kl >= 0 and policy > 0 else math.nan

    def _of_an_update(self, gram: Tensor) -> float:
        """Mean square norm of the gradient of a batch of the run's size."""
        return float(mean_product(gram) + noise(gram) * self._scale)

    def of(self, item: Audited) -> TermFinding:
        """Everything about one term but the check of beta."""
        own = self._at[item.key]
        products = None
        if item.term.reference != "sampler" and math.isfinite(self.reference_noise(_reference_name(item.term))):
            products = self._products(self._whole, item.key, _reference_name(item.term))
        own_KK = self._whole[own, own]
        p_no_mean = p_of_zero_mean(own_KK, self._generator)
        share = {name: self._values.get(f"{name}/{item.key}") for name in ("silent", "clamped", "capped")}
        return TermFinding(
            key=item.key, label=item.label, position=item.position, beta=item.beta, p_no_mean=p_no_mean,
            **self._against(products, p_no_mean), kl_to_policy=self.kl_to_policy([(item.key, item.beta)]),
            silent_share=share["silent"] or 0.0, clamped_share=share["clamped"], capped_share=share["capped"],
            layers={} if products is None else {name: self._layer(name, item) for name in self._layers},
        )  # fmt: skip

    def _against(self, products: tuple[Tensor, Tensor, Tensor] | None, p_no_mean: float) -> dict[str, Any]:
        if products is None:
            return {
                "delivered": _NOWHERE, "cosine": None, "bias": _NOWHERE, "p_unbiased": math.nan, "variance": math.nan,
            }  # fmt: skip
        own_KK, with_KK, ref_KK = products
        difference_KK = difference_gram(own_KK, with_KK, ref_KK)
        same = float(difference_KK.diagonal().sum()) <= 1e-10 * float(ref_KK.diagonal().sum())
        direction = estimate(cosine, own_KK, with_KK, ref_KK)
        found = p_no_mean < SIGNIFICANT and math.isfinite(direction.value) and math.isfinite(direction.half_width)
        return {
            "delivered": estimate(delivered, with_KK, ref_KK),
            "cosine": direction if found else None,
            "bias": rooted(estimate(squared_bias, difference_KK, ref_KK)),
            "p_unbiased": 1.0 if same else p_of_zero_mean(difference_KK, self._generator),
            "variance": float(noise(own_KK) / noise(ref_KK)),
        }

    def _layer(self, name: str, item: Audited) -> LayerFinding:
        own_KK, with_KK, ref_KK = self._products(self._layers[name], item.key, _reference_name(item.term))
        square = float(mean_product(ref_KK))
        if square <= 0:
            return LayerFinding(cosine=math.nan, delivered=math.nan, bias=math.nan)
        bias = float(squared_bias(difference_gram(own_KK, with_KK, ref_KK), ref_KK))
        return LayerFinding(
            cosine=float(cosine(own_KK, with_KK, ref_KK)),
            delivered=float(delivered(with_KK, ref_KK)),
            bias=math.sqrt(max(bias, 0.0)),
        )
