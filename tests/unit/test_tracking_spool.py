"""The spool: what is on disk survives kills, and a resume forgets exactly what it will do again."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.errors import UserError
from kl_comedy.tracking import mlflow_sync
from kl_comedy.tracking.logger import RunLogger
from kl_comedy.tracking.spool import Spool, json_safe


def steps_of(spool, kind="metrics"):
    return [event.step for event in spool.events() if event.kind == kind]


def test_what_goes_in_comes_out(tmp_path):
    spool = Spool(tmp_path)
    spool.append("params", {"seed": "0"})
    spool.append("metrics", {"a/b": 0.1, "nan": math.nan, "inf": -math.inf}, step=3)
    spool.close()
    params, metrics = Spool(tmp_path).events()
    assert (params.kind, dict(params.data), params.step) == ("params", {"seed": "0"}, None)
    assert metrics.step == 3 and metrics.data["a/b"] == 0.1 and metrics.data["inf"] == -math.inf
    assert math.isnan(metrics.data["nan"])
    for line in spool.path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_unknown_kind_is_a_bug(tmp_path):
    with pytest.raises(ValueError, match="unknown event kind"):
        Spool(tmp_path).append("metric", {}, step=1)


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_torn_last_line_is_dropped_and_the_next_append_is_whole(tmp_path, cut):
    spool = Spool(tmp_path)
    for step in range(3):
        spool.append("metrics", {"x": 1.0}, step=step)
    spool.close()
    os.truncate(spool.path, spool.path.stat().st_size - cut)
    again = Spool(tmp_path)
    assert steps_of(again) == [0, 1]
    again.append("metrics", {"x": 2.0}, step=2)
    again.close()
    assert steps_of(Spool(tmp_path)) == [0, 1, 2]
    assert Spool(tmp_path).read().unreadable == 0


def test_an_unreadable_line_in_the_middle_is_counted_not_hidden(tmp_path):
    spool = Spool(tmp_path)
    spool.append("metrics", {"x": 1.0}, step=0)
    spool.close()
    with spool.path.open("ab") as file:
        file.write(b"\x00\x00garbage\n" + b'{"kind": "metrics", "time": 1, "step": 1, "data": {"x": "text"}}\n')
    spool.append("metrics", {"x": 1.0}, step=2)
    reading = spool.read()
    assert [event.step for event, _ in reading.events] == [0, 2]
    assert reading.unreadable == 2


def test_kill_minus_nine_loses_nothing_that_was_logged(tmp_path):
    code = f"""
        from kl_comedy.tracking.spool import Spool
        spool = Spool({str(tmp_path)!r})
        for step in range(10**9):
            spool.append("metrics", {{"x": float(step)}}, step=step)
            print(step, flush=True)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    said = [int(child.stdout.readline()) for _ in range(200)]
    child.send_signal(signal.SIGKILL)
    said += [int(line) for line in child.communicate()[0].splitlines() if line]
    found = steps_of(Spool(tmp_path))
    assert found[: len(said)] == said


def test_truncate_drops_later_steps_and_their_tables_only(tmp_path):
    spool = Spool(tmp_path)
    spool.append("params", {"a": "1"})
    (tmp_path / "tables").mkdir()
    for step in (1, 2, 3):
        spool.append("metrics", {"x": float(step)}, step=step)
        (tmp_path / f"tables/{step}.json").write_text("[]")
        spool.append("table", {"name": "t", "path": f"tables/{step}.json", "folder": "tables"}, step=step)
    spool.append("status", {"status": "FAILED", "reason": "x"})
    before = spool.path.read_bytes()
    unchanged = spool.truncate_after(2)
    assert unchanged > 0 and spool.path.read_bytes()[:unchanged] == before[:unchanged]
    assert steps_of(spool) == [1, 2] and steps_of(spool, "table") == [1, 2]
    assert [event.kind for event in spool.events() if event.step is None] == ["params", "status"]
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == ["1.json", "2.json"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 8), max_size=12), st.integers(-1, 8))
def test_truncate_is_a_filter(tmp_path_factory, steps, last):
    spool = Spool(tmp_path_factory.mktemp("spool"))
    for step in steps:
        spool.append("metrics", {"x": 1.0}, step=step)
    unchanged = spool.truncate_after(last)
    assert steps_of(spool) == [step for step in steps if step <= last]
    assert [event.step for event, at in spool.read().events if at < unchanged] == steps[: _first(steps, last)]


