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
from kl_comedy.statistics import Interval, Point, clustered_interval, clustered_se, parse_rule, reward_at_kl

finite = st.floats(-1e6, 1e6)
problems = st.lists(st.lists(st.booleans().map(float), min_size=1, max_size=4), min_size=2, max_size=8)
examples = settings(deadline=None, max_examples=40)


def rng(seed=0):
    return np.random.default_rng(seed)


@examples
@given(st.lists(finite, min_size=2, max_size=12))
def test_t_interval_is_scipys(sample):
    ours = statistics.interval(sample)
    error = np.std(sample, ddof=1) / math.sqrt(len(sample))
    scale = max(1e-9, max(map(abs, sample)))
    low, high = (np.mean(sample),) * 2
    if error > 1e-12 * scale:
        low, high = reference.t.interval(0.95, len(sample) - 1, loc=np.mean(sample), scale=error)
    assert ours.n == len(sample) and ours.mean == pytest.approx(np.mean(sample), abs=1e-9 * scale)
    assert (ours.low, ours.high) == pytest.approx((low, high), abs=1e-6 * scale)
    clustered = clustered_interval([[value] for value in sample], "t")
    assert (clustered.low, clustered.high) == pytest.approx((ours.low, ours.high), abs=1e-9 * scale)


def test_bootstrap_is_scipys_percentile_bootstrap_and_repeats():
    sample = list(rng(1).exponential(size=30))
    theirs = reference.bootstrap((sample,), np.mean, n_resamples=20_000, method="percentile", rng=rng(2))
    ours = clustered_interval([[value] for value in sample], "bootstrap", rng=rng(3), draws=20_000)
    bounds = theirs.confidence_interval
    assert (ours.low, ours.high) == pytest.approx((bounds.low, bounds.high), abs=0.02)
    assert statistics.interval(sample, "bootstrap", rng(3)) == statistics.interval(sample, "bootstrap", rng(3))
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


@examples
@given(problems, st.integers(2, 4), st.sampled_from(statistics.CLUSTER_METHODS))
def test_repeated_samples_add_no_certainty_and_bounds_hold_the_mean(clusters, times, method):
    """Greedy samples drawn twice are no second measurement."""
    ours, repeated = clustered_interval(clusters, method, rng=rng(1)), [cluster * times for cluster in clusters]
    assert ours.low <= ours.mean <= ours.high and ours.n == len(clusters)
    assert method == "t" or (ours.low >= 0 and ours.high <= 1)
    assert clustered_se(repeated) == pytest.approx(clustered_se(clusters), abs=1e-12)
    if method in ("t", "bootstrap"):
        again = clustered_interval(repeated, method, rng=rng(1))
        assert (again.low, again.high) == pytest.approx((ours.low, ours.high), abs=1e-9)


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


@examples
@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(judged, data):
    k = data.draw(st.integers(1, len(judged)))
    subsets = list(itertools.combinations(judged, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert statistics.pass_at_k(len(judged), sum(judged), k) == pytest.approx(expected, abs=1e-12)
    for wrong in (0, len(judged) + 1):
        with pytest.raises(UserError, match=rf"got {wrong}; allowed: 1 to {len(judged)}"):
            statistics.pass_at_k(len(judged), sum(judged), wrong)


@examples
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=7))
def test_the_vote_is_the_mean_over_equally_likely_winners(pairs):
    answers, right = [answer for answer, _ in pairs], [verdict for _, verdict in pairs]
    counts = {a: answers.count(a) for a in answers if a is not None}
    winners = [a for a, n in counts.items() if n == max(counts.values())]
    outcomes = [np.mean([r for a, r in pairs if a == winner]) for winner in winners]
    vote = statistics.majority(answers, right)
    assert vote.correct == pytest.approx(np.mean(outcomes) if winners else 0.0) and vote.tied == (len(winners) > 1)
    blocks = statistics.majority_at_k(["a", "a", "b", "b", "c"], [True, True, False, False, True], 2)
    assert blocks.correct == 0.5 and not blocks.tied, "disjoint blocks of two"


@examples
@given(st.lists(st.tuples(finite, finite), min_size=2, max_size=10))
def test_paired_difference_is_the_paired_t_test_by_key(pairs):
    a, b = ({seed: pair[side] for seed, pair in enumerate(pairs)} for side in (0, 1))
    paired = statistics.paired_difference(a | {"more": 1.0}, dict(reversed(b.items())) | {"x": 2.0, "y": math.nan})
    differences = np.array([x - y for x, y in pairs])
    assert (paired.difference.n, paired.only_a, paired.only_b) == (len(pairs), 1, 1)
    assert paired.difference.mean == pytest.approx(differences.mean(), abs=1e-6)
    if np.ptp(differences) > 1e-3:
        test = reference.ttest_rel([x for x, _ in pairs], [y for _, y in pairs])
        assert paired.p == pytest.approx(test.pvalue, rel=1e-6, abs=1e-12)
        bounds = test.confidence_interval(0.95)
        assert (paired.difference.low, paired.difference.high) == pytest.approx((bounds.low, bounds.high), rel=1e-6)
    assert statistics.paired_difference({0: 1.0, 1: 2.0}, {0: 0.0, 1: 1.0}).p is None


