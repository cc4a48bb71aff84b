"""Copy a spool into one MLflow run, any number of times, with the same result.

MLflow cannot delete a metric point, but ignores one it already has (same name, step, time and value). So the
mirror sends the times recorded in the spool, and repeats freely. Points that a resumed run will compute again
must never reach MLflow in two versions: the tracker mirrors only up to the last checkpoint, and a run whose copy
is ahead of the checkpoint it resumes from gets a new MLflow run (the old one is deleted, which MLflow can undo).
A run is found again by the tag ``spool.id`` even where ``tracking.json`` is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from kl_comedy.errors import UserError
from kl_comedy.io import file_lock
from kl_comedy.tracking import store
from kl_comedy.tracking import store as naming
from kl_comedy.tracking.provenance import mark_dead_runs
from kl_comedy.tracking.spool import Event, MirrorState, Spool
from kl_comedy.tracking.store import HIDDEN, redact

SPOOL_ID = "spool.id"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """The part of a spool to send now: merged params and tags, points, files, the last status."""

    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str | None] = field(default_factory=dict)
    metrics: list[Event] = field(default_factory=list)
    files: list[Event] = field(default_factory=list)
    status: Event | None = None
    offset: int = 0
    unreadable: int = 0

    @property
    def last_step(self) -> int | None:
        return max((event.step for event in [*self.metrics, *self.files] if event.step is not None), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """What a push did. ``missing`` are files the spool names that are gone."""

    state: MirrorState
    events: int
    unreadable: int
    missing: tuple[str, ...] = ()


def collect(spool: Spool, offset: int, up_to: int | None, everything: bool) -> Pending:
    """Events from byte ``offset`` with step at most ``up_to`` (``everything``: all), and where to go on next time."""
    reading = spool.read(offset)
    params: dict[str, str] = {}
    tags: dict[str, str | None] = {}
    metrics, files = [], []
    status, held = None, None
    for event, at in reading.events:
        if event.step is not None and not everything and (up_to is None or event.step > up_to):
            held = at if held is None else held
        elif event.kind == "params":
            params.update(event.data)
        elif event.kind == "tags":
            tags.update(event.data)
        elif event.kind == "metrics":
            metrics.append(event)
        elif event.kind == "status":
            status = event
        else:
            files.append(event)
    return Pending(
        params=params,
        tags=tags,
        metrics=metrics,
        files=files,
        status=status,
        offset=reading.end if held is None else held,
        unreadable=reading.unreadable,
    )


def push(
    client: Any,
    spool: Spool,
    state: MirrorState,
    uri: str,
    *,
    up_to: int | None = None,
    everything: bool = False,
    keep_state: bool = True,
) -> Pushed:
    """Send what the MLflow run lacks; create the run where there is none. Returns the new state, saved in the folder.

    Only one process at a time pushes a run folder. Raises whatever MLflow raises; a push that failed half-way is
    repeated by the next.
    """
    with file_lock(spool.run_dir / "tracking.lock"):
        state = _latest(spool.run_dir, state) if keep_state else state
        state = _attach(client, spool, state, uri)
        todo = collect(spool, state.offset, up_to, everything)
        steps = [step for step in (state.mirrored_step, todo.last_step) if step is not None]
        state = replace(state, mirrored_step=max(steps, default=None))
        if keep_state:
            state.save(spool.run_dir)
        missing = _send(client, str(state.run_id), todo, spool.run_dir)
        state = replace(state, offset=todo.offset)
        if keep_state:
            state.save(spool.run_dir)
    events = len(todo.metrics) + len(todo.files)
    return Pushed(state=state, events=events, unreadable=todo.unreadable, missing=missing)


def sync(run_dir: Path | str, uri: str | None = None, experiment: str | None = None) -> Pushed:
    """Upload the whole spool of a run folder into MLflow; doing it twice changes nothing.

    ``uri`` and ``experiment`` default to where the run was to be tracked. Raises :class:`UserError` when the folder
    holds no spool or no store is known, and MLflow's own error when the store cannot be reached.
    """
    folder = Path(run_dir)
    spool = Spool(folder)
    if not spool.path.is_file():
        raise UserError(f"{folder}: no {spool.path.name} there; give the folder of a run")
    known = MirrorState.load(folder)
    target = store.check_uri(uri or (known.uri if known else store.NO_STORE), "--uri")
    if target == store.NO_STORE or HIDDEN in target:
        raise UserError(f"{folder}: does not say which store to upload to; name it with --uri")
    home = known is None or known.run_id is None or known.uri == redact(target)
    if known is None or not home or known.uri != redact(target):
        known = MirrorState(
            uri=redact(target),
            experiment=experiment or (known.experiment if known else "kl_comedy"),
            run_name=known.run_name if known else folder.name,
        )
    elif experiment and experiment != known.experiment:
        raise UserError(f"{folder}: is already in experiment {known.experiment!r} of that store, not {experiment!r}")
    client = store.connect(target)
    done = push(client, spool, known, target, everything=True, keep_state=home)
    mark_dead_runs(client, known.experiment)
    return done


def _latest(run_dir: Path, state: MirrorState) -> MirrorState:
    """The state on disk where it speaks of the same store: another process may have pushed meanwhile."""
    found = MirrorState.load(run_dir)
    return found if found is not None and found.uri == state.uri and found.experiment == state.experiment else state


def _attach(client: Any, spool: Spool, state: MirrorState, uri: str) -> MirrorState:
    """``state`` with a run that exists: its own, the one with this spool's id, or a new one filled from the start."""
    for old in state.replaced:
        if _is_active(client, old):
            client.delete_run(old)
    state = replace(state, replaced=())
    if state.run_id is not None and _is_active(client, state.run_id):
        return state
    first = spool.read().events
    tags = collect(spool, 0, None, False).tags
    experiment_id = store.ensure_experiment(client, uri, state.experiment)
    run_id = _find(client, experiment_id, tags.get(SPOOL_ID))
    if run_id is None:
        started = first[0][0].time if first else None
        text = {key: naming.shorten(value, naming.TAG_VALUE_LIMIT) for key, value in tags.items() if value is not None}
        run = client.create_run(experiment_id, start_time=started, tags=text, run_name=state.run_name)
        run_id = str(run.info.run_id)
    return replace(state, run_id=run_id, offset=0)


