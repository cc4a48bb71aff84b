"""Batches read from a recording instead of drawn: the source of a run with ``rollout.backend: replay``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kl_comedy.rollouts import ReplayRollouts
from kl_comedy.training.stream import Batch, Scorer


class Recorded:
    """See :class:`kl_comedy.training.stream.Source`: the batch of an iteration is the recording's."""

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
        """The iteration says it all."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing is held."""
