"""How much is held at once: sizes that a config leaves open are chosen by what a device has room for."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch

GIB = 2**30
ACTIVATIONS = {"cpu": 1 * GIB, "cuda": 16 * GIB}
"""Bytes that the activations of one backward pass may take where ``train.microbatch_tokens`` is open."""

CHUNK = {"cpu": 2**22, "cuda": 2**27}
"""Logits held at once where ``model.head_chunk_elements`` is open: 16 MiB and 512 MiB in float32. From 32 MiB on
glibc takes pages from the system for every tensor and gives them back."""

MOST_TOKENS = 2**16


def head_chunk(asked: int | None, device: torch.device) -> int:
    """``asked``, or what suits the device."""
    return asked or CHUNK.get(device.type, CHUNK["cuda"])


def microbatch_tokens(asked: int | None, model: Any, device: torch.device, *, checkpoints: bool) -> int:
    """``asked``, or as many tokens as the device's share for activations holds, by :func:`activation_bytes`."""
    if asked:
        return asked
    return open_microbatch_tokens(
        model.config, next(model.parameters()).element_size(), device.type, checkpoints=checkpoints
    )  # fmt: skip


def open_microbatch_tokens(config: Any, element_bytes: int, kind: str, *, checkpoints: bool) -> int:
    """Tokens whose activations fit the share of a device of this ``kind`` that is theirs."""
    room = ACTIVATIONS.get(kind, ACTIVATIONS["cuda"])
    return min(MOST_TOKENS, max(1, room // (element_bytes * activation_values(config, checkpoints=checkpoints))))


def activation_values(config: Any, *, checkpoints: bool) -> int:
    """Values that autograd keeps per token of a gated decoder: norms, projections, attention, the gated product.

    With ``checkpoints`` only the inputs of the layers, and one layer's values while it is passed again.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    heads = int(getattr(config, "num_attention_heads", 1))
    shared = 2 * hidden * int(getattr(config, "num_key_value_heads", None) or heads) // heads
    layer = 9 * hidden + 2 * shared + 4 * inner
    return layers * hidden + layer if checkpoints else layers * layer


def release() -> None:
    """Give free pages of the C library's allocator back to the system, where it knows how (glibc's ``malloc_trim``).

    What recomputation frees lies between what is kept, and would otherwise stay resident.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
