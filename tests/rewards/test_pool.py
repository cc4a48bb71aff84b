"""The worker pool: order, clocks, deaths of every kind, threads, forks, scripts."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from kl_comedy.config.schema import RewardConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.evaluation.records import _completion_record
from kl_comedy.evaluation.scores import score_completions
from kl_comedy.processes import BrokenChannel
from kl_comedy.records import Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.registry import REWARDS, load_plugin_file
from kl_comedy.rewards import Job, RewardPool, RewardSum, score
from kl_comedy.rewards import pool as pool_module
from kl_comedy.rewards.pool import Worker, checked_reply
from kl_comedy.training.metrics import row_metrics

PLUGIN = """
import os, signal, sys, time
from types import SimpleNamespace
from kl_comedy.processes import BrokenChannel
from kl_comedy.records import Reward
from kl_comedy.registry import REWARDS

touched = False

def raising(error):
    def fail():
        raise error
    return fail

def recurse():
    return recurse()

class Unprintable(Exception):
    def __str__(self):
        raise ValueError

FAILURES = {
    "key": raising(KeyError("a bug")),
    "escape": raising(ValueError("\\x1b[2J \\ud800 odd")),
    "recursion": recurse,
    "memory": raising(MemoryError()),
    "system": raising(SystemError("internal")),
    "exit": raising(SystemExit(0)),
    "interrupt": raising(KeyboardInterrupt()),
    "generator": raising(GeneratorExit()),
    "unprintable": raising(Unprintable()),
    "module": raising(ModuleNotFoundError("No module named 'left_out'", name="left_out")),
    "nan": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "overflow": lambda: float(10 ** 400),
    "huge": lambda: 10 ** 400,
    "text": lambda: "right",
    "nothing": lambda: None,
    "mapping": lambda: {"value": 1.0},
    "status": lambda: Reward(value=1.0, status="fine"),
    "status of no text": lambda: Reward(value=1.0, status=["ok"]),
    "value of text": lambda: Reward(value="1e", status="ok"),
    "parts of text": lambda: Reward(value=1.0, parts={"a": "b"}),
    "parts that are no mapping": lambda: Reward(value=1.0, parts=[1.0]),
    "many parts": lambda: Reward(value=1.0, parts={str(n): 1.0 for n in range(1000)}),
    "long part": lambda: Reward(value=1.0, parts={"n" * 1_000_000: 1.0}),
}

@REWARDS.register("broken", source="the tests", isolated=True)
def broken(completion, answer, meta):
    '''Fails on every item.'''
    raise ZeroDivisionError("in my function")

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
    if completion in FAILURES:
        return FAILURES[completion]()
    if completion in ("touch", "touch and recurse", "touch and leave"):
        global touched
        touched = True
        raise {"touch": ValueError, "touch and recurse": RecursionError, "touch and leave": SystemExit}[completion]()
    if completion == "touched":
        return float(touched)
    if completion.startswith("reply "):  # as code that an answer runs could
        sys.modules["__main__"].json = SimpleNamespace(dumps=lambda reply: completion[6:])
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
    del REWARDS._entries["obey"], REWARDS._entries["broken"]


def run(pool: RewardPool, *completions: str, timeout_s: float = 1.0, answer: str = "") -> list[tuple[float, str]]:
    """The value and the status of each completion; the value is its length, unless it is an order."""
    jobs = [Job(name="obey", completion=text, answer=answer, timeout_s=timeout_s) for text in completions]
    return [(reward.value, reward.status) for reward in pool.run(jobs)]


