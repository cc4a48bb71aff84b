"""What ``check`` is asked for: regimes, claims near the reference, the seed of the holes, beta."""

import pytest
import torch

from kl_comedy.conformance import check


def k2(logp, ref_logp, mask):
    return 0.5 * (logp - ref_logp) ** 2 * mask


def summed_k2(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask).sum()


def mean_k2(logp, ref_logp, mask):
    return summed_k2(logp, ref_logp, mask) / mask.sum()


@pytest.mark.parametrize("loss", [summed_k2, pytest.param(mean_k2, marks=pytest.mark.slow)])
def test_a_scalar_in_the_shape_of_one_number_is_a_scalar(loss):
    """Torch differentiates it as it does a scalar."""

    def in_shape_one(logp, ref_logp, mask):
        return loss(logp, ref_logp, mask).reshape(1)

    asked = {"claims": "token_reverse"}
    check(in_shape_one, **asked).assert_ok()
    assert str(check(in_shape_one, **asked)) == str(check(loss, **asked)).replace(loss.__name__, "in_shape_one")


def infinite_far_from_the_reference(logp, ref_logp, mask):
    """k2, infinite at log-ratios of four nats and more."""
    is_near = (logp - ref_logp).abs() < 4
    return torch.where(is_near, k2(logp, ref_logp, mask), torch.inf)


def test_a_claim_for_a_regime_is_checked_though_the_regime_is_not_asked_for():
    report = check(k2, claims={"off_policy": "token_reverse"}, regimes=("on_policy",))
    assert [finding.regime for finding in report.findings] == ["on_policy", "off_policy"]
    assert not report.ok


def test_what_is_not_finite_far_from_the_reference_is_no_problem_of_a_claim_near_it():
    asked = {"claims": "token_reverse", "regimes": ("on_policy",), "masked_tokens": "absent"}
    check(infinite_far_from_the_reference, near_only=True, **asked).assert_ok()
    problems = check(infinite_far_from_the_reference, **asked).problems
    assert any(problem.startswith("finite: the value is not finite") for problem in problems), problems


def test_values_must_be_finite_at_twenty_nats():
    """Training reaches them; only log-ratios of impossible tokens are beyond what a loss must bear."""

    def overflows(logp, ref_logp, mask):
        return torch.where((logp - ref_logp).abs() < 20, k2(logp, ref_logp, mask), torch.inf)

    problems = check(overflows, claims="token_reverse", regimes=("on_policy",)).problems
    assert any(problem.startswith("finite: the value is not finite") for problem in problems), problems


def test_the_token_whose_value_is_not_finite_is_named_by_its_number():
    def second_is_infinite(logp, ref_logp, mask):
        is_second = torch.arange(mask.shape[1]) == 1
        return torch.where(is_second & mask, torch.inf, k2(logp, ref_logp, mask))

    (problem,) = check(second_is_infinite, claims="none", regimes=("on_policy",), masked_tokens="absent").problems
    assert problem.startswith("finite: the value is not finite at token 2, with the mask 1 1")


def test_a_gradient_that_is_not_finite_has_no_nearest_target():
    def root_of_zero(logp, ref_logp, mask):
        return ((logp - ref_logp) * 0).sqrt() * mask

    finding = check(root_of_zero, claims="token_reverse", regimes=("on_policy",)).findings[0]
    assert str(finding) == "on_policy: none: its expected gradient is not finite [claimed: token_reverse]"


def test_the_nearest_target_may_be_the_one_that_is_driven_away_from():
    def negative(logp, ref_logp, mask):
        return -k2(logp, ref_logp, mask)

    finding = check(negative, claims="none", regimes=("on_policy",)).findings[0]
    assert str(finding).startswith("on_policy: none: nearest to token_reverse, cosine -1.00")


def test_digits_that_a_loss_loses_in_float32_are_a_problem():
    def cancels(logp, ref_logp, mask):
        return 0.5 * ((logp + 1e6) - (ref_logp + 1e6)) ** 2 * mask

    report = check(cancels, claims="token_reverse", regimes=("on_policy",))
    assert report.findings[0].target == "token_reverse"
    (problem,) = report.problems
    assert problem.startswith("dtype: in float32 the gradient differs from that in float64 by ")


def test_a_claim_near_the_reference_is_not_one_everywhere():
    def clamped(logp, ref_logp, mask):
        log_ratio = logp - ref_logp
        return torch.where(log_ratio.abs() < 2, 0.5 * log_ratio**2, log_ratio.abs()) * mask

    asked = {"claims": "token_reverse", "regimes": ("on_policy",)}
    check(clamped, near_only=True, **asked).assert_ok()
    assert not check(clamped, **asked).ok


def log_probs_in_holes(seed):
    """What a loss is given as log-probs of the reference at masked tokens within completions of the first policy.

    It is one of the policies that do not depend on the seed.
    """
    given = []

    def loss(logp, ref_logp, mask):
        if len(mask) > 1:
            given.append(ref_logp[(ref_logp != 0) & ~mask].tolist())
        return k2(logp, ref_logp, mask)

    check(loss, claims="token_reverse", regimes=("on_policy",), seed=seed).assert_ok()
    assert given[0], "no completion has a hole"
    return given[0]


def test_the_seed_draws_what_stands_in_the_holes_too():
    first, again, other = (log_probs_in_holes(seed) for seed in (0, 0, 1))
    assert first == again
    assert not set(first) & set(other)


def test_beta_is_compared_in_every_regime_that_is_claimed():
    def twice_off_policy(logp, ref_logp, behaviour_logp, mask):
        """k3 with the ratio of each token, twice as strong where policy and sampler differ."""
        log_ratio = logp - ref_logp
        coefficient = torch.where((logp - behaviour_logp).abs() > 1e-9, 0.08, 0.04)
        return coefficient * (logp - behaviour_logp).exp() * ((-log_ratio).exp() - 1 + log_ratio) * mask

    claims = {"on_policy": "token_reverse", "off_policy": "token_reverse"}
    report = check(twice_off_policy, claims=claims, regimes=tuple(claims), beta=0.04)
    on_policy, off_policy = report.findings
    assert on_policy.cause == ""
    assert "the coefficient is 0.08 and not beta, 0.04 (2 times)" in off_policy.cause
    assert not report.ok


@pytest.mark.parametrize("coefficient", [0.0404, 0.0396])
def test_a_beta_that_is_one_percent_off_is_another_one(coefficient):
    def loss(logp, ref_logp, mask):
        return coefficient * k2(logp, ref_logp, mask)

    assert not check(loss, claims="token_reverse", regimes=("on_policy",), beta=0.04).ok
