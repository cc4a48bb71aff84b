"""What accelerators can do, as data: memory, matrix products, bandwidths. Peaks of the makers' data sheets.

Rates are dense (no structured sparsity), in FLOP/s and bytes/s of one device; ``fp32_flops`` without TF32, which torch
leaves off. ``memory_bytes`` is what torch reports as total, a little under the name's. ``link`` is one direction, to a
device of the same node: half of what data sheets call NVLink's bandwidth, or PCIe's.

The sizes of a policy, read off its architecture on the meta device: no weights, no download of any.

How much one process does in an update: tokens and rows, of a micro-batch and in all.

Completions are taken to be as long as they may be, prompts as long as they are let in, unless other numbers are given:
then both memory and time are upper bounds.

Memory of one process by component: what is always there, what learning adds, what sampling adds.

    peak = always + max(learning, sampling)      (with ``lag.mode: async`` both at once)

Each component follows what this package's trainer holds, under ``train.strategy`` and ``train.precision``; activations
are :mod:`kl_comedy.models.introspection`'s count. ``bench/plan.py`` holds the estimate against measured runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

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
    """One accelerator, or this machine's cores as one. ``kind`` is torch's device type."""

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


def _gpu(name: str, gib: float, bf16: float, fp32: float, bandwidth: float, link: float, source: str) -> Device:
    """Units of data sheets: GiB, TFLOP/s twice, GB/s twice."""
    return Device(
        name=name,
        kind="cuda",
        memory_bytes=int(gib * GIB),
        bf16_flops=bf16 * 1e12,
        fp32_flops=fp32 * 1e12,
        bandwidth=bandwidth * 1e9,
        link=link * 1e9,
        source=source,
    )


GPUS = {
    device.name: device
    for device in (
        _gpu("a100-40", 39.4, 312, 19.5, 1555, 300, "NVIDIA A100 data sheet (SXM4 40 GB)"),
        _gpu("a100-80", 79.1, 312, 19.5, 2039, 300, "NVIDIA A100 data sheet (SXM4 80 GB)"),
        _gpu("l40s-48", 44.4, 362, 91.6, 864, 32, "NVIDIA L40S data sheet; PCIe 4.0 x16"),
        _gpu("h100-80", 79.1, 989, 67, 3350, 450, "NVIDIA H100 data sheet (SXM5)"),
        _gpu("h200-141", 139.8, 989, 67, 4800, 450, "NVIDIA H200 data sheet (SXM)"),
        _gpu("b200-180", 178.0, 2250, 75, 8000, 900, "NVIDIA DGX B200 data sheet, per GPU"),
        _gpu("rtx4090-24", 23.5, 165, 82.6, 1008, 32, "NVIDIA Ada architecture paper; PCIe 4.0 x16"),
    )
}


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
    import torch

    def rate(work: float, dtype: torch.dtype) -> float:
        left, right = (torch.ones(1024, 1024, dtype=dtype) for _ in range(2))
        return _per_second(lambda: left @ right, work, seconds)

    block = torch.ones(64 * 2**20 // 4)
    return Device(
        name="cpu",
        kind="cpu",
        memory_bytes=int(psutil.virtual_memory().total),
        bf16_flops=rate(2 * 1024**3, torch.bfloat16),
        fp32_flops=rate(2 * 1024**3, torch.float32),
        bandwidth=_per_second(block.clone, 2 * 64 * 2**20, seconds),
        link=5e9,
        source=f"measured now with {torch.get_num_threads()} threads of {os.cpu_count()} cores",
    )


def _per_second(action: object, work: float, seconds: float) -> float:
    """``work`` of each call per second, the best of the calls that fit ``seconds``."""
    assert callable(action)
    action()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        action()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return work / best


_QWEN25 = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 131072}
_LLAMA31_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 5e5,
}
_QWEN25_7B = {
    **_QWEN25,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
_QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "rope_theta": 5e6,
}
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 1e5,
    },
    "Qwen/Qwen2.5-0.5B": {
        **_QWEN25,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-1.5B": {
        **_QWEN25,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B": _QWEN25_7B,
    "Qwen/Qwen2.5-7B-Instruct": _QWEN25_7B,
    "Qwen/Qwen3-4B-Instruct-2507": _QWEN3_4B,
    "meta-llama/Llama-3.1-8B": _LLAMA31_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA31_8B,
}
"""Of the config.json of models on the hub, what decides sizes: a plan for them needs no network."""


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
    known = config.source in KNOWN and not Path(config.source).is_dir()
    model = causal = known_model(config.source) if known else skeleton(config)
    causal.tie_weights()  # a skeleton's parameters are apart, tied or not
    if config.lora is not None:
        from kl_comedy.models.lora import add_lora

        model = add_lora(causal, config.lora)
    found = causal.config.get_text_config() if hasattr(causal.config, "get_text_config") else causal.config
    heads = int(found.num_attention_heads)
    embedding, output = causal.get_input_embeddings().weight, causal.get_output_embeddings().weight
    layers = decoder_layers(causal)
    return Shape(
        source=config.source,
        parameters=_count(model, only_trained=False),
        trainable=_count(model, only_trained=True),
        embedding=embedding.numel(),
        head=0 if output is embedding else output.numel(),
        layer=max(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers),
        layers=len(layers),
        hidden=int(found.hidden_size),
        inner=int(getattr(found, "intermediate_size", None) or 4 * found.hidden_size),
        heads=heads,
        kv_heads=int(getattr(found, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(found, "head_dim", None) or found.hidden_size // heads),
        vocabulary=output.shape[0],
        config=found,
    )


def _count(model: Any, *, only_trained: bool) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not only_trained)


def known_model(source: str, **changes: Any) -> Any:
    """The architecture of a :data:`KNOWN` model on the meta device, with ``changes`` to its config."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(known_config(source, **changes), attn_implementation="sdpa")


