"""Shared-prompt attention: a prompt is computed once for all of its completions, without padding.

    prompt a | completion 1 | completion 2 | ... | prompt b | completion 1 | ...

The batch is one line of tokens through an otherwise unchanged transformers model. Its attention (``sdpa``) is replaced
in the library's registry for calls that carry a ``kl_layout``. A completion attends to its prompt and to itself, at the
positions that it would have alone, so hidden states and gradients are those of separate rows. Its last token is left
out, because no token of the batch follows it. :class:`PackedBatch` attends in padded rows with an additive mask,
:class:`VariableLengths` without either.

Shape legend: ``S`` tokens of the line, ``B`` completions, ``F`` distinct prompts, ``P`` and ``T`` longest prompt and
completion, ``K`` key-value heads, ``R`` query heads per key-value head, ``D`` head width, ``N`` completion tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from kl_comedy.models.introspection import decoder_body, uses_varlen

ATTENTION_NAME = "kl_comedy"
"""Name of our attention in the registry of transformers."""

NEUTRAL_ARGUMENTS: Mapping[str, Any] = {
    "is_causal": True,
    "dropout": 0.0,
    "sliding_window": None,
    "softcap": None,
    "s_aux": None,
    "position_bias": None,
}
"""Arguments of an attention call that change the result, and the values (beside None) that do not."""


class Layout(Protocol):
    """Computes attention over a line of tokens."""

    def attend(self, layer: int, query_SKRD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scale: float) -> Tensor:
        """The attention output ``[S, K, R, D]`` of one layer."""
        ...


def use_layout_attention(model: nn.Module) -> bool:
    """Select our attention where ``model`` supports it (full causal ``sdpa`` in every layer).

    Returns whether it is selected. Calls without a ``kl_layout`` are computed as before.
    """
    body: Any = decoder_body(model)
    has_sdpa = body.config._attn_implementation in ("sdpa", ATTENTION_NAME)
    if not has_sdpa or not attends_to_all(body.config):
        return False
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    # Once per model: a copy of an adopted policy has our name in its config already.
    if body.config._attn_implementation == "sdpa":
        body.set_attn_implementation(ATTENTION_NAME)
    return bool(body.config._attn_implementation == ATTENTION_NAME)


def attends_to_all(config: Any) -> bool:
    """Whether every layer attends to all tokens before it.

    Configs with ``layer_types`` say so for each layer, whatever their ``sliding_window``, which full layers do not
    read. Configs without it (Mistral, Phi3) give all layers the window, if there is one.
    """
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return set(layer_types) == {"full_attention"}
    return getattr(config, "sliding_window", None) is None


def forward_with_layout(model: nn.Module, layout: Layout, ids_S: Tensor, position_S: Tensor) -> Tensor:
    """Hidden states ``[S, H]`` of a line of tokens; :func:`use_layout_attention` must have returned True."""
    body: Any = decoder_body(model)
    # transformers passes a four-dimensional mask through unchanged, where it would otherwise build one [S, S].
    mask = torch.empty((1, 1, 1, 1), device=ids_S.device)
    output = body(
        input_ids=ids_S[None],
        position_ids=position_S[None],
        attention_mask=mask,
        use_cache=False,
        kl_layout=layout,
    )
    hidden_SH: Tensor = output.last_hidden_state[0]
    return hidden_SH


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Attention in the calling convention of transformers: ``[1, heads, S, D]`` in, ``[1, S, heads, D]`` out.

    Raises :class:`ValueError` for an argument that changes the result in a way that no layout computes.
    """
    # Popped, because sdpa's own function does not know it.
    layout: Layout | None = arguments.pop("kl_layout", None)
    if layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
        return output
    unsupported = {}
    for name, neutral in NEUTRAL_ARGUMENTS.items():
        if arguments.get(name) not in (neutral, None):
            unsupported[name] = arguments[name]
    if unsupported:
        remedy = "model.attention=eager computes it, without shared prompts"
        raise ValueError(f"attention of {type(module).__name__} asks for {unsupported}; {remedy}")
    heads, size, width = query.shape[1:]
    # Consecutive query heads share a key-value head.
    query_SKRD = query[0].view(key.shape[1], -1, size, width).permute(2, 0, 1, 3)
    key_SKD = key[0].transpose(0, 1)
    value_SKD = value[0].transpose(0, 1)
    scale = arguments.get("scaling")
    if scale is None:
        scale = width**-0.5
    out_SKRD = layout.attend(module.layer_idx, query_SKRD, key_SKD, value_SKD, scale)
    return out_SKRD.reshape(1, size, heads, width), None


