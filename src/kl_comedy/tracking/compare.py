"""Frames of runs compared: over seeds, at equal beta, at equal KL, over several tasks. Frames in, frames out.

A *family* is a KL configuration without its coefficient (column ``tags.kl.family``). ``no KL`` is beta 0 of every
family, so its runs are points of every family's frontier. The formulas are in :mod:`kl_comedy.statistics`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError, bad_value
from kl_comedy.statistics import (
    Interval,
    Paired,
    Point,
    compare_at_kl,
    family_at_kl,
    generator,
    interval,
    iqm,
    paired_difference,
    probability_of_improvement,
    t_interval,
)
from kl_comedy.tracking.runs import BETA, FAMILY, NO_KL, short

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

SEED = "params.seed"
COUNTS = ("runs", "collapsed", "outside", "gap")
DIFFERENCE = ("minus_baseline", "difference_low", "difference_high", "p", "pairs", "unpaired")


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
    """Mean and 95% interval of each metric's value in each group of runs, one row per group and metric.

    Columns: the group columns, ``metric``, ``n``, ``mean``, ``low``, ``high``, ``runs``, ``failed``. Only the ``n``
    runs of ``statuses`` with a finite value enter the mean; ``runs`` counts all runs of the group, ``failed`` those
    that FAILED or were KILLED. Where the frame has a column ``collapsed``, its true values are counted too; these runs
    stay in the mean. Groups keep the order of their first run; a missing group value is an empty text. ``rng`` feeds
    the bootstrap. ``run_ids`` adds the ids of the ``n`` runs, separated by spaces.
    """
    import numpy as np
    import pandas as pd

    rng = generator() if rng is None else rng
    counted = ["runs", "failed", *(["collapsed"] if "collapsed" in frame else []), *(["run_ids"] if run_ids else [])]
    rows = []
    for keys, members in groups_of(frame, group):
        chosen = members[members["status"].isin(list(statuses))]
        counts = {"runs": len(members), "failed": int(members["status"].isin(["FAILED", "KILLED"]).sum())}
        counts["collapsed"] = collapsed_runs(members)
        for metric in metrics:
            finite = chosen[np.isfinite(chosen[metric].astype(float))]
            bounds = _bounds(interval([float(value) for value in finite[metric]], method, rng=rng))
            row = dict(zip(group, keys, strict=True)) | {"metric": metric} | bounds | counts
            rows.append(row | {"run_ids": " ".join(finite["run_id"]) if run_ids else ""})
    summary = pd.DataFrame(rows, columns=[*group, "metric", "n", "mean", "low", "high", *counted])
    return summary.astype({"mean": float, "low": float, "high": float})


def band(points: pd.DataFrame) -> pd.DataFrame:
    """Curves of several runs as their mean with Student's 95% interval: columns step, n, mean, low, high.

    ``points`` has columns step and value, one row a run and step. Values that are not finite are left out; the bounds
    are NaN at steps that a single run has.
    """
    import numpy as np
    import pandas as pd

    finite = points[np.isfinite(points["value"].astype(float))]
    rows = [{"step": step} | _bounds(t_interval(list(values))) for step, values in finite.groupby("step")["value"]]
    return pd.DataFrame(rows, columns=["step", "n", "mean", "low", "high"]).astype({"low": float, "high": float})


def groups_of(frame: pd.DataFrame, group: Sequence[str]) -> list[tuple[tuple[str, ...], pd.DataFrame]]:
    """The groups in the order of their first run; a missing group value is an empty text."""
    if frame.empty:
        return []
    if not group:
        return [((), frame)]
    keyed = frame.assign(**{key: frame[key].fillna("").astype(str) for key in group})
    return [(tuple(map(str, keys)), members) for keys, members in keyed.groupby(list(group), sort=False)]


def collapsed_runs(members: pd.DataFrame) -> int | None:
    """How many of the runs collapsed; None where no rule was applied."""
    return int(members["collapsed"].eq(True).sum()) if "collapsed" in members else None


def compare_families(
    frame: pd.DataFrame,
    groups: Sequence[str],
    metric: str,
    baseline: str | None,
    method: str,
    rng: np.random.Generator,
    *,
    kl: str = "",
    at_kl: Sequence[float] | None = None,
) -> pd.DataFrame:
    """Mean of ``metric`` over seeds and its difference to the ``baseline`` family, paired over seeds.

    One row per family and beta; where ``at_kl`` has values of the metric ``kl``, one per family and KL: the reward is
    read off each seed's frontier (:func:`kl_comedy.statistics.reward_at_kl`). At equal beta, the baseline ``no KL`` is
    compared with every beta. Collapsed runs are in the means and counted. Raises :class:`UserError` where runs lack
    family or seed, and for an unknown baseline.
    """
    import pandas as pd

    for column, name in ((FAMILY, "the tag kl.label"), (SEED, "the param seed")):
        if column not in frame:
            raise UserError(f"these runs lack {name}, by which families are compared; they were not trained by us")
    families = list(dict.fromkeys(frame[FAMILY].astype(str)))
    if baseline is not None and baseline not in families:
        raise bad_value("--baseline", baseline, families)
    rows = []
    for keys, members in groups_of(frame, groups):
        found = (
            _at_beta(members, metric, baseline, method, rng)
            if at_kl is None
            else _at_kl(members, metric, kl, at_kl, baseline, method, rng)
        )
        rows += [dict(zip(map(short, groups), keys, strict=True)) | row for row in found]
    columns = [*map(short, groups), "kl.family", "at", "n", "mean", "low", "high", *COUNTS]
    table = pd.DataFrame(rows, columns=columns + [*DIFFERENCE] * (baseline is not None))
    numbers = ("mean", "low", "high", *DIFFERENCE[:4])
    return table.astype({name: float for name in numbers if name in table})


def _at_beta(
    members: pd.DataFrame, metric: str, baseline: str | None, method: str, rng: np.random.Generator
) -> list[dict[str, Any]]:
    cells = groups_of(members, [FAMILY, BETA])
    values = {}
    for key, side in cells:
        finite = side[side[metric].abs() < math.inf]
        values[key] = dict(finite.groupby(SEED)[metric].mean())  # a seed that ran more than once is averaged
    rows = []
    for (family, beta), side in cells:
        row: dict[str, Any] = {"kl.family": family, "at": f"beta {beta}", "runs": len(side)}
        row |= _bounds(interval(list(values[family, beta].values()), method, rng=rng))
        row |= {"collapsed": collapsed_runs(side), "outside": 0, "gap": 0}
        other = values.get((baseline or "", "0" if baseline == NO_KL else beta))
        if other and family != baseline:
            row |= _difference(paired_difference(values[family, beta], other, method=method, rng=rng))
        rows.append(row)
    return rows


def _at_kl(
    members: pd.DataFrame,
    metric: str,
    kl: str,
    at_kl: Sequence[float],
    baseline: str | None,
    method: str,
    rng: np.random.Generator,
) -> list[dict[str, Any]]:
    points = {key[0]: _points(side, metric, kl) for key, side in groups_of(members, [FAMILY])}
    without_kl = points.get(NO_KL, {})
    frontiers = {
        family: seeds if family == NO_KL else {seed: [*ends, *without_kl.get(seed, [])] for seed, ends in seeds.items()}
        for family, seeds in points.items()
    }
    rows = []
    for family, seeds in frontiers.items():
        for nats in at_kl:
            read = family_at_kl(seeds, nats, method=method, rng=rng)
            row = {"kl.family": family, "at": f"KL {nats:g}", **_bounds(read.reward)}
            row |= {"runs": sum(map(len, seeds.values())), "collapsed": read.collapsed}
            row |= {"outside": read.outside, "gap": read.gap}
            if family != baseline and baseline in frontiers:
                row |= _difference(compare_at_kl(seeds, frontiers[baseline], nats, method=method, rng=rng))
            rows.append(row)
    return rows


def aggregate(
    frame: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str], baseline: str | None, rng: np.random.Generator
) -> pd.DataFrame:
    """A row per group: the interquartile mean over runs and tasks (a metric each), and P(better than the baseline)."""
    import pandas as pd

    scores: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for keys, members in groups_of(frame, groups):
        finite = {name: [float(value) for value in members[name] if math.isfinite(value)] for name in metrics}
        if any(finite.values()):
            scores[keys] = {name: values for name, values in finite.items() if values}
    labels = {", ".join(keys): keys for keys in scores}
    if baseline is not None and baseline not in labels:
        raise bad_value("--baseline", baseline, list(labels))
    rows = []
    for keys, tasks in scores.items():
        mean = iqm(tasks, rng)
        row: dict[str, Any] = dict(zip(map(short, groups), keys, strict=True))
        row |= {"iqm": mean.value, "low": mean.low, "high": mean.high, "tasks": mean.tasks, "scores": mean.runs}
        if baseline is not None and keys != labels[baseline]:
            better = probability_of_improvement(tasks, scores[labels[baseline]], rng)
            row |= {"p_better": better.value, "p_low": better.low, "p_high": better.high}
        rows.append(row)
    return pd.DataFrame(rows)


def _points(side: pd.DataFrame, metric: str, kl: str) -> dict[Any, list[Point]]:
    """Seed to its runs."""
    points: dict[Any, list[Point]] = {}
    for row in side.to_dict("records"):
        end = Point(kl=float(row[kl]), reward=float(row[metric]), collapsed=row.get("collapsed") is True)
        points.setdefault(row[SEED], []).append(end)
    return points


def _bounds(mean: Interval) -> dict[str, Any]:
    return {"n": mean.n, "mean": mean.mean, "low": mean.low, "high": mean.high}


def _difference(paired: Paired) -> dict[str, Any]:
    minus = paired.difference
    values = (minus.mean, minus.low, minus.high, paired.p, minus.n, paired.only_a + paired.only_b)
    return dict(zip(DIFFERENCE, values, strict=True))
