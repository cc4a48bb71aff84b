"""Upload a run's spool into one MLflow run, any number of times, with the same result.

MLflow cannot delete a metric point, but ignores one it already has (same name, step, time and value). So an upload
sends the times recorded in the spool and can be repeated. Points that a resumed run will compute again must not reach
MLflow: the logger uploads only up to the last checkpoint, and a run whose copy in MLflow is ahead of the checkpoint it
resumes from gets a new MLflow run (the old one is deleted, which MLflow can undo). A run is identified by its tag
``spool.id`` even where ``tracking.json`` is lost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from kl_comedy.errors import UserError
from kl_comedy.io import atomic_write, file_lock
from kl_comedy.tracking import store
from kl_comedy.tracking.provenance import mark_dead_runs
from kl_comedy.tracking.spool import Event, Spool

SPOOL_ID = "spool.id"


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncState:
    """Where a run is uploaded and how far; stored in ``RUN_DIR/tracking.json``.

    ``uri`` is the store without credentials; ``run_id`` the MLflow run, None before it exists; ``mirrored_step``
    the highest step that may already be in MLflow (written before the upload, so never too low);
    ``offset`` the byte of the spool before which everything has been uploaded; ``replaced`` the ids of MLflow runs
    to delete, because they hold points that a resumed run computes again.
    """

    uri: str
    experiment: str
    run_name: str
    run_id: str | None = None
    mirrored_step: int | None = None
    offset: int = 0
    replaced: tuple[str, ...] = ()

    @staticmethod
    def load(run_dir: Path) -> SyncState | None:
        """The stored state, or None where the folder has none. Raises :class:`UserError` for a damaged file."""
        path = run_dir / "tracking.json"
        if not path.is_file():
            return None
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            row["replaced"] = tuple(row.get("replaced", ()))
            return SyncState(**{field.name: row[field.name] for field in fields(SyncState) if field.name in row})
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}); remove it to upload the run again from its spool") from error

    def save(self, run_dir: Path) -> None:
        atomic_write(run_dir / "tracking.json", json.dumps(asdict(self), indent=2) + "\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncResult:
    """What an upload sent. ``missing`` are files that the spool names and that no longer exist."""

    state: SyncState
    events: int
    unreadable: int
    missing: tuple[str, ...] = ()


def push(client: Any, spool: Spool, state: SyncState, uri: str, *, up_to: float, save_state: bool = True) -> SyncResult:
    """Upload the events that are not yet in MLflow, of steps at most ``up_to``; create the MLflow run if needed.

    Only one process at a time uploads a run folder. Raises whatever MLflow raises; the next call then repeats what
    failed.
    """
    with file_lock(spool.run_dir / "tracking.lock"):
        saved = SyncState.load(spool.run_dir) if save_state else None
        if saved is not None and (saved.uri, saved.experiment) == (state.uri, state.experiment):
            state = saved  # another process may have uploaded meanwhile
        state = _with_run(client, spool, state, uri)
        events, offset, unreadable = _events_to_send(spool, state.offset, up_to)
        steps = [step for step in (state.mirrored_step, *(event.step for event in events)) if step is not None]
        state = replace(state, mirrored_step=max(steps, default=None))
        if save_state:
            state.save(spool.run_dir)
        missing = _send(client, str(state.run_id), events, spool.run_dir)
        state = replace(state, offset=offset)
        if save_state:
            state.save(spool.run_dir)
    sent = sum(event.kind in ("metrics", "table", "artifact") for event in events)
    return SyncResult(state=state, events=sent, unreadable=unreadable, missing=tuple(missing))


def sync(run_dir: Path | str, uri: str | None = None, experiment: str | None = None) -> SyncResult:
    """Upload the whole spool of a run folder into MLflow; doing it twice changes nothing.

    ``uri`` and ``experiment`` default to where the run was to be tracked. Raises :class:`UserError` when the folder
    holds no spool or no store is known, and MLflow's own error when the store cannot be reached.
    """
    folder = Path(run_dir)
    spool = Spool(folder)
    if not spool.path.is_file():
        raise UserError(f"{folder}: no {spool.path.name} there; give the folder of a run")
    state = SyncState.load(folder)
    target = store.check_uri(uri or (state.uri if state else store.NO_STORE), "--uri")
    if target == store.NO_STORE or store.HIDDEN in target:
        raise UserError(f"{folder}: does not say which store to upload to; name it with --uri")
    same_store = state is not None and state.uri == store.redact(target)
    if same_store and experiment not in (None, state.experiment):
        raise UserError(f"{folder}: is already in experiment {state.experiment!r} of that store, not {experiment!r}")
    # A run that lives in one store may be uploaded to a second one; its folder keeps the first one's state.
    save_state = state is None or state.run_id is None or same_store
    if state is None or not same_store:
        state = SyncState(
            uri=store.redact(target),
            experiment=experiment or (state.experiment if state else "kl_comedy"),
            run_name=state.run_name if state else folder.name,
        )
    client = store.connect(target)
    result = push(client, spool, state, target, up_to=math.inf, save_state=save_state)
    mark_dead_runs(client, state.experiment)
    return result


def _events_to_send(spool: Spool, start: int, up_to: float) -> tuple[list[Event], int, int]:
    """Events from byte ``start`` with step at most ``up_to``, where to start next time, and unreadable lines."""
    content = spool.read(start)
    waiting = [at for event, at in content.events if event.step is not None and event.step > up_to]
    ready = [event for event, _ in content.events if event.step is None or event.step <= up_to]
    return ready, min(waiting, default=content.end), content.unreadable


def _with_run(client: Any, spool: Spool, state: SyncState, uri: str) -> SyncState:
    """``state`` with an MLflow run that exists: its own, the one with this spool's id, or a new one to be filled."""
    for replaced_id in state.replaced:
        if _is_active(client, replaced_id):
            client.delete_run(replaced_id)
    state = replace(state, replaced=())
    if state.run_id is not None and _is_active(client, state.run_id):
        return state
    events = spool.events()
    tags = {key: text for event in events if event.kind == "tags" for key, text in event.data.items() if text}
    experiment_id = store.ensure_experiment(client, uri, state.experiment)
    runs = []
    if SPOOL_ID in tags:
        runs = client.search_runs([experiment_id], f"tags.`{SPOOL_ID}` = '{tags[SPOOL_ID]}'", max_results=1)
    run = (
        runs[0]
        if runs
        else client.create_run(
            experiment_id,
            start_time=events[0].time if events else None,
            tags={key: store.shorten(text, store.TAG_VALUE_LIMIT) for key, text in tags.items()},
            run_name=state.run_name,
        )
    )
    return replace(state, run_id=str(run.info.run_id), offset=0)


