"""Baselines of the turns of a dialogue, and what becomes of the reward's gradient with each, by enumeration.

Dialogues with a tool that pays for turns, in groups of two that are an update each. The return of a turn is what is
paid from it on. Stale samples have the ratio of the whole completion, which is unbiased. Each gradient is compared with
that of ``-E[R]`` by direction: a factor on all tokens is the learning rate's.

Legend: ``B`` completions, ``T`` tokens, ``N`` prefixes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from doc_tables.directions import GROUP, direction_table, settings_of
from torch import Tensor

from kl_comedy.kl.oracle import Tree
from kl_comedy.kl.oracle.algorithm_context import policy_loss, turn_numbers
from kl_comedy.kl.oracle.certificate import dialogue_on
from kl_comedy.kl.oracle.enumeration import Instance, Loss, Rows
from kl_comedy.kl.oracle.gradients import exact_moments_by_loss
from kl_comedy.kl.oracle.policy_certificate import reward_gradient
from kl_comedy.objective.advantages import by_turn
from kl_comedy.objective.policy_term import PolicyTerm
from kl_comedy.objective.reduction import returns_with_costs
from kl_comedy.registry import ADVANTAGES

TERM = PolicyTerm(corrections={"sequence": {}})

Baseline = Callable[[Rows, Tensor, Tensor], Tensor]
"""From rows, their returns and the exact value of the prefix before each token to advantages; all ``[B, T]``."""


def of_turns(name: str, *, alone: float = 1.0) -> Baseline:
    """A registered advantage with ``environment.credit: turn``. ``alone``: factor of turns that no other reached."""

    def advantage(rows: Rows, returns_BT: Tensor, values_BT: Tensor) -> Tensor:
        turn_BT = turn_numbers(rows.mask_BT)
        advantage_BT = by_turn(ADVANTAGES.get(name).fn, returns_BT, rows.mask_BT, rows.group_B, turn_BT)
        turns_B = 1 + torch.where(rows.mask_BT, turn_BT, 0).max(-1).values
        fewest_B = turns_B.reshape(-1, GROUP).min(-1).values.repeat_interleave(GROUP)
        return torch.where(turn_BT < fewest_B[:, None], advantage_BT, alone * advantage_BT)

    return advantage


def pooled(rows: Rows, returns_BT: Tensor, values_BT: Tensor) -> Tensor:
    """Less the mean return of all turns of the group."""
    first_BT = _at_turns(rows.mask_BT, first=True)
    sums_B = torch.where(first_BT, returns_BT, 0.0).sum(-1).reshape(-1, GROUP).sum(-1)
    counts_B = first_BT.sum(-1).reshape(-1, GROUP).sum(-1)
    return returns_BT - (sums_B / counts_B).repeat_interleave(GROUP)[:, None]


def value_at(*, first: bool) -> Baseline:
    """Less the exact value before the first, or the last, token of the turn."""

    def advantage(rows: Rows, returns_BT: Tensor, values_BT: Tensor) -> Tensor:
        turn_BT = turn_numbers(rows.mask_BT)
        turns = int(turn_BT.max()) + 1
        at_BT = _at_turns(rows.mask_BT, first=first)
        value_BK = values_BT.new_zeros(len(values_BT), turns)
        value_BK.scatter_add_(1, turn_BT, torch.where(at_BT, values_BT, 0.0))
        return returns_BT - value_BK.gather(1, turn_BT)

    return advantage


def _at_turns(mask_BT: Tensor, *, first: bool) -> Tensor:
    """The first, or the last, token of each turn."""
    neighbour_BT = torch.nn.functional.pad(mask_BT, (1, 0))[:, :-1]
    if not first:
        neighbour_BT = torch.nn.functional.pad(mask_BT, (0, 1))[:, 1:]
    return mask_BT & ~neighbour_BT


@dataclass(frozen=True, kw_only=True)
class Convention:
    """What is subtracted from the return of a turn, and who does so (lines: results/register/README.md)."""

    name: str
    advantage: Baseline
    used: str = ""


def _value_at_each(rows: Rows, returns_BT: Tensor, values_BT: Tensor) -> Tensor:
    return returns_BT - values_BT


def _nothing(rows: Rows, returns_BT: Tensor, values_BT: Tensor) -> Tensor:
    return returns_BT


CONVENTIONS = (
    Convention(name="nothing", advantage=_nothing, used="here: `none`"),
    Convention(name="the mean of the group's others at the same turn", advantage=of_turns("rloo"), used="here: `rloo`"),
    Convention(
        name="the value before the turn's first token", advantage=value_at(first=True), used="VAGEN: `no_concat_gae`"
    ),
    Convention(
        name="the value before each token", advantage=_value_at_each, used="here: `gae` with gamma and lambda 1"
    ),
    Convention(
        name="the mean of the group at the same turn, its own return in it",
        advantage=of_turns("dr_grpo"),
        used="here: `dr_grpo`",
    ),
    Convention(name="the same, over the deviation", advantage=of_turns("grpo"), used="here: `grpo`"),
    Convention(
        name="the mean of the others at the same turn; 0 where there is none", advantage=of_turns("rloo", alone=0.0)
    ),
    Convention(name="the mean over all turns of the group", advantage=pooled),
    Convention(
        name="the value before the turn's last token, for the whole turn",
        advantage=value_at(first=False),
        used="VAGEN: `no_concat_gae_last`",
    ),
)


def values(instance: Instance) -> Tensor:
    """What the sampler's dialogues earn from each prefix on, ``[N]``."""
    completions = instance.tree.all
    rows = instance.rows(completions)
    weight_BT = torch.where(rows.mask_BT, instance.probability(completions)[:, None], 0.0)
    sums_N = torch.zeros(instance.tree.prefixes, dtype=torch.float64)
    weights_N = torch.zeros_like(sums_N)
    prefix_M = completions.prefix_BT[rows.mask_BT]
    sums_N.index_add_(0, prefix_M, (weight_BT * returns(rows))[rows.mask_BT])
    weights_N.index_add_(0, prefix_M, weight_BT[rows.mask_BT])
    return torch.where(weights_N > 0, sums_N / weights_N, 0.0)


