"""Memory of one process by component: what is always there, what learning adds, what sampling adds.

    peak = always + max(learning, sampling)      (with ``lag.mode: async`` both at once)

Each component follows what this package's trainer holds, under ``train.strategy`` and ``train.precision``; activations
are :mod:`kl_comedy.models.footprint`'s count. ``bench/plan.py`` holds the estimate against measured runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from kl_comedy.config.schema import SHARDED, Config
from kl_comedy.kl import KLTerm
from kl_comedy.models.footprint import activation_values, head_chunk
from kl_comedy.planning.devices import GIB, Device
from kl_comedy.planning.shapes import Shape
from kl_comedy.planning.workload import Workload, element_bytes
from kl_comedy.rollouts.caches import FIRST_ROOM

Phase = Literal["always", "learning", "sampling"]
PHASES: tuple[Phase, ...] = ("always", "learning", "sampling")

AUTOCAST_SHARE = 0.7
"""Of a float32 pass's saved values under bf16 autocast: linear layers keep half as much, norms and sums as much
(measured: ``tests/unit/test_planning.py``)."""

BACKWARD_LAYERS = 1.0
"""Layers' worth of saved values that gradients on their way back take beside them."""

FRAGMENTS = 0.05
"""Of what comes and goes: what an allocator keeps and cannot use."""

RUNTIME = {"cuda": 1.0 * GIB, "cpu": 0.6 * GIB}
"""CUDA's context and libraries, or python with its libraries, in every process."""

NCCL = 0.5 * GIB
SERVER_SHARE = {"vllm": 0.4}
"""Of a device, what an engine in the trainer's process takes by default (``gpu_memory_utilization``)."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """Bytes of one process, when they are there, and what they are."""

    name: str
    phase: Phase
    bytes: float
    what: str


def components(
    config: Config, terms: tuple[KLTerm, ...], shape: Shape, load: Workload, device: Device
) -> list[Component]:  # fmt: skip
    """Every component that is not zero."""
    found = [
        *_held(config, terms, shape, load),
        *_learning(config, shape, load, device),
        *_sampling(config, shape, load, device),
    ]
    for phase in PHASES[1:]:
        moving = sum(item.bytes for item in found if item.phase == phase)
        found.append(Component(name="fragments", phase=phase, bytes=FRAGMENTS * moving, what="allocator"))
    runtime = RUNTIME[device.kind] + (NCCL if device.kind == "cuda" and load.processes > 1 else 0)
    found.append(Component(name="runtime", phase="always", bytes=runtime, what="libraries and context"))
    return sorted((item for item in found if item.bytes), key=lambda item: PHASES.index(item.phase))


def peak(found: list[Component], *, at_once: bool) -> float:
    """The most bytes at any time; ``at_once``: sampling goes on while learning does."""
    sums = {phase: sum(item.bytes for item in found if item.phase == phase) for phase in PHASES}
    both = sums["learning"] + sums["sampling"] if at_once else max(sums["learning"], sums["sampling"])
    return sums["always"] + both


def computes_narrow(config: Config) -> bool:
    """Whether autocast works in bf16 on float32 weights."""
    return config.train.precision == "bf16" and config.model.dtype == "float32"


def compute_bytes(config: Config) -> int:
    """Of a value as matrix products take it."""
    return 2 if config.train.precision == "bf16" else element_bytes(config)


def _held(config: Config, terms: tuple[KLTerm, ...], shape: Shape, load: Workload) -> Iterator[Component]:
    """What is there from the first update on."""
    size, shards = element_bytes(config), load.processes if config.train.strategy in SHARDED else 1
    whole, trained = shape.parameters * size, shape.trainable * size
    yield Component(name="parameters", phase="always", bytes=whole / shards, what="policy")
    yield Component(name="gradients", phase="always", bytes=trained / shards, what="until the next update's first pass")
    yield Component(name="optimizer", phase="always", bytes=2 * trained / shards, what="AdamW's two moments")
    untrained = 0.0 if shards == 1 else (whole - trained) / shards  # copies of shards share nothing
    if config.model.lora is None:
        yield Component(name="reference", phase="always", bytes=whole / shards, what="frozen copy")
    for name in sorted({term.reference for term in terms} - {"initial", "sampler"}):
        average = shape.trainable * 4 / shards if name == "ema" else 0.0
        copy = trained / shards + untrained + average
        yield Component(name=f"{name} reference", phase="always", bytes=copy, what="its weights")
    if shards > 1 and config.rollout.backend == "hf":
        yield Component(name="sampling replica", phase="always", bytes=whole, what="whole copy to sample from")
    if config.lag.mode == "async":
        yield Component(name="sampler's policy", phase="always", bytes=whole, what="another process's copy")


def _learning(config: Config, shape: Shape, load: Workload, device: Device) -> Iterator[Component]:
    """What is there while a micro-batch is learned from."""
    size, narrow = element_bytes(config), computes_narrow(config)
    checkpoints = config.model.gradient_checkpointing
    layer_values = activation_values(shape.config, checkpoints=False) / shape.layers
    per_value = size * (AUTOCAST_SHARE if narrow else 1.0)
    kept = 1 if checkpoints else shape.layers
    inputs = shape.layers * shape.hidden * size if checkpoints else 0
    per_token = inputs + layer_values * per_value * (kept + BACKWARD_LAYERS)
    yield Component(
        name="activations", phase="learning", bytes=load.micro_tokens * per_token,
        what=f"{load.micro_tokens:,} tokens" + (", layer inputs and one layer" if checkpoints else ""),
    )  # fmt: skip
    yield Component(
        name="attention", phase="learning", bytes=_attention(config, shape, load, kept),
        what="mask, and keys of prompts row by row",
    )  # fmt: skip
    if narrow:
        yield Component(
            name="bf16 weights", phase="learning", bytes=2 * _cast_weights(config, shape, load),
            what="autocast's copies",
        )  # fmt: skip
    yield Component(name="head chunk", phase="learning", bytes=_head(config, shape, load, device), what="logits")
    if config.model.lora is None:
        table = shape.vocabulary * shape.hidden
        yield Component(
            name="head's gradient", phase="learning", bytes=table * max(size, 4) + table * size,
            what="of head and embedding, before they are added",
        )  # fmt: skip
    yield Component(
        name="kept passes", phase="learning", bytes=load.update_tokens * (shape.hidden * size + 60),
        what="the reference's hidden states, ids, log-probs",
    )  # fmt: skip
    if config.train.strategy in SHARDED and load.processes > 1:
        gathered = 2 * shape.layer * size + shape.root * size + (shape.layer + shape.root) * size
        yield Component(name="gathered layers", phase="learning", bytes=gathered, what="two layers, embedding and head")
    elif load.processes > 1:
        yield Component(name="gradient buckets", phase="learning", bytes=2 * 64 * 2**20, what="all-reduce")


def _attention(config: Config, shape: Shape, load: Workload, kept: int) -> float:
    """Our layout's mask (one for all layers) and the prompt's keys and values beside each completion's own."""
    if config.model.attention != "sdpa":
        return 0.0
    size, group = compute_bytes(config), shape.heads // shape.kv_heads
    seen = load.prompt + load.completion
    mask = group * load.micro_rows * load.completion * seen * size
    return mask + 2 * load.micro_rows * load.prompt * shape.kv_width * size * kept


