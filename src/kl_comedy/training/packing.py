"""From scored rollouts to padded tensors, and from an update's rows to micro-batches by token budget.

Legend: ``B`` rows, ``P`` longest prompt (left-padded), ``T`` longest completion (right-padded).

What is recorded of a batch when it is first used: the policy's log-probs (proximal policy) and the values.

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


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Rows of one micro-batch as tensors on the learner's device."""

    prompt_ids_BP: Tensor
    prompt_mask_BP: Tensor
    ids_BT: Tensor
    mask_BT: Tensor
    behaviour_logp_BT: Tensor
    policy_version_BT: Tensor

    def model_inputs(self) -> dict[str, Tensor]:
        """What a forward pass over these rows takes."""
        return {
            "prompt_ids_BP": self.prompt_ids_BP,
            "prompt_mask_BP": self.prompt_mask_BP,
            "ids_BT": self.ids_BT,
            "mask_BT": self.mask_BT,
        }


def pack(rows: Sequence[Scored], *, pad_id: int, device: torch.device) -> Packed:
    """Pad rows to tensors. ``pad_id`` only fills; masks say what counts, so pad may equal the end token."""
    prompts = [row.rollout.prompt.token_ids for row in rows]
    completions = [row.rollout.completion_ids for row in rows]
    p, t = max(map(len, prompts)), max(map(len, completions))
    return Packed(
        prompt_ids_BP=torch.tensor([[pad_id] * (p - len(x)) + list(x) for x in prompts], device=device),
        prompt_mask_BP=torch.tensor([[False] * (p - len(x)) + [True] * len(x) for x in prompts], device=device),
        ids_BT=torch.tensor([list(x) + [pad_id] * (t - len(x)) for x in completions], device=device),
        mask_BT=torch.tensor([[True] * len(x) + [False] * (t - len(x)) for x in completions], device=device),
        behaviour_logp_BT=torch.tensor(
            [list(row.rollout.logps) + [0.0] * (t - len(row.rollout.logps)) for row in rows],
            dtype=torch.float32,
            device=device,
        ),
        policy_version_BT=torch.tensor(
            [list(row.rollout.versions) + [0] * (t - len(row.rollout.versions)) for row in rows], device=device
        ),
    )


def shortest(rows: Sequence[Scored]) -> list[int]:
    """The position of the smallest row, in a list: what a rank passes without weight while others have more to do."""
    return [min(range(len(rows)), key=lambda position: (_tokens(rows, [position]), position))]


def by_token_budget(rows: Sequence[Scored], budget: int) -> list[list[int]]:
    """Split row positions into micro-batches of at most ``budget`` padded tokens. Deterministic.

    Completions of one prompt stay together, as they may share its computation, and prompts of similar size
    meet. A prompt counts once for its completions; a family larger than the budget is split, and a row
    larger than it is a micro-batch of its own.
    """
    families = [part for family in _families(rows) for part in _parts(rows, family, budget)]
    families.sort(key=lambda part: (_tokens(rows, part), part[0]))
    batches: list[list[int]] = []
    widest = members = 0
    for part in families:
        size = _tokens(rows, part)
        if batches and max(widest, size) * (members + 1) <= budget:
            batches[-1] += part
            widest, members = max(widest, size), members + 1
        else:
            batches.append(list(part))
            widest, members = size, 1
    return batches


def _families(rows: Sequence[Scored]) -> list[list[int]]:
    """Positions of the rows with the same prompt, in the order of their first."""
    found: dict[tuple[int, ...], list[int]] = {}
    for position, row in enumerate(rows):
        found.setdefault(tuple(row.rollout.prompt.token_ids), []).append(position)
    return list(found.values())


def _tokens(rows: Sequence[Scored], part: Sequence[int]) -> int:
    """Tokens of a prompt and all of its completions."""
    prompt = len(rows[part[0]].rollout.prompt.token_ids)
    return prompt + sum(len(rows[position].rollout.completion_ids) for position in part)


def _parts(rows: Sequence[Scored], family: Sequence[int], budget: int) -> list[list[int]]:
    """A family cut so that each part fits the budget, in order."""
    parts: list[list[int]] = []
    for position in family:
        if parts and _tokens(rows, [*parts[-1], position]) <= budget:
            parts[-1].append(position)
        else:
            parts.append([position])
    return parts


@dataclass(frozen=True, kw_only=True)
class OldPolicyValues:
    """One row: log-probs (nats) and values of its tokens, and the value after the last; float32, on the CPU."""

    logp_T: Tensor
    value_T: Tensor
    last_value: float


Measure = Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]
"""Model inputs of a pack -> the policy's log-probs and values, ``[B, T]`` each."""


@torch.no_grad()
def record_old_policy(
    rows: Sequence[Scored],
    measure: Measure,
    *,
    microbatch_tokens: int,
    pad_id: int,
    device: torch.device,
    bootstrap_truncated: bool,
) -> list[OldPolicyValues]:
    """Pass the policy over ``rows`` once, in micro-batches.

    ``bootstrap_truncated``: a completion cut at the limit gets the value after its last token; every other's is 0.
    """
    found: dict[int, OldPolicyValues] = {}
    for split in by_token_budget(rows, microbatch_tokens):
        packed = pack([rows[n] for n in split], pad_id=pad_id, device=device)
        inputs = _one_longer(packed, pad_id) if bootstrap_truncated else packed.model_inputs()
        logp_BT, value_BT = (tensor.float().cpu() for tensor in measure(inputs))
        for place, n in enumerate(split):
            size = len(rows[n].rollout.completion_ids)
            truncated = bootstrap_truncated and rows[n].rollout.stop_reason == "length"
            found[n] = OldPolicyValues(
                logp_T=logp_BT[place, :size].clone(),
                value_T=value_BT[place, :size].clone(),
                last_value=float(value_BT[place, size]) if truncated else 0.0,
            )
    return [found[n] for n in range(len(rows))]


def _one_longer(packed: Packed, pad_id: int) -> dict[str, Tensor]:
    """The pack with one token more in every row: the hidden state before it is the one after the last real token."""
    mask_BT = torch.nn.functional.pad(packed.mask_BT, (1, 0), value=True)
    ids_BT = torch.nn.functional.pad(packed.ids_BT, (0, 1), value=pad_id)
    return {**packed.model_inputs(), "ids_BT": ids_BT, "mask_BT": mask_BT}


def to_plain(rows: Sequence[OldPolicyValues]) -> list[dict[str, Any]]:
    """As primitives and tensors, for a checkpoint."""
    return [{"logp": row.logp_T, "value": row.value_T, "last": row.last_value} for row in rows]


def from_plain(rows: Sequence[Mapping[str, Any]]) -> list[OldPolicyValues]:
    """The inverse of :func:`to_plain`."""
    return [OldPolicyValues(logp_T=row["logp"], value_T=row["value"], last_value=float(row["last"])) for row in rows]


def padded(columns: Sequence[Tensor], length: int, device: torch.device) -> Tensor:
    """Rows of different lengths as ``[B, length]``, zeros after them."""
    whole = torch.zeros(len(columns), length)
    for place, column in enumerate(columns):
        whole[place, : len(column)] = column
    return whole.to(device)
