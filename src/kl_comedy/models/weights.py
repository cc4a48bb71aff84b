"""Weights of a model, sharded or not: their hash, a stream of whole tensors in bounded buckets, copying.

    sharded model -> (gather a bucket, pass it on, drop it) -> replica, sampler, file

Beside its own shards a process has at most one bucket in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kl_comedy.models.lora import base_name, is_lora_factor

HASH_BYTES = 1 << 24
"""Bytes hashed at a time, so that a weight on a GPU never needs a second full copy in host memory."""

DEFAULT_BUCKET_BYTES = 256 * 2**20

Bucket = list[tuple[str, Tensor]]


def weights_hash(model_or_state: nn.Module | Mapping[str, Tensor], *, base_only: bool = False) -> str:
    """Hex SHA-256 over names, dtypes, shapes and bytes; independent of device and sharding.

    A tensor tied under several names is hashed under each. ``base_only`` leaves a PEFT model's adapters out
    and strips the wrapper from the names, so that the hash equals that of the model before it was wrapped.
    Of a sharded model every process must call.
    """
    state: Mapping[str, Any] = model_or_state.state_dict() if isinstance(model_or_state, nn.Module) else model_or_state
    tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    if base_only:
        tensors = {base_name(name): tensor for name, tensor in tensors.items() if not is_lora_factor(name)}
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        flat = full_tensor(tensor).contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), HASH_BYTES):
            digest.update(memoryview(flat[start : start + HASH_BYTES].cpu().numpy()))
    return digest.hexdigest()


def stream_weights(model: nn.Module, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Iterator[Bucket]:
    """The weights of ``model`` under their names, whole and detached, at most ``bucket_bytes`` at a time.

    A larger tensor is a bucket of its own. Tied weights come once. Of a sharded model every process must consume
    the whole stream, in step, because gathering is a collective. A bucket may share memory with the model.

    >>> [[name for name, _ in bucket] for bucket in stream_weights(nn.Linear(2, 2), bucket_bytes=16)]
    [['weight'], ['bias']]
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    bucket: Bucket = []
    filled = 0
    for name, tensor in named_weights(model):
        size = tensor.numel() * tensor.element_size()
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, full_tensor(tensor)))
        filled += size
    if bucket:
        yield bucket


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters (tied ones once) and the buffers of the state dict, sharded or not."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # no public way asks for persistent buffers alone
                yield f"{prefix}.{name}".lstrip("."), buffer


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, detached. Of a sharded tensor every process must call."""
    detached: Any = tensor.detach()
    full: Tensor = detached.full_tensor() if hasattr(detached, "full_tensor") else detached
    return full


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the whole model, sharded or not."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in named_weights(model))


@torch.no_grad()
def copy_into(model: nn.Module, buckets: Iterable[Bucket]) -> None:
    """Overwrite the weights of a model that is not sharded. Raises :class:`ValueError` for names that differ."""
    weights = dict(named_weights(model))
    missing = set(weights)
    for bucket in buckets:
        for name, tensor in bucket:
            if name not in weights:
                raise ValueError(f"no such weight: {name}")
            weights[name].copy_(tensor)
            missing.discard(name)
    if missing:
        raise ValueError(f"weights that did not come: {', '.join(sorted(missing)[:3])}")
