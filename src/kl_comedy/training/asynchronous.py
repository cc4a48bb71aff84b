"""Asynchronous sampling: engines beside the trainer draw while it learns, at most ``lag.max_steps`` updates behind.

rank 0     producer thread: prompts -> engines -> rollouts -> rewards -> RolloutBuffer
all ranks  publish: stage the new weights; engines load them before the next batch (in flight: between tokens)
all ranks  take: rank 0 waits for a batch, all receive it. None of its groups is older than ``lag.max_steps``: the
           learner's version minus the oldest version among a group's tokens
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kl_comedy.config import Config
from kl_comedy.config.combinations import updates_from_a_batch
from kl_comedy.records import Scored
from kl_comedy.rewards import Scorer
from kl_comedy.training.distributed import Ranks
from kl_comedy.training.experience import Batch, TrainingPrompts
from kl_comedy.training.sampling import NOT_PUBLISHED, BroadcastRollouts

CLOSE_LIMIT_S = 10.0
"""Seconds that the threads have to end after the engines were closed."""


class Request(NamedTuple):
    """One batch to draw: ``number`` names its random numbers, ``indices`` are the positions of its prompts."""

    number: int
    indices: tuple[int, ...]


class Group(NamedTuple):
    """All completions of one prompt: its position, the number of the request that it came from, its rows."""

    index: int
    number: int
    rows: tuple[Scored, ...]

    @property
    def oldest(self) -> int:
        """The oldest version among its tokens."""
        return min(min(row.rollout.versions, default=0) for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class BufferLimits:
    """The settings of a :class:`RolloutBuffer`. ``updates``: optimizer updates made from one batch."""

    prompts_per_batch: int
    updates: int
    iterations: int
    max_steps: int
    drop: bool

    @property
    def ready_groups(self) -> int:
        """How many ready groups can still be used in time: one batch now, and one for each whole batch of lag."""
        return self.prompts_per_batch * (1 + self.max_steps // self.updates)


class RolloutBuffer:
    """Which prompts are requested, drawn, taken and dropped. ``indices(n)`` is the n-th batch of the prompts' order.

    Every prompt of the order is in exactly one place: to be requested again (``returned``), requested (``pending``),
    drawn and waiting (``ready``), or taken.

    - ``wait``: the batch of iteration n may be requested once the learner's version is at least ``n u - max_steps`` (u
      updates a batch). The newest weights are loaded before it is drawn, so the bound holds by construction.
    - ``drop``: drawing never waits. Groups that are too old when a batch is taken are dropped, and so are the oldest
      when more are ready than can be used in time. Dropped prompts are requested again before new ones.

    Not thread-safe.
    """

    def __init__(self, limits: BufferLimits, indices: Callable[[int], list[int]]) -> None:
        self.limits = limits
        self.pending: dict[int, Request] = {}
        self.ready: deque[Group] = deque()
        self.returned: deque[int] = deque()
        self.taken = self.dropped = 0
        self._indices = indices
        self._next_number = self._requested_in_order = 0

    def next_request(self, version: int) -> Request | None:
        """The batch to draw next, pending until it arrives; None while none may be with the learner at ``version``."""
        if self.pending:
            return next(iter(self.pending.values()))
        limits = self.limits
        if limits.drop:
            missing = (limits.iterations - self.taken) * limits.prompts_per_batch - len(self.ready)
            if missing <= 0:
                return None
        elif self._next_number >= limits.iterations or version < self._next_number * limits.updates - limits.max_steps:
            return None
        request = Request(self._next_number, tuple(self._next_prompts()))
        self._next_number += 1
        self.pending[request.number] = request
        return request

    def _next_prompts(self) -> list[int]:
        """Returned prompts first, then the order. A prompt is at most once in a request."""
        size, chosen, later = self.limits.prompts_per_batch, list[int](), list[int]()
        while self.returned and len(chosen) < size:
            index = self.returned.popleft()
            (later if index in chosen else chosen).append(index)
        self.returned.extendleft(reversed(later))
        while len(chosen) < size:
            batch, within = divmod(self._requested_in_order, size)
            chosen.append(self._indices(batch)[within])
            self._requested_in_order += 1
        return chosen

    def arrive(self, number: int, rows: Sequence[Scored]) -> None:
        """Store the rows of a request: its prompts' groups, in order, equally large."""
        request = self.pending.pop(number)
        size = len(rows) // len(request.indices)
        for position, index in enumerate(request.indices):
            self.ready.append(Group(index, number, tuple(rows[position * size : (position + 1) * size])))
        while self.limits.drop and len(self.ready) > self.limits.ready_groups:
            self._drop(self.ready.popleft())

    def take(self, version: int) -> list[Group] | None:
        """One batch of groups for the learner at ``version``, oldest first, or None while there are not enough."""
        groups, self.ready = self.ready, deque()
        for group in groups:
            if version - group.oldest <= self.limits.max_steps:
                self.ready.append(group)
            elif self.limits.drop:
                self._drop(group)
            else:
                raise AssertionError("a group older than lag.max_steps, though drawing waited")
        if len(self.ready) < self.limits.prompts_per_batch:
            return None
        self.taken += 1
        return [self.ready.popleft() for _ in range(self.limits.prompts_per_batch)]

    def _drop(self, group: Group) -> None:
        self.returned.append(group.index)
        self.dropped += 1

    def snapshot(self, pack: Callable[[Sequence[Scored]], list[dict[str, Any]]]) -> dict[str, Any]:
        """Plain data. Pending requests are drawn again after a restore, with weights that may be newer."""
        return {
            "next_number": self._next_number,
            "asked_in_order": self._requested_in_order,
            "taken": self.taken,
            "dropped": self.dropped,
            "returned": list(self.returned),
            "pending": [[request.number, list(request.indices)] for request in self.pending.values()],
            "ready": [[group.index, group.number, pack(group.rows)] for group in self.ready],
        }

    def restore(self, state: Mapping[str, Any], unpack: Callable[[Any], list[Scored]]) -> None:
        """The inverse of :meth:`snapshot`."""
        self._next_number, self._requested_in_order = int(state["next_number"]), int(state["asked_in_order"])
        self.taken, self.dropped = int(state["taken"]), int(state["dropped"])
        self.returned = deque(state["returned"])
        self.pending = {number: Request(number, tuple(indices)) for number, indices in state["pending"]}
        self.ready = deque(Group(index, number, tuple(unpack(rows))) for index, number, rows in state["ready"])


