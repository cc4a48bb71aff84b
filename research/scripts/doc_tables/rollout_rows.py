"""What becomes of a rollout of several rows by the conventions in use: the gradient of each, by enumeration.

Dialogues with a tool, a row per turn of the policy, in groups of two that are an update each. The reward part has the
other completion's reward as its baseline, the KL is k1 in reward, to go; both have the ratios that make them unbiased
on stale samples. Each convention changes one thing, and is compared with the gradients of ``-E[R]`` and of the KL of
completions by direction: a factor on all rows is the learning rate's.

Legend: ``B`` completions, ``T`` tokens, ``R`` rows of a completion at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from doc_tables.directions import GROUP, direction_table, settings_of
from torch import Tensor

from kl_comedy.kl import KLTerm, kl_surrogate
from kl_comedy.kl.oracle import Tree, target_gradient
from kl_comedy.kl.oracle.certificate import dialogue_on
from kl_comedy.kl.oracle.enumeration import Loss, Rows
from kl_comedy.kl.oracle.gradients import exact_moments_by_loss
from kl_comedy.kl.oracle.policy_certificate import reward_gradient

TERM = KLTerm("k1", credit="to_go", correction="prefix")


@dataclass(frozen=True, kw_only=True)
class Convention:
    """What belongs to a row where it should belong to the rollout."""

    name: str
    kl: bool = False
    """Costs to go and prefix ratios of the KL end with their row."""
    ratio: bool = False
    """The importance ratio of the reward's part is that of the row."""
    mean: bool = False
    """The loss is the mean over rows, and not over rollouts."""
    group: bool = False
    """The baseline is the mean reward of all other rows of the group."""
    last: bool = False
    """Only the last row has the reward."""
    tokens: str = ""
    """Tokens are averaged: within each ``rollout`` or ``row``, or over the ``update``; empty: summed."""
    used: str = ""
    """Who does so, by code that was read: agent-lightning at c632d8dd (``verl/trainer.py``, ``per_rollout_loss.py``),
    SkyRL at a9564572 (``train/trainer.py``, ``ppo_utils.py``)."""


GROUP_OF_ROWS = "agent-lightning: `enable_rollout_level_advantage: false` (over all of the group's rows)"
STEP_WISE = "SkyRL: `step_wise_trajectories`"
CONVENTIONS = (
    Convention(name="all of the rollout"),
    Convention(name="the KL to go, and its ratios, end with their row", kl=True),
    Convention(name="importance ratio of the row", ratio=True),
    Convention(name="baseline over the group's other rows", group=True, used=GROUP_OF_ROWS),
    Convention(name="mean over rows", mean=True, used=f"{STEP_WISE}, `loss_reduction: seq_mean_token_sum_norm`"),
    Convention(name="rows as rollouts: the four above together", kl=True, ratio=True, group=True, mean=True),
    Convention(name="the reward at the last row only", last=True),
    Convention(name="mean over all tokens (of rows or of rollouts, the same)", tokens="update", used=STEP_WISE),
    Convention(name="mean over a rollout's tokens, then over rollouts", tokens="rollout"),
    Convention(
        name="mean over a rollout's tokens, then over the update's rows",
        tokens="rollout",
        mean=True,
        used="agent-lightning: default",
    ),
    Convention(
        name="mean over a row's tokens, then over rows",
        tokens="row",
        mean=True,
        used=f"{STEP_WISE}, `loss_reduction: sequence_mean`",
    ),
)


def row_masks(mask_BT: Tensor) -> list[Tensor]:
    """The tokens of each row ``[B, T]``: a turn of the policy, between two replies."""
    before_BT = torch.nn.functional.pad(mask_BT, (1, 0))[:, :-1]
    row_BT = (mask_BT & ~before_BT).cumsum(-1) - 1
    return [mask_BT & (row_BT == row) for row in range(int(row_BT.max()) + 1)]


def _of_group(values_B: Tensor) -> Tensor:
    """The sum over each completion's group, ``[B]``."""
    return values_B.reshape(-1, GROUP).sum(-1).repeat_interleave(GROUP)


