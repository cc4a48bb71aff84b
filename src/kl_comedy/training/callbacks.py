"""Lightning callbacks of a run, and those a config may name: metrics, evaluation, progress, checkpoints.

Around an update, in this order: the user's callbacks, metrics and samples, evaluation, display, checkpoint or stop.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from signal import SIGTERM
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from kl_comedy.config import Config
from kl_comedy.config.combinations import updates_from_a_batch
from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.evaluation import EvalResult
from kl_comedy.evaluation.likelihood import ChoiceSet
from kl_comedy.phases import listen, phase
from kl_comedy.progress import PHASE_EVERY_S, PLAIN_EVERY_S, Bars, PlainLines, TimeLeft, TimeLeftColumn, memory_text
from kl_comedy.records import Scored
from kl_comedy.registry import CALLBACKS
from kl_comedy.rollouts.recording import RecordingWriter
from kl_comedy.tracking.tokens import traced_row
from kl_comedy.training.callback_rules import reason_against, unknown_monitor
from kl_comedy.training.checkpoint import SaveFailed, save_checkpoint
from kl_comedy.training.module import PolicyModule, is_sampled
from kl_comedy.training.run_folder import RunDir, saved, step_of
from kl_comedy.training.stop_signals import SIGNAL_SECONDS, StopRequest

log = logging.getLogger("kl_comedy")

SAMPLE_ROWS = 16
"""Completions per samples table: enough to see a group beside another."""


@dataclass(frozen=True, kw_only=True)
class RequestedCallback:
    """A registered callback that the config asks for, and the key that does."""

    key: str
    name: str
    options: Mapping[str, Any]


def _requested_callbacks(config: Config) -> list[RequestedCallback]:
    requested = [
        RequestedCallback(key=f"callbacks.{position}", name=item.name, options=item.options)
        for position, item in enumerate(config.callbacks)
    ]
    if config.audit.every:
        requested.append(RequestedCallback(key="audit", name="audit", options=dict(vars(config.audit))))
    if config.train.record_rollouts != "none":
        options = {"format": config.train.record_rollouts}
        requested.append(RequestedCallback(key="train.record_rollouts", name="record_rollouts", options=options))
    return requested


def configured_callbacks(config: Config) -> list[Callback]:
    """The callbacks that ``callbacks``, ``audit`` and ``train.record_rollouts`` ask for.

    Raises :class:`UserError` for an unknown name or option, for a callback of Lightning's that cannot work, as a
    callback's own ``check_config(config)`` may, and for one that monitors a metric which no run of ``config`` has.
    """
    callbacks = []
    all_requested = _requested_callbacks(config)
    # All of them before a model is loaded: a wrong option should not cost the start of a run.
    for requested in all_requested:
        callback = _build_callback(requested)
        reason = reason_against(callback, config)
        if reason is not None:
            raise UserError(f"{requested.key}: {requested.name} cannot work in a run: {reason}")
        # A plugin's callback is any callback of Lightning's, which knows nothing of configs.
        if hasattr(callback, "check_config"):
            callback.check_config(config)
        callbacks.append(callback)
    # Last: a callback may monitor what another one logs.
    for requested, callback in zip(all_requested, callbacks, strict=True):
        fault = unknown_monitor(callback, config, callbacks)
        if fault is not None:
            raise UserError(f"{requested.key}.options.monitor: {fault}")
    return callbacks


def _build_callback(requested: RequestedCallback) -> Callback:
    key = requested.key
    name = requested.name
    build = CALLBACKS.get(name, key=f"{key}.name").fn
    # Checked before the call, because a TypeError from inside of it is a bug of the callback and not of the config.
    try:
        inspect.signature(build).bind(**requested.options)
    except TypeError as error:
        allowed = f"the arguments of {name}"
        raise bad_value(f"{key}.options", requested.options, allowed, str(error)) from None
    try:
        callback = build(**requested.options)
    except MisconfigurationException as error:
        raise UserError(f"{key}.options: {error}") from None
    if not isinstance(callback, Callback):
        raise UserError(f"{key}.name: {name} gives a {type(callback).__name__}, and not a Lightning Callback")
    return callback


def sample_rows(rows: Sequence[Scored]) -> list[dict[str, Any]]:
    """The first completions as table rows, with their text unchanged."""
    table = []
    for row in rows[:SAMPLE_ROWS]:
        rollout = row.rollout
        version = None
        if rollout.drawn_versions:
            # That of the first token: with weights in flight later ones may have another.
            version = rollout.drawn_versions[0]
        facts = {
            "problem": rollout.prompt.problem.text,
            "answer": rollout.prompt.problem.answer,
            "completion": rollout.text,
            "reward": row.reward.value,
            "status": row.reward.status,
            "tokens": len(rollout.completion_ids),
            "stop_reason": rollout.stop_reason,
            "version": version,
        }
        if row.reward.gold is not None:
            facts["gold"] = row.reward.gold
        table.append(facts)
    return table


def training_samples(module: PolicyModule) -> list[dict[str, Any]]:
    """The rows of a table of samples after an update; the first ones with what it computed of their tokens."""
    assert module.last_batch is not None
    rows = module.last_batch.rows
    tokenizer = module.loaded.tokenizer
    special_ids = frozenset(tokenizer.all_special_ids)
    table = sample_rows(rows)
    for position, numbers in module.last_tokens.items():
        rollout = rows[position].rollout
        table[position] |= traced_row(
            numbers, rollout.completion_ids, rollout.group_id, tokenizer=tokenizer, special_ids=special_ids
        )
    return table


class RecordRollouts(Callback):
    """Writes every batch to ``rollouts/`` of the run's folder, before its first update.

    So the batches up to any checkpoint are on disk; on resume later ones are removed and drawn again.
    """

    def __init__(self, format: str = "jsonl") -> None:
        self._format = format

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        config = pl_module.config
        folder = pl_module.run_folder / "rollouts"
        self._writer = RecordingWriter(folder, self._format, temperature=config.rollout.temperature)
        # Rounded up: the batch in use is on disk already, and a resumed run does not draw it again.
        next_batch = -(-pl_module.version // updates_from_a_batch(config))
        pl_module.ranks.on_rank_zero(lambda: self._writer.remove_from(next_batch))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # Once per batch: its later updates learn from the same rows.
        if batch.first:
            pl_module.ranks.on_rank_zero(lambda: self._writer.write(batch.iteration, batch.batch))


class MetricsCallback(Callback):
    """Logs every update's metrics, and a table of completions every ``samples_every`` updates."""

    def __init__(self, samples_every: int) -> None:
        self._every = samples_every

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        version = pl_module.version
        for logger in trainer.loggers:
            logger.log_metrics(pl_module.last_metrics, step=version)
        if is_sampled(version, self._every):
            # The first logger is the run's own; Lightning's others have no tables.
            trainer.logger.log_table("samples", training_samples(pl_module), step=version)


