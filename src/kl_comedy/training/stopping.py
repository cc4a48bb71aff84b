"""Stopping a run from outside without losing an update: SIGUSR1 (make room, go on later) and SIGTERM (end).

The handler only takes a note; the run acts on it when the update at hand is done (saving inside a handler, as
Lightning's own SLURM handler does, would save in the middle of an update). Light: nothing but the standard library,
so that a process can listen before its heavy imports.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

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
