"""One training run, from config to summary."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import shlex
import signal
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from rich.console import Console

from kl_comedy.config import Config, config_hash, flatten, to_plain
from kl_comedy.config.combinations import capabilities_of
from kl_comedy.errors import RunFailed, RunStopped, UserError, unknown_key
from kl_comedy.models.load import pick_device
from kl_comedy.models.onednn_linear import linear_library
from kl_comedy.records import Scored
from kl_comedy.tracking import provenance_files, provenance_tags
from kl_comedy.tracking.logger import NullLogger, RunLogger
from kl_comedy.training.build import kl_label, policy_tags, term_tags
from kl_comedy.training.callbacks import (
    CheckpointCallback,
    ConsoleProgress,
    EvaluationCallback,
    MetricsCallback,
    configured_callbacks,
    sample_rows,
)
from kl_comedy.training.checkpoint import CheckpointManager
from kl_comedy.training.distributed import LAUNCHED, RankFailed, Ranks, cluster_environment, process_state_restored
from kl_comedy.training.experience_module import ExperienceModule
from kl_comedy.training.export import save_policy
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.run_folder import RunDir, create_run, find_run, step_of
from kl_comedy.training.stop_signals import StopRequest, stop_requests
from kl_comedy.training.strategies import NEWEST, strategy_for

log = logging.getLogger("kl_comedy")

_PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed"}

TRAINER_ARGUMENTS_SET_BY = {
    "accelerator": "model.device",
    "accumulate_grad_batches": "train.microbatch_tokens",
    "callbacks": "callbacks",
    "default_root_dir": "output",
    "deterministic": "train.deterministic",
    "devices": "train.devices",
    "enable_checkpointing": "train.checkpoint_every",
    "gradient_clip_algorithm": "optimizer.clip_norm",
    "gradient_clip_val": "optimizer.clip_norm",
    "logger": "tracking",
    "max_epochs": "train.steps",
    "max_steps": "train.steps",
    "min_epochs": "train.steps",
    "min_steps": "train.steps",
    "num_nodes": "train.nodes",
    "num_sanity_val_steps": "eval.at_start",
    "precision": "train.precision",
    "reload_dataloaders_every_n_epochs": "rollout",
    "strategy": "train.strategy",
    "use_distributed_sampler": "train.strategy",
}
"""Arguments of Lightning's Trainer that a config key sets already."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: its folder and the summary written there."""

    run: RunDir
    summary: dict[str, Any]
    already_finished: bool = False


def train(config: Config, *, console: Console, command: str) -> Outcome:
    """Train as ``config`` says. ``command`` is what reproduces the run.

    Raises :class:`UserError` for a mistake in the config and :class:`RunFailed` for a run that began and could not
    finish; the run is then marked failed with the reason. SIGTERM and SIGUSR1 end it after the current update, saved;
    the latter raises :class:`RunStopped`, which asks to be started again.
    """
    started = time.monotonic()
    run = find_run(config)
    if run is not None and (run.summary() or {}).get("status") == "FINISHED":
        return Outcome(run=run, summary=run.summary() or {}, already_finished=True)
    with stop_requests() as request, process_state_restored(config.train.threads):
        module, data = PolicyModule(config), ExperienceModule(config)
        record = RunRecord(config, console, command, request)
        evaluation = EvaluationCallback(config, console)
        callbacks = [
            record,
            *configured_callbacks(config),
            MetricsCallback(config.train.samples_every),
            evaluation,
            ConsoleProgress(console, config.train.steps),
            CheckpointCallback(config, evaluation, request),
        ]
        trainer = make_trainer(config, callbacks)
        console.quiet = console.quiet or not trainer.is_global_zero
        if not cluster_environment(config).creates_processes_externally:
            data.load_problems()  # before other processes are started, so that a mistake in the data costs none
        console.print(f"loading {config.model.source}", soft_wrap=True, highlight=False)
        os.environ[LAUNCHED] = "1"
        try:
            resume_from = NEWEST if config.resume == "auto" else None
            trainer.fit(module, datamodule=data, ckpt_path=resume_from, weights_only=True)
            if module.version < config.train.steps:
                raise KeyboardInterrupt
            record.save_policy(module)
            seconds = time.monotonic() - started
            summary = record.finish(module.last_metrics, evaluation, seconds)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            record.fail(error, module)
            raise
        finally:
            request.finishing = False
            data.close()
            record.close()
    assert record.run is not None
    return Outcome(run=record.run, summary=summary)


