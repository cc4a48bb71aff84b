"""Attention over a layout of our own, inside a transformers model that is otherwise as it was.

A model takes its attention from a registry by name. Ours is the library's ``sdpa``, unless the call carries a
``kl_layout``: then the tokens of the batch are one line ``[1, S]``, and the layout says who attends to whom. All
else in a decoder works token by token and does not mind.

Legend: ``S`` tokens of the line, ``K`` key-value heads, ``R`` query heads per key-value head, ``D`` width of a head.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kl_comedy.models.anatomy import decoder_body

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
        input_ids=ids_S[None], position_ids=position_S[None], attention_mask=none_11SS, use_cache=False,
        kl_layout=layout,
    )  # fmt: skip
    hidden_SH: Tensor = out.last_hidden_state[0]
    return hidden_SH


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, dropout: float = 0.0, kl_layout: Layout | None = None, **rest: Any,
) -> tuple[Tensor, None]:  # fmt: skip
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
    out_SKRD = kl_layout.attend(
        module.layer_idx, query_SKRD, key[0].transpose(0, 1), value[0].transpose(0, 1), scale
    )  # fmt: skip
    return out_SKRD.reshape(1, size, heads, width), None
