"""What differs on a GPU: variables read at its start, running sums, products with wide sums.

:func:`on_gpu` decides; on a CPU every function is the plain operation. Torch is imported inside the functions, because
:func:`set_variables` must come first.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Deterministic products (torch reads it once, at the first product), and less fragmentation by micro-batches of
different sizes."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of torch's allocator; the first that is set counts."""
EXPANDABLE = "expandable_segments"

PROBABILITY_STEPS = 2.0**52
"""A probability is summed as a whole multiple of 1 / this: exact in float64, and finer than a float32."""


def set_variables() -> None:
    """Set :data:`VARIABLES` where the user has not. Call before torch is imported."""
    for name, value in VARIABLES.items():
        if name != "PYTORCH_CUDA_ALLOC_CONF" or "PYTORCH_ALLOC_CONF" not in os.environ:
            os.environ.setdefault(name, value)


def allocator_settings(environment: Mapping[str, str]) -> str:
    """What torch's allocator was started with.

    >>> allocator_settings({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    'expandable_segments:True'
    """
    return next((environment[name] for name in ALLOCATOR_VARIABLES if environment.get(name)), "")


def shareable_settings(settings: str) -> str | None:
    """``settings`` with expandable segments off; None where they are off already.

    Every other setting is repeated, since torch takes one that is absent for its default.

    >>> shareable_settings("max_split_size_mb:512,expandable_segments:True")
    'max_split_size_mb:512,expandable_segments:False'
    >>> shareable_settings("max_split_size_mb:512") is None
    True
    """
    fields = [field.strip() for field in settings.split(",") if field.strip()]
    changed = []
    for field in fields:
        name, _, value = field.partition(":")
        is_on = name.strip() == EXPANDABLE and value.strip().lower() in ("true", "1")
        changed.append(f"{EXPANDABLE}:False" if is_on else field)
    return None if changed == fields else ",".join(changed)


_sharing = threading.Lock()


@contextlib.contextmanager
def shareable_memory() -> Iterator[None]:
    """GPU memory allocated inside can be opened by another process.

    Memory of expandable segments is passed as a file descriptor of this process, which containers without privileges
    and Ubuntu's default protection of processes refuse to another one (pytorch#165685), and which opens slowly. With
    the setting off torch's allocator takes none of its expandable blocks, cached ones neither. The setting belongs to
    the whole process: one thread at a time changes it.
    """
    settings = allocator_settings(os.environ)
    shareable = shareable_settings(settings)
    if shareable is None:
        yield
        return
    import torch

    set_allocator: Any = torch._C._accelerator_setAllocatorSettings  # type: ignore[attr-defined]
    with _sharing:
        set_allocator(shareable)
        try:
            yield
        finally:
            set_allocator(settings)


def leave_memory_unfilled() -> None:
    """Do not fill new memory with NaN, as torch does under determinism: everything is written before it is read. FSDP
    takes new memory for every layer; torch's profiler gave the filling 7 % of an update of two ranks on a CPU."""
    from torch.utils import deterministic

    deterministic.fill_uninitialized_memory = False


def on_gpu(tensor: Tensor) -> bool:
    """Whether ``tensor`` is anywhere but on the CPU (a ``meta`` tensor stands for a GPU's)."""
    return tensor.device.type != "cpu"


def running_sum(values: Tensor) -> Tensor:
    """``values.cumsum(-1)``, differentiable; torch refuses that on a GPU under determinism, for want of a fixed order.

    On a GPU each element adds the one that stands 1, 2, 4, ... places before it, in log2 of the width steps. Neither
    autocast nor TF32 changes an addition, as they would a triangular product.
    """
    if not on_gpu(values):
        return values.cumsum(-1)
    from torch.nn.functional import pad

    step = 1
    while step < values.shape[-1]:
        values = values + pad(values[..., :-step], (step, 0))
        step *= 2
    return values


def running_probability(probability: Tensor) -> Tensor:
    """The running sum of probabilities along the last axis in float64, never decreasing, equal where one is zero.

    On a GPU as whole numbers: these have the same sum in any order, so torch's is deterministic. Overwrites a float64
    ``probability``.
    """
    if not on_gpu(probability):
        return probability.double().cumsum_(-1)
    return (probability.double() * PROBABILITY_STEPS).long().cumsum(-1).double() / PROBABILITY_STEPS


def wide_product(rows_MK: Tensor, columns_KN: Tensor) -> Tensor:
    """``rows @ columns`` of two 16-bit matrices, summed in float32, which the result ``[M, N]`` keeps.

    A product of two bfloat16 numbers is exact in float32, so CPU and GPU differ in the order of the sums alone.
    """
    import torch

    if on_gpu(rows_MK):
        return torch.mm(rows_MK, columns_KN, out_dtype=torch.float32)
    return rows_MK.float() @ columns_KN.float()
