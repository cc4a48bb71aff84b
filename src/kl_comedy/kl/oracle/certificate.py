"""Certificates: what a list of terms optimizes in each regime, by enumeration, in a sentence a user can act on.

A target is *hit* when the exact expected gradient equals it on every instance of the battery: tabular and
shared parameters, several seeds, near the reference and far from it (where clamps and caps act). The
figures of a certificate are means over the near instances with shared parameters, as in a language model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from kl_comedy.kl.claims import TARGET_MEANINGS, TARGETS, claimed_target
from kl_comedy.kl.oracle.enumeration import REGIMES, Instance, Tree
from kl_comedy.kl.oracle.gradients import (
    Moments,
    against_the_sampler,
    exact_moments,
    initial_beta,
    target_gradient,
    terms_loss,
)
from kl_comedy.kl.term import KLTerm

TREE = Tree.build(vocabulary=3, length=4)
SEEDS = (0, 1, 2)
SHARED = 6
"""Parameters of the instances whose figures are shown."""
DISTANCE, STALENESS = 0.5, 0.3
FAR_DISTANCE, FAR_STALENESS = 4.0, 1.5
"""Logit noise of the far instance: log-ratios of several nats, ratios of a hundred."""
BOUNDS = ("cap", "window", "input_clamp", "output_clamp")
LONG = Tree.build(vocabulary=2, length=8, ends=False)
"""A longer tree, where a window of the last ratios leaves some out."""

YARDSTICKS: dict[str, tuple[KLTerm, ...]] = {
    "sequence_reverse": (
        KLTerm("exact", placement="loss", correction="prefix_previous"),
        KLTerm("exact", placement="reward", credit="to_go", correction="prefix_previous"),
    ),
    "token_reverse": (KLTerm("exact", placement="loss"),),
    "token_forward": (KLTerm("exact_forward", placement="loss"),),
    "sequence_forward": (KLTerm("k3", level="sequence", placement="loss"),),
}
"""Per target, the terms among which the least noisy unbiased one is chosen (tests search the whole matrix)."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """One row: a configuration in one regime.

    ``relative_bias`` and ``cosine`` are against each target; ``variance`` is the trace variance of one
    completion's gradient over the squared norm of the sequence-level reverse-KL gradient, and
    ``variance_ratio`` that over the least noisy unbiased term for the target hit (for the sequence-level
    reverse KL where none is). ``strength`` is the multiple of the sequence-level reverse-KL gradient it
    contains: the beta one gets for a beta of 1. ``near_target`` is what is hit while no bound acts.
    """

    name: str
    terms: tuple[KLTerm, ...]
    regime: str
    target: str | None
    near_target: str | None
    claimed: str | None
    relative_bias: dict[str, float]
    cosine: dict[str, float]
    variance: float
    variance_ratio: float | None
    strength: float
    claim_holds: bool
    verdict: str

    def row(self) -> dict[str, Any]:
        """Plain data for JSON; what is undefined (a cosine with nothing) is None."""
        return {
            "name": self.name,
            "terms": [term.to_mapping() for term in self.terms],
            "label": " + ".join(term.label() for term in self.terms) or "no KL",
            "regime": self.regime,
            "target": self.target,
            "near_target": self.near_target,
            "claimed": self.claimed,
            "kept": self.claim_holds,
            "relative_bias": {name: _plain(value) for name, value in self.relative_bias.items()},
            "cosine": {name: _plain(value) for name, value in self.cosine.items()},
            "variance": self.variance,
            "variance_ratio": self.variance_ratio,
            "strength": self.strength,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, kw_only=True)
class BatteryInstance:
    """An instance with the gradients of its targets. ``near``: no bound acts; ``shown``: figures average over it."""

    instance: Instance
    targets: dict[str, Tensor]
    near: bool
    shown: bool


@lru_cache(maxsize=8)
def battery(regime: str, *, sampler_is_reference: bool = False) -> tuple[BatteryInstance, ...]:
    """The instances on which a certificate of ``regime`` rests."""

    def build(tree: Tree, seed: int, parameters: int | None, *, near: bool, far_away: bool = False) -> BatteryInstance:
        distance, staleness = (FAR_DISTANCE, FAR_STALENESS) if far_away else (DISTANCE, STALENESS)
        instance = Instance.random(
            tree, regime=regime, seed=seed, parameters=parameters, distance=distance, staleness=staleness
        )
        measured = against_the_sampler(instance) if sampler_is_reference else instance
        targets = {name: target_gradient(measured, name) for name in TARGETS}
        return BatteryInstance(instance=instance, targets=targets, near=near, shown=near and parameters is not None)

    near = [build(TREE, seed, parameters, near=True) for seed in SEEDS for parameters in (None, SHARED)]
    far = build(TREE, 0, SHARED, near=False, far_away=True)
    return (*near, far, build(LONG, 0, SHARED, near=False))


def certify(name: str, terms: Sequence[KLTerm], *, regimes: Sequence[str] = REGIMES) -> list[Certificate]:
    """One certificate per regime for a list of terms, the largest beta counted as 1."""
    return [_certificate(name, tuple(terms), regime) for regime in regimes]


def _certificate(name: str, terms: tuple[KLTerm, ...], regime: str) -> Certificate:
    to_sampler = bool(terms) and all(term.reference == "sampler" for term in terms)
    instances = battery(regime, sampler_is_reference=to_sampler)
    scale = max((abs(initial_beta(term)) for term in terms), default=1.0) or 1.0
    unit = [dataclasses.replace(term, beta=initial_beta(term) / scale) for term in terms]
    pairs = [(each, exact_moments(each.instance, terms_loss(unit))) for each in instances]
    claimed = claimed_target(terms[0], regime) if len(terms) == 1 else None
    near_target = _target_hit([pair for pair in pairs if pair[0].near], claimed)
    target = _target_hit(pairs, near_target)
    if any(term.window is not None and term.window >= LONG.length - 1 for term in terms):
        target = None  # no instance is longer than the window, so none shows what it leaves out
    shown = [(each.targets, moments) for each, moments in pairs if each.shown]
    bias = {t: _mean([moments.relative_bias(targets[t]) for targets, moments in shown]) for t in TARGETS}
    cosine = {t: _mean([moments.cosine(targets[t]) for targets, moments in shown]) for t in TARGETS}
    if target == "zero":  # the cosine of a gradient of rounding errors is no direction
        cosine = dict.fromkeys(TARGETS, math.nan)
    variance = _mean([moments.variance / (_square(targets) or 1.0) for targets, moments in shown])
    strength = _mean([_along(moments, targets) for targets, moments in shown])
    compared_with = target or near_target or "sequence_reverse"
    best = None if target == "zero" or to_sampler else _least_variance(compared_with, regime)
    ratio = variance / best if best else None
    bounded = any(getattr(term, name) is not None for term in terms for name in BOUNDS)
    return Certificate(
        name=name,
        terms=terms,
        regime=regime,
        target=target,
        near_target=near_target,
        claimed=claimed,
        relative_bias=bias,
        cosine=cosine,
        variance=variance,
        variance_ratio=ratio,
        strength=strength,
        claim_holds=claimed is None or claimed == target or (bounded and claimed == near_target),
        verdict=_sentence(terms, to_sampler, target, near_target, bias, cosine, ratio),
    )


def _square(targets: dict[str, Tensor]) -> float:
    """The squared norm of the sequence-level reverse-KL gradient, the unit of variances."""
    return float(targets["sequence_reverse"].square().sum())


def _along(moments: Moments, targets: dict[str, Tensor]) -> float:
    """The multiple of the sequence-level reverse-KL gradient that a gradient contains."""
    square = _square(targets)
    return float(moments.gradient_D @ targets["sequence_reverse"]) / square if square > 0 else 0.0


def _target_hit(pairs: Sequence[tuple[BatteryInstance, Moments]], preferred: str | None) -> str | None:
    """The target hit on every instance; where several coincide, the preferred one."""
    hits = [name for name in TARGETS if all(moments.equals(each.targets[name]) for each, moments in pairs)]
    return preferred if preferred in hits else next(iter(hits), None)


@lru_cache(maxsize=64)
def _least_variance(target: str, regime: str) -> float | None:
    """The variance of the least noisy yardstick that hits a target in a regime, in the certificate's unit."""
    variances = []
    for term in YARDSTICKS.get(target, ()):
        pairs = [(each, exact_moments(each.instance, terms_loss((term,)))) for each in battery(regime)]
        if _target_hit(pairs, target) == target:
            variances.append(_mean([moments.variance / _square(each.targets) for each, moments in pairs if each.shown]))
    return min(variances, default=None)


