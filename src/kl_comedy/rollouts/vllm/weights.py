"""The learner's weights as vLLM wants them: every tensor under its checkpoint name, one at a time.

Three silent corruptions are ruled out here: a partial update (everything is sent, always), an adapter left out
(LoRA is merged on the way, tensor by tensor), a stale tied head (it is sent under its own name, too).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from kl_comedy.models.introspection import is_peft
from kl_comedy.models.lora import merge_adapter, peft_scaling
from kl_comedy.models.weights import full_tensor
from kl_comedy.rollouts.base import Policy

SHARD_BYTES = 2**30
"""Weights are written in files of about this size, so that little more than one is held in host memory."""


def full_weights(loaded: Policy, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the policy with its adapter merged, in checkpoint format; detached, in ``dtype`` if given.

    A tied head is yielded under its own name as well (a state dict lists it so), since vLLM keeps a packed copy of it.
    A sharded tensor is gathered when it is reached, so all ranks must iterate.
    """
    weights: Iterator[tuple[str, Tensor]] = (
        (name, full_tensor(tensor)) for name, tensor in loaded.causal.state_dict().items()
    )
    if is_peft(loaded.model):
        weights = merge_adapter(weights, peft_scaling(loaded.model))
    for name, tensor in weights:
        yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def write_config(loaded: Policy, folder: Path) -> None:
    """The model's config and tokenizer, as a folder that vLLM can be started on (without weights)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = type(loaded.causal.config).from_dict(loaded.causal.config.to_dict())
    config.architectures = [type(loaded.causal).__name__]
    config.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def write_weights(loaded: Policy, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """A whole checkpoint folder: config, tokenizer, and every weight in safetensors shards.

    Written beside ``folder`` and renamed, so that a reader sees all of it or nothing.
    """
    from safetensors.torch import save_file

    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    write_config(loaded, temporary)
    for number, shard in enumerate(_shards(full_weights(loaded, dtype=dtype))):
        save_file(shard, temporary / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def _shards(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Host copies of the weights, gathered up to :data:`SHARD_BYTES`; tensors of one shard share no memory."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        shard[name] = tensor.to("cpu", copy=True).contiguous()
        size += tensor.numel() * tensor.element_size()
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard
