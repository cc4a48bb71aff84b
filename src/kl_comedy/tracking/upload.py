"""Upload of a run's spool into one MLflow run: during the run (:class:`Uploader`), or later (:func:`sync`).

MLflow cannot delete a metric point, but it ignores one that it already has (same name, step, time and value), so an
upload can be repeated. Points that a resumed run will compute again must not reach MLflow: a run uploads up to its last
checkpoint only, and a run whose MLflow copy is ahead of the checkpoint that it resumes from gets a new MLflow run (the
old one is deleted, which MLflow can undo).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from kl_comedy.config.validate import option, parse_record
from kl_comedy.errors import UserError
from kl_comedy.io import file_lock, read_json, write_json
from kl_comedy.redaction import HIDDEN
from kl_comedy.tracking import store
from kl_comedy.tracking.datasets import HASH, dataset_inputs
from kl_comedy.tracking.provenance import mark_dead_runs
from kl_comedy.tracking.spool import FILE_KINDS, UNREADABLE, Event, Spool, merged

log = logging.getLogger("kl_comedy.tracking")

SPOOL_ID = "spool.id"
"""The tag that identifies a run even where ``tracking.json`` is lost."""

FIRST_RETRY_S = 60.0
MAX_RETRY_S = 900.0
"""After a failure the store is left alone for a minute, then twice as long each time, up to a quarter of an hour."""

PARAMS_PER_BATCH = 100
TAGS_PER_BATCH = 100
METRICS_PER_BATCH = 1000
"""The largest batches that MLflow takes: mlflow/utils/validation.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncState:
    """Where a run is uploaded and how far; stored in ``RUN_DIR/tracking.json``.

    ``mirrored_step`` is the highest step that may already be in MLflow (written before the upload, so never too low);
    ``offset`` the byte of the spool before which everything has been uploaded; ``replaced`` the MLflow runs to delete,
    because they hold points that a resumed run computes again.
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
        """The stored state, or None when the folder has none. Raises :class:`UserError` for a damaged file."""
        path = run_dir / "tracking.json"
        if not path.is_file():
            return None
        try:
            row = read_json(path, "record of uploads", root=run_dir)
            # Keys of a newer or an older version are ignored.
            known = {field.name: row[field.name] for field in fields(SyncState) if field.name in row}
            return parse_record(SyncState, known, origin=str(path))
        except UserError as error:
            raise UserError(f"{error}; remove it to upload the run again from its spool") from error

    def save(self, run_dir: Path) -> None:
        write_json(run_dir / "tracking.json", asdict(self), private=True)

    def same_place(self, other: SyncState) -> bool:
        """Whether both name the same experiment of the same store."""
        return (self.uri, self.experiment) == (other.uri, other.experiment)

    def is_ahead_of(self, step: float) -> bool:
        """Whether the MLflow run may hold points of steps beyond ``step``."""
        if self.run_id is None or self.mirrored_step is None:
            return False
        return self.mirrored_step > step


def run_name(params: Mapping[str, Any], folder_name: str) -> str:
    """The run's name in a store: the config's name and the seed. The folder's name where ``params`` lack them.

    >>> run_name({"name": "k3-loss", "seed": 1}, "k3-loss-1"), run_name({}, "k3-loss-1")
    ('k3-loss s1', 'k3-loss-1')
    """
    if "name" in params and "seed" in params:
        return f"{params['name']} s{params['seed']}"
    return folder_name


class SyncResult(NamedTuple):
    """What an upload sent. ``left_out``: files that the spool names, each with the reason."""

    state: SyncState
    events: int
    left_out: list[str]


class Uploader:
    """The upload of a run by its own process. A store that fails costs a warning and is tried again later.

    ``state`` says where to and how far; ``committed_step`` is the last step whose points are final: later ones stay in
    the spool.
    """

    def __init__(self, spool: Spool, state: SyncState) -> None:
        self.state = state
        self.committed_step = -math.inf
        self.client: Any = None
        self.failing = False
        self._spool = spool
        self._retry_at = 0.0
        self._retry_s = FIRST_RETRY_S
        self._warned_of_files = False

    @property
    def to_files_only(self) -> bool:
        """Whether the run has no store."""
        return self.state.uri == store.NO_STORE

    def push_when_due(self) -> None:
        """:meth:`push`, unless the store failed a short while ago."""
        if time.monotonic() >= self._retry_at:
            self.push()

    def push(self) -> None:
        """Upload up to the committed step. Whatever the store raises becomes a warning, once per outage."""
        if self.to_files_only:
            return
        # Training must not end because of its tracking: MLflow, its database and the network raise many types.
        try:
            is_first = self.client is None
            if is_first:
                self.client = store.connect(self.state.uri)
            result = push(self.client, self._spool, self.state, up_to=self.committed_step)
            self.state = result.state
            if is_first:
                # Once per process: it is the moment at which this host's earlier, killed runs are noticed.
                mark_dead_runs(self.client, self.state.experiment)
        except Exception as error:
            self._wait_after(error)
            return
        if result.left_out and not self._warned_of_files:
            self._warned_of_files = True
            log.warning("not uploaded: %s", ", ".join(result.left_out))
        if self.failing:
            self.failing = False
            self._retry_s = FIRST_RETRY_S
            log.warning("MLflow at %s answers again; what was spooled has been uploaded", self.state.uri)

    def _wait_after(self, error: Exception) -> None:
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
        if self.failing:
            return
        self.failing = True
        problem = f"MLflow at {self.state.uri} fails"
        if isinstance(error, ImportError):
            problem = "mlflow is not installed"
        log.warning(
            "%s (%s); the run continues and is recorded in %s; upload it with: kl-comedy results sync %s",
            problem,
            store.first_line(error),
            self._spool.path,
            os.path.relpath(self._spool.run_dir),
        )


def push(client: Any, spool: Spool, state: SyncState, *, up_to: float, save_state: bool = True) -> SyncResult:
    """Upload the events that are not yet in MLflow, of steps at most ``up_to``; create the MLflow run if needed.

    Only one process at a time uploads a run folder. Raises whatever MLflow raises; the next call then repeats what
    failed.
    """
    with file_lock(spool.run_dir / "tracking.lock"):
        if save_state:
            saved = SyncState.load(spool.run_dir)
            # Another process may have uploaded since ``state`` was read.
            if saved is not None and saved.same_place(state):
                state = saved
        state = _with_run(client, spool, state)
        unsent = spool.read(state.offset)
        events = [event for event in unsent if not event.is_after(up_to)]
        waiting = [event for event in unsent if event.is_after(up_to)]

        # Saved before the upload: a process that is killed during it may have sent any of these steps.
        state = replace(state, mirrored_step=_highest_step(state.mirrored_step, events))
        if save_state:
            state.save(spool.run_dir)
        left_out = _send(client, str(state.run_id), events, spool)

        # Saved after the upload, so that a failed one is repeated. Events between waiting ones are sent again later.
        if waiting:
            state = replace(state, offset=waiting[0].start)
        elif unsent:
            state = replace(state, offset=unsent[-1].end)
        if save_state:
            state.save(spool.run_dir)
    counted = [event for event in events if event.kind == "metrics" or event.kind in FILE_KINDS]
    return SyncResult(state, len(counted) - len(left_out), left_out)


def _highest_step(mirrored_step: int | None, events: Sequence[Event]) -> int | None:
    steps = [event.step for event in events if event.step is not None]
    if mirrored_step is not None:
        steps.append(mirrored_step)
    return max(steps, default=None)


def sync(run_dir: Path | str, uri: str | None = None, experiment: str | None = None) -> SyncResult:
    """Upload the whole spool of a run folder into MLflow; doing it twice changes nothing.

    ``uri`` and ``experiment`` default to where the run was to be tracked. Raises :class:`UserError` when the folder
    holds no spool or no store is known, and MLflow's error when the store cannot be reached.
    """
    spool = Spool(run_dir)
    folder = spool.run_dir
    if not spool.path.is_file():
        raise UserError(f"{folder}: no {spool.path.name} there; give the folder of a run")
    saved = SyncState.load(folder)
    if uri:
        target = uri
    elif saved is not None:
        target = saved.uri
    else:
        target = store.NO_STORE
    target = store.check_uri(target, "--uri")
    # Earlier versions stored an address with its password hidden: it names no store that can be reached.
    if target == store.NO_STORE or HIDDEN in target:
        raise UserError(f"{folder}: does not say which store to upload to; name it with --uri")

    save_state = True
    if saved is None:
        # tracking.json is lost, and with it the run's name and experiment.
        name = run_name(merged(spool.read(), "params"), folder.name)
        state = SyncState(uri=target, experiment=experiment or "kl_comedy", run_name=name)
    elif saved.uri != target:
        state = SyncState(uri=target, experiment=experiment or saved.experiment, run_name=saved.run_name)
        # A run that is in one store may be uploaded to a second one; its folder keeps the state of the first one.
        save_state = saved.run_id is None
    elif experiment not in (None, saved.experiment):
        raise UserError(f"{folder}: is already in experiment {saved.experiment!r} of that store, not {experiment!r}")
    else:
        state = saved
    client = store.connect(target)
    result = push(client, spool, state, up_to=math.inf, save_state=save_state)
    mark_dead_runs(client, state.experiment)
    return result


def _with_run(client: Any, spool: Spool, state: SyncState) -> SyncState:
    """``state`` with an MLflow run that exists: its run, the one with this spool's id, or a new one to be filled."""
    # Before the new run exists: a process that is killed in between leaves no run twice in tables.
    for replaced_id in state.replaced:
        if _is_active(client, replaced_id):
            client.delete_run(replaced_id)
    state = replace(state, replaced=())
    # Somebody may have deleted the run in MLflow's pages; it is then uploaded anew.
    if state.run_id is not None and _is_active(client, state.run_id):
        return state
    events = spool.read()
    tags = {key: store.shorten(text, store.TAG_VALUE_LIMIT) for key, text in merged(events, "tags").items() if text}
    experiment_id = store.ensure_experiment(client, state.uri, state.experiment)
    run = None
    if SPOOL_ID in tags:
        # tracking.json is lost or was never written: the run may be in the store all the same.
        with_this_id = client.search_runs([experiment_id], f"tags.`{SPOOL_ID}` = '{tags[SPOOL_ID]}'", max_results=1)
        run = next(iter(with_this_id), None)
    if run is None:
        began_at = min((event.time for event in events if event.kind != UNREADABLE), default=None)
        run = client.create_run(experiment_id, start_time=began_at, tags=tags, run_name=state.run_name)
    # From the start: what this MLflow run already has is ignored by MLflow.
    return replace(state, run_id=str(run.info.run_id), offset=0)


