"""Asynchronous sampling end to end on the tiny pocket policy: staleness, equality, faults, signals, resume.

Most tests draw from ``memory`` engines in this process; the last ones from servers, as ``hf`` with ``lag.mode: async``.
"""

import math
import os
import signal
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from commands import Command, assert_resumed, waits
from forked_servers import ForkedServer
from kl_comedy.config import load_config
from kl_comedy.data import PromptOrder
from kl_comedy.errors import REQUEUE_EXIT_CODE, RunFailed, UserError
from kl_comedy.rollouts.engines import servers as servers_module
from kl_comedy.training.asynchronous import Producer
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.run_folder import RunDir, step_of
from memory_engines import MemoryEngines
from training_runs import TINY, go, metrics_of, weights_of

MEMORY = ("rollout.backend=memory", "lag.mode=async", "train.eval_every=0")
SERVERS = ("lag.mode=async", "train.eval_every=0")
PROMPTS_PER_BATCH = 4
GROUP_SIZE = 4
ORDER = PromptOrder(256, PROMPTS_PER_BATCH, 0)


def series(run, name):
    """The values of one metric, step by step."""
    return [value for (_, key), value in sorted(metrics_of(run).items()) if key == name]


@pytest.fixture
def watched(monkeypatch):
    """What the source handed out: prompt positions of each batch, ages, versions of each row's tokens, the producer."""
    log = {"used": [], "ages": [], "versions": []}
    take = Producer.take

    def watched_take(self, iteration):
        batch = take(self, iteration)
        version = iteration * self._updates
        positions = [self._prompts.positions[row.rollout.prompt.problem.id] for row in batch.rows]
        oldest = min(min(row.rollout.versions) for row in batch.rows)
        log["used"].append(positions[::GROUP_SIZE])  # one of each group
        log["ages"].append(version - oldest)
        log["versions"] += [row.rollout.versions for row in batch.rows]
        log["producer"] = self
        return batch

    monkeypatch.setattr(Producer, "take", watched_take)
    return log


def first_in_order(n_prompts):
    """The first prompts of the order, counted."""
    n_batches = math.ceil(n_prompts / PROMPTS_PER_BATCH)
    indices = []
    for n in range(n_batches):
        indices += ORDER.indices(n)
    return Counter(indices[:n_prompts])


def assert_every_prompt_is_in_one_place(watched):
    """Every prompt that was requested is used, returned, ready or pending, and only one of these."""
    buffer = watched["producer"].buffer
    places = Counter(buffer.returned)
    places.update(group.index for group in buffer.ready)
    for request in buffer.pending.values():
        places.update(request.indices)
    for used in watched["used"]:
        places.update(used)
    assert places == first_in_order(buffer.snapshot(lambda rows: [])["asked_in_order"])


def test_no_lag_is_the_on_policy_run_to_the_bit(tmp_path):
    """Evaluations too, which are drawn between batches."""
    updates = ["algorithm.updates_per_batch=2", "algorithm.epochs_per_batch=2"]
    on_policy = go(tmp_path / "on_policy", *updates).run
    waiting = go(tmp_path / "async", *MEMORY, *updates, "train.eval_every=4").run
    assert weights_of(waiting) == weights_of(on_policy)

    def comparable(run):
        return {key: value for key, value in metrics_of(run).items() if not key[1].startswith("stream/")}

    assert comparable(waiting) == comparable(on_policy)
    assert len(comparable(waiting)) > 100
    assert MemoryEngines.last.closed


def before_the_first_update(monkeypatch, watched, ready):
    """The learner's first update waits until ``ready`` holds for the buffer that the engines fill."""
    step = PolicyModule.training_step

    def step_when_ready(*args):
        producer = watched["producer"]
        with producer._changed:
            assert producer._changed.wait_for(lambda: ready(producer.buffer), timeout=60)
        return step(*args)

    monkeypatch.setattr(PolicyModule, "training_step", step_when_ready)


@pytest.mark.parametrize("in_flight", ["false", "true"])
def test_waiting_bounds_the_age_and_accounts_for_every_prompt(tmp_path, watched, monkeypatch, in_flight):
    """The batch of iteration 3 is drawn before the first update: the bound is reached."""
    before_the_first_update(monkeypatch, watched, lambda buffer: buffer.taken > 1 or len(buffer.ready) == 3 * 4)
    run = go(tmp_path, *MEMORY, "lag.max_steps=3", f"lag.in_flight={in_flight}", "train.steps=12").run
    assert max(watched["ages"]) == 3
    assert min(watched["ages"]) == 0
    assert watched["used"] == [ORDER.indices(n) for n in range(12)]
    assert_every_prompt_is_in_one_place(watched)
    assert not watched["producer"].buffer.pending
    assert max(series(run, "policy/staleness")) <= 3
    events = MemoryEngines.last.events
    loads = [version for event, version in events if event == "load"]
    assert loads == sorted(set(loads)), "no weights are loaded twice"
    if in_flight == "false":
        kinds = [kind for kind, _ in events]
        assert ("load", "load") not in pairwise(kinds), "weights are loaded between draws only"


