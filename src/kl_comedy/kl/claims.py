"""What a term claims to optimize, composed from the facts that its estimator and its correction declare.

A target is a gradient:

- ``sequence_reverse``: of KL(pi || ref) over completions;
- ``sequence_forward``: of KL(ref || pi) over completions;
- ``token_reverse``, ``token_forward``: of the KL of the next token, summed over the prefixes that the behaviour policy
  visits, whose distribution is held fixed;
- ``zero``: none.

A term with another divergence has targets of its own (:func:`own_targets`): ``token_mixture`` and ``sequence_mixture``
for a Jensen-Shannon divergence, and with ``weight`` names that end in ``_weighted``, for the sum of the divergences
times their weights, which are not differentiated. tests/exact enumerates every possible term, and fails both when a
claim here does not hold and when a term hits a target that nothing here claims.
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

# By the target of an estimate per token, that of the same estimate of a completion, which is then like one token.
_AT_SEQUENCE = {"token_reverse": "sequence_reverse", "token_forward": "sequence_forward", "zero": "zero"}


def claimed_target(term: KLTerm, regime: str) -> str | None:
    """The target whose gradient the term's expected gradient equals in a regime, or None.

    ``mixed`` (several policy versions within a completion) obeys the off-policy claims: the sum of the recorded
    log-probs per token is that of the behaviour policy. A capped ratio and recorded log-probs (``anchor``) claim
    nothing off-policy, a term that pulls towards the sampler claims nothing at all.
    """
    # What holds for the reverse KL of a prefix holds for any divergence of a prefix, so one derivation serves all.
    target = _claimed_as_reverse(term, on_policy=regime == "on_policy")
    # Zero is zero for every divergence, and needs no other name.
    if target is None or target == "zero":
        return target
    if term.direction == "mixture":
        target = target.replace("reverse", "mixture")
    if term.weight != "none":
        target += WEIGHTED
    return target


def own_targets(term: KLTerm) -> tuple[str, ...]:
    """The targets of a term's own divergence, where it is not one of :data:`TARGETS`; empty where it is."""
    if term.direction == "mixture":
        names: tuple[str, ...] = ("token_mixture", "sequence_mixture")
    elif term.weight != "none":
        names = ("token_reverse", "sequence_reverse", "token_forward")
    else:
        return ()
    if term.weight != "none":
        names = tuple(name + WEIGHTED for name in names)
    return names


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
                pathwise = target  # an estimator has one derivative: the first such claim is the one
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
    if _options_bias_it(term, on_policy=on_policy):
        return None
    facts = _Facts.of(term, on_policy=on_policy)
    if term.placement == "reward":
        return _in_reward(term, facts)
    if term.window is not None:
        return _windowed_in_loss(term, facts)
    if term.level == "sequence":
        return _sequence_in_loss(term, facts)
    return _token_in_loss(term, facts)


def _options_bias_it(term: KLTerm, *, on_policy: bool) -> bool:
    """Whether an option keeps the term from every target, whatever its estimator and its correction are."""
    if term.reference == "sampler":
        return True
    # The estimate's own gradient ends at a clamp, and no target has a gradient that ends. That of k2 does not end: such
    # a term claims too little.
    if term.input_clamp is not None or term.output_clamp is not None:
        return True
    if term.discount != 1:
        return True
    if on_policy:
        # All ratios are one: a cap below one cuts every one of them, a cap above one and a window cut none.
        return term.cap is not None and term.cap < 1
    return term.cap is not None or term.window is not None or term.anchor == "behaviour"


def claims_of(term: KLTerm, *, on_policy: bool) -> tuple[str, ...]:
    """The claims of the term's estimator that hold with its options in a regime, a mixture's as of the reverse KL."""
    entry = ESTIMATORS.get(term.estimator)
    options = term.estimator_options
    regime = "off_policy"
    if on_policy:
        regime = "on_policy"
    # Some claims hold for some options only, such as a top-k KL that samples its tail.
    needed_options = entry.facts.get("claims_need", {}).get(regime, {})
    for name, values in needed_options.items():
        if options[name] not in values:
            return ()
    return tuple(claim.replace("mixture", "reverse") for claim in entry.claims)


def _windowed_in_loss(term: KLTerm, facts: _Facts) -> str | None:
    """The target of a differentiated estimate times a window of ratios, on-policy.

    Differentiated, a window of ratios is future credit that is cut after ``window`` tokens: one token keeps none.
    """
    has_own_token_alone = term.correction == "prefix" and term.window == 1
    if has_own_token_alone and facts.unbiased and term.gradient == "natural":
        return "token_reverse"
    return None


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
    if facts.scope == "none":
        # The mean of a sampled estimate is over the sampler's tokens; a sum over the vocabulary draws none.
        if facts.on_policy or facts.exact:
            return facts.pathwise
        return None
    if facts.detached_ratio:
        # Without a score term of the ratio the derivative is the estimate's own, averaged over the policy's tokens.
        if facts.on_policy or facts.scope == "token":
            return facts.pathwise
        return None
    if facts.scope == "token":
        return _times_its_token_ratio(term, facts)
    if facts.scope == "sequence" or facts.own_ratio:
        # The score terms of the earlier tokens' ratios are the credit for this estimate.
        if facts.unbiased and term.gradient == "natural":
            return "sequence_reverse"
        return None
    return _times_the_ratio_before(facts)


