"""The policy against its sampler: estimates against enumeration, mismatch apart from staleness, ages as histograms."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.records import FOREIGN_VERSION, Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.training.metrics import MetricAccumulator, VersionTimes, accumulate_behaviour, staleness_metrics


def tallied(logp, behaviour, versions, mask, version):
    metrics = MetricAccumulator()
    accumulate_behaviour(
        metrics,
        logp_BT=torch.tensor(logp),
        behaviour_logp_BT=torch.tensor(behaviour),
        versions_BT=torch.tensor(versions),
        mask_BT=torch.tensor(mask),
        version=version,
    )
    return metrics.values()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6))
def test_the_estimates_have_the_divergences_as_expectation(seed):
    """Weighted by mu over a vocabulary of 6, the two estimates of each direction are that KL."""
    g = torch.Generator().manual_seed(seed)
    logp_V, logm_V = torch.randn(2, 6, generator=g, dtype=torch.float64).log_softmax(-1)
    names = ["k1_behaviour", "k3_behaviour", "k1_policy_behaviour", "k3_policy_behaviour"]
    expected = dict.fromkeys(names, 0.0)
    for token in range(6):
        got = tallied([[float(logp_V[token])]], [[float(logm_V[token])]], [[0]], [[True]], 0)
        for name in names:
            expected[name] += float(logm_V[token].exp()) * got[f"kl/{name}_token"]
    forward = float((logm_V.exp() * (logm_V - logp_V)).sum())
    reverse = float((logp_V.exp() * (logp_V - logm_V)).sum())
    for name, truth in zip(names, (forward, forward, reverse, reverse), strict=True):
        assert expected[name] == pytest.approx(truth, abs=1e-5)


def test_mismatch_is_only_of_tokens_whose_whole_prefix_the_learners_weights_drew():
    """Row 0 is the learner's own; row 1 got the weights in mid-completion, its cache is older; row 2 is stale."""
    got = tallied(
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


def test_there_is_no_mismatch_where_every_token_is_stale():
    got = tallied([[-1.0]], [[-2.0]], [[3]], [[True]], 4)
    assert "policy/mismatch" not in got and got["policy/equal_weights_share"] == 0.0


def test_another_runs_tokens_have_no_age():
    got = tallied([[-1.0, -1.0]], [[-1.0, -1.0]], [[FOREIGN_VERSION, 2]], [[True, True]], 5)
    assert got["policy/staleness"] == 3.0
    assert "policy/staleness" not in tallied([[-1.0]], [[-1.0]], [[FOREIGN_VERSION]], [[True]], 5)


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
    prompt = Prompt(problem=Problem(id="a", text="", answer=""), text="", token_ids=(1,))
    n = len(versions)
    rollout = Rollout(
        prompt=prompt,
        group_id=0,
        completion_ids=(1,) * n,
        logps=(0.0,) * n,
        versions=tuple(versions),
        stop_reason="eos",
        text="",
    )
    return Scored(rollout=rollout, reward=Reward(value=0.0))


def test_ages_are_a_histogram_in_updates_and_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("kl_comedy.training.metrics.time.monotonic", lambda: now[0])
    clock = VersionTimes()
    for version in range(3):
        clock.replaced(version)  # version n was replaced at 100 + 10 n
        now[0] += 10
    got = staleness_metrics([row([0, 1, 1, 2, 3, 3, 3, 3, 3, 3])], 3, clock)
    assert (got["policy/staleness_p50"], got["policy/staleness_p90"], got["policy/staleness_max"]) == (0, 2, 3)
    assert (got["time/staleness_p50"], got["time/staleness_p90"], got["time/staleness_max"]) == (0, 20, 30)
    assert got["time/staleness"] == pytest.approx((30 + 20 + 20 + 10) / 10)
    resumed = VersionTimes()
    ages = clock.ages()
    now[0] += 1000
    resumed.restore(ages)
    assert staleness_metrics([row([2])], 3, resumed)["time/staleness"] == pytest.approx(10)
    assert staleness_metrics([row([FOREIGN_VERSION])], 3, clock) == {}
    assert "time/staleness" not in staleness_metrics([row([1])], 3, VersionTimes()), "not known when it was replaced"
