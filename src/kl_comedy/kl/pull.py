"""The pull of a KL term: how its force on a token grows with the distance from the reference.

With ``l = log pi - log ref`` of a sampled token (nats), the force is the factor of the token's score in the gradient of
the term, per unit of beta: positive lowers the token's probability. It is read from the surrogate itself, over a grid
of distances, and then classified; so a new estimator or clamp has a pull without further code.

Above the reference (``l > 0``) and below it the growth may differ. *Per sample* it is the force on a token that was
drawn. *Expected*, on fresh samples, a token that fell below the reference is drawn less often, by ``exp(l)``; on stale
samples without a ratio it is drawn as often as before, so that the growth is that per sample.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kl_comedy.kl.surrogate import kl_surrogate
from kl_comedy.kl.term import KLTerm
from kl_comedy.registry import CORRECTIONS

FARTHEST = 32.0
"""Nats: beyond the clamps that libraries have (10 and 20), and ``exp`` is still far from the end of float64."""
STEP = 0.125
ZERO = 1e-9
HARDLY = 1e-12
"""Nats by which the other tokens move when a rare one does."""


@dataclass(frozen=True)
class Pull:
    """The growth of the force on one side of the reference.

    ``growth``: ``none``, ``fades`` (goes back to 0), ``bounded``, ``linear``, ``quadratic`` or ``exponential``, without
    clamps. ``limit``: the largest force per beta where it is bounded. ``cut``: nats from which a clamp leaves no force;
    None where none does. ``away``: whether it moves the token further from the reference.
    """

    growth: str
    limit: float | None = None
    cut: float | None = None
    away: bool = False

    @property
    def words(self) -> str:
        """As ``at most beta`` or ``linear (0 from 5 nats)``."""
        text = self.growth
        if self.growth == "bounded":
            size = f"{self.limit:.2g} "
            if size == "1 ":
                size = ""
            text = f"at most {size}beta"
        if self.away:
            text += " away"
        if self.cut is not None:
            text += f" (0 from {self.cut:.3g} nats)"
        return text


def force(term: KLTerm, distance_N: Tensor, *, expected: bool = False) -> Tensor:
    """The force per beta on a token drawn on policy, at log-ratios ``distance_N`` (nats), ``[N]`` in float64.

    ``expected``: its share of the mean over fresh samples, in draws of a token that is not below the reference, where
    the token is rare. For terms that read the log-ratio of the sampled token; the completion is that one token.
    """
    force_N = _force_per_sample(term, distance_N)
    if not expected:
        return force_N
    # The scores of fresh samples have mean zero, and so has any constant times them: what counts is the force beyond
    # that on the other tokens. What a rare token gains they lose, so little that only a step at the reference shows it.
    others_N = _force_per_sample(term, -HARDLY * distance_N.sign())
    return (force_N - others_N) * distance_N.clamp(max=0.0).exp()


def _force_per_sample(term: KLTerm, distance_N: Tensor) -> Tensor:
    logp_BT = distance_N.double()[:, None].clone().requires_grad_(True)
    zeros_BT = torch.zeros_like(logp_BT).detach()
    surrogate_BT = kl_surrogate(
        term,
        logp_BT=logp_BT,
        ref_logp_BT=zeros_BT,
        # Fresh: every ratio is 1, and only its derivative acts.
        behaviour_logp_BT=logp_BT.detach(),
        mask_BT=torch.ones_like(zeros_BT, dtype=torch.bool),
    )
    (force_BT,) = torch.autograd.grad(surrogate_BT.sum(), logp_BT)
    return force_BT[:, 0]


def pulls(term: KLTerm, *, expected: bool) -> tuple[Pull, Pull] | None:
    """The pull above and below the reference; None for a term that reads whole distributions.

    ``expected`` is that of fresh samples, or of stale ones with the token's ratio; otherwise per sample.
    """
    if term.needs != "log_ratio" or term.weight != "none" or term.baseline == "exact":
        return None
    # A centred score takes a constant of the prefix out of the mean force, as a baseline does: not its growth.
    # By the distance a force is the same, whichever policy is the reference.
    bare = dataclasses.replace(term, score_centring=None, reference="initial")
    above = _pull(bare, 1.0, expected)
    below = _pull(bare, -1.0, expected)
    if term.reference == "sampler" and term.cap is not None and _drops_by_its_own_ratio(term):
        # The ratio that a mask bounds is then exp of the distance itself.
        dropped_from = max(math.log(term.cap), 0.0)
        if above.cut is None or dropped_from < above.cut:
            above = dataclasses.replace(above, cut=dropped_from)
    return above, below


def _drops_by_its_own_ratio(term: KLTerm) -> bool:
    return term.cap_mode == "mask" and CORRECTIONS.get(term.correction).facts.get("scope") == "token"


def is_idle(term: KLTerm) -> bool:
    """Whether nothing in the term's expected gradient leads the policy back to its reference, on samples of any age.

    Less is asked than of a target: k3 in the loss on stale samples hits none, and has its minimum at the reference.
    False for a pull to the sampler, and for a term that reads whole distributions: it is differentiated at the prefix.
    """
    if term.reference == "sampler" or term.needs != "log_ratio":
        return False
    # A certainty is a factor from 0 to 1, and a baseline a constant of the prefix: neither turns a force round.
    bare = dataclasses.replace(term, weight="none", weight_power=1.0, score_centring=None)
    if term.placement == "reward":
        bare = dataclasses.replace(bare, baseline="after")
    # A constant, as k1 in the loss has, is noise on fresh samples and a push away from stale ones, and no pull.
    sides = [_toward(bare, side, expected=True) for side in (1.0, -1.0)]
    leads_back = any(float(toward_N.max()) > ZERO for toward_N in sides)
    # A cost that is never negative makes a token rarer on both sides of the reference.
    drives_away = any(float(toward_N.min()) < -ZERO and float(toward_N.max()) < ZERO for toward_N in sides)
    return drives_away or not leads_back


def idle_terms(terms: Iterable[KLTerm], *, off_policy: bool) -> str:
    """The first of ``terms`` in words, where all of them are idle; empty where one acts, or all have beta 0.

    >>> idle_terms([KLTerm("k1", placement="loss")], off_policy=True)
    'k1 in the loss on stale samples'
    """
    samples = "fresh"
    if off_policy:
        samples = "stale"
    # A beta of 0 is a run without a KL, which somebody asked for.
    acting = [term for term in terms if term.beta != 0]
    if not acting or not all(is_idle(term) for term in acting):
        return ""
    return f"{acting[0].estimator} in the {acting[0].placement} on {samples} samples"


def _pull(term: KLTerm, side: float, expected: bool) -> Pull:
    """The pull above (``side`` 1) or below (-1) the reference."""
    toward_N = _toward(term, side, expected)
    growth, limit = _growth(toward_N)
    away = growth != "none" and float(toward_N[toward_N.abs().argmax()]) < 0
    return Pull(growth, limit, _cut(term, side), away)


def _toward(term: KLTerm, side: float, expected: bool) -> Tensor:
    """The force toward the reference, ``[N]``, at distances from near to far above (``side`` 1) or below (-1) it."""
    distance_N = torch.arange(STEP, FARTHEST + STEP / 2, STEP, dtype=torch.float64)
    # Its growth is that without clamps, which may act before it shows.
    unclamped = dataclasses.replace(term, input_clamp=None, output_clamp=None)
    return side * force(unclamped, side * distance_N, expected=expected)


def _growth(force_N: Tensor) -> tuple[str, float | None]:
    """The growth of a force over distances from near to far, and its limit where it is bounded."""
    size_N = force_N.abs()
    limit = float(size_N.max())
    if limit < ZERO:
        return "none", None
    far = float(size_N[-1])
    if far < 0.1 * limit:
        return "fades", None
    half = float(size_N[len(size_N) // 2 - 1])
    if half < ZERO:
        # It begins beyond half of the distance, as behind an estimator's own clamp: too late to see it grow.
        return "bounded", limit
    # From half of the distance to all of it, a power of the distance grows by that power of 2.
    power = math.log2(far / half)
    if power < 0.3:
        return "bounded", limit
    if power < 1.5:
        return "linear", None
    if power < 2.5:
        return "quadratic", None
    return "exponential", None


def _cut(term: KLTerm, side: float) -> float | None:
    """The distance (nats) from which a clamp leaves no force, by bisection; None where it acts everywhere."""
    acting, ended = 0.0, FARTHEST
    is_clamped = term.input_clamp is not None or term.output_clamp is not None
    # A cost that is clamped is a constant beyond, and still a force.
    if not is_clamped or _acts(term, side * ended):
        return None
    for _ in range(40):
        middle = (acting + ended) / 2
        if _acts(term, side * middle):
            acting = middle
        else:
            ended = middle
    return acting


def _acts(term: KLTerm, distance: float) -> bool:
    return bool(force(term, torch.tensor([distance], dtype=torch.float64)) != 0)


def pull_in_words(term: KLTerm, regime: str) -> str:
    """The pull on samples of a regime, in a line; empty where :func:`pulls` has none.

    Fresh samples have no distance from the sampler, and a KL to it has no pull there.

    >>> pull_in_words(KLTerm("k3", placement="loss"), "off_policy")
    'above the reference at most beta, below it exponential'
    """
    if term.reference == "sampler" and regime == "on_policy":
        return "none"
    # A ratio that contains the token's own makes a stale sample like a fresh one.
    ratio = CORRECTIONS.get(term.correction).facts
    has_own_ratio = ratio.get("scope") != "none" and bool(ratio.get("own", True))
    sides = pulls(term, expected=regime == "on_policy" or has_own_ratio)
    if sides is None:
        return ""
    above, below = sides
    if above.growth == below.growth == "none":
        return "none"
    reference = "the sampler" if term.reference == "sampler" else "the reference"
    return f"above {reference} {above.words}, below it {below.words}"
