"""Each mistake that trainers have made is named in one line of the report, with the smallest batch that shows it."""

import time

import pytest
import torch

from kl_comedy.conformance import check
from kl_comedy.kl.claims import REGIMES

ON = {"claims": "token_reverse", "regimes": ("on_policy",)}
OFF = {"claims": {"off_policy": "token_reverse"}, "regimes": ("off_policy",)}


def k2(logp, ref_logp):
    return 0.5 * (logp - ref_logp) ** 2


def k3(logp, ref_logp):
    return torch.expm1(ref_logp - logp) - (ref_logp - logp)


def completion_log_ratio(logp, behaviour_logp, mask):
    return ((logp - behaviour_logp) * mask).sum(-1, keepdim=True)


def swapped_arguments(logp, ref_logp, mask):
    """RLinf's FSDP path."""
    return k3(ref_logp, logp) * mask


def swapped_sign(logp, ref_logp, mask):
    return (ref_logp - logp).detach() * logp * mask


def value_without_its_gradient(logp, ref_logp, mask):
    """k3 in the loss: the commonest form."""
    return k3(logp, ref_logp) * mask


def value_of_a_completion_without_its_gradient(logp, ref_logp, mask):
    """The same, where the values of the tokens are not returned."""
    return (k3(logp, ref_logp) * mask).sum(-1)


def value_of_one_completion_without_its_gradient(logp, ref_logp, mask):
    return (k3(logp, ref_logp) * mask).sum()


def forward_over_the_vocabulary(logp_full, ref_logp_full, mask):
    return (ref_logp_full.exp() * (ref_logp_full - logp_full)).sum(-1) * mask


def without_a_ratio(logp, ref_logp, mask):
    return k2(logp, ref_logp) * mask


def ratio_of_the_completion(logp, ref_logp, behaviour_logp, mask):
    ratio = completion_log_ratio(logp, behaviour_logp, mask).exp().detach()
    return (ratio * k2(logp, ref_logp) * mask).sum(-1)


def mean_ratio_of_the_completion(logp, ref_logp, behaviour_logp, mask):
    """TRL #7188: GSPO's ratio on the KL."""
    mean = completion_log_ratio(logp, behaviour_logp, mask) / mask.sum(-1, keepdim=True).clamp(min=1)
    return (mean.exp().detach() * k2(logp, ref_logp) * mask).sum(-1)


def cost_of_the_completion(logp, ref_logp, mask):
    return ((logp - ref_logp) * mask).sum(-1).detach() * (logp * mask).sum(-1)


