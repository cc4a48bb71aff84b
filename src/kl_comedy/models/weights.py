"""Weights of a model, sharded or not: their hash, streams of whole tensors, copying.

    sharded model -> (gather a bucket, pass it on, drop it) -> replica, file
    sharded model -> (cast shards, gather a bucket, pass it on) -> inference engine

Beside its own shards a process has a few buckets in memory. The shards of a bucket are gathered together, as one flat
tensor. Gathering is a collective: where the model is sharded, every process must consume a stream to its end, in step,
or the others wait for it forever.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kl_comedy.models.introspection import is_peft, unwrap
from kl_comedy.models.lora import base_name, is_lora_factor, merge_adapter, peft_scaling

HASH_BYTES = 1 << 24
"""Bytes hashed at a time, so that a weight on a GPU never needs a second full copy in host memory."""

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Linear layers that vLLM stores as parts of one, and the name of that one."""

BUCKET_BYTES = 384 * 2**20
"""Large enough that a collective's start costs little beside its transfer, small beside a model.

The layers of a 7B model have matrices of 130 MiB in bfloat16: of 256 MiB a bucket could hold only one of them."""

Bucket = list[tuple[str, Tensor]]


def weights_hash(model_or_state: nn.Module | Mapping[str, Tensor], *, base_only: bool = False) -> str:
    """Hex SHA-256 over names, dtypes, shapes and bytes; independent of device and sharding.

    ``base_only`` leaves a PEFT model's adapters out and strips the wrapper from the names, so that the hash equals that
    of the model before it was wrapped. Every process must call it where the model is sharded.
    """
    # Checkpoints, exports and run records store this hash: the bytes that are hashed must stay as they are.
    state: Mapping[str, Any]
    if isinstance(model_or_state, nn.Module):
        state = model_or_state.state_dict()
    else:
        state = model_or_state
    tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    if base_only:
        tensors = {base_name(name): tensor for name, tensor in tensors.items() if not is_lora_factor(name)}
    digest = hashlib.sha256()
    # Sorted: the order of a state dict is that of construction, which another version of transformers may change.
    for name, full in _whole(sorted(tensors.items())):
        digest.update(f"{name}|{full.dtype}|{tuple(full.shape)}|".encode())
        _hash_bytes(digest, full)
    return digest.hexdigest()


def _hash_bytes(digest: hashlib._Hash, tensor: Tensor) -> None:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    # In pieces, so that a weight on a GPU is never copied to the host as a whole.
    for start in range(0, flat.numel(), HASH_BYTES):
        piece: Any = flat[start : start + HASH_BYTES].cpu().numpy()
        digest.update(memoryview(piece))


class Checksums:
    """SHA-256 of the bytes of every weight, by name, to compare a policy with what vLLM has received.

    ``fused``: the parts that vLLM stores as one weight are hashed as one, in their order.

    >>> weights = {"q_proj.bias": torch.ones(2), "k_proj.bias": torch.zeros(1), "v_proj.bias": torch.ones(1)}
    >>> sums, whole = Checksums(fused=True), Checksums()
    >>> for name, tensor in weights.items():
    ...     sums.add(name, tensor)
    >>> whole.add("qkv_proj.bias", torch.tensor([1.0, 1.0, 0.0, 1.0]))
    >>> sums.hexdigests() == whole.hexdigests()
    True
    """

    def __init__(self, *, fused: bool = False) -> None:
        self._fused = fused
        self._digests: dict[str, hashlib._Hash] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a weight. The parts of a fused weight must come in their order."""
        if self._fused:
            name = ".".join(FUSED.get(part, part) for part in name.split("."))
        _hash_bytes(self._digests.setdefault(name, hashlib.sha256()), tensor)

    def hexdigests(self) -> dict[str, str]:
        """The hex digest of each weight."""
        return {name: digest.hexdigest() for name, digest in self._digests.items()}


def full_weights(
    model: nn.Module, dtype: torch.dtype | None = None, *, adapter: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the policy under its checkpoint name, whole and detached, in ``dtype`` if given.

    With ``adapter`` a LoRA adapter is merged, else it is left out. Tied weights are gathered once and come one after
    the other, each under its own name, because vLLM has a packed copy of a tied head. Every process must consume the
    whole stream, in step, where the model is sharded.
    """
    causal = unwrap(model)
    tied = _further_names(causal)
    # They come right after the weight that they are tied to, and not at their own places.
    repeated = set(itertools.chain.from_iterable(tied.values()))
    parts = [(name, tensor) for name, tensor in causal.state_dict().items() if name not in repeated]
    weights: Iterator[tuple[str, Tensor]]
    if is_peft(model) and adapter:
        # Merged from whole weights in their own dtype, and cast afterwards, so that the sum is rounded once.
        merged = merge_adapter(_whole(parts), peft_scaling(model))
        weights = ((name, _cast(tensor, dtype)) for name, tensor in merged)
    else:
        # Shards are cast before they are gathered: half the traffic for 16 bits.
        base_parts = ((name, _cast(tensor, dtype)) for name, tensor in parts if not is_lora_factor(name))
        weights = _whole(base_parts)
    for name, whole in weights:
        yield base_name(name), whole
        for tied_name in tied.get(base_name(name), ()):
            yield tied_name, whole


