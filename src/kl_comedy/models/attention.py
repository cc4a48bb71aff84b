"""Shared-prompt attention: a prompt is computed once for all of its completions, without padding.

The batch is packed into one line of tokens that runs through an otherwise unchanged transformers model:

    prompt a | completion 1 | completion 2 | ... | prompt b | completion 1 | ...

A completion attends to its prompt and to itself, at the positions it would have alone, so hidden states and
gradients are those of separate padded rows. The last token of a completion predicts nothing and is left out.
transformers looks its attention up in a registry by name. Ours is the library's ``sdpa``, unless the call carries a
``kl_layout``, which then computes the attention. Every other part of a decoder works token by token.

Shape legend: ``S`` tokens of the line, ``B`` completions, ``F`` distinct prompts, ``P`` and ``T`` longest prompt and
completion, ``K`` key-value heads, ``R`` query heads per key-value head, ``D`` head width, ``N`` completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from kl_comedy.models.introspection import decoder_body

ATTENTION_NAME = "kl_comedy"
"""Name of our attention in the registry of transformers."""

NEUTRAL_ARGUMENTS = {"sliding_window": None, "softcap": None, "s_aux": None, "position_bias": None, "is_causal": True}
"""Arguments of an attention call that change the result, and the values (beside None) that do not."""


class Layout(Protocol):
    """Computes attention over a line of tokens."""

    def attend(self, layer: int, query_SKRD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scale: float) -> Tensor:
        """The attention output ``[S, K, R, D]`` of one layer."""
        ...


def use_layout_attention(model: nn.Module) -> bool:
    """Select our attention where ``model`` supports it (full causal ``sdpa`` in every layer); whether it is selected.

    Calls without a ``kl_layout`` are computed as before.
    """
    body: Any = decoder_body(model)
    layer_types = set(getattr(body.config, "layer_types", None) or ["full_attention"])
    implementation = getattr(body.config, "_attn_implementation", None)
    if layer_types != {"full_attention"} or implementation not in ("sdpa", ATTENTION_NAME):
        return False
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    if implementation == "sdpa":
        body.set_attn_implementation(ATTENTION_NAME)
    return bool(body.config._attn_implementation == ATTENTION_NAME)


def forward_with_layout(model: nn.Module, layout: Layout, ids_S: Tensor, position_S: Tensor) -> Tensor:
    """Hidden states ``[S, H]`` of a line of tokens; :func:`use_layout_attention` must have returned True."""
    body: Any = decoder_body(model)
    # transformers passes a four-dimensional mask through unchanged instead of building one.
    unused_mask = torch.empty((1, 1, 1, 1), device=ids_S.device)
    out = body(
        input_ids=ids_S[None],
        position_ids=position_S[None],
        attention_mask=unused_mask,
        use_cache=False,
        kl_layout=layout,
    )
    hidden_SH: Tensor = out.last_hidden_state[0]
    return hidden_SH


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    kl_layout: Layout | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The calling convention of transformers: ``[1, heads, S, D]`` in, ``[1, S, heads, D]`` out."""
    if kl_layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **rest
        )
        return output
    unsupported = {k: rest[k] for k, neutral in NEUTRAL_ARGUMENTS.items() if rest.get(k) not in (neutral, None)}
    if dropout:
        unsupported["dropout"] = dropout
    if unsupported:
        raise ValueError(f"attention of {type(module).__name__} asks for {unsupported}")
    heads, size, width = query.shape[1:]
    kv_heads = key.shape[1]
    query_SKRD = query[0].view(kv_heads, heads // kv_heads, size, width).permute(2, 0, 1, 3)
    scale = width**-0.5 if scaling is None else scaling
    out_SKRD = kl_layout.attend(module.layer_idx, query_SKRD, key[0].transpose(0, 1), value[0].transpose(0, 1), scale)
    return out_SKRD.reshape(1, size, heads, width), None


@dataclass(frozen=True, kw_only=True)
class PaddedRows:
    """Right-padded rows of a line: ``index_BT`` is each token's place in the line, ``real_BT`` False on padding."""

    index_BT: Tensor
    real_BT: Tensor

    def gather(self, line_S: Tensor) -> Tensor:
        """``line_S [S, ...]`` as rows ``[B, T, ...]``."""
        return line_S[self.index_BT]


def padded_rows(spans: list[range], *, device: torch.device) -> PaddedRows:
    """Rows of a line, given the span of each row's tokens in it."""
    width = max(map(len, spans))
    index = torch.tensor([[*span, *[0] * (width - len(span))] for span in spans], dtype=torch.long, device=device)
    sizes = torch.tensor([len(span) for span in spans], device=device)
    index_BT = index.view(len(spans), width)
    return PaddedRows(index_BT=index_BT, real_BT=torch.arange(width, device=device) < sizes[:, None])


def causal_mask(real_BT: Tensor) -> Tensor:
    """``[B, T, T]``: the keys each query may attend to. Every query, padding too, sees the first token of its row.

    >>> causal_mask(torch.tensor([[True, True, False]])).int().tolist()
    [[[1, 0, 0], [1, 1, 0], [1, 1, 0]]]
    """
    index_T = torch.arange(real_BT.shape[1], device=real_BT.device)
    return (index_T[:, None] >= index_T) & real_BT[:, None, :]


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where ``mask`` is true, minus infinity elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def repeat_for_heads(mask_BTS: Tensor, heads: int) -> Tensor:
    """The mask ``[B, R T, S]`` of ``heads`` query heads stacked along the queries."""
    return mask_BTS.repeat(1, heads, 1)


def attend_rows(query_BTKRD: Tensor, key_BSKD: Tensor, value_BSKD: Tensor, mask_BQS: Tensor, scale: float) -> Tensor:
    """Attention output ``[B, T, K, R, D]``. Query heads that share keys are stacked, so that no key is repeated.

    ``mask_BQS [B, R T, S]`` (:func:`repeat_for_heads`) is added to the scores.
    """
    b, t, k, r, d = query_BTKRD.shape
    query = query_BTKRD.permute(0, 2, 3, 1, 4).reshape(b, k, r * t, d)
    key, value = key_BSKD.transpose(1, 2), value_BSKD.transpose(1, 2)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask_BQS[:, None], scale=scale)
    return out.view(b, k, r, t, d).permute(0, 3, 1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class SharedPromptLayout:
    """Prompts attend to themselves; completions to their prompt and themselves. The cost is that of separate rows.

    ``prompt_of_B`` prompt index of each completion. ``line_index_S`` position of each token of the line within the
    padded prompt rows followed by the padded completion rows.
    """

    prompts: PaddedRows
    completions: PaddedRows
    prompt_of_B: Tensor
    line_index_S: Tensor
    _masks: dict[tuple[torch.dtype, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, layer: int, query_SKRD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scale: float) -> Tensor:
        """See :class:`Layout`."""
        device_type = query_SKRD.device.type
        dtype = query_SKRD.dtype
        if torch.is_autocast_enabled(device_type):  # a mask of another dtype would be copied in every layer
            dtype = torch.get_autocast_dtype(device_type)
        prompt_mask, completion_mask = self._masks_for(dtype, query_SKRD.shape[2])
        prompt_key, prompt_value = self.prompts.gather(key_SKD), self.prompts.gather(value_SKD)
        rows = [attend_rows(self.prompts.gather(query_SKRD), prompt_key, prompt_value, prompt_mask, scale)]
        if self.completions.index_BT.shape[1]:
            key = torch.cat([prompt_key[self.prompt_of_B], self.completions.gather(key_SKD)], 1)
            value = torch.cat([prompt_value[self.prompt_of_B], self.completions.gather(value_SKD)], 1)
            rows.append(attend_rows(self.completions.gather(query_SKRD), key, value, completion_mask, scale))
        return torch.cat([part.flatten(0, 1) for part in rows])[self.line_index_S]

    def _masks_for(self, dtype: torch.dtype, heads: int) -> tuple[Tensor, Tensor]:
        """Additive masks of prompts ``[F, R P, P]`` and completions ``[B, R T, P + T]``, shared by all layers."""
        if (dtype, heads) not in self._masks:
            own_BTT = causal_mask(self.completions.real_BT)
            prompt_BTP = self.prompts.real_BT[self.prompt_of_B][:, None, :].expand(-1, own_BTT.shape[1], -1)
            prompt_mask, completion_mask = (
                repeat_for_heads(additive_mask(mask, dtype), heads)
                for mask in (causal_mask(self.prompts.real_BT), torch.cat([prompt_BTP, own_BTT], 2))
            )
            self._masks[dtype, heads] = (prompt_mask, completion_mask)
        return self._masks[dtype, heads]


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """A batch as one line. ``before_N`` is the index of the hidden state before each completion token."""

    ids_S: Tensor
    position_S: Tensor
    layout: SharedPromptLayout
    before_N: Tensor


def packed_hidden(model: nn.Module, batch: PackedBatch) -> Tensor:
    """Hidden state before each completion token, ``[N, H]``, rows of the batch in reading order."""
    return forward_with_layout(model, batch.layout, batch.ids_S, batch.position_S)[batch.before_N]


def group_by_prompt(prompt_ids_BP: Tensor, prompt_mask_BP: Tensor) -> list[list[int]]:
    """Row numbers grouped by equal prompts, in the order of first appearance."""
    rows_of_prompt: dict[tuple[int, ...], list[int]] = {}
    ids, mask = prompt_ids_BP.tolist(), prompt_mask_BP.tolist()
    for row, (tokens, real) in enumerate(zip(ids, mask, strict=True)):
        prompt = tuple(token for token, is_real in zip(tokens, real, strict=True) if is_real)
        rows_of_prompt.setdefault(prompt, []).append(row)
    return list(rows_of_prompt.values())


def pack_batch(prompt_ids_BP: Tensor, prompt_mask_BP: Tensor, ids_BT: Tensor, mask_BT: Tensor) -> PackedBatch:
    """Pack rows of left-padded prompts (at least one token) and right-padded completions into a line."""
    prompt_sizes, sizes = prompt_mask_BP.bool().sum(-1).tolist(), mask_BT.bool().sum(-1).tolist()
    prompt_ids, ids = prompt_ids_BP.tolist(), ids_BT.tolist()
    tokens: list[int] = []
    positions: list[int] = []
    prompt_spans: list[range] = []
    completion_spans = [range(0)] * len(sizes)
    prompt_of = [0] * len(sizes)
    for prompt, rows in enumerate(group_by_prompt(prompt_ids_BP, prompt_mask_BP)):
        length = prompt_sizes[rows[0]]
        prompt_spans.append(range(len(tokens), len(tokens) + length))
        tokens += prompt_ids[rows[0]][-length:]
        positions += range(length)
        for row in rows:
            inputs = max(sizes[row] - 1, 0)
            prompt_of[row] = prompt
            completion_spans[row] = range(len(tokens), len(tokens) + inputs)
            tokens += ids[row][:inputs]
            positions += range(length, length + inputs)
    before: list[int] = []
    for size, prompt, span in zip(sizes, prompt_of, completion_spans, strict=True):
        before += [prompt_spans[prompt][-1], *span][:size]
    device = ids_BT.device
    prompts, completions = (padded_rows(spans, device=device) for spans in (prompt_spans, completion_spans))
    index = torch.cat([prompts.index_BT[prompts.real_BT], completions.index_BT[completions.real_BT]])
    real = torch.cat([prompts.real_BT.flatten(), completions.real_BT.flatten()])
    line_index_S = torch.empty(len(tokens), dtype=torch.long, device=device)
    line_index_S[index] = real.nonzero()[:, 0]
    return PackedBatch(
        ids_S=torch.tensor(tokens, dtype=torch.long, device=device),
        position_S=torch.tensor(positions, dtype=torch.long, device=device),
        layout=SharedPromptLayout(
            prompts=prompts,
            completions=completions,
            prompt_of_B=torch.tensor(prompt_of, device=device),
            line_index_S=line_index_S,
        ),
        before_N=torch.tensor(before, dtype=torch.long, device=device),
    )
