"""What docs/symptoms states about values and gradients, computed exactly: by enumeration or by hand, in float64.

Legend: ``N`` prefixes, ``V`` tokens, ``B`` completions, ``T`` tokens of a completion. Log-probs in nats.
"""

import math

import pytest
import torch

from kl_comedy.kl import KLTerm
from kl_comedy.kl.estimators import k1, k2, k3
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient

TREE = Tree.build(vocabulary=3, length=3)


def small_policy(**options):
    options = {"regime": "on_policy", "distance": 0.8, "staleness": 0.5, "seed": 3, **options}
    return Instance.random(TREE, InstanceSettings(**options))


def completion_log_prob(logp_NV):
    """The log-prob of each completion, ``[B]``."""
    everything = TREE.all
    logp_BT = logp_NV[everything.prefix_BT, everything.token_BT]
    return torch.where(everything.mask_BT, logp_BT, 0.0).sum(-1)


def sequence_kl(from_NV, to_NV):
    """KL of completions, by enumeration."""
    from_B = completion_log_prob(from_NV)
    return float((from_B.exp() * (from_B - completion_log_prob(to_NV))).sum())


# --- negative.md --------------------------------------------------------------------------------------------------
def test_a_third_of_the_batches_have_a_negative_mean_of_k1():
    """Two tokens, KL 0.005 nats: the mean of k1 over 64 independent tokens, by the binomial distribution."""
    policy_V = torch.tensor([0.5, 0.5], dtype=torch.float64)
    reference_V = torch.tensor([0.45, 0.55], dtype=torch.float64)
    k1_V = k1(policy_V.log() - reference_V.log())
    kl = float((policy_V * k1_V).sum())
    standard_deviation = math.sqrt(float((policy_V * k1_V**2).sum()) - kl**2)
    assert kl == pytest.approx(0.005, abs=5e-5)
    assert standard_deviation == pytest.approx(math.sqrt(2 * kl), rel=0.02)

    negative = 0.0
    for first_tokens in range(65):
        if first_tokens * float(k1_V[0]) + (64 - first_tokens) * float(k1_V[1]) < 0:
            negative += math.comb(64, first_tokens) / 2**64
    assert negative == pytest.approx(0.35, abs=0.005)


