"""A term's own baseline: the leave-one-out mean of its KL returns over the group, weighted as they are.

``E_mu[W_t s_t b] = 0`` for any ``b`` that does not see the completion itself, where ``W_t`` is the product
of ratios up to the token (one on-policy). So the baseline is weighted by ``W_t``, not by the plain score,
and leaves an unbiased term unbiased off-policy too; a baseline inside the advantage does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kl_comedy.kl.placements import TermParts


def own_baseline(parts: TermParts, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """``b_t = sum_j W_t^j F_t^j / sum_j W_t^j`` over the other completions of the group that reach t, ``[B, T]``.

    ``F`` is the KL return (nats) that weights the score at t. Where no other completion of the group
    reaches t there is nothing to compare with, and the baseline is 0. Detached.
    """
    mask_BT = mask_BT.bool()
    weighted_BT = torch.where(mask_BT, parts.weight_BT * parts.cost_BT, 0.0)
    weight_BT = torch.where(mask_BT, parts.baseline_weight_BT, 0.0)
    numerator_BT = _others(weighted_BT, group_B)
    denominator_BT = _others(weight_BT, group_B)
    has_others_BT = _others(mask_BT.to(weight_BT.dtype), group_B) > 0.5
    safe_BT = torch.where(denominator_BT > 0, denominator_BT, torch.ones_like(denominator_BT))
    found_BT = has_others_BT & (denominator_BT > 0) & mask_BT
    return torch.where(found_BT, numerator_BT / safe_BT, torch.zeros_like(safe_BT)).detach()


def _others(values_BT: Tensor, group_B: Tensor) -> Tensor:
    """The sum over the other rows of the group, summed afresh where subtraction would leave rounding."""
    _, index_B = torch.unique(group_B, return_inverse=True)
    groups = int(index_B.max()) + 1
    sums_GT = values_BT.new_zeros(groups, values_BT.shape[1]).index_add_(0, index_B, values_BT)
    return sums_GT[index_B] - values_BT
