"""Float32 products of rows and weights by oneDNN, on CPUs where torch's choice (MKL) is slow.

MKL leaves half of an AVX-512 core idle when the processor is not Intel's; oneDNN, which torch also ships, does not
(bench/NOTES.md). On such a processor :func:`load_model` replaces the linear layers by :class:`OnednnLinear`; a GPU and
every other CPU keep ``nn.Linear``. The arithmetic is the same float32 arithmetic, summed in another order.
``KL_COMEDY_LINEAR`` (``auto``, ``torch`` or ``onednn``) overrides the choice.

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
MIN_ELEMENTS, MIN_PRODUCTS = 100_000, 3_000_000
"""Weights with fewer elements, where they and the rows have fewer products, stay with torch: a call costs more."""
FEW_ROWS = range(9, 65)
"""Numbers of rows for which the product is computed as weight times rows and transposed."""
LARGE_SIDE, BLOCK = 16_384, 2048
"""A side of this size (a vocabulary's) is computed in blocks that fit a core's cache."""


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
    available = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return "onednn" if slow_mkl and available else "torch"


def processor_vendor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's vendor id; ``GenuineIntel`` where it is not known."""
    if platform.machine() in ("x86_64", "AMD64") and cpuinfo.exists():
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
    plain = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    for name, module in plain:
        replacement = OnednnLinear(module.in_features, module.out_features, module.bias is not None, device="meta")
        replacement.weight, replacement.bias = module.weight, module.bias
        replacement.train(module.training)
        model.set_submodule(name, replacement)


def product(rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """``rows @ weight.T + bias`` ``[M, N]``, differentiable once; either matrix may be a transposed view."""
    suitable = (
        (weight_NK.numel() >= MIN_ELEMENTS or weight_NK.numel() * len(rows_MK) >= MIN_PRODUCTS)
        and all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in (rows_MK, weight_NK))
        and all(type(tensor) in (Tensor, nn.Parameter) for tensor in (rows_MK, weight_NK))
        and not torch.is_autocast_enabled("cpu")
        and linear_library() == "onednn"
    )
    if not suitable:
        return linear(rows_MK, weight_NK, bias_N)
    if not torch.is_grad_enabled():
        return _onednn(rows_MK, weight_NK, bias_N)
    out_MN: Tensor = _Product.apply(rows_MK, weight_NK, bias_N)  # type: ignore[no-untyped-call]
    return out_MN


def _onednn(rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """oneDNN copies its second factor into another layout at every call: pass the smaller one there, or blocks."""
    # torch has no public function that asks for oneDNN; this is the operator that torch.compile uses
    call = functools.partial(torch.ops.mkldnn._linear_pointwise, attr="none", scalars=[], algorithm="")
    rows, (outputs, inputs) = len(rows_MK), weight_NK.shape
    out_MN: Tensor
    if inputs >= LARGE_SIDE:
        out_MN = rows_MK.new_zeros(rows, outputs) if bias_N is None else bias_N.expand(rows, -1).clone()
        for start in range(0, inputs, BLOCK):
            out_MN += call(rows_MK[:, start : start + BLOCK], weight_NK[:, start : start + BLOCK], None)
    elif bias_N is None and rows in FEW_ROWS and rows < outputs and weight_NK.is_contiguous():
        out_MN = call(weight_NK, rows_MK, None).t().contiguous()
    elif bias_N is None and outputs >= LARGE_SIDE and rows >= FEW_ROWS.stop:
        out_MN = rows_MK.new_empty(rows, outputs)
        for start in range(0, outputs, BLOCK):
            out_MN[:, start : start + BLOCK] = call(rows_MK, weight_NK[start : start + BLOCK], None)
    else:
        out_MN = call(rows_MK, weight_NK, bias_N)
    return out_MN


class _Product(torch.autograd.Function):
    """:func:`product` with its gradients, each a product of the same kind."""

    @staticmethod
    def forward(ctx: Any, rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows_MK, weight_NK)
        return _onednn(rows_MK, weight_NK, bias_N)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows_MK, weight_NK = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (
            _onednn(grad_MN, weight_NK.t(), None) if needs[0] else None,
            _onednn(grad_MN.t(), rows_MK.t(), None) if needs[1] else None,
            grad_MN.sum(0) if needs[2] else None,
        )
