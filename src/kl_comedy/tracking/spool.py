"""The record of a run: one JSON object per line in ``RUN_DIR/spool.jsonl``, and the files that its lines name.

The spool is the primary record and MLflow holds a copy (:mod:`kl_comedy.tracking.upload`): an event is on disk before
anything is sent. A process that is killed leaves at most one incomplete last line, which the next append removes. A
complete line that cannot be read any more (its checksum does not match, or it is not an event) is skipped and counted.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kl_comedy.errors import UserError
from kl_comedy.io import atomic_write, decode_json, inside, is_file_name, json_line, open_file, read_file, sha256_file
from kl_comedy.tracking import store

KINDS = ("params", "tags", "metrics", "table", "artifact", "status")
FILE_KINDS = ("table", "artifact")
"""Kinds of events that name a file in the run's folder."""

UNREADABLE = "unreadable"
"""The kind of an event whose line cannot be read."""

REQUIRED_KEYS = {"table": ("path", "folder"), "artifact": ("path", "folder"), "status": ("status",)}
"""Keys of an event's data without which the event has no meaning, by kind."""


class Event(NamedTuple):
    """One logged fact. ``time`` is Unix milliseconds; ``step`` counts optimizer updates, None for the whole run.

    ``data`` by kind: params {key: text}; tags {key: text, or None to delete}; metrics {name: float};
    table {name, path, folder, sha256}; artifact {path, folder, sha256}; status {status, reason}. Paths are relative to
    the run folder. ``start`` and ``end`` are the bytes of the event's line. An unreadable line has no data.
    """

    kind: str
    time: int
    step: int | None
    data: Mapping[str, Any]
    start: int
    end: int

    def is_after(self, step: float) -> bool:
        """Whether the event belongs to a later step. An event of the whole run never does."""
        return self.step is not None and self.step > step


class Spool:
    """The append-only events of one run. Only the run's first process writes them."""

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = Path(run_dir)
        self.path = self.run_dir / "spool.jsonl"
        self._descriptor: int | None = None

    def append(self, kind: str, data: Mapping[str, Any], step: int | None = None) -> None:
        """Write one event as one line.

        Raises OSError when the disk refuses the line, and :class:`UserError` when the spool is not a regular file or
        is a link that leads out of the run's folder.
        """
        if self._descriptor is None:
            self._descriptor = self._open()
        # MLflow's unit. The time is stored, because a point that is uploaded again must have the same one.
        time_ms = time.time_ns() // 1_000_000
        line = json_line({"kind": kind, "time": time_ms, "step": step, "data": json_safe(data)})
        # os.write may write only a part, for instance when the disk is nearly full.
        while line:
            written = os.write(self._descriptor, line)
            line = line[written:]

    def _open(self) -> int:
        """A descriptor of the file, which then ends with a complete line."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = open_file(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600, root=self.run_dir)
        # Without the cut, the next event would be appended to the half line of a killed process, and both were lost.
        complete_bytes = self._content().rfind(b"\n") + 1
        os.ftruncate(descriptor, complete_bytes)
        return descriptor

    def add_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write rows as ``tables/<name>/<step>.json`` and record the file. Raises OSError."""
        folder = f"tables/{store.clean_path(name)}"
        path = f"{folder}/{step}.json"
        content = json.dumps(json_safe(list(rows)), allow_nan=False, indent=1)
        file = self.run_dir / path
        atomic_write(file, content + "\n")
        self.append("table", {"name": name, "path": path, "folder": folder, "sha256": sha256_file(file)}, step)

    def add_artifact(self, path: Path | str, folder: str = "") -> None:
        """Record a file or directory; one outside the run's folder is copied into its folder ``files``. Raises OSError.

        ``folder`` is its place among the artifacts of the MLflow run.
        """
        file = Path(path).absolute()
        root = self.run_dir.absolute()
        if not file.is_relative_to(root):
            # The upload may happen days later and on another machine, which sees the run's folder alone.
            file = _copy_into(file, root / "files")
        data = {"path": str(file.relative_to(root)), "folder": folder}
        # A folder has no hash: files may be added to it until the upload.
        if file.is_file():
            data["sha256"] = sha256_file(file)
        self.append("artifact", data)

    def flush(self) -> None:
        """Make the appended events survive a power failure (fsync)."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            self.flush()
            os.close(self._descriptor)
            self._descriptor = None

    def read(self, start: int = 0) -> list[Event]:
        """The events of the complete lines from byte ``start`` on, in the order in which they were written.

        Raises :class:`UserError` when the spool is not a regular file or is a link that leads out of the run's folder.
        """
        events: list[Event] = []
        with contextlib.suppress(FileNotFoundError), open(open_file(self.path, root=self.run_dir), "rb") as file:
            file.seek(start)
            for line in file:
                end = start + len(line)
                # The last line may be incomplete: the run is writing it now, or was killed while it did.
                if line.endswith(b"\n"):
                    events.append(decode_event(line, start, end))
                start = end
        return events

    def _content(self) -> bytes:
        return read_file(self.path, root=self.run_dir)

    def ended(self) -> bool:
        """Whether the last event says how the run ended."""
        events = self.read()
        if not events or events[-1].kind != "status":
            return False
        return bool(events[-1].data["status"] != "RUNNING")

    def truncate_after(self, step: float) -> int:
        """Drop metrics and tables of steps beyond ``step``, which a resumed run computes again.

        The file is replaced atomically. Returns the number of bytes at its front that did not change.
        """
        # The open descriptor would write on into the replaced file, which no longer has a name.
        self.close()
        events = self.read()
        later = [event for event in events if event.is_after(step)]
        if not later:
            return events[-1].end if events else 0
        content = self._content()
        # The bytes as they were written: the offset in the upload state counts them.
        remaining_lines = [content[event.start : event.end] for event in events if not event.is_after(step)]
        # The spool first: a process killed here leaves tables that no event names, not events without their tables.
        atomic_write(self.path, b"".join(remaining_lines), private=True)
        for event in later:
            if event.kind == "table" and self.reason_to_refuse(event) is None:
                (self.run_dir / event.data["path"]).unlink(missing_ok=True)
        return later[0].start

    def rename_earlier(self) -> Path | None:
        """Rename the spool and the upload state of an earlier run in this folder. Returns the spool's new path."""
        if not self.path.exists():
            return None
        # Earlier ones are spool.1.jsonl, spool.2.jsonl, ...: the oldest run has the lowest number.
        number = 1 + len(list(self.run_dir.glob("spool.*.jsonl")))
        for file in (self.path, self.run_dir / "tracking.json"):
            if file.exists():
                file.rename(file.with_name(f"{file.stem}.{number}{file.suffix}"))
        return self.run_dir / f"spool.{number}.jsonl"

    def reason_to_refuse(self, event: Event) -> str | None:
        """Why the file of a table or artifact is neither uploaded nor removed; None when it is as it was logged.

        A spool is data that may come from somebody else's folder. Without these checks, one that names
        ``../../.ssh/id_rsa`` would upload that file, and a resume would delete it.
        """
        return self._reason_against_path(event) or self._reason_against_content(event)

    def _reason_against_path(self, event: Event) -> str | None:
        path = event.data["path"]
        for name in [*path.split("/"), *event.data["folder"].split("/")]:
            # Dots are judged below, by where the whole path leads.
            if name not in ("", ".", "..") and not is_file_name(name):
                return "has a name that no file can have"
        try:
            real_path = inside(self.run_dir / path, self.run_dir)
        except UserError:
            return "lies outside the folder of the run"
        # Without links, the real path is the written one with its dots resolved.
        real_root = inside(self.run_dir, self.run_dir)
        if real_path != real_root / os.path.normpath(path):
            return "is a link"
        return None

    def _reason_against_content(self, event: Event) -> str | None:
        file = self.run_dir / event.data["path"]
        if not file.exists():
            return "is gone"
        if file.is_dir():
            if _holds_only_files(file):
                return None
            return "holds links, or what is not a file"
        # A pipe or a device: reading it may never end.
        if not file.is_file():
            return "is not a file"
        # A run's files are evidence for its numbers, so one that was edited later is not uploaded as the run's own.
        digest = event.data.get("sha256")
        if digest and sha256_file(file) != digest:
            return "was changed after it was logged"
        return None


