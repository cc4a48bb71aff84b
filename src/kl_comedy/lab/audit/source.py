"""The policy that ``kl-comedy audit`` measures, and its completions: trained a little here, or from a run's folder.

A policy that equals its reference has no KL gradient, so the policy of a config alone is trained for some updates
first, as the run would, without tracking. Where the config trains on stale samples, the completions are drawn by the
policy as it was that many updates before, as in the run's own updates.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from kl_comedy.training.build import is_off_policy
from kl_comedy.training.experience import derive_seed
from kl_comedy.training.experience_module import ExperienceModule
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.run_folder import RunDir

Progress = Callable[[str, int, int], None]
"""Called with the stage, what is done of it, and its total."""


@dataclass(frozen=True, kw_only=True)
class AuditSource:
    """A config, and the newest checkpoint where CONFIG is the folder of a run."""

    config: Config
    checkpoint: Path | None
    step: int

    @classmethod
    def read(cls, path: Path, overrides: list[str]) -> AuditSource:
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


@dataclass(frozen=True, kw_only=True)
class AuditedPolicy:
    """A policy at some version of its weights, and the completions to audit it on."""

    module: PolicyModule
    trainer: lightning.Trainer
    rows: list[Scored]


def staleness(config: Config) -> int:
    """How many updates old the samples of the stalest update of a batch are; 0 on-policy."""
    if not is_off_policy(config):
        return 0
    updates = config.algorithm.updates_per_batch * config.algorithm.epochs_per_batch
    return config.lag.steps + config.lag.max_steps + updates - 1


@contextlib.contextmanager
def audited_policy(source: AuditSource, *, updates: int, samples: int, progress: Progress) -> Iterator[AuditedPolicy]:
    """Build the run, train its policy to where it is audited, and draw ``samples`` completions (whole groups).

    From a config: ``updates`` updates from the start. From a checkpoint: at it, or, where samples are stale, as many
    updates further.
    """
    from kl_comedy.training.run import make_trainer

    config, lag = source.config, staleness(source.config)
    if source.checkpoint is None and updates <= lag:
        raise UserError(
            f"--updates: got {updates}; this config trains on samples {lag} updates old, so at least {lag + 1}"
        )
    stop = source.step + lag if source.checkpoint is not None else updates
    steps = max(config.train.steps, stop)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))
    module, data = PolicyModule(config), ExperienceModule(config)
    try:
        sampler = _SampleAndStop(samples=samples, draw_at=stop - lag, stop_at=stop, progress=progress)
        trainer = make_trainer(config, [sampler])
        trainer.fit(module, datamodule=data, ckpt_path=source.checkpoint, weights_only=True)
        if module.version != stop or not sampler.rows:
            raise UserError(f"audit: training stopped at update {module.version}, before update {stop}")
        yield AuditedPolicy(module=module, trainer=trainer, rows=sampler.rows)
    finally:
        data.close()


class _SampleAndStop(Callback):
    """Draws the completions at version ``draw_at`` of the weights, and stops training at version ``stop_at``."""

    def __init__(self, *, samples: int, draw_at: int, stop_at: int, progress: Progress) -> None:
        self._samples, self._progress = samples, progress
        self._draw_at, self._stop_at = draw_at, stop_at
        self.rows: list[Scored] = []

    def on_load_checkpoint(self, trainer: lightning.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        # The checkpoint of a run's last update marks its batch as the last; here training continues.
        checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._check_version(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._check_version(trainer, pl_module)

    def _check_version(self, trainer: Any, module: PolicyModule) -> None:
        if self._draw_at > 0 or self._stop_at > module.version:
            self._progress("training", module.version, self._stop_at)
        if module.version == self._draw_at and not self.rows:
            with trainer.precision_plugin.forward_context():
                self.rows = self._draw(trainer.datamodule)
        if module.version >= self._stop_at:
            trainer.should_stop = True

    def _draw(self, data: ExperienceModule) -> list[Scored]:
        """Fresh completions, a batch of the run's size at a time, in an order of prompts that the run does not use."""
        config, problems = data.config, data.prompts.train
        group_size = config.rollout.group_size
        prompts = -(-self._samples // group_size)
        batch = min(config.rollout.prompts_per_batch, prompts)
        order = PromptOrder(len(problems), batch, derive_seed(config.seed, "audit", 0))
        rows: list[Scored] = []
        for n in range(-(-prompts // batch)):
            rollouts = data.backend.generate(
                [problems[i] for i in order.indices(n)][: prompts - n * batch],
                group_size=group_size,
                sampling=sampling_from(config.rollout),
                seed=derive_seed(config.seed, "audit", n + 1),
            )
            numbered = [dataclasses.replace(r, group_id=r.group_id + n * batch) for r in rollouts]
            rows += data.scorer.score(numbered)
            self._progress("sampling", len(rows), prompts * group_size)
        return rows
