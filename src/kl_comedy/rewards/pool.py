"""One worker process as its parent sees it: start, frames in and out, CPU time used, kill.

The worker is an interpreter of its own (``python -m kl_comedy.rewards.worker``), not a fork: it inherits
no locks or threads, works from any thread of the parent, and does not import the parent's ``__main__``.
Frames to the worker are pickles (the parent is trusted); frames from it are JSON (what a hostile answer
may have touched is not), each after its length in eight bytes. All writes and reads are non-blocking, so
that a stopped worker cannot stop its parent.

A batch of items in the worker pool: every item on its own clock, every overrun killed, every batch in order.

The parent keeps one item in flight per worker and decides alone. The clock of an item starts when it is
handed to a worker that has already imported what it needs, so neither queueing nor start-up counts. What
is limited is the CPU time that the item uses: on a crowded machine an honest item waits longer but is not
judged differently. A much wider limit on wall time ends items that wait without computing.
An item over either limit loses its worker (SIGKILL) and has status ``timeout``; an item whose worker dies
``MAX_CRASHES`` times by itself has status ``refused``. Workers start when there is work for them.

The pool of verifier workers: who owns them, who may use them when, and how they end.

How items are handed out, timed and judged is in :mod:`kl_comedy.rewards.pool`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import pickle
import selectors
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from kl_comedy.errors import RunFailed, UserError
from kl_comedy.records import Reward
from kl_comedy.registry import REWARDS
from kl_comedy.rewards.base import normalized

HEADER = struct.Struct(">Q")
MAX_REPLY = 1 << 20
"""Bytes. A verdict is a few hundred; a longer frame is a broken worker."""

_CHUNK = 1 << 16


class WorkerLost(Exception):
    """The worker has died, or what it says is no frame of ours."""


class WorkerProcess:
    """A worker and its two pipes. ``warmed`` names the rewards whose imports it has done."""

    def __init__(self, *, memory_bytes: int) -> None:
        if not sys.executable:
            raise RunFailed("rewards: cannot start verifier workers, since sys.executable is unknown")
        path = os.pathsep.join(entry for entry in sys.path if entry)
        single = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kl_comedy.rewards.worker", str(memory_bytes), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path, **single},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin_fd, self.stdout_fd = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.stdin_fd, False)
        os.set_blocking(self.stdout_fd, False)
        self.warmed: set[str] = set()
        self._outgoing = memoryview(b"")
        self._incoming = bytearray()

    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, message: Any) -> None:
        """Queue one message; :meth:`flush` writes as much as the pipe takes. Raises :class:`WorkerLost`."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._outgoing = memoryview(HEADER.pack(len(body)) + body)
        self.flush()

    @property
    def unsent(self) -> bool:
        return len(self._outgoing) > 0

    def flush(self) -> None:
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self.stdin_fd, self._outgoing[:_CHUNK]) :]
        except BlockingIOError:
            pass
        except OSError as error:
            raise WorkerLost(str(error)) from error

    def receive(self) -> dict[str, Any] | None:
        """The next whole frame, or None when it has not all arrived. Raises :class:`WorkerLost`."""
        try:
            while data := os.read(self.stdout_fd, _CHUNK):
                self._incoming += data
                if len(data) < _CHUNK:
                    break
            else:
                raise WorkerLost("end of file")
        except BlockingIOError:
            pass
        except OSError as error:
            raise WorkerLost(str(error)) from error
        return self._frame()

    def _frame(self) -> dict[str, Any] | None:
        if len(self._incoming) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(self._incoming)
        if size > MAX_REPLY:
            raise WorkerLost(f"a reply of {size} bytes")
        if len(self._incoming) < HEADER.size + size:
            return None
        body = bytes(self._incoming[HEADER.size : HEADER.size + size])
        del self._incoming[: HEADER.size + size]
        try:
            reply = json.loads(body)
        except ValueError as error:
            raise WorkerLost("a reply that is not JSON") from error
        if not isinstance(reply, dict):
            raise WorkerLost("a reply that is not an object")
        return reply

    def cpu_seconds(self) -> float:
        """CPU time (user and system) this process has used; infinite for a process that is gone."""
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:
            return float("inf")
        return float(times.user + times.system)

    def kill(self) -> int | None:
        """End it now, reap it, close the pipes; its exit status (minus the signal's number)."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        return self._reap()

    def close(self, *, grace_s: float = 1.0) -> None:
        """Let an idle worker leave at the end of its input; kill it where it does not within ``grace_s``."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        deadline = time.monotonic() + grace_s
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        self.kill()

    def forget(self) -> None:
        """In a forked child: close the inherited pipe ends and leave the parent's worker alone."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self.process.returncode = 0

    def _reap(self) -> int | None:
        status = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return status


TIMEOUT_S = 3.0
"""CPU seconds an item may cost. Honest answers take milliseconds, the slowest golds of MATH under one second."""
WALL_FACTOR, WALL_SLACK_S = 10.0, 30.0
"""The wall limit is ``WALL_FACTOR * timeout_s + WALL_SLACK_S``. It is for functions that wait without computing,
so it may be generous: seven processes a core once made an item of 0.1 CPU seconds take more than 3."""
START_LIMIT_S = 300.0
"""Wall seconds for a worker to start and import what a reward needs (on a crowded shared file system)."""
MAX_CRASHES = 3
"""Workers an item may lose otherwise than by its clock: a kill from outside must not cost it its verdict."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One item for one isolated reward; ``timeout_s`` in CPU seconds."""

    name: str
    completion: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S


