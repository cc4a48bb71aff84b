"""The pool of verifier workers: every item on its own clock, every overrun killed, every batch in order.

A worker is an interpreter of its own (``python -m kl_comedy.rewards.worker``), not a fork of the trainer: it inherits
no locks or threads. It forks the process that judges (:mod:`kl_comedy.rewards.worker`), which is replaced in
milliseconds. Frames to a worker are pickles (the parent is trusted); frames from it are JSON that
:func:`checked_reply` checks (a hostile answer may have touched the worker). An item's clock starts when it is sent to a
worker that has already imported what it needs. The limit is on CPU time: on a crowded machine an honest item waits
longer and is judged alike. A much wider limit on wall time ends items that wait without computing.

What happens to an item: over either limit it loses its judge (SIGKILL) and has status ``timeout``. Where the verifier
raises, or its worker dies ``MAX_CRASHES`` times, it has status ``refused`` and the part ``verifier_failed``; where it
leaves a process behind, status ``refused``. What items over their limits cost a batch has one budget,
``BATCH_BUDGET_S`` (:class:`Budget`).

What an answer can reach: a worker has no network, where the kernel allows that (:func:`namespace`), a few harmless
variables of the environment, and limits on memory, file size, processes and CPU time. All that it started dies with it.
A verdict echoes a random word that only its own question held, so a frame that something else wrote into the pipe is no
verdict. What it prints is dropped.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hmac
import json
import logging
import os
import pickle
import re
import secrets
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.processes import BrokenChannel, ChildProcess, FrameChannel
from kl_comedy.records import STATUSES, Reward
from kl_comedy.registry import REWARDS
from kl_comedy.rewards.base import JUDGE_ENDED, MAX_PARTS, MAX_REPLY, failure_verdict

TIMEOUT_S = 3.0
"""CPU seconds an item may cost. Honest answers take milliseconds, the slowest golds of MATH under one second."""
WALL_FACTOR, WALL_SLACK_S = 10.0, 30.0
"""The wall limit is ``WALL_FACTOR * timeout_s + WALL_SLACK_S``. It is for functions that wait without computing,
so it may be generous: seven processes a core once made an item of 0.1 CPU seconds take more than 3."""
START_LIMIT_S = 300.0
"""Wall seconds for a worker to start and import what a reward needs (on a crowded shared file system)."""
MAX_CRASHES = 3
"""Workers an item may lose otherwise than by its clock: a kill from outside must not cost it its verdict."""
BATCH_BUDGET_S = 120.0
"""Seconds of workers that items over their limits may cost a batch together; see :class:`Budget`."""
MIN_LIMIT_S, MIN_WALL_S = 0.1, 5.0
"""CPU and wall seconds that every item has, whatever others of its batch have cost. Honest answers take milliseconds;
the wall limit is wide because a crowded machine once made an item of 0.1 CPU seconds take more than 3."""
REPLACE_S = 5.0
"""Wall seconds for a worker to replace its judge; over it the worker is replaced, which takes longer."""
STOP_CHECK_S = 0.2
"""How often a thread that waits for a worker looks whether the batch was stopped."""
MEMORY_BYTES = 4 << 30
"""Address space of a worker; math-verify needs a few hundred MB of it."""
MAX_WORKERS = 8
NONCE_BYTES = 16
MAX_FRAME = NONCE_BYTES + MAX_REPLY
ENVIRONMENT = (
    *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("PYTHONHASHSEED", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"),
)
"""The variables that a worker inherits: an answer must find no key there."""
NAMESPACE = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
FIRST_PROCESS = ("sh", "-c", 'exec 9>&2 2>&-; "$@" 2>&9 9>&-; exit "$?"', "sh")
"""In a namespace of processes the first one is a shell: the kernel shields the first from limits and signals."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One item for one isolated reward; ``timeout_s`` in CPU seconds."""

    name: str
    completion: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S


