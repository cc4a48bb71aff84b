"""The statistics against scipy, enumeration and closed forms, and where they must have no value."""

import itertools
import math
from collections import Counter

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


def bounds(interval):
    return interval.low, interval.high


# --- intervals ----------------------------------------------------------------------------------------------------
@examples
@given(st.lists(finite, min_size=2, max_size=12))
def test_t_interval_is_scipys(sample):
    mean = np.mean(sample)
    error = np.std(sample, ddof=1) / math.sqrt(len(sample))
    scale = max(1e-9, max(map(abs, sample)))
    expected = (mean, mean)
    if error > 1e-12 * scale:  # scipy's has no value where all are equal
        expected = reference.t.interval(0.95, len(sample) - 1, loc=mean, scale=error)
    ours = statistics.interval(sample)
    assert ours.n == len(sample)
    assert ours.mean == pytest.approx(mean, abs=1e-9 * scale)
    assert bounds(ours) == pytest.approx(expected, abs=1e-6 * scale)


@examples
@given(st.lists(finite, min_size=2, max_size=12))
def test_the_clustered_interval_of_single_values_is_the_t_interval(sample):
    scale = max(1e-9, max(map(abs, sample)))
    clustered = clustered_interval([[value] for value in sample], "t")
    assert bounds(clustered) == pytest.approx(bounds(statistics.interval(sample)), abs=1e-9 * scale)


@pytest.fixture(scope="module")
def skewed_sample():
    return list(rng(1).exponential(size=30))


def test_bootstrap_is_scipys_percentile_bootstrap(skewed_sample):
    theirs = reference.bootstrap((skewed_sample,), np.mean, n_resamples=20_000, method="percentile", rng=rng(2))
    ours = clustered_interval([[value] for value in skewed_sample], "bootstrap", rng=rng(3), draws=20_000)
    # Two sets of draws: the bounds differ by their error.
    assert bounds(ours) == pytest.approx(bounds(theirs.confidence_interval), abs=0.02)


def test_a_bootstrap_with_the_same_generator_repeats(skewed_sample):
    first = statistics.interval(skewed_sample, "bootstrap", rng(3))
    assert first == statistics.interval(skewed_sample, "bootstrap", rng(3))


def test_a_bootstrap_advances_its_generator(skewed_sample):
    generator = rng()
    first = statistics.interval(skewed_sample, "bootstrap", rng=generator)
    second = statistics.interval(skewed_sample, "bootstrap", rng=generator)
    assert first != second
    assert first == statistics.interval(skewed_sample, "bootstrap"), "without one, a new one with the seed 0"


@pytest.mark.parametrize("method", statistics.METHODS)
def test_one_value_has_no_interval_and_none_has_no_mean(method):
    assert statistics.interval([3.0], method) == Interval(n=1, mean=3.0, low=None, high=None)
    assert statistics.interval([], method) == Interval(n=0, mean=None, low=None, high=None)


def test_one_cluster_has_no_interval():
    assert clustered_interval([[1.0, 0.0]]).low is None
    assert clustered_se([[1.0]]) is None


def test_an_unknown_method_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'bootstrap'"):
        statistics.interval([1.0], "boot")
    with pytest.raises(UserError, match="wilson"):
        clustered_interval([[1.0], [0.0]], "wilsn")


any_method = st.sampled_from(statistics.CLUSTER_METHODS)


@examples
@given(problems, any_method)
def test_bounds_hold_the_mean(clusters, method):
    interval = clustered_interval(clusters, method, rng=rng(1))
    assert interval.low <= interval.mean <= interval.high
    assert interval.n == len(clusters)
    if method != "t":  # which knows nothing of shares
        assert interval.low >= 0
        assert interval.high <= 1


@examples
@given(problems, st.integers(2, 4), any_method)
def test_repeated_samples_add_no_certainty(clusters, times, method):
    """Greedy samples drawn twice are no second measurement."""
    repeated = [cluster * times for cluster in clusters]
    assert clustered_se(repeated) == pytest.approx(clustered_se(clusters), abs=1e-12)
    if method in ("t", "bootstrap"):
        ours = clustered_interval(clusters, method, rng=rng(1))
        again = clustered_interval(repeated, method, rng=rng(1))
        assert bounds(again) == pytest.approx(bounds(ours), abs=1e-9)


