"""A lock held through a file, between processes of one host and, where the file system agrees, between hosts."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_WAIT_S = 120.0
"""Longer than creating an MLflow database takes on a busy machine (a few seconds)."""


@contextlib.contextmanager
def file_lock(path: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` (created if absent, never removed: removing it would race).

    The lock goes when the process does. Raises TimeoutError after ``wait_s`` seconds, and OSError where the
    file cannot be created. Systems without ``fcntl`` (Windows) run unlocked.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} is held by another process for more than {wait_s:g} s") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)
