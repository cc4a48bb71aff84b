"""Seconds of an update on N trainer ranks and M inference engines, from counted work and the rates of devices.

    engine, per batch    read weights     S max(W w / memory, launches), and the host's part of S steps
                         read caches      R c k (p / q + c / 2) / memory
                         draw             R c 2 (B / products + H / head products)
                         read prompts     R (p / G + d) 2 B / products
    engine               load weights     W w x the transport's seconds a byte
    rank, per update     body             t (2 B (f + b) + a (f + 2)) / products
                         head             s 2 H h / head products
                         exchange         FSDP: gathers and sums of gradients, on a GPU beyond body and head; ddp: sums
                         optimizer        7 E e / memory
                         publish weights  W w x the transport's seconds a byte, and gathering the shards

    update  = max(rank, engine, rank + engine - overlap)        engine: its batch over the updates from it
    overlap = 0 on-policy;  min(1, lag.max_steps / updates from a batch) x rank  in an asynchronous run

W parameters of w bytes, B of them in layers, E e bytes trained by one rank; H = vocabulary x hidden. R completions of c
tokens after prompts of p, in groups of G, drawn in S steps; k bytes of keys and values of a token, q rows that read a
prompt's together. t tokens pass the body, f times forward, b = 2 products of a backward (LoRA: 1), a FLOP of attention;
s of them pass the head, h products each. d: tokens of a dialogue's prefixes, which each turn passes anew.
docs/planning.md compares the predictions with runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kl_comedy.planning.sizes import Device, Shape

NETWORK = 50e9
"""Bytes/s of a device's port to other nodes: 400 Gbit/s for each, as in DGX H100 systems. All ports of a node carry a
gather: nccl-tests reach 340 GB/s over nodes of eight (NVIDIA/nccl#1218)."""
OPTIMIZER_PASSES = 7
"""AdamW reads weight, gradient and two moments, and writes weight and moments."""


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """Shares of a device's peak that are reached, and seconds that the host adds.

    ``flops``: bf16 products of a training pass (NeMo-RL, Llama-3.1-8B on 8 H100: 46 s with Megatron and 57 s with
    FSDP for passes that take 51 s at 0.4; NVIDIA-NeMo/RL#959). ``fp32_flops``: products in float32 without TF32, 50 of
    an H100's 67 TFLOP/s. ``bandwidth``: of memory while decoding. ``link``: of NVLink in FSDP's gathers. The last two
    are estimates. ``layer_s``: starting the kernels of one layer; the ``hf`` sampler starts them one by one, engines
    replay a graph (``engine_layer_s``). ``engine_step_s``: scheduling and log-probs of one step of an engine, from the
    58 s in which NeMo-RL's 8 engines draw (the same source).
    """

    flops: float = 0.4
    fp32_flops: float = 0.75
    bandwidth: float = 0.7
    link: float = 0.7
    layer_s: float = 5e-4
    engine_layer_s: float = 2e-5
    engine_step_s: float = 3e-3


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one process reaches: FLOP/s of the body's and the head's products, bytes/s of memory and between ranks.

    ``link``: between ranks that gather weights; ``port``: of one device to other nodes. ``hides``: exchanges run beside
    computing.
    """

    products: float
    head: float
    memory: float
    link: float
    port: float
    hides: bool

    @classmethod
    def of(cls, device: Device, assumed: Assumed, *, bf16: bool, bf16_head: bool, ports: int | None = None) -> Rates:
        """``ports``: devices of a node whose weights are gathered over several nodes; None: within one node."""
        # The peaks of a data sheet times the share of them that real passes reach.
        wide = device.fp32_flops * assumed.fp32_flops
        narrow = device.bf16_flops * assumed.flops
        link = device.link
        if ports is not None:
            # Over nodes the slower of the two links bounds a gather.
            link = min(link, NETWORK * ports)
        return cls(
            products=narrow if bf16 else wide,
            head=narrow if bf16_head else wide,
            memory=device.bandwidth * assumed.bandwidth,
            link=link * assumed.link,
            port=NETWORK * assumed.link,
            hides=device.kind == "cuda",
        )


@dataclass(frozen=True, kw_only=True)
class TransportCost:
    """Seconds for each byte of the weights, on the trainer's side and on an engine's.

    Engines load at the same time; ``in_turn``: one after the other.
    """

    publish: float
    load: float
    source: str
    in_turn: bool = False


HASH = 1 / 1.5e9
"""SHA-256 of a byte on one core with SHA instructions; trainer and engine compute it, one after the other."""
TO_HOST = 1 / 3.4e9
"""Between a GPU and host memory, either way."""
NCCL = 1 / 8.25e9
IPC = 1 / 40e9
TRANSPORT_COSTS: Mapping[str, TransportCost] = {
    "folder": TransportCost(
        publish=1 / 1.6e9,
        load=1 / 1.5e9,
        source="prime-rl gathers and writes 1.2 GB of Qwen3-0.6B in 0.75 s; servers read 15 GB in 5 to 20 s (estimate)",
    ),
    "adapter": TransportCost(publish=1 / 1.6e9, load=1 / 1.5e9, source="as folder, of the adapter alone"),
    "gloo": TransportCost(
        publish=TO_HOST, load=1 / 1.5e9, source="15 GB to host memory in 3 to 6 s; one TCP connection (estimates)"
    ),
    "nccl": TransportCost(
        publish=TO_HOST, load=TO_HOST + NCCL, source="verl's measured 8.25 GB/s over InfiniBand", in_turn=True
    ),
    "ipc": TransportCost(publish=TO_HOST, load=TO_HOST + IPC, source="15 GB over NVLink in 0.2 to 0.5 s (estimate)"),
}
"""Weights wait in host memory for every engine that is sent to; this trainer hashes them there."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What one engine draws for a batch.

    ``steps``: passes of one token each; ``launch_s``: starting one, while the device works; ``host_s``: what it adds.
    ``weight_bytes`` are moved for each parameter in a step, ``value_bytes`` for a cached value. ``shared``: rows that
    read the cache of their prompt together. ``read_again``: tokens that a dialogue passes again as prefixes of turns.
    """

    rows: float
    group: int
    prompt: float
    completion: float
    steps: float
    launch_s: float = 0.0
    host_s: float = 0.0
    weight_bytes: float = 2
    value_bytes: float = 2
    shared: int = 1
    read_again: float = 0.0


def drawing_parts(shape: Shape, rates: Rates, work: Drawing) -> dict[str, float]:
    """Seconds of a batch, by part."""
    tokens = work.rows * work.completion
    head = shape.vocabulary * shape.hidden
    read = shape.parameters * work.weight_bytes / rates.memory
    # A prompt's cache is read once for its rows; a completion's grows from nothing, so half of it on average.
    context = work.prompt / work.shared + work.completion / 2
    return {
        # The device reads them while the host starts the next kernels: the slower of the two counts.
        "read weights": work.steps * (max(read, work.launch_s) + work.host_s),
        "read caches": tokens * shape.kv_values * work.value_bytes * context / rates.memory,
        # Two operations for each parameter and token: a product and a sum.
        "draw": tokens * 2 * (shape.body / rates.products + head / rates.head),
        "read prompts": work.rows * (work.prompt / work.group + work.read_again) * 2 * shape.body / rates.products,
    }


@dataclass(frozen=True, kw_only=True)
class Learning:
    """What one rank computes for an update.

    ``line`` tokens pass the body, ``tokens`` of them the head. ``context``: tokens that one attends to, on average.
    ``ahead``: passes without gradient, of references and of the policy. ``head_products``: for each token.
    ``element_bytes``: of a weight, a gradient and a moment. ``gather_bytes``: of a layer's weight on the wire.
    ``copies``: of a sharded policy, each over ``ranks / copies`` ranks of one node (``shards: node`` of
    ``train.shards``).
    """

    line: float
    tokens: float
    context: float
    ahead: int
    head_products: float
    recompute: bool
    lora: bool
    micro_batches: int
    ranks: int
    sharded: bool
    copies: int = 1
    element_bytes: float = 4
    gather_bytes: float = 4

    @property
    def shards(self) -> int:
        """Ranks that have a part of one copy of the policy."""
        if not self.sharded:
            return 1
        return self.ranks // self.copies


def learning_parts(shape: Shape, rates: Rates, work: Learning) -> dict[str, float]:
    """Seconds of an update, by part."""
    # Products with each weight: those of the forward passes, of which checkpointing repeats one in the backward.
    forward = work.ahead + 1
    if work.recompute:
        forward += 1
    # The gradients of inputs and of weights; with LoRA the frozen weights have none.
    backward = 2
    if work.lora:
        backward = 1
    # Scores and weighted values: two products of [heads, head_dim] with every token of the context.
    attention = 4 * shape.layers * shape.heads * shape.head_dim * work.context
    body = work.line * (2 * shape.body * (forward + backward) + attention * (forward + 2)) / rates.products
    head = work.tokens * 2 * shape.vocabulary * shape.hidden * work.head_products / rates.head
    exchange = exchange_s(shape, rates, work)
    if work.sharded and rates.hides:
        # FSDP gathers the next layer while this one computes; only what is longer than that is waited for.
        exchange = max(0.0, exchange - body - head)
    trained = shape.trainable * work.element_bytes / work.shards
    return {
        "body": body,
        "head": head,
        "exchange": exchange,
        "optimizer": OPTIMIZER_PASSES * trained / rates.memory,
    }


def exchange_s(shape: Shape, rates: Rates, work: Learning) -> float:
    """Seconds that weights and gradients of an update are on the wire between ranks.

    FSDP gathers the weights for every forward and for the backward of each micro-batch, and reduces its gradient, then
    sums it over the copies; ddp sums gradients once.
    """
    gradient = shape.trainable * work.element_bytes
    if not work.sharded:
        # A ring all-reduce sends every byte twice, except for the rank's own part.
        return 2 * (1 - 1 / work.ranks) * gradient / rates.link
    # Layers travel narrow; embedding, final norm and head as they are stored.
    weights = shape.body * work.gather_bytes + (shape.parameters - shape.body) * work.element_bytes
    # A gather and a reduction send every byte once, again except for the own part.
    in_a_copy = (1 - 1 / work.shards) * ((work.ahead + 2) * weights + gradient) / rates.link
    between_copies = 2 * (1 - 1 / work.copies) * gradient / work.shards / rates.port
    return work.micro_batches * (in_a_copy + between_copies)


def update_s(rank: float, engine: float, overlap: float) -> float:
    """Seconds of an update whose rank and engine work at the same time for ``overlap`` seconds.

    >>> update_s(3.0, 2.0, 0.0), update_s(3.0, 2.0, 1.0), update_s(3.0, 2.0, 3.0)
    (5.0, 4.0, 3.0)
    """
    return max(rank, engine, rank + engine - overlap)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one optimizer update, tokens per second, hours of the run.

    ``generate_s`` and ``load_s`` are an update's share of its batch. ``exchange_s`` is hidden behind computing, except
    for the part in ``learn_s``. ``parts``: what an update consists of; ``bottleneck``: the largest of those on the side
    that an update waits for. ``trainer_idle`` and ``engine_idle``: shares of an update in which they wait for the
    other. ``transfer_s``: publishing and loading by each transport. ``devices``: of ranks and engines. Evaluation,
    verification and checkpoints are not counted.
    """

    generate_s: float
    learn_s: float
    exchange_s: float
    update_s: float
    generated_tokens_per_s: float
    trained_tokens_per_s: float
    run_hours: float
    device_hours: float
    publish_s: float
    load_s: float
    trainer_idle: float
    engine_idle: float
    bottleneck: str
    devices: int
    parts: Mapping[str, float]
    transfer_s: Mapping[str, float]
