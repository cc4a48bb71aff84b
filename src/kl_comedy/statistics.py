"""Statistics of runs: intervals, pass@k, differences, power, aggregates, frontiers, collapse.

Functions that resample take a ``numpy.random.Generator`` (:func:`generator` makes one per command), so the same
command on the same runs prints the same numbers.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from kl_comedy.errors import UserError, bad_value

if TYPE_CHECKING:
    import numpy as np

LEVEL = 0.95
"""Coverage of every interval of this module."""
METHODS = ("t", "bootstrap")
CLUSTER_METHODS = ("auto", "wilson", "t", "bootstrap")
SEED_DRAWS = 10_000
"""Bootstrap draws for a mean over seeds: few values, so that many draws cost little."""
DRAWS = 2_000
"""Bootstrap draws for everything else."""

MARGIN = 0.015
"""Two mean rewards (0 to 1) within it are the same, unless a command says otherwise."""
POWER = 0.8
"""A contrast that finds a difference of the margin less often than this resolves nothing."""
MOST_PAIRS = 100_000
"""Beyond it the number of seeds is not computed: nobody would run them."""
MAX_NONCENTRALITY = 100.0
"""So far beyond its bound the statistic is always resolved, and the tails of ``nct`` are no numbers."""
MAX_WRONG_DIRECTION = 5.0
"""Beyond it the statistic has the other sign with a probability below 1e-6."""

CHUNK = 2_000_000
"""A bootstrap over clusters draws at most about this many numbers at once."""

MAX_LOG = 700.0
"""Logarithms are clamped to this size before ``exp``, which overflows a float beyond 709."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """``mean`` of ``n`` independent units with bounds; the bounds are None for n < 2, the mean too for n = 0."""

    n: int
    mean: float | None
    low: float | None
    high: float | None

    @property
    def half_width(self) -> float | None:
        """Half the distance of the bounds; None without bounds."""
        if self.low is None or self.high is None:
            return None
        return (self.high - self.low) / 2

    def __format__(self, spec: str) -> str:
        """``mean [low, high]``, each number in the format ``spec``; only what is not None.

        >>> f"{Interval(n=9, mean=0.5, low=0.25, high=0.75):.2f}, {Interval(n=1, mean=0.5, low=None, high=None):.2f}"
        '0.50 [0.25, 0.75], 0.50'
        """
        if self.mean is None:
            return ""
        mean = format(self.mean, spec)
        if self.low is None or self.high is None:
            return mean
        return f"{mean} [{format(self.low, spec)}, {format(self.high, spec)}]"


def generator(seed: int = 0) -> np.random.Generator:
    """The random generator of one command, which passes it to everything that resamples."""
    import numpy as np

    # A fixed seed: `results verify` makes tables again and compares their intervals to the last digit.
    return np.random.default_rng(seed)


def interval(values: Sequence[float], method: str = "t", rng: np.random.Generator | None = None) -> Interval:
    """The mean of finite, independent values with its 95% interval.

    ``t`` is Student's: mean ± t s / sqrt(n), exact for normal values. ``bootstrap`` takes percentiles of resampled
    means (Efron 1979), which are too narrow for fewer than about ten values. Raises :class:`UserError` for another
    method.

    >>> f"{interval([1.0, 2.0, 3.0]):.3f}"
    '2.000 [-0.484, 4.484]'
    """
    if method not in METHODS:
        raise bad_value("--interval", method, METHODS)
    n = len(values)
    if method == "bootstrap" or n < 2:
        # An independent value is a cluster of its own.
        return clustered_interval([[value] for value in values], method, rng=rng, draws=SEED_DRAWS)
    # fmean and fsum round once, at their end, so that the interval does not depend on the order of the seeds.
    mean = fmean(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = _t_quantile(n - 1) * deviation / math.sqrt(n)
    return Interval(n=n, mean=mean, low=mean - half, high=mean + half)


def geometric_interval(values: Sequence[float]) -> Interval:
    """The geometric mean of values above 0 with Student's interval of their logarithms: for logarithmic axes.

    >>> f"{geometric_interval([1.0, 10.0, 100.0]):.3g}"
    '10 [0.0328, 3.05e+03]'
    """
    logs = interval([math.log(value) for value in values])
    return Interval(n=logs.n, mean=_exp(logs.mean), low=_exp(logs.low), high=_exp(logs.high))


def _exp(logarithm: float | None) -> float | None:
    if logarithm is None:
        return None
    # Two values that are far apart have an interval whose bounds no float can hold.
    return math.exp(max(-MAX_LOG, min(logarithm, MAX_LOG)))


def clustered_se(clusters: Sequence[Sequence[float]]) -> float | None:
    """The standard error of the mean of all values, with clusters as the independent units; None for fewer than two.

    This is the cluster-robust standard error of a mean (Liang and Zeger 1986): ``sqrt(G / (G - 1) sum_g d_g^2) / n``,
    where ``d_g`` is the sum of cluster g's deviations from the mean of all ``n`` values.

    >>> clustered_se([[0.0, 0.0], [1.0, 1.0]]) == clustered_se([[0.0], [1.0]]) == 0.5
    True
    """
    groups = len(clusters)
    if groups < 2:
        return None
    values = _flatten(clusters)
    mean = fmean(values)
    # d_g^2: deviations are summed within a cluster before they are squared. Those of samples that agree add up, and the
    # error is then larger than that of independent samples.
    squares = [math.fsum(value - mean for value in cluster) ** 2 for cluster in clusters]
    return math.sqrt(groups / (groups - 1) * math.fsum(squares)) / len(values)


def _flatten(clusters: Sequence[Sequence[float]]) -> list[float]:
    return list(itertools.chain.from_iterable(clusters))


def clustered_interval(
    clusters: Sequence[Sequence[float]],
    method: str = "auto",
    *,
    rng: np.random.Generator | None = None,
    draws: int = DRAWS,
) -> Interval:
    """The mean of all values with its 95% interval; ``n`` counts clusters. Values must be finite.

    ``auto``: ``wilson`` where every value is 0 or 1, else ``t``. ``wilson``: Wilson's score interval at the effective
    sample size ``p (1-p) / se^2`` (Kish's design effect, Franco et al. 2019, doi 10.1093/jssam/smy019), at most the
    number of values; where all values are equal, the number of clusters. ``t``: mean ± t se. ``bootstrap``: percentiles
    over resampled whole clusters. Raises :class:`UserError` for another method, and for values outside [0, 1] with
    ``wilson``.
    """
    if method not in CLUSTER_METHODS:
        raise bad_value("--interval", method, CLUSTER_METHODS)
    groups = len(clusters)
    values = _flatten(clusters)
    if not values:
        return Interval(n=groups, mean=None, low=None, high=None)
    mean = fmean(values)
    se = clustered_se(clusters)
    if se is None:
        return Interval(n=groups, mean=mean, low=None, high=None)

    if method == "auto":
        only_right_or_wrong = set(values) <= {0.0, 1.0}
        if only_right_or_wrong:
            method = "wilson"
        else:
            method = "t"

    if method == "t":
        half = _t_quantile(groups - 1) * se
        low = mean - half
        high = mean + half
    elif method == "wilson":
        if min(values) < 0 or max(values) > 1:
            raise bad_value("--interval", "wilson", ["t", "bootstrap"], "some values lie outside [0, 1]")
        low, high = _wilson(mean, _effective_size(mean, se, values=len(values), groups=groups))
    else:
        if rng is None:
            rng = generator()
        low, high = _percentiles(_bootstrap_means(clusters, rng, draws))
    # Rounding, or percentiles of few draws, must not leave the mean outside of its own interval.
    return Interval(n=groups, mean=mean, low=min(low, mean), high=max(high, mean))


def _effective_size(share: float, se: float, *, values: int, groups: int) -> float:
    """How many independent values of 0 or 1 would have the standard error ``se`` (Kish's design effect)."""
    if se == 0:
        # All clusters have the same mean (mostly: everything right, or everything wrong). Nothing is known about how
        # much the samples of a cluster agree, so each cluster counts as one value.
        return float(groups)
    # At most the number of values: clusters that differ less than chance alone would make them are luck, not evidence.
    return min(share * (1 - share) / se**2, float(values))


def _t_quantile(freedom: int) -> float:
    """The two-sided quantile of Student's distribution at :data:`LEVEL`."""
    from scipy.special import stdtrit  # the quantile of scipy.stats.t, without its slow import

    return float(stdtrit(freedom, 0.5 + LEVEL / 2))


def _wilson(share: float, size: float) -> tuple[float, float]:
    """Wilson's score interval (1927): the shares p with ``|share - p| <= z sqrt(p (1 - p) / size)``."""
    from scipy.special import ndtri  # the quantile of scipy.stats.norm

    # middle ± half = (share + z²/2n ± z sqrt(share (1 - share) / n + z²/4n²)) / (1 + z²/n)
    z2 = float(ndtri(0.5 + LEVEL / 2)) ** 2
    middle = (share + z2 / (2 * size)) / (1 + z2 / size)
    half = math.sqrt(z2 * (share * (1 - share) / size + z2 / (4 * size**2))) / (1 + z2 / size)
    # The formula stays within [0, 1]; its rounding may not.
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _bootstrap_means(clusters: Sequence[Sequence[float]], rng: np.random.Generator, draws: int) -> np.ndarray:
    """The mean of all values in each of ``draws`` samples of whole clusters, drawn with replacement."""
    import numpy as np

    # A drawn cluster comes whole, so that its sum and its size are all that a draw needs.
    totals = np.array([math.fsum(cluster) for cluster in clusters])
    sizes = np.array([len(cluster) for cluster in clusters], dtype=float)
    groups = len(clusters)
    means = []
    # In parts: all draws of an evaluation with many problems would not fit into memory.
    draws_at_once = max(CHUNK // groups, 1)
    for start in range(0, draws, draws_at_once):
        rows = min(draws_at_once, draws - start)
        picked = rng.integers(0, groups, size=(rows, groups))
        means.append(totals[picked].sum(axis=1) / sizes[picked].sum(axis=1))
    return np.concatenate(means)


def _percentiles(draws: np.ndarray) -> tuple[float, float]:
    """The bounds that hold the middle :data:`LEVEL` of the draws."""
    import numpy as np

    low, high = np.quantile(draws, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
    return float(low), float(high)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that at least one of ``k`` samples is right, given that ``correct`` of ``samples`` were right.

    ``1 - C(n-c, k) / C(n, k)``, the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1). Raises
    :class:`UserError` where ``k`` is larger than the number of samples.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 0, 4), pass_at_k(4, 2, 3)
    (0.25, 0.5, 0.0, 1.0)
    """
    check_k(k, samples)
    # A fraction, because the binomial coefficients of a few hundred samples exceed what a float holds.
    return float(1 - Fraction(math.comb(samples - correct, k), math.comb(samples, k)))


def check_k(k: int, samples: int, *, key: str = "k") -> None:
    """Raise :class:`UserError` unless ``1 <= k <= samples``."""
    if not 1 <= k <= samples:
        raise UserError(
            f"{key}: got {k}; allowed: 1 to {samples}, the samples drawn of each problem (eval.samples={samples})"
        )


class Majority(NamedTuple):
    """A vote over the samples of one problem.

    ``correct``: the chance that the most frequent answer is right, where ties are broken at random; with a tie it may
    lie between 0 and 1. ``tied``: several answers have the most votes.
    """

    correct: float
    tied: bool


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> Majority:
    """Vote over canonical ``answers``. None abstains; a vote without any answer is not correct.

    ``correct`` is the verdict on each sample; a winning answer counts as right by the mean verdict on its samples.
    Source: Wang et al. 2203.11171 (self-consistency).

    >>> majority(["7", "7", "8"], [True, True, False]), majority(["7", "8", None], [True, False, False])
    (Majority(correct=1.0, tied=False), Majority(correct=0.5, tied=True))
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return Majority(correct=0.0, tied=False)
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    # Winners have equally many samples, so that the mean over samples is the mean over winners.
    verdicts = [verdict for answer, verdict in zip(answers, correct, strict=True) if answer in winners]
    return Majority(correct=fmean(verdicts), tied=len(winners) > 1)


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> Majority:
    """maj@k: the mean vote of the ``n // k`` disjoint blocks of ``k`` samples, in order; ``tied`` where any block was.

    Samples are exchangeable, so this is unbiased for the vote of ``k`` of them. The last ``n % k`` samples are
    not used. Raises :class:`UserError` where ``k`` is larger than the number of samples.
    """
    check_k(k, len(answers))
    # Disjoint, because votes of blocks that share samples would not be independent.
    blocks = [slice(start, start + k) for start in range(0, len(answers) - k + 1, k)]
    votes = [majority(answers[block], correct[block]) for block in blocks]
    return Majority(correct=fmean(vote.correct for vote in votes), tied=any(vote.tied for vote in votes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """A paired comparison of two sides, by key."""

    difference: Interval
    """a - b over the ``difference.n`` common keys."""
    p: float | None
    """p-value of the paired t-test for no difference; None for n < 2 and where all differences are equal."""
    p_equivalent: float | None
    """p-value of two one-sided tests (TOST) for a difference within the margin; None without a margin and for n < 2."""
    deviation: float | None
    """Standard deviation of the differences; None for n < 2."""
    only_a: int
    """Number of keys that b lacks."""
    only_b: int
    """Number of keys that a lacks."""


def paired_difference(
    a: Mapping[Hashable, float],
    b: Mapping[Hashable, float],
    *,
    method: str = "t",
    rng: np.random.Generator | None = None,
    margin: float | None = None,
) -> Paired:
    """``a - b``, matched by key (seed), never by order. Values that are not finite count as absent.

    Two runs with the same seed share warm start, prompts and their order; their common noise cancels in the difference.
    ``margin``: a difference up to this size counts as none in the equivalence test (Schuirmann 1987).

    >>> paired = paired_difference({0: 1.0, 1: 2.0, 2: 9.0}, {1: 1.5, 0: 0.5})
    >>> paired.difference.mean, paired.difference.n, paired.only_a, paired.only_b
    (0.5, 2, 1, 0)
    """
    left = _finite(a)
    right = _finite(b)
    # By key and never by order: the sides may have run in different orders, or lack a seed.
    differences = [left[key] - right[key] for key in left if key in right]
    n = len(differences)
    p = None
    p_equivalent = None
    differ = len(set(differences)) > 1
    if differ:
        from scipy.stats import ttest_1samp

        p = float(ttest_1samp(differences, 0.0).pvalue)
        if margin is not None:
            # Both one-sided tests must reject, so the larger p-value is that of their union.
            above_low = float(ttest_1samp(differences, -margin, alternative="greater").pvalue)
            below_high = float(ttest_1samp(differences, margin, alternative="less").pvalue)
            p_equivalent = max(above_low, below_high)
    elif n > 1 and margin is not None:
        # Without any variance the t-statistic is infinite: the p-value is 0 within the margin and 1 beyond.
        p_equivalent = float(abs(differences[0]) >= margin)
    deviation = None
    if n > 1:
        deviation = stdev(differences)
    return Paired(
        difference=interval(differences, method, rng=rng),
        p=p,
        p_equivalent=p_equivalent,
        deviation=deviation,
        only_a=len(left) - n,
        only_b=len(right) - n,
    )


def _finite(values: Mapping[Hashable, float]) -> dict[Hashable, float]:
    return {key: value for key, value in values.items() if math.isfinite(value)}


def holm(p: Sequence[float | None]) -> list[float | None]:
    """The p-values of one family of tests, adjusted by Holm's step-down rule (1979).

    None entries are returned unchanged and not counted as tests.

    >>> holm([0.01, None, 0.04, 0.03])
    [0.03, None, 0.06, 0.06]
    """
    order = sorted((value, position) for position, value in enumerate(p) if value is not None)
    adjusted: list[float | None] = [None] * len(p)
    largest = 0.0
    for rank, (value, position) in enumerate(order):
        # The running maximum keeps the order: a test is not rejected before one with a smaller p-value.
        largest = max(largest, min(1.0, value * (len(order) - rank)))
        adjusted[position] = largest
    return adjusted


def false_discovery_rate(p: Sequence[float | None]) -> list[float | None]:
    """The p-values of one page, adjusted by the step-up rule of Benjamini and Hochberg (1995).

    Of the contrasts whose adjusted value is below 5%, at most 5% are expected to be false. None entries are returned
    unchanged and not counted as tests.

    >>> false_discovery_rate([0.01, None, 0.04, 0.03])
    [0.03, None, 0.04, 0.04]
    """
    from scipy.stats import false_discovery_control

    tested = [value for value in p if value is not None]
    if not tested:
        return list(p)
    adjusted = iter(false_discovery_control(tested))
    return [None if value is None else float(next(adjusted)) for value in p]


# --- power ----------------------------------------------------------------------------------------------------------
def power(difference: float, deviation: float, pairs: int, level: float = 1 - LEVEL) -> float:
    """The probability that a two-sided paired t-test at ``level`` resolves a true ``difference`` with ``pairs`` pairs.

    ``deviation`` is the standard deviation of the paired differences, in the unit of ``difference``. The statistic of a
    true difference has a noncentral t distribution, with which this is exact for normal differences. 0 for fewer than
    two pairs, which have no test.

    >>> round(power(0.421637, 1.0, 50), 6)  # an example of the manual of G*Power 3.1, matched pairs
    0.832114
    """
    from scipy.stats import nct, t

    if pairs < 2:
        return 0.0
    if deviation == 0:
        # Every pair shows the difference itself.
        return float(difference != 0)
    bound = float(t.isf(level / 2, pairs - 1))
    noncentrality = abs(difference) / deviation * math.sqrt(pairs)
    if noncentrality > bound + MAX_NONCENTRALITY:
        # The power rounds to 1, and nct's tails overflow further out.
        return 1.0
    in_direction = float(nct.sf(bound, pairs - 1, noncentrality))
    if noncentrality > MAX_WRONG_DIRECTION:
        return in_direction
    # Resolved in the wrong direction: a rejection of "no difference" too, though one that hardly occurs.
    return in_direction + float(nct.cdf(-bound, pairs - 1, noncentrality))


def pairs_needed(difference: float, deviation: float, *, level: float = 1 - LEVEL, wanted: float = POWER) -> int | None:
    """The least number of pairs with a :func:`power` of ``wanted`` or more; None beyond :data:`MOST_PAIRS`.

    >>> [pairs_needed(size, 1.0) for size in (0.2, 0.5, 0.8)]
    [199, 34, 15]
    """
    if power(difference, deviation, MOST_PAIRS, level) < wanted:
        return None
    # Power grows with the number of pairs, so that the least one is between two bounds which close in on it.
    too_few = 1
    enough = MOST_PAIRS
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if power(difference, deviation, middle, level) < wanted:
            too_few = middle
        else:
            enough = middle
    return enough


def iqm(scores: Mapping[str, Sequence[float]], rng: np.random.Generator) -> Interval:
    """The interquartile mean of all scores (``floor(n/4)`` are cut at each end) with its stratified bootstrap interval.

    ``scores`` maps a task to the scores of its runs, all on one scale. ``n`` counts scores; there are no bounds where
    no task has two. Source: Agarwal et al. 2021, "Deep RL at the Edge of the Statistical Precipice" (arXiv 2108.13264).
    Raises :class:`UserError` unless each task has a score and all scores are finite.

    >>> import numpy as np
    >>> iqm({"a": [0.0, 1.0], "b": [2.0, 100.0]}, np.random.default_rng(0)).mean
    1.5
    """

    def trimmed(samples: Sequence[np.ndarray]) -> Any:
        import numpy as np
        from scipy.stats import trim_mean

        return trim_mean(np.concatenate(samples, axis=-1), 0.25, axis=-1)

    return _aggregate(_arrays(scores), trimmed, rng)


def probability_of_improvement(
    a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]], rng: np.random.Generator
) -> Interval:
    """The mean over common tasks of P(A > B) + P(A = B) / 2 for one run of each side (Agarwal et al. 2021).

    Raises :class:`UserError` without a common task, and for scores that are not finite.

    >>> import numpy as np
    >>> probability_of_improvement({"t": [1.0, 3.0]}, {"t": [2.0, 2.0]}, np.random.default_rng(0)).mean
    0.5
    """
    tasks = [task for task in a if task in b]
    if not tasks:
        raise UserError(f"no task in common: {', '.join(a)} against {', '.join(b)}")

    def wins(samples: Sequence[np.ndarray]) -> Any:
        import numpy as np

        # The samples of a come first, one for each task, then those of b; leading axes are bootstrap draws.
        total: Any = 0
        for x, y in zip(samples[: len(tasks)], samples[len(tasks) :], strict=True):
            # The sign is 1, 0 or -1 for each pair of runs: half of it plus one half counts a tie as half a win.
            total = total + (np.sign(x[..., :, None] - y[..., None, :]).mean(axis=(-2, -1)) / 2 + 0.5)
        return total / len(tasks)

    samples = [*_arrays({task: a[task] for task in tasks}), *_arrays({task: b[task] for task in tasks})]
    return _aggregate(samples, wins, rng)


def _arrays(scores: Mapping[str, Sequence[float]]) -> list[np.ndarray]:
    import numpy as np

    if not scores:
        raise UserError("an aggregate needs at least one task")
    arrays = []
    for task, values in scores.items():
        array = np.asarray(values, dtype=float)
        if len(array) == 0 or not np.isfinite(array).all():
            raise UserError(f"an aggregate needs at least one score of each task, all of them finite; {task!r} has not")
        arrays.append(array)
    return arrays


def _aggregate(
    samples: list[np.ndarray], statistic: Callable[[Sequence[np.ndarray]], Any], rng: np.random.Generator
) -> Interval:
    """``statistic`` of the samples, one array ``[runs]`` per task, with its stratified bootstrap interval.

    Runs are resampled within their task. ``statistic`` takes arrays with leading axes too: ``[draws, runs]``.
    """
    low = None
    high = None
    # Not scipy.stats.bootstrap, which refuses a task with a single run. Where every task has one, each draw would be
    # the same and the interval a point.
    can_resample = any(len(values) > 1 for values in samples)
    if can_resample:
        draws = []
        for values in samples:
            picked = rng.integers(0, len(values), size=(DRAWS, len(values)))
            draws.append(values[picked])
        low, high = _percentiles(statistic(draws))
    total = sum(len(values) for values in samples)
    return Interval(n=total, mean=float(statistic(samples)), low=low, high=high)


class Point(NamedTuple):
    """The end of a run: its KL (nats), its reward, whether it collapsed."""

    kl: float
    reward: float
    collapsed: bool = False


def reward_at_kl(points: Sequence[Point], kl: float) -> float | str:
    """The reward of one seed's runs at ``kl``, interpolated linearly between neighbours in KL, or why there is none.

    ``outside``: ``kl`` is outside the range of the runs. ``gap``: a neighbour has collapsed. Points at the same KL are
    averaged.

    >>> line = [Point(kl=0.0, reward=0.4), Point(kl=2.0, reward=0.8), Point(kl=9.0, reward=0.0, collapsed=True)]
    >>> round(reward_at_kl(line, 1.0), 9), reward_at_kl(line, 5.0), reward_at_kl(line, 10.0)
    (0.6, 'gap', 'outside')
    """
    # A run that diverged has no place on the frontier.
    finite = [point for point in points if math.isfinite(point.kl) and math.isfinite(point.reward)]
    # The nearest KL on either side. Collapsed runs count here: where between a sound run and a collapsed one the
    # collapse begins is unknown, so the frontier has a gap there.
    below = max((point.kl for point in finite if point.kl <= kl), default=None)
    above = min((point.kl for point in finite if point.kl >= kl), default=None)
    if below is None or above is None:
        return "outside"  # the frontier is not extrapolated
    reward_below = _mean_reward(finite, below)
    reward_above = _mean_reward(finite, above)
    if reward_below is None or reward_above is None:
        return "gap"
    share = 0.0
    if above > below:
        share = (kl - below) / (above - below)
    return reward_below * (1 - share) + reward_above * share


def _mean_reward(points: Sequence[Point], kl: float) -> float | None:
    """The mean reward of the runs that ended at exactly ``kl``; None where all of them have collapsed."""
    sound = [point for point in points if not point.collapsed]
    rewards = [point.reward for point in sound if point.kl == kl]
    if not rewards:
        return None
    return fmean(rewards)


DEFAULT_RULE = "eval/heldout/reward < 0.5 start"
"""The rule of collapse where the user gives none. Stored tables without ``--collapse`` count collapsed runs by it."""

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_LAST = r"(?:\blast\s+([1-9]\d*))?"
_CONDITION = re.compile(rf"\s*(\S+?)\s*(<=|>=|<|>)\s*({_NUMBER})\s*(\bstart)?\s*{_LAST}\s*")
_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


class Condition(NamedTuple):
    """A run collapsed where ``compare(value, bound)`` holds for each of the ``last`` final values of its ``metric``.

    With ``of_start`` the bound is a share of the metric's first value.
    """

    metric: str
    compare: Callable[[Any, Any], Any]
    bound: float
    of_start: bool
    last: int = 1


def parse_rule(text: str) -> list[Condition]:
    """The conditions of ``METRIC < NUMBER [start] [last N]``, joined by commas; a run that meets any of them collapsed.

    Raises :class:`UserError` for a text of another form.
    """
    conditions = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise UserError(
                f"--collapse: cannot read {part.strip()!r}; allowed: METRIC < NUMBER, or METRIC < SHARE start, "
                "'last N' after either (the last N values all), joined by commas, "
                f"as in {DEFAULT_RULE!r} or 'kl/exact_reverse_sequence > 20 last 2'"
            )
        metric, sign, number, start, last = match.groups()
        conditions.append(
            Condition(
                metric=metric,
                compare=_COMPARE[sign],
                bound=float(number),
                of_start=start is not None,
                last=int(last or 1),
            )
        )
    return conditions
