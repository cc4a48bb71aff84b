"""Records of an evaluation on disk: one file a chunk while it runs, one table when it is whole.

    FOLDER/  manifest.json  chunks/00000.jsonl ...  ->  items.jsonl  items.parquet  summary.json

A chunk's file is written beside and renamed, so a kill leaves whole chunks only, and whoever runs next goes on. Records
hold no times, so the same evaluation gives the same bytes.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_comedy.errors import UserError
from kl_comedy.evaluation.plan import Plan
from kl_comedy.tracking.locks import file_lock
from kl_comedy.tracking.spool import write_atomic

log = logging.getLogger("kl_comedy")
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Records:
    """The folder of one suite's evaluation."""

    path: Path
    plan: Plan

    @property
    def items(self) -> Path:
        return self.path / "items.jsonl"

    @property
    def table(self) -> Path:
        return self.path / "items.parquet"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def chunk(self, number: int) -> Path:
        return self.path / "chunks" / f"{number:05d}.jsonl"

    def open(self) -> None:
        """Make the folder and say in it what it is of. Raises :class:`UserError` where it cannot be written."""
        try:
            (self.path / "chunks").mkdir(parents=True, exist_ok=True)
            write_atomic(self.path / "manifest.json", _json(self.plan.identity(), indent=1))
        except OSError as error:
            raise UserError(f"--out: cannot write {self.path}: {error.strerror or error}") from error

    @property
    def finished(self) -> bool:
        """Whether every record is there, in one file."""
        return self.items.is_file()

    def missing(self) -> list[int]:
        """Chunks without a whole file."""
        return [] if self.finished else [n for n in self.plan.chunks if not self._whole(n)]

    def write(self, number: int, rows: Sequence[Row]) -> None:
        write_atomic(self.chunk(number), b"".join(_json(row) for row in rows))

    def merge(self) -> bool:
        """Make one file of the chunks, once all are there; whether it is there. Any process may, several at a time."""
        with file_lock(self.path / ".lock"):
            if self.finished:
                return True
            if self.missing():
                return False
            write_atomic(self.items, b"".join(self.chunk(n).read_bytes() for n in self.plan.chunks))
        shutil.rmtree(self.path / "chunks", ignore_errors=True)
        return True

    def rows(self) -> list[Row]:
        """Every record, in the order of problems and samples."""
        return _parsed(self.items.read_bytes())

    def write_table(self) -> None:
        """The records as Parquet beside the JSON lines."""
        import pandas as pd

        draft = self.table.with_name(f".{self.table.name}")
        pd.DataFrame(self.rows()).to_parquet(draft, index=False)
        draft.replace(self.table)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_atomic(self.summary, _json(dict(summary), indent=1))

    def _whole(self, number: int) -> bool:
        """Whether a chunk's file holds what it must; one that does not is said and drawn again."""
        file = self.chunk(number)
        if not file.is_file():
            return False
        try:
            there = [row["index"] for row in _parsed(file.read_bytes())]
        except (ValueError, KeyError, TypeError):
            there = []
        per_problem = self.plan.samples if self.plan.suite.kind == "generate" else 1
        if there == [index for index in self.plan.part(number) for _ in range(per_problem)]:
            return True
        log.warning(f"{file} is damaged; its problems are evaluated again")
        return False


def _json(value: Any, indent: int | None = None) -> bytes:
    return json.dumps(value, allow_nan=False, indent=indent).encode("ascii") + b"\n"


def _parsed(content: bytes) -> list[Row]:
    return [json.loads(line) for line in content.splitlines()]
