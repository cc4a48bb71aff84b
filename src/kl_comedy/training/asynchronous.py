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
from functools import partial
from typing import Any

from kl_comedy.config import Config
from kl_comedy.config.combinations import updates_from_a_batch
from kl_comedy.phases import phase
from kl_comedy.records import Scored
from kl_comedy.rewards import Scorer
from kl_comedy.training.distributed import Ranks
from kl_comedy.training.experience import Batch, TrainingPrompts
from kl_comedy.training.sampling import NOT_PUBLISHED, BroadcastRollouts

CLOSE_LIMIT_S = 10.0
"""Seconds that the threads have to end after the engines were closed."""


@dataclass(frozen=True)
class Request:
    """One batch to draw: ``number`` names its random numbers, ``indices`` are the positions of its prompts."""

    number: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """All completions of one prompt: its position, the number of the request that it came from, its rows."""

    index: int
    number: int
    rows: tuple[Scored, ...]

    @property
    def oldest(self) -> int:
        """The oldest version among the tokens that the policy drew. A completion without tokens has version 0."""
        return min(min(row.rollout.drawn_versions, default=0) for row in self.rows)


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
    drawn and waiting (``ready``), taken, or replaced by another because its rewards were equal.

    - ``wait``: the batch of iteration n may be requested once the learner's version is at least ``n u - max_steps`` (u
      updates per batch). The newest weights are loaded before it is drawn, so the bound holds by construction.
    - ``drop``: drawing never waits. Groups that are too old when a batch is taken are dropped, and so are the oldest
      when more are ready than can be used in time. Dropped prompts are requested again before new ones.

    Not thread-safe.
    """

    def __init__(self, limits: BufferLimits, indices: Callable[[int], list[int]]) -> None:
        self.limits = limits
        self.pending: dict[int, Request] = {}
        self.ready: deque[Group] = deque()
        self.returned: deque[int] = deque()
        self.taken = 0
        self.dropped = 0
        self._indices = indices
        self._next_number = 0
        self._requested_in_order = 0
        # Of the pending request, in the place of prompts whose rewards were equal.
        self._substitutes: list[int] = []

    def next_request(self, version: int) -> Request | None:
        """The batch to draw next, pending until it arrives; None while none may be with the learner at ``version``."""
        if self.pending:
            # After a resume: what was being drawn is drawn again.
            return next(iter(self.pending.values()))
        may_draw = self._misses_groups() if self.limits.drop else self._is_in_time(version)
        if not may_draw:
            return None
        request = Request(self._next_number, tuple(self._next_prompts()))
        self._next_number += 1
        self.pending[request.number] = request
        return request

    def _misses_groups(self) -> bool:
        """``drop``: whether the rest of the run needs more groups than are ready."""
        iterations_left = self.limits.iterations - self.taken
        return iterations_left * self.limits.prompts_per_batch > len(self.ready)

    def _is_in_time(self, version: int) -> bool:
        """``wait``: whether a batch drawn now is not too old when its iteration comes."""
        limits = self.limits
        if self._next_number >= limits.iterations:
            return False
        return version >= self._next_number * limits.updates - limits.max_steps

    def _next_prompts(self) -> list[int]:
        """Returned prompts first, then the order. A prompt is at most once in a request."""
        size = self.limits.prompts_per_batch
        chosen: list[int] = []
        # A small data set repeats prompts, so that one can have been returned twice.
        repeated: list[int] = []
        while self.returned and len(chosen) < size:
            index = self.returned.popleft()
            if index in chosen:
                repeated.append(index)
            else:
                chosen.append(index)
        self.returned.extendleft(reversed(repeated))
        return chosen + self._next_in_order(size - len(chosen))

    def substitutes(self, count: int) -> list[int]:
        """Prompts for the pending request, in the place of those whose rewards were equal."""
        chosen = self._next_in_order(count)
        self._substitutes += chosen
        return chosen

    def _next_in_order(self, count: int) -> list[int]:
        """The next prompts of the order, which nobody will be given again."""
        chosen = []
        for _ in range(count):
            batch, position = divmod(self._requested_in_order, self.limits.prompts_per_batch)
            chosen.append(self._indices(batch)[position])
            self._requested_in_order += 1
        return chosen

    def arrive(self, number: int, rows: Sequence[Scored], indices: Sequence[int]) -> None:
        """Store what was drawn for a request: the groups of the prompts at ``indices``, in order, equally large."""
        del self.pending[number]
        self._substitutes.clear()
        size = len(rows) // len(indices)
        for position, index in enumerate(indices):
            group_rows = rows[position * size : (position + 1) * size]
            self.ready.append(Group(index, number, tuple(group_rows)))
        while self.limits.drop and len(self.ready) > self.limits.ready_groups:
            self._drop(self.ready.popleft())

    def take(self, version: int) -> list[Group] | None:
        """One batch of groups for the learner at ``version``, oldest first, or None while there are not enough."""
        groups = self.ready
        self.ready = deque()
        for group in groups:
            if version - group.oldest <= self.limits.max_steps:
                self.ready.append(group)
            elif self.limits.drop:
                self._drop(group)
            else:
                # Impossible by construction. To pass over it would train on samples older than the config says.
                raise AssertionError("a group older than lag.max_steps, though drawing waited")
        if len(self.ready) < self.limits.prompts_per_batch:
            return None
        self.taken += 1
        return [self.ready.popleft() for _ in range(self.limits.prompts_per_batch)]

    def _drop(self, group: Group) -> None:
        self.returned.append(group.index)
        self.dropped += 1

    def snapshot(self, pack: Callable[[Sequence[Scored]], list[dict[str, Any]]]) -> dict[str, Any]:
        """Plain data, by the keys of stored checkpoints. Pending requests are drawn again after a restore, with weights
        that may be newer; prompts that stood in for others of them are requested after that."""
        return {
            "next_number": self._next_number,
            "asked_in_order": self._requested_in_order,
            "taken": self.taken,
            "dropped": self.dropped,
            "returned": [*self.returned, *self._substitutes],
            "pending": [[request.number, list(request.indices)] for request in self.pending.values()],
            "ready": [[group.index, group.number, pack(group.rows)] for group in self.ready],
        }

    def restore(self, state: Mapping[str, Any], unpack: Callable[[Any], list[Scored]]) -> None:
        """The inverse of :meth:`snapshot`."""
        self._next_number = int(state["next_number"])
        self._requested_in_order = int(state["asked_in_order"])
        self.taken = int(state["taken"])
        self.dropped = int(state["dropped"])
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
        self._updates = updates_from_a_batch(config)
        self._in_flight = config.lag.in_flight
        limits = BufferLimits(
            prompts_per_batch=config.rollout.prompts_per_batch,
            updates=self._updates,
            iterations=-(-config.train.steps // self._updates),
            max_steps=config.lag.max_steps,
            drop=config.lag.policy == "drop",
        )
        self.buffer = RolloutBuffer(limits, prompts.order.indices)
        self._sampler = sampler
        self._prompts = prompts
        self._scorer = scorer
        self._ranks = ranks
        self._precision = precision
        # The buffer and everything below are read and written under this lock, by the main thread and the producer's.
        # It is the sampler's, because a thread waits for either to change: a new version, or room in the buffer.
        self._changed = sampler.changed
        self._closed = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._seconds: dict[str, float] = defaultdict(float)
        self._dropped_reported = 0
        self._replaced = 0  # groups without signal since the last batch was taken

    def take(self, iteration: int) -> Batch:
        """One batch no older than allowed; waits for it."""
        # A new run: the engines have no weights before the first batch is drawn.
        if self._sampler.version == NOT_PUBLISHED:
            self._sampler.publish(0)
        start = time.perf_counter()
        phase("waiting for a batch")
        taken = self._ranks.on_rank_zero(lambda: self._wait_for_batch(iteration * self._updates))
        rows, metrics = taken or ([], {})
        metrics = self._ranks.broadcast(metrics)
        rows = self._prompts.broadcast(rows)
        return Batch(rows=rows, metrics={**metrics, "time/wait": time.perf_counter() - start})

    def _wait_for_batch(self, version: int) -> tuple[Sequence[Scored], dict[str, float]]:
        """Rows, and metrics since the last batch. The first call starts the threads."""
        if not self._threads:
            self._start_threads()
        with self._changed:
            depth = len(self.buffer.ready) / self.buffer.limits.prompts_per_batch
            groups = self._wait_for_groups(version)
            self._changed.notify_all()  # there is room in the buffer
            seconds = self._seconds
            self._seconds = defaultdict(float)
            dropped = self.buffer.dropped - self._dropped_reported
            self._dropped_reported = self.buffer.dropped
            replaced = self._replaced
            self._replaced = 0
        metrics = {
            "time/generate": seconds["generate"],
            "time/score": seconds["score"],
            "stream/queue_depth": depth,
            "stream/dropped_groups": float(dropped),
            "stream/sampler_restarts": float(self._sampler.engines.restarts),
        }
        if self._prompts.refills:
            metrics["stream/replaced_groups"] = float(replaced)
        busy_s = seconds["generate"] + seconds["score"]
        if busy_s > 0:
            metrics["time/sampler_idle_share"] = seconds["idle"] / (seconds["idle"] + busy_s)
            metrics["time/sampler_cpu"] = seconds["cpu"]
        # Groups of several requests may be in one batch; the learner tells groups apart by their number in the batch.
        numbered = []
        for position, group in enumerate(groups):
            for row in group.rows:
                numbered.append(replace(row, rollout=replace(row.rollout, group_id=position)))
        return numbered, metrics

    def _wait_for_groups(self, version: int) -> list[Group]:
        """A batch of groups, once the buffer has one. Raises what ended a thread.

        The lock is held by the caller, who also tells the producer about the room in the buffer.
        """
        while self._error is None:
            groups = self.buffer.take(version)
            if groups is not None:
                return groups
            # Taking may have dropped groups, whose prompts the producer must draw again: without this notice it and
            # the learner would wait for each other.
            self._changed.notify_all()
            self._changed.wait()
        raise self._error

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

    def _start_threads(self) -> None:
        works = [self._produce]
        if self._in_flight:
            works.append(self._follow)
        for work in works:
            # Daemons: an engine that does not answer must not keep the process from ending.
            thread = threading.Thread(target=self._run, args=(work,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._changed:
                if self._error is None:  # the first is the cause, the others follow from it
                    self._error = error
                self._changed.notify_all()

    def _produce(self) -> None:
        """Draw one batch after the other, as soon as each may be drawn."""
        while True:
            request = self._wait_for_request()
            if request is None:
                return
            batch = self._prompts.draw_batch(request.indices, partial(self._draw, request.number), self._substitutes)
            with self._changed:
                self._replaced += batch.replaced
                self.buffer.arrive(request.number, batch.rows, batch.indices)
                self._changed.notify_all()

    def _draw(self, number: int, indices: Sequence[int], again: int) -> Sequence[Scored]:
        """Scored groups from the newest weights."""
        engines = self._sampler.engines
        with self._sampler.turn():
            start = time.perf_counter()
            cpu_before = engines.cpu_seconds()
            self._sampler.load()
            with self._precision():
                rollouts = self._prompts.draw(engines.generate, number, indices, again=again)
            drawn = time.perf_counter()
            cpu_s = engines.cpu_seconds() - cpu_before
        # Scored outside the turn: an evaluation may draw meanwhile.
        rows = self._scorer.score(rollouts)
        with self._changed:
            self._seconds["generate"] += drawn - start
            self._seconds["score"] += time.perf_counter() - drawn
            self._seconds["cpu"] += max(cpu_s, 0.0)  # a restarted engine begins at 0
        return rows

    def _substitutes(self, count: int) -> list[int]:
        """Prompts in the place of those without signal. After a resume that request is drawn again, with others."""
        with self._changed:
            return self.buffer.substitutes(count)

    def _wait_for_request(self) -> Request | None:
        """The next batch to draw, once one may be drawn; None when the run is over."""
        start = time.perf_counter()
        with self._changed:
            while not self._closed:
                request = self.buffer.next_request(self._sampler.version)
                if request is not None:
                    self._seconds["idle"] += time.perf_counter() - start
                    return request
                self._changed.wait()
        return None

    def _follow(self) -> None:
        """In flight: let the engines load weights as soon as they are published."""

        def has_work() -> bool:
            return self._closed or self._sampler.loaded != self._sampler.version

        while True:
            with self._changed:
                self._changed.wait_for(has_work)
                if self._closed:
                    return
            # Outside the lock: loading takes long, and the learner must be able to publish and take meanwhile.
            self._sampler.load()
