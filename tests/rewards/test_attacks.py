"""Code that has taken a worker over: what it can reach, what it costs, what it leaves behind."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kl_comedy.registry import REWARDS, load_plugin_file
from kl_comedy.rewards import Job, RewardPool
from kl_comedy.rewards import pool as pool_module
from kl_comedy.rewards.pool import MIN_LIMIT_S, TIMED_OUT, Budget, Reply, namespace

PLUGIN = '''
import json, os, socket, struct, subprocess, sys, time
from kl_comedy.registry import REWARDS

def fork(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid

def stay(folder):
    """Run on in a session of its own, under a number that the test can find."""
    os.setsid()
    open(os.path.join(folder, os.readlink("/proc/self")), "w").close()
    time.sleep(600)

def burn(seconds):
    while time.process_time() < seconds:
        pass

@REWARDS.register("attack", source="the tests", isolated=True)
def attack(completion, answer, meta):
    """Does what the completion says; 1 is what an attacker wants."""
    kind, _, rest = completion.partition(" ")
    if kind == "forks":
        for _ in range(30):
            fork(lambda: stay(answer))
        while len(os.listdir(answer)) < 30:
            time.sleep(0.01)
    elif kind == "orphan":
        os.waitpid(fork(lambda: fork(lambda: stay(answer))), 0)
        while not os.listdir(answer):
            time.sleep(0.01)
    elif kind == "orphan-and-die":
        os.waitpid(fork(lambda: fork(lambda: stay(answer))), 0)
        while not os.listdir(answer):
            time.sleep(0.01)
        os.abort()
    elif kind == "child":
        os.waitpid(fork(lambda: burn(30)), 0)
    elif kind == "children":
        for pid in [fork(lambda: burn(0.3)) for _ in range(4)]:
            os.waitpid(pid, 0)
    elif kind == "stderr":
        for fd in (1, 2):
            os.write(fd, b"loud" * 5_000_000)
        subprocess.run([sys.executable, "-c", "print('loud')"])
        return 0.5
    elif kind == "forge":
        body = json.dumps({"value": 1.0, "status": "ok", "parts": {}, "cpu_s": 0, "rss_bytes": 0, "pid": 1}).encode()
        for frame in (body, bytes(16) + body):
            for fd in range(3, 300):
                try:
                    os.write(fd, struct.pack(">Q", len(frame)) + frame)
                except OSError:
                    pass
        time.sleep(0.2)
    elif kind == "environment":
        text = json.dumps(dict(os.environ)) + open("/proc/self/environ").read()
        return float("canary" in text)
    elif kind == "environments":
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if b"canary" in open(f"/proc/{pid}/environ", "rb").read():
                    return 1.0
            except OSError:
                pass
        return 0.0
    elif kind == "network":
        try:
            socket.create_connection(("127.0.0.1", int(rest)), timeout=2).close()
        except OSError:
            return 0.0
    elif kind == "file":
        with open(os.path.join(answer, "large"), "wb") as file:
            file.write(bytes(64 << 20))
    elif kind == "spin":
        burn(1e9)
    return 1.0
'''


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    file = tmp_path_factory.mktemp("plugin") / "attacker.py"
    file.write_text(PLUGIN)
    load_plugin_file(file, check_names=False)
    with pytest.MonkeyPatch.context() as patch, RewardPool(workers=2, memory_bytes=2 << 30) as pool:
        patch.setenv("MY_TOKEN", "canary")
        # A process of the same user with the canary in its environment, for the attack that reads them all.
        bystander = subprocess.Popen(["sleep", "600"])
        yield pool
        bystander.kill()
        bystander.wait()
    del REWARDS._entries["attack"]


def run(pool: RewardPool, *completions: str, folder: Path, timeout_s: float = 1.0) -> list[tuple[float, str]]:
    """The value and the status of each completion; the attacks find ``folder`` in the gold answer."""
    jobs = [Job(name="attack", completion=text, answer=str(folder), timeout_s=timeout_s) for text in completions]
    return [(reward.value, reward.status) for reward in pool.run(jobs)]


def wait_for_the_end_of(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)


HONEST = "honest"
LEAVE_PROCESSES = ("forks", "orphan", "orphan-and-die")
NEED_NAMESPACES = ("network", "environments", "orphan-and-die")


@pytest.mark.parametrize(
    ("attack", "outcome"),
    [
        ("forks", (0.0, "refused")),
        ("orphan", (0.0, "refused")),
        ("orphan-and-die", (0.0, "refused")),
        # A child's time is charged to its worker, of one child and of many one after another.
        ("child", (0.0, "timeout")),
        ("children", (0.0, "timeout")),
        ("stderr", (0.5, "ok")),
        ("forge", (0.0, "refused")),
        ("environment", (0.0, "ok")),
        ("environments", (0.0, "ok")),
        ("network", (0.0, "ok")),
        ("file", (0.0, "refused")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_attack_gets_nothing_and_leaves_nothing(
    pool: RewardPool, attack: str, outcome: tuple[float, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if attack in NEED_NAMESPACES and not namespace():
        pytest.skip("this kernel gives its users no namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server:
        completion = attack
        if attack == "network":
            port = server.getsockname()[1]
            completion = f"network {port}"
        before, attacked, after = run(pool, HONEST, completion, HONEST, folder=tmp_path, timeout_s=0.8)
    assert attacked == outcome
    assert before == (1.0, "ok")
    assert after == (1.0, "ok")

    # Each process that an attack started left a file with its number.
    pids = [int(name) for name in os.listdir(tmp_path) if name.isdigit()]
    assert bool(pids) == (attack in LEAVE_PROCESSES)
    wait_for_the_end_of(pids, seconds=10)
    assert not any(map(psutil.pid_exists, pids)), "a process outlived its worker"
    output, errors = capfd.readouterr()
    assert "loud" not in output
    assert "loud" not in errors


# --- the budget of a batch ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("items", "seconds", "wanted"),
    [(20, 4.0, 3.0), (256, 120.0, 3.0), (3, 120.0, 1.0), (1, 1.0, 3.0)],
    ids=["more wanted than there is", "a whole batch", "less wanted than there is", "one item"],
)
def test_the_budget_of_a_batch_is_one_and_every_item_has_its_share(items: int, seconds: float, wanted: float) -> None:
    budget = Budget(seconds, items=items)
    limits = []
    for _ in range(items):
        limit = budget.take(wanted)
        budget.settle(limit, limit)  # it used all of it
        limits.append(limit)
    assert sum(limits) <= seconds + 1e-9
    # Half of the budget is divided equally, the other half is for those who come first.
    assert min(limits) >= min(wanted, seconds / 2 / items) - 1e-9
    assert limits[0] >= min(wanted, seconds / 2)


def test_what_costs_nothing_leaves_its_share_to_others() -> None:
    budget = Budget(4.0, items=20)
    for _ in range(19):
        budget.settle(budget.take(3.0), 0.0)
    assert budget.take(3.0) == 3.0


def test_where_nothing_is_left_every_item_has_the_least_limit() -> None:
    spent = Budget(0.0, items=100)
    assert [spent.take(3.0) for _ in range(100)] == [MIN_LIMIT_S] * 100


def test_a_batch_has_a_budget(tmp_path: Path, pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    ask = pool_module.Worker.ask

    def recorded(worker: pool_module.Worker, *words: Any, **options: Any) -> dict[str, Any]:
        if options.get("limit_s") is not None:  # an item, and no question to the worker itself
            limits.append(options["limit_s"])
        return ask(worker, *words, **options)

    run(pool, HONEST, HONEST, folder=tmp_path)
    workers_before = set(pool.workers.values())
    monkeypatch.setattr(pool_module.Worker, "ask", recorded)
    monkeypatch.setattr(pool_module, "BATCH_BUDGET_S", 2.0)
    results = run(pool, *["spin", HONEST] * 20, folder=tmp_path, timeout_s=3.0)
    assert results == [(0.0, "timeout"), (1.0, "ok")] * 20
    assert len(limits) == 40
    assert max(limits) <= 2.0
    assert min(limits) >= MIN_LIMIT_S
    # The first may have the free half of the budget; the others have their shares.
    assert sum(limits[1:]) <= 40 * MIN_LIMIT_S + 2.0
    if namespace():
        assert set(pool.workers.values()) == workers_before, "replacing a judge starts no interpreter"


def test_an_item_that_others_have_cut_short_has_another_chance(
    pool: RewardPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One item needs half a second. The others are over any limit, or need nothing."""
    seconds_needed = {"spin": 1e9, "slow": 0.5, HONEST: 0.0}
    limits: dict[str, list[float]] = {completion: [] for completion in seconds_needed}

    def judged(self: RewardPool, job: Job, slot: int, limit_s: float, budget: Budget) -> tuple[Reply, float]:
        limits[job.completion].append(limit_s)
        if seconds_needed[job.completion] > limit_s:
            return TIMED_OUT, limit_s
        return {"value": 1.0, "status": "ok", "parts": {}}, 0.0

    monkeypatch.setattr(RewardPool, "_judge", judged)
    monkeypatch.setattr(pool_module, "BATCH_BUDGET_S", 4.0)
    with RewardPool(workers=1) as single:
        results = run(single, "spin", "slow", *[HONEST] * 10, folder=Path(), timeout_s=3.0)
    statuses = [status for _, status in results]
    assert statuses == ["timeout", *["ok"] * 11]
    first_limit, second_limit, *_ = limits["slow"]
    assert first_limit < 0.5 < second_limit
