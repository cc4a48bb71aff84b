"""Rollouts on disk: writing them batch by batch, and reading them back one batch at a time.

    <folder>/batch-00000000.jsonl   one completion a line, the groups of a batch one after the other
    <folder>/batch-00000001.jsonl   ... or .parquet, the same columns

A part is written under another name and renamed, so a kill leaves whole parts only. Parts concatenated into one file
are a recording too (``cat batch-*.jsonl > all.jsonl``). Every row is checked when a recording is opened.
"""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.io import atomic_write
from kl_comedy.records import FOREIGN_VERSION, STATUSES, STOP_REASONS, Prompt, Reward, Rollout, Scored

FORMATS = ("jsonl", "parquet")
LOGP_SLACK = 1e-4
"""Nats above 0 that rounding may leave on the log-prob of a certain token."""

Row = tuple[str, Mapping[str, Any]]
"""File and line for messages, and the row."""


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_count, value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_logps(value: Any) -> bool:
    return isinstance(value, list) and all(_is_number(item) and item <= LOGP_SLACK for item in value)


def _is_versions(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= FOREIGN_VERSION for item in value)


def _is_parts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


FIELDS: Mapping[str, tuple[str, str, Callable[[Any], bool]]] = {
    "batch": ("the number of its batch, counted from 0", "int", _is_count),
    "group": ("the number of its group within the batch", "int", _is_count),
    "problem": ("the problem's id", "text", _is_text),
    "prompt_ids": ("token ids of the prompt", "ints", _is_ids),
    "completion_ids": ("token ids of the completion, the end token included", "ints", _is_ids),
    "logps": ("the sampler's log-prob (nats) of each of them, at `temperature`", "floats", _is_logps),
    "versions": ("the version of the weights that drew each of them; -1: of another run", "ints", _is_versions),
    "stop_reason": ("eos, stop or length", "text", STOP_REASONS.__contains__),
    "text": ("the completion decoded, without special tokens", "text", _is_text),
    "reward": ("the weighted reward", "float", _is_number),
    "status": ("of the verifier", "text", STATUSES.__contains__),
    "parts": ("each reward before its weight", "parts", _is_parts),
    "temperature": ("of sampling", "float", lambda value: _is_number(value) and value > 0),
}
"""Columns of a recording, in order: meaning, kind, and the check of a value."""


def to_row(batch: int, scored: Scored, *, temperature: float) -> dict[str, Any]:
    """A rollout and its reward as the plain data of one row."""
    rollout, reward = scored.rollout, scored.reward
    return {
        "batch": batch,
        "group": rollout.group_id,
        "problem": rollout.prompt.problem.id,
        "prompt_ids": list(rollout.prompt.token_ids),
        "completion_ids": list(rollout.completion_ids),
        "logps": list(rollout.logps),
        "versions": list(rollout.versions),
        "stop_reason": rollout.stop_reason,
        "text": rollout.text,
        "reward": reward.value,
        "status": reward.status,
        "parts": dict(reward.parts),
        "temperature": temperature,
    }


def from_row(row: Mapping[str, Any], prompt: Prompt) -> Scored:
    """The inverse, but for the versions: they count another run's updates, so all become :data:`FOREIGN_VERSION`."""
    rollout = Rollout(
        prompt=prompt,
        group_id=row["group"],
        completion_ids=tuple(row["completion_ids"]),
        logps=tuple(row["logps"]),
        versions=(FOREIGN_VERSION,) * len(row["completion_ids"]),
        stop_reason=row["stop_reason"],
        text=row["text"],
    )
    return Scored(rollout=rollout, reward=Reward(value=row["reward"], status=row["status"], parts=dict(row["parts"])))


class RecordingWriter:
    """Writes the batches of one run, each once or again: a resumed run replaces what it draws anew."""

    def __init__(self, folder: Path, format: str, *, temperature: float) -> None:
        self._folder, self._format, self._temperature = folder, format, temperature

    def write(self, batch: int, rows: Sequence[Scored]) -> None:
        """Write one batch whole. Raises :class:`RunFailed` where the disk refuses."""
        plain = [to_row(batch, row, temperature=self._temperature) for row in rows]
        try:
            content = _jsonl_bytes(plain) if self._format == "jsonl" else _parquet_bytes(plain)
            atomic_write(self._folder / f"batch-{batch:08d}.{self._format}", content)
        except OSError as error:
            raise RunFailed(
                f"the rollouts of batch {batch} cannot be written to {self._folder} ({error.strerror or error})"
            ) from error

    def remove_from(self, batch: int) -> None:
        """Remove batches from this one on: what a run drew after the checkpoint from which it resumes."""
        for part in self._folder.glob(f"batch-*.{self._format}"):
            if int(part.stem.removeprefix("batch-")) >= batch:
                part.unlink()


def _jsonl_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _parquet_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet

    types = {
        "int": pa.int64(),
        "ints": pa.list_(pa.int64()),
        "float": pa.float64(),
        "floats": pa.list_(pa.float64()),
        "text": pa.string(),
        "parts": pa.map_(pa.string(), pa.float64()),
    }
    schema = pa.schema([(name, types[kind]) for name, (_, kind, _) in FIELDS.items()])
    columns = [{**row, "parts": list(row["parts"].items())} for row in rows]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pa.Table.from_pylist(columns, schema=schema), buffer)
    return buffer.getvalue()


def check_row(row: Mapping[str, Any], place: str) -> None:
    """Raise :class:`UserError` for the first thing that makes a row unusable, naming ``place`` and the field."""
    for name, (meaning, _, fits) in FIELDS.items():
        if row.get(name) is None:
            raise UserError(f"{place}: {name} is missing ({meaning}); a run records it with train.record_rollouts")
        if not fits(row[name]):
            raise UserError(f"{place}: {name} is not {meaning}: {str(row[name])[:60]}")
    tokens = len(row["completion_ids"])
    for name in ("logps", "versions"):
        if len(row[name]) != tokens:
            raise UserError(f"{place}: {name} has {len(row[name])} numbers for the {tokens} tokens of completion_ids")


class Recording:
    """Batches of recorded rollouts, read one at a time. Opening reads everything once and checks every row.

    ``check`` gets each whole batch, and may raise. ``key`` names the setting at fault in messages.
    """

    def __init__(self, path: Path, *, key: str, check: Callable[[Sequence[Row]], None]) -> None:
        self._key = key
        self._batches: list[tuple[Path, int, int]] = []
        """Of each batch: its file, where its first row begins there (see :func:`_rows`), and its number of rows."""
        rows = ((file, start, place, row) for file in _files(path, key) for start, place, row in _rows(file, 0, key))
        previous: int | None = None
        for number, group in itertools.groupby(rows, key=lambda item: item[3].get("batch")):
            batch = []
            for file, start, place, row in group:
                check_row(row, place)
                if not batch:
                    first_file, first_start = file, start
                    if previous is not None and number != previous + 1:
                        raise UserError(
                            f"{place}: batch {number} comes after batch {previous}; a recording holds every batch, in "
                            "order"
                        )
                elif file != first_file:
                    raise UserError(f"{place}: batch {number} began in {first_file.name}; keep a batch in one file")
                batch.append((place, row))
            check(batch)
            self._batches.append((first_file, first_start, len(batch)))
            previous = number
        if not self._batches:
            raise UserError(f"{key}: {path} holds no rollouts")

    def __len__(self) -> int:
        return len(self._batches)

    def read(self, batch: int) -> list[Mapping[str, Any]]:
        """The rows of one batch, by its position. Raises :class:`RunFailed` where they have changed since."""
        file, start, count = self._batches[batch]
        rows = []
        try:
            for _, place, row in itertools.islice(_rows(file, start, self._key), count):
                check_row(row, place)
                rows.append(row)
        except (UserError, OSError, ValueError) as error:
            raise RunFailed(f"{self._key}: batch {batch} of the recording cannot be read any more: {error}") from error
        if len(rows) != count:
            raise RunFailed(f"{self._key}: {file} has changed since this run began")
        return rows


def _files(path: Path, key: str) -> list[Path]:
    """The parts of a folder, in order, or the one file."""
    if path.is_dir():
        files = sorted(file for format in FORMATS for file in path.glob(f"batch-*.{format}"))
        if not files:
            raise UserError(
                f"{key}: {path} holds no batch-*.jsonl or batch-*.parquet (train.record_rollouts writes them)"
            )
        if len({file.suffix for file in files}) > 1:
            raise UserError(f"{key}: {path} holds both JSONL and Parquet parts; keep one kind")
        return files
    if not path.is_file():
        raise UserError(f"{key}: no such file or folder: {path}")
    if path.suffix.removeprefix(".") not in FORMATS:
        raise bad_value(key, str(path), "a folder of parts, a .jsonl or a .parquet file")
    return [path]


def _rows(file: Path, start: int, key: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Rows from ``start`` on: where each begins (byte of a JSONL file, row of a Parquet file), its name, the row."""
    if file.suffix == ".parquet":
        for number, row in _parquet_rows(file, start, key):
            parts = row.get("parts")
            yield (
                number,
                f"{key}: {file}, row {number + 1}",
                {**row, "parts": dict(parts)} if isinstance(parts, list) else row,
            )
        return
    with file.open("rb") as lines:
        lines.seek(start)
        suffix = f" after byte {start}" if start else ""
        for number, line in enumerate(lines, 1):
            place = f"{key}: {file}, row {number}{suffix}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{place}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise UserError(f"{place}: a row is a JSON object, got {type(row).__name__}")
            yield start, place, row
            start += len(line)


def _parquet_rows(file: Path, start: int, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            number, groups = 0, list(range(table.num_row_groups))
            while groups and number + table.metadata.row_group(groups[0]).num_rows <= start:
                number += table.metadata.row_group(groups.pop(0)).num_rows
            for batch in table.iter_batches(batch_size=1024, row_groups=groups):
                for row in batch.to_pylist():
                    if number >= start:
                        yield number, row
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{key}: {file} is not a readable Parquet file: {error}") from error
