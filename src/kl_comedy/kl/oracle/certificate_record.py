"""The record of a certificate and its sentences. Reading one needs no torch: :mod:`.certificate` makes them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kl_comedy.kl.beta import first_value
from kl_comedy.kl.claims import (
    NO_TARGET,
    SELF_WORDS,
    OffPolicyKind,
    dropped_token_words,
    kind_of_terms,
    target_meaning,
    targets_of,
)
from kl_comedy.kl.term import KLTerm

BATTERY_WORDS = (
    "random policies of 3 tokens and up to 4 steps, 0.02 to 0.06 nats of KL per prefix from the reference; errors grow "
    "with the standard deviation of the log-ratio, targets and kinds hold in general"
)
"""Where the figures of a certificate come from: below every table that has them."""

BOUNDS = ("cap", "window", "input_clamp", "output_clamp")


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """One row: a configuration in one regime."""

    name: str
    terms: tuple[KLTerm, ...]
    regime: str
    target: str | None
    """The target that is hit on every instance."""
    near_target: str | None
    """The target that is hit while no bound acts."""
    claimed: str | None
    """The target that the term claims; None for several terms."""
    relative_bias: dict[str, float]
    cosine: dict[str, float]
    """Both against each target."""
    variance: float
    """The trace variance of one completion's gradient, over the square of the gradient of :attr:`stated`."""
    variance_ratio: float | None
    """That over the variance of the least noisy unbiased term for the target that is hit; where none is hit, for
    :attr:`stated`."""
    strength: float
    """The multiple of the gradient of :attr:`stated` that it contains: the beta one gets for a beta of 1."""
    worst_error: float = 0.0
    """The largest error from the claimed target, in the drawn setting :attr:`worst_setting`."""
    worst_setting: str = ""
    not_finite: bool = False
    """Whether there is no gradient where a token is impossible under the reference (1e4 nats), which is left out."""
    pull: str = ""
    """How the force of one term on a token grows with the distance (:mod:`kl_comedy.kl.pull`), in words; empty for
    several terms, and for one that reads whole distributions."""
    batch_bias: Mapping[int, float] = field(default_factory=dict)
    """With a baseline of the batch's mean, by the number of completions in the batch: the relative distance of the
    expected gradient from that without the baseline, which the other figures are of."""

    @property
    def stated(self) -> str:
        """The target that bias, cosine, variance and strength are shown against."""
        return stated_target(self.terms)

    @property
    def kind(self) -> OffPolicyKind | None:
        """What a gradient that hits no target is; None where that is not proved."""
        if self.target is not None or self.near_target is not None:
            return None
        return kind_of_terms(self.terms, self.regime)

    @property
    def optimizes(self) -> str:
        """The target that is hit, if only while no bound acts, else the name of the kind, for the column of a table."""
        if self.target is not None:
            return self.target
        if self.near_target is not None:
            return f"{self.near_target}, bounded"
        if self.kind is not None:
            return self.kind.kind
        return NO_TARGET

    @property
    def untargeted(self) -> str:
        """What a gradient that hits no target is, in words."""
        if self.kind is not None:
            return self.kind.words
        return NO_TARGET

    @property
    def claim_holds(self) -> bool:
        """Whether the claimed target is hit; for a term with a bound, while no bound acts."""
        # Nothing is claimed, or it was hit.
        if self.claimed is None or self.claimed == self.target:
            return True
        return is_bounded(self.terms) and self.claimed == self.near_target

    @property
    def false_claim(self) -> str | None:
        """How far the enumerated gradient is from the claimed one, as a sentence; None where the claim holds."""
        if self.claim_holds:
            return None
        from kl_comedy.kl.oracle.drawn import TOLERANCE as DRAWN_TOLERANCE  # with torch

        missed_when_drawn = self.near_target == self.claimed and self.worst_error > DRAWN_TOLERANCE
        if missed_when_drawn:
            distance = f"{self.worst_error:.2g} of what is summed up, in a drawn setting ({self.worst_setting})"
        else:
            distance = f"{self.relative_bias[str(self.claimed)]:.3g} of the target's size"
        claim = f"{self.name}, {self.regime}: claims {self.claimed}"
        return f"{claim}, and the enumerated gradient differs from it by {distance}"

    @property
    def verdict(self) -> str:
        """One sentence: the target or the bias, then the noise."""
        if self.not_finite:
            finite = dataclasses.replace(self, not_finite=False)
            return f"{finite.verdict}; not finite where a token is impossible under the reference"
        if not self.terms:
            return "no KL term: nothing holds the policy to the reference"
        dropped = [words for words in map(dropped_token_words, self.terms) if words]
        return "; ".join([self._judgement(), *dropped])

    def _judgement(self) -> str:
        """The target or the bias, then the noise."""
        if self.batch_bias:
            sizes = " and ".join(f"{bias:.0%} off with {completions}" for completions, bias in self.batch_bias.items())
            limit = self.near_target or "no target"
            reason = "its mean contains the token's own estimate"
            return f"{limit} as the batch grows, {sizes} completions: {reason}{self._noise()}"
        if self.target == "zero":
            if pulls_to_sampler(self.terms) and self.regime == "on_policy":
                return SELF_WORDS
            # A multiple of the noise of "the least noisy unbiased term" for zero would divide by nothing.
            return target_meaning(self.target)
        if self.target is not None:
            return f"{target_meaning(self.target)}{self._noise()}"
        if self.near_target is not None:
            return f"{self.near_target} while no bound acts, biased beyond{self._noise()}"
        if self.kind is not None:
            return f"{self.kind.words}; {self._bias()}{self._noise()}"
        return f"{self._bias()}{self._noise()}"

    def _noise(self) -> str:
        """The end of a verdict: the variance as a multiple of the best; empty where none is known."""
        noise = ""
        if self.variance_ratio is not None:
            noise = f"; {self.variance_ratio:.3g}x the variance of the least noisy unbiased term"
        if any(term.baseline == "own" for term in self.terms):
            noise += " (its own baseline, which needs a group, is not counted)"
        return noise

    def _bias(self) -> str:
        """How far a gradient that equals no target is from the sequence-level reverse KL, and what it is nearest to."""
        error = self.relative_bias[self.stated]
        cosine = self.cosine[self.stated]
        stated = "the sequence-level reverse KL"
        if pulls_to_sampler(self.terms):
            stated += " to the sampler"
        if error < 0.01:
            size = "less than 1%"
        elif error < 10:
            size = f"{error:.0%}"
        else:
            size = f"{error:.0f}x"
        if cosine < 0:
            text = f"points away: cosine {cosine:.2f} with {stated}, {size} off it"
        else:
            text = f"biased: {size} off {stated}, cosine {cosine:.2f}"
        divergences = [target for target in self.relative_bias if target != "zero"]
        nearest = min(divergences, key=lambda target: self.relative_bias[target])
        # Nearly as near is not worth a word: the sentence names another target where it is nearer by a tenth.
        if nearest != self.stated and self.relative_bias[nearest] < 0.9 * error:
            text += f", nearest to {nearest} ({self.relative_bias[nearest]:.0%} off)"
        return text

    def row(self) -> dict[str, Any]:
        """Plain data for JSON; undefined values (the cosine with a zero gradient) are None.

        Names and order are those that stored certificates and the pages of results/ have.
        """
        row: dict[str, Any] = {
            "name": self.name,
            "terms": [term.to_mapping() for term in self.terms],
            "label": " + ".join(term.label() for term in self.terms) or "no KL",
            "regime": self.regime,
            "target": self.target,
            "near_target": self.near_target,
            "claimed": self.claimed,
            "kept": self.claim_holds,
            "relative_bias": {name: finite_or_none(value) for name, value in self.relative_bias.items()},
            "cosine": {name: finite_or_none(value) for name, value in self.cosine.items()},
            "variance": self.variance,
            "variance_ratio": self.variance_ratio,
            "strength": self.strength,
            "verdict": self.verdict,
        }
        if self.kind is not None:
            row["kind"] = self.kind.kind
            row["function"] = self.kind.function
        if self.pull:
            row["pull"] = self.pull
        if self.batch_bias:
            row["batch_bias"] = dict(self.batch_bias)
        return row


