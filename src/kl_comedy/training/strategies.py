"""Lightning's strategies as a run uses them: what is summed when, and checkpoints in the run's own format.

| train.strategy | class | gradients |
|---|---|---|
| `single` | SingleDeviceStrategy | are there |
| `ddp` | DDPStrategy without DDP's wrapper | summed once, after the last micro-batch |
| `fsdp` | ModelParallelStrategy, FSDP2 | reduced into shards by every backward |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn

from kl_comedy.config import Config
from kl_comedy.models.load import pick_device
from kl_comedy.models.weights import full_tensor
from kl_comedy.training.checkpoint import read_checkpoint, write_checkpoint
from kl_comedy.training.distributed import TIMEOUT, Ranks, cluster_environment

NEWEST = "newest"
"""As ``ckpt_path`` of ``Trainer.fit``: resume from ``strategy.newest_checkpoint``, or start anew where that is None."""

GRADIENT_BUCKET_BYTES = 64 * 2**20
"""Gradients summed in one exchange under `ddp`: large enough to fill a network, small beside a model."""


class _FolderCheckpoints:
    """Weights, optimizer and loops are saved in the folder format of :mod:`kl_comedy.training.checkpoint`."""

    restore_checkpoint_after_setup = True  # which checkpoint is the newest is decided once the processes are connected
    lightning_restore_optimizer = False
    sharded = False
    newest_checkpoint: Path | None = None

    @property
    def ranks(self: Any) -> Ranks:
        """The processes of the run; call once they are connected."""
        return Ranks(rank=self.global_rank, size=getattr(self, "world_size", 1), sharded=self.sharded)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """:meth:`load_checkpoint` loaded it."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """:meth:`load_checkpoint` loaded it."""

    def save_checkpoint(self: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        write_checkpoint(Path(filepath), checkpoint, self.lightning_module, self.optimizers, self.ranks)

    def load_checkpoint(self: Any, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = self.newest_checkpoint if checkpoint_path == NEWEST else Path(checkpoint_path)
        if path is None:
            return {"pytorch-lightning_version": lightning.__version__, "lr_schedulers": []}
        return read_checkpoint(path, self.lightning_module, self.optimizers, self.ranks)


class SingleProcess(_FolderCheckpoints, SingleDeviceStrategy):  # type: ignore[misc]
    """One process."""


class Replicated(_FolderCheckpoints, DDPStrategy):  # type: ignore[misc]
    """A whole policy in every process.

    DDP's wrapper averages over a fixed number of backwards, and updates have different numbers of micro-batches, on
    each rank too. So gradients are summed once, by :func:`sum_gradients`.
    """

    def configure_ddp(self) -> None:
        """Start from rank 0's weights; no wrapper."""
        assert self.model is not None
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                dist.broadcast(tensor.detach(), src=0)


class Sharded(_FolderCheckpoints, ModelParallelStrategy):  # type: ignore[misc]
    """FSDP2: the policy is sharded when it is loaded."""

    sharded = True


def strategy_for(config: Config) -> Strategy:
    """The strategy that ``train.strategy`` names."""
    device = pick_device(config.model.device)
    strategy: Any
    if config.train.strategy == "single":
        strategy = SingleProcess(device=device)
        return strategy  # type: ignore[no-any-return]
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    groups: dict[str, Any] = {"process_group_backend": backend, "timeout": TIMEOUT}
    if config.train.strategy == "ddp":
        strategy = Replicated(**groups)
    else:
        processes = config.train.devices * config.train.nodes
        strategy = Sharded(data_parallel_size=processes, tensor_parallel_size=1, **groups)
    strategy.cluster_environment = cluster_environment(config)
    return strategy  # type: ignore[no-any-return]


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Add up over all ranks the gradients of parameters that are whole on each, in buckets.

    A parameter without gradient on some ranks counts as zero there; without one on any it stays without.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    with_gradient = ranks.sum(torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32))
    buckets: dict[torch.dtype, list[Tensor]] = {}
    for parameter, count in zip(trained, with_gradient.tolist(), strict=True):
        if not count:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bucket = buckets.setdefault(parameter.grad.dtype, [])
        bucket.append(parameter.grad)
        if sum(gradient.nbytes for gradient in bucket) >= GRADIENT_BUCKET_BYTES:
            _sum_bucket(buckets.pop(parameter.grad.dtype), ranks)
    for bucket in buckets.values():
        _sum_bucket(bucket, ranks)


def _sum_bucket(bucket: list[Tensor], ranks: Ranks) -> None:
    flat = ranks.sum(torch.cat([gradient.flatten() for gradient in bucket]))
    for gradient, summed in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def clip_gradients(parameters: Iterable[nn.Parameter], bound: float) -> float:
    """Clip the norm of all gradients together to ``bound``; the norm before. All ranks must call."""
    return float(full_tensor(nn.utils.clip_grad_norm_(list(parameters), bound)))