@examples
@given(st.lists(finite, min_size=3, max_size=10), st.floats(0.01, 10))
def test_two_runs_are_the_same_where_the_90_percent_interval_is_within_the_margin(differences, margin):
    a = dict(enumerate(differences))
    paired = statistics.paired_difference(a, dict.fromkeys(a, 0.0), margin=margin)
    if np.ptp(differences) > 1e-3:
        low, high = reference.ttest_1samp(differences, 0.0).confidence_interval(0.9)
        nearest = min(margin - high, low + margin)  # to the verdict's change
        if abs(nearest) > 1e-6 * (1 + abs(high) + abs(low)):
            assert (paired.p_equivalent < 0.05) == (nearest > 0)
    same = statistics.paired_difference({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}, margin=margin)
    assert (
        same.p_equivalent == 0.0
        and paired.difference == statistics.paired_difference(a, dict.fromkeys(a, 0.0)).difference
    )


def test_holm_rejects_what_testing_step_by_step_rejects():
    p = [0.001, 0.2, 0.013, 0.04, 0.012]
    adjusted = statistics.holm(p)
    for level in (0.005, 0.01, 0.04, 0.05, 0.06, 0.2):
        rejected = 0
        while rejected < len(p) and sorted(p)[rejected] <= level / (len(p) - rejected):
            rejected += 1
        assert sum(value <= level + 1e-12 for value in adjusted) == rejected, level
    assert statistics.holm([]) == [] and statistics.holm([None, 0.9, 0.8]) == [None, 1.0, 1.0]


def test_iqm_is_the_trimmed_mean_with_scipys_stratified_bootstrap():
    scores = {"a": list(rng(1).normal(size=12)), "b": list(rng(2).normal(size=9) + 1)}

    def statistic(*parts, axis):
        return reference.trim_mean(np.concatenate(parts, axis=axis), 0.25, axis=axis)

    parts = tuple(map(np.asarray, scores.values()))
    options = {"n_resamples": 5000, "method": "percentile", "rng": rng(3), "vectorized": True, "axis": -1}
    theirs = reference.bootstrap(parts, statistic, **options).confidence_interval
    ours = statistics.iqm(scores, rng(4))
    assert ours.mean == pytest.approx(reference.trim_mean([*scores["a"], *scores["b"]], 0.25)) and ours.n == 21
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.07)
    apart = statistics.iqm({"easy": [1.0] * 5, "hard": [0.0] * 5}, rng())
    assert (apart.low, apart.high) == (0.5, 0.5), "each task is resampled among itself"
    assert statistics.iqm({"a": [1.0], "b": [2.0]}, rng()).low is None


@examples
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_probability_of_improvement_is_mann_whitney_and_sums_to_one(a, b):
    left, right = {"t": [float(x) for x in a]}, {"t": [float(x) for x in b]}
    ours = statistics.probability_of_improvement(left, right, rng())
    u = reference.mannwhitneyu(a, b).statistic if len(set(a + b)) > 1 else len(a) * len(b) / 2
    assert ours.mean == pytest.approx(u / (len(a) * len(b)))
    assert ours.mean + statistics.probability_of_improvement(right, left, rng()).mean == pytest.approx(1)
    assert ours.low is None or 0 <= ours.low <= ours.high <= 1


def test_tasks_are_matched_by_name_and_empty_ones_are_refused():
    a, b = {"x": [1.0], "y": [5.0], "only a": [9.0]}, {"y": [6.0], "x": [0.0]}
    better = statistics.probability_of_improvement(a, b, rng())
    assert (better.mean, better.n) == (0.5, 4)
    for scores in ({}, {"a": []}, {"a": [math.nan]}):
        with pytest.raises(UserError, match="at least one"):
            statistics.iqm(scores, rng())
    with pytest.raises(UserError, match="no task in common"):
        statistics.probability_of_improvement({"a": [1.0]}, {"b": [1.0]}, rng())


@examples
@given(
    st.lists(st.floats(0, 50), min_size=2, max_size=6, unique=True),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(0, 50),
)
def test_a_frontier_on_a_line_is_the_line_and_never_leaves_its_range(at, slope, intercept, kl):
    reward = reward_at_kl([Point(kl=x, reward=intercept + slope * x) for x in at], kl)
    inside = min(at) <= kl <= max(at)
    assert reward == (pytest.approx(intercept + slope * kl, abs=1e-9) if inside else "outside")


def test_a_frontier_names_the_reason_where_it_has_no_value():
    dead = Point(kl=40.0, reward=0.0, collapsed=True)
    assert reward_at_kl([Point(1.0, 0.5), Point(3.0, 0.7), dead], 2.0) == pytest.approx(0.6)
    assert reward_at_kl([Point(1.0, 0.3), dead], 2.0) == "gap"
    assert reward_at_kl([Point(1.0, 0.3), Point(1.5, 0.4)], 2.0) == "outside"
    assert reward_at_kl([Point(math.nan, 0.3), Point(2.0, 0.9), Point(2.0, 0.7)], 2.0) == pytest.approx(0.8)


def test_rules_of_collapse_are_read_or_refused():
    start, kl = parse_rule("r < 0.5 start, kl>=20")
    assert (start.metric, start.bound, start.of_start) == ("r", 0.5, True) and start.compare(1, 2)
    assert (kl.metric, kl.bound, kl.of_start) == ("kl", 20.0, False) and kl.compare(20, 20) and not kl.compare(1, 20)
    assert not parse_rule("r > 1")[0].compare(1, 1) and parse_rule(statistics.DEFAULT_RULE)[0].of_start
    twice, once = parse_rule("r < 0.5 start last 2, kl > 20 last 1")
    assert (twice.of_start, twice.last, once.of_start, once.last) == (True, 2, False, 1) and start.last == 1
    for wrong in ("r", "r < x", "r == 1", "", "r < inf", "r < 1 begin", "r < 1 last", "r < 1 last 0"):
        with pytest.raises(UserError, match="--collapse"):
            parse_rule(wrong)
