"""From scored rollouts to padded tensors, and from an update's rows to micro-batches by token budget.

Legend: ``B`` rows, ``P`` longest prompt (left-padded), ``T`` longest completion (right-padded).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
            dtype=torch.float32, device=device,
        ),
        policy_version_BT=torch.tensor(
            [list(row.rollout.versions) + [0] * (t - len(row.rollout.versions)) for row in rows], device=device
        ),
    )  # fmt: skip


def by_token_budget(rows: Sequence[Scored], budget: int) -> list[list[int]]:
    """Split row positions into micro-batches of at most ``budget`` padded tokens, similar lengths together.

    A row longer than the budget is a micro-batch of its own. Deterministic.
    """
    size = [(len(row.rollout.prompt.token_ids), len(row.rollout.completion_ids)) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (sum(size[i]), size[i], i))
    batches: list[list[int]] = []
    p = t = 0
    for position in order:
        p_new, t_new = max(p, size[position][0]), max(t, size[position][1])
        if batches and (len(batches[-1]) + 1) * (p_new + t_new) <= budget:
            batches[-1].append(position)
            p, t = p_new, t_new
        else:
            batches.append([position])
            p, t = size[position]
    return batches
