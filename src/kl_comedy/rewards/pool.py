"""The pool of verifier workers: who owns them, who may use them when, and how they end.

How items are handed out, timed and judged is in :mod:`kl_comedy.rewards.batch`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Sequence

from kl_comedy.errors import UserError
from kl_comedy.records import Reward
from kl_comedy.rewards.batch import Batch, Job, Slot

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