class EvaluationCallback(Callback):
    """Runs Lightning's validation loop at the start, every ``eval_every`` updates, and at the end; logs the scores.

    ``history``: mean rewards by set and update, gold verdicts where the run has them; ``proxies``: then the means of
    what is trained on; ``accuracies``: those of suites by log-prob, which have no reward.
    """

    def __init__(self, config: Config, console: Console) -> None:
        self._config = config
        self._console = console
        self.history: dict[str, dict[int, float]] = {}
        self.proxies: dict[str, dict[int, float]] = {}
        self.accuracies: dict[str, dict[int, float]] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Evaluate the policy before its first update, as Lightning's sanity check.

        EarlyStopping and ModelCheckpoint skip a sanity check: no metric of an update is there yet. Lightning would run
        it before :meth:`RunRecord.on_train_start`, and a signal would wait there for ever.
        """
        # A resumed run has its first evaluation in the history already.
        if self._config.eval.at_start and pl_module.version == 0:
            trainer.num_sanity_val_steps = math.inf  # every set
            trainer._run_sanity_check()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        every = self._config.train.eval_every
        version = pl_module.version
        is_due = every > 0 and version % every == 0
        # should_stop: a callback before this one ends the run here.
        is_last = version == self._config.train.steps or trainer.should_stop
        if is_due or (is_last and self._config.eval.at_end):
            self._validate(trainer)

    def _validate(self, trainer: Any) -> None:
        """What Lightning's training loop does between two batches, here at the end of one.

        A checkpoint is written at the end of a batch, and must hold what callbacks have made of the evaluation.
        """
        # Reading them stores those of the update, which a callback may monitor at the end of the validation.
        _ = trainer.callback_metrics
        connector = trainer._logger_connector
        first_iteration = connector._first_loop_iter
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
        connector._first_loop_iter = first_iteration

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *rest: Any) -> None:
        """Log and print the scores of one set."""
        version = pl_module.version
        result: EvalResult = outputs
        scores = result.row()
        # By update, so that a resumed run that repeats one replaces its score.
        for history, score in ((self.history, "reward"), (self.proxies, "proxy"), (self.accuracies, "accuracy")):
            if score in scores:
                history.setdefault(result.name, {})[version] = scores[score]
        for logger in trainer.loggers:
            logger.log_metrics(result.metrics(), step=version)
        line = f"eval {result.name} at update {version}: {result.line()}"
        self._console.print(line, soft_wrap=True, highlight=False)
        if isinstance(batch, ChoiceSet):
            trainer.logger.log_table(f"choices/{result.name}", list(result.rows[:SAMPLE_ROWS]), step=version)
        else:
            trainer.logger.log_table(f"eval/{result.name}", sample_rows(result.rows), step=version)

    def reward_at(self, version: int) -> float | None:
        """The mean reward over the sets evaluated at ``version``, suites by log-prob aside; None without any."""
        rewards = [values[version] for values in self.history.values() if version in values]
        if not rewards:
            return None
        # The mean is over sets and not over problems: a large set should not decide alone which checkpoint is best.
        return sum(rewards) / len(rewards)

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy({"history": self.history, "proxies": self.proxies, "accuracies": self.accuracies})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = state_dict["history"]
        self.proxies = state_dict.get("proxies", {})
        self.accuracies = state_dict.get("accuracies", {})  # checkpoints of earlier versions have none


class CheckpointCallback(Checkpoint):
    """A whole checkpoint every ``checkpoint_every`` updates, at the end, and when a signal asks to stop.

    All ranks stop after the same update, whichever of them received the signal; ``interrupted`` is true then. Where a
    checkpoint cannot be written (full disk, quota, read-only) the run ends on every rank; the one before stays.
    """

    def __init__(self, config: Config, evaluation: EvaluationCallback, request: StopRequest) -> None:
        self._train = config.train
        self._evaluation = evaluation
        self._request = request
        self.interrupted = False
        self._was_stopped = False
        # Only a job that is signalled before its end can lose what it has not saved.
        self._warning_s = float(os.environ.get(SIGNAL_SECONDS) or math.inf)
        # The longest so far, in seconds: of an update with its evaluation, and of a save.
        self._update_s = 0.0
        self._save_s = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # A process that was killed between this checkpoint and the summary repeats no update.
        trainer.should_stop = trainer.should_stop or self._was_stopped
        self._since = time.monotonic()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save what the user's callbacks read and write in the trainer, which Lightning does not save."""
        # A metric that is not measured at every update is there as its last value, and one may be monitored.
        checkpoint["callback_metrics"] = dict(trainer.callback_metrics)
        checkpoint["stopped"] = trainer.should_stop and not self.interrupted

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        # Checkpoints of earlier versions have neither.
        trainer.callback_metrics.update(checkpoint.get("callback_metrics", {}))
        self._was_stopped = checkpoint.get("stopped", False)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        # The longest and not the last: a stop may come in an update that evaluates.
        self._update_s = max(self._update_s, time.monotonic() - self._since)
        version = pl_module.version
        # should_stop: a callback of the user's ends the run here, as finished.
        is_last = version == self._train.steps or trainer.should_stop
        is_due = self._is_due(version, is_last)
        if is_due:
            self.save(trainer, version)
        # Gathered after every update: a rank that stopped alone would leave the others waiting in the next one.
        received = {signal for signal in pl_module.ranks.gather(self._request.signal) if signal is not None}
        if received and not is_last:
            self.interrupted = True
            # An end outranks a pause, as in stop_signals.py.
            if SIGTERM in received:
                self._request.signal = SIGTERM
            else:
                self._request.signal = received.pop()
            trainer.should_stop = True
            # Saved once, also where a regular checkpoint falls on this update.
            if not is_due:
                self.save(trainer, version)
        self._warn_if_a_stop_takes_too_long()
        self._since = time.monotonic()

    def _is_due(self, version: int, is_last: bool) -> bool:
        every = self._train.checkpoint_every
        if every == 0:
            return False
        return version % every == 0 or is_last

    def _warn_if_a_stop_takes_too_long(self) -> None:
        needed_s = self._update_s + self._save_s
        if needed_s > self._warning_s:
            log.warning(
                f"stopping takes up to {needed_s:.0f} s (an update with evaluation {self._update_s:.0f} s, a "
                f"checkpoint {self._save_s:.0f} s), and this job is signalled {self._warning_s:g} s before its end: it "
                "may be killed before it has saved; raise signal_seconds in the profile"
            )
            self._warning_s = math.inf  # once

    def save(self, trainer: Any, version: int) -> None:
        """Write the checkpoint of ``version``. Raises :class:`RunFailed` where it cannot be written."""
        module: Any = trainer.lightning_module
        root = RunDir(path=module.run_folder).checkpoints
        start = time.monotonic()
        phase("saving a checkpoint")
        try:
            save_checkpoint(
                root,
                version,
                trainer.save_checkpoint,
                keep=self._train.keep_checkpoints,
                reward=self._evaluation.reward_at(version),
                ranks=module.ranks,
            )
        except SaveFailed as error:
            last = max(map(step_of, saved(root)), default=0)
            raise RunFailed(
                f"the checkpoint of update {version} cannot be written ({error}); a resume will start from update "
                f"{last} once {root} can be written again"
            ) from error
        self._save_s = max(self._save_s, time.monotonic() - start)
        # After the checkpoint is whole: metrics of updates that a resume repeats must not reach the store twice.
        trainer.logger.commit(version)


