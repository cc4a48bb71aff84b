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

Where the reference is the sampler mu, the targets have ``sampler`` in their names (:data:`SAMPLER_TARGETS`):
``sequence_sampler_reverse`` and ``token_sampler_reverse`` are of KL(pi || mu), ``sequence_sampler_forward`` of
KL(mu || pi). What is proved of any reference holds for mu, which is held fixed. Two things hold for it alone. The
samples' prefixes are its own, so that the forward KLs of the visited prefixes add up to that of completions: both are
one target. On fresh samples it is the policy: every KL is 0 there, and its gradient too.

Where the sampler truncates, pi is the policy renormalized over the tokens S that it kept, and S is held fixed. The
reverse KL to the whole reference is finite; the forward one is infinite, and ``token_forward`` is then its part over S,
which is the reference's mass on S times the forward KL from the reference renormalized over S. ``exp(-l)`` has mean
ref(S) and not 1, so that ``k3`` estimates the reverse KL less ``1 - ref(S)`` (``value:shifted_reverse``): right where a
constant of the prefix has no gradient, and wrong where earlier tokens are credited with it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kl_comedy.errors import UserError
from kl_comedy.kl.beta import first_value
from kl_comedy.kl.term import ANCHORS, CREDITS, GRADIENTS, LEVELS, KLTerm
from kl_comedy.registry import CORRECTIONS, ESTIMATORS

TARGETS = ("sequence_reverse", "token_reverse", "token_forward", "sequence_forward", "zero")
SAMPLER_TARGETS = ("sequence_sampler_reverse", "token_sampler_reverse", "sequence_sampler_forward", "zero")
"""In place of :data:`TARGETS`, where the sampler is the reference."""
REGIMES = ("on_policy", "off_policy", "mixed")

WEIGHTED = "_weighted"
"""Ending of the name of a target whose divergences are weighted by the token's certainty."""

SAMPLER = "_sampler_"
"""In the name of a target that is measured against the sampler."""

# By the target of an estimate per token, that of the same estimate of a completion, which is then like one token.
_AT_SEQUENCE = {"token_reverse": "sequence_reverse", "token_forward": "sequence_forward", "zero": "zero"}


def claimed_target(term: KLTerm, regime: str, *, truncated: bool = False) -> str | None:
    """The target whose gradient the term's expected gradient equals in a regime, or None.

    ``truncated``: the policy is renormalized over the tokens that a truncating sampler kept.

    ``mixed`` (several policy versions within a completion) obeys the off-policy claims: the sum of the recorded
    log-probs per token is that of the behaviour policy. A capped ratio and recorded log-probs (``anchor``) claim
    nothing off-policy.
    """
    term = _plain_estimator(term)
    if term.reference == "sampler":
        # A truncating sampler is renormalized over the tokens that it kept, as the policy is: it gives them all mass.
        truncated = False
        if regime == "on_policy":
            return "zero" if _is_zero_at_reference(term) else None
    # What holds for the reverse KL of a prefix holds for any divergence of a prefix, so one derivation serves all.
    target = _claimed_as_reverse(term, on_policy=regime == "on_policy", truncated=truncated)
    # Zero is zero for every divergence, and needs no other name.
    if target is None or target == "zero":
        return target
    if term.direction == "mixture":
        target = target.replace("reverse", "mixture")
    if term.weight != "none":
        target += WEIGHTED
    if term.reference == "sampler":
        target = to_the_sampler(target)
    return target


def to_the_sampler(target: str) -> str:
    """The name of a target where the sampler is the reference.

    >>> to_the_sampler("token_reverse"), to_the_sampler("token_forward")
    ('token_sampler_reverse', 'sequence_sampler_forward')
    """
    level, _, divergence = target.partition("_")
    if divergence == "forward":
        # sum_h mu(h) KL(mu_h || pi_h) is KL(mu || pi) of completions.
        level = "sequence"
    return f"{level}{SAMPLER}{divergence}"


