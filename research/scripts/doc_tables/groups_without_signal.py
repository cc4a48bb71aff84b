"""What becomes of the gradients where groups without signal are left out or replaced, by enumeration.

Two prompts that are equally frequent: the completions and their probabilities are the same, the rewards are not. Groups
of two; their baseline is the other's reward, the KL is k1 in reward, to go; both have the ratios that make them
unbiased on stale samples. Of prompt x, ``all_D`` is the expected gradient of a group, ``signal_D`` what groups with a
signal add to it, and ``share`` how many these are. Each selection is a sum of these. It is compared by direction with
the mean over the prompts of the gradients of ``-E[R]`` and of the KL of completions: a factor on everything is the
learning rate's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from doc_tables.directions import GROUP, direction_table, settings_of
from torch import Tensor

from kl_comedy.kl import KLTerm, kl_surrogate
from kl_comedy.kl.oracle import Tree, target_gradient
from kl_comedy.kl.oracle.algorithm_context import has_signal, policy_loss, signal_share
from kl_comedy.kl.oracle.enumeration import Instance, Loss, Rows
from kl_comedy.kl.oracle.gradients import exact_moments_by_loss, term_arguments
from kl_comedy.kl.oracle.policy_certificate import reward_gradient
from kl_comedy.objective.policy_term import PolicyTerm
from kl_comedy.registry import ADVANTAGES

POLICY_TERM = PolicyTerm(corrections={"sequence": {}})
KL_TERM = KLTerm("k1", credit="to_go", correction="prefix")


@dataclass(frozen=True, kw_only=True)
class PromptGradients:
    """The gradients of one prompt's groups."""

    all_D: Tensor
    signal_D: Tensor
    share: float


Selection = Callable[[PromptGradients, PromptGradients], Tensor]
"""The expected gradient of an update, from those of the two prompts."""


def kept(first: PromptGradients, second: PromptGradients) -> Tensor:
    """Every group."""
    return (first.all_D + second.all_D) / 2


def next_prompts(first: PromptGradients, second: PromptGradients) -> Tensor:
    """A place is drawn again, each time of a prompt at random, until its group has a signal.

    The sum over ``n`` of what the n-th draw adds, ``mean(signal_D) (1 - mean(share)) ** n``. An update of groups that
    were drawn once, of prompts at random, from which those without signal are left out, has the same direction: its
    groups are drawn alike and independently, and the mean over any number of them, other than none, is this one.
    """
    return (first.signal_D + second.signal_D) / (first.share + second.share)


def the_same_prompt(first: PromptGradients, second: PromptGradients) -> Tensor:
    """A place is drawn again of its own prompt, until its group has a signal."""
    return (first.signal_D / first.share + second.signal_D / second.share) / 2


def one_of_each(first: PromptGradients, second: PromptGradients) -> Tensor:
    """The mean over the groups with signal, of two: one of each prompt. It is alone where the other has none."""
    first_D = first.signal_D * (second.share / 2 + 1 - second.share)
    second_D = second.signal_D * (first.share / 2 + 1 - first.share)
    return first_D + second_D


@dataclass(frozen=True, kw_only=True)
class Convention:
    """What is done with groups without signal, and who does so."""

    name: str
    select: Selection
    advantage: str = "rloo"
    used: str = ""


REFILLED = (
    "here: `refill`; DAPO (verl's recipe: `filter_groups`), slime: `check_reward_nonzero_std`, SkyRL: "
    "`dynamic_sampling.type: filter`, open-instruct: `active_sampling`"
)
SHRUNK = (
    "here: `shrink`; tinker-cookbook: `remove_constant_reward_groups`, open-instruct: `filter_zero_std_samples` alone"
)
CONVENTIONS = (
    Convention(name="kept", select=kept, used="here: `keep`"),
    Convention(name="replaced by groups of the next prompts", select=next_prompts, used=REFILLED),
    Convention(name="left out of an update with prompts at random", select=next_prompts, used=SHRUNK),
    Convention(name="left out of an update with a group of each prompt", select=one_of_each, used="with few prompts"),
    Convention(name="replaced by groups of the same prompt", select=the_same_prompt),
    Convention(
        name="replaced by the next prompts, and no baseline is subtracted", select=next_prompts, advantage="none"
    ),
)


def _reward_loss(advantage: str) -> Loss:
    estimator = ADVANTAGES.get(advantage).fn

    def loss(rows: Rows, /) -> Tensor:
        returns_BT = rows.reward_B[:, None].expand(rows.mask_BT.shape)
        return policy_loss(POLICY_TERM, rows, estimator(returns_BT, rows.mask_BT, rows.group_B))

    return loss


def _kl_loss(rows: Rows, /) -> Tensor:
    return kl_surrogate(KL_TERM, **term_arguments(KL_TERM, rows))


def _of_signal(loss: Loss) -> Loss:
    """The loss, 0 in groups without signal."""

    def selected(rows: Rows, /) -> Tensor:
        return torch.where(has_signal(rows)[:, None], loss(rows), 0.0)

    return selected


def prompts_of(regime: str, seed: int, *, length: int = 3) -> tuple[Instance, Instance]:
    """Two prompts; the second is the harder one: it has a reward where the first has one, and only half as often."""
    first = Instance.random(Tree.build(vocabulary=3, length=length), settings_of(regime, seed))
    generator = torch.Generator().manual_seed(seed)
    solved_N2 = torch.rand(first.reward_N2.shape, generator=generator, dtype=torch.float64).round()
    return first, dataclasses.replace(first, reward_N2=first.reward_N2 * solved_N2)


def gradients_of(instance: Instance, advantage: str) -> dict[str, PromptGradients]:
    """The gradients of one prompt's groups, of the reward's part of the loss and of the KL's."""
    parts = {"reward": _reward_loss(advantage), "KL": _kl_loss}
    losses = parts | {f"{name} of signal": _of_signal(loss) for name, loss in parts.items()}
    moments = exact_moments_by_loss(instance, losses, group_size=GROUP)
    share = signal_share(instance, GROUP)
    return {
        name: PromptGradients(
            all_D=moments[name].gradient_D, signal_D=moments[f"{name} of signal"].gradient_D, share=share
        )
        for name in parts
    }


def targets_of(prompts: Sequence[Instance]) -> dict[str, Tensor]:
    """What each part should be: the means over the prompts."""
    return {
        "reward": torch.stack([reward_gradient(prompt) for prompt in prompts]).mean(0),
        "KL": torch.stack([target_gradient(prompt, "sequence_reverse") for prompt in prompts]).mean(0),
    }


def selected(convention: Convention, prompts: tuple[Instance, Instance]) -> dict[str, Tensor]:
    """The expected gradient of each part of the loss."""
    first, second = (gradients_of(prompt, convention.advantage) for prompt in prompts)
    return {part: convention.select(first[part], second[part]) for part in first}


def cosines(regime: str, seed: int) -> dict[str, dict[str, float]]:
    """Of each selection's gradients with their targets, on two prompts."""
    prompts = prompts_of(regime, seed)
    by_part: dict[str, dict[str, float]] = {part: {} for part in ("reward", "KL")}
    targets = targets_of(prompts)
    for convention in CONVENTIONS:
        for part, gradient_D in selected(convention, prompts).items():
            by_part[part][convention.name] = float(torch.cosine_similarity(gradient_D, targets[part], dim=0))
    return by_part


def selections() -> str:
    return direction_table("groups without signal are", CONVENTIONS, cosines)


PARTS = {"groups without signal": selections}
