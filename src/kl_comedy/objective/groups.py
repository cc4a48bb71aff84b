"""Sums over groups of rows: the completions of a prompt, whose number ``group_B`` they share."""

from __future__ import annotations

import torch
from torch import Tensor


def group_sums(values_BT: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
    """For each row, the sum of ``values_BT`` over its group, ``[B, T]``, and the group's size, ``[B, 1]``.

    >>> group_sums(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([7, 7, 9]))[0].flatten()
    tensor([3., 3., 4.])
    """
    # Numbers of groups may be anything; those of unique() are 0, 1, ..., so that they index a table of sums.
    _, index_B = torch.unique(group_B, return_inverse=True)
    groups = int(index_B.max()) + 1
    sums_GT = values_BT.new_zeros(groups, values_BT.shape[1]).index_add_(0, index_B, values_BT)
    size_G = torch.bincount(index_B, minlength=groups).to(values_BT.dtype)
    return sums_GT[index_B], size_G[index_B, None]
