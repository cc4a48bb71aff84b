"""Statistics of gradients that are known only through the inner products of their blocks.

Legend: ``K`` disjoint blocks of completions. ``gram_KK[j, k]`` is the inner product of block j's gradient of one loss
with block k's gradient of another, in float64. Blocks are independent, so products of *different* blocks estimate
products of expectations without bias, also where both gradients were taken on the same completions: the noise that
such gradients share is on the diagonal only.

Intervals are delete-one jackknife (Tukey 1958) with Student's t of K - 1 degrees of freedom. For a squared norm near
zero they are wide rather than narrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kl_comedy.audit.report import Estimate

FLIPS = 2000
"""Sign flips of a randomization test: p-values are resolved to 0.0005."""

SMALLEST_SQUARED_NORM = 1e-30
"""Keeps the division by a norm finite where a gradient is zero; its square root is far below float32's rounding."""


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
    """``statistic(*grams)`` with its 95% jackknife interval, leaving out one block at a time.

    The interval is NaN where the statistic of any subset is undefined.
    """
    from scipy.stats import t

    k = grams_KK[0].shape[0]
    value = float(statistic(*grams_KK))
    left_out = []
    for block in range(k):
        others = torch.tensor([other for other in range(k) if other != block])
        left_out.append(float(statistic(*[gram_KK[others][:, others] for gram_KK in grams_KK])))
    mean = sum(left_out) / k
    squares = sum((item - mean) ** 2 for item in left_out)
    # The jackknife's variance is (K - 1) / K times the sum of squares, and not 1 / (K - 1): subsets of K - 1 of
    # the K blocks hardly differ from each other.
    half_width = float(t.ppf(0.975, k - 1)) * math.sqrt((k - 1) / k * squares)
    return Estimate(value=value, low=value - half_width, high=value + half_width)


def delivered(with_reference_KK: Tensor, reference_KK: Tensor) -> Tensor:
    """``<E g, E r> / |E r|^2``: the share of the reference gradient that a term delivers; 1 is all, 0 nothing."""
    return mean_product(with_reference_KK) / mean_product(reference_KK)


def cosine(term_KK: Tensor, with_reference_KK: Tensor, reference_KK: Tensor) -> Tensor:
    """Cosine of the expected gradients; NaN where a squared norm is estimated at or below zero."""
    term_square = mean_product(term_KK)
    reference_square = mean_product(reference_KK)
    # An unbiased estimate of a square may be negative; a cosine from it would be noise with any sign.
    if term_square <= 0 or reference_square <= 0:
        return torch.tensor(math.nan)
    return mean_product(with_reference_KK) / (term_square * reference_square).sqrt()


def squared_bias(difference_KK: Tensor, reference_KK: Tensor) -> Tensor:
    """``|E(g - r)|^2 / |E r|^2``. The numerator is unbiased, so it may come out below zero."""
    return mean_product(difference_KK) / mean_product(reference_KK)


def bias_of_square(square: float) -> float:
    """The bias, given an estimate of its square; 0 where that came out below zero. NaN stays NaN."""
    return math.sqrt(max(square, 0.0))


def difference_gram(term_KK: Tensor, with_reference_KK: Tensor, reference_KK: Tensor) -> Tensor:
    """Products of ``g_j - r_j`` with ``g_k - r_k``; ``with_reference_KK[j, k]`` is ``<g_j, r_k>``."""
    return term_KK - with_reference_KK - with_reference_KK.T + reference_KK


def kl_projection(
    update_KK: Tensor,
    policy_KK: Tensor,
    update_reference_KK: Tensor,
    policy_reference_KK: Tensor,
    reference_KK: Tensor,
    *,
    scale: float,
    bound: float,
) -> Tensor:
    """What the KL part adds to a clipped update along the reference gradient, over the clipped policy gradient's norm.

    The arguments are products of ``u = p + beta g``, of the policy gradient ``p``, and of the reference gradient ``r``:
    ``<u, u>``, ``<p, p>``, ``<u, r>``, ``<p, r>`` and ``<r, r>``; the blocks of ``u`` and ``p`` are in rows. With
    ``c(x) = x min(1, bound / |x|)`` the result is ``<E c(u) - E c(p), E r> / (|E r| rms |c(p)|)``.

    ``bound`` is the largest norm of an update's gradient. ``scale`` is the size of a block over that of an update: from
    a smaller block, the norm is that of an update with this block's noise. NaN where noise hides ``r``.
    """
    reference_square = mean_product(reference_KK)
    if reference_square <= 0:
        return torch.tensor(math.nan)

    update_K = _update_norms(update_KK, scale)
    policy_K = _update_norms(policy_KK, scale)
    # Clipping multiplies a gradient by one number, so a clipped gradient's products are its products times that number.
    update_clip_K1 = (bound / update_K[:, None]).clamp(max=1.0)
    policy_clip_K1 = (bound / policy_K[:, None]).clamp(max=1.0)
    added_KK = update_clip_K1 * update_reference_KK - policy_clip_K1 * policy_reference_KK
    clipped_policy_norm = policy_K.clamp(max=bound).square().mean().sqrt()
    return mean_product(added_KK) / (reference_square.sqrt() * clipped_policy_norm)


def _update_norms(gram_KK: Tensor, scale: float) -> Tensor:
    """The gradient norm ``[K]`` of an update with the noise of each block.

    A block's ``|x|^2`` is ``|E x|^2`` plus noise. An update averages ``1 / scale`` times as many completions, which
    leaves ``scale`` of the noise: ``|E x|^2 + scale (|x|^2 - |E x|^2)``.
    """
    mean = mean_product(gram_KK).clamp(min=0.0)
    square_K = mean * (1.0 - scale) + scale * gram_KK.diagonal()
    return square_K.clamp(min=SMALLEST_SQUARED_NORM).sqrt()


def p_of_zero_mean(gram_KK: Tensor, generator: torch.Generator) -> float:
    """How often blocks of mean zero would give a ``|E x|^2`` as large as this, by flipping the signs of whole blocks.

    Exact for blocks whose distribution is symmetric when their mean is zero (Fisher's randomization test); means over
    many completions nearly are. Sharper than the jackknife of a squared norm, which is for its size.
    """
    k = gram_KK.shape[0]
    signs_FK = torch.randint(0, 2, (FLIPS, k), generator=generator).to(gram_KK) * 2 - 1
    # A sign flip leaves a block's product with itself as it is: the diagonal cannot tell the flips apart.
    off_diagonal_KK = gram_KK - gram_KK.diagonal().diag()
    flipped_F = ((signs_FK @ off_diagonal_KK) * signs_FK).sum(-1)
    at_least_as_large = (flipped_F >= off_diagonal_KK.sum()).sum()
    # The observed signs count as one of the flips, so that a p-value is never zero (Phipson & Smyth 2010).
    return float((1 + at_least_as_large) / (1 + FLIPS))


def gram(blocks: list[Tensor]) -> Tensor:
    """The inner products ``[C, C, K, K]`` of ``K`` blocks of ``C`` gradients, each ``[C, w]``."""
    stacked = torch.stack(blocks).double().cpu()
    k, c, _ = stacked.shape
    flat = stacked.transpose(0, 1).reshape(c * k, -1)
    return (flat @ flat.T).reshape(c, k, c, k).permute(0, 2, 1, 3)
