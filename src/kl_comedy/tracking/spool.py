"""The record of a run, one JSON object per line in ``RUN_DIR/spool.jsonl``, and its upload into one MLflow run.

The file is the truth and MLflow a copy: an event is on disk before anything is sent. MLflow cannot delete a metric
point, but ignores one it already has (same name, step, time and value), so an upload can be repeated. Points that a
resumed run will compute again must not reach MLflow: the logger uploads up to the last checkpoint only, and a run whose
copy is ahead of the checkpoint it resumes from gets a new MLflow run (the old one is deleted, which MLflow can undo).
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from kl_comedy.config.validate import option, parse_record
from kl_comedy.errors import UserError
from kl_comedy.io import (
    atomic_write,
    decode_json,
    encode_json,
    file_lock,
    inside,
    is_file_name,
    open_file,
    read_file,
    read_json,
    sha256_file,
    write_json,
)
from kl_comedy.redaction import HIDDEN
from kl_comedy.tracking import store
from kl_comedy.tracking.provenance import mark_dead_runs

KINDS = ("params", "tags", "metrics", "table", "artifact", "status")
UNREADABLE = "unreadable"
SPOOL_ID = "spool.id"
"""The tag that identifies a run even where ``tracking.json`` is lost."""


class Event(NamedTuple):
    """One logged fact. ``time`` is Unix milliseconds; ``step`` counts optimizer updates, None for the whole run.

    ``data`` by kind: params {key: text}; tags {key: text, or None to delete}; metrics {name: float};
    table {name, path, folder, sha256}; artifact {path, folder, sha256}; status {status, reason}. Paths are relative to
    the run folder. ``start`` and ``end`` are the bytes of its line; a damaged line has the kind ``unreadable``.
    ``number`` counts the lines from 0, so that missing ones are noticed; None in a spool of an earlier version.
    """

    kind: str
    time: int
    step: int | None
    data: Mapping[str, Any]
    start: int
    end: int
    number: int | None = None

    def is_after(self, step: float) -> bool:
        """Whether it belongs to a later step; what belongs to the whole run never does."""
        return self.step is not None and self.step > step


class Spool:
    """Append-only events of one run, written by its first process, a whole line at a time: a killed process leaves at
    most one incomplete last line, which the next append removes."""

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = Path(run_dir)
        self.path = self.run_dir / "spool.jsonl"
        self._fd: int | None = None
        self._lines = 0

    def append(self, kind: str, data: Mapping[str, Any], step: int | None = None) -> None:
        """Write one event as one line. Raises OSError when the disk refuses it, and :class:`UserError` where the spool
        is a link out of the run's folder, or no file."""
        if self._fd is None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._fd = open_file(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600, root=self.run_dir)
            os.ftruncate(self._fd, self._content().rfind(b"\n") + 1)
            events = self.read()
            self._lines = len(events) + lost_lines(events) - [event.kind for event in events].count(UNREADABLE)
        line = _encode(kind, time.time_ns() // 1_000_000, step, data, self._lines)
        while line:
            line = line[os.write(self._fd, line) :]
        self._lines += 1

    def flush(self) -> None:
        """Make what was appended survive a power cut (fsync)."""
        if self._fd is not None:
            os.fsync(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            self.flush()
            os.close(self._fd)
            self._fd = None

    def read(self, start: int = 0) -> list[Event]:
        """The events of the complete lines from byte ``start`` on, in the order they were written.

        Raises :class:`UserError` where the file is a link out of the run's folder, or no file.
        """
        events: list[Event] = []
        with contextlib.suppress(FileNotFoundError), open(open_file(self.path, root=self.run_dir), "rb") as file:
            file.seek(start)
            for line in file:
                end = start + len(line)
                if line.endswith(b"\n"):
                    events.append(decode_event(line, start, end))
                start = end
        return events

    def _content(self) -> bytes:
        return read_file(self.path, root=self.run_dir)

    def ended(self) -> bool:
        """Whether its last event says how the run ended."""
        return [event.data.get("status", "RUNNING") for event in self.read()[-1:]] not in ([], ["RUNNING"])

    def truncate_after(self, step: float) -> int:
        """Drop metrics and tables of steps beyond ``step``, which a resumed run computes again.

        Replaces the file atomically. Returns the number of bytes at its front that did not change.
        """
        self.close()
        events = self.read()
        later = [event for event in events if event.is_after(step)]
        if later:
            content, lines, dropped = self._content(), list[bytes](), 0
            for event in events:
                if event.is_after(step):
                    dropped += 1
                elif dropped and event.number is not None:  # the lines after a dropped one are numbered anew
                    lines.append(_encode(*event[:4], event.number - dropped))
                else:
                    lines.append(content[event.start : event.end])
            atomic_write(self.path, b"".join(lines), private=True)
        for event in later:
            if event.kind == "table" and not self.refused(event):
                (self.run_dir / event.data["path"]).unlink(missing_ok=True)
        return later[0].start if later else events[-1].end if events else 0

    def refused(self, event: Event) -> str | None:
        """Why the file of a table or artifact is neither uploaded nor removed; None where it is as it was logged."""
        file = self.run_dir / event.data["path"]
        names = [*event.data["path"].split("/"), *event.data["folder"].split("/")]
        if not all(is_file_name(name) for name in names if name not in ("", ".", "..")):
            return "has a name that no file can have"
        try:
            real = inside(file, self.run_dir)
        except UserError:
            return "lies outside the folder of the run"
        if real != inside(self.run_dir, self.run_dir) / os.path.normpath(event.data["path"]):
            return "is a link"
        if not file.exists():
            return "is gone"
        if file.is_dir():
            content = file.rglob("*")
            linked = any(path.is_symlink() or not (path.is_dir() or path.is_file()) for path in content)
            return "holds links, or what is no file" if linked else None
        if not file.is_file():
            return "is no file"
        digest = event.data.get("sha256")
        return "was changed after it was logged" if digest and sha256_file(file) != digest else None


def json_safe(value: Any) -> Any:
    """``value`` as strict JSON can hold it: non-finite floats become 'nan', 'inf', '-inf', other types their text."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _encode(kind: str, time_ms: int, step: int | None, data: Mapping[str, Any], number: int) -> bytes:
    return encode_json({"kind": kind, "time": time_ms, "step": step, "data": json_safe(data), "n": number})


def lost_lines(events: Sequence[Event]) -> int:
    """How many lines of a whole spool are damaged or gone. Not those cut off its end: see :meth:`Spool.ended`."""
    damaged = [event.kind for event in events].count(UNREADABLE)
    numbers = [event.number for event in events if event.number is not None]
    return max(damaged, max(numbers, default=-1) + 1 - (len(events) - damaged))


def decode_event(line: bytes, start: int = 0, end: int = 0) -> Event:
    """The event in a line."""
    try:
        row = decode_json(line)
        kind, step, data = row["kind"], row["step"], row["data"]
        if kind == "metrics":
            data = {key: float(value) for key, value in data.items()}
        elif not all(isinstance(value, str | None) for value in data.values()):
            raise ValueError
        needed = {"table": ("path", "folder"), "artifact": ("path", "folder"), "status": ("status",)}.get(kind, ())
        well_formed = (
            kind in KINDS and isinstance(step, int | None) and all(isinstance(data[key], str) for key in needed)
        )
        number = row.get("n") if isinstance(row.get("n"), int) else None
        return Event(kind if well_formed else UNREADABLE, int(row.get("time", 0)), step, data, start, end, number)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return Event(UNREADABLE, 0, None, {}, start, end)


def merged(events: Sequence[Event], kind: str) -> dict[str, Any]:
    """The data of all events of a kind; of one key the last value counts."""
    return {key: value for event in events if event.kind == kind for key, value in event.data.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncState:
    """Where a run is uploaded and how far; stored in ``RUN_DIR/tracking.json``.

    ``uri`` is the store without credentials; ``mirrored_step`` the highest step that may already be in MLflow (written
    before the upload, so never too low); ``offset`` the byte of the spool before which everything has been uploaded;
    ``replaced`` the MLflow runs to delete, because they hold points that a resumed run computes again.
    """

    uri: str
    experiment: str
    run_name: str
    run_id: str | None = None
    mirrored_step: int | None = None
    offset: int = option(0, minimum=0)
    replaced: tuple[str, ...] = ()

    @staticmethod
    def load(run_dir: Path) -> SyncState | None:
        """The stored state, or None where the folder has none. Raises :class:`UserError` for a damaged file."""
        path = run_dir / "tracking.json"
        if not path.is_file():
            return None
        try:
            row = read_json(path, "record of uploads", root=run_dir)
            known = {field.name: row[field.name] for field in fields(SyncState) if field.name in row}
            return parse_record(SyncState, known, origin=str(path))
        except UserError as error:
            raise UserError(f"{error}; remove it to upload the run again from its spool") from error

    def save(self, run_dir: Path) -> None:
        write_json(run_dir / "tracking.json", asdict(self), private=True)

    def same_place(self, other: SyncState) -> bool:
        return (self.uri, self.experiment) == (other.uri, other.experiment)


class SyncResult(NamedTuple):
    """What an upload sent. ``left_out``: files that the spool names, each with the reason."""

    state: SyncState
    events: int
    left_out: list[str]


def push(client: Any, spool: Spool, state: SyncState, uri: str, *, up_to: float, save_state: bool = True) -> SyncResult:
    """Upload the events that are not yet in MLflow, of steps at most ``up_to``; create the MLflow run if needed.

    Only one process at a time uploads a run folder. Raises whatever MLflow raises; the next call then repeats what
    failed.
    """
    with file_lock(spool.run_dir / "tracking.lock"):
        saved = SyncState.load(spool.run_dir) if save_state else None
        if saved is not None and saved.same_place(state):
            state = saved  # another process may have uploaded meanwhile
        state = _with_run(client, spool, state, uri)
        rows = spool.read(state.offset)
        events = [event for event in rows if not event.is_after(up_to)]
        steps = [step for step in (state.mirrored_step, *(event.step for event in events)) if step is not None]
        state = replace(state, mirrored_step=max(steps, default=None))
        if save_state:
            state.save(spool.run_dir)
        left_out = _send(client, str(state.run_id), events, spool)
        waiting = [event.start for event in rows if event.is_after(up_to)]
        state = replace(state, offset=min(waiting, default=rows[-1].end if rows else state.offset))
        if save_state:
            state.save(spool.run_dir)
    kinds = [event.kind for event in events]
    sent = sum(map(kinds.count, ("metrics", "table", "artifact"))) - len(left_out)
    return SyncResult(state, sent, left_out)


def sync(run_dir: Path | str, uri: str | None = None, experiment: str | None = None) -> SyncResult:
    """Upload the whole spool of a run folder into MLflow; doing it twice changes nothing.

    ``uri`` and ``experiment`` default to where the run was to be tracked. Raises :class:`UserError` when the folder
    holds no spool or no store is known, and MLflow's error when the store cannot be reached.
    """
    spool = Spool(run_dir)
    folder = spool.run_dir
    if not spool.path.is_file():
        raise UserError(f"{folder}: no {spool.path.name} there; give the folder of a run")
    state = SyncState.load(folder)
    target = store.check_uri(uri or (state.uri if state else store.NO_STORE), "--uri")
    if target == store.NO_STORE or HIDDEN in target:
        raise UserError(f"{folder}: does not say which store to upload to; name it with --uri")
    same_store = state is not None and state.uri == target
    if same_store and experiment not in (None, state.experiment):
        raise UserError(f"{folder}: is already in experiment {state.experiment!r} of that store, not {experiment!r}")
    # A run that lives in one store may be uploaded to a second one; its folder stays with the first one's state.
    save_state = state is None or state.run_id is None or same_store
    if not same_store:
        name, default = (state.run_name, state.experiment) if state else (folder.name, "kl_comedy")
        state = SyncState(uri=target, experiment=experiment or default, run_name=name)
    client = store.connect(target)
    result = push(client, spool, state, target, up_to=math.inf, save_state=save_state)
    mark_dead_runs(client, state.experiment)
    return result


def _with_run(client: Any, spool: Spool, state: SyncState, uri: str) -> SyncState:
    """``state`` with an MLflow run that exists: its run, the one with this spool's id, or a new one to be filled."""
    for replaced_id in filter(lambda run_id: _is_active(client, run_id), state.replaced):
        client.delete_run(replaced_id)
    state = replace(state, replaced=())
    if state.run_id is not None and _is_active(client, state.run_id):
        return state
    events = spool.read()
    tags = {key: store.shorten(text, store.TAG_VALUE_LIMIT) for key, text in merged(events, "tags").items() if text}
    experiment_id = store.ensure_experiment(client, uri, state.experiment)
    where = f"tags.`{SPOOL_ID}` = '{tags.get(SPOOL_ID)}'"
    runs = client.search_runs([experiment_id], where, max_results=1) if SPOOL_ID in tags else []
    if not runs:
        began = min((event.time for event in events if event.kind != UNREADABLE), default=None)
        runs = [client.create_run(experiment_id, start_time=began, tags=tags, run_name=state.run_name)]
    return replace(state, run_id=str(runs[0].info.run_id), offset=0)


def _is_active(client: Any, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


def _send(client: Any, run_id: str, events: Sequence[Event], spool: Spool) -> list[str]:
    """Upload params, tags, points and files, and the status last. Returns the files left out, with reasons."""
    from mlflow.entities import Metric, Param, RunTag

    tags, shorten = merged(events, "tags"), store.shorten
    params = [Param(key, shorten(text, store.PARAM_VALUE_LIMIT)) for key, text in merged(events, "params").items()]
    new_tags = [RunTag(key, shorten(text, store.TAG_VALUE_LIMIT)) for key, text in tags.items() if text is not None]
    points = [
        Metric(name, value, event.time, event.step or 0)
        for event in events
        if event.kind == "metrics"
        for name, value in event.data.items()
    ]
    batches = ("params", params, 100), ("tags", new_tags, 100), ("metrics", points, 1000)  # MLflow's largest batches
    for kind, items, size in batches:
        for start in range(0, len(items), size):
            client.log_batch(run_id, **{kind: items[start : start + size]})
    deleted = {key for key, text in tags.items() if text is None}
    for key in deleted & client.get_run(run_id).data.tags.keys() if deleted else ():
        client.delete_tag(run_id, key)
    files = {
        (event.data["path"], event.data["folder"]): event for event in events if event.kind in ("table", "artifact")
    }  # as last logged
    left_out = []
    for (path, folder), event in files.items():
        if reason := spool.refused(event):
            left_out.append(f"{spool.run_dir / path} {reason}")
            continue
        parts = [part for part in folder.split("/") if part.strip(". ")]
        client.log_artifact(run_id, str(spool.run_dir / path), "/".join(parts) or None)
    statuses = [event for event in events if event.kind == "status"]
    if statuses and statuses[-1].data["status"] == "RUNNING":
        client.update_run(run_id, status="RUNNING")
    elif statuses:
        client.set_terminated(run_id, status=statuses[-1].data["status"], end_time=statuses[-1].time)
    return left_out
