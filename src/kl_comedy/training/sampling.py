"""The sampler of a run over its processes: parts drawn by every rank, or engines that rank 0 asks for all.

    in the trainer's ranks   prompts -> each rank draws its part ----------> all rows on every rank
    engines beside them      prompts -> rank 0 -> engines -> rank 0 -------> all rows on every rank
    rewards                  each rank scores its part -> all rewards on every rank

After an update the weights take the way back: all ranks *publish* them under the next version, and the engines *load*
them before they *generate* again. Every rank holds all rows (text and ids), so baselines, denominators, micro-batches
and the stream's state are the same on all of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kl_comedy.config import Config
from kl_comedy.data.prompts import TurnRenderer, turn_frame
from kl_comedy.errors import UserError, bad_value
from kl_comedy.models import LoadedModel
from kl_comedy.models.introspection import layers_in_bf16
from kl_comedy.models.load import place
from kl_comedy.models.sharding import compute_in_bf16, rounded_parameters, unsharded_skeleton
from kl_comedy.models.weights import copy_into, stream_weights, weight_bytes
from kl_comedy.records import Problem, Prompt, Reward, Rollout, Scored, Step
from kl_comedy.rewards import RewardPool, Scorer
from kl_comedy.rewards.environments import Answers, ContainedEnvironment
from kl_comedy.rewards.pool import Failure, Turn
from kl_comedy.rollouts import RolloutBackend, Sampler
from kl_comedy.rollouts.base import EngineBackend
from kl_comedy.rollouts.dialogue import Dialogue
from kl_comedy.rollouts.engines.options import visible_gpus
from kl_comedy.training.distributed import Ranks

NOT_PUBLISHED = -1
"""Version of engines that have no weights of this run yet."""


class BroadcastRollouts:
    """A :class:`RolloutBackend` of engines beside the trainer: rank 0 asks, all ranks receive the completions.

    All ranks call its methods but :meth:`turn` and :meth:`load`, and all raise what fails on one. ``version`` is that
    of the newest published weights. ``asynchronous``: :class:`~kl_comedy.training.asynchronous.Producer` draws in
    another thread of rank 0, and new weights are loaded at the next turn.
    """

    def __init__(self, engines: EngineBackend, ranks: Ranks, *, asynchronous: bool = False) -> None:
        self.version = NOT_PUBLISHED
        self.loaded = NOT_PUBLISHED
        self.engines = engines
        self.changed = threading.Condition()  # notified of a new ``version``, and when a turn ends
        self._ranks = ranks
        self._asynchronous = asynchronous
        # Two threads may load: the producer before a batch, and in flight the one that follows the learner.
        self._loading = threading.Lock()
        self._busy = False
        self._evaluations = 0

    def publish(self, version: int) -> None:
        """Stage the learner's weights; engines that were not started yet start on them."""
        # Outside the lock: staging takes long, and the producer must be able to end its batch meanwhile.
        self._ranks.raise_on_all_ranks(lambda: self.engines.publish(version))
        with self.changed:
            self.version = version
            self.changed.notify_all()

    def load(self) -> None:
        """Let the engines load what is published and not loaded yet."""
        with self._loading:
            # The other thread may have loaded the same weights while this one waited for the lock.
            if self.loaded != self.version:
                self.loaded = self.engines.load()

    def update_weights(self, version: int) -> None:
        self.publish(version)
        # Asynchronously the producer loads them at its next turn, or in flight.
        if not self._asynchronous:
            self._ranks.on_rank_zero(self.load)

    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> list[Rollout]:
        """See :class:`RolloutBackend`: drawn from the newest weights, when the batch being drawn is finished."""
        if self.version == NOT_PUBLISHED:
            self.publish(0)

        def draw() -> list[Rollout]:
            with self.turn(evaluation=True):
                self.load()
                return self.engines.generate(prompts, **settings)

        # None on the other ranks, which receive the completions below.
        drawn = self._ranks.on_rank_zero(draw) or []
        received = self._ranks.broadcast(_without_prompts(drawn))
        return _with_prompts(received, prompts)

    @contextlib.contextmanager
    def turn(self, *, evaluation: bool = False) -> Iterator[None]:
        """Inside, nothing else is drawn; evaluations come first.

        Without that precedence the producer, which always has a next batch, could take turn after turn while the
        learner waits for its evaluation.
        """

        def is_free() -> bool:
            if self._busy:
                return False
            return evaluation or self._evaluations == 0

        with self.changed:
            # Counted before waiting, so that the producer sees it when its turn ends.
            self._evaluations += evaluation
            self.changed.wait_for(is_free)
            self._busy = True
        try:
            yield
        finally:
            with self.changed:
                self._busy = False
                self._evaluations -= evaluation
                self.changed.notify_all()

    def work_in(self, folder: Path) -> None:
        """Keep logs and weights in ``folder``."""
        engines: Any = self.engines  # a FolderBackend: the caller has asked its capabilities
        self._ranks.on_rank_zero(lambda: engines.work_in(folder))

    def close(self) -> None:
        self.engines.close()


