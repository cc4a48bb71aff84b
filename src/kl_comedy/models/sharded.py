"""Calling parts of a sharded (FSDP2) model: its parameters exist only inside what FSDP takes for a forward."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

_METHOD = "_kl_comedy_pass"


def call_as_forward(model: nn.Module, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """``run()``, inside the forward hooks of ``model`` when FSDP2 shards it, so that head and body are gathered.

    For any other model this is just ``run()``.
    """
    if not _is_fsdp(model):
        return run()
    from torch.distributed.fsdp import register_fsdp_forward_method

    sharded: Any = model
    if _METHOD not in vars(sharded):
        setattr(sharded, _METHOD, types.MethodType(lambda self, inner: inner(), sharded))
        register_fsdp_forward_method(sharded, _METHOD)
    result: tuple[Tensor, ...] = getattr(sharded, _METHOD)(run)
    return result


def _is_fsdp(model: nn.Module) -> bool:
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:  # a build of torch without distributed
        return False
    return isinstance(model, FSDPModule)