def status_line(metrics: Mapping[str, float]) -> str:
    """The few numbers worth watching. The KL is per completion: exact at updates that measure it, else sampled k1.

    >>> status_line({"train/reward": 0.5, "kl/k1_reverse_sequence": 0.01, "time/tokens_per_second": 100.0})
    'reward 0.500  sampled k1 KL 0.0100 nats  100 tok/s'
    >>> status_line({"train/reward": 0.25, "train/verifier_failed": 0.5})
    'reward 0.250  VERIFIER FAILED on 50.0%'
    """
    formats = {"train/reward": "reward {:.3f}", "train/gold": "gold {:.3f}"}
    if "kl/exact_reverse_sequence" in metrics:
        formats["kl/exact_reverse_sequence"] = "exact KL {:.4f} nats"
    else:
        formats["kl/k1_reverse_sequence"] = "sampled k1 KL {:.4f} nats"
    formats["policy/entropy"] = "entropy {:.3f}"
    formats["train/length"] = "length {:.1f}"
    formats["time/tokens_per_second"] = "{:.0f} tok/s"
    # A bug of a reward shows in every line, and not in one warning only.
    if metrics.get("train/verifier_failed", 0.0) > 0:
        formats["train/verifier_failed"] = "VERIFIER FAILED on {:.1%}"
    return "  ".join(text.format(metrics[key]) for key, text in formats.items() if key in metrics)


