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
from collections.abc import Iterable, Mapping, Sequence
from signal import SIGTERM
from typing import Any

from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from kl_comedy.config import Config
from kl_comedy.config.combinations import updates_from_a_batch
from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.evaluation import EvalResult, EvalSettings, evaluate
from kl_comedy.evaluation.evaluate import evaluate_choices
from kl_comedy.evaluation.likelihood import choice_scorer
from kl_comedy.records import Scored
from kl_comedy.registry import CALLBACKS
from kl_comedy.rollouts.recording import RecordingWriter
from kl_comedy.training.build import eval_sampling
from kl_comedy.training.checkpoint import SaveFailed, save_checkpoint
from kl_comedy.training.experience import derive_seed
from kl_comedy.training.metrics import completion_metrics
from kl_comedy.training.run_folder import RunDir, saved, step_of
from kl_comedy.training.stop_signals import SIGNAL_SECONDS, StopRequest

log = logging.getLogger("kl_comedy")

SAMPLE_ROWS = 16
"""Completions per samples table: enough to see a group beside another."""

SILENT_UPDATES = 10
"""Updates without a difference of rewards before a warning: fewer happen by chance where rewards start near 0 or 1."""

SHOWN_CHARACTERS = 200

PLAIN_EVERY_S = 5.0
"""Without a terminal: at most one line per this many seconds, and always the last."""


def configured_callbacks(config: Config) -> list[Callback]:
    """The callbacks that ``callbacks``, ``audit`` and ``train.record_rollouts`` ask for.

    Raises :class:`UserError` for an unknown name or option, as a callback's own ``check_config(config)`` may.
    """
    wanted = [(f"callbacks.{n}", each.name, each.options) for n, each in enumerate(config.callbacks)]
    if config.audit.every:
        wanted.append(("audit", "audit", dict(vars(config.audit))))
    if config.train.record_rollouts != "none":
        wanted.append(("train.record_rollouts", "record_rollouts", {"format": config.train.record_rollouts}))
    callbacks = []
    for key, name, options in wanted:
        build = CALLBACKS.get(name, key=f"{key}.name").fn
        try:
            inspect.signature(build).bind(**options)
        except TypeError as error:
            raise bad_value(f"{key}.options", options, f"the arguments of {name}", str(error)) from None
        callback = build(**options)
        if not isinstance(callback, Callback):
            raise UserError(f"{key}.name: {name} gives a {type(callback).__name__}, and not a Lightning Callback")
        if hasattr(callback, "check_config"):
            callback.check_config(config)
        callbacks.append(callback)
    return callbacks


def sample_rows(rows: Sequence[Scored]) -> list[dict[str, Any]]:
    """The first completions as table rows, with their text unchanged."""
    return [
        {
            "problem": row.rollout.prompt.problem.text,
            "answer": row.rollout.prompt.problem.answer,
            "completion": row.rollout.text,
            "reward": row.reward.value,
            "status": row.reward.status,
            "tokens": len(row.rollout.completion_ids),
            "stop_reason": row.rollout.stop_reason,
            "version": row.rollout.versions[0] if row.rollout.versions else None,
        }
        for row in rows[:SAMPLE_ROWS]
    ]