def _find(client: Any, experiment_id: str, spool_id: str | None) -> str | None:
    if not spool_id:
        return None
    found = client.search_runs([experiment_id], f"tags.`{SPOOL_ID}` = '{spool_id}'", max_results=1)
    return str(found[0].info.run_id) if found else None


def _is_active(client: Any, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


def _send(client: Any, run_id: str, todo: Pending, run_dir: Path) -> tuple[str, ...]:
    """Upload ``todo``: params, tags, points, files, and the status last. Returns the files that are missing."""
    from mlflow.entities import Metric

    _send_params_and_tags(client, run_id, todo)
    points = (
        Metric(key=name, value=value, timestamp=event.time, step=event.step or 0)
        for event in todo.metrics
        for name, value in event.data.items()
    )
    for batch in _batches(points, naming.METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=batch)
    missing = []
    for event in todo.files:
        file = run_dir / event.data["path"]
        if file.exists():
            client.log_artifact(run_id, str(file), event.data.get("folder") or None)
        else:
            missing.append(str(file))
    if todo.status is not None:
        _send_status(client, run_id, todo.status)
    return tuple(missing)


def _send_params_and_tags(client: Any, run_id: str, todo: Pending) -> None:
    """Params that MLflow already has keep their first value (it allows no other); tags take the last."""
    from mlflow.entities import Param, RunTag

    if not todo.params and not todo.tags:
        return
    present = client.get_run(run_id).data
    params = [
        Param(key, naming.shorten(value, naming.PARAM_VALUE_LIMIT))
        for key, value in todo.params.items()
        if key not in present.params
    ]
    tags = [
        RunTag(key, naming.shorten(value, naming.TAG_VALUE_LIMIT))
        for key, value in todo.tags.items()
        if value is not None
    ]
    for params_batch in _batches(params, naming.PARAMS_PER_BATCH):
        client.log_batch(run_id, params=params_batch)
    for tags_batch in _batches(tags, naming.PARAMS_PER_BATCH):
        client.log_batch(run_id, tags=tags_batch)
    for key, value in todo.tags.items():
        if value is None and key in present.tags:
            client.delete_tag(run_id, key)


def _send_status(client: Any, run_id: str, event: Event) -> None:
    status: Mapping[str, Any] = event.data
    if status["status"] == "RUNNING":
        client.update_run(run_id, status="RUNNING")
    else:
        client.set_terminated(run_id, status=status["status"], end_time=event.time)


def _batches(items: Iterator[T] | Sequence[T], size: int) -> Iterator[list[T]]:
    source = iter(items)
    while batch := list(islice(source, size)):
        yield batch
