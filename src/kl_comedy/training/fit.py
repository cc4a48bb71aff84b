"""The fit of a run by Lightning, from what was decided about it to its summary."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from rich.console import Console

from kl_comedy.config import Config
from kl_comedy.config.trainer_arguments import check_trainer_arguments
from kl_comedy.cuda import VARIABLES, leave_memory_unfilled
from kl_comedy.errors import UserError
from kl_comedy.models.load import pick_device
from kl_comedy.redaction import one_line
from kl_comedy.rollouts import Sampler
from kl_comedy.rollouts.engines.options import visible_gpus
from kl_comedy.training.build import Run, warn_about
from kl_comedy.training.callbacks import (
    CheckpointCallback,
    ConsoleProgress,
    EvaluationCallback,
    MetricsCallback,
    configured_callbacks,
)
from kl_comedy.training.distributed import LAUNCHED, cluster_environment, process_state_restored
from kl_comedy.training.experience_module import ExperienceModule
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.open_run import Opened
from kl_comedy.training.run_folder import Outcome, finished_outcome
from kl_comedy.training.run_record import AlreadyFinished, RunRecord
from kl_comedy.training.run_warnings import RunWarnings
from kl_comedy.training.stop_signals import StopRequest, stop_requests
from kl_comedy.training.strategies import NEWEST, strategy_for


def fit(run: Run, opened: Opened | None, console: Console, command: str, *, folder: Path | None = None) -> Outcome:
    """Train ``run`` to its end. ``opened``: where, or None where rank 0 asks once all processes are connected.

    ``folder`` is that of a sweep's cell. Raises as :func:`kl_comedy.training.run.train`.
    """
    started = time.monotonic()
    with stop_requests() as request, process_state_restored(run.config.train.threads):
        warn_about(run)
        record = RunRecord(run.config, console, command, request, opened=opened, folder=folder)
        return _fit(run, record, console, request, started)


def _fit(run: Run, record: RunRecord, console: Console, request: StopRequest, started: float) -> Outcome:
    """Build what trains, train, and end the record in whatever way the training ended."""
    config = run.config
    module = PolicyModule(config, run)
    data = ExperienceModule(config, run.problems, on_connected=record.ask)
    evaluation = EvaluationCallback(config, console)
    checkpoints = CheckpointCallback(config, evaluation, request)
    # Lightning calls these in order: the record comes first, because it finds the folder that others write to, and
    # the checkpoint last, because it holds the state of the others after the update.
    callbacks: list[Callback] = [
        record,
        *configured_callbacks(config),
        MetricsCallback(config.train.samples_every),
        evaluation,
        RunWarnings(config),
        ConsoleProgress(console, config.train.steps),
        checkpoints,
    ]
    trainer = make_trainer(config, callbacks)
    record.watch_ranks_of(trainer.strategy.launcher)
    if not trainer.is_global_zero:
        console.quiet = True
    if not cluster_environment(config).creates_processes_externally:
        # Before Lightning starts the other ranks, so that a mistake in the data ends this process alone.
        data.load_problems()
    console.print(one_line(f"loading {config.model.source}"), soft_wrap=True, highlight=False)
    # The ranks that Lightning starts inherit it; process_state_restored removes it from this process.
    os.environ[LAUNCHED] = "1"
    try:
        trainer.fit(module, datamodule=data, ckpt_path=NEWEST, weights_only=True)
        reason = None
        if module.version < config.train.steps:
            if checkpoints.interrupted or not trainer.should_stop:
                # Lightning returns from an interrupt as from the end of the training; for us it is an early end.
                raise KeyboardInterrupt
            reason = record.stopped_early(trainer, module)
        record.save_policy(module)
        summary = record.end(
            "FINISHED",
            reason,
            evaluations=evaluation.history,
            proxies=evaluation.proxies,
            accuracies=evaluation.accuracies,
            metrics=module.last_metrics,
            seconds=time.monotonic() - started,
        )
    except AlreadyFinished as finished:
        return finished_outcome(finished.run)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        record.fail(error, module)
        raise
    finally:
        request.finishing = False  # what can be saved is saved: a signal may end the process
        data.close()
        record.close()
    assert record.run is not None
    return Outcome(run=record.run, summary=summary)


def make_trainer(config: Config, callbacks: Sequence[Callback]) -> lightning.Trainer:
    """Lightning's Trainer as a run uses it: manual optimization, one epoch whose batches are the updates.

    Raises :class:`UserError` for arguments in ``trainer`` that the Trainer does not take or a config key sets.
    """
    check_trainer_arguments(config.trainer)
    _quiet_lightning()
    defaults = {
        "enable_model_summary": False,
        "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks),
        "log_every_n_steps": 1,
    }
    arguments = defaults | config.trainer | _set_by_keys(config, callbacks)
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    leave_memory_unfilled()
    try:
        return lightning.Trainer(**arguments)
    except (TypeError, ValueError, MisconfigurationException) as error:
        if config.trainer:
            raise UserError(f"trainer: {error}") from error
        raise
    finally:
        # Under `deterministic` Lightning replaces the user's CUBLAS_WORKSPACE_CONFIG.
        os.environ |= variables


def _set_by_keys(config: Config, callbacks: Sequence[Callback]) -> dict[str, Any]:
    """The Trainer's arguments that a run decides or other config keys set.

    The keys that stand for these are in ``kl_comedy.config.trainer_arguments.TRAINER_ARGUMENTS``.
    """
    train = config.train
    on_gpu = pick_device(config.model.device).type == "cuda"
    accelerator = "cpu"
    if on_gpu:
        accelerator = "gpu"
        Sampler.of(config).server_gpus(visible_gpus("cuda"))  # raises where a rank or a server has no GPU
    precision = "32-true"
    if train.precision == "bf16":
        precision = "bf16-mixed"
    return {
        "accelerator": accelerator,
        "accumulate_grad_batches": 1,
        "callbacks": list(callbacks),
        # A run is one epoch, so Lightning never validates by itself: EvaluationCallback runs its validation loop.
        "check_val_every_n_epoch": 2,
        "default_root_dir": config.output,
        "deterministic": train.deterministic,
        "devices": train.devices,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "fast_dev_run": False,
        "gradient_clip_algorithm": None,
        "gradient_clip_val": None,
        "limit_train_batches": None,
        "limit_val_batches": None,
        "logger": False,  # the run's logger joins when the run has a folder
        "max_epochs": 1,
        "max_steps": -1,
        "min_epochs": None,
        "min_steps": None,
        "num_nodes": train.nodes,
        "num_sanity_val_steps": 0,
        "overfit_batches": 0.0,
        "precision": precision,
        "reload_dataloaders_every_n_epochs": 0,
        "strategy": strategy_for(config),
        "use_distributed_sampler": False,
        "val_check_interval": None,
    }


def _quiet_lightning() -> None:
    """Silence advice on hardware and add-ons. Lightning resets its loggers on import, so this is done after it."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # What the user's own callbacks say, as ModelSummary and EarlyStopping(verbose=True), is not advice.
    logging.getLogger("lightning.pytorch.callbacks").setLevel(logging.INFO)
    # torch's checkpoint writer logs each error with its traceback; our one line says the same.
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module=r"lightning\.")
