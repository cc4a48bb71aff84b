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
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from kl_comedy.config import Config
from kl_comedy.config.combinations import sampler_of
from kl_comedy.config.schema import RolloutConfig
from kl_comedy.errors import UserError, bad_value
from kl_comedy.models import LoadedModel
from kl_comedy.models.introspection import layers_in_bf16
from kl_comedy.models.load import place
from kl_comedy.models.sharding import compute_in_bf16, rounded_parameters, unsharded_skeleton
from kl_comedy.models.weights import copy_into, stream_weights, weight_bytes
from kl_comedy.records import Problem, Prompt, Rollout, Scored
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rewards import Scorer
from kl_comedy.rollouts import RolloutBackend, Sampling
from kl_comedy.rollouts.engines.options import (
    GPU_SHARE,
    ServerOptions,
    VLLMServerOptions,
    engine_options,
    transport_of,
    visible_gpus,
)
from kl_comedy.training.distributed import Ranks

NOT_PUBLISHED = -1
"""Version of engines that have no weights of this run yet."""


class Engines(Protocol):
    """A sampler beside the trainer (``Capabilities.in_trainer_ranks`` False), built on every rank.

    Rank 0 talks to the engines; the other ranks take part in :meth:`publish` only. Has ``work_in(folder)`` too where
    its capabilities say ``needs_folder``.
    """

    restarts: int
    """How often an engine was restarted so far."""

    def publish(self, version: int) -> None:
        """Stage the learner's weights under ``version``; all ranks call, in step. Does not wait for engines."""

    def load(self) -> int:
        """Let every engine take the newest staged weights; their version. On rank 0, from any thread."""

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        """See :class:`RolloutBackend`; on rank 0."""

    def work_in(self, folder: Path) -> None: ...

    def cpu_seconds(self) -> float:
        """CPU seconds of the engines that this run started, since their start."""

    def close(self) -> None: ...


class BroadcastRollouts:
    """A :class:`RolloutBackend` of engines beside the trainer: rank 0 asks, all ranks receive the completions.

    All ranks call its methods but :meth:`turn` and :meth:`load`, and all raise what fails on one. ``version`` is that
    of the newest published weights. ``asynchronous``: :class:`~kl_comedy.training.asynchronous.Producer` draws in
    another thread of rank 0, and new weights are loaded at the next turn.
    """

    def __init__(self, engines: Engines, ranks: Ranks, *, asynchronous: bool = False) -> None:
        self.version = self.loaded = NOT_PUBLISHED
        self.engines = engines
        self.changed = threading.Condition()  # of ``version`` and of whose turn it is
        self._ranks, self._asynchronous = ranks, asynchronous
        self._loading = threading.Lock()
        self._busy = False
        self._evaluations = 0

    def publish(self, version: int) -> None:
        """Stage the learner's weights; engines that were not started yet start on them."""
        self._ranks.raise_on_all_ranks(lambda: self.engines.publish(version))
        with self.changed:
            self.version = version
            self.changed.notify_all()

    def load(self) -> None:
        """Let the engines load what is published and not loaded yet."""
        with self._loading:
            if self.loaded != self.version:
                self.loaded = self.engines.load()

    def update_weights(self, version: int) -> None:
        self.publish(version)
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

        return _with_prompts(self._ranks.broadcast(_without_prompts(self._ranks.on_rank_zero(draw) or [])), prompts)

    @contextlib.contextmanager
    def turn(self, *, evaluation: bool = False) -> Iterator[None]:
        """Inside, nothing else is drawn; evaluations come first."""
        with self.changed:
            self._evaluations += evaluation
            self.changed.wait_for(lambda: not self._busy and (evaluation or not self._evaluations))
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
        self._ranks.on_rank_zero(lambda: self.engines.work_in(folder))

    def close(self) -> None:
        self.engines.close()


