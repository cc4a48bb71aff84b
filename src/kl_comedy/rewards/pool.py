"""The pool of workers of rewards and environments: each item has its own clock, each overrun is killed.

A worker is an interpreter of its own (``python -m kl_comedy.rewards.worker``), not a fork of the trainer: it inherits
no locks or threads. It forks the process that judges (:mod:`kl_comedy.rewards.worker`), which is replaced in
milliseconds. Frames to a worker are pickles (the parent is trusted); frames from it are JSON that
:func:`checked_reply` checks (a hostile answer may have touched the worker). An item's clock starts when it is sent to a
worker that has already imported what it needs. The limit is on CPU time: on a crowded machine an honest item waits
longer and gets the same verdict. A much wider limit on wall time ends items that wait without computing.

What happens to an item:

- over either limit: its judge is killed (SIGKILL), and it has status ``timeout``;
- the verifier raises an error, or ``MAX_CRASHES`` workers die: status ``refused`` and the part ``verifier_failed``;
- it leaves a process behind: status ``refused``.

What items over their limits cost a batch has one budget, ``BATCH_BUDGET_S`` (:class:`Budget`).

What an answer can reach: a worker has no network, where the kernel allows that (:func:`namespace`), a few harmless
variables of the environment, and limits on memory, file size, processes and CPU time. All that it started dies with it.
A verdict echoes a random nonce that only its own question held, so a frame that something else wrote into the pipe does
not count as a verdict. Whatever an answer prints is dropped.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import psutil

from kl_comedy.config.validate import Field, is_count, is_finite, is_number, is_numbers_by_name, is_text, record_fault
from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.processes import BrokenChannel, ChildProcess, FrameChannel
from kl_comedy.records import STATUSES, Problem, Reward
from kl_comedy.registry import KINDS
from kl_comedy.rewards.base import JUDGE_ENDED, MAX_PARTS, MAX_REPLY, failure_verdict

TIMEOUT_S = 3.0
"""CPU seconds an item may cost. Honest answers take milliseconds, the slowest golds of MATH under one second."""
WALL_FACTOR = 10.0
WALL_SLACK_S = 30.0
"""The wall limit is ``WALL_FACTOR * timeout_s + WALL_SLACK_S``. It ends functions that wait without computing, so it
may be generous: with seven processes per core an item of 0.1 CPU seconds was seen to take more than 3."""
START_LIMIT_S = 300.0
"""Wall seconds for a worker to start and import what a reward needs (on a crowded shared file system)."""
MAX_CRASHES = 3
"""Workers an item may lose other than by its clock: a kill from outside must not cost it its verdict."""
BATCH_BUDGET_S = 120.0
"""Seconds of workers that items over their limits may cost a batch together; see :class:`Budget`."""
MIN_LIMIT_S = 0.1
MIN_WALL_S = 5.0
"""CPU and wall seconds that every item has, whatever others of its batch have cost. Honest answers take milliseconds;
the wall limit is wide for the reason given at :data:`WALL_FACTOR`."""
REPLACE_S = 5.0
"""Wall seconds for a worker to replace its judge; after that the worker is replaced, which takes longer."""
STOP_CHECK_S = 0.2
"""How often a thread that waits for a worker checks whether the batch was stopped."""
MEMORY_BYTES = 4 << 30
"""Address space of a worker; math-verify needs a few hundred MB of it."""
MAX_WORKERS = 8
NONCE_BYTES = 16
MAX_FRAME = NONCE_BYTES + MAX_REPLY
ENVIRONMENT = (
    "PATH",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "PYTHONHASHSEED",
    "PYTHONPYCACHEPREFIX",
    "PYTHONDONTWRITEBYTECODE",
)
"""The variables that a worker inherits. An allow-list: an answer that runs code must find no key or token there."""
NAMESPACE = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
FIRST_PROCESS = ("sh", "-c", 'exec 9>&2 2>&-; "$@" 2>&9 9>&-; exit "$?"', "sh")
"""In a process namespace the first process is a shell: the kernel shields the first from limits and signals."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One item for one isolated reward; ``timeout_s`` in CPU seconds."""

    table: ClassVar[str] = "rewards"
    name: str
    completion: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What a worker gets beside the name."""
        return self.completion, self.answer, self.meta, self.options, self.timeout_s


@dataclass(frozen=True)
class Turn:
    """One turn of the policy, for an environment to answer; ``timeout_s`` in CPU seconds.

    ``state``: what the environment's last answer in this dialogue gave, as JSON; None at the first turn.
    """

    table: ClassVar[str] = "environments"
    name: str
    problem: Problem
    text: str
    state: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What a worker gets beside the name."""
        return self.problem, self.text, self.state, self.options, self.timeout_s


