"""Policy losses: per token, unreduced, to be minimized. Advantages and behaviour log-probs are detached.

``rho = pi / mu`` is the ratio of the current policy to the policy that sampled (``behaviour``); ``sg`` stops gradients.

Facts an entry declares: ``scope`` of the ratio it weights the score with (``none``, ``token``, ``sequence``: it then
takes ``mask_BT``), ``bounded`` (a function of the same arguments: true where its bound acts) and, as claims, the
regimes in which its expected gradient is the policy's own reward gradient (``on_policy``: with every ratio at one).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kl_comedy.objective.policy_corrections import sequence_mean
from kl_comedy.registry import POLICY_LOSSES


class PolicyLoss(Protocol):
    """A function from log-probs and advantages to a per-token loss."""

    def __call__(self, logp_BT: Tensor, behaviour_logp_BT: Tensor, advantage_BT: Tensor, /, **options: float) -> Tensor:
        """Map ``[B, T]`` log-probs (nats) and advantages to a loss ``[B, T]``; gradient into ``logp_BT`` only.

        An entry of scope ``sequence`` also takes ``mask_BT``. Decoupled PPO passes the proximal policy's log-probs
        in the place of the behaviour policy's.
        """
        ...


def clip_fraction(
    logp_BT: Tensor, behaviour_logp_BT: Tensor, advantage_BT: Tensor, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """True where :func:`ppo_clip` gives a token no gradient, ``[B, T]``."""
    return _silenced((logp_BT - behaviour_logp_BT).exp(), advantage_BT, clip_low, clip_high)


def gspo_clipped(
    logp_BT: Tensor,
    behaviour_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """True where :func:`gspo` gives a token no gradient, ``[B, T]``."""
    # The same ratio at every token of a completion: all of them are clipped, or none.
    ratio_BT = sequence_mean(logp_BT - behaviour_logp_BT, mask_BT).exp()
    return _silenced(ratio_BT, advantage_BT, clip_low, clip_high)


def cispo_clipped(
    logp_BT: Tensor, behaviour_logp_BT: Tensor, advantage_BT: Tensor, clip_low: float = 1.0, clip_high: float = 4.0
) -> Tensor:
    """True where :func:`cispo` bounds the ratio, ``[B, T]``; the token keeps a gradient."""
    ratio_BT = (logp_BT - behaviour_logp_BT).exp()
    return (ratio_BT > 1.0 + clip_high) | (ratio_BT < 1.0 - clip_low)


def aipo_capped(logp_BT: Tensor, behaviour_logp_BT: Tensor, advantage_BT: Tensor, cap: float = 4.0) -> Tensor:
    """True where :func:`aipo` bounds the ratio, ``[B, T]``; the token keeps a gradient."""
    return (logp_BT - behaviour_logp_BT).exp() > cap


def _silenced(ratio_BT: Tensor, advantage_BT: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Where the minimum of :func:`_clipped` is the clipped side, which is constant."""
    # The clip acts on one side only: where the update would move the ratio further out.
    above_BT = (ratio_BT > 1.0 + clip_high) & (advantage_BT > 0)
    below_BT = (ratio_BT < 1.0 - clip_low) & (advantage_BT < 0)
    return above_BT | below_BT


@POLICY_LOSSES.register(
    "reinforce", source="Williams 1992; Ahmadian et al. 2402.14740", claims=("on_policy",), scope="none"
)
def reinforce(logp_BT: Tensor, behaviour_logp_BT: Tensor, advantage_BT: Tensor) -> Tensor:
    """``-A log pi``: the score function, with no ratio, hence biased when the batch is stale."""
    return -advantage_BT * logp_BT


@POLICY_LOSSES.register(
    "ppo_clip",
    source="Schulman et al. 1707.06347, Eq. 7; DAPO 2503.14476 clip-higher",
    claims=("on_policy",),
    scope="token",
    bounded=clip_fraction,
)
def ppo_clip(
    logp_BT: Tensor, behaviour_logp_BT: Tensor, advantage_BT: Tensor, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)`` with ``rho = pi / mu``.

    A token on the clipped side has no gradient. A KL cost inside ``A`` is clipped with it; a KL term in the loss never
    is.
    """
    ratio_BT = (logp_BT - behaviour_logp_BT).exp()
    return _clipped(ratio_BT, advantage_BT, clip_low, clip_high)


@POLICY_LOSSES.register(
    "gspo", source="Zheng et al. 2507.18071 (GSPO-token)", claims=("on_policy",), scope="sequence", bounded=gspo_clipped
)
def gspo(
    logp_BT: Tensor,
    behaviour_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """``-min(s A, clip(s) A)`` at each token, ``s = (pi(y) / mu(y))^(1/length)``: sequence clip, length-normalized.

    ``s_t = sg(s) pi_t / sg(pi_t)``, so that every token weights its own score by ``s`` and advantages may differ along
    a completion. With the reduction ``sequence_mean_token_mean`` and one advantage per completion this is GSPO.
    """
    sequence_ratio_BT = sequence_mean(logp_BT - behaviour_logp_BT, mask_BT).detach().exp()
    # exp(log pi - sg(log pi)) is 1 and has the gradient of log pi.
    one_BT = (logp_BT - logp_BT.detach()).exp()
    ratio_BT = sequence_ratio_BT * one_BT
    return _clipped(ratio_BT, advantage_BT, clip_low, clip_high)


@POLICY_LOSSES.register(
    "cispo", source="MiniMax-M1 2506.13585", claims=("on_policy",), scope="token", bounded=cispo_clipped
)
def cispo(
    logp_BT: Tensor, behaviour_logp_BT: Tensor, advantage_BT: Tensor, clip_low: float = 1.0, clip_high: float = 4.0
) -> Tensor:
    """``-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi``: the weight is bounded, every token keeps a gradient."""
    ratio_BT = (logp_BT - behaviour_logp_BT).detach().exp()
    # Detached: the weight is bounded and has no gradient, where ppo_clip has none beyond its bound.
    weight_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight_BT * advantage_BT * logp_BT


@POLICY_LOSSES.register(
    "aipo", source="LlamaRL 2505.24034 (AIPO)", claims=("on_policy",), scope="token", bounded=aipo_capped
)
def aipo(logp_BT: Tensor, behaviour_logp_BT: Tensor, advantage_BT: Tensor, cap: float = 4.0) -> Tensor:
    """``-sg(min(rho, cap)) A log pi``: the score with the token ratio, capped on one side."""
    ratio_BT = (logp_BT - behaviour_logp_BT).detach().exp()
    # On one side: a small ratio only shrinks a step, a large one makes it unbounded.
    return -ratio_BT.clamp(max=cap) * advantage_BT * logp_BT


def _clipped(ratio_BT: Tensor, advantage_BT: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)``."""
    bounded_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    # The minimum is pessimistic: of the two gains it takes the one that promises less.
    return -torch.minimum(ratio_BT * advantage_BT, bounded_BT * advantage_BT)
