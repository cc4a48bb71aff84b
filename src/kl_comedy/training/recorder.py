"""Writing the rollouts of a run as it uses them.

A batch is written whole before its first update, so that whatever checkpoint a run goes on from, the batches used up
to there are on disk; what was drawn after it is removed on resume and drawn again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from kl_comedy.config import Config
from kl_comedy.rollouts.recording import RecordingWriter
from kl_comedy.training.world import World


class RecordCallback(Callback):
    """Writes every batch to ``rollouts/`` of the run folder, as ``train.record_rollouts`` asks."""

    def __init__(self, config: Config, folder: Path, world: World) -> None:
        self._world = world
        self._writer = RecordingWriter(
            folder / "rollouts", config.train.record_rollouts, temperature=config.rollout.temperature
        )
        self._per_batch = config.algorithm.updates_per_batch * config.algorithm.epochs_per_batch

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._first_does(lambda: self._writer.forget_from(-(-pl_module.version // self._per_batch)))

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch.first:
            self._first_does(lambda: self._writer.write(batch.iteration, batch.batch))

    def _first_does(self, action: Callable[[], None]) -> None:
        """Every rank holds all rows; one writes them, and all end where it cannot."""
        self._world.together(lambda: action() if self._world.first else None)


def record_callbacks(config: Config, folder: Path, world: World) -> list[Callback]:
    """The callback that records, where the config asks for one."""
    return [] if config.train.record_rollouts == "none" else [RecordCallback(config, folder, world)]