def _copy_into(source: Path, folder: Path) -> Path:
    copy = folder / store.clean_path(source.name)
    copy.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, copy, dirs_exist_ok=True)
    elif source.exists():
        shutil.copy(source, copy)
    return copy


def _holds_only_files(folder: Path) -> bool:
    """Whether a folder holds regular files and folders alone: a link could lead out of the run's folder."""
    for path in folder.rglob("*"):
        is_regular = path.is_dir() or path.is_file()
        if path.is_symlink() or not is_regular:
            return False
    return True


def json_safe(value: Any) -> Any:
    """``value`` as strict JSON can hold it: non-finite floats become 'nan', 'inf', '-inf', other types their text."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def decode_event(line: bytes, start: int = 0, end: int = 0) -> Event:
    """The event in a line; one of the kind ``unreadable`` where the line does not hold an event."""
    try:
        row = decode_json(line)
        kind = row["kind"]
        step = row["step"]
        if kind not in KINDS or not isinstance(step, int | None):
            raise ValueError
        data = _checked_data(kind, row["data"])
        return Event(kind, int(row.get("time", 0)), step, data, start, end)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return Event(UNREADABLE, 0, None, {}, start, end)


def _checked_data(kind: str, data: Any) -> dict[str, Any]:
    """The data of an event with the types that its readers rely on. Raises one of what :func:`decode_event` catches."""
    if kind == "metrics":
        # float() reads the texts that stand for non-finite values.
        return {key: float(value) for key, value in data.items()}
    for value in data.values():
        if not isinstance(value, str | None):
            raise ValueError
    for key in REQUIRED_KEYS.get(kind, ()):
        if not isinstance(data[key], str):
            raise ValueError
    return dict(data)


def unreadable_lines(events: Sequence[Event]) -> int:
    """How many complete lines of a spool cannot be read. Lines cut off its end leave no trace (:meth:`Spool.ended`)."""
    return [event.kind for event in events].count(UNREADABLE)


def merged(events: Sequence[Event], kind: str) -> dict[str, Any]:
    """The data of all events of one kind in one dict; the last value of a key counts."""
    values: dict[str, Any] = {}
    for event in events:
        if event.kind == kind:
            values.update(event.data)
    return values
