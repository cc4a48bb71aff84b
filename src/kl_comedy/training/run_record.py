"""The record of a run: its folder and lock, its loggers, and how it ended."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback, EarlyStopping, Timer
from rich.console import Console

from kl_comedy.config import Config, config_hash, flatten, to_plain
from kl_comedy.errors import RunFailed, RunInterrupted, RunStopped
from kl_comedy.models.onednn_linear import linear_library
from kl_comedy.redaction import redact
from kl_comedy.registry import plugin_line
from kl_comedy.tracking import provenance_files, provenance_tags
from kl_comedy.tracking.logger import NullLogger, ResumedFrom, RunLogger
from kl_comedy.tracking.loggers import build_loggers
from kl_comedy.tracking.provenance import FOLDER, NOTE
from kl_comedy.tracking.store import param_texts
from kl_comedy.tracking.upload import run_name
from kl_comedy.training.checkpoint import newest_checkpoint
from kl_comedy.training.distributed import RankFailed, Ranks, RankWatch
from kl_comedy.training.export import save_policy, write_card
from kl_comedy.training.extension import Extension, extension_of
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.open_run import Opened, create_run, open_run
from kl_comedy.training.problems import PromptSets
from kl_comedy.training.run_folder import RunDir, step_of
from kl_comedy.training.run_outcome import resume_command, run_summary, write_failed_batch
from kl_comedy.training.run_plugins import PLUGIN_FOLDER, PLUGINS, plugins_of
from kl_comedy.training.stop_signals import StopRequest
from kl_comedy.training.strategies import RankLauncher
from kl_comedy.training.tags import description, kl_label, policy_tags, term_tags

log = logging.getLogger("kl_comedy")


class AlreadyFinished(Exception):
    """The run was finished before, which rank 0 saw when the processes were connected. Raised on all of them."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(f"{run.path} is finished")
        self.run = run


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """A run's folder, locked for this process, and where training begins in it."""

    run: RunDir
    is_new: bool
    """Whether this process made the folder."""
    checkpoint: Path | None
    """What training resumes from; None where it begins at update 0."""
    extension: Extension | None = None
    """What the run extends."""

    @property
    def is_resumed(self) -> bool:
        """Whether there is something to continue: an earlier start of this run, with a checkpoint or without, or
        another run."""
        return not self.is_new or self.extension is not None

    @property
    def step(self) -> int:
        """The update after which training begins."""
        if self.checkpoint is None:
            return 0
        return step_of(self.checkpoint)


def begin(
    opened: Opened, config: Config, ranks: Ranks, lock: contextlib.ExitStack, folder: Path | None = None
) -> Beginning:
    """Make the folder where it is new, and lock it until ``lock`` is closed. All ranks call, with rank 0's answer.

    Raises :class:`UserError` on all ranks where another process trains in the folder.
    """
    is_new = opened.is_new_folder
    if is_new:
        created = ranks.broadcast(ranks.on_rank_zero(lambda: create_run(opened, config, folder)))
        assert created is not None
        opened = created
    run = RunDir(path=opened.folder)
    ranks.on_rank_zero(lambda: lock.enter_context(run.lock()))
    extension = ranks.broadcast(ranks.on_rank_zero(lambda: extension_of(run)))
    checkpoint = None
    if opened.kind != "new":
        checkpoint = newest_checkpoint(run.checkpoints, ranks)
    return Beginning(run=run, is_new=is_new, checkpoint=checkpoint, extension=extension)


def stop_reason(callbacks: Sequence[Any]) -> str:
    """The callback that set ``trainer.should_stop``, with its reason where it is one of Lightning's.

    >>> stop_reason([Timer(duration={"hours": 1})])
    'a callback (trainer.should_stop)'
    """
    for callback in callbacks:
        if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
            message = callback.stopping_reason_message.removesuffix(" Signaling Trainer to stop.")
            return f"EarlyStopping: {message}"
        if isinstance(callback, Timer):
            remaining = callback.time_remaining()
            if remaining is not None and remaining <= 0:
                return "Timer: its duration has passed"
    return "a callback (trainer.should_stop)"


