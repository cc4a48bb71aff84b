"""What memory and time of a run follow from: the device, the sizes of the model, tokens and rows of one process.

No weights are loaded. ``known.yaml`` holds accelerators and the architectures of common models.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kl_comedy.config.schema import Config, ModelConfig
from kl_comedy.errors import UserError, bad_value
from kl_comedy.io import read_yaml
from kl_comedy.models.introspection import activation_values, default_microbatch_tokens
from kl_comedy.models.onednn_linear import product
from kl_comedy.models.sharding import decoder_layers, skeleton
from kl_comedy.models.sources import base_of_adapter, is_adapter_folder

GIB = 2**30
GLOO = 1e9
"""Bytes/s between two processes over loopback, one core each; FSDP reaches 70 % (``bench/scaling.py``)."""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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


def _gpu(name: str, facts: Mapping[str, Any]) -> Device:
    """A GPU from the units of ``known.yaml``: GiB, TFLOP/s, GB/s."""
    return Device(
        name=name,
        kind="cuda",
        memory_bytes=int(facts["gib"] * GIB),
        bf16_flops=facts["bf16"] * 1e12,
        fp32_flops=facts["fp32"] * 1e12,
        bandwidth=facts["bandwidth"] * 1e9,
        link=facts["link"] * 1e9,
        source=facts["source"],
    )


_KNOWN = read_yaml(Path(__file__).parent / "known.yaml")
GPUS = {name: _gpu(name, facts) for name, facts in _KNOWN["gpus"].items()}
KNOWN: Mapping[str, Mapping[str, Any]] = _KNOWN["models"]
"""What decides sizes in the config.json of models on the hub: a plan for them needs no network."""


def device_named(name: str, *, measured: bool = True) -> Device:
    """The device that ``--gpu`` names; ``cpu`` is this machine, its speed measured now. Raises :class:`UserError`."""
    if name != "cpu" and name not in GPUS:
        raise bad_value("--gpu", name, [*GPUS, "cpu"])
    if name in GPUS:
        return GPUS[name]
    return this_machine(seconds=0.3 if measured else 0.0)


def this_machine(*, seconds: float = 0.3) -> Device:
    """The cores of this machine as one device: matrix products and a copy, timed for about ``seconds`` each.

    0: not timed, for plans of memory.
    """
    import psutil

    threads = torch.get_num_threads()

    def rate(action: Callable[[], object], work: float) -> float:
        if not seconds:
            return 1.0
        from torch.utils.benchmark import Timer

        timer = Timer("action()", globals={"action": action}, num_threads=threads)
        return work / min(timer.blocked_autorange(min_run_time=seconds).times)

    def product_rate(dtype: torch.dtype) -> float:
        left, right = (torch.ones(1024, 1024, dtype=dtype) for _ in range(2))
        return rate(lambda: product(left, right), 2 * 1024**3)

    return Device(
        name="cpu",
        kind="cpu",
        memory_bytes=int(psutil.virtual_memory().total),
        bf16_flops=product_rate(torch.bfloat16),
        fp32_flops=product_rate(torch.float32),
        bandwidth=rate(torch.ones(64 * 2**20 // 4).clone, 2 * 64 * 2**20),
        link=GLOO,
        source=f"measured now with {threads} threads of {os.cpu_count()} cores",
    )


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

    @property
    def kv_values(self) -> int:
        """Values that caches of all layers keep of a token."""
        return 2 * self.layers * self.kv_width

    @property
    def layer_values(self) -> float:
        """Values that autograd saves of one layer and token."""
        return activation_values(self.config, checkpoints=False) / self.layers


def shape_of(config: ModelConfig) -> Shape:
    """The sizes of the policy of ``config``; models of :data:`KNOWN` need no hub.

    Raises :class:`UserError` for a source that cannot be reached, and for a GGUF file.
    """
    if is_adapter_folder(config.source):
        return shape_of(base_of_adapter(config))  # merged into its base, an adapter adds nothing
    if config.gguf_file is not None:
        raise UserError("model.gguf_file: a plan needs a config.json; name the model it was made from as model.source")
    facts = _dense_facts(config)
    if facts is None:
        return _built_shape(config)
    adapter = 0
    if config.lora is not None:
        for name in config.lora.target_modules:
            # A module of another name than the matrices, which only building the model finds.
            if name not in facts.projections:
                return _built_shape(config)
            adapter += config.lora.rank * sum(facts.projections[name])
    hidden = facts.hidden_size
    # Keys and values are narrower than queries where groups of heads share them.
    width = facts.num_key_value_heads * facts.head_dim
    # The matrices, the two norms, and what the architecture adds in attention.
    layer = sum(rows * columns for rows, columns in facts.projections.values())
    query = facts.num_attention_heads * facts.head_dim
    layer += 2 * hidden + _BIASES_AND_NORMS[facts.model_type](query + 2 * width, 2 * facts.head_dim)
    embedding = facts.vocab_size * hidden
    # A tied head is the embedding, which was counted.
    head = 0 if facts.tie_word_embeddings else embedding
    # The last term is the final norm.
    parameters = embedding + head + facts.num_hidden_layers * (layer + adapter) + hidden
    return Shape(
        source=config.source,
        parameters=parameters,
        trainable=facts.num_hidden_layers * adapter if config.lora else parameters,
        embedding=embedding,
        head=head,
        layer=layer + adapter,
        layers=facts.num_hidden_layers,
        hidden=hidden,
        inner=facts.intermediate_size,
        heads=facts.num_attention_heads,
        kv_heads=facts.num_key_value_heads,
        head_dim=facts.head_dim,
        vocabulary=facts.vocab_size,
        config=facts,
    )


_BIASES_AND_NORMS: Mapping[str, Callable[[int, int], int]] = {
    "llama": lambda biases, norms: 0,
    "qwen2": lambda biases, norms: biases,
    "qwen3": lambda biases, norms: norms,
}
"""Parameters of attention beside its matrices, of the biases and the norms of queries, keys and values."""


class _Facts(SimpleNamespace):
    """What decides sizes in the config of a dense decoder, by transformers' names, and its ``projections``: rows and
    columns of a layer's matrices."""

    def get_text_config(self) -> _Facts:
        return self