def targets_of(terms: Sequence[KLTerm]) -> tuple[str, ...]:
    """The targets that a list of terms is compared with: those against the sampler where all of them are."""
    if terms and all(term.reference == "sampler" for term in terms):
        return SAMPLER_TARGETS
    return TARGETS


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
    if term.reference == "sampler":
        names = tuple(to_the_sampler(name) for name in names)
    return names


def _plain_estimator(term: KLTerm) -> KLTerm:
    """The term, with the ends of ``k_lambda`` by their names: it is k1 where ``lam`` is 0, and k3 where it is 1."""
    if term.estimator == "k_lambda" and _mix(term) in (0, 1):
        name = "k1" if _mix(term) == 0 else "k3"
        return dataclasses.replace(term, estimator=name, options={})
    return term


def _is_zero_at_reference(term: KLTerm) -> bool:
    """Whether the expected gradient is zero where the policy is the reference.

    There every log-ratio is 0: a cost is 0, and an estimate has one slope, times a score of mean zero.
    """
    claims = claims_of(term, on_policy=True)
    if _is_built_in(term):
        # Those without a claim are forms of a top-k KL that are biased, of which not every one is 0 there.
        return bool(claims)
    # An estimate with the mean of a KL is 0 where both policies are one. Another may have a constant, which tokens are
    # credited with by how many follow them.
    return any(claim.startswith("value:") for claim in claims)


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What the estimator and the correction of a term declare, for one regime.

    ``exact``: the estimate is a sum over the vocabulary, so a differentiated one brings the whole gradient of its
    prefix. ``unbiased``, ``forward``: the value is an unbiased estimate of the reverse (forward) KL of the prefix.
    ``shifted``: of the reverse KL of the prefix and a constant that the policy's weights do not change there.
    ``pathwise``: the target of the expected derivative of the estimate itself, without a score term; None where no
    target has it. ``scope``: which tokens' ratios the correction multiplies (``none``, ``token``, ``prefix``,
    ``sequence``). ``own_ratio``: whether a prefix's ratios include that of the token itself. ``detached_ratio``: the
    ratio has no gradient. ``weights_costs``: each token's cost is weighted by its ratio, not the score.
    """

    on_policy: bool
    truncated: bool
    exact: bool
    unbiased: bool
    shifted: bool
    forward: bool
    pathwise: str | None
    scope: str
    own_ratio: bool
    detached_ratio: bool
    weights_costs: bool

    @property
    def has_gradient_of_a_step(self) -> bool:
        """Whether the mean of the value has the gradient of the reverse KL, where one step stands alone."""
        return self.unbiased or self.shifted

    @classmethod
    def of(cls, term: KLTerm, *, on_policy: bool, truncated: bool = False) -> _Facts:
        claims = claims_of(term, on_policy=on_policy, truncated=truncated)
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
            truncated=truncated,
            exact=term.needs != "log_ratio",
            unbiased="value:reverse" in claims,
            shifted="value:shifted_reverse" in claims,
            forward="value:forward" in claims,
            pathwise=pathwise,
            scope=str(ratio.get("scope")),
            own_ratio=bool(ratio.get("own", True)),
            detached_ratio=bool(ratio.get("detached")),
            weights_costs=ratio.get("weights") == "cost",
        )


def _claimed_as_reverse(term: KLTerm, *, on_policy: bool, truncated: bool) -> str | None:
    """:func:`claimed_target` as if the divergence were the reverse KL."""
    if _options_bias_it(term, on_policy=on_policy):
        return None
    facts = _Facts.of(term, on_policy=on_policy, truncated=truncated)
    if term.placement == "reward":
        return _in_reward(term, facts)
    if term.window is not None:
        return _windowed_in_loss(term, facts)
    if term.level == "sequence":
        return _sequence_in_loss(term, facts)
    return _token_in_loss(term, facts)


def _options_bias_it(term: KLTerm, *, on_policy: bool) -> bool:
    """Whether an option keeps the term from every target, whatever its estimator and its correction are."""
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


def claims_of(term: KLTerm, *, on_policy: bool, truncated: bool = False) -> tuple[str, ...]:
    """The claims of the term's estimator that hold with its options in a regime, a mixture's as of the reverse KL."""
    entry = ESTIMATORS.get(term.estimator)
    if truncated:
        claims: tuple[str, ...] = entry.facts.get("claims_truncated", ())
        return claims
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
    if has_own_token_alone and facts.has_gradient_of_a_step and term.gradient == "natural":
        return "token_reverse"
    return None


def _sequence_in_loss(term: KLTerm, facts: _Facts) -> str | None:
    """The target of a differentiated estimate of the whole completion's KL."""
    if term.correction == "none":
        if not facts.on_policy or facts.pathwise is None:
            return None
        # The kept completions of the reference have a mass, which is no product of its masses on the kept tokens.
        if facts.truncated and facts.pathwise == "token_forward":
            return None
        return _AT_SEQUENCE.get(facts.pathwise)
    # The sequence ratio is differentiated: its score term turns an unbiased value into an unbiased gradient.
    if facts.has_gradient_of_a_step and term.gradient == "natural":
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
    if facts.has_gradient_of_a_step:
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