class _ThreeLines(Bars):
    """The bar, beneath it the phase and the memory, and beneath these the numbers: 80 columns hold no two of them."""

    phase = ""
    memory = ""
    numbers = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        # Drawn from what the last report and the last update left: drawing asks the run for nothing.
        second_line = "  ".join(text for text in (self.phase, self.memory) if text)
        for line in (second_line, self.numbers):
            yield Text(line, no_wrap=True, overflow="ellipsis")


class ConsoleProgress(ProgressBar):
    """Updates, time left, phase, memory, reward, KL and tokens/s: a bar on a terminal, plain lines elsewhere.

    The time left comes from the durations of the last updates, with their evaluations and checkpoints.
    """

    def __init__(self, console: Console, steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._console = console
        self._steps = steps
        self._clock = clock
        self._time_left = TimeLeft(steps, clock=clock)
        self._lines = PlainLines(clock)
        self._bar = _ThreeLines(
            TextColumn("[bold]update"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeLeftColumn(),
            console=console,
            get_time=clock,
        )
        self._task = self._bar.add_task("train", total=steps, start=False, time_left=self._time_left)
        self._version = 0

    def enable(self) -> None: ...

    def disable(self) -> None:
        """Ranks other than 0 print nothing, because their console is quiet."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        self._console.print(*args, **kwargs)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Shown from here on: the evaluation before the first update may take minutes."""
        if self._console.quiet:
            return
        self._bar.memory = memory_text()
        # With its clock: without one, a run that evaluates for minutes would look as if it stood still.
        self._bar.start_task(self._task)
        self._bar.start()
        listen(self._show_phase)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._version = pl_module.version
        self._time_left = TimeLeft(self._steps, self._version, clock=self._clock)
        if not self._console.quiet:
            self._bar.update(self._task, completed=self._version, time_left=self._time_left)

    def _show_phase(self, text: str) -> None:
        self._bar.phase = text
        # In a log a phase is news only where an update takes minutes.
        if not self._console.is_terminal and self._lines.due(PHASE_EVERY_S):
            self._print_line(f"update {self._version + 1}/{self._steps}", text)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        version = pl_module.version
        self._version = version
        self._time_left.reach(version)
        if self._console.quiet:
            return
        numbers = status_line(pl_module.last_metrics)
        memory = memory_text()
        if "time/flop_utilization" in pl_module.last_metrics:
            memory += f"  FLOP utilization {pl_module.last_metrics['time/flop_utilization']:.0%}"
        self._bar.memory = memory
        self._bar.numbers = numbers
        self._bar.update(self._task, completed=version)
        if self._console.is_terminal:
            return
        # The first shows that a run has begun to learn, the last how it ended.
        is_first_or_last = version in (1, self._steps)
        if self._lines.due(PLAIN_EVERY_S, always=is_first_or_last):
            self._print_line(f"update {version}/{self._steps}", numbers, memory, self._time_left.text())

    def _print_line(self, *texts: str) -> None:
        line = "  ".join(text for text in texts if text)
        self._console.print(line, soft_wrap=True, markup=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        # A bar that is still live would draw over the error message.
        self._stop()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """For a run that a callback stopped before it began to train."""
        self._stop()

    def _stop(self) -> None:
        listen(None)
        # The last picture stays on the screen, and nothing is under way any more.
        self._bar.phase = ""
        self._bar.stop()
