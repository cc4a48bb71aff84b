"""From the rows of an update to its micro-batches: reference pass, KL costs, advantages, weights.

Everything that must see the whole update (baselines, normalization, denominators) happens here, without
gradient; what follows can go micro-batch by micro-batch and add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.config import AlgorithmConfig
from kl_comedy.kl import KLTerm, TermParts, kl_parts, own_baseline
from kl_comedy.objective import returns_with_costs, sequence_weights
from kl_comedy.objective.advantages import whiten
from kl_comedy.objective.preferences import Preferences
from kl_comedy.records import Experience, Scored
from kl_comedy.registry import ADVANTAGES
from kl_comedy.training.critic import ValueTargets, uses_critic
from kl_comedy.training.distributed import ALONE, World
from kl_comedy.training.dpo import pair_metrics, pair_weights
from kl_comedy.training.packing import OldPolicyValues, Packed, by_token_budget, pack, padded, shortest

if TYPE_CHECKING:
    from kl_comedy.models.logprobs import TokenPass
    from kl_comedy.models.reference import Reference, ReferencePass


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows that fit one backward: their experience, and the pass of each reference over them.

    ``empty``: it has no weight, and keeps this rank in step with ranks that have more to do.
    """

    experience: Experience
    references: Mapping[str, ReferencePass]
    baselines: Mapping[int, Tensor]
    """By position, the ``[B, T]`` baselines of terms with ``baseline: own``."""
    proximal_logp_BT: Tensor | None = None
    """Log-probs of the policy at the batch's first use; None: the policy loss is held against the sampler."""
    values: ValueTargets | None = None
    """What the value head is trained towards; None: there is no critic."""
    empty: bool = False
    notes: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the whole update that preparing it found; the same on each of its micro-batches."""

    def reference_of(self, term: KLTerm) -> ReferencePass:
        """The pass a term is measured against; ``sampler`` terms read the behaviour log-probs instead."""
        return self.references["initial" if term.reference == "sampler" else term.reference]


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What preparing an update needs to know."""

    terms: Sequence[KLTerm]
    algorithm: AlgorithmConfig
    microbatch_tokens: int
    pad_id: int
    device: torch.device
    world: World = ALONE


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

    ``rows`` are those of all ranks: baselines and denominators are of the whole update, and so is the plan of
    micro-batches, which needs no agreement because every rank makes the same one.
    ``old_policy``, row by row, is needed with a proximal policy or a critic (:mod:`kl_comedy.training.packing`).

    ``policy_pass`` is called only where a term before the baseline (or with its own) needs the policy's log-probs.
    ``policy_pass(inputs, reference, terms)`` returns log-probs and, where a term asks, exact KLs.
    """
    splits = plan.world.share(by_token_budget(rows, plan.microbatch_tokens))
    packs = [_packed(rows, split or shortest(rows), plan) for split in splits]
    with torch.no_grad():
        passes = [{name: ref.forward_pass(**p.model_inputs()) for name, ref in references.items()} for p in packs]
        length = max(len(row.rollout.completion_ids) for row in rows)
        before, own = _parts_ahead(splits, packs, passes, plan, policy_pass, rows=len(rows), length=length)
        cost_BT = _sum_of([(betas[position], parts.cost_BT) for position, parts in before.items()])
        pairs = _preferences(rows, splits, packs, passes, plan, policy_pass)
    reward_B = torch.tensor([row.reward.value for row in rows], dtype=torch.float64, device=plan.device)
    group_B = torch.tensor([row.rollout.group_id for row in rows], device=plan.device)
    sizes = torch.tensor([len(row.rollout.completion_ids) for row in rows], device=plan.device)
    mask_BT = torch.arange(length, device=plan.device)[None] < sizes[:, None]
    baselines = {position: own_baseline(parts, mask_BT, group_B) for position, parts in own.items()}
    returns_BT = returns_with_costs(reward_B, cost_BT, length)
    if pairs is None:
        advantage_BT, values = _advantages(plan, returns_BT, mask_BT, group_B, old_policy)
    else:
        advantage_BT, values = pairs.coefficient_B.float()[:, None].expand(-1, length), None
    proximal_BT = _proximal(plan, old_policy, length)
    weight_B = (
        sequence_weights(
            plan.algorithm.reduction, mask_BT, constant=plan.algorithm.reduction_constant, keep_B=_kept(rows, plan)
        )
        if pairs is None
        else torch.ones(len(rows), device=plan.device)
    )
    micro: list[MicroBatch] = []
    for split, packed, seen in zip(splits, packs, passes, strict=True):
        index = torch.tensor(split or shortest(rows), device=plan.device)
        advantage = advantage_BT[index, : packed.ids_BT.shape[1]]
        experience = Experience(
            prompt_ids_BP=packed.prompt_ids_BP,
            prompt_mask_BP=packed.prompt_mask_BP,
            ids_BT=packed.ids_BT,
            mask_BT=packed.mask_BT,
            behaviour_logp_BT=packed.behaviour_logp_BT,
            ref_logp_BT=seen["initial"].logp_BT,
            advantage_BT=torch.where(packed.mask_BT, advantage, torch.zeros_like(advantage)),
            reward_B=reward_B[index].float(),
            weight_B=weight_B[index] if split else torch.zeros_like(weight_B[index]),
            policy_version_BT=packed.policy_version_BT,
            group_B=group_B[index],
        )
        width = packed.ids_BT.shape[1]
        own_BT = {position: baseline_BT[index, :width] for position, baseline_BT in baselines.items()}
        micro.append(
            MicroBatch(
                experience=experience,
                references=seen,
                baselines=own_BT,
                proximal_logp_BT=None if proximal_BT is None else proximal_BT[index, :width],
                values=None if values is None else values.part(index, width),
                empty=not split,
                notes={} if pairs is None else pair_metrics(pairs),
            )
        )
    return micro


def _advantages(
    plan: Preparation,
    returns_BT: Tensor,
    mask_BT: Tensor,
    group_B: Tensor,
    old_policy: Sequence[OldPolicyValues] | None,
) -> tuple[Tensor, ValueTargets | None]:
    """Advantages ``[B, T]`` in float32 and, with a critic, what its values are trained towards."""
    fn = ADVANTAGES.get(plan.algorithm.advantage).fn
    if not uses_critic(plan.algorithm):
        return fn(returns_BT, mask_BT, group_B).float(), None
    assert old_policy is not None
    settings, length = plan.algorithm.value, mask_BT.shape[1]
    value_BT = padded([row.value_T for row in old_policy], length, plan.device)
    advantage_BT = fn(
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


def _preferences(
    rows: Sequence[Scored],
    splits: Sequence[Sequence[int] | None],
    packs: Sequence[Packed],
    passes: Sequence[Mapping[str, Any]],
    plan: Preparation,
    policy_pass: Callable[..., TokenPass],
) -> Preferences | None:
    """The pairs of the update where ``algorithm.dpo`` asks for them; they take the advantages' place."""
    if plan.algorithm.dpo is None:
        return None
    return pair_weights(
        rows,
        splits,
        packs,
        passes,
        policy_pass,
        dpo=plan.algorithm.dpo,
        mask_truncated=plan.algorithm.mask_truncated,
        world=plan.world,
    )


