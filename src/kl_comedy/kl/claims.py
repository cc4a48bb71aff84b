"""What a term claims to optimize, composed from the facts its estimator and correction declare.

Targets (gradients of): ``sequence_reverse`` KL(pi || ref) over completions; ``token_reverse`` and
``token_forward`` the KL per prefix summed over the prefixes the behaviour policy visits, their
distribution held fixed; ``sequence_forward`` KL(ref || pi) over completions; ``zero``. A term whose divergence is
another one has targets of its own (:func:`own_targets`), as ``token_mixture``, for a Jensen-Shannon divergence the same
as ``token_reverse``, ``sequence_mixture``, its sum over the policy's completions, and with ``weight`` each of them with
the name ``_weighted``: the sum of the divergences times their weights, which are not differentiated. tests/exact
enumerates every possible term and fails both when a claim here does not hold and when a target is hit
that nothing here claims.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kl_comedy.errors import UserError
from kl_comedy.kl.term import ANCHORS, CREDITS, GRADIENTS, LEVELS, KLTerm
from kl_comedy.registry import CORRECTIONS, ESTIMATORS

TARGETS = ("sequence_reverse", "token_reverse", "token_forward", "sequence_forward", "zero")
REGIMES = ("on_policy", "off_policy", "mixed")

WEIGHTED = "_weighted"
"""Ending of the name of a target whose divergences are weighted by the token's certainty."""

_AT_SEQUENCE = {"token_reverse": "sequence_reverse", "token_forward": "sequence_forward", "zero": "zero"}


def claimed_target(term: KLTerm, regime: str) -> str | None:
    """The target whose gradient the term's expected gradient equals in a regime, or None.

    What holds of the reverse KL of a prefix holds of any divergence of a prefix, so the claims of another one are
    derived as those of the reverse KL.
    ``mixed`` (several policy versions within a completion) obeys the off-policy claims: the product of
    the recorded per-token behaviour log-probs is the behaviour policy. A capped ratio, a moving anchor
    or another reference than the one compared against claims nothing off-policy.
    """
    target = _claimed_as_reverse(term, on_policy=regime == "on_policy")
    if target is None or target == "zero":
        return target
    if term.direction == "mixture":
        target = target.replace("reverse", "mixture")
    if term.weight != "none":
        target += WEIGHTED
    return target


