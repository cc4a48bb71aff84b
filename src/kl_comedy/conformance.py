"""Conformance: what somebody's KL loss optimizes, by enumeration in float64, as a test for their CI.

    loss_fn + every completion of small policies -> expected gradient -> compared with targets -> Report

Legend: ``B`` completions, ``T`` tokens, ``V`` vocabulary, ``D`` parameters, ``N`` prefixes; log-probs in nats.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kl_comedy.errors import UserError, bad_value, unknown_key
from kl_comedy.kl.claims import REGIMES, TARGET_MEANINGS, TARGETS
from kl_comedy.kl.oracle.certificate import BatteryInstance, battery, with_targets
from kl_comedy.kl.oracle.drawn import TOLERANCE, coverage, drawn_settings
from kl_comedy.kl.oracle.enumeration import log_probs
from kl_comedy.kl.oracle.gradients import Moments, ScoreTables

ARGUMENTS = ("logp", "ref_logp", "behaviour_logp", "mask", "tokens", "logp_full", "ref_logp_full")
REDUCTIONS = ("sum", "token_mean")
TOLERANCE32 = 1e-3
"""Error up to which a loss that computes in float32 hits a target."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the loss optimizes in one regime.

    ``target``: whose gradient the expected gradient equals, times ``coefficient``, on every policy; ``near_target``: on
    those near the reference; None where there is none. ``nearest``: the target with the largest ``cosine``.
    ``reaches_policy``: whether any completion has a gradient. ``missed_in``: a policy that misses ``near_target``.
    """

    regime: str
    claimed: str | None
    target: str | None
    near_target: str | None
    coefficient: float | None
    nearest: str
    cosine: float
    reaches_policy: bool
    missed_in: str

    def __str__(self) -> str:
        if not self.reaches_policy:
            words = "zero: no gradient reaches the policy (no_grad, or a detached value)"
        elif self.target is not None:
            times = "" if self.target == "zero" else f", times {self.coefficient:.4g}"
            words = f"{self.target}{times}: {TARGET_MEANINGS[self.target]}"
        elif self.near_target is not None:
            words = f"{self.near_target} near the reference only, missed with {self.missed_in}"
        else:
            words = f"none: nearest to {self.nearest}, cosine {self.cosine:.2f}"
        return f"{self.regime}: {words}" + (f" [claimed: {self.claimed}]" if self.claimed else "")


@dataclass(frozen=True, kw_only=True)
class Report:
    """The findings of :func:`check`, and what they cover."""

    findings: tuple[Finding, ...]
    near_only: bool
    covered: str

    @property
    def ok(self) -> bool:
        """Whether every claim holds."""
        return all(self._holds(each) for each in self.findings)

    def assert_ok(self) -> None:
        """Raise AssertionError with the report unless every claim holds."""
        if not self.ok:
            raise AssertionError(f"the KL loss does not optimize what it claims\n{self}")

    def _holds(self, finding: Finding) -> bool:
        target = finding.near_target if self.near_only else finding.target
        return finding.claimed in (None, target or "none")

    def __str__(self) -> str:
        rows = [f"{'ok    ' if self._holds(each) else 'FAILED'} {each}" for each in self.findings]
        return "\n".join([*rows, f"checked: {self.covered}"])


def check(
    loss_fn: Callable[..., Tensor],
    *,
    claims: str | Mapping[str, str],
    reduction: str = "sum",
    near_only: bool = False,
    regimes: Sequence[str] = REGIMES,
    seed: int = 0,
) -> Report:
    """What ``loss_fn`` optimizes on-policy, off-policy and with mixed policy versions, against what it claims.

    ``loss_fn`` is called with those of these tensors that its parameters name: ``logp``, ``ref_logp``,
    ``behaviour_logp`` (log-probs of the tokens, ``[B, T]``, zero outside the ``mask``), ``mask`` (bool), ``tokens``
    (ids), ``logp_full``, ``ref_logp_full`` (``[B, T, V]``). It returns what is to be minimized: ``[B, T]`` or ``[B]``,
    summed, or a scalar, for which it is called once per completion; ``reduction="token_mean"``: the scalar is a mean
    over the mask, which is undone. (A mean per completion weights by 1 / length, which no KL does.)

    ``claims``: a target (:data:`kl_comedy.kl.claims.TARGETS`, or ``none``) on-policy, or one per regime. A claim holds
    where the gradient is that of the target times one positive coefficient (your beta). ``near_only``: losses that
    clamp claim it near the reference only. ``seed``: of the settings drawn beside the fixed policies.

    Raises :class:`UserError` for a wrong name, parameter or shape, and for a loss that mixes completions.
    """
    by_regime = {"on_policy": claims} if isinstance(claims, str) else dict(claims)
    values = {"claims": (tuple(by_regime.values()), (*TARGETS, "none")), "reduction": ((reduction,), REDUCTIONS)}
    for key, (given, allowed) in {"regimes": ((*by_regime, *regimes), REGIMES), **values}.items():
        for value in given:
            if value not in allowed:
                raise bad_value(key, value, allowed)
    findings, policies = [], list[BatteryInstance]()
    for regime in dict.fromkeys((*regimes, *by_regime)):
        shared = [each for each in battery(regime) if each.instance.features_NVD is not None]
        settings = [dataclasses.replace(each, parameters=each.parameters or 6) for each in drawn_settings(seed)]
        policies = [*shared, *(with_targets(each.instance(regime), setting=each) for each in settings)]
        pairs = [(each, *_moments(loss_fn, each, reduction)) for each in policies]
        findings.append(_finding(regime, by_regime.get(regime), pairs))
    span = coverage(each.instance for each in policies)
    covered = (
        f"every completion of {len(policies)} policies per regime, some drawn (seed {seed}); vocabulary "
        f"{span['vocabulary'][0]:g} to {span['vocabulary'][1]:g}, up to {span['steps'][1]:g} tokens, log-ratios from "
        f"{span['log_ratios'][0]:.3g} nats to those of tokens that are impossible under the reference"
    )
    return Report(findings=tuple(findings), near_only=near_only, covered=covered)


def _finding(regime: str, claimed: str | None, results: list[tuple[BatteryInstance, Moments, float]]) -> Finding:
    near = [(each.targets, moments) for each, moments, _ in results if each.near]
    coefficients = {name: near[0][1].strength(near[0][0][name]) for name in TARGETS}

    def misses(target: str, only_near: bool) -> list[str]:
        """The policies in which the gradient is not that of the target times the coefficient."""
        return [
            str(each.setting or "log-ratios of several nats, or 8 tokens")
            for each, moments, tolerance in results
            if (each.near or not only_near)
            and not moments.equals(coefficients[target] * each.targets[target], tolerance)
        ]

    def hit(only_near: bool) -> str | None:
        """Zero first: beside it a positive coefficient is rounding."""
        names = ["zero", *(name for name in TARGETS if coefficients[name] > 0)]
        names = [name for name in names if not misses(name, only_near)]
        return claimed if claimed in names and "zero" not in names else next(iter(names), None)

    near_target, target = hit(True), hit(False)
    cosines = {name: sum(moments.cosine(targets[name]) for targets, moments in near) / len(near) for name in TARGETS}
    nearest = max((name for name in TARGETS if name != "zero"), key=lambda name: abs(cosines[name]))
    return Finding(
        regime=regime,
        claimed=claimed,
        target=target,
        near_target=near_target,
        coefficient=coefficients[target] if target else None,
        nearest=nearest,
        cosine=cosines[nearest],
        reaches_policy=any(moments.mean_norm != 0 for _, moments, _ in results),
        missed_in=next(iter(misses(near_target, False)), "") if near_target else "",
    )


def _moments(loss_fn: Callable[..., Tensor], policy: BatteryInstance, reduction: str) -> tuple[Moments, float]:
    """The expected gradient over all completions, and the tolerance of its comparison (float32 has a wider one)."""
    instance, tree = policy.instance, policy.instance.tree
    weight_B = instance.probability(tree.all)
    rows, weight_B = tree.all.select(weight_B > 0), weight_B[weight_B > 0]
    full_BTV = instance.policy_logp()[rows.prefix_BT].requires_grad_(True)
    logp_BT = torch.where(rows.mask_BT, full_BTV.gather(-1, rows.token_BT[..., None])[..., 0], 0.0)
    tensors = {
        "logp": logp_BT,
        "ref_logp": log_probs(rows, instance.ref_logp_NV),
        "behaviour_logp": log_probs(rows, instance.recorded_logp_NV),
        "mask": rows.mask_BT,
        "tokens": rows.token_BT,
        "logp_full": full_BTV,
        "ref_logp_full": instance.ref_logp_NV[rows.prefix_BT],
    }
    loss_B = _losses(loss_fn, tensors, reduction)
    slope_BTV = torch.zeros_like(full_BTV)
    if loss_B.requires_grad:
        (slope_BTV,) = torch.autograd.grad(loss_B.double().sum(), full_BTV, allow_unused=True, materialize_grads=True)
    assert instance.features_NVD is not None
    score_BTVD = ScoreTables(instance, instance.features_NVD).score_NVD[rows.prefix_BT]
    gradient_BD = torch.einsum("btv,btvd->bd", torch.where(rows.mask_BT[..., None], slope_BTV, 0.0), score_BTVD)
    tolerance = TOLERANCE if loss_B.dtype == torch.float64 else TOLERANCE32
    norm = float(weight_B @ gradient_BD.norm(dim=-1))
    return Moments(gradient_D=weight_B @ gradient_BD, variance=0.0, mean_norm=norm), tolerance


def _losses(loss_fn: Callable[..., Tensor], tensors: Mapping[str, Tensor], reduction: str) -> Tensor:
    """The loss of each completion, ``[B]``. Raises :class:`UserError`; see :func:`check`."""
    parameters = inspect.signature(loss_fn).parameters.values()
    required = [each.name for each in parameters if each.default is each.empty and each.kind != each.VAR_KEYWORD]
    for name in required:
        if name not in ARGUMENTS:
            raise unknown_key(f"loss_fn.{name}", "a parameter", ARGUMENTS, "it is called with tensors by name")
    names = [each.name for each in parameters if each.name in ARGUMENTS]
    mask_BT = tensors["mask"]

    def call(start: int, stop: int) -> Tensor:
        value = loss_fn(**{name: tensors[name][start:stop] for name in names})
        if not isinstance(value, Tensor) or value.shape not in ((), (stop - start,), mask_BT[start:stop].shape):
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise bad_value("loss_fn", shape, "a tensor [B, T], [B], or a scalar", "what it returns")
        return torch.where(mask_BT[start:stop], value, 0.0).sum(-1) if value.dim() == 2 else value

    first = call(0, 1)
    if first.dim() == 0:
        lengths_B = mask_BT.sum(-1) if reduction == "token_mean" else torch.ones(len(mask_BT), dtype=torch.long)
        return torch.stack([call(row, row + 1) * lengths_B[row] for row in range(len(mask_BT))])
    together_B = call(0, len(mask_BT))
    if not torch.allclose(first, together_B[:1], rtol=1e-4, atol=1e-6, equal_nan=True):
        raise UserError("loss_fn: the loss of a completion changes with the others in its batch; return it unreduced")
    return together_B
