"""Statistics of runs: intervals, pass@k, differences, aggregates, frontiers, collapse.

Functions that resample take a ``numpy.random.Generator`` (:func:`generator` makes one per command), so the same
command on the same runs prints the same numbers.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from kl_comedy.errors import UserError, bad_value

if TYPE_CHECKING:
    import numpy as np

LEVEL = 0.95
METHODS = ("t", "bootstrap")
CLUSTER_METHODS = ("auto", "wilson", "t", "bootstrap")
SEED_DRAWS, DRAWS = 10_000, 2_000
"""Bootstrap draws: of a mean over seeds, and of everything else."""

CHUNK = 2_000_000
"""A bootstrap over clusters draws at most about this many numbers at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """``mean`` of ``n`` independent units with bounds; the bounds are None for n < 2, the mean too for n = 0."""

    n: int
    mean: float | None
    low: float | None
    high: float | None

    @property
    def half_width(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def __format__(self, spec: str) -> str:
        """``mean [low, high]``, each number in the format ``spec``; only what is not None.

        >>> f"{Interval(n=9, mean=0.5, low=0.25, high=0.75):.2f}, {Interval(n=1, mean=0.5, low=None, high=None):.2f}"
        '0.50 [0.25, 0.75], 0.50'
        """
        mean, low, high = ("" if value is None else format(value, spec) for value in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]" if low else mean


def generator(seed: int = 0) -> np.random.Generator:
    """The random generator of one command, which passes it to everything that resamples."""
    import numpy as np

    return np.random.default_rng(seed)


def interval(values: Sequence[float], method: str = "t", rng: np.random.Generator | None = None) -> Interval:
    """The mean of finite, independent values with its interval: ``t`` (Student's) or ``bootstrap`` (percentiles; too
    narrow for fewer than ten values or so). Raises :class:`UserError` for another method.

    >>> f"{interval([1.0, 2.0, 3.0]):.3f}"
    '2.000 [-0.484, 4.484]'
    """
    if method not in METHODS:
        raise bad_value("--interval", method, METHODS)
    n = len(values)
    if method == "bootstrap" or n < 2:
        return clustered_interval([[value] for value in values], method, rng=rng, draws=SEED_DRAWS)
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
    mean, low, high = (
        None if at is None else math.exp(max(-700.0, min(at, 700.0))) for at in (logs.mean, logs.low, logs.high)
    )
    return Interval(n=logs.n, mean=mean, low=low, high=high)


def clustered_se(clusters: Sequence[Sequence[float]]) -> float | None:
    """Standard error of the mean of all values, clusters being the independent units; None for fewer than two.

    >>> clustered_se([[0.0, 0.0], [1.0, 1.0]]) == clustered_se([[0.0], [1.0]]) == 0.5
    True
    """
    values, groups = [value for cluster in clusters for value in cluster], len(clusters)
    if groups < 2:
        return None
    mean = fmean(values)
    squares = [math.fsum(value - mean for value in cluster) ** 2 for cluster in clusters]
    return math.sqrt(groups / (groups - 1) * math.fsum(squares)) / len(values)


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
    values, groups = [value for cluster in clusters for value in cluster], len(clusters)
    se = clustered_se(clusters)
    if se is None:
        return Interval(n=groups, mean=fmean(values) if values else None, low=None, high=None)
    mean = fmean(values)
    if method == "auto":
        method = "wilson" if set(values) <= {0.0, 1.0} else "t"
    if method == "t":
        half = _t_quantile(groups - 1) * se
        low, high = mean - half, mean + half
    elif method == "wilson":
        if min(values) < 0 or max(values) > 1:
            raise bad_value("--interval", "wilson", ["t", "bootstrap"], "some values lie outside [0, 1]")
        size = min(mean * (1 - mean) / se**2, float(len(values))) if se > 0 else float(groups)
        low, high = _wilson(mean, size)
    else:
        low, high = _percentiles(_bootstrap_means(clusters, rng or generator(), draws))
    return Interval(n=groups, mean=mean, low=min(low, mean), high=max(high, mean))


def _t_quantile(freedom: int) -> float:
    from scipy.special import stdtrit  # the quantile of scipy.stats.t, without its slow import

    return float(stdtrit(freedom, 0.5 + LEVEL / 2))


def _wilson(share: float, size: float) -> tuple[float, float]:
    from scipy.special import ndtri

    z2 = float(ndtri(0.5 + LEVEL / 2)) ** 2
    middle = (share + z2 / (2 * size)) / (1 + z2 / size)
    half = math.sqrt(z2 * (share * (1 - share) / size + z2 / (4 * size**2))) / (1 + z2 / size)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _bootstrap_means(clusters: Sequence[Sequence[float]], rng: np.random.Generator, draws: int) -> np.ndarray:
    import numpy as np

    totals = np.array([math.fsum(cluster) for cluster in clusters])
    sizes = np.array([len(cluster) for cluster in clusters], dtype=float)
    groups, means = len(clusters), []
    step = max(CHUNK // groups, 1)
    for start in range(0, draws, step):
        picked = rng.integers(0, groups, size=(min(step, draws - start), groups))
        means.append(totals[picked].sum(axis=1) / sizes[picked].sum(axis=1))
    return np.concatenate(means)


def _percentiles(draws: Any) -> tuple[float, float]:
    import numpy as np

    low, high = np.quantile(draws, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
    return float(low), float(high)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that at least one of ``k`` samples is right, from ``correct`` right ones among ``samples``.

    ``1 - C(n-c, k) / C(n, k)``, the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1), without
    rounding on the way. Raises :class:`UserError` where ``k`` is more than there are samples.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 0, 4), pass_at_k(4, 2, 3)
    (0.25, 0.5, 0.0, 1.0)
    """
    check_k(k, samples)
    return float(1 - Fraction(math.comb(samples - correct, k), math.comb(samples, k)))


def check_k(k: int, samples: int, *, key: str = "k") -> None:
    """Raise :class:`UserError` unless ``1 <= k <= samples``."""
    if not 1 <= k <= samples:
        raise UserError(
            f"{key}: got {k}; allowed: 1 to {samples}, the samples drawn of each problem (eval.samples={samples})"
        )


class Majority(NamedTuple):
    """A vote over samples of one problem. ``correct``: the chance that the most frequent answer is right, ties broken
    by lot (a share, not always 0 or 1). ``tied``: several answers have the most votes."""

    correct: float
    tied: bool


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> Majority:
    """Vote over canonical ``answers``; None abstains, and without any answer the vote is not correct. A winning answer
    is as right as its samples were judged.

    >>> majority(["7", "7", "8"], [True, True, False]), majority(["7", "8", None], [True, False, False])
    (Majority(correct=1.0, tied=False), Majority(correct=0.5, tied=True))
    """
    votes = Counter(answer for answer in answers if answer is not None)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    judged = [right for answer, right in zip(answers, correct, strict=True) if answer in winners]
    return Majority(correct=fmean(judged) if judged else 0.0, tied=len(winners) > 1)


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> Majority:
    """maj@k: the mean over the ``n // k`` disjoint blocks of ``k`` samples, in order; ``tied`` where any block was.

    Samples are exchangeable, so this is unbiased for the vote of k of them. The last ``n % k`` samples are unused.
    """
    check_k(k, len(answers))
    blocks = [slice(start, start + k) for start in range(0, len(answers) - k + 1, k)]
    votes = [majority(answers[block], correct[block]) for block in blocks]
    return Majority(correct=fmean(vote.correct for vote in votes), tied=any(vote.tied for vote in votes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """``difference`` is a - b over ``difference.n`` common keys. ``p`` is the paired t-test's, None for n < 2 and
    where all differences are equal. ``p_equivalent`` is that of two one-sided tests (TOST) for a difference within the
    margin; None without a margin and for n < 2. ``only_a`` and ``only_b`` count the keys that the other side lacks."""

    difference: Interval
    p: float | None
    p_equivalent: float | None
    only_a: int
    only_b: int


def paired_difference(
    a: Mapping[Hashable, float],
    b: Mapping[Hashable, float],
    *,
    method: str = "t",
    rng: np.random.Generator | None = None,
    margin: float | None = None,
) -> Paired:
    """``a - b``, matched by key (seed), never by order. Values that are not finite count as absent.

    Two runs with one seed share warm start, prompts and their order; what they share cancels in the difference.

    >>> paired = paired_difference({0: 1.0, 1: 2.0, 2: 9.0}, {1: 1.5, 0: 0.5})
    >>> paired.difference.mean, paired.difference.n, paired.only_a, paired.only_b
    (0.5, 2, 1, 0)
    """
    left, right = ({key: value for key, value in side.items() if math.isfinite(value)} for side in (a, b))
    differences = [left[key] - right[key] for key in left if key in right]
    n = len(differences)
    p = p_equivalent = None
    if len(set(differences)) > 1:
        from scipy.stats import ttest_1samp

        p = float(ttest_1samp(differences, 0.0).pvalue)
        if margin is not None:
            above, below = ((-margin, "greater"), (margin, "less"))
            p_equivalent = max(
                float(ttest_1samp(differences, at, alternative=side).pvalue) for at, side in (above, below)
            )
    elif n > 1 and margin is not None:
        p_equivalent = float(abs(differences[0]) >= margin)
    return Paired(
        difference=interval(differences, method, rng=rng),
        p=p,
        p_equivalent=p_equivalent,
        only_a=len(left) - n,
        only_b=len(right) - n,
    )


def holm(p: Sequence[float | None]) -> list[float | None]:
    """The p-values of one family of tests, adjusted by Holm's step-down rule (1979); None stays, and is no test.

    >>> holm([0.01, None, 0.04, 0.03])
    [0.03, None, 0.06, 0.06]
    """
    order = sorted((value, at) for at, value in enumerate(p) if value is not None)
    adjusted: list[float | None] = [None] * len(p)
    largest = 0.0
    for rank, (value, at) in enumerate(order):
        largest = max(largest, min(1.0, value * (len(order) - rank)))
        adjusted[at] = largest
    return adjusted


def iqm(scores: Mapping[str, Sequence[float]], rng: np.random.Generator) -> Interval:
    """Interquartile mean of all scores (``floor(n/4)`` are cut at each end) with its stratified bootstrap interval.

    ``scores``: task to its runs' scores, all on one scale. ``n`` counts scores; without bounds where no task has two.
    Agarwal et al. 2021, "Deep RL at the Edge of the Statistical Precipice" (arXiv 2108.13264). Raises
    :class:`UserError` without a finite score of each task.

    >>> import numpy as np
    >>> iqm({"a": [0.0, 1.0], "b": [2.0, 100.0]}, np.random.default_rng(0)).mean
    1.5
    """

    def trimmed(samples: Sequence[Any]) -> Any:
        import numpy as np
        from scipy.stats import trim_mean

        return trim_mean(np.concatenate(samples, axis=-1), 0.25, axis=-1)

    return _aggregate(_arrays(scores), trimmed, rng)


def probability_of_improvement(
    a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]], rng: np.random.Generator
) -> Interval:
    """Mean over common tasks of P(A > B) + P(A = B) / 2 for a run of each (Agarwal et al. 2021).

    >>> import numpy as np
    >>> probability_of_improvement({"t": [1.0, 3.0]}, {"t": [2.0, 2.0]}, np.random.default_rng(0)).mean
    0.5
    """
    tasks = [task for task in a if task in b]
    if not tasks:
        raise UserError(f"no task in common: {', '.join(a)} against {', '.join(b)}")

    def wins(samples: Sequence[Any]) -> Any:
        import numpy as np

        pairs = zip(samples[: len(tasks)], samples[len(tasks) :], strict=True)
        shares = [np.sign(x[..., :, None] - y[..., None, :]).mean(axis=(-2, -1)) / 2 + 0.5 for x, y in pairs]
        return sum(shares) / len(tasks)

    samples = [*_arrays({task: a[task] for task in tasks}), *_arrays({task: b[task] for task in tasks})]
    return _aggregate(samples, wins, rng)


def _arrays(scores: Mapping[str, Sequence[float]]) -> list[Any]:
    import numpy as np

    arrays = [np.asarray(values, dtype=float) for values in scores.values()]
    if not arrays or any(not len(values) or not np.isfinite(values).all() for values in arrays):
        raise UserError("an aggregate needs at least one task, and at least one finite score of each")
    return arrays


def _aggregate(samples: list[Any], statistic: Any, rng: np.random.Generator) -> Interval:
    """Each task's runs are resampled among themselves; scipy.stats.bootstrap does too, but refuses a single run."""
    low = high = None
    if any(len(values) > 1 for values in samples):
        draws = [values[rng.integers(0, len(values), size=(DRAWS, len(values)))] for values in samples]
        low, high = _percentiles(statistic(draws))
    return Interval(n=sum(map(len, samples)), mean=float(statistic(samples)), low=low, high=high)


class Point(NamedTuple):
    """A run: the KL where it ended (nats), its reward, whether it collapsed."""

    kl: float
    reward: float
    collapsed: bool = False


def reward_at_kl(points: Sequence[Point], kl: float) -> float | str:
    """The reward of one seed's runs at ``kl``, interpolated linearly between neighbours in KL, or why there is none.

    ``outside``: no extrapolation. ``gap``: an end of the line has collapsed. Points at one KL are averaged.

    >>> line = [Point(kl=0.0, reward=0.4), Point(kl=2.0, reward=0.8), Point(kl=9.0, reward=0.0, collapsed=True)]
    >>> round(reward_at_kl(line, 1.0), 9), reward_at_kl(line, 5.0), reward_at_kl(line, 10.0)
    (0.6, 'gap', 'outside')
    """
    finite = [point for point in points if math.isfinite(point.kl) and math.isfinite(point.reward)]
    below = max((point.kl for point in finite if point.kl <= kl), default=None)
    above = min((point.kl for point in finite if point.kl >= kl), default=None)
    if below is None or above is None:
        return "outside"
    ends = [[p.reward for p in finite if p.kl == end and not p.collapsed] for end in (below, above)]
    if not all(ends):
        return "gap"
    share = (kl - below) / (above - below) if above > below else 0.0
    return fmean(ends[0]) * (1 - share) + fmean(ends[1]) * share


DEFAULT_RULE = "eval/heldout/reward < 0.5 start"

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_LAST = r"(?:\blast\s+([1-9]\d*))?"
_CONDITION = re.compile(rf"\s*(\S+?)\s*(<=|>=|<|>)\s*({_NUMBER})\s*(\bstart)?\s*{_LAST}\s*")
_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


class Condition(NamedTuple):
    """A run collapsed where ``compare(value, bound)`` holds for each of the ``last`` last values of its ``metric``; the
    bound is a share of the metric's first value where ``of_start``."""

    metric: str
    compare: Callable[[Any, Any], Any]
    bound: float
    of_start: bool
    last: int = 1


def parse_rule(text: str) -> list[Condition]:
    """``METRIC < NUMBER [start] [last N]``, several with commas: any means collapse. Raises :class:`UserError`."""
    conditions = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise UserError(
                f"--collapse: cannot read {part.strip()!r}; allowed: METRIC < NUMBER, or METRIC < SHARE start, "
                "'last N' after either (the last N values all), joined by commas, "
                f"as in {DEFAULT_RULE!r} or 'kl/exact_reverse_sequence > 20 last 2'"
            )
        of_start, last = match[4] is not None, int(match[5] or 1)
        conditions.append(Condition(match[1], _COMPARE[match[2]], float(match[3]), of_start, last))
    return conditions