def _cast_weights(config: Config, shape: Shape, load: Workload) -> int:
    """Weights whose narrow copies live through a pass: all that are trained; with FSDP those one layer needs, where
    activations are not kept."""
    if config.train.strategy in SHARDED and load.processes > 1 and config.model.gradient_checkpointing:
        return 2 * shape.layer
    return shape.layers * shape.layer


def _head(config: Config, shape: Shape, load: Workload, device: Device) -> float:
    """Tensors ``[n, V]`` in float32 that are there at once; more where exact KLs are measured."""
    chunk = head_chunk(config.model.head_chunk_elements, torch.device(device.kind))
    rows = min(max(1, chunk // shape.vocabulary), load.micro_rows * load.completion)
    tensors = 5 if config.train.exact_kl_every else 3
    return rows * shape.vocabulary * 4.0 * tensors


def _sampling(config: Config, shape: Shape, load: Workload, device: Device) -> Iterator[Component]:
    """What is there while completions are drawn in this process (or, asynchronous, beside it)."""
    backend = config.rollout.backend
    if backend in SERVER_SHARE:
        share = float(config.rollout.options.get("gpu_memory_utilization") or SERVER_SHARE[backend])
        if device.kind == "cuda":
            yield Component(
                name="engine", phase="always", bytes=share * device.memory_bytes,
                what="gpu_memory_utilization of the device",
            )  # fmt: skip
        return
    if backend != "hf":
        return
    size, room = compute_bytes(config), FIRST_ROOM
    while room < load.completion:
        room *= 2
    families = -(-load.wave_rows // config.rollout.group_size)
    values = 2 * shape.layers * shape.kv_width * (families * load.prompt + load.wave_rows * room)
    yield Component(
        name="KV cache", phase="sampling", bytes=values * size, what=f"{load.wave_rows} completions at a time"
    )  # fmt: skip
    logits = load.wave_rows * shape.vocabulary * 20.0  # scores and log-probs in float32, probabilities in both
    yield Component(name="logits of a token", phase="sampling", bytes=logits, what="every row's")
    layer_values = activation_values(shape.config, checkpoints=False) / shape.layers
    yield Component(
        name="prompts' pass", phase="sampling", bytes=families * load.prompt * layer_values * size,
        what="one layer, no gradient",
    )  # fmt: skip
