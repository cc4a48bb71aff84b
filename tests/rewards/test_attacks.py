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

from kl_comedy.records import Reward
from kl_comedy.registry import REWARDS, load_plugin_file
from kl_comedy.rewards import Job, RewardPool
from kl_comedy.rewards import pool as pool_module
from kl_comedy.rewards.pool import MIN_LIMIT_S, Budget, namespace

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
        other = subprocess.Popen(["sleep", "600"])
        yield pool
        other.kill()
        other.wait()
    del REWARDS._entries["attack"]


def run(pool: RewardPool, *completions: str, folder: Path, timeout_s: float = 1.0) -> list[tuple[float, str]]:
    jobs = [Job(name="attack", completion=text, answer=str(folder), timeout_s=timeout_s) for text in completions]
    return [(reward.value, reward.status) for reward in pool.run(jobs)]


HONEST = "honest"


@pytest.mark.parametrize(
    ("attack", "outcomes"),
    [
        ("forks", {(0.0, "refused")}),
        ("orphan", {(0.0, "refused")}),
        ("orphan-and-die", {(0.0, "refused")}),
        ("child", {(0.0, "timeout")}),
        ("children", {(0.0, "timeout")}),
        ("stderr", {(0.5, "ok")}),
        ("forge", {(0.0, "refused")}),
        ("environment", {(0.0, "ok")}),
        ("environments", {(0.0, "ok")}),
        ("network", {(0.0, "ok")}),
        ("file", {(0.0, "refused")}),
    ],
)
def test_an_attack_gets_nothing_and_leaves_nothing(
    pool: RewardPool, attack: str, outcomes: set[tuple[float, str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if attack in ("network", "environments", "orphan-and-die") and not namespace():
        pytest.skip("this kernel gives its users no namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = f"network {server.getsockname()[1]}" if attack == "network" else attack
        results = run(pool, HONEST, words, HONEST, folder=tmp_path, timeout_s=0.8)
    assert results[1] in outcomes and results[::2] == [(1.0, "ok")] * 2
    deadline = time.monotonic() + 10
    pids = [int(name) for name in os.listdir(tmp_path) if name.isdigit()]
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(psutil.pid_exists, pids)), "a process outlived its worker"
    assert bool(pids) == (attack in ("forks", "orphan", "orphan-and-die"))
    assert "loud" not in "".join(capfd.readouterr())


def test_the_budget_of_a_batch_is_one_and_every_item_has_its_share() -> None:
    for items, seconds, wanted in ((20, 4.0, 3.0), (256, 120.0, 3.0), (3, 120.0, 1.0), (1, 1.0, 3.0)):
        budget = Budget(seconds, items=items)
        limits = []
        for _ in range(items):
            limits.append(budget.take(wanted))
            budget.settle(limits[-1], limits[-1])
        assert sum(limits) <= seconds + 1e-9 and min(limits) >= min(wanted, seconds / 2 / items) - 1e-9
        assert limits[0] >= min(wanted, seconds / 2)
    honest = Budget(4.0, items=20)
    for _ in range(19):  # what costs nothing leaves its share
        honest.settle(honest.take(3.0), 0.0)
    assert honest.take(3.0) == 3.0
    spent = Budget(0.0, items=100)
    assert [spent.take(3.0) for _ in range(100)] == [MIN_LIMIT_S] * 100


def test_a_batch_has_a_budget(tmp_path: Path, pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    limits, ask = [], pool_module.Worker.ask

    def recorded(worker: pool_module.Worker, *words: Any, **limit: Any) -> dict[str, Any]:
        limits.append(limit.get("limit_s"))
        return ask(worker, *words, **limit)

    run(pool, HONEST, HONEST, folder=tmp_path)
    workers = set(pool.workers.values())
    monkeypatch.setattr(pool_module.Worker, "ask", recorded)
    monkeypatch.setattr(pool_module, "BATCH_BUDGET_S", 2.0)
    results = run(pool, *["spin", HONEST] * 20, folder=tmp_path, timeout_s=3.0)
    assert results == [(0.0, "timeout"), (1.0, "ok")] * 20
    judged = [limit for limit in limits if limit is not None]
    assert len(judged) == 40 and max(judged) <= 2.0 and min(judged) >= MIN_LIMIT_S
    assert sum(judged[1:]) <= 40 * MIN_LIMIT_S + 2.0
    assert set(pool.workers.values()) == workers or not namespace(), "replacing a judge starts no interpreter"


def test_an_item_that_others_have_cut_short_has_another_chance(
    pool: RewardPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One item needs half a second. The others are over any limit, or need nothing."""
    needs = {"spin": 1e9, "slow": 0.5, HONEST: 0.0}
    limits: dict[str, list[float]] = {word: [] for word in needs}

    def judged(self: RewardPool, job: Job, slot: int, limit_s: float, budget: Budget) -> tuple[Reward, float]:
        limits[job.completion].append(limit_s)
        if needs[job.completion] > limit_s:
            return Reward(value=0.0, status="timeout"), limit_s
        return Reward(value=1.0), 0.0

    monkeypatch.setattr(RewardPool, "_judge", judged)
    monkeypatch.setattr(pool_module, "BATCH_BUDGET_S", 4.0)
    with RewardPool(workers=1) as single:
        words = ["spin", "slow", *[HONEST] * 10]
        statuses = [status for _, status in run(single, *words, folder=Path(), timeout_s=3.0)]
    assert statuses == ["timeout", *["ok"] * 11]
    assert limits["slow"][0] < 0.5 < limits["slow"][1]