# --- where no target is hit -------------------------------------------------------------------------------------------
KINDS = ("proper_loss", "repulsion", "difference", "no_function")
KIND_WORDS = {
    "proper_loss": "a loss with its minimum at the reference",
    "repulsion": "a repulsion from the samples",
    "difference": "a function whose minimum is not at the reference",
    "no_function": "the gradient of no function",
}
"""What an expected gradient is, where it is that of no target."""

# The mean that a differentiated term is, by the scope of its correction.
_MEANS = {
    "none": "over the samples",
    "token": "over the policy's tokens at visited prefixes",
    "prefix": "over the policy's completions",
    "sequence": "over the policy's completions",
    "prefix_previous": "over the sampler's tokens at the policy's prefixes",
}


@dataclass(frozen=True)
class OffPolicyKind:
    """What the expected gradient of a term is where it hits no target, the sampler ``mu`` held fixed.

    ``kind`` is one of :data:`KINDS`:

    - ``proper_loss``: the gradient of a function that is at least 0, and 0 at the reference;
    - ``repulsion``: of one that falls with the log-prob of every sample; k1 in the loss is ``-KL(mu || pi)``;
    - ``difference``: of one whose minimum is not at the reference: a difference of divergences, or a mean of costs that
      are frozen at the sampler;
    - ``no_function``: of none, as its Jacobian is not symmetric.

    ``function`` names the function in words, with ``KL(a, b)`` for ``KL(a || b)``; empty for ``no_function``.
    ``reference``: what the divergence is measured against, ``reference`` or ``sampler``.
    """

    kind: str
    function: str = ""
    reference: str = "reference"

    @property
    def words(self) -> str:
        """The kind, and the function that it is the gradient of."""
        text = KIND_WORDS[self.kind].replace("reference", self.reference)
        if self.function:
            text += f": {self.function}"
        return text


NO_FUNCTION = OffPolicyKind("no_function")


def off_policy_kind(term: KLTerm) -> OffPolicyKind | None:
    """What a term that hits no target optimizes on stale samples (``off_policy``, ``mixed``), the sampler held fixed.

    A baseline of a group or of a batch is not counted. None where a target is hit, and where nothing is proved: a part
    of a plugin, and bounds that change one kind into another.

    >>> off_policy_kind(KLTerm("k1", placement="loss")).words
    'a repulsion from the samples: -KL(sampler, policy)'
    """
    term = _plain_estimator(term)
    if not _may_have_a_kind(term, "off_policy"):
        return None
    facts = _Facts.of(term, on_policy=False)
    if term.placement == "loss":
        kind = _kind_in_loss(term, facts)
    elif term.score_centring is not None:
        kind = _kind_of_centred_score(term)
    elif facts.exact:
        kind = _kind_of_exact_cost(term, facts)
    elif term.anchor == "behaviour":
        kind = _kind_of_frozen_cost(term, facts)
    else:
        kind = _kind_of_sampled_cost(term, facts)
    if kind is None:
        return None
    function = kind.function
    if function:
        function += _bounds_in_words(term)
    if term.reference == "sampler":
        # What a term is against any reference it is against this one.
        function = function.replace("KL(sampler, reference) - ", "-").replace("reference", "sampler")
        return OffPolicyKind(kind.kind, function, reference="sampler")
    return OffPolicyKind(kind.kind, function)


