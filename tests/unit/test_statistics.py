"""The statistics against scipy, against closed forms, and where they must stay silent."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as reference

from kl_comedy import statistics
from kl_comedy.errors import UserError
from kl_comedy.statistics import Interval, Point, intervals, parse_rule

finite = st.floats(-1e6, 1e6)
values = st.lists(finite, min_size=2, max_size=12)


def rng(seed=0):
    return np.random.default_rng(seed)


@settings(deadline=None)
@given(values, st.sampled_from([0.9, 0.95, 0.99]))
def test_t_interval_is_scipys(sample, level):
    found = statistics.t_interval(sample, level)
    error = np.std(sample, ddof=1) / math.sqrt(len(sample))
    scale = max(1e-9, max(map(abs, sample)))
    low, high = (np.mean(sample),) * 2
    if error > 1e-12 * scale:
        low, high = reference.t.interval(level, len(sample) - 1, loc=np.mean(sample), scale=error)
    assert found.n == len(sample)
    assert found.mean == pytest.approx(np.mean(sample), abs=1e-9 * scale)
    assert found.low == pytest.approx(low, abs=1e-6 * scale) and found.high == pytest.approx(high, abs=1e-6 * scale)


@settings(max_examples=25, deadline=None)
@given(values)
def test_bootstrap_repeats_and_holds_the_mean(sample):
    first, second = (statistics.bootstrap_interval(sample, rng(), draws=500) for _ in range(2))
    assert first == second
    assert first.low <= first.mean <= first.high
    assert min(sample) - 1e-6 <= first.low and first.high <= max(sample) + 1e-6


def test_bootstrap_is_scipys_percentile_bootstrap():
    sample = list(rng(1).exponential(size=30))
    theirs = reference.bootstrap((sample,), np.mean, n_resamples=20_000, method="percentile", rng=rng(2))
    ours = statistics.bootstrap_interval(sample, rng(3), draws=20_000)
    interval = theirs.confidence_interval
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high), abs=0.02)


def test_one_generator_is_threaded_through():
    threaded, sample = rng(), [0.0, 1.1, 5.23, 6.7, 9.01, 4.4, 2.7]
    first, second = (statistics.interval(sample, "bootstrap", rng=threaded) for _ in range(2))
    assert first != second
    assert first == statistics.interval(sample, "bootstrap", rng=rng())


@pytest.mark.parametrize("method", statistics.METHODS)
def test_one_value_has_no_interval_and_none_has_no_mean(method):
    assert statistics.interval([3.0], method) == Interval(n=1, mean=3.0, low=None, high=None)
    assert statistics.interval([], method) == Interval(n=0, mean=None, low=None, high=None)


def test_unknown_method():
    with pytest.raises(UserError, match="bootstrap"):
        statistics.interval([1.0], "boot")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(finite, finite), min_size=2, max_size=10))
def test_paired_difference_is_the_paired_t_test(pairs):
    a, b = ({seed: pair[side] for seed, pair in enumerate(pairs)} for side in (0, 1))
    found = statistics.paired_difference(a | {"more": 1.0}, b | {"x": 2.0, "y": math.nan})
    differences = np.array([x - y for x, y in pairs])
    assert (found.difference.n, found.only_a, found.only_b) == (len(pairs), 1, 1)
    assert found.difference.mean == pytest.approx(differences.mean(), abs=1e-6)
    if np.ptp(differences) > 1e-3:
        test = reference.ttest_rel([x for x, _ in pairs], [y for _, y in pairs])
        assert found.p == pytest.approx(test.pvalue, rel=1e-6, abs=1e-12)
        bounds = test.confidence_interval(0.95)
        assert (found.difference.low, found.difference.high) == pytest.approx((bounds.low, bounds.high), rel=1e-6)
    assert statistics.paired_difference({0: 1.0, 1: 2.0}, {0: 0.0, 1: 1.0}).p is None


def items(grid):
    return pd.DataFrame(
        [{"seed": s, "item": i, "value": value} for s, row in enumerate(grid) for i, value in enumerate(row)]
    )


def test_paired_items_resample_both_seeds_and_items():
    effect = np.array([[0.0], [1.0], [2.0], [3.0]]) + np.zeros(20)  # everything varies over seeds, nothing over items
    found = statistics.paired_items(items(effect), items(np.zeros((4, 20))), rng())
    by_seed = statistics.bootstrap_interval([0.0, 1.0, 2.0, 3.0], rng())
    assert found.difference.mean == 1.5 and found.difference.n == 80
    assert (found.difference.low, found.difference.high) == pytest.approx((by_seed.low, by_seed.high), abs=0.1)
    turned = statistics.paired_items(items(effect.T), items(np.zeros((20, 4))), rng())
    assert (turned.difference.low, turned.difference.high) == pytest.approx((by_seed.low, by_seed.high), abs=0.1)


def test_paired_items_use_what_both_have():
    a, b = items([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]), items([[0.0, 0.5], [0.0, 0.5]])
    found = statistics.paired_items(a, b, rng())
    assert (found.difference.n, found.only_a, found.only_b) == (4, 5, 0)
    assert found.difference.mean == 0.75 and found.difference.low >= 0.5
    assert statistics.paired_items(a, b[b["seed"] == 0], rng()).difference.low is None


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), st.lists(st.floats(-10, 10), min_size=1, max_size=8), min_size=1))
def test_iqm_is_the_trimmed_mean(scores):
    flat = [value for task in scores.values() for value in task]
    found = statistics.iqm_interval(scores, rng())
    assert found.value == pytest.approx(reference.trim_mean(flat, 0.25))
    assert (found.runs, found.tasks) == (len(flat), len(scores))
    assert (found.low is None) == all(len(task) == 1 for task in scores.values())


def test_the_stratified_bootstrap_keeps_tasks_apart():
    found = statistics.iqm_interval({"easy": [1.0] * 5, "hard": [0.0] * 5}, rng())
    assert (found.low, found.high) == (0.5, 0.5)  # pooled resampling would vary


def test_iqm_interval_is_scipys_stratified_bootstrap():
    samples = {"a": list(rng(1).normal(size=12)), "b": list(rng(2).normal(size=9) + 1)}

    def statistic(*parts, axis):
        return reference.trim_mean(np.concatenate(parts, axis=axis), 0.25, axis=axis)

    theirs = reference.bootstrap(
        tuple(map(np.asarray, samples.values())),
        statistic,
        n_resamples=5000,
        method="percentile",
        rng=rng(3),
        vectorized=True,
        axis=-1,
    ).confidence_interval
    ours = statistics.iqm_interval(samples, rng(4))
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.07)


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_probability_of_improvement_is_mann_whitney_and_sums_to_one(a, b):
    one, other = {"t": [float(x) for x in a]}, {"t": [float(x) for x in b]}
    found = statistics.probability_of_improvement(one, other, rng())
    u = reference.mannwhitneyu(a, b).statistic if len(set(a + b)) > 1 else len(a) * len(b) / 2
    assert found.value == pytest.approx(u / (len(a) * len(b)))
    assert found.value + statistics.probability_of_improvement(other, one, rng()).value == pytest.approx(1)
    assert found.low is None or 0 <= found.low <= found.high <= 1


def test_aggregates_refuse_what_they_cannot_mean():
    for scores in ({}, {"a": []}, {"a": [math.nan]}):
        with pytest.raises(UserError, match="at least one"):
            statistics.iqm(scores)
    with pytest.raises(UserError, match="no task in common"):
        statistics.probability_of_improvement({"a": [1.0]}, {"b": [1.0]}, rng())


knots = st.lists(st.floats(0, 50), min_size=2, max_size=6, unique=True)


@given(knots, st.floats(-2, 2), st.floats(-2, 2), st.floats(0, 50))
def test_a_frontier_on_a_line_is_the_line_and_never_leaves_its_range(at, slope, intercept, kl):
    found = statistics.read_off([Point(kl=x, reward=intercept + slope * x) for x in at], kl)
    if min(at) <= kl <= max(at):
        assert found == pytest.approx(intercept + slope * kl, abs=1e-9)
    else:
        assert found == "outside"


def test_a_frontier_says_why_it_has_no_value_and_counts_the_collapsed():
    dead = Point(kl=40.0, reward=0.0, collapsed=True)
    runs = {
        0: [Point(kl=1.0, reward=0.5), Point(kl=3.0, reward=0.7), dead],
        1: [Point(kl=1.0, reward=0.3), dead],
        2: [Point(kl=1.0, reward=0.3), Point(kl=1.5, reward=0.4)],
        3: [Point(kl=math.nan, reward=0.3), Point(kl=2.0, reward=0.9), Point(kl=2.0, reward=0.7)],
    }
    found = statistics.frontier_at(runs, 2.0)
    assert found.reward.mean == pytest.approx((0.6 + 0.8) / 2) and found.reward.n == 2
    assert (found.outside, found.gap, found.collapsed) == (1, 1, 2)
    paired = statistics.compare_at(runs, {0: [Point(kl=2.0, reward=0.1)], 2: [Point(kl=2.0, reward=1.0)]}, 2.0)
    assert (paired.difference.n, paired.only_a, paired.only_b) == (1, 1, 1)
    assert paired.difference.mean == pytest.approx(0.5)


def test_collapse_is_what_the_rule_says():
    rule = parse_rule("r < 0.5 start, kl>=20")
    assert rule.metrics == ("r", "kl") and rule.starts == ("r",)
    judge = rule.collapsed
    assert judge(last={"r": 0.19}, first={"r": 0.4}) is True
    assert judge(last={"r": 0.2, "kl": 3.0}, first={"r": 0.4}) is False
    assert judge(last={"r": 0.9, "kl": 20.0}, first={"r": 0.4}) is True
    assert judge(last={"r": math.nan}, first={}) is True
    assert judge(last={"r": 0.1}, first={}) is None and judge(last={}, first={}) is None
    assert judge(last={}, first={}, status="FAILED", reason="train/loss is not finite (nan)") is True
    assert judge(last={}, first={}, status="FAILED", reason="process died (pid 3)") is None
    for wrong in ("r", "r < x", "r == 1", "", "r < inf", "r < 1 begin"):
        with pytest.raises(UserError, match="--collapse"):
            parse_rule(wrong)
    assert parse_rule(statistics.DEFAULT_RULE).starts == ("eval/heldout/reward",)
    assert intervals.mean_of([]) is None
