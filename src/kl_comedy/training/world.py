"""The processes of one run: how they start, who is who, and what they tell each other.

Lightning's launcher starts ``train.devices`` processes on one node; srun and torchrun start their own. The group is
there before anything is built, so that weights can be streamed into their shards. Whatever one process alone may
stumble over goes through :meth:`World.together`: then all fail alike, and none waits for one that is gone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from kl_comedy.config import SHARDED, Config
from kl_comedy.errors import RunFailed, UserError, bad_value

T = TypeVar("T")

TIMEOUT = timedelta(hours=2)
"""How long a process waits for the others in one exchange: longer than the longest evaluation of a slow rank."""

LAUNCHED = "KL_COMEDY_LAUNCHED"
"""Set for processes that a run started itself: their outcome is the first one's, and they end with exit code 0."""

_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", LAUNCHED, "OMP_NUM_THREADS")


class RankFailed(RuntimeError):
    """Something outside our errors failed on one process; raised on all."""


@dataclass(frozen=True, kw_only=True)
class World:
    """``size`` processes, this one being ``rank``. ``sharded``: the policy is split over them (FSDP).

    With one process every exchange is the identity.
    """

    rank: int = 0
    size: int = 1
    sharded: bool = False

    @property
    def first(self) -> bool:
        """The process that prints, logs and writes."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T | None]:
        """Every ``size``-th item from this rank on, filled up with None: equally many on all ranks.

        >>> World(rank=1, size=2).share("abc")
        ['b', None]
        """
        own: list[T | None] = list(items[self.rank :: self.size])
        return own + [None] * (-(-len(items) // self.size) - len(own))

    def bounds(self, count: int) -> tuple[int, int]:
        """This rank's part of ``count`` things in order: contiguous, as even as possible.

        >>> [World(rank=rank, size=2).bounds(5) for rank in range(2)]
        [(0, 2), (2, 5)]
        """
        return count * self.rank // self.size, count * (self.rank + 1) // self.size

    def gather(self, item: T) -> list[T]:
        """What every rank gave, in order, on every rank."""
        if self.size == 1:
            return [item]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, item)
        return found

    def broadcast(self, item: T) -> T:
        """What the first rank gave."""
        if self.size == 1:
            return item
        box = [item]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def together(self, action: Callable[[], T]) -> T:
        """Do ``action`` on every rank; where it fails on one, raise on all.

        A :class:`UserError` or :class:`RunFailed` stays one; what else a machine can do to a process (no memory, no
        disk) becomes :class:`RankFailed`.
        """
        if self.size == 1:
            return action()
        result: Any = None
        failure: BaseException | None = None
        try:
            result = action()
        except (Exception, CheckpointException) as error:
            failure = error
        told = self.gather(None if failure is None else (_kind(failure), str(failure)))
        for rank, said in enumerate(told):
            if said is not None:
                kind, text = said
                where = "" if rank == 0 else f" (on rank {rank})"
                raise {"UserError": UserError, "RunFailed": RunFailed}.get(kind, RankFailed)(text + where) from failure
        done: T = result
        return done


ALONE = World()


def _kind(error: BaseException) -> str:
    return next((kind.__name__ for kind in (UserError, RunFailed) if isinstance(error, kind)), "other")


@contextlib.contextmanager
def joined(config: Config) -> Iterator[World]:
    """Start the processes of a run and connect them; with ``train.strategy: single`` nothing happens.

    Raises :class:`UserError` where what started this process (srun, torchrun) started another number.
    """
    train = config.train
    if train.strategy == "single":
        yield ALONE
        return
    import lightning
    from lightning.fabric.strategies import DDPStrategy

    on_gpu = config.model.device != "cpu" and torch.cuda.is_available()
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    threads = torch.get_num_threads()  # the launcher divides the cores by the processes
    os.environ[LAUNCHED] = "1"
    try:
        environment = cluster_environment(train.nodes)
        strategy = DDPStrategy(
            cluster_environment=environment,
            process_group_backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            timeout=TIMEOUT,
        )
        fabric = lightning.Fabric(
            accelerator="gpu" if on_gpu else "cpu", devices=train.devices, num_nodes=train.nodes, strategy=strategy
        )
        try:
            fabric.launch()
        except ValueError as error:  # srun with other numbers than the config's
            raise UserError(f"train.devices, train.nodes: {error}") from error
        size = fabric.world_size
        if size != dist.get_world_size():
            raise bad_value("train.devices", train.devices, f"{dist.get_world_size()} processes in all")
        yield World(rank=fabric.global_rank, size=size, sharded=train.strategy in SHARDED)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(threads)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def cluster_environment(nodes: int = 1) -> Any:
    """Who starts the processes: SLURM, torchrun, or Lightning's launcher. SLURM's handlers stay off: we have ours.

    Raises :class:`UserError` where ``nodes`` are several and nobody starts the others, which would be waited for.
    """
    from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    if SLURMEnvironment.detect():
        return SLURMEnvironment(auto_requeue=False)
    if nodes > 1 and "NODE_RANK" not in os.environ:
        raise bad_value("train.nodes", nodes, "1 where nothing starts processes on other nodes",
                        "start it by srun, by torchrun on each node, or as a sweep's cell")  # fmt: skip
    return LightningEnvironment()
