"""Differences between two configurations where they met the same seeds (and the same items).

Two runs with one seed share warm start, prompts and their order. What they share cancels in the difference, so its
interval is narrower than that of two independent means. What only one side has is counted, not used.

Scores of runs on several tasks as one number: the interquartile mean, and the probability of improvement.

Both as in Agarwal et al. 2021, "Deep RL at the Edge of the Statistical Precipice" (2108.13264). Intervals are
percentile bootstraps, stratified: the runs of each task are resampled among themselves, so every draw has as many runs
of each task as the data. Scores of tasks must be on one scale.

Reward against KL: what a configuration earns at a given distance from the reference.

beta is not portable between placements, estimators or normalizations; the KL that a run ends at is. The runs of one
configuration family with one seed over several betas are the points (KL, reward) of that seed's frontier. Between
neighbours in KL the reward is interpolated linearly. Outside the points' range there is no value (never an
extrapolation), and across a collapsed run there is none either: a line from a healthy policy to a dead one says
nothing about policies in between. Each absence is counted with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError
from kl_comedy.statistics.intervals import BOOTSTRAP_DRAWS, LEVEL, Interval, interval

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """``difference`` is a - b over ``difference.n`` common keys; ``p`` is the paired t-test's, None for n < 2 or
    where all differences are equal; ``only_a`` and ``only_b`` count keys that the other side lacks."""

    difference: Interval
    p: float | None
    only_a: int
    only_b: int


def paired_difference(
    a: Mapping[Hashable, float],
    b: Mapping[Hashable, float],
    *,
    method: str = "t",
    rng: np.random.Generator | None = None,
) -> Paired:
    """``a - b`` over their common keys (seeds). Non-finite values count as absent.

    >>> found = paired_difference({0: 1.0, 1: 2.0, 2: 9.0}, {0: 0.5, 1: 1.5})
    >>> found.difference.mean, found.difference.n, found.only_a, found.only_b
    (0.5, 2, 1, 0)
    """
    left, right = ({key: value for key, value in side.items() if math.isfinite(value)} for side in (a, b))
    common = [key for key in left if key in right]
    differences = [left[key] - right[key] for key in common]
    return Paired(
        difference=interval(differences, method, rng=rng),
        p=_p_of(differences),
        only_a=len(left) - len(common),
        only_b=len(right) - len(common),
    )


def paired_items(
    a: pd.DataFrame, b: pd.DataFrame, rng: np.random.Generator, *, level: float = LEVEL, draws: int = BOOTSTRAP_DRAWS
) -> Paired:
    """``a - b`` over common seeds and items; frames with columns ``seed``, ``item``, ``value`` (samples: averaged).

    Seeds and items both vary, and every seed meets every item: the bootstrap resamples seeds and items
    independently (Owen 2007, "The pigeonhole bootstrap", arXiv 0712.1111; it errs on the wide side). ``n`` of the
    interval counts (seed, item) pairs; seeds that lack an item leave that item out. ``p`` is None.
    """
    import numpy as np

    tables = [
        side.pivot_table(index="seed", columns="item", values="value", aggfunc="mean", dropna=False) for side in (a, b)
    ]
    seeds, items = (tables[0].index.intersection(tables[1].index), tables[0].columns.intersection(tables[1].columns))
    difference = tables[0].loc[seeds, items] - tables[1].loc[seeds, items]
    whole = difference.dropna(axis=1)
    only = [table.size - whole.size for table in tables]
    grid = whole.to_numpy(dtype=float)
    n, mean = int(grid.size), float(grid.mean()) if grid.size else None
    low = high = None
    if min(grid.shape, default=0) >= 2:
        rows, columns = grid.shape
        weights = rng.multinomial(rows, np.full(rows, 1 / rows), size=draws) / rows
        counts = rng.multinomial(columns, np.full(columns, 1 / columns), size=draws) / columns
        means = np.einsum("dr,rc,dc->d", weights, grid, counts, optimize=True)
        low, high = (float(x) for x in np.quantile(means, [0.5 - level / 2, 0.5 + level / 2]))
    return Paired(difference=Interval(n=n, mean=mean, low=low, high=high), p=None, only_a=only[0], only_b=only[1])


def _p_of(differences: list[float]) -> float | None:
    """The two-sided paired t-test: a one-sample test of the differences."""
    if len(differences) < 2 or max(differences) == min(differences):
        return None
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(differences, 0.0).pvalue)


DRAWS = 2_000
TRIM = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """An aggregate over ``tasks`` tasks and ``runs`` runs; the bounds are None where every task has one run."""

    value: float
    low: float | None
    high: float | None
    runs: int
    tasks: int


def iqm(scores: Mapping[str, Sequence[float]]) -> float:
    """Mean of the middle half of all scores: ``floor(n/4)`` of n are cut off at each end.

    >>> iqm({"a": [0.0, 1.0], "b": [2.0, 100.0]})
    1.5
    """
    return float(_trimmed(*_samples(scores), axis=-1))


def iqm_interval(scores: Mapping[str, Sequence[float]], rng: np.random.Generator, level: float = LEVEL) -> Score:
    """:func:`iqm` with its stratified bootstrap interval. ``scores``: task to its runs' scores."""
    samples = _samples(scores)
    low, high = _bootstrap(samples, _trimmed, rng, level)
    return Score(value=iqm(scores), low=low, high=high, runs=sum(map(len, samples)), tasks=len(samples))


