"""Frames of runs compared: over seeds, at equal beta, at equal KL, over several tasks. Frames in, frames out.

A *family* is a KL configuration without its coefficient (column ``tags.kl.family``). ``no KL`` is beta 0 of every
family, so its runs are points of every family's frontier. The formulas are in :mod:`kl_comedy.statistics`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError, bad_value
from kl_comedy.results.runs import BETA, FAMILY, NO_KL, short
from kl_comedy.statistics import (
    LEVEL,
    POWER,
    Interval,
    Point,
    false_discovery_rate,
    generator,
    geometric_interval,
    holm,
    interval,
    iqm,
    paired_difference,
    power,
    probability_of_improvement,
    reward_at_kl,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

SEED = "params.seed"
WARM_START = "params.model.options.seed"
"""The seed of the pocket policy's warm start: runs of one seed from two warm starts are two observations."""
STATISTICS = ("n", "mean", "low", "high")
DIFFERENCE = (
    "minus_baseline",
    "difference_low",
    "difference_high",
    "sd",
    "p",
    "p_holm",
    "q",
    "p_equivalent",
    "power",
    "pairs",
    "unpaired",
    "verdict",
)
"""Columns of the difference to the baseline. ``pairs`` and ``unpaired`` count seeds, ``verdict`` is a word, the others
are numbers."""
OF_THE_MARGIN = ("p_equivalent", "power")
"""Columns that only a table with a margin has."""


@dataclass(frozen=True, kw_only=True)
class FamilyResult:
    """What the runs of one family gave at one beta or one KL.

    ``outside`` and ``gap`` count the seeds whose frontier has no value at this KL (:func:`reward_at_kl`), 0 at a beta.
    ``collapsed`` is None where no rule of collapse was applied.
    """

    value_by_seed: Mapping[Any, float]
    runs: int
    collapsed: int | None
    outside: int = 0
    gap: int = 0

    def counts(self) -> dict[str, int | None]:
        return {"runs": self.runs, "collapsed": self.collapsed, "outside": self.outside, "gap": self.gap}


Results = dict[tuple[str, str], FamilyResult]
"""By family and place: ``beta 0.1``, or ``KL 2`` in nats."""


@dataclass(frozen=True, kw_only=True)
class EqualKL:
    """The KLs at which families are compared, and the columns that a frontier is made of."""

    column: str
    """The column with the KL of each run's last policy (nats)."""
    nats: Sequence[float]
    start: str | None = None
    """The column with each run's first reward. If given, each frontier begins at 0 nats with that reward."""


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

    # One generator for all rows: a bootstrap's intervals depend on the order of the groups and metrics.
    rng = generator()
    rows = []
    for keys, members in groups_of(frame, group):
        chosen = members[members["status"].isin(list(statuses))]
        failed = int(members["status"].isin(["FAILED", "KILLED"]).sum())
        for metric in metrics:
            # A mean of what is finite: a diverged run is counted as collapsed or failed instead.
            finite = _finite(chosen, metric)
            row: dict[str, Any] = dict(zip(group, keys, strict=True))
            row["metric"] = metric
            row |= asdict(interval(by_seed(finite, metric), method, rng=rng))
            row |= {"runs": len(members), "failed": failed, "collapsed": collapsed_runs(members)}
            if run_ids:
                row["run_ids"] = " ".join(finite["run_id"])
            rows.append(row)
    columns = [*group, "metric", *STATISTICS, "runs", "failed"]
    if "collapsed" in frame:
        columns.append("collapsed")
    if run_ids:
        columns.append("run_ids")
    return pd.DataFrame(rows, columns=columns).astype({"mean": float, "low": float, "high": float})


