"""Exact gradients of a case: which target it optimizes, bias, variance, and tokens without gradient."""

from __future__ import annotations

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
    """The instances of the certificates; for groups a smaller set, without instances far from the reference."""
    if group_size == 1:
        return battery(regime)
    settings = [
        Instance.random(SMALL, InstanceSettings(regime=regime, seed=seed, parameters=SHARED)) for seed in (0, 1)
    ]
    settings.append(Instance.random(SMALL, InstanceSettings(regime=regime, seed=2)))
    return tuple(
        BatteryInstance(
            instance=instance,
            targets={name: target_gradient(instance, name) for name in TARGETS},
            near=True,
            shown=instance.features_NVD is not None,
        )
        for instance in settings
    )


def measure(case: Case, regime: str) -> dict[str, Any]:
    """The columns of one row. Biases and cosines are means over the instances with shared parameters."""
    moments_by_instance = [
        (battery_instance, exact_moments(battery_instance.instance, case.loss, group_size=case.group_size))
        for battery_instance in instances(regime, case.group_size)
    ]
    shown_moments = [pair for pair in moments_by_instance if pair[0].shown]
    near_target = _hit([pair for pair in moments_by_instance if pair[0].near], case.tolerance)
    target = _hit(moments_by_instance, case.tolerance)
    silent_no_op = all(float(m.gradient_D.norm()) == 0 and m.variance == 0 for _, m in moments_by_instance)
    row: dict[str, Any] = {
        "target": target,
        "near_target": near_target,
        "silent_no_op": silent_no_op,
        "variance": _mean([m.variance / _square(i) for i, m in shown_moments]),
        "strength": _mean([float(m.gradient_D @ i.targets["sequence_reverse"]) / _square(i) for i, m in shown_moments]),
        "dead_share_far": dead_share(case, regime),
    }
    for name in ("sequence_reverse", "token_reverse"):
        row[f"bias_{name}"] = _mean([m.relative_bias(i.targets[name]) for i, m in shown_moments])
        row[f"cosine_{name}"] = (
            None if "zero" in (target, near_target) else _mean([m.cosine(i.targets[name]) for i, m in shown_moments])
        )
    return {key: _plain(value) for key, value in row.items()}


def dead_share(case: Case, regime: str) -> float:
    """The expected share of tokens whose log-prob gets no KL gradient, far from the reference.

    Both clamps of the estimate and clips of the ratio that multiplies a cost count. Groups with equal completions are
    excluded.
    """
    tree = TREE if case.group_size == 1 else SMALL
    setting = Instance.random(
        tree, InstanceSettings(regime=regime, seed=0, parameters=SHARED, distance=FAR_DISTANCE, staleness=FAR_STALENESS)
    )
    count = tree.completions
    member_GC = torch.cartesian_prod(*[torch.arange(count)] * case.group_size).reshape(-1, case.group_size).T
    different_C = torch.stack([a != b for a, b in itertools.combinations(member_GC, 2)] or [member_GC[0] >= 0]).all(0)
    index_B = member_GC[:, different_C].T.flatten()
    probability_C = setting.probability(tree.all)[member_GC[:, different_C]].prod(0)
    weight_B = probability_C.repeat_interleave(case.group_size)
    gradient_BT, rows = gradient(case, setting.rows(Completions(**{k: v[index_B] for k, v in vars(tree.all).items()})))
    tokens_B = rows.mask_BT.sum(-1).double()
    dead_B = ((gradient_BT == 0) & rows.mask_BT).sum(-1).double()
    return float(weight_B @ dead_B) / float(weight_B @ tokens_B)


def gradient(case: Case, rows: Rows) -> tuple[Tensor, Rows]:
    """The derivative of the case's loss by each log-prob, ``[B, T]``, and the rows in groups."""
    grouped = Rows(**{**rows.__dict__, "group_B": torch.arange(len(rows.group_B)) // case.group_size})
    value = case.loss(grouped)
    if not value.requires_grad:
        return torch.zeros_like(grouped.ref_logp_BT), grouped
    (gradient_BT,) = torch.autograd.grad(value.sum(), [grouped.logp_BT], allow_unused=True)
    return (torch.zeros_like(grouped.ref_logp_BT) if gradient_BT is None else gradient_BT), grouped


def _hit(moments_by_instance: Sequence[tuple[BatteryInstance, Moments]], tolerance: float) -> str | None:
    """The target whose gradient equals the expected gradient on every instance, within rounding."""
    for name in TARGETS:
        if all(_equal(m, i.targets[name], tolerance) for i, m in moments_by_instance):
            return name
    return None


def _equal(moments: Moments, target_D: Tensor, tolerance: float) -> bool:
    scale = float(target_D.norm()) + math.sqrt(moments.variance) + float(moments.gradient_D.norm())
    return float((moments.gradient_D - target_D).norm()) <= tolerance * max(scale, 1e-3)


def _square(instance: BatteryInstance) -> float:
    return float(instance.targets["sequence_reverse"].square().sum())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
