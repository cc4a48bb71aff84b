"""The spool and the logger to files: what was logged survives kills, and a resume drops exactly what it repeats."""

import itertools
import json
import math
import multiprocessing
import os
import signal
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.errors import UserError
from kl_comedy.tracking import logger as logger_module
from kl_comedy.tracking.logger import NullLogger, ResumedFrom, RunLogger
from kl_comedy.tracking.spool import Spool, json_safe, unreadable_lines


def append_steps(spool, steps):
    for step in steps:
        spool.append("metrics", {"x": float(step)}, step=step)


def steps_of(spool, kind="metrics"):
    return [event.step for event in spool.read() if event.kind == kind]


def kinds_of(spool):
    return [event.kind for event in spool.read()]


def test_events_read_back_as_written_in_strict_json(tmp_path):
    spool = Spool(tmp_path)
    spool.append("params", {"seed": "0"})
    spool.append("metrics", {"a/b": 0.1, "nan": math.nan, "inf": -math.inf}, step=3)
    spool.close()
    params, metrics = Spool(tmp_path).read()
    assert params.kind == "params"
    assert dict(params.data) == {"seed": "0"}
    assert params.step is None
    assert metrics.step == 3
    assert metrics.data["a/b"] == 0.1
    assert metrics.data["inf"] == -math.inf
    assert math.isnan(metrics.data["nan"])
    for line in spool.path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # NaN and Infinity are no JSON


def test_anything_becomes_json(tmp_path):
    safe = json_safe([{1: math.nan, "b": (None, True, "x")}, tmp_path, -math.inf])
    assert safe == [{"1": "nan", "b": [None, True, "x"]}, str(tmp_path), "-inf"]


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_an_incomplete_last_line_is_dropped_and_the_next_append_is_whole(tmp_path, cut):
    spool = Spool(tmp_path)
    append_steps(spool, range(3))
    spool.close()
    os.truncate(spool.path, spool.path.stat().st_size - cut)
    again = Spool(tmp_path)
    assert steps_of(again) == [0, 1]
    append_steps(again, [2])
    assert steps_of(Spool(tmp_path)) == [0, 1, 2]
    assert "unreadable" not in kinds_of(Spool(tmp_path))


def test_an_unreadable_line_in_the_middle_is_no_event(tmp_path):
    spool = Spool(tmp_path)
    append_steps(spool, [0])
    with spool.path.open("ab") as file:
        file.write(b"\x00\x00garbage\n" + b'{"kind": "metrics", "time": 1, "step": 1, "data": {"x": "text"}}\n')
    append_steps(spool, [2])
    events = spool.read()
    assert kinds_of(spool) == ["metrics", "unreadable", "unreadable", "metrics"]
    assert steps_of(spool) == [0, 2]
    for event, following in itertools.pairwise(events):
        assert event.end == following.start


def test_damaged_lines_are_counted(tmp_path):
    spool = Spool(tmp_path)
    append_steps(spool, range(5))
    spool.close()
    lines = spool.path.read_bytes().splitlines(keepends=True)
    half = lines[1][:20] + b"\n"
    spool.path.write_bytes(b"".join([lines[0], half, b"garbage\n", *lines[3:]]))
    assert unreadable_lines(Spool(tmp_path).read()) == 2


def test_a_killed_process_loses_nothing_that_it_logged(tmp_path):
    def log_for_ever():
        spool = Spool(tmp_path)
        for step in range(10**9):
            append_steps(spool, [step])
            os.write(to_parent, b".")

    from_child, to_parent = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=log_for_ever)
    child.start()
    os.close(to_parent)
    # The child writes a byte to the pipe after each step that it logged.
    logged = b""
    while len(logged) < 200:
        logged += os.read(from_child, 1)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    rest = os.read(from_child, 1000)
    while rest:
        logged += rest
        rest = os.read(from_child, 1000)
    os.close(from_child)
    assert steps_of(Spool(tmp_path))[: len(logged)] == list(range(len(logged)))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 8), max_size=12), st.integers(-1, 8) | st.just(-math.inf))
def test_truncation_drops_later_steps_with_their_tables_and_nothing_else(tmp_path_factory, steps, last):
    spool = Spool(tmp_path_factory.mktemp("spool"))
    spool.append("params", {"a": "1"})
    for step in steps:
        append_steps(spool, [step])
        (spool.run_dir / f"{step}.json").write_text("[]")
        spool.append("table", {"name": "t", "path": f"{step}.json", "folder": "tables"}, step=step)
    spool.append("status", {"status": "FAILED", "reason": "x"})
    before = spool.path.read_bytes()
    unchanged_bytes = spool.truncate_after(last)
    remaining = [step for step in steps if step <= last]
    assert steps_of(spool) == remaining
    assert steps_of(spool, "table") == remaining
    assert [event.kind for event in spool.read() if event.step is None] == ["params", "status"]
    assert {int(path.stem) for path in spool.run_dir.glob("*.json")} == set(remaining)
    assert spool.path.read_bytes()[:unchanged_bytes] == before[:unchanged_bytes]
    before_the_first_later_one = list(itertools.takewhile(lambda step: step <= last, steps))
    unchanged_events = [event for event in spool.read() if event.start < unchanged_bytes]
    assert [event.step for event in unchanged_events if event.kind == "metrics"] == before_the_first_later_one
    nothing_dropped = before_the_first_later_one == steps
    assert (unchanged_bytes == len(before)) == nothing_dropped


