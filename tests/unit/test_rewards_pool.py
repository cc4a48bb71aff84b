"""The worker pool: order, clocks, deaths of every kind, threads, forks, scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.errors import RunFailed, UserError
from kl_comedy.processes import BrokenChannel
from kl_comedy.registry import REWARDS, load_plugin_file
from kl_comedy.rewards import Job, RewardPool, score
from kl_comedy.rewards import pool as batch
from kl_comedy.rewards.pool import parse_reply

PLUGIN = """
import os, signal, sys, time
from kl_comedy.processes import BrokenChannel
from kl_comedy.registry import REWARDS

def busy(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

@REWARDS.register("obey", source="the tests", isolated=True)
def obey(completion, answer, meta, *, scale: float = 1.0):
    '''Does what the completion says.'''
    if completion == "allocate":
        return float(len(bytearray(3 << 30)) > 0)
    if completion == "abort":
        os.abort()
    if completion == "exit":
        os._exit(3)
    if completion == "sleep":
        time.sleep(1000)
    if completion == "spin":
        while True:
            pass
    if completion == "work":
        busy(0.1)
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
    load_plugin_file(file)
    with RewardPool(workers=2, memory_bytes=2 << 30) as pool:
        yield pool
    del REWARDS._entries["obey"]


def run(pool: RewardPool, *words: str, timeout_s: float = 1.0, answer: str = "") -> list[tuple[float, str]]:
    jobs = [Job(name="obey", completion=word, answer=answer, timeout_s=timeout_s) for word in words]
    return [(reward.value, reward.status) for reward in pool.run(jobs)]


@settings(max_examples=25, deadline=None)
@given(
    words=st.lists(
        st.one_of(st.text(alphabet="xyz", max_size=5), st.sampled_from(["nap0.01", "nap0.002"])), max_size=20
    )
)
def test_results_are_in_the_order_of_the_jobs(pool: RewardPool, words: list[str]) -> None:
    assert run(pool, *words) == [(float(len(word)), "ok") for word in words]


@pytest.mark.parametrize("bad", ["spin", "big", "sleep"])
def test_an_overrun_is_killed_at_its_limit(pool: RewardPool, bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "WALL_SLACK_S", 0.5)
    run(pool, "warm", "warm")
    limit = 0.2
    started = time.monotonic()
    assert run(pool, "ab", bad, "abc", "d", timeout_s=limit) == [
        (2.0, "ok"),
        (0.0, "timeout"),
        (3.0, "ok"),
        (1.0, "ok"),
    ]
    seconds = time.monotonic() - started
    assert limit <= seconds < 10 * limit + 20.0
    if bad == "sleep":
        assert seconds >= 10 * limit + 0.5, "an item that waits has the wall limit"
    assert run(pool, "ab") == [(2.0, "ok")]


def test_a_crowded_machine_does_not_change_verdicts(pool: RewardPool) -> None:
    """Six busy processes beside the workers, and items of less CPU time than their limit, but not of less time."""
    run(pool, "a", "b")
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)]
    try:
        assert run(pool, *["work"] * 4, timeout_s=0.3) == [(4.0, "ok")] * 4
        assert run(pool, "spin", "a", timeout_s=0.2) == [(0.0, "timeout"), (1.0, "ok")]
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_waiting_is_not_charged_as_computing(pool: RewardPool) -> None:
    assert run(pool, "nap0.5", timeout_s=0.1) == [(6.0, "ok")]


@pytest.mark.parametrize("bad", ["abort", "exit", "allocate"])
def test_an_item_that_kills_its_worker_is_refused(pool: RewardPool, bad: str) -> None:
    assert run(pool, "a", bad, "b", bad, "c") == [
        (1.0, "ok"),
        (0.0, "refused"),
        (1.0, "ok"),
        (0.0, "refused"),
        (1.0, "ok"),
    ]


def test_one_death_from_outside_does_not_cost_the_verdict(pool: RewardPool, tmp_path: Path) -> None:
    assert run(pool, "die once", answer=str(tmp_path / "mark")) == [(1.0, "ok")]


