"""The watchdog on a clock of the test's own, messages to a stopped reader, shared weights, and a worker that fails."""

import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kl_comedy.config import load_config
from kl_comedy.errors import RunFailed
from kl_comedy.training.asynchronous import sampler as sampler_module
from kl_comedy.training.asynchronous.sampler import MAX_GAP_S, STARTUP_S, MessageSender, SamplerProcess, Watchdog
from kl_comedy.training.asynchronous.shared_weights import SharedWeights, WeightsLocked, load_from, start_heartbeat

TINY = Path(__file__).parents[1] / "integration" / "tiny.yaml"


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def check_for(watchdog, clock, *, seconds, beats, asked=True, step=0.25):
    """Check every ``step`` seconds; the first fault and when it came. ``beats``: the count at each second."""
    for n in range(int(seconds / step)):
        clock.now += step
        if fault := watchdog.check(beats(n * step), asked=asked):
            return fault, (n + 1) * step
    return None, seconds


def test_a_process_without_heartbeats_is_reported_after_its_limit(clock):
    watchdog = Watchdog(silence_s=5, answer_s=1000, now=clock)
    assert check_for(watchdog, clock, seconds=60, beats=int) == (None, 60)
    fault, when = check_for(watchdog, clock, seconds=60, beats=lambda at: 60)
    assert fault == "gave no sign of life for 5 s (lag.silence_limit_s)" and 5 < when <= 6


def test_a_new_process_has_the_startup_limit_until_its_first_heartbeat(clock):
    watchdog = Watchdog(silence_s=5, answer_s=10_000, now=clock)
    fault, when = check_for(watchdog, clock, seconds=2 * STARTUP_S, beats=lambda at: 7)
    assert "no sign of life for 600 s" in fault and STARTUP_S < when <= STARTUP_S + 1
    check_for(watchdog, clock, seconds=2, beats=lambda at: 8 + int(at))
    watchdog.restarted()
    assert check_for(watchdog, clock, seconds=STARTUP_S - 1, beats=lambda at: 9)[0] is None


def test_a_process_with_heartbeats_is_reported_while_an_answer_is_awaited(clock):
    watchdog = Watchdog(silence_s=5, answer_s=30, now=clock)
    assert check_for(watchdog, clock, seconds=100, beats=int, asked=False)[0] is None
    assert check_for(watchdog, clock, seconds=29, beats=int)[0] is None
    watchdog.answered()
    assert check_for(watchdog, clock, seconds=29, beats=int)[0] is None
    fault, _ = check_for(watchdog, clock, seconds=3, beats=int)
    assert fault == "lived and finished nothing for 30 s (lag.answer_limit_s)"


def test_time_without_waiting_and_long_gaps_do_not_count(clock):
    watchdog = Watchdog(silence_s=5, answer_s=50, now=clock)
    check_for(watchdog, clock, seconds=2, beats=int)
    clock.now += 10_000  # the learner learns
    watchdog.start_waiting()
    assert watchdog.check(2, asked=True) is None
    clock.now += 10_000  # both processes were stopped
    assert watchdog.check(2, asked=True) is None
    assert check_for(watchdog, clock, seconds=5 - MAX_GAP_S - 1, beats=lambda at: 2)[0] is None


def test_posting_to_a_stopped_reader_does_not_block():
    ours, theirs = socket.socketpair()
    with theirs:
        reader = subprocess.Popen(["sleep", "1000"], stdin=theirs.fileno())
    os.kill(reader.pid, signal.SIGSTOP)
    pipe = Connection(ours.detach())
    sender = MessageSender(pipe)
    start = time.monotonic()
    for _ in range(20):
        sender.post(bytes(10**6))  # far more than a socket buffers
    assert time.monotonic() - start < 5
    assert sender._thread.is_alive()
    reader.kill()
    reader.wait()
    sender.close()
    assert not sender._thread.is_alive()
    pipe.close()
    with pytest.raises(Exception, match="pickle"):
        sender.post(lambda: None)


def model(seed, width=3):
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(width, 2), torch.nn.Linear(2, 2))
    module[1].requires_grad_(False)
    return module


def equal(a, b, layer):
    return torch.equal(a[layer].weight, b[layer].weight) and torch.equal(a[layer].bias, b[layer].bias)


def test_published_weights_are_read_with_their_version():
    learner, sampler = model(0), model(1)
    ours = SharedWeights(learner)
    theirs = SharedWeights(sampler, ours.fd)
    ours.publish(learner, 4)
    assert load_from(theirs, sampler, everything=True) == 4
    assert equal(learner, sampler, 0) and equal(learner, sampler, 1)
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.add_(1.0)
    ours.publish(learner, 5)
    assert theirs.version() == 5
    assert load_from(theirs, sampler, everything=False) == 5
    assert equal(learner, sampler, 0) and not equal(learner, sampler, 1), "frozen weights are copied once"
    with pytest.raises(RunFailed, match="other weights"):
        load_from(SharedWeights(model(0, width=4), ours.fd), model(0, width=4), everything=True)


def test_a_lock_of_another_process_raises_and_ends_with_the_process():
    learner = model(0)
    shared = SharedWeights(learner)
    shared.publish(learner, 1)
    code = f"import fcntl, time; fcntl.lockf({shared.fd}, fcntl.LOCK_EX); print(flush=True); time.sleep(1000)"
    reader = subprocess.Popen([sys.executable, "-c", code], pass_fds=[shared.fd], stdout=subprocess.PIPE)
    reader.stdout.readline()
    with pytest.raises(WeightsLocked):
        shared.publish(learner, 2, limit_s=0.05)
    assert shared.version() == 1
    reader.kill()
    reader.communicate()
    shared.publish(learner, 2)
    assert shared.version() == 2


def test_heartbeats_are_counted_in_the_shared_memory():
    shared = SharedWeights(model(0))
    start_heartbeat(shared.fd)
    deadline = time.monotonic() + 10
    while shared.beats() == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo 'ImportError: no such module' >&2; exit 3",
            r"ended with status 3, 2 times in a row without finishing anything; it said: ImportError: no such module",
        ),
        ("kill -KILL $$", r"was killed by signal 9 \(out of memory\?\), 2 times in a row"),
        (
            "exec sleep 1000",
            r"gave no sign of life for 0\.3 s \(lag\.silence_limit_s\) and was killed, 2 times in a row",
        ),
    ],
    ids=["ends", "is killed", "hangs"],
)
def test_a_worker_lost_again_and_again_ends_the_run(tmp_path, monkeypatch, script, message):
    """Another program stands for the Python interpreter, so nothing is imported."""
    worker = tmp_path / "worker"
    worker.write_text(f"#!/bin/sh\n{script}\n")
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    monkeypatch.setattr(sampler_module, "MAX_DEATHS", 1)
    monkeypatch.setattr(sampler_module, "STARTUP_S", 0.3)
    monkeypatch.setattr(sampler_module, "STOP_LIMIT_S", 0.1)
    config = load_config(TINY, ["lag.mode=async", "lag.silence_limit_s=0.3"])
    with pytest.raises(RunFailed, match="the sampler process " + message):
        SamplerProcess(config, SimpleNamespace(model=model(0)))