def known_config(source: str, **changes: Any) -> Any:
    """transformers' config of a :data:`KNOWN` model, with ``changes``."""
    from transformers import AutoConfig

    facts = {**KNOWN[source], **changes}
    rope = {"rope_type": "default", "rope_theta": facts.pop("rope_theta")}
    return AutoConfig.for_model(facts.pop("model_type"), rope_parameters=rope, **facts)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Of one process. ``micro_*`` is its largest micro-batch; ``line`` tokens are those that the body passes.

    ``update_*`` is an optimizer update; ``drawn_*`` a batch of rollouts, drawn in ``waves`` of ``wave_rows``.
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
    own_micro = -(-pieces // processes)
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
        update_micro=own_micro,
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
) -> list[Component]:
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
        name="activations",
        phase="learning",
        bytes=load.micro_tokens * per_token,
        what=f"{load.micro_tokens:,} tokens" + (", layer inputs and one layer" if checkpoints else ""),
    )
    yield Component(
        name="attention",
        phase="learning",
        bytes=_attention(config, shape, load, kept),
        what="mask, and keys of prompts row by row",
    )
    if narrow:
        yield Component(
            name="bf16 weights",
            phase="learning",
            bytes=2 * _cast_weights(config, shape, load),
            what="autocast's copies",
        )
    yield Component(name="head chunk", phase="learning", bytes=_head(config, shape, load, device), what="logits")
    if config.model.lora is None:
        table = shape.vocabulary * shape.hidden
        yield Component(
            name="head's gradient",
            phase="learning",
            bytes=table * max(size, 4) + table * size,
            what="of head and embedding, before they are added",
        )
    yield Component(
        name="kept passes",
        phase="learning",
        bytes=load.update_tokens * (shape.hidden * size + 60),
        what="the reference's hidden states, ids, log-probs",
    )
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
                name="engine",
                phase="always",
                bytes=share * device.memory_bytes,
                what="gpu_memory_utilization of the device",
            )
        return
    if backend != "hf":
        return
    size, room = compute_bytes(config), INITIAL_CAPACITY
    while room < load.completion:
        room *= 2
    families = -(-load.wave_rows // config.rollout.group_size)
    values = 2 * shape.layers * shape.kv_width * (families * load.prompt + load.wave_rows * room)
    yield Component(
        name="KV cache", phase="sampling", bytes=values * size, what=f"{load.wave_rows} completions at a time"
    )
    logits = load.wave_rows * shape.vocabulary * 20.0  # scores and log-probs in float32, probabilities in both
    yield Component(name="logits of a token", phase="sampling", bytes=logits, what="every row's")
    layer_values = activation_values(shape.config, checkpoints=False) / shape.layers
    yield Component(
        name="prompts' pass",
        phase="sampling",
        bytes=families * load.prompt * layer_values * size,
        what="one layer, no gradient",
    )