def _is_active(client: Any, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


def _send(client: Any, run_id: str, events: list[Event], run_dir: Path) -> list[str]:
    """Upload params, tags (the last value counts), points, files, and the status last. Returns the missing files."""
    from mlflow.entities import Metric, Param, RunTag

    params = {key: text for event in events if event.kind == "params" for key, text in event.data.items()}
    tags = {key: text for event in events if event.kind == "tags" for key, text in event.data.items()}
    new_params = (Param(key, store.shorten(text, store.PARAM_VALUE_LIMIT)) for key, text in params.items())
    for batch in _batches(new_params, store.PARAMS_PER_BATCH):
        client.log_batch(run_id, params=batch)
    new_tags = (
        RunTag(key, store.shorten(text, store.TAG_VALUE_LIMIT)) for key, text in tags.items() if text is not None
    )
    for batch in _batches(new_tags, store.PARAMS_PER_BATCH):
        client.log_batch(run_id, tags=batch)
    deleted = {key for key, text in tags.items() if text is None}
    for key in deleted & client.get_run(run_id).data.tags.keys() if deleted else ():
        client.delete_tag(run_id, key)
    points = (
        Metric(key=name, value=value, timestamp=event.time, step=event.step or 0)
        for event in events
        if event.kind == "metrics"
        for name, value in event.data.items()
    )
    for batch in _batches(points, store.METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=batch)
    missing = []
    for event in events:
        if event.kind in ("table", "artifact"):
            file = run_dir / event.data["path"]
            if file.exists():
                client.log_artifact(run_id, str(file), event.data.get("folder") or None)
            else:
                missing.append(str(file))
    statuses = [event for event in events if event.kind == "status"]
    if statuses and statuses[-1].data["status"] == "RUNNING":
        client.update_run(run_id, status="RUNNING")
    elif statuses:
        client.set_terminated(run_id, status=statuses[-1].data["status"], end_time=statuses[-1].time)
    return missing


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    source = iter(items)
    while batch := list(islice(source, size)):
        yield batch
