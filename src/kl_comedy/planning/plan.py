"""A plan: what each process of a run allocates, how long an update takes, and which settings would make it fit.

    peak = always + max(learning, sampling)      (with ``lag.mode: async`` the sum of the two)

Memory follows what this package's trainer allocates; activations are :mod:`kl_comedy.models.introspection`'s count.
Time is :mod:`kl_comedy.planning.timing`'s formulas. Shorter completions than planned make both upper bounds.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kl_comedy.config.combinations import updates_from_a_batch, versions_of_samples
from kl_comedy.config.schema import SHARDED, Config, LoraConfig
from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl import resolve_terms
from kl_comedy.models.introspection import head_chunk
from kl_comedy.models.reference import check_past_policies
from kl_comedy.planning.sizes import ELEMENT_BYTES, GIB, Device, Shape, shape_of, workload
from kl_comedy.planning.timing import (
    HASH,
    TRANSPORT_COSTS,
    Assumed,
    Drawing,
    Learning,
    Rates,
    Timing,
    drawing_parts,
    exchange_s,
    learning_parts,
    update_s,
)
from kl_comedy.registry import ADVANTAGES
from kl_comedy.rollouts.decoding import INITIAL_CAPACITY
from kl_comedy.rollouts.engines.options import GPU_SHARE, SERVER_GPU_SHARE
from kl_comedy.rollouts.sampler import Sampler, capabilities_of, sampler_name

PHASES = ("always", "learning", "sampling")
AUTOCAST_SHARE = 0.7
"""The share of a float32 pass's saved values that bf16 autocast saves: linear layers keep half as much, norms and sums
as much (measured: ``tests/planning/test_planning.py``)."""
BACKWARD_LAYERS = 1.0
"""Layers' worth of saved values that gradients on their way back take beside them."""
FRAGMENTS = 0.05
"""The share of temporary memory that an allocator keeps and cannot use."""
RUNTIME = {"cuda": 1.0 * GIB, "cpu": 0.6 * GIB}
"""CUDA's context and libraries, or python with its libraries, in every process."""
NCCL = 0.5 * GIB
ENGINE_SHARE = {"vllm": GPU_SHARE, "vllm_server": SERVER_GPU_SHARE}
"""The share of a device that an engine takes by default (``gpu_memory_utilization``)."""
MAX_PROCESSES = 64
"""A remedy has at most so many."""
DEVICES_OF_A_NODE = 8
KEPT_ID_BYTES = 8
"""Of an id in a kept set, and of a set's size, on the device."""
HF = ("hf", "hf_server")
"""Samplers that start their kernels one by one, in the trainer's precision."""

Changes = Sequence[tuple[str, object]]
"""Dotted config keys and their new values."""
Sizes = Iterator[tuple[str, float, str]]
"""Name, bytes and meaning of components."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """Bytes of one process, when they are allocated (one of :data:`PHASES`), and what they are."""

    name: str
    phase: str
    bytes: float
    what: str


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Overrides that make a run fit, and its peak with them."""

    overrides: tuple[str, ...]
    peak_bytes: float


