"""Attention over a layout of our own, inside a transformers model that is otherwise as it was.

A model takes its attention from a registry by name. Ours is the library's ``sdpa``, unless the call carries a
``kl_layout``: then the tokens of the batch are one line ``[1, S]``, and the layout says who attends to whom. All
else in a decoder works token by token and does not mind.

Legend: ``S`` tokens of the line, ``K`` key-value heads, ``R`` query heads per key-value head, ``D`` width of a head.

A prompt computed once for all of its completions, and no padding: the batch as one line of tokens.

    prompt a | completion 1 | completion 2 | ... | prompt b | completion 1 | ...

Every completion attends to its prompt and to itself, at the positions it would have on its own, so hidden
states and gradients are those of separate rows. The last token of a completion, which predicts nothing, is
left out. Attention itself works on rows: prompts by themselves, then every completion over its prompt and
itself, so that its cost is that of separate rows too.

Legend: ``B`` completions, ``F`` families (distinct prompts), ``P`` and ``T`` longest prompt and completion, ``S``
tokens of the line, ``N`` completion tokens; ``K``, ``R``, ``D`` as in :mod:`kl_comedy.models.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from kl_comedy.models.introspection import decoder_body

NAME = "kl_comedy"
"""Our attention in the library's registry."""

HARMLESS = {"sliding_window": None, "softcap": None, "s_aux": None, "position_bias": None, "is_causal": True}
"""Arguments of an attention call that would change what is computed, and the values that do not."""


class Layout(Protocol):
    """Who attends to whom."""

    def attend(self, layer: int, query_SKRD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scale: float) -> Tensor:
        """The attention's outcome ``[S, K, R, D]`` of one layer."""
        ...


def adopt(model: nn.Module) -> bool:
    """Give ``model`` our attention where that is possible; whether it has it now.

    Possible where every layer attends to all that came before it by the library's ``sdpa``. Until a layout
    comes along nothing changes.
    """
    body: Any = decoder_body(model)
    kinds = set(getattr(body.config, "layer_types", None) or ["full_attention"])
    name = getattr(body.config, "_attn_implementation", None)
    if kinds != {"full_attention"} or name not in ("sdpa", NAME):
        return False
    _register()
    if name == "sdpa":
        body.set_attn_implementation(NAME)
    return bool(body.config._attn_implementation == NAME)


