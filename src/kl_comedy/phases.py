"""What this process is doing now, for a display: ``sampling 128 of 384``, ``scoring``, ``learning 3 of 8``.

Code that takes long calls :func:`phase`. Without a listener that costs one look-up and changes nothing. A listener
belongs to the thread that set it: where batches are drawn in a thread of its own, its phases are not those of the
learner, and are not shown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Listener = Callable[[str], None]
"""Called with the text of each phase. It must be quick: it runs inside of what it reports on."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_prefix: ContextVar[str] = ContextVar("prefix", default="")


def phase(name: str, done: int | None = None, total: int | None = None) -> None:
    """Report that ``name`` is under way: ``done`` of ``total``, where these are given."""
    listener = _listener.get()
    if listener is None:
        return
    text = _prefix.get() + name
    if total is not None:
        text += f" {done or 0} of {total}"
    listener(text)


@contextlib.contextmanager
def within(name: str) -> Iterator[None]:
    """Inside, phases are those of ``name``, as in ``evaluating heldout: sampling 64 of 512``."""
    token = _prefix.set(f"{_prefix.get()}{name}: ")
    try:
        yield
    finally:
        _prefix.reset(token)


def listen(listener: Listener | None) -> None:
    """Report the phases of this thread to ``listener`` from now on; None ends that."""
    _listener.set(listener)
