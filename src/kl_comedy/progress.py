"""Progress on a terminal and in a log: the time left, the phase, memory; bars that log lines do not tear.

The time left comes from the durations of the last steps themselves. rich's own column forgets what is older than 30
seconds, so that it has no estimate for steps that take longer, as every update of a real model does.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from kl_comedy.phases import listen

REMEMBERED_STEPS = 20
"""Steps that an estimate comes from: enough to even out an evaluation now and then, few enough to follow a change."""

PLAIN_EVERY_S = 5.0
"""Without a terminal: at most one line about finished steps per this many seconds."""

PHASE_EVERY_S = 60.0
"""Without a terminal: a line about the phase where nothing was printed for so long, as in a step of many minutes."""

REFRESHES_PER_S = 4.0
"""How often a bar is drawn: a clock of seconds needs no more, and each drawing costs a millisecond of a busy core."""

GIB = 2**30


class TimeLeft:
    """Estimates the time to ``total`` steps, of which ``done`` were done at the beginning.

    >>> now = 0.0
    >>> left = TimeLeft(10, clock=lambda: now)
    >>> left.seconds() is None
    True
    >>> now = 40.0; left.reach(1); left.seconds()
    360.0
    >>> now = 50.0; left.seconds()
    350.0
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        *,
        remembered: int = REMEMBERED_STEPS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._clock = clock
        # When which number of steps was reached; the first entry is where the remembered steps begin.
        self._reached = deque([(clock(), done)], maxlen=remembered + 1)

    def reach(self, done: int) -> None:
        """Note that ``done`` steps are done now."""
        _, last_done = self._reached[-1]
        if done > last_done:
            self._reached.append((self._clock(), done))

    def seconds(self) -> float | None:
        """Seconds left; None before the first step."""
        first_time, first_done = self._reached[0]
        last_time, last_done = self._reached[-1]
        if last_done == first_done:
            return None
        step_s = (last_time - first_time) / (last_done - first_done)
        # The step under way counts down. One that takes longer than the others leaves the later ones as they are.
        running_s = min(self._clock() - last_time, step_s)
        return max(step_s * (self._total - last_done) - running_s, 0.0)

    def text(self) -> str:
        """The estimate in words, as ``6 min left``; empty before the first step."""
        seconds = self.seconds()
        if seconds is None:
            return ""
        return f"{duration(seconds)} left"


def duration(seconds: float) -> str:
    """A duration in words, in two units at most.

    >>> duration(4.6), duration(340), duration(7500), duration(90_000)
    ('5 s', '6 min', '2 h 05 min', '1 d 1 h')
    """
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


class TimeLeftColumn(ProgressColumn):
    """The text of the :class:`TimeLeft` in the field ``time_left`` of a task."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["time_left"].text(), style="progress.remaining")


def memory_text() -> str:
    """The memory of this process: what torch reserved at most on its GPU, else what is resident in RAM now."""
    torch: Any = sys.modules.get("torch")
    # Asked only where torch is at work: a display imports nothing, and starts no GPU.
    if torch is not None and torch.cuda.is_initialized():
        return f"GPU {torch.cuda.max_memory_reserved() / GIB:.1f} GiB"
    return f"memory {_resident_bytes() / GIB:.1f} GiB"


def _resident_bytes() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux; the largest so far, which macOS gives in bytes
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return float(pages * resource.getpagesize())


class Bars(Progress):
    """rich's bars, above which log lines are printed.

    logging holds the stream that stderr was when it was set up. Its lines would be written into the bars, and not above
    them, so that its handlers write to the stream that rich puts in the place of stderr, for as long as it is there.
    """

    def __init__(self, *columns: str | ProgressColumn, console: Console, **options: Any) -> None:
        off = not console.is_terminal
        super().__init__(*columns, console=console, disable=off, refresh_per_second=REFRESHES_PER_S, **options)
        self._redirected: list[tuple[logging.StreamHandler[Any], Any]] = []

    def start(self) -> None:
        before = sys.stderr
        super().start()
        if sys.stderr is before:
            return
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                self._redirected.append((handler, handler.setStream(sys.stderr)))

    def stop(self) -> None:
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected.clear()
        super().stop()


class PlainLines:
    """Decides which lines about progress are printed where there is no terminal.

    ``printed``: whether there was any.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self.printed = False

    def due(self, every_s: float, *, always: bool = False) -> bool:
        """Whether a line should be printed now, which then counts as printed: the last is ``every_s`` ago or more."""
        now = self._clock()
        if not always and now - self._last < every_s:
            return False
        self._last = now
        self.printed = True
        return True


ShowStage = Callable[[str, int, int], None]
"""Called with the name of a stage, how much of it is done, and its total."""


@contextlib.contextmanager
def stages(
    console: Console, *, transient: bool = False, clock: Callable[[], float] = time.monotonic
) -> Iterator[ShowStage]:
    """Show the stages of a command: a bar for each on a terminal, else plain lines, none in the first seconds.

    ``transient``: the bars are removed at the end. What was done before a stage's first call counts for no estimate.
    """
    display = _Stages(console, transient, clock)
    try:
        with display.bars:
            listen(display.show_phase)
            yield display
    finally:
        listen(None)


class _Stages:
    """The :data:`ShowStage` of :func:`stages`."""

    def __init__(self, console: Console, transient: bool, clock: Callable[[], float]) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeLeftColumn(),
            TextColumn("{task.fields[phase]}", markup=False),
        )
        self.bars = Bars(*columns, console=console, transient=transient, get_time=clock)
        self._console = console
        self._clock = clock
        self._lines = PlainLines(clock)
        self._tasks: dict[str, TaskID] = {}
        self._time_left: dict[str, TimeLeft] = {}
        self._stage = ""
        self._counts = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._time_left[stage] = TimeLeft(total, done, clock=self._clock)
            self._tasks[stage] = self.bars.add_task(
                stage, total=total, completed=done, time_left=self._time_left[stage], phase=""
            )
        time_left = self._time_left[stage]
        time_left.reach(done)
        self._stage = stage
        self._counts = f"{stage} {done}/{total}"
        is_done = done >= total
        if self._console.is_terminal:
            self.bars.update(self._tasks[stage], completed=done)
            if is_done:
                self.bars.update(self._tasks[stage], phase="")
            return
        # Who saw that a stage is under way should see its end.
        if self._lines.due(PLAIN_EVERY_S, always=is_done and self._lines.printed):
            self._print(self._counts, time_left.text())

    def show_phase(self, text: str) -> None:
        """Show the phase beside the bar of the stage that was called last."""
        if not self._stage:
            return
        if self._console.is_terminal:
            self.bars.update(self._tasks[self._stage], phase=text)
        elif self._lines.due(PHASE_EVERY_S):
            self._print(self._counts, text)

    def _print(self, *texts: str) -> None:
        line = "  ".join(text for text in texts if text)
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
