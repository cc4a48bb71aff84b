"""Calling parts of a model that FSDP holds in shards: its weights exist only inside what FSDP takes for a forward."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_METHOD = "_kl_comedy_pass"
_TWIN = "_kl_comedy_twin"
_ROOT = "_kl_comedy_root"


def call_as_forward(model: nn.Module, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """``run()``, inside a forward of ``model`` when FSDP shards it, so that head and body are gathered.

    For any other model this is just ``run()``.
    """
    if is_classic(model):
        found: tuple[Tensor, ...] = vars(model)[_ROOT][0](run)
        return found
    if not is_sharded(model):
        return run()
    from torch.distributed.fsdp import register_fsdp_forward_method

    sharded: Any = model
    if _METHOD not in vars(sharded):
        setattr(sharded, _METHOD, types.MethodType(lambda self, inner: inner(), sharded))
        register_fsdp_forward_method(sharded, _METHOD)
    result: tuple[Tensor, ...] = getattr(sharded, _METHOD)(run)
    return result


def remember_twin(model: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Note how another model like this one is made, sharded alike and unfilled: FSDP cannot be deep-copied."""
    setattr(model, _TWIN, make)


def remember_root(model: nn.Module, root: nn.Module) -> None:
    """Note the first FSDP's root around ``model``; in a tuple, or the root would become a part of what it holds."""
    setattr(model, _ROOT, (root,))


def twin(model: nn.Module) -> nn.Module:
    """A sharded model with the same weights, made of its own memory; all processes must call."""
    make: Callable[[], nn.Module] = vars(model)[_TWIN]
    other = make()
    with torch.no_grad():
        for ours, theirs in zip(_held(other), _held(model), strict=True):
            ours.copy_(theirs)
    return other


def _held(model: nn.Module) -> list[Tensor]:
    """What this process holds of the weights: its shards, and buffers."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP shards ``model``, the second or the first."""
    if is_classic(model):
        return True
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:  # a build of torch without distributed
        return False
    return isinstance(model, FSDPModule)


def is_classic(model: nn.Module) -> bool:
    """Whether torch's first FSDP holds ``model``."""
    return _ROOT in vars(model)
