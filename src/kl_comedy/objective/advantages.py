"""Advantages: from returns (and a value function) to the weight of each token's score.

``returns_BT[b, t]`` is the return that the score of token t earns: the verified reward, less the KL costs that enter
before the baseline. It may therefore differ along t, and it is defined beyond the end of a completion, where no cost is
left. Baselines are taken column by column, over the completions of the same prompt (``group_B``) or of the batch. With
no KL cost the columns are equal, and each function is the textbook one.

Facts an entry declares: ``group`` (it compares the completions of a prompt), ``batch`` (it compares those of the
batch), ``critic`` (it needs a value head). One that compares completions compares turns too: :func:`by_turn`.

Legend: ``B`` sequences, ``T`` completion tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from kl_comedy.errors import UserError
from kl_comedy.objective.groups import group_sums
from kl_comedy.registry import ADVANTAGES

EPSILON = 1e-6
"""Added to a standard deviation before dividing, as in TRL's and verl's group normalization."""


class Advantage(Protocol):
    """A function from returns to advantages."""

    def __call__(self, returns_BT: Tensor, mask_BT: Tensor, group_B: Tensor, /) -> Tensor:
        """Map returns ``[B, T]`` to advantages ``[B, T]``; rows of ``group_B`` share a prompt. Detached."""
        ...


def _group_mean(values_BT: Tensor, group_B: Tensor) -> Tensor:
    """For each row, the mean over its group, itself included ``[B, T]``."""
    sums_BT, size_B1 = group_sums(values_BT, group_B)
    return sums_BT / size_B1


@ADVANTAGES.register("none", source="REINFORCE without baseline, Williams 1992", group=False)
def none(returns_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """The return itself (the neutral element)."""
    return returns_BT


@ADVANTAGES.register("batch_mean", source="REINFORCE with a batch baseline, Williams 1992", group=False, batch=True)
def batch_mean(returns_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """``R - mean over the batch``. The mean contains the sample, which scales the expected gradient by ``1 - 1/B``."""
    # Over completions at each token: with costs to go, every token has a baseline of its own.
    return returns_BT - returns_BT.mean(0, keepdim=True)


@ADVANTAGES.register("rloo", source="Ahmadian et al. 2402.14740, Eq. 8", group=True)
def rloo(returns_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """``R_i - mean_{j != i} R_j`` over the group: leave-one-out, unbiased.

    >>> rloo(torch.tensor([[1.0], [0.0]]), torch.ones(2, 1), torch.tensor([0, 0])).flatten()
    tensor([ 1., -1.])
    """
    sums_BT, size_B1 = group_sums(returns_BT, group_B)
    if bool((size_B1 < 2).any()):
        raise UserError("algorithm.advantage: rloo needs groups of at least 2 completions (rollout.group_size)")
    # R_i - (sum_j R_j - R_i) / (G - 1)
    return returns_BT - (sums_BT - returns_BT) / (size_B1 - 1)


@ADVANTAGES.register("grpo", source="2402.03300 Sec. 4.1", group=True)
def grpo(returns_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """``(R_i - mean) / (std + eps)`` over the group, with the sample standard deviation."""
    # Two passes, since a sum of squares less the square of a sum cancels.
    centred_BT = returns_BT - _group_mean(returns_BT, group_B)
    squares_BT, size_B1 = group_sums(centred_BT.square(), group_B)
    if bool((size_B1 < 2).any()):
        raise UserError("algorithm.advantage: grpo needs groups of at least 2 completions (rollout.group_size)")
    # (R_i - mean) / (sqrt(sum_j (R_j - mean)^2 / (G - 1)) + eps)
    return centred_BT / ((squares_BT / (size_B1 - 1)).sqrt() + EPSILON)


@ADVANTAGES.register("dr_grpo", source="Liu et al. 2503.20783", group=True)
def dr_grpo(returns_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """``R_i - mean`` over the group, no standard deviation: ``(1 - 1/G)`` times RLOO."""
    return returns_BT - _group_mean(returns_BT, group_B)


def whiten(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """``(values - mean) / (std + eps)``, with mean and standard deviation over the tokens inside the mask."""
    inside = values_BT[mask_BT.bool()]
    # The standard deviation of the population (correction 0) exists for a single token too.
    return (values_BT - inside.mean()) / (inside.std(correction=0) + EPSILON)


@ADVANTAGES.register("reinforce_pp", source="REINFORCE++ 2501.03262", group=False, batch=True)
def reinforce_pp(returns_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """The return, normalized over all tokens of the batch (mean and standard deviation)."""
    return whiten(returns_BT, mask_BT)


@ADVANTAGES.register("reinforce_pp_baseline", source="REINFORCE++-baseline 2501.03262", group=True, batch=True)
def reinforce_pp_baseline(returns_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """The return less its group's mean, then normalized over all tokens of the batch."""
    return whiten(returns_BT - _group_mean(returns_BT, group_B), mask_BT)


