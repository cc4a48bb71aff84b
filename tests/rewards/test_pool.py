"""The worker pool: order, clocks, deaths of every kind, threads, forks, scripts."""

from __future__ import annotations

import json
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

from kl_comedy.config.schema import RewardConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.evaluation.records import _completion_record
from kl_comedy.evaluation.scores import score_completions
from kl_comedy.processes import BrokenChannel
from kl_comedy.records import Problem, Prompt, Rollout
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


USAGE = '"cpu_s": 0.1, "rss_bytes": 1, "pid": 2'
VERDICT = f'"value": 1.0, "status": "ok", "parts": {{}}, {USAGE}'
NO_REPLIES = [
    *("{x", "[]", "3", "null", "{}", '{"cpu_s": null}', "[" * 10_000, '{"a":' * 10_000, "\xff"),
    "{" + VERDICT.replace("1.0", '"1.0"') + "}",
    "{" + VERDICT.replace("1.0", "NaN") + "}",
    "{" + VERDICT.replace("1.0", "-Infinity") + "}",
    "{" + VERDICT.replace("1.0", "1" + "0" * 400) + "}",
    "{" + VERDICT.replace("1.0", "1" + "0" * 6_000) + "}",
    "{" + VERDICT.replace("1.0", "true") + "}",
    "{" + VERDICT.replace("1.0", "[1.0]") + "}",
    "{" + VERDICT.replace("{}", "[]") + "}",
    "{" + VERDICT.replace("{}", '{"a": {"b": 1}}') + "}",
    "{" + VERDICT.replace("{}", '{"a": "1"}') + "}",
    "{" + VERDICT.replace("{}", json.dumps({str(n): n for n in range(1000)})) + "}",
    "{" + VERDICT.replace('"ok"', '"fine"') + "}",
    "{" + VERDICT.replace('"ok"', '["ok"]') + "}",
    "{" + VERDICT.replace("0.1", '"0.1"') + "}",
    "{" + VERDICT.replace("0.1", "-1") + "}",
    "{" + VERDICT.replace("0.1", "1e999") + "}",
    "{" + VERDICT.replace('"rss_bytes": 1', '"rss_bytes": "large"') + "}",
    "{" + VERDICT.replace('"rss_bytes": 1', '"rss_bytes": 1.5') + "}",
    "{" + VERDICT.replace('"pid": 2', '"pid": -1') + "}",
    "{" + VERDICT.replace('"pid": 2', '"pid": 1e400') + "}",
    "{" + VERDICT + ', "suspect": "no"}',
    "{" + VERDICT + ', "failed": {}}',
    "{" + VERDICT + ', "error": ["user"]}',
    "{" + VERDICT + ', "more": 1}',
    "{" + USAGE + "}",
    "{" + USAGE + ', "error": "user", "message": ' + '"' + "x" * 200_000 + '"}',
]


@pytest.mark.parametrize("body", NO_REPLIES, ids=lambda body: body[:60] + str(len(body)))
def test_a_reply_that_is_no_reply_is_a_broken_worker(body: str) -> None:
    checked_reply(("{" + VERDICT + "}").encode(), verdict=True)
    with pytest.raises(BrokenChannel):
        checked_reply(body.encode("latin-1"), verdict=True)


