"""The loss of one micro-batch: the policy loss and every KL term, under one set of sequence weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kl_comedy.config import AlgorithmConfig
from kl_comedy.kl import KLTerm, kl_parts, kl_surrogate
from kl_comedy.models.logprobs import TokenPass
from kl_comedy.objective.policy_term import PolicyLossParts, PolicyTerm, policy_term
from kl_comedy.training.prepare import MicroBatch


@dataclass(frozen=True, kw_only=True)
class MicroLoss:
    """A micro-batch's share of the update's loss; detached, the share of each part and the policy term per token."""

    loss: Tensor
    parts: dict[str, Tensor]
    policy: PolicyLossParts


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
    experience = micro.experience
    logp_BT = passes["initial"].logp_BT
    policy = policy_parts(micro, logp_BT, algorithm)
    parts = {"policy": _weighted(policy.loss_BT, experience.mask_BT, experience.weight_B)}
    for position, (term, beta) in enumerate(zip(terms, betas, strict=True)):
        policy_pass = passes.get(term.reference, passes["initial"])  # separate only where the term needs an exact KL
        arguments = {
            "logp_BT": logp_BT,
            "ref_logp_BT": micro.reference_of(term).logp_BT,
            "behaviour_logp_BT": experience.behaviour_logp_BT,
            "mask_BT": experience.mask_BT,
            "exact_kl_BT": policy_pass.forward_kl_BT if term.needs == "exact_forward" else policy_pass.kl_BT,
        }
        if term.baseline == "before":
            surrogate_BT = kl_parts(term, **arguments).pathwise_BT
        else:
            surrogate_BT = kl_surrogate(term, **arguments, baseline_BT=micro.baselines.get(position))
        parts[f"kl_{position}"] = beta * _weighted(surrogate_BT, experience.mask_BT, experience.weight_B)
    loss = torch.stack(list(parts.values())).sum()
    return MicroLoss(
        loss=loss,
        parts={name: part.detach() for name, part in parts.items()},
        policy=replace(policy, loss_BT=policy.loss_BT.detach()),
    )


def policy_parts(micro: MicroBatch, logp_BT: Tensor, algorithm: AlgorithmConfig) -> PolicyLossParts:
    """The policy term of a micro-batch, unreduced, with where its bounds and corrections acted."""
    experience = micro.experience
    return policy_term(
        PolicyTerm.of(algorithm),
        logp_BT=logp_BT,
        behaviour_logp_BT=experience.behaviour_logp_BT,
        advantage_BT=experience.advantage_BT,
        mask_BT=experience.mask_BT,
        proximal_logp_BT=micro.proximal_logp_BT,
    )


def _weighted(loss_BT: Tensor, mask_BT: Tensor, weight_B: Tensor) -> Tensor:
    return (weight_B * torch.where(mask_BT, loss_BT, 0.0).sum(-1)).sum()