def run_with(model: nn.Module, layout: Layout, ids_S: Tensor, position_S: Tensor) -> Tensor:
    """Hidden states ``[S, H]`` of a line of tokens under ``layout``. The model must have our attention."""
    body: Any = decoder_body(model)
    # A mask of four dimensions is taken as it is: the library makes none of its own.
    none_11SS = torch.empty((1, 1, 1, 1), device=ids_S.device)
    out = body(
        input_ids=ids_S[None],
        position_ids=position_S[None],
        attention_mask=none_11SS,
        use_cache=False,
        kl_layout=layout,
    )
    hidden_SH: Tensor = out.last_hidden_state[0]
    return hidden_SH


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


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
    """The library's calling convention: ``[1, heads, S, D]`` in, ``[1, S, heads, D]`` out."""
    if kl_layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **rest
        )
        return found
    odd = {name: rest[name] for name, value in HARMLESS.items() if rest.get(name, value) not in (value, None)}
    if odd or dropout:
        raise ValueError(f"attention of {type(module).__name__} asks for {odd or {'dropout': dropout}}")
    heads, size, width = query.shape[1:]
    kv_heads = key.shape[1]
    query_SKRD = query[0].view(kv_heads, heads // kv_heads, size, width).permute(2, 0, 1, 3)
    scale = width**-0.5 if scaling is None else scaling
    out_SKRD = kl_layout.attend(module.layer_idx, query_SKRD, key[0].transpose(0, 1), value[0].transpose(0, 1), scale)
    return out_SKRD.reshape(1, size, heads, width), None


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a line: where in it each token is (0 where there is none, on the right), and what is real."""

    index_BT: Tensor
    real_BT: Tensor

    def of(self, line_S: Tensor) -> Tensor:
        """``line_S [S, ...]`` by rows, ``[B, T, ...]``."""
        return line_S[self.index_BT]


@dataclass(frozen=True, kw_only=True)
class Families:
    """The layout of prompts and their completions (:class:`kl_comedy.models.attention.Layout`).

    ``family_B``: the prompt of each completion. ``back_S``: where each token of the line is among all prompt
    rows followed by all completion rows.
    """

    prompts: Rows
    completions: Rows
    family_B: Tensor
    back_S: Tensor
    _masks: dict[tuple[torch.dtype, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, layer: int, query_SKRD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scale: float) -> Tensor:
        """See :class:`kl_comedy.models.attention.Layout`."""
        prompt_mask, mask = self._masks_in(_computed_in(query_SKRD), query_SKRD.shape[2])
        prompt_key, prompt_value = self.prompts.of(key_SKD), self.prompts.of(value_SKD)
        done = [attend_rows(self.prompts.of(query_SKRD), prompt_key, prompt_value, prompt_mask, scale)]
        if self.completions.index_BT.shape[1]:
            key = torch.cat([prompt_key[self.family_B], self.completions.of(key_SKD)], 1)
            value = torch.cat([prompt_value[self.family_B], self.completions.of(value_SKD)], 1)
            done.append(attend_rows(self.completions.of(query_SKRD), key, value, mask, scale))
        return torch.cat([rows.flatten(0, 1) for rows in done])[self.back_S]

    def _masks_in(self, dtype: torch.dtype, heads: int) -> tuple[Tensor, Tensor]:
        """What is added to the scores of prompts ``[F, R P, P]`` and of completions ``[B, R T, P + T]``.

        Autograd keeps them for every layer, so that all layers share one: they grow with the square of the length.
        """
        if (dtype, heads) not in self._masks:
            own_BTT = causal(self.completions.real_BT)
            seen_BTP = self.prompts.real_BT[self.family_B][:, None, :].expand(-1, own_BTT.shape[1], -1)
            own = torch.cat([seen_BTP, own_BTT], 2)
            prompt_mask, mask = (
                for_heads(additive(seen, dtype), heads) for seen in (causal(self.prompts.real_BT), own)
            )
            self._masks[dtype, heads] = (prompt_mask, mask)
        return self._masks[dtype, heads]


@dataclass(frozen=True, kw_only=True)
class Line:
    """Inputs of a body, and the places ``[N]`` of the hidden states before each completion token."""

    ids_S: Tensor
    position_S: Tensor
    layout: Families
    before_N: Tensor


def causal(real_BT: Tensor) -> Tensor:
    """``[B, T, T]``: what each place may attend to. A place that is not real sees the first, so that none sees nothing.

    >>> causal(torch.tensor([[True, True, False]])).int().tolist()
    [[[1, 0, 0], [1, 1, 0], [1, 1, 0]]]
    """
    index_T = torch.arange(real_BT.shape[1], device=real_BT.device)
    return (index_T[:, None] >= index_T) & real_BT[:, None, :]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where ``mask`` is true, minus infinity elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _computed_in(query_SKRD: Tensor) -> torch.dtype:
    """The dtype that attention runs in: autocast would make a copy of a mask in another one, layer by layer."""
    kind = query_SKRD.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query_SKRD.dtype


def for_heads(mask_BTS: Tensor, heads: int) -> Tensor:
    """``[B, R T, S]``: a mask for ``heads`` query heads below one another."""
    return mask_BTS.repeat(1, heads, 1)


def attend_rows(query_BTKRD: Tensor, key_BSKD: Tensor, value_BSKD: Tensor, mask_BQS: Tensor, scale: float) -> Tensor:
    """Attention of rows ``[B, T, K, R, D]``. Heads that share keys stand below one another, so nothing is repeated.

    ``mask_BQS [B, R T, S]`` is added to the scores (:func:`for_heads`).
    """
    b, t, k, r, d = query_BTKRD.shape
    query = query_BTKRD.permute(0, 2, 3, 1, 4).reshape(b, k, r * t, d)
    key, value = key_BSKD.transpose(1, 2), value_BSKD.transpose(1, 2)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask_BQS[:, None], scale=scale)
    return out.view(b, k, r, t, d).permute(0, 3, 1, 2, 4)


def line_hidden(model: nn.Module, line: Line) -> Tensor:
    """Hidden state before each completion token, ``[N, H]``, rows of the batch in reading order."""
    return run_with(model, line.layout, line.ids_S, line.position_S)[line.before_N]


def same_prompt(prompt_ids_BP: Tensor, prompt_mask_BP: Tensor) -> list[list[int]]:
    """Rows with the same prompt, in the order of their first."""
    found: dict[tuple[int, ...], list[int]] = {}
    ids, mask = prompt_ids_BP.tolist(), prompt_mask_BP.tolist()
    for row, (tokens, real) in enumerate(zip(ids, mask, strict=True)):
        found.setdefault(tuple(token for token, is_real in zip(tokens, real, strict=True) if is_real), []).append(row)
    return list(found.values())


def build_line(prompt_ids_BP: Tensor, prompt_mask_BP: Tensor, ids_BT: Tensor, mask_BT: Tensor) -> Line:
    """The line of a batch whose rows are left-padded prompts and right-padded completions of one token or more."""
    families = same_prompt(prompt_ids_BP, prompt_mask_BP)
    sizes, prompts = mask_BT.bool().sum(-1).tolist(), prompt_mask_BP.bool().sum(-1).tolist()
    prompt_ids, ids = prompt_ids_BP.tolist(), ids_BT.tolist()
    tokens: list[int] = []
    positions: list[int] = []
    starts: list[int] = []
    own: dict[int, range] = {}
    for rows in families:
        length = prompts[rows[0]]
        starts.append(len(tokens))
        tokens += prompt_ids[rows[0]][-length:]
        positions += range(length)
        for row in rows:
            kept = max(sizes[row] - 1, 0)
            own[row] = range(len(tokens), len(tokens) + kept)
            tokens += ids[row][:kept]
            positions += range(length, length + kept)
    lengths = [prompts[rows[0]] for rows in families]
    family = {row: n for n, rows in enumerate(families) for row in rows}
    before: list[int] = []
    for row, size in enumerate(sizes):
        last = starts[family[row]] + lengths[family[row]] - 1
        before += [last, *own[row]][:size]
    device = ids_BT.device
    prompt_rows = [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return Line(
        ids_S=torch.tensor(tokens, dtype=torch.long, device=device),
        position_S=torch.tensor(positions, dtype=torch.long, device=device),
        layout=_layout(prompt_rows, [own[row] for row in range(len(sizes))], family, device=device),
        before_N=torch.tensor(before, dtype=torch.long, device=device),
    )


def _layout(prompts: list[range], own: list[range], family: dict[int, int], *, device: torch.device) -> Families:
    prompt_rows, completion_rows = rows_of(prompts, device=device), rows_of(own, device=device)
    back = torch.empty(sum(map(len, [*prompts, *own])), dtype=torch.long, device=device)
    first = 0
    for rows in (prompt_rows, completion_rows):
        places_BT = torch.arange(first, first + rows.real_BT.numel(), device=device).view(rows.real_BT.shape)
        back[rows.index_BT[rows.real_BT]] = places_BT[rows.real_BT]
        first += rows.real_BT.numel()
    return Families(
        prompts=prompt_rows,
        completions=completion_rows,
        family_B=torch.tensor([family[row] for row in range(len(own))], device=device),
        back_S=back,
    )


def rows_of(lines: list[range], *, device: torch.device) -> Rows:
    """Rows from the places of their tokens."""
    width = max(map(len, lines))
    index = torch.tensor([[*line, *[0] * (width - len(line))] for line in lines], dtype=torch.long, device=device)
    sizes = torch.tensor([len(line) for line in lines], device=device)
    index_BT = index.view(len(lines), width)
    return Rows(index_BT=index_BT, real_BT=torch.arange(width, device=device) < sizes[:, None])
