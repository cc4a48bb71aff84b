"""Advantages: from returns to what weights the score of each token.

``returns_BT[b, t]`` is the return that the score of token t earns: the verified reward, less the KL
costs that enter before the baseline (so it may differ along t, and is defined beyond the end of a
completion, where no cost is left). Baselines are taken column by column, over the completions of the
same prompt (``group_B``) or of the batch. With no KL cost the columns are equal, and each function is
the textbook one.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kl_comedy.errors import UserError
from kl_comedy.registry import ADVANTAGES

EPSILON = 1e-6
"""Added to a standard deviation before dividing, as in TRL's and verl's group normalization."""


class Advantage(Protocol):
    """A function from returns to advantages."""

    def __call__(self, returns_BT: Tensor, mask_BT: Tensor, group_B: Tensor, /) -> Tensor:
        """Map returns ``[B, T]`` to advantages ``[B, T]``; rows of ``group_B`` share a prompt. Detached."""
        ...


def _group_sums(values_BT: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
    """Per row: the sum over its group, and the group's size ``[B, 1]``."""
    _, index_B = torch.unique(group_B, return_inverse=True)
    groups = int(index_B.max()) + 1
    sums_GT = values_BT.new_zeros(groups, values_BT.shape[1]).index_add_(0, index_B, values_BT)
    size_G = torch.bincount(index_B, minlength=groups).to(values_BT.dtype)
    return sums_GT[index_B], size_G[index_B, None]


def _group_mean(values_BT: Tensor, group_B: Tensor) -> Tensor:
    sums_BT, size_B1 = _group_sums(values_BT, group_B)
    return sums_BT / size_B1


@ADVANTAGES.register("none", source="REINFORCE without baseline, Williams 1992", group=False)
def none(returns_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """The return itself (the neutral element)."""
    return returns_BT


@ADVANTAGES.register("batch_mean", source="REINFORCE with a batch baseline, Williams 1992", group=False, batch=True)
def batch_mean(returns_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """``R - mean over the batch``. The baseline contains the sample: shrinks the gradient by ``1 - 1/B``."""
    return returns_BT - returns_BT.mean(0, keepdim=True)


@ADVANTAGES.register("rloo", source="Ahmadian et al. 2402.14740, Eq. 8", group=True)
def rloo(returns_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """``R_i - mean_{j != i} R_j`` over the group: leave-one-out, unbiased.

    >>> rloo(torch.tensor([[1.0], [0.0]]), torch.ones(2, 1), torch.tensor([0, 0])).flatten()
    tensor([ 1., -1.])
    """
    sums_BT, size_B1 = _group_sums(returns_BT, group_B)
    if bool((size_B1 < 2).any()):
        raise UserError("algorithm.advantage: rloo needs groups of at least 2 completions (rollout.group_size)")
    return returns_BT - (sums_BT - returns_BT) / (size_B1 - 1)


@ADVANTAGES.register("grpo", source="2402.03300 Sec. 4.1", group=True)
def grpo(returns_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """``(R_i - mean) / (std + eps)`` over the group, with the sample standard deviation."""
    centred_BT = returns_BT - _group_mean(returns_BT, group_B)
    squares_BT, size_B1 = _group_sums(centred_BT.square(), group_B)
    if bool((size_B1 < 2).any()):
        raise UserError("algorithm.advantage: grpo needs groups of at least 2 completions (rollout.group_size)")
    return centred_BT / ((squares_BT / (size_B1 - 1)).sqrt() + EPSILON)


@ADVANTAGES.register("dr_grpo", source="Liu et al. 2503.20783", group=True)
def dr_grpo(returns_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """``R_i - mean`` over the group, no standard deviation: ``(1 - 1/G)`` times RLOO."""
    return returns_BT - _group_mean(returns_BT, group_B)


def whiten(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Zero mean and unit standard deviation over the tokens of the batch."""
    inside = values_BT[mask_BT.bool()]
    return (values_BT - inside.mean()) / (inside.std(correction=0) + EPSILON)


@ADVANTAGES.register("reinforce_pp", source="REINFORCE++ 2501.03262", group=False, batch=True)
def reinforce_pp(returns_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """The return, normalized over all tokens of the batch (mean and standard deviation)."""
    return whiten(returns_BT, mask_BT)


@ADVANTAGES.register("reinforce_pp_baseline", source="REINFORCE++-baseline 2501.03262", group=True, batch=True)
def reinforce_pp_baseline(returns_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """The return less its group's mean, then normalized over all tokens of the batch."""
    return whiten(returns_BT - _group_mean(returns_BT, group_B), mask_BT)