def make_trainer(config: Config, callbacks: Sequence[Callback]) -> lightning.Trainer:
    """Lightning's Trainer as a run uses it: manual optimization, one epoch whose batches are the updates.

    Raises :class:`UserError` for arguments in ``trainer`` that the Trainer does not take or a config key sets.
    """
    _quiet_lightning()
    strategy = strategy_for(config)
    arguments: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "gpu" if pick_device(config.model.device).type == "cuda" else "cpu",
        "devices": config.train.devices,
        "num_nodes": config.train.nodes,
        "strategy": strategy,
        "precision": _PRECISION[config.train.precision],
        "callbacks": list(callbacks),
        "logger": False,  # the run's logger joins when the run has a folder
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks),
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "deterministic": config.train.deterministic,
        "default_root_dir": config.output,
    }
    allowed = set(inspect.signature(lightning.Trainer).parameters) - set(TRAINER_ARGUMENTS_SET_BY)
    for name, value in config.trainer.items():
        if name in TRAINER_ARGUMENTS_SET_BY:
            raise UserError(f"trainer.{name}: got {value!r}; {TRAINER_ARGUMENTS_SET_BY[name]} sets this argument")
        if name not in allowed:
            raise unknown_key(f"trainer.{name}", value, sorted(allowed), "an argument of lightning.Trainer")
    try:
        return lightning.Trainer(**{**arguments, **config.trainer})
    except (TypeError, ValueError, lightning.pytorch.utilities.exceptions.MisconfigurationException) as error:
        if config.trainer:
            raise UserError(f"trainer: {error}") from error
        raise


