"""What a person watching a run sees: a rich bar on a terminal, plain lines elsewhere.

Writing the rollouts of a run as it uses them.

A batch is written whole before its first update, so that whatever checkpoint a run goes on from, the batches used up
to there are on disk; what was drawn after it is removed on resume and drawn again.

Stopping a run from outside without losing an update: SIGUSR1 (make room, go on later) and SIGTERM (end).

The handler only takes a note; the run acts on it when the update at hand is done (saving inside a handler, as
Lightning's own SLURM handler does, would save in the middle of an update). Light: nothing but the standard library,
so that a process can listen before its heavy imports.

What happens around an update, in this order: metrics, samples, evaluation, checkpoint, display.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM
from types import FrameType
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kl_comedy.config import Config
from kl_comedy.errors import RunFailed
from kl_comedy.evaluation import EvalSet, Result, evaluate
from kl_comedy.evaluation.evaluate import ChoiceSet, compare
from kl_comedy.evaluation.likelihood import choice_passes
from kl_comedy.records import Scored
from kl_comedy.rollouts.recording import RecordingWriter
from kl_comedy.tracking.logger import RunLogger
from kl_comedy.training.build import Parts, eval_sampling
from kl_comedy.training.checkpoint import CheckpointManager, SaveFailed
from kl_comedy.training.distributed import World
from kl_comedy.training.eval_metrics import completion_measure
from kl_comedy.training.experience import derive_seed
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.run_folder import saved, step_of

PLAIN_EVERY_S = 5.0
"""Without a terminal: at most one line per this many seconds, and always the last."""


def status_line(metrics: dict[str, float]) -> str:
    """The few numbers worth watching.

    >>> status_line({"train/reward": 0.5, "kl/k1_reverse_sequence": 0.01, "time/tokens_per_second": 100.0})
    'reward 0.500  KL 0.0100 nats  100 tok/s'
    """
    kl = metrics.get("kl/exact_reverse_sequence", metrics.get("kl/k1_reverse_sequence", float("nan")))
    words = [f"reward {metrics.get('train/reward', float('nan')):.3f}", f"KL {kl:.4f} nats"]
    if "policy/entropy" in metrics:
        words.append(f"entropy {metrics['policy/entropy']:.3f}")
    if "train/length" in metrics:
        words.append(f"length {metrics['train/length']:.1f}")
    words.append(f"{metrics.get('time/tokens_per_second', 0.0):.0f} tok/s")
    return "  ".join(words)


class ProgressCallback(Callback):
    """Steps, reward, KL, tokens/s and time left."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._bar: Progress | None = None
        self._task: Any = None
        self._started = self._spoken = time.monotonic()
        self._first = 0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._started, self._first = time.monotonic(), pl_module.version
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]update"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[line]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
                transient=False,
            )
            self._task = self._bar.add_task("train", total=self._steps, completed=pl_module.version, line="")
            self._bar.start()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        line = status_line(pl_module.last_metrics)
        if self._bar is not None:
            self._bar.update(self._task, completed=pl_module.version, line=line)
            return
        now = time.monotonic()
        if now - self._spoken >= PLAIN_EVERY_S or pl_module.version in (1, self._steps):
            self._spoken = now
            done = max(pl_module.version - self._first, 1)
            left = (now - self._started) / done * (self._steps - pl_module.version)
            self._console.print(f"update {pl_module.version}/{self._steps}  {line}  {left:.0f} s left", soft_wrap=True)

    def show_evaluation(self, result: Result, step: int) -> None:
        line = f"eval {result.name} at update {step}: {result.line()}"
        self._console.print(line, soft_wrap=True, highlight=False)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self.close()

    def on_exception(self, trainer: lightning.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class RecordCallback(Callback):
    """Writes every batch to ``rollouts/`` of the run folder, as ``train.record_rollouts`` asks."""

    def __init__(self, config: Config, folder: Path, world: World) -> None:
        self._world = world
        self._writer = RecordingWriter(
            folder / "rollouts", config.train.record_rollouts, temperature=config.rollout.temperature
        )
        self._per_batch = config.algorithm.updates_per_batch * config.algorithm.epochs_per_batch

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._first_does(lambda: self._writer.remove_from(-(-pl_module.version // self._per_batch)))

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch.first:
            self._first_does(lambda: self._writer.write(batch.iteration, batch.batch))

    def _first_does(self, action: Callable[[], None]) -> None:
        """Every rank holds all rows; one writes them, and all end where it cannot."""
        self._world.together(lambda: action() if self._world.first else None)


def record_callbacks(config: Config, folder: Path, world: World) -> list[Callback]:
    """The callback that records, where the config asks for one."""
    return [] if config.train.record_rollouts == "none" else [RecordCallback(config, folder, world)]


SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


@dataclass
class StopRequest:
    """Who asked. Outside ``finishing`` there is nothing to finish, and SIGTERM ends the process at once."""

    signal: signal.Signals | None = None
    finishing: bool = False

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not signal.SIGTERM:  # an end outranks a pause
            self.signal = signal.Signals(number)
        if number == signal.SIGTERM and not self.finishing:
            raise KeyboardInterrupt

    @contextmanager
    def finish_first(self) -> Iterator[None]:
        """While an update is under way, or what a whole run made is being written: signals are noted only."""
        self.finishing = True
        try:
            yield
        finally:
            self.finishing = False


_listening: StopRequest | None = None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Listen; inside another call, share what that one hears. Outside the main thread nothing can be heard."""
    global _listening
    if _listening is not None:
        yield _listening
        return
    if threading.current_thread() is not threading.main_thread():
        yield StopRequest()
        return
    request = _listening = StopRequest()
    before = {number: signal.signal(number, request.note) for number in SIGNALS}
    try:
        yield request
    finally:
        _listening = None
        for number, handler in before.items():
            signal.signal(number, handler)


log = logging.getLogger("kl_comedy")

SAMPLE_ROWS = 16
"""Completions kept per samples table: enough to see a group beside another."""


def sample_rows(rows: tuple[Scored, ...]) -> list[dict[str, Any]]:
    """Completions as table rows, hostile text included as it is (the table is JSON)."""
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


class MetricsCallback(Callback):
    """Every update's metrics, and a table of sampled completions every ``samples_every`` updates."""

    def __init__(self, tracker: RunLogger, samples_every: int) -> None:
        self._tracker, self._every = tracker, samples_every

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, PolicyModule)
        self._tracker.log_metrics(pl_module.last_metrics, step=pl_module.version)
        if self._every and (pl_module.version == 1 or pl_module.version % self._every == 0):
            self._tracker.log_table("samples", sample_rows(batch.rows), step=pl_module.version)


class EvaluationCallback(Callback):
    """Evaluation on every set at the start, every ``eval_every`` updates, and at the end.

    ``history``: mean rewards by set and update; ``accuracies``: those of suites by log-prob, which have no reward.
    """

    def __init__(self, parts: Parts, tracker: RunLogger, show: Callable[[Result, int], None]) -> None:
        self._parts, self._tracker, self._show = parts, tracker, show
        self._measure = completion_measure(
            parts.config, loaded=parts.loaded, reference=parts.references["initial"], world=parts.world
        )
        self._passes = choice_passes(parts.config, parts.loaded, parts.world)
        self.history: dict[str, dict[int, float]] = {}
        self.accuracies: dict[str, dict[int, float]] = {}

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        if self._parts.config.eval.at_start and pl_module.version == 0:
            self.run(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every, version = self._parts.config.train.eval_every, pl_module.version
        last = version == self._parts.config.train.steps
        if (every and version % every == 0) or (last and self._parts.config.eval.at_end):
            self.run(trainer, pl_module)

    def run(self, trainer: lightning.Trainer, module: PolicyModule) -> None:
        for held_out in self._parts.problems.evals:
            with trainer.precision_plugin.forward_context():
                self._draw(held_out, module.version)
        for asked in self._parts.problems.compared:
            with trainer.precision_plugin.forward_context():
                self._compare(asked, module.version)

    def _draw(self, held_out: EvalSet, version: int) -> None:
        config = self._parts.config
        result = evaluate(
            self._parts.backend,
            self._parts.scorer,
            held_out,
            samples=config.eval.samples,
            sampling=eval_sampling(config),
            seed=derive_seed(config.seed, f"eval/{held_out.name}", 0),
            measure=self._measure,
        )
        self._keep(result, version, result.reward, self.history)
        self._tracker.log_table(f"eval/{result.name}", sample_rows(result.rows), step=version)

    def _compare(self, asked: ChoiceSet, version: int) -> None:
        result = compare(self._passes, asked)
        self._keep(result, version, result.accuracy, self.accuracies)
        self._tracker.log_table(f"choices/{result.name}", list(result.rows[:SAMPLE_ROWS]), step=version)

    def _keep(self, result: Result, version: int, value: float, history: dict[str, dict[int, float]]) -> None:
        self._tracker.log_metrics(result.metrics(), step=version)
        history.setdefault(result.name, {})[version] = value
        self._show(result, version)

    def reward_at(self, version: int) -> float | None:
        """The mean reward over the sets evaluated at ``version``, suites by log-prob aside; None where none was."""
        found = [values[version] for values in self.history.values() if version in values]
        return sum(found) / len(found) if found else None

    def state_dict(self) -> dict[str, Any]:
        return {"history": _copied(self.history), "accuracies": _copied(self.accuracies)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = _copied(state_dict["history"])
        self.accuracies = _copied(state_dict.get("accuracies", {}))  # none in checkpoints of earlier versions


def _copied(history: Mapping[str, Mapping[int, float]]) -> dict[str, dict[int, float]]:
    return {name: dict(values) for name, values in history.items()}


class CheckpointCallback(Callback):
    """A whole checkpoint every ``every`` updates and at the end. Committing tells the tracker that it is final.

    One that cannot be written (full disk, quota, read-only) ends the run on every process; the one before stays.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        tracker: RunLogger,
        *,
        every: int,
        steps: int,
        reward_at: Callable[[int], float | None],
    ) -> None:
        self._manager, self._tracker, self._reward_at = manager, tracker, reward_at
        self._every, self._steps = every, steps
        self._saved: int | None = None

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        version = pl_module.version
        if self._every and (version % self._every == 0 or version == self._steps):
            self.save(trainer, version)

    def ensure(self, trainer: lightning.Trainer, version: int) -> None:
        """Save unless the checkpoint of this update is already there."""
        if self._saved != version:
            self.save(trainer, version)

    def save(self, trainer: lightning.Trainer, version: int) -> None:
        try:
            self._manager.save(version, trainer.save_checkpoint, reward=self._reward_at(version))
        except SaveFailed as error:  # a full disk, a quota, a file system that went away
            there = saved(self._manager.root)
            raise RunFailed(
                f"the checkpoint of update {version} cannot be written ({error}); the run goes on from "
                f"update {step_of(there[-1]) if there else 0} when {self._manager.root} can be written again"
            ) from error
        self._saved = version
        self._tracker.commit(version)


class StopCallback(Callback):
    """When a signal asked for it: save what this update made, if that is not done, and end the training.

    Every process of a run stops at the same update, whichever of them heard the signal.
    """

    def __init__(self, request: StopRequest, checkpoints: CheckpointCallback, steps: int) -> None:
        self._request, self._checkpoints, self._steps = request, checkpoints, steps

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        heard = {signal for signal in pl_module.world.gather(self._request.signal) if signal is not None}
        if heard and pl_module.version < self._steps:
            self._request.signal = SIGTERM if SIGTERM in heard else heard.pop()
            self._checkpoints.ensure(trainer, pl_module.version)
            trainer.should_stop = True
