"""Completions that a run kept as tables, read back from the store."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from kl_comedy.tracking import store

FOLDERS = ("tables/eval", "tables/samples")
MOST_ROWS = 4


def newest_samples(uri: str, run_id: str, most: int = MOST_ROWS) -> list[dict[str, Any]]:
    """Up to ``most`` rows of the newest evaluation table of the run, else of its newest table of samples.

    Nothing where the run kept none, or where its artifacts are not where the store says they are.
    """
    client = store.open_existing(uri)
    for folder in FOLDERS:
        files = _files(client, run_id, folder)
        if files:
            return _rows(client, run_id, max(files, key=_step))[:most]
    return []


def _files(client: Any, run_id: str, folder: str) -> list[str]:
    found = []
    for item in client.list_artifacts(run_id, folder):
        found += _files(client, run_id, item.path) if item.is_dir else [item.path]
    return [path for path in found if path.endswith(".json")]


def _step(path: str) -> int:
    stem = Path(path).stem
    return int(stem) if stem.isdigit() else -1


def _rows(client: Any, run_id: str, path: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        content = Path(client.download_artifacts(run_id, path, scratch)).read_bytes()
    try:
        rows = json.loads(content)
    except ValueError:
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
