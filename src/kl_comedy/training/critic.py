"""The value head of PPO: linear on the last hidden state, and its loss.

Legend: ``B`` sequences, ``T`` completion tokens, ``N`` tokens inside the mask, ``H`` hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kl_comedy.config.schema import AlgorithmConfig, ValueConfig
from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl import KLTerm
from kl_comedy.objective import PolicyTerm, check_policy_term, value_loss
from kl_comedy.registry import ADVANTAGES

if TYPE_CHECKING:
    from kl_comedy.models import LoadedModel
    from kl_comedy.training.prepare import MicroBatch


class ValueHead(nn.Module):
    """``V = w . hidden + b`` in float32, zero at the start: the first advantages are the returns to go."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_NH: Tensor, mask_BT: Tensor) -> Tensor:
        """The value of the prefix before each completion token, ``[B, T]``, zero outside the mask."""
        with torch.autocast(device_type=hidden_NH.device.type, enabled=False):
            value_N = self.linear(hidden_NH.float())[:, 0]
        return torch.zeros(mask_BT.shape, dtype=value_N.dtype, device=value_N.device).masked_scatter(mask_BT, value_N)


@dataclass(frozen=True, kw_only=True)
class ValueTargets:
    """The values at the batch's first use, and the lambda returns that values are trained towards."""

    old_value_BT: Tensor
    target_BT: Tensor

    def part(self, index_B: Tensor, width: int) -> ValueTargets:
        """These rows, cut at ``width`` tokens."""
        return ValueTargets(old_value_BT=self.old_value_BT[index_B, :width], target_BT=self.target_BT[index_B, :width])


def uses_critic(algorithm: AlgorithmConfig) -> bool:
    """Whether the advantage needs a value function."""
    return bool(ADVANTAGES.get(algorithm.advantage, key="algorithm.advantage").facts.get("critic"))


def check_algorithm(algorithm: AlgorithmConfig, terms: Sequence[KLTerm]) -> None:
    """Raise :class:`UserError` for names, options and combinations of policy term and critic that cannot work."""
    check_policy_term(PolicyTerm.of(algorithm))
    if not uses_critic(algorithm):
        if algorithm.value != ValueConfig():
            raise UserError(
                f"algorithm.value: {algorithm.advantage} has no value function, so these settings would do nothing; "
                "remove them or set algorithm.advantage=gae"
            )
        return
    for position, term in enumerate(terms):
        if term.baseline == "before" and term.credit == "own":
            raise bad_value(
                f"kl.{position}.credit", "own", "to_go or total", "gae itself gives later costs to earlier tokens"
            )


def value_head_for(loaded: LoadedModel) -> ValueHead:
    """A new value head as wide as the model's hidden states."""
    settings: Any = loaded.model.config
    return ValueHead(int(settings.get_text_config().hidden_size), loaded.device)


def value_part(
    settings: ValueConfig, value_BT: Tensor, targets: ValueTargets, mask_BT: Tensor, weight_B: Tensor
) -> tuple[Tensor, Tensor]:
    """The micro-batch's share of the value loss, and which tokens were clipped (bool, ``[B, T]``)."""
    loss_BT, clipped_BT = value_loss(value_BT, targets.old_value_BT, targets.target_BT, settings.clip)
    total = (weight_B * torch.where(mask_BT, loss_BT, 0.0).sum(-1)).sum()
    return settings.coefficient * total, clipped_BT & mask_BT


def critic_metrics(micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
    """Mean, mean target and explained variance of the old values of an update. Empty without a critic."""
    pairs = [
        (micro.values.old_value_BT[micro.experience.mask_BT], micro.values.target_BT[micro.experience.mask_BT])
        for micro in micro_batches
        if micro.values is not None
    ]
    if not pairs:
        return {}
    value, target = (torch.cat(column) for column in zip(*pairs, strict=True))
    return {
        "value/mean": float(value.double().mean()),
        "value/target_mean": float(target.double().mean()),
        "value/explained_variance": explained_variance(value, target),
    }


def explained_variance(value: Tensor, target: Tensor) -> float:
    """``1 - Var(target - value) / Var(target)`` over tokens: 1 is a perfect critic, 0 a constant, below 0 worse.

    0 where all targets are equal.
    """
    spread = target.double().var(correction=0)
    return 0.0 if float(spread) == 0 else float(1 - (target - value).double().var(correction=0) / spread)