def _weights(convention: Convention, mask_BT: Tensor, masks: list[Tensor]) -> Tensor:
    """The factor of each token, ``[B, T]``, over the mean over rollouts that the oracle takes."""
    # float64: a quotient of integers is float32.
    rows_B = torch.stack([mask.any(-1) for mask in masks]).sum(0).double()
    tokens_B = mask_BT.sum(-1).double()
    weight_BT = mask_BT.double()
    if convention.mean:
        weight_BT = weight_BT * (GROUP / _of_group(rows_B))[:, None]
    if convention.tokens == "rollout":
        weight_BT = weight_BT / tokens_B[:, None]
    elif convention.tokens == "update":
        weight_BT = weight_BT * (GROUP / _of_group(tokens_B))[:, None]
    elif convention.tokens == "row":
        of_rows = [weight_BT * mask / mask.sum(-1, keepdim=True).clamp(min=1) for mask in masks]
        weight_BT = torch.stack(of_rows).sum(0)
    return weight_BT


def kl_loss(convention: Convention) -> Loss:
    """The KL's part of an update."""

    def loss(rows: Rows, /) -> Tensor:
        masks = row_masks(rows.mask_BT)
        surrogate_BT = torch.zeros_like(rows.logp_BT)
        for mask_BT in masks if convention.kl else [rows.mask_BT]:
            surrogate_BT = surrogate_BT + kl_surrogate(
                TERM,
                logp_BT=rows.logp_BT,
                ref_logp_BT=rows.ref_logp_BT,
                behaviour_logp_BT=rows.behaviour_logp_BT,
                mask_BT=mask_BT,
            )
        return surrogate_BT * _weights(convention, rows.mask_BT, masks)

    return loss


def reward_loss(convention: Convention) -> Loss:
    """The reward's part of an update."""

    def loss(rows: Rows, /) -> Tensor:
        masks = row_masks(rows.mask_BT)
        rows_B = torch.stack([mask.any(-1) for mask in masks]).sum(0)
        delta_BT = torch.where(rows.mask_BT, rows.logp_BT - rows.behaviour_logp_BT, 0.0).detach()
        counts_B = rows_B if convention.group else torch.ones_like(rows_B)
        # Of rollouts the other one's reward; of rows all but one, its own rollout's others among them.
        others_B = (_of_group(counts_B * rows.reward_B) - rows.reward_B) / (_of_group(counts_B) - 1)
        loss_BT = torch.zeros_like(rows.logp_BT)
        for row, mask_BT in enumerate(masks):
            ratio_B = (torch.where(mask_BT, delta_BT, 0.0) if convention.ratio else delta_BT).sum(-1).exp()
            advantage_B = rows.reward_B - others_B
            if convention.last:
                advantage_B = torch.where(rows_B == row + 1, rows.reward_B, 0.0) - others_B
            loss_BT = loss_BT - torch.where(mask_BT, (ratio_B * advantage_B)[:, None] * rows.logp_BT, 0.0)
        return loss_BT * _weights(convention, rows.mask_BT, masks)

    return loss


PARTS_OF_A_LOSS: dict[str, Callable[[Convention], Loss]] = {"reward": reward_loss, "KL": kl_loss}


def cosines(regime: str, seed: int) -> dict[str, dict[str, float]]:
    """Of each convention's gradients with those of ``-E[R]`` and of the KL of completions, on one instance."""
    instance = dialogue_on(Tree.build(vocabulary=3, length=4), settings_of(regime, seed))
    targets = {"reward": reward_gradient(instance), "KL": target_gradient(instance, "sequence_reverse")}
    by_part = {}
    for part, loss_of in PARTS_OF_A_LOSS.items():
        losses = {convention.name: loss_of(convention) for convention in CONVENTIONS}
        moments_by_name = exact_moments_by_loss(instance, losses, group_size=GROUP)
        by_part[part] = {name: moments.cosine(targets[part]) for name, moments in moments_by_name.items()}
    return by_part


def conventions() -> str:
    return direction_table("convention", CONVENTIONS, cosines)


PARTS = {"conventions for rows": conventions}