@pytest.mark.parametrize("seed", range(5))
def test_on_stale_samples_the_mean_of_k1_is_a_difference_of_two_kls(seed):
    stale = small_policy(regime="off_policy", seed=seed)
    policy_NV = stale.policy_logp().detach()
    sampler_B = completion_log_prob(stale.sampler_logp_NV)
    k1_B = k1(completion_log_prob(policy_NV) - completion_log_prob(stale.ref_logp_NV))
    mean = float((sampler_B.exp() * k1_B).sum())
    to_reference = sequence_kl(stale.sampler_logp_NV, stale.ref_logp_NV)
    to_policy = sequence_kl(stale.sampler_logp_NV, policy_NV)
    assert mean == pytest.approx(to_reference - to_policy, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_where_the_sampler_is_the_reference_the_mean_of_k1_is_negative(seed):
    """However large the batch, while the KL is positive."""
    moved = small_policy(seed=seed)
    policy_NV = moved.policy_logp().detach()
    k1_B = k1(completion_log_prob(policy_NV) - completion_log_prob(moved.ref_logp_NV))
    mean = float((completion_log_prob(moved.ref_logp_NV).exp() * k1_B).sum())
    assert mean == pytest.approx(-sequence_kl(moved.ref_logp_NV, policy_NV), abs=1e-12)
    assert mean < -0.05
    assert sequence_kl(policy_NV, moved.ref_logp_NV) > 0.05


@pytest.mark.parametrize(
    ("dtype", "lowest"), [(torch.float32, -6e-8), (torch.bfloat16, -4e-3)], ids=["float32", "bfloat16"]
)
def test_rounding_makes_k3_negative_unless_it_is_computed_with_expm1(dtype, lowest):
    sizes = torch.logspace(-6, -1, 2000, dtype=torch.float64)
    log_ratio = torch.cat([sizes, -sizes]).to(dtype)
    as_written = torch.exp(-log_ratio) - 1 + log_ratio
    assert float(as_written.min()) == pytest.approx(lowest, rel=0.05)
    assert float(k3(log_ratio).min()) >= 0


# --- nan.md -------------------------------------------------------------------------------------------------------
def test_k3_overflows_at_the_largest_number_of_its_dtype():
    assert math.log(torch.finfo(torch.float32).max) == pytest.approx(88.7, abs=0.03)
    assert math.log(torch.finfo(torch.float16).max) == pytest.approx(11.1, abs=0.03)
    assert torch.isinf(k3(torch.tensor(-89.0)))
    assert torch.isfinite(k3(torch.tensor(-88.0)))


def gradient(function, log_ratio):
    leaf = torch.tensor(log_ratio, requires_grad=True)  # float32, in which trainers compute the loss
    function(leaf).backward()
    return float(leaf.grad)


def test_a_clamp_or_a_mask_behind_the_exponential_leaves_a_gradient_that_is_nan():
    """0 times infinity; the value looks right."""

    def clamped_behind(log_ratio):
        return (torch.exp(-log_ratio) - 1 + log_ratio).clamp(max=10)

    def clamped_before(log_ratio):
        return clamped_behind(log_ratio.clamp(min=-20))

    def masked_behind(log_ratio):
        value = torch.exp(-log_ratio) - 1 + log_ratio
        return torch.where(torch.tensor(False), value, torch.zeros(()))

    def masked_before(log_ratio):
        return clamped_behind(torch.where(torch.tensor(False), log_ratio, torch.zeros(())))

    assert float(clamped_behind(torch.tensor(-100.0))) == 10
    assert float(masked_behind(torch.tensor(-100.0))) == 0
    assert math.isnan(gradient(clamped_behind, -100.0))
    assert math.isnan(gradient(masked_behind, -100.0))
    assert gradient(clamped_before, -100.0) == 0
    assert gradient(masked_before, -100.0) == 0


# --- spikes.md ----------------------------------------------------------------------------------------------------
RARE = torch.tensor([1e-4, 0.9999], dtype=torch.float64)
"""A policy that has almost given up a token to which the reference gives 0.3."""
REFERENCE = torch.tensor([0.3, 0.7], dtype=torch.float64)


def test_one_rare_token_carries_most_of_the_mean_of_k3():
    log_ratio_V = RARE.log() - REFERENCE.log()
    k3_V = k3(log_ratio_V)
    kl = float((RARE * log_ratio_V).sum())
    assert kl == pytest.approx(0.356, abs=5e-4)
    assert float((RARE * k3_V).sum()) == pytest.approx(kl, rel=1e-12)
    # A batch of 1,000 tokens without the rare one, which 90% of them are, and one with it once.
    share_without_it = float(RARE[1]) ** 1000
    assert share_without_it == pytest.approx(0.90, abs=0.006)
    assert float(k3_V[1]) == pytest.approx(0.057, abs=5e-4)
    assert float(k3_V[0] + 999 * k3_V[1]) / 1000 == pytest.approx(3.0, abs=0.06)


def test_at_that_token_the_gradient_of_k3_is_thousands_and_that_of_k2_is_the_log_ratio():
    log_ratio = float((RARE.log() - REFERENCE.log())[0])
    assert gradient(k3, log_ratio) == pytest.approx(-2999, abs=1)
    assert gradient(k2, log_ratio) == pytest.approx(-8.0, abs=0.01)
    assert gradient(lambda value: k3(value).clamp(max=10), log_ratio) == 0


@pytest.mark.parametrize("log_ratio", [-8.0, -0.3, 0.0, 2.0])
def test_the_derivative_of_the_ratio_times_k3_is_the_log_ratio(log_ratio):
    """TRL's and DeepSeek-V3.2's form, on fresh samples: exact for each sample, not in the mean only."""
    derivative = gradient(lambda value: torch.exp(value - value.detach()) * k3(value), log_ratio)
    assert derivative == pytest.approx(log_ratio, abs=2e-4)


# --- step_0.md ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_at_the_reference_no_estimator_pulls(estimator):
    """The expected gradient is zero, and so is that of every completion, except that of k1, which is the score."""
    equal = small_policy(distance=0.0)
    moments = expected_gradient(equal, [KLTerm(estimator, placement="loss")])
    assert float(moments.gradient_D.norm()) < 1e-12
    if estimator == "k1":
        assert moments.variance > 0.1
    else:
        assert moments.variance < 1e-20


def test_a_step_of_bfloat16_weights_below_half_their_spacing_is_lost():
    weight = torch.tensor(1.0, dtype=torch.bfloat16)
    assert weight - torch.tensor(1e-3, dtype=torch.bfloat16) == weight
    assert weight - torch.tensor(5e-3, dtype=torch.bfloat16) < weight


# --- top_p.md -----------------------------------------------------------------------------------------------------
def test_with_top_p_the_ratio_of_a_fresh_token_is_the_mass_that_was_kept():
    """Where the engine reports the log-probs that it drew from. Where it reports raw ones, the ratio is 1."""
    drawn = small_policy(top_p=0.8)
    raw = small_policy(top_p=0.8, records="raw")
    policy_NV = drawn.policy_logp().detach()
    for prefix in range(TREE.prefixes):
        is_kept_V = drawn.sampler_logp_NV[prefix] > -1e3
        kept_mass = float(policy_NV[prefix].exp()[is_kept_V].sum())
        assert 0.8 <= kept_mass <= 1 + 1e-12
        ratio_V = (policy_NV[prefix] - drawn.recorded_logp_NV[prefix]).exp()
        torch.testing.assert_close(ratio_V[is_kept_V], torch.full_like(ratio_V[is_kept_V], kept_mass))
    torch.testing.assert_close(raw.recorded_logp_NV, policy_NV)


@pytest.mark.parametrize("seed", range(5))
def test_with_top_p_a_part_of_the_kl_is_never_drawn(seed):
    """That of the completions with a token that is cut. No ratio brings it back (test_oracle.py has the gradient)."""
    cut = small_policy(seed=seed, top_p=0.8)
    policy_NV = cut.policy_logp().detach()
    policy_B = completion_log_prob(policy_NV)
    k1_B = k1(policy_B - completion_log_prob(cut.ref_logp_NV))
    kl = sequence_kl(policy_NV, cut.ref_logp_NV)

    drawn_B = completion_log_prob(cut.sampler_logp_NV).exp()
    assert abs(float((drawn_B * k1_B).sum()) - kl) > 1e-3

    is_drawn_B = drawn_B > 0
    ratio_B = (policy_B - completion_log_prob(cut.recorded_logp_NV)).exp()
    weighted = float((drawn_B * ratio_B * k1_B)[is_drawn_B].sum())
    missing = float((policy_B.exp() * k1_B)[~is_drawn_B].sum())
    assert weighted == pytest.approx(kl - missing, abs=1e-12)
    assert abs(missing) > 1e-4
