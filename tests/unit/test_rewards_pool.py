"""The worker pool: order, clocks, deaths of every kind, threads, forks, scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kl_comedy.errors import RunFailed, UserError
from kl_comedy.processes import BrokenChannel
from kl_comedy.registry import REWARDS, load_plugin_file
from kl_comedy.rewards import Job, RewardPool, score
from kl_comedy.rewards import pool as pool_module
from kl_comedy.rewards.pool import Worker

PLUGIN = """
import os, signal, sys, time
from kl_comedy.processes import BrokenChannel
from kl_comedy.registry import REWARDS

@REWARDS.register("obey", source="the tests", isolated=True)
def obey(completion, answer, meta, *, scale: float = 1.0):
    '''Does what the completion says.'''
    if completion == "allocate":
        return float(len(bytearray(3 << 30)) > 0)
    if completion == "abort":
        os.abort()
    if completion == "sleep":
        time.sleep(1000)
    if completion == "spin":
        while True:
            pass
    if completion == "big":
        return float(9 ** 9 ** 9)
    if completion == "raise":
        raise KeyError("a bug")
    if completion == "nan":
        return float("nan")
    if completion == "print":
        print("x" * 100_000)
        sys.stdout.flush()
    if completion == "flood":
        os.write(1, b"y" * 100_000)
    if completion == "die once":
        try:
            os.mkdir(answer)
        except FileExistsError:
            return 1.0
        os.kill(os.getpid(), signal.SIGKILL)
    if completion.startswith("nap"):
        time.sleep(float(completion[3:]))
    return scale * len(completion)
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    file = tmp_path_factory.mktemp("plugin") / "obedient.py"
    file.write_text(PLUGIN)
    load_plugin_file(file, check_names=False)
    with RewardPool(workers=2, memory_bytes=2 << 30) as pool:
        yield pool
    del REWARDS._entries["obey"]


def run(pool: RewardPool, *words: str, timeout_s: float = 1.0, answer: str = "") -> list[tuple[float, str]]:
    jobs = [Job(name="obey", completion=word, answer=answer, timeout_s=timeout_s) for word in words]
    return [(reward.value, reward.status) for reward in pool.run(jobs)]


