"""Policy losses: per token, unreduced, to be minimized. Advantages and behaviour log-probs are detached."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kl_comedy.registry import POLICY_LOSSES


class PolicyLoss(Protocol):
    """A function from log-probs and advantages to a per-token loss."""

    def __call__(self, logp_BT: Tensor, behaviour_logp_BT: Tensor, advantage_BT: Tensor, /, **options: float) -> Tensor:
        """Map ``[B, T]`` log-probs (nats) and advantages to a loss ``[B, T]``; gradient into ``logp_BT`` only."""
        ...


@POLICY_LOSSES.register("reinforce", source="Williams 1992; Ahmadian et al. 2402.14740", clips=False)
def reinforce(logp_BT: Tensor, behaviour_logp_BT: Tensor, advantage_BT: Tensor) -> Tensor:
    """``-A * log pi``: the score function, with no ratio (biased when the batch is stale)."""
    return -advantage_BT * logp_BT


@POLICY_LOSSES.register("ppo_clip", source="Schulman et al. 1707.06347, Eq. 7; DAPO 2503.14476 clip-higher", clips=True)
def ppo_clip(
    logp_BT: Tensor, behaviour_logp_BT: Tensor, advantage_BT: Tensor, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)`` with ``rho = pi / mu``.

    ``mu`` is the sampler's. A token on the clipped side has no gradient; a KL cost inside ``A`` is
    clipped with it, a KL term in loss never is.
    """
    ratio_BT = (logp_BT - behaviour_logp_BT).exp()
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio_BT * advantage_BT, clipped_BT * advantage_BT)


def clip_fraction(
    logp_BT: Tensor, behaviour_logp_BT: Tensor, advantage_BT: Tensor, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """True where :func:`ppo_clip` gives a token no gradient, ``[B, T]``."""
    ratio_BT = (logp_BT - behaviour_logp_BT).exp()
    above_BT = (ratio_BT > 1.0 + clip_high) & (advantage_BT > 0)
    below_BT = (ratio_BT < 1.0 - clip_low) & (advantage_BT < 0)
    return above_BT | below_BT
