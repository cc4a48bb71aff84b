"""Frames of runs compared: over seeds, at equal beta, at equal KL, over several tasks. Frames in, frames out.

A *family* is a KL configuration without its coefficient (column ``tags.kl.family``). ``no KL`` is beta 0 of every
family, so its runs are points of every family's frontier. The formulas are in :mod:`kl_comedy.statistics`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError, bad_value
from kl_comedy.statistics import (
    Point,
    generator,
    geometric_interval,
    holm,
    interval,
    iqm,
    paired_difference,
    probability_of_improvement,
    reward_at_kl,
)
from kl_comedy.tracking.runs import BETA, FAMILY, NO_KL, short

if TYPE_CHECKING:
    import pandas as pd

SEED = "params.seed"
DIFFERENCE = ("minus_baseline", "difference_low", "difference_high", "p", "p_holm", "p_equivalent", "pairs", "unpaired")

Cells = dict[tuple[str, str], tuple[dict[Any, float], dict[str, Any]]]
"""Of each family and beta or KL: the value by seed, and counts of runs."""


def summarize(
    frame: pd.DataFrame,
    group: list[str],
    metrics: list[str],
    method: str = "t",
    statuses: Sequence[str] = ("FINISHED",),
    *,
    run_ids: bool = False,
) -> pd.DataFrame:
    """Mean and 95% interval of each metric's value in each group of runs, one row per group and metric.

    Columns: the group columns, ``metric``, ``n``, ``mean``, ``low``, ``high``, ``runs``, ``failed``. Only runs of
    ``statuses`` with a finite value enter the mean, and ``n`` counts their seeds (:func:`by_seed`); ``runs`` counts all
    runs of the group, ``failed`` those that FAILED or were KILLED. Where the frame has a column ``collapsed``, its true
    values are counted too; these runs stay in the mean. Groups are in the order of their first run; a missing group
    value is an empty text. ``run_ids`` adds the ids of the runs in the mean, separated by spaces.
    """
    import pandas as pd

    rng = generator()
    rows = []
    for keys, members in groups_of(frame, group):
        chosen = members[members["status"].isin(list(statuses))]
        counts = {"runs": len(members), "failed": int(members["status"].isin(["FAILED", "KILLED"]).sum())}
        counts["collapsed"] = collapsed_runs(members)
        for metric in metrics:
            finite = chosen[chosen[metric].astype(float).abs() < math.inf]
            mean = interval(by_seed(finite, metric), method, rng=rng)
            row = dict(zip(group, keys, strict=True)) | {"metric": metric} | asdict(mean) | counts
            rows.append(row | {"run_ids": " ".join(finite["run_id"]) if run_ids else ""})
    counted = ["runs", "failed", *["collapsed"] * ("collapsed" in frame), *["run_ids"] * run_ids]
    summary = pd.DataFrame(rows, columns=[*group, "metric", "n", "mean", "low", "high", *counted])
    return summary.astype({"mean": float, "low": float, "high": float})


def seeds_of(frame: pd.DataFrame) -> pd.Series:
    """What counts as one observation: the run's seed; of a run without one, the run (as the index names it)."""
    runs = frame.index.to_series().map("run {}".format)
    return frame[SEED].astype(object).where(frame[SEED].notna(), runs) if SEED in frame else runs


def by_seed(frame: pd.DataFrame, column: str) -> list[float]:
    """The mean of the finite values of each seed's runs: runs of one seed are not independent, so they count once."""
    finite = frame[frame[column].astype(float).abs() < math.inf]
    return [float(value) for value in finite.groupby(seeds_of(finite), sort=False)[column].mean()]


