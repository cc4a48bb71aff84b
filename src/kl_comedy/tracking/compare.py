"""Means and intervals over seeds, of frames of runs. The formulas are in :mod:`kl_comedy.statistics`.

Configurations compared: at the same beta, at the same KL, and over several tasks. Frames in, frames out.

A *family* is a KL configuration without its coefficient (column ``kl.family``). ``no KL`` is beta 0 of every family, so
its runs are points of every family's frontier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import bad_value
from kl_comedy.statistics import Paired, Point, compare_at, frontier_at, interval, paired_difference
from kl_comedy.statistics.comparisons import iqm_interval, probability_of_improvement
from kl_comedy.statistics.intervals import LEVEL, METHODS, generator
from kl_comedy.tracking.runs import BETA, FAMILY, NO_KL, short

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


SEED = "params.seed"
HEAD = ("at", "n", "mean", "low", "high", "runs", "collapsed", "outside", "gap")
AGAINST = ("minus_baseline", "difference_low", "difference_high", "p", "pairs", "unpaired")


def matched_beta(
    frame: pd.DataFrame,
    groups: Sequence[str],
    metric: str,
    baseline: str | None,
    method: str,
    rng: np.random.Generator,
) -> pd.DataFrame:
    """A row a family and beta: mean over seeds, and the difference to the baseline at that beta, paired over seeds.

    A baseline without coefficient (``no KL``) is compared with every beta. Collapsed runs are in the means and counted.
    """
    rows = []
    for keys, members in groups_of(frame, list(groups)):
        sides = {key: _values(side, metric) for key, side in groups_of(members, [FAMILY, BETA])}
        for (family, beta), side in groups_of(members, [FAMILY, BETA]):
            found = interval(list(sides[family, beta].values()), method, rng=rng)
            row = _head(groups, keys, family) | {"at": f"beta {beta}", **_bounds(found), "runs": len(side)}
            row |= {"collapsed": _collapsed(side), "outside": 0, "gap": 0}
            other = sides.get((baseline or "", "0" if baseline == NO_KL else beta))
            if baseline and family != baseline and other:
                row |= _against(paired_difference(sides[family, beta], other, method=method, rng=rng))
            rows.append(row)
    return _frame(rows, groups, baseline)


def matched_kl(
    frame: pd.DataFrame,
    groups: Sequence[str],
    metric: str,
    kl: str,
    at: Sequence[float],
    baseline: str | None,
    method: str,
    rng: np.random.Generator,
) -> pd.DataFrame:
    """A row a family and KL: the reward read off each seed's frontier there, and the difference to the baseline's.

    See :mod:`kl_comedy.statistics.comparisons` for what is interpolated and what is not.
    """
    rows = []
    for keys, members in groups_of(frame, list(groups)):
        points = {key[0]: _points(side, metric, kl) for key, side in groups_of(members, [FAMILY])}
        free = points.get(NO_KL, {})
        fronts = {family: _joined(own, {} if family == NO_KL else free) for family, own in points.items()}
        for family, own in fronts.items():
            for where in at:
                found = frontier_at(own, where, method=method, rng=rng)
                row = _head(groups, keys, family) | {"at": f"KL {where:g}", **_bounds(found.reward)}
                row |= {"runs": sum(map(len, own.values())), "collapsed": found.collapsed}
                row |= {"outside": found.outside, "gap": found.gap}
                if baseline and family != baseline and baseline in fronts:
                    row |= _against(compare_at(own, fronts[baseline], where, method=method, rng=rng))
                rows.append(row)
    return _frame(rows, groups, baseline)


def aggregate(
    frame: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str], baseline: str | None, rng: np.random.Generator
) -> pd.DataFrame:
    """A row a group: the interquartile mean over runs and tasks (a metric each), and P(better than the baseline)."""
    import pandas as pd

    scores = {keys: _tasks(members, metrics) for keys, members in groups_of(frame, list(groups))}
    scores = {keys: tasks for keys, tasks in scores.items() if tasks}
    labels = {", ".join(keys): keys for keys in scores}
    if baseline is not None and baseline not in labels:
        raise bad_value("--baseline", baseline, list(labels))
    rows = []
    for keys, tasks in scores.items():
        found = iqm_interval(tasks, rng)
        row: dict[str, Any] = dict(zip((short(group) for group in groups), keys, strict=True))
        row |= {"iqm": found.value, "low": found.low, "high": found.high, "tasks": found.tasks, "scores": found.runs}
        if baseline is not None and keys != labels[baseline]:
            better = probability_of_improvement(tasks, scores[labels[baseline]], rng)
            row |= {"p_better": better.value, "p_low": better.low, "p_high": better.high}
        rows.append(row)
    return pd.DataFrame(rows)


def families_of(frame: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(frame[FAMILY].astype(str)))


def _tasks(members: pd.DataFrame, metrics: Sequence[str]) -> dict[str, list[float]]:
    import math

    found = {name: [float(x) for x in members[name] if math.isfinite(x)] for name in metrics}
    return {name: values for name, values in found.items() if values}


def _values(side: pd.DataFrame, metric: str) -> dict[Any, float]:
    """Seed to value; a seed that ran more than once is averaged."""
    finite = side[side[metric].abs() < float("inf")]
    return dict(finite.groupby(SEED)[metric].mean())


def _points(side: pd.DataFrame, metric: str, kl: str) -> dict[Any, list[Point]]:
    found: dict[Any, list[Point]] = {}
    judged = side["collapsed"] if "collapsed" in side else [None] * len(side)
    for seed, x, y, collapsed in zip(side[SEED], side[kl], side[metric], judged, strict=True):
        found.setdefault(seed, []).append(Point(kl=float(x), reward=float(y), collapsed=collapsed is True))
    return found


def _joined(own: dict[Any, list[Point]], free: dict[Any, list[Point]]) -> dict[Any, list[Point]]:
    return {seed: [*points, *free.get(seed, [])] for seed, points in own.items()}


def _collapsed(side: pd.DataFrame) -> int | None:
    return int(side["collapsed"].eq(True).sum()) if "collapsed" in side else None


def _head(groups: Sequence[str], keys: tuple[str, ...], family: str) -> dict[str, Any]:
    return dict(zip((short(group) for group in groups), keys, strict=True)) | {"kl.family": family}


def _bounds(found: Any) -> dict[str, Any]:
    return {"n": found.n, "mean": found.mean, "low": found.low, "high": found.high}


def _against(found: Paired) -> dict[str, Any]:
    difference = found.difference
    values = (difference.mean, difference.low, difference.high, found.p, difference.n, found.only_a + found.only_b)
    return dict(zip(AGAINST, values, strict=True))


def _frame(rows: list[dict[str, Any]], groups: Sequence[str], baseline: str | None) -> pd.DataFrame:
    import pandas as pd

    columns = [*(short(group) for group in groups), "kl.family", *HEAD, *(AGAINST if baseline else ())]
    frame = pd.DataFrame(rows, columns=columns)
    numbers = ("mean", "low", "high", *AGAINST[:4])
    return frame.astype({name: float for name in numbers if name in frame})
