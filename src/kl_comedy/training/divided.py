"""Sampling and scoring divided over the processes of a run, seen by everyone as if one had done them.

    prompts -> each rank draws its part -> all rows on every rank -> each rank scores its part -> all rewards

Rows are text and ids, so every rank holding all of them costs little and keeps the rest simple: baselines,
denominators, the plan of micro-batches and the stream's state are the same everywhere, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from kl_comedy.config import Config
from kl_comedy.errors import UserError, bad_value
from kl_comedy.models import LoadedModel, load_model
from kl_comedy.models.load import DTYPES
from kl_comedy.models.sharding import whole_skeleton
from kl_comedy.models.weights import copy_into, stream_weights, weight_bytes
from kl_comedy.records import Prompt, Reward, Rollout, Scored
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts import RolloutBackend, Sampling
from kl_comedy.training.critic import uses_critic
from kl_comedy.training.stream import Scorer
from kl_comedy.training.world import World


class PartialBackend(RolloutBackend, Protocol):
    """A sampler that declares ``divides``: it can draw some prompts of a batch as it would among all of them."""

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
        rollout.group_id, rollout.completion_ids, rollout.logps, rollout.versions, rollout.stop_reason,
        rollout.text,
    )  # fmt: skip


def _from_plain(row: tuple[Any, ...], prompts: Sequence[Prompt]) -> Rollout:
    group, ids, logps, versions, reason, text = row
    return Rollout(
        prompt=prompts[group], group_id=group, completion_ids=ids, logps=logps, versions=versions, stop_reason=reason,
        text=text,
    )  # fmt: skip


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
    if config.train.strategy != "single" and uses_critic(config.algorithm):
        raise bad_value("train.strategy", config.train.strategy, "single with a value head (algorithm.advantage: gae)")
    if not world.sharded:
        return world.together(lambda: load_model(config.model))
    if config.train.strategy == "fsdp1":
        from kl_comedy.models.classic import load_classic

        return load_classic(config.model, limit_bytes=_limit_bytes(config))
    from kl_comedy.models.sharding import load_sharded

    return load_sharded(config.model, limit_bytes=_limit_bytes(config))


def build_backend(config: Config, loaded: LoadedModel, world: World) -> RolloutBackend:
    """This rank's sampler, and around it what divides the work where the run has several processes."""
    entry = ROLLOUTS.get(config.rollout.backend)
    if config.train.strategy == "single":
        single: RolloutBackend = entry.fn(config.rollout, loaded=loaded)
        return single
    if not entry.facts.get("divides"):
        able = [each.name for each in ROLLOUTS if each.facts.get("divides")]
        why = f"with train.strategy {config.train.strategy}"
        raise bad_value("rollout.backend", config.rollout.backend, able, why)
    if not world.sharded:
        return DividedBackend(entry.fn(config.rollout, loaded=loaded), world)
    replica = world.together(
        lambda: make_replica(
            loaded, lambda: whole_skeleton(config.model), limit_bytes=_limit_bytes(config),
            bucket_bytes=config.rollout.bucket_mib * 2**20,
        )
    )  # fmt: skip
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
