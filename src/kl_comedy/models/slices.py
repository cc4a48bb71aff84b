"""What a process holds of a weight under torch's first FSDP: a contiguous part of the flattened tensor, or none of it.

FSDP2 keeps DTensors, which know how to become whole. The first FSDP leaves one-dimensional parameters, of which each
process has some elements, in the order of the ranks; :class:`Slice` adds what is needed to make the tensor whole, and
to lay it out as the DTensor that torch's distributed checkpoints write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_WRAPPED = "_fsdp_wrapped_module."
"""What FSDP puts into the names of what it wraps."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a parameter of ``shape`` lies over the ranks of ``mesh``: ``sizes`` elements on each, in order."""

    shape: torch.Size
    sizes: tuple[int, ...]
    mesh: DeviceMesh

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def start(self) -> int:
        """The first element that lies here, of the flattened tensor."""
        return sum(self.sizes[: self.rank])


@dataclass(frozen=True, kw_only=True, eq=False)
class Slice:
    """This process's elements ``local`` (one-dimensional, possibly none; a view of what is held) of a whole tensor."""

    local: Tensor
    layout: Layout

    @property
    def shape(self) -> torch.Size:
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def numel(self) -> int:
        return self.layout.shape.numel()

    def element_size(self) -> int:
        return self.local.element_size()

    def detach(self) -> Slice:
        return self

    def full_tensor(self) -> Tensor:
        """The whole tensor, on every process; all must call."""
        sizes = self.layout.sizes
        mine = self.local.new_zeros(max(sizes))
        mine[: len(self.local)] = self.local
        parts = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(parts, mine, group=self.layout.mesh.get_group())
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).view(self.shape)

    def take(self, whole: Tensor) -> None:
        """Overwrite the elements held here by those of ``whole``."""
        start = self.layout.start
        self.local.copy_(whole.reshape(-1)[start : start + len(self.local)])

    def spread(self) -> Tensor:
        """The values as a DTensor in rows over the ranks; all must call."""
        return self._rows(self.full_tensor())

    def room(self) -> Tensor:
        """A DTensor of zeros, laid out as :meth:`spread` does."""
        return self._rows(self.local.new_zeros(1).expand(self.shape))

    def _rows(self, whole: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard

        ranks = len(self.layout.sizes)
        rows = -(-self.shape[0] // ranks)
        local = whole[rows * self.layout.rank : rows * (self.layout.rank + 1)].contiguous()
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            local, self.layout.mesh, [Shard(0)], run_check=False, shape=self.shape, stride=stride
        )  # fmt: skip


_LAYOUTS = WeakTensorKeyDictionary()
"""The layout of every parameter that the first FSDP holds, for as long as it lives."""


def remember_layouts(shapes: list[tuple[nn.Parameter, torch.Size]], mesh: DeviceMesh) -> None:
    """Note the whole ``shapes`` of parameters that FSDP has cut; all processes must call, in step."""
    sizes: list[Any] = [None] * mesh.size()
    dist.all_gather_object(sizes, [parameter.numel() for parameter, _ in shapes], group=mesh.get_group())
    for (parameter, shape), held_by in zip(shapes, zip(*sizes, strict=True), strict=True):
        if sum(held_by) != shape.numel():
            raise RuntimeError(f"FSDP holds {sum(held_by)} elements of a weight of {shape.numel()}")
        _LAYOUTS[parameter] = Layout(shape=shape, sizes=tuple(held_by), mesh=mesh)


def is_slice(parameter: Tensor) -> bool:
    return parameter in _LAYOUTS


def held(parameter: Tensor, values: Tensor | None = None) -> Any:
    """``parameter``, or ``values`` laid out as it is, so that it can become whole: itself, or a :class:`Slice`."""
    layout = _LAYOUTS.get(parameter)
    kept = parameter if values is None else values
    return kept if layout is None else Slice(local=kept.detach().reshape(-1), layout=layout)


def local(values: Any) -> Tensor:
    """The elements that lie here, in the shape of the parameter that :func:`held` was given."""
    kept: Tensor = values.local if isinstance(values, Slice) else values
    return kept


def clean_name(name: str) -> str:
    """The name that a weight has without FSDP around it.

    >>> clean_name("model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    return name.replace(_WRAPPED, "")


def named_parameters(model: nn.Module, *, tied: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters under the names they have unwrapped; with ``tied`` each under all of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=not tied):
        yield clean_name(name), parameter


def kept_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a state dict keeps, without asking for one: FSDP would gather every weight for it."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield clean_name(f"{prefix}.{name}".lstrip(".")), buffer