def test_only_answers_of_the_worker_are_verdicts(pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(pool, "print", "flood", "a") == [(5.0, "ok"), (5.0, "ok"), (1.0, "ok")]
    worker, nonce = object.__new__(Worker), bytes(pool_module.NONCE_BYTES)
    worker.cpu_s = worker.pid = 0
    worker.process = SimpleNamespace(pid=os.getpid())
    monkeypatch.setattr(pool_module.secrets, "token_bytes", bytes)
    foreign = "{" + VERDICT.replace('"pid": 2', f'"pid": {os.getppid()}') + "}"
    for body in (b"{x", b"[]", foreign.encode()):
        worker.channel = SimpleNamespace(send=lambda frame: None, receive=partial(bytes.__add__, nonce, body))
        with pytest.raises(BrokenChannel):
            worker.ask("judge", "obey", limit_s=1.0)


def test_a_worker_that_sends_no_reply_is_replaced(pool: RewardPool) -> None:
    for body in NO_REPLIES[6:8]:
        assert run(pool, "a", f"reply {body}", "b", "c") == [(1.0, "ok"), (0.0, "refused"), (1.0, "ok"), (1.0, "ok")]


FAILURES = (
    *("key", "escape", "recursion", "memory", "system", "exit", "interrupt", "generator", "unprintable", "module"),
    *("nan", "infinity", "overflow", "huge", "text", "nothing", "mapping", "status", "status of no text"),
    *("value of text", "parts of text", "parts that are no mapping", "many parts", "long part"),
)


def test_whatever_a_verifier_raises_or_returns_is_the_verdict_of_that_item(
    pool: RewardPool, caplog: pytest.LogCaptureFixture
) -> None:
    words = [word for failure in FAILURES for word in ("a", failure)]
    workers = set(pool.workers.values())
    with caplog.at_level("WARNING", logger="kl_comedy.rewards"):
        rewards = pool.run([Job(name="obey", completion=word, answer="gold") for word in words] * 2)
    verdicts = {word: reward for word, reward in zip(words, rewards, strict=False)}
    for word in FAILURES:
        reward = verdicts[word]
        assert (reward.value, reward.status, reward.parts) == (0.0, "refused", {"obey": 0.0, "verifier_failed": 1.0}), (
            word
        )
    assert [(r.value, r.status) for r in rewards[::2]] == [(1.0, "ok")] * len(rewards[::2])
    assert workers <= set(pool.workers.values()), "an error costs no interpreter"
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == len(set(texts)) and len(texts) < len(FAILURES)
    (shown,) = (text for text in texts if "KeyError" in text)
    assert "obedient.py" in shown and "'key'" in shown and "'gold'" in shown and "verifier_failed" in shown
    assert all(text.isprintable() for text in texts)


def test_a_judge_whose_state_is_in_doubt_judges_nothing_more(pool: RewardPool) -> None:
    with RewardPool(workers=1) as single:
        outcomes = {
            word: run(single, "a", word, "touched")[2] for word in ("touch and recurse", "touch and leave", "touch")
        }
    assert outcomes == {"touch and recurse": (0.0, "ok"), "touch and leave": (0.0, "ok"), "touch": (1.0, "ok")}


def test_imports_for_a_second_reward_reach_later_judges(pool: RewardPool) -> None:
    other = Job(name="format", completion="\\boxed{1}", answer="")
    with RewardPool(workers=1) as single:
        run(single, "a")
        (worker,) = single.workers.values()
        assert single.run([other])[0].value == 1.0
        assert run(single, "touch and recurse", "a")[1] == (1.0, "ok")
        assert single.run([other])[0].value == 1.0
        assert list(single.workers.values()) == [worker] and worker.warmed == {"obey", "format"}


@pytest.mark.parametrize("isolated", [True, False])
def test_a_reward_that_fails_on_golds_too_ends_the_run(pool: RewardPool, isolated: bool) -> None:
    name = "broken"
    if not isolated:
        name = "broken_here"
        fn = REWARDS.get("broken").fn
        broken_here = lambda completion, answer, meta: fn(completion, answer, meta)  # noqa: E731
        broken_here.__doc__ = "Fails on every item."
        REWARDS.register(name, source="the tests")(broken_here)
    try:
        with pytest.raises(RunFailed, match=r"and on a gold answer:(.|\n)*ZeroDivisionError: in my function"):
            score(name, completions=["a"], answers=["b"], pool=pool)
        problems = [Problem(id=str(n), text="", answer=str(n)) for n in range(3)]
        with pytest.raises(RunFailed, match="ZeroDivisionError"):
            RewardSum([RewardConfig(name=name)], pool=pool).check(problems)
    finally:
        REWARDS._entries.pop("broken_here", None)


def test_golds_on_which_a_reward_fails_are_named(pool: RewardPool) -> None:
    def picky(completion: str, answer: str, meta: object) -> float:
        """Fails on one gold."""
        return 1 / (answer != "7")

    REWARDS.register("picky", source="the tests")(picky)
    try:
        problems = [Problem(id=f"p/{answer}", text="", answer=answer) for answer in "67"]
        with pytest.raises(UserError, match=r"answers of 1 of 2 problems: p/7 .*failed: ZeroDivisionError"):
            RewardSum([RewardConfig(name="picky")], pool=pool).check(problems)
    finally:
        del REWARDS._entries["picky"]


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

    REWARDS.register("needy", source="the tests")(needy)
    try:
        with pytest.raises(UserError, match=r"needs a package that is not installed.*left_out"):
            score("needy", completions=["a"], answers=["b"], pool=pool)
    finally:
        del REWARDS._entries["needy"]


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


def test_failures_are_counted_in_training_and_in_evaluation(pool: RewardPool) -> None:
    texts = ["a", "key", "recursion", "ab"]
    prompt = Prompt(problem=Problem(id="p", text="", answer="gold"), text="", token_ids=(1,))
    one_token = {"completion_ids": (1,), "logps": (0.0,), "versions": (0,), "stop_reason": "eos"}
    rollouts = [Rollout(prompt=prompt, group_id=0, text=text, **one_token) for text in texts]
    scored = RewardSum([RewardConfig(name="obey", weight=0.5), RewardConfig(name="zero")], pool=pool).score(rollouts)
    metrics = row_metrics(scored)
    assert metrics["train/verifier_failed"] == metrics["train/verifier_refused"] == 0.5
    assert metrics["train/reward"] == 0.5 * metrics["train/reward/obey"] == 0.375
    assert not any(name.endswith("obey/verifier_failed") for name in metrics)
    suite = SimpleNamespace(solved_at=1.0, answer="number")
    records = [_completion_record(suite, 0, sample, each) for sample, each in enumerate(scored)]
    assert [(record["status"], record["failed"]) for record in records[1:3]] == [("refused", True)] * 2
    values = score_completions("s", records, ks=()).values
    assert values["failed_share"] == values["refused_share"] == 0.5
    earlier = [{key: value for key, value in record.items() if key != "failed"} for record in records]
    assert score_completions("s", earlier, ks=()).values["failed_share"] == 0.0