def _times_its_token_ratio(term: KLTerm, facts: _Facts) -> str | None:
    """The target of an estimate times the differentiated ratio of its own token.

    The ratio's score term turns an unbiased value into an unbiased gradient of the KL at the visited prefixes.
    """
    if facts.exact:
        # The ratio has mean one at each prefix, and so its score term has mean zero.
        return facts.pathwise
    if term.gradient != "natural":
        return None
    if facts.unbiased:
        return "token_reverse"
    if facts.forward:
        return "token_forward"
    return None


def _times_the_ratio_before(facts: _Facts) -> str | None:
    """The target of an estimate times the differentiated ratio of the tokens before its own.

    The ratio brings the credit of earlier tokens; the gradient of the KL of the own step must be the estimate's.
    """
    if not facts.unbiased:
        return None
    if facts.exact:
        return "sequence_reverse"
    if facts.on_policy and facts.pathwise == "token_reverse":
        return "sequence_reverse"
    return None


def _in_reward(term: KLTerm, facts: _Facts) -> str | None:
    """The target of an estimate that is a cost of the completion, detached."""
    if term.credit == "own":
        return _own_credit_in_reward(facts)
    if not _is_whole_when_detached(facts):
        return None
    if facts.on_policy or facts.scope == "sequence":
        return "sequence_reverse"
    # A ratio per cost is that of its own prefix, so a score may only be weighted by costs that come after it.
    per_decision = facts.scope == "prefix" and facts.weights_costs and term.credit == "to_go"
    if per_decision and (facts.exact or facts.own_ratio):
        return "sequence_reverse"
    return None


def _own_credit_in_reward(facts: _Facts) -> str | None:
    """The target of a cost that weights the score of its own token only."""
    if facts.exact:
        if facts.on_policy or facts.scope in ("none", "token"):
            return facts.pathwise
        return None
    if _is_whole_when_detached(facts) and (facts.on_policy or facts.scope == "token"):
        return "token_reverse"
    return None


def _is_whole_when_detached(facts: _Facts) -> bool:
    """Whether a cost alone is unbiased: it misses the estimate's own derivative, which must then have mean zero."""
    return facts.unbiased and (facts.exact or facts.pathwise == "zero")


NO_TARGET = "the gradient of no KL"
"""How every answer, table and page calls an expected gradient that equals no target. This is its one place."""

TARGET_WORDS = {
    "sequence_reverse": "the reverse KL of completions",
    "token_reverse": "the reverse KL of each visited prefix",
    "token_forward": "the forward KL of each visited prefix",
    "sequence_forward": "the forward KL of completions",
    "token_mixture": "the Jensen-Shannon divergence of each visited prefix",
    "sequence_mixture": "the Jensen-Shannon divergences of completions",
    "zero": "nothing: zero-mean noise",
}
"""The divergence of each target, for a line or a cell."""

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
        return NO_TARGET
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
        # A forward KL per token is expected of a term that says forward, and a surprise in one that says reverse (k3).
        expected = ("sequence_reverse", "token_reverse", *own_targets(term))
        if target.removesuffix(WEIGHTED) in expected:
            return []
        if target.startswith("token_forward") and term.direction == "forward":
            return []
    return [f"{term.label()}: {regime.replace('_', '-')} {verdict(term, regime)}"]


def has_no_pull(term: KLTerm, regime: str) -> bool:
    """Whether nothing in the term's expected gradient leads the policy back to its reference.

    Less is asked than of a target: k3 in the loss on stale samples is the gradient of no KL, and has its minimum at the
    reference. False where an estimator claims too little to tell.
    """
    if term.reference == "sampler":
        return False
    target = claimed_target(term, regime)
    if target is not None:
        return target == "zero"
    facts = _Facts.of(term, on_policy=regime == "on_policy")
    # A sum over the vocabulary is differentiated at its own prefix, in either placement.
    if facts.exact:
        return False
    if term.placement == "reward":
        # A cost that is never negative makes a token rarer on both sides of the reference.
        return "nonnegative" in claims_of(term, on_policy=facts.on_policy)
    # The derivative of k1 is the score itself, which knows no reference: noise on fresh samples, and on stale ones a
    # push away from the sampler. The ratio of the token itself, differentiated, adds the value times the score.
    value_weights_score = facts.scope != "none" and facts.own_ratio and not facts.detached_ratio
    return facts.pathwise == "zero" and not value_weights_score


def idle_terms(terms: Iterable[KLTerm], *, off_policy: bool) -> str:
    """The first of ``terms`` in words, where none of them has a pull; empty where one has, or all have beta 0.

    >>> idle_terms([KLTerm("k1", placement="loss")], off_policy=True)
    'k1 in the loss on stale samples'
    """
    regime = "on_policy"
    samples = "fresh"
    if off_policy:
        regime = "off_policy"
        samples = "stale"
    # A beta of 0 is a run without a KL, which somebody asked for.
    acting = [term for term in terms if term.beta != 0]
    if not acting or not all(has_no_pull(term, regime) for term in acting):
        return ""
    return f"{acting[0].estimator} in the {acting[0].placement} on {samples} samples"


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
    # Credit exists in the reward only and gradient in the loss only: each placement has its own axis.
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
