"""Means and intervals: against scipy, and where they must stay silent."""

import math

import pandas as pd
import pytest

from kl_comedy.errors import UserError
from kl_comedy.tracking import compare as stats
from kl_comedy.tracking.runs import drop_repeats, resolve, varying


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
