"""The experience stream: what the trainer iterates over, one item per optimizer update.

``lag = 0`` is on-policy: a batch is drawn with the weights it is used on. ``lag = k`` batches is replay:
the batch used at iteration n was drawn at iteration ``max(0, n - k)``, so it is exactly ``k`` iterations
old once n >= k (during the first k there is no older policy). Every draw is seeded by its batch number,
so the stream's state is its position and the batches not yet used.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from kl_comedy.records import Prompt, Rollout, Scored
from kl_comedy.training.seeds import derive_seed
from kl_comedy.training.state import pack_scored, unpack_scored


class Scorer(Protocol):
    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]: ...


class Generate(Protocol):
    def __call__(self, prompts: Sequence[Prompt], *, seed: int) -> list[Rollout]: ...


@dataclass(frozen=True, kw_only=True)
class UpdateBatch:
    """The rows of one optimizer update: whole groups. ``first`` marks the first use of fresh samples.

    ``batch`` is the whole batch that the rows are part of, from position ``offset`` on.
    """

    rows: tuple[Scored, ...]
    batch: tuple[Scored, ...]
    offset: int
    iteration: int
    first: bool
    generate_s: float
    score_s: float


@dataclass(frozen=True, kw_only=True)
class StreamShape:
    """How batches become updates. ``updates`` is the length of the run."""

    updates: int
    updates_per_batch: int
    epochs_per_batch: int
    group_size: int
    lag_batches: int
    seed: int

    @property
    def per_iteration(self) -> int:
        return self.updates_per_batch * self.epochs_per_batch

    @property
    def iterations(self) -> int:
        return -(-self.updates // self.per_iteration)


class ExperienceStream:
    """Iterable of :class:`UpdateBatch` with a known length and a resumable position."""

    def __init__(
        self,
        shape: StreamShape,
        *,
        prompts: Sequence[Prompt],
        indices: Callable[[int], list[int]],
        generate: Generate,
        scorer: Scorer,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.shape = shape
        self._prompts, self._indices = prompts, indices
        self._generate, self._scorer, self._context = generate, scorer, context
        self._positions = {prompt.problem.id: n for n, prompt in enumerate(prompts)}
        self._handed_out = 0
        self._drawn = 0
        self._queue: deque[list[Scored]] = deque()
        self._current: list[Scored] = []
        self._times = (0.0, 0.0)

    def __len__(self) -> int:
        return self.shape.updates

    def __iter__(self) -> Iterator[UpdateBatch]:
        return self

    def __next__(self) -> UpdateBatch:
        if self._handed_out >= self.shape.updates:
            raise StopIteration
        iteration, within = divmod(self._handed_out, self.shape.per_iteration)
        self._times = (0.0, 0.0)
        if within == 0:
            self._fill(iteration)
            self._current = self._queue.popleft()
        part = within % self.shape.updates_per_batch
        size = len(self._current) // self.shape.updates_per_batch
        self._handed_out += 1
        return UpdateBatch(
            rows=tuple(self._current[part * size : (part + 1) * size]),
            batch=tuple(self._current),
            offset=part * size,
            iteration=iteration,
            first=within == 0,
            generate_s=self._times[0],
            score_s=self._times[1],
        )

    def _fill(self, iteration: int) -> None:
        """Draw what the lag asks for: everything up to ``iteration + lag`` not drawn yet."""
        while self._drawn <= min(iteration + self.shape.lag_batches, self.shape.iterations - 1):
            prompts = [self._prompts[n] for n in self._indices(self._drawn)]
            start = time.perf_counter()
            with self._context():
                rollouts = self._generate(prompts, seed=derive_seed(self.shape.seed, "rollout", self._drawn))
            middle = time.perf_counter()
            self._queue.append(self._scorer.score(rollouts))
            end = time.perf_counter()
            self._times = (self._times[0] + middle - start, self._times[1] + end - middle)
            self._drawn += 1

    def snapshot(self) -> dict[str, Any]:
        """Position and unused batches, as plain data. The current batch only while it is still needed."""
        middle = self._handed_out % self.shape.per_iteration != 0
        return {
            "handed_out": self._handed_out,
            "drawn": self._drawn,
            "current": pack_scored(self._current, self._positions) if middle else [],
            "queue": [pack_scored(rows, self._positions) for rows in self._queue],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`snapshot` was taken."""
        self._handed_out, self._drawn = int(state["handed_out"]), int(state["drawn"])
        self._current = unpack_scored(state["current"], self._prompts)
        self._queue = deque(unpack_scored(rows, self._prompts) for rows in state["queue"])
