"""Direct preference optimization on verified pairs: a better and a worse completion of one prompt.

    loss = mean over prompts with a pair, of the mean over their pairs (i, j) with reward_i > reward_j, of
           -log sigmoid(beta (h_i - h_j)),   h = log pi(completion) - log ref(completion)

The gradient is ``- sum_b c_b grad log pi(completion b)`` with the coefficients ``c`` below. It is REINFORCE with the
advantages ``c_b``, so micro-batches add up to it even where they separate the completions of a pair.

Legend: ``B`` completions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Preferences:
    """The pairs of an update. Without a pair all fields are zero, and there is no gradient."""

    coefficient_B: Tensor
    """Weight of a completion's score: positive where it is preferred; the sum over a prompt is 0."""
    loss: float
    """In nats."""
    accuracy: float
    """Share of pairs, weighted as in the loss, whose better completion gained more over the reference."""
    margin: float
    """Mean of ``beta (h_i - h_j)`` under the same weights, in nats."""
    pairs: int
    prompts: int
    """Prompts with a pair."""


@torch.no_grad()
def preferences(
    log_ratio_B: Tensor, reward_B: Tensor, group_B: Tensor, judged_B: Tensor, *, beta: float
) -> Preferences:
    """The pairs of an update, in float64. Source: Rafailov et al. 2305.18290, Eq. 7.

    ``log_ratio_B`` is ``h`` in nats, ``group_B`` says which completions share a prompt, ``judged_B`` (bool) which have
    a verdict. Completions with equal rewards make no pair.
    """
    h_B = log_ratio_B.double()
    # Entry [i, j]: completion i is better than completion j.
    same_prompt_BB = group_B[:, None] == group_B[None]
    better_BB = reward_B[:, None] > reward_B[None]
    pair_BB = same_prompt_BB & better_BB & judged_B[:, None] & judged_B[None]

    # The weight of a pair: 1 / (prompts with a pair) / (pairs of its prompt).
    _, index_B = torch.unique(group_B, return_inverse=True)
    counts_G = torch.zeros(int(index_B.max()) + 1, dtype=torch.float64, device=h_B.device)
    counts_G.index_add_(0, index_B, pair_BB.sum(1).double())
    prompts = int((counts_G > 0).sum())
    weight_BB = pair_BB / (counts_G[index_B].clamp(min=1.0)[:, None] * max(prompts, 1))

    margin_BB = beta * (h_B[:, None] - h_B[None])
    # - log sigmoid(margin) = softplus(-margin), and its derivative by the margin is - sigmoid(-margin).
    loss_BB = torch.nn.functional.softplus(-margin_BB)
    # A pair raises the better completion (a sum over its row) as much as it lowers the worse one (over its column).
    pull_BB = weight_BB * beta * torch.sigmoid(-margin_BB)
    return Preferences(
        coefficient_B=pull_BB.sum(1) - pull_BB.sum(0),
        loss=float((weight_BB * loss_BB).sum()),
        accuracy=float((weight_BB * (margin_BB > 0)).sum()),
        margin=float((weight_BB * margin_BB).sum()),
        pairs=int(pair_BB.sum()),
        prompts=prompts,
    )
