"""Reading runs back from an MLflow store, as pandas frames.

A runs frame has one row per run: ``run_id``, ``run_name``, ``experiment``, ``status``, ``start_time``,
``duration_s``, and ``params.*``, ``tags.*``, ``metrics.*`` (the last value of each), with ``tags.kl.family``,
``tags.kl.betas`` and ``tags.code`` derived. Wherever a key is asked for, the
short form will do: ``seed`` for ``params.seed``, ``kl.label`` for the tag, ``train/reward`` for the metric.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError, nearest
from kl_comedy.tracking import bulk, store
from kl_comedy.tracking.derived import with_derived
from kl_comedy.tracking.filters import Filter, translate
from kl_comedy.tracking.process import mark_dead_runs

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("kl_comedy.tracking")

PREFIXES = ("params.", "tags.", "metrics.")
KL_TAG = "tags.kl.label"
"""The column that ``kl`` means: the tag that spells the run's KL terms in one short text."""


def runs_frame(
    uri: str, experiment: str | None = None, where: str | None = None, *, mark_dead: bool = False
) -> pd.DataFrame:
    """All runs of the store (or of one experiment) that match ``where``, newest first.

    ``mark_dead`` first marks this host's dead runs as FAILED. Raises :class:`UserError` for a store that is not
    there, an unknown experiment or a filter that cannot be read.
    """
    import pandas as pd

    wanted = translate(where)
    client = store.open_existing(uri)
    ids = store.experiment_ids(client, experiment)
    if mark_dead:
        _mark_dead(client, experiment)
    names = {item.experiment_id: item.name for item in client.search_experiments() if item.experiment_id in ids}
    frame = _search(client, names, wanted, where)
    if frame.empty:
        if wanted.keys:
            _explain_nothing(client, names, wanted, where)
        return pd.DataFrame()
    return with_derived(frame).copy()  # in one piece: hundreds of columns added one by one are slow to add to


def history(uri: str, run_ids: Iterable[str], metric: str) -> pd.DataFrame:
    """The curve of ``metric`` in each run: columns run_id, step, value; one row a step (the last logged wins)."""
    import pandas as pd

    client = store.open_existing(uri)
    points: dict[tuple[str, int], tuple[int, float]] = {}
    wanted = list(run_ids)
    for run_id, step, timestamp, value in bulk.read_points(client, wanted, metric):
        if (run_id, step) not in points or timestamp >= points[run_id, step][0]:
            points[run_id, step] = (timestamp, value)
    place = {run_id: at for at, run_id in enumerate(wanted)}
    rows = [
        (run_id, step, points[run_id, step][1]) for run_id, step in sorted(points, key=lambda p: (place[p[0]], p[1]))
    ]
    return pd.DataFrame(rows, columns=["run_id", "step", "value"])


def tidy(uri: str, frame: pd.DataFrame, keys: Sequence[str], metrics: Sequence[str], of: str = "last") -> pd.DataFrame:
    """One row a run and metric: ``run_id``, ``status``, ``seed``, the short names of ``keys``, ``metric``, ``value``.

    ``of`` says which of a run's values counts (``kl_comedy.tracking.values.RULES``). A run without a metric has NaN.
    Raises :class:`UserError` for a key or metric that no run has.
    """
    from kl_comedy.tracking.values import with_values

    columns = [resolve(frame, metric, "--metric") for metric in metrics]
    groups = [resolve(frame, key, "--group") for key in dict.fromkeys(["seed", *keys])]
    kept = with_values(uri, frame, columns, of)[["run_id", "status", *groups, *columns]]
    long = kept.melt(id_vars=["run_id", "status", *groups], var_name="metric", value_name="value")
    return long.rename(columns=short).assign(metric=long["metric"].map(short))


