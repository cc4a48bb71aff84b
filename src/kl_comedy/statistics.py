"""Statistics of runs: intervals, pass@k, paired differences, aggregates over tasks, frontiers, collapse.

Arrays, mappings and frozen records in, frozen records out. Functions that resample take a ``numpy.random.Generator``
(:func:`generator` makes one per command), so the same command on the same runs prints the same numbers.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean
from typing import TYPE_CHECKING, Any

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
        """Half of the distance between the bounds."""
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


def interval(
    values: Sequence[float], method: str = "t", level: float = LEVEL, rng: np.random.Generator | None = None
) -> Interval:
    """The mean of finite, independent values with its interval: ``t`` or ``bootstrap``. Raises :class:`UserError`."""
    if method == "t":
        return t_interval(values, level)
    if method == "bootstrap":
        return bootstrap_interval(values, generator() if rng is None else rng, level)
    raise bad_value("--interval", method, METHODS)


def t_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Student's interval ``mean ± t(n-1) s / sqrt(n)``, s with denominator n-1. Values must be finite.

    >>> student = t_interval([1.0, 2.0, 3.0])
    >>> round(student.low, 3), student.mean, round(student.high, 3)
    (-0.484, 2.0, 4.484)
    """
    n = len(values)
    if n < 2:
        return Interval(n=n, mean=fmean(values) if n else None, low=None, high=None)
    mean = fmean(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = _t_quantile(n - 1, level) * deviation / math.sqrt(n)
    return Interval(n=n, mean=mean, low=mean - half, high=mean + half)


def bootstrap_interval(
    values: Sequence[float], rng: np.random.Generator, level: float = LEVEL, draws: int = SEED_DRAWS
) -> Interval:
    """Percentile bootstrap of the mean. Assumes no distribution, but is too narrow for few values (n < 10 or so)."""
    return clustered_interval([[value] for value in values], "bootstrap", rng=rng, level=level, draws=draws)


def clustered_se(clusters: Sequence[Sequence[float]]) -> float | None:
    """Standard error of the mean of all values, clusters being the independent units; None for fewer than two.

    >>> clustered_se([[0.0, 0.0], [1.0, 1.0]]) == clustered_se([[0.0], [1.0]]) == 0.5
    True
    """
    values, groups = [value for cluster in clusters for value in cluster], len(clusters)
    if groups < 2:
        return None
    mean = fmean(values)
    totals = [math.fsum(value - mean for value in cluster) for cluster in clusters]
    return math.sqrt(groups / (groups - 1) * math.fsum(total**2 for total in totals)) / len(values)


def clustered_interval(
    clusters: Sequence[Sequence[float]],
    method: str = "auto",
    *,
    rng: np.random.Generator | None = None,
    level: float = LEVEL,
    draws: int = DRAWS,
) -> Interval:
    """The mean of all values with its interval; ``n`` counts clusters. Values must be finite.

    ``auto``: ``wilson`` where every value is 0 or 1, else ``t``.
    ``wilson``: Wilson's score interval at the effective sample size ``p (1-p) / se^2`` (Kish's design effect, Franco
    et al. 2019, doi 10.1093/jssam/smy019), at most the number of values. It stays inside [0, 1], and has a width where
    every value is the same (the effective size is then the number of clusters). Values must lie in [0, 1].
    ``t``: mean ± t se. ``bootstrap``: percentiles over resampled clusters, each taken whole. Raises
    :class:`UserError` for another method, or for values that Wilson's interval cannot have.
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
        half = _t_quantile(groups - 1, level) * se
        return Interval(n=groups, mean=mean, low=mean - half, high=mean + half)
    if method == "wilson":
        if min(values) < 0 or max(values) > 1:
            raise bad_value("--interval", "wilson", ["t", "bootstrap"], "some values lie outside [0, 1]")
        size = min(mean * (1 - mean) / se**2, float(len(values))) if se > 0 else float(groups)
        low, high = _wilson(mean, size, level)
    else:
        low, high = _bootstrap_means(clusters, generator() if rng is None else rng, level, draws)
    return Interval(n=groups, mean=mean, low=min(low, mean), high=max(high, mean))


def _t_quantile(freedom: int, level: float) -> float:
    from scipy.special import stdtrit  # the quantile of scipy.stats.t, without its slow import

    return float(stdtrit(freedom, 0.5 + level / 2))


def _wilson(share: float, size: float, level: float) -> tuple[float, float]:
    from scipy.special import ndtri

    z2 = float(ndtri(0.5 + level / 2)) ** 2
    middle = (share + z2 / (2 * size)) / (1 + z2 / size)
    half = math.sqrt(z2 * (share * (1 - share) / size + z2 / (4 * size**2))) / (1 + z2 / size)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _bootstrap_means(
    clusters: Sequence[Sequence[float]], rng: np.random.Generator, level: float, draws: int
) -> tuple[float, float]:
    import numpy as np

    totals = np.array([math.fsum(cluster) for cluster in clusters])
    sizes = np.array([len(cluster) for cluster in clusters], dtype=float)
    groups, means = len(clusters), []
    step = max(CHUNK // groups, 1)
    for start in range(0, draws, step):
        picked = rng.integers(0, groups, size=(min(step, draws - start), groups))
        means.append(totals[picked].sum(axis=1) / sizes[picked].sum(axis=1))
    return _percentiles(np.concatenate(means), level)


def _percentiles(draws: Any, level: float) -> tuple[float, float]:
    import numpy as np

    low, high = np.quantile(draws, [0.5 - level / 2, 0.5 + level / 2])
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Majority:
    """The vote over samples of one problem.

    ``correct``: the chance that the most frequent answer is right, ties broken by lot (a share, not always 0 or 1).
    ``tied``: several answers have the most votes. ``votes``: samples that have an answer; without any, not correct.
    """

    correct: float
    tied: bool
    votes: int


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> Majority:
    """Vote over canonical ``answers``; None abstains. A winning answer is as right as its samples were judged.

    >>> majority(["7", "7", "8"], [True, True, False])
    Majority(correct=1.0, tied=False, votes=3)
    >>> majority(["7", "8", None], [True, False, False])
    Majority(correct=0.5, tied=True, votes=2)
    """
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    judged = [right for answer, right in zip(answers, correct, strict=True) if answer in winners]
    return Majority(correct=fmean(judged) if judged else 0.0, tied=len(winners) > 1, votes=votes.total())


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> Majority:
    """maj@k: the mean over the ``n // k`` disjoint blocks of ``k`` samples, in order; ``tied`` where any block was.

    Samples are exchangeable, so this is unbiased for the vote of k of them. The last ``n % k`` samples are unused.
    """
    check_k(k, len(answers))
    votes = [
        majority(answers[start : start + k], correct[start : start + k]) for start in range(0, len(answers) - k + 1, k)
    ]
    return Majority(
        correct=fmean(vote.correct for vote in votes),
        tied=any(vote.tied for vote in votes),
        votes=sum(vote.votes for vote in votes),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """``difference`` is a - b over ``difference.n`` common keys. ``p`` is the paired t-test's, None for n < 2 and
    where all differences are equal. ``only_a`` and ``only_b`` count the keys that the other side lacks."""

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
    """``a - b``, matched by key (seed), never by order. Values that are not finite count as absent.

    Two runs with one seed share warm start, prompts and their order; what they share cancels in the difference.

    >>> paired = paired_difference({0: 1.0, 1: 2.0, 2: 9.0}, {1: 1.5, 0: 0.5})
    >>> paired.difference.mean, paired.difference.n, paired.only_a, paired.only_b
    (0.5, 2, 1, 0)
    """
    left, right = ({key: value for key, value in side.items() if math.isfinite(value)} for side in (a, b))
    differences = [left[key] - right[key] for key in left if key in right]
    p = None
    if len(set(differences)) > 1:
        from scipy.stats import ttest_1samp

        p = float(ttest_1samp(differences, 0.0).pvalue)
    n = len(differences)
    return Paired(difference=interval(differences, method, rng=rng), p=p, only_a=len(left) - n, only_b=len(right) - n)


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """An aggregate over ``tasks`` tasks and ``runs`` runs; the bounds are None where every task has a single run."""

    value: float
    low: float | None
    high: float | None
    runs: int
    tasks: int


def iqm(scores: Mapping[str, Sequence[float]], rng: np.random.Generator) -> Score:
    """Interquartile mean of all scores (``floor(n/4)`` are cut at each end) with its stratified bootstrap interval.

    ``scores``: task to its runs' scores, all on one scale. Agarwal et al. 2021, "Deep RL at the Edge of the
    Statistical Precipice" (arXiv 2108.13264). Raises :class:`UserError` without a finite score of each task.

    >>> import numpy as np
    >>> iqm({"a": [0.0, 1.0], "b": [2.0, 100.0]}, np.random.default_rng(0)).value
    1.5
    """

    def trimmed(samples: Sequence[Any]) -> Any:
        import numpy as np
        from scipy.stats import trim_mean

        return trim_mean(np.concatenate(samples, axis=-1), 0.25, axis=-1)

    return _aggregate(_arrays(scores), trimmed, rng, len(scores))


def probability_of_improvement(
    a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]], rng: np.random.Generator
) -> Score:
    """Mean over common tasks of P(A > B) + P(A = B) / 2 for a run of each (Agarwal et al. 2021).

    >>> import numpy as np
    >>> probability_of_improvement({"t": [1.0, 3.0]}, {"t": [2.0, 2.0]}, np.random.default_rng(0)).value
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
    return _aggregate(samples, wins, rng, len(tasks))


def _arrays(scores: Mapping[str, Sequence[float]]) -> list[Any]:
    import numpy as np

    arrays = [np.asarray(values, dtype=float) for values in scores.values()]
    if not arrays or any(not len(values) or not np.isfinite(values).all() for values in arrays):
        raise UserError("an aggregate needs at least one task, and at least one finite score of each")
    return arrays


def _aggregate(samples: list[Any], statistic: Any, rng: np.random.Generator, tasks: int) -> Score:
    """Each task's runs are resampled among themselves; scipy.stats.bootstrap does too, but refuses a single run."""
    low = high = None
    if any(len(values) > 1 for values in samples):
        draws = [values[rng.integers(0, len(values), size=(DRAWS, len(values)))] for values in samples]
        low, high = _percentiles(statistic(draws), LEVEL)
    return Score(value=float(statistic(samples)), low=low, high=high, runs=sum(map(len, samples)), tasks=tasks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A run: the KL where it ended (nats), its reward, whether it collapsed."""

    kl: float
    reward: float
    collapsed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyAtKL:
    """A family at KL ``kl``: ``reward`` over the seeds that reach it. ``outside`` seeds have no run on one side of it,
    ``gap`` seeds only collapsed runs there; ``collapsed`` counts all collapsed runs of the family."""

    kl: float
    reward: Interval
    outside: int
    gap: int
    collapsed: int


def reward_at_kl(points: Sequence[Point], kl: float) -> float | str:
    """The reward of one seed's runs at ``kl``, interpolated linearly between neighbours in KL, or why there is none.

    ``outside``: no extrapolation. ``gap``: a line from a healthy policy to a collapsed one says nothing about policies
    in between. Points at one KL are averaged; points that are not finite are ignored.

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


def family_at_kl(
    runs: Mapping[Hashable, Sequence[Point]], kl: float, *, method: str = "t", rng: np.random.Generator | None = None
) -> FamilyAtKL:
    """The family ``runs`` (seed to its points) at ``kl``."""
    rewards = [reward_at_kl(points, kl) for points in runs.values()]
    return FamilyAtKL(
        kl=kl,
        reward=interval([reward for reward in rewards if not isinstance(reward, str)], method, rng=rng),
        outside=rewards.count("outside"),
        gap=rewards.count("gap"),
        collapsed=sum(point.collapsed for points in runs.values() for point in points),
    )


def compare_at_kl(
    a: Mapping[Hashable, Sequence[Point]],
    b: Mapping[Hashable, Sequence[Point]],
    kl: float,
    *,
    method: str = "t",
    rng: np.random.Generator | None = None,
) -> Paired:
    """Reward of ``a`` minus that of ``b`` at the same KL, paired over the seeds in which both reach it."""
    left, right = (
        {seed: reward for seed, points in side.items() if not isinstance(reward := reward_at_kl(points, kl), str)}
        for side in (a, b)
    )
    return paired_difference(left, right, method=method, rng=rng)


DEFAULT_RULE = "eval/heldout/reward < 0.5 start"
"""Half of the run's first value is lost. Written as ``--collapse`` takes it."""

_CONDITION = re.compile(r"\s*(?P<metric>\S+)\s*(?P<sign><=|>=|<|>)\s*(?P<bound>\S+?)\s*(?P<start>\bstart)?\s*")
_SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_NOT_FINITE = re.compile(r"\b(nan|inf|non-?finite|not finite)\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """``metric sign bound``; the bound is a share of the metric's first value where ``of_start``."""

    metric: str
    sign: str
    bound: float
    of_start: bool

    def holds(self, last: Mapping[str, float], first: Mapping[str, float]) -> bool | None:
        """None where the metric, or the first value it is compared with, is missing."""
        value = last.get(self.metric)
        if value is None or not math.isfinite(value):
            return None if value is None else True
        start = first.get(self.metric, math.nan) if self.of_start else 1.0
        return _SIGNS[self.sign](value, self.bound * start) if math.isfinite(start) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class CollapseRule:
    """A run collapsed where any of ``conditions`` holds at its end. ``text`` is how it was written, for captions."""

    text: str
    conditions: tuple[Condition, ...]

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(condition.metric for condition in self.conditions))

    @property
    def starts(self) -> tuple[str, ...]:
        """Metrics whose first value is needed."""
        return tuple(dict.fromkeys(condition.metric for condition in self.conditions if condition.of_start))

    def collapsed(
        self, *, last: Mapping[str, float], first: Mapping[str, float], status: str = "FINISHED", reason: str = ""
    ) -> bool | None:
        """Whether a run with these values collapsed; None where it measured nothing that the rule names.

        A run that FAILED because something was not finite collapsed, and so did one whose last value is not finite.

        >>> rule = parse_rule("reward < 0.5 start, kl > 20")
        >>> rule.collapsed(last={"reward": 0.1, "kl": 3.0}, first={"reward": 0.4})
        True
        """
        if status == "FAILED" and _NOT_FINITE.search(reason):
            return True
        verdicts = {condition.holds(last, first) for condition in self.conditions}
        return True if True in verdicts else False if False in verdicts else None


def parse_rule(text: str) -> CollapseRule:
    """``METRIC < NUMBER [start]``, several with commas. Raises :class:`UserError` with an example."""
    conditions = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        try:
            bound = float(match["bound"]) if match else math.nan
        except ValueError:
            bound = math.nan
        if match is None or not math.isfinite(bound):
            raise UserError(
                f"--collapse: cannot read {part.strip()!r}; allowed: METRIC < NUMBER, or METRIC < SHARE start, "
                f"joined by commas, as in {DEFAULT_RULE!r} or 'kl/exact_reverse_sequence > 20'"
            )
        conditions.append(
            Condition(metric=match["metric"], sign=match["sign"], bound=bound, of_start=match["start"] is not None)
        )
    return CollapseRule(text=text.strip(), conditions=tuple(conditions))
