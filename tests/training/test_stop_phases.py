"""A signal in every phase of a run: the update at hand is finished and saved, and the run goes on to the same bits.

The signal is a real one, sent by the process to itself while the phase is under way.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import training_runs
from commands import assert_resumed
from kl_comedy.errors import RunFailed, RunStopped
from kl_comedy.training import callbacks, experience, models, module
from kl_comedy.training.run_folder import RunDir
from training_runs import TINY

STEPS = 4
SETTINGS = [f"train.steps={STEPS}", "train.checkpoint_every=0", "train.eval_every=2", "train.threads=1", "resume=auto"]
"""Without a periodic checkpoint: a stopped run resumes from what the signal made it save."""

PHASES = {
    "loading": (models, "load_model", 1, 1),
    "evaluation at the start": (callbacks, "evaluate", 1, 1),
    "generation": (experience, "derive_seed", 2, 2),
    "learning": (module, "micro_loss", 3, None),
    "evaluation": (callbacks, "evaluate", 2, 2),
    "save": (callbacks.CheckpointCallback, "save", 1, 2),
}
"""Where the signal comes: owner and name of what the phase calls, at which call, and the update then saved."""


@pytest.fixture(scope="module")
def go(tmp_path_factory):
    """A run in a folder; all are in one store, because a new one takes seconds."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/store.db"
    return lambda folder, *overrides: training_runs.go(f"{folder}/runs", f"tracking.uri={uri}", *SETTINGS, *overrides)


def signal_at(monkeypatch, owner, name, call, number=signal.SIGUSR1):
    """Send ``number`` to this process in the given call of ``owner.name``, and let the call go on."""
    original, calls = getattr(owner, name), []

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

    client, run_id = connect(done.summary["mlflow_uri"]), done.summary["run_id"]
    names = [name for name in client.get_run(run_id).data.metrics if not name.startswith("time/")]
    return {(name, point.step, point.value) for name in names for point in client.get_metric_history(run_id, name)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, go):
    done = go(tmp_path_factory.mktemp("undisturbed"))
    return bits(done), points(done)


FAST = ("learning", "save")
"""Phases of the default tests; the others differ from them in what is interrupted only."""


@pytest.mark.parametrize(
    "phase", [phase if phase in FAST else pytest.param(phase, marks=pytest.mark.slow) for phase in PHASES]
)
def test_asked_to_make_room(tmp_path, monkeypatch, go, undisturbed, phase):
    owner, name, call, saved = PHASES[phase]
    saving = ["train.checkpoint_every=2"] if phase == "save" else []
    signal_at(monkeypatch, owner, name, call)
    with pytest.raises(RunStopped, match="stopped by SIGUSR1 at update") as stopped:
        go(tmp_path, *saving)
    (folder,) = (tmp_path / "runs").iterdir()
    (checkpoint,) = folder.glob("checkpoints/step-*.ckpt")
    step = int(checkpoint.stem.split("-")[1])
    assert f"at update {step} of {STEPS}" in str(stopped.value) and 0 < step < STEPS
    assert saved in (None, step)
    first = RunDir(path=folder).summary()
    assert first["status"] == "KILLED"
    monkeypatch.undo()
    done = go(tmp_path, *saving)
    assert_resumed(tmp_path / "runs", at=step)
    assert done.summary["status"] == "FINISHED" and done.run.path == folder
    assert done.summary["run_id"] == first["run_id"], "the same MLflow run"
    assert bits(done) == undisturbed[0]
    assert points(done) == undisturbed[1]


def test_an_end_is_not_taken_while_the_finished_policy_is_written(tmp_path, monkeypatch, go, undisturbed):
    """SIGTERM after the last update: the policy is written whole, the run is finished, nothing is trained twice."""
    from transformers import PreTrainedModel

    signal_at(monkeypatch, PreTrainedModel, "save_pretrained", 1, number=signal.SIGTERM)
    done = go(tmp_path)
    assert done.summary["status"] == "FINISHED" and bits(done) == undisturbed[0]


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
    command = [sys.executable, "-m", "kl_comedy.cli", "sweep", "grid.yaml", "--local", "1"]
    manager = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{manager.pid}/task/{manager.pid}/children")
    deadline = time.monotonic() + 120
    worker = None
    while worker is None:
        assert time.monotonic() < deadline and manager.poll() is None
        for pid in children.read_text().split():
            if b"cell" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                worker = int(pid)
    os.kill(worker, signal.SIGUSR1)
    _, said = manager.communicate(timeout=240)
    assert manager.returncode == 0, said
    assert "stopped, resumes later" in said and "done" in said
    (policy,) = tmp_path.glob("sweeps/early/runs/*/policy/model.safetensors")
    assert policy.read_bytes() == undisturbed[0]
