"""What a loss optimizes with fresh samples, with stale ones, and with masked tokens in between, by enumeration.

Legend: ``B`` completions, ``T`` tokens, ``V`` vocabulary, ``D`` parameters; log-probs in nats.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from peers.case import FLOAT32, FLOAT64
from peers.measure import instances
from torch import Tensor

from kl_comedy.kl.claims import TARGETS
from kl_comedy.kl.oracle import Loss, Moments, Rows, exact_moments
from kl_comedy.kl.oracle.certificate import BatteryInstance
from kl_comedy.kl.oracle.divergences import DIVERGENCES, divergence_gradient

FRESH = "on_policy"
STALE = "off_policy"
HOLE = 1
"""The column at which a masked token is inserted: after the first token of a completion."""
HOLE_LOGP = -1.3
"""Of the masked token, in nats. None of its log-probs is 0: a sum that forgets the mask shows."""
HOLE_REF_LOGP = -2.1
HOLE_BEHAVIOUR_LOGP = -1.7
NONE = "none"
"""The objective of a loss whose expected gradient is that of no objective with a name."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a loss optimizes in one regime.

    ``target``: the objective whose gradient, times ``coefficient``, is the expected gradient on every instance.
    ``near``: whether that holds only while no clamp acts. ``error``: the relative distance of the expected gradient
    from that of the row's intended KL, a mean over instances with shared parameters. ``cosine``: between the two.
    ``silent``: no completion has a gradient; a mean of zero alone is noise in training.
    """

    target: str
    coefficient: float | None
    near: bool
    error: float
    cosine: float | None
    silent: bool


@dataclass(frozen=True, kw_only=True)
class _Result:
    """The expected gradient of a loss on one instance, and the gradients of the objectives by name."""

    policy: BatteryInstance
    moments: Moments
    targets: dict[str, Tensor]


@lru_cache(maxsize=8)
def _targets(regime: str, group_size: int) -> tuple[dict[str, Tensor], ...]:
    """The gradients of every objective that has a name, by instance."""
    named = []
    for policy in instances(regime, group_size):
        targets = {name: policy.targets[name] for name in TARGETS}
        for name in DIVERGENCES:
            targets[name] = divergence_gradient(policy.instance, name)
        named.append(targets)
    return tuple(named)


def verdict(loss: Loss, regime: str, *, intended: str, group_size: int = 1) -> Verdict:
    """The :class:`Verdict` of a loss. ``intended``: the target that error and cosine compare with."""
    results = []
    for policy, targets in zip(instances(regime, group_size), _targets(regime, group_size), strict=True):
        moments = exact_moments(policy.instance, loss, group_size=group_size)
        results.append(_Result(policy=policy, moments=moments, targets=targets))
    near_results = [result for result in results if result.policy.near]
    shown = [result for result in results if result.policy.shown]
    if group_size > 1:
        shown = _on_shown_policies(loss, regime, group_size)

    target, coefficient = _named(results)
    near = False
    if target == NONE:
        # A clamp may act where policy and reference are far apart; near each other the loss is itself.
        target, coefficient = _named(near_results)
        near = target != NONE
    cosine = None
    if target != "zero":
        cosine = _mean([result.moments.cosine(result.policy.targets[intended]) for result in shown])
    error = _mean([result.moments.relative_bias(result.policy.targets[intended]) for result in shown])
    silent = all(_is_silent(result.moments) for result in results)
    return Verdict(target=target, coefficient=coefficient, near=near, error=error, cosine=cosine, silent=silent)


def _on_shown_policies(loss: Loss, regime: str, group_size: int) -> list[_Result]:
    """Groups on the policies of the rows without groups: their errors stand in one column and are compared.

    The smaller policies on which groups are named are other policies, with errors of another size.
    """
    results = []
    for policy in instances(regime, 1):
        if policy.shown:
            moments = exact_moments(policy.instance, loss, group_size=group_size)
            results.append(_Result(policy=policy, moments=moments, targets=policy.targets))
    return results


def _is_silent(moments: Moments) -> bool:
    """Whether no completion has a gradient: neither their mean nor their variance differs from 0."""
    return moments.variance == 0 and not bool(moments.gradient_D.any())


def _named(results: Sequence[_Result]) -> tuple[str, float | None]:
    """:func:`_fitted`, in float64 and then in float32, which some code computes in whatever it is given."""
    target, coefficient = _fitted(results, FLOAT64)
    if target == NONE:
        target, coefficient = _fitted(results, FLOAT32)
    return target, coefficient


def _fitted(results: Sequence[_Result], tolerance: float) -> tuple[str, float | None]:
    """The objective whose gradient, times one positive number, is the expected gradient on every instance."""
    if all(float(result.moments.gradient_D.norm()) <= tolerance * _scale(result) for result in results):
        return "zero", None
    first = results[0]
    for name in (*TARGETS, *DIVERGENCES):
        if name == "zero":
            continue
        target_D = first.targets[name]
        coefficient = float(first.moments.gradient_D @ target_D) / float(target_D @ target_D)
        if not math.isfinite(coefficient) or coefficient <= 0:
            continue
        if all(_hits(result, coefficient * result.targets[name], tolerance) for result in results):
            return name, coefficient
    return NONE, None


def _hits(result: _Result, target_D: Tensor, tolerance: float) -> bool:
    if not bool(target_D.isfinite().all()):
        return False
    distance = float((result.moments.gradient_D - target_D).norm())
    # The coefficient is itself rounded, so that a target far larger than the first one has that rounding too.
    return distance <= tolerance * max(_scale(result), float(target_D.norm()))


def _scale(result: _Result) -> float:
    # Rounding errors are proportional to what is added up, which the variance bounds where it cancels.
    return max(math.sqrt(result.moments.variance) + float(result.moments.gradient_D.norm()), 1e-3)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True, kw_only=True)
class Holes:
    """What masked tokens inside completions do to a loss with fresh samples.

    ``change``: the relative change of the expected gradient, by the size of the intended KL's. ``reached``: whether
    the masked token itself gets a gradient.
    """

    change: float
    reached: bool


def holes(loss: Loss, *, intended: str, group_size: int = 1) -> Holes:
    """Insert one masked token into every completion and compare the expected gradients of the others."""
    reached = False

    def loss_with_hole(rows: Rows, /) -> Tensor:
        nonlocal reached
        wide, hole_B = _with_hole(rows)
        value = _summed(loss(wide), wide.mask_BT)
        # Plus 0 times the hole, so that there is a derivative where the loss does not read it.
        total = value.sum() + 0.0 * hole_B.sum()
        (slope_B,) = torch.autograd.grad(total, hole_B, retain_graph=True)
        if bool((slope_B != 0).any()):
            reached = True
        return value

    def loss_without(rows: Rows, /) -> Tensor:
        return _summed(loss(rows), rows.mask_BT)

    changes = []
    for policy in instances(FRESH, 1):
        if not policy.shown:
            continue
        clean_D = exact_moments(policy.instance, loss_without, group_size=group_size).gradient_D
        holed_D = exact_moments(policy.instance, loss_with_hole, group_size=group_size).gradient_D
        changes.append(float((holed_D - clean_D).norm()) / float(policy.targets[intended].norm()))
    change = _mean(changes)
    # Below the rounding of float32 nothing has changed.
    if change < FLOAT32:
        change = 0.0
    return Holes(change=change, reached=reached)


def _summed(value: Tensor, mask_BT: Tensor) -> Tensor:
    """A value for each token summed over the mask, however trainers average; a value for each completion as it is."""
    if value.dim() == 2:
        return torch.where(mask_BT, value, 0.0).sum(-1)
    return value


def _with_hole(rows: Rows) -> tuple[Rows, Tensor]:
    """The rows with one masked token after the first, and its log-probs ``[B]``, which ask for gradient.

    A completion of one token has padding there. A tool's reply depends on what was called, and so do its log-probs: a
    cost that were the same after every token would leave an expected gradient as it is.
    """
    assert rows.token_BT is not None
    is_inside_B = rows.mask_BT[:, HOLE]
    step_B = rows.token_BT[:, 0].double()

    def inside(values_B: Tensor) -> Tensor:
        return torch.where(is_inside_B, values_B, 0.0)

    hole_B = inside(HOLE_LOGP - 0.3 * step_B).requires_grad_(True)
    no_mask_B = torch.zeros_like(is_inside_B)
    columns = {
        "logp_BT": _inserted(rows.logp_BT, hole_B),
        "ref_logp_BT": _inserted(rows.ref_logp_BT, inside(HOLE_REF_LOGP + 0.5 * step_B)),
        "behaviour_logp_BT": _inserted(rows.behaviour_logp_BT, inside(HOLE_BEHAVIOUR_LOGP - 0.4 * step_B)),
        "mask_BT": _inserted(rows.mask_BT, no_mask_B),
        "token_BT": _inserted(rows.token_BT, no_mask_B.long()),
        "reverse_kl_BT": _inserted(rows.reverse_kl_BT, inside(torch.ones_like(step_B))),
        "forward_kl_BT": _inserted(rows.forward_kl_BT, inside(torch.ones_like(step_B))),
    }
    for name in ("next_logp_BTV", "ref_next_logp_BTV"):
        # Any distribution would do: that of the first token, so that it is one.
        full_BTV = getattr(rows, name)
        columns[name] = _inserted(full_BTV, full_BTV[:, 0].detach())
    return dataclasses.replace(rows, **columns), hole_B


def _inserted(values: Tensor, hole: Tensor) -> Tensor:
    return torch.cat([values[:, :HOLE], hole[:, None], values[:, HOLE:]], 1)


Given = dict[str, Any]


def given_of(rows: Rows) -> Given:
    """The tensors that a row's call may name."""
    return {
        "logp": rows.logp_BT,
        "ref_logp": rows.ref_logp_BT,
        "old_logp": rows.behaviour_logp_BT,
        "mask": rows.mask_BT,
        "tokens": rows.token_BT,
        "logp_full": rows.next_logp_BTV,
        "ref_logp_full": rows.ref_next_logp_BTV,
    }


def loss_of(call: Callable[[Given], Tensor]) -> Loss:
    """A loss over rows from a call of the row's code."""

    def loss(rows: Rows, /) -> Tensor:
        value = call(given_of(rows))
        if value.dim() == 2:
            # Not a product: inf * 0 would be NaN.
            return torch.where(rows.mask_BT, value, 0.0)
        return value

    return loss
