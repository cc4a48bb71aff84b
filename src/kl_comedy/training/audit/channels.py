"""The scalar losses whose gradients are audited, over one micro-batch.

Each is a mean over completions of a sum over tokens, under the run's own sequence weights. They are written with
:func:`kl_surrogate` and the policy loss directly, not through the training step, so that the check of beta compares
two independent roads.

Legend: ``B`` sequences, ``T`` completion tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_comedy.config import AlgorithmConfig
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm, kl_parts, kl_surrogate
from kl_comedy.models.logprobs import TokenPass
from kl_comedy.training.losses import policy_parts
from kl_comedy.training.prepare import MicroBatch


def reference_term(reference: str, *, on_policy: bool, group_size: int) -> KLTerm:
    """The term whose gradient others are measured against: unbiased for the sequence KL, low in variance.

    The exact KL of each prefix with future credit (2506.09477), off-policy times the ratio of the tokens before,
    less the leave-one-out mean over the group where there is a group.
    """
    return KLTerm(
        "exact", placement="reward", credit="to_go", reference=reference,
        correction="none" if on_policy else "prefix_previous", baseline="own" if group_size > 1 else "after",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Channel:
    """One gradient: the policy loss where ``term`` is None, else the term at beta = 1.

    A term before the baseline exists only through the advantage: its loss is the policy loss with the cost, less the
    policy loss without, over ``beta`` (at the coefficient in force, for advantages are not linear in it).
    """

    name: str
    term: KLTerm | None
    beta: float = 1.0

    @property
    def sees_the_update(self) -> bool:
        """Whether the term is prepared over all rows: a cost before the baseline, or a baseline of its own."""
        return self.term is not None and self.term.baseline in ("before", "own")


def channel_loss(
    channel: Channel, micro: MicroBatch, with_term: MicroBatch | None, passes: Mapping[str, TokenPass],
    algorithm: AlgorithmConfig,
) -> Tensor:  # fmt: skip
    """The channel's loss over one micro-batch. ``with_term`` is the same, prepared with the channel's term alone."""
    experience = micro.experience
    if channel.term is None:
        return _weighted(_policy_loss(micro, passes, algorithm), micro)
    term = channel.term
    if term.reference not in ("sampler", *micro.references):
        raise UserError(
            f"audit: {term.label()} is measured against the {term.reference} reference, which this config does not "
            "keep; give the config a term that names it"
        )
    seen = passes["initial" if term.reference == "sampler" else term.reference]
    arguments: dict[str, Any] = {
        "logp_BT": passes["initial"].logp_BT,
        "ref_logp_BT": micro.reference_of(term).logp_BT,
        "behaviour_logp_BT": experience.behaviour_logp_BT,
        "mask_BT": experience.mask_BT,
        "exact_kl_BT": seen.forward_kl_BT if term.needs == "exact_forward" else seen.kl_BT,
    }
    if term.baseline != "before":
        baseline_BT = None if with_term is None else with_term.baselines.get(0)
        return _weighted(kl_surrogate(term, **arguments, baseline_BT=baseline_BT), micro)
    assert with_term is not None
    change_BT = _policy_loss(with_term, passes, algorithm) - _policy_loss(micro, passes, algorithm)
    return _weighted(change_BT / channel.beta + kl_parts(term, **arguments).pathwise_BT, micro)


def _policy_loss(micro: MicroBatch, passes: Mapping[str, TokenPass], algorithm: AlgorithmConfig) -> Tensor:
    return policy_parts(micro, passes["initial"].logp_BT, algorithm).loss_BT


def _weighted(loss_BT: Tensor, micro: MicroBatch) -> Tensor:
    inside_BT = torch.where(micro.experience.mask_BT, loss_BT, 0.0)
    return (micro.experience.weight_B * inside_BT.sum(-1)).sum()
