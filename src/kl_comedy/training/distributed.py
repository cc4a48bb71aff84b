"""The processes of one run: how they start, who is who, and what they tell each other.

Lightning's launcher starts ``train.devices`` processes on one node; srun and torchrun start their own. The group is
there before anything is built, so that weights can be streamed into their shards. Whatever one process alone may
stumble over goes through :meth:`World.together`: then all fail alike, and none waits for one that is gone.

Sampling and scoring divided over the processes of a run, seen by everyone as if one had done them.

    prompts -> each rank draws its part -> all rows on every rank -> each rank scores its part -> all rewards

Rows are text and ids, so every rank holding all of them costs little and keeps the rest simple: baselines,
denominators, the plan of micro-batches and the stream's state are the same everywhere, whatever the number of ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from kl_comedy.config import SHARDED, Config
from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.models import LoadedModel, load_model
from kl_comedy.models.load import DTYPES
from kl_comedy.models.sharding import whole_skeleton
from kl_comedy.models.weights import copy_into, stream_weights, weight_bytes
from kl_comedy.records import Prompt, Reward, Rollout, Scored
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts import RolloutBackend, Sampling
from kl_comedy.training.experience import Scorer

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
        raise bad_value(
            "train.nodes",
            nodes,
            "1 where nothing starts processes on other nodes",
            "start it by srun, by torchrun on each node, or as a sweep's cell",
        )
    return LightningEnvironment()


class PartialBackend(RolloutBackend, Protocol):
    """A sampler that declares ``draws_parts``: it can draw some prompts of a batch as it would among all of them."""

    def generate_part(
        self, prompts: Sequence[Prompt], part: tuple[int, int], *, group_size: int, sampling: Sampling, seed: int
    ) -> list[Rollout]:
        """What ``generate`` returns for ``prompts[part[0]:part[1]]``."""
        ...


class DividedBackend:
    """A :class:`RolloutBackend` of which each rank draws the completions of its own prompts, whole groups.

    ``inner`` is this rank's sampler; it draws a part of a batch as it would draw it among the whole, so completions do
    not depend on the number of ranks.
    """

    def __init__(self, inner: PartialBackend, world: World, *, refresh: Callable[[], None] | None = None) -> None:
        self._inner, self._world, self._refresh = inner, world, refresh

    @property
    def version(self) -> int:
        return self._inner.version

    def update_weights(self, version: int) -> None:
        if self._refresh is not None:
            self._refresh()
        self._inner.update_weights(version)

    def close(self) -> None:
        self._inner.close()

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        """See :class:`RolloutBackend`; what fails on one rank is raised on all."""
        part = self._world.bounds(len(prompts))

        def draw() -> list[Rollout]:
            return self._inner.generate_part(prompts, part, group_size=group_size, sampling=sampling, seed=seed)

        own = [_to_plain(rollout) for rollout in self._world.together(draw)]
        return [_from_plain(row, prompts) for rows in self._world.gather(own) for row in rows]


def _to_plain(rollout: Rollout) -> tuple[Any, ...]:
    return (
        rollout.group_id,
        rollout.completion_ids,
        rollout.logps,
        rollout.versions,
        rollout.stop_reason,
        rollout.text,
    )


def _from_plain(row: tuple[Any, ...], prompts: Sequence[Prompt]) -> Rollout:
    group, ids, logps, versions, reason, text = row
    return Rollout(
        prompt=prompts[group],
        group_id=group,
        completion_ids=ids,
        logps=logps,
        versions=versions,
        stop_reason=reason,
        text=text,
    )


class DividedScorer:
    """A scorer of which each rank judges its part of the completions."""

    def __init__(self, inner: Scorer, world: World) -> None:
        self._inner, self._world = inner, world

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        start, end = self._world.bounds(len(rollouts))
        own = self._world.together(lambda: self._inner.score(rollouts[start:end]))
        rewards: list[Reward] = [
            reward for found in self._world.gather([row.reward for row in own]) for reward in found
        ]
        return [Scored(rollout=rollout, reward=reward) for rollout, reward in zip(rollouts, rewards, strict=True)]


def load_policy(config: Config, world: World) -> LoadedModel:
    """The policy: whole in every process, or in shards. Raises :class:`UserError` on every process alike."""
    if not world.sharded:
        return world.together(lambda: load_model(config.model))
    from kl_comedy.models.sharding import load_sharded

    return load_sharded(config.model, limit_bytes=_limit_bytes(config))


def build_backend(config: Config, loaded: LoadedModel, world: World) -> RolloutBackend:
    """This rank's sampler, and around it what divides the work where the run has several processes."""
    entry = ROLLOUTS.get(config.rollout.backend)
    if config.train.strategy == "single":
        single: RolloutBackend = entry.fn(config.rollout, loaded=loaded)
        return single
    if not world.sharded:
        return DividedBackend(entry.fn(config.rollout, loaded=loaded), world)
    replica = world.together(
        lambda: make_replica(
            loaded,
            lambda: whole_skeleton(config.model),
            limit_bytes=_limit_bytes(config),
            bucket_bytes=config.rollout.bucket_mib * 2**20,
        )
    )
    replica.refresh()
    return DividedBackend(entry.fn(config.rollout, loaded=replica.loaded), world, refresh=replica.refresh)


def _limit_bytes(config: Config) -> int:
    return int(config.rollout.replica_gib * 2**30)


def make_replica(loaded: LoadedModel, build: Callable[[], Any], *, limit_bytes: int, bucket_bytes: int) -> Replica:
    """A whole copy of a sharded policy to sample from, where it fits ``limit_bytes``; else a :class:`UserError`."""
    size = weight_bytes(loaded.model)
    if size > limit_bytes:
        raise UserError(
            f"rollout.replica_gib: got {limit_bytes / 2**30:g}; this policy takes {size / 2**30:.1f} GiB, and the hf "
            "backend samples from a whole copy of it on every rank; raise the limit where that fits"
        )
    return Replica(loaded, build(), bucket_bytes)


class Replica:
    """Holds a whole copy of a sharded policy; :meth:`refresh` streams the weights into it, bucket by bucket."""

    def __init__(self, loaded: LoadedModel, model: Any, bucket_bytes: int) -> None:
        self._source, self._bucket_bytes = loaded.model, bucket_bytes
        dtype = next(iter(loaded.model.parameters())).dtype
        assert dtype in DTYPES.values()
        self.loaded = replace(loaded, model=model.to(dtype).to(loaded.device).requires_grad_(False).eval())

    def refresh(self) -> None:
        """Take over the policy's weights; all ranks must call."""
        copy_into(self.loaded.model, stream_weights(self._source, self._bucket_bytes))
