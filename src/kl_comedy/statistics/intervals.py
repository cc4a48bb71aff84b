"""Means and intervals over seeds. Pure functions; an interval needs at least two values.

Student's interval is ``mean ± t(1/2 + level/2, n-1) * s / sqrt(n)`` with s the standard deviation with denominator
n-1; it assumes the seeds' values are about normal and independent. The percentile bootstrap makes no such assumption
but is too narrow for few seeds (n < 10 or so).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kl_comedy.errors import bad_value

if TYPE_CHECKING:
    import numpy as np

LEVEL = 0.95
METHODS = ("t", "bootstrap")
BOOTSTRAP_DRAWS = 10_000
SEED = 0
"""Of the generator that a command makes; the draws of a bootstrap, not of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """``mean`` of ``n`` values with bounds; the bounds are None for n < 2, all are None for n = 0."""

    n: int
    mean: float | None
    low: float | None
    high: float | None


def generator(seed: int = SEED) -> np.random.Generator:
    """The one source of randomness of a command."""
    import numpy as np

    return np.random.default_rng(seed)


def t_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Student's interval of the mean. Values must be finite.

    >>> found = t_interval([1.0, 2.0, 3.0])
    >>> round(found.low, 3), found.mean, round(found.high, 3)
    (-0.484, 2.0, 4.484)
    """
    n, mean = len(values), mean_of(values)
    if mean is None or n < 2:
        return Interval(n=n, mean=mean, low=None, high=None)
    from scipy.special import stdtrit

    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = float(stdtrit(n - 1, 0.5 + level / 2)) * deviation / math.sqrt(n)
    return Interval(n=n, mean=mean, low=mean - half, high=mean + half)


def bootstrap_interval(
    values: Sequence[float], rng: np.random.Generator, level: float = LEVEL, draws: int = BOOTSTRAP_DRAWS
) -> Interval:
    """Percentile bootstrap of the mean. Values must be finite."""
    n, mean = len(values), mean_of(values)
    if mean is None or n < 2:
        return Interval(n=n, mean=mean, low=None, high=None)
    import numpy as np

    sample = np.asarray(values, dtype=float)
    means = sample[rng.integers(0, n, size=(draws, n))].mean(axis=1)
    low, high = np.quantile(means, [0.5 - level / 2, 0.5 + level / 2])
    return Interval(n=n, mean=mean, low=min(float(low), mean), high=max(float(high), mean))


def interval(
    values: Sequence[float], method: str = "t", level: float = LEVEL, rng: np.random.Generator | None = None
) -> Interval:
    """The interval by ``method``: t or bootstrap; the latter draws from ``rng`` (default: a new seeded one)."""
    if method == "t":
        return t_interval(values, level)
    if method == "bootstrap":
        return bootstrap_interval(values, generator() if rng is None else rng, level)
    raise bad_value("--interval", method, METHODS)


def mean_of(values: Sequence[float]) -> float | None:
    """The mean, summed without rounding; None of nothing."""
    return math.fsum(values) / len(values) if len(values) else None
