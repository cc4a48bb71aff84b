"""The two ways to run an audit: by the command, on a policy trained for it or read from a run, and during a run.

A policy that equals its reference has no KL gradient, so the policy of a config alone is trained for some updates
first, as the run would, without tracking. Where the config trains on stale samples, the completions are drawn by the
policy as it was that many updates before, as in the run's own updates.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from kl_comedy.audit.gradients import SKETCH
from kl_comedy.audit.measure import MINIMUM_BLOCKS, audit_blocks, equal_blocks, select_terms
from kl_comedy.audit.report import AuditReport
from kl_comedy.audit.source import AuditSource
from kl_comedy.config import AuditConfig, Config
from kl_comedy.config.combinations import is_off_policy, updates_from_a_batch
from kl_comedy.data import PromptOrder
from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl import resolve_terms
from kl_comedy.kl.term import top_logps_of
from kl_comedy.records import Scored
from kl_comedy.rollouts import sampling_from
from kl_comedy.training.experience import derive_seed
from kl_comedy.training.experience_module import ExperienceModule
from kl_comedy.training.module import PolicyModule

log = logging.getLogger("kl_comedy")
Progress = Callable[[str, int, int], None]
"""Called with the name of the stage, how much of it is done, and its total."""


def _show_nothing(stage: str, done: int, total: int) -> None:
    """The default :data:`Progress`."""


def staleness(config: Config) -> int:
    """The age, in updates, of the samples at the last update from a batch; 0 on-policy."""
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
    progress: Progress = _show_nothing,
) -> AuditReport:
    """Build the run, train its policy to where it is audited, draw ``samples`` completions (whole groups), audit.

    A config is audited after ``updates`` updates. A checkpoint is audited as it is or, where samples are stale, as many
    updates later. Runs in one process, whatever ``train.strategy`` says. Raises :class:`UserError` for unknown names,
    too few updates, and training that stops early.
    """
    from kl_comedy.training.fit import make_trainer

    lag = staleness(source.config)
    select_terms(names, source.config, key="--terms")  # refuses unknown names before anything is trained
    stop_at = _update_to_audit(source, updates, lag)
    config = _in_one_process(source.config, stop_at)
    module = PolicyModule(config)
    data = ExperienceModule(config)
    try:
        sampler = _SampleAndStop(samples=samples, draw_at=stop_at - lag, stop_at=stop_at, progress=progress)
        trainer = make_trainer(config, [sampler])
        trainer.fit(module, datamodule=data, ckpt_path=source.checkpoint, weights_only=True)
        if module.version != stop_at or not sampler.rows:
            raise UserError(f"audit: training stopped at update {module.version}, before update {stop_at}")

        blocks_of_rows = equal_blocks(sampler.rows, blocks)
        # Again, for the betas in force now: a schedule or a target has moved them since the start.
        terms = select_terms(names, config, key="--terms", betas=module.beta_values)
        progress("auditing", 0, len(blocks_of_rows))

        def show(done: int) -> None:
            progress("auditing", done, len(blocks_of_rows))

        # The trainer's precision, or the audited gradients would not be those of training.
        with trainer.precision_plugin.forward_context():
            return audit_blocks(module, blocks_of_rows, terms, sketch=sketch, seed=config.seed, progress=show)
    finally:
        data.close()


def _update_to_audit(source: AuditSource, updates: int, lag: int) -> int:
    """The version of the weights that is audited. Its samples are drawn ``lag`` updates before."""
    if source.checkpoint is not None:
        return source.step + lag
    if updates <= lag:
        # The completions would be drawn by a policy that equals its reference, or before it exists.
        raise UserError(
            f"--updates: got {updates}; this config trains on samples {lag} updates old, so at least {lag + 1}"
        )
    return updates


def _in_one_process(config: Config, steps: int) -> Config:
    """``config`` for a single process that trains at least ``steps`` updates."""
    settings = dataclasses.replace(
        config.train,
        steps=max(config.train.steps, steps),
        strategy="single",
        devices=1,
        nodes=1,
        shards="all",
    )
    return dataclasses.replace(config, train=settings)


class _SampleAndStop(Callback):
    """Draws the completions at version ``draw_at`` of the weights, and stops training at version ``stop_at``."""

    def __init__(self, *, samples: int, draw_at: int, stop_at: int, progress: Progress) -> None:
        self._samples = samples
        self._draw_at = draw_at
        self._stop_at = stop_at
        self._progress = progress
        self.rows: list[Scored] = []

    def on_load_checkpoint(self, trainer: lightning.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        # The checkpoint of a run's last update marks its batch as the last; here training continues.
        checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Here for a checkpoint that is audited as it is; after each update for everything else.
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


def draw_completions(data: ExperienceModule, samples: int, progress: Progress = _show_nothing) -> list[Scored]:
    """At least ``samples`` fresh completions (whole groups) of the policy as it is, scored.

    They are drawn in batches of the run's size, in an order of prompts that the run does not use.
    """
    rollout = data.config.rollout
    problems = data.prompts.train
    prompts = math.ceil(samples / rollout.group_size)
    batch_size = min(rollout.prompts_per_batch, prompts)
    # Seeds of their own, so that the audit draws nothing that the run would draw: the same completions twice, in
    # training and in the audit, would not be independent.
    order = PromptOrder(len(problems), batch_size, derive_seed(data.config.seed, "audit", 0))
    rows: list[Scored] = []
    for n in range(math.ceil(prompts / batch_size)):
        remaining = prompts - n * batch_size
        batch = [problems[i] for i in order.indices(n)][:remaining]
        rollouts = data.backend.generate(
            batch,
            group_size=rollout.group_size,
            sampling=sampling_from(rollout, top_logps=top_logps_of(resolve_terms(data.config.kl))),
            seed=derive_seed(data.config.seed, "audit", n + 1),
        )
        numbered = []
        for completion in rollouts:
            # Each batch numbers its groups from 0; blocks need whole groups of all batches.
            group_id = completion.group_id + n * batch_size
            numbered.append(dataclasses.replace(completion, group_id=group_id))
        rows += data.scorer.score(numbered)
        progress("sampling", len(rows), prompts * rollout.group_size)
    return rows


class AuditCallback(Callback):
    """Audits the gradient of the KL terms every ``audit.every`` updates. The registry of callbacks calls it ``audit``.

    An audit runs before an update, on the update's completions, and does not change the run. There is none before the
    first update, where the KL is zero. The first audit of a process checks beta, and warns about a term that fails the
    check. With several processes, each audits its micro-batches. An audit splits its groups into at most ``blocks``
    blocks, of whose products its intervals are made.
    """

    def __init__(self, config: AuditConfig, *, blocks: int = 8) -> None:
        if blocks < MINIMUM_BLOCKS:
            raise bad_value("blocks", blocks, f"at least {MINIMUM_BLOCKS}")
        self._config = config
        self._blocks = blocks
        self._metrics: dict[str, float] = {}
        self._checked_beta = False

    def check_config(self, config: Config) -> None:
        """Raise :class:`UserError` for an audit that could not run, before anything is trained."""
        select_terms(self._config.terms, config, key="audit.terms")
        groups = config.rollout.prompts_per_batch // config.algorithm.updates_per_batch
        if self._config.samples is None:
            # An audit of a whole update costs about two updates, and is half as noisy as an audit of half of it.
            wanted = max(groups // 2, MINIMUM_BLOCKS)
        else:
            wanted = self._config.samples // config.rollout.group_size
        self._groups = min(groups, wanted)
        if self._groups < MINIMUM_BLOCKS:
            allowed = f"0 where an audit has fewer than {MINIMUM_BLOCKS} groups"
            reason = f"rollout.prompts_per_batch, algorithm.updates_per_batch and audit.samples leave {self._groups}"
            raise bad_value("audit.every", self._config.every, allowed, reason)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        version = pl_module.version
        self._metrics = {}
        if version == 0 or version % self._config.every != 0:
            return
        try:
            with trainer.precision_plugin.forward_context():
                report = self._audit(pl_module, batch.rows)
        except UserError as error:
            # What cannot be audited (a batch with too few groups, a policy that equals its reference) can be trained.
            log.warning(f"audit at update {version + 1}: {error}")
            return
        warnings = list(report.failures)
        if report.drives_away:
            warnings.append(report.drives_away)
        for warning in warnings:
            log.warning(f"audit at update {version + 1}: {warning}")
        # Once: it costs two updates per term, and whether a beta acts does not change during a run.
        self._checked_beta = True
        self._metrics = report.metrics()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        # After the update, under its number, where the update's own metrics are.
        if self._metrics:
            trainer.logger.log_metrics(self._metrics, step=pl_module.version)

    def _audit(self, module: PolicyModule, rows: Sequence[Scored]) -> AuditReport:
        config = self._config
        betas = module.beta_values
        audited_rows = rows[: self._groups * module.config.rollout.group_size]
        return audit_blocks(
            module,
            equal_blocks(audited_rows, self._blocks),
            select_terms(config.terms, module.config, key="audit.terms", betas=betas),
            sketch=SKETCH,
            seed=module.version,
            check=not self._checked_beta,
        )
