"""Where a run computes, as tags: what can make the same config give other last bits.

One run, from config to summary: folder, resume, tracking, Lightning, and what is left behind.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from rich.console import Console

from kl_comedy.config import Config, config_hash, flatten, to_plain
from kl_comedy.config.combinations import capabilities_of
from kl_comedy.errors import RunFailed, RunStopped
from kl_comedy.kl import resolve_terms
from kl_comedy.lab.audit.callback import AuditCallback, check_audit
from kl_comedy.models import onednn_linear as products
from kl_comedy.records import Scored
from kl_comedy.tracking import provenance_files, provenance_tags
from kl_comedy.tracking.logger import NullLogger, RunLogger
from kl_comedy.training.build import Parts, build, kl_label, policy_tags, stream_for, term_tags
from kl_comedy.training.callbacks import (
    CheckpointCallback,
    EvaluationCallback,
    MetricsCallback,
    ProgressCallback,
    StopCallback,
    StopRequest,
    record_callbacks,
    sample_rows,
    stop_requests,
)
from kl_comedy.training.checkpoint import CheckpointManager
from kl_comedy.training.distributed import RankFailed, World, joined
from kl_comedy.training.export import save_policy
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.run_folder import RunDir, create_run, find_run, step_of
from kl_comedy.training.strategies import strategy_for


def place_tags() -> dict[str, str]:
    """Commit, packages and machine, and ``host.products``: the library of float32 products on a CPU."""
    return {**provenance_tags(), "host.products": products.library()}


log = logging.getLogger("kl_comedy")

_PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: its folder and the summary written there."""

    run: RunDir
    summary: dict[str, Any]
    already_finished: bool = False


def train(config: Config, *, console: Console, command: str) -> Outcome:
    """Train as ``config`` says. ``command`` is what reproduces the run.

    Raises :class:`UserError` for a mistake in the config and :class:`RunFailed` for a run that began
    and could not finish; the run is then marked failed with the reason. SIGTERM and SIGUSR1 end it after the update
    at hand, saved; the latter raises :class:`RunStopped`, which asks to be started again.
    """
    _quiet_lightning()
    with stop_requests() as request, joined(config) as world, _threads(config.train.threads):
        return _train(config, console if world.first else Console(quiet=True), command, request, world)


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Torch computes with ``count`` threads inside, where it is given; as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(config: Config, console: Console, command: str, request: StopRequest, world: World) -> Outcome:
    run = world.broadcast(world.together(lambda: find_run(config) if world.first else None))
    ended = world.broadcast(None if run is None or not world.first else run.summary())
    if run is not None and ended is not None and ended["status"] == "FINISHED":
        return Outcome(run=run, summary=ended, already_finished=True)
    console.print(f"loading {config.model.source}", soft_wrap=True, highlight=False)
    started = time.monotonic()
    parts = build(config, world)
    try:
        check_audit(config, parts.terms)
        resume = run is not None
        run = run or world.broadcast(world.together(lambda: create_run(config) if world.first else None))
        assert run is not None
        with _held(run, world):
            return _train_in(run, parts, console, command, request, resume=resume, started=started)
    finally:
        parts.close()


@contextlib.contextmanager
def _held(run: RunDir, world: World) -> Iterator[None]:
    """The first process holds the run's folder; where it cannot, no process goes on."""
    with contextlib.ExitStack() as stack:
        world.together(lambda: stack.enter_context(run.held()) if world.first else None)
        yield


def _train_in(
    run: RunDir, parts: Parts, console: Console, command: str, request: StopRequest, *, resume: bool, started: float
) -> Outcome:
    config = parts.config
    if capabilities_of(config.rollout.backend).needs_folder:
        parts.backend.work_in(run.path)
    checkpoint = CheckpointManager(root=run.checkpoints, keep=1, world=parts.world).newest() if resume else None
    step = None if checkpoint is None else step_of(checkpoint)
    tags = {**place_tags(), **_identity(parts), "run.command": command, "run.dir": str(run.path)}
    tracker: RunLogger | NullLogger = NullLogger()
    if parts.world.first:
        tracker = RunLogger.start(
            config.tracking,
            run_dir=run.path,
            run_name=run.path.name,
            params=flatten(to_plain(config)),
            tags=tags,
            resume=resume,
            resume_step=step,
            live=config.train.checkpoint_every == 0,
        )
        place = "provenance" if not resume else f"provenance/resumed-at-{step or 0}"
        for file in provenance_files(run.path / place):
            tracker.log_artifact(file, folder=place)
    words = f"resuming at update {step or 0} of" if resume else "training for"
    console.print(f"{words} {config.train.steps} updates in {run.path}", soft_wrap=True, highlight=False)
    return _fit(run, parts, tracker, console, command, request, checkpoint=checkpoint, started=started)


def _fit(
    run: RunDir,
    parts: Parts,
    tracker: RunLogger | NullLogger,
    console: Console,
    command: str,
    request: StopRequest,
    *,
    checkpoint: Path | None,
    started: float,
) -> Outcome:
    config = parts.config
    progress = ProgressCallback(console, config.train.steps)
    evaluation = EvaluationCallback(parts, tracker, progress.show_evaluation)
    checkpoints = CheckpointCallback(
        CheckpointManager(root=run.checkpoints, keep=config.train.keep_checkpoints, world=parts.world),
        tracker,
        every=config.train.checkpoint_every,
        steps=config.train.steps,
        reward_at=evaluation.reward_at,
    )
    callbacks = [
        AuditCallback(config.audit, tracker),
        MetricsCallback(tracker, config.train.samples_every),
        *record_callbacks(config, run.path, parts.world),
        evaluation,
        checkpoints,
        progress,
        StopCallback(request, checkpoints, config.train.steps),
    ]
    trainer = trainer_for(parts, callbacks, run.path)
    module = PolicyModule(
        config,
        loaded=parts.loaded,
        references=parts.references,
        terms=parts.terms,
        stream=stream_for(parts, trainer.precision_plugin.forward_context),
        backend=parts.backend,
        world=parts.world,
    )
    with request.finish_first():
        return _fit_and_write(run, parts, tracker, command, request, trainer, module, evaluation, checkpoint, started)


