"""Problems from local files: JSONL (strict UTF-8, one object a line) and Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kl_comedy.config.schema import DatasetConfig
from kl_comedy.data.checks import existing_file, known_options, unused
from kl_comedy.data.rows import ROW_OPTIONS, read_rows
from kl_comedy.errors import UserError
from kl_comedy.records import Problem
from kl_comedy.registry import DATASETS


@DATASETS.register("jsonl", source="JSON Lines: one RFC 8259 object a line, UTF-8")
def jsonl(config: DatasetConfig, *, key: str) -> list[Problem]:
    """A local JSONL file; a malformed row names its file and line."""
    known_options(config, ROW_OPTIONS, key=key)
    unused(config, "name", "subset", "split", key=key)
    path = existing_file(config, (".jsonl",), key=key)
    return read_rows(_jsonl_rows(path), config, key=key, source=str(path))


@DATASETS.register("parquet", source="Apache Parquet, read with pyarrow")
def parquet(config: DatasetConfig, *, key: str) -> list[Problem]:
    """A local Parquet file; a malformed row names its file and row number."""
    known_options(config, ROW_OPTIONS, key=key)
    unused(config, "name", "subset", "split", key=key)
    path = existing_file(config, (".parquet",), key=key)
    return read_rows(_parquet_rows(path, key=key), config, key=key, source=str(path))


def _jsonl_rows(path: Path) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """``(file:line, fallback id, row)``; lines count from 1 and end in ``\\n`` only (U+2028 is text)."""
    with path.open("rb") as file:
        blank: str | None = None
        for number, line in enumerate(file, start=1):
            place = f"{path}:{number}"
            if not line.strip():
                blank = blank or place
                continue
            if blank:
                raise UserError(f"{blank}: blank line between rows; remove it")
            yield place, f"{path.stem}/{number}", _parse(line, place)


def _parse(line: bytes, place: str) -> Mapping[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 (byte {error.start + 1} of the line: {error.reason})") from error
    try:
        row = json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
    except RecursionError as error:
        raise UserError(f"{place}: malformed JSON: nested too deeply") from error
    except ValueError as error:
        raise UserError(f"{place}: malformed JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{place}: a row must be a JSON object, got {type(row).__name__}")
    return row


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {next(n for n in names if names.count(n) > 1)!r} is there twice")
    return row


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _parquet_rows(path: Path, *, key: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """``(file row N, fallback id, row)``; rows count from 1 and are read in batches."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", f"{path.stem}/{number}", row
    except (pyarrow.ArrowException, OSError) as error:
        where = f" after row {number}" if number else ""
        raise UserError(f"{key}.path: {path} is not a readable Parquet file{where}: {error}") from error