def _sentence(
    terms: Sequence[KLTerm],
    to_sampler: bool,
    target: str | None,
    near_target: str | None,
    bias: dict[str, float],
    cosine: dict[str, float],
    ratio: float | None,
) -> str:
    """The words of a certificate: the target or the bias, then the noise."""
    if not terms:
        return "no KL term: nothing holds the policy to the reference"
    if to_sampler:
        away = "" if target is None or target == "zero" else f" ({target})"
        return f"a trust region: pulls towards the sampler{away}, not towards the reference"
    noise = "" if ratio is None else f"; {ratio:.3g}x the variance of the least noisy unbiased term"
    if any(term.baseline == "own" for term in terms):
        noise += " (its own baseline, which needs a group, is not counted)"
    if target is not None:
        return f"{TARGET_MEANINGS[target]}{noise if target != 'zero' else ''}"
    off, along = bias["sequence_reverse"], cosine["sequence_reverse"]
    nearest = min((t for t in TARGETS if t != "zero"), key=lambda t: bias[t])
    size = "less than 1%" if off < 0.01 else f"{off:.0%}" if off < 10 else f"{off:.0f}x"
    words = f"biased: {size} off the sequence-level reverse KL, cosine {along:.2f}"
    if along < 0:
        words = f"points away: cosine {along:.2f} with the sequence-level reverse KL, {size} off it"
    if nearest != "sequence_reverse" and bias[nearest] < 0.9 * off:
        words += f", nearest to {nearest} ({bias[nearest]:.0%} off)"
    if near_target is not None:
        words = f"{near_target} while no bound acts, biased beyond"
    return words + noise


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
