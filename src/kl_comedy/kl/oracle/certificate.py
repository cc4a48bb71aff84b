"""Certificates: what a list of terms descends in each regime, by enumeration, in a sentence a user can act on.

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

from kl_comedy.kl.claims import SAYS, TARGETS, claimed_target
from kl_comedy.kl.oracle.enumeration import REGIMES, Setting, Tree
from kl_comedy.kl.oracle.gradients import (
    Moments,
    against_the_sampler,
    exact_moments,
    number,
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
LONG = Tree.build(vocabulary=2, length=8, ends=False)
"""A longer tree, where a window of the last ratios leaves some out."""
TOLERANCE = 1e-9

YARDSTICKS: dict[str, tuple[KLTerm, ...]] = {
    "sequence_reverse": (
        KLTerm("exact", placement="loss", correction="prefix_previous"),
        KLTerm("exact", placement="reward", credit="to_go", correction="prefix_previous"),
    ),
    "token_reverse": (KLTerm("exact", placement="loss"),),
    "token_forward": (KLTerm("exact_forward", placement="loss"),),
    "sequence_forward": (KLTerm("k3", level="sequence", placement="loss"),),
}
"""Per target, the terms among which the least noisy unbiased one is found (tests search the whole matrix)."""


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
    kept: bool
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
            "kept": self.kept,
            "relative_bias": {name: _plain(value) for name, value in self.relative_bias.items()},
            "cosine": {name: _plain(value) for name, value in self.cosine.items()},
            "variance": self.variance,
            "variance_ratio": self.variance_ratio,
            "strength": self.strength,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A setting of the battery with the gradients of its targets."""

    setting: Setting
    targets: dict[str, Tensor]
    near: bool
    shown: bool


@lru_cache(maxsize=8)
def battery(regime: str, *, sampler_is_reference: bool = False) -> tuple[Instance, ...]:
    """The instances on which a certificate of ``regime`` rests."""
    found = []
    near = [(seed, shared) for seed in SEEDS for shared in (None, SHARED)]
    for seed, shared in near:
        found.append(
            (
                Setting.random(
                    TREE, regime=regime, seed=seed, parameters=shared, distance=DISTANCE, staleness=STALENESS
                ),
                True,
                shared is not None,
            )
        )
    found.append(
        (
            Setting.random(
                TREE, regime=regime, seed=0, parameters=SHARED, distance=FAR_DISTANCE, staleness=FAR_STALENESS
            ),
            False,
            False,
        )
    )
    found.append(
        (
            Setting.random(LONG, regime=regime, seed=0, parameters=SHARED, distance=DISTANCE, staleness=STALENESS),
            False,
            False,
        )
    )
    instances = []
    for setting, is_near, shown in found:
        measured = against_the_sampler(setting) if sampler_is_reference else setting
        targets = {name: target_gradient(measured, name) for name in TARGETS}
        instances.append(Instance(setting=setting, targets=targets, near=is_near, shown=shown))
    return tuple(instances)


def certify(name: str, terms: Sequence[KLTerm], *, regimes: Sequence[str] = REGIMES) -> list[Certificate]:
    """One certificate per regime for a list of terms, the largest beta counted as 1."""
    return [_certificate(name, tuple(terms), regime) for regime in regimes]


def _certificate(name: str, terms: tuple[KLTerm, ...], regime: str) -> Certificate:
    to_sampler = bool(terms) and all(term.reference == "sampler" for term in terms)
    instances = battery(regime, sampler_is_reference=to_sampler)
    scale = max((abs(number(term)) for term in terms), default=1.0) or 1.0
    unit = [dataclasses.replace(term, beta=number(term) / scale) for term in terms]
    moments = [exact_moments(each.setting, terms_loss(unit)) for each in instances]
    claimed = claimed_target(terms[0], regime) if len(terms) == 1 else None
    near_target = _hit([pair for pair in zip(instances, moments, strict=True) if pair[0].near], claimed)
    target = _hit(list(zip(instances, moments, strict=True)), near_target)
    if any(term.window is not None and term.window >= LONG.length - 1 for term in terms):
        target = None  # no instance is longer than the window, so none shows what it leaves out
    shown = [pair for pair in zip(instances, moments, strict=True) if pair[0].shown]
    bias = {t: _mean([m.relative_bias(i.targets[t]) for i, m in shown]) for t in TARGETS}
    cosine = {t: _mean([m.cosine(i.targets[t]) for i, m in shown]) for t in TARGETS}
    sizes = [float(i.targets["sequence_reverse"].square().sum()) for i, _ in shown]
    variance = _mean([m.variance / size if size > 0 else m.variance for (_, m), size in zip(shown, sizes, strict=True)])
    strength = _mean(
        [
            float(m.gradient_D @ i.targets["sequence_reverse"]) / size if size > 0 else 0.0
            for (i, m), size in zip(shown, sizes, strict=True)
        ]
    )
    inert = target == "zero"
    best = None if inert or to_sampler else _least_variance(target or near_target or "sequence_reverse", regime)
    ratio = None if best is None or best == 0 else variance / best
    # A zero cosine of a zero gradient is rounding noise, not a direction.
    cosine = {t: float("nan") for t in TARGETS} if inert else cosine
    kept = claimed is None or claimed in (target, near_target if _bounded(terms) else target)
    words = _sentence(terms, to_sampler, target, near_target, bias, cosine, ratio)
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
        kept=kept,
        verdict=words,
    )


def _hit(pairs: Sequence[tuple[Instance, Moments]], preferred: str | None) -> str | None:
    """The target hit on every instance; where several coincide, the preferred one."""
    hits = [name for name in TARGETS if all(_equal(m, i.targets[name]) for i, m in pairs)]
    return preferred if preferred in hits else next(iter(hits), None)


def _equal(moments: Moments, target_D: Tensor) -> bool:
    """Equal up to rounding, which grows with the noise that was summed over."""
    scale = float(target_D.norm()) + math.sqrt(moments.variance) + float(moments.gradient_D.norm())
    return float((moments.gradient_D - target_D).norm()) <= TOLERANCE * max(scale, 1e-3)


@lru_cache(maxsize=64)
def _least_variance(target: str, regime: str) -> float | None:
    """The variance of the least noisy yardstick that hits a target in a regime, in the certificate's unit."""
    found = []
    for term in YARDSTICKS.get(target, ()):
        instances = battery(regime)
        moments = [exact_moments(each.setting, terms_loss((term,))) for each in instances]
        if _hit(list(zip(instances, moments, strict=True)), target) == target:
            found.append(
                _mean(
                    [
                        m.variance / float(i.targets["sequence_reverse"].square().sum())
                        for i, m in zip(instances, moments, strict=True)
                        if i.shown
                    ]
                )
            )
    return min(found, default=None)


def _bounded(terms: Sequence[KLTerm]) -> bool:
    bounds = ("cap", "window", "input_clamp", "output_clamp")
    return any(getattr(term, name) is not None for term in terms for name in bounds)


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
        return f"{SAYS[target]}{noise if target != 'zero' else ''}"
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