def band(points: pd.DataFrame, *, log: bool = False) -> pd.DataFrame:
    """Curves of several runs as their mean with Student's 95% interval: columns step, n, mean, low, high.

    ``points`` has columns step and value, one row a run and step. Values that are not finite are left out; the bounds
    are NaN at steps that a single run has. ``log``: the geometric mean and the interval of the logarithms, of the
    values above 0.
    """
    import pandas as pd

    finite = points[points["value"].astype(float).abs() < math.inf]
    finite, of = (finite[finite["value"] > 0], geometric_interval) if log else (finite, interval)
    rows = [{"step": step} | asdict(of(list(values))) for step, values in finite.groupby("step")["value"]]
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
    *,
    at_kl: tuple[str, Sequence[float]] | None = None,
    margin: float | None = None,
    start: str | None = None,
) -> pd.DataFrame:
    """Mean of ``metric`` over seeds and its difference to the ``baseline`` family, paired over seeds.

    One row per family and beta; with ``at_kl``, a KL column and values of it (nats), one per family and KL: the reward
    is read off each seed's frontier (:func:`kl_comedy.statistics.reward_at_kl`), which begins at 0 nats with the
    reward of the column ``start`` if given. At equal beta, the baseline ``no KL`` is compared with every beta.
    ``p_holm`` is adjusted for all contrasts of the table (Holm), ``p_equivalent`` is of a difference within ``margin``.
    Collapsed runs are in the means and counted. ``runs`` and ``collapsed`` count each run of the family once, with
    ``at_kl`` also those without KL, which are points of its frontier. Raises :class:`UserError` where runs lack a
    seed, and for an unknown baseline.
    """
    import pandas as pd

    if SEED not in frame:
        raise UserError("these runs lack the param seed, by which differences are paired; they were not trained by us")
    families = list(dict.fromkeys(frame[FAMILY].astype(str)))
    if baseline is not None and baseline not in families:
        raise bad_value("--baseline", baseline, families)
    rng = generator()
    rows = []
    for keys, members in groups_of(frame, groups):
        cells = _at_beta(members, metric) if at_kl is None else _at_kl(members, metric, *at_kl, start)
        for (family, at), (values, counts) in cells.items():
            row: dict[str, Any] = dict(zip(map(short, groups), keys, strict=True)) | {"kl.family": family, "at": at}
            row |= asdict(interval(list(values.values()), method, rng=rng)) | counts
            other = cells.get((str(baseline), "beta 0" if at_kl is None and baseline == NO_KL else at))
            if other and family != baseline:
                paired = paired_difference(values, other[0], method=method, rng=rng, margin=margin)
                minus, unpaired = paired.difference, paired.only_a + paired.only_b
                difference = (minus.mean, minus.low, minus.high, paired.p, None, paired.p_equivalent, minus.n, unpaired)
                row |= dict(zip(DIFFERENCE, difference, strict=True))
            rows.append(row)
    for row, p in zip(rows, holm([row.get("p") for row in rows]), strict=True):
        row["p_holm"] = p
    columns = ["kl.family", "at", "n", "mean", "low", "high", "runs", "collapsed", "outside", "gap"]
    difference = [
        name for name in DIFFERENCE if baseline is not None and (name != "p_equivalent" or margin is not None)
    ]
    table = pd.DataFrame(rows, columns=[*map(short, groups), *columns, *difference])
    return table.astype({name: float for name in ("mean", "low", "high", *DIFFERENCE[:6]) if name in table})


def _at_beta(members: pd.DataFrame, metric: str) -> Cells:
    cells: Cells = {}
    for (family, beta), side in groups_of(members, [FAMILY, BETA]):
        values = dict(side[side[metric].abs() < math.inf].groupby(SEED)[metric].mean())  # a repeated seed is averaged
        counts = {"runs": len(side), "collapsed": collapsed_runs(side), "outside": 0, "gap": 0}
        cells[family, f"beta {beta}"] = values, counts
    return cells


def _at_kl(members: pd.DataFrame, metric: str, kl: str, at_kl: Sequence[float], start: str | None) -> Cells:
    # By family and seed. A run has one end, which counts as the run, and one start, which is a point and no run.
    ends: dict[str, dict[Any, list[Point]]] = {}
    starts: dict[str, dict[Any, list[Point]]] = {}
    for row in members.fillna({FAMILY: ""}).to_dict("records"):
        end = Point(kl=float(row[kl]), reward=float(row[metric]), collapsed=row.get("collapsed") is True)
        ends.setdefault(row[FAMILY], {}).setdefault(row[SEED], []).append(end)
        if start is not None:
            begin = Point(kl=0.0, reward=float(row[start]))
            starts.setdefault(row[FAMILY], {}).setdefault(row[SEED], []).append(begin)
    cells: Cells = {}
    for family, seeds in ends.items():
        on_frontier = [family] if family == NO_KL else [family, NO_KL]
        runs: list[Point] = []
        points: dict[Any, list[Point]] = {}
        for seed in seeds:
            of_seed = [point for name in on_frontier for point in ends.get(name, {}).get(seed, [])]
            runs += of_seed
            points[seed] = of_seed + [point for name in on_frontier for point in starts.get(name, {}).get(seed, [])]
        collapsed = sum(run.collapsed for run in runs)
        for nats in at_kl:
            read = {seed: reward_at_kl(line, nats) for seed, line in points.items()}
            values = {seed: value for seed, value in read.items() if not isinstance(value, str)}
            counts: dict[str, Any] = {reason: list(read.values()).count(reason) for reason in ("outside", "gap")}
            cells[family, f"KL {nats:g}"] = values, {"runs": len(runs), "collapsed": collapsed, **counts}
    return cells


def aggregate(frame: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str], baseline: str | None) -> pd.DataFrame:
    """A row per group: the interquartile mean over seeds and tasks (a metric each), and P(better than the baseline)."""
    import pandas as pd

    rng = generator()
    scores: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for keys, members in groups_of(frame, groups):
        finite = {name: by_seed(members, name) for name in metrics}
        if any(finite.values()):
            scores[keys] = {name: values for name, values in finite.items() if values}
    labels = {", ".join(keys): keys for keys in scores}
    if baseline is not None and baseline not in labels:
        raise bad_value("--baseline", baseline, list(labels))
    rows = []
    for keys, tasks in scores.items():
        mean = iqm(tasks, rng)
        row: dict[str, Any] = dict(zip(map(short, groups), keys, strict=True))
        row |= {"iqm": mean.mean, "low": mean.low, "high": mean.high, "tasks": len(tasks), "scores": mean.n}
        if baseline is not None and keys != labels[baseline]:
            better = probability_of_improvement(tasks, scores[labels[baseline]], rng)
            row |= {"p_better": better.mean, "p_low": better.low, "p_high": better.high}
        rows.append(row)
    return pd.DataFrame(rows)
