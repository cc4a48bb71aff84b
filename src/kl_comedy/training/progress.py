"""What a person watching a run sees: a rich bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kl_comedy.evaluation import Result

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
                TextColumn("[bold]update"), BarColumn(bar_width=24), MofNCompleteColumn(),
                TextColumn("{task.fields[line]}"),
                TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=self._console, transient=False,
            )  # fmt: skip
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
