"""Means and intervals over seeds. Pure functions; an interval needs at least two values.

Student's interval is ``mean ± t(1/2 + level/2, n-1) * s / sqrt(n)`` with s the standard deviation with denominator
n-1; it assumes the seeds' values are about normal and independent. The percentile bootstrap makes no such assumption
but is too narrow for few seeds (n < 10 or so).

Intervals of shares and means whose values come in clusters: several samples of each problem.

Samples of one problem are not independent, so the problem is what is drawn at random. The standard error is that of a
ratio of cluster totals (Cochran 1977, Sampling Techniques, ch. 9; Miller 2024, "Adding Error Bars to Evals", arXiv
2411.00640, eq. 4, up to the factor G/(G-1)):

    se^2 = G/(G-1) * sum_g (sum_i (x_gi - mean))^2 / N^2

with G problems and N values. With equally many samples a problem it is the standard error of the problems' means.
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


CLUSTER_METHODS = ("wilson", "t", "bootstrap")
DRAWS = 2_000
DRAWS_AT_ONCE = 2_000_000
"""Numbers of a bootstrap held at once."""


def clustered_se(clusters: Sequence[Sequence[float]]) -> float | None:
    """Standard error of the mean of all values, clusters being the independent units; None for fewer than two.

    >>> clustered_se([[0.0, 0.0], [1.0, 1.0]]) == clustered_se([[0.0], [1.0]]) == 0.5
    True
    """
    values = [value for cluster in clusters for value in cluster]
    mean, groups = mean_of(values), len(clusters)
    if mean is None or groups < 2:
        return None
    totals = [math.fsum(value - mean for value in cluster) for cluster in clusters]
    return math.sqrt(groups / (groups - 1) * math.fsum(total**2 for total in totals)) / len(values)


def clustered_interval(
    clusters: Sequence[Sequence[float]],
    method: str = "wilson",
    *,
    rng: np.random.Generator | None = None,
    level: float = LEVEL,
) -> Interval:
    """The mean of all values with its interval; ``n`` counts clusters. Values must be finite.

    ``wilson``: Wilson's score interval of a share at the effective sample size ``p (1-p) / se^2`` (Kish's design
    effect, Franco et al. 2019, doi 10.1093/jssam/smy019), at most the number of values; never outside [0, 1], and not
    empty where every value is the same (the effective size is then the number of clusters). Values must lie in
    [0, 1]. ``t``: mean ± t se. ``bootstrap``: percentiles over resampled clusters, each taken whole, by ``rng``.
    """
    if method not in CLUSTER_METHODS:
        raise bad_value("--interval", method, CLUSTER_METHODS)
    values = [value for cluster in clusters for value in cluster]
    mean, groups = mean_of(values), len(clusters)
    if mean is None or groups < 2:
        return Interval(n=groups, mean=mean, low=None, high=None)
    if method == "bootstrap":
        return _bootstrap(clusters, mean, rng, level)
    se = clustered_se(clusters)
    assert se is not None
    if method == "wilson":
        return _wilson(mean, se, values, groups, level)
    from scipy.special import stdtrit

    half = float(stdtrit(groups - 1, 0.5 + level / 2)) * se
    return Interval(n=groups, mean=mean, low=mean - half, high=mean + half)


def _wilson(mean: float, se: float, values: Sequence[float], groups: int, level: float) -> Interval:
    if min(values) < 0 or max(values) > 1:
        raise bad_value("--interval", "wilson", ["t", "bootstrap"], "some values lie outside [0, 1]")
    from scipy.special import ndtri

    z2 = float(ndtri(0.5 + level / 2)) ** 2
    size = min(mean * (1 - mean) / se**2, float(len(values))) if se > 0 else float(groups)
    middle = (mean + z2 / (2 * size)) / (1 + z2 / size)
    half = math.sqrt(z2 * (mean * (1 - mean) / size + z2 / (4 * size**2))) / (1 + z2 / size)
    return Interval(
        n=groups, mean=mean, low=min(max(middle - half, 0.0), mean), high=max(min(middle + half, 1.0), mean)
    )


def _bootstrap(
    clusters: Sequence[Sequence[float]], mean: float, rng: np.random.Generator | None, level: float
) -> Interval:
    import numpy as np

    rng = np.random.default_rng(0) if rng is None else rng
    totals = np.array([math.fsum(cluster) for cluster in clusters])
    sizes = np.array([len(cluster) for cluster in clusters], dtype=float)
    groups, means = len(clusters), []
    step = max(DRAWS_AT_ONCE // groups, 1)
    for start in range(0, DRAWS, step):
        picked = rng.integers(0, groups, size=(min(step, DRAWS - start), groups))
        means.append(totals[picked].sum(axis=1) / sizes[picked].sum(axis=1))
    low, high = np.quantile(np.concatenate(means), [0.5 - level / 2, 0.5 + level / 2])
    return Interval(n=groups, mean=mean, low=min(float(low), mean), high=max(float(high), mean))