def relative_terms(terms: Sequence[KLTerm]) -> tuple[KLTerm, ...]:
    """The terms with betas relative to the largest, which counts as 1.

    Figures are per unit of beta, so that a certificate does not depend on how strong the terms are.
    """
    largest = max((first_value(term.beta) for term in terms), default=1.0)
    if largest == 0:
        largest = 1.0
    return tuple(dataclasses.replace(term, beta=first_value(term.beta) / largest) for term in terms)


def is_bounded(terms: Sequence[KLTerm]) -> bool:
    """Whether a cap, clamp or window acts far from the reference, or the mean of a batch contains the own sample."""
    for term in terms:
        if term.baseline == "batch":
            return True
        if any(getattr(term, name) is not None for name in BOUNDS):
            return True
    return False


def stated_target(terms: Sequence[KLTerm]) -> str:
    """The reverse KL of completions, to the sampler where all terms are measured against it."""
    return targets_of(terms)[0]


def pulls_to_sampler(terms: Sequence[KLTerm]) -> bool:
    """Whether every term is measured against the sampler."""
    return bool(terms) and all(term.reference == "sampler" for term in terms)


def finite_or_none(value: float) -> float | None:
    """The value, None where it is infinite or not a number: JSON has neither."""
    if math.isfinite(value):
        return value
    return None
