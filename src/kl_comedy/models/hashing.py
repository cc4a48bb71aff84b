"""The identity of a set of weights: one SHA-256 over names, dtypes, shapes and bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kl_comedy.models.sharded import is_classic
from kl_comedy.models.slices import Slice, held, kept_buffers, named_parameters

CHUNK_BYTES = 1 << 24
"""Bytes hashed at a time, so that a weight on a GPU never needs a second full copy in host memory."""


def weights_hash(model_or_state: nn.Module | Mapping[str, Tensor], *, base_only: bool = False) -> str:
    """Hex SHA-256 of the weights. Where they live (device, sharding) does not enter; dtype does.

    A tensor tied under several names is hashed under each. ``base_only`` leaves a PEFT model's adapters out
    and strips the wrapper from the names, so that the hash equals that of the model before it was wrapped.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(_named(model_or_state, base_only=base_only)):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        for piece in _bytes_of(tensor):
            digest.update(piece)
    return digest.hexdigest()


def _named(model_or_state: Any, *, base_only: bool) -> Iterator[tuple[str, Tensor]]:
    state = _state(model_or_state) if isinstance(model_or_state, nn.Module) else model_or_state
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor | Slice):
            continue
        if base_only:
            if ".lora_" in name or ".modules_to_save." in name:
                continue
            name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        yield name, tensor


def _state(model: nn.Module) -> Mapping[str, Any]:
    """The state dict, each tensor as it is held: sharded or not."""
    if not is_classic(model):
        return model.state_dict()
    return {**{name: held(p) for name, p in named_parameters(model, tied=True)}, **dict(kept_buffers(model))}


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's values in C order, as byte pieces. A sharded tensor is gathered (all ranks must call)."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    flat = whole.detach().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), CHUNK_BYTES):
        yield memoryview(flat[start : start + CHUNK_BYTES].cpu().numpy())
