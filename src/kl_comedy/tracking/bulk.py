"""Many runs at once from a store that is a database.

MLflow's ``search_runs`` builds objects for every param, tag and metric: 7 CPU seconds for 1,000 runs of ours
(`python bench/results_queries.py`). Here the same tables are read column-wise through MLflow's own engine and models,
so every database MLflow supports works, and MLflow's own filter decides which runs match. A tracking server is asked
through the API, page by page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from kl_comedy.tracking.process import search_all

if TYPE_CHECKING:
    import pandas as pd

IDS_A_QUERY = 1000
"""Run ids in one IN list; databases limit it."""

SQL_INFINITY = 1.7976931348623157e308
"""What MLflow's database keeps in place of an infinite metric value."""

RUN_COLUMNS = ("run_id", "run_name", "experiment", "status", "start_time", "duration_s")


def read_runs(client: Any, experiments: dict[str, str], where: str) -> pd.DataFrame:
    """The runs of ``experiments`` (id to name) that match MLflow's filter ``where``, newest first, one row each."""
    store = _database(client)
    return _by_api(client, experiments, where) if store is None else _by_sql(store, experiments, where)


def read_points(client: Any, run_ids: Sequence[str], metric: str) -> Iterator[tuple[str, int, int, float]]:
    """Every point of ``metric`` in these runs: run_id, step, timestamp (ms), value."""
    store = _database(client)
    if store is None:
        for run_id in run_ids:
            for point in client.get_metric_history(run_id, metric):
                yield run_id, point.step, point.timestamp, infinite(point.value)
        return
    from mlflow.store.tracking.dbmodels.models import SqlMetric as M
    from sqlalchemy import select

    with store.ManagedSessionMaker() as session:
        for ids in _chunks(run_ids):
            wanted = select(M.run_uuid, M.step, M.timestamp, M.value, M.is_nan).where(
                M.key == metric, M.run_uuid.in_(ids)
            )
            for run_id, step, timestamp, value, is_nan in session.execute(wanted):
                yield run_id, step, timestamp, float("nan") if is_nan else infinite(value)


def infinite(value: float) -> float:
    """A metric's value as it was logged."""
    return value if abs(value) < SQL_INFINITY else float("inf") if value > 0 else float("-inf")


def _database(client: Any) -> Any:
    """The store behind ``client`` where it is a database this process reads itself, else None."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store = client._tracking_client.store
    return store if isinstance(store, SqlAlchemyStore) else None


def _by_sql(store: Any, experiments: dict[str, str], where: str) -> pd.DataFrame:
    import pandas as pd
    from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlParam, SqlTag

    with store.ManagedSessionMaker() as session:
        runs = _matching(store, session, list(experiments), where)
        position = {run[0]: at for at, run in enumerate(runs)}
        columns: dict[str, list[Any]] = {}
        for table, prefix in ((SqlParam, "params"), (SqlTag, "tags"), (SqlLatestMetric, "metrics")):
            columns |= dict(sorted(_columns(session, table, prefix, position).items()))
    heads = zip(RUN_COLUMNS, zip(*(_head(run, experiments) for run in runs), strict=True), strict=False)
    frame = pd.DataFrame({**{name: list(values) for name, values in heads}, **columns})
    return frame.astype({name: float for name in frame.columns if name.startswith("metrics.")})


def _matching(store: Any, session: Any, ids: list[str], where: str) -> list[Any]:
    """(id, name, experiment id, status, start, end) of active runs, by MLflow's reading of the filter."""
    from mlflow.store.tracking.dbmodels.models import SqlRun as R
    from mlflow.store.tracking.sqlalchemy_store import _get_sqlalchemy_filter_clauses
    from mlflow.utils.search_utils import SearchUtils
    from sqlalchemy import select

    attributes, others, datasets = _get_sqlalchemy_filter_clauses(
        SearchUtils.parse_search_filter(where), session, store._get_dialect()
    )
    wanted = select(R.run_uuid, R.name, R.experiment_id, R.status, R.start_time, R.end_time)
    for clause in others:
        wanted = wanted.join(clause)
    for clause in datasets:
        wanted = wanted.join(clause, R.run_uuid == clause.c.destination_id)
    wanted = wanted.where(
        R.experiment_id.in_([int(one) for one in ids]), R.lifecycle_stage == "active", *attributes
    ).order_by(R.start_time.desc(), R.run_uuid)
    return list(session.execute(wanted.distinct()))


def _columns(session: Any, table: Any, prefix: str, position: dict[str, int]) -> dict[str, list[Any]]:
    """``prefix.key`` to its value in each run (None where a run has none), in the order of ``position``."""
    from sqlalchemy import select

    metric = prefix == "metrics"
    what = (table.run_uuid, table.key, table.value, *((table.is_nan,) if metric else ()))
    found: dict[str, list[Any]] = {}
    for ids in _chunks(list(position)):
        for run_id, key, value, *nan in session.execute(select(*what).where(table.run_uuid.in_(ids))):
            column = found.get(key)
            if column is None:
                column = found[key] = [None] * len(position)
            column[position[run_id]] = (float("nan") if nan[0] else infinite(value)) if metric else value
    return {f"{prefix}.{key}": column for key, column in found.items()}


def _by_api(client: Any, experiments: dict[str, str], where: str) -> pd.DataFrame:
    import pandas as pd

    rows = []
    for run in search_all(client, list(experiments), where):
        info, data = run.info, run.data
        head = (info.run_id, info.run_name, info.experiment_id, info.status, info.start_time, info.end_time)
        row = dict(zip(RUN_COLUMNS, _head(head, experiments), strict=True))
        row |= {f"params.{key}": value for key, value in sorted(data.params.items())}
        row |= {f"tags.{key}": value for key, value in sorted(data.tags.items())}
        rows.append(row | {f"metrics.{key}": infinite(value) for key, value in sorted(data.metrics.items())})
    return pd.DataFrame(rows)


def _head(run: Sequence[Any], experiments: dict[str, str]) -> tuple[Any, ...]:
    run_id, name, experiment_id, status, start, end = run
    ended = end if end and status != "RUNNING" else None
    seconds = (ended - start) / 1000 if ended else None
    return run_id, name, experiments.get(str(experiment_id), str(experiment_id)), status, start, seconds


def _chunks(ids: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(ids)
    while chunk := list(islice(iterator, IDS_A_QUERY)):
        yield chunk
