"""Time of an update from counts of work and a device's rates: rooflines, with shares of the peak that are assumed.

No number here was measured on a GPU by this project. :data:`Assumed` names the shares; every plan prints them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kl_comedy.config.schema import SHARDED, Config
from kl_comedy.kl import KLTerm
from kl_comedy.lab.planning.memory import (
    NETWORK,
    Device,
    Shape,
    Workload,
    compute_bytes,
    computes_narrow,
    element_bytes,
)


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


def timing_of(
    config: Config, terms: tuple[KLTerm, ...], shape: Shape, load: Workload, device: Device, assumed: Assumed
) -> Timing:
    """Upper bounds where completions end before ``rollout.max_new_tokens``."""
    generate = _generation(config, shape, load, device, assumed) / load.reuse
    compute = _learning_flops(config, terms, shape, load) / (device.flops(config.train.precision) * assumed.flops)
    exchange = _exchange(config, shape, load, device)
    learn = max(compute, exchange) + 7 * shape.trainable * element_bytes(config) / _shards(config, load) / (
        device.bandwidth * assumed.bandwidth
    )
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


def _shards(config: Config, load: Workload) -> int:
    return load.processes if config.train.strategy in SHARDED else 1


def _learning_flops(config: Config, terms: tuple[KLTerm, ...], shape: Shape, load: Workload) -> float:
    """Of one process and update: passes of the policy and of each reference, forward and back."""
    seen = load.prompt + load.completion / 2
    per_token = 2 * shape.body + 4 * shape.layers * shape.heads * shape.head_dim * seen
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
    own_loop = config.rollout.backend == "hf"
    # autocast without gradient makes a narrow copy of each weight whenever it is used: read, write, read
    weights = shape.parameters * (8 if own_loop and computes_narrow(config) else size)
    families = -(-load.wave_rows // config.rollout.group_size)
    cached = 2 * shape.layers * shape.kv_width * size
    keys = cached * (families * load.prompt + load.wave_rows * load.completion / 2)
    moved = (weights + keys) / (device.bandwidth * assumed.bandwidth)
    products = 2 * (shape.body + shape.vocabulary * shape.hidden) * load.wave_rows
    computed = products / (device.flops(config.train.precision) * assumed.flops)
    start = 0.0 if device.kind == "cpu" else shape.layers * (assumed.layer_s if own_loop else assumed.engine_layer_s)
    return load.waves * load.completion * max(moved, computed, start)