def _finite(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """The rows whose value in ``column`` is neither missing nor infinite."""
    return frame[frame[column].astype(float).abs() < math.inf]


def seeds_of(frame: pd.DataFrame) -> pd.Series:
    """What counts as one observation: a run's seed and warm start, or the run itself (as the index names it) if it has
    no seed."""
    # Runs of other programs may lack a seed; each of them is an observation.
    runs = frame.index.to_series().map("run {}".format)
    if SEED not in frame:
        return runs
    seeds = frame[SEED].astype(object)
    if WARM_START in frame:
        warm_starts = " of warm start " + frame[WARM_START].astype(str)
        seeds = (seeds.astype(str) + warm_starts).where(frame[WARM_START].notna(), seeds)
    return seeds.where(frame[SEED].notna(), runs)


def by_seed(frame: pd.DataFrame, column: str) -> list[float]:
    """The mean of the finite values of each seed's runs: runs of one seed are not independent, so they count once."""
    finite = _finite(frame, column)
    return [float(value) for value in finite.groupby(seeds_of(finite), sort=False)[column].mean()]


def band(points: pd.DataFrame, *, log: bool = False) -> pd.DataFrame:
    """Curves of several runs as their mean with Student's 95% interval: columns step, n, mean, low, high.

    ``points`` has columns step and value, one row per run and step. Values that are not finite are left out; the bounds
    are NaN at steps that a single run has. ``log``: the geometric mean and the interval of the logarithms, of the
    values above 0.
    """
    import pandas as pd

    # A diverged run must not take the whole band with it.
    finite = _finite(points, "value")
    interval_of: Callable[[Sequence[float]], Interval] = interval
    if log:
        finite = finite[finite["value"] > 0]
        interval_of = geometric_interval
    rows = [{"step": step} | asdict(interval_of(list(values))) for step, values in finite.groupby("step")["value"]]
    return pd.DataFrame(rows, columns=["step", *STATISTICS]).astype({"low": float, "high": float})


def groups_of(frame: pd.DataFrame, group: Sequence[str]) -> list[tuple[tuple[str, ...], pd.DataFrame]]:
    """The groups in the order of their first run; a missing group value is an empty text."""
    if frame.empty:
        return []
    if not group:
        return [((), frame)]
    # pandas leaves runs with a missing key out of every group.
    keyed = frame.assign(**{key: frame[key].fillna("").astype(str) for key in group})
    return [(tuple(map(str, keys)), members) for keys, members in keyed.groupby(list(group), sort=False)]


def collapsed_runs(members: pd.DataFrame) -> int | None:
    """How many of the runs collapsed; None where no rule was applied."""
    if "collapsed" not in members:
        return None
    return int(members["collapsed"].eq(True).sum())


def compare_families(
    frame: pd.DataFrame,
    groups: Sequence[str],
    metric: str,
    baseline: str | None,
    method: str,
    *,
    at_kl: EqualKL | None = None,
    margin: float | None = None,
) -> pd.DataFrame:
    """Mean of ``metric`` over seeds and its difference to the ``baseline`` family, paired over seeds.

    One row per family and beta; with ``at_kl``, one per family and KL: the reward is read off each seed's frontier
    (:func:`kl_comedy.statistics.reward_at_kl`). At equal beta, the baseline ``no KL`` is compared with every beta.
    ``p_holm`` and ``q`` are adjusted for all contrasts of the table (Holm; Benjamini and Hochberg), ``p_equivalent`` is
    of a difference within ``margin``, ``power`` that of finding the margin, and ``verdict`` :func:`verdict_on`'s.
    Collapsed runs are in the means and counted. ``runs`` and ``collapsed`` count each run of the family once, with
    ``at_kl`` also those without KL, which are points of its frontier. Raises :class:`UserError` where runs lack a
    seed, and for an unknown baseline.
    """
    import pandas as pd

    # by_seed would take each run as a seed of its own, and no run would have a partner.
    if SEED not in frame:
        raise UserError("no param seed, by which differences are paired: these runs were not made by kl-comedy")
    families = list(dict.fromkeys(frame[FAMILY].astype(str)))
    if baseline is not None and baseline not in families:
        raise bad_value("--baseline", baseline, families)
    rng = generator()
    rows: list[dict[str, Any]] = []
    for keys, members in groups_of(frame, groups):
        if at_kl is None:
            results = _at_each_beta(members, metric)
        else:
            results = _at_each_kl(members, metric, at_kl)
        for (family, place), result in results.items():
            row: dict[str, Any] = dict(zip(map(short, groups), keys, strict=True))
            row |= {"kl.family": family, "at": place}
            # The mean's draws come before the difference's: a bootstrap's numbers depend on the order.
            row |= asdict(interval(list(result.value_by_seed.values()), method, rng=rng))
            row |= result.counts()
            baseline_result = _result_to_compare(results, baseline, family, place)
            if baseline_result is not None:
                row |= _difference(result, baseline_result, method, rng, margin)
            rows.append(row)
    _decide(rows, margin)

    columns = [*map(short, groups), "kl.family", "at", *STATISTICS, "runs", "collapsed", "outside", "gap"]
    if baseline is not None:
        columns += [name for name in DIFFERENCE if name not in OF_THE_MARGIN or margin is not None]
    table = pd.DataFrame(rows, columns=columns)
    numbers = {"mean", "low", "high", *DIFFERENCE} - {"pairs", "unpaired", "verdict"}
    return table.astype({name: float for name in columns if name in numbers})


def _decide(rows: list[dict[str, Any]], margin: float | None) -> None:
    """Add what depends on all contrasts of the table: adjusted p-values, power and verdict."""
    # Over all rows of the table, because a reader looks for the smallest p among all of them.
    p_values = [row.get("p") for row in rows]
    tests = sum(p is not None for p in p_values)
    adjusted = zip(
        holm(p_values), false_discovery_rate(p_values), holm([row.get("p_equivalent") for row in rows]), strict=True
    )
    for row, (p_holm, q, p_same) in zip(rows, adjusted, strict=True):
        row["p_holm"] = p_holm
        row["q"] = q
        if "minus_baseline" not in row:
            continue
        if margin is not None and row["sd"] is not None:
            # The least p of the table has to pass this level, the first step of Holm.
            row["power"] = power(margin, row["sd"], row["pairs"], (1 - LEVEL) / max(tests, 1))
        row["verdict"] = verdict_on(
            row["minus_baseline"], row["sd"], p=p_holm, p_same=p_same, power=row.get("power", 0.0)
        )


def verdict_on(difference: float, sd: float | None, *, p: float | None, p_same: float | None, power: float) -> str:
    """``above`` or ``below`` the baseline where the difference is resolved after Holm; ``the same`` where the two
    one-sided tests find it within the margin after Holm, and a difference of the margin would have been found in four
    of five studies; else ``not resolved``.

    ``p`` (of no difference) and ``p_same`` (of one within the margin) are adjusted by Holm; ``power`` is of finding
    the margin.
    """
    is_resolved = p is not None and p < 1 - LEVEL
    # Equal differences in all seeds have no p-value: the statistic is infinite, or 0 / 0.
    is_constant = sd == 0 and difference != 0
    if is_resolved or is_constant:
        return "above" if difference > 0 else "below"
    if power >= POWER and p_same is not None and p_same < 1 - LEVEL:
        return "the same"
    return "not resolved"


def _result_to_compare(results: Results, baseline: str | None, family: str, place: str) -> FamilyResult | None:
    """The baseline's result at the same place; None where there is none, and for the baseline itself."""
    if baseline is None or family == baseline:
        return None
    # Runs without KL have one beta, 0, and every other beta is compared with it.
    if baseline == NO_KL and place.startswith("beta"):
        place = "beta 0"
    return results.get((baseline, place))


def _difference(
    result: FamilyResult, baseline: FamilyResult, method: str, rng: np.random.Generator, margin: float | None
) -> dict[str, Any]:
    """The columns :data:`DIFFERENCE` of a row, except those of :func:`_decide`, which need all rows."""
    paired = paired_difference(result.value_by_seed, baseline.value_by_seed, method=method, rng=rng, margin=margin)
    return {
        "minus_baseline": paired.difference.mean,
        "difference_low": paired.difference.low,
        "difference_high": paired.difference.high,
        "sd": paired.deviation,
        "p": paired.p,
        "p_equivalent": paired.p_equivalent,
        "pairs": paired.difference.n,
        "unpaired": paired.only_a + paired.only_b,
    }


def _at_each_beta(members: pd.DataFrame, metric: str) -> Results:
    results: Results = {}
    for (family, beta), runs in groups_of(members, [FAMILY, BETA]):
        finite = runs[runs[metric].abs() < math.inf]
        # Runs of one seed are averaged: they are not independent.
        value_by_seed = dict(finite.groupby(seeds_of(finite))[metric].mean())
        results[family, f"beta {beta}"] = FamilyResult(
            value_by_seed=value_by_seed, runs=len(runs), collapsed=collapsed_runs(runs)
        )
    return results


PointsBySeed = dict[Any, list[Point]]


def _at_each_kl(members: pd.DataFrame, metric: str, at_kl: EqualKL) -> Results:
    # A run has one end, which counts as the run, and one start, which is a point of the frontier but not a run.
    ends: dict[str, PointsBySeed] = {}
    starts: dict[str, PointsBySeed] = {}
    observations = members.fillna({FAMILY: ""}).assign(observation=seeds_of(members))
    for row in observations.to_dict("records"):
        family = row[FAMILY]
        seed = row["observation"]
        end = Point(kl=float(row[at_kl.column]), reward=float(row[metric]), collapsed=row.get("collapsed") is True)
        ends.setdefault(family, {}).setdefault(seed, []).append(end)
        if at_kl.start is not None:
            begin = Point(kl=0.0, reward=float(row[at_kl.start]))
            starts.setdefault(family, {}).setdefault(seed, []).append(begin)

    results: Results = {}
    for family, seeds in ends.items():
        families = [family]
        # Runs without KL are beta 0 of every family, so they are points of its frontier too.
        if family != NO_KL:
            families.append(NO_KL)
        runs: list[Point] = []
        frontiers: PointsBySeed = {}
        for seed in seeds:
            seed_ends = _points_of(ends, families, seed)
            runs += seed_ends
            frontiers[seed] = seed_ends + _points_of(starts, families, seed)
        collapsed = sum(run.collapsed for run in runs)
        for nats in at_kl.nats:
            # A text says why this seed's frontier has no reward at this KL.
            reward_or_reason = {seed: reward_at_kl(points, nats) for seed, points in frontiers.items()}
            rewards = {seed: value for seed, value in reward_or_reason.items() if not isinstance(value, str)}
            reasons = list(reward_or_reason.values())
            results[family, f"KL {nats:g}"] = FamilyResult(
                value_by_seed=rewards,
                runs=len(runs),
                collapsed=collapsed,
                outside=reasons.count("outside"),
                gap=reasons.count("gap"),
            )
    return results


def _points_of(points: Mapping[str, PointsBySeed], families: Sequence[str], seed: Any) -> list[Point]:
    """The points of one seed in all ``families``."""
    seed_points: list[Point] = []
    for family in families:
        seed_points += points.get(family, {}).get(seed, [])
    return seed_points


def aggregate(frame: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str], baseline: str | None) -> pd.DataFrame:
    """One row per group: the interquartile mean over seeds and tasks (each metric is a task), and the probability that
    a run is better than one of the baseline.

    ``baseline`` is the group's values, joined by a comma and a space. Raises :class:`UserError` for an unknown one.
    """
    import pandas as pd

    # One generator for all rows: the intervals depend on the order of the groups.
    rng = generator()
    scores: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for keys, members in groups_of(frame, groups):
        values_by_task = {}
        for name in metrics:
            values = by_seed(members, name)
            # A task that no run of the group measured does not count against it.
            if values:
                values_by_task[name] = values
        if values_by_task:
            scores[keys] = values_by_task
    # A group has several values, and the option names it as a table's row shows it.
    keys_of_label = {", ".join(keys): keys for keys in scores}
    baseline_keys = None
    if baseline is not None:
        if baseline not in keys_of_label:
            raise bad_value("--baseline", baseline, list(keys_of_label))
        baseline_keys = keys_of_label[baseline]
    rows = []
    for keys, tasks in scores.items():
        row: dict[str, Any] = dict(zip(map(short, groups), keys, strict=True))
        mean = iqm(tasks, rng)
        row |= {"iqm": mean.mean, "low": mean.low, "high": mean.high, "tasks": len(tasks), "scores": mean.n}
        if baseline_keys is not None and keys != baseline_keys:
            better = probability_of_improvement(tasks, scores[baseline_keys], rng)
            row |= {"p_better": better.mean, "p_low": better.low, "p_high": better.high}
        rows.append(row)
    return pd.DataFrame(rows)
