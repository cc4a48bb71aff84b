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
from typing import Any

from kl_comedy.errors import UserError
from kl_comedy.kl.term import ANCHORS, CREDITS, GRADIENTS, LEVELS, KLTerm
from kl_comedy.registry import CORRECTIONS, ESTIMATORS, Entry

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
    target = _claimed_as_reverse(term, regime)
    if target is None or target == "zero":
        return target
    target = target.replace("reverse", "mixture") if term.direction == "mixture" else target
    return target if term.weight == "none" else target + WEIGHTED


def own_targets(term: KLTerm) -> tuple[str, ...]:
    """The targets of a term's own divergence, where it is none of those of :data:`TARGETS`."""
    if term.direction == "mixture":
        names: tuple[str, ...] = ("token_mixture", "sequence_mixture")
    else:
        names = () if term.weight == "none" else ("token_reverse", "sequence_reverse", "token_forward")
    return names if term.weight == "none" else tuple(name + WEIGHTED for name in names)


def _claimed_as_reverse(term: KLTerm, regime: str) -> str | None:
    on_policy = regime == "on_policy"
    if term.reference == "sampler" or term.input_clamp is not None or term.output_clamp is not None:
        return None
    if not on_policy and (term.cap is not None or term.window is not None or term.anchor == "behaviour"):
        return None
    if (term.cap is not None and term.cap < 1) or term.discount != 1:
        return None
    claims = claims_of(term, regime)
    unbiased = "value:reverse" in claims
    if term.window is not None and term.placement == "loss":
        # Differentiated, a window of ratios is future credit cut after ``window`` tokens: one token keeps none.
        one_token = term.correction == "prefix" and term.window == 1
        return "token_reverse" if one_token and unbiased and term.gradient == "natural" else None
    pathwise = next((claim.split(":")[1] for claim in claims if claim.startswith("pathwise:")), None)
    if term.gradient == "k2":
        pathwise = "token_reverse"
    if term.placement == "loss":
        return _in_loss(term, on_policy, unbiased, pathwise, forward="value:forward" in claims)
    return _in_reward(term, on_policy, unbiased, pathwise)


def claims_of(term: KLTerm, regime: str) -> tuple[str, ...]:
    """The claims of the term's estimator that hold with its options in a regime, a mixture's as of the reverse KL."""
    entry, options = ESTIMATORS.get(term.estimator), term.estimator_options
    needed = entry.facts.get("claims_need", {}).get("on_policy" if regime == "on_policy" else "off_policy", {})
    if not all(options[name] in values for name, values in needed.items()):
        return ()
    return tuple(claim.replace("mixture", "reverse") for claim in entry.claims)


def _in_loss(term: KLTerm, on_policy: bool, unbiased: bool, pathwise: str | None, *, forward: bool) -> str | None:
    exact = term.needs != "log_ratio"
    name = term.correction
    if term.level == "sequence":
        if name == "none":
            return _AT_SEQUENCE.get(pathwise or "") if on_policy else None
        return "sequence_reverse" if unbiased and term.gradient == "natural" else None
    ratio = CORRECTIONS.get(name).facts
    scope = ratio.get("scope")
    if scope == "none":
        return pathwise if on_policy or exact else None
    if ratio.get("detached"):
        return pathwise if on_policy or scope == "token" else None
    if scope == "token":
        # The ratio is differentiated: its score term turns an unbiased value into an unbiased gradient.
        if exact:
            return pathwise
        if term.gradient != "natural":
            return None
        return "token_reverse" if unbiased else "token_forward" if forward else None
    if scope == "sequence" or ratio.get("own", True):
        return "sequence_reverse" if unbiased and term.gradient == "natural" else None
    # The ratio stops before the token, so the own step must bring the gradient of its KL itself.
    if exact:
        return "sequence_reverse" if unbiased else None
    return "sequence_reverse" if on_policy and unbiased and pathwise == "token_reverse" else None


def _in_reward(term: KLTerm, on_policy: bool, unbiased: bool, pathwise: str | None) -> str | None:
    exact = term.needs != "log_ratio"
    ratio = CORRECTIONS.get(term.correction).facts
    scope = ratio.get("scope")
    # A detached cost misses the path-wise part, so a sampled one is right only where that part is zero.
    complete = unbiased and (exact or pathwise == "zero")
    if term.credit == "own":
        if exact:
            return pathwise if on_policy or scope in ("none", "token") else None
        if not complete:
            return None
        return "token_reverse" if on_policy or scope == "token" else None
    if not complete:
        return None
    if on_policy or scope == "sequence":
        return "sequence_reverse"
    if scope == "prefix" and ratio.get("weights") == "cost" and term.credit == "to_go":
        return "sequence_reverse" if exact or ratio.get("own", True) else None
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
    return TARGET_MEANINGS[base] + (
        "" if base == target else ", weighted by the tokens' certainty, which is held fixed"
    )


def verdict(term: KLTerm, regime: str) -> str:
    """One sentence for a user: the claimed target in a regime, or that there is none; a plugin may claim too little.

    >>> verdict(KLTerm("k1", placement="loss"), "on_policy")
    'zero: zero expected gradient: no regularization, only noise that grows with beta and length'
    """
    target = claimed_target(term, regime)
    if target is None and all(part.origin.startswith("kl_comedy.") for part in _parts(term)):
        return "none: a biased gradient that equals no target"
    if target is None:
        return "not claimed: kl-comedy certify computes what it optimizes"
    return f"{target}: {target_meaning(target)}"


def term_warnings(term: KLTerm, *, off_policy: bool) -> list[str]:
    """Warnings for a user who trains with this term; empty where it regularizes as its value suggests."""
    if term.reference == "sampler" or term.beta == 0:
        return []
    regime = "off_policy" if off_policy else "on_policy"
    target = claimed_target(term, regime)
    if target is not None and target.removesuffix(WEIGHTED) in (
        "sequence_reverse",
        "token_reverse",
        *own_targets(term),
    ):
        return []
    if target is not None and target.startswith("token_forward") and term.direction == "forward":
        return []
    return [f"{term.label()}: its target {regime.replace('_', '-')} is {verdict(term, regime)}"]


def _parts(term: KLTerm) -> tuple[Entry[Any], Entry[Any]]:
    return ESTIMATORS.get(term.estimator), CORRECTIONS.get(term.correction)


def all_terms(estimators: Iterable[str] | None = None, corrections: Iterable[str] | None = None) -> list[KLTerm]:
    """All terms at beta 1 without caps, clamps and windows: estimator x level x correction x anchor x placement.

    ``None`` takes every registered name, so a new part is in the matrix the day it registers.
    """
    chosen = ESTIMATORS.names() if estimators is None else [ESTIMATORS.get(name).name for name in estimators]
    ratios = CORRECTIONS.names() if corrections is None else [CORRECTIONS.get(name).name for name in corrections]
    shapes: list[dict[str, Any]] = [{"placement": "reward", "credit": credit} for credit in CREDITS]
    shapes += [{"placement": "loss", "gradient": gradient} for gradient in GRADIENTS]
    terms = []
    for estimator, level, ratio, anchor, shape in itertools.product(chosen, LEVELS, ratios, ANCHORS, shapes):
        try:
            terms.append(KLTerm(estimator, level=level, correction=ratio, anchor=anchor, **shape))
        except UserError:
            continue
    return terms