class RecordRollouts(Callback):
    """Writes every batch to ``rollouts/`` of the run's folder, before its first update.

    So the batches up to any checkpoint are on disk; on resume later ones are removed and drawn again.
    """

    def __init__(self, format: str = "jsonl") -> None:
        self._format = format

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        config, folder = pl_module.config, pl_module.run_folder
        self._writer = RecordingWriter(folder / "rollouts", self._format, temperature=config.rollout.temperature)
        next_batch = -(-pl_module.version // updates_from_a_batch(config))
        pl_module.ranks.on_rank_zero(lambda: self._writer.remove_from(next_batch))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
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
        if self._every and (version == 1 or version % self._every == 0):
            trainer.logger.log_table("samples", sample_rows(pl_module.last_batch.rows), step=version)


class EvaluationCallback(Callback):
    """Evaluates every set at the start, every ``eval_every`` updates, and at the end.

    ``history``: mean rewards by set and update; ``accuracies``: those of suites by log-prob, which have no reward.
    """

    def __init__(self, config: Config, console: Console) -> None:
        self._config, self._console = config, console
        self.history: dict[str, dict[int, float]] = {}
        self.accuracies: dict[str, dict[int, float]] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        ranks, loaded, reference = pl_module.ranks, pl_module.loaded, pl_module.references["initial"]
        self._measure = completion_metrics(self._config, loaded=loaded, reference=reference, ranks=ranks)
        self._choice_scorer = choice_scorer(self._config, loaded, ranks)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._config.eval.at_start and pl_module.version == 0:
            self.run(trainer, pl_module.version)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        every, version = self._config.train.eval_every, pl_module.version
        last = version == self._config.train.steps
        if (every and version % every == 0) or (last and self._config.eval.at_end):
            self.run(trainer, version)

    def run(self, trainer: Any, version: int) -> None:
        data, config, logger = trainer.datamodule, self._config, trainer.logger

        def record(result: EvalResult, history: dict[str, dict[int, float]], score: str) -> None:
            history.setdefault(result.name, {})[version] = result.row()[score]
            for each in trainer.loggers:
                each.log_metrics(result.metrics(), step=version)
            line = f"eval {result.name} at update {version}: {result.line()}"
            self._console.print(line, soft_wrap=True, highlight=False)

        settings = EvalSettings(samples=config.eval.samples, sampling=eval_sampling(config), measure=self._measure)
        with trainer.precision_plugin.forward_context():
            for eval_set in data.prompts.evals:
                seed = derive_seed(config.seed, f"eval/{eval_set.name}", 0)
                result = evaluate(data.backend, data.scorer, eval_set, settings, seed=seed)
                record(result, self.history, "reward")
                logger.log_table(f"eval/{result.name}", sample_rows(result.rows), step=version)
            for choices in data.prompts.choice_sets:
                result = evaluate_choices(self._choice_scorer, choices)
                record(result, self.accuracies, "accuracy")
                logger.log_table(f"choices/{result.name}", list(result.rows[:SAMPLE_ROWS]), step=version)

    def reward_at(self, version: int) -> float | None:
        """The mean reward over the sets evaluated at ``version``, suites by log-prob aside; None without any."""
        rewards = [values[version] for values in self.history.values() if version in values]
        return sum(rewards) / len(rewards) if rewards else None

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy({"history": self.history, "accuracies": self.accuracies})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history, self.accuracies = state_dict["history"], state_dict.get("accuracies", {})


class CheckpointCallback(Checkpoint):
    """A whole checkpoint every ``checkpoint_every`` updates, at the end, and when a signal asks to stop.

    All ranks stop after the same update, whichever of them received the signal. Where a checkpoint cannot be written
    (full disk, quota, read-only) the run ends on every rank; the one before stays.
    """

    def __init__(self, config: Config, evaluation: EvaluationCallback, request: StopRequest) -> None:
        self._train, self._evaluation, self._request = config.train, evaluation, request
        self._warning_s = float(os.environ.get(SIGNAL_SECONDS) or math.inf)
        self._update_s = self._save_s = 0.0  # the longest of either so far; an update with its evaluation

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._since = time.monotonic()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self._update_s = max(self._update_s, time.monotonic() - self._since)
        every, version, last = self._train.checkpoint_every, pl_module.version, self._train.steps
        due = bool(every) and (version % every == 0 or version == last)
        if due:
            self.save(trainer, version)
        received = {signal for signal in pl_module.ranks.gather(self._request.signal) if signal is not None}
        if received and version < last:
            self._request.signal = SIGTERM if SIGTERM in received else received.pop()
            trainer.should_stop = True
            if not due:
                self.save(trainer, version)
        self._warn_if_a_stop_takes_too_long()
        self._since = time.monotonic()

    def _warn_if_a_stop_takes_too_long(self) -> None:
        needed_s = self._update_s + self._save_s
        if needed_s > self._warning_s:
            parts = f"an update with evaluation {self._update_s:.0f} s, a checkpoint {self._save_s:.0f} s"
            when = f"this job is signalled {self._warning_s:g} s before its end"
            log.warning(
                f"to stop takes up to {needed_s:.0f} s ({parts}), and {when}: it may be killed before it has saved; "
                "raise signal_seconds in the profile"
            )
            self._warning_s = math.inf  # once

    def save(self, trainer: Any, version: int) -> None:
        module: Any = trainer.lightning_module
        root, reward = RunDir(path=module.run_folder).checkpoints, self._evaluation.reward_at(version)
        options = {"keep": self._train.keep_checkpoints, "reward": reward, "ranks": module.ranks}
        start = time.monotonic()
        try:
            save_checkpoint(root, version, trainer.save_checkpoint, **options)
        except SaveFailed as error:
            last = max(map(step_of, saved(root)), default=0)
            raise RunFailed(
                f"the checkpoint of update {version} cannot be written ({error}); the run goes on from "
                f"update {last} when {root} can be written again"
            ) from error
        self._save_s = max(self._save_s, time.monotonic() - start)
        trainer.logger.commit(version)


class SignalWarning(Callback):
    """Warns once where the rewards gave the policy loss nothing to learn from for :data:`SILENT_UPDATES` updates.

    With a group's mean as the baseline, completions of equal reward all have an advantage of 0; what moves the policy
    then is the KL term alone. Often the reward cannot read the answers, so that a completion is shown.
    """

    def __init__(self) -> None:
        self._silent = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        metrics, rows = pl_module.last_metrics, pl_module.last_batch.rows
        several = len({row.rollout.group_id for row in rows}) < len(rows)
        if several:
            silent = metrics["train/groups_without_signal"] == 1.0
        else:  # one completion a prompt: the baseline is the batch's
            silent = metrics["train/reward_std"] == 0.0
        self._silent = self._silent + 1 if silent else 0
        if self._silent != SILENT_UPDATES:
            return
        first = rows[0]
        log.warning(
            f"no signal for {SILENT_UPDATES} updates: in each group all completions had the same reward (mean "
            f"{metrics['train/reward']:.3f}, answers {first.reward.status}), so that only a KL term moves the policy. "
            f"The first completion of update {pl_module.version}: {first.rollout.text[:SHOWN_CHARACTERS]!r}; its "
            f"answer: {first.rollout.prompt.problem.answer[:SHOWN_CHARACTERS]!r}"
        )


def status_line(metrics: Mapping[str, float]) -> str:
    """The few numbers worth watching. The KL is per completion: exact at updates that measure it, else sampled k1.

    >>> status_line({"train/reward": 0.5, "kl/k1_reverse_sequence": 0.01, "time/tokens_per_second": 100.0})
    'reward 0.500  sampled k1 KL 0.0100 nats  100 tok/s'
    >>> status_line({"train/reward": 0.25, "train/verifier_failed": 0.5})
    'reward 0.250  VERIFIER FAILED on 50.0%'
    """
    name, word = ("exact", "exact") if "kl/exact_reverse_sequence" in metrics else ("k1", "sampled k1")
    formats = {
        "train/reward": "reward {:.3f}",
        f"kl/{name}_reverse_sequence": f"{word} KL {{:.4f}} nats",
        "policy/entropy": "entropy {:.3f}",
        "train/length": "length {:.1f}",
        "time/tokens_per_second": "{:.0f} tok/s",
    }
    if metrics.get("train/verifier_failed", 0.0) > 0:  # a bug of a reward shows in every line, not in one warning only
        formats["train/verifier_failed"] = "VERIFIER FAILED on {:.1%}"
    return "  ".join(text.format(metrics[key]) for key, text in formats.items() if key in metrics)


class _TwoLines(Progress):
    """The bar, and beneath it ``line``: 80 columns do not hold both."""

    line = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self.line, no_wrap=True, overflow="ellipsis")


