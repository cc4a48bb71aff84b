"""From the rows of an update to its micro-batches: reference pass, KL costs, advantages, weights.

Everything that needs the whole update (baselines, normalization, denominators) is computed here, without gradient.
The losses of the micro-batches then add up to that of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.config import AlgorithmConfig
from kl_comedy.kl import KLTerm, TermParts, kl_parts, own_baseline
from kl_comedy.objective import returns_with_costs, sequence_weights
from kl_comedy.objective.advantages import whiten
from kl_comedy.records import Experience, Scored
from kl_comedy.registry import ADVANTAGES
from kl_comedy.training.critic import ValueTargets, uses_critic
from kl_comedy.training.distributed import SINGLE_PROCESS, Ranks
from kl_comedy.training.dpo import pair_metrics, pair_weights
from kl_comedy.training.packing import OldPolicyValues, Packed, by_token_budget, pack, pad_columns, shortest

if TYPE_CHECKING:
    from kl_comedy.models.logprobs import TokenPass
    from kl_comedy.models.reference import Reference, ReferencePass


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows of one forward and backward: their experience, and the pass of each reference over them.

    ``empty``: its weight is zero; it keeps the collectives of this rank in step with ranks that have more rows.
    """

    experience: Experience
    references: Mapping[str, ReferencePass]
    baselines: Mapping[int, Tensor]
    """By position, the ``[B, T]`` baselines of terms with ``baseline: own``."""
    proximal_logp_BT: Tensor | None = None
    """Log-probs of the policy at the batch's first use; None: the policy loss uses the sampler's."""
    values: ValueTargets | None = None
    """The targets of the value head; None without a critic."""
    empty: bool = False
    notes: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the whole update; the same on each of its micro-batches."""

    def reference_of(self, term: KLTerm) -> ReferencePass:
        """The reference pass of a term. Terms against the ``sampler`` read the behaviour log-probs instead."""
        return self.references["initial" if term.reference == "sampler" else term.reference]


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The settings of :func:`prepare`, constant over a run."""

    terms: Sequence[KLTerm]
    algorithm: AlgorithmConfig
    microbatch_tokens: int
    pad_id: int
    device: torch.device
    ranks: Ranks = SINGLE_PROCESS


def prepare(
    rows: Sequence[Scored],
    plan: Preparation,
    *,
    betas: Sequence[float],
    references: Mapping[str, Reference],
    policy_pass: Callable[..., TokenPass],
    old_policy: Sequence[OldPolicyValues] | None = None,
) -> list[MicroBatch]:
    """Turn the rows of one update (whole groups) into this rank's micro-batches, as many as on every other rank.

    ``rows`` are those of all ranks: baselines and denominators are of the whole update, and every rank computes the
    same split into micro-batches. ``old_policy``, row by row, is needed with a recomputed proximal policy or a critic.

    ``policy_pass(inputs, reference, terms)`` returns log-probs and the exact KLs that the terms need. It is called
    only for terms with ``baseline: before`` or ``own``, and for DPO.
    """
    algorithm, device = plan.algorithm, plan.device
    splits = plan.ranks.split(by_token_budget(rows, plan.microbatch_tokens))
    shortest_row = shortest(rows)
    packs = [pack([rows[n] for n in split or shortest_row], pad_id=plan.pad_id, device=device) for split in splits]
    length = max(len(row.rollout.completion_ids) for row in rows)
    with torch.no_grad():
        passes = [{name: ref.forward_pass(**p.model_inputs()) for name, ref in references.items()} for p in packs]
        parts = _update_parts(splits, packs, passes, plan, policy_pass, rows=len(rows), length=length)
    reward_B = torch.tensor([row.reward.value for row in rows], dtype=torch.float64, device=device)
    group_B = torch.tensor([row.rollout.group_id for row in rows], device=device)
    sizes_B = torch.tensor([len(row.rollout.completion_ids) for row in rows], device=device)
    mask_BT = torch.arange(length, device=device)[None] < sizes_B[:, None]
    costs = [
        betas[position] * cost.cost_BT for position, cost in parts.items() if plan.terms[position].baseline == "before"
    ]
    returns_BT = returns_with_costs(reward_B, torch.stack(costs).sum(0) if costs else None, length)
    baselines = {
        position: own_baseline(term_parts, mask_BT, group_B)
        for position, term_parts in parts.items()
        if plan.terms[position].baseline == "own"
    }
    values, notes = None, {}
    if algorithm.dpo is not None:
        with torch.no_grad():
            pairs = pair_weights(rows, splits, packs, passes, policy_pass, algorithm=algorithm, ranks=plan.ranks)
        advantage_BT = pairs.coefficient_B.float()[:, None].expand(-1, length)
        weight_B, notes = torch.ones(len(rows), device=device), pair_metrics(pairs)
    else:
        advantage_BT, values = _advantages(plan, returns_BT, mask_BT, group_B, old_policy)
        keep_B = None
        if algorithm.mask_truncated:
            keep_B = torch.tensor([row.rollout.stop_reason != "length" for row in rows], device=device)
        weight_B = sequence_weights(algorithm.reduction, mask_BT, constant=algorithm.reduction_constant, keep_B=keep_B)
    proximal_BT = None
    if algorithm.proximal == "recomputed":
        assert old_policy is not None
        proximal_BT = pad_columns([row.logp_T for row in old_policy], length, device)
    micro_batches: list[MicroBatch] = []
    for split, packed, reference_passes in zip(splits, packs, passes, strict=True):
        index_B, width = torch.tensor(split or shortest_row, device=device), packed.ids_BT.shape[1]
        experience = Experience(
            **{item.name: getattr(packed, item.name) for item in fields(packed)},
            ref_logp_BT=reference_passes["initial"].logp_BT,
            advantage_BT=torch.where(packed.mask_BT, advantage_BT[index_B, :width], 0.0),
            reward_B=reward_B[index_B].float(),
            weight_B=weight_B[index_B] if split else torch.zeros_like(weight_B[index_B]),
            group_B=group_B[index_B],
        )
        micro_batches.append(
            MicroBatch(
                experience=experience,
                references=reference_passes,
                baselines={position: own_BT[index_B, :width] for position, own_BT in baselines.items()},
                proximal_logp_BT=None if proximal_BT is None else proximal_BT[index_B, :width],
                values=None if values is None else values.part(index_B, width),
                empty=not split,
                notes=notes,
            )
        )
    return micro_batches


