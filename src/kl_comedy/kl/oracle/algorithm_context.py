"""What is left of the KL terms within an algorithm: rewards, group baselines, normalization, clipping, dropped rows.

The policy loss and the terms are combined as in training. The result is not linear in beta, so the KL part is a
difference quotient: ``(gradient(beta) - gradient(0)) / beta``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import kl_comedy.objective  # noqa: F401  (registers the built-ins)
from kl_comedy.errors import UserError
from kl_comedy.kl.oracle.certificate import dialogue_on
from kl_comedy.kl.oracle.enumeration import Instance, InstanceSettings, Loss, Rows, Tree
from kl_comedy.kl.oracle.gradients import (
    Moments,
    exact_moments_by_loss,
    initial_beta,
    target_gradient,
    term_arguments,
    term_surrogate,
)
from kl_comedy.kl.surrogate import kl_parts
from kl_comedy.kl.term import KLTerm
from kl_comedy.objective.advantages import by_turn
from kl_comedy.objective.policy_term import PolicyTerm, policy_term
from kl_comedy.objective.reduction import returns_with_costs, sequence_weights
from kl_comedy.registry import ADVANTAGES


@dataclass(frozen=True, kw_only=True)
class AlgorithmContext:
    """The algorithm around the terms; the defaults are a plain REINFORCE without a baseline."""

    advantage: str = "none"
    policy_loss: str = "reinforce"
    policy_loss_options: Mapping[str, float] = field(default_factory=dict)
    correction: Mapping[str, Any] = field(default_factory=dict)
    proximal: str = "behaviour"
    group_size: int = 1
    """Completions that share a prompt; for an advantage over the batch, the completions of the batch."""
    reduction: str = "sequence_sum"
    """How a batch becomes a loss; ``sequence_sum`` leaves the objective as it is."""
    drop_truncated: bool = False
    """Whether truncated completions have no loss."""
    reward_scale: float = 1.0
    signal_only: bool = False
    """Whether groups whose rewards are all equal are left out: the result is that of a group which has a signal."""
    credit: str = "dialogue"
    """With ``turn`` a token's return is less what an environment paid for earlier turns, and groups compare turns."""


def training_loss(terms: Sequence[KLTerm], context: AlgorithmContext, *, scale: float = 1.0) -> Loss:
    """The loss of one update as training computes it, with every beta times ``scale``."""
    spec = PolicyTerm(
        loss=context.policy_loss,
        options=context.policy_loss_options,
        corrections=context.correction,
        proximal=context.proximal,
    )

    def loss(rows: Rows, /) -> Tensor:
        # As in training: a cost before the baseline is taken from the reward, everything else is a loss beside it.
        cost_BT = torch.zeros_like(rows.ref_logp_BT)
        losses_BT = []
        for term in terms:
            beta = scale * initial_beta(term)
            if term.baseline == "before":
                parts = kl_parts(term, **term_arguments(term, rows))
                cost_BT = cost_BT + beta * parts.cost_BT.detach()
                losses_BT.append(beta * parts.pathwise_BT)
            else:
                losses_BT.append(beta * term_surrogate(term, rows))
        paid_BT = None
        if context.credit == "turn" and rows.paid_BT is not None:
            paid_BT = context.reward_scale * rows.paid_BT
        length = rows.mask_BT.shape[1]
        returns_BT = returns_with_costs(context.reward_scale * rows.reward_B, cost_BT, length, paid_BT=paid_BT)
        # Detached as in training: an advantage weights the score and is not differentiated.
        advantage_BT = _advantage(context, returns_BT, rows).detach()
        total_BT = policy_loss(spec, rows, advantage_BT)
        for loss_BT in losses_BT:
            total_BT = total_BT + loss_BT
        if context.signal_only:
            total_BT = torch.where(has_signal(rows)[:, None], total_BT, 0.0)
        return _reduced(torch.where(rows.mask_BT, total_BT, 0.0), rows, context)

    return loss


def has_signal(rows: Rows) -> Tensor:
    """Whether the rewards of a row's group are not all equal, ``[B]``. Groups are equally large, and follow each other.

    The sampler's choice: nothing is differentiated.
    """
    groups = int(rows.group_B.max()) + 1
    reward_CG = rows.reward_B.reshape(groups, -1)
    differs_C = (reward_CG != reward_CG[:, :1]).any(-1)
    return differs_C.repeat_interleave(reward_CG.shape[1])


