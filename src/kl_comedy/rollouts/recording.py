"""Rollouts on disk: what a row holds, and writing them batch by batch (reading: :mod:`recording_reader`).

    <folder>/batch-00000000.jsonl   one completion a line, the groups of a batch one after the other
    <folder>/batch-00000001.jsonl   ... or .parquet, the same columns

A part is written under another name and renamed, so a kill leaves whole parts only. Parts laid end to end in one file
are a recording too (``cat batch-*.jsonl > all.jsonl``).

Reading a recording: every row is checked once when it is opened, then one batch at a time is read.

path -> parts, or one file -> rows -> batches -> where each begins -> the rows of one
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.records import FOREIGN_VERSION, STATUSES, STOP_REASONS, Prompt, Reward, Rollout, Scored

FORMATS = ("jsonl", "parquet")
FIELDS = {
    "batch": "the number of its batch, counted from 0",
    "group": "the number of its group within the batch",
    "problem": "the problem's id",
    "prompt_ids": "token ids of the prompt",
    "completion_ids": "token ids of the completion, the end token included",
    "logps": "the sampler's log-prob (nats) of each of them, at `temperature`",
    "versions": "the version of the weights that drew each of them; -1: of another run",
    "stop_reason": "eos, stop or length",
    "text": "the completion decoded, without special tokens",
    "reward": "the weighted reward",
    "status": "of the verifier",
    "parts": "each reward before its weight",
    "temperature": "of sampling",
}
"""Columns of a recording, in order."""

LOGP_SLACK = 1e-4
"""Nats above 0 that rounding may leave on the log-prob of a certain token."""


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
        target = self._folder / f"batch-{batch:08d}.{self._format}"
        temporary = target.with_name(f".{target.name}.tmp")
        try:
            self._folder.mkdir(exist_ok=True)
            (_write_jsonl if self._format == "jsonl" else _write_parquet)(temporary, plain)
            os.replace(temporary, target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise RunFailed(
                f"the rollouts of batch {batch} cannot be written to {self._folder} ({error.strerror or error})"
            ) from error

    def forget_from(self, batch: int) -> None:
        """Remove batches from this one on: what a run drew after the checkpoint that it goes on from."""
        for part in self._folder.glob(f"batch-*.{self._format}"):
            if int(part.stem.removeprefix("batch-")) >= batch:
                part.unlink()


def _write_jsonl(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows), encoding="utf-8")


def _write_parquet(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = [{**row, "parts": list(row["parts"].items())} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(columns, schema=_schema()), file)


def _schema() -> Any:
    import pyarrow as pa

    ids, text = pa.list_(pa.int64()), pa.string()
    types = {
        "batch": pa.int64(),
        "group": pa.int64(),
        "problem": text,
        "prompt_ids": ids,
        "completion_ids": ids,
        "logps": pa.list_(pa.float64()),
        "versions": ids,
        "stop_reason": text,
        "text": text,
        "reward": pa.float64(),
        "status": text,
        "parts": pa.map_(text, pa.float64()),
        "temperature": pa.float64(),
    }
    return pa.schema([(name, types[name]) for name in FIELDS])


def check_row(row: Mapping[str, Any], place: str) -> None:
    """Raise :class:`UserError` for the first thing that makes a row unusable, naming ``place`` and the field."""
    for name, meaning in FIELDS.items():
        if row.get(name) is None:
            raise UserError(f"{place}: {name} is missing ({meaning}); a run records it with train.record_rollouts")
        if not _FITS[name](row[name]):
            raise UserError(f"{place}: {name} is not {meaning}: {str(row[name])[:60]}")
    tokens = len(row["completion_ids"])
    for name in ("logps", "versions"):
        if len(row[name]) != tokens:
            raise UserError(f"{place}: {name} has {len(row[name])} numbers for the {tokens} tokens of completion_ids")


def _whole(value: Any) -> bool:
    return type(value) is int


def _ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_whole(item) and item >= 0 for item in value)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


_FITS: dict[str, Callable[[Any], bool]] = {
    "batch": lambda value: _whole(value) and value >= 0,
    "group": lambda value: _whole(value) and value >= 0,
    "problem": lambda value: isinstance(value, str),
    "prompt_ids": _ids,
    "completion_ids": _ids,
    "logps": lambda value: isinstance(value, list) and all(_number(x) and x <= LOGP_SLACK for x in value),
    "versions": lambda value: isinstance(value, list) and all(_whole(x) and x >= FOREIGN_VERSION for x in value),
    "stop_reason": lambda value: value in STOP_REASONS,
    "text": lambda value: isinstance(value, str),
    "reward": _number,
    "status": lambda value: value in STATUSES,
    "parts": lambda value: isinstance(value, dict) and all(_number(x) for x in value.values()),
    "temperature": lambda value: _number(value) and value > 0,
}


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
