"""Rollouts on disk: what a row holds, and writing them batch by batch (reading: :mod:`recording_reader`).

    <folder>/batch-00000000.jsonl   one completion a line, the groups of a batch one after the other
    <folder>/batch-00000001.jsonl   ... or .parquet, the same columns

A part is written under another name and renamed, so a kill leaves whole parts only. Parts laid end to end in one file
are a recording too (``cat batch-*.jsonl > all.jsonl``).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kl_comedy.errors import RunFailed, UserError
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
    return Scored(
        rollout=rollout, reward=Reward(value=row["reward"], status=row["status"], parts=dict(row["parts"]))
    )  # fmt: skip


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
        "batch": pa.int64(), "group": pa.int64(), "problem": text, "prompt_ids": ids, "completion_ids": ids,
        "logps": pa.list_(pa.float64()), "versions": ids, "stop_reason": text, "text": text, "reward": pa.float64(),
        "status": text, "parts": pa.map_(text, pa.float64()), "temperature": pa.float64(),
    }  # fmt: skip
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