def kind_in(term: KLTerm, regime: str) -> OffPolicyKind | None:
    """What a term that hits no target optimizes in a regime; None where one is hit, and where nothing is proved.

    >>> kind_in(KLTerm("k3"), "on_policy").function
    'KL(policy, reference) of completions - KL(reference, policy) of each visited prefix'
    """
    if regime != "on_policy":
        return off_policy_kind(term)
    term = _plain_estimator(term)
    if term.placement == "reward":
        return _fresh_kind_of_cost(term)
    # Fresh samples are those of a sampler that is the policy, held fixed.
    if claimed_target(term, "on_policy") is not None:
        return None
    return off_policy_kind(term)


def kind_of_terms(terms: Sequence[KLTerm], regime: str) -> OffPolicyKind | None:
    """The kind of terms that act together: that of the one, or a proper loss where each is one or hits a divergence."""
    if len(terms) == 1:
        return kind_in(terms[0], regime)
    for term in terms:
        is_a_divergence = claimed_target(term, regime) not in (None, "zero")
        kind = kind_in(term, regime)
        is_proper = is_a_divergence or (kind is not None and kind.kind == "proper_loss")
        if not is_proper or first_value(term.beta) <= 0 or term.reference != terms[0].reference:
            return None
    if not terms:
        return None
    return OffPolicyKind("proper_loss", "a sum of such losses")


def _may_have_a_kind(term: KLTerm, regime: str) -> bool:
    """Whether a term hits no target, and is of a form that is proved about."""
    if claimed_target(term, regime) is not None or not _is_built_in(term):
        return False
    # A weight that depends on the policy, and is not differentiated, is in no function's gradient; what it does to the
    # force is a factor of at most 1.
    if term.weight == "policy":
        return False
    # Other forms of a top-k estimate are biased in ways of their own.
    return term.needs != "top_k" or _Facts.of(term, on_policy=regime == "on_policy").unbiased


def _is_built_in(term: KLTerm) -> bool:
    parts = (ESTIMATORS.get(term.estimator), CORRECTIONS.get(term.correction))
    return all(part.origin.startswith("kl_comedy.") for part in parts)


def _is_clamped(term: KLTerm) -> bool:
    return term.input_clamp is not None or term.output_clamp is not None


def _is_capped(term: KLTerm) -> bool:
    return term.cap is not None or term.window is not None


def _bounds_in_words(term: KLTerm) -> str:
    """What bounds and weights do to a named function: they change where and how strongly it acts, not its minimum."""
    words = ""
    if term.weight != "none":
        words += ", weighted by certainty"
    if _is_clamped(term):
        words += ", as clamped"
    if _is_capped(term):
        words += ", with the bounded ratio"
    if term.baseline in ("before", "own", "batch"):
        words += ", without its baseline"
    return words


def _mix(term: KLTerm) -> float:
    """The share of k3 in ``k_lambda``."""
    return float(term.estimator_options["lam"])


def _kind_in_loss(term: KLTerm, facts: _Facts) -> OffPolicyKind | None:
    """Of a differentiated term.

    With a differentiated ratio or none, the mean of the surrogate over mu is a function of the policy, and the expected
    gradient is its gradient.
    """
    has_differentiated_ratio = facts.scope != "none" and not facts.detached_ratio
    if term.gradient == "k2" and term.estimator != "k2" and has_differentiated_ratio:
        return _kind_of_another_gradient(term, facts)
    name = term.estimator
    if term.gradient == "k2":
        name = "k2"
    if name == "k2" or "nonnegative" in claims_of(term, on_policy=False):
        return _kind_of_nonnegative(term, facts, name)
    if _is_capped(term):
        return None
    return _kind_of_signed(term, facts)