def test_the_clustered_error_of_a_grid_is_that_of_its_rows_means():
    grid = rng(5).random((6, 4))
    expected = np.std(grid.mean(axis=1), ddof=1) / math.sqrt(6)
    assert clustered_se(grid.tolist()) == pytest.approx(expected, rel=1e-12)


THIRTEEN_OF_TWENTY = [[0.0]] * 7 + [[1.0]] * 13
SHARE = 13 / 20
Z2 = reference.norm.ppf(0.975) ** 2


def test_wilson_of_single_values_is_scipys():
    theirs = reference.binomtest(13, 20).proportion_ci(0.95, "wilson")
    ours = clustered_interval(THIRTEEN_OF_TWENTY)
    # Not to the bit: the effective size is 19 rather than 20, because s has the denominator n - 1.
    assert SHARE * (1 - SHARE) / clustered_se(THIRTEEN_OF_TWENTY) ** 2 == pytest.approx(19)
    assert bounds(ours) == pytest.approx(bounds(theirs), abs=0.006)


def test_wilson_by_hand():
    ours = clustered_interval(THIRTEEN_OF_TWENTY)
    centre = (SHARE + Z2 / 38) / (1 + Z2 / 19)
    assert (ours.low + ours.high) / 2 == pytest.approx(centre)


def test_wilson_where_nothing_is_right():
    """No variance, and no certainty either: 30 problems are what there is."""
    interval = clustered_interval([[0.0, 0.0]] * 30)
    assert interval.low == 0
    assert interval.high == pytest.approx(Z2 / (30 + Z2))


def test_wilson_refuses_values_that_are_no_shares():
    with pytest.raises(UserError, match="outside"):
        clustered_interval([[0.5], [3.0]], "wilson")


def test_the_default_is_wilson_for_values_of_0_and_1_and_t_for_others():
    assert clustered_interval(THIRTEEN_OF_TWENTY) == clustered_interval(THIRTEEN_OF_TWENTY, "wilson")
    assert clustered_interval([[0.5], [3.0]]) == clustered_interval([[0.5], [3.0]], "t")


@pytest.mark.parametrize("method", ["wilson", "bootstrap"])
def test_coverage_where_samples_of_a_problem_agree(method):
    """Problems are all right or all wrong: an interval over completions would cover the truth far too seldom."""
    draws = rng(3)
    truth = 0.4
    rounds = 200
    covered = 0
    covered_by_completions = 0
    for _ in range(rounds):
        clusters = [[float(solved)] * 8 for solved in draws.random(60) < truth]
        completions = [[value] for cluster in clusters for value in cluster]
        ours = clustered_interval(clusters, method, rng=draws)
        naive = clustered_interval(completions, "wilson")
        covered += ours.low <= truth <= ours.high
        covered_by_completions += naive.low <= truth <= naive.high
    assert covered / rounds > 0.9
    assert covered_by_completions / rounds < 0.7


# --- pass@k and votes ---------------------------------------------------------------------------------------------
samples_of_a_problem = st.lists(st.booleans(), min_size=1, max_size=7)


