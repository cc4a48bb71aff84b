"""Key-value caches that hold a prompt once for its group, as layouts of our attention.

While sampling, a token attends to its prompt's keys (one copy per group, read by all of its rows in one matrix
product) and to the keys of its own completion (written in place). Nothing is concatenated or repeated from
token to token.

Legend: ``F`` prompts, ``P`` longest prompt, ``B`` rows being drawn, ``M`` most rows of one prompt, ``T`` tokens
drawn; ``K``, ``R``, ``D``, ``S`` as in :mod:`kl_comedy.models.attention`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kl_comedy.models.shared_prefix import additive, attend_rows, causal, for_heads, rows_of

FIRST_ROOM = 16
"""Tokens of a completion that are first made room for; the room doubles when it is full."""


class PromptCache:
    """The layout of the first pass, over prompts in a line; keeps their keys and values ``[F, K, P, D]`` by layer."""

    def __init__(self, lengths: Sequence[int], *, device: torch.device) -> None:
        starts = [sum(lengths[:n]) for n in range(len(lengths))]
        lines = [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        self._rows = rows_of(lines, device=device)
        self._mask_FQP: Tensor | None = None
        self.last_F = torch.tensor([line[-1] for line in lines], device=device)
        self.real_FP = self._rows.real_BT
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(self, layer: int, query_SKRD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scale: float) -> Tensor:
        """See :class:`kl_comedy.models.attention.Layout`."""
        if self._mask_FQP is None:
            self._mask_FQP = for_heads(additive(causal(self.real_FP), query_SKRD.dtype), query_SKRD.shape[2])
        key, value = self._rows.of(key_SKD), self._rows.of(value_SKD)
        self.keys[layer] = key.transpose(1, 2).contiguous()
        self.values[layer] = value.transpose(1, 2).contiguous()
        done = attend_rows(self._rows.of(query_SKRD), key, value, self._mask_FQP, scale)
        return done[self.real_FP]

    def keep(self, prompts_F: Tensor) -> None:
        """Forget all but the chosen prompts."""
        self.real_FP = self.real_FP[prompts_F]
        for kept in (self.keys, self.values):
            for layer, tensor in kept.items():
                kept[layer] = tensor[prompts_F]


class GroupCache:
    """The layout of one token per row: prompts shared, completions ``[B, K, T, D]`` by layer."""

    def __init__(self, prompts: PromptCache, family_B: Tensor) -> None:
        self._prompts = prompts
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self.length = 0
        """Completion tokens that are in the cache; the next pass writes behind them, then call :meth:`grew`."""
        self._place(family_B)

    def _place(self, family_B: Tensor) -> None:
        """Where each row stands among the rows of its prompt."""
        self._family_B = family_B
        counts: dict[int, int] = {}
        numbers = []
        for family in family_B.tolist():
            numbers.append(counts.get(family, 0))
            counts[family] = numbers[-1] + 1
        self._most = max(counts.values())
        self._slot_B = family_B * self._most + torch.tensor(numbers, device=family_B.device)
        self._mask_FP: Tensor | None = None

    def attend(self, layer: int, query_SKRD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scale: float) -> Tensor:
        """See :class:`kl_comedy.models.attention.Layout`; the line is one token of every row."""
        keys, values = self._write(layer, key_SKD, value_SKD)
        query = query_SKRD * scale
        prompt_key, prompt_value = self._prompts.keys[layer], self._prompts.values[layer]
        shared_FKQP = self._by_prompt(query) @ prompt_key.transpose(-1, -2) + self._mask(query.dtype)[:, None, None]
        shared = self._by_row(shared_FKQP)
        scores = torch.cat([shared, query @ keys.transpose(-1, -2)], -1)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
        split = shared.shape[-1]
        return weights[..., split:] @ values + self._by_row(self._by_prompt(weights[..., :split]) @ prompt_value)

    def _by_prompt(self, rows_BKRX: Tensor) -> Tensor:
        """Rows below those of the same prompt, ``[F, K, M * R, X]``; places without a row are zero."""
        _, k, r, x = rows_BKRX.shape
        families = len(self._prompts.real_FP)
        padded = rows_BKRX.new_zeros(families * self._most, k, r, x)
        padded.index_copy_(0, self._slot_B, rows_BKRX.contiguous())
        return padded.view(families, self._most, k, r, x).transpose(1, 2).reshape(families, k, self._most * r, x)

    def _by_row(self, shared_FKQX: Tensor) -> Tensor:
        """The inverse of :meth:`_by_prompt`."""
        families, k, rows, x = shared_FKQX.shape
        apart = shared_FKQX.view(families, k, self._most, rows // self._most, x).transpose(1, 2)
        return apart.reshape(families * self._most, k, rows // self._most, x).index_select(0, self._slot_B)

    def _mask(self, dtype: torch.dtype) -> Tensor:
        if self._mask_FP is None or self._mask_FP.dtype != dtype:
            self._mask_FP = additive(self._prompts.real_FP, dtype)
        return self._mask_FP

    def _write(self, layer: int, key_BKD: Tensor, value_BKD: Tensor) -> tuple[Tensor, Tensor]:
        """Add a token; keys and values of the completions so far, this token included."""
        found = []
        for kept, fresh in ((self._keys, key_BKD), (self._values, value_BKD)):
            room = kept[layer].shape[2] if layer in kept else 0
            if room <= self.length:
                wider = fresh.new_empty(len(fresh), fresh.shape[1], max(FIRST_ROOM, 2 * room), fresh.shape[2])
                if room:
                    wider[:, :, :room] = kept[layer]
                kept[layer] = wider
            kept[layer][:, :, self.length] = fresh
            found.append(kept[layer][:, :, : self.length + 1])
        return found[0], found[1]

    def grew(self) -> None:
        """Every layer has written its token."""
        self.length += 1

    def keep(self, rows_B: Tensor) -> None:
        """Forget all but the chosen rows, and prompts without a row."""
        for kept in (self._keys, self._values):
            for layer, tensor in kept.items():
                kept[layer] = tensor[rows_B]
        families, renumbered_B = self._family_B[rows_B].unique(return_inverse=True)
        if len(families) < len(self._prompts.real_FP):
            self._prompts.keep(families)
        self._place(renumbered_B)
