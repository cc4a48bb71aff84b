"""Exact gradients of a case: which target it optimizes, bias, variance, and tokens without gradient."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kl_comedy.kl.claims import TARGETS
from kl_comedy.kl.oracle import (
    Completions,
    Instance,
    InstanceSettings,
    Moments,
    Rows,
    Tree,
    exact_moments,
    target_gradient,
)
from kl_comedy.kl.oracle.certificate import FAR_DISTANCE, FAR_STALENESS, SHARED, TREE, BatteryInstance, battery
from peers.case import Case

SMALL = Tree.build(vocabulary=3, length=3)
"""The tree on which every group of two is enumerated."""
REGIMES = ("on_policy", "off_policy")


@lru_cache(maxsize=8)
def instances(regime: str, group_size: int) -> tuple[BatteryInstance, ...]:
    """The instances of the certificates without dialogues; for groups a smaller set, none far from the reference.

    What a loss does at the tokens of a tool has a figure of its own (``holes`` of the register), so that a row says
    what is optimized without tools, and what leaks with them.
    """
    if group_size == 1:
        return tuple(case for case in battery(regime) if case.instance.environment is None)
    # All groups of completions are enumerated: their number is that of completions to the power of the group's size.
    settings = [
        InstanceSettings(regime=regime, seed=0, parameters=SHARED),
        InstanceSettings(regime=regime, seed=1, parameters=SHARED),
        InstanceSettings(regime=regime, seed=2),
    ]
    group_instances = []
    for instance_settings in settings:
        instance = Instance.random(SMALL, instance_settings)
        group_instances.append(
            BatteryInstance(
                instance=instance,
                targets={name: target_gradient(instance, name) for name in TARGETS},
                near=True,
                shown=instance.features_NVD is not None,
            )
        )
    return tuple(group_instances)


def measure(case: Case, regime: str) -> dict[str, Any]:
    """The columns of one row. Biases and cosines are means over the instances with shared parameters."""
    results = []
    for battery_instance in instances(regime, case.group_size):
        moments = exact_moments(battery_instance.instance, case.loss, group_size=case.group_size)
        results.append((battery_instance, moments))
    near_results = [result for result in results if result[0].near]
    # Parameters that prefixes share, as in a language model.
    shown_results = [result for result in results if result[0].shown]

    target = _target_of(results, case.tolerance)
    near_target = _target_of(near_results, case.tolerance)
    # No completion has a gradient: a KL whose gradient is zero in the mean alone has a variance.
    silent_no_op = all(float(moments.gradient_D.norm()) == 0 and moments.variance == 0 for _, moments in results)

    variances = []
    strengths = []
    for instance, moments in shown_results:
        target_D = instance.targets["sequence_reverse"]
        square = float(target_D.square().sum())
        variances.append(moments.variance / square)
        strengths.append(float(moments.gradient_D @ target_D) / square)
    row: dict[str, Any] = {
        "target": target,
        "near_target": near_target,
        "silent_no_op": silent_no_op,
        "variance": _mean(variances),
        "strength": _mean(strengths),
        "dead_share_far": dead_share(case, regime),
    }

    # The direction of a zero gradient is rounding noise.
    has_direction = "zero" not in (target, near_target)
    for name in ("sequence_reverse", "token_reverse"):
        row[f"bias_{name}"] = _mean([moments.relative_bias(i.targets[name]) for i, moments in shown_results])
        row[f"cosine_{name}"] = None
        if has_direction:
            row[f"cosine_{name}"] = _mean([moments.cosine(i.targets[name]) for i, moments in shown_results])
    return {key: _finite_or_none(value) for key, value in row.items()}


def dead_share(case: Case, regime: str) -> float:
    """The expected share of tokens whose log-prob gets no KL gradient, far from the reference.

    Both clamps of the estimate and clips of the ratio that multiplies a cost count. Groups with equal completions are
    excluded.
    """
    tree = TREE if case.group_size == 1 else SMALL
    far = InstanceSettings(regime=regime, seed=0, parameters=SHARED, distance=FAR_DISTANCE, staleness=FAR_STALENESS)
    instance = Instance.random(tree, far)

    # G members of each group, C groups: every combination of completions, numbered as in the tree.
    numbers = torch.arange(tree.completions)
    member_GC = torch.cartesian_prod(*[numbers] * case.group_size).reshape(-1, case.group_size).T
    # Equal completions have equal rewards and costs: a baseline of the group removes them, whatever the KL code does.
    different_C = torch.ones(member_GC.shape[1], dtype=torch.bool)
    for first, second in itertools.combinations(member_GC, 2):
        different_C &= first != second
    member_GC = member_GC[:, different_C]

    # The rows of a group stand side by side.
    index_B = member_GC.T.flatten()
    columns = {name: column[index_B] for name, column in vars(tree.all).items()}
    gradient_BT, rows = gradient(case, instance.rows(Completions(**columns)))
    probability_C = instance.probability(tree.all)[member_GC].prod(0)
    # A group counts with the probability that the sampler draws it.
    weight_B = probability_C.repeat_interleave(case.group_size)
    tokens_B = rows.mask_BT.sum(-1).double()
    dead_B = ((gradient_BT == 0) & rows.mask_BT).sum(-1).double()
    return float(weight_B @ dead_B) / float(weight_B @ tokens_B)


def gradient(case: Case, rows: Rows) -> tuple[Tensor, Rows]:
    """The derivative of the case's loss by each log-prob, ``[B, T]``, and the rows in groups."""
    group_B = torch.arange(len(rows.group_B)) // case.group_size
    grouped = dataclasses.replace(rows, group_B=group_B)
    no_gradient_BT = torch.zeros_like(grouped.ref_logp_BT)
    value = case.loss(grouped)
    # Some peers' penalties reach no log-prob that is differentiated: no error, but a result.
    if not value.requires_grad:
        return no_gradient_BT, grouped
    (gradient_BT,) = torch.autograd.grad(value.sum(), [grouped.logp_BT], allow_unused=True)
    if gradient_BT is None:
        return no_gradient_BT, grouped
    return gradient_BT, grouped


def _target_of(results: Sequence[tuple[BatteryInstance, Moments]], tolerance: float) -> str | None:
    """The target whose gradient equals the expected gradient on every instance, within rounding."""
    for name in TARGETS:
        if all(_equal(moments, instance.targets[name], tolerance) for instance, moments in results):
            return name
    return None


def _equal(moments: Moments, target_D: Tensor, tolerance: float) -> bool:
    # Rounding errors are proportional to the terms that were added up, which the variance bounds where they cancel.
    scale = float(target_D.norm()) + math.sqrt(moments.variance) + float(moments.gradient_D.norm())
    distance = float((moments.gradient_D - target_D).norm())
    return distance <= tolerance * max(scale, 1e-3)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _finite_or_none(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
