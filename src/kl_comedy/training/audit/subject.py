"""The policy to audit and its completions: trained a little in this process, or taken from a run's folder.

A policy that has not left its reference has no KL gradient, so a config alone is trained for some updates first, as
the run would, with no tracking. Where the config trains on stale samples the completions are drawn by the policy as
it was that many updates before, which is what the run's own updates see.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from kl_comedy.config import Config, load_config
from kl_comedy.data import PromptOrder
from kl_comedy.errors import UserError
from kl_comedy.records import Scored
from kl_comedy.rollouts import sampling_from
from kl_comedy.training.build import Parts, build, is_off_policy
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.run import trainer_for
from kl_comedy.training.rundir import RunDir
from kl_comedy.training.seeds import derive_seed
from kl_comedy.training.sources import stream_for

log = logging.getLogger("kl_comedy")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A policy at some version of its weights, and rows drawn ``lag`` updates before."""

    module: PolicyModule
    trainer: lightning.Trainer
    rows: list[Scored]
    lag: int


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What CONFIG names: a config, and the newest checkpoint where it is the folder of a run."""

    config: Config
    checkpoint: Path | None
    step: int

    @classmethod
    def read(cls, path: Path, overrides: list[str]) -> Origin:
        """Read a YAML config or a run's folder. Raises :class:`UserError` for a folder without a checkpoint."""
        if not path.is_dir():
            return cls(config=load_config(path, overrides), checkpoint=None, step=0)
        run = RunDir(path=path)
        if not (path / "config.yaml").is_file():
            raise UserError(f"{path} is a folder without config.yaml; give a YAML config, or the folder of a run")
        if run.checkpoint is None or run.checkpoint_step is None:
            raise UserError(
                f"{path} holds no checkpoint (train.checkpoint_every, train.keep_checkpoints); audit its config.yaml "
                "instead, which trains some updates first"
            )
        if any(text.startswith(("kl=", "kl.", "model.")) for text in overrides):
            raise UserError(
                "audit: kl and model of a run are what its checkpoint was trained with; audit other terms with --terms"
            )
        config = load_config(path / "config.yaml", overrides)
        return cls(config=config, checkpoint=run.checkpoint, step=run.checkpoint_step)


def staleness(config: Config) -> int:
    """How many updates old the samples of the stalest update of a batch are; 0 on-policy."""
    if not is_off_policy(config):
        return 0
    return (
        config.lag.steps
        + config.lag.max_steps
        + config.algorithm.updates_per_batch * config.algorithm.epochs_per_batch
        - 1
    )


@contextlib.contextmanager
def subject(origin: Origin, *, updates: int, samples: int, tell: Callable[[str, int, int], None]) -> Iterator[Subject]:
    """Build the run, bring its policy to where it is audited, and draw ``samples`` completions (whole groups).

    From a config: ``updates`` updates from the start. From a checkpoint: at it, or, where samples are stale, as many
    updates further. ``tell(stage, done, total)`` is called as it goes.
    """
    config, lag = origin.config, staleness(origin.config)
    if origin.checkpoint is None and updates <= lag:
        raise UserError(
            f"--updates: got {updates}; this config trains on samples {lag} updates old, so at least {lag + 1}"
        )
    stop = origin.step + lag if origin.checkpoint is not None else updates
    steps = max(config.train.steps, stop)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))
    parts = build(config)
    try:
        with tempfile.TemporaryDirectory() as folder:
            walk = _Walk(parts, samples=samples, draw_at=stop - lag, stop_at=stop, tell=tell)
            trainer = trainer_for(parts, [walk], Path(folder))
            module = PolicyModule(
                config, loaded=parts.loaded, references=parts.references, terms=parts.terms,
                stream=stream_for(parts, trainer.precision_plugin.forward_context), backend=parts.backend,
            )  # fmt: skip
            trainer.fit(module, ckpt_path=origin.checkpoint, weights_only=True)
        if module.version != stop or not walk.rows:
            raise UserError(f"audit: training stopped at update {module.version}, before update {stop}")
        yield Subject(module=module, trainer=trainer, rows=walk.rows, lag=lag)
    finally:
        parts.close()


class _Walk(Callback):
    """Stops training at a version, and draws the audited completions at another."""

    def __init__(
        self, parts: Parts, *, samples: int, draw_at: int, stop_at: int, tell: Callable[[str, int, int], None]
    ) -> None:
        self._parts, self._samples, self._tell = parts, samples, tell
        self._draw_at, self._stop_at = draw_at, stop_at
        self.rows: list[Scored] = []

    def on_load_checkpoint(self, trainer: lightning.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        # The checkpoint of a run's last update says that its batch was the last; this stream goes on.
        checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._at(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._at(trainer, pl_module)

    def _at(self, trainer: lightning.Trainer, module: PolicyModule) -> None:
        if self._draw_at > 0 or self._stop_at > module.version:
            self._tell("training", module.version, self._stop_at)
        if module.version == self._draw_at and not self.rows:
            with trainer.precision_plugin.forward_context():
                self.rows = self._draw()
        if module.version >= self._stop_at:
            trainer.should_stop = True

    def _draw(self) -> list[Scored]:
        """Fresh completions, a batch of the run's size at a time, of prompts in an order of their own."""
        config, parts = self._parts.config, self._parts
        rollout = config.rollout
        prompts = -(-self._samples // rollout.group_size)
        batch = min(rollout.prompts_per_batch, prompts)
        order = PromptOrder(len(parts.problems.train), batch, derive_seed(config.seed, "audit", 0))
        found: list[Scored] = []
        for n in range(-(-prompts // batch)):
            asked = [parts.problems.train[i] for i in order.indices(n)][: prompts - n * batch]
            rollouts = parts.backend.generate(
                asked, group_size=rollout.group_size, sampling=sampling_from(rollout),
                seed=derive_seed(config.seed, "audit", n + 1),
            )  # fmt: skip
            found += parts.scorer.score([_numbered(r, n * batch) for r in rollouts])
            self._tell("sampling", len(found), prompts * rollout.group_size)
        return found


def _numbered(rollout: Any, first: int) -> Any:
    """Group numbers count on from batch to batch."""
    return dataclasses.replace(rollout, group_id=rollout.group_id + first)
