"""Reward against KL: what a configuration earns at a given distance from the reference.

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
from typing import TYPE_CHECKING

from kl_comedy.statistics.intervals import Interval, interval
from kl_comedy.statistics.paired import Paired, paired_difference

if TYPE_CHECKING:
    import numpy as np


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
    a: Mapping[Hashable, Sequence[Point]], b: Mapping[Hashable, Sequence[Point]], kl: float, *, method: str = "t",
    rng: np.random.Generator | None = None,
) -> Paired:  # fmt: skip
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