@dataclass(frozen=True)
class PaddedRows:
    """Right-padded rows of a line."""

    index_BT: Tensor
    """The place of each token in the line."""
    real_BT: Tensor
    """False on padding."""

    def gather(self, line_S: Tensor) -> Tensor:
        """``line_S [S, ...]`` as rows ``[B, T, ...]``."""
        return line_S[self.index_BT]


def padded_rows(spans: list[range], *, device: torch.device) -> PaddedRows:
    """Rows of a line, given the span of each row's tokens in it.

    The index of padding is that of the tokens that follow in the line: a GPU adds the gradients of equal indices one
    after the other, so that one index for all padding would be slow.
    """
    starts_B1 = torch.tensor([[span.start] for span in spans], device=device)
    sizes_B1 = torch.tensor([[len(span)] for span in spans], device=device)
    longest = max(len(span) for span in spans)
    place_T = torch.arange(longest, device=device)
    # At least 1, as a modulus.
    line_length = max(1, *(span.stop for span in spans))
    return PaddedRows(index_BT=(starts_B1 + place_T) % line_length, real_BT=place_T < sizes_B1)


def causal_mask(real_BT: Tensor) -> Tensor:
    """``[B, T, T]``: the keys each query may attend to. Every query, padding included, sees the first token of its row.

    >>> causal_mask(torch.tensor([[True, True, False]])).int().tolist()
    [[[1, 0, 0], [1, 1, 0], [1, 1, 0]]]
    """
    # A query without any key would have a softmax of nothing, which is NaN.
    index_T = torch.arange(real_BT.shape[1], device=real_BT.device)
    return (index_T[:, None] >= index_T) & real_BT[:, None, :]


def additive_mask(mask_BTS: Tensor, dtype: torch.dtype, heads: int = 1) -> Tensor:
    """0 where the mask is true, else minus infinity; ``[B, R T, S]`` for ``R`` heads stacked along the queries."""
    additive_BTS = torch.zeros(mask_BTS.shape, dtype=dtype, device=mask_BTS.device)
    additive_BTS.masked_fill_(~mask_BTS, float("-inf"))
    if heads == 1:
        return additive_BTS
    return additive_BTS.repeat(1, heads, 1)


