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
from kl_comedy.rewards.pool import namespace

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


def test_a_batch_has_a_budget(tmp_path: Path, pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    limits, ask = [], pool_module.Worker.ask

    def recorded(worker: pool_module.Worker, *words: Any, **limit: Any) -> dict[str, Any]:
        limits.append((limit.get("limit_s"), limit.get("wall_s")))
        return ask(worker, *words, **limit)

    monkeypatch.setattr(pool_module.Worker, "ask", recorded)
    monkeypatch.setattr(pool_module, "BATCH_BUDGET_S", 0.1)
    pool._lost_s = 1e9  # by an earlier batch
    assert run(pool, *["spin", HONEST] * 3, folder=tmp_path, timeout_s=0.8) == [(0.0, "timeout"), (1.0, "ok")] * 3
    judged = [limit for limit in limits if limit[0] is not None]
    assert judged[0] == (0.8, 38.0) and judged[-1] == pytest.approx((0.08, 3.8)) and pool._lost_s < 1e6
