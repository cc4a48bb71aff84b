"""Certificates: what a list of terms optimizes in each regime, by enumeration, in a sentence a user can act on.

A target is *hit* when the exact expected gradient equals it on every instance of the battery: tabular and
shared parameters, several seeds, near the reference and far from it (where clamps and caps act); with a seed,
also in drawn settings (:mod:`kl_comedy.kl.oracle.drawn`). The figures of a certificate are means over the near
instances with shared parameters, as in a language model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import Tensor

from kl_comedy.kl.claims import TARGETS, claimed_target, own_targets, target_meaning
from kl_comedy.kl.oracle.drawn import TOLERANCE as DRAWN_TOLERANCE
from kl_comedy.kl.oracle.drawn import Setting, drawn_settings, worst_case
from kl_comedy.kl.oracle.enumeration import REGIMES, Instance, Tree
from kl_comedy.kl.oracle.gradients import (
    TOLERANCE,
    Moments,
    NotFinite,
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
TOP = Tree.build(vocabulary=5, length=3)
"""Where a term reads top tokens: two of them leave a tail of three."""
BOUNDS = ("cap", "window", "input_clamp", "output_clamp")
BATCHES = (2, 3)
"""Completions of the batches that are enumerated with a baseline of the batch's mean."""
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
    contains: the beta one gets for a beta of 1. ``near_target`` is what is hit while no bound acts. ``worst_error``:
    the largest error from the claimed target, in the drawn setting ``worst_setting``. ``not_finite``: there
    is no gradient where a token is impossible under the reference (1e4 nats), which is left out. ``batch_bias``: with a
    baseline of the batch's mean, by the batch's completions, the relative distance of the expected gradient from that
    without it, which the other figures are of.
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
    worst_error: float = 0.0
    worst_setting: str = ""
    not_finite: bool = False
    batch_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def claim_holds(self) -> bool:
        """Whether the claimed target is hit; of a term with a bound, while no bound acts."""
        return self.claimed in (None, self.target) or (is_bounded(self.terms) and self.claimed == self.near_target)

    @property
    def false_claim(self) -> str | None:
        """How far the enumerated gradient is from the claimed one, as a sentence; None where the claim holds."""
        if self.claim_holds:
            return None
        if self.near_target == self.claimed and self.worst_error > DRAWN_TOLERANCE:
            error = f"is {self.worst_error:.2g} of what it sums up off it in a drawn setting ({self.worst_setting})"
        else:
            error = f"is {self.relative_bias[str(self.claimed)]:.3g} off it (relative)"
        return f"{self.name}, {self.regime}: claims {self.claimed}, and the enumerated gradient {error}"

    @property
    def verdict(self) -> str:
        """One sentence: the target or the bias, then the noise."""
        if self.not_finite:
            finite = dataclasses.replace(self, not_finite=False)
            return f"{finite.verdict}; not finite where a token is impossible under the reference"
        if not self.terms:
            return "no KL term: nothing holds the policy to the reference"
        if pulls_to_sampler(self.terms):
            if self.regime == "on_policy" and self.target is not None:
                return "a trust region: zero expected gradient, as the policy is the sampler"
            away = "" if self.target in (None, "zero") else f" ({self.target})"
            return f"a trust region: pulls towards the sampler{away}, not towards the reference"
        ratio = self.variance_ratio
        noise = "" if ratio is None else f"; {ratio:.3g}x the variance of the least noisy unbiased term"
        if any(term.baseline == "own" for term in self.terms):
            noise += " (its own baseline, which needs a group, is not counted)"
        if self.batch_bias:
            sizes = " and ".join(f"{share:.0%} off with {n}" for n, share in self.batch_bias.items())
            limit = self.near_target or "no target"
            return f"{limit} as the batch grows, {sizes} completions: its mean contains the token's own estimate{noise}"
        if self.target is not None:
            return f"{target_meaning(self.target)}{noise if self.target != 'zero' else ''}"
        if self.near_target is not None:
            return f"{self.near_target} while no bound acts, biased beyond{noise}"
        bias, along = self.relative_bias, self.cosine["sequence_reverse"]
        off = bias["sequence_reverse"]
        nearest = min((t for t in bias if t != "zero"), key=lambda t: bias[t])
        size = "less than 1%" if off < 0.01 else f"{off:.0%}" if off < 10 else f"{off:.0f}x"
        words = f"biased: {size} off the sequence-level reverse KL, cosine {along:.2f}"
        if along < 0:
            words = f"points away: cosine {along:.2f} with the sequence-level reverse KL, {size} off it"
        if nearest != "sequence_reverse" and bias[nearest] < 0.9 * off:
            words += f", nearest to {nearest} ({bias[nearest]:.0%} off)"
        return words + noise

    def row(self) -> dict[str, Any]:
        """Plain data for JSON; what is undefined (a cosine with nothing) is None."""
        return {
            "name": self.name,
            "terms": [term.to_mapping() for term in self.terms],
            "label": " + ".join(term.label() for term in self.terms) or "no KL",
            **{name: getattr(self, name) for name in ("regime", "target", "near_target", "claimed")},
            "kept": self.claim_holds,
            "relative_bias": {name: _plain(value) for name, value in self.relative_bias.items()},
            "cosine": {name: _plain(value) for name, value in self.cosine.items()},
            **{name: getattr(self, name) for name in ("variance", "variance_ratio", "strength", "verdict")},
            **({"batch_bias": dict(self.batch_bias)} if self.batch_bias else {}),
        }