def by_turn(advantage: Advantage, returns_BT: Tensor, mask_BT: Tensor, group_B: Tensor, turn_BT: Tensor) -> Tensor:
    """``advantage`` of turns in the place of completions: turn k with those of its group that have the number k too.

    ``turn_BT`` is the number of each token's turn. A turn that no other completion has reached has no baseline: its
    advantage is its return. Column by column within a turn; beyond its end a turn has the return of its last token.
    Returns ``[B, T]``, zero outside the mask.

    Which turn a token is in was decided before it, and what others return does not depend on it. So leave-one-out
    (:func:`rloo`) is unbiased. A mean that contains the turn itself scales its gradient by ``1 - 1/n``, for the n
    completions that have reached it: not by one number, so that the direction is another (:func:`dr_grpo`).

    >>> returns_BT = torch.tensor([[1.0, 1.0, 3.0], [0.0, 0.0, 0.0]])
    >>> turn_BT = torch.tensor([[0, 0, 1], [0, 0, 0]])
    >>> by_turn(rloo, returns_BT, torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 0]), turn_BT)
    tensor([[ 1.,  1.,  3.],
            [-1., -1., -1.]])
    """
    mask_BT = mask_BT.bool()
    # A row of its own for each turn that has a token: first by the number of completion and turn, then without gaps.
    turns = int(turn_BT.max()) + 1
    completion_B = torch.arange(len(returns_BT), device=returns_BT.device)
    _, row_M, size_R = torch.unique(
        (completion_B[:, None] * turns + turn_BT)[mask_BT], return_inverse=True, return_counts=True
    )
    first_R = size_R.cumsum(0) - size_R
    # The masked tokens are in the order of completions and tokens, and so are the rows.
    column_M = torch.arange(len(row_M), device=returns_BT.device) - first_R[row_M]
    columns = torch.arange(int(size_R.max()), device=returns_BT.device)
    inside_RS = columns < size_R[:, None]
    last_R = first_R + size_R - 1
    returns_RS = returns_BT[mask_BT][torch.minimum(first_R[:, None] + columns, last_R[:, None])]
    # Turns are compared where both prompt and number are the same.
    turn_group_R = (group_B[:, None] * turns + turn_BT)[mask_BT][first_R]
    _, group_R, group_sizes = torch.unique(turn_group_R, return_inverse=True, return_counts=True)
    is_compared_R = group_sizes[group_R] > 1
    advantage_RS = returns_RS.clone()
    if bool(is_compared_R.any()):
        advantage_RS[is_compared_R] = advantage(
            returns_RS[is_compared_R], inside_RS[is_compared_R], group_R[is_compared_R]
        )
    advantage_BT = torch.zeros_like(returns_BT)
    advantage_BT[mask_BT] = advantage_RS[row_M, column_M]
    return advantage_BT


