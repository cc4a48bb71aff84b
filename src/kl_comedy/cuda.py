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
"""Probabilities are summed as whole multiples of 1 / this number: exact in float64, and finer than a float32."""


def set_variables() -> None:
    """Set :data:`VARIABLES` where the user has not. Call before torch is imported."""
    for name, value in VARIABLES.items():
        # torch has two names for the allocator's settings; the user may have used the other.
        has_other_name = name == "PYTORCH_CUDA_ALLOC_CONF" and "PYTORCH_ALLOC_CONF" in os.environ
        if not has_other_name:
            os.environ.setdefault(name, value)


def allocator_settings(environment: Mapping[str, str]) -> str:
    """What torch's allocator was started with.

    >>> allocator_settings({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    'expandable_segments:True'
    """
    for name in ALLOCATOR_VARIABLES:
        if environment.get(name):
            return environment[name]
    return ""


def shareable_settings(settings: str) -> str | None:
    """``settings`` with expandable segments off; None where they are off already.

    Every other setting is repeated, since torch takes one that is absent for its default.

    >>> shareable_settings("max_split_size_mb:512,expandable_segments:True")
    'max_split_size_mb:512,expandable_segments:False'
    >>> shareable_settings("max_split_size_mb:512") is None
    True
    """
    changed = False
    fields = []
    for text in settings.split(","):
        field = text.strip()
        name, _, value = field.partition(":")
        if name.strip() == EXPANDABLE and value.strip().lower() in ("true", "1"):
            field = f"{EXPANDABLE}:False"
            changed = True
        if field:
            fields.append(field)
    if not changed:
        return None
    return ",".join(fields)


_sharing = threading.Lock()


@contextlib.contextmanager
def shareable_memory() -> Iterator[None]:
    """GPU memory that is allocated in this context can be opened by another process.

    Memory of expandable segments is passed as a file descriptor of this process, which containers without privileges
    and Ubuntu's default protection of processes refuse to another one (pytorch#165685), and which opens slowly. With
    the setting off torch's allocator uses none of its expandable blocks, not even cached ones. The setting belongs to
    the whole process: one thread at a time changes it.
    """
    settings = allocator_settings(os.environ)
    shareable = shareable_settings(settings)
    if shareable is None:
        yield
        return
    import torch

    # Private: torch has no public function that changes the setting after the start.
    set_allocator: Any = torch._C._accelerator_setAllocatorSettings
    with _sharing:
        set_allocator(shareable)
        try:
            yield
        finally:
            set_allocator(settings)


def leave_memory_unfilled() -> None:
    """Do not fill new memory with NaN, as torch does under determinism: everything is written before it is read.

    FSDP takes new memory for every layer: with two ranks on a CPU, the filling took 7 % of an update (torch's
    profiler).
    """
    import torch.utils.deterministic

    # Any: torch makes the setting a property of the module's class, which types do not show.
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False


def on_gpu(tensor: Tensor) -> bool:
    """Whether ``tensor`` is anywhere but on the CPU (a ``meta`` tensor stands for a GPU's)."""
    return tensor.device.type != "cpu"


def running_sum(values: Tensor) -> Tensor:
    """``values.cumsum(-1)``, differentiable.

    Under determinism torch refuses a cumsum on a GPU, because its order is not fixed. There each element adds the one
    that stands 1, 2, 4, ... places before it: as many steps as the base-2 logarithm of the width. A product with a
    triangular matrix would be shorter, but autocast and TF32 change products; they do not change additions.
    """
    if not on_gpu(values):
        return values.cumsum(-1)
    from torch.nn.functional import pad

    # After the pass with a step, each element holds the sum of up to 2 x step elements that end with it.
    step = 1
    while step < values.shape[-1]:
        values = values + pad(values[..., :-step], (step, 0))
        step *= 2
    return values


def running_probability(probability: Tensor) -> Tensor:
    """The running sum of probabilities along the last axis in float64, never decreasing, equal where one is zero.

    On a GPU the sum is over whole numbers, which have the same sum in any order, so torch's is deterministic.
    Overwrites a float64 ``probability``.
    """
    if not on_gpu(probability):
        return probability.double().cumsum_(-1)
    # The sum of a distribution is about 2^52, far below the largest 64-bit integer.
    whole = (probability.double() * PROBABILITY_STEPS).long()
    return whole.cumsum(-1).double() / PROBABILITY_STEPS


def wide_product(rows_MK: Tensor, columns_KN: Tensor) -> Tensor:
    """``rows @ columns`` of two 16-bit matrices ``[M, K]`` and ``[K, N]``, summed in float32; the result is float32.

    A product of two bfloat16 numbers is exact in float32, so CPU and GPU differ only in the order of the sums.
    """
    import torch

    if on_gpu(rows_MK):
        return torch.mm(rows_MK, columns_KN, out_dtype=torch.float32)
    return rows_MK.float() @ columns_KN.float()