@examples
@given(samples_of_a_problem, st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(judged, data):
    k = data.draw(st.integers(1, len(judged)))
    subsets = list(itertools.combinations(judged, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert statistics.pass_at_k(len(judged), sum(judged), k) == pytest.approx(expected, abs=1e-12)


@examples
@given(samples_of_a_problem)
def test_a_k_that_there_are_no_subsets_of_is_refused(judged):
    for k in (0, len(judged) + 1):
        with pytest.raises(UserError, match=rf"got {k}; allowed: 1 to {len(judged)}"):
            statistics.pass_at_k(len(judged), sum(judged), k)


@examples
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=7))
def test_the_vote_is_the_mean_over_equally_likely_winners(pairs):
    answers = [answer for answer, _ in pairs]
    verdicts = [verdict for _, verdict in pairs]
    votes = Counter(answer for answer in answers if answer is not None)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    expected = 0.0
    if winners:
        # A winner is right as often as the samples that gave it.
        shares = []
        for winner in winners:
            shares.append(np.mean([verdict for answer, verdict in pairs if answer == winner]))
        expected = np.mean(shares)
    vote = statistics.majority(answers, verdicts)
    assert vote.correct == pytest.approx(expected)
    assert vote.tied == (len(winners) > 1)


def test_the_vote_of_k_is_the_mean_over_disjoint_blocks():
    vote = statistics.majority_at_k(["a", "a", "b", "b", "c"], [True, True, False, False, True], 2)
    assert vote.correct == 0.5, "a block of two a, right, and one of two b, wrong"
    assert not vote.tied


# --- paired differences -------------------------------------------------------------------------------------------
@examples
@given(st.lists(st.tuples(finite, finite), min_size=2, max_size=10))
def test_paired_difference_is_the_paired_t_test_by_key(pairs):
    left = [a for a, _ in pairs]
    right = [b for _, b in pairs]
    differences = np.array(left) - np.array(right)
    a = {**dict(enumerate(left)), "more": 1.0}
    # In another order, with a key of its own, and with one that has no value.
    b = {**dict(reversed(list(enumerate(right)))), "x": 2.0, "y": math.nan}
    paired = statistics.paired_difference(a, b)
    assert paired.difference.n == len(pairs)
    assert paired.only_a == 1
    assert paired.only_b == 1
    assert paired.difference.mean == pytest.approx(differences.mean(), abs=1e-6)
    if np.ptp(differences) > 1e-3:  # scipy's has no value where all are equal
        test = reference.ttest_rel(left, right)
        assert paired.p == pytest.approx(test.pvalue, rel=1e-6, abs=1e-12)
        assert bounds(paired.difference) == pytest.approx(bounds(test.confidence_interval(0.95)), rel=1e-6)


def test_equal_differences_have_no_p_value():
    assert statistics.paired_difference({0: 1.0, 1: 2.0}, {0: 0.0, 1: 1.0}).p is None


@examples
@given(st.lists(finite, min_size=3, max_size=10), st.floats(0.01, 10))
def test_two_runs_are_the_same_where_the_90_percent_interval_is_within_the_margin(differences, margin):
    a = dict(enumerate(differences))
    zeros = dict.fromkeys(a, 0.0)
    paired = statistics.paired_difference(a, zeros, margin=margin)
    assert paired.difference == statistics.paired_difference(a, zeros).difference, "the margin changes no difference"
    if np.ptp(differences) > 1e-3:
        low, high = reference.ttest_1samp(differences, 0.0).confidence_interval(0.9)
        room = min(margin - high, low + margin)
        # At the bound itself the two roundings may decide differently.
        if abs(room) > 1e-6 * (1 + abs(high) + abs(low)):
            assert (paired.p_equivalent < 0.05) == (room > 0)


@examples
@given(st.floats(0.01, 10))
def test_a_run_is_the_same_as_itself(margin):
    paired = statistics.paired_difference({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}, margin=margin)
    assert paired.p_equivalent == 0.0


@pytest.mark.parametrize("level", [0.005, 0.01, 0.04, 0.05, 0.06, 0.2])
def test_holm_rejects_what_testing_step_by_step_rejects(level):
    p = [0.001, 0.2, 0.013, 0.04, 0.012]
    rejected = 0
    while rejected < len(p) and sorted(p)[rejected] <= level / (len(p) - rejected):
        rejected += 1
    # The tolerance: a value at the level is rejected, whatever the product rounds to.
    assert sum(value <= level + 1e-12 for value in statistics.holm(p)) == rejected


def test_the_false_discovery_rate_by_hand():
    """Six p-values, worked by Benjamini and Hochberg's rule: p_(i) m / i, then the running minimum from the largest."""
    p_values = [0.01, 0.04, None, 0.03, 0.005, 0.55, 0.06]
    # In order: .005 x 6/1 = .03; .01 x 6/2 = .03; .03 x 6/3 = .06; .04 x 6/4 = .06; .06 x 6/5 = .072; .55
    expected = [0.03, 0.06, None, 0.06, 0.03, 0.55, 0.072]
    assert statistics.false_discovery_rate(p_values) == pytest.approx(expected)
    assert statistics.false_discovery_rate([None]) == [None]
    assert statistics.false_discovery_rate([]) == []


def test_power_is_that_of_tables():
    """G*Power 3.1 manual, matched pairs: 0.832114 at 50 pairs and d = 0.421637. Cohen 1988: 34 pairs at d = 0.5."""
    assert statistics.power(0.421637, 1.0, 50) == pytest.approx(0.832114, abs=1e-6)
    assert [statistics.pairs_needed(size, 1.0) for size in (0.2, 0.5, 0.8)] == [199, 34, 15]


@pytest.mark.parametrize(
    ("difference", "deviation", "pairs", "level"),
    [(0.015, 0.03, 12, 0.05), (-0.06, 0.04, 4, 0.01), (0.0, 1.0, 6, 0.2), (0.01, 0.05, 2, 0.05)],
)
def test_power_is_the_share_of_simulated_studies_that_resolve_the_difference(difference, deviation, pairs, level):
    studies = 40_000
    draws = np.random.default_rng(3).normal(difference, deviation, (studies, pairs))
    simulated = float((reference.ttest_1samp(draws, 0.0, axis=1).pvalue < level).mean())
    # Four standard errors of the simulated share.
    exact = statistics.power(difference, deviation, pairs, level)
    assert exact == pytest.approx(simulated, abs=4 * 0.5 / math.sqrt(studies))


def test_power_without_a_test_or_without_noise():
    assert statistics.power(0.1, 0.04, 1) == 0
    assert statistics.power(0.1, 0.0, 5) == 1
    assert statistics.power(0.0, 0.0, 5) == 0
    assert statistics.pairs_needed(0.001, 10.0) is None
    # The tails of the noncentral t have no number so far out.
    assert statistics.power(1e4, 1.0, 100_000) == 1


def test_holm_of_nothing_and_of_tests_that_were_not_made():
    assert statistics.holm([]) == []
    assert statistics.holm([None, 0.9, 0.8]) == [None, 1.0, 1.0]


# --- over tasks ---------------------------------------------------------------------------------------------------
def test_iqm_is_the_trimmed_mean_with_scipys_stratified_bootstrap():
    scores = {"a": list(rng(1).normal(size=12)), "b": list(rng(2).normal(size=9) + 1)}

    def trimmed_mean(*parts, axis):
        return reference.trim_mean(np.concatenate(parts, axis=axis), 0.25, axis=axis)

    theirs = reference.bootstrap(
        tuple(np.asarray(values) for values in scores.values()),
        trimmed_mean,
        n_resamples=5000,
        method="percentile",
        rng=rng(3),
        vectorized=True,
        axis=-1,
    )
    ours = statistics.iqm(scores, rng(4))
    assert ours.mean == pytest.approx(reference.trim_mean([*scores["a"], *scores["b"]], 0.25))
    assert ours.n == 21
    # Two sets of draws: the bounds differ by their error.
    assert bounds(ours) == pytest.approx(bounds(theirs.confidence_interval), abs=0.07)


def test_each_task_is_resampled_among_itself():
    apart = statistics.iqm({"easy": [1.0] * 5, "hard": [0.0] * 5}, rng())
    assert bounds(apart) == (0.5, 0.5)


def test_iqm_of_single_scores_has_no_interval():
    assert statistics.iqm({"a": [1.0], "b": [2.0]}, rng()).low is None


@pytest.mark.parametrize("scores", [{}, {"a": []}, {"a": [math.nan]}], ids=["no task", "an empty task", "no value"])
def test_iqm_of_nothing_is_refused(scores):
    with pytest.raises(UserError, match="at least one"):
        statistics.iqm(scores, rng())


few_numbers = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=8)