def own_targets(term: KLTerm) -> tuple[str, ...]:
    """The targets of a term's own divergence, where it is none of those of :data:`TARGETS`."""
    if term.direction == "mixture":
        names: tuple[str, ...] = ("token_mixture", "sequence_mixture")
    elif term.weight != "none":
        names = ("token_reverse", "sequence_reverse", "token_forward")
    else:
        names = ()
    if term.weight == "none":
        return names
    return tuple(name + WEIGHTED for name in names)


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What the estimator and the correction of a term declare, for one regime.

    ``exact``: the estimate is a sum over the vocabulary, so a differentiated one brings the whole gradient of its
    prefix. ``unbiased``, ``forward``: the value is an unbiased estimate of the reverse (forward) KL of the prefix.
    ``pathwise``: the target of the expected derivative of the estimate itself, without a score term; None where no
    target has it. ``scope``: which tokens' ratios the correction multiplies (``none``, ``token``, ``prefix``,
    ``sequence``). ``own_ratio``: whether a prefix's ratios include that of the token itself. ``detached_ratio``: the
    ratio has no gradient. ``weights_costs``: each token's cost is weighted by its ratio, not the score.
    """

    on_policy: bool
    exact: bool
    unbiased: bool
    forward: bool
    pathwise: str | None
    scope: str
    own_ratio: bool
    detached_ratio: bool
    weights_costs: bool

    @classmethod
    def of(cls, term: KLTerm, *, on_policy: bool) -> _Facts:
        claims = claims_of(term, on_policy=on_policy)
        pathwise = None
        for claim in claims:
            kind, _, target = claim.partition(":")
            if kind == "pathwise":
                pathwise = target
                break
        if term.gradient == "k2":
            # The value of another estimator with the gradient of k2, whose derivative is l times the score.
            pathwise = "token_reverse"
        ratio = CORRECTIONS.get(term.correction).facts
        return cls(
            on_policy=on_policy,
            exact=term.needs != "log_ratio",
            unbiased="value:reverse" in claims,
            forward="value:forward" in claims,
            pathwise=pathwise,
            scope=str(ratio.get("scope")),
            own_ratio=bool(ratio.get("own", True)),
            detached_ratio=bool(ratio.get("detached")),
            weights_costs=ratio.get("weights") == "cost",
        )


def _claimed_as_reverse(term: KLTerm, *, on_policy: bool) -> str | None:
    """:func:`claimed_target` as if the divergence were the reverse KL."""
    if term.reference == "sampler":
        return None
    if term.input_clamp is not None or term.output_clamp is not None:
        return None
    changes_ratios = term.cap is not None or term.window is not None or term.anchor == "behaviour"
    if changes_ratios and not on_policy:
        return None
    if term.cap is not None and term.cap < 1:
        return None  # it cuts the ratio of 1 that every token has on-policy
    if term.discount != 1:
        return None
    facts = _Facts.of(term, on_policy=on_policy)
    if term.window is not None and term.placement == "loss":
        # Differentiated, a window of ratios is future credit cut after ``window`` tokens: one token keeps none.
        keeps_one_token = term.correction == "prefix" and term.window == 1
        if keeps_one_token and facts.unbiased and term.gradient == "natural":
            return "token_reverse"
        return None
    if term.placement == "reward":
        return _in_reward(term, facts)
    if term.level == "sequence":
        return _sequence_in_loss(term, facts)
    return _token_in_loss(term, facts)


def claims_of(term: KLTerm, *, on_policy: bool) -> tuple[str, ...]:
    """The claims of the term's estimator that hold with its options in a regime, a mixture's as of the reverse KL."""
    entry = ESTIMATORS.get(term.estimator)
    options = term.estimator_options
    regime = "off_policy"
    if on_policy:
        regime = "on_policy"
    needed_options = entry.facts.get("claims_need", {}).get(regime, {})
    for name, values in needed_options.items():
        if options[name] not in values:
            return ()
    return tuple(claim.replace("mixture", "reverse") for claim in entry.claims)


def _sequence_in_loss(term: KLTerm, facts: _Facts) -> str | None:
    """The target of a differentiated estimate of the whole completion's KL."""
    if term.correction == "none":
        if not facts.on_policy or facts.pathwise is None:
            return None
        return _AT_SEQUENCE.get(facts.pathwise)
    # The sequence ratio is differentiated: its score term turns an unbiased value into an unbiased gradient.
    if facts.unbiased and term.gradient == "natural":
        return "sequence_reverse"
    return None


def _token_in_loss(term: KLTerm, facts: _Facts) -> str | None:
    """The target of a differentiated estimate per token, times the ratio of the term's correction."""
    natural = term.gradient == "natural"
    if facts.scope == "none":
        if facts.on_policy or facts.exact:
            return facts.pathwise
        return None
    if facts.detached_ratio:
        if facts.on_policy or facts.scope == "token":
            return facts.pathwise
        return None
    if facts.scope == "token":
        # The ratio is differentiated: its score term turns an unbiased value into an unbiased gradient.
        if facts.exact:
            return facts.pathwise
        if not natural:
            return None
        if facts.unbiased:
            return "token_reverse"
        if facts.forward:
            return "token_forward"
        return None
    if facts.scope == "sequence" or facts.own_ratio:
        if facts.unbiased and natural:
            return "sequence_reverse"
        return None
    # The ratio stops before the token, so the own step must bring the gradient of its KL itself.
    if not facts.unbiased:
        return None
    if facts.exact:
        return "sequence_reverse"
    if facts.on_policy and facts.pathwise == "token_reverse":
        return "sequence_reverse"
    return None


