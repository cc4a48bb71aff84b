"""What a loss that hits no objective is on stale samples, measured: one of the kinds of docs/off_policy_terms.md.

The sampler is held fixed. Whether there is a function is the symmetry of the Jacobian of the expected gradient; where
the function is least, the integral of the gradient along lines that leave the reference.

Legend: ``D`` parameters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from kl_comedy.kl.oracle import Instance, InstanceSettings, Loss, Rows, Tree, exact_moments
from kl_comedy.kl.oracle.enumeration import log_probs

TREE = Tree.build(vocabulary=3, length=2, ends=False)
PARAMETERS = 4
SEEDS = (5, 6)
DISTANCE = 0.7
"""Standard deviation of the difference of the parameters of policy and reference."""
STALENESS = 0.6
STEP = 1e-3
"""Of the central differences; their error is of its square, 1e-6."""
SYMMETRIC = 1e-4
ASYMMETRIC = 1e-3
"""Relative sizes of the Jacobian's antisymmetric part: below the first there is a function, above the second none."""
ROUNDING = 1e-9
POLICIES = 8
"""At which the direction of the gradient is compared with that of the samples."""
LINES = (1.0, -2.0, 4.0)
"""How far, in standard deviations, lines leave the reference."""
PLACES = ((-0.8611363115940526, 0.3478548451374538), (-0.3399810435848563, 0.6521451548625461))
"""Half of the places and weights of Gauss's rule of four points, on [-1, 1]."""

Gradient = Callable[[Tensor], Tensor]


def kind(loss: Loss, *, group_size: int = 1) -> str | None:
    """The name of the kind; None where it is not decided, as for code that computes in float32."""
    kinds = {_kind_on(instance, reference_D, loss, group_size) for instance, reference_D in _instances()}
    if len(kinds) > 1:
        return None
    return kinds.pop()


@lru_cache(maxsize=1)
def _instances() -> tuple[tuple[Instance, Tensor], ...]:
    """Stale instances whose reference is one of the policies, and the parameters of that policy."""
    instances = []
    for seed in SEEDS:
        settings = InstanceSettings(regime="off_policy", seed=seed, parameters=PARAMETERS, staleness=STALENESS)
        instance = Instance.random(TREE, settings)
        generator = torch.Generator().manual_seed(seed)
        reference_D = instance.theta_D + DISTANCE * torch.randn(PARAMETERS, generator=generator, dtype=torch.float64)
        instance = dataclasses.replace(instance, ref_logp_NV=instance.policy_logp(reference_D))
        instances.append((instance, reference_D))
    return tuple(instances)


def _kind_on(instance: Instance, reference_D: Tensor, loss: Loss, group_size: int) -> str | None:
    lowest_slope = math.inf

    def watched(rows: Rows, /) -> Tensor:
        nonlocal lowest_slope
        value = loss(rows)
        (slope_BT,) = torch.autograd.grad(value.sum(), rows.logp_BT, retain_graph=True, materialize_grads=True)
        lowest_slope = min(lowest_slope, float(slope_BT[rows.mask_BT].min()))
        return value

    def gradient(theta_D: Tensor) -> Tensor:
        at_theta = dataclasses.replace(instance, theta_D=theta_D)
        return exact_moments(at_theta, watched, group_size=group_size).gradient_D

    asymmetry = _asymmetry(gradient, instance.theta_D)
    if asymmetry > ASYMMETRIC:
        return "no_function"
    if asymmetry > SYMMETRIC:
        return None
    slope = float(gradient(reference_D).norm())
    if slope < ROUNDING and min(_rises(gradient, reference_D)) > 0:
        return "proper_loss"
    # With a ratio, costs above 0 push every sample down too, and in the mean only those of a higher cost.
    if _drives_away(instance, gradient) and lowest_slope >= -ROUNDING:
        return "repulsion"
    return "difference"


def _drives_away(instance: Instance, gradient: Gradient) -> bool:
    """Whether a step against the gradient makes the samples rarer, ``E_mu[log pi]`` smaller, at every policy tried."""
    completions = instance.tree.all
    weight_B = log_probs(completions, instance.sampler_logp_NV).sum(-1).exp()
    generator = torch.Generator().manual_seed(4)
    for _ in range(POLICIES):
        away_D = torch.randn(PARAMETERS, generator=generator, dtype=torch.float64)
        theta_D = (instance.theta_D + away_D).requires_grad_(True)
        likelihood = weight_B @ log_probs(completions, instance.policy_logp(theta_D)).sum(-1)
        (rise_D,) = torch.autograd.grad(likelihood, theta_D)
        if float(rise_D @ gradient(theta_D.detach())) <= 0:
            return False
    return True


def _asymmetry(gradient: Gradient, theta_D: Tensor) -> float:
    """The size of the Jacobian's antisymmetric part over that of the Jacobian."""
    columns = []
    for direction_D in torch.eye(len(theta_D), dtype=torch.float64):
        above_D = gradient(theta_D + STEP * direction_D)
        below_D = gradient(theta_D - STEP * direction_D)
        columns.append((above_D - below_D) / (2 * STEP))
    jacobian_DD = torch.stack(columns)
    return float((jacobian_DD - jacobian_DD.T).norm() / jacobian_DD.norm())


def _rises(gradient: Gradient, reference_D: Tensor) -> list[float]:
    """How much the function rises from the reference to the end of each line."""
    generator = torch.Generator().manual_seed(3)
    rises = []
    for size in LINES:
        line_D = size * torch.randn(len(reference_D), generator=generator, dtype=torch.float64)
        rise = 0.0
        for place, weight in PLACES:
            for where in (place, -place):
                rise += weight / 2 * float(gradient(reference_D + (where + 1) / 2 * line_D) @ line_D)
        rises.append(rise)
    return rises