@functools.cache
def namespace() -> tuple[str, ...]:
    """The words before a command that is to have no network, and whose processes all end with it.

    Empty where the kernel or the site does not allow it, or there is no ``unshare`` (util-linux).
    """
    words = (*NAMESPACE, *FIRST_PROCESS)
    try:
        done = subprocess.run([*words, "true"], capture_output=True, stdin=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ()
    return words if done.returncode == 0 else ()


_VERDICT: dict[str, Callable[[Any], bool]] = {
    "value": lambda value: _is_number(value),
    "status": lambda value: isinstance(value, str) and value in STATUSES,
    "parts": lambda value: isinstance(value, dict) and len(value) <= MAX_PARTS and all(map(_is_number, value.values())),
}
_OPTIONAL: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("suspect", "forks", "again"), lambda value: isinstance(value, bool)),
    **dict.fromkeys(("failed", "bad_gold", "message"), lambda value: isinstance(value, str)),
    "error": lambda value: value in ("user", "bug"),
}
_USAGE: dict[str, Callable[[Any], bool]] = {
    "cpu_s": lambda value: _is_number(value) and value >= 0,
    "rss_bytes": lambda value: isinstance(value, int) and _is_number(value) and value >= 0,
    "pid": lambda value: isinstance(value, int) and _is_number(value) and 0 < value < 1 << 31,
}
_TEXT_IN_JSON = re.compile(rb'"(?:[^"\\]|\\.)*"')


def _is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number. Whole numbers of any size are compared exactly; NaN compares as false."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def checked_reply(body: bytes, *, verdict: bool) -> dict[str, Any]:
    """The reply in ``body``; with ``verdict`` it must hold one, or an error.

    Raises :class:`BrokenChannel` for everything else: a worker that an answer has touched may send anything.
    """
    # One mapping with one inside, so more brackets are refused before anything recursive reads them.
    brackets = len(re.findall(rb"[\[{]", _TEXT_IN_JSON.sub(b"", body)))
    if len(body) > MAX_REPLY or brackets > 2:
        raise BrokenChannel(f"a reply of {len(body)} bytes and {brackets} brackets")
    try:
        reply = json.loads(body)
    except ValueError as error:
        raise BrokenChannel("what the worker sent is no JSON") from error
    if not isinstance(reply, dict):
        raise BrokenChannel("what the worker sent is no mapping")
    needed = {**_USAGE, **(_VERDICT if verdict and "error" not in reply else {})}
    checks = {**_OPTIONAL, **needed}
    missing = needed.keys() - reply.keys()
    wrong = [key for key, value in reply.items() if key not in checks or not checks[key](value)]
    if missing or wrong:
        raise BrokenChannel(f"a reply without {sorted(missing)} and with odd {wrong!r:.200}")
    return reply


