"""A run is trained to more updates than it was started for: the bits of the longer run, or a reason."""

import json
import os
import shutil

import pytest

from commands import resumed_at
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.tracking.logger import copy_record
from kl_comedy.training import extension
from kl_comedy.training.extension import begin_extension, extension_of
from kl_comedy.training.run_folder import RunDir, saved
from training_runs import go, metrics_of, weights_of

LENGTH = ["train.steps=2", "train.eval_every=2", "eval.at_start=false"]
LONGER = ["train.steps=4", "train.eval_every=2", "eval.at_start=false"]
SEVERAL_UPDATES = ["algorithm.updates_per_batch=2", "algorithm.epochs_per_batch=2"]
"""Four updates of a batch: the short run ends within its first one."""


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A finished run of two updates; for reading."""
    return go(tmp_path_factory.mktemp("short"), *LENGTH).run


@pytest.mark.parametrize("setup", [[], SEVERAL_UPDATES], ids=["on policy", "within a batch"])
def test_an_extended_run_is_the_longer_run_to_the_bit(tmp_path, setup):
    straight = go(tmp_path / "straight", *LONGER, *setup)
    first = go(tmp_path / "runs", *LENGTH, *setup).run
    weights_before = weights_of(first)
    extended = go(tmp_path / "runs", *LONGER, *setup, f"resume={first.path}")
    assert extended.summary["status"] == "FINISHED"
    assert extended.run.path != first.path
    assert weights_of(extended.run) == weights_of(straight.run)
    assert metrics_of(extended.run) == metrics_of(straight.run)
    assert extended.summary["evaluations"] == straight.summary["evaluations"]
    assert weights_of(first) == weights_before


def test_what_it_extends_is_recorded(tmp_path):
    first = go(tmp_path, *LENGTH).run
    extended = go(tmp_path, *LONGER, f"resume={first.path}")
    assert extended.summary["extends"] == {"run": first.path.name, "update": 2}
    assert extended.summary["steps"] == 4
    assert "extends" not in first.summary()
    events = [json.loads(line) for line in (extended.run.path / "spool.jsonl").read_text().splitlines()]
    tags = {}
    params = {}
    for event in events:
        if event["kind"] == "tags":
            tags |= event["data"]
        if event["kind"] == "params":
            params |= event["data"]
    assert tags["extends.run"] == first.path.name
    assert tags["extends.update"] == "2"
    assert params["train.steps"] == "4"
    spool_ids = [json.loads(line)["data"].get("spool.id") for line in _tag_lines(first)]
    assert tags["spool.id"] not in spool_ids
    # The same command again finds it.
    assert go(tmp_path, *LONGER, f"resume={first.path}").already_finished
    assert go(tmp_path, *LONGER, "resume=auto").run.path == extended.run.path


def _tag_lines(run):
    return [line for line in (run.path / "spool.jsonl").read_text().splitlines() if json.loads(line)["kind"] == "tags"]


def test_an_extension_that_was_interrupted_is_begun_again(tmp_path, monkeypatch):
    first = go(tmp_path, *LENGTH).run

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(extension.shutil, "copytree", killed)
    with pytest.raises(RunFailed, match="interrupted"):
        go(tmp_path, *LONGER, f"resume={first.path}")
    monkeypatch.undo()
    extended = go(tmp_path, *LONGER, f"resume={first.path}")
    assert extended.summary["extends"] == {"run": first.path.name, "update": 2}
    assert min(step for step, _ in metrics_of(extended.run)) == 1
    assert resumed_at(extended.run.path) == [2], "it began at update 0"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny-1", "tiny-2"]


def test_a_damaged_checkpoint_is_passed_over_and_left_as_it_is(tmp_path):
    first = go(tmp_path, *LENGTH, "train.keep_checkpoints=2").run
    damaged = saved(first.checkpoints)[-1]
    for file in damaged.rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            os.truncate(file, 1000)
    names = sorted(path.name for path in first.checkpoints.iterdir())
    extended = go(tmp_path, *LONGER, "train.keep_checkpoints=2", f"resume={first.path}")
    assert extended.summary["extends"] == {"run": first.path.name, "update": 1}
    # What the earlier run logged at update 2 is not of this run, which makes that update itself.
    assert {step for step, _ in metrics_of(extended.run)} == {1, 2, 3, 4}
    assert sorted(path.name for path in first.checkpoints.iterdir()) == names


def test_only_what_was_logged_up_to_the_checkpoint_is_copied(short, tmp_path):
    copy_record(short.path, tmp_path, up_to=1)
    assert {step for step, _ in metrics_of(RunDir(path=tmp_path))} == {1}
    assert {step for step, _ in metrics_of(short)} == {1, 2}


def test_a_run_that_is_being_trained_is_not_extended(short, tmp_path):
    new = RunDir(path=tmp_path / "new")
    new.checkpoints.mkdir(parents=True)
    with short.lock(), pytest.raises(UserError):
        begin_extension(new, short)
    assert list(new.checkpoints.iterdir()) == []


def test_recorded_rollouts_are_those_of_the_earlier_run_too(short, tmp_path):
    copy = RunDir(path=tmp_path / short.path.name)
    shutil.copytree(short.path, copy.path)
    (copy.path / "rollouts").mkdir()
    (copy.path / "rollouts" / "1.jsonl").write_text("{}")
    new = RunDir(path=tmp_path / "new")
    new.checkpoints.mkdir(parents=True)
    begin_extension(new, copy)
    assert (new.path / "rollouts" / "1.jsonl").read_text() == "{}"


def test_a_run_that_extends_nothing_has_no_record(short):
    assert extension_of(short) is None


def test_a_checkpoint_is_shared_where_the_disk_allows_it(tmp_path, monkeypatch):
    source = tmp_path / "a"
    source.write_text("weights")
    extension._link_or_copy(str(source), str(tmp_path / "b"))
    assert os.path.samefile(source, tmp_path / "b")

    def refused(*_):
        raise OSError("another file system")

    monkeypatch.setattr(extension.os, "link", refused)
    extension._link_or_copy(str(source), str(tmp_path / "c"))
    assert (tmp_path / "c").read_text() == "weights"
    assert not os.path.samefile(source, tmp_path / "c")
