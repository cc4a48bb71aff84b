"""Many runs of an MLflow database at once: their values in four queries, a curve of each in one.

MLflow's client makes an object of every param, tag and metric, and reads the curve of one run at a time, which takes a
minute for a thousand runs. These functions read the tables themselves. They return None for a store that they do not
know: a server, or a database whose schema is not one of :data:`KNOWN_SCHEMAS`. The caller then asks MLflow's client,
which has the public API. Both ways give the same values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAN = float("nan")

IDS_PER_QUERY = 500
"""SQL Server takes 2,100 variables in a query, SQLite 32,766."""

KNOWN_SCHEMAS = frozenset(
    (
        "71994744cf8e",
        "3da73c924c2f",
        "bf29a5ff90ea",
        "1bd49d398cd23",
        "b7c8d9e0f1a2",
        "5d2d30f0abce",
        "c9d4e5f6a7b8",
        "2c33131f4dae",
        "d3e4f5a6b7c8",
        "d0e1f2a3b4c5",
        "c8d9e0f1a2b3",
        "1b5f0d9ad7c1",
        "e1f2a3b4c5d6",
        "76601a5f987d",
        "c3d6457b6d8a",
        "a5b4c3d2e1f0",
        "ae8bbe7743c9",
        "7d34483879f0",
        "da6fb0208061",
        "89d3d66ed43f",
        "b7e4c1a90f23",
        "a8b9c0d1e2f3",
        "c1d2e3f4a5b6",
        "c3d9e7f1a2b4",
        "6f8d9c3b2a1e",
        "1971f2d9a75b",
        "17e22815139b",
        "b7e2c1a4d9f3",
        "75868b020152",
        "dc11669786a5",
    )
)
"""Versions of MLflow's schema in which the tables read here mean the same, oldest first: those of MLflow 3.5 to 3.17.

A later migration may move values elsewhere, or restrict who sees which runs. Add its version after reading it (folder
``store/db_migrations`` of MLflow); until then its databases are read through the client, which is slower and right.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRun:
    """What a store has of a run, whichever way it was read. ``steps``: the update of each metric's last value."""

    run_id: str
    name: str
    experiment_id: str
    status: str
    start_time: int
    end_time: int | None
    params: Mapping[str, str]
    tags: Mapping[str, str]
    metrics: Mapping[str, float]
    steps: Mapping[str, int]

    @staticmethod
    def of(run: Any) -> StoredRun:
        """The record of an MLflow run, as a client gives it."""
        last_points = run.data._metric_objs  # no public attribute has the steps
        return StoredRun(
            run_id=run.info.run_id,
            name=run.info.run_name,
            experiment_id=str(run.info.experiment_id),
            status=run.info.status,
            start_time=run.info.start_time,
            end_time=run.info.end_time,
            params=run.data.params,
            tags=run.data.tags,
            metrics=run.data.metrics,
            steps={point.key: point.step for point in last_points},
        )


def active_runs(client: Any, experiment_ids: Sequence[str]) -> list[StoredRun] | None:
    """All runs of the experiments that are not deleted, newest first; None where only the client can tell."""
    backend = _backend(client)
    if backend is None:
        return None
    from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlParam, SqlRun, SqlTag
    from sqlalchemy import select

    is_asked_for = (
        SqlRun.experiment_id.in_([int(experiment_id) for experiment_id in experiment_ids]),
        SqlRun.lifecycle_stage == "active",
    )
    ids = select(SqlRun.run_uuid).where(*is_asked_for)
    fields = (SqlRun.run_uuid, SqlRun.name, SqlRun.experiment_id, SqlRun.status, SqlRun.start_time, SqlRun.end_time)
    with backend.ManagedSessionMaker() as session:
        # In the order of MLflow's search: runs of the same millisecond would change places otherwise.
        runs = session.execute(
            select(*fields).where(*is_asked_for).order_by(SqlRun.start_time.desc(), SqlRun.run_uuid)
        ).all()
        params = _texts_by_run(session, SqlParam, ids)
        tags = _texts_by_run(session, SqlTag, ids)
        last = SqlLatestMetric
        columns = (last.run_uuid, last.key, last.value, last.step, last.is_nan)
        metrics: dict[str, dict[str, float]] = {}
        steps: dict[str, dict[str, int]] = {}
        for run_id, key, value, step, is_nan in session.execute(select(*columns).where(last.run_uuid.in_(ids))):
            metrics.setdefault(run_id, {})[key] = NAN if is_nan else value
            steps.setdefault(run_id, {})[key] = step

    records = []
    for run_id, name, experiment_id, status, start_time, end_time in runs:
        run_tags = tags.get(run_id, {})
        records.append(
            StoredRun(
                run_id=run_id,
                # MLflow's early versions kept a run's name in a tag alone.
                name=name or run_tags.get("mlflow.runName") or name,
                experiment_id=str(experiment_id),
                status=status,
                start_time=start_time,
                end_time=end_time,
                params=params.get(run_id, {}),
                tags=run_tags,
                metrics=metrics.get(run_id, {}),
                steps=steps.get(run_id, {}),
            )
        )
    return records


