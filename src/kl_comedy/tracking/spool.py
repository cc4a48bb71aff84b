"""What a run folder remembers about its copy in MLflow: ``RUN_DIR/tracking.json``.

The run's own record of everything it tracked: one JSON object a line in ``RUN_DIR/spool.jsonl``.

The spool is the truth and MLflow a copy of it: an event is on disk before anything is sent anywhere.
Each append is one ``write`` of a whole line, so a killed process leaves at most one torn last line,
which the next opening cuts off. :meth:`Spool.truncate_after` drops what a resumed run will do again.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from kl_comedy.errors import UserError
from kl_comedy.io import atomic_write

STATE_NAME = "tracking.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class MirrorState:
    """Where the run is mirrored and how far.

    ``uri`` is the store without credentials; ``run_id`` the MLflow run, None before it exists; ``mirrored_step``
    the highest step that may already be in MLflow (written before the upload, so never too low);
    ``offset`` the byte of the spool before which everything has been uploaded; ``replaced`` the ids of runs
    that were given up because MLflow cannot forget metric points.
    """

    uri: str
    experiment: str
    run_name: str
    run_id: str | None = None
    mirrored_step: int | None = None
    offset: int = 0
    replaced: tuple[str, ...] = ()

    @staticmethod
    def load(run_dir: Path) -> MirrorState | None:
        """The stored state, or None where the folder has none. Raises :class:`UserError` for a damaged file."""
        path = run_dir / STATE_NAME
        if not path.is_file():
            return None
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            known = {field.name for field in fields(MirrorState)}
            row["replaced"] = tuple(row.get("replaced", ()))
            return MirrorState(**{key: value for key, value in row.items() if key in known})
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({error}); remove it to mirror the run anew from its spool") from error

    def save(self, run_dir: Path) -> None:
        atomic_write(run_dir / STATE_NAME, json.dumps(asdict(self), indent=2).encode() + b"\n")


KINDS = ("params", "tags", "metrics", "table", "artifact", "status")
"""What an event can be. ``metrics`` and ``table`` have a step; the others belong to the whole run."""

SPOOL_NAME = "spool.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One tracked fact. ``time`` is Unix milliseconds; ``step`` counts optimizer updates.

    ``data`` by kind: params {key: text}; tags {key: text, or None to delete}; metrics {name: float};
    table {name, path}; artifact {path, folder}; status {status, reason}. Paths inside the run folder
    are stored relative to it, so that the folder can be moved and synced elsewhere.
    """

    kind: str
    data: Mapping[str, Any]
    time: int
    step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a pass over the spool found: ``(event, byte offset of its line)`` pairs and unreadable lines."""

    events: list[tuple[Event, int]] = field(default_factory=list)
    end: int = 0
    unreadable: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """How many events were dropped, and how many bytes at the front of the file stayed as they were."""

    dropped: int
    unchanged: int


class Spool:
    """Append-only events of one run. Not shared between processes: the main process of a run writes it."""

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = Path(run_dir)
        self.path = self.run_dir / SPOOL_NAME
        self._fd: int | None = None

    def append(self, kind: str, data: Mapping[str, Any], *, step: int | None = None) -> Event:
        """Write one event as one line and return it. Raises OSError when the disk refuses it."""
        if kind not in KINDS:
            raise ValueError(f"unknown event kind {kind!r}; allowed: {', '.join(KINDS)}")
        event = Event(kind=kind, data=dict(data), time=time.time_ns() // 1_000_000, step=step)
        _write_all(self._descriptor(), _encode(event))
        return event

    def flush(self) -> None:
        """Make what was appended survive a power cut (fsync)."""
        if self._fd is not None:
            os.fsync(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            self.flush()
            os.close(self._fd)
            self._fd = None

    def read(self, start: int = 0) -> Reading:
        """Events from byte ``start`` on. A torn last line is left out; unreadable lines are counted."""
        found: list[tuple[Event, int]] = []
        offset, unreadable = start, 0
        for line in self._lines(start):
            if not line.endswith(b"\n"):
                break
            event = _decode(line)
            if event is None:
                unreadable += 1
            else:
                found.append((event, offset))
            offset += len(line)
        return Reading(events=found, end=offset, unreadable=unreadable)

    def events(self) -> list[Event]:
        """All readable events in the order they were written."""
        return [event for event, _ in self.read().events]

    def truncate_after(self, step: int | None) -> Truncation:
        """Drop metrics and tables of steps beyond ``step`` (None: all of them); the file is replaced atomically.

        Used on resume: the run will compute those steps again.
        """
        self.close()
        kept: list[bytes] = []
        dropped: list[Event] = []
        unchanged: int | None = None
        for line in self._lines(0):
            event = _decode(line)
            if event is not None and event.step is not None and (step is None or event.step > step):
                unchanged = sum(map(len, kept)) if unchanged is None else unchanged
                dropped.append(event)
            elif line.endswith(b"\n"):
                kept.append(line)
        if unchanged is None:
            return Truncation(dropped=0, unchanged=sum(map(len, kept)))
        atomic_write(self.path, b"".join(kept))
        for event in dropped:
            if event.kind == "table":
                (self.run_dir / event.data["path"]).unlink(missing_ok=True)
        return Truncation(dropped=len(dropped), unchanged=unchanged)

    def metric_names_at(self, step: int) -> set[str]:
        """Names of the metrics already logged at ``step``."""
        return {
            name for event in self.events() if event.kind == "metrics" and event.step == step for name in event.data
        }

    def _descriptor(self) -> int:
        if self._fd is None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._cut_torn_line()
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        return self._fd

    def _cut_torn_line(self) -> None:
        """Remove what a killed process wrote after the last newline."""
        if not self.path.exists():
            return
        end = 0
        for line in self._lines(0):
            if line.endswith(b"\n"):
                end += len(line)
        if end != self.path.stat().st_size:
            os.truncate(self.path, end)

    def _lines(self, start: int) -> Iterator[bytes]:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(start)
            yield from file


def plain(value: Any) -> Any:
    """``value`` as strict JSON can hold it: non-finite floats become 'nan', 'inf', '-inf', strangers their text."""
    if isinstance(value, bool) or value is None or isinstance(value, int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)


def _encode(event: Event) -> bytes:
    row = {"kind": event.kind, "time": event.time, "step": event.step, "data": plain(event.data)}
    return json.dumps(row, allow_nan=False).encode("ascii") + b"\n"


def _decode(line: bytes) -> Event | None:
    try:
        row = json.loads(line)
        data = row["data"]
        if row["kind"] == "metrics":
            data = {name: float(value) for name, value in data.items()}
        if row["kind"] not in KINDS or not isinstance(data, dict):
            return None
        return Event(kind=row["kind"], data=data, time=int(row["time"]), step=row["step"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _write_all(fd: int, content: bytes) -> None:
    while content:
        content = content[os.write(fd, content) :]
