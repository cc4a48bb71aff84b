"""A run is trained to more updates than it was started for: the bits of the longer run, or a reason."""

import json
import os
import shutil

import pytest

from commands import resumed_at
from kl_comedy.config import load_config, to_yaml
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.tracking.logger import copy_record
from kl_comedy.training import extension
from kl_comedy.training.extension import begin_extension, check_extension, extension_of
from kl_comedy.training.run_folder import RunDir, runs_named_alike, saved
from training_runs import TINY, go, metrics_of, weights_of

LENGTH = ["train.steps=2", "train.eval_every=2", "eval.at_start=false"]
LONGER = ["train.steps=4", "train.eval_every=2", "eval.at_start=false"]
SEVERAL_UPDATES = ["algorithm.updates_per_batch=2", "algorithm.epochs_per_batch=2"]
"""Four updates of a batch: the short run ends within its first one."""


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A finished run of two updates; for reading."""
    return go(tmp_path_factory.mktemp("short"), *LENGTH).run


def config_of(run, *overrides):
    return load_config(TINY, [f"output={run.path.parent}", *LENGTH, f"resume={run.path}", *overrides])


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
    assert len(list(tmp_path.glob("tiny-*"))) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=5"], "was trained with another seed; to extend a run, only train.steps may change"),
        (["kl.0.beta=0.3", "optimizer.lr=0.1"], "was trained with another kl.0.beta, optimizer.lr;"),
        (["train.steps=1"], r"train.steps: got 1; allowed: more than the 2 updates of .*, to extend it"),
    ],
    ids=["seed", "two keys", "fewer updates"],
)
def test_a_run_of_another_config_is_not_extended(short, overrides, message):
    with pytest.raises(UserError, match=message):
        check_extension(config_of(short, "train.steps=4", *overrides))


def test_a_run_elsewhere_of_as_many_updates_is_not_extended(short, tmp_path):
    config = config_of(short, f"output={tmp_path}")
    with pytest.raises(UserError, match=r"train.steps: got 2; allowed: more than the 2 updates of "):
        check_extension(config)


def test_a_run_of_other_plugins_is_not_extended(short, tmp_path):
    copy = RunDir(path=tmp_path / short.path.name)
    shutil.copytree(short.path, copy.path)
    record = {"config_hash": "0" * 12, "sources": {"mine": "0" * 64}}
    (copy.path / "plugins.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"was trained with other plugins: mine changed"):
        check_extension(config_of(copy, "train.steps=4"))


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


def test_a_run_does_not_extend_itself(short, tmp_path):
    copy = RunDir(path=tmp_path / short.path.name)
    shutil.copytree(short.path, copy.path)
    shutil.rmtree(copy.checkpoints)
    begin_extension(copy, config_of(copy))
    assert not copy.checkpoints.exists()
    assert (copy.path / "spool.jsonl").read_bytes() == (short.path / "spool.jsonl").read_bytes()
    assert extension_of(copy) is None


def test_a_run_that_is_being_trained_is_not_extended(short, tmp_path):
    new = RunDir(path=tmp_path / "new")
    new.checkpoints.mkdir(parents=True)
    with short.lock(), pytest.raises(UserError):
        begin_extension(new, config_of(short, "train.steps=4"))
    assert list(new.checkpoints.iterdir()) == []


def test_recorded_rollouts_are_those_of_the_earlier_run_too(short, tmp_path):
    copy = RunDir(path=tmp_path / short.path.name)
    shutil.copytree(short.path, copy.path)
    (copy.path / "rollouts").mkdir()
    (copy.path / "rollouts" / "1.jsonl").write_text("{}")
    new = RunDir(path=tmp_path / "new")
    new.checkpoints.mkdir(parents=True)
    begin_extension(new, config_of(copy, "train.steps=4"))
    assert (new.path / "rollouts" / "1.jsonl").read_text() == "{}"


def test_what_the_hash_leaves_out_may_differ(short):
    check_extension(config_of(short, "train.steps=4", "tracking.experiment=other", "audit.every=1", "train.devices=1"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.schedule=cosine"], "optimizer.schedule cosine ends at train.steps"),
        (["lag={mode: replayed, steps: 2}"], "would have to be 2 updates old, and were not drawn"),
    ],
    ids=["schedule", "lag"],
)
def test_updates_that_depended_on_their_number_are_not_extended(tmp_path, overrides, message):
    config = load_config(TINY, [f"output={tmp_path}", *LENGTH, *overrides])
    run = RunDir(path=tmp_path / "run")
    (run.path / "checkpoints" / "step-2.ckpt").mkdir(parents=True)
    (run.path / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(UserError, match=rf"^resume: {run.path} cannot be extended: .*{message}"):
        check_extension(config_of(run, "train.steps=4", *overrides))


def test_a_folder_that_is_no_run_and_a_run_without_checkpoints(short, tmp_path):
    with pytest.raises(UserError, match=rf"^resume: {tmp_path}/nothing is not the folder of a run"):
        check_extension(config_of(RunDir(path=tmp_path / "nothing"), "train.steps=4"))
    near = short.path.with_name(short.path.name[:-1] + "9")
    with pytest.raises(UserError, match=rf"did you mean {short.path}\?"):
        check_extension(config_of(RunDir(path=near), "train.steps=4"))
    copy = RunDir(path=tmp_path / short.path.name)
    shutil.copytree(short.path, copy.path)
    shutil.rmtree(copy.checkpoints)
    with pytest.raises(UserError, match=r"has no checkpoint to continue from"):
        check_extension(config_of(copy, "train.steps=4"))


def test_a_run_that_extends_nothing_has_no_record(short):
    assert extension_of(short) is None


def test_runs_of_the_same_name_are_named_where_none_is_resumed(short):
    longer = load_config(TINY, [f"output={short.path.parent}", *LENGTH, "train.steps=4", "resume=auto"])
    assert runs_named_alike(longer) == (
        f"1 other run is named 'tiny'; it differs in train.steps (resume={short.path} trains that run to 4 updates)"
    )
    other = load_config(TINY, [f"output={short.path.parent}", *LENGTH, "optimizer.lr=0.5", "resume=auto"])
    assert runs_named_alike(other) == "1 other run is named 'tiny'; it differs in optimizer.lr"


def test_seeds_and_other_names_are_not_alike(short, tmp_path):
    folder = f"output={short.path.parent}"
    assert runs_named_alike(load_config(TINY, [folder, *LENGTH, "seed=1", "resume=auto"])) is None
    assert runs_named_alike(load_config(TINY, [folder, "name=tin", "resume=auto"])) is None
    assert runs_named_alike(load_config(TINY, [f"output={tmp_path}", "resume=auto"])) is None
    assert runs_named_alike(load_config(TINY, [folder, "optimizer.lr=0.5"])) is None


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
