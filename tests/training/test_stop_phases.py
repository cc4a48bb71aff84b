"""A signal in every phase of a run: the update at hand is finished and saved, and the run goes on to the same bits.

The signal is a real one, sent by the process to itself while the phase is under way.
"""

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest

import training_runs
from commands import Command, assert_resumed
from kl_comedy.errors import RunFailed, RunStopped
from kl_comedy.training import callbacks, experience, models, module
from kl_comedy.training.run_folder import RunDir
from training_runs import TINY

STEPS = 4
SETTINGS = [f"train.steps={STEPS}", "train.checkpoint_every=0", "train.eval_every=2", "train.threads=1", "resume=auto"]
"""Without a periodic checkpoint: a stopped run resumes from what the signal made it save."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """A phase of a run, by a function that it calls."""

    owner: object
    name: str
    call: int
    """At which call the signal comes, counted from 1."""
    saved: int | None
    """The update that is saved then; None where it depends on how many micro-batches an update has."""
    settings: tuple[str, ...] = ()


PHASES = {
    "loading": Phase(models, "load_model", call=1, saved=1),
    "evaluation at the start": Phase(module, "evaluate", call=1, saved=1),
    "generation": Phase(experience, "derive_seed", call=2, saved=2),
    "learning": Phase(module, "micro_loss", call=3, saved=None),
    "evaluation": Phase(module, "evaluate", call=2, saved=2),
    "save": Phase(callbacks.CheckpointCallback, "save", call=1, saved=2, settings=("train.checkpoint_every=2",)),
}


@pytest.fixture(scope="module")
def go(tmp_path_factory):
    """A run in a folder; all are in one store, because a new one takes seconds."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/store.db"

    def run(folder, *overrides):
        return training_runs.go(f"{folder}/runs", f"tracking.uri={uri}", *SETTINGS, *overrides)

    return run


def signal_at(monkeypatch, owner, name, call, number=signal.SIGUSR1):
    """Send ``number`` to this process in the given call of ``owner.name``, and let the call go on."""
    original = getattr(owner, name)
    calls = []

    def called(*arguments, **named):
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, called)


def bits(done):
    return (done.run.policy / "model.safetensors").read_bytes()


def points(done):
    """Every metric point in the MLflow store: name, step and value, times left out."""
    from kl_comedy.tracking.store import connect

    client = connect(done.summary["mlflow_uri"])
    run_id = done.summary["run_id"]
    stored = set()
    for name in client.get_run(run_id).data.metrics:
        if name.startswith("time/"):
            continue
        for point in client.get_metric_history(run_id, name):
            stored.add((name, point.step, point.value))
    return stored


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, go):
    done = go(tmp_path_factory.mktemp("undisturbed"))
    return bits(done), points(done)


# "learning" and "save" are tried by default; the slow ones differ from them only in what is interrupted.
@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("loading", marks=pytest.mark.slow),
        pytest.param("evaluation at the start", marks=pytest.mark.slow),
        pytest.param("generation", marks=pytest.mark.slow),
        "learning",
        pytest.param("evaluation", marks=pytest.mark.slow),
        "save",
    ],
)
def test_asked_to_make_room(tmp_path, monkeypatch, go, undisturbed, phase):
    phase = PHASES[phase]
    signal_at(monkeypatch, phase.owner, phase.name, phase.call)
    with pytest.raises(RunStopped, match="stopped by SIGUSR1 at update") as stopped:
        go(tmp_path, *phase.settings)
    (folder,) = (tmp_path / "runs").iterdir()
    (checkpoint,) = folder.glob("checkpoints/step-*.ckpt")
    step = int(checkpoint.stem.split("-")[1])
    assert f"at update {step} of {STEPS}" in str(stopped.value)
    assert 0 < step < STEPS
    if phase.saved is not None:
        assert step == phase.saved
    first = RunDir(path=folder).summary()
    assert first["status"] == "KILLED"
    monkeypatch.undo()
    done = go(tmp_path, *phase.settings)
    assert_resumed(tmp_path / "runs", at=step)
    assert done.summary["status"] == "FINISHED"
    assert done.run.path == folder
    assert done.summary["run_id"] == first["run_id"], "the same MLflow run"
    assert bits(done) == undisturbed[0]
    assert points(done) == undisturbed[1]


def test_an_end_is_not_taken_while_the_finished_policy_is_written(tmp_path, monkeypatch, go, undisturbed):
    """SIGTERM after the last update: the policy is written whole, the run is finished, nothing is trained twice."""
    from transformers import PreTrainedModel

    signal_at(monkeypatch, PreTrainedModel, "save_pretrained", 1, number=signal.SIGTERM)
    done = go(tmp_path)
    assert done.summary["status"] == "FINISHED"
    assert bits(done) == undisturbed[0]


def test_an_interrupt_ends_the_run_with_the_command_that_resumes_it(tmp_path, monkeypatch, go):
    """Ctrl-C in the second update: nothing is finished first."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a command in the background ignores it
    signal_at(monkeypatch, module, "micro_loss", 3, number=signal.SIGINT)
    try:
        with pytest.raises(RunFailed, match=r"interrupted at update \d of 4; resume with: .* resume=auto"):
            go(tmp_path)
    finally:
        signal.signal(signal.SIGINT, handler)
    (folder,) = (tmp_path / "runs").iterdir()
    assert RunDir(path=folder).summary()["status"] == "KILLED"


def test_an_end_before_the_first_update_leaves_nothing_to_go_on_from(tmp_path, monkeypatch, go):
    signal_at(monkeypatch, models, "load_model", 1, number=signal.SIGTERM)
    with pytest.raises(RunFailed, match="stopped by SIGTERM at update 0"):
        go(tmp_path)
    assert not list(tmp_path.rglob("tiny-*"))


@pytest.mark.slow
def test_a_signal_before_the_process_listens_costs_nothing(tmp_path, undisturbed):
    """The worker of a local sweep is signalled as soon as it exists, in its first imports."""
    (tmp_path / "grid.yaml").write_text(
        f"base: {TINY}\nname: early\noverrides: {{train.steps: {STEPS}, train.checkpoint_every: 0, "
        "train.eval_every: 2, train.threads: 1}\n"
    )
    manager = Command("sweep", "grid.yaml", "--local", "1", cwd=tmp_path)
    children = Path(f"/proc/{manager.pid}/task/{manager.pid}/children")
    deadline = time.monotonic() + 120
    worker = None
    while worker is None:
        assert time.monotonic() < deadline, "no worker in time"
        assert manager.poll() is None, "the manager ended before its worker began"
        for pid in children.read_text().split():
            if b"cell" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                worker = int(pid)
    os.kill(worker, signal.SIGUSR1)
    output = manager.finish()
    assert "stopped, resumes later" in output
    assert "done" in output
    (policy,) = tmp_path.glob("sweeps/early/cells/*/run/policy/model.safetensors")
    assert policy.read_bytes() == undisturbed[0]
