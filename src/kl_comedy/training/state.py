"""Scored rollouts as primitives and tensors, so that a checkpoint loads with ``weights_only=True``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kl_comedy.records import Prompt, Reward, Rollout, Scored


def pack_scored(rows: Sequence[Scored], positions: Mapping[str, int]) -> list[dict[str, Any]]:
    """Rows as plain data; a prompt is stored as its position among the training prompts."""
    return [
        {
            "prompt": positions[row.rollout.prompt.problem.id],
            "group_id": row.rollout.group_id,
            "completion_ids": torch.tensor(row.rollout.completion_ids, dtype=torch.long),
            "logps": torch.tensor(row.rollout.logps, dtype=torch.float64),
            "versions": torch.tensor(row.rollout.versions, dtype=torch.long),
            "stop_reason": row.rollout.stop_reason,
            "text": row.rollout.text,
            "value": row.reward.value,
            "status": row.reward.status,
            "parts": dict(row.reward.parts),
        }
        for row in rows
    ]


def unpack_scored(rows: Sequence[Mapping[str, Any]], prompts: Sequence[Prompt]) -> list[Scored]:
    """The inverse of :func:`pack_scored`."""
    return [
        Scored(
            rollout=Rollout(
                prompt=prompts[row["prompt"]],
                group_id=row["group_id"],
                completion_ids=tuple(row["completion_ids"].tolist()),
                logps=tuple(row["logps"].tolist()),
                versions=tuple(row["versions"].tolist()),
                stop_reason=row["stop_reason"],
                text=row["text"],
            ),
            reward=Reward(value=row["value"], status=row["status"], parts=row["parts"]),
        )
        for row in rows
    ]
