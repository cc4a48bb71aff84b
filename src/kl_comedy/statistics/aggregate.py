"""Scores of runs on several tasks as one number: the interquartile mean, and the probability of improvement.

Both as in Agarwal et al. 2021, "Deep RL at the Edge of the Statistical Precipice" (2108.13264). Intervals are
percentile bootstraps, stratified: the runs of each task are resampled among themselves, so every draw has as many runs
of each task as the data. Scores of tasks must be on one scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError
from kl_comedy.statistics.intervals import LEVEL

if TYPE_CHECKING:
    import numpy as np

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