AnyJob = Job | Turn
Reply = Mapping[str, Any]
"""What is known of an item: the fields of :func:`checked_reply`, without those of usage where no worker replied."""
REFUSED: Reply = {"value": 0.0, "status": "refused", "parts": {}}
TIMED_OUT: Reply = {"value": 0.0, "status": "timeout", "parts": {}}


@functools.cache
def namespace() -> tuple[str, ...]:
    """The command prefix that takes the network away, and ends all processes of the command together.

    Empty where the kernel or the site does not allow it, or there is no ``unshare`` (util-linux).
    """
    prefix = (*NAMESPACE, *FIRST_PROCESS)
    try:
        trial = subprocess.run([*prefix, "true"], capture_output=True, stdin=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ()
    if trial.returncode != 0:
        return ()
    return prefix


# --- What a worker may reply -----------------------------------------------------------------------------------------


def _is_status(value: Any) -> bool:
    return is_text(value) and value in STATUSES


def _is_parts(value: Any) -> bool:
    return is_numbers_by_name(value) and len(value) <= MAX_PARTS


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_error(value: Any) -> bool:
    return value in ("user", "bug")


def _is_cpu_seconds(value: Any) -> bool:
    return is_number(value) and value >= 0


def _is_byte_count(value: Any) -> bool:
    return is_count(value) and is_finite(value)


def _is_pid(value: Any) -> bool:
    # psutil and os.kill raise OverflowError for larger numbers.
    return is_count(value) and 0 < value < 1 << 31


_USAGE_FIELDS = {
    "cpu_s": Field("the CPU seconds that the process has used", _is_cpu_seconds),
    "rss_bytes": Field("its memory", _is_byte_count),
    "pid": Field("its id", _is_pid),
}
"""Every reply has these."""
_VERDICT_FIELDS = {
    "value": Field("the reward", is_number),
    "status": Field("a status of rewards", _is_status),
    "parts": Field("numbers by name", _is_parts),
}
"""A verdict has these too."""
_OPTIONAL_FIELDS = {
    "suspect": Field("true or false", _is_bool, required=False),
    "forks": Field("true or false", _is_bool, required=False),
    "again": Field("true or false", _is_bool, required=False),
    "observation": Field("a text", is_text, required=False),
    "state": Field("a text", is_text, required=False),
    "done": Field("true or false", _is_bool, required=False),
    "failed": Field("a text", is_text, required=False),
    "bad_gold": Field("a text", is_text, required=False),
    "message": Field("a text", is_text, required=False),
    "error": Field("user or bug", _is_error, required=False),
}
_TEXT_IN_JSON = re.compile(rb'"(?:[^"\\]|\\.)*"')
_MOST_BRACKETS = 2
"""A reply is one mapping with at most one inside, ``parts``."""


def checked_reply(body: bytes, *, verdict: bool) -> dict[str, Any]:
    """The reply in ``body``; with ``verdict`` it must hold one, or an error.

    Raises :class:`BrokenChannel` for everything else: a worker that an answer has touched may send anything.
    """
    # json.loads is recursive, and 10,000 brackets would raise RecursionError in the trainer. Brackets are counted
    # first, outside of texts: an error message may quote as many as it likes.
    brackets = len(re.findall(rb"[\[{]", _TEXT_IN_JSON.sub(b"", body)))
    if len(body) > MAX_REPLY or brackets > _MOST_BRACKETS:
        raise BrokenChannel(f"a reply of {len(body)} bytes and {brackets} brackets")
    try:
        reply = json.loads(body)
    except ValueError as error:
        raise BrokenChannel("the worker's reply is not JSON") from error
    if not isinstance(reply, dict):
        raise BrokenChannel("the worker's reply is not a mapping")

    fields = _USAGE_FIELDS | _OPTIONAL_FIELDS
    if verdict and "error" not in reply:
        fields |= _VERDICT_FIELDS
    # Without other fields: only what is checked here may travel on.
    fault = record_fault(reply, fields)
    if fault is not None:
        raise BrokenChannel(f"a reply that is none: {fault}")
    return reply


# --- One worker ------------------------------------------------------------------------------------------------------


class Worker:
    """A worker process that answers one message at a time.

    ``warmed``: table and name of the parts whose imports it has done.
    """

    def __init__(self, memory_bytes: int, stop: threading.Event) -> None:
        # -P keeps the current folder off the path: a file called json.py there must not shadow a module.
        command = [*namespace(), sys.executable, "-P", "-m", "kl_comedy.rewards.worker", str(memory_bytes)]
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        # One judge per CPU already; and a process with BLAS threads could not be forked (worker._may_fork).
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[name] = "1"
        self.process = ChildProcess(command, pipes=True, env=environment)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.channel = FrameChannel(self.process.stdout.fileno(), self.process.stdin.fileno(), max_bytes=MAX_FRAME)
        self.stop = stop
        self.warmed: set[tuple[str, str]] = set()
        # The process that answered last: the judge, or in a namespace the worker below `unshare`.
        self.pid = self.process.pid
        # The worker's clock at its last reply, CPU seconds.
        self.cpu_s = 0.0
        self._forks = False
        self._worker_pid = 0

    def warm(self, table: str, name: str) -> None:
        """Let the worker import what the reward or environment ``name`` needs."""
        arguments = (table, name, *_defining_module(table, name))
        reply = self.ask("warm", *arguments)
        if reply.get("again"):
            # The judge has read the message and has exited, so that the worker reads it the second time.
            reply = self.ask("warm", *arguments)
        self._forks = bool(reply.get("forks"))
        self._worker_pid = int(reply["pid"])
        self.warmed.add((table, name))

    def ask(
        self,
        kind: str,
        table: str,
        name: str,
        *arguments: Any,
        limit_s: float | None = None,
        wall_s: float = START_LIMIT_S,
    ) -> dict[str, Any]:
        """The reply to a message about a part by its table and name; it may cost ``limit_s`` CPU and ``wall_s`` wall s.

        Without a limit it may take :data:`START_LIMIT_S` of wall time. Raises TimeoutError over the limit,
        :class:`BrokenChannel` where the worker dies or sends no valid reply, InterruptedError once ``stop`` is set,
        :class:`UserError` and :class:`RunFailed` where the reply says so.
        """
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.channel.send(pickle.dumps((nonce, kind, table, name, *arguments), protocol=pickle.HIGHEST_PROTOCOL))
        body = self._receive(kind, name, limit_s, wall_s)

        # An answer that runs code could write a verdict into the pipe before the judge does; it cannot know the nonce
        # of the next question.
        if not hmac.compare_digest(body[:NONCE_BYTES], nonce):
            raise BrokenChannel("a frame that does not echo the nonce of the question")
        reply = checked_reply(body[NONCE_BYTES:], verdict=kind == "judge")
        used_s = float(reply["cpu_s"]) - self.cpu_s
        self.cpu_s = float(reply["cpu_s"])
        self._note_pid(int(reply["pid"]))

        if reply.get("error") == "user":
            raise UserError(str(reply.get("message")))
        if "error" in reply:
            text = f"{_kind_of(table)} {name!r} cannot be used: it fails on its own examples"
            raise RunFailed(f"{text}:\n{reply.get('message')}")
        # The limit may have passed since _receive last read the clock. The verdict must not depend on when it did.
        if limit_s is not None and used_s > limit_s:
            raise TimeoutError(f"more than {limit_s:g} s")
        return reply

    def _receive(self, kind: str, name: str, limit_s: float | None, wall_s: float) -> bytes:
        """The next frame from the worker. Raises as :meth:`ask`."""
        started = time.monotonic()
        while (body := self.channel.receive()) is None:
            if self.stop.is_set():
                raise InterruptedError("the batch was stopped")
            left_s = self._seconds_left(time.monotonic() - started, limit_s, wall_s)
            if left_s <= 0 and kind == "warm":
                raise RunFailed(
                    f"rewards: a verifier worker took more than {START_LIMIT_S:g} s to start and import what "
                    f"{name!r} needs"
                )
            if left_s <= 0:
                raise TimeoutError(f"more than {limit_s or wall_s:g} s")
            # Short waits, because nothing wakes this thread when the batch is stopped.
            self._wait(min(left_s, STOP_CHECK_S))
            # A message that is larger than the pipe leaves piece by piece. A blocking write could wait forever: a
            # stopped worker reads nothing.
            self.channel.flush()
        return body

    def _wait(self, seconds: float) -> None:
        """Wait until something can be read or written, at most ``seconds``."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel.read_fd, selectors.EVENT_READ)
            if self.channel.unsent:
                selector.register(self.channel.write_fd, selectors.EVENT_WRITE)
            selector.select(seconds)

    def _note_pid(self, pid: int) -> None:
        """Note the process id that answered. Raises :class:`BrokenChannel` where it is not below this worker.

        The number comes from a process that an answer may have touched, and signals are sent by it later.
        """
        if pid == self.pid:
            return
        with contextlib.suppress(psutil.Error):
            ancestors = [parent.pid for parent in psutil.Process(pid).parents()]
            if pid == self.process.pid or self.process.pid in ancestors:
                self.pid = pid
                return
        raise BrokenChannel(f"process {pid} does not belong to this worker")

    def _seconds_left(self, waited_s: float, limit_s: float | None, wall_s: float) -> float:
        """Seconds until a message can at the earliest be over its limit.

        One process uses no more CPU time than wall time; an item with several is over its limit when it answers.
        """
        if limit_s is None:
            return wall_s - waited_s
        if waited_s < limit_s:
            # No reason to read the CPU clock yet: it lies in /proc, and most items answer in milliseconds.
            return limit_s - waited_s
        cpu_left_s = limit_s - (self.process.cpu_seconds() - self.cpu_s)
        left_s = min(cpu_left_s, wall_s - waited_s)
        if left_s <= 0:
            return 0.0
        # At least 10 ms: the remaining CPU time shrinks at each look, and shorter waits would spin.
        return max(left_s, 0.01)

    def replace_judge(self) -> bool:
        """Kill the judge and all that it started, so that the next item has a new one. False where that fails.

        The caller then ends this worker.
        """
        # With a message half sent, what is left of it in the pipe would be read as the next message.
        if not self._forks or self.channel.unsent:
            return False
        deadline = time.monotonic() + REPLACE_S
        try:
            self._kill_descendants(deadline)
            if not self._saw_judge_end(deadline):
                return False
            # An answer may have written the notice itself before it was killed. Then this reply does not come.
            self.ask("ping", "", "", wall_s=deadline - time.monotonic())
        except (psutil.Error, BrokenChannel, TimeoutError, InterruptedError):
            return False
        return True

    def _saw_judge_end(self, deadline: float) -> bool:
        """Read frames up to the worker's notice that its judge has ended; False where none comes before ``deadline``.

        Verdicts that were under way when the judge was killed come before the notice and are dropped.
        """
        while True:
            body = self.channel.receive()
            if body == JUDGE_ENDED:
                return True
            if body is not None:
                continue
            if time.monotonic() > deadline or self.stop.is_set():
                return False
            self._wait(0.05)

    def _kill_descendants(self, deadline: float) -> None:
        """Kill what the worker has forked, until none of it runs. Raises TimeoutError after ``deadline``.

        In rounds, because a process may fork between the listing and the kill.
        """
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
        """Let an idle worker exit at the end of its input; kill it where it does not within ``grace_s``."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(grace_s)
        self.process.kill()


def _kind_of(table: str) -> str:
    """The word for one part of a table: ``reward`` or ``environment``."""
    return table.removesuffix("s")


def _defining_module(table: str, name: str) -> tuple[str, str | None]:
    """Where a worker finds a part: the module that registers it, and its file if it is a plugin's."""
    module_name = KINDS[table].get(name).fn.__module__
    if module_name == "__main__":
        raise UserError(
            f"{_kind_of(table)} {name!r} is isolated and registered by the script itself, which workers do not import; "
            "register it in a module of its own or a plugin file"
        )
    module = sys.modules.get(module_name)
    # A plugin file is loaded under a name that no other interpreter can import.
    if module_name.startswith("kl_comedy_plugin_") and module is not None:
        return module_name, str(module.__file__)
    return module_name, None


# --- The time of a batch ---------------------------------------------------------------------------------------------


class Budget:
    """Seconds of workers that items over their limits may cost one batch together, divided as its items are judged.

    Half of it is promised to the items in equal shares; the other half, and the shares of items that have been judged
    (an item within its limit costs nothing), goes to the first who can use it. So a few items over their limits have
    full limits, many have their shares, and none takes the share of an item that waits. No item has less than
    :data:`MIN_LIMIT_S`. Without a budget a batch of 1,000 answers that never end would take 1,000 limits.

    >>> budget = Budget(4.0, items=20)
    >>> [round(budget.take(3.0), 3) for _ in range(20)] == [2.1] + [0.1] * 19
    True
    """

    def __init__(self, seconds: float, *, items: int) -> None:
        # Neither spent nor granted to an item that is being judged.
        self.left_s = seconds
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


# --- Failures, as they are shown -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """What went wrong where a verifier failed on an item; ``text`` is a traceback, or says how its worker ended."""

    text: str

    @property
    def error(self) -> str:
        """The error's own line."""
        # Frames of a traceback are indented; the last line that is not holds the class and the message.
        lines = [line for line in self.text.splitlines() if line and not line.startswith(" ")]
        last_line = lines[-1] if lines else "no message"
        without_package = re.sub(r"^(\w+\.)+(?=\w+(:|$))", "", last_line)
        # An error may quote the answer: no terminal escapes, nothing that cannot be encoded, no flood.
        return "".join(_printable(char) for char in without_package[:200])

    @property
    def kind(self) -> str:
        """The class of the error."""
        return self.error.partition(":")[0]

    @property
    def place(self) -> str:
        """The file and line that raised, in brackets, or nothing."""
        places = re.findall(r'^  File "(.*)", line (\d+)', self.text, re.MULTILINE)
        if not places:
            return ""
        file, line = places[-1]
        short_file = os.sep.join(file.split(os.sep)[-3:])
        return f" ({short_file}:{line})"

    def __str__(self) -> str:
        return self.error + self.place


def _printable(char: str) -> str:
    if char.isprintable():
        return char
    return repr(char)[1:-1]


SHOWN_CHARS = 300
"""How many characters of a completion a warning shows."""


def _shown_end(text: str) -> str:
    """The end of a completion, where its answer stands, with everything odd escaped."""
    if len(text) <= SHOWN_CHARS:
        return repr(text)
    return f"{text[-SHOWN_CHARS:]!r} (the last {SHOWN_CHARS} characters of {len(text)})"


# --- The pool --------------------------------------------------------------------------------------------------------


@dataclass
class _Batch:
    """Items that the threads of a pool judge together, and what they have written down so far."""

    jobs: Sequence[AnyJob]
    budget: Budget
    remaining: Iterator[int]
    """Positions of items that no thread has taken yet. ``next`` on an iterator of a list is atomic."""
    results: dict[int, Reply] = field(default_factory=dict)
    cut_short: dict[int, float] = field(default_factory=dict)
    """The limits of items that ran out of time with less than their own limit, because others had used the budget."""
    errors: list[BaseException] = field(default_factory=list)


class RewardPool:
    """A pool of verifier workers. Thread-safe (batches from several threads take turns); a context manager.

    ``workers`` is their largest number, by default the CPUs this process may use, at most ``MAX_WORKERS``;
    ``memory_bytes`` limits the address space of each. A batch has one thread per worker.
    """

    def __init__(self, *, workers: int | None = None, memory_bytes: int = MEMORY_BYTES) -> None:
        if workers is not None and workers < 1:
            raise bad_value("workers", workers, "at least 1")
        self.size = workers or min(_usable_cpus(), MAX_WORKERS)
        self.memory_bytes = memory_bytes
        self.workers: dict[int, Worker] = {}
        self.lock = threading.Lock()
        self.stop = threading.Event()
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
        """The process id that answered last, of each worker that is alive now."""
        return [worker.pid for worker in list(self.workers.values()) if worker.process.alive]

    def close(self) -> None:
        """End all workers. The pool may be used again; it then starts new ones."""
        with self.lock:
            while self.workers:
                _, worker = self.workers.popitem()
                worker.close()

    def run(self, jobs: Sequence[Job]) -> list[Reward]:
        """Judge ``jobs``; the results are in their order, each with a part ``{name: value}`` of its own.

        Whatever a reward function raises on an item is that item's verdict (:func:`failure_verdict`). Raises as
        :meth:`replies`.
        """
        return [self._verdict(job, reply) for job, reply in zip(jobs, self.replies(jobs), strict=True)]

    def replies(self, jobs: Sequence[AnyJob]) -> list[Reply]:
        """What workers reply to ``jobs``, in their order; ``failed`` says why where one has no verdict.

        Raises :class:`UserError` for meta or options that a part cannot work with, and :class:`RunFailed` for a reward
        that fails on its own examples or workers that cannot start.
        """
        with self.lock:
            self.stop.clear()
            batch = _Batch(jobs, Budget(BATCH_BUDGET_S, items=len(jobs)), iter(range(len(jobs))))
            self._judge_all(batch, len(jobs))

            # Items that were cut short by others get what is left now, where that at least doubles their limit.
            second_chance = []
            for index in sorted(batch.cut_short):
                share_s = batch.budget.left_s / len(batch.cut_short)
                if share_s >= 2 * batch.cut_short[index]:
                    second_chance.append(index)
            if second_chance:
                rest = Budget(batch.budget.left_s, items=len(second_chance))
                again = _Batch(jobs, rest, iter(second_chance), results=batch.results)
                self._judge_all(again, len(second_chance))
        return [batch.results[index] for index in range(len(jobs))]

    def _judge_all(self, batch: _Batch, count: int) -> None:
        """Judge the remaining ``count`` items of ``batch``, one thread per worker. Raises the first error."""
        slots = range(min(self.size, count))
        threads = [threading.Thread(target=self._judge_in_slot, args=(batch, slot), daemon=True) for slot in slots]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            # An interrupt. The threads must end before the lock is released, or the next batch and they would write to
            # the same workers.
            self.stop.set()
            for thread in threads:
                thread.join()
            raise
        if batch.errors:
            raise batch.errors[0]

    def _judge_in_slot(self, batch: _Batch, slot: int) -> None:
        """What each thread does: take the next item until none is left."""
        try:
            for index in batch.remaining:
                job = batch.jobs[index]
                limit_s = batch.budget.take(job.timeout_s)
                reply, lost_s = self._judge(job, slot, limit_s, batch.budget)
                batch.results[index] = reply
                batch.budget.settle(limit_s, lost_s)
                if reply.get("status") == "timeout" and limit_s < job.timeout_s:
                    batch.cut_short[index] = limit_s
        except BaseException as error:
            # An exception in a thread would only be printed. It is raised by the caller, once the others have stopped.
            batch.errors.append(error)
            self.stop.set()

    def _judge(self, job: AnyJob, slot: int, limit_s: float, budget: Budget) -> tuple[Reply, float]:
        """The reply to one item by the worker in ``slot``, which is replaced where it dies; and the seconds lost."""
        share = limit_s / job.timeout_s
        wall_s = share * (WALL_FACTOR * job.timeout_s + WALL_SLACK_S)
        lost_s = 0.0
        deaths = 0
        while True:
            worker = self._worker_in(slot)
            started = time.monotonic()
            try:
                if (job.table, job.name) not in worker.warmed:
                    worker.warm(job.table, job.name)
                    # Imports are off the clock.
                    started = time.monotonic()
                # The budget is of wall time: an item that waits without computing must not use more than is left.
                wall_left_s = max(min(wall_s, budget.left_s + limit_s - lost_s), MIN_WALL_S)
                reply = worker.ask("judge", job.table, job.name, *job.arguments, limit_s=limit_s, wall_s=wall_left_s)
            except BrokenChannel:
                lost_s += time.monotonic() - started
                exit_status = self._drop(slot)
                deaths += 1
                # One death is forgiven, a second is not when the batch has no time left.
                out_of_time = deaths == MAX_CRASHES - 1 and budget.left_s < 0
                if deaths == MAX_CRASHES or out_of_time:
                    return _reply_of_dead_workers(job, worker, deaths, exit_status), lost_s
            except TimeoutError:
                lost_s += time.monotonic() - started
                self._renew(slot)
                return TIMED_OUT, lost_s
            except UserError:
                # The worker has answered, and is as good as before.
                raise
            except BaseException:
                # The worker may be in the middle of an item, so that its next reply would belong to this one.
                self._drop(slot)
                raise
            else:
                # An answer may fill the memory slowly, item by item: a new judge begins small.
                if reply.get("suspect") or reply["rss_bytes"] > self.memory_bytes // 2:
                    self._renew(slot)
                return reply, lost_s

    def _worker_in(self, slot: int) -> Worker:
        """The live worker of ``slot``; a new one where there is none."""
        if slot in self.workers and not self.workers[slot].process.alive:
            self._drop(slot)
        if slot not in self.workers:
            self.workers[slot] = Worker(self.memory_bytes, self.stop)
        return self.workers[slot]

    def _verdict(self, job: Job, reply: Mapping[str, Any]) -> Reward:
        """The verdict in a checked reply, with the warnings that it gives rise to."""
        if "bad_gold" in reply:
            self.warn_bad_gold(str(reply["bad_gold"]))
        if "failed" in reply:
            self.warn_failure(job.name, Failure(reply["failed"]), job.completion, job.answer)
            return failure_verdict(job.name)
        value = float(reply["value"])
        parts = {job.name: value}
        for name, part in reply["parts"].items():
            parts[name] = float(part)
        return Reward(value=value, status=reply["status"], parts=parts)

    def _renew(self, slot: int) -> None:
        """A new judge for the worker in ``slot``, or no worker where that fails: the next item starts one."""
        if not self.workers[slot].replace_judge():
            self._drop(slot)

    def _drop(self, slot: int) -> int:
        """Kill the worker in ``slot``; its exit status."""
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


def _reply_of_dead_workers(job: AnyJob, last_worker: Worker, deaths: int, exit_status: int) -> Reply:
    """The reply to an item that has cost its last worker too. Raises :class:`RunFailed` where none could start.

    A worker that has imported what it needs dies of the item, one that has not dies of the installation.
    """
    if (job.table, job.name) not in last_worker.warmed:
        raise RunFailed(
            f"{job.table}: verifier workers die (exit status {exit_status}) while they start and import what "
            f"{job.name!r} needs; their messages are on stderr"
        )
    how_it_died = f"died: its worker ended {deaths} times or sent no verdict (exit status {exit_status})"
    return {**REFUSED, "failed": how_it_died}


def _usable_cpus() -> int:
    """The CPUs that this process may use: a SLURM step or a container may have fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
    """After a fork, in the child: the workers belong to the parent, and a lock may be held by a thread that is gone."""
    for pool in list(_POOLS):
        pool.lock = threading.Lock()
        pool.stop = threading.Event()
        while pool.workers:
            _, worker = pool.workers.popitem()
            worker.process.abandon()


atexit.register(_kill_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
