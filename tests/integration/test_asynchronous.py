"""Asynchronous sampling end to end on the tiny pocket policy: staleness, equality, restarts, signals, resume."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from kl_comedy.config import load_config
from kl_comedy.data import PromptOrder
from kl_comedy.errors import REQUEUE_EXIT_CODE, UserError
from kl_comedy.models import weights_hash
from kl_comedy.training.asynchronous.sampler import Asynchronous, SamplerProcess
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.run import train

TINY = Path(__file__).with_name("tiny.yaml")
ASYNC = ("lag.mode=async",)


def go(tmp_path, *overrides, command="kl-comedy train tiny.yaml"):
    config = load_config(TINY, [f"output={tmp_path}", *overrides])
    return train(config, console=Console(file=io.StringIO(), width=200), command=command)


def metrics_of(path):
    found = {}
    for line in (path / "spool.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event.get("kind") == "metrics":
            for name, value in event["data"].items():
                assert (event["step"], name) not in found, "logged twice"
                found[(event["step"], name)] = value
    return found


def series(path, name):
    return [value for (_, found), value in sorted(metrics_of(path).items()) if found == name]


def weights_of(run):
    from safetensors.torch import load_file

    return weights_hash(load_file(run.policy / "model.safetensors"))


def gone(pid):
    """Whether the process has ended (its parent may not have asked for its status yet)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pid):
    deadline = time.monotonic() + 30
    while not gone(pid):
        assert time.monotonic() < deadline, "the sampler outlived its run"
        time.sleep(0.05)


@pytest.fixture
def watched(monkeypatch):
    """What the source handed out (prompt positions per batch, ages), and the process ids of samplers."""
    seen = {"used": [], "ages": [], "buffers": [], "pids": []}
    take, start = Asynchronous.take, SamplerProcess._start

    def watched_take(self, iteration):
        batch = take(self, iteration)
        version = iteration * self._shape.per_iteration
        seen["used"].append([self._positions[row.rollout.prompt.problem.id] for row in batch.rows][::4])
        seen["ages"].append(version - min(min(row.rollout.versions) for row in batch.rows))
        seen["buffers"].append(self.buffer)
        return batch

    def watched_start(self):
        start(self)
        seen["pids"].append(self.pid)

    monkeypatch.setattr(Asynchronous, "take", watched_take)
    monkeypatch.setattr(SamplerProcess, "_start", watched_start)
    return seen