def _dense_facts(config: ModelConfig) -> _Facts | None:
    """The facts of the pocket policy and of :data:`KNOWN` models, counted without transformers; None for others."""
    if config.source == "pocket":
        from kl_comedy.models.pocket import MAX_LENGTH, VOCABULARY, recipe_from_options

        recipe = recipe_from_options(config.options)
        raw: dict[str, Any] = {
            "model_type": "llama",
            "hidden_size": recipe.hidden_size,
            "intermediate_size": recipe.intermediate_size,
            "num_hidden_layers": recipe.layers,
            "num_attention_heads": recipe.heads,
            "tie_word_embeddings": False,
            "vocab_size": len(VOCABULARY),
            "max_position_embeddings": MAX_LENGTH,
        }
    elif config.source in KNOWN and not Path(config.source).is_dir():
        raw = {**KNOWN[config.source]}
    else:
        return None
    # Another architecture has other matrices, which only building it tells.
    if raw["model_type"] not in _BIASES_AND_NORMS:
        return None
    hidden = raw["hidden_size"]
    inner = raw["intermediate_size"]
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    dim = raw.get("head_dim") or hidden // heads
    # Rows and columns, as torch stores a linear layer: outputs first.
    projections = {
        "k_proj": (kv_heads * dim, hidden),
        "v_proj": (kv_heads * dim, hidden),
        "q_proj": (heads * dim, hidden),
        "o_proj": (hidden, heads * dim),
        "down_proj": (hidden, inner),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
    }
    return _Facts(**{**raw, "head_dim": dim, "num_key_value_heads": kv_heads, "projections": projections})