@pytest.fixture(autouse=True, scope="module")
def frequent_flushes():
    # For the module: Hypothesis refuses fixtures that are made anew for each function.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger_module, "FLUSH_EVERY", 2)
        yield


def files_only(tmp_path, uri="none", **options):
    config = SimpleNamespace(uri=uri, experiment="e", tags={})
    arguments = {"run_dir": tmp_path / "run", "params": {"seed": 0}, "tags": {}, **options}
    return RunLogger(config, **arguments)


def test_logging_to_files_only(tmp_path, caplog):
    logger = files_only(tmp_path)
    logger.log_metrics({"eval/x/pass@4": 1.0}, 1)
    logger.log_table("samples", [{"text": "\ud800 [red]", "value": math.nan}], 1)
    with pytest.raises(ValueError, match="FINISHED"):
        logger.finish("DONE")
    logger.finish("FAILED", "the loss is NaN")
    assert logger.run_id is None
    events = Spool(tmp_path / "run").read()
    assert [event.data for event in events if event.kind == "metrics"] == [{"eval/x/pass_at_4": 1.0}]
    assert json.loads((tmp_path / "run/tables/samples/1.json").read_text())[0]["value"] == "nan"
    assert events[-1].data == {"status": "FAILED", "reason": "the loss is NaN"}
    assert {"failure.reason": "the loss is NaN"} in [event.data for event in events]
    for _ in range(2):
        files_only(tmp_path).finish()
    assert len(list((tmp_path / "run").glob("spool*.jsonl"))) == 3
    assert "contains an earlier run" in caplog.text


@pytest.mark.parametrize("uri", ["file:///x/mlruns", "mlruns", "sqlite://x.db", "sqlit:///x.db", ""])
def test_an_address_mlflow_cannot_use_is_refused_before_training(tmp_path, uri):
    with pytest.raises(UserError, match=r"tracking\.uri"):
        files_only(tmp_path, uri)
    assert not (tmp_path / "run").exists()


def test_a_resume_drops_the_repeated_steps_and_notes_changed_params(tmp_path):
    first = files_only(tmp_path, params={"seed": 0, "train.steps": 7})
    for step in range(1, 8):
        first.log_metrics({"x": float(step)}, step)
    second = files_only(tmp_path, resumed=ResumedFrom(step=4), params={"seed": 0, "train.steps": 9})
    second.log_metrics({"x": -1.0, "eval": 2.0}, 4)  # x of step 4 is logged already, eval is not
    for step in range(5, 10):
        second.log_metrics({"x": float(step)}, step)
    second.finish()
    events = Spool(tmp_path / "run").read()
    metrics = [event for event in events if event.kind == "metrics"]
    points = [(event.step, event.data["x"]) for event in metrics if "x" in event.data]
    assert points == [(step, float(step)) for step in range(1, 10)]
    assert {"eval": 2.0} in [event.data for event in events]
    tags = {}
    for event in events:
        if event.kind == "tags":
            tags.update(event.data)
    assert tags["resume.params_changed"] == "train.steps: 7 -> 9"
    assert tags["resume.count"] == "1"
    assert tags["resume.step"] == "4"


@pytest.mark.parametrize("first_rank", [True, False])
def test_a_lightning_trainer_takes_it_as_its_logger(tmp_path, first_rank):
    import torch
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters({"width": 3})
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            self.log("loss", float(batch_idx))
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logger = files_only(tmp_path) if first_rank else NullLogger()
    trainer = Trainer(
        logger=logger,
        max_steps=3,
        accelerator="cpu",
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(3, 1)))
    logger.commit(3)
    logger.set_tags({"done": "yes"})
    if not first_rank:
        assert logger.run_id is None
        assert not list(tmp_path.iterdir())
        return
    events = Spool(tmp_path / "run").read()
    assert [event.data["loss"] for event in events if event.kind == "metrics"] == [0.0, 1.0, 2.0]
    assert trainer.log_dir == str(tmp_path / "run")
    assert logger.name == "e"
    assert logger.version == "run"
    assert {"width": "3"} in [event.data for event in events if event.kind == "params"]
    assert [event.data["status"] for event in events if event.kind == "status"] == ["RUNNING"], "finish() ends a run"