def is_bounded(terms: Sequence[KLTerm]) -> bool:
    """Whether a cap, clamp or window acts far from the reference, or the mean of a batch contains the own sample."""
    return any(term.baseline == "batch" or getattr(term, name) is not None for term in terms for name in BOUNDS)


def pulls_to_sampler(terms: Sequence[KLTerm]) -> bool:
    """Whether every term is measured against the sampler."""
    return bool(terms) and all(term.reference == "sampler" for term in terms)


@dataclass(frozen=True, kw_only=True)
class BatteryInstance:
    """An instance with the gradients of its targets. ``near``: no bound acts; ``shown``: figures average over it.
    ``setting``: how it was drawn, None of a fixed one."""

    instance: Instance
    targets: dict[str, Tensor]
    near: bool = False
    shown: bool = False
    setting: Setting | None = None

    @property
    def tolerance(self) -> float:
        return TOLERANCE if self.setting is None else DRAWN_TOLERANCE


@lru_cache(maxsize=16)
def battery(
    regime: str, *, sampler_is_reference: bool = False, main: Tree = TREE, seed: int | None = None
) -> tuple[BatteryInstance, ...]:
    """The instances on which a certificate of ``regime`` rests; with a seed, the drawn settings too."""

    near = {"distance": DISTANCE, "staleness": STALENESS}
    far = {"distance": FAR_DISTANCE, "staleness": FAR_STALENESS}

    def build(tree: Tree, seed: int, parameters: int | None, noise: dict[str, Any]) -> BatteryInstance:
        is_near = tree is main and noise is near
        instance = Instance.random(tree, regime=regime, seed=seed, parameters=parameters, **noise)
        return with_targets(instance, sampler_is_reference, near=is_near, shown=is_near and bool(parameters))

    nearby = [build(main, seed, parameters, near) for seed in SEEDS for parameters in (None, SHARED)]
    fixed = (*nearby, build(main, 0, SHARED, far), build(LONG, 0, SHARED, near))
    settings = [] if seed is None else drawn_settings(seed)
    return (*fixed, *(with_targets(each.instance(regime), sampler_is_reference, setting=each) for each in settings))


def with_targets(instance: Instance, sampler_is_reference: bool = False, **facts: Any) -> BatteryInstance:
    """An instance with the gradients of all targets."""
    measured = against_the_sampler(instance) if sampler_is_reference else instance
    targets = {name: target_gradient(measured, name) for name in TARGETS}
    return BatteryInstance(instance=instance, targets=targets, **facts)


def certify(
    name: str,
    terms: Sequence[KLTerm],
    *,
    regimes: Sequence[str] = REGIMES,
    seed: int | None = None,
    search_seconds: float = 0.0,
) -> list[Certificate]:
    """One certificate per regime for a list of terms, the largest beta counted as 1.

    With ``seed``, targets must be hit in drawn settings too; ``search_seconds`` per regime go into a search for the
    setting in which the claimed target is missed most.
    """
    return [_certificate(name, tuple(terms), regime, seed, search_seconds) for regime in regimes]