class Worker:
    """A worker process, asked one thing at a time. ``warmed`` names the rewards whose imports it has done."""

    def __init__(self, memory_bytes: int, stop: threading.Event) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self.process = ChildProcess(
            [*namespace(), sys.executable, "-P", "-m", "kl_comedy.rewards.worker", str(memory_bytes)],
            pipes=True,
            env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
            | {"PYTHONPATH": path, **one_thread},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.channel = FrameChannel(self.process.stdout.fileno(), self.process.stdin.fileno(), max_bytes=MAX_FRAME)
        self.stop = stop
        self.warmed: set[str] = set()
        self.pid = self.process.pid
        self.cpu_s = 0.0
        self._forks = False
        self._worker_pid = 0

    def warm(self, name: str) -> None:
        """Let the worker import what the reward ``name`` needs."""
        arguments = (name, *_defining_module(name))
        reply = self.ask("warm", *arguments)
        if reply.get("again"):  # the judge has read it, and has left, so that the worker reads the next one
            reply = self.ask("warm", *arguments)
        self._forks = bool(reply.get("forks"))
        self._worker_pid = int(reply["pid"])
        self.warmed.add(name)

    def ask(
        self, kind: str, name: str, *arguments: Any, limit_s: float | None = None, wall_s: float = START_LIMIT_S
    ) -> dict[str, Any]:
        """The reply to a message about the reward ``name``, which may cost ``limit_s`` CPU and ``wall_s`` wall seconds.

        Without a limit it may take :data:`START_LIMIT_S` of wall time. Raises TimeoutError over the limit,
        :class:`BrokenChannel` where the worker dies or sends no reply, InterruptedError once ``stop`` is set, and the
        errors that the reply names.
        """
        started, nonce = time.monotonic(), secrets.token_bytes(NONCE_BYTES)
        self.channel.send(pickle.dumps((nonce, kind, name, *arguments), protocol=pickle.HIGHEST_PROTOCOL))
        while (body := self.channel.receive()) is None:
            if self.stop.is_set():
                raise InterruptedError("the batch was stopped")
            left_s = self._seconds_left(time.monotonic() - started, limit_s, wall_s)
            if left_s <= 0 and kind == "warm":
                message = f"took more than {START_LIMIT_S:g} s to start and import what {name!r} needs"
                raise RunFailed(f"rewards: a verifier worker {message}")
            if left_s <= 0:
                raise TimeoutError(f"more than {limit_s or wall_s:g} s")
            self._wait(min(left_s, STOP_CHECK_S))
            self.channel.flush()
        if not hmac.compare_digest(body[:NONCE_BYTES], nonce):
            raise BrokenChannel("a frame that is no answer to the question")
        reply = checked_reply(body[NONCE_BYTES:], verdict=kind == "judge")
        used_s, self.cpu_s = float(reply["cpu_s"]) - self.cpu_s, float(reply["cpu_s"])
        self._note_pid(int(reply["pid"]))
        if reply.get("error") == "user":
            raise UserError(str(reply.get("message")))
        if "error" in reply:
            raise RunFailed(f"reward {name!r} cannot be used: it fails on its own examples:\n{reply.get('message')}")
        if limit_s is not None and used_s > limit_s:
            raise TimeoutError(f"more than {limit_s:g} s")
        return reply

    def _wait(self, seconds: float) -> None:
        """Until something can be read or written, at most ``seconds``."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel.read_fd, selectors.EVENT_READ)
            if self.channel.unsent:
                selector.register(self.channel.write_fd, selectors.EVENT_WRITE)
            selector.select(seconds)

    def _note_pid(self, pid: int) -> None:
        """Note the number of the process that answered, if it is one of ours: others may be sent signals by it."""
        if pid == self.pid:
            return
        with contextlib.suppress(psutil.Error):
            ancestors = [parent.pid for parent in psutil.Process(pid).parents()]
            if pid == self.process.pid or self.process.pid in ancestors:
                self.pid = pid
                return
        raise BrokenChannel(f"process {pid} is none of this worker's")

    def _seconds_left(self, waited_s: float, limit_s: float | None, wall_s: float) -> float:
        """Seconds until a message can at the earliest be over its limit.

        One process uses no more CPU time than wall time; an item with several is over its limit when it answers.
        """
        if limit_s is None or waited_s < limit_s:
            return (wall_s if limit_s is None else limit_s) - waited_s
        left_s = min(limit_s - (self.process.cpu_seconds() - self.cpu_s), wall_s - waited_s)
        return max(left_s, 0.01) if left_s > 0 else 0.0

    def replace_judge(self) -> bool:
        """Kill the judge and all that it started, so that the next item has a new one. False where that fails.

        The caller then ends this worker.
        """
        if not self._forks or self.channel.unsent:
            return False
        deadline = time.monotonic() + REPLACE_S
        try:
            self._kill_descendants(deadline)
            while True:  # verdicts that were under way come before the notice
                body = self.channel.receive()
                if body == JUDGE_ENDED:
                    break
                if body is None and (time.monotonic() > deadline or self.stop.is_set()):
                    return False
                if body is None:
                    self._wait(0.05)
            # An answer may have written the notice before it was killed. Then this reply does not come.
            self.ask("ping", "", wall_s=deadline - time.monotonic())
        except (psutil.Error, BrokenChannel, TimeoutError, InterruptedError):
            return False
        return True

    def _kill_descendants(self, deadline: float) -> None:
        """Kill what the worker has forked, until nothing of it runs. Raises TimeoutError after ``deadline``."""
        worker = psutil.Process(self._worker_pid)
        while True:
            running = []
            for process in worker.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        process.kill()
                        running.append(process)
            if not running:
                return
            if time.monotonic() > deadline:
                raise TimeoutError("processes that cannot be killed")
            time.sleep(0.002)

    def close(self, *, grace_s: float = 1.0) -> None:
        """Let an idle worker leave at the end of its input; kill it where it does not within ``grace_s``."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(grace_s)
        self.process.kill()


def _defining_module(name: str) -> tuple[str, str | None]:
    """Where a worker finds reward ``name``: the module that registers it, and its file if it is a plugin's."""
    fn = REWARDS.get(name).fn
    module = sys.modules.get(fn.__module__)
    if fn.__module__ == "__main__":
        raise UserError(
            f"reward {name!r} is isolated and registered by the script itself, which workers do not import; "
            "register it in a module of its own or a plugin file"
        )
    is_plugin = fn.__module__.startswith("kl_comedy_plugin_")
    return fn.__module__, str(module.__file__) if is_plugin and module is not None else None


class Budget:
    """Seconds of workers that items over their limits may cost one batch together, divided as its items are judged.

    Half of it is promised to the items in equal shares; the other half, and the shares of items that have been judged
    (an item within its limit costs nothing), goes to the first who can use it. So a few items over their limits have
    full limits, many have their shares, and none takes the share of an item that waits. No item has less than
    :data:`MIN_LIMIT_S`.

    >>> budget = Budget(4.0, items=20)
    >>> [round(budget.take(3.0), 3) for _ in range(20)] == [2.1] + [0.1] * 19
    True
    """

    def __init__(self, seconds: float, *, items: int) -> None:
        self.left_s = seconds  # neither spent nor granted to an item that is being judged
        self._waiting = items
        self._share_s = seconds / 2 / max(items, 1)
        self._lock = threading.Lock()

    def take(self, wanted_s: float) -> float:
        """The limit of the next item, at most ``wanted_s``; it is set aside until :meth:`settle`."""
        with self._lock:
            self._waiting -= 1
            free_s = self.left_s - self._waiting * self._share_s
            granted_s = min(wanted_s, max(free_s, MIN_LIMIT_S))
            self.left_s -= granted_s
        return granted_s

    def settle(self, granted_s: float, lost_s: float) -> None:
        """An item that was granted ``granted_s`` has cost ``lost_s``: 0 where it was judged within its limit."""
        with self._lock:
            self.left_s += granted_s - lost_s


@dataclass(frozen=True)
class Failure:
    """What went wrong where a verifier failed on an item; ``text`` is a traceback, or says how its worker ended."""

    text: str

    @property
    def error(self) -> str:
        """The error's own line."""
        lines = [line for line in self.text.splitlines() if line and not line.startswith(" ")]
        line = re.sub(r"^(\w+\.)+(?=\w+(:|$))", "", (lines or ["no message"])[-1])[:200]
        # An error may quote the answer: no terminal escapes, nothing that cannot be encoded.
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)

    @property
    def kind(self) -> str:
        """The class of the error."""
        return self.error.partition(":")[0]

    @property
    def place(self) -> str:
        """The file and line that raised, or nothing."""
        places = re.findall(r'^  File "(.*)", line (\d+)', self.text, re.MULTILINE)
        return f" ({os.sep.join(places[-1][0].split(os.sep)[-3:])}:{places[-1][1]})" if places else ""

    def __str__(self) -> str:
        return self.error + self.place


