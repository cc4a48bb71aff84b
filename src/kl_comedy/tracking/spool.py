"""The record of a run: one JSON object per line in ``RUN_DIR/spool.jsonl``.

This file is the truth and MLflow a copy of it: an event is on disk before anything is sent. Each append is one
``write`` of a whole line, so a killed process leaves at most one incomplete last line, which the next append removes.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kl_comedy.io import atomic_write

KINDS = ("params", "tags", "metrics", "table", "artifact", "status")
"""What an event can be. ``metrics`` and ``table`` have a step; the others belong to the whole run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One logged fact. ``time`` is Unix milliseconds; ``step`` counts optimizer updates.

    ``data`` by kind: params {key: text}; tags {key: text, or None to delete}; metrics {name: float};
    table {name, path, folder}; artifact {path, folder}; status {status, reason}. Paths inside the run folder
    are relative to it, so that the folder can be moved.
    """

    kind: str
    time: int
    step: int | None = None
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpoolContent:
    """Events with the byte offset of their lines, the offset after the last one, and the number of unreadable lines."""

    events: list[tuple[Event, int]]
    end: int
    unreadable: int


class Spool:
    """Append-only events of one run. Only the first process of a run writes it."""

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = Path(run_dir)
        self.path = self.run_dir / "spool.jsonl"
        self._fd: int | None = None

    def append(self, kind: str, data: Mapping[str, Any], *, step: int | None = None) -> None:
        """Write one event as one line. Raises OSError when the disk refuses it."""
        if kind not in KINDS:
            raise ValueError(f"unknown event kind {kind!r}; allowed: {', '.join(KINDS)}")
        event = Event(kind=kind, time=time.time_ns() // 1_000_000, step=step, data=json_safe(data))
        line = json.dumps(asdict(event), allow_nan=False).encode("ascii") + b"\n"
        if self._fd is None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._fd, sum(map(len, self._lines())))
        while line:
            line = line[os.write(self._fd, line) :]

    def flush(self) -> None:
        """Make what was appended survive a power cut (fsync)."""
        if self._fd is not None:
            os.fsync(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            self.flush()
            os.close(self._fd)
            self._fd = None

    def read(self, start: int = 0) -> SpoolContent:
        """Events from byte ``start`` on, without an incomplete last line."""
        events: list[tuple[Event, int]] = []
        offset, unreadable = start, 0
        for line in self._lines(start):
            event = _decode(line)
            if event is None:
                unreadable += 1
            else:
                events.append((event, offset))
            offset += len(line)
        return SpoolContent(events=events, end=offset, unreadable=unreadable)

    def events(self) -> list[Event]:
        """All readable events in the order they were written."""
        return [event for event, _ in self.read().events]

    def truncate_after(self, step: float) -> int:
        """Drop metrics and tables of steps beyond ``step``, which a resumed run computes again.

        Replaces the file atomically. Returns the number of bytes at its front that did not change.
        """
        self.close()
        lines = [(line, _decode(line)) for line in self._lines()]
        later = [event is not None and event.step is not None and event.step > step for _, event in lines]
        first_dropped = later.index(True) if True in later else len(lines)
        if True in later:
            atomic_write(self.path, b"".join(line for (line, _), drop in zip(lines, later, strict=True) if not drop))
        for (_, event), drop in zip(lines, later, strict=True):
            if drop and event is not None and event.kind == "table":
                (self.run_dir / event.data["path"]).unlink(missing_ok=True)
        return sum(len(line) for line, _ in lines[:first_dropped])

    def _lines(self, start: int = 0) -> Iterator[bytes]:
        """Complete lines from byte ``start`` on."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(start)
                yield from (line for line in file if line.endswith(b"\n"))


def json_safe(value: Any) -> Any:
    """``value`` as strict JSON can hold it: non-finite floats become 'nan', 'inf', '-inf', other types their text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return str(value)


def _decode(line: bytes) -> Event | None:
    try:
        event = Event(**json.loads(line))
        if event.kind not in KINDS or not isinstance(event.data, dict):
            return None
        if event.kind == "metrics":
            data = {name: float(value) for name, value in event.data.items()}
            return Event(kind="metrics", time=event.time, step=event.step, data=data)
        return event
    except (ValueError, TypeError):
        return None