def _certificate(
    name: str, terms: tuple[KLTerm, ...], regime: str, seed: int | None, search_seconds: float
) -> Certificate:
    to_sampler = pulls_to_sampler(terms)
    main = TREE if all(term.top is None for term in terms) else TOP
    own = terms[0] if len(terms) == 1 else None

    def with_own_targets(each: BatteryInstance) -> BatteryInstance:
        names = own_targets(own) if own else ()
        if not names:
            return each
        targets = {name: target_gradient(each.instance, name, own) for name in names}
        return dataclasses.replace(each, targets={**targets, **each.targets})

    instances = [
        with_own_targets(each) for each in battery(regime, sampler_is_reference=to_sampler, main=main, seed=seed)
    ]
    scale = max((initial_beta(term) for term in terms), default=1.0) or 1.0
    whole = [dataclasses.replace(term, beta=initial_beta(term) / scale) for term in terms]
    centred = any(term.baseline == "batch" for term in terms)
    unit = [dataclasses.replace(term, baseline="after") if term.baseline == "batch" else term for term in whole]
    pairs, not_finite = _pairs(instances, unit)
    claimed = claimed_target(terms[0], regime) if len(terms) == 1 else None
    near_target = _target_hit([pair for pair in pairs if pair[0].near], claimed)
    if claimed is not None and search_seconds and not is_bounded(terms):

        def error_of(setting: Setting) -> float:
            each = with_own_targets(with_targets(setting.instance(regime), to_sampler))
            if not_finite and setting.impossible == "reference":
                return 0.0
            return exact_moments(each.instance, terms_loss(unit)).error(each.targets[claimed])

        setting, _, _ = worst_case(error_of, seed=seed or 0, seconds=search_seconds)
        if setting is not None:
            each = with_own_targets(with_targets(setting.instance(regime), to_sampler, setting=setting))
            pairs.append((each, exact_moments(each.instance, terms_loss(unit))))
    target = _target_hit(pairs, near_target)
    if any(term.window is not None and term.window >= LONG.length - 1 for term in terms):
        target = None  # no instance is longer than the window, so none shows what it leaves out
    if centred:
        target = None
    shown = [(each.targets, moments) for each, moments in pairs if each.shown]

    def mean(target: str, figure: str) -> float:
        return sum(moments.figures(targets[target])[figure] for targets, moments in shown) / len(shown)

    compared = claimed or near_target or "sequence_reverse"
    drawn = [(each, moments) for each, moments in pairs if each.setting is not None]
    errors = [(moments.error(each.targets[compared]), str(each.setting)) for each, moments in drawn]
    worst_error, worst_setting = max(errors, default=(0.0, ""))
    variance = mean("sequence_reverse", "variance")
    compared_with = target or near_target or "sequence_reverse"
    best = None if target == "zero" or to_sampler else _least_variance(compared_with, regime, main)
    return Certificate(
        name=name,
        terms=terms,
        regime=regime,
        target=target,
        near_target=near_target,
        claimed=claimed,
        relative_bias={t: mean(t, "relative_bias") for t in instances[0].targets},
        # the cosine of a gradient of rounding errors is no direction
        cosine={t: math.nan if target == "zero" else mean(t, "cosine") for t in instances[0].targets},
        variance=variance,
        variance_ratio=variance / best if best else None,
        strength=mean("sequence_reverse", "strength"),
        worst_error=worst_error,
        worst_setting=worst_setting,
        not_finite=not_finite,
        batch_bias={n: _batch_bias(whole, pairs, n) for n in (BATCHES if centred else ())},
    )


def _pairs(
    instances: Sequence[BatteryInstance], terms: Sequence[KLTerm]
) -> tuple[list[tuple[BatteryInstance, Moments]], bool]:
    """The moments on each instance, and whether some are not finite where a token is impossible under the reference.

    There alone: ``log(exp(-l))`` is right at any log-ratio of a language model, and has no value at 1e4 nats.
    """
    pairs, not_finite = [], False
    for each in instances:
        try:
            pairs.append((each, exact_moments(each.instance, terms_loss(terms))))
        except NotFinite:
            if each.setting is None or each.setting.impossible != "reference":
                raise
            not_finite = True
    return pairs, not_finite


def _batch_bias(terms: Sequence[KLTerm], pairs: Sequence[tuple[BatteryInstance, Moments]], completions: int) -> float:
    """The mean distance from the expected gradients in ``pairs``, relative, where so many completions are a batch."""
    return sum(
        exact_moments(each.instance, terms_loss(terms), group_size=completions).relative_bias(moments.gradient_D)
        for each, moments in pairs
        if each.shown
    ) / sum(each.shown for each, _ in pairs)


def _target_hit(pairs: Sequence[tuple[BatteryInstance, Moments]], preferred: str | None) -> str | None:
    """The target hit on every instance; where several coincide, the preferred one."""
    hits = [
        name
        for name in pairs[0][0].targets
        if all(moments.equals(each.targets[name], each.tolerance) for each, moments in pairs)
    ]
    return preferred if preferred in hits else next(iter(hits), None)


@lru_cache(maxsize=64)
def _least_variance(target: str, regime: str, main: Tree) -> float | None:
    """The variance of the least noisy yardstick that hits a target in a regime, in the certificate's unit."""
    variances = []
    for term in YARDSTICKS.get(target, ()):
        pairs = [(each, exact_moments(each.instance, terms_loss((term,)))) for each in battery(regime, main=main)]
        if _target_hit(pairs, target) == target:
            shown = [moments.figures(each.targets["sequence_reverse"]) for each, moments in pairs if each.shown]
            variances.append(sum(figures["variance"] for figures in shown) / len(shown))
    return min(variances, default=None)


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
