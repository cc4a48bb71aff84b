"""Generalized advantage estimation: from returns and a value function to advantages with credit per token.

Legend: ``B`` sequences, ``T`` completion tokens. ``values_BT[b, t]`` is the value of the prefix before token t,
``last_value_B`` that after the last token: 0 where the completion is over, a value where it is bootstrapped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kl_comedy.errors import UserError
from kl_comedy.registry import ADVANTAGES


def token_rewards(returns_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The reward of each token, ``[B, T]``, zero outside the mask: ``G_t - G_{t+1}``, and ``G`` at the last token.

    ``returns_BT`` is the reward less the KL cost to go, so a KL cost comes back as a cost of its own token (of the
    token that led to the prefix, for an exact KL), and the verified reward as the last token's.

    >>> token_rewards(torch.tensor([[0.5, 0.7, 0.9]]), torch.tensor([[True, True, False]]))
    tensor([[-0.2000,  0.7000,  0.0000]])
    """
    inside_BT = torch.where(mask_BT.bool(), returns_BT, torch.zeros_like(returns_BT))
    return inside_BT - torch.nn.functional.pad(inside_BT[:, 1:], (0, 1))


@ADVANTAGES.register("gae", source="Schulman et al. 1506.02438, Eq. 16", group=False, critic=True)
def gae(
    returns_BT: Tensor, mask_BT: Tensor, group_B: Tensor, *, values_BT: Tensor | None = None,
    last_value_B: Tensor | None = None, gamma: float = 1.0, lam: float = 0.95,
) -> Tensor:  # fmt: skip
    """``sum_l (gamma lam)^l delta_{t+l}`` with ``delta_t = r_t + gamma V_{t+1} - V_t``: a value head, credit per token.

    With ``gamma = lam = 1`` it is the return to go less the value, so unbiased whatever the values are; a smaller
    ``lam`` trades variance for the bias of the values. Options: ``algorithm.value``. ``[B, T]``, zero outside the mask.
    """
    if values_BT is None:
        raise UserError("algorithm.advantage: gae needs the values of a value head, which only training has")
    mask_BT = mask_BT.bool()
    values_BT = torch.where(mask_BT, values_BT, torch.zeros_like(values_BT)).to(returns_BT.dtype)
    after_B = values_BT.new_zeros(len(values_BT)) if last_value_B is None else last_value_B.to(values_BT.dtype)
    ends_BT = mask_BT & ~torch.nn.functional.pad(mask_BT[:, 1:], (0, 1))
    next_BT = torch.where(ends_BT, after_B[:, None], torch.nn.functional.pad(values_BT[:, 1:], (0, 1)))
    delta_BT = torch.where(mask_BT, token_rewards(returns_BT, mask_BT) + gamma * next_BT - values_BT, 0.0)
    advantage_BT = torch.zeros_like(delta_BT)
    running_B = delta_BT.new_zeros(len(delta_BT))
    for t in reversed(range(delta_BT.shape[1])):
        running_B = delta_BT[:, t] + gamma * lam * running_B
        advantage_BT[:, t] = running_B
    return advantage_BT


def value_loss(value_BT: Tensor, old_value_BT: Tensor, target_BT: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """``(V - target)^2 / 2`` per token, and where the clip silenced it (bool); both ``[B, T]``.

    With ``clip`` (Schulman et al.'s PPO code): the larger of it and the same at ``V`` held within ``clip`` of the value
    at the batch's first use, so that a value that has moved that far towards its target has no gradient.
    """
    free_BT = 0.5 * (value_BT - target_BT).square()
    if clip is None:
        return free_BT, torch.zeros_like(value_BT, dtype=torch.bool)
    held_BT = old_value_BT + (value_BT - old_value_BT).clamp(-clip, clip)
    held_loss_BT = 0.5 * (held_BT - target_BT).square()
    silenced_BT = ((value_BT - old_value_BT).abs() > clip) & (held_loss_BT > free_BT)
    return torch.maximum(free_BT, held_loss_BT), silenced_BT.detach()