def _proximal(plan: Preparation, old_policy: Sequence[OldPolicyValues] | None, length: int) -> Tensor | None:
    if plan.algorithm.proximal != "recomputed":
        return None
    assert old_policy is not None
    return padded([row.logp_T for row in old_policy], length, plan.device)


def _packed(rows: Sequence[Scored], split: Sequence[int], plan: Preparation) -> Packed:
    return pack([rows[n] for n in split], pad_id=plan.pad_id, device=plan.device)


def _kept(rows: Sequence[Scored], plan: Preparation) -> Tensor | None:
    """With ``mask_truncated``, completions cut at the limit take no part in the loss."""
    if not plan.algorithm.mask_truncated:
        return None
    return torch.tensor([row.rollout.stop_reason != "length" for row in rows], device=plan.device)


def _parts_ahead(
    splits: Sequence[Sequence[int] | None],
    packs: Sequence[Packed],
    passes: Sequence[Mapping[str, Any]],
    plan: Preparation,
    policy_pass: Callable[..., TokenPass],
    *,
    rows: int,
    length: int,
) -> tuple[dict[int, TermParts], dict[int, TermParts]]:
    """By position, the parts over the whole update of terms ``before`` the baseline, and of those with their ``own``.

    Beyond the end of a completion the cost is what the credit leaves there (the total, or zero).
    """
    chosen = {position: term for position, term in enumerate(plan.terms) if term.baseline in ("before", "own")}
    device = packs[0].ids_BT.device
    found = {position: _blank_parts(rows, length, device) for position in chosen}
    for split, packed, seen in zip(splits, packs, passes, strict=True):
        index = torch.tensor(split or [], dtype=torch.long, device=device)
        for name in sorted({term.reference for term in chosen.values()}):
            wanted = {position: term for position, term in chosen.items() if term.reference == name}
            reference = seen["initial" if name == "sampler" else name]
            now = policy_pass(packed.model_inputs(), reference, list(wanted.values()))
            for position, term in wanted.items():
                parts = kl_parts(
                    term,
                    logp_BT=now.logp_BT,
                    ref_logp_BT=reference.logp_BT,
                    behaviour_logp_BT=packed.behaviour_logp_BT,
                    mask_BT=packed.mask_BT,
                    exact_kl_BT=now.forward_kl_BT if term.needs == "exact_forward" else now.kl_BT,
                )
                if split:
                    _fill(found[position], parts, index, fill_end=term.credit == "total")
    for parts in found.values():
        for whole in (parts.cost_BT, parts.weight_BT, parts.baseline_weight_BT):
            plan.world.sum(whole)
    before = {position: parts for position, parts in found.items() if chosen[position].baseline == "before"}
    return before, {position: parts for position, parts in found.items() if position not in before}


def _blank_parts(rows: int, length: int, device: torch.device) -> TermParts:
    def blank() -> Tensor:
        return torch.zeros(rows, length, dtype=torch.float64, device=device)

    return TermParts(cost_BT=blank(), weight_BT=blank(), baseline_weight_BT=blank(), pathwise_BT=blank())


def _fill(whole: TermParts, parts: TermParts, index: Tensor, *, fill_end: bool) -> None:
    """Write the rows of one pack into the parts of the update."""
    width = parts.cost_BT.shape[1]
    for name in ("cost_BT", "weight_BT", "baseline_weight_BT"):
        getattr(whole, name)[index, :width] = getattr(parts, name).double()
    if fill_end:
        whole.cost_BT[index, width:] = parts.cost_BT[:, -1:].double()


def _sum_of(weighted: Sequence[tuple[float, Tensor]]) -> Tensor | None:
    return torch.stack([beta * cost_BT for beta, cost_BT in weighted]).sum(0) if weighted else None
