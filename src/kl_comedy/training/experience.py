"""The experience stream: what the trainer iterates over, one item per optimizer update.

    source -> batch of whole groups -> epochs x parts -> one :class:`UpdateBatch` per update

Batches are drawn in this process (:class:`DrawnHere`: on-policy, or replayed lag), by another process while the learner
learns (:mod:`kl_comedy.training.asynchronous`), or read from a recording (:class:`Recorded`). The *age* of a batch is
the number of updates between the weights that drew it and the weights at its first use; later updates from the same
batch see it that much older.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kl_comedy.records import Prompt, Reward, Rollout, Scored
from kl_comedy.rollouts import ReplayRollouts


def derive_seed(seed: int, purpose: str, index: int) -> int:
    """A 62-bit seed for one draw, named by what is drawn, so that a resumed run draws the same numbers.

    >>> derive_seed(0, "rollout", 1) == derive_seed(0, "rollout", 1) != derive_seed(0, "rollout", 2)
    True
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


def pack_scored(rows: Sequence[Scored], positions: Mapping[str, int]) -> list[dict[str, Any]]:
    """Rows as primitives and tensors (for a checkpoint); a prompt is its position among the training prompts."""
    return [
        {
            "prompt": positions[row.rollout.prompt.problem.id],
            "group_id": row.rollout.group_id,
            "completion_ids": torch.tensor(row.rollout.completion_ids, dtype=torch.long),
            "logps": torch.tensor(row.rollout.logps, dtype=torch.float64),
            "versions": torch.tensor(row.rollout.versions, dtype=torch.long),
            "stop_reason": row.rollout.stop_reason,
            "text": row.rollout.text,
            "value": row.reward.value,
            "status": row.reward.status,
            "parts": dict(row.reward.parts),
        }
        for row in rows
    ]


def unpack_scored(rows: Sequence[Mapping[str, Any]], prompts: Sequence[Prompt]) -> list[Scored]:
    """The inverse of :func:`pack_scored`."""
    return [
        Scored(
            rollout=Rollout(
                prompt=prompts[row["prompt"]],
                group_id=row["group_id"],
                completion_ids=tuple(row["completion_ids"].tolist()),
                logps=tuple(row["logps"].tolist()),
                versions=tuple(row["versions"].tolist()),
                stop_reason=row["stop_reason"],
                text=row["text"],
            ),
            reward=Reward(value=row["value"], status=row["status"], parts=row["parts"]),
        )
        for row in rows
    ]


class Scorer(Protocol):
    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]: ...