@dataclass(frozen=True, kw_only=True)
class Split:
    """A number of devices divided: trainer ranks, devices of engines alone (0: all train), and what follows from it."""

    ranks: int
    engines: int
    generate_s: float
    transfer_s: float
    learn_s: float
    update_s: float
    trainer_idle: float
    engine_idle: float
    run_hours: float
    peak_bytes: float
    fits: bool
    overrides: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of prompts and completions; None: as many as the config allows."""

    prompt: int | None = None
    completion: int | None = None
    """The mean completion; None: as many tokens as the longest one has."""
    longest: int | None = None
    """The longest completion of a batch."""


ALLOWED_BY_THE_CONFIG = Lengths()


def _check_lengths(lengths: Lengths, config: Config) -> None:
    """Raise :class:`UserError` for more tokens than the config lets through, and for fewer than one."""
    most_new = config.rollout.max_new_tokens
    most_of_mean = most_new
    if lengths.longest is not None:
        most_of_mean = min(lengths.longest, most_new)
    for option, tokens, most in (
        ("--prompt-tokens", lengths.prompt, config.data.prompt.max_tokens),
        ("--completion-tokens", lengths.completion or lengths.longest, most_of_mean),
        ("--longest-tokens", lengths.longest, most_new),
    ):
        if tokens is not None and not 1 <= tokens <= most:
            raise UserError(f"{option}: got {tokens}; allowed: 1 to {most}, the most that the config lets through")


def _with_fragments(rows: Sizes) -> list[tuple[str, float, str]]:
    """Components of one phase, and the memory between them that the allocator cannot use."""
    components = list(rows)
    total = sum(size for _, size, _ in components)
    return [*components, ("fragments", FRAGMENTS * total, "allocator")]


class Plan:
    """``config`` on ``train.devices`` x ``train.nodes`` devices, with prompts and completions of these lengths.

    Raises :class:`UserError` for more tokens than the config allows, and for a model that cannot be had.
    """

    def __init__(
        self,
        config: Config,
        device: Device,
        lengths: Lengths = ALLOWED_BY_THE_CONFIG,
        *,
        assumed: Assumed | None = None,
        shape: Shape | None = None,
    ) -> None:
        _check_lengths(lengths, config)
        self.config = config
        self.device = device
        self.lengths = lengths
        self.longest = lengths.longest or config.rollout.max_new_tokens
        self.assumed = assumed or Assumed()
        self.shape = shape or shape_of(config.model)
        self.load = workload(config, self.shape, device, lengths.prompt, lengths.completion or lengths.longest)
        self.terms = resolve_terms(config.kl)
        references = {term.reference for term in self.terms} - {"initial", "sampler"}
        if any(term.reads_past_policy for term in self.terms):
            check_past_policies(config, self.shape.trainable * ELEMENT_BYTES[config.model.dtype])
            references.add("sampler")
        self.references = sorted(references)

        is_bf16 = config.train.precision == "bf16"
        self.element_bytes = ELEMENT_BYTES[config.model.dtype]
        # Of a value as matrix products take it.
        self.compute_bytes = self.element_bytes
        if is_bf16:
            self.compute_bytes = 2
        self.autocast = is_bf16 and config.model.dtype == "float32"

        self.sampler = sampler_name(config)
        # Whether engines beside the trainer draw.
        self.beside = not capabilities_of(self.sampler).in_trainer_ranks

        self.sharded = config.train.strategy in SHARDED and self.load.processes > 1
        # A policy in one copy or in one on each node, and the processes that have a part of a copy.
        self.copies = 1
        self.shards = 1
        if self.sharded:
            if config.train.shards == "node":
                self.copies = config.train.nodes
            self.shards = self.load.processes // self.copies

    # --- memory ------------------------------------------------------------------------------------------------------

    @cached_property
    def components(self) -> tuple[Component, ...]:
        """Every component that is not zero."""
        runtime = RUNTIME[self.device.kind]
        if self.device.kind == "cuda" and self.load.processes > 1:
            runtime += NCCL
        # Whatever the phase: the largest of the phases comes on top of it.
        rows_of_phase = {
            "always": [*self._always(), ("runtime", runtime, "libraries and context")],
            "learning": _with_fragments(self._learning()),
            "sampling": _with_fragments(self._sampling()),
        }
        components = []
        for phase in PHASES:
            for name, size, what in rows_of_phase[phase]:
                if size:
                    components.append(Component(name=name, phase=phase, bytes=size, what=what))
        return tuple(components)

    @cached_property
    def peak_bytes(self) -> float:
        """The most bytes of one process at any time; an asynchronous run samples while it learns."""
        size_of_phase = dict.fromkeys(PHASES, 0.0)
        for component in self.components:
            size_of_phase[component.phase] += component.bytes
        largest = max(size_of_phase["learning"], size_of_phase["sampling"])
        if self.config.lag.mode == "async":
            largest = size_of_phase["learning"] + size_of_phase["sampling"]
        return size_of_phase["always"] + largest

    @property
    def limit_bytes(self) -> float:
        """What one process may take: a device, or its share of this machine's memory."""
        if self.device.kind == "cpu":
            return self.device.memory_bytes / self.config.train.devices
        return self.device.memory_bytes

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes and self.engine_fits

    def _always(self) -> Sizes:
        """What is allocated from the first update on."""
        config = self.config
        shape = self.shape
        shards = self.shards
        whole = shape.parameters * self.element_bytes
        trained = shape.trainable * self.element_bytes
        yield "parameters", whole / shards, "policy"
        yield "gradients", trained / shards, "until the next update's first pass"
        yield "optimizer", 2 * trained / shards, "AdamW's two moments"
        if config.model.lora is None:
            yield "reference", whole / shards, "frozen copy"
        # A copy of an unsharded policy shares what is not trained; copies of shards share nothing.
        untrained = 0.0
        if self.sharded:
            untrained = (whole - trained) / shards
        for name in self.references:
            if name == "teacher" and config.reference.teacher is not None:
                # One with a URL is on another machine.
                if config.reference.teacher.url is None:
                    teacher = config.reference.teacher.model(config.model)
                    size = shape_of(teacher).parameters * ELEMENT_BYTES[teacher.dtype]
                    yield "teacher", size / shards, "frozen"
                continue
            if name == "sampler":
                versions = versions_of_samples(config)
                yield "past policies", versions * trained, f"{versions} versions, which samples name"
                continue
            average = 0.0
            if name == "ema":
                # The exact average is float32, and rounded into the weights of the pass.
                average = shape.trainable * 4 / shards
            yield f"{name} reference", trained / shards + untrained + average, "its weights"
        # A sharded policy cannot be called for one token at a time by one rank: it samples from a copy.
        if self.sharded and self.sampler in ("hf", "replay"):
            yield "sampling replica", self._replica_bytes, "whole copy to sample from"
        if self.on_rank_gpus:
            if not self._engine_sleeps:
                yield self._engine
        elif self.beside and not self.apart:
            yield "sampler's policy", whole, "of the engine beside the trainer"

    def _learning(self) -> Sizes:
        """What is allocated while gradients of a micro-batch are computed."""
        config = self.config
        shape = self.shape
        load = self.load
        size = self.element_bytes
        layer_bytes = shape.layer_values * size
        if self.autocast:
            layer_bytes *= AUTOCAST_SHARE
        tokens = f"{load.micro_tokens:,} tokens"
        if config.model.gradient_checkpointing:
            # One layer's values are there at a time, and the inputs of all.
            layers = 1
            inputs = shape.layers * shape.hidden * size
            tokens += ", layer inputs and one layer"
        else:
            layers = shape.layers
            inputs = 0
        per_token = inputs + layer_bytes * (layers + BACKWARD_LAYERS)
        yield "activations", load.micro_tokens * per_token, tokens
        if config.model.attention == "sdpa":
            # One mask for all layers; the prompt's keys and values once for each completion.
            width = self.compute_bytes
            group = shape.heads // shape.kv_heads
            mask = group * load.micro_rows * load.completion * (load.prompt + load.completion) * width
            prompts = 2 * load.micro_rows * load.prompt * shape.kv_width * width * layers
            yield "attention", mask + prompts, "mask, and keys of prompts row by row"
        if self.autocast and not self.sharded:
            # The copies live through a pass; FSDP gathers narrow weights.
            yield "bf16 weights", 2 * shape.layers * shape.layer, "autocast's copies"
        chunk = head_chunk(config.model.head_chunk_elements, torch.device(self.device.kind))
        rows = min(max(1, chunk // shape.vocabulary), load.micro_rows * load.completion)
        # Five [n, V] in float32 at once, since the first and the last update measure exact KL.
        yield "head chunk", 5 * rows * shape.vocabulary * 4.0, "logits"
        table = shape.vocabulary * shape.hidden
        if self._head_in_bf16 and size > 2:
            yield "bf16 heads", 2 * 2 * table, "model.head_dtype: of policy and reference"
        if config.model.lora is None:
            yield "head's gradient", table * max(size, 4) + table * size, "of head and embedding, before they are added"
        stored = load.update_tokens * (shape.hidden * size + 60)
        yield "kept passes", stored, "the reference's hidden states, ids, log-probs"
        truncation = config.rollout.truncation
        if truncation.is_on:
            # Of top_p and min_p alone nothing bounds a set but the vocabulary: a warning says what an id takes.
            kept_ids = load.update_tokens * (truncation.top_k + 1) * KEPT_ID_BYTES
            yield (
                "kept sets",
                kept_ids + rows * shape.vocabulary,
                "of truncated sampling, and a chunk's mask",
            )
        if self.sharded:
            weights = 2 * shape.layer * self.compute_bytes + shape.root * size
            yield "gathered layers", weights + (shape.layer + shape.root) * size, "two layers, embedding and head"
        # Two buckets: one is filled while the other is summed.
        elif load.processes > 1:
            yield "gradient buckets", 2 * 64 * 2**20, "all-reduce"

    def _sampling(self) -> Sizes:
        """What is allocated while completions are drawn, by the ``hf`` backend and by an engine that sleeps else."""
        if self.on_rank_gpus and self._engine_sleeps:
            yield self._engine
        if self.config.rollout.backend != "hf" or self.apart:
            return
        shape = self.shape
        load = self.load
        size = self.compute_bytes
        drawn = load.completion
        prefix = load.prompt
        families = -(-load.wave_rows // self.config.rollout.group_size)
        environment = self.config.environment
        if environment is not None and environment.turns > 1:
            # The last turn of a dialogue: all that stands before it is its own prompt, which no other row shares.
            drawn = min(drawn, environment.turn_tokens or max(1, drawn // environment.turns))
            prefix = load.prompt + load.completion - drawn
            families = load.wave_rows
        # As the sampler's cache grows: by doubling, from its first capacity.
        capacity = INITIAL_CAPACITY
        while capacity < drawn:
            capacity *= 2
        cached = 2 * shape.layers * shape.kv_width * (families * prefix + load.wave_rows * capacity)
        yield "KV cache", cached * size, f"{load.wave_rows} completions at a time"
        # Scores and log-probs in float32, probabilities in both.
        yield "logits of a token", load.wave_rows * shape.vocabulary * 20.0, "every row's"
        yield "prompts' pass", families * prefix * shape.layer_values * size, "one layer, no gradient"

    # --- engines -----------------------------------------------------------------------------------------------------

    @cached_property
    def _node_gpus(self) -> list[str]:
        """The GPUs of rank 0's node: as many as ranks and engines need, a node's at least; none on a CPU."""
        if self.device.kind != "cuda":
            return []
        needed = self.config.train.devices
        if self.beside:
            needed += self.engines * self.engine_devices
        return [str(number) for number in range(max(needed, DEVICES_OF_A_NODE))]

    @cached_property
    def transport(self) -> str | None:
        """How weights reach engines beside the trainer, as a run chooses it (an engine's own way counts as gloo); None
        where the ranks draw."""
        if not self.beside:
            return None
        return Sampler.of(self.config).transport_on(self._node_gpus) or "gloo"

    @cached_property
    def apart(self) -> bool:
        """Whether engines beside the trainer have GPUs of their own."""
        if not self.beside or self.device.kind != "cuda":
            return False
        of_engines = ",".join(Sampler.of(self.config).server_gpus(self._node_gpus)).split(",")
        return set(self._node_gpus[: self.config.train.devices]).isdisjoint(of_engines)

    @property
    def on_rank_gpus(self) -> bool:
        """Whether an engine takes a share of a rank's GPU."""
        return self.device.kind == "cuda" and self.sampler in ENGINE_SHARE and not self.apart

    @property
    def _engine_sleeps(self) -> bool:
        """Whether it has memory only while it draws."""
        return not self.beside and self.config.rollout.options.get("sleep") is not False

    @property
    def _engine(self) -> tuple[str, float, str]:
        return "engine", self._engine_share * self.device.memory_bytes, "gpu_memory_utilization of the device"

    @property
    def engines(self) -> int:
        """Processes that draw."""
        if not self.beside:
            return self.load.processes
        options = self.config.rollout.options
        urls = options.get("urls")
        if urls:
            return len(urls)
        return int(options.get("servers", 1))

    @property
    def engine_devices(self) -> int:
        """Devices of one engine that only draws."""
        if not self.beside:
            return 1
        return int(self.config.rollout.options.get("tensor_parallel_size", 1))

    @property
    def _engine_share(self) -> float:
        share = self.config.rollout.options.get("gpu_memory_utilization")
        return float(share or ENGINE_SHARE.get(self.sampler, 1 / (1 + FRAGMENTS)))

    @property
    def engine_fits(self) -> bool:
        """Whether an engine's share of its devices has room for the weights and for one whole completion."""
        if not self.apart and not self.on_rank_gpus:
            return True
        # Less than one whole completion, and the engine would refuse to start.
        memory = self.engine_devices * self._engine_share * self.device.memory_bytes
        return self._weight_bytes + self._row_bytes < memory

    @property
    def _replica_bytes(self) -> float:
        """The whole copy of a sharded policy that ``hf`` samples from: layers as matrix products take them."""
        return self.shape.body * self.compute_bytes + (self.shape.parameters - self.shape.body) * self.element_bytes

    @property
    def _in_bf16(self) -> bool:
        """Whether an engine's weights are narrow: ``rollout.options.dtype``, else the policy's."""
        return (self.config.rollout.options.get("dtype") or self.config.model.dtype) != "float32"

    @property
    def _weight_bytes(self) -> float:
        """The bytes of the weights as they travel to an engine and as it holds them; an adapter is merged."""
        return self.shape.parameters * (2 if self._in_bf16 else 4)

    @property
    def _row_bytes(self) -> float:
        """Keys and values of one completion of mean length and its prompt, in an engine."""
        return self.shape.kv_values * (2 if self._in_bf16 else 4) * (self.load.prompt + self.load.completion)

    # --- time --------------------------------------------------------------------------------------------------------

    @cached_property
    def timing(self) -> Timing:
        """Upper bounds where completions end before ``rollout.max_new_tokens``."""
        config = self.config
        load = self.load
        # Seconds are those of one update; a batch is drawn for several.
        updates = updates_from_a_batch(config)

        learning = self._learning_work()
        learned = learning_parts(self.shape, self._rates, learning)
        learn_s = sum(learned.values())
        generate_s = sum(self._drawn.values()) / updates
        transfer = self._transfer(self.transport)
        publish_s = transfer["publish weights"]
        load_s = transfer["load weights"]
        if config.lag.mode == "async" and not config.lag.in_flight:
            # An engine that takes weights between batches only loads once for all updates of a batch.
            load_s *= 1 / updates

        rank_s = learn_s + publish_s
        engine_s = generate_s + load_s
        update = update_s(rank_s, engine_s, rank_s * self._overlap)
        rank_parts = {**learned, "publish weights": publish_s}
        engine_parts = {name: seconds / updates for name, seconds in self._drawn.items()}
        engine_parts["load weights"] = load_s
        parts = {**engine_parts, **rank_parts}
        # Where one side hides the other, only what the slower side does can be the bottleneck.
        waited_for = parts
        if update == rank_s:
            waited_for = rank_parts
        elif update == engine_s:
            waited_for = engine_parts

        devices = load.processes
        if self.apart:
            devices += self.engines * self.engine_devices
        tokens = config.rollout.prompts_per_batch * config.rollout.group_size * load.completion
        hours = update * config.train.steps / 3600
        return Timing(
            generate_s=generate_s,
            learn_s=learn_s,
            exchange_s=exchange_s(self.shape, self._rates, learning),
            update_s=update,
            generated_tokens_per_s=tokens / (generate_s * updates) if generate_s else 0.0,
            trained_tokens_per_s=tokens / config.algorithm.updates_per_batch / learn_s,
            run_hours=hours,
            device_hours=hours * devices,
            publish_s=publish_s,
            load_s=load_s,
            # Where the ranks draw, nobody waits for another.
            trainer_idle=1 - rank_s / update if self.beside else 0.0,
            engine_idle=1 - engine_s / update if self.beside else 0.0,
            bottleneck=max(waited_for, key=lambda name: waited_for[name]),
            devices=devices,
            parts=parts,
            transfer_s={name: sum(self._transfer(name).values()) for name in self._possible_transports},
        )

    @cached_property
    def _drawn(self) -> Mapping[str, float]:
        """Seconds in which one engine, or one rank that draws, makes a batch, by part; empty where batches are read."""
        drawing = self._drawing_work()
        if drawing is None:
            return {}
        return drawing_parts(self.shape, self._engine_rates, drawing)

    @property
    def _possible_transports(self) -> Sequence[str]:
        """The ways in which weights could reach engines beside the trainer."""
        if not self.beside:
            return []
        names = list(TRANSPORT_COSTS)
        if self.config.model.lora is None:
            names.remove("adapter")
        return names

    @property
    def _overlap(self) -> float:
        """The share of a rank's work in which the engines may already draw the next batch."""
        lag = self.config.lag
        # On a shared GPU two sides at once take as long as one after the other.
        if lag.mode != "async" or (self.device.kind == "cuda" and not self.apart):
            return 0.0
        # Engines that drop what is too old never wait for the trainer.
        if lag.policy == "drop":
            return 1.0
        return min(1.0, lag.max_steps / updates_from_a_batch(self.config))

    @property
    def _rates(self) -> Rates:
        """The speeds of a trainer rank."""
        train = self.config.train
        # A copy on each node gathers within its node.
        ports = None
        if train.nodes > 1 and self.copies == 1:
            ports = train.devices
        return Rates.of(
            self.device, self.assumed, bf16=self.compute_bytes == 2, bf16_head=self._head_in_bf16, ports=ports
        )

    @property
    def _head_in_bf16(self) -> bool:
        """Whether the head's products are of bf16 factors, whatever autocast does."""
        return self.element_bytes == 2 or self.config.model.head_dtype is not None

    @property
    def _engine_rates(self) -> Rates:
        """The speeds of an engine with all its devices; ``hf`` draws in the trainer's precision."""
        is_bf16 = self._in_bf16
        has_bf16_head = self._in_bf16
        if self.sampler in HF:
            is_bf16 = is_bf16 or self.compute_bytes == 2
            has_bf16_head = has_bf16_head or self._head_in_bf16
        rates = Rates.of(self.device, self.assumed, bf16=is_bf16, bf16_head=has_bf16_head)
        devices = self.engine_devices
        return dataclasses.replace(
            rates, products=rates.products * devices, head=rates.head * devices, memory=rates.memory * devices
        )

    def _drawing_work(self) -> Drawing | None:
        """What one engine, or one rank that draws, does for a batch; None where batches are read."""
        if capabilities_of(self.sampler).recorded:
            return None
        if self.sampler in HF:
            return self._drawing_of_hf()
        return self._drawing_of_an_engine()

    @property
    def _rows_of_an_engine(self) -> int:
        """Completions of a batch that the engine with the most of them draws: whole groups."""
        rollout = self.config.rollout
        return -(-rollout.prompts_per_batch // self.engines) * rollout.group_size

    @property
    def _mean_rows_of_an_engine(self) -> float:
        return self.config.rollout.prompts_per_batch * self.config.rollout.group_size / self.engines

    @property
    def _read_again(self) -> float:
        """Tokens of its own prefixes that a dialogue passes again, because each turn after the first begins anew."""
        environment = self.config.environment
        if environment is None:
            return 0.0
        # Turns are equally long, so that half of the completion stands before a turn on average.
        return (environment.turns - 1) * (self.load.prompt + self.load.completion / 2)

    def _drawing_of_hf(self) -> Drawing:
        """Waves of completions; each wave ends with its longest one."""
        rollout = self.config.rollout
        rows = self._rows_of_an_engine
        waves = -(-rows // min(rollout.batch_sequences, rows))
        # A GPU works while the host starts the next kernels; a CPU is the host.
        launch_s = self.shape.layers * self.assumed.layer_s
        host_s = 0.0
        if self.device.kind != "cuda":
            host_s = launch_s
            launch_s = 0.0
        value_bytes = self.compute_bytes
        if self._in_bf16:
            value_bytes = 2
        weight_bytes = value_bytes
        # The layers of the copy that a sharded policy draws from are narrow already.
        has_narrow_copy = self.sharded and not self.beside
        if self.autocast and not self._in_bf16 and not has_narrow_copy:
            # Autocast without gradient makes a narrow copy of each weight whenever it is used: it reads 4 bytes, writes
            # 2 and reads 2.
            weight_bytes = 8
        return Drawing(
            rows=self._mean_rows_of_an_engine,
            group=rollout.group_size,
            prompt=self.load.prompt,
            completion=self.load.completion,
            read_again=self._read_again,
            steps=waves * self.longest,
            launch_s=launch_s,
            host_s=host_s,
            weight_bytes=weight_bytes,
            value_bytes=value_bytes,
            shared=rollout.group_size,
        )

    def _drawing_of_an_engine(self) -> Drawing:
        """As many completions at once as its memory holds; one that ended makes room for the next."""
        rollout = self.config.rollout
        rows = self._rows_of_an_engine
        memory = self._engine_share * self.device.memory_bytes * self.engine_devices
        fitting = (memory - self._weight_bytes) / self._row_bytes
        at_once = max(1.0, min(rows, rollout.batch_sequences, fitting))
        value_bytes = 2 if self._in_bf16 else 4
        return Drawing(
            rows=self._mean_rows_of_an_engine,
            group=rollout.group_size,
            prompt=self.load.prompt,
            completion=self.load.completion,
            read_again=self._read_again,
            steps=self.longest + (rows / at_once - 1) * self.load.completion,
            launch_s=self.shape.layers * self.assumed.engine_layer_s,
            host_s=self.assumed.engine_step_s,
            weight_bytes=value_bytes,
            value_bytes=value_bytes,
        )

    def _learning_work(self) -> Learning:
        """What one rank does for an update."""
        config = self.config
        load = self.load
        algorithm = config.algorithm
        # The initial reference is always there: its KL is measured whatever the terms.
        references = 1 + len(self.references)
        critic = bool(ADVANTAGES.get(algorithm.advantage, key="algorithm.advantage").facts.get("critic"))
        # Passes of the policy without gradient, before the one that learns: each True counts as one.
        early = any(term.needs_update for term in self.terms) or algorithm.dpo is not None
        ahead = early + (algorithm.proximal == "recomputed" or critic)
        every = config.train.exact_kl_every
        exact = any(term.reads != {"log_ratio"} for term in self.terms)
        # The share of updates that measure the exact KL.
        measured = 0.0
        if exact:
            measured = 1.0
        elif every:
            measured = 1 / every
        lora = config.model.lora is not None
        # Of the hidden states, and of the head's weights where they are trained.
        gradients = 2
        if lora:
            gradients = 1
        # Forward, again in the backward, and gradients; for the exact KL the reference's again in both.
        head_products = references + ahead + early * exact + 2 + gradients + 2 * measured
        return Learning(
            line=load.update_line,
            tokens=load.update_tokens,
            context=load.prompt + load.completion / 2,
            ahead=references + ahead,
            head_products=head_products,
            recompute=config.model.gradient_checkpointing,
            lora=lora,
            micro_batches=load.update_micro,
            ranks=load.processes,
            sharded=self.sharded,
            copies=self.copies,
            element_bytes=self.element_bytes,
            gather_bytes=self.compute_bytes,
        )

    def _transfer(self, transport: str | None) -> Mapping[str, float]:
        """Seconds of publishing the weights and of loading them. Trainer and engine hash them.

        Ranks that draw take new weights by a gather of the shards, or have them already.
        """
        gather = self.shape.parameters * self.element_bytes * (1 - 1 / self.shards) / self._rates.link
        if transport is None:
            seconds = {"publish weights": 0.0, "load weights": 0.0}
            if self.sampler == "hf":
                seconds["publish weights"] = gather
            elif self.sampler == "vllm":
                seconds["load weights"] = self._weight_bytes / self._rates.memory
            return seconds
        cost = TRANSPORT_COSTS[transport]
        size = self._weight_bytes
        # Weights are cast before they are gathered.
        narrow = size / (self.shape.parameters * self.element_bytes)
        if transport == "adapter":
            size *= self.shape.trainable / self.shape.parameters
        gather *= size / self._weight_bytes * narrow
        load = cost.load
        if cost.in_turn:
            load *= self.engines
        # The hash is computed on both sides, so it is part of publishing and of loading.
        return {"publish weights": gather + size * (cost.publish + HASH), "load weights": size * (load + HASH)}

    # --- what does not fit, and what would ---------------------------------------------------------------------------

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[str]:
        config = self.config
        device = self.device
        load = self.load
        peak = self.peak_bytes
        limit = self.limit_bytes
        if peak > limit:
            yield f"does not fit: {peak / GIB:.1f} GiB in one process, {limit / GIB:.1f} GiB on {device.name}"
        if not self.engine_fits:
            yield f"does not fit: an engine's weights and one completion on {self.engine_devices} x {device.name}"
        truncation = config.rollout.truncation
        if truncation.is_on and not truncation.top_k:
            id_bytes = load.update_tokens * KEPT_ID_BYTES
            yield (
                "how many tokens top_p and min_p keep is not known before a run: "
                f"{id_bytes / GIB:.3g} GiB for each token of a kept set are not counted"
            )
        # docs/planning.md compares the estimate with measured peaks.
        if limit >= peak > 0.9 * limit:
            yield f"tight: {peak / limit:.0%} of the memory, and the estimate may be off by as much"
        if device.kind == "cuda" and config.train.precision == "fp32":
            ratio = device.bf16_flops / device.fp32_flops
            yield f"train.precision=fp32 has 1/{ratio:.0f} of this device's bf16 rate; train.precision=bf16 is autocast"
        size = self._replica_bytes
        limit_gib = config.train.replica_gib
        if self.sharded and self.sampler == "hf" and size > limit_gib * GIB:
            yield (
                f"train.replica_gib={limit_gib:g} refuses the whole copy that hf samples from: "
                f"{size / GIB:.1f} GiB; "
                f"train.replica_gib={-(-size // GIB):.0f} lets it"
            )
        budget = config.train.microbatch_tokens
        if budget is not None and load.prompt + load.completion > budget:
            yield (
                f"train.microbatch_tokens={budget} is less than a prompt and its completion "
                f"({load.prompt} + {load.completion}); each such row is a micro-batch of its own"
            )

    @cached_property
    def remedies(self) -> tuple[Remedy, ...]:
        """What makes a run fit that does not: of each kind of :meth:`_candidates` the first."""
        if self.fits:
            return ()
        remedies = []
        for candidates in self._candidates():
            for changes in candidates:
                remedy = self._try(changes)
                if remedy is not None:
                    remedies.append(remedy)
                    break
        return tuple(remedies)

    def _try(self, changes: Changes) -> Remedy | None:
        """The changes as a remedy, where the run fits with them."""
        config = changed(self.config, changes)
        shape = self.shape
        if config.model.lora != self.config.model.lora:
            try:
                shape = shape_of(config.model)
            except UserError:
                # The model has none of the modules that adapters usually go to.
                return None
        plan = Plan(config, self.device, self.lengths, assumed=self.assumed, shape=shape)
        if not plan.fits:
            return None
        return Remedy(overrides=_as_overrides(changes), peak_bytes=plan.peak_bytes)

    def _candidates(self) -> Iterator[Iterator[Changes]]:
        """Settings that change no number of the run, one after another; more processes; an adapter."""
        config = self.config
        steps = list(self._harmless_changes())
        yield (steps[:count] for count in range(1, len(steps) + 1))
        can = capabilities_of(self.sampler)
        if can.draws_parts or not can.in_trainer_ranks:
            yield self._more_processes(steps)
        if config.model.lora is None:
            yield iter([[*steps, ("model.lora", "{rank: 16}")]])

    def _more_processes(self, steps: Changes) -> Iterator[Changes]:
        """Sharding over two to 64 times as many processes, first as the run is, then with ``steps``."""
        processes = self.load.processes
        if self.config.train.strategy == "single":
            processes = 1
        nothing_else: Changes = ()
        for changes in (nothing_else, steps):
            for power in range(1, 7):
                count = processes * 2**power
                # Every rank draws as many prompts.
                if count <= MAX_PROCESSES and self.config.rollout.prompts_per_batch % count == 0:
                    yield [("train.strategy", "fsdp"), *_places(count), *changes]

    def _harmless_changes(self) -> Iterator[tuple[str, object]]:
        """Settings that change time and memory only."""
        config = self.config
        chunk = 2**23
        if not config.model.gradient_checkpointing:
            yield "model.gradient_checkpointing", True
        longest = config.data.prompt.max_tokens + config.rollout.max_new_tokens
        if (config.train.microbatch_tokens or 2**16) > longest:
            yield "train.microbatch_tokens", longest
        if self.device.kind == "cuda" and (config.model.head_chunk_elements or 2**27) > chunk:
            yield "model.head_chunk_elements", chunk
        if config.rollout.backend == "hf" and config.rollout.batch_sequences > 64:
            yield "rollout.batch_sequences", 64


def splits(
    config: Config,
    device: Device,
    total: int,
    lengths: Lengths = ALLOWED_BY_THE_CONFIG,
) -> tuple[Split, ...]:
    """Ways to divide ``total`` devices between trainer ranks and engines: those that fit first, the fastest first.

    Without engines in the config, vLLM's servers draw, in bf16 where ``train.precision`` is. Where all devices train,
    the ranks draw, or the config's engines take a share of the same GPUs. Lengths as for :class:`Plan`. Raises
    :class:`UserError` where no division gives every rank as many prompts.
    """
    shape = shape_of(config.model)
    divided = []
    # Every number of ranks: a plan is cheap, and which of them is best depends on all rates.
    for ranks in range(1, total + 1):
        changes = _division_of(config, ranks, total)
        if changes is None:
            continue
        plan = Plan(changed(config, changes), device, lengths, shape=shape)
        time = plan.timing
        divided.append(
            Split(
                ranks=ranks,
                engines=total - ranks,
                generate_s=time.generate_s,
                transfer_s=time.publish_s + time.load_s,
                learn_s=time.learn_s,
                update_s=time.update_s,
                trainer_idle=time.trainer_idle,
                engine_idle=time.engine_idle,
                run_hours=time.run_hours,
                peak_bytes=plan.peak_bytes,
                fits=plan.fits,
                overrides=_as_overrides(changes),
            )
        )
    if not divided:
        prompts = config.rollout.prompts_per_batch
        raise bad_value("--split", total, f"a number of which a part divides rollout.prompts_per_batch ({prompts})")
    return tuple(sorted(divided, key=lambda split: (not split.fits, split.update_s)))


def _division_of(config: Config, ranks: int, total: int) -> Changes | None:
    """Settings with which ``ranks`` of ``total`` devices train and the others draw; None where that cannot be."""
    sampler = sampler_name(config)
    capabilities = capabilities_of(sampler)
    engine_devices = 1
    if not capabilities.in_trainer_ranks:
        engine_devices = int(config.rollout.options.get("tensor_parallel_size", 1))
    nodes = -(-ranks // DEVICES_OF_A_NODE)
    # As many prompts for every rank, as many ranks on every node, and no device that does nothing.
    if config.rollout.prompts_per_batch % ranks or ranks % nodes or (total - ranks) % engine_devices:
        return None
    if ranks < total:
        return _division(config, ranks, servers=(total - ranks) // engine_devices, gpus_each=0)
    # All devices train: servers share the GPUs of one node, or the ranks draw.
    if sampler == "vllm_server" and nodes == 1 and ranks % engine_devices == 0:
        return _division(config, ranks, servers=ranks // engine_devices, gpus_each=engine_devices)
    if capabilities.draws_parts:
        return _division(config, ranks, servers=0, gpus_each=0)
    return None


def _division(config: Config, ranks: int, *, servers: int, gpus_each: int) -> Changes:
    """Settings of so many ranks and servers; a server shares ``gpus_each`` of the ranks' GPUs, or has its own (0)."""
    if ranks == 1:
        strategy = "single"
    elif config.train.strategy == "ddp":
        strategy = "ddp"
    else:
        strategy = "fsdp"
    changes: list[tuple[str, object]] = [("train.strategy", strategy), *_places(ranks)]
    # A setting of sharded strategies, which the config refuses beside another one.
    if strategy not in SHARDED and config.train.shards != "all":
        changes.append(("train.shards", "all"))
    if not servers:
        return changes
    sampler = "vllm_server"
    options: dict[str, Any] = {}
    if not capabilities_of(sampler_name(config)).in_trainer_ranks:
        sampler = sampler_name(config)
        options = {name: value for name, value in config.rollout.options.items() if name not in ("gpus", "urls")}
    options["servers"] = servers
    if config.train.precision == "bf16":
        options.setdefault("dtype", "bfloat16")
    if gpus_each:
        names = [str(gpu) for gpu in range(ranks)]
        options["gpus"] = [",".join(names[first : first + gpus_each]) for first in range(0, ranks, gpus_each)]
        options.setdefault("gpu_memory_utilization", GPU_SHARE)
    return [*changes, ("rollout.backend", sampler), ("rollout.options", options)]


def _as_overrides(changes: Changes) -> tuple[str, ...]:
    """As the command line takes them."""
    overrides = []
    for key, value in changes:
        if isinstance(value, bool | dict):
            value = json.dumps(value)
        overrides.append(f"{key}={value}")
    return tuple(overrides)


def _places(processes: int) -> list[tuple[str, object]]:
    """Settings of so many processes: on as few nodes as hold them."""
    nodes = -(-processes // DEVICES_OF_A_NODE)
    changes: list[tuple[str, object]] = [("train.devices", processes // nodes)]
    if nodes > 1:
        changes.append(("train.nodes", nodes))
    return changes


def changed(config: Config, changes: Changes) -> Config:
    """``config`` with fields of its sections replaced; the rest is shared."""
    for key, value in changes:
        section, name = key.split(".")
        if name == "lora":
            value = LoraConfig(rank=16)
        replaced = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: replaced})
    return config