def _in_reward(term: KLTerm, facts: _Facts) -> str | None:
    """The target of an estimate that is a cost of the completion, detached."""
    # A detached cost misses the path-wise part, so a sampled one is right only where that part is zero.
    complete = facts.unbiased and (facts.exact or facts.pathwise == "zero")
    if term.credit == "own":
        if facts.exact:
            if facts.on_policy or facts.scope in ("none", "token"):
                return facts.pathwise
            return None
        if complete and (facts.on_policy or facts.scope == "token"):
            return "token_reverse"
        return None
    if not complete:
        return None
    if facts.on_policy or facts.scope == "sequence":
        return "sequence_reverse"
    per_decision = facts.scope == "prefix" and facts.weights_costs and term.credit == "to_go"
    if per_decision and (facts.exact or facts.own_ratio):
        return "sequence_reverse"
    return None


TARGET_MEANINGS = {
    "sequence_reverse": "optimizes the sequence-level reverse KL, what the objective states",
    "token_reverse": "optimizes the reverse KL of each visited prefix; ignores how a token changes later prefixes",
    "token_forward": "optimizes the forward KL of each visited prefix, not the reverse KL its value estimates",
    "sequence_forward": "optimizes the sequence-level forward KL: another objective, exploding variance",
    "token_mixture": "optimizes the Jensen-Shannon divergence of each visited prefix, prefixes held fixed",
    "sequence_mixture": "optimizes the Jensen-Shannon divergences of all prefixes of the policy's completions",
    "zero": "zero expected gradient: no regularization, only noise that grows with beta and length",
}


def target_meaning(target: str) -> str:
    """What a target optimizes, in words."""
    base = target.removesuffix(WEIGHTED)
    meaning = TARGET_MEANINGS[base]
    if base != target:
        meaning += ", weighted by the tokens' certainty, which is held fixed"
    return meaning


def verdict(term: KLTerm, regime: str) -> str:
    """One sentence for a user: the claimed target in a regime, or that there is none; a plugin may claim too little.

    >>> verdict(KLTerm("k1", placement="loss"), "on_policy")
    'zero: zero expected gradient: no regularization, only noise that grows with beta and length'
    """
    target = claimed_target(term, regime)
    if target is not None:
        return f"{target}: {target_meaning(target)}"
    parts = (ESTIMATORS.get(term.estimator), CORRECTIONS.get(term.correction))
    if all(part.origin.startswith("kl_comedy.") for part in parts):
        # The exact tests fail where a built-in part hits a target that it does not claim, so no claim is no target.
        return "none: a biased gradient that equals no target"
    return "not claimed: kl-comedy certify computes what it optimizes"


def term_warnings(term: KLTerm, *, off_policy: bool) -> list[str]:
    """Warnings for a user who trains with this term; empty where it regularizes as its value suggests."""
    if term.reference == "sampler" or term.beta == 0:
        return []
    regime = "on_policy"
    if off_policy:
        regime = "off_policy"
    target = claimed_target(term, regime)
    if target is not None:
        expected = ("sequence_reverse", "token_reverse", *own_targets(term))
        if target.removesuffix(WEIGHTED) in expected:
            return []
        if target.startswith("token_forward") and term.direction == "forward":
            return []
    return [f"{term.label()}: its target {regime.replace('_', '-')} is {verdict(term, regime)}"]


def all_terms(estimators: Iterable[str] | None = None, corrections: Iterable[str] | None = None) -> list[KLTerm]:
    """All terms at beta 1 without caps, clamps and windows: estimator x level x correction x anchor x placement.

    ``None`` takes every registered name, so a new part is in the matrix the day it registers.
    """
    if estimators is None:
        estimator_names = ESTIMATORS.names()
    else:
        estimator_names = [ESTIMATORS.get(name).name for name in estimators]
    if corrections is None:
        correction_names = CORRECTIONS.names()
    else:
        correction_names = [CORRECTIONS.get(name).name for name in corrections]
    placements: list[dict[str, Any]] = [{"placement": "reward", "credit": credit} for credit in CREDITS]
    placements += [{"placement": "loss", "gradient": gradient} for gradient in GRADIENTS]
    terms = []
    for estimator, level, correction, anchor, placement in itertools.product(
        estimator_names, LEVELS, correction_names, ANCHORS, placements
    ):
        try:
            terms.append(KLTerm(estimator, level=level, correction=correction, anchor=anchor, **placement))
        except UserError:
            continue  # an impossible combination (kl/term_rules.py)
    return terms