def token_rewards(returns_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The reward of each token, ``[B, T]``, zero outside the mask: ``G_t - G_{t+1}``, and ``G_t`` at the last token.

    This undoes the sum in a cost to go, so that a KL cost is again a cost of its own token; that of an exact KL, which
    belongs to a prefix, is a cost of the prefix's last token. The next token is the next one inside the mask: a tool's
    reply stands between two tokens of the policy, and a reward before it counts once.

    >>> token_rewards(torch.tensor([[0.5, 0.7, 0.9]]), torch.tensor([[True, True, False]]))
    tensor([[-0.2000,  0.7000,  0.0000]])
    >>> token_rewards(torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[True, False, True]]))
    tensor([[0., 0., 1.]])
    """
    mask_BT = mask_BT.bool()
    next_BT = _next(returns_BT, _next_column(mask_BT))
    # Outside the mask a return may be anything.
    return torch.where(mask_BT, returns_BT - next_BT, 0.0)


def _next_column(mask_BT: Tensor) -> Tensor:
    """The column of the next token inside the mask, ``[B, T]``; ``T`` where none follows."""
    length = mask_BT.shape[1]
    column_T = torch.arange(length, device=mask_BT.device)
    # The smallest column inside the mask, of those at or after each one.
    column_BT = torch.where(mask_BT, column_T, length).flip(-1).cummin(-1).values.flip(-1)
    return pad(column_BT[:, 1:], (0, 1), value=length)


def _next(values_BT: Tensor, next_column_BT: Tensor) -> Tensor:
    """The value at the columns of :func:`_next_column`, ``[B, T]``; zero where there is none."""
    return pad(values_BT, (0, 1)).gather(-1, next_column_BT)


@ADVANTAGES.register("gae", source="Schulman et al. 1506.02438, Eq. 16", group=False, critic=True)
def gae(
    returns_BT: Tensor,
    mask_BT: Tensor,
    group_B: Tensor,
    *,
    values_BT: Tensor | None = None,
    last_value_B: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
    turn_BT: Tensor | None = None,
) -> Tensor:
    """``A_t = sum_l (gamma lam)^l delta_{t+l}`` with ``delta_t = r_t + gamma V_{t+1} - V_t``: credit for each token.

    ``values_BT[b, t]`` is the value of the prefix before token t, ``last_value_B`` the value after the last token (0
    where the completion has ended). Steps are tokens inside the mask: a tool's reply between two of them adds no factor
    of ``gamma`` or ``lam``. With ``turn_BT``, the number of each token's turn, steps are turns: the factors stand at
    the last token of a turn, and are 1 elsewhere. With ``gamma = lam = 1`` the advantage is the return to go less the
    value, hence unbiased whatever the values are; a smaller ``lam`` trades variance for their bias. Returns ``[B, T]``,
    zero outside the mask. Raises :class:`UserError` without values.
    """
    if values_BT is None:
        raise UserError("algorithm.advantage: gae needs the values of a value head, which only training has")
    mask_BT = mask_BT.bool()
    values_BT = torch.where(mask_BT, values_BT, 0.0).to(returns_BT.dtype)
    if last_value_B is None:
        last_value_B = values_BT.new_zeros(len(values_BT))
    last_value_B = last_value_B.to(values_BT.dtype)
    # V_{t+1}: at the last token of a completion, the value after it.
    next_column_BT = _next_column(mask_BT)
    is_last_BT = next_column_BT == mask_BT.shape[1]
    next_value_BT = torch.where(is_last_BT, last_value_B[:, None], _next(values_BT, next_column_BT))
    gamma_BT = torch.full_like(values_BT, gamma)
    lam_BT = torch.full_like(values_BT, lam)
    if turn_BT is not None:
        # After the last token there is a step as well: to the value of a completion that was cut.
        is_step_BT = is_last_BT | (_next(turn_BT, next_column_BT) != turn_BT)
        gamma_BT = torch.where(is_step_BT, gamma_BT, 1.0)
        lam_BT = torch.where(is_step_BT, lam_BT, 1.0)
    # delta_t = r_t + gamma V_{t+1} - V_t
    delta_BT = token_rewards(returns_BT, mask_BT) + gamma_BT * next_value_BT - values_BT
    delta_BT = torch.where(mask_BT, delta_BT, 0.0)
    # A_t = delta_t + gamma lam A_{t+1}, from the last token to the first.
    advantage_BT = torch.zeros_like(delta_BT)
    running_B = delta_BT.new_zeros(len(delta_BT))
    # A loop and not a running sum over powers of gamma lam, whose inverses overflow on long rows.
    for t in reversed(range(delta_BT.shape[1])):
        is_inside_B = mask_BT[:, t]
        decayed_B = gamma_BT[:, t] * lam_BT[:, t] * running_B
        running_B = torch.where(is_inside_B, delta_BT[:, t] + decayed_B, running_B)
        advantage_BT[:, t] = torch.where(is_inside_B, running_B, 0.0)
    return advantage_BT


def value_loss(value_BT: Tensor, old_value_BT: Tensor, target_BT: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """``(V - target)^2 / 2`` per token, and where the clip removed its gradient (bool); both ``[B, T]``.

    With ``clip`` (Schulman et al.'s PPO code) it is the larger of that loss and the same loss at ``V`` clamped to
    within ``clip`` of the old value: a value that has moved that far towards its target has no gradient.
    """
    loss_BT = 0.5 * (value_BT - target_BT).square()
    if clip is None:
        return loss_BT, torch.zeros_like(value_BT, dtype=torch.bool)
    moved_BT = value_BT - old_value_BT
    clipped_BT = old_value_BT + moved_BT.clamp(-clip, clip)
    clipped_loss_BT = 0.5 * (clipped_BT - target_BT).square()
    # The maximum is the clipped loss there, in which a value beyond the clip is constant.
    silenced_BT = (moved_BT.abs() > clip) & (clipped_loss_BT > loss_BT)
    return torch.maximum(loss_BT, clipped_loss_BT), silenced_BT.detach()
