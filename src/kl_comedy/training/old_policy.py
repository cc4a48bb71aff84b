"""The record of the old policy: log-probs and values of a batch before its first update.

A batch may serve several updates and epochs. Decoupled PPO clips against the policy at the batch's first use, and a
critic's advantages come from its values then; both must stay the same while the policy moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from kl_comedy.config import AlgorithmConfig
from kl_comedy.records import Scored
from kl_comedy.training.loss import OldPolicyRow, PolicyPass
from kl_comedy.training.models import ValueHead
from kl_comedy.training.packing import Packed, Packer, model_inputs


@torch.no_grad()
def record_old_policy(
    rows: Sequence[Scored],
    *,
    algorithm: AlgorithmConfig,
    packer: Packer,
    policy_pass: PolicyPass,
    value_head: ValueHead | None,
) -> list[OldPolicyRow] | None:
    """The policy's log-probs and values of each row's completion, in the order of ``rows``.

    None where the algorithm has no value head and does not clip against recomputed log-probs. Every rank must call this
    at the same time, because a pass over a sharded model gathers its weights from all ranks.

    With the option ``bootstrap_truncated`` of ``gae``, ``last`` of a completion that was cut at the limit is the value
    after its last token. Otherwise ``last`` is 0, the value after the end of a completion.
    """
    if value_head is None and algorithm.proximal != "recomputed":
        return None
    bootstrap = value_head is not None and algorithm.value.bootstrap_truncated
    recorded: dict[int, OldPolicyRow] = {}
    for packed in packer.micro_batches(rows):
        inputs = {**model_inputs(packed), "kept": packed.kept}
        if bootstrap:
            rows_per_rollout = [len(rows[position].rollout.rows) for position in packed.positions]
            inputs = _with_a_token_more(packed, rows_per_rollout, packer.pad_id)
        policy = policy_pass(inputs, None, ())
        logp_BT = policy.logp_BT.float().cpu()
        value_BT = torch.zeros_like(logp_BT)
        if value_head is not None:
            assert policy.hidden_NH is not None
            value_BT = value_head(policy.hidden_NH, inputs["mask_BT"]).cpu()
        # The micro-batch repeats rows of another rank, which records them. This rank made the pass all the same: a
        # rank that leaves a pass out makes the others wait for ever.
        if packed.empty:
            continue
        for index, position in enumerate(packed.positions):
            rollout = rows[position].rollout
            size = len(rollout.completion_ids)
            last_value = 0.0
            if bootstrap and rollout.stop_reason == "length":
                last_value = float(value_BT[index, size])
            # Cloned, or each row of a stored record would keep the tensor of its whole micro-batch.
            recorded[position] = {
                "logp": logp_BT[index, :size].clone(),
                "value": value_BT[index, :size].clone(),
                "last": last_value,
            }
    by_position: dict[int, OldPolicyRow] = {}
    for recorded_on_rank in packer.ranks.gather(recorded):
        by_position |= recorded_on_rank
    return [by_position[position] for position in range(len(rows))]


def _with_a_token_more(packed: Packed, rows_per_rollout: Sequence[int], pad_id: int) -> dict[str, Any]:
    """The inputs of a pass with one token more at the end of each completion (any id will do), as if it were trained.

    The value head gives the value before a token; before this one it is the value after the last token.
    """
    every = list(range(len(packed.positions)))
    ids_BT, real_BT, mask_BT = _longer(packed.ids_BT, packed.real_BT, packed.mask_BT, every, pad_id)
    rows = packed.rows
    if rows is not None:
        # A rollout ends where its last row does.
        last_rows = [end - 1 for end in accumulate(rows_per_rollout)]
        ids_RT, real_RT, mask_RT = _longer(rows.ids_RT, rows.real_RT, rows.mask_RT, last_rows, pad_id)
        rows = replace(rows, ids_RT=ids_RT, real_RT=real_RT, mask_RT=mask_RT)
    return model_inputs(replace(packed, ids_BT=ids_BT, real_BT=real_BT, mask_BT=mask_BT, rows=rows))


def _longer(
    ids: Tensor, real: Tensor, mask: Tensor, lengthened: list[int], pad_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and masks one column wider; the rows ``lengthened`` have one token more."""
    sizes = real.sum(-1)
    ids = nn.functional.pad(ids, (0, 1), value=pad_id)
    real = nn.functional.pad(real, (0, 1))
    mask = nn.functional.pad(mask, (0, 1))
    real[lengthened, sizes[lengthened]] = True
    mask[lengthened, sizes[lengthened]] = True
    return ids, real, mask
