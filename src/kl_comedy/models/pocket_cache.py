"""A folder of built policies: checked by content on every read, written whole or not at all, locked while built."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from kl_comedy.errors import UserError

MANIFEST = "manifest.json"


def cache_root() -> Path:
    """``$KL_COMEDY_CACHE``, else ``~/.cache/kl_comedy``."""
    return Path(os.environ.get("KL_COMEDY_CACHE") or "~/.cache/kl_comedy").expanduser()


def cached_folder(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """The folder ``<cache>/<kind>/<key>``, made by ``build(empty folder)`` unless a sound one is there.

    ``build`` runs in a folder beside it that is renamed into place once its manifest is written, so a reader
    never sees half of it. Of several processes one builds and the others wait. A folder whose files differ
    from its manifest is said to be damaged, and built again. Raises UserError where the cache cannot be written.
    """
    folder = cache_root() / kind / key
    if damage(folder) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f"{key}.lock", f"{kind} {key}"):
            why = damage(folder)
            if why is not None:
                if folder.exists():
                    _say(f"{kind} policy: the cached copy {folder} is damaged ({why}); building it again")
                _build_into(folder, build)
    except OSError as error:
        raise UserError(
            f"KL_COMEDY_CACHE: cannot write the {kind} policy to {folder}: {error}; set it to a writable folder"
        ) from error
    return folder


def damage(folder: Path) -> str | None:
    """What is wrong with a cached folder, or None when every file of its manifest is there unchanged."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, digest in files.items():
            if _sha256(folder / name) != digest:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return None if files else f"{MANIFEST} names no files"


def _build_into(folder: Path, build: Callable[[Path], None]) -> None:
    """Build beside ``folder``, write the manifest, and rename. Leftovers of killed builds go first."""
    for leftover in folder.parent.glob(f"{folder.name}.*.tmp"):
        shutil.rmtree(leftover)
    fresh = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    fresh.mkdir()
    try:
        build(fresh)
        files = {path.name: _sha256(path) for path in sorted(fresh.iterdir()) if path.is_file()}
        (fresh / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    """Hold an exclusive lock on ``path``, which the system drops with the process; unlocked without ``fcntl``."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another process is building {what}; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
