"""The experience stream: what the trainer iterates over, one item per optimizer update.

    source -> batch of whole groups -> epochs x parts -> one :class:`UpdateBatch` per update

Batches are drawn when they are needed (:class:`DrawnHere`: on-policy, or replayed lag), while the learner learns
(:class:`~kl_comedy.training.asynchronous.Producer`), or read from a recording (:class:`Recorded`).
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kl_comedy.config import Config
from kl_comedy.config.combinations import updates_from_a_batch
from kl_comedy.data import PromptOrder
from kl_comedy.records import Prompt, Reward, Rollout, Scored
from kl_comedy.rewards import Scorer
from kl_comedy.rollouts import ReplayRollouts, sampling_from
from kl_comedy.training.distributed import Ranks


def derive_seed(seed: int, purpose: str, index: int) -> int:
    """A 62-bit seed for one draw, named by what is drawn, so that a resumed run draws the same numbers.

    >>> derive_seed(0, "rollout", 1) == derive_seed(0, "rollout", 1) != derive_seed(0, "rollout", 2)
    True
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


Generate = Callable[..., list[Rollout]]
"""``generate`` of a :class:`~kl_comedy.rollouts.RolloutBackend`."""


class TrainingPrompts:
    """The prompts of a run, the order that they are drawn in, and rows as plain data that names them by position."""

    def __init__(self, config: Config, prompts: Sequence[Prompt], ranks: Ranks) -> None:
        self.indices = PromptOrder(len(prompts), config.rollout.prompts_per_batch, config.seed).indices
        self.positions = {prompt.problem.id: n for n, prompt in enumerate(prompts)}
        self._config, self._prompts, self._ranks = config, prompts, ranks

    def draw(self, generate: Generate, number: int, indices: Sequence[int]) -> list[Rollout]:
        """Completions of the prompts at ``indices``; ``number`` names their random numbers."""
        rollout, seed = self._config.rollout, derive_seed(self._config.seed, "rollout", number)
        prompts = [self._prompts[n] for n in indices]
        return generate(prompts, group_size=rollout.group_size, sampling=sampling_from(rollout), seed=seed)

    def pack(self, rows: Sequence[Scored]) -> list[dict[str, Any]]:
        """Rows as primitives and tensors, for checkpoints and other ranks."""
        return [
            {
                "prompt": self.positions[row.rollout.prompt.problem.id],
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

    def unpack(self, states: Sequence[Mapping[str, Any]]) -> list[Scored]:
        """The inverse of :meth:`pack`."""
        rows = []
        for state in states:
            tokens = {name: tuple(state[name].tolist()) for name in ("completion_ids", "logps", "versions")}
            same = {name: state[name] for name in ("group_id", "stop_reason", "text")}
            reward = Reward(value=state["value"], status=state["status"], parts=state["parts"])
            rows.append(Scored(rollout=Rollout(prompt=self._prompts[state["prompt"]], **tokens, **same), reward=reward))
        return rows

    def broadcast(self, rows: Sequence[Scored]) -> Sequence[Scored]:
        """The rows of rank 0 on every rank."""
        return rows if self._ranks.size == 1 else self.unpack(self._ranks.broadcast(self.pack(rows)))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Whole groups. ``metrics``: those of the source; ``time/generate`` and ``time/score`` (seconds that sampling took)
    and ``time/wait`` (seconds that the learner waited) among them."""

    rows: Sequence[Scored]
    metrics: Mapping[str, float]


class Source(Protocol):
    """Where batches come from."""

    def take(self, iteration: int) -> Batch:
        """The batch of this iteration. Asked once each, in order."""

    def snapshot(self) -> dict[str, Any]:
        """Batches drawn and not yet taken, as primitives and tensors."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`snapshot`."""


@dataclass(frozen=True, kw_only=True)
class UpdateBatch:
    """The rows of one optimizer update: whole groups, from position ``offset`` of the ``batch`` of ``iteration`` on.

    ``first``: the first update from its batch, which has the batch's ``metrics``; later ones have none.
    """

    rows: tuple[Scored, ...]
    batch: tuple[Scored, ...]
    offset: int
    iteration: int
    first: bool
    metrics: Mapping[str, float]


class ExperienceStream:
    """Iterable of :class:`UpdateBatch` with a known length and a resumable position."""

    def __init__(self, config: Config, prompts: TrainingPrompts, source: Source) -> None:
        self.source = source
        self._updates, self._parts = config.train.steps, config.algorithm.updates_per_batch
        self._per_batch = updates_from_a_batch(config)
        self._prompts = prompts
        self._handed_out = 0
        self._current: tuple[Scored, ...] = ()

    def __len__(self) -> int:
        return self._updates

    def __iter__(self) -> Iterator[UpdateBatch]:
        return self

    def __next__(self) -> UpdateBatch:
        if self._handed_out >= self._updates:
            raise StopIteration
        iteration, within = divmod(self._handed_out, self._per_batch)
        metrics: Mapping[str, float] = {}
        if within == 0:
            batch = self.source.take(iteration)
            self._current, metrics = tuple(batch.rows), batch.metrics
        size = len(self._current) // self._parts
        offset = within % self._parts * size
        self._handed_out += 1
        return UpdateBatch(
            rows=self._current[offset : offset + size],
            batch=self._current,
            offset=offset,
            iteration=iteration,
            first=within == 0,
            metrics=metrics,
        )

    def snapshot(self) -> dict[str, Any]:
        """Position, the current batch while it is still needed, and the source's unused batches, as plain data."""
        middle = self._handed_out % self._per_batch != 0
        current = self._prompts.pack(self._current) if middle else []
        return {"handed_out": self._handed_out, "current": current, "source": self.source.snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`snapshot`."""
        self._handed_out = int(state["handed_out"])
        self._current = tuple(self._prompts.unpack(state["current"]))
        self.source.restore(state["source"])


class DrawnHere:
    """Batches drawn by all ranks when they are needed. ``lag.steps`` 0 is on-policy.

    With a lag of k batches that of iteration n is drawn at iteration ``max(0, n - k)``, so that with u updates a batch
    it is exactly ``k u`` updates old at its first use once n >= k (before, no older policy exists).
    """

    def __init__(self, config: Config, prompts: TrainingPrompts, generate: Generate, scorer: Scorer) -> None:
        per_batch = updates_from_a_batch(config)
        self._lag, self._iterations = config.lag.steps // per_batch, -(-config.train.steps // per_batch)
        self._prompts, self._generate, self._scorer = prompts, generate, scorer
        self._drawn = 0
        self._queue: deque[list[Scored]] = deque()

    def take(self, iteration: int) -> Batch:
        """Draw everything up to ``iteration + lag`` that is not drawn yet, and hand out the oldest."""
        generate_s = score_s = 0.0
        while self._drawn <= min(iteration + self._lag, self._iterations - 1):
            start = time.perf_counter()
            rollouts = self._prompts.draw(self._generate, self._drawn, self._prompts.indices(self._drawn))
            middle = time.perf_counter()
            self._queue.append(self._scorer.score(rollouts))
            generate_s += middle - start
            score_s += time.perf_counter() - middle
            self._drawn += 1
        times = {"time/generate": generate_s, "time/score": score_s, "time/wait": generate_s + score_s}
        return Batch(rows=self._queue.popleft(), metrics=times)

    def snapshot(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "queue": [self._prompts.pack(rows) for rows in self._queue]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._drawn = int(state["drawn"])
        self._queue = deque(self._prompts.unpack(rows) for rows in state["queue"])


class Recorded:
    """Batches that rank 0 reads from a recording (``rollout.backend: replay``). The iteration is its whole state."""

    def __init__(self, recording: ReplayRollouts, prompts: TrainingPrompts, scorer: Scorer, ranks: Ranks) -> None:
        self._recording, self._prompts, self._scorer, self._ranks = recording, prompts, scorer, ranks

    def take(self, iteration: int) -> Batch:
        """Read a batch; judge it anew where the backend's options say so."""
        start = time.perf_counter()
        rows = self._prompts.broadcast(self._ranks.on_rank_zero(lambda: self._recording.batch(iteration)) or ())
        middle = time.perf_counter()
        if self._recording.judges_again:
            rows = self._scorer.score([row.rollout for row in rows])
        end = time.perf_counter()
        times = {"time/generate": middle - start, "time/score": end - middle, "time/wait": end - start}
        return Batch(rows=rows, metrics=times)

    def snapshot(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...
