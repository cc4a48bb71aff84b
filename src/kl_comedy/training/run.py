"""One training run, from config to summary."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import signal
import time
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from rich.console import Console

from kl_comedy.config import Config, config_hash, flatten, plugins_of, to_plain
from kl_comedy.config.combinations import capabilities_of, sampler_of
from kl_comedy.cuda import VARIABLES, leave_memory_unfilled, set_variables
from kl_comedy.errors import RunFailed, RunStopped, UserError
from kl_comedy.io import atomic_write
from kl_comedy.models.load import pick_device
from kl_comedy.models.onednn_linear import linear_library
from kl_comedy.redaction import redact
from kl_comedy.registry import plugin_line
from kl_comedy.rollouts.engines.options import visible_gpus
from kl_comedy.tracking import provenance_files, provenance_tags
from kl_comedy.tracking.logger import NullLogger, RunLogger
from kl_comedy.tracking.loggers import build_loggers
from kl_comedy.tracking.store import param_texts
from kl_comedy.training.build import check_trainer_arguments
from kl_comedy.training.callbacks import (
    CheckpointCallback,
    ConsoleProgress,
    EvaluationCallback,
    MetricsCallback,
    SignalWarning,
    configured_callbacks,
    sample_rows,
)
from kl_comedy.training.checkpoint import newest_checkpoint
from kl_comedy.training.distributed import (
    LAUNCHED,
    RankFailed,
    Ranks,
    RankWatch,
    cluster_environment,
    process_state_restored,
)
from kl_comedy.training.experience_module import ExperienceModule
from kl_comedy.training.export import save_policy, write_card
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.problems import ProblemSets, PromptSets
from kl_comedy.training.run_folder import (
    PLUGIN_FOLDER,
    PLUGINS,
    Outcome,
    RunDir,
    changed_plugins,
    create_run,
    find_run,
    finished_run,
    repair_config,
    step_of,
)
from kl_comedy.training.sampling import engine_gpus
from kl_comedy.training.stop_signals import StopRequest, stop_requests
from kl_comedy.training.strategies import NEWEST, RankLauncher, strategy_for
from kl_comedy.training.tags import kl_label, policy_tags, term_tags

log = logging.getLogger("kl_comedy")


def train(config: Config, *, console: Console, command: str, problems: ProblemSets | None = None) -> Outcome:
    """Train as ``config`` says. ``command`` is what reproduces the run; ``problems``: the config's, if loaded already.

    Raises :class:`UserError` for a mistake in the config and :class:`RunFailed` for a run that began and could not
    finish; the run is then marked failed with the reason. SIGTERM and SIGUSR1 end it after the current update, saved;
    the latter raises :class:`RunStopped`, which asks to be started again.
    """
    started = time.monotonic()
    set_variables()
    if finished := finished_run(config):
        return finished
    if find_run(config) is None and (reason := changed_plugins(config)):
        console.print(reason, markup=False, soft_wrap=True, highlight=False)
    with stop_requests() as request, process_state_restored(config.train.threads):
        module, data = PolicyModule(config), ExperienceModule(config, problems)
        record, evaluation = RunRecord(config, console, command, request), EvaluationCallback(config, console)
        callbacks = [
            record,
            *configured_callbacks(config),
            MetricsCallback(config.train.samples_every),
            evaluation,
            SignalWarning(),
            ConsoleProgress(console, config.train.steps),
            CheckpointCallback(config, evaluation, request),
        ]
        trainer = make_trainer(config, callbacks)
        record.watch_ranks_of(trainer.strategy.launcher)
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
            results: dict[str, Any] = {"evaluations": evaluation.history, "accuracies": evaluation.accuracies}
            results |= {"metrics": module.last_metrics, "seconds": time.monotonic() - started}
            summary = record.end("FINISHED", **results)
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
    check_trainer_arguments(config)
    _quiet_lightning()
    train = config.train
    on_gpu = pick_device(config.model.device).type == "cuda"
    if on_gpu:
        engine_gpus(config, visible_gpus("cuda"))
    set_by_keys: dict[str, Any] = {  # kl_comedy.training.build.TRAINER_ARGUMENTS has the keys
        "accelerator": "gpu" if on_gpu else "cpu",
        "accumulate_grad_batches": 1,
        "callbacks": list(callbacks),
        "default_root_dir": config.output,
        "deterministic": train.deterministic,
        "devices": train.devices,
        "enable_checkpointing": any(isinstance(each, Checkpoint) for each in callbacks),
        "gradient_clip_algorithm": None,
        "gradient_clip_val": None,
        "logger": False,  # the run's logger joins when the run has a folder
        "max_epochs": 1,
        "max_steps": -1,
        "min_epochs": None,
        "min_steps": None,
        "num_nodes": train.nodes,
        "num_sanity_val_steps": 0,
        "precision": "bf16-mixed" if train.precision == "bf16" else "32-true",
        "reload_dataloaders_every_n_epochs": 0,
        "strategy": strategy_for(config),
        "use_distributed_sampler": False,
    }
    defaults = {"enable_model_summary": False}
    defaults["enable_progress_bar"] = any(isinstance(each, ProgressBar) for each in callbacks)
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    leave_memory_unfilled()
    try:
        return lightning.Trainer(**(defaults | config.trainer | set_by_keys))
    except (TypeError, ValueError, lightning.pytorch.utilities.exceptions.MisconfigurationException) as error:
        if config.trainer:
            raise UserError(f"trainer: {error}") from error
        raise
    finally:
        os.environ |= variables  # Lightning replaces the user's


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
        self._resume_command = command if "resume=auto" in command.split() else f"{command} resume=auto"
        self._ranks = Ranks()
        self._lock = contextlib.ExitStack()
        self._watch = RankWatch(lambda: f"; resume with: {self._resume_command}")

    def watch_ranks_of(self, launcher: Any) -> None:
        """Watch the processes that ``launcher`` will start, if it starts any."""
        if isinstance(launcher, RankLauncher):
            launcher.on_start = self._watch.watch_children

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Find or create the folder, once data and policy are there: a mistake leaves no folder behind."""
        config, data = self._config, trainer.datamodule
        self._ranks = ranks = pl_module.ranks
        self._watch.watch_others(ranks)
        self._kl_label = kl_label(list(pl_module.terms.values()))
        earlier = ranks.broadcast(ranks.on_rank_zero(lambda: find_run(config)))
        run: RunDir = earlier or ranks.broadcast(ranks.on_rank_zero(lambda: create_run(config)))
        ranks.on_rank_zero(lambda: self._lock.enter_context(run.lock()))
        ranks.on_rank_zero(lambda: repair_config(run, config))
        checkpoint = newest_checkpoint(run.checkpoints, ranks) if earlier else None
        step = 0 if checkpoint is None else step_of(checkpoint)
        trainer.strategy.newest_checkpoint = checkpoint
        capabilities = capabilities_of(sampler_of(config))
        if capabilities.needs_folder:
            data.backend.work_in(run.path)
        if not capabilities.in_trainer_ranks and checkpoint is None:
            data.backend.publish(0)  # engines start meanwhile
        frozen = {name: each.hash for name, each in pl_module.references.items() if not each.moving}  # ranks exchange
        hashes = {"reference.hash" if name == "initial" else f"{name}.hash": value for name, value in frozen.items()}

        def start_logger() -> RunLogger:
            logger = RunLogger(
                config.tracking,
                run_dir=run.path,
                run_name=run.path.name,
                params=flatten(to_plain(config)),
                tags=self._tags(run, data.prompts, pl_module) | hashes,
                resume=earlier is not None,
                resume_step=None if checkpoint is None else step,
                live=config.train.checkpoint_every == 0,
            )
            folder = f"provenance/resumed-at-{step}" if earlier else "provenance"
            for file in provenance_files(run.path / folder):
                logger.log_artifact(file, folder=folder)
            if earlier is None and (run.path / PLUGINS).is_file():
                logger.log_artifact(run.path / PLUGINS, folder=PLUGIN_FOLDER)
                for file in sorted((run.path / PLUGIN_FOLDER).rglob("*.py")):
                    logger.log_artifact(file, folder=str(file.parent.relative_to(run.path)))
            return logger

        self._logger = ranks.on_rank_zero(start_logger) or NullLogger()
        others = ranks.on_rank_zero(lambda: self._other_loggers(run)) or []
        trainer.loggers = [self._logger, *others]  # trainer.logger is the first
        self.run, pl_module.run_folder = run, run.path
        nodes = f"{config.train.nodes} node{'s' if config.train.nodes > 1 else ''}"
        where = f"{config.train.strategy}, {ranks.size} processes on {nodes}"
        if ranks.size > 1 or not capabilities.in_trainer_ranks:
            self._console.print(f"{where}; samples from {sampler_of(config)}", soft_wrap=True, highlight=False)
        action = f"resuming at update {step} of" if earlier else "training for"
        self._console.print(f"{action} {config.train.steps} updates in {run.path}", soft_wrap=True, highlight=False)

    def _tags(self, run: RunDir, prompts: PromptSets, module: PolicyModule) -> dict[str, str]:
        """What exactly is trained: config, data, certificates."""
        config = self._config
        self._certificate = term_tags(config, list(module.terms.values()))
        return {
            **provenance_tags(plugins=plugins_of(config)),
            "host.products": linear_library(),
            "config.hash": config_hash(config),
            "config.hash_without_seed": config_hash(config, without=("seed",)),
            **{f"data.hash.{name}": value for name, value in prompts.hashes.items()},
            **{f"data.count.{name}": str(value) for name, value in prompts.counts.items()},
            **self._certificate,
            **policy_tags(config),
            "run.command": self._command,
            "run.dir": str(run.path),
        }

    def _other_loggers(self, run: RunDir) -> list[Any]:
        """Those of ``tracking.loggers``, which get the config without secrets."""
        loggers = build_loggers(self._config.tracking.loggers, run.path, run.path.name)
        for logger in loggers:
            logger.log_hyperparams(param_texts(flatten(to_plain(self._config))))
        return loggers

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """From now on a signal lets the current update finish.

        Lightning's SIGTERM handler, registered just before, broadcasts in the middle of whatever the process does,
        another exchange too, and waits there for ever. Ours replaces it until the end of the fit.
        """
        self._request.finishing = True
        self._request.listen()

    def save_policy(self, module: PolicyModule) -> None:
        """Write RUN/policy. Raises :class:`RunFailed` where it cannot be written."""
        assert self.run is not None
        try:
            self._ranks.raise_on_all_ranks(partial(save_policy, self.run, module))
        except (OSError, RankFailed) as error:
            module.last_batch = None  # it is not the reason
            room = f"with room for it: kl-comedy export {self.run.path} FOLDER"
            raise RunFailed(f"trained, but the policy could not be written: {error}; {room}") from error

    def fail(self, error: BaseException, module: PolicyModule) -> None:
        """Write the summary of a run that ended early. Returns where ``error`` itself should be raised.

        Raises :class:`RunStopped` after SIGUSR1, else :class:`RunFailed`.
        """
        lost = self._watch.lost(error)
        if lost is not None:
            reason = f"{lost} at update {module.version} of {self._config.train.steps}"
            self.end("FAILED", reason)
            raise RunFailed(f"{reason}; resume with: {self._resume_command}") from None
        if isinstance(error, KeyboardInterrupt | SystemExit):
            received = self._request.signal
            reason = f"{f'stopped by {received.name}' if received else 'interrupted'} at update {module.version}"
            self.end("KILLED", reason)
            kind = RunStopped if received is signal.SIGUSR1 else RunFailed
            raise kind(f"{reason} of {self._config.train.steps}; resume with: {self._resume_command}") from None
        if self.run is None or not isinstance(error, RunFailed):
            where = f" (plugin {line})" if (line := plugin_line(error)) else ""
            self.end("FAILED", f"{type(error).__name__}: {error}{where}")
            return
        reason = str(error)
        if module.last_batch is not None and self._ranks.is_rank_zero:
            file = self.run.path / "failed_batch.json"
            rows = []
            for row in module.last_batch.rows:
                tokens = {"completion_ids": row.rollout.completion_ids, "behaviour_logps": row.rollout.logps}
                rows.append({**sample_rows((row,))[0], **tokens})
            atomic_write(file, json.dumps({"reason": redact(reason), "rows": rows}, indent=1))
            reason += f"; the last batch is kept in {file}"
        self.end("FAILED", reason)
        raise RunFailed(reason) from error

    def end(self, status: str, reason: str | None = None, **results: Any) -> dict[str, Any]:
        """Close the logger and write the summary; the summary. Empty where the run has no folder yet."""
        run, config = self.run, self._config
        if run is None:
            return {}
        self._logger.log_artifact(run.path / "config.yaml", folder="config")
        self._logger.finish(status, reason)
        summary = {
            "status": status,
            "reason": None if reason is None else redact(reason),
            "name": config.name,
            "seed": config.seed,
            "steps": config.train.steps,
            "config_hash": config_hash(config),
            "kl": self._kl_label,
            "command": self._command,
            "resume_command": self._resume_command,
            "evaluate_command": _evaluate_command(run, config),
            "mlflow_uri": config.tracking.uri,
            "run_id": self._logger.run_id,
            **results,
        }
        try:
            if self._ranks.is_rank_zero:
                run.write_summary(summary)
                if status == "FINISHED":
                    write_card(run.policy, config, summary, self._certificate)
        except OSError as error:
            message = f"{run.path}/summary.json cannot be written ({error.strerror})"
            if status == "FINISHED":
                raise RunFailed(f"{message}; run it again") from error
            log.warning(message)
        return summary

    def close(self) -> None:
        """Release the folder."""
        self._watch.end()
        self._lock.close()


def _evaluate_command(run: RunDir, config: Config) -> str:
    words = ["kl-comedy", "evaluate", str(run.path / "config.yaml"), f"model.source={run.policy}"]
    words += ["model.options={}"] if config.model.options else []
    words += [] if config.model.lora is None else ["model.lora=null"]  # RUN/policy is merged
    words += [f"eval.reference={run.path / 'config.yaml'}"] if config.eval.kl else []
    return shlex.join(words)
