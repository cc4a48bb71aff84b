"""Memory of one process by component, from the config and the architecture alone: no weights are loaded.

    peak = always + max(learning, sampling)      (with ``lag.mode: async`` the sum of the two)

Each component follows what this package's trainer allocates, under ``train.strategy`` and ``train.precision``;
activations are :mod:`kl_comedy.models.introspection`'s count. Completions are as long as ``rollout.max_new_tokens``
and prompts as long as ``data.prompt.max_tokens``, unless other lengths are given: memory and time are then upper
bounds. ``known.yaml`` holds accelerators and the architectures of common models. ``bench/plan.py`` compares the
estimate with measured runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import yaml

from kl_comedy.config.schema import SHARDED, Config
from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl import KLTerm
from kl_comedy.models.introspection import activation_values, default_microbatch_tokens, head_chunk
from kl_comedy.models.sharding import decoder_layers, skeleton
from kl_comedy.rollouts.decoding import INITIAL_CAPACITY

if TYPE_CHECKING:
    from kl_comedy.config.schema import ModelConfig


GIB = 2**30
NETWORK = 50e9
"""Bytes/s to a device of another node: one 400 Gbit/s port for each, as in DGX H100 systems."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or this machine's cores as one device. ``kind`` is torch's device type.

    Rates are dense (no structured sparsity), in FLOP/s and bytes/s; ``fp32_flops`` without TF32, which torch leaves
    off. ``memory_bytes`` is what torch reports as total. ``link`` is one direction, to a device of the same node: half
    of what data sheets call NVLink's bandwidth, or PCIe's.
    """

    name: str
    kind: str
    memory_bytes: int
    bf16_flops: float
    fp32_flops: float
    bandwidth: float
    link: float
    source: str

    def flops(self, precision: str) -> float:
        """Peak matrix products under ``train.precision``."""
        return self.bf16_flops if precision == "bf16" else self.fp32_flops


_KNOWN = yaml.safe_load((Path(__file__).parent / "known.yaml").read_text("utf-8"))
GPUS = {
    name: Device(
        name=name,
        kind="cuda",
        memory_bytes=int(facts["gib"] * GIB),
        bf16_flops=facts["bf16"] * 1e12,
        fp32_flops=facts["fp32"] * 1e12,
        bandwidth=facts["bandwidth"] * 1e9,
        link=facts["link"] * 1e9,
        source=facts["source"],
    )
    for name, facts in _KNOWN["gpus"].items()
}
KNOWN: Mapping[str, Mapping[str, Any]] = _KNOWN["models"]
"""What decides sizes in the config.json of models on the hub: a plan for them needs no network."""


def device_named(name: str) -> Device:
    """The device that ``--gpu`` names; ``cpu`` is this machine, measured now. Raises :class:`UserError`."""
    if name == "cpu":
        return this_machine()
    if name not in GPUS:
        raise bad_value("--gpu", name, [*GPUS, "cpu"])
    return GPUS[name]


def this_machine(*, seconds: float = 0.3) -> Device:
    """The cores of this machine as one device: a matrix product and a copy, timed for about ``seconds`` each."""
    import psutil

    def product_rate(dtype: torch.dtype) -> float:
        left, right = (torch.ones(1024, 1024, dtype=dtype) for _ in range(2))
        return _best_rate(lambda: left @ right, 2 * 1024**3, seconds)

    block = torch.ones(64 * 2**20 // 4)
    return Device(
        name="cpu",
        kind="cpu",
        memory_bytes=int(psutil.virtual_memory().total),
        bf16_flops=product_rate(torch.bfloat16),
        fp32_flops=product_rate(torch.float32),
        bandwidth=_best_rate(block.clone, 2 * 64 * 2**20, seconds),
        link=5e9,
        source=f"measured now with {torch.get_num_threads()} threads of {os.cpu_count()} cores",
    )


def _best_rate(action: Callable[[], object], work: float, seconds: float) -> float:
    """``work`` of one call per second, the best of the calls that fit ``seconds``."""
    action()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() <= end or best == float("inf"):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return work / best


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Counts of parameters (tied ones once), and the dimensions that memory and time follow from.

    ``embedding`` is the input table's, ``head`` that of the output's own matrix (0 where it is tied); ``layer`` the
    largest decoder layer's. ``config`` is transformers' own.
    """

    source: str
    parameters: int
    trainable: int
    embedding: int
    head: int
    layer: int
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    config: Any

    @property
    def body(self) -> int:
        """Parameters of the layers and norms: what every token is multiplied with."""
        return self.parameters - self.embedding - self.head

    @property
    def root(self) -> int:
        """Parameters that FSDP gathers with the root: embedding, final norm, head."""
        return self.parameters - self.layers * self.layer

    @property
    def kv_width(self) -> int:
        """Values of a key, and of a value, in one layer."""
        return self.kv_heads * self.head_dim


