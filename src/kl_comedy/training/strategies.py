"""Lightning's strategies as a run uses them: what is summed when, and checkpoints in the run's own format.

| train.strategy | class | gradients |
|---|---|---|
| `single` | SingleDeviceStrategy | are there |
| `ddp` | DDPStrategy without DDP's wrapper | summed once, after the last micro-batch |
| `fsdp` | ModelParallelStrategy, FSDP2 | reduced into shards by every backward |
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch import Tensor, nn
from torch.optim import Optimizer

from kl_comedy.config import Config
from kl_comedy.errors import RunFailed, bad_value
from kl_comedy.models.load import pick_device
from kl_comedy.models.sources import first_line
from kl_comedy.models.weights import full_tensor
from kl_comedy.training.checkpoint import UNFINISHED, SaveFailed, read_checkpoint, write_checkpoint, write_whole
from kl_comedy.training.distributed import TIMEOUT, Ranks, cluster_environment

NEWEST = "newest"
"""As ``ckpt_path`` of ``Trainer.fit``: resume from ``strategy.newest_checkpoint``, or start anew where that is None."""

GRADIENT_BUCKET_BYTES = 64 * 2**20
"""Gradients summed in one exchange under ``ddp``: large enough to fill a network, small beside a model."""


class _FolderCheckpoints(Strategy):
    """Weights, optimizer and loops are saved in the folder format of :mod:`kl_comedy.training.checkpoint`.

    A mixin: it stands before one of Lightning's strategies in the bases.
    """

    # Which checkpoint is the newest is decided once the processes are connected.
    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False
    sharded = False
    newest_checkpoint: Path | None = None

    @property
    def ranks(self) -> Ranks:
        """The processes of the run; call once they are connected."""
        if isinstance(self, ParallelStrategy):
            return Ranks(rank=self.global_rank, size=self.world_size, sharded=self.sharded)
        return Ranks(rank=0, size=1, sharded=self.sharded)

    # Lightning would gather whole weights on rank 0. :meth:`save_checkpoint` collects them in shards instead, and
    # :meth:`load_checkpoint` has loaded them before Lightning asks for them. So these four do nothing.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None: ...

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None: ...

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        ranks = self.ranks
        # Rank 0 names it for all: ModelCheckpoint may put a metric in the name that differs from rank to rank.
        path: Path = ranks.broadcast(Path(filepath))

        # ModelCheckpoint(save_weights_only=True) asks for none.
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []

        def write(folder: Path) -> None:
            write_checkpoint(folder, checkpoint, self.lightning_module, optimizers, ranks)

        if path.suffix == UNFINISHED:
            write(path)  # save_checkpoint makes it whole
            return
        try:
            write_whole(path, checkpoint["kl_comedy"]["version"], write, ranks=ranks)
        except SaveFailed as error:
            raise RunFailed(f"the checkpoint {path} cannot be written ({error})") from error

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path: Path | None = Path(checkpoint_path)
        if checkpoint_path == NEWEST:
            path = self.newest_checkpoint
        if path is None:
            # The least that Lightning accepts as a checkpoint: the run begins at update 0.
            return {"pytorch-lightning_version": lightning.__version__, "lr_schedulers": []}
        checkpoint = read_checkpoint(path, self.lightning_module, self.optimizers, self.ranks)
        # The checkpoint of a run's last update marks its batch as the last. Where the run is extended, others follow,
        # and the stream of batches knows how many.
        checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False
        return checkpoint


class SingleProcess(_FolderCheckpoints, SingleDeviceStrategy):
    """One process."""


class RankLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of the other ranks of this node, which hands them to ``on_start`` (a :class:`RankWatch`)."""

    on_start: Callable[[Sequence[Any]], None] | None = None

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other ranks of this node, unless SLURM or torchrun has, and call ``function`` in this process.

        The steps are those of Lightning's launcher, without its observer of the started ranks: when one of them ends,
        the observer kills this process too, before it can say which rank was lost.
        """
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            if self.on_start is not None:
                self.on_start(self.procs)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


class _SeveralProcesses(_FolderCheckpoints, ParallelStrategy):
    """The processes of a run, which meet at the address of rank 0."""

    num_processes: int
    num_nodes: int
    cluster_environment: ClusterEnvironment

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        # ModelParallelStrategy has none where SLURM or torchrun has started every process.
        if self._launcher is not None:
            self._launcher = RankLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Connect them. Where rank 0 fails, it ends those that it started: they would wait for :data:`TIMEOUT`."""
        try:
            super().setup_environment()
        except RuntimeError as error:
            # The others wait for this address; only the process that started them can end them now.
            if isinstance(self.launcher, RankLauncher):
                self.launcher.kill(signal.SIGKILL)
            address = f"{self.cluster_environment.main_address}:{self.cluster_environment.main_port}"
            allowed = "an address with a free port, which all processes reach"
            raise bad_value("MASTER_ADDR:MASTER_PORT", address, allowed, first_line(error)) from error