def _further_names(causal: nn.Module) -> dict[str, list[str]]:
    """By the base name of a parameter, its further names: those of the weights that are tied to it."""
    # By identity: tied weights are one parameter under several names.
    names_of: dict[int, list[str]] = {}
    for name, parameter in causal.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    return {base_name(first): further for first, *further in names_of.values()}


def adapter_weights(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """The factors of a PEFT model's adapter, as ``MODULE.lora_A`` and ``MODULE.lora_B``, in ``dtype`` if given.

    B is multiplied by the scaling before it is cast, so that it is rounded once. Every process must consume the whole
    stream, in step, where the model is sharded.
    """
    factors = [(name, tensor) for name, tensor in unwrap(model).state_dict().items() if is_lora_factor(name)]
    for name, factor in _whole(factors):
        # PEFT calls the only adapter of a policy "default".
        name = name.removesuffix(".default.weight")
        if name.endswith(".lora_B"):
            factor = peft_scaling(model) * factor
        yield name, _cast(factor, dtype)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``tensor`` in ``dtype``; integers, and everything where it is None, as they are."""
    if dtype is None or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


def stream_weights(model: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """The weights of ``model`` under their names, whole and detached, at most ``bucket_bytes`` at a time.

    A larger tensor is a bucket of its own. Tied weights come once. A bucket may share memory with the model. Every
    process must consume the whole stream, in step, where the model is sharded. Raises :class:`ValueError` for
    ``bucket_bytes`` below 1.

    >>> [[name for name, _ in bucket] for bucket in stream_weights(nn.Linear(2, 2), bucket_bytes=16)]
    [['weight'], ['bias']]
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    for bucket in in_buckets(named_weights(model), bucket_bytes):
        yield gathered(bucket)


def in_buckets(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Consecutive weights of one dtype and layout, at most ``bucket_bytes`` together; a larger one is alone.

    Further names of a weight, which follow it, are in its bucket and take no bytes.

    >>> weight, bias, step = torch.zeros(2), torch.zeros(1), torch.tensor(0)
    >>> weights = [("head", weight), ("embed", weight), ("bias", bias), ("step", step)]
    >>> [[name for name, _ in bucket] for bucket in in_buckets(weights, 12)]
    [['head', 'embed', 'bias'], ['step']]
    >>> [[name for name, _ in bucket] for bucket in in_buckets(weights, 8)]
    [['head', 'embed'], ['bias'], ['step']]
    """
    bucket: Bucket = []
    filled_bytes = 0
    for name, tensor in weights:
        if bucket and bucket[-1][1] is tensor:
            bucket.append((name, tensor))
            continue
        # A sharded tensor has the bytes of the whole one, so that this is known before it is gathered.
        is_full = filled_bytes + tensor.nbytes > bucket_bytes
        if bucket and (is_full or _layout(tensor) != _layout(bucket[0][1])):
            yield bucket
            bucket = []
            filled_bytes = 0
        bucket.append((name, tensor))
        filled_bytes += tensor.nbytes
    if bucket:
        yield bucket


def _layout(tensor: Any) -> tuple[Any, ...]:
    """What tensors must have in common to be parts of one flat tensor."""
    # Of a sharded tensor: the processes that it is sharded over, and how.
    mesh = getattr(tensor, "device_mesh", None)
    placements = getattr(tensor, "placements", None)
    return tensor.dtype, tensor.device, mesh, placements


def _whole(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """``weights`` whole and detached. Every process must consume the whole stream, in step, where they are sharded."""
    # No bucket has a name here: it would be kept until the next one is whole.
    return itertools.chain.from_iterable(map(gathered, in_buckets(weights, BUCKET_BYTES)))


@torch.no_grad()
def gathered(bucket: Bucket) -> Bucket:
    """The tensors of a bucket whole and detached, by one collective where they are sharded: every process must call.

    Those that are not sharded share memory with the given ones. Raises :class:`ValueError` for tensors that are not
    sharded as FSDP2 does it: along their first dimension, over one axis of their mesh.
    """
    first: Any = bucket[0][1]
    if not hasattr(first, "device_mesh"):
        return [(name, tensor.detach()) for name, tensor in bucket]
    from torch.distributed.tensor import DTensor

    axes = [axis for axis, placement in enumerate(first.placements) if not placement.is_replicate()]
    if len(axes) != 1 or not first.placements[axes[0]].is_shard(0):
        raise ValueError(f"{bucket[0][0]} is sharded as {first.placements}, not along its first dimension alone")
    shards = first.device_mesh.size(axes[0])
    flat_shards = [_padded_shard(tensor, shards) for _, tensor in bucket]
    flat: Any = DTensor.from_local(torch.cat(flat_shards), first.device_mesh, first.placements, run_check=False)
    all_parts = flat.full_tensor().view(shards, -1)
    whole: Bucket = []
    start = 0
    for (name, tensor), flat_shard in zip(bucket, flat_shards, strict=True):
        end = start + flat_shard.numel()
        rows = all_parts[:, start:end].reshape(-1)[: tensor.numel()]
        whole.append((name, rows.view(tensor.shape)))
        start = end
    return whole


def _padded_shard(tensor: Any, shards: int) -> Tensor:
    """This process's shard of ``tensor``, flat, with as many elements as the largest shard.

    All shards but the last ones have the same number of rows. So what is padded stands behind the whole tensor, once
    the shards are joined.
    """
    shard: Tensor = tensor.to_local()
    rows = -(-tensor.shape[0] // shards)
    missing_rows = rows - shard.shape[0]
    if missing_rows > 0:
        padding = shard.new_empty(missing_rows, *shard.shape[1:])
        shard = torch.cat([shard, padding])
    return shard.reshape(-1)


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters (tied ones once) and the buffers of the state dict, sharded or not."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # no public way asks for persistent buffers alone
                yield f"{prefix}.{name}".lstrip("."), buffer


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, detached. Every process must call it where the tensor is sharded."""
    detached: Any = tensor.detach()
    if hasattr(detached, "full_tensor"):
        detached = detached.full_tensor()
    whole: Tensor = detached
    return whole


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the whole model, sharded or not."""
    return sum(tensor.nbytes for _, tensor in named_weights(model))


@torch.no_grad()
def copy_into(model: nn.Module, buckets: Iterable[Bucket]) -> None:
    """Overwrite the weights of a model that is not sharded. Raises :class:`ValueError` for unknown or missing names."""
    weights = dict(named_weights(model))
    # Counted down, because the stream is read once: its names are not known before.
    missing = set(weights)
    for name, tensor in itertools.chain.from_iterable(buckets):
        if name not in weights:
            raise ValueError(f"no such weight: {name}")
        weights[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise ValueError(f"weights that did not come: {', '.join(sorted(missing)[:3])}")
