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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kl_comedy.config import Config
from kl_comedy.config.combinations import updates_from_a_batch
from kl_comedy.data import PromptOrder
from kl_comedy.phases import phase
from kl_comedy.records import KeptSets, Prompt, Reward, Rollout, Scored, groups_without_signal
from kl_comedy.rewards import Scorer
from kl_comedy.rollouts import ReplayRollouts, sampling_from
from kl_comedy.training.distributed import Ranks

if TYPE_CHECKING:
    from kl_comedy.training.build import Lag


def derive_seed(seed: int, purpose: str, index: int) -> int:
    """A 62-bit seed for one draw, named by what is drawn, so that a resumed run draws the same numbers.

    >>> derive_seed(0, "rollout", 1) == derive_seed(0, "rollout", 1) != derive_seed(0, "rollout", 2)
    True
    """
    # Every stored run's completions depend on these bytes.
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


Generate = Callable[..., list[Rollout]]
"""``generate`` of a :class:`~kl_comedy.rollouts.RolloutBackend`."""


class TrainingPrompts:
    """The prompts of a run, the order that they are drawn in, and rows as plain data that names them by position."""

    def __init__(self, config: Config, prompts: Sequence[Prompt], ranks: Ranks, *, top_logps: int = 0) -> None:
        """``top_logps``: as in :class:`~kl_comedy.rollouts.Sampling`."""
        self._top_logps = top_logps
        self.order = PromptOrder(len(prompts), config.rollout.prompts_per_batch, config.seed)
        # Rows are stored by position: a prompt's text is in the run's data already.
        self.positions = {prompt.problem.id: position for position, prompt in enumerate(prompts)}
        self._config = config
        self._prompts = prompts
        self._ranks = ranks
        self.refills = config.algorithm.groups_without_signal == "refill"

    def draw(self, generate: Generate, number: int, indices: Sequence[int], *, again: int = 0) -> list[Rollout]:
        """Completions of the prompts at ``indices``; ``number`` and ``again`` name their random numbers."""
        rollout = self._config.rollout
        purpose = "rollout"
        if again:
            purpose = f"refill/{again}"
        return generate(
            [self._prompts[index] for index in indices],
            group_size=rollout.group_size,
            sampling=sampling_from(rollout, top_logps=self._top_logps),
            seed=derive_seed(self._config.seed, purpose, number),
        )

    def draw_batch(
        self,
        indices: Sequence[int],
        draw: Callable[[Sequence[int], int], Sequence[Scored]],
        next_prompts: Callable[[int], list[int]],
    ) -> DrawnBatch:
        """A group for each of the prompts at ``indices``; with ``refill``, others in the place of those without signal.

        ``draw(indices, again)`` draws and scores groups: at first with ``again`` 0, then with 1, 2, ... those of
        ``next_prompts(count)``. Each place of the batch is drawn until its group has a signal, or the draws are used
        up.
        """
        indices = list(indices)
        rows = list(draw(indices, 0))
        size = len(rows) // len(indices)
        replaced = 0
        draws = self._config.algorithm.refill_draws if self.refills else 1
        for again in range(1, draws):
            places = sorted(groups_without_signal(rows))
            if not places:
                break
            others = next_prompts(len(places))
            drawn = draw(others, again)
            for number, (place, index) in enumerate(zip(places, others, strict=True)):
                indices[place] = index
                for row in range(size):
                    scored = drawn[number * size + row]
                    rows[place * size + row] = replace(scored, rollout=replace(scored.rollout, group_id=place))
            replaced += len(places)
        return DrawnBatch(rows=rows, indices=indices, replaced=replaced)

    def pack(self, rows: Sequence[Scored]) -> list[dict[str, Any]]:
        """Rows as primitives and tensors, for checkpoints and other ranks. Stored checkpoints have these keys."""
        return [
            {
                "prompt": self.positions[row.rollout.prompt.problem.id],
                "group_id": row.rollout.group_id,
                "completion_ids": torch.tensor(row.rollout.completion_ids, dtype=torch.long),
                # float64 holds Python's floats exactly: a resumed run computes with the same bits.
                "logps": torch.tensor(row.rollout.logps, dtype=torch.float64),
                "versions": torch.tensor(row.rollout.versions, dtype=torch.long),
                "stop_reason": row.rollout.stop_reason,
                "text": row.rollout.text,
                "trained": torch.tensor(row.rollout.trained, dtype=torch.bool),
                "restarts": [
                    (start, torch.tensor(context, dtype=torch.long)) for start, context in row.rollout.restarts
                ],
                "turn_ends": row.rollout.turn_ends,
                "turn_parts": dict(row.rollout.turn_parts),
                "sampler_top": row.rollout.sampler_top,
                # A plain tuple: a checkpoint is read without classes of ours.
                "kept": None if row.rollout.kept is None else tuple(row.rollout.kept),
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
            rollout = Rollout(
                prompt=self._prompts[state["prompt"]],
                group_id=state["group_id"],
                completion_ids=tuple(state["completion_ids"].tolist()),
                logps=tuple(state["logps"].tolist()),
                versions=tuple(state["versions"].tolist()),
                stop_reason=state["stop_reason"],
                text=state["text"],
                trained=tuple(state["trained"].tolist()),
                restarts=tuple((start, tuple(context.tolist())) for start, context in state["restarts"]),
                turn_ends=tuple(state["turn_ends"]),
                turn_parts={name: tuple(values) for name, values in state["turn_parts"].items()},
                sampler_top=state["sampler_top"],
                kept=None if state["kept"] is None else KeptSets(*state["kept"]),
            )
            reward = Reward(value=state["value"], status=state["status"], parts=state["parts"])
            rows.append(Scored(rollout=rollout, reward=reward))
        return rows

    def broadcast(self, rows: Sequence[Scored]) -> Sequence[Scored]:
        """The rows of rank 0 on every rank."""
        if self._ranks.size == 1:
            return rows
        # Packed, because the prompts are on every rank already.
        return self.unpack(self._ranks.broadcast(self.pack(rows)))


@dataclass(frozen=True, kw_only=True)
class DrawnBatch:
    """Groups of the prompts at ``indices``, in their order; ``replaced``: those without signal that were drawn before
    them."""

    rows: list[Scored]
    indices: list[int]
    replaced: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Whole groups, and the metrics of the source.

    Among the metrics are ``time/generate`` and ``time/score`` (seconds that sampling took) and ``time/wait`` (seconds
    that the learner waited).
    """

    rows: Sequence[Scored]
    metrics: Mapping[str, float]


class Source(Protocol):
    """Where batches come from."""

    def take(self, iteration: int) -> Batch:
        """The batch of this iteration. Called once for each iteration, in order, by all ranks."""

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
        self._updates = config.train.steps
        self._parts = config.algorithm.updates_per_batch
        self._per_batch = updates_from_a_batch(config)
        self._prompts = prompts
        self._handed_out = 0
        self._current: tuple[Scored, ...] = ()

    def __len__(self) -> int:
        return self._updates

    def __iter__(self) -> Iterator[UpdateBatch]:
        return self

    def __next__(self) -> UpdateBatch:
        # Lightning would otherwise ask for one batch more, which would be drawn for nothing.
        if self._handed_out >= self._updates:
            raise StopIteration
        # The updates of a batch are its parts in order, and the same again in each epoch.
        iteration, update_in_batch = divmod(self._handed_out, self._per_batch)
        is_first = update_in_batch == 0
        metrics: Mapping[str, float] = {}
        if is_first:
            batch = self.source.take(iteration)
            self._current = tuple(batch.rows)
            metrics = batch.metrics
        # Whole groups: prompts_per_batch is a multiple of the parts.
        size = len(self._current) // self._parts
        offset = update_in_batch % self._parts * size
        self._handed_out += 1
        return UpdateBatch(
            rows=self._current[offset : offset + size],
            batch=self._current,
            offset=offset,
            iteration=iteration,
            first=is_first,
            metrics=metrics,
        )

    def snapshot(self) -> dict[str, Any]:
        """Position, the current batch while it is still needed, and the source's unused batches, as plain data."""
        # Between two batches the last one is used up, and a checkpoint without it is much smaller.
        is_within_a_batch = self._handed_out % self._per_batch != 0
        current = []
        if is_within_a_batch:
            current = self._prompts.pack(self._current)
        return {"handed_out": self._handed_out, "current": current, "source": self.source.snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`snapshot`."""
        self._handed_out = int(state["handed_out"])
        self._current = tuple(self._prompts.unpack(state["current"]))
        self.source.restore(state["source"])


class DrawnHere:
    """Batches drawn by all ranks when they are needed. ``lag.steps`` 0 is on-policy.

    With a lag of k batches that of iteration n is drawn at iteration ``max(0, n - k)``, so that with u updates per
    batch it is exactly ``k u`` updates old at its first use once n >= k (before, no older policy exists).
    """

    def __init__(self, lag: Lag, updates: int, prompts: TrainingPrompts, generate: Generate, scorer: Scorer) -> None:
        """``updates``: those of the run."""
        self._lag = lag.steps // lag.updates_per_batch
        # Rounded up: the last batch may not be used up.
        self._iterations = -(-updates // lag.updates_per_batch)
        self._prompts = prompts
        self._generate = generate
        self._scorer = scorer
        self._drawn = 0
        self._asked = 0  # prompts of the order that were drawn from: with refill, more than batches have
        self._queue: deque[list[Scored]] = deque()

    def take(self, iteration: int) -> Batch:
        """Draw everything up to ``iteration + lag`` that is not drawn yet, and hand out the oldest."""
        seconds = {"time/generate": 0.0, "time/score": 0.0}
        replaced = 0

        def draw(indices: Sequence[int], again: int) -> Sequence[Scored]:
            start = time.perf_counter()
            phase("sampling")
            rollouts = self._prompts.draw(self._generate, self._drawn, indices, again=again)
            generated = time.perf_counter()
            phase("scoring")
            rows = self._scorer.score(rollouts)
            seconds["time/generate"] += generated - start
            seconds["time/score"] += time.perf_counter() - generated
            return rows

        # No batch is drawn that the run does not use: at its end the queue empties.
        last = min(iteration + self._lag, self._iterations - 1)
        while self._drawn <= last:
            # Scored when drawn, so that a checkpoint holds no completion without its reward.
            batch = self._prompts.draw_batch(self._next_prompts(self._prompts.order.batch), draw, self._next_prompts)
            self._queue.append(batch.rows)
            replaced += batch.replaced
            self._drawn += 1
        metrics = {**seconds, "time/wait": sum(seconds.values())}
        if self._prompts.refills:
            metrics["stream/replaced_groups"] = float(replaced)
        return Batch(rows=self._queue.popleft(), metrics=metrics)

    def _next_prompts(self, count: int) -> list[int]:
        first = self._asked
        self._asked += count
        return [self._prompts.order.item(position) for position in range(first, self._asked)]

    def snapshot(self) -> dict[str, Any]:
        queue = [self._prompts.pack(rows) for rows in self._queue]
        return {"drawn": self._drawn, "asked": self._asked, "queue": queue}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._drawn = int(state["drawn"])
        self._asked = int(state["asked"])
        self._queue = deque(self._prompts.unpack(rows) for rows in state["queue"])


class Recorded:
    """Batches that rank 0 reads from a recording (``rollout.backend: replay``). The iteration is its whole state."""

    def __init__(self, recording: ReplayRollouts, prompts: TrainingPrompts, scorer: Scorer, ranks: Ranks) -> None:
        self._recording = recording
        self._prompts = prompts
        self._scorer = scorer
        self._ranks = ranks

    def take(self, iteration: int) -> Batch:
        """Read a batch; judge it anew where the backend's options say so."""
        start = time.perf_counter()
        phase("reading a recorded batch")
        # One reader: the recording may be on a disk that the other nodes do not have.
        recorded = self._ranks.on_rank_zero(lambda: self._recording.batch(iteration))
        rows = self._prompts.broadcast(recorded or ())
        read = time.perf_counter()
        if self._recording.judges_again:
            phase("scoring")
            rows = self._scorer.score([row.rollout for row in rows])
        end = time.perf_counter()
        times = {"time/generate": read - start, "time/score": end - read, "time/wait": end - start}
        return Batch(rows=rows, metrics=times)

    def snapshot(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...