def wait_until_ended(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_results_are_in_the_order_of_the_jobs_from_any_thread(pool: RewardPool) -> None:
    results: dict[int, list[tuple[float, str]]] = {}

    def work(length: int) -> None:
        results[length] = run(pool, *["x" * length, "nap0.01", "y"] * 4)

    threads = [threading.Thread(target=work, args=(length,)) for length in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for length in range(1, 5):
        assert results[length] == [(float(length), "ok"), (7.0, "ok"), (1.0, "ok")] * 4


def test_no_jobs_have_no_results(pool: RewardPool) -> None:
    assert run(pool) == []


def test_a_rewards_options_reach_its_worker(pool: RewardPool) -> None:
    (reward,) = score("obey", completions=["abc"], answers=[""], pool=pool, scale=2)
    assert reward.value == 6.0
    assert reward.parts == {"obey": 6.0}


# --- limits and deaths --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ["spin", "big", "sleep"], ids=["in Python", "in C", "waiting"])
def test_an_overrun_is_killed_at_its_limit(pool: RewardPool, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """CPU time is limited, in Python and in C alike; an item that waits has the wall limit."""
    monkeypatch.setattr(pool_module, "WALL_SLACK_S", 0.5)
    run(pool, "warm", "warm")  # both workers run, so that their start is not timed
    limit = 0.2
    started = time.monotonic()
    results = run(pool, "ab", order, "abc", timeout_s=limit)
    seconds = time.monotonic() - started
    assert results == [(2.0, "ok"), (0.0, "timeout"), (3.0, "ok")]
    assert limit <= seconds < 120.0
    if order == "sleep":
        assert seconds >= 10 * limit + 0.5, "the wall limit: ten times the CPU limit, and the slack"


def test_waiting_is_not_charged_as_computing(pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WALL_SLACK_S", 0.5)
    assert run(pool, "nap0.5", timeout_s=0.1) == [(6.0, "ok")]


def test_an_item_that_kills_its_workers_is_refused_and_one_death_costs_nothing(
    pool: RewardPool, tmp_path: Path
) -> None:
    results = run(pool, "a", "abort", "allocate", "die once", answer=str(tmp_path / "mark"))
    assert results == [(1.0, "ok"), (0.0, "refused"), (0.0, "refused"), (1.0, "ok")]


def kill_workers(pool: RewardPool, after_s: float = 0.0) -> None:
    time.sleep(after_s)
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)


def test_idle_workers_killed_from_outside_are_replaced(pool: RewardPool) -> None:
    run(pool, "a", "b")
    kill_workers(pool)
    assert run(pool, "a", "b") == [(1.0, "ok")] * 2


def test_busy_workers_killed_from_outside_are_replaced(pool: RewardPool) -> None:
    run(pool, "a", "b")
    killer = threading.Thread(target=kill_workers, args=(pool, 0.3))
    killer.start()
    assert run(pool, *["nap0.2"] * 6) == [(6.0, "ok")] * 6
    killer.join()


def test_a_stopped_worker_does_not_stop_its_parent(pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WALL_SLACK_S", 0.5)
    run(pool, "a", "b")
    for pid in pool.pids:
        os.kill(pid, signal.SIGSTOP)
    # More than a pipe takes: a parent that writes without a limit would wait for the stopped worker to read.
    large = "x" * 3_000_000
    assert run(pool, large, "c", timeout_s=0.1) == [(0.0, "timeout"), (0.0, "timeout")]
    assert run(pool, large, "c") == [(3e6, "ok"), (1.0, "ok")], "the workers were replaced"


# --- what a worker sends ------------------------------------------------------------------------------------------
USAGE = '"cpu_s": 0.1, "rss_bytes": 1, "pid": 2'
VERDICT = f'"value": 1.0, "status": "ok", "parts": {{}}, {USAGE}'


def verdict_with(old: str, new: str) -> str:
    """A whole verdict in which one value is another."""
    assert old in VERDICT
    return "{" + VERDICT.replace(old, new) + "}"


def verdict_and(more: str) -> str:
    """A whole verdict with one more entry."""
    return "{" + VERDICT + ", " + more + "}"


TOO_DEEP = ["[" * 10_000, '{"a":' * 10_000]
NO_REPLIES = [
    "{x",
    "[]",
    "3",
    "null",
    "{}",
    '{"cpu_s": null}',
    *TOO_DEEP,
    "\xff",
    verdict_with("1.0", '"1.0"'),
    verdict_with("1.0", "NaN"),
    verdict_with("1.0", "-Infinity"),
    verdict_with("1.0", "1" + "0" * 400),
    verdict_with("1.0", "1" + "0" * 6_000),
    verdict_with("1.0", "true"),
    verdict_with("1.0", "[1.0]"),
    verdict_with("{}", "[]"),
    verdict_with("{}", '{"a": {"b": 1}}'),
    verdict_with("{}", '{"a": "1"}'),
    verdict_with("{}", json.dumps({str(n): n for n in range(1000)})),
    verdict_with('"ok"', '"fine"'),
    verdict_with('"ok"', '["ok"]'),
    verdict_with("0.1", '"0.1"'),
    verdict_with("0.1", "-1"),
    verdict_with("0.1", "1e999"),
    verdict_with('"rss_bytes": 1', '"rss_bytes": "large"'),
    verdict_with('"rss_bytes": 1', '"rss_bytes": 1.5'),
    verdict_with('"pid": 2', '"pid": -1'),
    verdict_with('"pid": 2', '"pid": 1e400'),
    verdict_and('"suspect": "no"'),
    verdict_and('"failed": {}'),
    verdict_and('"error": ["user"]'),
    verdict_and('"more": 1'),
    "{" + USAGE + "}",
    "{" + USAGE + ', "error": "user", "message": "' + "x" * 200_000 + '"}',
]


def test_a_whole_verdict_is_a_reply() -> None:
    """Or each of the changed ones below would be refused for another reason."""
    checked_reply(("{" + VERDICT + "}").encode(), verdict=True)


@pytest.mark.parametrize("body", NO_REPLIES, ids=lambda body: body[:60] + str(len(body)))
def test_a_reply_that_is_no_reply_is_a_broken_worker(body: str) -> None:
    with pytest.raises(BrokenChannel):
        checked_reply(body.encode("latin-1"), verdict=True)


def test_what_a_reward_prints_is_no_verdict(pool: RewardPool) -> None:
    assert run(pool, "print", "flood", "a") == [(5.0, "ok"), (5.0, "ok"), (1.0, "ok")]


OF_ANOTHER_PROCESS = verdict_with('"pid": 2', f'"pid": {os.getppid()}')


@pytest.mark.parametrize("body", ["{x", "[]", OF_ANOTHER_PROCESS], ids=["no JSON", "no verdict", "another process"])
def test_only_answers_of_the_worker_are_verdicts(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose channel answers with the right nonce, so that only the rest of the frame can be wrong."""
    nonce = bytes(pool_module.NONCE_BYTES)
    monkeypatch.setattr(pool_module.secrets, "token_bytes", bytes)
    worker = object.__new__(Worker)
    worker.cpu_s = 0
    worker.pid = 0
    worker.process = SimpleNamespace(pid=os.getpid())
    worker.channel = SimpleNamespace(send=lambda frame: None, receive=partial(bytes.__add__, nonce, body.encode()))
    with pytest.raises(BrokenChannel):
        worker.ask("judge", "rewards", "obey", limit_s=1.0)


@pytest.mark.parametrize("body", TOO_DEEP, ids=["lists", "mappings"])
def test_a_worker_that_sends_no_reply_is_replaced(pool: RewardPool, body: str) -> None:
    results = run(pool, "a", f"reply {body}", "b", "c")
    assert results == [(1.0, "ok"), (0.0, "refused"), (1.0, "ok"), (1.0, "ok")]


# --- errors of a verifier -----------------------------------------------------------------------------------------
FAILURES = (
    "key",
    "escape",
    "recursion",
    "memory",
    "system",
    "exit",
    "interrupt",
    "generator",
    "unprintable",
    "module",
    "nan",
    "infinity",
    "overflow",
    "huge",
    "text",
    "nothing",
    "mapping",
    "status",
    "status of no text",
    "value of text",
    "parts of text",
    "parts that are no mapping",
    "many parts",
    "long part",
)
"""The keys of FAILURES in the plugin."""


@dataclass(frozen=True)
class FailingBatch:
    """A batch in which every second item makes the verifier fail, judged twice."""

    rewards: list[Reward]
    """In the order of the items: an honest one, a failure, an honest one, ..."""
    warnings: list[str]
    workers_before: set[Worker]
    workers_after: set[Worker]


@pytest.fixture(scope="module")
def failing_batch(pool: RewardPool) -> FailingBatch:
    jobs = []
    for failure in FAILURES:
        jobs.append(Job(name="obey", completion="a", answer="gold"))
        jobs.append(Job(name="obey", completion=failure, answer="gold"))
    run(pool, "a", "b")
    workers_before = set(pool.workers.values())
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("kl_comedy.rewards")
    logger.addHandler(handler)
    try:
        rewards = pool.run(jobs * 2)
    finally:
        logger.removeHandler(handler)
    return FailingBatch(
        rewards=rewards,
        warnings=[record.getMessage() for record in records],
        workers_before=workers_before,
        workers_after=set(pool.workers.values()),
    )


@pytest.mark.parametrize("failure", FAILURES)
def test_whatever_a_verifier_raises_or_returns_is_the_verdict_of_that_item(
    failing_batch: FailingBatch, failure: str
) -> None:
    reward = failing_batch.rewards[2 * FAILURES.index(failure) + 1]
    assert reward.value == 0.0
    assert reward.status == "refused"
    assert reward.parts == {"obey": 0.0, "verifier_failed": 1.0}


def test_a_failure_changes_no_verdict_beside_it(failing_batch: FailingBatch) -> None:
    honest = [(reward.value, reward.status) for reward in failing_batch.rewards[::2]]
    assert honest == [(1.0, "ok")] * (2 * len(FAILURES))


def test_an_error_costs_no_interpreter(failing_batch: FailingBatch) -> None:
    assert failing_batch.workers_before <= failing_batch.workers_after


def test_failures_of_one_kind_are_warned_about_once(failing_batch: FailingBatch) -> None:
    warnings = failing_batch.warnings
    assert len(warnings) == len(set(warnings))
    assert len(warnings) < len(FAILURES)


@pytest.mark.parametrize("part", ["obedient.py", "'key'", "'gold'", "verifier_failed"])
def test_a_warning_shows_the_place_the_item_and_the_metric(failing_batch: FailingBatch, part: str) -> None:
    (warning,) = [text for text in failing_batch.warnings if "KeyError" in text]
    assert part in warning


def test_a_warning_has_no_control_characters(failing_batch: FailingBatch) -> None:
    for warning in failing_batch.warnings:
        assert warning.isprintable(), ascii(warning)


@pytest.mark.parametrize(
    ("order", "touched"),
    [("touch and recurse", 0.0), ("touch and leave", 0.0), ("touch", 1.0)],
    ids=["a RecursionError", "a SystemExit", "a ValueError"],
)
def test_a_judge_whose_state_is_in_doubt_judges_nothing_more(pool: RewardPool, order: str, touched: float) -> None:
    """After an ordinary error the same process goes on, and sees what the failed call left behind."""
    with RewardPool(workers=1) as single:
        results = run(single, "a", order, "touched")
    assert results[2] == (touched, "ok")


def test_imports_for_a_second_reward_reach_later_judges(pool: RewardPool) -> None:
    of_another_reward = Job(name="format", completion="\\boxed{1}", answer="")
    with RewardPool(workers=1) as single:
        run(single, "a")
        (worker,) = single.workers.values()
        assert single.run([of_another_reward])[0].value == 1.0
        assert run(single, "touch and recurse", "a")[1] == (1.0, "ok")
        assert single.run([of_another_reward])[0].value == 1.0
        assert list(single.workers.values()) == [worker], "only its judges were replaced"
        assert worker.warmed == {("rewards", "obey"), ("rewards", "format")}


@contextmanager
def registered(name: str, function: Callable[..., float], **facts: Any) -> Iterator[str]:
    """A reward of this process for the time of the block; its name."""
    REWARDS.register(name, source="the tests", **facts)(function)
    try:
        yield name
    finally:
        del REWARDS._entries[name]


def broken_here(completion: str, answer: str, meta: object) -> float:
    """Fails on every item, in this process."""
    return REWARDS.get("broken").fn(completion, answer, meta)


@pytest.fixture(params=["broken", "broken_here"], ids=["isolated", "in process"])
def broken_reward(request: pytest.FixtureRequest, pool: RewardPool) -> Iterator[str]:
    with registered("broken_here", broken_here):
        yield request.param


def test_a_reward_that_fails_on_golds_too_ends_the_run(pool: RewardPool, broken_reward: str) -> None:
    with pytest.raises(RunFailed, match=r"and on a gold answer:(.|\n)*ZeroDivisionError: in my function"):
        score(broken_reward, completions=["a"], answers=["b"], pool=pool)


def test_a_reward_that_fails_on_golds_does_not_pass_the_check(pool: RewardPool, broken_reward: str) -> None:
    problems = [Problem(id=str(n), text="", answer=str(n)) for n in range(3)]
    with pytest.raises(RunFailed, match="ZeroDivisionError"):
        RewardSum([RewardConfig(name=broken_reward)], pool=pool).check(problems)


def test_golds_on_which_a_reward_fails_are_named(pool: RewardPool) -> None:
    def picky(completion: str, answer: str, meta: object) -> float:
        """Fails on one gold."""
        return 1 / (answer != "7")

    problems = [Problem(id=f"p/{answer}", text="", answer=answer) for answer in "67"]
    with registered("picky", picky) as name:
        rewards = RewardSum([RewardConfig(name=name)], pool=pool)
        with pytest.raises(UserError, match=r"answers of 1 of 2 problems: p/7 .*failed: ZeroDivisionError"):
            rewards.check(problems)


def test_a_batch_of_nothing_but_failures_is_shown_and_judged(
    pool: RewardPool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="kl_comedy.rewards"):
        rewards = score("obey", completions=["key"] * 3, answers=["gold"] * 3, pool=pool)
    assert [(reward.value, reward.status) for reward in rewards] == [(0.0, "refused")] * 3
    assert "failed on all 3 completions of a batch" in caplog.text


def test_a_package_that_is_missing_is_named(pool: RewardPool) -> None:
    def needy(completion: str, answer: str, meta: object) -> float:
        """Imports late."""
        import left_out  # noqa: F401

        return 1.0

    with (
        registered("needy", needy) as name,
        pytest.raises(UserError, match=r"needs a package that is not installed.*left_out"),
    ):
        score(name, completions=["a"], answers=["b"], pool=pool)


# --- the processes of a pool --------------------------------------------------------------------------------------
JOB = Job(name="format", completion="\\boxed{1}", answer="")


def test_an_idle_pool_has_no_workers() -> None:
    with RewardPool(workers=1) as pool:
        assert pool.run([]) == []
        assert pool.pids == []


def run_in_a_thread(pool: RewardPool) -> list[int]:
    """The processes of a pool whose first job came from a thread that has ended."""
    thread = threading.Thread(target=pool.run, args=([JOB],))
    thread.start()
    thread.join()
    return pool.pids


def test_workers_outlive_the_thread_that_started_them() -> None:
    with RewardPool(workers=1) as pool:
        pids = run_in_a_thread(pool)
        assert pids
        assert pool.run([JOB])[0].value == 1.0
        assert pool.pids == pids


def test_a_fork_has_workers_of_its_own_and_leaves_its_parents_alone() -> None:
    with RewardPool(workers=1) as pool:
        pids = run_in_a_thread(pool)
        child = os.fork()
        if child == 0:
            status = 1  # for an exception, which must not reach pytest in the child
            try:
                is_right = pool.run([JOB])[0].value == 1.0
                is_separate = pool.pids != pids
                pool.close()
                status = 0 if is_right and is_separate else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert pool.run([JOB])[0].value == 1.0
        assert pool.pids == pids


def test_workers_end_on_close() -> None:
    with RewardPool(workers=1) as pool:
        pids = run_in_a_thread(pool)
    assert pids
    assert pool.pids == []
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_closed_pool_can_start_again() -> None:
    with RewardPool(workers=1) as pool:
        pool.run([JOB])
    with pool:
        assert pool.run([JOB])[0].value == 1.0


def test_a_pool_without_workers_is_refused() -> None:
    with pytest.raises(UserError, match="workers"):
        RewardPool(workers=0)


def test_workers_without_memory_to_start_are_reported() -> None:
    with RewardPool(workers=1, memory_bytes=16 << 20) as pool, pytest.raises(RunFailed, match="workers die"):
        pool.run([Job(name="format", completion="a", answer="")])


def test_an_isolated_reward_of_a_script_is_refused() -> None:
    """A worker cannot import it: its module is the script."""

    def local(completion: str, answer: str, meta: object) -> float:
        """Never called."""
        return 1.0

    local.__module__ = "__main__"
    with (
        registered("of_main", local, isolated=True) as name,
        RewardPool(workers=1) as pool,
        pytest.raises(UserError, match="plugin file"),
    ):
        pool.run([Job(name=name, completion="a", answer="")])


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
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    worker_count, value, pids_line = result.stdout.splitlines()
    assert worker_count == "1", "a worker was replaced"
    assert value == "1.0"
    pids = [int(pid) for pid in pids_line.split()]
    assert pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


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
    wait_until_ended(pids, seconds=20)
    assert not any(_runs(pid) for pid in pids)


# --- failures in a run's numbers ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def half_failed(pool: RewardPool) -> list[Scored]:
    """Four rollouts on which the verifier fails twice; half its reward counts."""
    prompt = Prompt(problem=Problem(id="p", text="", answer="gold"), text="", token_ids=(1,))
    one_token = {"completion_ids": (1,), "logps": (0.0,), "versions": (0,), "stop_reason": "eos"}
    texts = ["a", "key", "recursion", "ab"]
    rollouts = [Rollout(prompt=prompt, group_id=0, text=text, **one_token) for text in texts]
    return RewardSum([RewardConfig(name="obey", weight=0.5), RewardConfig(name="zero")], pool=pool).score(rollouts)


@pytest.fixture(scope="module")
def records(half_failed: list[Scored]) -> list[dict[str, Any]]:
    """Those rollouts as an evaluation stores them."""
    suite = SimpleNamespace(solved_at=1.0, answer="number")
    return [_completion_record(suite, 0, sample, scored) for sample, scored in enumerate(half_failed)]


def test_failures_are_counted_in_training(half_failed: list[Scored]) -> None:
    metrics = row_metrics(half_failed)
    assert metrics["train/verifier_failed"] == 0.5
    assert metrics["train/verifier_refused"] == 0.5
    # The lengths 1 and 2 among four, of which half counts.
    assert metrics["train/reward/obey"] == 0.75
    assert metrics["train/reward"] == 0.375


def test_a_failure_is_no_part_of_a_reward(half_failed: list[Scored]) -> None:
    for name in row_metrics(half_failed):
        assert not name.endswith("obey/verifier_failed")


def test_failures_are_in_the_records_of_an_evaluation(records: list[dict[str, Any]]) -> None:
    for record in records[1:3]:
        assert record["status"] == "refused"
        assert record["failed"] is True


def test_failures_are_counted_in_an_evaluation(records: list[dict[str, Any]]) -> None:
    values = score_completions("s", records, ks=()).values
    assert values["failed_share"] == 0.5
    assert values["refused_share"] == 0.5


def test_records_of_an_earlier_version_have_no_failures(records: list[dict[str, Any]]) -> None:
    earlier = [{key: value for key, value in record.items() if key != "failed"} for record in records]
    assert score_completions("s", earlier, ks=()).values["failed_share"] == 0.0