def _texts_by_run(session: Any, table: Any, ids: Any) -> dict[str, dict[str, str]]:
    """The keys and values of a table of params or tags, by run."""
    from sqlalchemy import select

    texts: dict[str, dict[str, str]] = {}
    for run_id, key, value in session.execute(
        select(table.run_uuid, table.key, table.value).where(table.run_uuid.in_(ids))
    ):
        texts.setdefault(run_id, {})[key] = value
    return texts


def points(client: Any, run_ids: Iterable[str], metric: str) -> dict[str, list[tuple[int, float]]] | None:
    """Step and value of every point of ``metric``, by run, in the order of logging.

    A run without the metric is missing. None where only the client can tell.
    """
    backend = _backend(client)
    if backend is None:
        return None
    from mlflow.store.tracking.dbmodels.models import SqlMetric
    from sqlalchemy import select

    ids = list(run_ids)
    columns = (SqlMetric.run_uuid, SqlMetric.step, SqlMetric.value, SqlMetric.is_nan)
    curves: dict[str, list[tuple[int, float]]] = {}
    with backend.ManagedSessionMaker() as session:
        for start in range(0, len(ids), IDS_PER_QUERY):
            some_ids = ids[start : start + IDS_PER_QUERY]
            query: Any = select(*columns).where(SqlMetric.key == metric, SqlMetric.run_uuid.in_(some_ids))
            # As MLflow orders a run's points, so that of two points of one step and time the same one is the last.
            query = query.order_by(SqlMetric.timestamp, SqlMetric.step, SqlMetric.value)
            for run_id, step, value, is_nan in session.execute(query):
                curves.setdefault(run_id, []).append((step, NAN if is_nan else value))
    return curves


def artifact_folder(client: Any, run_id: str) -> Path | None:
    """The run's artifacts as a folder of this machine's file system; None where only the client can fetch them."""
    backend = _backend(client)
    if backend is None:
        return None
    from mlflow.store.tracking.dbmodels.models import SqlRun
    from mlflow.utils import file_utils
    from mlflow.utils import uri as addresses
    from sqlalchemy import select

    # MLflow has no types for these two.
    is_local: Any = addresses.is_local_uri
    path_of: Any = file_utils.local_file_uri_to_path
    with backend.ManagedSessionMaker() as session:
        uri = session.execute(select(SqlRun.artifact_uri).where(SqlRun.run_uuid == run_id)).scalar()
    if not uri or not is_local(uri):
        return None
    return Path(path_of(uri))


def _backend(client: Any) -> Any | None:
    """MLflow's own store behind ``client``, where it is a database of a known schema; else None."""
    try:
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    except ImportError:
        return None
    tracking = getattr(client, "_tracking_client", None)
    backend = getattr(tracking, "store", None)
    # By its exact type: a subclass, as that of workspaces, may restrict what a reader sees.
    if type(backend) is not SqlAlchemyStore:
        return None
    if _schema_of(backend) not in KNOWN_SCHEMAS:
        return None
    return backend


def _schema_of(backend: Any) -> str | None:
    """The version of the schema that the database itself states; None where it states none."""
    from sqlalchemy import text

    with backend.ManagedSessionMaker() as session:
        version: str | None = session.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return version
