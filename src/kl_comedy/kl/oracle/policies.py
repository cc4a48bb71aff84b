"""Enumerable autoregressive policies: a tree of prefixes, and logits linear in shared parameters.

Legend: ``N`` prefixes of the tree, ``V`` tokens, ``B`` completions (all of them), ``T`` longest
completion, ``D`` parameters. The end token is token 0 where the tree has one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Every completion over ``V`` tokens up to ``T`` tokens, as indices into its prefixes.

    ``prefix_BT`` is the prefix before each token, ``token_BT`` the token, ``mask_BT`` true on tokens of
    the completion (the end token included). A completion ends at the end token, where ``ends`` is set,
    or is truncated at ``T``.
    """

    vocabulary: int
    length: int
    ends: bool
    prefixes: int
    prefix_BT: Tensor
    token_BT: Tensor
    mask_BT: Tensor

    @classmethod
    def build(cls, *, vocabulary: int, length: int, ends: bool = True) -> Tree:
        """Enumerate the tree breadth first. ``V^T`` completions without an end token, fewer with one."""
        index: dict[tuple[int, ...], int] = {(): 0}
        finished: list[tuple[int, ...]] = []
        frontier: list[tuple[int, ...]] = [()]
        for depth in range(length):
            following: list[tuple[int, ...]] = []
            for prefix in frontier:
                for token in range(vocabulary):
                    grown = (*prefix, token)
                    if depth == length - 1 or (ends and token == 0):
                        finished.append(grown)
                    else:
                        index[grown] = len(index)
                        following.append(grown)
            frontier = following
        prefix_BT = torch.zeros(len(finished), length, dtype=torch.long)
        token_BT = torch.zeros_like(prefix_BT)
        mask_BT = torch.zeros_like(prefix_BT, dtype=torch.bool)
        for row, completion in enumerate(finished):
            for t, token in enumerate(completion):
                prefix_BT[row, t] = index[completion[:t]]
                token_BT[row, t] = token
                mask_BT[row, t] = True
        return cls(
            vocabulary=vocabulary,
            length=length,
            ends=ends,
            prefixes=len(index),
            prefix_BT=prefix_BT,
            token_BT=token_BT,
            mask_BT=mask_BT,
        )


def prefix_log_probs(logits_NV: Tensor) -> Tensor:
    """Next-token log-probs (nats) at every prefix, ``[N, V]``."""
    return logits_NV.log_softmax(-1)


def log_probs(tree: Tree, logp_NV: Tensor) -> Tensor:
    """Per-token log-probs (nats) of every completion, ``[B, T]``, zero outside the mask."""
    logp_BT = logp_NV[tree.prefix_BT, tree.token_BT]
    return torch.where(tree.mask_BT, logp_BT, torch.zeros_like(logp_BT))
