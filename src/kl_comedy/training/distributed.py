"""The processes of one run: who is who, exchanges between them, and sampling and scoring spread over them.

Lightning's Trainer starts the processes (or srun and torchrun do). What may fail on one rank alone goes through
:meth:`Ranks.raise_on_all_ranks`, so that no rank waits for another that has stopped.

    prompts -> each rank draws its part -> all rows on every rank -> each rank scores its part -> all rewards

Every rank holds all rows (text and ids), so baselines, denominators, micro-batch plans and the stream's state are the
same on all of them.
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

from kl_comedy.config import Config
from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.models import LoadedModel, load_model
from kl_comedy.models.sharding import unsharded_skeleton
from kl_comedy.models.weights import copy_into, stream_weights, weight_bytes
from kl_comedy.records import Prompt, Rollout, Scored
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts import RolloutBackend, Sampling
from kl_comedy.training.experience import Scorer

T = TypeVar("T")

TIMEOUT = timedelta(hours=2)
"""How long a process waits for the others in one exchange: longer than the longest evaluation of a slow rank."""

LAUNCHED = "KL_COMEDY_LAUNCHED"
"""Set in processes that a run started: rank 0 reports the outcome, and they exit with code 0."""

_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", LAUNCHED, "OMP_NUM_THREADS")


class RankFailed(RuntimeError):
    """An error other than :class:`UserError` and :class:`RunFailed` on one rank; raised on all."""


_RAISED_AS_IS = {"UserError": UserError, "RunFailed": RunFailed}


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """``size`` processes, this one being ``rank``. ``sharded``: the policy is split over them (FSDP).

    With one process every exchange is the identity. All ranks must call the exchanging methods, in the same order.
    """

    rank: int = 0
    size: int = 1
    sharded: bool = False

    @property
    def is_rank_zero(self) -> bool:
        """Rank 0 prints, logs and writes."""
        return self.rank == 0

    def split(self, items: Sequence[T]) -> list[T | None]:
        """Every ``size``-th item from this rank on, padded with None to the same length on all ranks.

        >>> Ranks(rank=1, size=2).split("abc")
        ['b', None]
        """
        mine: list[T | None] = list(items[self.rank :: self.size])
        return mine + [None] * (-(-len(items) // self.size) - len(mine))

    def bounds(self, count: int) -> tuple[int, int]:
        """This rank's contiguous part of ``count`` items, as even as possible.

        >>> [Ranks(rank=rank, size=2).bounds(5) for rank in range(2)]
        [(0, 2), (2, 5)]
        """
        return count * self.rank // self.size, count * (self.rank + 1) // self.size

    def gather(self, item: T) -> list[T]:
        """The items of all ranks, in the order of ranks, on every rank."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items

    def broadcast(self, item: T) -> T:
        """The item of rank 0."""
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

    def raise_on_all_ranks(self, action: Callable[[], T]) -> T:
        """Call ``action`` on every rank; where it fails on one, raise on all.

        :class:`UserError` and :class:`RunFailed` keep their type, any other exception becomes :class:`RankFailed`.
        """
        if self.size == 1:
            return action()
        result: Any = None
        failure: BaseException | None = None
        try:
            result = action()
        except (Exception, CheckpointException) as error:
            failure = error
        kind = next((name for name, cls in _RAISED_AS_IS.items() if isinstance(failure, cls)), "RankFailed")
        for rank, report in enumerate(self.gather(None if failure is None else (kind, str(failure)))):
            if report is not None:
                where = "" if rank == 0 else f" (on rank {rank})"
                raise _RAISED_AS_IS.get(report[0], RankFailed)(report[1] + where) from failure
        done: T = result
        return done

    def on_rank_zero(self, action: Callable[[], T]) -> T | None:
        """Call ``action`` on rank 0 only, and raise on all ranks where it fails. None on the other ranks."""
        return self.raise_on_all_ranks(lambda: action() if self.is_rank_zero else None)


SINGLE_PROCESS = Ranks()