def _kind_of_nonnegative(term: KLTerm, facts: _Facts, name: str) -> OffPolicyKind | None:
    """Of a differentiated estimate that is at least 0 and has no slope where it is 0."""
    if not facts.detached_ratio:
        scope = facts.scope
        if scope == "prefix" and not facts.own_ratio and not facts.exact:
            scope = "prefix_previous"
        what = name
        if term.level == "sequence":
            what = f"{name} of the completion"
        return OffPolicyKind("proper_loss", f"the mean of {what} {_MEANS[scope]}")
    if facts.exact and _is_capped(term):
        return None
    # E_mu[rho f'(l) s] at a prefix is sum_v f'(log p_v / q_v) dp_v: the gradient of a sum over the vocabulary whose
    # every part is least at p_v = q_v, as f' has the sign of l. A cap multiplies each part by at most 1.
    if name == "abs":
        return OffPolicyKind("proper_loss", "2 total variations of each visited prefix")
    return OffPolicyKind("proper_loss", f"the divergence with the slope of {name}, of each visited prefix")


def _kind_of_signed(term: KLTerm, facts: _Facts) -> OffPolicyKind | None:
    """Of ``k1``, and of ``k_lambda``, which is ``lam k3 + (1 - lam) k1``, differentiated."""
    lam = 0.0
    if term.estimator == "k_lambda":
        lam = _mix(term)
        if _is_clamped(term):
            return None
    if facts.detached_ratio:
        # The part of k1 has mean zero.
        if lam > 0:
            return OffPolicyKind("proper_loss", f"{lam:g} KL(reference, policy) of each visited prefix")
        return None
    if facts.scope == "none":
        if lam == 0:
            return OffPolicyKind("repulsion", "-KL(sampler, policy)")
        return OffPolicyKind(
            "difference", f"{lam:g} times the mean of k3 over the samples + {1 - lam:g} times -KL(sampler, policy)"
        )
    if facts.scope == "prefix" and not facts.own_ratio and not _is_clamped(term):
        function = "KL(sampler, reference) - KL(sampler, policy) of each prefix that the policy visits"
        if lam == 0:
            return OffPolicyKind("difference", function)
        return OffPolicyKind("difference", f"{function}, with {lam:g} (exp(-l) - 1)")
    return None


def _kind_of_another_gradient(term: KLTerm, facts: _Facts) -> OffPolicyKind | None:
    """Of an estimate with the gradient of k2, times a differentiated ratio: ``E[f s] + E[l s]`` over the policy."""
    if _is_clamped(term) or _is_capped(term):
        return None
    # Over several tokens the second part is a sum of gradients at prefixes that are held fixed: no function's.
    if facts.scope != "token" and term.level != "sequence":
        return NO_FUNCTION
    place = _place(term)
    if term.estimator == "abs":
        # Twice the sum over p > q of p l - p + q.
        return OffPolicyKind("proper_loss", f"the mean of abs + KL(policy, reference) - 2 total variations {place}")
    forward = 1.0
    if term.estimator == "k1":
        forward = 0.0
    elif term.estimator == "k_lambda":
        forward = _mix(term)
    if forward == 0:
        return OffPolicyKind("proper_loss", f"2 KL(policy, reference) {place}")
    return OffPolicyKind("difference", f"2 KL(policy, reference) - {_times(forward)}KL(reference, policy) {place}")


def _times(factor: float) -> str:
    """A factor before a divergence; empty for 1."""
    if factor == 1:
        return ""
    return f"{factor:g} "


def _place(term: KLTerm) -> str:
    if term.level == "sequence":
        return "of completions"
    return "of each visited prefix"


