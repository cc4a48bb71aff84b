"""Files: atomic writes, hashes, locks between processes, YAML mappings."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kl_comedy.errors import UserError, nearest

LOCK_WAIT_S = 120.0
"""Longer than creating an MLflow database takes on a busy machine (a few seconds)."""


class LockHeld(TimeoutError):
    """Another process holds the lock. ``holder`` is its process id as text, ``?`` where unknown."""

    def __init__(self, path: Path, holder: str, wait_s: float) -> None:
        super().__init__(f"{path} is locked by process {holder} for more than {wait_s:g} s")
        self.holder = holder


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write ``content`` (text as UTF-8). A reader or a crash sees the old file or the new one, never a part.

    Creates missing parent folders. Raises OSError where the file cannot be written; the old file is then unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of the file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def file_lock(path: Path, wait_s: float = LOCK_WAIT_S, *, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` (created if absent, never removed: removing it would race).

    The lock ends with the process. ``on_wait`` is called once when another process holds it. Raises
    :class:`LockHeld` after ``wait_s`` seconds, and OSError where the file cannot be created. Systems without
    ``fcntl`` (Windows) run unlocked.
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
        waiting = False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "?"
                    raise LockHeld(path, holder, wait_s) from None
                if on_wait is not None and not waiting:
                    on_wait()
                waiting = True
                time.sleep(0.05)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode("ascii"), 0)
        yield
    finally:
        os.close(fd)


def read_yaml(path: Path, kind: str = "config") -> dict[str, Any]:
    """The mapping in a YAML file, interpolations unresolved.

    Raises :class:`UserError` where the file is missing (with the nearest name), is no YAML, or holds no mapping.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if path.is_dir():
        raise UserError(f"{path} is a folder; a {kind} is a file")
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path("configs")
        names = [str(file) for file in sorted(folder.glob("*.y*ml"))]
        near = nearest(str(path), names)
        hint = f"; did you mean {near}?" if near else (f"; there are: {', '.join(names)}" if names else "")
        raise UserError(f"no such {kind} file: {path}{hint}")
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: a {kind} is a mapping of keys to values, and this file holds a list")
    return {str(key): item for key, item in content.items()}