def attend_rows(query_BTKRD: Tensor, key_BSKD: Tensor, value_BSKD: Tensor, mask_BQS: Tensor, scale: float) -> Tensor:
    """Attention output ``[B, T, K, R, D]``. Query heads that share keys are stacked, so that no key is repeated.

    ``mask_BQS [B, R T, S]`` (:func:`additive_mask`) is added to the scores.
    """
    b, t, k, r, d = query_BTKRD.shape
    # R before T, as additive_mask repeats the mask: all queries of one head, then of the next.
    query_BKQD = query_BTKRD.permute(0, 2, 3, 1, 4).reshape(b, k, r * t, d)
    key_BKSD = key_BSKD.transpose(1, 2)
    value_BKSD = value_BSKD.transpose(1, 2)
    out_BKQD = scaled_dot_product_attention(query_BKQD, key_BKSD, value_BKSD, attn_mask=mask_BQS[:, None], scale=scale)
    return out_BKQD.view(b, k, r, t, d).permute(0, 3, 1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """A batch as one line, and its layout: prompts attend to themselves, completions to their prompt and themselves."""

    ids_S: Tensor
    position_S: Tensor
    before_N: Tensor
    """Index in the line of the hidden state before each completion token."""
    prompts: PaddedRows
    completions: PaddedRows
    prompt_of_B: Tensor
    """Number of each completion's prompt, in ``prompts``."""
    place_S: Tensor
    """Place of each token of the line in the padded prompt rows followed by the padded completion rows, flattened."""
    _masks: dict[tuple[torch.dtype, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, layer: int, query_SKRD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scale: float) -> Tensor:
        """See :class:`Layout`. The cost is that of separate rows."""
        dtype = query_SKRD.dtype
        device_type = query_SKRD.device.type
        if torch.is_autocast_enabled(device_type):  # a mask of another dtype would be copied in every layer
            dtype = torch.get_autocast_dtype(device_type)
        prompt_mask, completion_mask = self._masks_for(dtype, query_SKRD.shape[2])

        prompt_key = self.prompts.gather(key_SKD)
        prompt_value = self.prompts.gather(value_SKD)
        parts = [attend_rows(self.prompts.gather(query_SKRD), prompt_key, prompt_value, prompt_mask, scale)]
        # Completions of one token have none in the line.
        if self.completions.index_BT.shape[1] > 0:
            key = torch.cat([prompt_key[self.prompt_of_B], self.completions.gather(key_SKD)], 1)
            value = torch.cat([prompt_value[self.prompt_of_B], self.completions.gather(value_SKD)], 1)
            parts.append(attend_rows(self.completions.gather(query_SKRD), key, value, completion_mask, scale))
        return torch.cat([part.flatten(0, 1) for part in parts])[self.place_S]

    def _masks_for(self, dtype: torch.dtype, heads: int) -> tuple[Tensor, Tensor]:
        """Additive masks of prompts ``[F, R P, P]`` and completions ``[B, R T, P + T]``, shared by all layers."""
        if (dtype, heads) not in self._masks:
            prompt_FPP = causal_mask(self.prompts.real_BT)
            to_itself_BTT = causal_mask(self.completions.real_BT)
            to_prompt_BTP = self.prompts.real_BT[self.prompt_of_B][:, None, :].expand(-1, to_itself_BTT.shape[1], -1)
            completion_BTS = torch.cat([to_prompt_BTP, to_itself_BTT], 2)
            self._masks[dtype, heads] = (
                additive_mask(prompt_FPP, dtype, heads),
                additive_mask(completion_BTS, dtype, heads),
            )
        return self._masks[dtype, heads]


class VariableLengths:
    """A :class:`PackedBatch` as sequences of different lengths, for torch's flash kernel on a GPU (``varlen``).

    A prompt is a sequence; so is a completion, whose keys are those of its prompt and its own. Each query is computed
    once, nothing is padded, and the kernel skips what causality hides: it aligns the last query with the last key.

    Legend: ``C`` completions with a token in the line, ``L`` longest prompt plus longest completion.
    """

    def __init__(self, batch: PackedBatch) -> None:
        prompts = batch.prompts
        completions = batch.completions
        # The last token of a completion is predicted and never an input, so that a completion of one token has no
        # query, and would be a sequence of length 0.
        nonempty_C = completions.real_BT.any(1)
        prompt_of_C = batch.prompt_of_B[nonempty_C]
        index_CT = completions.index_BT[nonempty_C]
        real_CT = completions.real_BT[nonempty_C]
        key_index_CL = torch.cat([prompts.index_BT[prompt_of_C], index_CT], 1)
        key_real_CL = torch.cat([prompts.real_BT[prompt_of_C], real_CT], 1)

        # The sequences one after the other: first the prompts, then the completions.
        prompt_index = prompts.index_BT[prompts.real_BT]
        self._queries = torch.cat([prompt_index, index_CT[real_CT]])
        self._keys = torch.cat([prompt_index, key_index_CL[key_real_CL]])
        # Each token of the line is one query; sorting them by their place restores the line.
        self._place_S = self._queries.argsort()
        prompt_sizes = prompts.real_BT.sum(1)
        self._query_ends, self._most_queries = _ends(torch.cat([prompt_sizes, real_CT.sum(1)]))
        self._key_ends, self._most_keys = _ends(torch.cat([prompt_sizes, key_real_CL.sum(1)]))

    def attend(self, layer: int, query_SKRD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scale: float) -> Tensor:
        """See :class:`Layout`. The kernel takes 16 bits: those of autocast, else of the model, else bfloat16."""
        from torch.nn.attention import varlen

        dtype = value_SKD.dtype
        device_type = value_SKD.device.type
        if torch.is_autocast_enabled(device_type):  # autocast does not know this kernel, and would not cast for it
            dtype = torch.get_autocast_dtype(device_type)
        elif dtype == torch.float32:
            dtype = torch.bfloat16
        options, takes_scale, takes_groups = _varlen_options(varlen.varlen_attn)
        if takes_scale:
            options = {**options, "scale": scale}
        else:
            # The kernel multiplies by D ** -0.5; what it should have multiplied by goes into the query.
            query_SKRD = query_SKRD * (scale * query_SKRD.shape[-1] ** 0.5)
        key = key_SKD
        value = value_SKD
        if not takes_groups:
            # One key-value head for each query head.
            key = key_SKD[:, :, None].expand(query_SKRD.shape).flatten(1, 2)
            value = value_SKD[:, :, None].expand(query_SKRD.shape).flatten(1, 2)
        query = query_SKRD.flatten(1, 2)
        out: Any = varlen.varlen_attn(
            query.to(dtype)[self._queries],
            key.to(dtype)[self._keys],
            value.to(dtype)[self._keys],
            self._query_ends,
            self._key_ends,
            self._most_queries,
            self._most_keys,
            **options,
        )
        out_SKRD: Tensor = out[self._place_S].view(query_SKRD.shape)
        return out_SKRD.to(value_SKD.dtype)


@functools.cache
def _varlen_options(kernel: Callable[..., Any]) -> tuple[Mapping[str, Any], bool, bool]:
    """The options that make torch's kernel causal; whether it takes a scale, and fewer key-value than query heads.

    Torch 2.10 has ``is_causal``, 2.11 ``window_size`` and ``scale``, 2.13 ``enable_gqa``.
    """
    known = inspect.signature(kernel).parameters
    takes_groups = "enable_gqa" in known
    options: dict[str, Any] = {}
    if "window_size" in known:
        options["window_size"] = (-1, 0)  # all keys before a query, none after it
    else:
        options["is_causal"] = True
    if takes_groups:
        options["enable_gqa"] = True
    return options, "scale" in known, takes_groups


def _ends(sizes: Tensor) -> tuple[Tensor, int]:
    """Where each sequence ends, after a zero, as the kernel takes it; and the longest."""
    return nn.functional.pad(sizes.cumsum(0), (1, 0)).int(), int(sizes.max())


def packed_hidden(model: nn.Module, batch: PackedBatch) -> Tensor:
    """Hidden state before each completion token, ``[N, H]``, rows of the batch in reading order."""
    layout: Layout = batch
    if uses_varlen(model):
        layout = VariableLengths(batch)
    return forward_with_layout(model, layout, batch.ids_S, batch.position_S)[batch.before_N]


def group_by_prompt(prompt_ids_BP: Tensor, prompt_mask_BP: Tensor) -> dict[tuple[int, ...], list[int]]:
    """Row numbers by their prompt's tokens, in the order of first appearance."""
    rows_of_prompt: dict[tuple[int, ...], list[int]] = {}
    for row, (ids_P, mask_P) in enumerate(zip(prompt_ids_BP.cpu(), prompt_mask_BP.bool().cpu(), strict=True)):
        rows_of_prompt.setdefault(tuple(ids_P[mask_P].tolist()), []).append(row)
    return rows_of_prompt


def pack_batch(prompt_ids_BP: Tensor, prompt_mask_BP: Tensor, ids_BT: Tensor, real_BT: Tensor) -> PackedBatch:
    """Pack rows of left-padded prompts (at least one token) and right-padded completions into a line."""
    device = ids_BT.device
    sizes = real_BT.bool().sum(-1).tolist()
    completion_ids = ids_BT.tolist()
    tokens: list[int] = []
    positions: list[int] = []
    prompt_spans: list[range] = []
    spans = [range(0)] * len(sizes)
    prompt_of = [0] * len(sizes)

    def append(ids: list[int], position: int) -> range:
        """Add tokens to the line, the first at ``position`` of its own sequence; returns their span in the line."""
        start = len(tokens)
        tokens.extend(ids)
        positions.extend(range(position, position + len(ids)))
        return range(start, len(tokens))

    for prompt, (prompt_ids, rows) in enumerate(group_by_prompt(prompt_ids_BP, prompt_mask_BP).items()):
        prompt_spans.append(append(list(prompt_ids), 0))
        for row in rows:
            prompt_of[row] = prompt
            # Nothing is predicted after the last token, so that it needs no place in the line.
            without_last = completion_ids[row][: max(sizes[row] - 1, 0)]
            # Positions continue after the prompt's, as if the completion stood right behind it.
            spans[row] = append(without_last, len(prompt_ids))

    # Before the first token of a completion is the last of its prompt; before the others, the one before them.
    before: list[int] = []
    for size, prompt, span in zip(sizes, prompt_of, spans, strict=True):
        before += [prompt_spans[prompt][-1], *span][:size]

    prompts = padded_rows(prompt_spans, device=device)
    completions = padded_rows(spans, device=device)
    index = torch.cat([prompts.index_BT.flatten(), completions.index_BT.flatten()])
    real = torch.cat([prompts.real_BT.flatten(), completions.real_BT.flatten()])
    place_S = torch.empty(len(tokens), dtype=torch.long, device=device)
    # Padding has an index too, of a token that it does not belong to; only real places count.
    place_S[index[real]] = real.nonzero()[:, 0]

    def to_tensor(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=device)

    return PackedBatch(
        ids_S=to_tensor(tokens),
        position_S=to_tensor(positions),
        before_N=to_tensor(before),
        prompts=prompts,
        completions=completions,
        prompt_of_B=to_tensor(prompt_of),
        place_S=place_S,
    )
