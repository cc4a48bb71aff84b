"""Differences between two configurations where they met the same seeds (and the same items).

Two runs with one seed share warm start, prompts and their order. What they share cancels in the difference, so its
interval is narrower than that of two independent means. What only one side has is counted, not used.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    a: Mapping[Hashable, float], b: Mapping[Hashable, float], *, method: str = "t",
    rng: np.random.Generator | None = None,
) -> Paired:  # fmt: skip
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
