"""How long the learner waits for a sampler that does not answer: the two limits, and the clock they are counted with.

A stopped process (SIGSTOP, a debugger, memory swapped out) gives no sign of life; one whose engine hangs may give signs
of life for ever and no answer. The clock counts only what this process has seen pass: when learner and sampler are
stopped together and go on together, or the learner was busy elsewhere, nobody is blamed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BEAT_S = 0.5
"""Between the sampler's signs of life."""
LONGEST_LOOK_S = 1.0
"""The most seconds that one look adds: looks are 0.2 s apart, and a longer gap is this process's own."""
STARTUP_S = 600.0
"""Until a new process's first sign of life: it imports before it can give one, on a busy machine for a while."""


class Patience:
    """Seconds of silence and seconds without an answer, against their limits. Counted while somebody waits.

    ``silence_s``: without a sign of life. ``answer_s``: with requests open and none answered.
    """

    def __init__(self, *, silence_s: float, answer_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._silence_s, self._answer_s, self._now = silence_s, answer_s, now
        self.restarted()

    def restarted(self) -> None:
        """Another process begins: it has not beaten yet."""
        self._silent = self._unanswered = 0.0
        self._beats: int | None = None
        self._beaten = False
        self._last = self._now()

    def answered(self) -> None:
        """An answer came."""
        self._silent = self._unanswered = 0.0

    def begin(self) -> None:
        """Somebody begins to wait: what passed since the last look was not waiting."""
        self._last = self._now()

    def look(self, beats: int, *, asked: bool) -> str | None:
        """Take in the count of signs of life and whether an answer is owed; what the sampler did wrong, or None."""
        now = self._now()
        passed = min(now - self._last, LONGEST_LOOK_S)
        self._last = now
        if self._beats is not None and beats != self._beats:
            self._silent, self._beaten = 0.0, True
        else:
            self._silent += passed
        self._beats = beats
        self._unanswered = self._unanswered + passed if asked else 0.0
        silence_s = self._silence_s if self._beaten else max(self._silence_s, STARTUP_S)
        if self._silent > silence_s:
            return f"gave no sign of life for {silence_s:g} s (lag.silence_limit_s)"
        if self._unanswered > self._answer_s:
            return f"lived and finished nothing for {self._answer_s:g} s (lag.answer_limit_s)"
        return None


def beat_for_ever(beat: Callable[[], None]) -> None:
    """Give a sign of life every :data:`BEAT_S`, from a thread that ends with the process."""

    def run() -> None:
        while True:
            beat()
            time.sleep(BEAT_S)

    threading.Thread(target=run, daemon=True, name="signs of life").start()