def signal_share(instance: Instance, group_size: int) -> float:
    """The probability that the sampler draws a group whose rewards are not all equal."""
    probability_of: dict[float, float] = {}
    completions = instance.tree.all
    rewards = instance.rows(completions).reward_B.tolist()
    for reward, probability in zip(rewards, instance.probability(completions).tolist(), strict=True):
        probability_of[reward] = probability_of.get(reward, 0.0) + probability
    return 1.0 - sum(probability**group_size for probability in probability_of.values())


def given_signal(moments: Moments, share: float, group_size: int) -> Moments:
    """The moments of a group that has a signal, from those of a loss that is 0 in the others; ``share``: of groups."""
    mean_square = moments.variance / group_size + float(moments.gradient_D.square().sum())
    gradient_D = moments.gradient_D / share
    variance = mean_square / share - float(gradient_D.square().sum())
    return Moments(gradient_D=gradient_D, variance=max(variance, 0.0) * group_size, mean_norm=moments.mean_norm / share)


def policy_loss(spec: PolicyTerm, rows: Rows, advantage_BT: Tensor) -> Tensor:
    """The policy term on rows, ``[B, T]``; at a first update the recomputed policy is the current one."""
    proximal_logp_BT = rows.proximal_logp_BT
    if proximal_logp_BT is None:
        proximal_logp_BT = rows.logp_BT.detach()
    return policy_term(
        spec,
        logp_BT=rows.logp_BT,
        behaviour_logp_BT=rows.behaviour_logp_BT,
        advantage_BT=advantage_BT,
        mask_BT=rows.mask_BT,
        proximal_logp_BT=proximal_logp_BT,
    ).loss_BT


def kl_effect(instance: Instance, terms: Sequence[KLTerm], context: AlgorithmContext) -> Moments:
    """What the terms add to the expected gradient of the whole loss, per unit of their betas.

    The variance is that of the whole loss's gradient, reward part included, over the square of beta.
    """
    beta = max((initial_beta(term) for term in terms), default=1.0)
    if beta == 0:
        beta = 1.0  # nothing to divide by: the terms add nothing
    losses = {
        "with terms": training_loss(terms, context, scale=1.0),
        "without": training_loss(terms, context, scale=0.0),
    }
    moments = exact_moments_by_loss(instance, losses, group_size=context.group_size)
    if context.signal_only:
        share = signal_share(instance, context.group_size)
        moments = {name: given_signal(of_loss, share, context.group_size) for name, of_loss in moments.items()}
    # The loss is linear in beta only without a cost before the baseline, so the quotient is taken at the terms' betas.
    whole = moments["with terms"]
    gradient_D = (whole.gradient_D - moments["without"].gradient_D) / beta
    return Moments(gradient_D=gradient_D, variance=whole.variance / beta**2, mean_norm=whole.mean_norm / beta)


def group_effect(instance: Instance, terms: Sequence[KLTerm], context: AlgorithmContext) -> tuple[Moments, int]:
    """:func:`kl_effect` and the size of the groups that it is of.

    Groups up to :data:`LARGEST_GROUP` are enumerated. Where a loss is linear in an advantage ``R - mean of the group``,
    the expected gradient is ``A + B / G``: the mean contains the completion's own return with weight ``1 / G``, and
    what the others returned has no part in it. Two sizes give A and B. A third says whether the loss is of this kind:
    with a group of one; where the advantage has none (leave-one-out), B must be 0. Otherwise (a division by the
    standard deviation, a clip) the result is that of the largest group which is enumerated. The variance of a larger
    group is not known: it is that of the largest enumerated one.
    """
    size = context.group_size
    largest = kl_effect(instance, terms, dataclasses.replace(context, group_size=min(size, LARGEST_GROUP)))
    # Whether a group has a signal depends on all of its completions, in no way that is linear in 1 / G.
    if size <= LARGEST_GROUP or context.signal_only:
        return largest, min(size, LARGEST_GROUP)
    smaller = kl_effect(instance, terms, dataclasses.replace(context, group_size=LARGEST_GROUP - 1))
    # A + B / (n - 1) less A + B / n is B / (n (n - 1)).
    by_size_D = (smaller.gradient_D - largest.gradient_D) * LARGEST_GROUP * (LARGEST_GROUP - 1)
    limit_D = largest.gradient_D - by_size_D / LARGEST_GROUP
    try:
        single_D = kl_effect(instance, terms, dataclasses.replace(context, group_size=1)).gradient_D
    except UserError:
        # The advantage has no meaning within a group of one.
        predicted_D, enumerated_D = largest.gradient_D, smaller.gradient_D
    else:
        predicted_D, enumerated_D = limit_D + by_size_D, single_D
    difference = float((predicted_D - enumerated_D).norm())
    if difference > AGREEMENT * float(largest.gradient_D.norm()):
        return largest, LARGEST_GROUP
    gradient_D = limit_D + by_size_D / size
    return dataclasses.replace(largest, gradient_D=gradient_D), size


