"""Reading a recording: every row is checked once when it is opened, then one batch at a time is read.

path -> parts, or one file -> rows -> batches -> where each begins -> the rows of one
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.rollouts.recording import FORMATS, check_row

Row = tuple[str, Mapping[str, Any]]
"""Where it is (file and line, for messages), and the row."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a batch begins: ``at`` is a byte of a JSONL file or a row of a Parquet file, ``first`` its row number."""

    file: Path
    at: int
    first: int
    rows: int


class Recording:
    """Batches of recorded rollouts, read one at a time. Opening reads everything once and checks every row.

    ``check`` sees each whole batch as it goes by, and may raise. ``key`` names the setting at fault in messages.
    """

    def __init__(self, path: Path, *, key: str, check: Callable[[Sequence[Row]], None]) -> None:
        self._key = key
        self._places: list[_Place] = []
        batch: list[Row] = []
        begun: tuple[Path, int, int] = (path, 0, 0)
        for file in _files(path, key):
            for number, at, row in _rows(file, key):
                place = f"{key}: {file}, row {number + 1}"
                check_row(row, place)
                if batch and row["batch"] != batch[0][1]["batch"]:
                    self._add(batch, begun, check)
                    if row["batch"] != batch[0][1]["batch"] + 1:
                        raise UserError(
                            f"{place}: batch {row['batch']} comes after batch {batch[0][1]['batch']}; a recording "
                            "holds every batch, in order"
                        )
                    batch = []
                if not batch:
                    begun = (file, at, number)
                elif file != begun[0]:
                    raise UserError(
                        f"{place}: batch {row['batch']} goes on from {begun[0].name}; keep a batch in one file"
                    )
                batch.append((place, row))
        if not batch:
            raise UserError(f"{key}: {path} holds no rollouts")
        self._add(batch, begun, check)

    def __len__(self) -> int:
        return len(self._places)

    def _add(self, batch: Sequence[Row], begun: tuple[Path, int, int], check: Callable[[Sequence[Row]], None]) -> None:
        check(batch)
        file, at, first = begun
        self._places.append(_Place(file=file, at=at, first=first, rows=len(batch)))

    def read(self, batch: int) -> list[Mapping[str, Any]]:
        """The rows of one batch, by its place in the recording. Raises :class:`RunFailed` where they have changed."""
        place = self._places[batch]
        try:
            found = _read_jsonl(place) if place.file.suffix == ".jsonl" else _read_parquet(place)
            for n, row in enumerate(found):
                check_row(row, f"{place.file}, row {place.first + n + 1}")
        except (UserError, OSError, ValueError) as error:
            raise RunFailed(f"{self._key}: batch {batch} of the recording cannot be read any more: {error}") from error
        if len(found) != place.rows:
            raise RunFailed(f"{self._key}: {place.file} has changed since this run began")
        return found


def _files(path: Path, key: str) -> list[Path]:
    """The parts of a folder, in order, or the one file."""
    if path.is_dir():
        found = sorted(file for format in FORMATS for file in path.glob(f"batch-*.{format}"))
        if not found:
            raise UserError(
                f"{key}: {path} holds no batch-*.jsonl or batch-*.parquet (train.record_rollouts writes them)"
            )
        if len({file.suffix for file in found}) > 1:
            raise UserError(f"{key}: {path} holds both JSONL and Parquet parts; keep one kind")
        return found
    if not path.is_file():
        raise UserError(f"{key}: no such file or folder: {path}")
    if path.suffix.removeprefix(".") not in FORMATS:
        raise bad_value(key, str(path), "a folder of parts, a .jsonl or a .parquet file")
    return [path]


def _rows(file: Path, key: str) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """``(row number, where it begins, row)``."""
    if file.suffix == ".parquet":
        yield from _parquet_rows(file, key)
        return
    at = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines):
            yield number, at, _parsed(line, f"{key}: {file}, row {number + 1}")
            at += len(line)


def _parsed(line: bytes, place: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise UserError(f"{place}: a row is a JSON object, got {type(row).__name__}")
    return row


def _parquet_rows(file: Path, key: str) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield number, number, _with_parts(row)
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{key}: {file} is not a readable Parquet file: {error}") from error


def _with_parts(row: dict[str, Any]) -> dict[str, Any]:
    parts = row.get("parts")
    return {**row, "parts": dict(parts)} if isinstance(parts, list) else row


def _read_jsonl(place: _Place) -> list[Mapping[str, Any]]:
    with place.file.open("rb") as lines:
        lines.seek(place.at)
        return [_parsed(lines.readline(), f"row {place.first + n + 1}") for n in range(place.rows)]


def _read_parquet(place: _Place) -> list[Mapping[str, Any]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(place.file) as table:
        wanted, start, first = [], 0, 0
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if start < place.at + place.rows and start + rows > place.at:
                first = first if wanted else start
                wanted.append(group)
            start += rows
        found = table.read_row_groups(wanted).slice(place.at - first, place.rows).to_pylist()
    return [_with_parts(row) for row in found]
