"""The loss of an update: :func:`prepare` looks at all its rows, :func:`micro_loss` at one micro-batch.

Whatever needs the whole update (baselines, normalization, denominators) is prepared, without gradient. The losses of
the micro-batches then add up to that of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.config import AlgorithmConfig
from kl_comedy.kl import KLTerm, TermParts, batch_baseline, kl_parts, kl_surrogate, kl_value, own_baseline
from kl_comedy.objective import PolicyTerm, policy_term, returns_with_costs, sequence_weights
from kl_comedy.objective.advantages import whiten
from kl_comedy.objective.policy_term import PolicyLossParts
from kl_comedy.objective.preferences import preferences
from kl_comedy.records import Experience, Scored
from kl_comedy.registry import ADVANTAGES
from kl_comedy.training.packing import Packed, Packer, model_inputs

if TYPE_CHECKING:
    from kl_comedy.models.reference import Reference
    from kl_comedy.models.types import ReferencePass, TokenPass

WITHOUT_VERDICT = ("timeout", "refused")
"""Statuses of completions that were not judged; these enter no pair of DPO."""

PolicyPass = Callable[..., "TokenPass"]
_Passed = Sequence[tuple[Packed, Mapping[str, Any]]]
"""The micro-batches of an update, and the pass of each reference over them."""

OldPolicyRow = dict[str, Any]
"""The policy before the first update from a row's batch, in float32 on the CPU: ``logp`` (nats) and ``value`` of its
tokens, ``[T]``, and ``last``, the value after the last."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows of one forward and backward: their experience, and the pass of each reference over them.

    ``baselines``: ``[B, T]`` by the position of each term with ``baseline: own`` or ``batch``. ``proximal_logp_BT`` and
    ``old_value_BT``: log-probs and values of the policy at the batch's first use, ``value_target_BT`` the lambda
    returns; None where the policy loss uses the sampler's log-probs, or there is no critic. ``empty``: its weight is
    zero; it keeps the collectives of this rank in step with ranks that have more rows. ``notes``: metrics of the
    whole update, the same on each of its micro-batches.
    """

    experience: Experience
    references: Mapping[str, ReferencePass]
    baselines: Mapping[int, Tensor]
    proximal_logp_BT: Tensor | None = None
    old_value_BT: Tensor | None = None
    value_target_BT: Tensor | None = None
    empty: bool = False
    notes: Mapping[str, float] = field(default_factory=dict)

    def reference_of(self, term: KLTerm) -> ReferencePass:
        """The reference pass of a term. Terms against the ``sampler`` read the behaviour log-probs instead."""
        return self.references["initial" if term.reference == "sampler" else term.reference]


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The settings of :func:`prepare`, constant over a run."""

    terms: Sequence[KLTerm]
    algorithm: AlgorithmConfig
    packer: Packer


def uses_critic(algorithm: AlgorithmConfig) -> bool:
    """Whether the advantage needs a value function."""
    return bool(ADVANTAGES.get(algorithm.advantage, key="algorithm.advantage").facts.get("critic"))


