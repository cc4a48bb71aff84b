"""Comparisons and aggregates of drawn runs, against plain loops over the runs: seeds that repeat, runs that diverged.

The tables read frames; here every number of a row is computed again from the list of runs, by its definition.
"""

import math
import random
from statistics import mean, stdev

import pandas as pd
import pytest
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from kl_comedy.results.compare import EqualKL, aggregate, by_seed, compare_families, summarize
from kl_comedy.results.runs import BETA, FAMILY
from kl_comedy.statistics import generator, iqm, paired_difference, probability_of_improvement

METRIC = "metrics.eval/a/reward"
OTHER = "metrics.eval/b/reward"
SEED = "params.seed"
FAMILIES = {"no KL": ("0",), "k1": ("0.1", "0.5"), "k3": ("0.1", "0.5")}


def drawn_runs(number):
    """Runs of three families: seeds that lack, that repeat once or twice, and values that are not finite."""
    draw = random.Random(number)
    runs = []
    for family, betas in FAMILIES.items():
        for beta in betas:
            for seed in range(6):
                for _ in range(draw.choice([0, 1, 1, 2, 3])):
                    value = draw.gauss(0.5, 0.2)
                    if draw.random() < 0.12:
                        value = draw.choice([math.nan, math.inf, -math.inf])
                    run = {FAMILY: family, BETA: beta, SEED: str(seed), METRIC: value, OTHER: draw.gauss(0.3, 0.1)}
                    runs.append(run | {"run_id": f"r{len(runs)}", "status": "FINISHED"})
    draw.shuffle(runs)
    return runs


def seed_means(runs, metric=METRIC):
    """The mean of the finite values of each seed."""
    values = {}
    for run in runs:
        if math.isfinite(run[metric]):
            values.setdefault(run[SEED], []).append(run[metric])
    return {seed: mean(of_seed) for seed, of_seed in values.items()}


def interval(values):
    """Mean and Student's bounds; NaN where there are none."""
    if not values:
        return math.nan, math.nan, math.nan
    if len(values) == 1:
        return values[0], math.nan, math.nan
    half = student.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean(values), mean(values) - half, mean(values) + half