class Slot:
    """A worker and what it is doing: nothing, warming up for item ``index``, or judging it."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.index: int | None = None
        self.judging = False
        self.since = self.cpu_before = self.cpu_last = 0.0

    def begin(self, index: int, *, judging: bool) -> None:
        self.index, self.judging, self.since = index, judging, time.monotonic()
        self.cpu_before = self.cpu_last


class Batch:
    """The jobs of one :meth:`RewardPool.run` and the loop that sees them through.

    Takes over the workers in ``slots`` and starts others up to ``size``; :meth:`put_down` gives them back.
    ``bad_gold`` is told of every answer that a reward cannot read.
    """

    def __init__(
        self, jobs: Sequence[Job], *, slots: list[Slot], size: int, memory_bytes: int, bad_gold: Callable[[str], None]
    ) -> None:
        self.jobs, self.slots = jobs, slots
        self.size, self.memory_bytes, self.bad_gold = size, memory_bytes, bad_gold
        self.pending = deque(range(len(jobs)))
        self.results: dict[int, Reward] = {}
        self.crashes: dict[int, int] = {}

    def finish(self) -> list[Reward]:
        while len(self.results) < len(self.jobs):
            self._assign()
            self._wait()
            for slot in list(self.slots):
                if slot.index is not None:
                    self._attend(slot)
        return [self.results[index] for index in range(len(self.jobs))]

    def put_down(self) -> list[Slot]:
        """The idle workers; those still busy (after an error or an interrupt) are killed."""
        for slot in self.slots:
            if slot.index is not None:
                slot.worker.kill()
        return [slot for slot in self.slots if slot.index is None]

    def _assign(self) -> None:
        """Give every idle worker the next item; start workers while there are more items than workers."""
        for slot in list(self.slots):
            if slot.index is None and not slot.worker.alive():
                self._drop(slot)
        idle = [slot for slot in self.slots if slot.index is None]
        while len(idle) < len(self.pending) and len(self.slots) < self.size:
            slot = Slot(WorkerProcess(memory_bytes=self.memory_bytes))
            self.slots.append(slot)
            idle.append(slot)
        for slot in idle:
            if self.pending:
                self._hand(slot, self.pending.popleft())

    def _hand(self, slot: Slot, index: int) -> None:
        """Send item ``index``, or first the order to warm up for its reward."""
        job = self.jobs[index]
        warm = job.name in slot.worker.warmed
        slot.begin(index, judging=warm)
        try:
            if warm:
                slot.worker.send(
                    ("judge", job.name, job.completion, job.answer, job.meta, dict(job.options), job.timeout_s)
                )
            else:
                slot.worker.send(("warm", job.name, *_whereabouts(job.name)))
        except WorkerLost:
            self._crashed(slot)

    def _wait(self) -> None:
        """Sleep until a worker has something to say, or an item may be over its limit."""
        busy = [slot for slot in self.slots if slot.index is not None]
        if not busy:
            return
        with selectors.DefaultSelector() as selector:
            for slot in busy:
                selector.register(slot.worker.stdout_fd, selectors.EVENT_READ)
                if slot.worker.unsent:
                    selector.register(slot.worker.stdin_fd, selectors.EVENT_WRITE)
            selector.select(max(0.0, min(self._patience(slot) for slot in busy)))

    def _patience(self, slot: Slot) -> float:
        """Seconds until this worker can at the earliest be over its limit (it cannot use more CPU than time)."""
        waited = time.monotonic() - slot.since
        if not slot.judging or slot.index is None:
            return START_LIMIT_S - waited
        limit = self.jobs[slot.index].timeout_s
        if waited < limit:
            return limit - waited
        left = limit - (slot.worker.cpu_seconds() - slot.cpu_before)
        left = min(left, WALL_FACTOR * limit + WALL_SLACK_S - waited)
        return max(left, 0.01) if left > 0 else 0.0

    def _attend(self, slot: Slot) -> None:
        try:
            slot.worker.flush()
            reply = slot.worker.receive()
        except WorkerLost:
            self._crashed(slot)
            return
        if reply is not None:
            self._take(slot, reply)
        elif self._patience(slot) <= 0:
            self._overrun(slot)

    def _take(self, slot: Slot, reply: Mapping[str, Any]) -> None:
        index, judging = slot.index, slot.judging
        assert index is not None
        job = self.jobs[index]
        if reply.get("error") == "user":
            raise UserError(str(reply["message"]))
        if "error" in reply:
            raise RunFailed(f"reward {job.name!r} failed on an item:\n{reply['message']}")
        slot.index, slot.cpu_last = None, float(reply["cpu_s"])
        if not judging:
            slot.worker.warmed.add(job.name)
            self._hand(slot, index)
            return
        self.results[index] = _verdict(reply, job)
        if "bad_gold" in reply:
            self.bad_gold(str(reply["bad_gold"]))
        if reply.get("spent") or reply["rss_bytes"] > self.memory_bytes // 2:
            self._drop(slot)

    def _overrun(self, slot: Slot) -> None:
        index = slot.index
        assert index is not None
        self._drop(slot)
        if not slot.judging:
            raise RunFailed(
                f"rewards: a verifier worker took more than {START_LIMIT_S:g} s to start and import "
                f"what {self.jobs[index].name!r} needs"
            )
        self.results[index] = Reward(value=0.0, status="timeout", parts={self.jobs[index].name: 0.0})

    def _crashed(self, slot: Slot) -> None:
        """The worker died by itself: the item is tried again on another, up to ``MAX_CRASHES`` workers."""
        index = slot.index
        assert index is not None
        status = self._drop(slot)
        self.crashes[index] = self.crashes.get(index, 0) + 1
        if self.crashes[index] < MAX_CRASHES:
            self.pending.appendleft(index)
        elif slot.judging:
            self.results[index] = Reward(value=0.0, status="refused", parts={self.jobs[index].name: 0.0})
        else:
            raise RunFailed(
                f"rewards: verifier workers die (exit status {status}) while they start and import what "
                f"{self.jobs[index].name!r} needs; their messages are on stderr"
            )

    def _drop(self, slot: Slot) -> int | None:
        self.slots.remove(slot)
        return slot.worker.kill()


def _verdict(reply: Mapping[str, Any], job: Job) -> Reward:
    value = float(reply["value"])
    parts = {str(key): float(part) for key, part in reply["parts"].items()}
    return normalized(Reward(value=value, status=str(reply["status"]), parts={job.name: value, **parts}), name=job.name)


def _whereabouts(name: str) -> tuple[str, str | None]:
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


logger = logging.getLogger(__name__)

MEMORY_BYTES = 4 << 30
"""Address space of a worker; math-verify needs a few hundred MB of it."""
MAX_WORKERS = 8


class RewardPool:
    """A pool of verifier workers. Thread-safe (batches from several threads take turns); a context manager.

    ``workers`` defaults to the CPUs this process may use, at most ``MAX_WORKERS``.
    """

    def __init__(self, *, workers: int | None = None, memory_bytes: int = MEMORY_BYTES) -> None:
        if workers is not None and workers < 1:
            raise UserError(f"workers: got {workers}; allowed: at least 1")
        self.size = workers or min(_cpus(), MAX_WORKERS)
        self.memory_bytes = memory_bytes
        self._slots: list[Slot] = []
        self._lock = threading.Lock()
        self._bad_golds: set[str] = set()
        _POOLS.add(self)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers alive now."""
        return [slot.worker.process.pid for slot in self._slots if slot.worker.alive()]

    def close(self) -> None:
        """End all workers. The pool may be used again; it then starts new ones."""
        with self._lock:
            slots, self._slots = self._slots, []
            for slot in slots:
                slot.worker.close()

    def run(self, jobs: Sequence[Job]) -> list[Reward]:
        """Judge ``jobs``; the results are in their order, each with parts ``{name: value}`` of its own.

        Raises :class:`UserError` for meta or options a reward cannot work with, and :class:`RunFailed`
        for a reward function that raises anything else or workers that cannot start.
        """
        if not jobs:
            return []
        with self._lock:
            batch = Batch(
                jobs,
                slots=self._slots,
                size=self.size,
                memory_bytes=self.memory_bytes,
                bad_gold=self.warn_bad_gold,
            )
            try:
                return batch.finish()
            finally:
                self._slots = batch.put_down()

    def warn_bad_gold(self, message: str) -> None:
        if message not in self._bad_golds:
            self._bad_golds.add(message)
            logger.warning("%s; completions of this problem are refused and earn 0", message)

    def _forget(self) -> None:
        """After a fork, in the child: the workers belong to the parent."""
        self._lock = threading.Lock()
        slots, self._slots = self._slots, []
        for slot in slots:
            slot.worker.forget()


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_POOLS: weakref.WeakSet[RewardPool] = weakref.WeakSet()
_shared: RewardPool | None = None
_shared_lock = threading.Lock()


def shared_pool() -> RewardPool:
    """The pool of this process for whoever brings none of their own; closed at exit."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = RewardPool()
        return _shared


def _kill_all() -> None:
    for pool in list(_POOLS):
        for slot in pool._slots:
            with contextlib.suppress(OSError):
                slot.worker.kill()


def _forget_all() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    for pool in list(_POOLS):
        pool._forget()


atexit.register(_kill_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
