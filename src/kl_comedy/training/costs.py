"""What an update costs: tokens per second and device, memory, and the share of the devices' products that it used.

The share is the model FLOP utilization. Counted are 4 operations of each parameter and 2 more of each that is trained,
for every token that a policy pass reads: a forward and a backward pass. Not counted are attention, references, passes
before the loss and recomputation, so that a run that does less of them has the higher share.
"""

from __future__ import annotations

import functools
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kl_comedy.config import Config
from kl_comedy.models import LoadedModel
from kl_comedy.models.introspection import unwrap
from kl_comedy.models.onednn_linear import product
from kl_comedy.records import Scored
from kl_comedy.rollouts.engines.options import visible_gpus
from kl_comedy.training.distributed import Ranks

if TYPE_CHECKING:
    from kl_comedy.rollouts import Sampler

GIB = 2**30
PRODUCT_SIZE = {"cpu": 512, "cuda": 8192}
"""Rows and columns of the measured products: large enough for full speed, and done in some milliseconds."""
PRODUCTS = 4


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What an update of a run is compared with."""

    ranks: int
    devices: int
    """Processes of the trainer, and GPUs beside theirs of the servers that the run starts."""
    products: float
    """Operations per second of one process: measured, in the dtype of the layers."""
    operations: float
    """Of one token in a forward and a backward pass."""
    share_prompt: bool

    @classmethod
    def of(cls, config: Config, loaded: LoadedModel, sampler: Sampler, ranks: Ranks) -> Machine:
        """Measures products for some milliseconds."""
        dtype = torch.bfloat16 if config.train.precision == "bf16" else loaded.causal.dtype
        gpus = visible_gpus(loaded.device.type)
        return cls(
            ranks=ranks.size,
            devices=ranks.size + gpus_of_servers(sampler, gpus),
            products=product_rate(loaded.device, dtype),
            operations=operations_per_token(loaded.model),
            share_prompt=config.model.share_prompt,
        )


def gpus_of_servers(sampler: Sampler, gpus: Sequence[str]) -> int:
    """How many of this node's ``gpus`` are of servers that the run starts, and of no rank."""
    if not gpus:
        return 0
    of_ranks = set(gpus[: sampler.ranks_per_node])
    of_servers = set(",".join(sampler.server_gpus(gpus)).split(",")) - {""}
    return len(of_servers - of_ranks)


def operations_per_token(model: torch.nn.Module) -> float:
    """Operations of a token in a forward and a backward pass.

    >>> operations_per_token(torch.nn.Linear(3, 5, bias=False))
    90.0
    """
    # An embedding that is no head is only read.
    table = None
    if hasattr(unwrap(model), "get_input_embeddings"):
        causal: Any = unwrap(model)
        is_head = causal.get_input_embeddings().weight is causal.get_output_embeddings().weight
        table = None if is_head else causal.get_input_embeddings().weight
    operations = 0.0
    for parameter in model.parameters():
        if parameter is not table:
            # A product and a sum: forward, for the gradient of the input, and for that of the parameter.
            operations += (6 if parameter.requires_grad else 4) * parameter.numel()
    return operations


@functools.cache
def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of square products on ``device``, the best of :data:`PRODUCTS`."""
    size = PRODUCT_SIZE[device.type]
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    seconds = []
    with torch.no_grad():
        for _ in range(PRODUCTS):
            start = time.perf_counter()
            product(matrix, matrix)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
    # The first one includes the start of the library.
    return 2 * size**3 / min(seconds)


def peak_memory(device: torch.device) -> float:
    """GiB of this process at most so far: what torch allocated on its GPU, else what was resident in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    # Linux says it in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def passed_tokens(rows: Sequence[Scored], *, share_prompt: bool) -> int:
    """Tokens that one policy pass over ``rows`` reads: of prompts once a group where they are shared."""
    tokens = 0
    groups = set()
    for row in rows:
        rollout = row.rollout
        tokens += len(rollout.completion_ids) + sum(len(context) for _, context in rollout.restarts)
        if not share_prompt or rollout.group_id not in groups:
            tokens += len(rollout.prompt.token_ids)
        groups.add(rollout.group_id)
    return tokens


def cost_metrics(rows: Sequence[Scored], machine: Machine, *, step_s: float, learn_s: float) -> dict[str, float]:
    """``time/tokens_per_second_per_device`` and ``time/flop_utilization`` of an update."""
    drawn = sum(len(row.rollout.drawn_ids) for row in rows)
    work = machine.operations * passed_tokens(rows, share_prompt=machine.share_prompt)
    return {
        "time/tokens_per_second_per_device": drawn / step_s / machine.devices,
        "time/flop_utilization": work / learn_s / machine.ranks / machine.products,
    }