@examples
@given(few_numbers, few_numbers)
def test_probability_of_improvement_is_mann_whitney(a, b):
    u = len(a) * len(b) / 2
    if len({*a, *b}) > 1:  # scipy's warns where all are equal
        u = reference.mannwhitneyu(a, b).statistic
    ours = statistics.probability_of_improvement({"t": a}, {"t": b}, rng())
    assert ours.mean == pytest.approx(u / (len(a) * len(b)))
    if ours.low is not None:
        assert 0 <= ours.low <= ours.high <= 1


@examples
@given(few_numbers, few_numbers)
def test_probabilities_of_improvement_sum_to_one(a, b):
    there = statistics.probability_of_improvement({"t": a}, {"t": b}, rng())
    back = statistics.probability_of_improvement({"t": b}, {"t": a}, rng())
    assert there.mean + back.mean == pytest.approx(1)


def test_tasks_are_matched_by_name():
    a = {"x": [1.0], "y": [5.0], "only a": [9.0]}
    b = {"y": [6.0], "x": [0.0]}
    better = statistics.probability_of_improvement(a, b, rng())
    assert better.mean == 0.5, "better in x, worse in y"
    assert better.n == 4


def test_two_results_without_a_task_in_common_are_refused():
    with pytest.raises(UserError, match="no task in common"):
        statistics.probability_of_improvement({"a": [1.0]}, {"b": [1.0]}, rng())


