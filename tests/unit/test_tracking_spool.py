"""The spool and the logger to files: what was logged survives kills, and a resume drops exactly what it repeats."""

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
from kl_comedy.tracking import mlflow_sync
from kl_comedy.tracking.logger import NullLogger, RunLogger
from kl_comedy.tracking.spool import Spool, json_safe


def append_steps(spool, steps):
    for step in steps:
        spool.append("metrics", {"x": float(step)}, step=step)


def steps_of(spool, kind="metrics"):
    return [event.step for event in spool.events() if event.kind == kind]


def test_events_read_back_as_written_in_strict_json(tmp_path):
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
    with pytest.raises(ValueError, match="unknown event kind"):
        spool.append("metric", {}, step=1)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_like)
def test_any_value_becomes_strict_json(value):
    json.loads(json.dumps(json_safe(value), allow_nan=False))


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_an_incomplete_last_line_is_dropped_and_the_next_append_is_whole(tmp_path, cut):
    spool = Spool(tmp_path)
    append_steps(spool, range(3))
    spool.close()
    os.truncate(spool.path, spool.path.stat().st_size - cut)
    again = Spool(tmp_path)
    assert steps_of(again) == [0, 1]
    append_steps(again, [2])
    assert steps_of(Spool(tmp_path)) == [0, 1, 2] and Spool(tmp_path).read().unreadable == 0


def test_an_unreadable_line_in_the_middle_is_counted(tmp_path):
    spool = Spool(tmp_path)
    append_steps(spool, [0])
    with spool.path.open("ab") as file:
        file.write(b"\x00\x00garbage\n" + b'{"kind": "metrics", "time": 1, "step": 1, "data": {"x": "text"}}\n')
    append_steps(spool, [2])
    content = spool.read()
    assert [event.step for event, _ in content.events] == [0, 2] and content.unreadable == 2


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
    logged = sum(len(os.read(from_child, 1)) for _ in range(200))
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    while more := len(os.read(from_child, 1000)):
        logged += more
    os.close(from_child)
    assert steps_of(Spool(tmp_path))[:logged] == list(range(logged))


def test_truncation_drops_later_steps_with_their_tables_and_nothing_else(tmp_path):
    spool = Spool(tmp_path)
    spool.append("params", {"a": "1"})
    (tmp_path / "tables").mkdir()
    for step in (1, 2, 3):
        append_steps(spool, [step])
        (tmp_path / f"tables/{step}.json").write_text("[]")
        spool.append("table", {"name": "t", "path": f"tables/{step}.json", "folder": "tables"}, step=step)
    spool.append("status", {"status": "FAILED", "reason": "x"})
    spool.truncate_after(2)
    assert steps_of(spool) == [1, 2] and steps_of(spool, "table") == [1, 2]
    assert [event.kind for event in spool.events() if event.step is None] == ["params", "status"]
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == ["1.json", "2.json"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 8), max_size=12), st.integers(-1, 8) | st.just(-math.inf))
def test_truncation_returns_the_bytes_that_did_not_change(tmp_path_factory, steps, last):
    spool = Spool(tmp_path_factory.mktemp("spool"))
    append_steps(spool, steps)
    before = spool.path.read_bytes() if steps else b""
    unchanged = spool.truncate_after(last)
    assert steps_of(spool) == [step for step in steps if step <= last]
    assert not steps or spool.path.read_bytes()[:unchanged] == before[:unchanged]
    first_later = next((at for at, step in enumerate(steps) if step > last), len(steps))
    assert [event.step for event, at in spool.read().events if at < unchanged] == steps[:first_later]


def test_points_beyond_the_last_checkpoint_are_not_sent(tmp_path):
    spool = Spool(tmp_path)
    append_steps(spool, range(1, 6))
    spool.append("tags", {"a": "b"})

    def steps_to_send(start, up_to):
        events, offset, _ = mlflow_sync._events_to_send(spool, start, up_to)
        return [event.step for event in events], offset

    steps, offset = steps_to_send(0, 3)
    assert steps == [1, 2, 3, None]
    steps, offset = steps_to_send(offset, 5)
    assert steps == [4, 5, None]
    assert steps_to_send(offset, math.inf)[0] == [] and steps_to_send(0, -math.inf)[0] == [None]


def files_only(tmp_path, uri="none", **options):
    config = SimpleNamespace(uri=uri, experiment="e", flush_every=2, tags={})
    arguments = {"run_dir": tmp_path / "run", "run_name": "r", "params": {"seed": 0}, "tags": {}, **options}
    return RunLogger.start(config, **arguments)


def test_logging_to_files_only(tmp_path):
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
    with pytest.raises(ValueError, match="FINISHED"):
        files_only(tmp_path).finish("DONE")


@pytest.mark.parametrize("uri", ["file:///x/mlruns", "mlruns", "sqlite://x.db", "sqlit:///x.db", ""])
def test_an_address_mlflow_cannot_use_is_refused_before_training(tmp_path, uri):
    with pytest.raises(UserError, match=r"tracking\.uri"):
        files_only(tmp_path, uri)
    assert not (tmp_path / "run").exists()


def test_a_new_run_in_an_old_folder_renames_the_old_spool(tmp_path, caplog):
    for _ in range(3):
        files_only(tmp_path).finish()
    assert len(list((tmp_path / "run").glob("spool*.jsonl"))) == 3
    assert "held an earlier run" in caplog.text


def test_a_resume_drops_the_repeated_steps_and_notes_changed_params(tmp_path):
    first = files_only(tmp_path, params={"seed": 0, "train.steps": 7})
    for step in range(1, 8):
        first.log_metrics({"x": float(step)}, step)
    second = files_only(tmp_path, resume=True, resume_step=4, params={"seed": 0, "train.steps": 9})
    second.log_metrics({"x": -1.0, "eval": 2.0}, 4)  # x of step 4 is logged already, eval is not
    for step in range(5, 10):
        second.log_metrics({"x": float(step)}, step)
    second.finish()
    events = Spool(tmp_path / "run").events()
    points = [(event.step, event.data["x"]) for event in events if event.kind == "metrics" and "x" in event.data]
    assert points == [(step, float(step)) for step in range(1, 10)]
    assert any(event.data == {"eval": 2.0} for event in events)
    tags = {key: text for event in events if event.kind == "tags" for key, text in event.data.items()}
    assert tags["resume.params_changed"] == "train.steps: 7 -> 9"
    assert (tags["resume.count"], tags["resume.step"]) == ("1", "4")


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
        assert logger.run_id is None and not list(tmp_path.iterdir())
        return
    events = Spool(tmp_path / "run").events()
    assert [event.data["loss"] for event in events if event.kind == "metrics"] == [0.0, 1.0, 2.0]
    assert trainer.log_dir == str(tmp_path / "run") and (logger.name, logger.version) == ("e", "r")
    assert {"width": "3"} in [event.data for event in events if event.kind == "params"]
    assert [event.data["status"] for event in events if event.kind == "status"] == ["RUNNING"], "finish() ends a run"