def prepare(
    rows: Sequence[Scored],
    plan: Preparation,
    *,
    betas: Sequence[float],
    references: Mapping[str, Reference],
    policy_pass: PolicyPass,
    old_policy: Sequence[OldPolicyRow] | None = None,
) -> list[MicroBatch]:
    """Turn the rows of one update (whole groups) into this rank's micro-batches, as many as on every other rank.

    ``rows`` are those of all ranks: baselines and denominators are of the whole update, and every rank computes the
    same split into micro-batches. ``old_policy``, row by row, is needed with a recomputed proximal policy or a critic.

    ``policy_pass(inputs, reference, terms)`` returns log-probs and the exact KLs that the terms need. It is called
    only for terms with ``baseline: before``, ``own`` or ``batch``, and for DPO.
    """
    algorithm, device = plan.algorithm, plan.packer.device
    packs = plan.packer.micro_batches(rows)
    sizes_B = torch.tensor([len(row.rollout.completion_ids) for row in rows], device=device)
    length = int(sizes_B.max())
    mask_BT = torch.arange(length, device=device)[None] < sizes_B[:, None]
    reward_B = torch.tensor([row.reward.value for row in rows], dtype=torch.float64, device=device)
    group_B = torch.tensor([row.rollout.group_id for row in rows], device=device)
    with torch.no_grad():
        passes = [{name: ref.forward_pass(**model_inputs(p)) for name, ref in references.items()} for p in packs]
        passed = list(zip(packs, passes, strict=True))
        parts = _update_parts(passed, plan, betas, policy_pass, mask_BT)
    before, own, centred = ([n for n in parts if plan.terms[n].baseline == kind] for kind in ("before", "own", "batch"))
    costs = [betas[n] * parts[n].cost_BT for n in before]
    returns_BT = returns_with_costs(
        algorithm.reward_weight * reward_B, torch.stack(costs).sum(0) if costs else None, length
    )
    baselines = {n: own_baseline(parts[n], mask_BT, group_B) for n in own}
    baselines |= {n: batch_baseline(parts[n], mask_BT) for n in centred}

    def old(key: str) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([row[key] for row in old_policy], batch_first=True).to(device)

    old_value_BT = value_target_BT = None
    notes: dict[str, float] = {}
    if algorithm.dpo is not None:
        unused = "length" if algorithm.mask_truncated else None
        judged = [row.reward.status not in WITHOUT_VERDICT and row.rollout.stop_reason != unused for row in rows]
        judged_B, log_ratio_B = torch.tensor(judged, device=device), _log_ratios(passed, plan, policy_pass, len(rows))
        pairs = preferences(log_ratio_B, reward_B, group_B, judged_B, beta=algorithm.dpo.beta)
        advantage_BT, weight_B = pairs.coefficient_B.float()[:, None].expand(-1, length), torch.ones_like(sizes_B)
        names = "pairs prompts loss accuracy margin" if pairs.pairs else "pairs prompts"
        notes = {f"dpo/{name}": float(getattr(pairs, name)) for name in names.split()}
    else:
        estimator, settings = ADVANTAGES.get(algorithm.advantage).fn, algorithm.value
        if uses_critic(algorithm):
            old_value_BT = old("value")
            last_B = torch.tensor([row["last"] for row in old_policy], device=device)
            options = {"values_BT": old_value_BT, "last_value_B": last_B, "gamma": settings.gamma, "lam": settings.lam}
            advantage_BT = estimator(returns_BT, mask_BT, group_B, **options).float()
            value_target_BT = advantage_BT + old_value_BT
            advantage_BT = whiten(advantage_BT, mask_BT) if settings.normalize else advantage_BT
        else:
            advantage_BT = estimator(returns_BT, mask_BT, group_B).float()
        keep = [row.rollout.stop_reason != "length" for row in rows]
        keep_B = torch.tensor(keep, device=device) if algorithm.mask_truncated else None
        weight_B = sequence_weights(algorithm.reduction, mask_BT, constant=algorithm.reduction_constant, keep_B=keep_B)
    proximal_BT = old("logp") if algorithm.proximal == "recomputed" else None

    def part(packed: Packed, values_BT: Tensor | None) -> Any:
        return None if values_BT is None else values_BT[packed.positions, : packed.ids_BT.shape[1]]

    return [
        MicroBatch(
            experience=Experience(
                **model_inputs(packed),
                behaviour_logp_BT=packed.behaviour_logp_BT,
                policy_version_BT=packed.policy_version_BT,
                ref_logp_BT=reference_passes["initial"].logp_BT,
                advantage_BT=torch.where(packed.mask_BT, part(packed, advantage_BT), 0.0),
                reward_B=reward_B[packed.positions].float(),
                weight_B=weight_B[packed.positions].float() * (not packed.empty),
                group_B=group_B[packed.positions],
            ),
            references=reference_passes,
            baselines={position: part(packed, own_BT) for position, own_BT in baselines.items()},
            proximal_logp_BT=part(packed, proximal_BT),
            old_value_BT=part(packed, old_value_BT),
            value_target_BT=part(packed, value_target_BT),
            empty=packed.empty,
            notes=notes,
        )
        for packed, reference_passes in passed
    ]


def _update_parts(
    passed: _Passed, plan: Preparation, betas: Sequence[float], policy_pass: PolicyPass, mask_BT: Tensor
) -> dict[int, TermParts]:
    """By position, the parts over the whole update, in float64, of terms with :attr:`KLTerm.needs_update`.

    Past the end of a completion the cost is what the credit gives there: the total, or zero. ``pathwise_BT`` is zero.
    """
    early = (n for n, term in enumerate(plan.terms) if term.needs_update and betas[n] != 0)
    terms = {position: plan.terms[position] for position in early}
    names = ("cost_BT", "weight_BT", "baseline_weight_BT")
    zeros_BT = torch.zeros_like(mask_BT, dtype=torch.float64)
    empty = {"pathwise_BT": zeros_BT, "cost_after_B": zeros_BT.new_zeros(len(zeros_BT))}
    update = {n: TermParts(**empty, **{name: zeros_BT.clone() for name in names}) for n in terms}
    for packed, reference_passes in passed:
        for name in sorted({term.reference for term in terms.values()}):
            alike = {position: term for position, term in terms.items() if term.reference == name}
            reference = reference_passes["initial" if name == "sampler" else name]
            policy = policy_pass(model_inputs(packed), reference, list(alike.values()))
            for position, term in alike.items():
                parts = kl_parts(term, **kl_arguments(term, packed, policy.logp_BT, reference.logp_BT, policy))
                if packed.empty:
                    continue
                width = packed.ids_BT.shape[1]
                for part in names:
                    getattr(update[position], part)[packed.positions, :width] = getattr(parts, part).double()
                update[position].cost_BT[packed.positions, width:] = parts.cost_after_B[:, None].double()
    for parts in update.values():
        for part in names:
            plan.packer.ranks.sum(getattr(parts, part))
    return update


