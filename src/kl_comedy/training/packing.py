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