def accounted(seen, *, prompts=256, batch=4):
    """Every prompt that was asked for is in exactly one place."""
    buffer = seen["buffers"][-1]
    asked = buffer.snapshot(lambda rows: [])["asked_in_order"]
    order = PromptOrder(prompts, batch, 0)
    expected = Counter([n for i in range(-(-asked // batch)) for n in order.indices(i)][:asked])
    places = Counter(n for used in seen["used"] for n in used)
    places += Counter(buffer.returned) + Counter(group.index for group in buffer.ready)
    places += Counter(n for request in buffer.pending.values() for n in request.indices)
    return places == expected


def test_no_lag_is_the_on_policy_run_to_the_bit(tmp_path):
    updates = ["algorithm.updates_per_batch=2", "algorithm.epochs_per_batch=2"]
    on_policy = go(tmp_path / "on_policy", *updates)
    waiting = go(tmp_path / "async", *ASYNC, *updates)
    assert weights_of(waiting.run) == weights_of(on_policy.run)

    def comparable(run):
        return {k: v for k, v in metrics_of(run.path).items() if not k[1].startswith(("time/", "stream/"))}

    assert comparable(waiting.run) == comparable(on_policy.run)
    assert len(comparable(waiting.run)) > 100


@pytest.mark.parametrize("in_flight", [pytest.param("false", marks=pytest.mark.slow), "true"])
def test_waiting_bounds_the_age_and_accounts_for_every_prompt(tmp_path, watched, in_flight):
    done = go(tmp_path, *ASYNC, "lag.max_steps=3", f"lag.in_flight={in_flight}", "train.steps=12")
    assert done.summary["status"] == "FINISHED"
    assert max(watched["ages"]) == 3 and min(watched["ages"]) == 0
    order = PromptOrder(256, 4, 0)
    assert watched["used"] == [order.indices(n) for n in range(12)]
    assert accounted(watched) and not watched["buffers"][-1].pending
    assert max(series(done.run.path, "policy/staleness")) <= 3
    assert all(gone(pid) for pid in watched["pids"])


@pytest.mark.slow
def test_dropping_returns_what_is_too_old(tmp_path, watched, monkeypatch):
    """The learner is slowed, so that the sampler is far ahead."""
    step = PolicyModule.training_step
    monkeypatch.setattr(PolicyModule, "training_step", lambda *args: (time.sleep(0.3), step(*args))[1])
    done = go(
        tmp_path,
        *ASYNC,
        "lag.max_steps=2",
        "lag.policy=drop",
        "algorithm.updates_per_batch=2",
        "train.steps=16",
        "train.eval_every=0",
    )
    buffer = watched["buffers"][-1]
    assert buffer.dropped > 0 and sum(series(done.run.path, "stream/dropped_groups")) <= buffer.dropped
    assert max(watched["ages"]) <= 2
    assert accounted(watched)


@pytest.mark.slow
def test_in_flight_changes_weights_inside_completions(tmp_path, watched, monkeypatch):
    """Long completions of a sampler that is slower than the learner: some hold tokens of several versions."""
    mixed = []
    take = Asynchronous.take

    def look(self, iteration):
        batch = take(self, iteration)
        mixed.extend(len(set(row.rollout.versions)) > 1 for row in batch.rows)
        for row in batch.rows:
            assert list(row.rollout.versions) == sorted(row.rollout.versions)
        return batch

    monkeypatch.setattr(Asynchronous, "take", look)
    for attempt in range(5):  # which process is ahead is up to the machine
        go(
            tmp_path / str(attempt),
            *ASYNC,
            "lag.max_steps=4",
            "lag.in_flight=true",
            "train.steps=20",
            "rollout.max_new_tokens=48",
            "train.eval_every=0",
            "train.microbatch_tokens=100000",
            "rollout.temperature=2.0",
        )
        if any(mixed):
            break
    assert any(mixed)
    assert max(watched["ages"]) <= 4


def test_a_killed_sampler_is_replaced_and_nothing_is_lost(tmp_path, watched, monkeypatch):
    def kill_once(self, iteration, take=Asynchronous.take):
        if iteration == 2:
            os.kill(self._sampler.pid, signal.SIGKILL)
        return take(self, iteration)

    monkeypatch.setattr(Asynchronous, "take", kill_once)
    done = go(tmp_path, *ASYNC, "lag.max_steps=2", "train.eval_every=0", "train.steps=5")
    assert done.summary["status"] == "FINISHED"
    order = PromptOrder(256, 4, 0)
    assert watched["used"] == [order.indices(n) for n in range(5)] and accounted(watched)
    assert series(done.run.path, "stream/sampler_restarts")[-1] == 1.0
    assert len(watched["pids"]) == 2 and all(gone(pid) for pid in watched["pids"])


@pytest.mark.slow
def test_a_stopped_sampler_is_killed_after_its_limit_and_nothing_is_lost(tmp_path, watched, monkeypatch, caplog):
    """SIGSTOP, for real: the process is there, holds its pipe open, and says nothing any more."""

    def stop_it(self, iteration, take=Asynchronous.take):
        if iteration == 2:
            os.kill(self._sampler.pid, signal.SIGSTOP)
        return take(self, iteration)

    monkeypatch.setattr(Asynchronous, "take", stop_it)
    done = go(tmp_path, *ASYNC, "lag.max_steps=2", "lag.silence_limit_s=5", "train.eval_every=0")
    assert done.summary["status"] == "FINISHED"
    assert watched["used"] == [PromptOrder(256, 4, 0).indices(n) for n in range(8)] and accounted(watched)
    assert series(done.run.path, "stream/sampler_restarts")[-1] == 1.0
    assert "gave no sign of life for 5 s (lag.silence_limit_s) and was killed; another takes its place" in caplog.text
    assert len(watched["pids"]) == 2 and all(gone(pid) for pid in watched["pids"])


STOPS_WITH_THE_WEIGHTS = """
import os, signal, sys
from pathlib import Path

worker, once = sys.modules["__main__"], Path({once!r})
if hasattr(worker, "load_from") and not once.exists():
    load_from = worker.load_from

    def load_and_stop(shared, model, *, everything):
        if everything:  # at the start
            return load_from(shared, model, everything=True)
        with shared.reading():
            once.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        raise AssertionError("went on")

    worker.load_from = load_and_stop
"""


@pytest.mark.slow
def test_a_sampler_stopped_while_it_holds_the_weights_does_not_stop_the_learner(tmp_path, watched, caplog):
    """The plugin, which the sampler loads too, has it stop itself within a read of the shared weights."""
    from kl_comedy.registry import load_plugin_file

    (tmp_path / "stops.py").write_text(STOPS_WITH_THE_WEIGHTS.format(once=str(tmp_path / "stopped")))
    load_plugin_file(tmp_path / "stops.py")
    try:
        done = go(tmp_path, *ASYNC, "lag.max_steps=1", "lag.silence_limit_s=3", "train.eval_every=0", "train.steps=5")
    finally:
        for name in [name for name in sys.modules if name.startswith("kl_comedy_plugin_")]:
            del sys.modules[name]
    assert (tmp_path / "stopped").exists() and done.summary["status"] == "FINISHED"
    assert "was killed; another takes its place" in caplog.text
    assert watched["used"] == [PromptOrder(256, 4, 0).indices(n) for n in range(5)] and accounted(watched)
    assert len(watched["pids"]) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.options={loop: libary}"], r"rollout\.options\.loop: got 'libary'"),
        pytest.param(
            ["rollout.options={loop: library}", "lag.in_flight=true", "lag.max_steps=1"],
            r"lag\.in_flight: got True; allowed: false with rollout\.backend hf \(it takes new weights between batches",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_config_that_the_sampler_refuses_is_a_user_error(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        go(tmp_path, *ASYNC, *overrides)
    assert not list(tmp_path.iterdir())


def start_in_a_process(tmp_path, *overrides):
    command = [sys.executable, "-c", "from kl_comedy.cli.main import run; run()", "train", str(TINY)]
    command += [f"output={tmp_path}", "train.eval_every=0", "lag.mode=async", "lag.max_steps=2", *overrides]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def after_checkpoint(process, tmp_path, at):
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob(f"tiny-*/checkpoints/step-{at:08d}.ckpt")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    samplers = [pid for pid in children if b"asynchronous.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(samplers) == 1
    return int(samplers[0])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_the_sampler_ends_with_a_run_that_a_signal_stops(tmp_path, number):
    """A terminal sends SIGINT to the sampler too; only the learner acts on it."""
    process = start_in_a_process(tmp_path, "train.steps=5000")
    sampler = after_checkpoint(process, tmp_path, 3)
    os.kill(sampler, number)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    wait_until_gone(sampler)
    assert process.returncode == (REQUEUE_EXIT_CODE if number == signal.SIGUSR1 else 1)
    assert "resume=auto" in stderr and "Traceback" not in stderr


@pytest.mark.parametrize("policy", ["wait", pytest.param("drop", marks=pytest.mark.slow)])
def test_a_killed_run_resumes_without_losing_or_repeating_a_prompt(tmp_path, watched, policy):
    """The resumed run's batches and those before its checkpoint make up the order. The sampler ends with the run."""
    overrides = [f"lag.policy={policy}", "lag.max_steps=2", "train.steps=24", "resume=auto", "train.eval_every=0"]
    process = start_in_a_process(tmp_path, *overrides)
    sampler = after_checkpoint(process, tmp_path, 4)
    process.kill()
    process.communicate()
    wait_until_gone(sampler)
    (folder,) = tmp_path.glob("tiny-*")
    import torch

    from kl_comedy.training.run_folder import RunDir

    begun = RunDir(path=folder).checkpoint_step
    state = torch.load(RunDir(path=folder).checkpoint / "state.pt", weights_only=True)["ExperienceModule"]["source"]
    order = PromptOrder(256, 4, 0)
    asked = [n for i in range(-(-state["asked_in_order"] // 4)) for n in order.indices(i)][: state["asked_in_order"]]
    left = Counter(state["returned"]) + Counter(group[0] for group in state["ready"])
    left += Counter(n for _, indices in state["pending"] for n in indices)
    watched["used"].append([n for n in (Counter(asked) - left).elements()])
    assert len(watched["used"][0]) == 4 * begun, "what was asked and is not left was used"
    done = go(tmp_path, *ASYNC, *overrides)
    assert done.summary["status"] == "FINISHED" and len(watched["ages"]) == 24 - begun
    assert accounted(watched)
    assert max(watched["ages"]) <= 2
    assert {step for step, _ in metrics_of(done.run.path)} >= set(range(1, 25))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lag.mode=async", "lag.steps=3"], r"lag\.steps: got 3; allowed: 0 with lag\.mode async .*lag\.max_steps"),
        (["lag.max_steps=3"], r"lag\.max_steps: got 3; allowed: 0 with lag\.mode on_policy .*lag\.mode=async"),
        (["lag.mode=replayed", "lag.steps=1", "lag.in_flight=true"], r"lag\.in_flight: got True; .*lag\.mode replayed"),
        (["lag.mode=async", "lag.policy=drop"], r"lag\.max_steps: got 0; allowed: at least 1 with lag\.policy drop"),
        (["lag.mode=async", "lag.policy=drop", "lag.max_steps=1", "algorithm.updates_per_batch=2"], "at least 2 with"),
        (["lag.mode=async", "lag.in_flight=true"], r"lag\.in_flight: got True; allowed: false with lag\.max_steps 0"),
        (["lag.silence_limit_s=5"], r"lag\.silence_limit_s: got 5\.0; allowed: 60\.0 with lag\.mode on_policy"),
        (["lag.mode=async", "lag.silence_limit_s=0"], r"lag\.silence_limit_s: got 0.*above 0"),
        (["lag.mode=async", "lag.policy=wiat"], r"lag\.policy: got 'wiat'; .*did you mean 'wait'"),
        (["lag.mode=asinc"], r"lag\.mode: got 'asinc'; .*did you mean 'async'"),
    ],
)
def test_combinations_that_cannot_work_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        load_config(TINY, overrides)
