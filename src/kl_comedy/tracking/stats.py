"""Means and intervals over seeds. Pure functions; an interval needs at least two values.

The 95% interval is Student's: ``mean ± t(0.975, n-1) * s / sqrt(n)`` with s the standard deviation with
denominator n-1; it assumes the seeds' values are about normal and independent. The bootstrap makes no such
assumption but is too narrow for few seeds (n < 10 or so).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import bad_value

if TYPE_CHECKING:
    import pandas as pd

LEVEL = 0.95
METHODS = ("t", "bootstrap")
BOOTSTRAP_DRAWS = 10_000
BOOTSTRAP_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """``mean`` of ``n`` values with bounds; the bounds are None for n < 2, all are None for n = 0."""

    n: int
    mean: float | None
    low: float | None
    high: float | None


def t_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Student's interval of the mean. Values must be finite.

    >>> found = t_interval([1.0, 2.0, 3.0])
    >>> round(found.low, 3), found.mean, round(found.high, 3)
    (-0.484, 2.0, 4.484)
    """
    n, mean = len(values), _mean(values)
    if mean is None or n < 2:
        return Interval(n=n, mean=mean, low=None, high=None)
    from scipy.special import stdtrit

    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = float(stdtrit(n - 1, 0.5 + level / 2)) * deviation / math.sqrt(n)
    return Interval(n=n, mean=mean, low=mean - half, high=mean + half)


def bootstrap_interval(
    values: Sequence[float], level: float = LEVEL, draws: int = BOOTSTRAP_DRAWS, seed: int = BOOTSTRAP_SEED
) -> Interval:
    """Percentile bootstrap of the mean; the same values give the same interval."""
    n, mean = len(values), _mean(values)
    if mean is None or n < 2:
        return Interval(n=n, mean=mean, low=None, high=None)
    import numpy as np

    sample = np.asarray(values, dtype=float)
    means = sample[np.random.default_rng(seed).integers(0, n, size=(draws, n))].mean(axis=1)
    low, high = np.quantile(means, [0.5 - level / 2, 0.5 + level / 2])
    return Interval(n=n, mean=mean, low=min(float(low), mean), high=max(float(high), mean))


def interval(values: Sequence[float], method: str = "t", level: float = LEVEL) -> Interval:
    """The interval by ``method``: t or bootstrap."""
    if method == "t":
        return t_interval(values, level)
    if method == "bootstrap":
        return bootstrap_interval(values, level)
    raise bad_value("--interval", method, METHODS)


def summarize(
    frame: pd.DataFrame,
    group: list[str],
    metrics: list[str],
    method: str = "t",
    statuses: Sequence[str] = ("FINISHED",),
) -> pd.DataFrame:
    """Mean and 95% interval of each metric's final value in each group of runs.

    One row per group and metric: the group columns, ``metric``, ``n``, ``mean``, ``low``, ``high``, ``runs``,
    ``failed``. Only runs of ``statuses`` with a finite value enter the mean, ``n`` of them; ``runs`` counts all
    runs of the group and ``failed`` those that FAILED or were KILLED, so that what was lost stays in sight. Groups
    keep the order of their first run; a missing group value is an empty text.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for keys, members in _groups(frame, group):
        counted = members[members["status"].isin(list(statuses))]
        failed = int(members["status"].isin(["FAILED", "KILLED"]).sum())
        for metric in metrics:
            values = [float(value) for value in counted[metric] if math.isfinite(value)]
            found = interval(values, method)
            rows.append(
                dict(zip(group, keys, strict=True))
                | {"metric": metric, "n": found.n, "mean": found.mean, "low": found.low, "high": found.high}
                | {"runs": len(members), "failed": failed}
            )
    columns = [*group, "metric", "n", "mean", "low", "high", "runs", "failed"]
    return pd.DataFrame(rows, columns=columns).astype({"mean": float, "low": float, "high": float})


def band(points: pd.DataFrame) -> pd.DataFrame:
    """Curves of several runs -> one with a band: columns step, n, mean, low, high.

    ``points`` has columns step and value, one row a run and step. Non-finite values are left out of a step's
    mean; the bounds are NaN at steps that only one run has.
    """
    import pandas as pd

    rows = []
    for step, values in points.groupby("step")["value"]:
        found = t_interval([float(value) for value in values if math.isfinite(value)])
        if found.n:
            rows.append((step, found.n, found.mean, found.low, found.high))
    columns = ["step", "n", "mean", "low", "high"]
    return pd.DataFrame(rows, columns=columns).astype({"mean": float, "low": float, "high": float})


def _groups(frame: pd.DataFrame, group: list[str]) -> list[tuple[tuple[str, ...], pd.DataFrame]]:
    if frame.empty:
        return []
    if not group:
        return [((), frame)]
    keyed = frame.assign(**{key: frame[key].fillna("").astype(str) for key in group})
    return [(tuple(map(str, keys)), members) for keys, members in keyed.groupby(group, sort=False)]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if len(values) else None
