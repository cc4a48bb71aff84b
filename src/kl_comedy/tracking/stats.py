"""Means and intervals over seeds, of frames of runs. The formulas are in :mod:`kl_comedy.statistics`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kl_comedy.statistics.intervals import LEVEL, METHODS, generator, interval

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

__all__ = ["METHODS", "band", "groups_of", "summarize"]


def summarize(
    frame: pd.DataFrame,
    group: list[str],
    metrics: list[str],
    method: str = "t",
    statuses: Sequence[str] = ("FINISHED",),
    rng: np.random.Generator | None = None,
    *,
    run_ids: bool = False,
) -> pd.DataFrame:
    """Mean and 95% interval of each metric's final value in each group of runs.

    One row per group and metric: the group columns, ``metric``, ``n``, ``mean``, ``low``, ``high``, ``runs``,
    ``failed``. Only runs of ``statuses`` with a finite value enter the mean, ``n`` of them; ``runs`` counts all
    runs of the group and ``failed`` those that FAILED or were KILLED, so that what was lost stays in sight. Where the
    frame has a column ``collapsed`` (see :mod:`kl_comedy.tracking.collapses`), ``collapsed`` counts its true values
    among the group's runs; they stay in the mean. Groups keep the order of their first run; a missing group value is
    an empty text. ``rng`` feeds the bootstrap. ``run_ids`` adds the ids of the ``n`` runs, parted by spaces.
    """
    import pandas as pd

    rng = generator() if rng is None else rng

    rows: list[dict[str, Any]] = []
    for keys, members in groups_of(frame, group):
        counted = members[members["status"].isin(list(statuses))]
        failed = int(members["status"].isin(["FAILED", "KILLED"]).sum())
        for metric in metrics:
            finite = [math.isfinite(value) for value in counted[metric]]
            values = [float(value) for value in counted[metric][finite]]
            found = interval(values, method, rng=rng)
            rows.append(
                dict(zip(group, keys, strict=True))
                | {"metric": metric, "n": found.n, "mean": found.mean, "low": found.low, "high": found.high}
                | {"runs": len(members), "failed": failed}
                | ({"run_ids": " ".join(counted["run_id"][finite])} if run_ids else {})
                | ({"collapsed": int(members["collapsed"].eq(True).sum())} if "collapsed" in members else {})
            )
    lost = ["failed", "collapsed"] if "collapsed" in frame else ["failed"]
    columns = [*group, "metric", "n", "mean", "low", "high", "runs", *lost, *(["run_ids"] if run_ids else [])]
    return pd.DataFrame(rows, columns=columns).astype({"mean": float, "low": float, "high": float})


def band(points: pd.DataFrame) -> pd.DataFrame:
    """Curves of several runs -> one with a band: columns step, n, mean, low, high.

    The bounds are Student's, as :func:`kl_comedy.statistics.t_interval` has them, for all steps at once.
    ``points`` has columns step and value, one row a run and step. Non-finite values are left out of a step's
    mean; the bounds are NaN at steps that only one run has.
    """
    import numpy as np
    from scipy.special import stdtrit

    finite = points[np.isfinite(points["value"].astype(float))]
    found = finite.astype({"value": float}).groupby("step")["value"].agg(["count", "mean", "std"]).reset_index()
    n = found["count"].to_numpy()
    half = np.where(n > 1, stdtrit(np.maximum(n - 1, 1), 0.5 + LEVEL / 2) * found["std"] / np.sqrt(n), np.nan)
    found = found.assign(low=found["mean"] - half, high=found["mean"] + half).rename(columns={"count": "n"})
    return found[["step", "n", "mean", "low", "high"]]


def groups_of(frame: pd.DataFrame, group: list[str]) -> list[tuple[tuple[str, ...], pd.DataFrame]]:
    """The groups in the order of their first run; a missing group value is an empty text."""
    if frame.empty:
        return []
    if not group:
        return [((), frame)]
    keyed = frame.assign(**{key: frame[key].fillna("").astype(str) for key in group})
    return [(tuple(map(str, keys)), members) for keys, members in keyed.groupby(group, sort=False)]