def _kind_of_exact_cost(term: KLTerm, facts: _Facts) -> OffPolicyKind | None:
    """Of a divergence of the whole vocabulary as a cost, its own step differentiated."""
    if term.credit == "own":
        if facts.scope in ("none", "token"):
            return OffPolicyKind("proper_loss", f"the mean of {term.estimator} over the samples")
        return NO_FUNCTION
    if _is_capped(term):
        return None
    is_per_decision = facts.scope == "prefix" and facts.weights_costs and term.credit == "to_go"
    if (is_per_decision or facts.scope == "sequence") and term.discount == 1:
        return OffPolicyKind("proper_loss", f"the mean of {term.estimator} over the policy's completions")
    return NO_FUNCTION


def _kind_of_sampled_cost(term: KLTerm, facts: _Facts) -> OffPolicyKind | None:
    """Of an estimate at the policy's own log-probs, as a detached cost."""
    if facts.scope == "none":
        # The exact KL of a prefix is another function of the policy than the score that it is taken from.
        if term.baseline == "exact":
            return NO_FUNCTION
        return _kind_of_uncorrected_cost(term)
    is_one_factor = term.level == "sequence" and facts.scope == "sequence"
    is_one_factor = is_one_factor or (term.credit == "own" and facts.scope == "token")
    if is_one_factor:
        return _kind_of_weighted_cost(term)
    if _is_capped(term):
        return None
    return NO_FUNCTION


def _kind_of_uncorrected_cost(term: KLTerm) -> OffPolicyKind | None:
    """Of ``E_mu[c s]``: of a cost and a score of one token or completion, it is the gradient of the cost's integral."""
    of = ""
    if term.credit == "total":
        of = " of the completion"
    if term.level == "token" and term.credit != "own":
        # (sum of l) (sum of s) is l s of the completion; any other sum of costs is not one of its own scores.
        is_whole = term.estimator == "k1" and term.credit == "total" and term.weight == "none" and not _is_clamped(term)
        if not is_whole:
            return NO_FUNCTION
    lam = None
    if term.estimator == "k1":
        lam = 0.0
    elif term.estimator == "k_lambda":
        lam = _mix(term)
    if lam == 0:
        return OffPolicyKind("proper_loss", f"the mean of k2{of} over the samples")
    if lam is None:
        return OffPolicyKind("repulsion", "each pushed down by its cost")
    if _is_clamped(term):
        return None
    return OffPolicyKind("difference", f"the mean of k2 - {lam:g} k3{of} over the samples")


def _kind_of_weighted_cost(term: KLTerm) -> OffPolicyKind | None:
    """Of ``E_mu[rho f(l) s]``, a ratio and a cost of the same token or completion."""
    place = _place(term)
    if term.estimator == "k1":
        # Bounded: a part of each token is still least where the policy is the reference.
        return OffPolicyKind("proper_loss", f"KL(policy, reference) {place}")
    if _is_clamped(term) or _is_capped(term):
        return None
    mean, less = _mean_less_own_gradient(term)
    return OffPolicyKind("difference", f"{mean} - {less} {place}")


def _mean_less_own_gradient(term: KLTerm) -> tuple[str, str]:
    """What an estimate is in the policy's mean, and what it optimizes differentiated: a cost has the first less that.

    ``E_pi[f s]`` is the gradient of ``E_pi[f]`` less ``E_pi[f' s]``.
    """
    if term.estimator == "k2":
        return "the policy's mean of k2", "KL(policy, reference)"
    if term.estimator == "abs":
        return "the policy's mean of abs", "2 total variations"
    share = 1.0
    if term.estimator == "k_lambda":
        share = _mix(term)
    return "KL(policy, reference)", f"{_times(share)}KL(reference, policy)"


def _fresh_kind_of_cost(term: KLTerm) -> OffPolicyKind | None:
    """Of a cost in the reward, on fresh samples."""
    if term.weight != "none" or _options_bias_it(term, on_policy=True) or not _may_have_a_kind(term, "on_policy"):
        return None
    if _Facts.of(term, on_policy=True).exact:
        # Of its own step it is differentiated, and earlier tokens are credited with it: all of the mean's gradient.
        return OffPolicyKind("proper_loss", f"the mean of {term.estimator} over the policy's completions")
    if term.needs != "log_ratio" or term.baseline == "exact":
        return None
    mean, less = _mean_less_own_gradient(term)
    place = _place(term)
    if term.level == "sequence" or term.credit == "own":
        return OffPolicyKind("difference", f"{mean} - {less} {place}")
    # The mean of all costs of a completion, whose earlier tokens are credited with the later costs; the estimate of a
    # token differentiated would credit that token alone.
    return OffPolicyKind("difference", f"{mean} of completions - {less} {place}")


