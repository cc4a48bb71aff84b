"""Which prompts are requested, drawn, taken and dropped in asynchronous sampling. No processes here.

Every prompt of the order is in exactly one place: to be requested again (``returned``), requested (``pending``), drawn
and waiting (``ready``), or taken. The *age* of a group is the learner's version at its first use minus the oldest
version among its tokens; no group older than ``max_steps`` is ever taken.

- ``wait``: the batch of iteration n may be requested once the learner's version is at least ``n u - max_steps`` (u
  updates a batch). The sampler loads the newest weights first, so the bound holds by construction.
- ``drop``: the sampler never waits. Groups that are too old when a batch is taken are dropped, and so are the oldest
  when more are ready than can be used in time. Dropped prompts are requested again before new ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kl_comedy.records import Scored

BEGUN_AHEAD = 2
"""Requests sent ahead under ``drop``: one being drawn and the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One batch to draw: ``number`` names its random numbers, ``indices`` are the positions of its prompts."""

    number: int
    indices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All completions of one prompt: its position, the request it came from, its rows, their oldest version."""

    index: int
    number: int
    rows: tuple[Scored, ...]
    oldest: int


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
    """See the module. ``indices(n)`` is the n-th batch of the prompts' order. Not thread-safe."""

    def __init__(self, terms: BufferLimits, indices: Callable[[int], list[int]]) -> None:
        self.terms = terms
        self.pending: dict[int, Request] = {}
        self.ready: deque[Group] = deque()
        self.returned: deque[int] = deque()
        self.taken = 0
        self.dropped = 0
        self._indices = indices
        self._next_number = 0
        self._requested_in_order = 0

    def due(self, version: int) -> list[Request]:
        """Requests that may be sent to the sampler with the learner at ``version``; they become pending."""
        requests = []
        while self._may_request(version):
            request = Request(number=self._next_number, indices=tuple(self._next_prompts()))
            self._next_number += 1
            self.pending[request.number] = request
            requests.append(request)
        return requests

    def _may_request(self, version: int) -> bool:
        terms = self.terms
        if not terms.drop:
            wanted = self._next_number < terms.iterations
            return wanted and version >= self._next_number * terms.updates - terms.max_steps
        missing = (terms.iterations - self.taken) * terms.prompts_per_batch - len(self.ready)
        return len(self.pending) < min(BEGUN_AHEAD, -(-missing // terms.prompts_per_batch))

    def _next_prompts(self) -> list[int]:
        """Returned prompts first, then the order. A prompt is at most once in a request."""
        size = self.terms.prompts_per_batch
        chosen: list[int] = []
        later: list[int] = []
        while self.returned and len(chosen) < size:
            index = self.returned.popleft()
            (later if index in chosen else chosen).append(index)
        self.returned.extendleft(reversed(later))
        while len(chosen) < size:
            chosen.append(self._next_in_order())
        return chosen

    def _next_in_order(self) -> int:
        batch, within = divmod(self._requested_in_order, self.terms.prompts_per_batch)
        self._requested_in_order += 1
        return self._indices(batch)[within]

    def arrive(self, number: int, rows: Sequence[Scored]) -> None:
        """Store the rows of a request: its prompts' groups, in order, equally large."""
        request = self.pending.pop(number)
        size = len(rows) // len(request.indices)
        for position, index in enumerate(request.indices):
            self._add(index, number, rows[position * size : (position + 1) * size])
        while self.terms.drop and len(self.ready) > self.terms.ready_groups:
            self._drop(self.ready.popleft())

    def take(self, version: int) -> list[Group] | None:
        """One batch of groups for the learner at ``version``, oldest first, or None while there are not enough."""
        fresh = [group for group in self.ready if version - group.oldest <= self.terms.max_steps]
        if len(fresh) < len(self.ready):
            if not self.terms.drop:
                raise AssertionError("a group older than lag.max_steps, though the sampler waited")
            for group in self.ready:
                if version - group.oldest > self.terms.max_steps:
                    self._drop(group)
            self.ready = deque(fresh)
        if len(self.ready) < self.terms.prompts_per_batch:
            return None
        self.taken += 1
        return [self.ready.popleft() for _ in range(self.terms.prompts_per_batch)]

    def _drop(self, group: Group) -> None:
        self.returned.append(group.index)
        self.dropped += 1

    def snapshot(self, pack: Callable[[Sequence[Scored]], list[dict[str, Any]]]) -> dict[str, Any]:
        """Plain data. Pending requests are sent again after a restore, with weights that may be newer."""
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
        """The inverse of :meth:`snapshot`; pending requests must be sent again."""
        self._next_number, self._requested_in_order = int(state["next_number"]), int(state["asked_in_order"])
        self.taken, self.dropped = int(state["taken"]), int(state["dropped"])
        self.returned = deque(state["returned"])
        self.pending = {number: Request(number=number, indices=tuple(indices)) for number, indices in state["pending"]}
        self.ready = deque()
        for index, number, packed in state["ready"]:
            self._add(index, number, unpack(packed))

    def _add(self, index: int, number: int, rows: Sequence[Scored]) -> None:
        oldest = min(min(row.rollout.versions, default=0) for row in rows)
        self.ready.append(Group(index=index, number=number, rows=tuple(rows), oldest=oldest))