def _fit_and_write(
    run: RunDir,
    parts: Parts,
    tracker: RunLogger | NullLogger,
    command: str,
    request: StopRequest,
    trainer: lightning.Trainer,
    module: PolicyModule,
    evaluation: EvaluationCallback,
    checkpoint: Path | None,
    started: float,
) -> Outcome:
    config = parts.config
    try:
        trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
        if module.version < config.train.steps:
            raise KeyboardInterrupt
    except RunFailed as error:
        reason = str(error)
        if module.last_batch is not None and parts.world.first:
            reason += f"; the last batch is kept in {_save_batch(run, reason, module.last_batch.rows)}"
        _end(run, tracker, "FAILED", reason, config, command)
        raise RunFailed(reason) from error
    except (KeyboardInterrupt, SystemExit):
        what = f"stopped by {request.signal.name}" if request.signal else "interrupted"
        _end(run, tracker, "KILLED", f"{what} at update {module.version}", config, command)
        kind = RunStopped if request.signal is signal.SIGUSR1 else RunFailed
        raise kind(
            f"{what} at update {module.version} of {config.train.steps}; go on with: {_resume_command(command)}"
        ) from None
    except Exception as error:
        _end(run, tracker, "FAILED", f"{type(error).__name__}: {error}", config, command)
        raise
    try:
        parts.world.together(lambda: save_policy(run, parts))
    except (OSError, RankFailed) as error:
        reason = f"trained, but the policy could not be written: {error}"
        _end(run, tracker, "FAILED", reason, config, command)
        raise RunFailed(f"{reason}; with room for it: kl-comedy export {run.path} FOLDER") from error
    summary = _end(
        run,
        tracker,
        "FINISHED",
        None,
        config,
        command,
        metrics=module.last_metrics,
        evaluations=evaluation.history,
        accuracies=evaluation.accuracies,
        seconds=time.monotonic() - started,
        run_id=tracker.run_id,
    )
    return Outcome(run=run, summary=summary)


def _quiet_lightning() -> None:
    """Lightning resets its loggers when it is imported; its advice on hardware and add-ons is not for our users."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.CRITICAL)  # tells what we tell in a line
    warnings.filterwarnings("ignore", module=r"lightning\.")


def trainer_for(parts: Parts, callbacks: list[Any], folder: Path) -> lightning.Trainer:
    """Lightning as a run uses it: manual optimization, nothing written by itself."""
    _quiet_lightning()
    config = parts.config
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="gpu" if parts.loaded.device.type == "cuda" else "cpu",
        devices=config.train.devices,
        num_nodes=config.train.nodes,
        strategy=strategy_for(config, parts.world, parts.loaded.device),
        precision=_PRECISION[config.train.precision],  # type: ignore[arg-type]
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        deterministic=config.train.deterministic,
        default_root_dir=folder,
    )
    # Its SIGTERM handler broadcasts wherever the process happens to be, in the middle of another exchange too, and
    # waits there for ever. Ours takes a note (training/callbacks.py), which all processes read after the update.
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    return trainer


def _identity(parts: Parts) -> dict[str, str]:
    """Tags that say exactly what was trained: config, data, reference weights, KL verdicts."""
    config = parts.config
    return {
        "config.hash": config_hash(config),
        "config.hash_without_seed": config_hash(config, without=("seed",)),
        **{f"data.hash.{name}": value for name, value in parts.problems.hashes.items()},
        **{f"data.count.{name}": str(value) for name, value in parts.problems.counts.items()},
        "reference.hash": parts.references["initial"].hash,
        **term_tags(config, parts.terms),
        **policy_tags(config),
    }


def _save_batch(run: RunDir, reason: str, rows: Sequence[Scored]) -> Path:
    """The completions of the update at fault, readable and loadable."""
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


def _end(
    run: RunDir,
    tracker: RunLogger | NullLogger,
    status: str,
    reason: str | None,
    config: Config,
    command: str,
    **found: Any,
) -> dict[str, Any]:
    """Close the tracker and write the summary."""
    tracker.log_artifact(run.path / "config.yaml", folder="config")
    tracker.finish(status, reason)
    summary = {
        "status": status,
        "reason": reason,
        "name": config.name,
        "seed": config.seed,
        "config_hash": config_hash(config),
        "kl": kl_label(resolve_terms(config.kl)),
        "command": command,
        "resume_command": _resume_command(command),
        "evaluate_command": _evaluate_command(run, config),
        "mlflow_uri": config.tracking.uri,
        "run_id": tracker.run_id,
        **found,
    }
    if isinstance(tracker, NullLogger):
        return summary
    try:
        run.write_summary(summary)
    except OSError as error:
        if status == "FINISHED":
            raise RunFailed(f"{run.path}/summary.json cannot be written ({error.strerror}); run it again") from error
        log.warning("%s/summary.json cannot be written: %s", run.path, error.strerror)
    return summary
