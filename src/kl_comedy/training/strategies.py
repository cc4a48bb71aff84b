"""Lightning's strategies as a run uses them: what is summed when, and checkpoints in the run's own format.

| train.strategy | class | gradients |
|---|---|---|
| `single` | SingleDeviceStrategy | are there |
| `ddp` | DDPStrategy, unwrapped: accumulation differs from update to update | summed after the last micro-batch |
| `fsdp` | ModelParallelStrategy, FSDP2 | reduced into shards by every backward |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from kl_comedy.config import Config
from kl_comedy.models.weights import whole
from kl_comedy.training.checkpoint import read_checkpoint, write_checkpoint
from kl_comedy.training.distributed import TIMEOUT, World, cluster_environment

GRADIENT_BUCKET_BYTES = 64 * 2**20
"""Gradients summed in one exchange under `ddp`: large enough to fill a network, small beside a model."""


class _OwnCheckpoints:
    """Weights, optimizer and loop go to the folder format of :mod:`kl_comedy.training.checkpoint`."""

    world: World
    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loaded already, with the rest."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loaded already, with the rest."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        this: Any = self
        write_checkpoint(Path(filepath), checkpoint, this.lightning_module, this.optimizers, self.world)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        this: Any = self
        return read_checkpoint(Path(checkpoint_path), this.lightning_module, this.optimizers, self.world)


class Single(_OwnCheckpoints, SingleDeviceStrategy):  # type: ignore[misc]
    """One process."""


class Replicated(_OwnCheckpoints, DDPStrategy):  # type: ignore[misc]
    """A whole policy in every process. Weights begin as the first's; gradients are summed by :func:`sum_gradients`."""

    def _setup_model(self, model: nn.Module) -> Any:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)
        return model

    def _register_ddp_hooks(self) -> None:
        """No wrapper, no hooks."""


class Sharded(_OwnCheckpoints, ModelParallelStrategy):  # type: ignore[misc]
    """FSDP2: the policy was sharded when it was loaded."""


def strategy_for(config: Config, world: World, device: torch.device) -> Strategy:
    """The strategy that ``train.strategy`` names, of processes that are connected already."""
    found: Any
    if config.train.strategy == "single":
        found = Single(device=device)
    elif config.train.strategy == "ddp":
        found = Replicated(cluster_environment=cluster_environment(), timeout=TIMEOUT)
    else:
        found = Sharded(data_parallel_size=world.size, tensor_parallel_size=1, timeout=TIMEOUT)
        found.cluster_environment = cluster_environment()
    found.world = world
    strategy: Strategy = found
    return strategy


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], world: World) -> None:
    """Add up over all ranks the gradients of parameters that are whole on each, in buckets.

    A parameter without gradient on some ranks counts as zero there; without one on any it stays without.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    has = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
    world.sum(has)
    bucket: list[Tensor] = []
    held = 0
    for parameter, ranks in zip(trained, has.tolist(), strict=True):
        if not ranks:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bucket.append(parameter.grad)
        held += parameter.grad.numel() * parameter.grad.element_size()
        if held >= GRADIENT_BUCKET_BYTES:
            _sum_bucket(bucket, world)
            bucket, held = [], 0
    _sum_bucket(bucket, world)


def _sum_bucket(bucket: list[Tensor], world: World) -> None:
    for dtype in {tensor.dtype for tensor in bucket}:
        alike = [tensor for tensor in bucket if tensor.dtype == dtype]
        flat = world.sum(_flatten_dense_tensors(alike))
        for tensor, summed in zip(alike, _unflatten_dense_tensors(flat, alike), strict=True):
            tensor.copy_(summed)


def clip_gradients(parameters: Iterable[nn.Parameter], bound: float, world: World) -> float:
    """Clip the norm of all gradients together to ``bound``; the norm before. All processes must call."""
    chosen = list(parameters)
    return float(whole(nn.utils.clip_grad_norm_(chosen, bound)))