def shape_of(config: ModelConfig) -> Shape:
    """The sizes of the policy of ``config``.

    Models of :data:`KNOWN` need no hub. Raises :class:`UserError` for a source that cannot be reached, and for a GGUF
    file.
    """
    if config.gguf_file is not None:
        raise UserError("model.gguf_file: a plan needs a config.json; name the model it was made from as model.source")
    if config.source in KNOWN and not Path(config.source).is_dir():
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            causal = AutoModelForCausalLM.from_config(known_config(config.source), attn_implementation="sdpa")
    else:
        causal = skeleton(config)
    model = causal
    causal.tie_weights()  # on the meta device even tied parameters are separate
    if config.lora is not None:
        from kl_comedy.models.lora import add_lora

        model = add_lora(causal, config.lora)
    facts = causal.config.get_text_config() if hasattr(causal.config, "get_text_config") else causal.config
    heads = int(facts.num_attention_heads)
    embedding, output = causal.get_input_embeddings().weight, causal.get_output_embeddings().weight
    layers = decoder_layers(causal)
    return Shape(
        source=config.source,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        embedding=embedding.numel(),
        head=0 if output is embedding else output.numel(),
        layer=max(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers),
        layers=len(layers),
        hidden=int(facts.hidden_size),
        inner=int(getattr(facts, "intermediate_size", None) or 4 * facts.hidden_size),
        heads=heads,
        kv_heads=int(getattr(facts, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(facts, "head_dim", None) or facts.hidden_size // heads),
        vocabulary=output.shape[0],
        config=facts,
    )


def known_config(source: str, **changes: Any) -> Any:
    """transformers' config of a :data:`KNOWN` model, with ``changes``."""
    from transformers import AutoConfig

    facts = {**KNOWN[source], **changes}
    rope = {"rope_type": "default", "rope_theta": facts.pop("rope_theta")}
    return AutoConfig.for_model(facts.pop("model_type"), rope_parameters=rope, **facts)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Tokens and rows of one process: ``micro_*`` of its largest micro-batch, ``update_*`` of an optimizer update
    (``update_line``: tokens that pass through the body), ``drawn_*`` of a batch of rollouts, which is drawn in
    ``waves`` of ``wave_rows``. ``reuse`` is the number of updates on one batch.
    """

    processes: int
    prompt: int
    completion: int
    micro_tokens: int
    micro_rows: int
    update_line: int
    update_tokens: int
    update_micro: int
    drawn_rows: int
    drawn_tokens: int
    wave_rows: int
    waves: int
    reuse: int


def element_bytes(config: Config) -> int:
    """Of a weight as it is kept."""
    return {"float32": 4, "bfloat16": 2, "float16": 2}[config.model.dtype]


def workload_of(
    config: Config, shape: Shape, device: Device, *, prompt: int | None, completion: int | None
) -> Workload:
    """What ``config`` asks of each of its processes on ``device``; tokens of a prompt and of a completion."""
    rollout, train = config.rollout, config.train
    c = completion or rollout.max_new_tokens
    context = getattr(shape.config, "max_position_embeddings", None) or config.data.prompt.max_tokens + c
    p = prompt or max(1, min(config.data.prompt.max_tokens, context - c))
    processes, group = train.devices * train.nodes, rollout.group_size
    share = config.model.share_prompt and config.model.attention == "sdpa"
    budget = train.microbatch_tokens or default_microbatch_tokens(
        shape.config, element_bytes(config), device.kind, checkpoints=config.model.gradient_checkpointing
    )
    families = rollout.prompts_per_batch // config.algorithm.updates_per_batch
    each = min(group, max(1, (budget - p) // c))
    fit = max(1, budget // (p + each * c)) if each == group else 1
    in_micro = min(fit, families)
    pieces = -(-families // in_micro) if each == group else families * -(-group // each)
    rows = in_micro * each
    micro_batches = -(-pieces // processes)
    drawn = rollout.prompts_per_batch * group // processes
    wave = min(rollout.batch_sequences, drawn)
    return Workload(
        processes=processes,
        prompt=p,
        completion=c,
        micro_tokens=rows * (p + c) if not share else in_micro * p + rows * c,
        micro_rows=rows,
        update_line=-(-families * (-(-group // each) * p + group * c if share else group * (p + c)) // processes),
        update_tokens=families * group * c // processes,
        update_micro=micro_batches,
        drawn_rows=drawn,
        drawn_tokens=drawn * c,
        wave_rows=wave,
        waves=-(-drawn // wave),
        reuse=config.algorithm.updates_per_batch * config.algorithm.epochs_per_batch,
    )


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
ENGINE_SHARE = {"vllm": 0.4}
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
) -> list[Component]:
    """Every component that is not zero."""
    parts = [
        Component(name=name, phase=phase, bytes=size, what=what)
        for phase, rows in (
            ("always", _always(config, terms, shape, load, device)),
            ("learning", _learning(config, shape, load, device)),
            ("sampling", _sampling(config, shape, load)),
        )
        for name, size, what in rows
    ]
    for phase in PHASES[1:]:
        moving = sum(item.bytes for item in parts if item.phase == phase)
        parts.append(Component(name="fragments", phase=phase, bytes=FRAGMENTS * moving, what="allocator"))
    runtime = RUNTIME[device.kind] + (NCCL if device.kind == "cuda" and load.processes > 1 else 0)
    parts.append(Component(name="runtime", phase="always", bytes=runtime, what="libraries and context"))
    return sorted((item for item in parts if item.bytes), key=lambda item: PHASES.index(item.phase))


def peak(parts: list[Component], *, at_once: bool) -> float:
    """The most bytes at any time; ``at_once``: sampling runs beside learning."""
    sums = {phase: sum(item.bytes for item in parts if item.phase == phase) for phase in PHASES}
    both = sums["learning"] + sums["sampling"] if at_once else max(sums["learning"], sums["sampling"])
    return sums["always"] + both


def is_sharded(config: Config, load: Workload) -> bool:
    return config.train.strategy in SHARDED and load.processes > 1


def uses_autocast(config: Config) -> bool:
    """Whether float32 weights are multiplied in bf16."""
    return config.train.precision == "bf16" and config.model.dtype == "float32"


def compute_bytes(config: Config) -> int:
    """Bytes of a value as matrix products take it."""
    return 2 if config.train.precision == "bf16" else element_bytes(config)


def _always(
    config: Config, terms: tuple[KLTerm, ...], shape: Shape, load: Workload, device: Device
) -> Iterator[tuple[str, float, str]]:
    """What is allocated from the first update on."""
    size, shards = element_bytes(config), load.processes if is_sharded(config, load) else 1
    whole, trained = shape.parameters * size, shape.trainable * size
    yield "parameters", whole / shards, "policy"
    yield "gradients", trained / shards, "until the next update's first pass"
    yield "optimizer", 2 * trained / shards, "AdamW's two moments"
    untrained = 0.0 if shards == 1 else (whole - trained) / shards  # copies of shards share nothing
    if config.model.lora is None:
        yield "reference", whole / shards, "frozen copy"
    for name in sorted({term.reference for term in terms} - {"initial", "sampler"}):
        average = shape.trainable * 4 / shards if name == "ema" else 0.0
        yield f"{name} reference", trained / shards + untrained + average, "its weights"
    if shards > 1 and config.rollout.backend == "hf":
        yield "sampling replica", whole, "whole copy to sample from"
    if config.lag.mode == "async":
        yield "sampler's policy", whole, "another process's copy"
    if config.rollout.backend in ENGINE_SHARE and device.kind == "cuda":
        share = float(config.rollout.options.get("gpu_memory_utilization") or ENGINE_SHARE[config.rollout.backend])
        yield "engine", share * device.memory_bytes, "gpu_memory_utilization of the device"


def _learning(config: Config, shape: Shape, load: Workload, device: Device) -> Iterator[tuple[str, float, str]]:
    """What is allocated while gradients of a micro-batch are computed."""
    size, autocast = element_bytes(config), uses_autocast(config)
    checkpoints, sharded = config.model.gradient_checkpointing, is_sharded(config, load)
    layers = 1 if checkpoints else shape.layers
    inputs = shape.layers * shape.hidden * size if checkpoints else 0
    layer_bytes = _layer_values(shape) * size * (AUTOCAST_SHARE if autocast else 1.0)
    per_token = inputs + layer_bytes * (layers + BACKWARD_LAYERS)
    tokens = f"{load.micro_tokens:,} tokens" + (", layer inputs and one layer" if checkpoints else "")
    yield "activations", load.micro_tokens * per_token, tokens
    if config.model.attention == "sdpa":  # one mask for all layers; the prompt's keys and values for each completion
        width, group = compute_bytes(config), shape.heads // shape.kv_heads
        mask = group * load.micro_rows * load.completion * (load.prompt + load.completion) * width
        prompts = 2 * load.micro_rows * load.prompt * shape.kv_width * width * layers
        yield "attention", mask + prompts, "mask, and keys of prompts row by row"
    if autocast:  # copies of all trained weights live through a pass; FSDP with checkpoints has one layer's at a time
        copied = 2 * shape.layer if sharded and checkpoints else shape.layers * shape.layer
        yield "bf16 weights", 2 * copied, "autocast's copies"
    chunk = head_chunk(config.model.head_chunk_elements, torch.device(device.kind))
    rows = min(max(1, chunk // shape.vocabulary), load.micro_rows * load.completion)
    tensors = 5 if config.train.exact_kl_every else 3  # [n, V] in float32 at once
    yield "head chunk", rows * shape.vocabulary * 4.0 * tensors, "logits"
    if config.model.lora is None:
        table = shape.vocabulary * shape.hidden
        yield "head's gradient", table * max(size, 4) + table * size, "of head and embedding, before they are added"
    stored = load.update_tokens * (shape.hidden * size + 60)
    yield "kept passes", stored, "the reference's hidden states, ids, log-probs"
    if sharded:
        gathered = 2 * shape.layer * size + shape.root * size + (shape.layer + shape.root) * size
        yield "gathered layers", gathered, "two layers, embedding and head"
    elif load.processes > 1:
        yield "gradient buckets", 2 * 64 * 2**20, "all-reduce"


def _sampling(config: Config, shape: Shape, load: Workload) -> Iterator[tuple[str, float, str]]:
    """What the ``hf`` backend allocates while completions are drawn; engines are counted under ``always``."""
    if config.rollout.backend != "hf":
        return
    size, capacity = compute_bytes(config), INITIAL_CAPACITY
    while capacity < load.completion:
        capacity *= 2
    families = -(-load.wave_rows // config.rollout.group_size)
    cached = 2 * shape.layers * shape.kv_width * (families * load.prompt + load.wave_rows * capacity)
    yield "KV cache", cached * size, f"{load.wave_rows} completions at a time"
    # scores and log-probs in float32, probabilities in both
    yield "logits of a token", load.wave_rows * shape.vocabulary * 20.0, "every row's"
    yield "prompts' pass", families * load.prompt * _layer_values(shape) * size, "one layer, no gradient"


def _layer_values(shape: Shape) -> float:
    """Values that autograd saves of one layer and token."""
    return activation_values(shape.config, checkpoints=False) / shape.layers