def mean_over_each_completion(logp, ref_logp, mask):
    return (k2(logp, ref_logp) * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def top_k_with_half_a_tail(logp, ref_logp, logp_full, ref_logp_full, tokens, mask):
    """EMA-PG's released function: the head is differentiated as it stands, the sampled tail has no derivative."""
    top, index = logp_full.topk(2, -1)
    head = (top.exp() * (top - ref_logp_full.gather(-1, index))).sum(-1)
    is_outside = ~(index == tokens[..., None]).any(-1)
    return (head + is_outside * (logp - ref_logp).detach() * logp) * mask


def top_k_with_its_tail(logp, ref_logp, logp_full, ref_logp_full, tokens, mask):
    index = logp_full.topk(2, -1).indices
    is_outside = ~(index == tokens[..., None]).any(-1)
    missing = is_outside * (logp - logp.detach()) * mask
    return top_k_with_half_a_tail(logp, ref_logp, logp_full, ref_logp_full, tokens, mask) + missing


def top_k_without_a_tail(logp_full, ref_logp_full, mask):
    top, index = logp_full.topk(2, -1)
    return (top.exp() * (top - ref_logp_full.gather(-1, index))).sum(-1) * mask


def sum_to_go(value):
    return value.flip(-1).cumsum(-1).flip(-1)


def cost_with_a_gradient(logp, ref_logp, mask):
    return (logp - ref_logp) * logp * mask


def costs_to_go_with_a_gradient(logp, ref_logp, mask):
    return sum_to_go((logp - ref_logp) * mask) * logp * mask


def ratio_without_its_gradient(logp, ref_logp, behaviour_logp, mask):
    return (logp - behaviour_logp).exp().detach() * k3(logp, ref_logp) * mask


def ratio_on_k2_with_a_gradient(logp, ref_logp, behaviour_logp, mask):
    return (logp - behaviour_logp).exp() * k2(logp, ref_logp) * mask


def ratio_squared(logp, ref_logp, behaviour_logp, mask):
    return (2 * (logp - behaviour_logp)).exp().detach() * k2(logp, ref_logp) * mask


def ratio_upside_down(logp, ref_logp, behaviour_logp, mask):
    return (behaviour_logp - logp).exp().detach() * k2(logp, ref_logp) * mask


def ratio_upside_down_with_a_gradient(logp, ref_logp, behaviour_logp, mask):
    return (behaviour_logp - logp).exp() * k3(logp, ref_logp) * mask


def ratio_clipped(logp, ref_logp, behaviour_logp, mask):
    return (logp - behaviour_logp).exp().detach().clamp(0.8, 1.2) * k2(logp, ref_logp) * mask


def towards_the_sampler(logp, ref_logp, behaviour_logp, mask):
    return (logp - behaviour_logp).exp().detach() * k2(logp, behaviour_logp) * mask


def entropy_alone(logp_full, ref_logp_full, mask):
    return (logp_full.exp() * logp_full).sum(-1) * mask


def first_token_dropped(logp, ref_logp, mask):
    return (k2(logp, ref_logp) * mask)[:, 1:].sum(-1)


def last_token_dropped(logp, ref_logp, mask):
    count = mask.cumsum(-1)
    return k2(logp, ref_logp) * (mask & (count < count[:, -1:]))


def probabilities_detached(logp_full, ref_logp_full, mask):
    return (logp_full.exp().detach() * (logp_full - ref_logp_full)).sum(-1) * mask


def value_clamped(logp, ref_logp, mask):
    return k2(logp, ref_logp).clamp(max=10) * mask


def log_ratio_clamped(logp, ref_logp, mask):
    return 0.5 * (logp - ref_logp).clamp(-20, 20) ** 2 * mask


CAUSES = [
    (cost_with_a_gradient, ON, "a detach is missing"),
    (ratio_without_its_gradient, OFF, "the ratio is detached"),
    (ratio_on_k2_with_a_gradient, OFF, "the ratio on k2 has a gradient: detach"),
    (ratio_squared, OFF, "each token's ratio is applied twice, or squared"),
    (ratio_upside_down, OFF, "each token's ratio is upside down"),
    (ratio_upside_down_with_a_gradient, OFF, "each token's ratio is upside down"),
    (ratio_clipped, OFF, "the ratio is clipped: it is 0.8 to 1.2 and not 0.495"),
    (towards_the_sampler, OFF, "the reference does not enter the gradient"),
    (entropy_alone, ON, "the reference does not enter the gradient"),
    (first_token_dropped, ON, "the first token of every completion has no gradient"),
    (last_token_dropped, ON, "the last token of every completion has no gradient"),
    (probabilities_detached, ON, "the probabilities of the sum over the vocabulary are detached"),
    (value_clamped, ON, "clamped: a token has no gradient where logp - ref_logp is above 4.14 or below -4.31"),
    (log_ratio_clamped, ON, "clamped: a token has no gradient where logp - ref_logp is above 19.9 or below -18.2"),
    (swapped_arguments, ON, "token_chi_square, times 0.5: .* policy against reference"),
    (swapped_arguments, ON, "logp and ref_logp are exchanged: in the other order it is token_forward"),
    (swapped_sign, ON, "wrong sign"),
    (value_without_its_gradient, ON, "wrong direction: the gradient is the forward KL's"),
    (value_without_its_gradient, ON, "multiply each token's value by its ratio"),
    (value_without_its_gradient, OFF, "multiply each token's value by its ratio"),
    (value_of_a_completion_without_its_gradient, OFF, "multiply each token's value by its ratio"),
    (value_of_one_completion_without_its_gradient, OFF, "multiply each token's value by its ratio"),
    (forward_over_the_vocabulary, ON, "wrong direction: the gradient is the forward KL's"),
    (without_a_ratio, OFF, r"a ratio is missing: multiply each token by its own exp\(logp - behaviour_logp\)"),
    (ratio_of_the_completion, OFF, "the ratio of the whole completion stands where each token's own"),
    (mean_ratio_of_the_completion, OFF, r"the mean ratio of the whole completion \(GSPO's\)"),
    (cost_of_the_completion, ON, "a cost of the whole completion stands where a token's is meant"),
    (mean_over_each_completion, ON, "a mean over the wrong axis: each completion is divided by its number of tokens"),
    (top_k_with_half_a_tail, ON, "the gradient of the tail is missing in part: .* policy's 2 likeliest tokens"),
    (top_k_without_a_tail, ON, "the tail is missing: only the 2 likeliest tokens of the policy"),
]


@pytest.mark.parametrize(("loss", "asked", "cause"), CAUSES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mistake_is_named_in_one_line_with_its_smallest_batch(loss, asked, cause):
    report = check(loss, **asked)
    with pytest.raises(AssertionError, match=f"FAILED [a-z_]+: .*{cause}.*claimed: token_reverse") as error:
        report.assert_ok()
    assert report.problems == ()
    # The batch is there to be computed by hand: few completions of few tokens.
    example = report.example.splitlines()
    assert example[0].startswith("smallest failing batch")
    assert 2 <= len(example) - 2 <= 7
    assert all("mask [1" in line and "loss [" in line for line in example[1:-1])
    assert "expected gradient" in example[-1]
    assert report.example in str(error.value)


def test_a_cause_says_the_same_of_a_loss_with_a_coefficient():
    def scaled(logp, ref_logp, logp_full, ref_logp_full, tokens, mask):
        return 0.04 * top_k_with_half_a_tail(logp, ref_logp, logp_full, ref_logp_full, tokens, mask)

    cause = check(top_k_with_half_a_tail, **ON).findings[0].cause
    assert "is left over, 1 times" in cause
    assert check(scaled, **ON).findings[0].cause == cause


def forward_of_completions(logp, ref_logp, mask):
    """Minus the score of each token, weighted by reference over policy up to it."""
    ratio = ((ref_logp - logp) * mask).cumsum(-1).exp().detach()
    return -ratio * logp * mask


def costs_to_go(logp, ref_logp, mask):
    costs = ((logp - ref_logp) * mask).detach()
    return costs.flip(-1).cumsum(-1).flip(-1) * logp * mask


def costs_to_go_with_the_token_ratio(logp, ref_logp, behaviour_logp, mask):
    return (logp - behaviour_logp).exp().detach() * costs_to_go(logp, ref_logp, mask)


def costs_of_their_own_token(logp, ref_logp, mask):
    return (logp - ref_logp).detach() * logp * mask


OF_COMPLETIONS = [
    (forward_of_completions, "off_policy", "sequence_forward", "multiply each token by the ratio of its prefix"),
    (costs_to_go, "off_policy", "sequence_reverse", "multiply by the ratio of the whole completion"),
    (
        costs_to_go_with_the_token_ratio,
        "off_policy",
        "sequence_reverse",
        "each token's own ratio stands where the ratio of the whole completion is meant",
    ),
    (costs_of_their_own_token, "on_policy", "sequence_reverse", "each token's cost reaches that token alone"),
    (without_a_ratio, "on_policy", "token_forward", "wrong direction: the gradient is the reverse KL's"),
    (costs_to_go, "on_policy", "sequence_forward", "wrong direction: the gradient is the reverse KL's"),
    (forward_of_completions, "on_policy", "sequence_reverse", "wrong direction: the gradient is the forward KL's"),
    (value_without_its_gradient, "on_policy", "sequence_reverse", "the forward KL's, token by token"),
    (forward_over_the_vocabulary, "on_policy", "token_reverse", "logp and ref_logp are exchanged"),
]


@pytest.mark.parametrize(
    ("loss", "regime", "claimed", "cause"), OF_COMPLETIONS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_mistake_is_named_for_each_claim(loss, regime, claimed, cause):
    report = check(loss, claims={regime: claimed}, regimes=(regime,))
    assert not report.ok
    assert cause in report.findings[0].cause


def test_a_detach_that_is_missing_on_costs_to_go_is_named():
    report = check(costs_to_go_with_a_gradient, claims="sequence_reverse", regimes=("on_policy",))
    assert "a detach is missing" in report.findings[0].cause


def test_the_repaired_losses_have_no_cause():
    repaired = [top_k_with_its_tail, without_a_ratio]
    for loss in repaired:
        report = check(loss, **ON)
        report.assert_ok()
        assert report.findings[0].cause == ""
        assert report.example == ""


@pytest.mark.parametrize(
    ("coefficient", "cause"),
    [
        (0.0016, "beta is applied twice: the coefficient is 0.0016 and not 0.04"),
        (1.0, "beta is not applied: the coefficient is 1 and not 0.04"),
        (0.08, r"the coefficient is 0.08 and not beta, 0.04 \(2 times\)"),
    ],
)
def test_the_coefficient_must_be_beta_where_it_is_given(coefficient, cause):
    def loss(logp, ref_logp, mask):
        return coefficient * k2(logp, ref_logp) * mask

    with pytest.raises(AssertionError, match=cause):
        check(loss, beta=0.04, **ON).assert_ok()
    check(loss, beta=coefficient, **ON).assert_ok()
    check(loss, **ON).assert_ok()


def test_a_divergence_can_be_claimed_and_counts_as_none_otherwise():
    check(swapped_arguments, claims="none", regimes=("on_policy",)).assert_ok()
    report = check(swapped_arguments, claims="token_chi_square", regimes=("on_policy",), near_only=True)
    report.assert_ok()
    assert report.findings[0].coefficient == pytest.approx(0.5)


def jensen_shannon(logp_full, ref_logp_full, mask):
    middle = ((logp_full.exp() + ref_logp_full.exp()) / 2).log()
    policy = logp_full.exp() * (logp_full - middle)
    reference = ref_logp_full.exp() * (ref_logp_full - middle)
    return 0.5 * (policy + reference).sum(-1) * mask


def total_variation(logp_full, ref_logp_full, mask):
    return 0.5 * (logp_full.exp() - ref_logp_full.exp()).abs().sum(-1) * mask


def reference_chi_square(logp_full, ref_logp_full, mask):
    return (2 * ref_logp_full - logp_full).exp().sum(-1) * mask


def square_under_the_policy(logp, ref_logp, behaviour_logp, mask):
    """k2 times a ratio that is differentiated, as with slime's --use-unbiased-kl."""
    return (logp - behaviour_logp).exp() * k2(logp, ref_logp) * mask


def square_under_the_reference(logp, ref_logp, mask):
    """``r log r - r + 1`` with ``r = reference / policy``."""
    log_r = ref_logp - logp
    return (log_r.exp() * log_r - log_r.exp() + 1) * mask


def as_a_cost(estimate_BT, logp, mask):
    """Later estimates weight the score of each token, as a detached cost of the reward does."""
    cost_BT = (estimate_BT * mask).detach()
    return cost_BT.flip(-1).cumsum(-1).flip(-1) * logp * mask


def k2_as_a_cost(logp, ref_logp, mask):
    return as_a_cost(k2(logp, ref_logp), logp, mask)


def k3_as_a_cost(logp, ref_logp, mask):
    return as_a_cost((ref_logp - logp).exp() - 1 - (ref_logp - logp), logp, mask)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (k2_as_a_cost, "sequence_k2_cost"),
        (k3_as_a_cost, "sequence_k3_cost"),
        (jensen_shannon, "token_jensen_shannon"),
        (total_variation, "token_total_variation"),
        (reference_chi_square, "token_reference_chi_square"),
        (square_under_the_policy, "token_policy_square"),
        (square_under_the_reference, "token_reference_square"),
    ],
)
def test_other_divergences_are_named(loss, name):
    finding = check(loss, **ON).findings[0]
    assert finding.near_target == name
    assert finding.coefficient == pytest.approx(1)
    assert f"{name}, times 1: " in str(finding)


def test_an_estimate_as_a_cost_is_the_cause():
    report = check(k3_as_a_cost, claims="sequence_reverse", regimes=("on_policy",))
    assert not report.ok
    assert "k3 is a cost, where k1 has the gradient of the reverse KL" in str(report)


def overflows_in_float32(logp, ref_logp, mask):
    """A scale that float64 alone can hold."""
    return (k2(logp, ref_logp) * 1e200) * 1e-200 * mask


def for_double_alone(logp, ref_logp, mask):
    if logp.dtype != torch.float64:
        raise TypeError("double expected")
    return k2(logp, ref_logp) * mask


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (overflows_in_float32, "dtype: in float32 the value or the gradient is not finite"),
        (for_double_alone, "dtype: in bfloat16: loss_fn: it raised TypeError: double expected"),
    ],
)
def test_a_loss_that_fails_in_the_dtypes_of_training_is_named(loss, problem):
    report = check(loss, **ON)
    assert any(found.startswith(problem) for found in report.problems), report.problems
    assert "smallest batch" in report.example


def test_a_leak_shows_the_smallest_batch_with_masked_tokens():
    def leaking(logp, ref_logp, mask):
        return (logp - ref_logp).flip(-1).cumsum(-1).flip(-1).detach() * logp * mask

    report = check(leaking, claims="sequence_reverse", regimes=("on_policy",))
    assert not report.ok
    header, *rows = report.problem_example.splitlines()
    assert header.startswith("smallest batch with masked tokens")
    assert any("mask [1 0 0 1]" in row for row in rows)


def test_a_divergence_that_is_hit_everywhere_still_counts_as_none():
    check(total_variation, claims="none", regimes=("on_policy",)).assert_ok()


def test_a_check_takes_less_than_five_seconds():
    """In all regimes, of a loss for which every completion is called alone and a cause is searched."""
    start = time.process_time()
    check(value_of_one_completion_without_its_gradient, claims=dict.fromkeys(REGIMES, "token_reverse"))
    assert time.process_time() - start < 5