# --- the frontier of reward and KL --------------------------------------------------------------------------------
@examples
@given(
    st.lists(st.floats(0, 50), min_size=2, max_size=6, unique=True),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(0, 50),
)
def test_a_frontier_on_a_line_is_the_line_and_never_leaves_its_range(at, slope, intercept, kl):
    reward = reward_at_kl([Point(kl=x, reward=intercept + slope * x) for x in at], kl)
    if min(at) <= kl <= max(at):
        assert reward == pytest.approx(intercept + slope * kl, abs=1e-9)
    else:
        assert reward == "outside"


COLLAPSED = Point(kl=40.0, reward=0.0, collapsed=True)


def test_a_collapsed_run_is_no_part_of_a_frontier():
    assert reward_at_kl([Point(1.0, 0.5), Point(3.0, 0.7), COLLAPSED], 2.0) == pytest.approx(0.6)


def test_runs_at_one_kl_count_as_their_mean():
    # A run without a KL is left out.
    points = [Point(math.nan, 0.3), Point(2.0, 0.9), Point(2.0, 0.7)]
    assert reward_at_kl(points, 2.0) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        pytest.param([Point(1.0, 0.3), COLLAPSED], "gap", id="a collapsed run beyond it"),
        pytest.param([Point(1.0, 0.3), Point(1.5, 0.4)], "outside", id="no run beyond it"),
    ],
)
def test_a_frontier_names_the_reason_where_it_has_no_value(points, reason):
    assert reward_at_kl(points, 2.0) == reason


# --- rules of collapse --------------------------------------------------------------------------------------------
def test_rules_of_collapse_are_read():
    of_start, of_kl = parse_rule("r < 0.5 start, kl>=20")
    assert (of_start.metric, of_start.bound, of_start.of_start, of_start.last) == ("r", 0.5, True, 1)
    assert (of_kl.metric, of_kl.bound, of_kl.of_start) == ("kl", 20.0, False)


def test_a_rule_compares_as_it_is_written():
    of_start, of_kl = parse_rule("r < 0.5 start, kl>=20")
    (above,) = parse_rule("r > 1")
    assert of_start.compare(1, 2)
    assert of_kl.compare(20, 20)
    assert not of_kl.compare(1, 20)
    assert not above.compare(1, 1)


def test_the_default_rule_is_a_share_of_the_start():
    assert parse_rule(statistics.DEFAULT_RULE)[0].of_start


def test_a_rule_may_ask_for_several_updates():
    twice, once = parse_rule("r < 0.5 start last 2, kl > 20 last 1")
    assert (twice.of_start, twice.last) == (True, 2)
    assert (once.of_start, once.last) == (False, 1)


@pytest.mark.parametrize("text", ["r", "r < x", "r == 1", "", "r < inf", "r < 1 begin", "r < 1 last", "r < 1 last 0"])
def test_what_is_no_rule_of_collapse_is_refused(text):
    with pytest.raises(UserError, match="--collapse"):
        parse_rule(text)
