"""The pool of verifier workers: every item on its own clock, every overrun killed, every batch in order.

A worker is an interpreter of its own (``python -m kl_comedy.rewards.worker``), not a fork: it inherits no locks or
threads. Frames to a worker are pickles (the parent is trusted); frames from it are JSON (a hostile answer may have
touched the worker). An item's clock starts when it is sent to a worker that has already imported what it needs. The
limit is on CPU time: on a crowded machine an honest item waits longer and is judged alike. A much wider limit on wall
time ends items that wait without computing. An item over either limit loses its worker (SIGKILL) and has status
``timeout``; an item whose worker dies ``MAX_CRASHES`` times by itself, or that leaves a process behind, has status
``refused``. Where such items have cost a batch more than ``BATCH_BUDGET_S``, the rest have a tenth of the limits.

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
import secrets
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.processes import BrokenChannel, ChildProcess, FrameChannel
from kl_comedy.records import Reward
from kl_comedy.registry import REWARDS
from kl_comedy.rewards.base import normalized

MAX_REPLY = 1 << 20
"""Bytes. A verdict is a few hundred; a longer frame is a broken worker."""
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
"""Seconds of workers that items over their limits may cost a batch at full limits."""
AFTER_BUDGET = 0.1
"""The share of its limits that an item has after that."""
STOP_CHECK_S = 0.2
"""How often a thread that waits for a worker looks whether the batch was stopped."""
MEMORY_BYTES = 4 << 30
"""Address space of a worker; math-verify needs a few hundred MB of it."""
MAX_WORKERS = 8
NONCE_BYTES = 16
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
        self.channel = FrameChannel(self.process.stdout.fileno(), self.process.stdin.fileno(), max_bytes=MAX_REPLY)
        self.stop = stop
        self.warmed: set[str] = set()
        self.pid = self.process.pid
        self.cpu_s = 0.0

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
            if left_s <= 0 and limit_s is None:
                message = f"took more than {START_LIMIT_S:g} s to start and import what {name!r} needs"
                raise RunFailed(f"rewards: a verifier worker {message}")
            if left_s <= 0:
                raise TimeoutError(f"more than {limit_s:g} s")
            with selectors.DefaultSelector() as selector:
                selector.register(self.channel.read_fd, selectors.EVENT_READ)
                if self.channel.unsent:
                    selector.register(self.channel.write_fd, selectors.EVENT_WRITE)
                selector.select(min(left_s, STOP_CHECK_S))
            self.channel.flush()
        if not hmac.compare_digest(body[:NONCE_BYTES], nonce):
            raise BrokenChannel("a frame that is no answer to the question")
        try:
            reply: dict[str, Any] = json.loads(body[NONCE_BYTES:])
            used_s, self.cpu_s = float(reply["cpu_s"]) - self.cpu_s, float(reply["cpu_s"])
            self.pid = int(reply["pid"])
        except (ValueError, TypeError, LookupError) as error:
            raise BrokenChannel("what the worker sent is no reply") from error
        if reply.get("error") == "user":
            raise UserError(str(reply["message"]))
        if "error" in reply:
            raise RunFailed(f"reward {name!r} failed on an item:\n{reply['message']}")
        if limit_s is not None and used_s > limit_s:
            raise TimeoutError(f"more than {limit_s:g} s")
        return reply

    def _seconds_left(self, waited_s: float, limit_s: float | None, wall_s: float) -> float:
        """Seconds until a message can at the earliest be over its limit.

        One process uses no more CPU time than wall time; an item with several is over its limit when it answers.
        """
        if limit_s is None or waited_s < limit_s:
            return (wall_s if limit_s is None else limit_s) - waited_s
        left_s = min(limit_s - (self.process.cpu_seconds() - self.cpu_s), wall_s - waited_s)
        return max(left_s, 0.01) if left_s > 0 else 0.0

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
        self._bad_golds: set[str] = set()
        self._lost_s = 0.0
        _POOLS.add(self)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers alive now."""
        return [worker.pid for worker in list(self.workers.values()) if worker.process.alive]

    def close(self) -> None:
        """End all workers. The pool may be used again; it then starts new ones."""
        with self.lock:
            while self.workers:
                self.workers.popitem()[1].close()

    def run(self, jobs: Sequence[Job]) -> list[Reward]:
        """Judge ``jobs``; the results are in their order, each with parts ``{name: value}`` of its own.

        Raises :class:`UserError` for meta or options a reward cannot work with, and :class:`RunFailed`
        for a reward function that raises anything else or workers that cannot start.
        """
        results: dict[int, Reward] = {}
        errors: list[BaseException] = []
        remaining = iter(enumerate(jobs))  # each thread takes the next item

        def work(slot: int) -> None:
            try:
                for index, job in remaining:
                    results[index] = self._judge(job, slot)
            except BaseException as error:
                errors.append(error)
                self.stop.set()

        with self.lock:
            self.stop.clear()
            self._lost_s = 0.0
            slots = range(min(self.size, len(jobs)))
            threads = [threading.Thread(target=work, args=(slot,), daemon=True) for slot in slots]
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
        return [results[index] for index in range(len(jobs))]

    def _judge(self, job: Job, slot: int) -> Reward:
        """The verdict on one item by the worker in ``slot``, which is replaced where it dies."""
        status = None
        for _ in range(MAX_CRASHES):
            if slot in self.workers and not self.workers[slot].process.alive:
                self._drop(slot)
            if slot not in self.workers:
                self.workers[slot] = Worker(self.memory_bytes, self.stop)
            worker = self.workers[slot]
            share = 1.0 if self._lost_s < BATCH_BUDGET_S else AFTER_BUDGET
            limit_s, wall_s = share * job.timeout_s, share * (WALL_FACTOR * job.timeout_s + WALL_SLACK_S)
            started = time.monotonic()
            try:
                if job.name not in worker.warmed:
                    worker.ask("warm", job.name, *_defining_module(job.name))
                    worker.warmed.add(job.name)
                    started = time.monotonic()
                reply = worker.ask("judge", *vars(job).values(), limit_s=limit_s, wall_s=wall_s)
            except BrokenChannel:
                self._lost_s += time.monotonic() - started
                status = self._drop(slot)
                continue
            except TimeoutError:
                self._lost_s += time.monotonic() - started
                self._drop(slot)
                return Reward(value=0.0, status="timeout", parts={job.name: 0.0})
            except UserError:  # the worker has answered
                raise
            except BaseException:
                self._drop(slot)
                raise
            if "bad_gold" in reply:
                self.warn_bad_gold(str(reply["bad_gold"]))
            if reply.get("suspect") or reply["rss_bytes"] > self.memory_bytes // 2:
                self._drop(slot)
            value = float(reply["value"])
            parts = {job.name: value, **{str(key): float(part) for key, part in reply["parts"].items()}}
            return normalized(Reward(value=value, status=str(reply["status"]), parts=parts), name=job.name)
        if job.name in worker.warmed:
            return Reward(value=0.0, status="refused", parts={job.name: 0.0})
        raise RunFailed(
            f"rewards: verifier workers die (exit status {status}) while they start and import what "
            f"{job.name!r} needs; their messages are on stderr"
        )

    def _drop(self, slot: int) -> int:
        return self.workers.pop(slot).process.kill()

    def warn_bad_gold(self, message: str) -> None:
        """Warn once of a gold answer that a reward cannot read."""
        if message not in self._bad_golds:
            self._bad_golds.add(message)
            logger.warning("%s; completions of this problem are refused and earn 0", message)


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
