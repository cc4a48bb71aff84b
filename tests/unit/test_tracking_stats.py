"""Means and intervals: against scipy, and where they must stay silent."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.errors import UserError
from kl_comedy.tracking import stats
from kl_comedy.tracking.queries import drop_repeats, resolve, varying

values = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=12)


@settings(deadline=None)
@given(values, st.sampled_from([0.9, 0.95, 0.99]))
def test_t_interval_is_scipys(sample, level):
    from scipy import stats as reference

    found = stats.t_interval(sample, level)
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
    first, second = stats.bootstrap_interval(sample, draws=500), stats.bootstrap_interval(sample, draws=500)
    assert first == second
    assert first.low <= first.mean <= first.high
    assert min(sample) - 1e-6 <= first.low and first.high <= max(sample) + 1e-6


def test_bootstrap_is_near_t_for_many_values():
    sample = list(np.random.default_rng(0).normal(size=400))
    by_t, by_draws = stats.t_interval(sample), stats.bootstrap_interval(sample)
    assert by_draws.low == pytest.approx(by_t.low, abs=0.02) and by_draws.high == pytest.approx(by_t.high, abs=0.02)


@pytest.mark.parametrize("method", stats.METHODS)
def test_one_value_has_no_interval_and_none_has_no_mean(method):
    assert stats.interval([3.0], method) == stats.Interval(n=1, mean=3.0, low=None, high=None)
    assert stats.interval([], method) == stats.Interval(n=0, mean=None, low=None, high=None)


def test_unknown_method():
    with pytest.raises(UserError, match="bootstrap"):
        stats.interval([1.0], "boot")


def runs(*rows):
    base = {"status": "FINISHED", "start_time": 0}
    frame = pd.DataFrame([{**base, "run_id": str(at), **row} for at, row in enumerate(rows)])
    return frame


def test_summarize_counts_finished_runs_and_shows_the_lost():
    frame = runs(
        {"params.name": "b", "metrics.x": 1.0},
        {"params.name": "a", "metrics.x": 5.0},
        {"params.name": "b", "metrics.x": 3.0},
        {"params.name": "b", "metrics.x": 100.0, "status": "FAILED"},
        {"params.name": "b", "metrics.x": math.nan},
        {"params.name": "b", "metrics.x": 100.0, "status": "RUNNING"},
    )
    first, second = stats.summarize(frame, ["params.name"], ["metrics.x"]).to_dict("records")
    assert (first["params.name"], first["n"], first["mean"], first["runs"], first["failed"]) == ("b", 2, 2.0, 5, 1)
    assert first["low"] == pytest.approx(2 - 12.7062047)
    assert (second["n"], second["mean"], math.isnan(second["low"])) == (1, 5.0, True)
    everything = stats.summarize(frame, [], ["metrics.x"], statuses=("FINISHED", "RUNNING", "FAILED"))
    assert everything["n"].tolist() == [5]


def test_summarize_keeps_runs_that_lack_a_group_key():
    frame = runs({"params.a": "1", "metrics.x": 1.0}, {"metrics.x": 2.0})
    assert stats.summarize(frame, ["params.a"], ["metrics.x"])["params.a"].tolist() == ["1", ""]


def test_band_leaves_out_nan_points_and_single_run_bounds():
    points = pd.DataFrame({"step": [1, 1, 2, 2, 3], "value": [1.0, 3.0, math.nan, 2.0, math.nan]})
    found = stats.band(points)
    assert found["step"].tolist() == [1, 2] and found["n"].tolist() == [2, 1] and found["mean"].tolist() == [2.0, 2.0]
    assert found["low"].isna().tolist() == [False, True]


def test_a_repeat_of_config_and_seed_counts_once():
    frame = runs(
        {"params.seed": "0", "params.lr": "1", "params.output": "a", "start_time": 1},
        {"params.seed": "0", "params.lr": "1", "params.output": "b", "start_time": 2},
        {"params.seed": "0", "params.lr": "1", "params.output": "c", "start_time": 3, "status": "FAILED"},
        {"params.seed": "1", "params.lr": "1", "params.output": "b", "start_time": 2},
    )
    assert drop_repeats(frame)["run_id"].tolist() == ["1", "3"]


def test_varying_names_what_a_group_pools():
    frame = runs(
        {"params.name": "a", "params.seed": "0", "params.lr": "1", "params.b": "x"},
        {"params.name": "a", "params.seed": "1", "params.lr": "2", "params.b": "x"},
        {"params.name": "b", "params.seed": "0", "params.lr": "1", "params.b": "y"},
    )
    assert varying(frame, ["params.name"]) == ["params.lr"]
    assert varying(frame, ["params.name", "params.lr"]) == []
    assert varying(frame, []) == ["params.lr", "params.b"]


def test_keys_resolve_to_columns_and_misses_name_the_nearest():
    frame = runs({"params.algorithm.advantage": "rloo", "tags.kl.label": "k3", "metrics.train/reward": 1.0})
    assert resolve(frame, "algorithm.advantage", "--group") == "params.algorithm.advantage"
    assert resolve(frame, "kl", "--group") == resolve(frame, "kl.label", "--group") == "tags.kl.label"
    assert resolve(frame, "status", "--group") == "status"
    with pytest.raises(UserError, match=r"did you mean 'algorithm\.advantage'"):
        resolve(frame, "algorithm.advantag", "--group")
    with pytest.raises(UserError, match="train/reward"):
        resolve(frame, "loss", "--metric")
    with pytest.raises(UserError, match=r"group of keys: algorithm\.advantage"):
        resolve(frame, "algorithm", "--group")
