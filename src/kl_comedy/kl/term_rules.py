"""Which combinations of a KL term's fields have a meaning.

Each :class:`Rule` names one contradiction. The rules are checked in order and the first that applies is reported, so a
rule may rely on those above it. ``tests/kl/test_term.py`` has a term for each rule, by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kl_comedy.registry import CORRECTIONS

if TYPE_CHECKING:
    from kl_comedy.kl.term import KLTerm


@dataclass(frozen=True)
class Rule:
    """A contradiction between fields: when it applies, and what the user reads.

    ``message`` is a format string with ``{term}``.
    """

    name: str
    applies: Callable[[KLTerm], bool]
    message: str


def broken_rule(term: KLTerm) -> Rule | None:
    """The first rule that ``term`` breaks; None if the term has a meaning."""
    # The first one only: the others often follow from it, and a user mends one thing at a time.
    for rule in RULES:
        if rule.applies(term):
            return rule
    return None


# --- questions that several rules ask ---------------------------------------------------------------------------------


def is_sampled(term: KLTerm) -> bool:
    """Whether the estimator reads the log-ratio of the sampled token, and not the whole vocabulary."""
    return term.needs == "log_ratio"


def correction_scope(term: KLTerm) -> str:
    """What the correction's ratio covers: ``none``, ``token``, ``prefix`` or ``sequence``.

    A registered correction may declare no scope, which is then an empty text.
    """
    return str(CORRECTIONS.get(term.correction).facts.get("scope", ""))


def correction_has_own_token(term: KLTerm) -> bool:
    """Whether the correction's ratio of a token includes the token itself; true unless the correction denies it."""
    return bool(CORRECTIONS.get(term.correction).facts.get("own", True))


def correction_weights_the_cost(term: KLTerm) -> bool:
    """Whether the correction weights the cost itself, and not the score that the cost is multiplied with."""
    return CORRECTIONS.get(term.correction).facts.get("weights") == "cost"


# --- bounds and windows of a correction -------------------------------------------------------------------------------


def cap_without_ratio(term: KLTerm) -> bool:
    return term.cap is not None and term.correction == "none"


def clip_of_more_than_a_token(term: KLTerm) -> bool:
    if term.cap_mode != "clip":
        return False
    is_of_one_token = term.credit == "own" and correction_scope(term) == "token"
    return not is_of_one_token or not is_sampled(term)


def clip_outside_its_range(term: KLTerm) -> bool:
    # The lower bound is 2 - cap, as in PPO: a cap of 2 or more would allow a ratio of 0.
    if term.cap_mode != "clip":
        return False
    return term.cap is None or not 1 < term.cap < 2


def input_clamp_without_log_ratio(term: KLTerm) -> bool:
    return term.input_clamp is not None and not is_sampled(term)


def window_without_prefix(term: KLTerm) -> bool:
    return term.window is not None and correction_scope(term) != "prefix"


def tail_weighted_twice(term: KLTerm) -> bool:
    # top_k samples the tail of the vocabulary, and weights it by the ratio of the sampled token.
    if term.needs != "top_k" or correction_scope(term) == "none":
        return False
    return correction_has_own_token(term)


# --- what one estimate is of ------------------------------------------------------------------------------------------


def whole_vocabulary_of_a_sequence(term: KLTerm) -> bool:
    return not is_sampled(term) and term.level == "sequence"


def discount_without_later_costs(term: KLTerm) -> bool:
    return term.discount != 1 and term.credit != "to_go"


# --- baselines and weights --------------------------------------------------------------------------------------------


def exact_baseline_of_an_exact_cost(term: KLTerm) -> bool:
    return term.baseline == "exact" and not is_sampled(term)


def exact_baseline_without_distribution(term: KLTerm) -> bool:
    return term.baseline == "exact" and term.reference == "sampler"


def batch_baseline_of_another_cost(term: KLTerm) -> bool:
    if term.baseline != "batch":
        return False
    return not is_sampled(term) or term.credit != "own"


def weight_power_without_weight(term: KLTerm) -> bool:
    return term.weight == "none" and term.weight_power != 1


def weight_of_a_sequence(term: KLTerm) -> bool:
    return term.weight != "none" and term.level == "sequence"


