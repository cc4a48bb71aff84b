"""What a sweep on this machine shows while it runs: ``2 of 6 cells done; cell 3 update 34/100; 6 min left``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import SpinnerColumn, TextColumn
from rich.table import Column

from kl_comedy.progress import PHASE_EVERY_S, Bars, PlainLines, duration
from kl_comedy.slurm.local import StageState
from kl_comedy.slurm.manifest import Sweep
from kl_comedy.slurm.status import last_update

READ_EVERY_S = 2.0
"""Seconds between two looks at the files of the running cells."""

MOST_CELLS = 3
"""Running cells that the line names; more do not fit beside each other."""


@contextlib.contextmanager
def sweep_progress(
    sweep: Sweep, console: Console, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[StageState], None]]:
    """Yields the function to call while the cells run, with the state of their stage.

    On a terminal it changes one line in its place; else it prints a plain line per minute.
    """
    line = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    plain_lines = PlainLines(clock)
    estimate = SweepEstimate(sweep, clock)
    read_at = -READ_EVERY_S
    shown: tuple[str, frozenset[int]] | None = None
    with Bars(SpinnerColumn(), line, console=console, transient=True) as bars:
        task = bars.add_task(f"starting {len(sweep.manifest.cells)} cells")

        def show(state: StageState) -> None:
            nonlocal read_at, shown
            # The manager polls its workers several times per second; the files of the cells change more slowly. What
            # the manager knows itself, the end of a cell, is shown at once.
            is_news = shown != (state.stage, state.ended)
            if not is_news and clock() - read_at < READ_EVERY_S:
                return
            read_at = clock()
            shown = (state.stage, state.ended)
            if console.is_terminal:
                bars.update(task, description=estimate.line(state))
            elif plain_lines.due(PHASE_EVERY_S):
                console.print(estimate.line(state), markup=False, highlight=False, soft_wrap=True)

        yield show


class SweepEstimate:
    """The line about a stage of a sweep. The time left comes from the updates made since the stage began."""

    def __init__(self, sweep: Sweep, clock: Callable[[], float]) -> None:
        self._sweep = sweep
        self._clock = clock
        self._stage = ""
        self._began = 0.0
        self._made = 0
        self._last_made_at = 0.0
        self._updates_at_start: dict[int, int] = {}
        self._updates: dict[int, int] = {}

    def line(self, state: StageState) -> str:
        """What is done, what runs, and the time left where there is an estimate."""
        if state.stage == "report":
            return "writing the report"
        if state.stage != self._stage:
            self._begin(state)
        ended = len(state.ended)
        if state.stage == "train":
            texts = [f"{ended} of {len(state.cells)} cells done", *self._running_cells(state)]
            left_s = self._training_left_s(state)
        else:
            texts = [f"{ended} of {len(state.cells)} cells evaluated"]
            left_s = None
            if ended:
                left_s = (self._clock() - self._began) / ended * (len(state.cells) - ended)
        if state.failed:
            texts[0] += f" ({state.failed} failed)"
        if left_s is not None:
            texts.append(f"{duration(left_s)} left")
        return "; ".join(texts)

    def _begin(self, state: StageState) -> None:
        self._stage = state.stage
        self._began = self._clock()
        self._made = 0
        self._updates_at_start = self._read_updates(state.cells)
        self._updates = dict(self._updates_at_start)

    def _read_updates(self, cells: tuple[int, ...]) -> dict[int, int]:
        """The last update of each of these cells; 0 before its first."""
        return {index: last_update(self._sweep.run(index)) for index in cells}

    def _running_cells(self, state: StageState) -> list[str]:
        self._updates |= self._read_updates(state.running)
        texts = []
        for index in state.running[:MOST_CELLS]:
            texts.append(f"cell {index} update {self._updates[index]}/{self._sweep.cell(index).steps}")
        others = len(state.running) - MOST_CELLS
        if others > 0:
            texts.append(f"{others} more")
        return texts

    def _training_left_s(self, state: StageState) -> float | None:
        """Seconds left; None before the first update."""
        steps = {index: self._sweep.cell(index).steps for index in state.cells}
        made = 0
        left = 0
        for index in state.cells:
            updates = self._updates[index]
            # The end of a cell falls between two looks at its files. Nothing is left of one that failed.
            if index in state.ended and index not in state.failures:
                updates = steps[index]
            if index not in state.ended:
                left += max(steps[index] - updates, 0)
            # A cell that resumes from its checkpoint has fewer updates than before.
            made += max(updates - self._updates_at_start[index], 0)
        if made == 0:
            return None
        if made != self._made:
            self._made = made
            self._last_made_at = self._clock()
        update_s = (self._last_made_at - self._began) / made
        # The update under way counts down. A rate that took it in as idle time would let the time left grow meanwhile.
        running_s = min(self._clock() - self._last_made_at, update_s)
        return max(left * update_s - running_s, 0.0)
