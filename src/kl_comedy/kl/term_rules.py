"""Which combinations of a KL term's fields have a meaning.

Each rule refuses one contradiction: it returns the reason, or None (:func:`kl_comedy.errors.first_refusal`).
``tests/kl/test_term.py`` has a term for each rule, by its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kl_comedy.registry import CORRECTIONS

if TYPE_CHECKING:
    from kl_comedy.kl.term import KLTerm


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


def cap_without_ratio(term: KLTerm) -> str | None:
    if term.cap is not None and term.correction == "none":
        return "cap bounds the ratio of a correction, and correction is none"
    return None


def clip_of_more_than_a_token(term: KLTerm) -> str | None:
    if term.cap_mode != "clip":
        return None
    is_of_one_token = term.credit == "own" and correction_scope(term) == "token"
    if is_of_one_token and is_sampled(term):
        return None
    return "cap_mode: clip drops a token by its own ratio and cost; use credit: own, correction: token, a sampled k"


def clip_outside_its_range(term: KLTerm) -> str | None:
    # The lower bound is 2 - cap, as in PPO: a cap of 2 or more would allow a ratio of 0.
    is_in_range = term.cap is not None and 1 < term.cap < 2
    if term.cap_mode == "clip" and not is_in_range:
        return "cap_mode: clip bounds the ratio to [2 - cap, cap]; cap must be between 1 and 2"
    return None


def input_clamp_without_log_ratio(term: KLTerm) -> str | None:
    if term.input_clamp is not None and not is_sampled(term):
        return f"input_clamp bounds a log-ratio, and {term.estimator} reads none"
    return None


def window_without_prefix(term: KLTerm) -> str | None:
    if term.window is not None and correction_scope(term) != "prefix":
        return f"window limits the ratios of a prefix, and correction {term.correction} has no prefix"
    return None


def tail_weighted_twice(term: KLTerm) -> str | None:
    # top_k samples the tail of the vocabulary, and weights it by the ratio of the sampled token.
    if term.needs != "top_k" or correction_scope(term) == "none":
        return None
    if correction_has_own_token(term):
        return f"{term.estimator} has the ratio of its own token in its tail; use none or prefix_previous"
    return None


# --- what one estimate is of ------------------------------------------------------------------------------------------


def whole_vocabulary_of_a_sequence(term: KLTerm) -> str | None:
    if not is_sampled(term) and term.level == "sequence":
        return f"{term.estimator} sums over the vocabulary at each prefix, and level sequence has none"
    return None


def discount_without_later_costs(term: KLTerm) -> str | None:
    if term.discount != 1 and term.credit != "to_go":
        return f"discount fades the costs of later tokens, and credit is {term.credit}; use credit: to_go"
    return None


# --- baselines and weights --------------------------------------------------------------------------------------------


def exact_baseline_of_an_exact_cost(term: KLTerm) -> str | None:
    if term.baseline == "exact" and not is_sampled(term):
        return f"{term.estimator} has no noise that the exact KL of the prefix could take away; leave baseline out"
    return None


def batch_baseline_of_another_cost(term: KLTerm) -> str | None:
    is_of_one_token = is_sampled(term) and term.credit == "own"
    if term.baseline == "batch" and not is_of_one_token:
        return "baseline: batch centres the token's own sampled estimate; use credit: own and a sampled estimator"
    return None


# --- centred scores ---------------------------------------------------------------------------------------------------


def centred_score_in_loss(term: KLTerm) -> str | None:
    if term.score_centring is not None and term.placement == "loss":
        return "score_centring is of the score that a cost weights, and a term in loss has none; leave it out"
    return None


def centred_score_of_the_policy_loss(term: KLTerm) -> str | None:
    if term.score_centring is not None and term.baseline == "before":
        return (
            "before the baseline the cost weights the policy loss's score, which score_centring does not reach; "
            "use baseline: after or own"
        )
    return None


def centred_score_with_ratio(term: KLTerm) -> str | None:
    if term.score_centring is not None and term.correction != "none":
        return (
            "score_centring takes out the mean of a score without a ratio, and correction is "
            f"{term.correction}; use none"
        )
    return None


def centred_score_without_cost(term: KLTerm) -> str | None:
    # The own step of an exact cost is differentiated, so that with credit own nothing weights a score.
    if term.score_centring is not None and not is_sampled(term) and term.credit == "own":
        return (
            f"with credit own {term.estimator} is differentiated and weights no score; use to_go or total, or leave "
            "score_centring out"
        )
    return None


def weight_power_without_weight(term: KLTerm) -> str | None:
    if term.weight == "none" and term.weight_power != 1:
        return "weight_power is the exponent of weight, and weight is none"
    return None


def weight_of_a_sequence(term: KLTerm) -> str | None:
    if term.weight != "none" and term.level == "sequence":
        return "weight is of a token, and level sequence has one estimate for the whole completion"
    return None


# --- references, anchors and gradients --------------------------------------------------------------------------------


def recorded_whole_vocabulary(term: KLTerm) -> str | None:
    if not is_sampled(term) and term.anchor == "behaviour":
        return f"{term.estimator} needs the full distribution, and rollouts record sampled log-probs only"
    return None


def k2_gradient_of_an_exact_value(term: KLTerm) -> str | None:
    if not is_sampled(term) and term.gradient == "k2":
        return f"{term.estimator} already has the gradient of its own KL; gradient: k2 is for sampled estimates"
    return None


def correction_by_token_of_a_sequence(term: KLTerm) -> str | None:
    # In loss the corrections of a token have a rule of their own, with its advice.
    allowed = ("none", "sequence", "token", "token_detached")
    if term.level == "sequence" and term.correction not in allowed:
        return f"correction {term.correction} weights per-token costs, and level sequence has one cost"
    return None


def sampler_to_itself(term: KLTerm) -> str | None:
    if term.anchor == "behaviour" and term.reference == "sampler":
        return "the log-ratio of the sampler to itself is zero everywhere"
    return None


# --- terms in loss ----------------------------------------------------------------------------------------------------


def credit_in_loss(term: KLTerm) -> str | None:
    if term.placement == "loss" and term.credit is not None:
        return "credit says which costs weight a score, and a term in loss has no score; leave credit out"
    return None


def baseline_in_loss(term: KLTerm) -> str | None:
    if term.placement == "loss" and term.baseline is not None:
        return "baseline is about costs in the reward; leave baseline out"
    return None


def recorded_in_loss(term: KLTerm) -> str | None:
    if term.placement == "loss" and term.anchor == "behaviour":
        return "log-probs frozen at rollout carry no gradient, so a term in loss would do nothing"
    return None


def token_ratio_of_a_sequence_in_loss(term: KLTerm) -> str | None:
    if term.placement != "loss" or term.level != "sequence":
        return None
    if term.correction in ("token", "token_detached"):
        return f"correction {term.correction} is per token, and level sequence has one ratio; use sequence"
    return None


# --- terms in reward --------------------------------------------------------------------------------------------------


def gradient_in_reward(term: KLTerm) -> str | None:
    if term.placement == "reward" and term.gradient != "natural":
        return "gradient is for terms in loss; in reward the estimate is a detached cost"
    return None


def partial_credit_of_a_sequence(term: KLTerm) -> str | None:
    if term.placement == "reward" and term.level == "sequence" and term.credit != "total":
        return f"level sequence has one cost for the whole completion, so credit must be total, not {term.credit}"
    return None


def corrected_twice(term: KLTerm) -> str | None:
    # Before the baseline the cost becomes part of the return, and the policy loss has a ratio of its own.
    if term.placement != "reward" or term.baseline != "before" or term.correction == "none":
        return None
    if correction_weights_the_cost(term):
        return None
    return (
        "before the baseline the cost is part of the reward, and the policy loss weights its score; "
        f"correction {term.correction} would weight it twice (use baseline: after)"
    )


RULES = (
    cap_without_ratio,
    clip_of_more_than_a_token,
    clip_outside_its_range,
    input_clamp_without_log_ratio,
    window_without_prefix,
    tail_weighted_twice,
    whole_vocabulary_of_a_sequence,
    discount_without_later_costs,
    exact_baseline_of_an_exact_cost,
    batch_baseline_of_another_cost,
    centred_score_in_loss,
    centred_score_of_the_policy_loss,
    centred_score_with_ratio,
    centred_score_without_cost,
    weight_power_without_weight,
    weight_of_a_sequence,
    recorded_whole_vocabulary,
    k2_gradient_of_an_exact_value,
    correction_by_token_of_a_sequence,
    sampler_to_itself,
    credit_in_loss,
    baseline_in_loss,
    recorded_in_loss,
    token_ratio_of_a_sequence_in_loss,
    gradient_in_reward,
    partial_credit_of_a_sequence,
    corrected_twice,
)
"""In the order in which they are asked. Rules in loss and in reward come last, because most of them would also apply to
terms that an earlier rule explains better."""
