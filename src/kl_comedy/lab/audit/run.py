"""Where audits run: on a policy trained for it or read from a run's folder (the command), and during a run (callback).

A policy that equals its reference has no KL gradient, so the policy of a config alone is trained for some updates
first, as the run would, without tracking. Where the config trains on stale samples, the completions are drawn by the
policy as it was that many updates before, as in the run's own updates.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from kl_comedy.config import AuditConfig, Config
from kl_comedy.config.combinations import updates_from_a_batch
from kl_comedy.data import PromptOrder
from kl_comedy.errors import UserError, bad_value
from kl_comedy.lab.audit.measure import MINIMUM_BLOCKS, audit_blocks, equal_blocks, select_terms
from kl_comedy.lab.audit.report import AuditReport
from kl_comedy.lab.audit.source import AuditSource
from kl_comedy.records import Scored
from kl_comedy.rollouts import sampling_from
from kl_comedy.training.build import is_off_policy
from kl_comedy.training.experience import derive_seed
from kl_comedy.training.experience_module import ExperienceModule
from kl_comedy.training.module import PolicyModule

log = logging.getLogger("kl_comedy")
Progress = Callable[[str, int, int], None]
"""Called with the stage, what is done of it, and its total."""


def staleness(config: Config) -> int:
    """How many updates old the samples of the stalest update of a batch are; 0 on-policy."""
    if not is_off_policy(config):
        return 0
    return config.lag.steps + config.lag.max_steps + updates_from_a_batch(config) - 1


def run_audit(
    source: AuditSource,
    names: Sequence[str],
    *,
    updates: int,
    samples: int,
    blocks: int,
    sketch: int,
    progress: Progress = lambda stage, done, total: None,
) -> AuditReport:
    """Build the run, train its policy to where it is audited, draw ``samples`` completions (whole groups), audit.

    From a config: after ``updates`` updates. From a checkpoint: at it, or, where samples are stale, as many updates
    further. In one process, whatever ``train.strategy`` says.
    """
    from kl_comedy.training.run import make_trainer

    config, lag = source.config, staleness(source.config)
    select_terms(names, config, key="--terms")  # refuses unknown names before anything is trained
    if source.checkpoint is None and updates <= lag:
        raise UserError(
            f"--updates: got {updates}; this config trains on samples {lag} updates old, so at least {lag + 1}"
        )
    stop = updates if source.checkpoint is None else source.step + lag
    one_process = {"strategy": "single", "devices": 1, "nodes": 1, "shards": "all"}
    settings = dataclasses.replace(config.train, steps=max(config.train.steps, stop), **one_process)
    config = dataclasses.replace(config, train=settings)
    module, data = PolicyModule(config), ExperienceModule(config)
    try:
        sampler = _SampleAndStop(samples=samples, draw_at=stop - lag, stop_at=stop, progress=progress)
        trainer = make_trainer(config, [sampler])
        trainer.fit(module, datamodule=data, ckpt_path=source.checkpoint, weights_only=True)
        if module.version != stop or not sampler.rows:
            raise UserError(f"audit: training stopped at update {module.version}, before update {stop}")
        equal = equal_blocks(sampler.rows, blocks)
        terms = select_terms(names, config, key="--terms", betas=module.beta_values)
        progress("auditing", 0, len(equal))

        def show(done: int) -> None:
            progress("auditing", done, len(equal))

        with trainer.precision_plugin.forward_context():
            return audit_blocks(module, equal, terms, sketch=sketch, seed=config.seed, progress=show)
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

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        version = pl_module.version
        if self._draw_at > 0 or self._stop_at > version:
            self._progress("training", version, self._stop_at)
        if version == self._draw_at and not self.rows:
            with trainer.precision_plugin.forward_context():
                self.rows = draw_completions(trainer.datamodule, self._samples, self._progress)
        if version >= self._stop_at:
            trainer.should_stop = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.on_train_start(trainer, pl_module)


def draw_completions(
    data: ExperienceModule, samples: int, progress: Progress = lambda stage, done, total: None
) -> list[Scored]:
    """At least ``samples`` fresh completions (whole groups) of the policy as it is, scored.

    Drawn a batch of the run's size at a time, in an order of prompts that the run does not use.
    """
    config, problems = data.config, data.prompts.train
    group_size = config.rollout.group_size
    prompts = -(-samples // group_size)
    batch = min(config.rollout.prompts_per_batch, prompts)
    order = PromptOrder(len(problems), batch, derive_seed(config.seed, "audit", 0))
    rows: list[Scored] = []
    options: dict[str, Any] = {"group_size": group_size, "sampling": sampling_from(config.rollout)}
    for n in range(-(-prompts // batch)):
        asked = [problems[i] for i in order.indices(n)][: prompts - n * batch]
        rollouts = data.backend.generate(asked, **options, seed=derive_seed(config.seed, "audit", n + 1))
        numbered = [dataclasses.replace(r, group_id=r.group_id + n * batch) for r in rollouts]
        rows += data.scorer.score(numbered)
        progress("sampling", len(rows), prompts * group_size)
    return rows


class AuditCallback(Callback):
    """Audits the gradient of the KL terms every ``audit.every`` updates. The registry of callbacks calls it ``audit``.

    An audit precedes the update, on its own completions, and changes nothing of the run. Never before the first update,
    where the KL is zero. The check of beta is made at the first audit of the process; a term that fails it is warned
    about. With several processes each audits its micro-batches.
    """

    def __init__(self, config: AuditConfig) -> None:
        self._config = config
        self._metrics: dict[str, float] = {}
        self._checked_beta = False

    def check_config(self, config: Config) -> None:
        """Raise :class:`UserError` for an audit that could not run, before anything is trained."""
        select_terms(self._config.terms, config, key="audit.terms")
        # An audit of a whole update costs about two updates, and is half as noisy as that of half of it.
        groups, samples = config.rollout.prompts_per_batch // config.algorithm.updates_per_batch, self._config.samples
        wanted = max(groups // 2, MINIMUM_BLOCKS) if samples is None else samples // config.rollout.group_size
        self._groups = min(groups, wanted)
        if self._groups < MINIMUM_BLOCKS:
            allowed = f"0 where an audit has fewer than {MINIMUM_BLOCKS} groups"
            why = f"rollout.prompts_per_batch, algorithm.updates_per_batch and audit.samples leave {self._groups}"
            raise bad_value("audit.every", self._config.every, allowed, why)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        version = pl_module.version
        self._metrics = {}
        if version == 0 or version % self._config.every:
            return
        try:
            with trainer.precision_plugin.forward_context():
                report = self._audit(pl_module, batch.rows)
        except UserError as error:
            log.warning(f"audit at update {version + 1}: {error}")
            return
        for line in filter(None, [*report.failures, report.drives_away]):
            log.warning(f"audit at update {version + 1}: {line}")
        self._checked_beta = True
        self._metrics = report.metrics()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if self._metrics:
            trainer.logger.log_metrics(self._metrics, step=pl_module.version)

    def _audit(self, module: PolicyModule, rows: Sequence[Scored]) -> AuditReport:
        betas, config = module.beta_values, self._config
        blocks = equal_blocks(rows[: self._groups * module.config.rollout.group_size], config.blocks)
        terms = select_terms(config.terms, module.config, key="audit.terms", betas=betas)
        check = not self._checked_beta
        return audit_blocks(module, blocks, terms, sketch=config.sketch, seed=module.version, check=check)