def weight_without_distribution(term: KLTerm) -> bool:
    return term.weight != "none" and term.reference == "sampler"


# --- centred scores ---------------------------------------------------------------------------------------------------


def centred_score_in_loss(term: KLTerm) -> bool:
    return term.score_centring is not None and term.placement == "loss"


def centred_score_of_the_policy_loss(term: KLTerm) -> bool:
    return term.score_centring is not None and term.baseline == "before"


def centred_score_with_ratio(term: KLTerm) -> bool:
    return term.score_centring is not None and term.correction != "none"


def centred_score_without_cost(term: KLTerm) -> bool:
    # The own step of an exact cost is differentiated, so that with credit own nothing weights a score.
    return term.score_centring is not None and not is_sampled(term) and term.credit == "own"


# --- references, anchors and gradients --------------------------------------------------------------------------------


def recorded_whole_vocabulary(term: KLTerm) -> bool:
    return not is_sampled(term) and term.anchor == "behaviour"


def samplers_whole_vocabulary(term: KLTerm) -> bool:
    return not is_sampled(term) and term.reference == "sampler"


def k2_gradient_of_an_exact_value(term: KLTerm) -> bool:
    return not is_sampled(term) and term.gradient == "k2"


def correction_by_token_of_a_sequence(term: KLTerm) -> bool:
    # In loss the corrections of a token have a rule of their own, with its advice.
    allowed = ("none", "sequence", "token", "token_detached")
    return term.level == "sequence" and term.correction not in allowed


def sampler_to_itself(term: KLTerm) -> bool:
    return term.anchor == "behaviour" and term.reference == "sampler"


# --- terms in loss ----------------------------------------------------------------------------------------------------


def credit_in_loss(term: KLTerm) -> bool:
    return term.placement == "loss" and term.credit is not None


def baseline_in_loss(term: KLTerm) -> bool:
    return term.placement == "loss" and term.baseline is not None


def recorded_in_loss(term: KLTerm) -> bool:
    return term.placement == "loss" and term.anchor == "behaviour"


def token_ratio_of_a_sequence_in_loss(term: KLTerm) -> bool:
    if term.placement != "loss" or term.level != "sequence":
        return False
    return term.correction in ("token", "token_detached")


# --- terms in reward --------------------------------------------------------------------------------------------------


def gradient_in_reward(term: KLTerm) -> bool:
    return term.placement == "reward" and term.gradient != "natural"


def partial_credit_of_a_sequence(term: KLTerm) -> bool:
    return term.placement == "reward" and term.level == "sequence" and term.credit != "total"


def corrected_twice(term: KLTerm) -> bool:
    # Before the baseline the cost becomes part of the return, and the policy loss has a ratio of its own.
    if term.placement != "reward" or term.baseline != "before" or term.correction == "none":
        return False
    return not correction_weights_the_cost(term)


