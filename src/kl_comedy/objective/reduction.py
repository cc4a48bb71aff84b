"""Returns with KL costs, and reductions: the weight of each sequence in the loss, with explicit denominators.

A loss over any set of sequences is ``sum_b weight_B[b] * sum_t mask_BT[b, t] * loss_BT[b, t]``. The weights are
computed once for the whole batch of an update, so the losses of its micro-batches add up to the loss of the batch.

Legend: ``B`` sequences, ``T`` completion tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kl_comedy.cuda import running_sum
from kl_comedy.errors import bad_value


def returns_with_costs(
    reward_B: Tensor, cost_BT: Tensor | None, length: int, *, paid_BT: Tensor | None = None
) -> Tensor:
    """``R - cost`` for each token, ``[B, T]``: ``cost_BT`` is beta times the credited KL cost in nats.

    Beyond the end of a completion the cost is what the credit gives there: zero for a cost to go, the total for a cost
    of the whole completion. ``paid_BT``: what of the reward was paid at a token, and no later token has earned.

    >>> returns_with_costs(torch.tensor([3.0]), None, 3, paid_BT=torch.tensor([[0.0, 1.0, 0.0]]))
    tensor([[3., 3., 2.]])
    """
    # One reward for the whole completion, whichever token it is credited to.
    returns_BT = reward_B[:, None].expand(-1, length)
    if paid_BT is not None:
        returns_BT = returns_BT - (running_sum(paid_BT) - paid_BT)
    if cost_BT is None:
        return returns_BT
    return returns_BT - cost_BT


REDUCTIONS = ("token_mean", "sequence_mean_token_mean", "sequence_sum")


def sequence_weights(reduction: str, mask_BT: Tensor, *, constant: float = 1.0, keep_B: Tensor | None = None) -> Tensor:
    """The weight of each sequence, ``[B]``, in float32.

    - ``token_mean``: ``1 / (tokens in the batch)``; long completions count more.
    - ``sequence_mean_token_mean``: ``1 / (sequences x own tokens)``; all count the same (GRPO, 2402.03300).
    - ``sequence_sum``: ``1 / (sequences x constant)``; the constant is 1 for the sequence-level objective, the
      generation budget for Dr. GRPO (2503.20783).

    Sequences where ``keep_B`` (bool) is False have weight zero and do not count in the denominator.
    Raises :class:`UserError` for another reduction.

    >>> sequence_weights("token_mean", torch.tensor([[True, True], [True, False]]))
    tensor([0.3333, 0.3333])
    """
    if reduction not in REDUCTIONS:
        raise bad_value("algorithm.reduction", reduction, REDUCTIONS)
    tokens_B = mask_BT.sum(-1).to(torch.float64)
    counts_B = torch.ones_like(tokens_B)
    if keep_B is not None:
        # Out of the denominator too, or dropping completions would shrink the step.
        counts_B = keep_B.to(torch.float64)
    # Denominators are at least 1, so that a batch without tokens has weights of 0 or more, and not NaN.
    if reduction == "token_mean":
        weight_B = counts_B / (counts_B * tokens_B).sum().clamp(min=1.0)
    elif reduction == "sequence_mean_token_mean":
        weight_B = counts_B / tokens_B.clamp(min=1.0) / counts_B.sum().clamp(min=1.0)
    else:
        weight_B = counts_B / (counts_B.sum().clamp(min=1.0) * constant)
    return weight_B.to(torch.float32)