def test_results_are_in_the_order_of_the_jobs_from_any_thread(pool: RewardPool) -> None:
    results: dict[int, list[tuple[float, str]]] = {}

    def work(length: int) -> None:
        results[length] = run(pool, *["x" * length, "nap0.01", "y"] * 4)

    threads = [threading.Thread(target=work, args=(length,)) for length in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {length: [(float(length), "ok"), (7.0, "ok"), (1.0, "ok")] * 4 for length in range(1, 5)}
    assert run(pool) == []
    (reward,) = score("obey", completions=["abc"], answers=[""], pool=pool, scale=2)
    assert reward.value == 6.0 and reward.parts == {"obey": 6.0}


def test_an_overrun_is_killed_at_its_limit(pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time is limited, in Python and in C alike; an item that waits has the wall limit."""
    monkeypatch.setattr(pool_module, "WALL_SLACK_S", 0.5)
    run(pool, "warm", "warm")
    limit = 0.2
    for bad in ("spin", "big", "sleep"):
        started = time.monotonic()
        assert run(pool, "ab", bad, "abc", timeout_s=limit) == [(2.0, "ok"), (0.0, "timeout"), (3.0, "ok")]
        seconds = time.monotonic() - started
        assert limit <= seconds < 120.0
        assert bad != "sleep" or seconds >= 10 * limit + 0.5
    assert run(pool, "nap0.5", timeout_s=0.1) == [(6.0, "ok")], "waiting is not charged as computing"


def test_an_item_that_kills_its_workers_is_refused_and_one_death_costs_nothing(
    pool: RewardPool, tmp_path: Path
) -> None:
    words = ["a", "abort", "allocate", "die once"]
    results = run(pool, *words, answer=str(tmp_path / "mark"))
    assert results == [(1.0, "ok"), (0.0, "refused"), (0.0, "refused"), (1.0, "ok")]


def test_workers_killed_from_outside_are_replaced(pool: RewardPool) -> None:
    def kill(after_s: float) -> None:
        time.sleep(after_s)
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)

    run(pool, *"ab")
    kill(0.0)
    assert run(pool, *"ab") == [(1.0, "ok")] * 2, "idle"
    killer = threading.Thread(target=kill, args=(0.3,))
    killer.start()
    assert run(pool, *["nap0.2"] * 6) == [(6.0, "ok")] * 6, "busy"
    killer.join()


def test_a_stopped_worker_does_not_stop_its_parent(pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WALL_SLACK_S", 0.5)
    run(pool, "a", "b")
    for pid in pool.pids:
        os.kill(pid, signal.SIGSTOP)
    large = "x" * 3_000_000
    assert run(pool, large, "c", timeout_s=0.1) == [(0.0, "timeout"), (0.0, "timeout")]
    assert run(pool, large, "c") == [(3e6, "ok"), (1.0, "ok")]


def test_only_json_objects_are_verdicts(pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(pool, "print", "flood", "a") == [(5.0, "ok"), (5.0, "ok"), (1.0, "ok")]
    worker, nonce = object.__new__(Worker), bytes(pool_module.NONCE_BYTES)
    worker.cpu_s = 0.0
    monkeypatch.setattr(pool_module.secrets, "token_bytes", bytes)
    for body in (b"{x", b"[]", b"\xff", b"3", b"{}", b'{"cpu_s": null}'):
        worker.channel = SimpleNamespace(send=lambda frame: None, receive=partial(bytes.__add__, nonce, body))
        with pytest.raises(BrokenChannel):
            worker.ask("judge", "obey", limit_s=1.0)


def test_a_bug_in_a_reward_ends_the_run_with_its_traceback(pool: RewardPool) -> None:
    for bad, message in (("raise", "KeyError: 'a bug'"), ("nan", "must be finite")):
        with pytest.raises(RunFailed, match=message):
            run(pool, "a", bad, "b")
    assert run(pool, "a") == [(1.0, "ok")]


def test_workers_outlive_their_thread_are_left_alone_by_forks_and_end_on_close() -> None:
    job = Job(name="format", completion="\\boxed{1}", answer="")
    with RewardPool(workers=1) as pool:
        assert pool.run([]) == [] and pool.pids == [], "an idle pool has no workers"
        thread = threading.Thread(target=pool.run, args=([job],))
        thread.start()
        thread.join()
        pids = pool.pids
        child = os.fork()
        if child == 0:
            status = 1
            try:
                separate = pool.run([job])[0].value == 1.0 and pool.pids != pids
                pool.close()
                status = 0 if separate else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert pool.run([job])[0].value == 1.0 and pool.pids == pids
    assert pids and pool.pids == [] and not any(psutil.pid_exists(pid) for pid in pids)
    with pool:
        assert pool.run([job])[0].value == 1.0, "a closed pool can start again"


def test_what_cannot_work_is_refused_with_its_reason() -> None:
    def local(completion: str, answer: str, meta: object) -> float:
        """Never called."""
        return 1.0

    with pytest.raises(UserError, match="workers"):
        RewardPool(workers=0)
    with RewardPool(workers=1, memory_bytes=16 << 20) as pool, pytest.raises(RunFailed, match="workers die"):
        pool.run([Job(name="format", completion="a", answer="")])
    local.__module__ = "__main__"
    REWARDS.register("of_main", source="the tests", isolated=True)(local)
    try:
        with RewardPool(workers=1) as pool, pytest.raises(UserError, match="plugin file"):
            pool.run([Job(name="of_main", completion="a", answer="")])
    finally:
        del REWARDS._entries["of_main"]


SCRIPT = """
import threading, time
ballast = b"x" * (700 << 20)
from kl_comedy.rewards import Job, RewardPool, score, shared_pool
pids = set()
with RewardPool(workers=1, memory_bytes=1 << 30) as pool:
    for _ in range(3):
        score("format", completions=["\\\\boxed{1}"], answers=["1"], pool=pool)
        pids |= set(pool.pids)
print(len(pids))
print(score("format", completions=["\\\\boxed{1}"], answers=["1"])[0].value)
print(*shared_pool().pids)
"""


def test_a_script_without_a_main_guard_scores_and_leaves_no_process(tmp_path: Path) -> None:
    """Its size is not charged to its workers, although Linux passes the peak of a process on to its children."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    workers, value, pids = done.stdout.splitlines()
    assert (workers, value) == ("1", "1.0")
    assert pids and not any(psutil.pid_exists(int(pid)) for pid in pids.split())


ORPHANS = """
import threading, time
from kl_comedy.rewards import Job, RewardPool
pool = RewardPool(workers=2)
pool.run([Job("format", "1", "")] * 2)
hard = Job("format", "a" * 40 + "b", "", options={"pattern": "(a+)+$"}, timeout_s=0.5)
pids = pool.pids
threading.Thread(target=lambda: pool.run([hard] * 50), daemon=True).start()
time.sleep(0.1)
print(*pids, flush=True)
time.sleep(60)
"""


def test_workers_end_when_the_parent_is_killed(tmp_path: Path, pool: RewardPool) -> None:
    """One worker idle, one in a computation that never gives control back to Python."""
    script = tmp_path / "script.py"
    script.write_text(ORPHANS)
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert pids
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(_runs(pid) for pid in pids):
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
