"""Enumerable autoregressive policies: a tree of prefixes, walked in chunks so that memory stays bounded.

Legend: ``N`` prefixes of the tree, ``V`` tokens, ``B`` completions, ``T`` longest completion, ``K``
tokens that do not end a completion (``V - 1`` where token 0 ends it, else ``V``). Prefixes are numbered
by depth, then by their digits in base ``K``: the children of prefix ``i`` at depth ``d`` are
``first(d + 1) + K * (i - first(d)) + digit``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kl_comedy.errors import UserError, bad_value


@dataclass(frozen=True, kw_only=True)
class Completions:
    """Some completions of a tree, as indices: ``prefix_BT`` before each token, ``token_BT``, ``mask_BT``.

    The mask is true on tokens of the completion, the end token included; outside it both indices are 0.
    """

    prefix_BT: Tensor
    token_BT: Tensor
    mask_BT: Tensor
    truncated_B: Tensor


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Every completion over ``vocabulary`` tokens of at most ``length`` tokens.

    Where ``ends`` is set, token 0 ends a completion; one that has not ended at ``length`` is truncated.
    """

    vocabulary: int
    length: int
    ends: bool

    @classmethod
    def build(cls, *, vocabulary: int, length: int, ends: bool = True) -> Tree:
        """Check the sizes. Raises :class:`UserError` for a tree without choices."""
        if vocabulary < 2:
            raise bad_value("vocabulary", vocabulary, "at least 2 tokens")
        if length < 1:
            raise bad_value("length", length, "at least 1 token")
        return cls(vocabulary=vocabulary, length=length, ends=ends)

    @property
    def goes_on(self) -> int:
        """``K``: how many tokens lead to a further prefix."""
        return self.vocabulary - 1 if self.ends else self.vocabulary

    def width(self, depth: int) -> int:
        """How many prefixes have ``depth`` tokens."""
        return int(self.goes_on**depth)

    def first(self, depth: int) -> int:
        """The number of the first prefix of ``depth`` tokens."""
        return sum(self.width(d) for d in range(depth))

    @property
    def prefixes(self) -> int:
        """``N``."""
        return self.first(self.length)

    @property
    def completions(self) -> int:
        """``B``: the ended ones of each length, then the truncated ones (all of them, without an end token)."""
        ended = self.prefixes if self.ends else 0
        return ended + self.width(self.length)

    @cached_property
    def depth_N(self) -> Tensor:
        """The number of tokens of each prefix."""
        return torch.cat([torch.full((self.width(d),), d) for d in range(self.length)])

    def take(self, number_B: Tensor) -> Completions:
        """The completions with these numbers: an ended one has its last prefix's, truncated ones follow."""
        ended = self.prefixes if self.ends else 0
        truncated_B = number_B >= ended
        safe_B = torch.where(truncated_B, 0, number_B)
        depth_B = torch.where(truncated_B, self.length, self.depth_N[safe_B] if ended else self.length)
        firsts = torch.tensor([self.first(d) for d in range(self.length + 1)])
        digits_B = torch.where(truncated_B, number_B - ended, safe_B - firsts[depth_B.clamp(max=self.length)])
        return self._unfold(digits_B, depth_B, truncated_B, firsts)

    def _unfold(self, digits_B: Tensor, depth_B: Tensor, truncated_B: Tensor, firsts: Tensor) -> Completions:
        """Read digits most significant first; a completion that ends has token 0 after its digits."""
        prefix, token, mask = [], [], []
        for t in range(self.length):
            before_B = torch.div(digits_B, self.goes_on ** (depth_B - t).clamp(min=0), rounding_mode="floor")
            digit_B = torch.div(digits_B, self.goes_on ** (depth_B - t - 1).clamp(min=0), rounding_mode="floor")
            digit_B = digit_B % self.goes_on + (1 if self.ends else 0)
            inside_B, ends_B = depth_B >= t, depth_B == t
            prefix.append(torch.where(inside_B, firsts[t] + before_B, 0))
            token.append(torch.where(inside_B & ~ends_B, digit_B, 0))
            mask.append(inside_B)
        return Completions(
            prefix_BT=torch.stack(prefix, 1),
            token_BT=torch.stack(token, 1),
            mask_BT=torch.stack(mask, 1),
            truncated_B=truncated_B if self.ends else torch.zeros_like(truncated_B),
        )

    def chunks(self, size: int) -> Iterator[Completions]:
        """Every completion once, ``size`` at a time."""
        for start in range(0, self.completions, size):
            yield self.take(torch.arange(start, min(start + size, self.completions)))

    @cached_property
    def all(self) -> Completions:
        """Every completion at once, for small trees."""
        if self.completions > 2**17:
            raise UserError(f"{self.completions} completions at once are too many; walk them in chunks")
        return self.take(torch.arange(self.completions))

    @property
    def prefix_BT(self) -> Tensor:
        return self.all.prefix_BT

    @property
    def token_BT(self) -> Tensor:
        return self.all.token_BT

    @property
    def mask_BT(self) -> Tensor:
        return self.all.mask_BT

    def sample(self, logp_NV: Tensor, count: int, generator: torch.Generator) -> Completions:
        """``count`` completions drawn from next-token log-probs, independent."""
        prefix_B = torch.zeros(count, dtype=torch.long)
        alive_B = torch.ones(count, dtype=torch.bool)
        prefix, token, mask = [], [], []
        for t in range(self.length):
            uniform_B1 = torch.rand(count, 1, generator=generator, dtype=torch.float64)
            cumulative_BV = logp_NV[prefix_B].exp().cumsum(-1)
            token_B = (uniform_B1 > cumulative_BV).sum(-1).clamp(max=self.vocabulary - 1)
            prefix.append(torch.where(alive_B, prefix_B, 0))
            token.append(torch.where(alive_B, token_B, 0))
            mask.append(alive_B)
            ended_B = token_B == 0 if self.ends else torch.zeros_like(alive_B)
            alive_B = alive_B & ~ended_B
            if t + 1 < self.length:
                digit_B = token_B - 1 if self.ends else token_B
                child_B = self.first(t + 1) + self.goes_on * (prefix_B - self.first(t)) + digit_B
                prefix_B = torch.where(alive_B, child_B, 0)
        truncated_B = alive_B if self.ends else torch.zeros_like(alive_B)
        return Completions(
            prefix_BT=torch.stack(prefix, 1),
            token_BT=torch.stack(token, 1),
            mask_BT=torch.stack(mask, 1),
            truncated_B=truncated_B,
        )

    def reach(self, logp_NV: Tensor) -> Tensor:
        """The probability ``[N]`` of visiting each prefix under next-token log-probs; differentiable."""
        levels = [logp_NV.new_ones(1)]
        for depth in range(self.length - 1):
            here = slice(self.first(depth), self.first(depth + 1))
            going_NK = logp_NV[here, 1:] if self.ends else logp_NV[here]
            levels.append((levels[-1][:, None] * going_NK.exp()).reshape(-1))
        return torch.cat(levels)


def prefix_log_probs(logits_NV: Tensor) -> Tensor:
    """Next-token log-probs (nats) at every prefix, ``[N, V]``."""
    return logits_NV.log_softmax(-1)


def log_probs(tree: Tree | Completions, logp_NV: Tensor) -> Tensor:
    """Per-token log-probs (nats) of completions (all of a small tree's), ``[B, T]``, zero outside the mask."""
    rows = tree.all if isinstance(tree, Tree) else tree
    logp_BT = logp_NV[rows.prefix_BT, rows.token_BT]
    return torch.where(rows.mask_BT, logp_BT, torch.zeros_like(logp_BT))