def _first(steps, last):
    return next((at for at, step in enumerate(steps) if step > last), len(steps))


def test_points_beyond_the_checkpoint_wait(tmp_path):
    spool = Spool(tmp_path)
    for step in range(1, 6):
        spool.append("metrics", {"x": 1.0}, step=step)
    spool.append("tags", {"a": "b"})
    events, offset, _ = mlflow_sync._events_to_send(spool, 0, 3)
    assert [event.step for event in events] == [1, 2, 3, None]
    events, offset, _ = mlflow_sync._events_to_send(spool, offset, 5)
    assert [event.step for event in events] == [4, 5, None]
    assert mlflow_sync._events_to_send(spool, offset, math.inf)[0] == []
    assert [event.step for event in mlflow_sync._events_to_send(spool, 0, -math.inf)[0]] == [None]


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_like)
def test_plain_is_always_strict_json(value):
    json.loads(json.dumps(json_safe(value), allow_nan=False))


def files_only(tmp_path, **extra):
    config = SimpleNamespace(uri="none", experiment="e", flush_every=2, tags={})
    kwargs = {"run_dir": tmp_path / "run", "run_name": "r", "params": {"seed": 0}, "tags": {}}
    return RunLogger.start(config, **{**kwargs, **extra})


def test_tracking_to_files_only_needs_no_mlflow(tmp_path):
    logger = files_only(tmp_path)
    logger.log_metrics({"eval/x/pass@4": 1.0}, 1)
    logger.log_table("samples", [{"text": "\ud800 [red]", "value": math.nan}], 1)
    logger.finish("FAILED", "the loss is NaN")
    assert logger.run_id is None
    events = Spool(tmp_path / "run").events()
    assert [event.data for event in events if event.kind == "metrics"] == [{"eval/x/pass_at_4": 1.0}]
    assert json.loads((tmp_path / "run/tables/samples/1.json").read_text())[0]["value"] == "nan"
    assert events[-1].data == {"status": "FAILED", "reason": "the loss is NaN"}
    assert {"failure.reason": "the loss is NaN"} in [event.data for event in events]


def test_a_new_run_in_an_old_folder_keeps_the_old_spool(tmp_path, caplog):
    files_only(tmp_path).finish()
    files_only(tmp_path).finish()
    files_only(tmp_path).finish()
    assert len(list((tmp_path / "run").glob("spool*.jsonl"))) == 3
    assert "held an earlier run" in caplog.text


def test_resume_drops_the_replayed_steps_and_logs_the_checkpoint_step_once(tmp_path):
    first = files_only(tmp_path)
    for step in range(1, 8):
        first.log_metrics({"x": float(step)}, step)
    second = files_only(tmp_path, resume=True, resume_step=4, params={"seed": 0, "train.steps": 9})
    second.log_metrics({"x": -1.0, "eval": 2.0}, 4)
    for step in range(5, 10):
        second.log_metrics({"x": float(step)}, step)
    second.finish()
    events = Spool(tmp_path / "run").events()
    points = [(event.step, event.data["x"]) for event in events if event.kind == "metrics" and "x" in event.data]
    assert points == [(step, float(step)) for step in range(1, 10)]
    assert any(event.data == {"eval": 2.0} for event in events)


def test_changed_params_on_resume_are_said(tmp_path):
    files_only(tmp_path, params={"train.steps": 5, "seed": 0})
    files_only(tmp_path, params={"train.steps": 9, "seed": 0}, resume=True, resume_step=None).finish()
    tags = {
        key: text
        for event in Spool(tmp_path / "run").events()
        if event.kind == "tags"
        for key, text in event.data.items()
    }
    assert tags["resume.params_changed"] == "train.steps: 5 -> 9"
    assert tags["resume.count"] == "1"


@pytest.mark.parametrize("uri", ["file:///x/mlruns", "mlruns", "sqlite://x.db", "sqlit:///x.db", ""])
def test_an_address_mlflow_cannot_use_is_refused_before_training(tmp_path, uri):
    config = SimpleNamespace(uri=uri, experiment="e", flush_every=2, tags={})
    with pytest.raises(UserError, match=r"tracking\.uri"):
        RunLogger.start(config, run_dir=tmp_path, run_name="r", params={}, tags={})


def test_unknown_final_status_is_a_bug(tmp_path):
    with pytest.raises(ValueError, match="FINISHED"):
        files_only(tmp_path).finish("DONE")