def _advantage(context: AlgorithmContext, returns_BT: Tensor, rows: Rows) -> Tensor:
    """Advantages; one that normalizes over the batch sees each group as a batch of its own."""
    entry = ADVANTAGES.get(context.advantage)
    if context.credit == "turn" and entry.facts["group"]:
        return by_turn(entry.fn, returns_BT, rows.mask_BT, rows.group_B, turn_numbers(rows.mask_BT))
    # A group's mean is the same among other groups; the batch's is not, and here each group is a batch of its own.
    if not entry.facts.get("batch"):
        return torch.as_tensor(entry.fn(returns_BT, rows.mask_BT, rows.group_B))
    size = context.group_size
    groups = zip(
        torch.split(returns_BT, size), torch.split(rows.mask_BT, size), torch.split(rows.group_B, size), strict=True
    )
    advantages = [entry.fn(returns_GT, mask_GT, group_G) for returns_GT, mask_GT, group_G in groups]
    return torch.cat(advantages)


def turn_numbers(mask_BT: Tensor) -> Tensor:
    """The number of each token's turn, ``[B, T]``: what an environment writes is of the turn after it."""
    next_BT = torch.nn.functional.pad(mask_BT, (0, 1))[:, 1:]
    is_end_BT = (mask_BT & ~next_BT).long()
    return is_end_BT.cumsum(-1) - is_end_BT


def _reduced(loss_BT: Tensor, rows: Rows, context: AlgorithmContext) -> Tensor:
    """Each group reduced on its own, as a batch of one group would be; the group's mean is taken later."""
    if context.reduction == "sequence_sum" and not context.drop_truncated:
        return loss_BT  # every completion counts once, whatever its length
    size = context.group_size
    keep_B = torch.ones_like(rows.truncated_B)
    if context.drop_truncated:
        keep_B = ~rows.truncated_B
    weights = []
    for mask_GT, keep_G in zip(torch.split(rows.mask_BT, size), torch.split(keep_B, size), strict=True):
        weights.append(sequence_weights(context.reduction, mask_GT, keep_B=keep_G))
    # The weights are shares of a batch of ``size``; the mean over the group, which is taken later, divides by it again.
    return loss_BT * (torch.cat(weights).double() * size)[:, None]


TREE = Tree.build(vocabulary=3, length=3)
SEEDS = (0, 1)
SHARED = 6
LARGEST_GROUP = 3
"""Groups beyond this are not enumerated: their number is that of completions to the power of the group's size."""
AGREEMENT = 1e-8
"""Relative difference up to which two gradients are one."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The KL part of a whole loss against the sequence-level reverse KL, in one regime.

    ``around`` names the algorithm. ``strength`` is the effective beta for a beta of 1: the multiple of the
    sequence-level reverse-KL gradient that the algorithm passes on. It is what makes betas comparable between
    placements.
    """

    name: str
    around: str
    regime: str
    strength: float
    relative_bias: float
    cosine: float

    def row(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


def effects(
    name: str,
    terms: Sequence[KLTerm],
    context: AlgorithmContext,
    *,
    regimes: Sequence[str] = ("on_policy", "off_policy"),
) -> list[Effect]:
    """One row per regime, for groups of ``context.group_size`` completions of a small tree: :func:`group_effect`."""
    around = f"{context.advantage}, {context.policy_loss}, {context.reduction}, groups of "
    ending = ""
    if context.drop_truncated:
        ending = ", truncated dropped"
    if context.signal_only:
        ending += ", of groups with signal"
    rows = []
    for regime in regimes:
        figures = []
        sizes = []
        for seed in SEEDS:
            settings = InstanceSettings(regime=regime, seed=seed, parameters=SHARED)
            instance = Instance.random(TREE, settings)
            if context.credit == "turn":
                instance = dialogue_on(TREE, settings)
            target_D = target_gradient(instance, "sequence_reverse")
            moments, size = group_effect(instance, terms, context)
            figures.append(moments.figures(target_D))
            sizes.append(size)
        means = {}
        for name_of_figure in ("relative_bias", "cosine", "strength"):
            means[name_of_figure] = sum(by_seed[name_of_figure] for by_seed in figures) / len(figures)
        groups = str(min(sizes))
        if min(sizes) < context.group_size:
            groups += f" ({context.group_size} are too many to enumerate)"
        rows.append(Effect(name=name, around=f"{around}{groups}{ending}", regime=regime, **means))
    return rows