def returns(rows: Rows) -> Tensor:
    """What is paid from each token's turn on, ``[B, T]``."""
    return returns_with_costs(rows.reward_B, None, rows.mask_BT.shape[1], paid_BT=rows.paid_BT)


def turn_loss(convention: Convention, instance: Instance) -> Loss:
    """The reward's part of an update."""
    value_N = values(instance)

    def loss(rows: Rows, /) -> Tensor:
        # Rows have no numbers of prefixes; a completion's tokens lead to them.
        values_BT = torch.where(rows.mask_BT, value_N[prefixes(instance, rows)], 0.0)
        advantage_BT = convention.advantage(rows, returns(rows), values_BT)
        return policy_loss(TERM, rows, torch.where(rows.mask_BT, advantage_BT, 0.0))

    return loss


def prefixes(instance: Instance, rows: Rows) -> Tensor:
    """The number of the prefix before each token, ``[B, T]``; of no meaning beyond the end."""
    tree = instance.tree
    assert rows.token_BT is not None
    lowest_token = tree.vocabulary - tree.branching
    columns = [torch.zeros(len(rows.token_BT), dtype=torch.long)]
    for depth in range(tree.length - 1):
        digit_B = (rows.token_BT[:, depth] - lowest_token).clamp(min=0)
        children_B = tree.branching * (columns[-1] - tree.first(depth)) + digit_B
        columns.append(tree.first(depth + 1) + children_B)
    return torch.stack(columns, 1)


def instance_of(regime: str, seed: int, *, length: int = 4) -> Instance:
    """A dialogue whose tool pays for turns."""
    return dialogue_on(Tree.build(vocabulary=3, length=length), settings_of(regime, seed))


def cosines(regime: str, seed: int) -> dict[str, dict[str, float]]:
    """Of each convention's gradient with that of ``-E[R]``, on one instance."""
    instance = instance_of(regime, seed)
    target_D = reward_gradient(instance)
    losses = {convention.name: turn_loss(convention, instance) for convention in CONVENTIONS}
    moments_by_name = exact_moments_by_loss(instance, losses, group_size=GROUP)
    return {"": {name: moments.cosine(target_D) for name, moments in moments_by_name.items()}}


def baselines() -> str:
    return direction_table("subtracted from the return of a turn", CONVENTIONS, cosines)


PARTS = {"baselines by turn": baselines}
