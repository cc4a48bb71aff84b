"""From scored rollouts to padded tensors, and from an update's rows to micro-batches by token budget.

Also the old policy's log-probs and values: several updates may use one batch, and decoupled PPO and GAE compare all of
them with the policy and the value function before the first. They are recorded row by row and saved in checkpoints.

Legend: ``B`` rows, ``P`` longest prompt (left-padded), ``T`` longest completion (right-padded).
"""

from __future__ import annotations

from collections import defaultdict
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
        """The arguments of a forward pass over these rows."""
        return {
            "prompt_ids_BP": self.prompt_ids_BP,
            "prompt_mask_BP": self.prompt_mask_BP,
            "ids_BT": self.ids_BT,
            "mask_BT": self.mask_BT,
        }


def pack(rows: Sequence[Scored], *, pad_id: int, device: torch.device) -> Packed:
    """Pad rows to tensors. The masks say which tokens count, so ``pad_id`` may equal the end token."""
    rollouts = [row.rollout for row in rows]
    prompts = [rollout.prompt.token_ids for rollout in rollouts]
    p, t = max(map(len, prompts)), max(len(rollout.completion_ids) for rollout in rollouts)

    def right_padded(columns: Sequence[Sequence[Any]], fill: Any) -> Tensor:
        return torch.tensor([[*column, *[fill] * (t - len(column))] for column in columns], device=device)

    return Packed(
        prompt_ids_BP=torch.tensor([[*[pad_id] * (p - len(x)), *x] for x in prompts], device=device),
        prompt_mask_BP=torch.tensor([[False] * (p - len(x)) + [True] * len(x) for x in prompts], device=device),
        ids_BT=right_padded([rollout.completion_ids for rollout in rollouts], pad_id),
        mask_BT=right_padded([[True] * len(rollout.completion_ids) for rollout in rollouts], False),
        behaviour_logp_BT=right_padded([rollout.logps for rollout in rollouts], 0.0).float(),
        policy_version_BT=right_padded([rollout.versions for rollout in rollouts], 0),
    )


def pad_columns(columns: Sequence[Tensor], length: int, device: torch.device) -> Tensor:
    """Vectors of different lengths as ``[B, length]``, with zeros after them."""
    padded = torch.zeros(len(columns), length)
    for position, column in enumerate(columns):
        padded[position, : len(column)] = column
    return padded.to(device)


def shortest(rows: Sequence[Scored]) -> list[int]:
    """The position of the smallest row, in a list: the pass without weight of a rank that has fewer micro-batches."""
    return [min(range(len(rows)), key=lambda position: (_tokens(rows, [position]), position))]


def by_token_budget(rows: Sequence[Scored], budget: int) -> list[list[int]]:
    """Split row positions into micro-batches of at most ``budget`` padded tokens. Deterministic.

    Completions of one prompt stay together, because they may share its computation, and count it once; prompts of
    similar size are combined. A prompt's completions that exceed the budget are split, and a row that exceeds it is a
    micro-batch by itself.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for position, row in enumerate(rows):
        by_prompt[tuple(row.rollout.prompt.token_ids)].append(position)
    groups: list[list[int]] = []
    for positions in by_prompt.values():
        groups.append([])
        for position in positions:
            if groups[-1] and _tokens(rows, [*groups[-1], position]) > budget:
                groups.append([])
            groups[-1].append(position)
    groups.sort(key=lambda group: (_tokens(rows, group), group[0]))
    batches: list[list[int]] = []
    members = 0
    for group in groups:  # in ascending order, so the last group of a micro-batch is its widest
        if batches and _tokens(rows, group) * (members + 1) <= budget:
            batches[-1] += group
            members += 1
        else:
            batches.append(list(group))
            members = 1
    return batches


def _tokens(rows: Sequence[Scored], group: Sequence[int]) -> int:
    """Tokens of a prompt and of its completions at the positions ``group``."""
    prompt = len(rows[group[0]].rollout.prompt.token_ids)
    return prompt + sum(len(rows[position].rollout.completion_ids) for position in group)


@dataclass(frozen=True, kw_only=True)
class OldPolicyValues:
    """One row: log-probs (nats) and values of its tokens, and the value after the last; float32, on the CPU."""

    logp_T: Tensor
    value_T: Tensor
    last_value: float


@torch.no_grad()
def record_old_policy(
    rows: Sequence[Scored],
    evaluate: Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]],
    *,
    microbatch_tokens: int,
    pad_id: int,
    device: torch.device,
    bootstrap_truncated: bool,
) -> list[OldPolicyValues]:
    """Pass the policy over ``rows`` once, in micro-batches.

    ``evaluate``: from the model inputs of a pack to the policy's log-probs and values, ``[B, T]`` each.
    ``bootstrap_truncated``: a completion cut at the limit gets the value after its last token; every other's is 0.
    """
    recorded: dict[int, OldPolicyValues] = {}
    for split in by_token_budget(rows, microbatch_tokens):
        inputs = pack([rows[n] for n in split], pad_id=pad_id, device=device).model_inputs()
        if bootstrap_truncated:  # with one token more, the value before it is the one after the last real token
            inputs["mask_BT"] = torch.nn.functional.pad(inputs["mask_BT"], (1, 0), value=True)
            inputs["ids_BT"] = torch.nn.functional.pad(inputs["ids_BT"], (0, 1), value=pad_id)
        logp_BT, value_BT = (tensor.float().cpu() for tensor in evaluate(inputs))
        for position, n in enumerate(split):
            size = len(rows[n].rollout.completion_ids)
            truncated = bootstrap_truncated and rows[n].rollout.stop_reason == "length"
            recorded[n] = OldPolicyValues(
                logp_T=logp_BT[position, :size].clone(),
                value_T=value_BT[position, :size].clone(),
                last_value=float(value_BT[position, size]) if truncated else 0.0,
            )
    return [recorded[n] for n in range(len(rows))]


def to_plain(rows: Sequence[OldPolicyValues]) -> list[dict[str, Any]]:
    """As primitives and tensors, for a checkpoint."""
    return [{"logp": row.logp_T, "value": row.value_T, "last": row.last_value} for row in rows]


def from_plain(rows: Sequence[Mapping[str, Any]]) -> list[OldPolicyValues]:
    """The inverse of :func:`to_plain`."""
    return [OldPolicyValues(logp_T=row["logp"], value_T=row["value"], last_value=float(row["last"])) for row in rows]
