"""Which sampler a run has, and where its batches come from: the config's ``lag`` and ``rollout.backend`` decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from kl_comedy.config import Config
from kl_comedy.data import PromptOrder
from kl_comedy.models import LoadedModel
from kl_comedy.records import Prompt, Rollout
from kl_comedy.rollouts import ReplayRollouts, RolloutBackend, sampling_from
from kl_comedy.training.asynchronous.sampler import SamplerProcess
from kl_comedy.training.asynchronous.source import Asynchronous
from kl_comedy.training.divided import build_backend
from kl_comedy.training.recorded import Recorded
from kl_comedy.training.stream import DrawnHere, ExperienceStream, Source, StreamShape
from kl_comedy.training.world import World

if TYPE_CHECKING:
    from kl_comedy.training.build import Parts


def backend_for(config: Config, loaded: LoadedModel, world: World) -> RolloutBackend:
    """The sampler: in this process, divided over the run's processes, or with ``lag.mode: async`` in one of its own."""
    if config.lag.mode == "async":
        return SamplerProcess(config, loaded)
    return build_backend(config, loaded, world)


def stream_for(parts: Parts, context: Callable[[], AbstractContextManager[Any]]) -> ExperienceStream:
    """The updates of a run; ``context`` is the trainer's precision, under which its own sampler draws."""
    config = parts.config
    shape = StreamShape(
        updates=config.train.steps,
        updates_per_batch=config.algorithm.updates_per_batch,
        epochs_per_batch=config.algorithm.epochs_per_batch,
        seed=config.seed,
    )
    return ExperienceStream(shape, prompts=parts.problems.train, source=_source(parts, shape, context))


def _source(parts: Parts, shape: StreamShape, context: Callable[[], AbstractContextManager[Any]]) -> Source:
    config, prompts = parts.config, parts.problems.train
    indices = PromptOrder(len(prompts), config.rollout.prompts_per_batch, config.seed).indices
    if isinstance(parts.backend, SamplerProcess):
        return Asynchronous(config, shape, prompts=prompts, indices=indices, sampler=parts.backend)
    if isinstance(parts.backend, ReplayRollouts):
        return Recorded(parts.backend, parts.scorer)
    sampling, group_size = sampling_from(config.rollout), config.rollout.group_size

    def generate(prompts: Sequence[Prompt], *, seed: int) -> list[Rollout]:
        return parts.backend.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)

    return DrawnHere(
        shape, lag=config.lag.steps // shape.per_iteration, prompts=prompts, indices=indices, generate=generate,
        scorer=parts.scorer, context=context,
    )  # fmt: skip
