"""A plan: what a run takes (memory, time, device hours), whether that fits, and which settings would make it fit.

Time is a roofline of counted work and a device's rates, with shares of the peak that are assumed: no rate was measured
on a GPU by this project. :data:`Assumed` names the shares; every plan prints them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kl_comedy.config.schema import SHARDED, Config, LoraConfig
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm, resolve_terms
from kl_comedy.lab.planning.memory import (
    GIB,
    NETWORK,
    Component,
    Device,
    Shape,
    Workload,
    components,
    compute_bytes,
    element_bytes,
    is_sharded,
    peak,
    shape_of,
    uses_autocast,
    workload_of,
)

MAX_PROCESSES = 64
Changes = Sequence[tuple[str, object]]
"""Dotted config keys and their new values."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of a prompt and of a completion; None: as many as the config lets them have."""

    prompt: int | None = None
    completion: int | None = None


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Overrides that make a run fit, and its peak with them."""

    overrides: tuple[str, ...]
    peak_bytes: float


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """Shares of a device's peak that are reached: of matrix products (learning), of memory bandwidth (sampling).

    ``layer_s``: what starting the kernels of one layer costs, in seconds, whatever they do. The ``hf`` sampler starts
    them one by one; engines replay a graph.
    """

    flops: float = 0.4
    bandwidth: float = 0.7
    layer_s: float = 5e-4
    engine_layer_s: float = 2e-5


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one optimizer update, tokens per second over all processes, hours of the run.

    ``generate_s`` is an update's share of its batch. Evaluation, verification and checkpoints are not counted.
    """

    generate_s: float
    learn_s: float
    exchange_s: float
    update_s: float
    generated_tokens_per_s: float
    trained_tokens_per_s: float
    run_hours: float
    device_hours: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What each process of a run allocates and how long an update takes. ``limit_bytes``: of one process."""

    shape: Shape
    device: Device
    load: Workload
    components: tuple[Component, ...]
    peak_bytes: float
    limit_bytes: float
    timing: Timing
    assumed: Assumed
    warnings: tuple[str, ...]
    remedies: tuple[Remedy, ...]

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes


def plan_run(
    config: Config,
    device: Device,
    *,
    lengths: Lengths | None = None,
    assumed: Assumed | None = None,
    shape: Shape | None = None,
) -> Plan:
    """Plan ``config`` on ``train.devices`` x ``train.nodes`` devices.

    Raises :class:`UserError` for a model that cannot be had.
    """
    shape, lengths, assumed = shape or shape_of(config.model), lengths or Lengths(), assumed or Assumed()
    for option, given, most in (
        ("--prompt-tokens", lengths.prompt, config.data.prompt.max_tokens),
        ("--completion-tokens", lengths.completion, config.rollout.max_new_tokens),
    ):
        if given is not None and not 1 <= given <= most:
            raise UserError(f"{option}: got {given}; allowed: 1 to {most}, the most that the config lets through")
    terms = resolve_terms(config.kl)
    load, parts, peak_bytes = _memory(config, terms, shape, device, lengths)
    limit = limit_bytes(config, device)

    def try_changes(changes: Changes, shape: Shape = shape) -> Remedy | None:
        """The changes as a remedy where they fit; None where they do not."""
        other = changed(config, changes)
        _, _, size = _memory(other, terms, shape, device, lengths)
        if size > limit_bytes(other, device):
            return None
        return Remedy(overrides=tuple(f"{key}={_format(value)}" for key, value in changes), peak_bytes=size)

    return Plan(
        shape=shape,
        device=device,
        load=load,
        components=tuple(parts),
        peak_bytes=peak_bytes,
        limit_bytes=limit,
        timing=timing_of(config, terms, shape, load, device, assumed),
        assumed=assumed,
        warnings=tuple(_warnings(config, shape, device, load, peak_bytes, limit)),
        remedies=() if peak_bytes <= limit else tuple(_remedies(config, device, try_changes)),
    )


def limit_bytes(config: Config, device: Device) -> float:
    """What one process may take: a device, or its share of this machine's memory."""
    return device.memory_bytes / (config.train.devices if device.kind == "cpu" else 1)