def _is_active(client: Any, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


def _send(client: Any, run_id: str, events: Sequence[Event], spool: Spool) -> list[str]:
    """Upload params, tags, points and files, and the status last. Returns the files left out, with reasons.

    The status is last, so that a run that MLflow shows as FINISHED is complete.
    """
    from mlflow.entities import Metric, Param, RunTag

    params = [
        Param(key, store.shorten(text, store.PARAM_VALUE_LIMIT)) for key, text in merged(events, "params").items()
    ]
    _log_batches(client, run_id, "params", params, PARAMS_PER_BATCH)
    tags = merged(events, "tags")
    set_tags = [
        RunTag(key, store.shorten(text, store.TAG_VALUE_LIMIT)) for key, text in tags.items() if text is not None
    ]
    _log_batches(client, run_id, "tags", set_tags, TAGS_PER_BATCH)
    points = []
    for event in events:
        if event.kind == "metrics":
            # With the time at which it was logged: the same point with another time would be a second one to MLflow.
            points += [Metric(name, value, event.time, event.step or 0) for name, value in event.data.items()]
    _log_batches(client, run_id, "metrics", points, METRICS_PER_BATCH)
    _log_datasets(client, run_id, tags, spool)
    _delete_tags(client, run_id, {key for key, text in tags.items() if text is None})
    left_out = _send_files(client, run_id, events, spool)
    _send_status(client, run_id, events)
    return left_out


def _log_batches(client: Any, run_id: str, kind: str, items: Sequence[Any], size: int) -> None:
    for start in range(0, len(items), size):
        client.log_batch(run_id, **{kind: items[start : start + size]})


def _log_datasets(client: Any, run_id: str, tags: Mapping[str, str | None], spool: Spool) -> None:
    """Log the run's data sets as inputs, where ``tags`` have hashes of them; MLflow ignores an input that it has."""
    if not any(tag.startswith(HASH) for tag in tags):
        return
    from mlflow.exceptions import MlflowException

    # Of the whole spool: a resumed run logs its hashes again, and of its params only those that changed.
    inputs = dataset_inputs(merged(spool.read(), "params"), tags)
    try:
        client.log_inputs(run_id, inputs)
    except MlflowException as error:
        # A server that does not know inputs has everything else of the run.
        if error.error_code != "ENDPOINT_NOT_FOUND":
            raise
        log.info("the MLflow server takes no data sets")


def _delete_tags(client: Any, run_id: str, keys: set[str]) -> None:
    if not keys:
        return
    # MLflow raises for a tag that the run does not have.
    for key in keys & client.get_run(run_id).data.tags.keys():
        client.delete_tag(run_id, key)


def _send_files(client: Any, run_id: str, events: Sequence[Event], spool: Spool) -> list[str]:
    # A file that was logged twice is checked and sent as it was logged last.
    files: dict[tuple[str, str], Event] = {}
    for event in events:
        if event.kind in FILE_KINDS:
            files[event.data["path"], event.data["folder"]] = event
    left_out = []
    for (path, folder), event in files.items():
        reason = spool.reason_to_refuse(event)
        if reason is not None:
            left_out.append(f"{spool.run_dir / path} {reason}")
            continue
        # Empty parts and dots would place the artifact outside the run's artifacts.
        parts = [part for part in folder.split("/") if part.strip(". ")]
        client.log_artifact(run_id, str(spool.run_dir / path), "/".join(parts) or None)
    return left_out


def _send_status(client: Any, run_id: str, events: Sequence[Event]) -> None:
    status_events = [event for event in events if event.kind == "status"]
    if not status_events:
        return
    last = status_events[-1]
    if last.data["status"] == "RUNNING":
        client.update_run(run_id, status="RUNNING")
    else:
        client.set_terminated(run_id, status=last.data["status"], end_time=last.time)