@contextlib.contextmanager
def process_state_restored(threads: int | None = None) -> Iterator[None]:
    """Compute with ``threads`` threads inside; afterwards threads, environment and process group are as before."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    threads_before = torch.get_num_threads()  # Lightning's launcher divides the cores by the processes
    try:
        torch.set_num_threads(threads or threads_before)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(threads_before)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def cluster_environment(config: Config) -> Any:
    """Who starts the processes: SLURM, torchrun, or Lightning's launcher. SLURM's own signal handlers stay off.

    Raises :class:`UserError` where several nodes are asked for and nothing starts processes on the others, and where
    srun or torchrun started another number of processes than the config says.
    """
    from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

    devices, nodes = config.train.devices, config.train.nodes
    if TorchElasticEnvironment.detect():
        environment: Any = TorchElasticEnvironment()
    elif SLURMEnvironment.detect():
        environment = SLURMEnvironment(auto_requeue=False)
    else:
        environment = LightningEnvironment()
        if nodes > 1 and "NODE_RANK" not in os.environ:
            raise bad_value(
                "train.nodes",
                nodes,
                "1 where nothing starts processes on other nodes",
                "start it by srun, by torchrun on each node, or as a sweep's cell",
            )
    try:
        environment.validate_settings(num_devices=devices, num_nodes=nodes)
    except ValueError as error:
        raise UserError(f"train.devices, train.nodes: {error}") from error
    return environment


class PartialBackend(RolloutBackend, Protocol):
    """A sampler that declares ``draws_parts``: it can draw some prompts of a batch as it would among all of them."""

    def generate_part(
        self, prompts: Sequence[Prompt], part: tuple[int, int], *, group_size: int, sampling: Sampling, seed: int
    ) -> list[Rollout]:
        """What ``generate`` returns for ``prompts[part[0]:part[1]]``."""
        ...


class ShardedRollouts:
    """A :class:`RolloutBackend` of which each rank draws the completions of its own prompts, whole groups.

    ``inner`` draws a part of a batch as it would draw it among the whole, so completions do not depend on the number
    of ranks. ``refresh`` brings its weights up to date.
    """

    def __init__(self, inner: PartialBackend, ranks: Ranks, *, refresh: Callable[[], None] | None = None) -> None:
        self._inner, self._ranks, self._refresh = inner, ranks, refresh

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
        part = self._ranks.bounds(len(prompts))
        mine = self._ranks.raise_on_all_ranks(
            lambda: self._inner.generate_part(prompts, part, group_size=group_size, sampling=sampling, seed=seed)
        )
        # Prompts are on every rank already, so they are left out of the exchange.
        gathered = self._ranks.gather([replace(rollout, prompt=None) for rollout in mine])  # type: ignore[arg-type]
        return [replace(rollout, prompt=prompts[rollout.group_id]) for rows in gathered for rollout in rows]


class ShardedScorer:
    """A scorer of which each rank judges its part of the completions."""

    def __init__(self, inner: Scorer, ranks: Ranks) -> None:
        self._inner, self._ranks = inner, ranks

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        start, end = self._ranks.bounds(len(rollouts))
        mine = self._ranks.raise_on_all_ranks(lambda: self._inner.score(rollouts[start:end]))
        rewards = [reward for part in self._ranks.gather([row.reward for row in mine]) for reward in part]
        return [Scored(rollout=rollout, reward=reward) for rollout, reward in zip(rollouts, rewards, strict=True)]


def load_policy(config: Config, ranks: Ranks) -> LoadedModel:
    """The policy: whole in every process, or in shards. Raises :class:`UserError` on all ranks."""
    if not ranks.sharded:
        return ranks.raise_on_all_ranks(lambda: load_model(config.model))
    from kl_comedy.models.sharding import load_sharded

    return load_sharded(config.model, limit_bytes=_replica_limit_bytes(config))


def build_backend(config: Config, loaded: LoadedModel, ranks: Ranks) -> RolloutBackend:
    """This rank's sampler and, with several processes, what spreads the prompts over the ranks."""
    build: Callable[..., Any] = ROLLOUTS.get(config.rollout.backend).fn
    if config.train.strategy == "single":
        single: RolloutBackend = build(config.rollout, loaded=loaded)
        return single
    if not ranks.sharded:
        return ShardedRollouts(build(config.rollout, loaded=loaded), ranks)
    replica = ranks.raise_on_all_ranks(lambda: Replica.build(config, loaded))
    replica.refresh()
    return ShardedRollouts(build(config.rollout, loaded=replica.loaded), ranks, refresh=replica.refresh)


def _replica_limit_bytes(config: Config) -> int:
    return int(config.rollout.replica_gib * 2**30)


class Replica:
    """A whole copy of a sharded policy to sample from; :meth:`refresh` streams the weights into it."""

    def __init__(self, loaded: LoadedModel, model: Any, bucket_bytes: int) -> None:
        self._source, self._bucket_bytes = loaded.model, bucket_bytes
        dtype = next(iter(loaded.model.parameters())).dtype
        self.loaded = replace(loaded, model=model.to(dtype).to(loaded.device).requires_grad_(False).eval())

    @classmethod
    def build(cls, config: Config, loaded: LoadedModel) -> Replica:
        """Raises :class:`UserError` where the copy does not fit ``rollout.replica_gib``."""
        size, limit = weight_bytes(loaded.model), _replica_limit_bytes(config)
        if size > limit:
            raise UserError(
                f"rollout.replica_gib: got {limit / 2**30:g}; this policy takes {size / 2**30:.1f} GiB, and the hf "
                "backend samples from a whole copy of it on every rank; raise the limit where that fits"
            )
        return cls(loaded, unsharded_skeleton(config.model), config.rollout.bucket_mib * 2**20)

    def refresh(self) -> None:
        """Copy the policy's weights; all ranks must call."""
        copy_into(self.loaded.model, stream_weights(self._source, self._bucket_bytes))
