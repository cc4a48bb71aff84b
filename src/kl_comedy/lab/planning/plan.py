"""A plan: what a run will take, whether that fits, and which settings would make it fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kl_comedy.config.schema import SHARDED, Config, LoraConfig
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm, resolve_terms
from kl_comedy.lab.planning.memory import (
    GIB,
    Component,
    Device,
    Shape,
    Workload,
    components,
    peak,
    shape_of,
    workload_of,
)
from kl_comedy.lab.planning.timing import Assumed, Timing, timing_of

MOST_PROCESSES = 64


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
class Plan:
    """What each process of a run holds and how long an update takes. ``limit_bytes``: of one process."""

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
    terms, shape = resolve_terms(config.kl), shape or shape_of(config.model)
    lengths, assumed = lengths or Lengths(), assumed or Assumed()
    _check_lengths(config, lengths)
    load, found, most = _memory(config, terms, shape, device, lengths)
    limit = limit_bytes(config, device)
    remedies = () if most <= limit else tuple(_remedies(config, terms, shape, device, lengths))
    return Plan(
        shape=shape,
        device=device,
        load=load,
        components=tuple(found),
        peak_bytes=most,
        limit_bytes=limit,
        timing=timing_of(config, terms, shape, load, device, assumed),
        assumed=assumed,
        warnings=tuple(_warnings(config, shape, device, load, most, limit)),
        remedies=remedies,
    )


def limit_bytes(config: Config, device: Device) -> float:
    """What one process may take: a device, or its share of this machine's memory."""
    return device.memory_bytes / (config.train.devices if device.kind == "cpu" else 1)


def _check_lengths(config: Config, lengths: Lengths) -> None:
    for name, asked, most in (
        ("--prompt-tokens", lengths.prompt, config.data.prompt.max_tokens),
        ("--completion-tokens", lengths.completion, config.rollout.max_new_tokens),
    ):
        if asked is not None and not 1 <= asked <= most:
            raise UserError(f"{name}: got {asked}; allowed: 1 to {most}, the most that the config lets through")


def _memory(
    config: Config, terms: tuple[KLTerm, ...], shape: Shape, device: Device, lengths: Lengths
) -> tuple[Workload, list[Component], float]:
    load = workload_of(config, shape, device, prompt=lengths.prompt, completion=lengths.completion)
    found = components(config, terms, shape, load, device)
    return load, found, peak(found, at_once=config.lag.mode == "async")


def _warnings(config: Config, shape: Shape, device: Device, load: Workload, most: float, limit: float) -> Iterator[str]:
    if most > limit:
        yield f"does not fit: {most / GIB:.1f} GiB in one process, {limit / GIB:.1f} GiB on {device.name}"
    elif most > 0.9 * limit:
        yield f"tight: {most / limit:.0%} of the memory, and the estimate may be off by as much"
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


def _remedies(
    config: Config, terms: tuple[KLTerm, ...], shape: Shape, device: Device, lengths: Lengths
) -> Iterator[Remedy]:
    """The gentlest settings that fit: those that change no number first, then more processes, then an adapter."""
    steps = list(_gentle(config, device))
    for changes in (steps[:n] for n in range(1, len(steps) + 1)):
        remedy = _tried(config, terms, shape, device, lengths, changes)
        if remedy is not None:
            yield remedy
            break
    yield from _more_processes(config, terms, shape, device, lengths, steps)
    adapter = _with_adapter(config)
    if adapter is not None:
        lora = ("model.lora", "{rank: 16}")
        remedy = _tried(config, terms, adapter, device, lengths, [*steps, lora])
        if remedy is not None:
            yield remedy


def _with_adapter(config: Config) -> Shape | None:
    """The sizes under a LoRA adapter of rank 16; None where there is one, or its usual modules are not there."""
    if config.model.lora is not None:
        return None
    try:
        return shape_of(dataclasses.replace(config.model, lora=LoraConfig(rank=16)))
    except UserError:
        return None


def _gentle(config: Config, device: Device) -> Iterator[tuple[str, object]]:
    """Settings that change time and memory alone."""
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


def _more_processes(
    config: Config,
    terms: tuple[KLTerm, ...],
    shape: Shape,
    device: Device,
    lengths: Lengths,
    steps: Sequence[tuple[str, object]],
) -> Iterator[Remedy]:
    """The fewest processes over which shards fit, with the settings as they are, else with the gentle ones."""
    if config.lag.mode == "async" or config.rollout.backend not in ("hf", "replay"):
        return
    for changes in ([], list(steps)):
        processes = 2 if config.train.strategy == "single" else 2 * config.train.devices * config.train.nodes
        while processes <= MOST_PROCESSES:
            if config.rollout.prompts_per_batch % processes == 0:
                over = [("train.strategy", "fsdp"), *_places(processes), *changes]
                remedy = _tried(config, terms, shape, device, lengths, over)
                if remedy is not None:
                    yield remedy
                    return
            processes *= 2


def _places(processes: int) -> list[tuple[str, object]]:
    nodes = -(-processes // 8)
    return [("train.devices", processes // nodes), *([("train.nodes", nodes)] if nodes > 1 else [])]


def _tried(
    config: Config,
    terms: tuple[KLTerm, ...],
    shape: Shape,
    device: Device,
    lengths: Lengths,
    changes: Sequence[tuple[str, object]],
) -> Remedy | None:
    """The changes as a remedy where they fit; None where they do not."""
    other = changed(config, changes)
    _, _, most = _memory(other, terms, shape, device, lengths)
    if most > limit_bytes(other, device):
        return None
    return Remedy(overrides=tuple(f"{key}={_written(value)}" for key, value in changes), peak_bytes=most)


def changed(config: Config, changes: Sequence[tuple[str, object]]) -> Config:
    """``config`` with fields of its rooms replaced; the rest is shared."""
    for key, value in changes:
        room, name = key.split(".")
        value = LoraConfig(rank=16) if name == "lora" else value
        config = dataclasses.replace(config, **{room: dataclasses.replace(getattr(config, room), **{name: value})})
    return config


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