class RunRecord(Callback):
    """The run's folder, its logger, and how it ended. ``run`` is None until everything is built."""

    def __init__(
        self,
        config: Config,
        console: Console,
        command: str,
        request: StopRequest,
        *,
        opened: Opened | None = None,
        folder: Path | None = None,
    ) -> None:
        self.run: RunDir | None = None
        self._opened = opened
        self._folder = folder
        self._config = config
        self._console = console
        self._command = command
        self._request = request
        self._ranks = Ranks()
        self._stopped_at: int | None = None
        self._lock = contextlib.ExitStack()
        self._watch = RankWatch(lambda: f"; resume with: {resume_command(command)}")

    def watch_ranks_of(self, launcher: Any) -> None:
        """Watch the processes that ``launcher`` will start, if it starts any."""
        if isinstance(launcher, RankLauncher):
            launcher.on_start = self._watch.watch_children

    # --- beginning ---

    def ask(self, ranks: Ranks) -> None:
        """Which run this is, on all ranks as rank 0 sees it. Called when they are connected, before anything is loaded.

        Raises :class:`AlreadyFinished` where there is nothing to train.
        """
        opened = ranks.broadcast(ranks.on_rank_zero(lambda: self._opened or open_run(self._config, self._folder)))
        assert opened is not None
        self._opened = opened
        if opened.kind == "finished":
            raise AlreadyFinished(RunDir(path=opened.folder))
        if opened.reason is not None:
            self._print(opened.reason)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True, highlight=False)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Lock the folder, made now where it is new: data and policy are there, and a mistake leaves none behind."""
        module: PolicyModule = pl_module
        self._ranks = module.ranks
        self._watch.watch_others(self._ranks)
        self._kl_label = kl_label(list(module.terms.values()))
        self._sampler = module.run.sampler
        assert self._opened is not None, "ask() comes first"
        opened = begin(self._opened, self._config, self._ranks, self._lock, self._folder)
        trainer.strategy.newest_checkpoint = opened.checkpoint
        self._prepare_sampler(trainer.datamodule.backend, opened)
        self._start_loggers(trainer, module, opened)
        # Set last: from now on an early end writes a summary into the folder.
        self.run = opened.run
        module.run_folder = opened.run.path
        self._announce(opened)

    def _prepare_sampler(self, backend: Any, opened: Beginning) -> None:
        if self._sampler.capabilities.needs_folder:
            backend.work_in(opened.run.path)
        if self._sampler.beside and opened.checkpoint is None:
            # Engines start on the first weights they are given, and take long: they do it while the loggers start.
            # A resumed run publishes when its weights are restored.
            backend.publish(0)

    def _start_loggers(self, trainer: Any, module: PolicyModule, opened: Beginning) -> None:
        hash_tags: dict[str, str] = {}
        if opened.extension is not None:
            hash_tags |= opened.extension.tags()
        for name, reference in module.frozen_references.items():
            tag = f"{name}.hash"
            if name == "initial":
                # Its tag is older than the other references, and stored runs are compared by it.
                tag = "reference.hash"
            hash_tags[tag] = reference.hash  # on every rank: sharded weights are hashed by an exchange
        prompts: PromptSets = trainer.datamodule.prompts
        logger = self._ranks.on_rank_zero(lambda: self._start_logger(module, prompts, opened, hash_tags))
        self._logger = logger or NullLogger()
        others = self._ranks.on_rank_zero(lambda: self._other_loggers(opened.run)) or []
        trainer.loggers = [self._logger, *others]  # trainer.logger is the first

    def _start_logger(
        self, module: PolicyModule, prompts: PromptSets, opened: Beginning, hash_tags: dict[str, str]
    ) -> RunLogger:
        """The run's own logger, with what a reader needs to repeat the run: tags, provenance, plugins."""
        config = self._config
        run = opened.run
        resumed = None
        if opened.is_resumed:
            # Without a checkpoint everything that was logged is made again.
            resume_step = None
            if opened.checkpoint is not None:
                resume_step = opened.step
            resumed = ResumedFrom(step=resume_step)
        self._run_tags = self._tags(run, prompts, module) | hash_tags
        logger = RunLogger(
            config.tracking,
            run_dir=run.path,
            params=flatten(to_plain(config)),
            tags=self._run_tags,
            resumed=resumed,
            live=config.train.checkpoint_every == 0,
        )
        folder = "provenance"
        if not opened.is_new:
            # It may be on another machine or version now; its provenance goes beside the first.
            folder = f"provenance/resumed-at-{opened.step}"
        for file in provenance_files(run.path / folder):
            logger.log_artifact(file, folder=folder)
        if opened.is_new and (run.path / PLUGINS).is_file():
            logger.log_artifact(run.path / PLUGINS, folder=PLUGIN_FOLDER)
            for file in sorted((run.path / PLUGIN_FOLDER).rglob("*.py")):
                logger.log_artifact(file, folder=str(file.parent.relative_to(run.path)))
        return logger

    def _tags(self, run: RunDir, prompts: PromptSets, module: PolicyModule) -> dict[str, str]:
        """What exactly is trained: config, data, certificates."""
        config = self._config
        # Kept for the model card at the end: enumerating takes a second.
        self._certificate = term_tags(config, list(module.terms.values()))
        tags = {
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
            FOLDER: run.label,
        }
        return {**tags, NOTE: description(tags)}

    def _other_loggers(self, run: RunDir) -> list[Any]:
        """Those of ``tracking.loggers``, which get config, description and tags without secrets."""
        params = flatten(to_plain(self._config))
        loggers = build_loggers(self._config.tracking.loggers, run.path, run_name(params, run.path.name))
        tags = {**self._config.tracking.tags, **self._run_tags}
        texts = {key: redact(text, key) for key, text in tags.items()}
        note = texts[NOTE]
        # The others are what MLflow's own pages are made of.
        shown = {key: text for key, text in texts.items() if not key.startswith("mlflow.")}
        for logger in loggers:
            logger.log_hyperparams(param_texts(params))
            if hasattr(logger, "describe"):
                logger.describe(note, shown)
        return loggers

    def _announce(self, opened: Beginning) -> None:
        train = self._config.train
        if self._ranks.size > 1 or self._sampler.beside:
            nodes = "1 node" if train.nodes == 1 else f"{train.nodes} nodes"
            processes = f"{train.strategy}, {self._ranks.size} processes on {nodes}"
            self._console.print(f"{processes}; samples from {self._sampler.name}", soft_wrap=True, highlight=False)
        action = "training for"
        if opened.is_resumed:
            action = f"resuming at update {opened.step} of"
        text = f"{action} {train.steps} updates in {opened.run.path}"
        if opened.extension is not None:
            text += f", which extends {opened.extension.run} from its update {opened.extension.update}"
        self._console.print(text, soft_wrap=True, highlight=False)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """From now on a signal lets the current update finish.

        Lightning's SIGTERM handler, registered just before, broadcasts in the middle of whatever the process does,
        another exchange too, and waits there for ever. Ours replaces it until the end of the fit.
        """
        self._request.finishing = True
        self._request.listen()

    # --- end ---

    def stopped_early(self, trainer: Any, module: PolicyModule) -> str:
        """Why the user's callbacks ended the run, in one line, which is printed too."""
        self._stopped_at = module.version
        text = f"stopped at update {module.version} of {self._config.train.steps} by {stop_reason(trainer.callbacks)}"
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)
        return text

    def save_policy(self, module: PolicyModule) -> None:
        """Write RUN/policy. Raises :class:`RunFailed` where it cannot be written."""
        assert self.run is not None
        try:
            self._ranks.raise_on_all_ranks(partial(save_policy, self.run, module))
        except (OSError, RankFailed) as error:
            module.last_batch = None  # it is not the reason
            advice = f"after freeing disk space, run: kl-comedy export {self.run.path} FOLDER"
            raise RunFailed(f"trained, but the policy could not be written: {error}; {advice}") from error

    def fail(self, error: BaseException, module: PolicyModule) -> None:
        """Write the summary of a run that ended early. Returns where ``error`` itself should be raised.

        The loss of another rank comes first, because it is the cause of many other errors. Raises :class:`RunStopped`
        after SIGUSR1, :class:`RunInterrupted` after SIGTERM and Ctrl-C, else :class:`RunFailed`.
        """
        lost_ranks = self._watch.lost(error)
        if lost_ranks is not None:
            reason = f"{lost_ranks} at update {module.version} of {self._config.train.steps}"
            self.end("FAILED", reason)
            raise RunFailed(f"{reason}; {self._resume_advice}") from None
        if isinstance(error, KeyboardInterrupt | SystemExit):
            self._fail_by_interrupt(module)
        elif isinstance(error, RunFailed) and self.run is not None:
            self._fail_with_batch(error, self.run, module)
        else:
            plugin = plugin_line(error)
            origin = ""
            if plugin:
                origin = f" (plugin {plugin})"
            self.end("FAILED", f"{type(error).__name__}: {error}{origin}")

    @property
    def _resume_advice(self) -> str:
        return f"resume with: {resume_command(self._command)}"

    def _fail_by_interrupt(self, module: PolicyModule) -> None:
        received = self._request.signal
        event = "interrupted"
        if received:
            event = f"stopped by {received.name}"
        reason = f"{event} at update {module.version}"
        self.end("KILLED", reason)
        # SIGUSR1 comes before a job's time limit: whoever sent it starts the job again.
        message = f"{reason} of {self._config.train.steps}; {self._resume_advice}"
        if received is signal.SIGUSR1:
            raise RunStopped(message) from None
        raise RunInterrupted(message) from None

    def _fail_with_batch(self, error: RunFailed, run: RunDir, module: PolicyModule) -> None:
        reason = str(error)
        if module.last_batch is not None and self._ranks.is_rank_zero:
            file = write_failed_batch(run, reason, module.last_batch.rows)
            reason += f"; the last batch is kept in {file}"
        self.end("FAILED", reason)
        raise RunFailed(reason) from error

    def end(self, status: str, reason: str | None = None, **results: Any) -> dict[str, Any]:
        """Close the logger and write the summary; the summary. Empty where the run has no folder yet."""
        run = self.run
        if run is None:
            return {}
        self._logger.log_artifact(run.path / "config.yaml", folder="config")
        self._logger.finish(status, reason)
        summary = run_summary(
            run,
            self._config,
            status=status,
            reason=reason,
            command=self._command,
            kl_label=self._kl_label,
            run_id=self._logger.run_id,
        )
        if self._stopped_at is not None:
            summary["steps"] = self._stopped_at
        summary |= results
        try:
            if self._ranks.is_rank_zero:
                run.write_summary(summary)
                if status == "FINISHED":
                    write_card(run.policy, self._config, summary, self._certificate)
        except OSError as error:
            message = f"{run.path}/summary.json cannot be written ({error.strerror})"
            if status == "FINISHED":
                # Without a summary the run counts as unfinished; a second start finishes it from its last checkpoint.
                raise RunFailed(f"{message}; run it again") from error
            log.warning(message)
        return summary

    def close(self) -> None:
        """Release the folder."""
        self._watch.end()
        self._lock.close()
