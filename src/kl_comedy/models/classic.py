"""A policy sharded by torch's first FSDP (FullyShardedDataParallel), as :mod:`kl_comedy.models.sharding` does by FSDP2.

    skeleton on the meta device -> (a decoder layer in memory, filled from rank 0, wrapped: its shard stays) per layer
                                -> embedding, norm and head likewise, around the layers -> a root without weights

The root holds nothing because FSDP leaves a root's weights gathered after a pass without gradient. So every unit is in
shards whenever nothing is computed, and each parameter is this process's part of it (:mod:`kl_comedy.models.slices`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kl_comedy.errors import UserError
from kl_comedy.models.load import (
    LoadedModel,
    initial_adapter,
    load_tokenizer,
    pick_device,
    prepare_tokenizer,
    probe_head,
)
from kl_comedy.models.sharded import remember_root, remember_twin
from kl_comedy.models.sharding import base_name, decoder_layers, from_rank_zero, tie, trained_skeleton, weight_source
from kl_comedy.models.slices import remember_layouts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from kl_comedy.config.schema import ModelConfig

Fill = Callable[[str, Tensor], None]
"""Gives a whole weight (or kept buffer) its values by its name; called on every process, in the same order."""


def load_classic(config: ModelConfig, *, limit_bytes: int) -> LoadedModel:
    """Load the policy of ``config`` over all processes of the default group, which must be there already.

    Raises :class:`UserError` for what the user can mend, on every process alike.
    """
    device = pick_device(config.device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    tokenizer = load_tokenizer(config)
    prepare_tokenizer(tokenizer)
    model = _skeleton(config)
    _refuse_mixed(model)
    source = from_rank_zero(lambda: weight_source(config, model, limit_bytes))

    def fill(name: str, tensor: Tensor) -> None:
        if dist.get_rank() == 0:
            assert source is not None
            value = initial_adapter(name, tuple(tensor.shape)) if ".lora_" in name else source(base_name(name))
            tensor.copy_(value)
        dist.broadcast(tensor, src=0)

    wrap(model, config, mesh, device, fill)
    model.train(config.gradient_checkpointing)
    probe_head(model, share_prompt=config.share_prompt)
    return LoadedModel(model=model, tokenizer=tokenizer, device=device, source=config.source)


def _skeleton(config: ModelConfig) -> Any:
    """What will be wrapped, on the meta device; tied weights are one parameter from the start."""
    model = trained_skeleton(config)
    tie(model)
    return model


def _refuse_mixed(model: nn.Module) -> None:
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    if len(dtypes) > 1:
        raise UserError(
            f"train.strategy: fsdp1 flattens weights of one type, and this policy has {' and '.join(dtypes)}; set "
            "model.dtype=float32, or train.strategy=fsdp"
        )


@torch.no_grad()
def wrap(model: Any, config: ModelConfig, mesh: DeviceMesh, device: torch.device, fill: Fill | None) -> None:
    """Put FSDP around each decoder layer and around the rest, one unit in memory at a time; ``model`` stays itself."""
    shapes: list[tuple[nn.Parameter, torch.Size]] = []
    layers = decoder_layers(model)
    for name, layer in [(name, module) for name, module in model.named_modules() if module in layers]:
        _materialize(layer, f"{name}.", device, fill, shapes)
        model.set_submodule(name, _unit(layer, mesh, device))
    _materialize(model, "", device, fill, shapes)
    remember_root(model, _unit(_Root(_unit(_Entry(model), mesh, device)), mesh, device))
    remember_layouts(shapes, mesh)
    remember_twin(model, lambda: _unfilled(config, mesh, device))


def _unfilled(config: ModelConfig, mesh: DeviceMesh, device: torch.device) -> Any:
    model = _skeleton(config)
    wrap(model, config, mesh, device, None)
    return model


def _unit(module: nn.Module, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    return FullyShardedDataParallel(
        module, process_group=mesh.get_group(), sharding_strategy=ShardingStrategy.FULL_SHARD, device_id=device,
        use_orig_params=True,
    )  # fmt: skip


def _materialize(
    module: nn.Module, prefix: str, device: torch.device, fill: Fill | None,
    shapes: list[tuple[nn.Parameter, torch.Size]],
) -> None:  # fmt: skip
    """Give what is not yet wrapped in ``module`` memory and values, and note its parameters with their shapes."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in _outside(module):
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    own = torch.empty_like(parameter, device=device)
                    made[parameter] = nn.Parameter(own, requires_grad=parameter.requires_grad)
                part._parameters[name] = made[parameter]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
    names = {id(part): name for name, part in module.named_modules()}
    seen: set[int] = set()
    for part in _outside(module):
        start = f"{prefix}{names[id(part)]}.".lstrip(".")
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                shapes.append((parameter, parameter.shape))
                if fill is not None:
                    fill(start + name, parameter)
        for name, buffer in part._buffers.items():
            if buffer is not None and fill is not None and name not in part._non_persistent_buffers_set:
                fill(start + name, buffer)


def _outside(module: nn.Module) -> list[nn.Module]:
    """``module`` and what is in it, without the units that FSDP holds already."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(module, FullyShardedDataParallel):
        return []
    return [module, *(inner for child in module.children() for inner in _outside(child))]


class _Entry(nn.Module):
    """The unit of embedding, norm and head: whatever is run in its forward finds them gathered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.policy = model

    def forward(self, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return run()


class _Root(nn.Module):
    """FSDP's root; it has no weights of its own."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self.unit(run)
        return found