def _built_shape(config: ModelConfig) -> Shape:
    """The sizes of a model that is built on the meta device."""
    if config.source in KNOWN and not Path(config.source).is_dir():
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            build: Callable[..., Any] = AutoModelForCausalLM.from_config  # it has no types
            causal = build(known_config(config.source), attn_implementation="sdpa")
    else:
        causal = skeleton(config)
    # On the meta device even tied parameters are separate.
    causal.tie_weights()
    model = causal
    if config.lora is not None:
        from kl_comedy.models.lora import add_lora

        model = add_lora(causal, config.lora)
    facts = causal.config
    if hasattr(facts, "get_text_config"):
        facts = facts.get_text_config()
    heads = int(facts.num_attention_heads)
    embedding = causal.get_input_embeddings().weight
    output = causal.get_output_embeddings().weight
    # A tied head is the embedding, which is counted already.
    head = 0 if output is embedding else output.numel()
    layers = decoder_layers(causal)
    return Shape(
        source=config.source,
        parameters=_count(model.parameters()),
        trainable=_count(parameter for parameter in model.parameters() if parameter.requires_grad),
        embedding=embedding.numel(),
        head=head,
        layer=max(_count(layer.parameters()) for layer in layers),
        layers=len(layers),
        hidden=int(facts.hidden_size),
        inner=int(getattr(facts, "intermediate_size", None) or 4 * facts.hidden_size),
        heads=heads,
        kv_heads=int(getattr(facts, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(facts, "head_dim", None) or facts.hidden_size // heads),
        vocabulary=output.shape[0],
        config=facts,
    )


def _count(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def known_config(source: str, **changes: Any) -> Any:
    """transformers' config of a :data:`KNOWN` model, with ``changes``."""
    from transformers import AutoConfig

    facts = {**KNOWN[source], **changes}
    rope = {"rope_type": "default", "rope_theta": facts.pop("rope_theta")}
    return AutoConfig.for_model(facts.pop("model_type"), rope_parameters=rope, **facts)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Tokens and rows of one process: ``micro_*`` of its largest micro-batch, ``update_*`` of an optimizer update by
    the rank with the most micro-batches (``update_line``: tokens that pass through the body), ``drawn_*`` of a batch of
    rollouts, which is drawn in ``waves`` of ``wave_rows``. ``reuse`` is the number of updates on one batch.
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


def _longest_prompt(config: Config, shape: Shape, completion: int) -> int:
    """Tokens: what the config allows, and the model's context leaves beside a completion."""
    longest = config.data.prompt.max_tokens
    context: int | None = getattr(shape.config, "max_position_embeddings", None)
    if not context:
        return max(1, longest)
    return max(1, min(longest, context - completion))


def workload(config: Config, shape: Shape, device: Device, prompt: int | None, completion: int | None) -> Workload:
    """The work of one process; ``prompt`` and ``completion``: tokens, None for the most that the config allows."""
    rollout = config.rollout
    algorithm = config.algorithm
    processes = config.train.devices * config.train.nodes
    group = rollout.group_size
    completion = completion or rollout.max_new_tokens
    if prompt is None:
        prompt = _longest_prompt(config, shape, completion)

    # A micro-batch holds whole prompts with all their completions, or a part of the completions of one prompt.
    budget = config.train.microbatch_tokens or default_microbatch_tokens(
        shape.config,
        ELEMENT_BYTES[config.model.dtype],
        device.kind,
        checkpoints=config.model.gradient_checkpointing,
    )
    prompts = rollout.prompts_per_batch // algorithm.updates_per_batch
    rows_of_a_prompt = min(group, max(1, (budget - prompt) // completion))
    parts_of_a_group = -(-group // rows_of_a_prompt)
    if rows_of_a_prompt == group:
        fitting = max(1, budget // (prompt + group * completion))
        micro_prompts = min(fitting, prompts)
        micro_batches = -(-prompts // micro_prompts)
        # The last micro-batch may be smaller than the others.
        full_micro_batches = prompts / micro_prompts
    else:
        micro_prompts = 1
        micro_batches = prompts * parts_of_a_group
        full_micro_batches = micro_batches
    micro_rows = micro_prompts * rows_of_a_prompt
    # Ranks take whole micro-batches: the rank with the most of them has more than its share of the tokens.
    update_micro = -(-micro_batches // processes)
    share_of_update = min(1.0, max(1 / processes, update_micro / full_micro_batches))

    # With shared prompts a prompt passes the body once for its completions in a micro-batch, else once for each.
    if config.model.share_prompt and config.model.library_attention == "sdpa":
        micro_tokens = micro_prompts * prompt + micro_rows * completion
        line = prompts * (parts_of_a_group * prompt + group * completion)
    else:
        micro_tokens = micro_rows * (prompt + completion)
        line = prompts * group * (prompt + completion)

    drawn = rollout.prompts_per_batch * group // processes
    wave = min(rollout.batch_sequences, drawn)
    return Workload(
        processes=processes,
        prompt=prompt,
        completion=completion,
        micro_tokens=micro_tokens,
        micro_rows=micro_rows,
        update_line=math.ceil(line * share_of_update),
        update_tokens=math.ceil(prompts * group * completion * share_of_update),
        update_micro=update_micro,
        drawn_rows=drawn,
        drawn_tokens=drawn * completion,
        wave_rows=wave,
        waves=-(-drawn // wave),
        reuse=algorithm.updates_per_batch * algorithm.epochs_per_batch,
    )
