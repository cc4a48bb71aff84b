"""What is recorded of a batch when it is first used: the policy's log-probs (proximal policy) and the values.

Several updates may be made of one batch. Decoupled PPO and GAE compare all of them with the policy and the value
function as they were before the first, so these are recorded once, row by row, and travel in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_comedy.records import Scored
from kl_comedy.training.packing import Packed, by_token_budget, pack


@dataclass(frozen=True, kw_only=True)
class FirstUse:
    """One row: log-probs (nats) and values of its tokens, and the value after the last; float32, on the CPU."""

    logp_T: Tensor
    value_T: Tensor
    last_value: float


Measure = Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]
"""Model inputs of a pack -> the policy's log-probs and values, ``[B, T]`` each."""


@torch.no_grad()
def record_first_use(
    rows: Sequence[Scored], measure: Measure, *, microbatch_tokens: int, pad_id: int, device: torch.device,
    bootstrap_truncated: bool,
) -> list[FirstUse]:  # fmt: skip
    """Pass the policy over ``rows`` once, in micro-batches.

    ``bootstrap_truncated``: a completion cut at the limit gets the value after its last token; every other's is 0.
    """
    found: dict[int, FirstUse] = {}
    for split in by_token_budget(rows, microbatch_tokens):
        packed = pack([rows[n] for n in split], pad_id=pad_id, device=device)
        inputs = _one_longer(packed, pad_id) if bootstrap_truncated else packed.model_inputs()
        logp_BT, value_BT = (tensor.float().cpu() for tensor in measure(inputs))
        for place, n in enumerate(split):
            size = len(rows[n].rollout.completion_ids)
            truncated = bootstrap_truncated and rows[n].rollout.stop_reason == "length"
            found[n] = FirstUse(
                logp_T=logp_BT[place, :size].clone(), value_T=value_BT[place, :size].clone(),
                last_value=float(value_BT[place, size]) if truncated else 0.0,
            )  # fmt: skip
    return [found[n] for n in range(len(rows))]


def _one_longer(packed: Packed, pad_id: int) -> dict[str, Tensor]:
    """The pack with one token more in every row: the hidden state before it is the one after the last real token."""
    mask_BT = torch.nn.functional.pad(packed.mask_BT, (1, 0), value=True)
    ids_BT = torch.nn.functional.pad(packed.ids_BT, (0, 1), value=pad_id)
    return {**packed.model_inputs(), "ids_BT": ids_BT, "mask_BT": mask_BT}


def to_plain(rows: Sequence[FirstUse]) -> list[dict[str, Any]]:
    """As primitives and tensors, for a checkpoint."""
    return [{"logp": row.logp_T, "value": row.value_T, "last": row.last_value} for row in rows]


def from_plain(rows: Sequence[Mapping[str, Any]]) -> list[FirstUse]:
    """The inverse of :func:`to_plain`."""
    return [FirstUse(logp_T=row["logp"], value_T=row["value"], last_value=float(row["last"])) for row in rows]


def padded(columns: Sequence[Tensor], length: int, device: torch.device) -> Tensor:
    """Rows of different lengths as ``[B, length]``, zeros after them."""
    whole = torch.zeros(len(columns), length)
    for place, column in enumerate(columns):
        whole[place, : len(column)] = column
    return whole.to(device)
