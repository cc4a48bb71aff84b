"""The loss of one micro-batch: the policy loss and every KL term, under one set of sequence weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kl_comedy.config import AlgorithmConfig
from kl_comedy.kl import KLTerm, kl_parts, kl_surrogate
from kl_comedy.models.logprobs import TokenPass
from kl_comedy.objective.policy_term import PolicyLossParts, PolicyTerm, policy_term
from kl_comedy.training.prepare import MicroBatch


def micro_loss(
    micro: MicroBatch,
    passes: Mapping[str, TokenPass],
    *,
    terms: Sequence[KLTerm],
    betas: Sequence[float],
    algorithm: AlgorithmConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's share of the update's loss, and the detached share of each part.

    ``passes`` holds the policy pass per reference name (the log-probs are the same in each). A term
    before the baseline is inside the advantage already; what is left of it here is its path-wise part.
    """
    experience = micro.experience
    logp_BT = passes["initial"].logp_BT
    policy_BT = policy_parts(micro, logp_BT, algorithm).loss_BT
    parts = {"policy": _weighted(policy_BT, experience.mask_BT, experience.weight_B)}
    for position, (term, beta) in enumerate(zip(terms, betas, strict=True)):
        seen = passes.get(term.reference, passes["initial"])  # a pass of its own only where it needs exact KL
        arguments = {
            "logp_BT": logp_BT,
            "ref_logp_BT": micro.reference_of(term).logp_BT,
            "behaviour_logp_BT": experience.behaviour_logp_BT,
            "mask_BT": experience.mask_BT,
            "exact_kl_BT": seen.forward_kl_BT if term.needs == "exact_forward" else seen.kl_BT,
        }
        if term.baseline == "before":
            surrogate_BT = kl_parts(term, **arguments).pathwise_BT
        else:
            surrogate_BT = kl_surrogate(term, **arguments, baseline_BT=micro.baselines.get(position))
        parts[f"kl_{position}"] = beta * _weighted(surrogate_BT, experience.mask_BT, experience.weight_B)
    loss = torch.stack(list(parts.values())).sum()
    return loss, {name: part.detach() for name, part in parts.items()}


def policy_parts(micro: MicroBatch, logp_BT: Tensor, algorithm: AlgorithmConfig) -> PolicyLossParts:
    """The policy term over a micro-batch, unreduced, with what its bounds and corrections did."""
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
    inside_BT = torch.where(mask_BT, loss_BT, torch.zeros_like(loss_BT))
    return (weight_B * inside_BT.sum(-1)).sum()