def _memory(
    config: Config, terms: tuple[KLTerm, ...], shape: Shape, device: Device, lengths: Lengths
) -> tuple[Workload, list[Component], float]:
    load = workload_of(config, shape, device, prompt=lengths.prompt, completion=lengths.completion)
    parts = components(config, terms, shape, load, device)
    return load, parts, peak(parts, at_once=config.lag.mode == "async")


def _warnings(
    config: Config, shape: Shape, device: Device, load: Workload, peak_bytes: float, limit: float
) -> Iterator[str]:
    if peak_bytes > limit:
        yield f"does not fit: {peak_bytes / GIB:.1f} GiB in one process, {limit / GIB:.1f} GiB on {device.name}"
    elif peak_bytes > 0.9 * limit:
        yield f"tight: {peak_bytes / limit:.0%} of the memory, and the estimate may be off by as much"
    if device.kind == "cuda" and config.train.precision == "fp32":
        factor = device.bf16_flops / device.fp32_flops
        yield f"train.precision=fp32 has 1/{factor:.0f} of this device's bf16 rate; train.precision=bf16 is autocast"
    if config.train.strategy in SHARDED and config.rollout.backend == "hf":
        size = shape.parameters * (4 if config.model.dtype == "float32" else 2)
        if size > config.rollout.replica_gib * GIB:
            yield (
                f"rollout.replica_gib={config.rollout.replica_gib:g} refuses the whole copy that hf samples from: "
                f"{size / GIB:.1f} GiB; rollout.replica_gib={-(-size // GIB):.0f} lets it"
            )
    budget = config.train.microbatch_tokens
    if budget is not None and load.prompt + load.completion > budget:
        yield (
            f"train.microbatch_tokens={budget} is less than a prompt and its completion "
            f"({load.prompt} + {load.completion}); each such row is a micro-batch of its own"
        )


def _remedies(config: Config, device: Device, try_changes: Callable[..., Remedy | None]) -> Iterator[Remedy]:
    """Settings that change no number of the run first, then more processes, then an adapter."""
    steps = list(_harmless_changes(config, device))
    candidates = [try_changes(steps[:count]) for count in range(1, len(steps) + 1)]
    yield from [remedy for remedy in candidates if remedy is not None][:1]
    if config.lag.mode != "async" and config.rollout.backend in ("hf", "replay"):
        candidates = [
            try_changes([("train.strategy", "fsdp"), *_places(processes), *changes])
            for changes in ([], steps)
            for processes in _process_counts(config)
        ]
        yield from [remedy for remedy in candidates if remedy is not None][:1]
    if config.model.lora is None:
        try:
            adapter = shape_of(dataclasses.replace(config.model, lora=LoraConfig(rank=16)))
        except UserError:  # the model has none of the usual modules
            return
        remedy = try_changes([*steps, ("model.lora", "{rank: 16}")], adapter)
        if remedy is not None:
            yield remedy


def _harmless_changes(config: Config, device: Device) -> Iterator[tuple[str, object]]:
    """Settings that change time and memory only."""
    if not config.model.gradient_checkpointing:
        yield "model.gradient_checkpointing", True
    longest = config.data.prompt.max_tokens + config.rollout.max_new_tokens
    if (config.train.microbatch_tokens or 2**16) > longest:
        yield "train.microbatch_tokens", longest
    chunk = 2**23
    if device.kind == "cuda" and (config.model.head_chunk_elements or 2**27) > chunk:
        yield "model.head_chunk_elements", chunk
    if config.rollout.backend == "hf" and config.rollout.batch_sequences > 64:
        yield "rollout.batch_sequences", 64


def _process_counts(config: Config) -> Iterator[int]:
    """Twice as many processes as now, four times, ..., where they divide the batch."""
    count = 2 if config.train.strategy == "single" else 2 * config.train.devices * config.train.nodes
    while count <= MAX_PROCESSES:
        if config.rollout.prompts_per_batch % count == 0:
            yield count
        count *= 2


