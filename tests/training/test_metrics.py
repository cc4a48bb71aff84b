"""Metrics of an update: exact values, estimates, the policy against its sampler, staleness; micro-batches add up."""

import dataclasses
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.models.types import TokenPass
from kl_comedy.records import FOREIGN_VERSION
from kl_comedy.training.metrics import (
    MetricAccumulator,
    accumulate_behaviour,
    accumulate_divergence,
    staleness_metrics,
)

B, T, V = 5, 4, 7


def dense(seed):
    """Log-probs of a policy and a reference at every prefix, sampled tokens, and a right-padded mask. All float64."""
    g = torch.Generator().manual_seed(seed)
    logp_BTV, logq_BTV = torch.randn(2, B, T, V, generator=g, dtype=torch.float64).log_softmax(-1)
    ids_BT = torch.multinomial(logp_BTV.exp().view(-1, V), 1, generator=g).view(B, T)
    length_B = torch.randint(1, T + 1, (B,), generator=g)
    return logp_BTV, logq_BTV, ids_BT, torch.arange(T)[None] < length_B[:, None]


def pass_of(logp_BTV, logq_BTV, ids_BT, mask_BT):
    """The pass and log-ratios of the training loop, from the dense formulas."""
    p, q = logp_BTV.exp(), logq_BTV.exp()
    ratio_BTV = logp_BTV - logq_BTV

    def inside(values):
        return torch.where(mask_BT, values, 0.0)

    def picked(values):
        return inside(values.gather(2, ids_BT[..., None])[..., 0])

    policy = TokenPass(
        logp_BT=picked(logp_BTV),
        kl_BT=inside((p * ratio_BTV).sum(-1)),
        forward_kl_BT=inside(-(q * ratio_BTV).sum(-1)),
        entropy_BT=inside(-(p * logp_BTV).sum(-1)),
        total_variation_BT=inside((p - q).abs().sum(-1) / 2),
        hidden_NH=None,
    )
    return policy, picked(ratio_BTV)


def divergence_metrics(pieces):
    metrics = MetricAccumulator()
    for dense_piece in pieces:
        policy, log_ratio_BT = pass_of(*dense_piece)
        accumulate_divergence(metrics, dense_piece[3], policy, log_ratio_BT)
    return metrics.values()


LEVELS = ("token", "sequence")
NAMES = {
    *(f"kl/{n}_{level}" for n in ("exact_reverse", "exact_forward", "total_variation") for level in LEVELS),
    *(f"kl/{k}_reverse_{level}" for k in ("k1", "k2", "k3") for level in LEVELS),
    *(f"kl_error/{k}_reverse_{level}" for k in ("k1", "k2", "k3") for level in LEVELS),
    *(f"kl_error/{k}_reverse_{level}_rms" for k in ("k1", "k2", "k3") for level in LEVELS),
    "policy/entropy",
    "policy/entropy_sequence",
    "kl/log_ratio_max",
}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(1, 10**6), cut=st.sets(st.integers(1, B - 1)))
def test_micro_batches_add_up_to_the_batch(seed, cut):
    """Means, root mean squares and maxima alike, however the rows are split."""
    whole = dense(seed)
    edges = [0, *sorted(cut), B]
    pieces = [tuple(part[a:b] for part in whole) for a, b in pairwise(edges)]
    once = divergence_metrics([whole])
    assert set(once) == NAMES
    assert divergence_metrics(pieces) == pytest.approx(once, rel=1e-12, abs=1e-14)


def test_mean_errors_are_the_biases_of_the_estimators():
    """Averaged over every next token with its probability, k1 and k3 are unbiased and k2 is not."""
    logp_V, logq_V = torch.randn(2, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)
    bias = dict.fromkeys(("k1", "k2", "k3"), 0.0)
    for token in range(V):
        one = (logp_V.expand(1, 1, V), logq_V.expand(1, 1, V), torch.tensor([[token]]), torch.tensor([[True]]))
        for name in bias:
            bias[name] += float(logp_V[token].exp()) * divergence_metrics([one])[f"kl_error/{name}_reverse_token"]
    assert abs(bias["k1"]) < 1e-12 and abs(bias["k3"]) < 1e-12
    assert abs(bias["k2"]) > 1e-3


def test_without_exact_values_there_are_no_errors():
    whole = dense(5)
    metrics = MetricAccumulator()
    policy, log_ratio_BT = pass_of(*whole)
    accumulate_divergence(metrics, whole[3], dataclasses.replace(policy, kl_BT=None), log_ratio_BT)
    assert not [name for name in metrics.values() if name.startswith("kl_error/")]


def behaviour_metrics(logp, behaviour, versions, mask, version):
    metrics = MetricAccumulator()
    experience = SimpleNamespace(
        mask_BT=torch.tensor(mask),
        behaviour_logp_BT=torch.tensor(behaviour),
        policy_version_BT=torch.tensor(versions),
    )
    accumulate_behaviour(metrics, experience, torch.tensor(logp), version)
    return metrics.values()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6))
