"""The identity of a set of weights: one SHA-256 over names, dtypes, shapes and bytes.

A model's weights as a stream of whole tensors in bounded buckets, whatever way the model is sharded.

    sharded model -> (gather a bucket, hand it on, forget it) -> replica, sampler, file

No process holds more than one bucket beside its own shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
    state = model_or_state.state_dict() if isinstance(model_or_state, nn.Module) else model_or_state
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue
        if base_only:
            if ".lora_" in name or ".modules_to_save." in name:
                continue
            name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        yield name, tensor


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's values in C order, as byte pieces. A sharded tensor is gathered (all ranks must call)."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    flat = whole.detach().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), CHUNK_BYTES):
        yield memoryview(flat[start : start + CHUNK_BYTES].cpu().numpy())


Bucket = list[tuple[str, Tensor]]

DEFAULT_BUCKET_BYTES = 256 * 2**20


def stream_weights(model: nn.Module, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Iterator[Bucket]:
    """The weights of ``model`` under their names, whole and detached, at most ``bucket_bytes`` at a time.

    A tensor larger than that is a bucket of its own. Tied weights come once. Of a sharded model every process must
    walk the stream to its end, in step, because gathering is a collective; every process gets the whole tensors.
    A bucket may share memory with the model: copy what is kept.

    >>> [[name for name, _ in bucket] for bucket in stream_weights(nn.Linear(2, 2), bucket_bytes=16)]
    [['weight'], ['bias']]
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    bucket: Bucket = []
    held = 0
    for name, tensor in named_weights(model):
        size = tensor.numel() * tensor.element_size()
        if bucket and held + size > bucket_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, whole(tensor)))
        held += size
    if bucket:
        yield bucket


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters (tied ones once) and the buffers that a state dict keeps, as they are held: sharded or not."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # no public way asks for persistent buffers alone
                yield f"{prefix}.{name}".lstrip("."), buffer


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; then all processes must call."""
    gathered: Any = tensor.detach()
    full: Tensor = gathered.full_tensor() if hasattr(gathered, "full_tensor") else gathered
    return full


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the whole model, sharded or not."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in named_weights(model))


@torch.no_grad()
def copy_into(model: nn.Module, buckets: Iterable[Bucket]) -> None:
    """Overwrite the weights of a model that is not sharded. Raises :class:`ValueError` for names that differ."""
    mine: Mapping[str, Tensor] = dict(named_weights(model))
    seen: set[str] = set()
    for bucket in buckets:
        for name, tensor in bucket:
            if name not in mine:
                raise ValueError(f"no such weight: {name}")
            mine[name].copy_(tensor)
            seen.add(name)
    if seen != set(mine):
        raise ValueError(f"weights that did not come: {', '.join(sorted(set(mine) - seen)[:3])}")


def merged_weights(buckets: Iterable[Bucket], scaling: float) -> Iterator[tuple[str, Tensor]]:
    """Base names and weights of a LoRA model with its adapter folded in: ``W + scaling * B A``, in float32.

    The factors of a module must follow its weight within the stream, as PEFT registers them. Weights without an
    adapter pass through. Merging rounds to the weight's dtype, so log-probs agree to that precision only.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for bucket in buckets:
        for name, tensor in bucket:
            base = name.removeprefix("base_model.model.")
            for mark, part in (
                (".base_layer.weight", "base"),
                (".lora_A.default.weight", "A"),
                (".lora_B.default.weight", "B"),
            ):
                if base.endswith(mark):
                    module = base.removesuffix(mark)
                    parts = waiting.setdefault(module, {})
                    parts[part] = tensor
                    if len(parts) == 3:
                        delta = scaling * (parts["B"].float() @ parts["A"].float())
                        yield f"{module}.weight", (parts["base"].float() + delta).to(parts["base"].dtype)
                        del waiting[module]
                    break
            else:
                yield base.replace(".base_layer.", "."), tensor
    if waiting:
        raise ValueError(f"an adapter's factors are missing: {', '.join(sorted(waiting)[:3])}")