def test_a_large_parent_does_not_make_its_workers_look_large() -> None:
    """Linux passes the peak of a process on to its children; a worker judged by it would be renewed at every item."""
    code = textwrap.dedent(
        """
        from kl_comedy.rewards import RewardPool, score

        ballast = b"x" * (700 << 20)
        with RewardPool(workers=1, memory_bytes=1 << 30) as pool:
            seen = set()
            for _ in range(3):
                assert score("format", completions=["\\\\boxed{1}"], answers=["1"], pool=pool)
                seen |= set(pool.pids)
        print(len(seen))
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_workers_killed_while_idle_are_replaced(pool: RewardPool) -> None:
    run(pool, *"abcdef")
    assert pool.pids
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    assert run(pool, *"abcdef") == [(1.0, "ok")] * 6


def test_workers_killed_while_busy_are_replaced(pool: RewardPool) -> None:
    def kill() -> None:
        time.sleep(0.3)
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)

    run(pool, "a", "b")
    killer = threading.Thread(target=kill)
    killer.start()
    assert run(pool, *["nap0.2"] * 6) == [(6.0, "ok")] * 6
    killer.join()


def test_a_stopped_worker_does_not_stop_its_parent(pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "WALL_SLACK_S", 0.5)
    run(pool, "a", "b")
    for pid in pool.pids:
        os.kill(pid, signal.SIGSTOP)
    large = "x" * 3_000_000
    assert run(pool, large, "c", timeout_s=0.1) == [(0.0, "timeout"), (0.0, "timeout")]
    assert run(pool, large, "c") == [(3e6, "ok"), (1.0, "ok")]


def test_what_a_function_prints_is_not_taken_for_a_verdict(pool: RewardPool) -> None:
    assert run(pool, "print", "flood", "a") == [(5.0, "ok"), (5.0, "ok"), (1.0, "ok")]


@pytest.mark.parametrize(("bad", "what"), [("raise", "KeyError: 'a bug'"), ("nan", "must be finite")])
def test_a_bug_in_a_reward_ends_the_run_with_its_traceback(pool: RewardPool, bad: str, what: str) -> None:
    with pytest.raises(RunFailed, match=what):
        run(pool, "a", bad, "b")
    assert run(pool, "a") == [(1.0, "ok")]


def test_options_travel(pool: RewardPool) -> None:
    rewards = score("obey", completions=["abc"], answers=[""], pool=pool, scale=2)
    assert rewards[0].value == 6.0 and rewards[0].parts == {"obey": 6.0}


def test_threads_share_a_pool(pool: RewardPool) -> None:
    results: dict[int, list[tuple[float, str]]] = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: run(pool, *["x" * n] * 10)})) for n in range(1, 6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [(float(n), "ok")] * 10 for n in range(1, 6)}


def test_workers_outlive_the_thread_that_started_them() -> None:
    with RewardPool(workers=1) as pool:
        job = Job(name="format", completion="\\boxed{1}", answer="")
        thread = threading.Thread(target=pool.run, args=([job],))
        thread.start()
        thread.join()
        pids = pool.pids
        time.sleep(0.2)
        assert pool.run([job])[0].value == 1.0
        assert pool.pids == pids


def test_a_forked_child_leaves_the_workers_alone() -> None:
    with RewardPool(workers=1) as pool:
        job = Job(name="format", completion="\\boxed{1}", answer="")
        pool.run([job])
        pids = pool.pids
        child = os.fork()
        if child == 0:
            status = 1
            try:
                own = pool.run([job])[0].value == 1.0 and pool.pids != pids
                pool.close()
                status = 0 if own else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert pool.pids == pids and pool.run([job])[0].value == 1.0


def test_close_ends_the_workers_and_the_pool_can_start_again() -> None:
    pool = RewardPool(workers=2)
    jobs = [Job(name="format", completion="\\boxed{1}", answer="")] * 4
    pool.run(jobs)
    pids = pool.pids
    assert pids and len(pids) <= 2
    pool.close()
    assert pool.pids == [] and not any(psutil.pid_exists(pid) for pid in pids)
    assert pool.run(jobs)[3].value == 1.0
    pool.close()


def test_an_idle_pool_has_no_workers() -> None:
    with RewardPool() as pool:
        assert pool.run([]) == [] and pool.pids == []
    with pytest.raises(UserError, match="workers"):
        RewardPool(workers=0)


def test_workers_that_cannot_start_say_so() -> None:
    with RewardPool(workers=1, memory_bytes=16 << 20) as pool, pytest.raises(RunFailed, match="workers die"):
        pool.run([Job(name="format", completion="a", answer="")])


def test_a_reward_of_the_script_itself_is_refused_with_the_way_out() -> None:
    def local(completion: str, answer: str, meta: object) -> float:
        """Never called."""
        return 1.0

    local.__module__ = "__main__"
    REWARDS.register("of_main", source="the tests", isolated=True)(local)
    try:
        with RewardPool(workers=1) as pool, pytest.raises(UserError, match="plugin file"):
            pool.run([Job(name="of_main", completion="a", answer="")])
    finally:
        del REWARDS._entries["of_main"]


def test_a_reply_that_is_no_frame_or_no_json_object_breaks_the_channel() -> None:
    for body in (b"{x", b"[]", b"\xff"):
        with pytest.raises(BrokenChannel):
            parse_reply(body)


SCRIPT = """
from kl_comedy.rewards import score, shared_pool
print(score("math_verify", completions=["\\\\boxed{1}", "2"], answers=["1", "1"])[0].value)
print(*shared_pool().pids)
"""


def test_a_script_without_a_main_guard_scores_and_leaves_nothing_behind(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    value, pids = done.stdout.split("\n")[:2]
    assert value == "1.0"
    assert pids and not any(psutil.pid_exists(int(pid)) for pid in pids.split())


def test_workers_end_when_the_parent_is_killed(tmp_path: Path, pool: RewardPool) -> None:
    """One worker idle, one in a computation that never gives control back to Python."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import threading, time
            from kl_comedy.rewards import Job, RewardPool
            pool = RewardPool(workers=2)
            easy = Job(name="math_verify", completion="1", answer="1")
            pool.run([easy] * 8)
            hard = Job(name="math_verify", completion="A: 9**9**9**9", answer="1", timeout_s=0.5)
            pids = pool.pids
            threading.Thread(target=lambda: pool.run([hard] * 50), daemon=True).start()
            time.sleep(0.1)
            print(*pids, flush=True)
            time.sleep(60)
            """
        )
    )
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
