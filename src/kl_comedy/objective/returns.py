"""How KL costs that enter before the baseline become part of the return."""

from __future__ import annotations

from torch import Tensor


def returns_with_costs(reward_B: Tensor, cost_BT: Tensor | None, length: int) -> Tensor:
    """``R - cost`` for each token, ``[B, T]``: ``cost_BT`` is beta times the credited KL cost in nats.

    Beyond the end of a completion the cost is whatever the credit says there: zero to go, or the total.
    """
    returns_BT = reward_B[:, None].expand(-1, length)
    return returns_BT if cost_BT is None else returns_BT - cost_BT