def _kind_of_frozen_cost(term: KLTerm, facts: _Facts) -> OffPolicyKind | None:
    """Of a cost at the log-probs that the sampler recorded: a constant of the completion, whatever the policy is."""
    if term.baseline == "exact" and facts.scope == "none":
        return NO_FUNCTION
    if facts.scope == "none":
        if "nonnegative" in claims_of(term, on_policy=False):
            return OffPolicyKind("repulsion", "each pushed down by its frozen cost")
        return OffPolicyKind("difference", "the mean of the frozen cost times log-prob over the samples")
    if _is_capped(term):
        return None
    is_a_kl = term.estimator == "k1" and not _is_clamped(term) and term.weight == "none" and term.discount == 1
    kl_difference = "KL(policy, reference) - KL(policy, sampler)"
    frozen = "the mean of the frozen cost over the policy's"
    if facts.scope == "token":
        if is_a_kl and term.credit == "own":
            return OffPolicyKind("difference", f"{kl_difference} of each visited prefix")
        return OffPolicyKind("difference", f"{frozen} tokens at visited prefixes")
    is_per_decision = facts.scope == "prefix" and facts.own_ratio and term.credit == "to_go"
    is_whole = facts.scope == "sequence" and term.credit in ("to_go", "total")
    if (is_per_decision or is_whole) and term.discount == 1:
        if is_a_kl:
            return OffPolicyKind("difference", f"{kl_difference} of completions")
        return OffPolicyKind("difference", f"{frozen} completions")
    return NO_FUNCTION


def _kind_of_centred_score(term: KLTerm) -> OffPolicyKind | None:
    """Of ``E_mu[c_t (s_t - E_mu[s_t])]``, with mu the sampler at the prefix: the covariance of cost and score there."""
    # From some of the sampler's tokens the mean is not the sampler's, and what is left of it has no name.
    if term.score_centring != "exact":
        return None
    if term.baseline == "exact":
        return NO_FUNCTION
    if term.anchor == "behaviour":
        return OffPolicyKind(
            "difference", "the mean of the frozen cost times log-prob, less its mean at the prefix, over the samples"
        )
    # The gradient of l is the score itself, and that of its variance the covariance of the two. A later cost depends on
    # the policy at prefixes whose score is not this one.
    is_of_own_token = term.level == "token" and term.credit == "own"
    if term.estimator == "k1" and is_of_own_token and not _is_clamped(term):
        return OffPolicyKind("proper_loss", "half the variance of the log-ratio over the samples of each prefix")
    return NO_FUNCTION


NO_TARGET = "the gradient of no KL"
"""How every answer, table and page calls an expected gradient that equals no target and has no kind (:data:`KINDS`)."""

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


SELF_WORDS = "zero expected gradient, as the policy is the sampler"
"""What a term whose reference is the sampler is on fresh samples."""


def target_words(target: str) -> str:
    """The divergence of a target, for a line or a cell.

    >>> target_words("token_sampler_reverse")
    'the reverse KL of each visited prefix to the sampler'
    """
    base = target.removesuffix(WEIGHTED)
    words = TARGET_WORDS[base.replace(SAMPLER, "_")]
    if SAMPLER in base:
        words += " to the sampler"
    if base != target:
        words += ", weighted by certainty"
    return words


def target_meaning(target: str) -> str:
    """What a target optimizes, in words."""
    base = target.removesuffix(WEIGHTED)
    if SAMPLER in base:
        meaning = f"a trust region, optimizes {target_words(base)}"
    else:
        meaning = TARGET_MEANINGS[base]
    if base != target:
        meaning += ", weighted by the tokens' certainty, which is held fixed"
    return meaning


