"""The statistics against scipy, enumeration and closed forms, and where they must have no value."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as reference

from kl_comedy import statistics
from kl_comedy.errors import UserError
from kl_comedy.statistics import Interval, Point, clustered_interval, clustered_se, parse_rule

finite = st.floats(-1e6, 1e6)
samples = st.lists(finite, min_size=2, max_size=12)
problems = st.lists(st.lists(st.booleans().map(float), min_size=1, max_size=4), min_size=2, max_size=8)


def rng(seed=0):
    return np.random.default_rng(seed)


@settings(deadline=None, max_examples=50)
@given(samples, st.sampled_from([0.9, 0.95, 0.99]))
def test_t_interval_is_scipys(sample, level):
    ours = statistics.t_interval(sample, level)
    error = np.std(sample, ddof=1) / math.sqrt(len(sample))
    scale = max(1e-9, max(map(abs, sample)))
    low, high = (np.mean(sample),) * 2
    if error > 1e-12 * scale:
        low, high = reference.t.interval(level, len(sample) - 1, loc=np.mean(sample), scale=error)
    assert ours.n == len(sample) and ours.mean == pytest.approx(np.mean(sample), abs=1e-9 * scale)
    assert (ours.low, ours.high) == pytest.approx((low, high), abs=1e-6 * scale)
    clustered = clustered_interval([[value] for value in sample], "t", level=level)
    assert (clustered.low, clustered.high) == pytest.approx((ours.low, ours.high), abs=1e-9 * scale)


def test_bootstrap_is_scipys_percentile_bootstrap_and_repeats():
    sample = list(rng(1).exponential(size=30))
    theirs = reference.bootstrap((sample,), np.mean, n_resamples=20_000, method="percentile", rng=rng(2))
    ours = statistics.bootstrap_interval(sample, rng(3), draws=20_000)
    bounds = theirs.confidence_interval
    assert (ours.low, ours.high) == pytest.approx((bounds.low, bounds.high), abs=0.02)
    assert ours == statistics.bootstrap_interval(sample, rng(3), draws=20_000)
    generator = rng()
    first, second = (statistics.interval(sample, "bootstrap", rng=generator) for _ in range(2))
    assert first != second and first == statistics.interval(sample, "bootstrap"), "without one, a new seeded one"


def test_one_value_has_no_interval_and_none_has_no_mean():
    for method in statistics.METHODS:
        assert statistics.interval([3.0], method) == Interval(n=1, mean=3.0, low=None, high=None)
        assert statistics.interval([], method) == Interval(n=0, mean=None, low=None, high=None)
    assert clustered_interval([[1.0, 0.0]]).low is None and clustered_se([[1.0]]) is None
    with pytest.raises(UserError, match="did you mean 'bootstrap'"):
        statistics.interval([1.0], "boot")
    with pytest.raises(UserError, match="wilson"):
        clustered_interval([[1.0], [0.0]], "wilsn")


@settings(deadline=None, max_examples=40)
@given(problems, st.integers(1, 4), st.sampled_from(["t", "bootstrap"]))
def test_samples_repeated_word_for_word_add_no_certainty(clusters, times, method):
    """Greedy samples drawn twice are no second measurement."""
    repeated = [cluster * times for cluster in clusters]
    assert clustered_se(repeated) == pytest.approx(clustered_se(clusters), abs=1e-12)
    once, again = (clustered_interval(rows, method, rng=rng()) for rows in (clusters, repeated))
    assert (again.low, again.high) == pytest.approx((once.low, once.high), abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(problems, st.sampled_from(statistics.CLUSTER_METHODS))
def test_bounds_hold_the_mean(clusters, method):
    ours = clustered_interval(clusters, method, rng=rng(1))
    assert ours.low <= ours.mean <= ours.high and ours.n == len(clusters)
    assert method == "t" or (ours.low >= 0 and ours.high <= 1)


def test_clustered_error_and_wilson_by_hand():
    grid = rng(5).random((6, 4))
    assert clustered_se(grid.tolist()) == pytest.approx(np.std(grid.mean(axis=1), ddof=1) / math.sqrt(6), rel=1e-12)
    shares = [[0.0]] * 7 + [[1.0]] * 13
    theirs = reference.binomtest(13, 20).proportion_ci(0.95, "wilson")
    ours = clustered_interval(shares)
    size = 0.65 * 0.35 / clustered_se(shares) ** 2  # 19 rather than 20: s has the denominator n - 1
    assert size == pytest.approx(19) and (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.006)
    z2 = reference.norm.ppf(0.975) ** 2
    centre = (0.65 + z2 / 38) / (1 + z2 / 19)
    assert (ours.low + ours.high) / 2 == pytest.approx(centre)
    nothing_right = clustered_interval([[0.0, 0.0]] * 30)
    assert nothing_right.low == 0 and nothing_right.high == pytest.approx(z2 / (30 + z2))
    with pytest.raises(UserError, match="outside"):
        clustered_interval([[0.5], [3.0]], "wilson")
    assert ours == clustered_interval(shares, "wilson"), "the default for values of 0 and 1"
    assert clustered_interval([[0.5], [3.0]]) == clustered_interval([[0.5], [3.0]], "t"), "and for others"


@pytest.mark.parametrize("method", ["wilson", "bootstrap"])
def test_coverage_where_samples_of_a_problem_agree(method):
    """Problems are all right or all wrong: an interval over completions would cover the truth far too seldom."""
    draws, truth, covered, covered_by_completions, rounds = rng(3), 0.4, 0, 0, 200
    for _ in range(rounds):
        clusters = [[float(solved)] * 8 for solved in draws.random(60) < truth]
        ours = clustered_interval(clusters, method, rng=draws)
        naive = clustered_interval([[x] for cluster in clusters for x in cluster], "wilson")
        covered += ours.low <= truth <= ours.high
        covered_by_completions += naive.low <= truth <= naive.high
    assert covered / rounds > 0.9 > 0.7 > covered_by_completions / rounds


@settings(deadline=None, max_examples=50)
@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(judged, data):
    k = data.draw(st.integers(1, len(judged)))
    subsets = list(itertools.combinations(judged, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert statistics.pass_at_k(len(judged), sum(judged), k) == pytest.approx(expected, abs=1e-12)
    for wrong in (0, len(judged) + 1):
        with pytest.raises(UserError, match=rf"got {wrong}; allowed: 1 to {len(judged)}"):
            statistics.pass_at_k(len(judged), sum(judged), wrong)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=7))
def test_the_vote_is_the_mean_over_equally_likely_winners(pairs):
    answers, right = [answer for answer, _ in pairs], [verdict for _, verdict in pairs]
    counts = {a: answers.count(a) for a in answers if a is not None}
    winners = [a for a, n in counts.items() if n == max(counts.values())]
    outcomes = [np.mean([r for a, r in pairs if a == winner]) for winner in winners]
    vote = statistics.majority(answers, right)
    assert vote.correct == pytest.approx(np.mean(outcomes) if winners else 0.0)
    assert vote.tied == (len(winners) > 1) and vote.votes == sum(counts.values())


def test_the_vote_of_fewer_uses_disjoint_blocks_of_samples():
    vote = statistics.majority_at_k(["a", "a", "b", "b", "c"], [True, True, False, False, True], 2)
    assert vote.correct == 0.5 and not vote.tied and vote.votes == 4


def test_differences_are_paired_by_key_and_not_by_order():
    a, b = {0: 1.0, 1: 5.0, 2: 9.0}, {2: 8.0, 0: 0.5, 1: 3.0}
    by_key = statistics.paired_difference(a, b)
    assert by_key.difference.mean == pytest.approx((0.5 + 2.0 + 1.0) / 3)
    assert by_key == statistics.paired_difference(a, dict(sorted(b.items())))
    assert by_key.difference == statistics.t_interval([0.5, 2.0, 1.0])
    moved = {0: [Point(kl=1.0, reward=0.1)], 1: [Point(kl=1.0, reward=0.7)]}
    base = {1: [Point(kl=1.0, reward=0.5)], 0: [Point(kl=1.0, reward=0.0)]}
    assert statistics.compare_at_kl(moved, base, 1.0).difference == statistics.t_interval([0.1, 0.7 - 0.5])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(finite, finite), min_size=2, max_size=10))
def test_paired_difference_is_the_paired_t_test(pairs):
    a, b = ({seed: pair[side] for seed, pair in enumerate(pairs)} for side in (0, 1))
    paired = statistics.paired_difference(a | {"more": 1.0}, b | {"x": 2.0, "y": math.nan})
    differences = np.array([x - y for x, y in pairs])
    assert (paired.difference.n, paired.only_a, paired.only_b) == (len(pairs), 1, 1)
    assert paired.difference.mean == pytest.approx(differences.mean(), abs=1e-6)
    if np.ptp(differences) > 1e-3:
        test = reference.ttest_rel([x for x, _ in pairs], [y for _, y in pairs])
        assert paired.p == pytest.approx(test.pvalue, rel=1e-6, abs=1e-12)
        bounds = test.confidence_interval(0.95)
        assert (paired.difference.low, paired.difference.high) == pytest.approx((bounds.low, bounds.high), rel=1e-6)
    assert statistics.paired_difference({0: 1.0, 1: 2.0}, {0: 0.0, 1: 1.0}).p is None


def test_iqm_is_the_trimmed_mean_with_scipys_stratified_bootstrap():
    scores = {"a": list(rng(1).normal(size=12)), "b": list(rng(2).normal(size=9) + 1)}

    def statistic(*parts, axis):
        return reference.trim_mean(np.concatenate(parts, axis=axis), 0.25, axis=axis)

    parts = tuple(map(np.asarray, scores.values()))
    options = {"n_resamples": 5000, "method": "percentile", "rng": rng(3), "vectorized": True, "axis": -1}
    theirs = reference.bootstrap(parts, statistic, **options).confidence_interval
    ours = statistics.iqm(scores, rng(4))
    assert ours.value == pytest.approx(reference.trim_mean([*scores["a"], *scores["b"]], 0.25))
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.07)
    assert (ours.runs, ours.tasks) == (21, 2)
    apart = statistics.iqm({"easy": [1.0] * 5, "hard": [0.0] * 5}, rng())
    assert (apart.low, apart.high) == (0.5, 0.5), "each task is resampled among itself"
    assert statistics.iqm({"a": [1.0], "b": [2.0]}, rng()).low is None


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_probability_of_improvement_is_mann_whitney_and_sums_to_one(a, b):
    left, right = {"t": [float(x) for x in a]}, {"t": [float(x) for x in b]}
    ours = statistics.probability_of_improvement(left, right, rng())
    u = reference.mannwhitneyu(a, b).statistic if len(set(a + b)) > 1 else len(a) * len(b) / 2
    assert ours.value == pytest.approx(u / (len(a) * len(b)))
    assert ours.value + statistics.probability_of_improvement(right, left, rng()).value == pytest.approx(1)
    assert ours.low is None or 0 <= ours.low <= ours.high <= 1


def test_tasks_are_matched_by_name_and_empty_ones_are_refused():
    a, b = {"x": [1.0], "y": [5.0], "only a": [9.0]}, {"y": [6.0], "x": [0.0]}
    better = statistics.probability_of_improvement(a, b, rng())
    assert (better.value, better.tasks, better.runs) == (0.5, 2, 4)
    for scores in ({}, {"a": []}, {"a": [math.nan]}):
        with pytest.raises(UserError, match="at least one"):
            statistics.iqm(scores, rng())
    with pytest.raises(UserError, match="no task in common"):
        statistics.probability_of_improvement({"a": [1.0]}, {"b": [1.0]}, rng())


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(0, 50), min_size=2, max_size=6, unique=True),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(0, 50),
)
def test_a_frontier_on_a_line_is_the_line_and_never_leaves_its_range(at, slope, intercept, kl):
    reward = statistics.reward_at_kl([Point(kl=x, reward=intercept + slope * x) for x in at], kl)
    inside = min(at) <= kl <= max(at)
    assert reward == (pytest.approx(intercept + slope * kl, abs=1e-9) if inside else "outside")


def test_a_frontier_says_why_it_has_no_value_and_counts_the_collapsed():
    dead = Point(kl=40.0, reward=0.0, collapsed=True)
    runs = {
        0: [Point(kl=1.0, reward=0.5), Point(kl=3.0, reward=0.7), dead],
        1: [Point(kl=1.0, reward=0.3), dead],
        2: [Point(kl=1.0, reward=0.3), Point(kl=1.5, reward=0.4)],
        3: [Point(kl=math.nan, reward=0.3), Point(kl=2.0, reward=0.9), Point(kl=2.0, reward=0.7)],
    }
    family = statistics.family_at_kl(runs, 2.0)
    assert family.reward.mean == pytest.approx((0.6 + 0.8) / 2) and family.reward.n == 2
    assert (family.outside, family.gap, family.collapsed) == (1, 1, 2)
    paired = statistics.compare_at_kl(runs, {0: [Point(kl=2.0, reward=0.1)], 2: [Point(kl=2.0, reward=1.0)]}, 2.0)
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
    assert parse_rule("r > 1").collapsed(last={"r": 1.0}, first={}) is False
    for wrong in ("r", "r < x", "r == 1", "", "r < inf", "r < 1 begin"):
        with pytest.raises(UserError, match="--collapse"):
            parse_rule(wrong)
    assert parse_rule(statistics.DEFAULT_RULE).starts == ("eval/heldout/reward",)
