"""Filters, exports, and the columns of a frame of runs."""

import math

import pandas as pd
import pytest

from kl_comedy.errors import UserError
from kl_comedy.results import values
from kl_comedy.results.runs import drop_columns, read_runs, translate
from kl_comedy.statistics import parse_rule

FRAME = pd.DataFrame(
    {
        "run_id": ["a1", "02"],
        "status": ["FINISHED", "RUNNING"],
        "params.seed": ["0", "1"],
        "params.optimizer.lr": ["0.0001", "1e-05"],
        "params.output": ["/somewhere", "/else"],
        "params.lora": ["null", None],
        "tags.run.dir": ["x", "y"],
        "tags.kl.label": ["no KL", "0.10 k3_reverse_token in loss"],
        "metrics.train/reward": [0.1 + 0.2, math.nan],
        "metrics.kl/x": [math.inf, 1e-300],
        "duration_s": [1.5, math.nan],
    }
)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("seed = 0", "params.`seed` = '0'"),
        ("seed='0' and optimizer.lr = 1e-06", "params.`seed`='0' AND params.`optimizer.lr` = '1e-06'"),
        ("train/reward > 0.5", "metrics.`train/reward` > 0.5"),
        ("Metric.kl_x >= 1 and inside in ('a')", "metrics.`kl_x` >= 1 AND params.`inside` IN ('a')"),
        ("metrics.kl_x >= 1", "metrics.`kl_x` >= 1"),
        ("tags.kl.label LIKE 'k3%'", "tags.`kl.label` LIKE 'k3%'"),
        ('tags.`kl.label` = "it\'s"', 'tags.`kl.label` = "it\'s"'),
        ("status = 'FINISHED'", "attributes.status = 'FINISHED'"),
        ("attributes.run_id IN ('a','b')", "attributes.run_id IN ('a','b')"),
        ("", ""),
    ],
)
def test_a_filter_with_short_names_is_translated_to_mlflows(where, expected):
    translated, _ = translate(where)
    assert translated == expected


def test_the_keys_of_a_filter():
    _, keys = translate("seed = 0 and train/reward > 0.5 and status = 'x'")
    assert keys == ["params.seed", "metrics.train/reward", "attributes.status"]


def test_a_filter_with_or_is_refused():
    with pytest.raises(UserError, match="not OR"):
        translate("seed = 0 OR seed = 1")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_an_export_reads_back_as_it_was(tmp_path, suffix):
    file = tmp_path / f"runs.{suffix}"
    if suffix == "csv":
        FRAME.to_csv(file, index=False)
    else:
        FRAME.to_parquet(file, index=False)
    exported = read_runs(file)
    pd.testing.assert_frame_equal(exported, FRAME, check_exact=True, check_dtype=False)
    assert exported["params.optimizer.lr"].tolist() == ["0.0001", "1e-05"], "texts stay texts"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "name,mean\nx,1\n", "lacks run_id"),
        ("a.parquet", "no", "cannot be read"),
    ],
)
def test_a_file_that_is_no_export_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        read_runs(tmp_path / name)


def test_an_export_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such table"):
        read_runs(tmp_path / "b.csv")


def test_a_store_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UserError):
        read_runs(f"sqlite:///{tmp_path}/absent.db")


def test_columns_are_dropped_by_name_or_pattern():
    columns = list(drop_columns(FRAME, ["run.*", "output", "metrics.kl/*"]).columns)
    assert columns == [name for name in FRAME if name not in ("tags.run.dir", "params.output", "metrics.kl/x")]
    assert list(drop_columns(FRAME, []).columns) == list(FRAME.columns)


@pytest.mark.parametrize(("pattern", "message"), [("outputs", "did you mean 'output'"), ("run_*", "run_id stays")])
def test_a_pattern_that_drops_nothing_or_too_much_is_refused(pattern, message):
    with pytest.raises(UserError, match=message):
        drop_columns(FRAME, [pattern])


@pytest.mark.parametrize(
    ("last", "first", "status", "reason", "collapsed"),
    [
        ({"r": 0.19}, 0.4, "FINISHED", None, True),
        ({"r": 0.2, "kl": 3.0}, 0.4, "FINISHED", None, False),
        ({"r": 0.9, "kl": 20.0}, 0.4, "FINISHED", None, True),
        ({"r": -math.inf}, None, "FINISHED", None, True),
        ({"r": "nan"}, None, "FINISHED", None, True),  # logged, and so different from no value
        ({"r": 0.1}, None, "FINISHED", None, None),
        ({"r": 0.1, "kl": 3.0}, None, "FINISHED", None, False),
        ({}, None, "RUNNING", None, None),
        ({}, None, "FAILED", "train/loss is not finite (nan)", True),
        ({}, None, "FINISHED", "train/loss is not finite (nan)", None),
        ({}, None, "FAILED", "process died (pid 3)", None),
    ],
)
def test_collapse_is_what_the_rule_says(monkeypatch, last, first, status, reason, collapsed):
    def history(uri, run_ids, metric):
        rows = []
        for run_id in run_ids:
            if metric == "r" and first is not None:
                rows.append((run_id, 0, first))
            if last.get(metric) == "nan":
                rows.append((run_id, 9, math.nan))
        return pd.DataFrame(rows, columns=["run_id", "step", "value"]).astype({"value": float})

    monkeypatch.setattr(values, "history", history)
    row = {"run_id": "a", "status": status, "tags.failure.reason": reason}
    row |= {f"metrics.{name}": float(last.get(name, "nan")) for name in ("r", "kl")}
    (judged,) = values.with_collapsed("", pd.DataFrame([row]), parse_rule("r < 0.5 start, kl>=20")).to_dict("records")
    if collapsed is None:
        assert pd.isna(judged["collapsed"]), "it is not known"
    else:
        assert judged["collapsed"] is collapsed