def probability_of_improvement(
    a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]], rng: np.random.Generator, level: float = LEVEL
) -> Score:
    """Mean over tasks of P(A > B) + P(A = B) / 2 for a run of each, over their common tasks.

    >>> import numpy as np
    >>> probability_of_improvement({"t": [1.0, 3.0]}, {"t": [2.0, 2.0]}, np.random.default_rng(0)).value
    0.5
    """
    tasks = [task for task in a if task in b]
    if not tasks:
        raise UserError(f"no task in common: {', '.join(a)} against {', '.join(b)}")
    left, right = _samples({task: a[task] for task in tasks}), _samples({task: b[task] for task in tasks})

    def statistic(*sides: Any, axis: int = -1) -> Any:
        half = len(sides) // 2
        return sum(map(_wins, sides[:half], sides[half:])) / half

    low, high = _bootstrap([*left, *right], statistic, rng, level)
    value = float(statistic(*left, *right))
    return Score(value=value, low=low, high=high, runs=sum(map(len, [*left, *right])), tasks=len(tasks))


def _wins(left: Any, right: Any) -> Any:
    """Share of pairs (one of each) that ``left`` wins, along the last axis; a tie is half a win."""
    import numpy as np

    signs = np.sign(left[..., :, None] - right[..., None, :])
    return (signs.mean(axis=(-2, -1)) + 1) / 2


def _trimmed(*samples: Any, axis: int) -> Any:
    import numpy as np
    from scipy.stats import trim_mean

    return trim_mean(np.concatenate(samples, axis=axis), TRIM, axis=axis)


def _samples(scores: Mapping[str, Sequence[float]]) -> list[Any]:
    import numpy as np

    found = [np.asarray(values, dtype=float) for values in scores.values()]
    if not found or any(not len(values) or not np.isfinite(values).all() for values in found):
        raise UserError("an aggregate needs at least one task, and at least one finite score of each")
    return found


def _bootstrap(
    samples: list[Any], statistic: Any, rng: np.random.Generator, level: float
) -> tuple[float | None, float | None]:
    """Each sample is resampled among itself; scipy.stats.bootstrap does that too, but refuses a sample of one run."""
    import numpy as np

    if all(len(values) < 2 for values in samples):
        return None, None
    draws = [values[rng.integers(0, len(values), size=(DRAWS, len(values)))] for values in samples]
    low, high = np.quantile(statistic(*draws, axis=-1), [0.5 - level / 2, 0.5 + level / 2])
    return float(low), float(high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A run: where it ended (nats), what it earned, whether it collapsed."""

    kl: float
    reward: float
    collapsed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class At:
    """A family at KL ``kl``: ``reward`` over the seeds that reach it. ``outside`` seeds have no point on one side of
    it, ``gap`` seeds only a collapsed run there; ``collapsed`` counts collapsed runs of the family, all told."""

    kl: float
    reward: Interval
    outside: int
    gap: int
    collapsed: int


def read_off(points: Sequence[Point], kl: float) -> float | str:
    """The reward at ``kl`` by linear interpolation, or why there is none: ``outside`` or ``gap``.

    Points at one KL are averaged. Non-finite points support nothing.

    >>> line = [Point(kl=0.0, reward=0.4), Point(kl=2.0, reward=0.8), Point(kl=9.0, reward=0.0, collapsed=True)]
    >>> round(read_off(line, 1.0), 9), read_off(line, 5.0), read_off(line, 10.0)
    (0.6, 'gap', 'outside')
    """
    there = sorted(
        (point for point in points if math.isfinite(point.kl) and math.isfinite(point.reward)), key=lambda p: p.kl
    )
    same = [point for point in there if point.kl == kl]
    if same:
        alive = [point.reward for point in same if not point.collapsed]
        return math.fsum(alive) / len(alive) if alive else "gap"
    below = [point for point in there if point.kl < kl]
    above = [point for point in there if point.kl > kl]
    if not below or not above:
        return "outside"
    left, right = _merged(below, below[-1].kl), _merged(above, above[0].kl)
    if left is None or right is None:
        return "gap"
    share = (kl - left.kl) / (right.kl - left.kl)
    return left.reward * (1 - share) + right.reward * share


def frontier_at(
    runs: Mapping[Hashable, Sequence[Point]], kl: float, *, method: str = "t", rng: np.random.Generator | None = None
) -> At:
    """The family ``runs`` (seed to its points) at ``kl``."""
    found = [read_off(points, kl) for points in runs.values()]
    return At(
        kl=kl,
        reward=interval([value for value in found if not isinstance(value, str)], method, rng=rng),
        outside=found.count("outside"),
        gap=found.count("gap"),
        collapsed=sum(point.collapsed for points in runs.values() for point in points),
    )


def compare_at(
    a: Mapping[Hashable, Sequence[Point]],
    b: Mapping[Hashable, Sequence[Point]],
    kl: float,
    *,
    method: str = "t",
    rng: np.random.Generator | None = None,
) -> Paired:
    """Reward of ``a`` minus that of ``b`` at the same KL, paired over the seeds in which both reach it."""
    values = [
        {seed: value for seed, points in side.items() if not isinstance(value := read_off(points, kl), str)}
        for side in (a, b)
    ]
    return paired_difference(values[0], values[1], method=method, rng=rng)


def _merged(points: Sequence[Point], kl: float) -> Point | None:
    """The points at ``kl`` as one, or None where all of them collapsed."""
    alive = [point.reward for point in points if point.kl == kl and not point.collapsed]
    return Point(kl=kl, reward=math.fsum(alive) / len(alive)) if alive else None