class Replicated(_SeveralProcesses, DDPStrategy):
    """A whole policy in every process.

    DDP's wrapper averages over a fixed number of backwards, and updates have different numbers of micro-batches, on
    each rank too. So gradients are summed once, by :func:`sum_gradients`.
    """

    def configure_ddp(self) -> None:
        """Start from rank 0's weights; no wrapper."""
        assert self.model is not None, "Lightning calls this after it has set the model"
        tensors = [*self.model.parameters(), *self.model.buffers()]
        with torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)


class Sharded(_SeveralProcesses, ModelParallelStrategy):
    """FSDP2: the policy is sharded when it is loaded."""

    sharded = True


def strategy_for(config: Config) -> Strategy:
    """The strategy that ``train.strategy`` names."""
    device = pick_device(config.model.device)
    train = config.train
    if train.strategy == "single":
        return SingleProcess(device=device)
    # Exchanges of Python objects are on the CPU, those of tensors where the tensors are.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    groups: dict[str, Any] = {"process_group_backend": backend, "timeout": TIMEOUT}
    strategy: ParallelStrategy
    if train.strategy == "fsdp":
        strategy = Sharded(data_parallel_size=train.devices * train.nodes, tensor_parallel_size=1, **groups)
    else:
        strategy = Replicated(**groups)
    strategy.cluster_environment = cluster_environment(config)
    return strategy


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks, *, divisor: int = 1) -> None:
    """Add up over all ranks the gradients of parameters that are whole on each, in buckets; divide by ``divisor``.

    A parameter without gradient on some ranks counts as zero there; without one on any it stays without.
    """
    # Which parameters have a gradient differs between ranks, and all ranks must exchange the same buckets.
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    has_gradient = [parameter.grad is not None for parameter in trained]
    counts = ranks.sum(torch.tensor(has_gradient, dtype=torch.int32)).tolist()
    # Buckets are of one dtype, and filled in the same order on every rank.
    buckets: dict[torch.dtype, list[list[Tensor]]] = {}
    for parameter, count in zip(trained, counts, strict=True):
        if count == 0:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        of_dtype = buckets.setdefault(parameter.grad.dtype, [[]])
        if sum(gradient.nbytes for gradient in of_dtype[-1]) >= GRADIENT_BUCKET_BYTES:
            of_dtype.append([])
        of_dtype[-1].append(parameter.grad)
    for bucket in chain.from_iterable(buckets.values()):
        _sum_bucket(bucket, ranks, divisor)


def _sum_bucket(bucket: Sequence[Tensor], ranks: Ranks, divisor: int) -> None:
    """Sum gradients over the ranks in place, by one exchange."""
    sizes = [gradient.numel() for gradient in bucket]
    # One exchange for many gradients: each has a latency of its own, however small it is.
    flat = ranks.sum(torch.cat([gradient.flatten() for gradient in bucket])) / divisor
    for gradient, summed in zip(bucket, flat.split_with_sizes(sizes), strict=True):
        gradient.copy_(summed.view_as(gradient))


def clip_gradients(parameters: Iterable[nn.Parameter], bound: float) -> float:
    """Clip the norm of all gradients together to ``bound``; the norm before. All ranks must call."""
    return float(full_tensor(nn.utils.clip_grad_norm_(list(parameters), bound)))