def test_dropping_returns_what_is_too_old(tmp_path, watched, monkeypatch):
    """The first update waits until the engines are so far ahead that a group was dropped."""
    before_the_first_update(monkeypatch, watched, lambda buffer: buffer.dropped > 0)
    settings = ["lag.max_steps=2", "lag.policy=drop", "algorithm.updates_per_batch=2", "train.steps=12"]
    run = go(tmp_path, *MEMORY, *settings).run
    buffer = watched["producer"].buffer
    assert 0 < sum(series(run, "stream/dropped_groups")) <= buffer.dropped
    assert max(watched["ages"]) <= 2
    assert_every_prompt_is_in_one_place(watched)


def test_in_flight_changes_weights_inside_completions(tmp_path, watched, monkeypatch):
    """Engines slower than the learner: some completions hold tokens of several versions, in order."""
    between = MemoryEngines._between_tokens

    def slowly(self):
        between(self)
        time.sleep(0.02)

    monkeypatch.setattr(MemoryEngines, "_between_tokens", slowly)
    settings = ["lag.max_steps=4", "lag.in_flight=true", "train.steps=10", "rollout.temperature=2.0"]
    go(tmp_path, *MEMORY, *settings)
    assert max(len(set(versions)) for versions in watched["versions"]) > 1
    for versions in watched["versions"]:
        assert list(versions) == sorted(versions)
    assert max(watched["ages"]) <= 4


@pytest.mark.parametrize("method", ["generate", "load", "publish"])
def test_an_engine_that_fails_for_good_ends_the_run(tmp_path, monkeypatch, method):
    calls = []
    real = getattr(MemoryEngines, method)

    def fail(self, *arguments, **settings):
        calls.append(1)
        if len(calls) > 4:
            raise RunFailed("no engine is left")
        return real(self, *arguments, **settings)

    monkeypatch.setattr(MemoryEngines, method, fail)
    with pytest.raises(RunFailed, match="no engine is left"):
        go(tmp_path, *MEMORY, "lag.max_steps=2")
    assert MemoryEngines.last.closed


def stopped_in_the_middle(tmp_path, watched, monkeypatch, *settings, after):
    """A run that ends by an error in batch ``after``, with its newest checkpoint at that update."""
    take = Producer.take

    def take_or_stop(self, iteration):
        if iteration == after:
            raise RunFailed("stopped here")
        return take(self, iteration)

    with monkeypatch.context() as patch, pytest.raises(RunFailed, match="stopped here"):
        patch.setattr(Producer, "take", take_or_stop)
        go(tmp_path, *settings)


@pytest.mark.parametrize("policy", ["wait", "drop"])
def test_a_run_resumes_without_losing_or_repeating_a_prompt(tmp_path, watched, monkeypatch, policy):
    settings = [*MEMORY, f"lag.policy={policy}", "lag.max_steps=2", "train.steps=12", "resume=auto"]
    stopped_in_the_middle(tmp_path, watched, monkeypatch, *settings, after=5)
    assert len(watched["used"]) == 5
    go(tmp_path, *settings)
    assert_resumed(tmp_path, at=5)
    assert len(watched["used"]) == 12
    assert_every_prompt_is_in_one_place(watched)
    assert max(watched["ages"]) <= 2
    if policy == "wait":
        assert watched["used"] == [ORDER.indices(n) for n in range(12)]
    events = MemoryEngines.last.events
    kinds = [kind for kind, _ in events]
    assert events[0] == ("publish", 5)
    assert kinds.index("load") < kinds.index("generate")


# --- servers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def forked(monkeypatch):
    """Servers begin with everything imported."""
    monkeypatch.setattr(servers_module, "ChildProcess", ForkedServer)


def start_in_a_process(folder, *overrides, modules=(), env=None):
    settings = [f"output={folder}", *SERVERS, "lag.max_steps=2", *overrides]
    return Command("train", TINY, *settings, cwd=folder, modules=["waits", *modules], env=env)


def after_checkpoint(process, folder, step):
    """Wait for a checkpoint; the run's servers: children that lead a session of their own, and what they started."""
    import psutil

    process.wait_for(folder, f"tiny-*/checkpoints/step-{step:08d}.ckpt")
    servers = []
    for child in psutil.Process(process.pid).children():
        leads_a_session = os.getsid(child.pid) == child.pid
        if leads_a_session:
            servers.append(child)
            servers += child.children(recursive=True)
    assert servers
    return servers


def is_alive(process):
    return process.is_running() and process.status() != "zombie"


def wait_until_gone(processes):
    deadline = time.monotonic() + 30
    while any(is_alive(process) for process in processes):
        assert time.monotonic() < deadline, "a server outlived its run"
        time.sleep(0.05)