RULES = (
    Rule("cap_without_ratio", cap_without_ratio, "cap bounds the ratio of a correction, and correction is none"),
    Rule(
        "clip_of_more_than_a_token",
        clip_of_more_than_a_token,
        "cap_mode: clip drops a token by its own ratio and cost; use credit: own, correction: token, a sampled k",
    ),
    Rule(
        "clip_outside_its_range",
        clip_outside_its_range,
        "cap_mode: clip bounds the ratio to [2 - cap, cap]; cap must be between 1 and 2",
    ),
    Rule(
        "input_clamp_without_log_ratio",
        input_clamp_without_log_ratio,
        "input_clamp bounds a log-ratio, and {term.estimator} reads none",
    ),
    Rule(
        "window_without_prefix",
        window_without_prefix,
        "window limits the ratios of a prefix, and correction {term.correction} has no prefix",
    ),
    Rule(
        "tail_weighted_twice",
        tail_weighted_twice,
        "{term.estimator} has the ratio of its own token in its tail; use none or prefix_previous",
    ),
    Rule(
        "whole_vocabulary_of_a_sequence",
        whole_vocabulary_of_a_sequence,
        "{term.estimator} sums over the vocabulary at each prefix, and level sequence has none",
    ),
    Rule(
        "discount_without_later_costs",
        discount_without_later_costs,
        "discount fades the costs of later tokens, and credit is {term.credit}; use credit: to_go",
    ),
    Rule(
        "exact_baseline_of_an_exact_cost",
        exact_baseline_of_an_exact_cost,
        "{term.estimator} has no noise that the exact KL of the prefix could take away; leave baseline out",
    ),
    Rule(
        "exact_baseline_without_distribution",
        exact_baseline_without_distribution,
        "baseline: exact needs the sampler's full distribution, which rollouts do not carry",
    ),
    Rule(
        "batch_baseline_of_another_cost",
        batch_baseline_of_another_cost,
        "baseline: batch centres the token's own sampled estimate; use credit: own and a sampled estimator",
    ),
    Rule(
        "centred_score_in_loss",
        centred_score_in_loss,
        "score_centring is of the score that a cost weights, and a term in loss has none; leave it out",
    ),
    Rule(
        "centred_score_of_the_policy_loss",
        centred_score_of_the_policy_loss,
        "before the baseline the cost weights the policy loss's score, which score_centring does not reach; "
        "use baseline: after or own",
    ),
    Rule(
        "centred_score_with_ratio",
        centred_score_with_ratio,
        "score_centring takes out the mean of a score without a ratio, and correction is {term.correction}; use none",
    ),
    Rule(
        "centred_score_without_cost",
        centred_score_without_cost,
        "with credit own {term.estimator} is differentiated and weights no score; use to_go or total, or leave "
        "score_centring out",
    ),
    Rule(
        "weight_power_without_weight",
        weight_power_without_weight,
        "weight_power is the exponent of weight, and weight is none",
    ),
    Rule(
        "weight_of_a_sequence",
        weight_of_a_sequence,
        "weight is of a token, and level sequence has one estimate for the whole completion",
    ),
    Rule(
        "weight_without_distribution",
        weight_without_distribution,
        "weight needs a full distribution beside the policy's pass, and reference: sampler has none",
    ),
    Rule(
        "recorded_whole_vocabulary",
        recorded_whole_vocabulary,
        "{term.estimator} needs the full distribution, and rollouts record sampled log-probs only",
    ),
    Rule(
        "samplers_whole_vocabulary",
        samplers_whole_vocabulary,
        "{term.estimator} needs the sampler's full distribution, which rollouts do not carry",
    ),
    Rule(
        "k2_gradient_of_an_exact_value",
        k2_gradient_of_an_exact_value,
        "{term.estimator} already has the gradient of its own KL; gradient: k2 is for sampled estimates",
    ),
    Rule(
        "correction_by_token_of_a_sequence",
        correction_by_token_of_a_sequence,
        "correction {term.correction} weights per-token costs, and level sequence has one cost",
    ),
    Rule("sampler_to_itself", sampler_to_itself, "the log-ratio of the sampler to itself is zero everywhere"),
    Rule(
        "credit_in_loss",
        credit_in_loss,
        "credit says which costs weight a score, and a term in loss has no score; leave credit out",
    ),
    Rule("baseline_in_loss", baseline_in_loss, "baseline is about costs in the reward; leave baseline out"),
    Rule(
        "recorded_in_loss",
        recorded_in_loss,
        "log-probs frozen at rollout carry no gradient, so a term in loss would do nothing",
    ),
    Rule(
        "token_ratio_of_a_sequence_in_loss",
        token_ratio_of_a_sequence_in_loss,
        "correction {term.correction} is per token, and level sequence has one ratio; use sequence",
    ),
    Rule(
        "gradient_in_reward",
        gradient_in_reward,
        "gradient is for terms in loss; in reward the estimate is a detached cost",
    ),
    Rule(
        "partial_credit_of_a_sequence",
        partial_credit_of_a_sequence,
        "level sequence has one cost for the whole completion, so credit must be total, not {term.credit}",
    ),
    Rule(
        "corrected_twice",
        corrected_twice,
        "before the baseline the cost is part of the reward, and the policy loss weights its score; "
        "correction {term.correction} would weight it twice (use baseline: after)",
    ),
)
"""In the order in which they are checked: a term is told the first contradiction, and rules in loss and in reward come
last, because most of them would also apply to terms that an earlier rule explains better."""