def _places(processes: int) -> list[tuple[str, object]]:
    nodes = -(-processes // 8)
    return [("train.devices", processes // nodes), *([("train.nodes", nodes)] if nodes > 1 else [])]


def changed(config: Config, changes: Changes) -> Config:
    """``config`` with fields of its sections replaced; the rest is shared."""
    for key, value in changes:
        section, name = key.split(".")
        value = LoraConfig(rank=16) if name == "lora" else value
        replaced = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: replaced})
    return config


def _format(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- time ------------------------------------------------------------------------------------------------------------
def timing_of(
    config: Config, terms: tuple[KLTerm, ...], shape: Shape, load: Workload, device: Device, assumed: Assumed
) -> Timing:
    """Upper bounds where completions end before ``rollout.max_new_tokens``."""
    generate = _generation(config, shape, load, device, assumed) / load.reuse
    compute = _learning_flops(config, terms, shape, load) / (device.flops(config.train.precision) * assumed.flops)
    exchange = _exchange(config, shape, load, device)
    optimizer_bytes = 7 * shape.trainable * element_bytes(config) / (load.processes if is_sharded(config, load) else 1)
    learn = max(compute, exchange) + optimizer_bytes / (device.bandwidth * assumed.bandwidth)
    update = max(generate, learn) if config.lag.mode == "async" else generate + learn
    hours = update * config.train.steps / 3600
    return Timing(
        generate_s=generate,
        learn_s=learn,
        exchange_s=exchange,
        update_s=update,
        generated_tokens_per_s=load.processes * load.drawn_tokens / (generate * load.reuse) if generate else 0.0,
        trained_tokens_per_s=load.processes * load.update_tokens / learn,
        run_hours=hours,
        device_hours=hours * load.processes,
    )


def _learning_flops(config: Config, terms: tuple[KLTerm, ...], shape: Shape, load: Workload) -> float:
    """Of one process and update: passes of the policy and of each reference, forward and back."""
    context = load.prompt + load.completion / 2
    per_token = 2 * shape.body + 4 * shape.layers * shape.heads * shape.head_dim * context
    references = 1 + len({term.reference for term in terms} - {"initial", "sampler"})
    ahead = any(term.baseline in ("before", "own") for term in terms) or config.algorithm.proximal == "recomputed"
    backward = 1 if config.model.lora is not None else 2
    passes = references + 1 + backward + config.model.gradient_checkpointing + ahead
    head = 2 * shape.vocabulary * shape.hidden
    head_passes = 2 * references + 1 + backward + 1 + ahead
    return load.update_line * per_token * passes + load.update_tokens * head * head_passes


def _exchange(config: Config, shape: Shape, load: Workload, device: Device) -> float:
    """Seconds that weights and gradients of one update need on the wire; FSDP's overlap with computing."""
    if load.processes == 1:
        return 0.0
    link = min(device.link, NETWORK) if config.train.nodes > 1 else device.link
    size, share = element_bytes(config), (load.processes - 1) / load.processes
    if config.train.strategy not in SHARDED:
        return 2 * share * shape.trainable * size / link
    gathers = 2 + 1  # the policy's forward and backward, the reference's forward
    per_micro = gathers * shape.parameters + shape.trainable
    refresh = shape.parameters if config.rollout.backend == "hf" else 0
    return share * size * (load.update_micro * per_micro + refresh) / link


def _generation(config: Config, shape: Shape, load: Workload, device: Device, assumed: Assumed) -> float:
    """Seconds in which this process draws a batch: every token reads the weights and the rows' caches once."""
    if config.rollout.backend == "replay":
        return 0.0
    size = compute_bytes(config)
    hf_sampler = config.rollout.backend == "hf"
    # autocast without gradient makes a narrow copy of each weight whenever it is used: read, write, read
    weights = shape.parameters * (8 if hf_sampler and uses_autocast(config) else size)
    families = -(-load.wave_rows // config.rollout.group_size)
    cached = 2 * shape.layers * shape.kv_width * size
    keys = cached * (families * load.prompt + load.wave_rows * load.completion / 2)
    moved = (weights + keys) / (device.bandwidth * assumed.bandwidth)
    products = 2 * (shape.body + shape.vocabulary * shape.hidden) * load.wave_rows
    computed = products / (device.flops(config.train.precision) * assumed.flops)
    start = 0.0 if device.kind == "cpu" else shape.layers * (assumed.layer_s if hf_sampler else assumed.engine_layer_s)
    return load.waves * load.completion * max(moved, computed, start)
