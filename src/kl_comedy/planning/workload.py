"""How much one process does in an update: tokens and rows, of a micro-batch and in all.

Completions are taken to be as long as they may be, prompts as long as they are let in, unless other numbers are given:
then both memory and time are upper bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from kl_comedy.config.schema import Config
from kl_comedy.models.footprint import open_microbatch_tokens
from kl_comedy.planning.devices import Device
from kl_comedy.planning.shapes import Shape


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
    budget = train.microbatch_tokens or open_microbatch_tokens(
        shape.config, element_bytes(config), device.kind, checkpoints=config.model.gradient_checkpointing
    )  # fmt: skip
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
