"""Optimizer, clipping, moving reference and checkpoints over shards: as one process has them."""

import re
import subprocess
import sys
import threading

import pytest
import torch

from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models import load_model
from kl_comedy.training import distributed
from kl_comedy.training.distributed import SINGLE_PROCESS, Ranks, RankWatch
from ranks import spawn
from sharded_learner import Learner
from sharded_models import config_of


def saved_and_resumed(rank, world, folder, kind):
    from kl_comedy.models.sharding import load_sharded

    run = Learner(load_sharded(config_of(kind), limit_bytes=0), Ranks(rank=rank, size=world, sharded=True))
    run.learn(2)
    torch.manual_seed(rank)
    run.save(folder / "ckpt")
    report = {"saved": run.hashes(), "norm": run.norm, "drawn": torch.rand(3).tolist()}
    run.learn(2)
    report["went on"] = run.hashes()
    run.restore(folder / "ckpt")
    report["restored"] = run.hashes()
    report["drawn again"] = torch.rand(3).tolist()
    run.learn(2)
    report["resumed"] = run.hashes()
    return report


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "lora"])
def test_a_checkpoint_of_shards_is_read_by_many_and_by_one(tmp_path, kind):
    alone = Learner(load_model(config_of(kind)), SINGLE_PROCESS)
    alone.learn(2)
    for report in spawn(saved_and_resumed, tmp_path, kind):
        assert report["drawn again"] == report["drawn"], "each rank goes on with random numbers of its own"
        assert report["norm"] == pytest.approx(alone.norm, rel=1e-5)
        assert report["restored"] == report["saved"]
        assert report["went on"] != report["saved"]
        assert report["resumed"] == report["went on"]
    weights = {name: tensor.clone() for name, tensor in alone.policy.state_dict().items()}
    alone.learn(1)
    alone.restore(tmp_path / "ckpt")
    assert alone.hashes() == report["saved"]
    for name, tensor in alone.policy.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-5, rtol=0)
    alone.learn(1)


GLOO = "[gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:61135: Connection reset by peer"


@pytest.fixture
def watched(monkeypatch):
    """A watch over rank 1, which sleeps, and rank 2, which has ended well; and rank 1."""
    monkeypatch.setattr(distributed, "INTERRUPT_AFTER_S", 2.0)
    watch = RankWatch(lambda: "; resume with: a command")
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    watch.watch_children([sleeping, ended])
    yield watch, sleeping
    watch.end()
    sleeping.kill()
    sleeping.wait()


@pytest.mark.parametrize(
    "error", [RuntimeError(GLOO), RunFailed(f"cannot be written ({GLOO})")], ids=["of the exchange", "of a save"]
)
def test_a_killed_rank_is_named_with_its_signal(watched, error):
    watch, rank = watched
    rank.kill()
    rank.wait()
    assert f"rank 1 (process {rank.pid}) was killed by SIGKILL" in watch.lost(error)


def test_a_rank_that_ended_with_the_users_interrupt_is_not_blamed_for_it(watched):
    """Lightning kills the ranks that it started; of an interrupt by the watch the lost rank is the cause."""
    watch, rank = watched
    rank.kill()
    rank.wait()
    assert watch.lost(KeyboardInterrupt()) is None
    assert watch.lost(SystemExit(1)) is None
    watch._has_interrupted = True
    assert "was killed by SIGKILL" in watch.lost(SystemExit(1))


def test_an_error_of_this_rank_is_not_blamed_on_another(watched):
    watch, rank = watched
    assert watch.lost(ValueError("no such thing")) is None
    rank.kill()
    rank.wait()
    assert watch.lost(RunFailed("no server is left: Connection reset by peer")) is None
    assert watch.lost(UserError("train.steps: got 'x'")) is None


def test_a_rank_that_failed_and_said_so_is_waited_for(watched):
    """Its connection breaks before its process is gone; it ends with 0, since rank 0 reports."""
    watch, rank = watched
    watch._children.pop(2)
    threading.Timer(0.3, rank.terminate).start()
    assert watch.lost(RuntimeError(GLOO)) == f"rank 1 (process {rank.pid}) was killed by SIGTERM"


@pytest.mark.parametrize(
    ("handler", "end_after_s", "printed"),
    [("default_int_handler", 300.0, "interrupted\n"), ("SIG_IGN", 1.0, "")],
    ids=["listens to interrupts", "ignores interrupts"],
)
def test_a_rank_that_computes_while_another_is_lost_is_interrupted_and_then_ended(handler, end_after_s, printed):
    """In a process of its own: the first wait can be interrupted, the second, as in a call to a library, cannot.

    A command in the background of a script ignores interrupts; it is ended all the same.
    """
    code = """
import signal, subprocess, sys, time, threading
from kl_comedy.training import distributed
signal.signal(signal.SIGINT, getattr(signal, sys.argv[1]))
distributed.POLL_S, distributed.INTERRUPT_AFTER_S, distributed.END_AFTER_S = 0.1, 0.3, float(sys.argv[2])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
distributed.RankWatch(lambda: "; resume with: a command").watch_children([child])
try:
    child.kill()
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    distributed.END_AFTER_S = 1.0  # from here on, so that a slow machine has printed before it is ended
threading.Event().wait(60)
print("not reached")
"""
    command = [sys.executable, "-c", code, handler, str(end_after_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert done.stdout == printed, done.stderr
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(r"failed: rank 1 \(process \d+\) was killed by SIGKILL; resume with: a command", line)
