"""The pool of verifier workers: every item on its own clock, every overrun killed, every batch in order.

A worker is an interpreter of its own (``python -m kl_comedy.rewards.worker``), not a fork: it inherits no locks or
threads, works from any thread of the parent, and does not import the parent's ``__main__``. Frames to a worker are
pickles (the parent is trusted); frames from it are JSON (a hostile answer may have touched the worker).

The parent keeps one item in flight per worker and decides alone. An item's clock starts when it is sent to a worker
that has already imported what it needs, so neither queueing nor start-up counts. The limit is on CPU time: on a
crowded machine an honest item waits longer and is judged alike. A much wider limit on wall time ends items that wait
without computing. An item over either limit loses its worker (SIGKILL) and has status ``timeout``; an item whose
worker dies ``MAX_CRASHES`` times by itself has status ``refused``. Workers start when there is work for them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import pickle
import selectors
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

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
MEMORY_BYTES = 4 << 30
"""Address space of a worker; math-verify needs a few hundred MB of it."""
MAX_WORKERS = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One item for one isolated reward; ``timeout_s`` in CPU seconds."""

    name: str
    completion: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S


class Worker:
    """A worker process and what it does: nothing, importing what job ``index`` needs, or judging it.

    ``warmed`` names the rewards whose imports it has done.
    """

    def __init__(self, memory_bytes: int) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        self.process = ChildProcess(
            [sys.executable, "-P", "-m", "kl_comedy.rewards.worker", str(memory_bytes), str(os.getpid())],
            pipes=True,
            env={**os.environ, "PYTHONPATH": path, **one_thread},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.channel = FrameChannel(self.process.stdout.fileno(), self.process.stdin.fileno(), max_bytes=MAX_REPLY)
        self.warmed: set[str] = set()
        self.index: int | None = None
        self.judging = False
        self.since = self.cpu_before = self.cpu_last = 0.0

    def send(self, index: int, message: tuple[Any, ...], *, judging: bool) -> None:
        """Send a message about job ``index`` and start its clock. Raises :class:`BrokenChannel`."""
        self.index, self.judging, self.since, self.cpu_before = index, judging, time.monotonic(), self.cpu_last
        self.channel.send(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def receive(self) -> dict[str, Any] | None:
        """The next reply, or None when it has not all arrived. Raises :class:`BrokenChannel`."""
        self.channel.flush()
        return parse_reply(self.channel.receive())

    def seconds_left(self, limit_s: float) -> float:
        """Seconds until its job can at the earliest be over ``limit_s``; it uses no more CPU time than wall time."""
        waited_s = time.monotonic() - self.since
        if not self.judging:
            return START_LIMIT_S - waited_s
        if waited_s < limit_s:
            return limit_s - waited_s
        left_s = min(limit_s - (self._cpu_seconds() - self.cpu_before), WALL_FACTOR * limit_s + WALL_SLACK_S - waited_s)
        return max(left_s, 0.01) if left_s > 0 else 0.0

    def _cpu_seconds(self) -> float:
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:
            return float("inf")
        return float(times.user + times.system)

    def close(self, *, grace_s: float = 1.0) -> None:
        """Let an idle worker leave at the end of its input; kill it where it does not within ``grace_s``."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(grace_s)
        self.process.kill()


def parse_reply(body: bytes | None) -> dict[str, Any] | None:
    """A reply frame as its JSON object. Raises :class:`BrokenChannel` for anything else."""
    if body is None:
        return None
    try:
        reply = json.loads(body)
    except ValueError as error:
        raise BrokenChannel("a reply that is not JSON") from error
    if not isinstance(reply, dict):
        raise BrokenChannel("a reply that is not an object")
    return reply


class _Batch:
    """The jobs of one :meth:`RewardPool.run` and the loop that gets them judged by the pool's ``workers``."""

    def __init__(self, jobs: Sequence[Job], pool: RewardPool) -> None:
        self.jobs, self.pool, self.workers = jobs, pool, pool.workers
        self.pending = deque(range(len(jobs)))
        self.results: dict[int, Reward] = {}
        self.crashes: Counter[int] = Counter()

    def finish(self) -> list[Reward]:
        try:
            while len(self.results) < len(self.jobs):
                self._assign()
                self._wait()
                for worker in self._busy():
                    self._advance(worker)
        finally:
            for worker in self._busy():  # after an error or an interrupt
                self._drop(worker)
        return [self.results[index] for index in range(len(self.jobs))]

    def _busy(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.index is not None]

    def _assign(self) -> None:
        """Give every idle worker the next item; start workers while there are more items than workers."""
        idle = [worker for worker in self.workers if worker.index is None]
        for worker in [worker for worker in idle if not worker.process.alive]:
            idle.remove(worker)
            self._drop(worker)
        while len(idle) < len(self.pending) and len(self.workers) < self.pool.size:
            idle.append(Worker(self.pool.memory_bytes))
            self.workers.append(idle[-1])
        for worker in idle:
            if self.pending:
                self._hand(worker, self.pending.popleft())

    def _hand(self, worker: Worker, index: int) -> None:
        """Send item ``index``, or first the order to import what its reward needs."""
        job = self.jobs[index]
        message: tuple[Any, ...]
        if job.name in worker.warmed:
            message = ("judge", job.name, job.completion, job.answer, job.meta, dict(job.options), job.timeout_s)
        else:
            message = ("warm", job.name, *_defining_module(job.name))
        try:
            worker.send(index, message, judging=message[0] == "judge")
        except BrokenChannel:
            self._crashed(worker, index)

    def _wait(self) -> None:
        """Sleep until a reply arrives, or an item may be over its limit."""
        busy = self._busy()
        if not busy:
            return
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.channel.read_fd, selectors.EVENT_READ)
                if worker.channel.unsent:
                    selector.register(worker.channel.write_fd, selectors.EVENT_WRITE)
            selector.select(max(0.0, min(self._seconds_left(worker) for worker in busy)))

    def _seconds_left(self, worker: Worker) -> float:
        assert worker.index is not None
        return worker.seconds_left(self.jobs[worker.index].timeout_s)

    def _advance(self, worker: Worker) -> None:
        index = worker.index
        assert index is not None
        try:
            reply = worker.receive()
        except BrokenChannel:
            self._crashed(worker, index)
            return
        if reply is not None:
            self._take(worker, index, reply)
        elif self._seconds_left(worker) <= 0:
            self._drop(worker)
            if not worker.judging:
                raise RunFailed(
                    f"rewards: a verifier worker took more than {START_LIMIT_S:g} s to start and import "
                    f"what {self.jobs[index].name!r} needs"
                )
            self.results[index] = Reward(value=0.0, status="timeout", parts={self.jobs[index].name: 0.0})

    def _take(self, worker: Worker, index: int, reply: Mapping[str, Any]) -> None:
        job = self.jobs[index]
        if reply.get("error") == "user":
            raise UserError(str(reply["message"]))
        if "error" in reply:
            raise RunFailed(f"reward {job.name!r} failed on an item:\n{reply['message']}")
        worker.index, worker.cpu_last = None, float(reply["cpu_s"])
        if not worker.judging:
            worker.warmed.add(job.name)
            self._hand(worker, index)
            return
        value = float(reply["value"])
        parts = {job.name: value, **{str(key): float(part) for key, part in reply["parts"].items()}}
        self.results[index] = normalized(Reward(value=value, status=str(reply["status"]), parts=parts), name=job.name)
        if "bad_gold" in reply:
            self.pool.warn_bad_gold(str(reply["bad_gold"]))
        if reply.get("out_of_memory") or reply["rss_bytes"] > self.pool.memory_bytes // 2:
            self._drop(worker)

    def _crashed(self, worker: Worker, index: int) -> None:
        """The worker died by itself: the item is tried again on another, up to ``MAX_CRASHES`` workers."""
        status = self._drop(worker)
        self.crashes[index] += 1
        if self.crashes[index] < MAX_CRASHES:
            self.pending.appendleft(index)
        elif worker.judging:
            self.results[index] = Reward(value=0.0, status="refused", parts={self.jobs[index].name: 0.0})
        else:
            raise RunFailed(
                f"rewards: verifier workers die (exit status {status}) while they start and import what "
                f"{self.jobs[index].name!r} needs; their messages are on stderr"
            )

    def _drop(self, worker: Worker) -> int:
        self.workers.remove(worker)
        return worker.process.kill()


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
    ``memory_bytes`` limits the address space of each.
    """

    def __init__(self, *, workers: int | None = None, memory_bytes: int = MEMORY_BYTES) -> None:
        if workers is not None and workers < 1:
            raise bad_value("workers", workers, "at least 1")
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.size = workers or min(cpus, MAX_WORKERS)
        self.memory_bytes = memory_bytes
        self.workers: list[Worker] = []
        self.lock = threading.Lock()
        self._bad_golds: set[str] = set()
        _POOLS.add(self)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers alive now."""
        return [worker.process.pid for worker in self.workers if worker.process.alive]

    def close(self) -> None:
        """End all workers. The pool may be used again; it then starts new ones."""
        with self.lock:
            workers, self.workers = self.workers, []
            for worker in workers:
                worker.close()

    def run(self, jobs: Sequence[Job]) -> list[Reward]:
        """Judge ``jobs``; the results are in their order, each with parts ``{name: value}`` of its own.

        Raises :class:`UserError` for meta or options a reward cannot work with, and :class:`RunFailed`
        for a reward function that raises anything else or workers that cannot start.
        """
        if not jobs:
            return []
        with self.lock:
            return _Batch(jobs, self).finish()

    def warn_bad_gold(self, message: str) -> None:
        """Warn once of a gold answer that a reward cannot read."""
        if message not in self._bad_golds:
            self._bad_golds.add(message)
            logger.warning("%s; completions of this problem are refused and earn 0", message)


_POOLS: weakref.WeakSet[RewardPool] = weakref.WeakSet()
_shared: RewardPool | None = None
_shared_lock = threading.Lock()


def shared_pool() -> RewardPool:
    """The pool of this process for callers without one of their own; closed at exit."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = RewardPool()
        return _shared


def _kill_all() -> None:
    for pool in list(_POOLS):
        for worker in pool.workers:
            with contextlib.suppress(OSError):
                worker.process.kill()


def _abandon_all() -> None:
    """After a fork, in the child: the workers belong to the parent."""
    global _shared_lock
    _shared_lock = threading.Lock()
    for pool in list(_POOLS):
        pool.lock = threading.Lock()
        workers, pool.workers = pool.workers, []
        for worker in workers:
            worker.process.abandon()


atexit.register(_kill_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
