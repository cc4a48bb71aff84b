"""The smallest batch on which a loss fails, as text: small policies are tried before larger ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kl_comedy.conformance.causes import common_coefficient
from kl_comedy.kl.oracle.certificate import DISTANCE, SHARED, STALENESS, BatteryInstance, with_targets
from kl_comedy.kl.oracle.enumeration import Instance, InstanceSettings, Tree

SIZES = ((2, 1), (2, 2), (3, 1), (3, 2), (2, 3))
"""Vocabulary and tokens of the policies that are tried. A top-k loss needs a third token before it has a tail."""
SHOWN = ("mask", "logp", "ref_logp", "behaviour_logp")
"""Tensors that a batch is shown by. Off-policy the sampler's log-probs differ from the policy's."""
MAX_ROWS = 8
FAR = 40.0
"""Distance (nats, as :data:`DISTANCE`) of policies on which losses that clamp their log-ratios miss their targets."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A loss on a batch: what it was given, the value per completion or token, and its expected gradient ``[D]``."""

    tensors: Mapping[str, Tensor]
    weight_B: Tensor
    value: Tensor
    gradient_D: Tensor
    tolerance: float


def small_policy(
    regime: str, vocabulary: int, length: int, seed: int = 0, distance: float = DISTANCE
) -> BatteryInstance:
    """A policy, by default near its reference; one token of the vocabulary ends the completion."""
    tree = Tree.build(vocabulary=vocabulary, length=length)
    settings = InstanceSettings(regime=regime, seed=seed, parameters=SHARED, distance=distance, staleness=STALENESS)
    return with_targets(Instance.random(tree, settings), near=True)


def smallest_miss(measure: Callable[[BatteryInstance], Measured], regime: str, claimed: str, *, near_only: bool) -> str:
    """The shortest completions on which the expected gradient is not a multiple of the target's; empty if none.

    Policies near the reference come first; with ``near_only`` there are no others.
    """
    distances = [DISTANCE]
    if not near_only:
        distances.append(FAR)
    for distance, (vocabulary, length) in itertools.product(distances, SIZES):
        # One coefficient for two policies: with one alone a wrong size could not be told from beta.
        policies = [small_policy(regime, vocabulary, length, seed, distance) for seed in (0, 1)]
        measured = [measure(policy) for policy in policies]
        gradients = [result.gradient_D for result in measured]
        targets = [policy.targets[claimed] for policy in policies]
        if common_coefficient(gradients, targets, measured[0].tolerance) is not None:
            continue
        first = measured[0]
        lines = [f"smallest failing batch ({regime}, {len(first.weight_B)} completions of at most {_count(length)}):"]
        lines += batch_lines(first.tensors, first.value, first.weight_B)
        lines.append(f"  expected gradient {numbers(first.gradient_D)}; of {claimed} {numbers(targets[0])}")
        return "\n".join(lines)
    return ""


def _count(tokens: int) -> str:
    if tokens == 1:
        return "1 token"
    return f"{tokens} tokens"


def batch_lines(tensors: Mapping[str, Tensor], value: Tensor, weight_B: Tensor | None = None) -> list[str]:
    """A line for each completion: its probability under the sampler, the tensors, and the value of the loss."""
    lines = []
    count = len(tensors["mask"])
    for row in range(min(count, MAX_ROWS)):
        parts = []
        if weight_B is not None:
            parts.append(f"probability {float(weight_B[row]):.3g}")
        parts += [f"{name} {numbers(tensors[name][row])}" for name in SHOWN]
        if value.dim() == 0:
            parts.append(f"loss {float(value):.4g}")
        else:
            parts.append(f"loss {numbers(value[row])}")
        lines.append("  " + ", ".join(parts))
    if count > MAX_ROWS:
        lines.append(f"  ... {count - MAX_ROWS} more")
    return lines


def numbers(values: Tensor | Sequence[float]) -> str:
    """Numbers in brackets, with three digits."""
    if isinstance(values, Tensor):
        values = values.detach().double().reshape(-1).tolist()
    return "[" + " ".join(f"{value:.3g}" for value in values) + "]"