class ShardedRollouts:
    """A :class:`RolloutBackend` of which each rank draws the completions of its own prompts, whole groups.

    ``inner`` declares ``draws_parts``: it draws a part of a batch as it would draw it among the whole, so completions
    do not depend on the number of ranks. ``refresh`` brings its weights up to date.
    """

    def __init__(self, inner: Any, ranks: Ranks, *, refresh: Callable[[], None] = lambda: None) -> None:
        self.inner = inner
        self.version = int(inner.version)
        self._ranks = ranks
        self._refresh = refresh

    def update_weights(self, version: int) -> None:
        # First: the replica must have the weights that the version names.
        self._refresh()
        self.inner.update_weights(version)
        self.version = int(self.inner.version)

    def close(self) -> None:
        self.inner.close()

    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> list[Rollout]:
        """See :class:`RolloutBackend`; what fails on one rank is raised on all."""
        # Parts follow each other by rank: joined in that order they are the batch.
        part = self._ranks.bounds(len(prompts))
        drawn_here = self._ranks.raise_on_all_ranks(lambda: self.inner.generate_part(prompts, part, **settings))
        rollouts: list[Rollout] = []
        for drawn_on_rank in self._ranks.gather(_without_prompts(drawn_here)):
            rollouts += drawn_on_rank
        return _with_prompts(rollouts, prompts)