def _quiet_lightning() -> None:
    """Lightning resets its loggers when it is imported; its advice on hardware and add-ons is not for our users."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.CRITICAL)  # repeats what our one line says
    warnings.filterwarnings("ignore", module=r"lightning\.")


class RunRecord(Callback):
    """The run's folder, its logger, and how it ended. ``run`` is None until everything is built."""

    def __init__(self, config: Config, console: Console, command: str, request: StopRequest) -> None:
        self.run: RunDir | None = None
        self._config, self._console, self._command, self._request = config, console, command, request
        self._ranks = Ranks()
        self._lock = contextlib.ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Find or create the folder, once data and policy are there: a mistake leaves no folder behind."""
        self._ranks = ranks = pl_module.ranks
        self._kl_label = kl_label(pl_module.terms)
        run, resume = ranks.broadcast(ranks.on_rank_zero(self._find_or_create))
        ranks.on_rank_zero(lambda: self._lock.enter_context(run.held()))
        checkpoint = CheckpointManager(root=run.checkpoints, keep=1, ranks=ranks).newest() if resume else None
        step = None if checkpoint is None else step_of(checkpoint)
        trainer.strategy.newest_checkpoint = checkpoint
        if capabilities_of(self._config.rollout.backend).needs_folder:
            trainer.datamodule.backend.work_in(run.path)
        self._reference_hash = pl_module.references["initial"].hash  # over shards an exchange between all ranks
        logger = ranks.on_rank_zero(lambda: self._start_logger(run, trainer, resume, step))
        self._logger: Any = logger or NullLogger()
        trainer.logger = self._logger
        self.run, pl_module.run_folder = run, run.path
        action = f"resuming at update {step or 0} of" if resume else "training for"
        steps = self._config.train.steps
        self._console.print(f"{action} {steps} updates in {run.path}", soft_wrap=True, highlight=False)

    def _find_or_create(self) -> tuple[RunDir, bool]:
        run = find_run(self._config)
        return (create_run(self._config), False) if run is None else (run, True)

    def _start_logger(self, run: RunDir, trainer: Any, resume: bool, step: int | None) -> RunLogger:
        """The tags say exactly what is trained: config, data, reference weights, certificates."""
        config, prompts, module = self._config, trainer.datamodule.prompts, trainer.lightning_module
        tags = {
            **provenance_tags(),
            "host.products": linear_library(),
            "config.hash": config_hash(config),
            "config.hash_without_seed": config_hash(config, without=("seed",)),
            **{f"data.hash.{name}": value for name, value in prompts.hashes.items()},
            **{f"data.count.{name}": str(value) for name, value in prompts.counts.items()},
            "reference.hash": self._reference_hash,
            **term_tags(config, module.terms),
            **policy_tags(config),
            "run.command": self._command,
            "run.dir": str(run.path),
        }
        logger = RunLogger.start(
            config.tracking,
            run_dir=run.path,
            run_name=run.path.name,
            params=flatten(to_plain(config)),
            tags=tags,
            resume=resume,
            resume_step=step,
            live=config.train.checkpoint_every == 0,
        )
        folder = f"provenance/resumed-at-{step or 0}" if resume else "provenance"
        for file in provenance_files(run.path / folder):
            logger.log_artifact(file, folder=folder)
        return logger

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """From now on a signal lets the current update finish.

        Lightning's SIGTERM handler, registered just before, broadcasts in the middle of whatever the process does,
        another exchange too, and waits there for ever. Ours replaces it until the end of the fit.
        """
        self._request.finishing = True
        self._request.listen()

    def save_policy(self, module: PolicyModule) -> None:
        """Write RUN/policy. Raises :class:`RunFailed` where it cannot be written."""
        run = self.run
        assert run is not None
        try:
            self._ranks.raise_on_all_ranks(lambda: save_policy(run, module))
        except (OSError, RankFailed) as error:
            raise PolicyNotSaved(f"trained, but the policy could not be written: {error}") from error

    def finish(self, metrics: dict[str, float], evaluation: EvaluationCallback, seconds: float) -> dict[str, Any]:
        """Close the logger and write the summary of a finished run; the summary."""
        return self._end(
            "FINISHED",
            None,
            metrics=metrics,
            evaluations=evaluation.history,
            accuracies=evaluation.accuracies,
            seconds=seconds,
        )

    def fail(self, error: BaseException, module: PolicyModule) -> None:
        """Write the summary of a run that ended early, and raise what the caller should see. Nothing before it began.

        Raises :class:`RunStopped` after SIGUSR1, else :class:`RunFailed`; returns for errors that are raised as they
        are.
        """
        if isinstance(error, KeyboardInterrupt | SystemExit):
            received = self._request.signal
            what = f"stopped by {received.name}" if received else "interrupted"
            self._end("KILLED", f"{what} at update {module.version}")
            kind = RunStopped if received is signal.SIGUSR1 else RunFailed
            raise kind(
                f"{what} at update {module.version} of {self._config.train.steps}; "
                f"resume with: {_resume_command(self._command)}"
            ) from None
        if self.run is None:
            return
        if isinstance(error, PolicyNotSaved):
            self._end("FAILED", str(error))
            raise RunFailed(f"{error}; with room for it: kl-comedy export {self.run.path} FOLDER") from error
        if isinstance(error, RunFailed):
            reason = str(error)
            if module.last_batch is not None and self._ranks.is_rank_zero:
                reason += f"; the last batch is kept in {_save_batch(self.run, reason, module.last_batch.rows)}"
            self._end("FAILED", reason)
            raise RunFailed(reason) from error
        self._end("FAILED", f"{type(error).__name__}: {error}")

    def _end(self, status: str, reason: str | None, **results: Any) -> dict[str, Any]:
        run, config = self.run, self._config
        if run is None:
            return {}
        self._logger.log_artifact(run.path / "config.yaml", folder="config")
        self._logger.finish(status, reason)
        summary = {
            "status": status,
            "reason": reason,
            "name": config.name,
            "seed": config.seed,
            "config_hash": config_hash(config),
            "kl": self._kl_label,
            "command": self._command,
            "resume_command": _resume_command(self._command),
            "evaluate_command": _evaluate_command(run, config),
            "mlflow_uri": config.tracking.uri,
            "run_id": self._logger.run_id,
            **results,
        }
        if self._ranks.is_rank_zero:
            try:
                run.write_summary(summary)
            except OSError as error:
                if status == "FINISHED":
                    message = f"{run.path}/summary.json cannot be written ({error.strerror}); run it again"
                    raise RunFailed(message) from error
                log.warning("%s/summary.json cannot be written: %s", run.path, error.strerror)
        return summary

    def close(self) -> None:
        """Release the folder."""
        self._lock.close()


class PolicyNotSaved(Exception):
    """Training finished, and the policy could not be written."""


def _save_batch(run: RunDir, reason: str, rows: Sequence[Scored]) -> Path:
    """The completions of the failed update, readable and loadable."""
    path = run.path / "failed_batch.json"
    shown = [
        {
            **sample_rows((row,))[0],
            "completion_ids": list(row.rollout.completion_ids),
            "behaviour_logps": list(row.rollout.logps),
        }
        for row in rows
    ]
    path.write_text(json.dumps({"reason": reason, "rows": shown}, indent=1))
    return path


def _resume_command(command: str) -> str:
    return command if "resume=auto" in command.split() else f"{command} resume=auto"


def _evaluate_command(run: RunDir, config: Config) -> str:
    words = ["kl-comedy", "evaluate", str(run.path / "config.yaml"), f"model.source={run.policy}"]
    if config.model.options:
        words.append("model.options={}")
    if config.model.lora is not None:
        words.append("model.lora=null")  # RUN/policy is merged
    if config.eval.kl:
        words.append(f"eval.reference={run.path / 'config.yaml'}")
    return shlex.join(words)
