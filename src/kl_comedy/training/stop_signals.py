"""Stop a run from outside without losing an update: SIGUSR1 (save, resume later) and SIGTERM (save, end).

The handler records the signal; the run acts on it after the current update (Lightning's SLURM handler would save in
the middle of one). Imports nothing heavy, so that a process can listen before its heavy imports.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
SIGNAL_SECONDS = "KL_COMEDY_SIGNAL_SECONDS"
"""Set in a cluster job: how many seconds before its time limit it receives SIGUSR1."""


@dataclass
class StopRequest:
    """The signal received. While ``finishing`` is false no update is under way, and SIGTERM interrupts at once."""

    signal: signal.Signals | None = None
    finishing: bool = False

    def record(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.signal is not signal.SIGTERM:  # an end outranks a pause
            self.signal = signal.Signals(number)
        # Nothing is under way that could be saved; without this the process would load a model before it ends.
        if number == signal.SIGTERM and not self.finishing:
            raise KeyboardInterrupt

    def listen(self) -> None:
        """Handle :data:`SIGNALS` from now on. Outside the main thread nothing can be handled."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self.record)


# A process has one handler per signal, so that all runs in it share one request.
_listening: StopRequest | None = None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Listen inside; a call inside another shares its request."""
    global _listening
    if _listening is not None or threading.current_thread() is not threading.main_thread():
        yield _listening or StopRequest()
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    request = _listening = StopRequest()
    request.listen()
    try:
        yield request
    finally:
        _listening = None
        for number, handler in before.items():
            signal.signal(number, handler)