def kill_servers_once(monkeypatch, watched, number):
    """Send ``number`` to every server when the third batch is taken."""
    take = Producer.take

    def take_and_kill(self, iteration):
        if iteration == 2:
            for process in self._sampler.engines.processes():
                os.killpg(process.pid, number)
        return take(self, iteration)

    monkeypatch.setattr(Producer, "take", take_and_kill)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_server_that_dies_or_hangs_is_replaced_and_nothing_is_lost(tmp_path, watched, forked, monkeypatch, number):
    kill_servers_once(monkeypatch, watched, number)
    # Batches 3 to 5 may be there before the signal; the servers must answer again for what comes after them.
    run = go(tmp_path, *SERVERS, "lag.max_steps=2", "train.steps=8", "rollout.options={request_timeout_s: 2}").run
    assert watched["used"] == [ORDER.indices(n) for n in range(8)]
    assert_every_prompt_is_in_one_place(watched)
    assert max(series(run, "stream/sampler_restarts")) >= 1.0
    assert max(watched["ages"]) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_servers_end_with_a_run_that_a_signal_stops(tmp_path, number):
    process = start_in_a_process(tmp_path, "train.steps=5000", modules=["forked_servers"])
    servers = after_checkpoint(process, tmp_path, 3)
    process.send_signal(number)
    # SIGUSR1 asks to be started again; the others end the run.
    expected_code = REQUEUE_EXIT_CODE if number == signal.SIGUSR1 else 1
    assert process.wait(120) == expected_code
    wait_until_gone(servers)
    assert "resume=auto" in process.output
    assert "Traceback" not in process.output


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["wait", "drop"])
def test_a_killed_run_resumes_without_losing_or_repeating_a_prompt(tmp_path, watched, forked, policy):
    """The resumed run's batches and those before its checkpoint make up the order. Servers end with the run."""
    overrides = [f"lag.policy={policy}", "train.steps=24", "resume=auto"]
    process = start_in_a_process(tmp_path, *overrides, env=waits(4))
    servers = after_checkpoint(process, tmp_path, 4)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until_gone(servers)
    (folder,) = tmp_path.glob("tiny-*")
    checkpoint = RunDir(path=folder).checkpoint
    step = step_of(checkpoint)
    state = torch.load(checkpoint / "state.pt", weights_only=True)["ExperienceModule"]["source"]
    left = Counter(state["returned"])
    left.update(index for index, *_ in state["ready"])
    for _, indices in state["pending"]:
        left.update(indices)
    # What was requested and is not left was used before the checkpoint.
    used = list((first_in_order(state["asked_in_order"]) - left).elements())
    assert len(used) == PROMPTS_PER_BATCH * step
    watched["used"].append(used)
    go(tmp_path, *SERVERS, "lag.max_steps=2", *overrides)
    assert_resumed(tmp_path, at=step)
    assert len(watched["ages"]) == 24 - step
    assert_every_prompt_is_in_one_place(watched)
    assert max(watched["ages"]) <= 2


# --- configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lag.mode=async", "lag.steps=3"], r"lag\.steps: got 3; allowed: 0 with lag\.mode async .*lag\.max_steps"),
        (["lag.max_steps=3"], r"lag\.max_steps: got 3; allowed: 0 with lag\.mode on_policy .*lag\.mode=async"),
        (
            ["lag.mode=replayed", "lag.steps=1", "lag.in_flight=true"],
            r"lag\.in_flight: got True; .*lag\.mode replayed",
        ),
        (
            ["lag.mode=async", "lag.policy=drop"],
            r"lag\.max_steps: got 0; allowed: at least 1 with lag\.policy drop",
        ),
        (
            ["lag.mode=async", "lag.policy=drop", "lag.max_steps=1", "algorithm.updates_per_batch=2"],
            "at least 2 with",
        ),
        (
            ["lag.mode=async", "lag.in_flight=true"],
            r"lag\.in_flight: got True; allowed: false with lag\.max_steps 0",
        ),
        (["lag.mode=async", "lag.policy=wiat"], r"lag\.policy: got 'wiat'; .*did you mean 'wait'"),
        (["lag.mode=asinc"], r"lag\.mode: got 'asinc'; .*did you mean 'async'"),
        (
            ["rollout.options={loop: library}", "lag.mode=async", "lag.in_flight=true", "lag.max_steps=1"],
            r"lag\.in_flight: got True; allowed: false with rollout\.backend hf \(.* with loop: library",
        ),
        (["lag.mode=async", "rollout.backend=replay"], r"lag\.mode: got 'async'; .*recorded rollouts"),
        (["train.strategy=ddp", "rollout.backend=vllm"], r"rollout\.backend: got 'vllm'; .*allowed: hf, .*vllm_server"),
    ],
)
def test_combinations_that_cannot_work_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        load_config(TINY, overrides)


def test_a_config_that_an_engine_refuses_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"rollout\.options\.loop: got 'libary'"):
        go(tmp_path, "lag.mode=async", "rollout.options={loop: libary}")
    assert not list(Path(tmp_path).iterdir())
