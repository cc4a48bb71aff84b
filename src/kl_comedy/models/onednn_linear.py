"""Products of rows and weights in float32 on a CPU, by the library that is fast there.

Torch hands float32 products to MKL, which leaves half of an AVX-512 core of another maker than Intel idle; oneDNN,
which torch brings too, does not. Where that is so (:func:`library`), the linear layers of a loaded model and its
head are computed by oneDNN: the same float32 arithmetic, summed in another order. Everywhere else, and for
every other dtype or device, the product is torch's own.

Legend: ``M`` rows, ``K`` inputs, ``N`` outputs.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from kl_comedy.errors import bad_value

VARIABLE = "KL_COMEDY_PRODUCTS"
LIBRARIES = ("auto", "torch", "onednn")
SMALLEST = 100_000
"""Elements of a weight below which the product stays with torch: what is won is less than a call's cost."""

FEW = range(9, 65)
"""Rows for which the product is computed as weight times rows and turned around, the turn included in what is
won. With fewer the two are alike; with more, turning the outcome costs what was won (bench/NOTES.md)."""

MANY, BLOCK = 16_384, 2048
"""A side of this size (a vocabulary's) is computed in blocks, small enough to stay in a core's cache."""


def library() -> str:
    """``onednn`` or ``torch``: what the environment variable ``KL_COMEDY_PRODUCTS`` says, or what suits the processor.

    It depends on the machine alone, never on a measurement, so that a run sums in the same order every time.
    Raises :class:`UserError` for another value of the variable.
    """
    return _library(os.environ.get(VARIABLE, "auto"))


@functools.lru_cache
def _library(asked: str) -> str:
    if asked not in LIBRARIES:
        raise bad_value(VARIABLE, asked, LIBRARIES)
    if asked != "auto":
        return asked
    idle = torch.backends.cpu.get_cpu_capability() == "AVX512" and processor_maker() != "GenuineIntel"
    return "onednn" if idle and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() else "torch"


def processor_maker(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The maker's name that the processor gives itself, ``GenuineIntel`` where it is not known."""
    if platform.machine() not in ("x86_64", "AMD64") or not cpuinfo.exists():
        return "GenuineIntel"
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "vendor_id":
            return value.strip()
    return "GenuineIntel"


def suits(rows: Tensor, weight_NK: Tensor) -> bool:
    """Whether this product goes to oneDNN: plain float32 tensors on a CPU, a weight of some size, no autocast."""
    return (
        weight_NK.numel() >= SMALLEST
        and rows.dtype == weight_NK.dtype == torch.float32
        and rows.device.type == weight_NK.device.type == "cpu"
        and type(rows) in (Tensor, nn.Parameter)
        and type(weight_NK) in (Tensor, nn.Parameter)
        and not torch.is_autocast_enabled("cpu")
        and library() == "onednn"
    )


def rows_times(rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """``rows @ weight.T + bias`` ``[M, N]``, differentiable once; either matrix may be a transposed view."""
    if not suits(rows_MK, weight_NK):
        return linear(rows_MK, weight_NK, bias_N)
    if not torch.is_grad_enabled():
        return _onednn(rows_MK, weight_NK, bias_N)
    found: Tensor = _Product.apply(rows_MK, weight_NK, bias_N)  # type: ignore[no-untyped-call]  # torch does not type it
    return found


def _onednn(rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """oneDNN copies its second factor into another layout at every call: the smaller one goes there, or blocks do."""
    rows, (outputs, inputs) = len(rows_MK), weight_NK.shape
    if inputs >= MANY:
        out_MN = rows_MK.new_zeros(rows, outputs) if bias_N is None else bias_N.expand(rows, -1).clone()
        for part in _blocks(inputs):
            out_MN += _call(rows_MK[:, part], weight_NK[:, part], None)
        return out_MN
    if bias_N is None and rows in FEW and rows < outputs and weight_NK.is_contiguous():
        return _call(weight_NK, rows_MK, None).t().contiguous()
    if bias_N is None and outputs >= MANY and rows >= FEW.stop:
        out_MN = rows_MK.new_empty(rows, outputs)
        for part in _blocks(outputs):
            out_MN[:, part] = _call(rows_MK, weight_NK[part], None)
        return out_MN
    return _call(rows_MK, weight_NK, bias_N)


def _blocks(size: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK) for start in range(0, size, BLOCK))


def _call(rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows_MK, weight_NK, bias_N, "none", [], "")
    return found


def add_product(into_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> None:
    """``into += left @ right``, in place and without gradient; the outcome is never held whole beside ``into``."""
    if not suits(left_MK, into_MN):
        into_MN.addmm_(left_MK, right_KN)
        return
    for part in _blocks(len(into_MN)):
        into_MN[part] += _call(left_MK[part], right_KN.t(), None)


class _Product(torch.autograd.Function):
    """:func:`rows_times` with its gradients, each a product of the same kind."""

    @staticmethod
    def forward(ctx: Any, rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows_MK, weight_NK)
        return _onednn(rows_MK, weight_NK, bias_N)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch does not type it
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows_MK, weight_NK = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            _onednn(grad_MN, weight_NK.t(), None) if wanted[0] else None,
            _onednn(grad_MN.t(), rows_MK.t(), None) if wanted[1] else None,
            grad_MN.sum(0) if wanted[2] else None,
        )


class Linear(nn.Linear):
    """A linear layer whose product is computed where :func:`suits` says; in all else the library's own."""

    def forward(self, input: Tensor) -> Tensor:
        if not suits(input, self.weight):
            return super().forward(input)
        out_MN = rows_times(input.reshape(-1, self.in_features), self.weight, self.bias)
        return out_MN.view(*input.shape[:-1], self.out_features)


def adopt_products(model: nn.Module) -> None:
    """Make every plain linear layer of ``model`` a :class:`Linear`, where this machine has a use for it."""
    if library() != "onednn":
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