def resolve(frame: pd.DataFrame, key: str, option: str) -> str:
    """The column that ``key`` means. Raises :class:`UserError` naming the nearest where there is none.

    >>> import pandas as pd
    >>> resolve(pd.DataFrame({"params.seed": ["0"]}), "seed", "--group")
    'params.seed'
    """
    if key in frame.columns:
        return key
    for prefix in PREFIXES:
        if prefix + key in frame.columns:
            return prefix + key
    if key == "kl" and KL_TAG in frame.columns:
        return KL_TAG
    columns = [str(column) for column in frame.columns]
    if option == "--metric":
        columns = [column for column in columns if column.startswith("metrics.")]
    names = {short(column) for column in columns}
    below = sorted(name for name in names if name.startswith(f"{key}."))
    near = nearest(key, names)
    hint = f"; did you mean {near!r}?" if near else ""
    hint = f"; it is a group of keys: {', '.join(below[:8])}" if below else hint
    if option == "--metric":
        hint += f"; these runs have: {', '.join(sorted(names)[:40]) or '(no metrics)'}"
    raise UserError(f"{option}: got {key!r}; no such key in these runs{hint}")


def short(column: str) -> str:
    """A column's name without ``params.``, ``tags.`` or ``metrics.``."""
    for prefix in PREFIXES:
        column = column.removeprefix(prefix)
    return column


def drop_repeats(frame: pd.DataFrame, statuses: Sequence[str] = ("FINISHED",)) -> pd.DataFrame:
    """Keep one run of each configuration and seed: a repeat is no new evidence in an interval over seeds.

    Kept is the newest of those with one of ``statuses``, else the newest. Two runs are repeats when all params agree
    but those that say where a run writes (output, tracking.*, resume).
    """
    if frame.empty:
        return frame
    params = [
        column
        for column in frame.columns
        if column.startswith("params.")
        and not column.startswith(("params.tracking.", "params.output", "params.resume"))
    ]
    if not params:
        return frame
    ranked = frame.assign(counted=frame["status"].isin(list(statuses)))
    newest = ranked.sort_values(["counted", "start_time"], ascending=False).drop(columns="counted")
    return newest[~newest[params].fillna("\0").duplicated()].sort_index()


def varying(frame: pd.DataFrame, groups: Sequence[str]) -> list[str]:
    """Params, besides the seed, that differ between runs of one group: what a mean over the group pools."""
    ignored = ("params.tracking.", "params.output", "params.resume", "params.name")
    columns = [
        column
        for column in frame.columns
        if column.startswith("params.")
        and column not in groups
        and column.rpartition(".")[2] != "seed"
        and not column.startswith(ignored)
    ]
    if frame.empty or not columns:
        return []
    keys = [frame[group].fillna("") for group in groups] or [frame["status"].map(lambda _: "")]
    counts = frame[columns].fillna("\0").groupby(keys).nunique()
    return [column for column in columns if (counts[column] > 1).any()]


def _mark_dead(client: Any, experiment: str | None) -> None:
    """Best effort: a store one may only read still answers questions."""
    try:
        mark_dead_runs(client, experiment)
    except Exception as error:
        log.warning("could not mark dead runs as failed: %s", store.brief(error))


def _search(client: Any, experiments: dict[str, str], wanted: Filter, where: str | None) -> pd.DataFrame:
    import pandas as pd

    if not experiments:
        return pd.DataFrame()
    try:
        return bulk.read_runs(client, experiments, wanted.text)
    except Exception as error:
        if not where:
            raise
        raise UserError(
            f"--where: MLflow cannot read {where!r}: {store.brief(error)}; "
            "example: seed = 0 and algorithm.advantage = 'rloo' and train/reward > 0.5"
        ) from error


def _explain_nothing(client: Any, experiments: dict[str, str], wanted: Filter, where: str | None) -> None:
    """Nothing matched: say so when it is because a key does not exist in any run."""
    known = [str(name) for name in bulk.read_runs(client, experiments, "").columns] if experiments else []
    for key in wanted.keys:
        if known and key not in known and not key.startswith("attributes."):
            near = nearest(short(key), {short(name) for name in known})
            raise UserError(
                f"--where: got {where!r}; no run has {key!r}" + (f"; did you mean {near!r}?" if near else "")
            )
