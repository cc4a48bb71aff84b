"""Folders that are built once per machine and used again: the pocket policy, a model with its adapter merged."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from kl_comedy.errors import UserError
from kl_comedy.io import file_lock, find_damage, write_checksums


def cached_folder(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """The folder ``<kind>/<key>`` of the cache, built by ``build(empty folder)`` unless an undamaged one exists.

    The cache is ``$KL_COMEDY_CACHE``, else ``~/.cache/kl_comedy``. ``build`` works in a draft, which is renamed after
    its checksums are written, so that a reader never sees an unfinished folder. Where several processes ask for the
    same folder, one builds it and the others wait. Raises :class:`UserError` where the cache cannot be written.
    """
    folder = Path(os.environ.get("KL_COMEDY_CACHE") or "~/.cache/kl_comedy").expanduser() / kind / key
    if find_damage(folder) is None:
        return folder
    waiting = f"another process is building {kind} {key}; waiting for it"
    try:
        with file_lock(folder.parent / f"{key}.lock", wait_s=math.inf, on_wait=lambda: _print(waiting)):
            # Asked again inside the lock, because another process may have built it while this one waited.
            damage = find_damage(folder)
            if damage is None:
                return folder
            if folder.exists():
                _print(f"{kind}: the cached copy {folder} is damaged ({damage}); building it again")
            draft = folder.with_name(f"{key}.tmp")
            shutil.rmtree(draft, ignore_errors=True)  # a killed build left it
            draft.mkdir()
            build(draft)
            write_checksums(draft)
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
    except OSError as error:
        raise UserError(
            f"KL_COMEDY_CACHE: cannot write {kind} to {folder}: {error}; set it to a writable folder"
        ) from error
    return folder


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