class ConsoleProgress(ProgressBar):
    """Updates, reward, KL, tokens/s and time left: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, steps: int) -> None:
        super().__init__()
        self._console, self._steps = console, steps
        columns = (TextColumn("[bold]update"), BarColumn(bar_width=24), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._bar = _TwoLines(*columns, *times, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("train", total=steps, start=False)

    def enable(self) -> None: ...

    def disable(self) -> None:
        """Ranks other than 0 print nothing, because their console is quiet."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        self._console.print(*args, **kwargs)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._started = self._printed = time.monotonic()
        self._first = pl_module.version
        if not self._console.quiet:
            self._bar.start()
            self._bar.reset(self._task, completed=self._first)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        version, line, now = pl_module.version, status_line(pl_module.last_metrics), time.monotonic()
        self._bar.line = line
        self._bar.update(self._task, completed=version)
        due = now - self._printed >= PLAIN_EVERY_S or version in (1, self._steps)
        if not self._console.is_terminal and due:
            self._printed = now
            left = (now - self._started) / max(version - self._first, 1) * (self._steps - version)
            self._console.print(f"update {version}/{self._steps}  {line}  {left:.0f} s left", soft_wrap=True)

    def on_train_end(self, trainer: Any, pl_module: Any, *exception: BaseException) -> None:
        self._bar.stop()

    on_exception = on_train_end
