"""The expected gradients of a loss in one regime, and the targets that they are the gradients of.

Legend: ``B`` completions, ``T`` tokens, ``V`` vocabulary, ``D`` parameters, ``N`` prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kl_comedy.conformance.batches import Batch, Loss, slope_of, token_columns
from kl_comedy.conformance.report import Finding
from kl_comedy.kl.claims import TARGETS
from kl_comedy.kl.oracle.certificate import BatteryInstance
from kl_comedy.kl.oracle.divergences import DIVERGENCES, divergence_gradient
from kl_comedy.kl.oracle.drawn import TOLERANCE
from kl_comedy.kl.oracle.gradients import Moments, ScoreTables

TOLERANCE32 = 1e-3
"""Error up to which a loss that computes in float32 hits a target."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The expected gradient of the loss for one policy, and the tolerance of its comparison with a target.

    ``slope_BTV``: the derivatives of the losses by the log-probs of the completions' tokens, without those of holes.
    ``reaches_masked``: whether the log-probs of masked tokens have a derivative.
    """

    policy: BatteryInstance
    batch: Batch
    returned: Tensor
    slope_BTV: Tensor
    reaches_masked: bool
    moments: Moments
    tolerance: float

    def target(self, name: str) -> Tensor:
        """The gradient ``[D]`` of a target."""
        if name in DIVERGENCES:
            return divergence_gradient(self.policy.instance, name)
        return self.policy.targets[name]


def result_of(loss: Loss, batch: Batch, policy: BatteryInstance) -> Result:
    """The expected gradient over all completions; a loss in float32 has the wider tolerance."""
    instance = policy.instance
    rows = batch.rows
    assert instance.features_NVD is not None
    loss_B, returned = loss(batch)
    # Gradients in holes do not count here; `problems_of` reports them.
    all_slope_BTV = slope_of(loss_B, batch)
    is_masked_BT = ~batch.tensors["mask"]
    slope_BTV = all_slope_BTV[:, token_columns(batch.step_T)]
    slope_BTV = torch.where(batch.trained_BT[..., None], slope_BTV, 0.0)
    # d loss / d parameters = sum over tokens and vocabulary of d loss / d log-prob times the log-prob's score.
    score_BTVD = ScoreTables(instance, instance.features_NVD).score_NVD[rows.prefix_BT]
    gradient_BD = torch.einsum("btv,btvd->bd", slope_BTV, score_BTVD)
    moments = Moments(
        gradient_D=batch.weight_B @ gradient_BD,
        variance=0.0,  # nothing here reads it
        mean_norm=float(batch.weight_B @ gradient_BD.norm(dim=-1)),
    )
    tolerance = TOLERANCE32
    if loss_B.dtype == torch.float64:
        tolerance = TOLERANCE
    return Result(
        policy=policy,
        batch=batch,
        returned=returned,
        slope_BTV=slope_BTV,
        reaches_masked=bool((all_slope_BTV[is_masked_BT] != 0).any()),
        moments=moments,
        tolerance=tolerance,
    )


class Results:
    """The results of one regime: which targets they are the gradient of."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._results = results
        self._near = [result for result in results if result.policy.near]
        # One coefficient for all policies: a loss that needs another one for each optimizes no target.
        first = self._near[0]
        self._coefficients = {name: first.moments.strength(first.target(name)) for name in (*TARGETS, *DIVERGENCES)}

    def finding(self, regime: str, claimed: str | None, beta: float | None) -> Finding:
        """What the results say, without the cause of a miss. ``beta``: what the coefficient must be; None for any."""
        target = self._target(claimed, self._results)
        near_target = self._target(claimed, self._near)
        coefficient = None
        if near_target is not None:
            coefficient = self._coefficients[near_target]
        if target is not None:
            coefficient = self._coefficients[target]
        missed_in = ""
        if near_target is not None:
            missed_in = self._first_miss(near_target)
        # The zero target has no direction.
        cosines = {name: self._mean_cosine(name) for name in TARGETS if name != "zero"}
        nearest = max(cosines, key=lambda name: abs(cosines[name]))
        return Finding(
            regime=regime,
            claimed=claimed,
            target=target,
            near_target=near_target,
            coefficient=coefficient,
            nearest=nearest,
            cosine=cosines[nearest],
            reaches_policy=any(result.moments.mean_norm != 0 for result in self._results),
            reaches_masked=any(result.reaches_masked for result in self._results),
            missed_in=missed_in,
            expected_coefficient=beta,
        )

    def _target(self, claimed: str | None, results: Sequence[Result]) -> str | None:
        """The target that all ``results`` hit; the claimed one where several do. None where none does."""
        # Zero first: where it is hit, a positive coefficient of another target is rounding.
        if self._hit_by_all("zero", results):
            return "zero"
        hits = []
        for name in (*TARGETS, *DIVERGENCES):
            # A negative coefficient would be a loss that drives the policy away from the reference.
            if self._coefficients[name] > 0 and self._hit_by_all(name, results):
                hits.append(name)
        # Several targets may have the same gradient in a regime; the claim then decides how it is called.
        if claimed in hits:
            return claimed
        if hits:
            return hits[0]
        return None

    def _hit_by_all(self, target: str, results: Sequence[Result]) -> bool:
        return all(self._hits(target, result) for result in results)

    def _hits(self, target: str, result: Result) -> bool:
        return result.moments.equals(self._coefficients[target] * result.target(target), result.tolerance)

    def _first_miss(self, target: str) -> str:
        """The first policy whose gradient is not the target's, in words; empty where there is none."""
        for result in self._results:
            if not self._hits(target, result):
                where = str(result.policy.setting or "log-ratios of several nats, or 8 tokens")
                if result.policy.instance.environment is not None:
                    where = "a dialogue, in which a tool replies to what the policy wrote"
                if not bool(result.moments.gradient_D.isfinite().all()):
                    where += ", where its gradient is not finite"
                return where
        return ""

    def _mean_cosine(self, target: str) -> float:
        """Over the policies near the reference, where losses that clamp are themselves."""
        cosines = []
        for result in self._near:
            cosine = 0.0
            # A gradient of zero, as of a loss that drops the only token of each turn, is near to no target.
            if bool((result.moments.gradient_D != 0).any()):
                cosine = result.moments.cosine(result.policy.targets[target])
            cosines.append(cosine)
        return sum(cosines) / len(cosines)