class ShardedRollouts:
    """A :class:`RolloutBackend` of which each rank draws the completions of its own prompts, whole groups.

    ``inner`` declares ``draws_parts``: it draws a part of a batch as it would draw it among the whole, so completions
    do not depend on the number of ranks. ``refresh`` brings its weights up to date.
    """

    def __init__(self, inner: Any, ranks: Ranks, *, refresh: Callable[[], None] = lambda: None) -> None:
        self.inner = inner
        self._ranks, self._refresh = ranks, refresh

    @property
    def version(self) -> int:
        return int(self.inner.version)

    def update_weights(self, version: int) -> None:
        self._refresh()
        self.inner.update_weights(version)

    def close(self) -> None:
        self.inner.close()

    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> list[Rollout]:
        """See :class:`RolloutBackend`; what fails on one rank is raised on all."""
        part = self._ranks.bounds(len(prompts))
        mine = self._ranks.raise_on_all_ranks(lambda: self.inner.generate_part(prompts, part, **settings))
        return _with_prompts([row for rows in self._ranks.gather(_without_prompts(mine)) for row in rows], prompts)


def _without_prompts(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """For an exchange: the prompts are on every rank already."""
    empty = Prompt(problem=Problem(id="", text="", answer=""), text="", token_ids=())
    return [replace(rollout, prompt=empty) for rollout in rollouts]


def _with_prompts(rollouts: Sequence[Rollout], prompts: Sequence[Prompt]) -> list[Rollout]:
    return [replace(rollout, prompt=prompts[rollout.group_id]) for rollout in rollouts]


class ShardedScorer:
    """A scorer of which each rank judges its part of the completions."""

    def __init__(self, inner: Scorer, ranks: Ranks) -> None:
        self._inner, self._ranks = inner, ranks

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        start, end = self._ranks.bounds(len(rollouts))
        mine = self._ranks.raise_on_all_ranks(lambda: self._inner.score(rollouts[start:end]))
        rewards = [reward for part in self._ranks.gather([row.reward for row in mine]) for reward in part]
        return [Scored(rollout=rollout, reward=reward) for rollout, reward in zip(rollouts, rewards, strict=True)]


def engine_gpus(config: Config, gpus: Sequence[str]) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each server that the run starts on a node with ``gpus``: those that the config names,
    else those after the processes' own. Empty where it starts none, and where one shares the only GPU.

    Raises :class:`UserError` for a process or a server without a GPU, and for a GPU that is named twice.
    """
    devices, count = config.train.devices, len(gpus)
    if devices > count:
        raise bad_value("train.devices", devices, f"at most {count}", f"each process has a GPU, and a node has {count}")
    schema: Any = ROLLOUTS.get(sampler_of(config)).facts.get("options")
    if schema is None or not issubclass(schema, ServerOptions):
        return []
    options = engine_options(schema, config.rollout.options)
    each = getattr(options, "tensor_parallel_size", 1)
    named = [name.strip() for entry in options.gpus for name in entry.split(",")]
    if named:
        if len(set(named)) < len(named) or any(name.isdigit() and int(name) >= count for name in named):
            raise bad_value("rollout.options.gpus", list(options.gpus), f"GPUs 0 to {count - 1}, each once")
        if len(named) != options.servers * each:
            why = "rollout.options.tensor_parallel_size"
            raise bad_value("rollout.options.gpus", list(options.gpus), f"{each} for each server", why)
        return list(options.gpus)
    if options.urls or count == options.servers == each == 1:
        return []
    if devices + options.servers * each > count:
        why = f"a node has {count} GPUs, {devices} of them for train.devices, and a server computes on {each}; "
        why += "rollout.options.gpus may name GPUs that are shared"
        room = (count - devices) // each
        key, value, most = "rollout.options.servers", options.servers, room or 1  # a node's only GPU is shared
        if 1 < each >= count:
            key, value, most = "rollout.options.tensor_parallel_size", each, max(1, count - 1)
        elif not room and count > 1:
            key, value, most = "train.devices", devices, count - each
        raise bad_value(key, value, f"at most {most}", why)
    firsts = range(devices, devices + options.servers * each, each)
    return [",".join(gpus[first : first + each]) for first in firsts]


def rollout_on(config: Config, gpus: Sequence[str]) -> RolloutConfig:
    """``config.rollout`` with :func:`engine_gpus` among its options; ``gpus`` are none where the policy is on a CPU.

    A vLLM server on a process's GPU takes as much of its memory as the engine in process, if the config does not say.
    """
    rollout, of_engines = config.rollout, engine_gpus(config, gpus) if gpus else []
    options: dict[str, Any] = {**rollout.options, "gpus": of_engines} if of_engines else dict(rollout.options)
    starts_vllm = gpus and sampler_of(config) == "vllm_server" and not engine_options(VLLMServerOptions, options).urls
    shared = not of_engines or not set(gpus[: config.train.devices]).isdisjoint(",".join(of_engines).split(","))
    if starts_vllm and shared:
        options["gpu_memory_utilization"] = options.get("gpu_memory_utilization") or GPU_SHARE
    return replace(rollout, options=options)


def engine_transport(config: Config, gpus: Sequence[str]) -> str | None:
    """How weights reach engines beside a trainer on a node with ``gpus``; None for engines with a way of their own.

    Raises :class:`UserError` for a transport that cannot work there, and for engines that lack GPUs.
    """
    schema = ROLLOUTS.get(sampler_of(config)).facts.get("options")
    if not (isinstance(schema, type) and issubclass(schema, ServerOptions)):
        return None
    options = engine_options(schema, rollout_on(config, gpus).options)
    return transport_of(options, lora=config.model.lora is not None, gpus=gpus)


def build_engines(config: Config, loaded: LoadedModel, ranks: Ranks) -> BroadcastRollouts:
    """The run's engines beside the trainer, built on every rank."""
    build: Callable[..., Engines] = ROLLOUTS.get(sampler_of(config)).fn
    rollout = rollout_on(config, visible_gpus(loaded.device.type))
    engines = ranks.raise_on_all_ranks(lambda: build(rollout, loaded=loaded, leader=ranks.is_rank_zero))
    return BroadcastRollouts(engines, ranks, asynchronous=config.lag.mode == "async")


def build_backend(config: Config, loaded: LoadedModel, ranks: Ranks) -> RolloutBackend:
    """This rank's sampler and, with several processes, what spreads the prompts over the ranks.

    A sharded policy is sampled from a whole copy of it on every rank. Raises :class:`UserError` where that does not fit
    ``rollout.replica_gib``.
    """
    build: Callable[..., Any] = ROLLOUTS.get(config.rollout.backend).fn
    if config.train.strategy == "single":
        single: RolloutBackend = build(config.rollout, loaded=loaded)
        return single
    if not ranks.sharded:
        return ShardedRollouts(build(config.rollout, loaded=loaded), ranks)

    def make_replica() -> LoadedModel:
        bf16 = layers_in_bf16(loaded.model)
        size, limit = weight_bytes(loaded.model), int(config.rollout.replica_gib * 2**30)
        if bf16:
            size -= sum(parameter.nbytes // 2 for parameter in rounded_parameters(loaded.model))
        if size > limit:
            raise UserError(
                f"rollout.replica_gib: got {limit / 2**30:g}; this policy takes {size / 2**30:.1f} GiB, and the hf "
                "backend samples from a whole copy of it on every rank; raise the limit where that fits"
            )
        dtype = next(iter(loaded.model.parameters())).dtype
        model = unsharded_skeleton(config.model).to(dtype).requires_grad_(False).eval()
        if bf16:  # autocast would round these weights at every token
            for parameter in rounded_parameters(model):
                parameter.data = parameter.data.bfloat16()
            compute_in_bf16(model, loaded.device)
        place(model, loaded.device)
        return replace(loaded, model=model)

    def refresh() -> None:
        copy_into(replica.model, stream_weights(loaded.model, config.rollout.bucket_mib * 2**20))

    replica = ranks.raise_on_all_ranks(make_replica)
    refresh()
    return ShardedRollouts(build(config.rollout, loaded=replica), ranks, refresh=refresh)