def test_behaviour_estimates_have_the_divergences_as_expectation(seed):
    """Weighted by mu over a vocabulary of 6, the two estimates of each direction are that KL."""
    g = torch.Generator().manual_seed(seed)
    logp_V, logm_V = torch.randn(2, 6, generator=g, dtype=torch.float64).log_softmax(-1)
    names = ["k1_behaviour", "k3_behaviour", "k1_policy_behaviour", "k3_policy_behaviour"]
    expected = dict.fromkeys(names, 0.0)
    for token in range(6):
        got = behaviour_metrics([[float(logp_V[token])]], [[float(logm_V[token])]], [[0]], [[True]], 0)
        for name in names:
            expected[name] += float(logm_V[token].exp()) * got[f"kl/{name}_token"]
    forward = float((logm_V.exp() * (logm_V - logp_V)).sum())
    reverse = float((logp_V.exp() * (logp_V - logm_V)).sum())
    for name, truth in zip(names, (forward, forward, reverse, reverse), strict=True):
        assert expected[name] == pytest.approx(truth, abs=1e-5)


def test_mismatch_counts_tokens_whose_whole_prefix_has_the_current_version():
    """Row 0 is current; row 1 got new weights in mid-completion, so its cache is older; row 2 is stale."""
    got = behaviour_metrics(
        [[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]],
        [[-1.25, -1.0], [-1.0, -3.0], [-9.0, -9.0]],
        [[7, 7], [6, 7], [5, 5]],
        [[True, True], [True, True], [True, False]],
        7,
    )
    assert got["policy/mismatch"] == pytest.approx(0.125)
    assert got["policy/mismatch_max"] == pytest.approx(0.25)
    assert got["policy/equal_weights_share"] == pytest.approx(2 / 5)
    assert got["policy/behaviour_gap_max"] == pytest.approx(8.0)


def test_stale_tokens_have_no_mismatch_and_another_runs_no_age():
    got = behaviour_metrics([[-1.0]], [[-2.0]], [[3]], [[True]], 4)
    assert "policy/mismatch" not in got and got["policy/equal_weights_share"] == 0.0
    got = behaviour_metrics([[-1.0, -1.0]], [[-1.0, -1.0]], [[FOREIGN_VERSION, 2]], [[True, True]], 5)
    assert got["policy/staleness"] == 3.0
    assert "policy/staleness" not in behaviour_metrics([[-1.0]], [[-1.0]], [[FOREIGN_VERSION]], [[True]], 5)


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=60), st.integers(1, 5))
def test_quantiles_do_not_depend_on_how_a_batch_is_cut(values, parts):
    whole, cut = MetricAccumulator(), MetricAccumulator()
    whole.sample("x_p*", torch.tensor(values))
    for n in range(parts):
        cut.sample("x_p*", torch.tensor(values[n::parts]))
    got = whole.values()
    assert cut.values() == got
    assert got["x_p01"] <= got["x_p10"] <= got["x_p50"] <= got["x_p90"] <= got["x_p99"] <= max(values)
    assert sum(v <= got["x_p50"] for v in values) >= len(values) / 2


def row(versions):
    return SimpleNamespace(rollout=SimpleNamespace(versions=versions))


def test_staleness_in_updates_and_seconds():
    replaced_at = {version: 100.0 + 10 * version for version in range(3)}
    got = staleness_metrics([row([0, 1, 1, 2, 3, 3, 3, 3, 3, 3])], 3, replaced_at, 130.0)
    assert (got["policy/staleness_p50"], got["policy/staleness_p90"], got["policy/staleness_max"]) == (0, 2, 3)
    assert (got["time/staleness_p50"], got["time/staleness_p90"], got["time/staleness_max"]) == (0, 20, 30)
    assert got["time/staleness"] == pytest.approx((30 + 20 + 20 + 10) / 10)
    assert staleness_metrics([row([FOREIGN_VERSION])], 3, replaced_at, 130.0) == {}
    assert "time/staleness" not in staleness_metrics([row([1])], 3, {}, 130.0), "not known when it was replaced"


def test_the_effective_sample_share_is_that_of_all_micro_batches():
    whole, halves, weight_B = MetricAccumulator(), MetricAccumulator(), torch.tensor([1.0, 3.0, 2.0, 2.0])
    for metrics, parts in ((whole, [weight_B]), (halves, [weight_B[:1], weight_B[1:]])):
        for part_B in parts:
            sums = (part_B.sum(), part_B.square().sum(), len(part_B))
            metrics.add("policy/ess", *sums, reduction="effective_sample_share")
    assert whole.values() == halves.values() == {"policy/ess": pytest.approx(64 / (4 * 18))}
