"""What K disjoint blocks of completions say about expected gradients, from their inner products alone.

Legend: ``K`` blocks; ``gram_KK[j, k]`` the inner product of block j's gradient of one thing with block k's of another.
Blocks are independent, so products of *different* blocks estimate products of expectations without bias, also where
both gradients were taken on the same completions. Intervals are delete-one jackknife (Tukey 1958) with Student's t of
K - 1 degrees of freedom; for a squared norm near zero they are wide rather than narrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MINIMUM_BLOCKS = 3
"""Two blocks have one product of different blocks; leaving one out leaves none."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value and its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def mean_product(gram_KK: Tensor) -> Tensor:
    """Unbiased ``<E x, E y>``: the mean of the products of different blocks.

    >>> float(mean_product(torch.tensor([[9.0, 1.0], [3.0, 9.0]])))
    2.0
    """
    k = gram_KK.shape[0]
    return (gram_KK.sum() - gram_KK.diagonal().sum()) / (k * (k - 1))


def noise(gram_KK: Tensor) -> Tensor:
    """Unbiased trace of the covariance of one block's gradient, from its products with itself."""
    return gram_KK.diagonal().mean() - mean_product(gram_KK)


def estimate(statistic: Callable[..., Tensor], *grams_KK: Tensor) -> Estimate:
    """``statistic(*grams)`` with the interval of leaving out one block at a time. NaN where it is undefined."""
    from scipy.stats import t

    k = grams_KK[0].shape[0]
    if k < MINIMUM_BLOCKS:
        raise ValueError(f"an interval needs at least {MINIMUM_BLOCKS} blocks, got {k}")
    value = float(statistic(*grams_KK))
    left_out = []
    for n in range(k):
        rest = torch.tensor([m for m in range(k) if m != n])
        left_out.append(float(statistic(*(gram[rest][:, rest] for gram in grams_KK))))
    mean = sum(left_out) / k
    error = math.sqrt((k - 1) / k * sum((item - mean) ** 2 for item in left_out))
    width = float(t.ppf(0.975, k - 1)) * error
    return Estimate(value=value, low=value - width, high=value + width)


def delivered(with_reference_KK: Tensor, reference_KK: Tensor) -> Tensor:
    """``<E g, E r> / |E r|^2``: the share of the reference gradient that a term delivers; 1 is all, 0 nothing."""
    return mean_product(with_reference_KK) / mean_product(reference_KK)


def cosine(own_KK: Tensor, with_reference_KK: Tensor, reference_KK: Tensor) -> Tensor:
    """Cosine of the expected gradients; NaN where a squared norm is estimated at or below zero."""
    squares = mean_product(own_KK), mean_product(reference_KK)
    if min(float(square) for square in squares) <= 0:
        return torch.tensor(math.nan)
    return mean_product(with_reference_KK) / (squares[0] * squares[1]).sqrt()


def squared_bias(difference_KK: Tensor, reference_KK: Tensor) -> Tensor:
    """``|E(g - r)|^2 / |E r|^2``. Unbiased above the line, so it may come out below zero."""
    return mean_product(difference_KK) / mean_product(reference_KK)


def rooted(squared: Estimate) -> Estimate:
    """The square root of an estimate, each end on its own; below zero is zero."""
    return Estimate(**{name: math.sqrt(max(getattr(squared, name), 0.0)) for name in ("value", "low", "high")})


def difference_gram(own_KK: Tensor, with_reference_KK: Tensor, reference_KK: Tensor) -> Tensor:
    """Products of ``g_j - r_j`` with ``g_k - r_k``; ``with_reference_KK[j, k]`` is ``<g_j, r_k>``."""
    return own_KK - with_reference_KK - with_reference_KK.T + reference_KK


FLIPS = 2000
"""Sign flips of a test: p-values are resolved to 0.0005."""


def p_of_zero_mean(gram_KK: Tensor, generator: torch.Generator) -> float:
    """How often blocks of mean zero would give a ``|E x|^2`` as large as this, by flipping the signs of whole blocks.

    Exact for blocks whose distribution is symmetric when their mean is zero (Fisher's randomization test), which
    means over many completions nearly are. Sharper than the jackknife of a squared norm, which is for its size.
    """
    k = gram_KK.shape[0]
    signs_FK = torch.randint(0, 2, (FLIPS, k), generator=generator).to(gram_KK) * 2 - 1
    apart_KK = gram_KK - gram_KK.diagonal().diag()
    flipped_F = ((signs_FK @ apart_KK) * signs_FK).sum(-1)
    return float((1 + (flipped_F >= apart_KK.sum()).sum()) / (1 + FLIPS))
