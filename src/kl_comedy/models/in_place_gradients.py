"""Gradients of a large vocabulary's matrix, added where they belong instead of carried there.

A head's gradient is a matrix ``[V, H]`` that autograd holds while it goes through all layers, because a tied
embedding adds another one of that size at the end, and only their sum reaches ``.grad``. Within :func:`in_place`
both add to ``.grad`` themselves and autograd gets nothing. Who wants gradients any other way (``autograd.grad``,
shards) stays outside.

Legend: ``V`` vocabulary, ``H`` hidden width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LARGE = 2**22
"""Elements from which a matrix is worth it: 16 MiB in float32."""

_wanted: ContextVar[bool] = ContextVar("gradients_in_place", default=False)


@contextlib.contextmanager
def in_place(on: bool = True) -> Iterator[None]:
    """Passes made here will add to ``.grad`` of large matrices themselves when ``backward`` is called."""
    token = _wanted.set(on)
    try:
        yield
    finally:
        _wanted.reset(token)


def adds_in_place(weight_VH: Tensor) -> bool:
    """Whether the pass that is being made adds this gradient itself: plain float32 parameters of some size."""
    return (
        _wanted.get()
        and torch.is_grad_enabled()
        and type(weight_VH) is nn.Parameter
        and weight_VH.requires_grad
        and weight_VH.dtype == torch.float32
        and weight_VH.numel() >= LARGE
    )


def gradient_of(weight_VH: Tensor) -> Tensor:
    """``weight.grad``; zeros where there was none."""
    if weight_VH.grad is None:
        weight_VH.grad = torch.zeros_like(weight_VH)
    return weight_VH.grad


class Embedding(nn.Embedding):
    """An embedding whose gradient is added row by row within :func:`in_place`; in all else the library's own."""

    def forward(self, input: Tensor) -> Tensor:
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse or not adds_in_place(self.weight):
            return super().forward(input)
        found: Tensor = _Rows.apply(self.weight, input, self.padding_idx)  # type: ignore[no-untyped-call]  # torch
        return found


class _Rows(torch.autograd.Function):
    """Rows of a matrix; no gradient for ``skipped``, as the library does with a padding token."""

    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor, ids: Tensor, skipped: int | None) -> Tensor:
        ctx.weight_VH, ctx.ids, ctx.skipped = weight_VH, ids, skipped
        return weight_VH.detach()[ids]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch does not type it
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        rows, ids = grad.reshape(-1, grad.shape[-1]), ctx.ids.reshape(-1)
        if ctx.skipped is not None:
            rows, ids = rows[ids != ctx.skipped], ids[ids != ctx.skipped]
        gradient_of(ctx.weight_VH).index_add_(0, ids, rows.to(ctx.weight_VH.dtype))
        return None, None, None


def adopt_embeddings(model: nn.Module) -> None:
    """Make every plain embedding of ``model`` that is large enough an :class:`Embedding`."""
    for module in model.modules():
        if type(module) is nn.Embedding and module.weight.numel() >= LARGE:
            module.__class__ = Embedding