def dropped_token_words(term: KLTerm) -> str:
    """What happens at a token that a mask drops, where the sampler is the reference; empty for another term.

    The ratio to the sampler is the token's own distance then, so that the tokens furthest above it are dropped.
    """
    if term.reference != "sampler" or term.cap is None or term.cap_mode != "mask":
        return ""
    words = f"at a ratio above {term.cap:g} a token is dropped, and nothing pulls it back"
    has_constant_slope = term.estimator == "k1" and term.placement == "loss" and term.gradient == "natural"
    if has_constant_slope and term.correction == "token":
        # The slope of rho k1 is rho (l + 1): the ones have mean zero over all tokens, and not over those that are kept.
        words += ": the kept tokens push it up by its own probability"
    return words


def words_without_target(term: KLTerm, regime: str) -> str:
    """What a term that claims no target optimizes: its kind, or the target that it hits while no bound acts.

    >>> words_without_target(KLTerm("exact", correction="prefix_previous", cap=8.0), "off_policy")
    'the reverse KL of completions while no bound acts, biased beyond'
    """
    kind = kind_in(term, regime)
    if kind is not None:
        return kind.words
    unbounded = dataclasses.replace(
        term, cap=None, cap_mode="truncate", window=None, input_clamp=None, output_clamp=None
    )
    target = claimed_target(unbounded, regime)
    if target is None:
        return NO_TARGET
    return f"{target_words(target)} while no bound acts, biased beyond"


TRUNCATED_WORDS = (
    "the policy is renormalized over the tokens that the sampler kept, whose sets are held fixed: its KL to the whole "
    "reference is the KL to the reference renormalized over them, less the log of the reference's mass on them, and is "
    "not 0 where the two are one. What no sampler kept is in no KL, and nothing pushes it"
)
"""What a KL is where the sampler truncates, in two sentences."""


def verdict(term: KLTerm, regime: str, *, truncated: bool = False) -> str:
    """One sentence for a user: the claimed target in a regime, or that there is none; a plugin may claim too little.

    >>> verdict(KLTerm("k1", placement="loss"), "on_policy")
    'zero: zero expected gradient: no regularization, only noise that grows with beta and length'
    """
    target = claimed_target(term, regime, truncated=truncated)
    if target == "zero" and term.reference == "sampler" and regime == "on_policy":
        return f"zero: {SELF_WORDS}"
    if target is not None:
        return f"{target}: {target_meaning(target)}"
    if truncated and term.reference != "sampler":
        return "no divergence that is proved of a truncated sampler"
    without_target = words_without_target(term, regime)
    if without_target != NO_TARGET or _is_built_in(term):
        # The exact tests fail where a built-in part hits a target that it does not claim, so no claim is no target.
        return without_target
    return "not claimed: kl-comedy certify computes what it optimizes"


def term_warnings(term: KLTerm, *, off_policy: bool, truncated: bool = False) -> list[str]:
    """Warnings for a user who trains with this term; empty where it regularizes as its value suggests."""
    if term.beta == 0:
        return []
    regime = "on_policy"
    if off_policy:
        regime = "off_policy"
    target = claimed_target(term, regime, truncated=truncated)
    if target is not None:
        # Every divergence from the sampler holds the policy to it.
        if SAMPLER in target:
            return []
        # A forward KL per token is expected of a term that says forward, and a surprise in one that says reverse (k3).
        expected = ("sequence_reverse", "token_reverse", *own_targets(term))
        if target.removesuffix(WEIGHTED) in expected:
            return []
        if target.startswith("token_forward") and term.direction == "forward":
            return []
    elif term.reference == "sampler":
        # As the squared log-ratio, which is no KL and is least where the policy is the sampler.
        kind = kind_in(term, regime)
        if kind is not None and kind.kind == "proper_loss":
            return []
    return [f"{term.label()}: {regime.replace('_', '-')} {verdict(term, regime, truncated=truncated)}"]


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
