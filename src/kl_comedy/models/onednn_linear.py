"""Float32 products of rows and weights by oneDNN, on CPUs where torch's choice (MKL) is slow.

MKL leaves half of an AVX-512 core idle when the processor is not Intel's; oneDNN, which torch also ships, does not
(bench/NOTES.md). On such a processor :func:`load_model` replaces the linear layers by :class:`OnednnLinear`; a GPU and
every other CPU keep ``nn.Linear``. The arithmetic is the same float32 arithmetic, summed in another order.
``KL_COMEDY_LINEAR`` (``auto``, ``torch`` or ``onednn``) overrides the choice.

This module exists because torch has no setting for it: its flags switch oneDNN off, and leave float32 products to MKL
where it is on. Without the module, runs on such processors take longer and round differently from stored ones.

Legend: ``M`` rows, ``K`` inputs, ``N`` outputs.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from kl_comedy.errors import bad_value

VARIABLE = "KL_COMEDY_LINEAR"
LIBRARIES = ("auto", "torch", "onednn")
MIN_ELEMENTS = 100_000
MIN_PRODUCTS = 3_000_000
"""Weights with fewer elements, in products of fewer multiplications, stay with torch: a call of oneDNN costs more."""
FEW_ROWS = range(9, 65)
"""Numbers of rows for which the product is computed as weight times rows and transposed."""
LARGE_SIDE = 16_384
BLOCK = 2048
"""A side of at least ``LARGE_SIDE`` (a vocabulary's) is computed in blocks of this size, which fit a core's cache."""


def linear_library() -> str:
    """``onednn`` or ``torch``: the environment variable's choice, else the processor's.

    It depends on the machine alone, never on a measurement, so a run sums in the same order every time. Raises
    :class:`UserError` for another value of the variable.
    """
    return _library(os.environ.get(VARIABLE, "auto"))


@functools.lru_cache
def _library(choice: str) -> str:
    if choice not in LIBRARIES:
        raise bad_value(VARIABLE, choice, LIBRARIES)
    if choice != "auto":
        return choice
    slow_mkl = torch.backends.cpu.get_cpu_capability() == "AVX512" and processor_vendor() != "GenuineIntel"
    backends: Any = torch.backends
    has_both = backends.mkl.is_available() and backends.mkldnn.is_available()
    if slow_mkl and has_both:
        return "onednn"
    return "torch"


def processor_vendor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's vendor id; ``GenuineIntel``, for which torch's choice is kept, where it is not known."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    if not is_x86 or not cpuinfo.exists():
        return "GenuineIntel"
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "vendor_id":
            return value.strip()
    return "GenuineIntel"


class OnednnLinear(nn.Linear):
    """A linear layer whose float32 product on the CPU is oneDNN's."""

    def forward(self, input: Tensor) -> Tensor:
        out_MN = product(input.reshape(-1, self.in_features), self.weight, self.bias)
        return out_MN.view(*input.shape[:-1], self.out_features)


def use_onednn_linears(model: nn.Module) -> None:
    """Replace the plain linear layers of ``model`` by :class:`OnednnLinear` with the same parameters."""
    # All are found before one is replaced. Subclasses of nn.Linear compute something else, and stay.
    plain = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    for name, module in plain:
        replacement = OnednnLinear(module.in_features, module.out_features, module.bias is not None, device="meta")
        replacement.weight = module.weight
        replacement.bias = module.bias
        replacement.train(module.training)
        model.set_submodule(name, replacement)


def product(rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """``rows @ weight.T + bias`` ``[M, N]``, differentiable once; either matrix may be a transposed view."""
    if not _suits_onednn(rows_MK, weight_NK):
        return linear(rows_MK, weight_NK, bias_N)
    if not torch.is_grad_enabled():
        return _onednn(rows_MK, weight_NK, bias_N)
    out_MN: Tensor = _Product.apply(rows_MK, weight_NK, bias_N)  # type: ignore[no-untyped-call]
    return out_MN


def _suits_onednn(rows_MK: Tensor, weight_NK: Tensor) -> bool:
    is_large = weight_NK.numel() >= MIN_ELEMENTS or weight_NK.numel() * len(rows_MK) >= MIN_PRODUCTS
    if not is_large or torch.is_autocast_enabled("cpu"):
        return False
    for tensor in (rows_MK, weight_NK):
        # Subclasses of Tensor, as those of shards, have products of their own.
        is_plain = type(tensor) in (Tensor, nn.Parameter)
        if not is_plain or tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            return False
    return linear_library() == "onednn"


def _onednn(rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """oneDNN copies its second factor into another layout at every call: pass the smaller one there, or blocks."""
    rows = len(rows_MK)
    outputs, inputs = weight_NK.shape
    if inputs >= LARGE_SIDE:
        return _sum_of_blocks(rows_MK, weight_NK, bias_N)
    if bias_N is None and rows in FEW_ROWS and rows < outputs and weight_NK.is_contiguous():
        # (weight rows^T)^T, in which the rows are the factor that is copied.
        return _call(weight_NK, rows_MK, None).t().contiguous()
    if bias_N is None and outputs >= LARGE_SIDE and rows >= FEW_ROWS.stop:
        out_MN = rows_MK.new_empty(rows, outputs)
        for start in range(0, outputs, BLOCK):
            block = slice(start, start + BLOCK)
            out_MN[:, block] = _call(rows_MK, weight_NK[block], None)
        return out_MN
    return _call(rows_MK, weight_NK, bias_N)


def _sum_of_blocks(rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """The product as a sum over blocks of inputs."""
    rows = len(rows_MK)
    outputs, inputs = weight_NK.shape
    if bias_N is None:
        out_MN = rows_MK.new_zeros(rows, outputs)
    else:
        out_MN = bias_N.expand(rows, -1).clone()
    for start in range(0, inputs, BLOCK):
        block = slice(start, start + BLOCK)
        out_MN += _call(rows_MK[:, block], weight_NK[:, block], None)
    return out_MN


def _call(rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    # torch has no public function that asks for oneDNN; this is the operator that torch.compile uses.
    out_MN: Tensor = torch.ops.mkldnn._linear_pointwise(
        rows_MK, weight_NK, bias_N, attr="none", scalars=[], algorithm=""
    )
    return out_MN


class _Product(torch.autograd.Function):
    """:func:`product` with its gradients, each a product of the same kind."""

    @staticmethod
    def forward(ctx: Any, rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows_MK, weight_NK)
        return _onednn(rows_MK, weight_NK, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows_MK, weight_NK = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        rows_grad_MK = None
        weight_grad_NK = None
        bias_grad_N = None
        # d loss / d rows = g W
        if needs_rows:
            rows_grad_MK = _onednn(grad_MN, weight_NK.t(), None)
        # d loss / d W = g^T rows
        if needs_weight:
            weight_grad_NK = _onednn(grad_MN.t(), rows_MK.t(), None)
        # d loss / d bias = sum of g over the rows
        if needs_bias:
            bias_grad_N = grad_MN.sum(0)
        return rows_grad_MK, weight_grad_NK, bias_grad_N