def _without_prompts(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """For an exchange: the prompts are on every rank already."""
    empty = Prompt(problem=Problem(id="", text="", answer=""), text="", token_ids=())
    return [replace(rollout, prompt=empty) for rollout in rollouts]


def _with_prompts(rollouts: Sequence[Rollout], prompts: Sequence[Prompt]) -> list[Rollout]:
    return [replace(rollout, prompt=prompts[rollout.group_id]) for rollout in rollouts]


class ShardedScorer:
    """A scorer of which each rank judges its part of the completions."""

    def __init__(self, inner: Scorer, ranks: Ranks) -> None:
        self._inner = inner
        self._ranks = ranks

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """The rollouts with their rewards, on every rank; what fails on one rank is raised on all."""
        start, end = self._ranks.bounds(len(rollouts))
        scored_here = self._ranks.raise_on_all_ranks(lambda: self._inner.score(rollouts[start:end]))
        # Rewards alone travel: the completions are on every rank.
        rewards: list[Reward] = []
        for rewards_of_rank in self._ranks.gather([row.reward for row in scored_here]):
            rewards += rewards_of_rank
        return [Scored(rollout=rollout, reward=reward) for rollout, reward in zip(rollouts, rewards, strict=True)]


class ShardedEnvironment:
    """An environment of which each rank answers its part of the turns."""

    def __init__(self, inner: Answers, ranks: Ranks) -> None:
        self._inner = inner
        self._ranks = ranks

    def answer(self, turns: Sequence[Turn]) -> list[Step | Failure]:
        """The answers to all turns, on every rank; what fails on one rank is raised on all."""
        start, end = self._ranks.bounds(len(turns))
        answered_here = self._ranks.raise_on_all_ranks(lambda: self._inner.answer(turns[start:end]))
        answers: list[Step | Failure] = []
        for answers_of_rank in self._ranks.gather(answered_here):
            answers += answers_of_rank
        return answers


# --- building -------------------------------------------------------------------------------------------------------


def with_environment(
    backend: Any, config: Config, loaded: LoadedModel, pool: RewardPool, ranks: Ranks | None = None
) -> Any:
    """``backend``, and the environment of ``config`` between its turns where there is one.

    ``ranks``: those that call ``generate`` together, each of which answers a part of the turns; None where one does.
    """
    settings = config.environment
    if settings is None:
        return backend
    environment: Answers = ContainedEnvironment(settings, pool)
    if ranks is not None and ranks.size > 1:
        environment = ShardedEnvironment(environment, ranks)
    frame = turn_frame(config.data.prompt, loaded.tokenizer, role=settings.role)
    if frame is not None:
        return Dialogue(backend, environment, loaded, settings, frame)
    if settings.rerendered == "refuse":
        reason = "this model's chat template renders earlier turns anew; split trains a rollout of several rows"
        raise bad_value("environment.rerendered", "refuse", "split", reason)
    renderer = TurnRenderer(config.data.prompt, loaded.tokenizer, role=settings.role)
    return Dialogue(backend, environment, loaded, settings, renderer=renderer)


def build_engines(
    sampler: Sampler, config: Config, loaded: LoadedModel, ranks: Ranks, pool: RewardPool
) -> BroadcastRollouts:
    """The run's engines beside the trainer, built on every rank."""
    rollout = sampler.rollout_on(visible_gpus(loaded.device.type))

    def build() -> EngineBackend:
        engines = sampler.builder(rollout, loaded=loaded, leader=ranks.is_rank_zero)
        # Below the exchange between ranks: rank 0 alone asks, in a thread of its own where the run is asynchronous.
        dialogues: EngineBackend = with_environment(engines, config, loaded, pool)
        return dialogues

    engines = ranks.raise_on_all_ranks(build)
    return BroadcastRollouts(engines, ranks, asynchronous=config.lag.mode == "async")


@dataclass(frozen=True, kw_only=True)
class RankBackend:
    """A sampler in the trainer's ranks."""

    own: Any
    """This rank's sampler, as its backend built it."""
    shared: RolloutBackend
    """What the run draws from: with several processes it spreads the prompts over the ranks, else it is ``own``."""


def build_backend(sampler: Sampler, config: Config, loaded: LoadedModel, ranks: Ranks) -> RankBackend:
    """This rank's sampler and, with several processes, what spreads the prompts over the ranks.

    A sharded policy is sampled from a whole copy of it on every rank. Raises :class:`UserError` where that does not fit
    ``train.replica_gib``.
    """
    if config.train.strategy == "single":
        backend = sampler.builder(config.rollout, loaded=loaded)
        return RankBackend(own=backend, shared=backend)
    if not ranks.sharded:
        backend = sampler.builder(config.rollout, loaded=loaded)
        return RankBackend(own=backend, shared=ShardedRollouts(backend, ranks))

    replica = ranks.raise_on_all_ranks(lambda: _make_replica(config, loaded))

    def refresh() -> None:
        copy_into(replica.model, stream_weights(loaded.model, config.train.bucket_mib * 2**20))

    # The skeleton has no weights yet.
    refresh()
    backend = sampler.builder(config.rollout, loaded=replica)
    return RankBackend(own=backend, shared=ShardedRollouts(backend, ranks, refresh=refresh))


def _make_replica(config: Config, loaded: LoadedModel) -> LoadedModel:
    """A whole copy of a sharded policy on this rank, without its weights yet."""
    # Checked before any memory is taken: a process that runs out of it is killed without a word.
    bf16 = layers_in_bf16(loaded.model)
    size = weight_bytes(loaded.model)
    if bf16:
        size -= sum(parameter.nbytes // 2 for parameter in rounded_parameters(loaded.model))
    limit = int(config.train.replica_gib * 2**30)
    if size > limit:
        raise UserError(
            f"train.replica_gib: got {limit / 2**30:g}; this policy takes {size / 2**30:.1f} GiB, and "
            "the hf backend samples from a whole copy of it on every rank; raise the limit where that fits"
        )
    dtype = next(iter(loaded.model.parameters())).dtype
    model = unsharded_skeleton(config.model).to(dtype).requires_grad_(False).eval()
    if bf16:
        # Autocast would round these weights at every token; rounded once they also take half the memory.
        for parameter in rounded_parameters(model):
            parameter.data = parameter.data.bfloat16()
        compute_in_bf16(model, loaded.device)
    place(model, loaded.device)
    return replace(loaded, model=model)