class Generate(Protocol):
    def __call__(self, prompts: Sequence[Prompt], *, seed: int) -> list[Rollout]: ...


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Whole groups. ``wait_s``: seconds the learner waited; ``generate_s``, ``score_s``: seconds that sampling took.

    ``notes`` are metrics of the source.
    """

    rows: Sequence[Scored]
    generate_s: float = 0.0
    score_s: float = 0.0
    wait_s: float = 0.0
    notes: Mapping[str, float] = field(default_factory=dict)


class Source(Protocol):
    """Where batches come from."""

    def take(self, iteration: int) -> Batch:
        """The batch of this iteration. Asked once each, in order."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Batches drawn and not yet taken, as primitives and tensors."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`snapshot`."""
        ...


@dataclass(frozen=True, kw_only=True)
class UpdateBatch:
    """The rows of one optimizer update: whole groups. ``first``: the first update from its batch.

    ``batch`` is the whole batch that the rows are part of, from position ``offset`` on. Seconds and ``notes`` are those
    of :class:`Batch` at its first use, 0 and empty after.
    """

    rows: tuple[Scored, ...]
    batch: tuple[Scored, ...]
    offset: int
    iteration: int
    first: bool
    generate_s: float
    score_s: float
    wait_s: float
    notes: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class StreamShape:
    """How batches become updates. ``updates`` is the length of the run."""

    updates: int
    updates_per_batch: int
    epochs_per_batch: int
    seed: int

    @property
    def per_iteration(self) -> int:
        return self.updates_per_batch * self.epochs_per_batch

    @property
    def iterations(self) -> int:
        return -(-self.updates // self.per_iteration)


class ExperienceStream:
    """Iterable of :class:`UpdateBatch` with a known length and a resumable position."""

    def __init__(self, shape: StreamShape, *, prompts: Sequence[Prompt], source: Source) -> None:
        self.shape = shape
        self.source = source
        self._prompts = prompts
        self._positions = {prompt.problem.id: n for n, prompt in enumerate(prompts)}
        self._handed_out = 0
        self._current: Sequence[Scored] = []

    def __len__(self) -> int:
        return self.shape.updates

    def __iter__(self) -> Iterator[UpdateBatch]:
        return self

    def __next__(self) -> UpdateBatch:
        if self._handed_out >= self.shape.updates:
            raise StopIteration
        iteration, within = divmod(self._handed_out, self.shape.per_iteration)
        batch = self.source.take(iteration) if within == 0 else Batch(rows=self._current)
        self._current = batch.rows
        part = within % self.shape.updates_per_batch
        size = len(self._current) // self.shape.updates_per_batch
        self._handed_out += 1
        return UpdateBatch(
            rows=tuple(self._current[part * size : (part + 1) * size]),
            batch=tuple(self._current),
            offset=part * size,
            iteration=iteration,
            first=within == 0,
            generate_s=batch.generate_s,
            score_s=batch.score_s,
            wait_s=batch.wait_s,
            notes=batch.notes,
        )

    def snapshot(self) -> dict[str, Any]:
        """Position, the current batch while it is still needed, and the source's unused batches, as plain data."""
        middle = self._handed_out % self.shape.per_iteration != 0
        return {
            "handed_out": self._handed_out,
            "current": pack_scored(self._current, self._positions) if middle else [],
            "source": self.source.snapshot(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`snapshot`."""
        self._handed_out = int(state["handed_out"])
        self._current = unpack_scored(state["current"], self._prompts)
        self.source.restore(state["source"])


class DrawnHere:
    """Batches drawn in this process when they are needed. ``lag`` 0 is on-policy.

    ``lag`` k batches is replay: the batch of iteration n is drawn at iteration ``max(0, n - k)``, so that with u
    updates a batch it is exactly ``k u`` updates old at its first use once n >= k (before, no older policy exists).
    Every draw is seeded by its batch number, so the state is the batches drawn and not yet taken.
    """

    def __init__(
        self,
        shape: StreamShape,
        *,
        lag: int,
        prompts: Sequence[Prompt],
        indices: Callable[[int], list[int]],
        generate: Generate,
        scorer: Scorer,
    ) -> None:
        self._shape, self._lag = shape, lag
        self._prompts, self._indices = prompts, indices
        self._generate, self._scorer = generate, scorer
        self._positions = {prompt.problem.id: n for n, prompt in enumerate(prompts)}
        self._drawn = 0
        self._queue: deque[list[Scored]] = deque()

    def take(self, iteration: int) -> Batch:
        """Draw everything up to ``iteration + lag`` that is not drawn yet, and hand out the oldest."""
        generate_s = score_s = 0.0
        while self._drawn <= min(iteration + self._lag, self._shape.iterations - 1):
            prompts = [self._prompts[n] for n in self._indices(self._drawn)]
            start = time.perf_counter()
            rollouts = self._generate(prompts, seed=derive_seed(self._shape.seed, "rollout", self._drawn))
            middle = time.perf_counter()
            self._queue.append(self._scorer.score(rollouts))
            generate_s += middle - start
            score_s += time.perf_counter() - middle
            self._drawn += 1
        return Batch(rows=self._queue.popleft(), generate_s=generate_s, score_s=score_s, wait_s=generate_s + score_s)

    def snapshot(self) -> dict[str, Any]:
        """See :class:`Source`."""
        return {"drawn": self._drawn, "queue": [pack_scored(rows, self._positions) for rows in self._queue]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See :class:`Source`."""
        self._drawn = int(state["drawn"])
        self._queue = deque(unpack_scored(rows, self._prompts) for rows in state["queue"])


class Recorded:
    """Batches read from a recording (``rollout.backend: replay``); see :class:`Source`."""

    def __init__(self, backend: ReplayRollouts, scorer: Scorer) -> None:
        self._backend, self._scorer = backend, scorer

    def take(self, iteration: int) -> Batch:
        """Read a batch; judge it anew where the backend's options say so."""
        start = time.perf_counter()
        rows = self._backend.batch(iteration)
        middle = time.perf_counter()
        if self._backend.judges_again:
            rows = self._scorer.score([row.rollout for row in rows])
        end = time.perf_counter()
        return Batch(rows=rows, generate_s=middle - start, score_s=end - middle, wait_s=end - start)

    def snapshot(self) -> dict[str, Any]:
        """Nothing: the iteration says which batch is next."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""