class RewardPool:
    """A pool of verifier workers. Thread-safe (batches from several threads take turns); a context manager.

    ``workers`` is their largest number, by default the CPUs this process may use, at most ``MAX_WORKERS``;
    ``memory_bytes`` limits the address space of each. A batch has one thread per worker.
    """

    def __init__(self, *, workers: int | None = None, memory_bytes: int = MEMORY_BYTES) -> None:
        if workers is not None and workers < 1:
            raise bad_value("workers", workers, "at least 1")
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.size = workers or min(cpus, MAX_WORKERS)
        self.memory_bytes = memory_bytes
        self.workers: dict[int, Worker] = {}
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.last_failure: Failure | None = None
        self._bad_golds: set[str] = set()
        self._failures_shown: set[tuple[str, str]] = set()
        _POOLS.add(self)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers alive now: of the process that answered last."""
        return [worker.pid for worker in list(self.workers.values()) if worker.process.alive]

    def close(self) -> None:
        """End all workers. The pool may be used again; it then starts new ones."""
        with self.lock:
            while self.workers:
                self.workers.popitem()[1].close()

    def run(self, jobs: Sequence[Job]) -> list[Reward]:
        """Judge ``jobs``; the results are in their order, each with parts ``{name: value}`` of its own.

        Whatever a reward function raises on an item is that item's verdict (:func:`failure_verdict`). Raises
        :class:`UserError` for meta or options a reward cannot work with, and :class:`RunFailed` for a reward that
        fails on its own examples or workers that cannot start.
        """
        with self.lock:
            self.stop.clear()
            budget = Budget(BATCH_BUDGET_S, items=len(jobs))
            results, cut_short = self._judge_all(jobs, range(len(jobs)), budget)
            # Items that were cut off before their own limit, because others had used the budget, have what is left now.
            again = [index for index in sorted(cut_short) if budget.left_s / len(cut_short) >= 2 * cut_short[index]]
            if again:
                rest = Budget(budget.left_s, items=len(again))
                results |= self._judge_all(jobs, again, rest)[0]
        return [results[index] for index in range(len(jobs))]

    def _judge_all(
        self, jobs: Sequence[Job], indices: Sequence[int], budget: Budget
    ) -> tuple[dict[int, Reward], dict[int, float]]:
        """Verdicts by index, one thread a worker; and the limits of items that had less than their own and ran out."""
        results: dict[int, Reward] = {}
        cut_short: dict[int, float] = {}
        errors: list[BaseException] = []
        remaining = iter(indices)  # each thread takes the next item

        def work(slot: int) -> None:
            try:
                for index in remaining:
                    limit_s = budget.take(jobs[index].timeout_s)
                    results[index], lost_s = self._judge(jobs[index], slot, limit_s, budget)
                    budget.settle(limit_s, lost_s)
                    if results[index].status == "timeout" and limit_s < jobs[index].timeout_s:
                        cut_short[index] = limit_s
            except BaseException as error:
                errors.append(error)
                self.stop.set()

        threads = [
            threading.Thread(target=work, args=(slot,), daemon=True) for slot in range(min(self.size, len(indices)))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # an interrupt: no thread may use its worker after the lock is released
            self.stop.set()
            for thread in threads:
                thread.join()
            raise
        if errors:
            raise errors[0]
        return results, cut_short

    def _judge(self, job: Job, slot: int, limit_s: float, budget: Budget) -> tuple[Reward, float]:
        """The verdict on one item by the worker in ``slot``, which is replaced where it dies; and the seconds lost."""
        share = limit_s / job.timeout_s
        wall_s = share * (WALL_FACTOR * job.timeout_s + WALL_SLACK_S)
        lost_s, status = 0.0, None
        for attempt in range(MAX_CRASHES):
            if attempt == MAX_CRASHES - 1 and budget.left_s < 0:
                break  # one death is forgiven, more are not when the batch has no time left
            if slot in self.workers and not self.workers[slot].process.alive:
                self._drop(slot)
            if slot not in self.workers:
                self.workers[slot] = Worker(self.memory_bytes, self.stop)
            worker = self.workers[slot]
            started = time.monotonic()
            try:
                if job.name not in worker.warmed:
                    worker.warm(job.name)
                    started = time.monotonic()
                # The budget is of wall time: an item that waits without computing must not use more than is left.
                wall_left_s = max(min(wall_s, budget.left_s + limit_s - lost_s), MIN_WALL_S)
                reply = worker.ask("judge", *vars(job).values(), limit_s=limit_s, wall_s=wall_left_s)
            except BrokenChannel:
                lost_s += time.monotonic() - started
                status = self._drop(slot)
                continue
            except TimeoutError:
                lost_s += time.monotonic() - started
                self._renew(slot)
                return Reward(value=0.0, status="timeout", parts={job.name: 0.0}), lost_s
            except UserError:  # the worker has answered
                raise
            except BaseException:
                self._drop(slot)
                raise
            if reply.get("suspect") or reply["rss_bytes"] > self.memory_bytes // 2:
                self._renew(slot)
            return self._verdict(job, reply), lost_s
        if job.name not in worker.warmed:
            raise RunFailed(
                f"rewards: verifier workers die (exit status {status}) while they start and import what "
                f"{job.name!r} needs; their messages are on stderr"
            )
        died = f"died: its worker ended {attempt} times or sent no verdict (exit status {status})"
        self.warn_failure(job.name, Failure(died), job.completion, job.answer)
        return failure_verdict(job.name), lost_s

    def _verdict(self, job: Job, reply: Mapping[str, Any]) -> Reward:
        """The verdict in a checked reply, with the warnings that it gives rise to."""
        if "bad_gold" in reply:
            self.warn_bad_gold(str(reply["bad_gold"]))
        if "failed" in reply:
            self.warn_failure(job.name, Failure(reply["failed"]), job.completion, job.answer)
            return failure_verdict(job.name)
        value = float(reply["value"])
        parts = {job.name: value, **{key: float(part) for key, part in reply["parts"].items()}}
        return Reward(value=value, status=reply["status"], parts=parts)

    def _renew(self, slot: int) -> None:
        """A new judge for the worker in ``slot``, or no worker where that fails: the next item starts one."""
        if not self.workers[slot].replace_judge():
            self._drop(slot)

    def _drop(self, slot: int) -> int:
        return self.workers.pop(slot).process.kill()

    def warn_bad_gold(self, message: str) -> None:
        """Warn once of a gold answer that a reward cannot read."""
        if message not in self._bad_golds:
            self._bad_golds.add(message)
            logger.warning("%s; completions of this problem are refused and earn 0", message)

    def warn_failure(self, name: str, failure: Failure, completion: str, answer: str) -> None:
        """Warn of the first failure of each kind of a reward, with the item."""
        self.last_failure = failure
        if (name, failure.kind) in self._failures_shown:
            return
        self._failures_shown.add((name, failure.kind))
        logger.warning(
            "the reward %s failed on a completion: %s; such items are refused, earn 0 and are counted "
            "(train/verifier_failed, failed_share); further failures of this kind are not shown. To see it: "
            "kl_comedy.rewards.score(%r, completions=[%s], answers=[%r])",
            name,
            failure,
            name,
            _shown_end(completion),
            answer[:SHOWN_CHARS],
        )


SHOWN_CHARS = 300
"""Of a completion, in a warning."""


def _shown_end(text: str) -> str:
    """The end of a completion, where its answer stands, with everything odd escaped."""
    if len(text) <= SHOWN_CHARS:
        return repr(text)
    return f"{text[-SHOWN_CHARS:]!r} (the last {SHOWN_CHARS} characters of {len(text)})"


_POOLS: weakref.WeakSet[RewardPool] = weakref.WeakSet()
_SHARED = RewardPool()


def shared_pool() -> RewardPool:
    """The pool of this process for callers without one of their own; closed at exit."""
    return _SHARED


def _kill_all() -> None:
    for pool in list(_POOLS):
        pool.stop.set()
        for worker in list(pool.workers.values()):
            with contextlib.suppress(OSError):
                worker.process.kill()


def _abandon_all() -> None:
    """After a fork, in the child: the workers belong to the parent."""
    for pool in list(_POOLS):
        pool.lock, pool.stop = threading.Lock(), threading.Event()
        while pool.workers:
            pool.workers.popitem()[1].process.abandon()


atexit.register(_kill_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
