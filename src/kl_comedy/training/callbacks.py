"""Lightning callbacks of a run, and those a config may name: metrics, evaluation, progress, checkpoints.

Around an update, in this order: the user's callbacks, metrics and samples, evaluation, display, checkpoint or stop.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from signal import SIGTERM
from typing import Any

from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kl_comedy.config import Config
from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.evaluation import EvalResult, EvalSet, evaluate
from kl_comedy.evaluation.evaluate import evaluate_choices
from kl_comedy.evaluation.likelihood import ChoiceSet, choice_scorer
from kl_comedy.records import Scored
from kl_comedy.registry import CALLBACKS
from kl_comedy.rollouts.recording import RecordingWriter
from kl_comedy.training.build import eval_sampling
from kl_comedy.training.checkpoint import CheckpointManager, SaveFailed
from kl_comedy.training.eval_metrics import completion_metrics
from kl_comedy.training.experience import derive_seed
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.run_folder import RunDir, saved, step_of
from kl_comedy.training.stop_signals import StopRequest

SAMPLE_ROWS = 16
"""Completions per samples table: enough to see a group beside another."""

PLAIN_EVERY_S = 5.0
"""Without a terminal: at most one line per this many seconds, and always the last."""


def configured_callbacks(config: Config) -> list[Callback]:
    """The callbacks that ``callbacks``, ``audit`` and ``train.record_rollouts`` ask for.

    Raises :class:`UserError` for a name that is not registered and for options that the callback does not take. A
    callback may have a method ``check_config(config)``, which raises one before anything is built.
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
    """The first completions as table rows; hostile text is kept as it is (the table is JSON)."""
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
        per_batch = config.algorithm.updates_per_batch * config.algorithm.epochs_per_batch
        pl_module.ranks.on_rank_zero(lambda: self._writer.remove_from(-(-pl_module.version // per_batch)))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch.first:
            pl_module.ranks.on_rank_zero(lambda: self._writer.write(batch.iteration, batch.batch))


class MetricsCallback(Callback):
    """Logs every update's metrics, and a table of completions every ``samples_every`` updates."""

    def __init__(self, samples_every: int) -> None:
        self._every = samples_every

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        version = pl_module.version
        trainer.logger.log_metrics(pl_module.last_metrics, step=version)
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
        ranks, loaded = pl_module.ranks, pl_module.loaded
        self._measure = completion_metrics(
            self._config, loaded=loaded, reference=pl_module.references["initial"], ranks=ranks
        )
        self._choice_scorer = choice_scorer(self._config, loaded, ranks)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._config.eval.at_start and pl_module.version == 0:
            self.run(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        every, version = self._config.train.eval_every, pl_module.version
        last = version == self._config.train.steps
        if (every and version % every == 0) or (last and self._config.eval.at_end):
            self.run(trainer, pl_module)

    def run(self, trainer: Any, module: PolicyModule) -> None:
        prompts = trainer.datamodule.prompts
        with trainer.precision_plugin.forward_context():
            for eval_set in prompts.evals:
                self._evaluate(trainer, module, eval_set)
            for choices in prompts.choice_sets:
                self._evaluate_choices(trainer, module, choices)

    def _evaluate(self, trainer: Any, module: PolicyModule, eval_set: EvalSet) -> None:
        result = evaluate(
            trainer.datamodule.backend,
            trainer.datamodule.scorer,
            eval_set,
            samples=self._config.eval.samples,
            sampling=eval_sampling(self._config),
            seed=derive_seed(self._config.seed, f"eval/{eval_set.name}", 0),
            measure=self._measure,
        )
        self._record(trainer, module, result, self.history, "reward")
        trainer.logger.log_table(f"eval/{result.name}", sample_rows(result.rows), step=module.version)

    def _evaluate_choices(self, trainer: Any, module: PolicyModule, choices: ChoiceSet) -> None:
        result = evaluate_choices(self._choice_scorer, choices)
        self._record(trainer, module, result, self.accuracies, "accuracy")
        trainer.logger.log_table(f"choices/{result.name}", list(result.rows[:SAMPLE_ROWS]), step=module.version)

    def _record(
        self,
        trainer: Any,
        module: PolicyModule,
        result: EvalResult,
        history: dict[str, dict[int, float]],
        score: str,
    ) -> None:
        history.setdefault(result.name, {})[module.version] = result.row()[score]
        trainer.logger.log_metrics(result.metrics(), step=module.version)
        line = f"eval {result.name} at update {module.version}: {result.line()}"
        self._console.print(line, soft_wrap=True, highlight=False)

    def reward_at(self, version: int) -> float | None:
        """The mean reward over the sets evaluated at ``version``, suites by log-prob aside; None without any."""
        rewards = [values[version] for values in self.history.values() if version in values]
        return sum(rewards) / len(rewards) if rewards else None

    def state_dict(self) -> dict[str, Any]:
        return {"history": _copied(self.history), "accuracies": _copied(self.accuracies)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = _copied(state_dict["history"])
        self.accuracies = _copied(state_dict.get("accuracies", {}))


def _copied(history: Mapping[str, Mapping[int, float]]) -> dict[str, dict[int, float]]:
    return {name: dict(values) for name, values in history.items()}


class CheckpointCallback(Checkpoint):
    """A whole checkpoint every ``checkpoint_every`` updates, at the end, and when a signal asks to stop.

    All ranks stop after the same update, whichever of them received the signal. Where a checkpoint cannot be written
    (full disk, quota, read-only) the run ends on every rank; the one before stays.
    """

    def __init__(self, config: Config, evaluation: EvaluationCallback, request: StopRequest) -> None:
        self._train, self._evaluation, self._request = config.train, evaluation, request

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        every, version, last = self._train.checkpoint_every, pl_module.version, self._train.steps
        if every and (version % every == 0 or version == last):
            self.save(trainer, version)
        received = {signal for signal in pl_module.ranks.gather(self._request.signal) if signal is not None}
        if received and version < last:
            self._request.signal = SIGTERM if SIGTERM in received else received.pop()
            trainer.should_stop = True
            if not every or version % every:
                self.save(trainer, version)

    def save(self, trainer: Any, version: int) -> None:
        module: Any = trainer.lightning_module
        root = RunDir(path=module.run_folder).checkpoints
        manager = CheckpointManager(root=root, keep=self._train.keep_checkpoints, ranks=module.ranks)
        try:
            manager.save(version, trainer.save_checkpoint, reward=self._evaluation.reward_at(version))
        except SaveFailed as error:
            there = saved(root)
            raise RunFailed(
                f"the checkpoint of update {version} cannot be written ({error}); the run goes on from "
                f"update {step_of(there[-1]) if there else 0} when {root} can be written again"
            ) from error
        trainer.logger.commit(version)


def status_line(metrics: Mapping[str, float]) -> str:
    """The few numbers worth watching; the KL is per completion.

    >>> status_line({"train/reward": 0.5, "kl/k1_reverse_sequence": 0.01, "time/tokens_per_second": 100.0})
    'reward 0.500  k1 KL 0.0100 nats  100 tok/s'
    """
    name = "exact" if "kl/exact_reverse_sequence" in metrics else "k1"
    kl = metrics.get(f"kl/{name}_reverse_sequence", float("nan"))
    words = [f"reward {metrics.get('train/reward', float('nan')):.3f}", f"{name} KL {kl:.4f} nats"]
    if "policy/entropy" in metrics:
        words.append(f"entropy {metrics['policy/entropy']:.3f}")
    if "train/length" in metrics:
        words.append(f"length {metrics['train/length']:.1f}")
    words.append(f"{metrics.get('time/tokens_per_second', 0.0):.0f} tok/s")
    return "  ".join(words)


class ConsoleProgress(ProgressBar):
    """Updates, reward, KL, tokens/s and time left: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, steps: int) -> None:
        super().__init__()
        self._console, self._steps = console, steps
        self._bar: Progress | None = None
        self._task: Any = None
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        self._console.print(*args, **kwargs)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._started = self._printed = time.monotonic()
        self._first = pl_module.version
        if self._enabled and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]update"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[line]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("train", total=self._steps, completed=self._first, line="")
            self._bar.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:  # type: ignore[override]
        version, line, now = pl_module.version, status_line(pl_module.last_metrics), time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=version, line=line)
        elif self._enabled and (now - self._printed >= PLAIN_EVERY_S or version in (1, self._steps)):
            self._printed = now
            left = (now - self._started) / max(version - self._first, 1) * (self._steps - version)
            self._console.print(f"update {version}/{self._steps}  {line}  {left:.0f} s left", soft_wrap=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
