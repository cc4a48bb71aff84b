"""The stream's source while another process samples: gives out requests, takes in rows, hands on whole batches."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kl_comedy.config import Config
from kl_comedy.records import Prompt, Scored
from kl_comedy.training.asynchronous.ledger import Group, Ledger, Terms
from kl_comedy.training.asynchronous.sampler import SamplerProcess
from kl_comedy.training.seeds import derive_seed
from kl_comedy.training.state import pack_scored, unpack_scored
from kl_comedy.training.stream import Batch, StreamShape


class Asynchronous:
    """See :class:`kl_comedy.training.stream.Source`. The learner's version at iteration n is n updates a batch."""

    def __init__(
        self,
        config: Config,
        shape: StreamShape,
        *,
        prompts: Sequence[Prompt],
        indices: Callable[[int], list[int]],
        sampler: SamplerProcess,
    ) -> None:
        self._shape, self._prompts, self._sampler = shape, prompts, sampler
        self._positions = {prompt.problem.id: n for n, prompt in enumerate(prompts)}
        self.ledger = Ledger(
            Terms(
                prompts_per_batch=config.rollout.prompts_per_batch,
                updates=shape.per_iteration,
                iterations=shape.iterations,
                max_steps=config.lag.max_steps,
                drop=config.lag.policy == "drop",
            ),
            indices,
        )
        self._given: set[int] = set()
        self._spent: dict[str, float] = defaultdict(float)
        self._dropped_before = 0
        self._begun = False
        sampler.on_drawn = self._drawn
        sampler.on_version = self._published

    def take(self, iteration: int) -> Batch:
        """One batch no older than allowed; waits for it, and hears signals meanwhile."""
        version = iteration * self._shape.per_iteration
        start = time.perf_counter()
        depth = None
        found: list[Group] = []

        def there() -> bool:
            nonlocal depth
            self._begun = True
            self._give(version)
            if depth is None:
                depth = len(self.ledger.ready) / self.ledger.terms.prompts_per_batch
            found.extend(self.ledger.take(version) or ())
            self._give(version)
            return bool(found)

        self._sampler.wait_for(there)
        rows = [
            row if row.rollout.group_id == place else replace(row, rollout=replace(row.rollout, group_id=place))
            for place, group in enumerate(found)
            for row in group.rows
        ]
        with self._sampler.changed:
            return self._batch(rows, wait_s=time.perf_counter() - start, depth=depth or 0.0)

    def _batch(self, rows: Sequence[Scored], *, wait_s: float, depth: float) -> Batch:
        spent, self._spent = self._spent, defaultdict(float)
        dropped, self._dropped_before = self.ledger.dropped - self._dropped_before, self.ledger.dropped
        notes = {
            "stream/queue_depth": depth,
            "stream/dropped_groups": float(dropped),
            "stream/sampler_restarts": float(self._sampler.restarts),
        }
        busy_s = spent["generate_s"] + spent["score_s"]
        if busy_s > 0:
            notes["time/sampler_idle_share"] = spent["idle_s"] / (spent["idle_s"] + busy_s)
            notes["time/sampler_cpu"] = spent["cpu_s"]
        return Batch(
            rows=rows, generate_s=spent["generate_s"], score_s=spent["score_s"], wait_s=wait_s, notes=notes
        )  # fmt: skip

    def _give(self, version: int) -> None:
        """Give out what is due, and after a restore what was pending. Called with the sampler's lock held."""
        if not self._begun:
            return
        self.ledger.due(version)
        for number, request in self.ledger.pending.items():
            if number not in self._given:
                self._given.add(number)
                prompts = [self._prompts[n] for n in request.indices]
                self._sampler.ask(number, ("draw", number, prompts, derive_seed(self._shape.seed, "rollout", number)))

    def _published(self, version: int) -> None:
        self._begun = True
        self._give(version)

    def _drawn(self, number: int, rows: Sequence[Scored], stats: Mapping[str, float]) -> None:
        self._given.discard(number)
        self.ledger.arrive(number, rows)
        for name, value in stats.items():
            self._spent[name] += value
        self._give(self._sampler.version)

    def snapshot(self) -> dict[str, Any]:
        """See :class:`Source`. What is being drawn is asked again after a resume."""
        with self._sampler.changed:
            return self.ledger.snapshot(lambda rows: pack_scored(rows, self._positions))

    def restore(self, state: Mapping[str, Any]) -> None:
        """See :class:`Source`."""
        with self._sampler.changed:
            self.ledger.restore(state, lambda rows: unpack_scored(rows, self._prompts))
            self._dropped_before = self.ledger.dropped