def close(actual, expected):
    return actual == pytest.approx(expected, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("baseline", ["no KL", "k1"])
def test_each_row_of_a_comparison_at_equal_beta(number, baseline):
    runs = drawn_runs(number)
    margin = 0.1
    table = compare_families(pd.DataFrame(runs), [], METRIC, baseline, "t", margin=margin)
    rows = {(row["kl.family"], row["at"]): row for row in table.to_dict("records")}
    assert len(rows) == len(table) == len({(run[FAMILY], run[BETA]) for run in runs})
    for (family, at), row in rows.items():
        members = [run for run in runs if run[FAMILY] == family and f"beta {run[BETA]}" == at]
        means = seed_means(members)
        assert row["n"] == len(means)
        assert row["runs"] == len(members)
        assert close((row["mean"], row["low"], row["high"]), interval(list(means.values())))
        if family == baseline:
            assert math.isnan(row["minus_baseline"])
            continue
        beta = "0" if baseline == "no KL" else at.removeprefix("beta ")
        others = seed_means([run for run in runs if run[FAMILY] == baseline and run[BETA] == beta])
        if not [run for run in runs if run[FAMILY] == baseline and run[BETA] == beta]:
            assert math.isnan(row["minus_baseline"])
            continue
        common = sorted(set(means) & set(others))
        differences = [means[seed] - others[seed] for seed in common]
        assert row["pairs"] == len(common)
        assert row["unpaired"] == len(set(means) ^ set(others))
        assert close((row["minus_baseline"], row["difference_low"], row["difference_high"]), interval(differences))
        if len(common) > 1:
            assert close(row["p"], ttest_1samp(differences, 0.0).pvalue)
            above = ttest_1samp(differences, -margin, alternative="greater").pvalue
            below = ttest_1samp(differences, margin, alternative="less").pvalue
            assert close(row["p_equivalent"], max(above, below))


def test_runs_are_paired_by_seed_and_warm_start():
    """Two warm starts that differ by 0.5, two seeds of each: paired, the difference is 0.125 everywhere; by seed alone
    there would be two pairs of means."""
    runs = []
    for family, gain in (("no KL", 0.0), ("k1", 0.125)):
        for warm_start, level in (("1", 0.25), ("2", 0.75)):
            for seed in ("0", "1"):
                value = level + gain + int(seed) / 64
                run = {FAMILY: family, BETA: "0", SEED: seed, METRIC: value, "params.model.options.seed": warm_start}
                runs.append(run | {"run_id": f"r{len(runs)}", "status": "FINISHED"})
    frame = pd.DataFrame(runs)
    row = compare_families(frame, [], METRIC, "no KL", "t").to_dict("records")[1]
    assert (row["n"], row["pairs"], row["unpaired"]) == (4, 4, 0)
    assert close((row["minus_baseline"], row["sd"]), (0.125, 0.0))
    ends = frame.assign(kl=1.0)
    at_one_nat = compare_families(ends, [], METRIC, "no KL", "t", at_kl=EqualKL(column="kl", nats=[1.0]))
    assert list(at_one_nat["n"]) == [4, 4]


def test_a_verdict_needs_power_at_the_margin():
    """Ten pairs that are the same by two one-sided tests: within 0.1 and 0.02, and the latter without the power."""
    values = [0.01, -0.01, 0.03, -0.03, 0.02, -0.02, 0.04, -0.04, 0.0, 0.0]
    runs = []
    for seed, value in enumerate(values):
        for family, gain in (("no KL", 0.0), ("k1", value), ("k3", 0.2 + value)):
            run = {FAMILY: family, BETA: "0", SEED: str(seed), METRIC: 0.4 + gain}
            runs.append(run | {"run_id": f"r{len(runs)}", "status": "FINISHED"})
    verdicts = {}
    for margin in (0.1, 0.02, None):
        table = compare_families(pd.DataFrame(runs), [], METRIC, "no KL", "t", margin=margin)
        verdicts[margin] = list(table["verdict"].fillna(""))
    assert verdicts[0.1] == ["", "the same", "above"]
    # 0.02 is 0.74 standard deviations: its power as one of two contrasts is 0.4.
    assert verdicts[0.02] == ["", "not resolved", "above"]
    assert verdicts[None] == ["", "not resolved", "above"]


@pytest.mark.parametrize("number", range(6))
def test_counts_of_a_paired_difference_are_of_either_side(number):
    draw = random.Random(number)
    left = {key: draw.random() for key in range(9) if draw.random() < 0.6}
    right = {key: draw.random() for key in range(12) if draw.random() < 0.7}
    left[100] = math.nan
    right[101] = math.inf
    paired = paired_difference(left, right)
    finite_left, finite_right = set(left) - {100}, set(right) - {101}
    assert paired.only_a == len(finite_left - finite_right)
    assert paired.only_b == len(finite_right - finite_left)
    assert paired.difference.n == len(finite_left & finite_right)


@pytest.mark.parametrize("number", range(12))
def test_each_row_of_a_summary(number):
    runs = drawn_runs(number)
    draw = random.Random(number)
    for run in runs:
        run["status"] = draw.choice(["FINISHED", "FINISHED", "FAILED", "KILLED", "RUNNING"])
    table = summarize(pd.DataFrame(runs), [FAMILY], [METRIC, OTHER], run_ids=True)
    for row in table.to_dict("records"):
        members = [run for run in runs if run[FAMILY] == row[FAMILY]]
        finished = [run for run in members if run["status"] == "FINISHED"]
        values = list(seed_means(finished, row["metric"]).values())
        assert (row["runs"], row["n"]) == (len(members), len(values))
        assert row["failed"] == sum(run["status"] in ("FAILED", "KILLED") for run in members)
        assert close((row["mean"], row["low"], row["high"]), interval(values))
        finite = {run["run_id"] for run in finished if math.isfinite(run[row["metric"]])}
        assert set(row["run_ids"].split()) == finite


@pytest.mark.parametrize("number", range(8))
def test_each_row_of_an_aggregate(number):
    runs = drawn_runs(number)
    table = aggregate(pd.DataFrame(runs), [FAMILY], [METRIC, OTHER], "no KL")
    tasks = {}
    for family in FAMILIES:
        members = [run for run in runs if run[FAMILY] == family]
        tasks[family] = [list(seed_means(members, name).values()) for name in (METRIC, OTHER)]
    for row in table.to_dict("records"):
        of_tasks = tasks[row["kl.family"]]
        scores = sorted(score for of_task in of_tasks for score in of_task)
        cut = len(scores) // 4
        assert close(row["iqm"], mean(scores[cut : len(scores) - cut]))
        assert (row["scores"], row["tasks"]) == (len(scores), 2)
        if row["kl.family"] == "no KL":
            continue
        wins = []
        for mine, theirs in zip(of_tasks, tasks["no KL"], strict=True):
            points = [(a > b) + (a == b) / 2 for a in mine for b in theirs]
            wins.append(mean(points))
        assert close(row["p_better"], mean(wins))
        assert row["p_low"] <= row["p_better"] <= row["p_high"]


@pytest.mark.parametrize("number", range(12))
def test_each_row_of_a_comparison_at_equal_kl(number):
    runs = [run for run in drawn_runs(number) if math.isfinite(run[METRIC])]
    draw = random.Random(number)
    for run in runs:
        run |= {"kl": draw.uniform(0, 6), "start": 0.2, "collapsed": draw.random() < 0.15}
    nats = [1.0, 3.0]
    at_kl = EqualKL(column="kl", nats=nats, start="start")
    table = compare_families(pd.DataFrame(runs), [], METRIC, None, "t", at_kl=at_kl)
    for row in table.to_dict("records"):
        family = row["kl.family"]
        kl = float(row["at"].removeprefix("KL "))
        seeds = list(dict.fromkeys(run[SEED] for run in runs if run[FAMILY] == family))
        rewards, outside, gap, members = [], 0, 0, []
        for seed in seeds:
            mine = [run for run in runs if run[SEED] == seed and run[FAMILY] in (family, "no KL")]
            members += mine
            # Its start is a point at 0 nats, once for each run.
            points = [(run["kl"], run[METRIC], run["collapsed"]) for run in mine] + [(0.0, 0.2, False)]
            below = [point for point in points if point[0] <= kl]
            above = [point for point in points if point[0] >= kl]
            if not above:
                outside += 1
                continue
            left, right = max(below), min(above)
            if left[2] or right[2]:
                gap += 1
                continue
            rewards.append(left[1] + (right[1] - left[1]) * (kl - left[0]) / (right[0] - left[0]))
        assert (row["n"], row["outside"], row["gap"]) == (len(rewards), outside, gap)
        assert row["runs"] == len(members)
        assert row["collapsed"] == sum(run["collapsed"] for run in members)
        assert close((row["mean"], row["low"], row["high"]), interval(rewards))


def test_intervals_of_aggregates_cover_what_they_estimate():
    """The bootstrap's bounds of draws from a known distribution hold its mean as often as they say."""
    held = 0
    better = 0
    for number in range(60):
        draw = random.Random(number)
        scores = {name: [draw.gauss(0.0, 1.0) for _ in range(15)] for name in ("a", "b")}
        others = {name: [draw.gauss(0.0, 1.0) for _ in range(15)] for name in ("a", "b")}
        bounds = iqm(scores, generator())
        held += bounds.low <= 0 <= bounds.high
        chance = probability_of_improvement(scores, others, generator())
        better += chance.low <= 0.5 <= chance.high
    # Of 60 at 95 % (about 92 % for percentiles of 15 values), fewer than 46 have a chance below 1e-4.
    assert held >= 46
    assert better >= 46


def test_by_seed_takes_every_run_of_a_seed_into_its_mean():
    runs = drawn_runs(1)
    values = seed_means(runs)
    assert by_seed(pd.DataFrame(runs), METRIC) == pytest.approx([values[seed] for seed in values])
