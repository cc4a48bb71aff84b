"""pass@k and the vote against enumeration; intervals that see through repeated samples of one problem."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.errors import UserError
from kl_comedy.statistics import (
    CLUSTER_METHODS,
    clustered_interval,
    clustered_se,
    majority,
    majority_at_k,
    pass_at_k,
)

judged = st.lists(st.booleans(), min_size=1, max_size=7)
problems = st.lists(st.lists(st.booleans().map(float), min_size=1, max_size=4), min_size=2, max_size=8)


@given(judged, st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(samples, data):
    k = data.draw(st.integers(1, len(samples)))
    subsets = list(itertools.combinations(samples, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(samples), sum(samples), k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_a_k_that_samples_do_not_allow_is_refused(k):
    with pytest.raises(UserError, match=r"got \d; allowed: 1 to 4"):
        pass_at_k(4, 1, k)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=7))
def test_the_vote_is_the_mean_over_equally_likely_winners(pairs):
    answers, right = [answer for answer, _ in pairs], [verdict for _, verdict in pairs]
    counts = {a: answers.count(a) for a in answers if a is not None}
    winners = [a for a, n in counts.items() if n == max(counts.values())]
    outcomes = [np.mean([r for a, r in pairs if a == winner]) for winner in winners]
    found = majority(answers, right)
    assert found.correct == pytest.approx(np.mean(outcomes) if winners else 0.0)
    assert found.tied == (len(winners) > 1) and found.votes == sum(counts.values())


def test_the_vote_of_fewer_uses_disjoint_runs_of_samples():
    found = majority_at_k(["a", "a", "b", "b", "c"], [True, True, False, False, True], 2)
    assert found.correct == 0.5 and not found.tied


@settings(deadline=None)
@given(problems, st.integers(1, 4), st.sampled_from(["t", "bootstrap"]))
def test_samples_repeated_word_for_word_add_no_certainty(clusters, times, method):
    """Greedy samples drawn twice are no second measurement."""
    repeated = [cluster * times for cluster in clusters]
    assert clustered_se(repeated) == pytest.approx(clustered_se(clusters), abs=1e-12)
    once, again = (clustered_interval(rows, method, rng=np.random.default_rng(0)) for rows in (clusters, repeated))
    assert (again.low, again.high) == pytest.approx((once.low, once.high), abs=1e-9)


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_with_equal_numbers_it_is_the_error_of_the_problems_means(groups, samples, seed):
    values = np.random.default_rng(seed).random((groups, samples))
    means = values.mean(axis=1)
    assert clustered_se(values.tolist()) == pytest.approx(np.std(means, ddof=1) / math.sqrt(groups), rel=1e-9)


@settings(deadline=None)
@given(problems, st.sampled_from(CLUSTER_METHODS))
def test_bounds_hold_the_mean(clusters, method):
    found = clustered_interval(clusters, method, rng=np.random.default_rng(1))
    assert found.low <= found.mean <= found.high and found.n == len(clusters)
    if method != "t":
        assert found.low >= 0 and found.high <= 1


def test_nothing_right_is_not_certainty():
    found = clustered_interval([[0.0, 0.0]] * 30)
    z2 = 1.959963984540054**2
    assert found.low == 0 and found.high == pytest.approx(z2 / (30 + z2))


@pytest.mark.parametrize("method", ["wilson", "bootstrap"])
def test_coverage_where_samples_of_a_problem_agree(method):
    """Problems are all right or all wrong: an interval over completions would hold the truth far too seldom."""
    rng, truth, held, naive_held = np.random.default_rng(3), 0.4, 0, 0
    rounds = 300
    for _ in range(rounds):
        solved = rng.random(60) < truth
        clusters = [[float(each)] * 8 for each in solved]
        found = clustered_interval(clusters, method, rng=rng)
        naive = clustered_interval([[x] for cluster in clusters for x in cluster], "wilson")
        held += found.low <= truth <= found.high
        naive_held += naive.low <= truth <= naive.high
    assert held / rounds > 0.9 > 0.7 > naive_held / rounds


def test_one_problem_has_no_interval():
    assert clustered_interval([[1.0, 0.0]]).low is None and clustered_se([[1.0]]) is None


def test_wilson_is_for_shares_only():
    with pytest.raises(UserError, match="outside"):
        clustered_interval([[0.5], [3.0]])