class Producer:
    """A source of batches that a thread of rank 0 draws ahead of the learner. Its errors are raised by :meth:`take`.

    Batches and evaluations are drawn in turns, both from the newest published weights.
    """

    def __init__(
        self,
        config: Config,
        sampler: BroadcastRollouts,
        prompts: TrainingPrompts,
        scorer: Scorer,
        ranks: Ranks,
        precision: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._updates, self._in_flight = updates_from_a_batch(config), config.lag.in_flight
        limits = BufferLimits(
            prompts_per_batch=config.rollout.prompts_per_batch,
            updates=self._updates,
            iterations=-(-config.train.steps // self._updates),
            max_steps=config.lag.max_steps,
            drop=config.lag.policy == "drop",
        )
        self.buffer = RolloutBuffer(limits, prompts.indices)
        self._sampler, self._prompts, self._scorer, self._ranks = sampler, prompts, scorer, ranks
        self._precision = precision
        self._changed = sampler.changed  # locks everything below
        self._closed = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._seconds: dict[str, float] = defaultdict(float)
        self._dropped_reported = 0

    def take(self, iteration: int) -> Batch:
        """One batch no older than allowed; waits for it."""
        if self._sampler.version == NOT_PUBLISHED:
            self._sampler.publish(0)
        start = time.perf_counter()
        taken = self._ranks.on_rank_zero(lambda: self._wait_for_batch(iteration * self._updates))
        rows, metrics = taken or ([], {})
        metrics = self._ranks.broadcast(metrics)
        rows = self._prompts.broadcast(rows)
        return Batch(rows=rows, metrics={**metrics, "time/wait": time.perf_counter() - start})

    def _wait_for_batch(self, version: int) -> tuple[Sequence[Scored], dict[str, float]]:
        """Rows, and metrics since the last batch. The first call starts the threads."""
        if not self._threads:
            for work in (self._produce, self._follow) if self._in_flight else (self._produce,):
                self._threads.append(threading.Thread(target=self._run, args=(work,), daemon=True))
                self._threads[-1].start()
        with self._changed:
            depth = len(self.buffer.ready) / self.buffer.limits.prompts_per_batch
            while self._error is None and (groups := self.buffer.take(version)) is None:
                self._changed.notify_all()  # dropped prompts may be drawn again
                self._changed.wait()
            if self._error is not None:
                raise self._error
            self._changed.notify_all()
            assert groups is not None
            seconds, self._seconds = self._seconds, defaultdict(float)
            dropped, self._dropped_reported = self.buffer.dropped - self._dropped_reported, self.buffer.dropped
        metrics = {
            "time/generate": seconds["generate"],
            "time/score": seconds["score"],
            "stream/queue_depth": depth,
            "stream/dropped_groups": float(dropped),
            "stream/sampler_restarts": float(self._sampler.engines.restarts),
        }
        busy_s = seconds["generate"] + seconds["score"]
        if busy_s > 0:
            metrics["time/sampler_idle_share"] = seconds["idle"] / (seconds["idle"] + busy_s)
            metrics["time/sampler_cpu"] = seconds["cpu"]
        numbered = [
            replace(row, rollout=replace(row.rollout, group_id=position))
            for position, group in enumerate(groups)
            for row in group.rows
        ]
        return numbered, metrics

    def snapshot(self) -> dict[str, Any]:
        """Batches that are being drawn are drawn again after a resume."""
        with self._changed:
            return self.buffer.snapshot(self._prompts.pack)

    def restore(self, state: Mapping[str, Any]) -> None:
        with self._changed:
            self.buffer.restore(state, self._prompts.unpack)
            self._dropped_reported = self.buffer.dropped

    def close(self) -> None:
        """Close the engines and end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._sampler.close()
        for thread in self._threads:
            thread.join(CLOSE_LIMIT_S)

    # --- threads of rank 0 --------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _produce(self) -> None:
        """Draw one batch after the other, as soon as each may be."""
        engines = self._sampler.engines
        while True:
            idle, request = time.perf_counter(), None
            with self._changed:
                while not self._closed and (request := self.buffer.next_request(self._sampler.version)) is None:
                    self._changed.wait()
                if self._closed or request is None:
                    return
                self._seconds["idle"] += time.perf_counter() - idle
            with self._sampler.turn():
                start, cpu = time.perf_counter(), engines.cpu_seconds()
                self._sampler.load()
                with self._precision():
                    rollouts = self._prompts.draw(engines.generate, *request)
                middle, cpu = time.perf_counter(), engines.cpu_seconds() - cpu
            rows = self._scorer.score(rollouts)
            with self._changed:
                self._seconds["generate"] += middle - start
                self._seconds["score"] += time.perf_counter() - middle
                self._seconds["cpu"] += max(cpu, 0.0)  # a restarted engine begins at 0
                self.buffer.arrive(request.number, rows)
                self._changed.notify_all()

    def _follow(self) -> None:
        """In flight: let the engines load weights as soon as they are published."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._sampler.loaded != self._sampler.version)
                if self._closed:
                    return
            self._sampler.load()