@torch.no_grad()
def _log_ratios(passed: _Passed, plan: Preparation, policy_pass: PolicyPass, rows: int) -> Tensor:
    """Of each completion of the update, the log-ratio of the current policy to the initial one, in float64."""
    log_ratio_B = torch.zeros(rows, dtype=torch.float64, device=plan.packer.device)
    for packed, reference_passes in passed:
        logp_BT = policy_pass(model_inputs(packed), None, ()).logp_BT
        if not packed.empty:
            log_ratio_BT = torch.where(packed.mask_BT, logp_BT - reference_passes["initial"].logp_BT, 0.0)
            log_ratio_B[packed.positions] = log_ratio_BT.double().sum(-1)
    return plan.packer.ranks.sum(log_ratio_B)


# --- one micro-batch --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MicroLoss:
    """A micro-batch's share of the update's loss; detached, the share of each part, and the policy term per token.

    ``values``: of each KL term, the estimate per token ``[B, T]`` (nats), detached.
    """

    loss: Tensor
    parts: dict[str, Tensor]
    policy: PolicyLossParts
    values: list[Tensor]


def micro_loss(
    micro: MicroBatch,
    passes: Mapping[str, TokenPass],
    *,
    terms: Sequence[KLTerm],
    betas: Sequence[float],
    algorithm: AlgorithmConfig,
) -> MicroLoss:
    """The policy loss and every KL term of a micro-batch.

    ``passes`` holds the policy pass per reference name (the log-probs are the same in each). A term ``before`` the
    baseline is already part of the advantage; only its path-wise part is added here.
    """
    logp_BT = passes["initial"].logp_BT
    policy = policy_parts(micro, logp_BT, algorithm)
    parts, values = {"policy": weighted_sum(policy.loss_BT, micro.experience)}, []
    for position, (term, beta) in enumerate(zip(terms, betas, strict=True)):
        policy_pass = passes.get(term.reference, passes["initial"])  # separate only where the term needs an exact KL
        arguments = kl_arguments(term, micro.experience, logp_BT, micro.reference_of(term).logp_BT, policy_pass)
        values.append(kl_value(term, **arguments))
        if beta == 0:  # measured, not differentiated: 0 x inf would be NaN
            parts[f"kl_{position}"] = parts["policy"].new_zeros(())
            continue
        if term.baseline == "before":
            surrogate_BT = kl_parts(term, **arguments).pathwise_BT
        else:
            surrogate_BT = kl_surrogate(term, **arguments, baseline_BT=micro.baselines.get(position))
        parts[f"kl_{position}"] = beta * weighted_sum(surrogate_BT, micro.experience)
    loss = torch.stack(list(parts.values())).sum()
    detached = {name: part.detach() for name, part in parts.items()}
    return MicroLoss(loss=loss, parts=detached, policy=policy, values=values)


def policy_parts(micro: MicroBatch, logp_BT: Tensor, algorithm: AlgorithmConfig) -> PolicyLossParts:
    """The policy term of a micro-batch, unreduced, with where its bounds and corrections acted."""
    return policy_term(
        PolicyTerm.of(algorithm),
        logp_BT=logp_BT,
        behaviour_logp_BT=micro.experience.behaviour_logp_BT,
        advantage_BT=micro.experience.advantage_BT,
        mask_BT=micro.experience.mask_BT,
        proximal_logp_BT=micro.proximal_logp_BT,
    )


def kl_arguments(
    term: KLTerm, batch: Packed | Experience, logp_BT: Tensor, ref_logp_BT: Tensor, policy: TokenPass
) -> dict[str, Any]:
    """The tensors that a term is computed from; ``policy`` holds the exact KLs to its reference."""
    return {
        **({} if term.top is None else {"top": policy.top[term.top]}),
        **({} if term.weight == "none" else {"certainty_BT": certainty_of(term, policy)}),
        "logp_BT": logp_BT,
        "ref_logp_BT": ref_logp_BT,
        "behaviour_logp_BT": batch.behaviour_logp_BT,
        "mask_BT": batch.mask_BT,
        "exact_kl_BT": exact_divergence(term, policy),
    }


def certainty_of(term: KLTerm, policy: TokenPass) -> Tensor | None:
    """The certainty that weights each token, ``[B, T]``."""
    return policy.certainty_BT if term.weight == "policy" else policy.reference_certainty_BT


def exact_divergence(term: KLTerm, policy: TokenPass) -> Tensor | None:
    """The exact divergence per prefix that a term reads, ``[B, T]``."""
    if term.mixture is not None:
        return policy.mixture[term.mixture]
    return policy.forward_kl_BT if term.needs == "exact_forward" else policy.kl_BT


def weighted_sum(loss_BT: Tensor, experience: Experience) -> Tensor:
    """The sum over tokens, weighted by each sequence's share."""
    return (experience.weight_B * torch.where(experience.mask_BT, loss_BT, 0.0).sum(-1)).sum()