def _advantages(
    plan: Preparation,
    returns_BT: Tensor,
    mask_BT: Tensor,
    group_B: Tensor,
    old_policy: Sequence[OldPolicyValues] | None,
) -> tuple[Tensor, ValueTargets | None]:
    """Advantages ``[B, T]`` in float32 and, with a critic, the targets of its values."""
    estimator = ADVANTAGES.get(plan.algorithm.advantage).fn
    if not uses_critic(plan.algorithm):
        return estimator(returns_BT, mask_BT, group_B).float(), None
    assert old_policy is not None
    settings = plan.algorithm.value
    value_BT = pad_columns([row.value_T for row in old_policy], mask_BT.shape[1], plan.device)
    advantage_BT = estimator(
        returns_BT,
        mask_BT,
        group_B,
        values_BT=value_BT,
        gamma=settings.gamma,
        lam=settings.lam,
        last_value_B=torch.tensor([row.last_value for row in old_policy], device=plan.device),
    ).float()
    targets = ValueTargets(old_value_BT=value_BT, target_BT=advantage_BT + value_BT)
    return (whiten(advantage_BT, mask_BT) if settings.normalize else advantage_BT), targets


def _update_parts(
    splits: Sequence[Sequence[int] | None],
    packs: Sequence[Packed],
    passes: Sequence[Mapping[str, Any]],
    plan: Preparation,
    policy_pass: Callable[..., TokenPass],
    *,
    rows: int,
    length: int,
) -> dict[int, TermParts]:
    """By position, the parts over the whole update, in float64, of terms with ``baseline: before`` or ``own``.

    Past the end of a completion the cost is what the credit gives there: the total, or zero. ``pathwise_BT`` is zero.
    """
    terms = {position: term for position, term in enumerate(plan.terms) if term.baseline in ("before", "own")}
    names = ("cost_BT", "weight_BT", "baseline_weight_BT", "pathwise_BT")
    update = {
        position: TermParts(
            **{name: torch.zeros(rows, length, dtype=torch.float64, device=plan.device) for name in names}
        )
        for position in terms
    }
    for split, packed, reference_passes in zip(splits, packs, passes, strict=True):
        for name in sorted({term.reference for term in terms.values()}):
            of_reference = {position: term for position, term in terms.items() if term.reference == name}
            reference = reference_passes["initial" if name == "sampler" else name]
            policy = policy_pass(packed.model_inputs(), reference, list(of_reference.values()))
            for position, term in of_reference.items():
                parts = kl_parts(
                    term,
                    logp_BT=policy.logp_BT,
                    ref_logp_BT=reference.logp_BT,
                    behaviour_logp_BT=packed.behaviour_logp_BT,
                    mask_BT=packed.mask_BT,
                    exact_kl_BT=policy.forward_kl_BT if term.needs == "exact_forward" else policy.kl_BT,
                )
                if not split:
                    continue
                width = packed.ids_BT.shape[1]
                for part in names[:3]:
                    getattr(update[position], part)[split, :width] = getattr(parts, part).double()
                if term.credit == "total":
                    update[position].cost_BT[split, width:] = parts.cost_BT[:, -1:].double()
    for parts in update.values():
        for name in names[:3]:
            plan.ranks.sum(getattr(parts, name))
    return update
