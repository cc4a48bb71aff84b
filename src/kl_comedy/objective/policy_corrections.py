"""Corrections of the policy term for stale samples: detached weights on the per-token policy loss.

Legend: ``B`` sequences, ``T`` completion tokens. ``delta_BT = log anchor - log mu`` (nats, zero outside the mask):
``mu`` is what the sampler recorded, the anchor the current policy or, with ``algorithm.proximal: recomputed``, the
policy at the batch's first use. A KL term never sees these weights: it has a ``correction`` of its own.

Facts an entry declares: ``role`` (``ratio``: an importance weight, at most one per run; ``mask``: drops tokens or
completions, any number), ``unbounded`` (the options that take its bounds away) and, as claims, the regimes in which
``E_mu`` of the weighted policy gradient is the policy's own reward gradient: ``on_policy``, ``off_policy``, and
``off_policy_unbounded`` (once the bounds are away).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kl_comedy.registry import POLICY_CORRECTIONS


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A correction of some completions: what multiplies the loss ``[B, T]``, and where a bound acted (bool)."""

    weight_BT: Tensor
    truncated_BT: Tensor
    masked_BT: Tensor


class PolicyCorrection(Protocol):
    """A function from log-ratios to weights."""

    def __call__(self, delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, /, **options: float) -> Weights:
        """Map ``delta_BT`` (nats, detached) ``[B, T]`` to :class:`Weights`; never differentiated."""
        ...


def _weights(weight_BT: Tensor, *, truncated_BT: Tensor | None = None, masked_BT: Tensor | None = None) -> Weights:
    never_BT = torch.zeros_like(weight_BT, dtype=torch.bool)
    truncated_BT = never_BT if truncated_BT is None else truncated_BT
    return Weights(
        weight_BT=weight_BT, truncated_BT=truncated_BT, masked_BT=never_BT if masked_BT is None else masked_BT
    )


def _truncated(log_BT: Tensor, cap: float) -> Weights:
    beyond_BT = log_BT > math.log(cap)
    weight_BT = torch.where(beyond_BT, torch.full_like(log_BT, cap), log_BT.exp())
    return _weights(weight_BT, truncated_BT=beyond_BT)


def _masked(log_BT: Tensor, low: float, high: float, *, keep_ratio: bool) -> Weights:
    inside_BT = (log_BT >= (math.log(low) if low > 0 else -math.inf)) & (log_BT <= math.log(high))
    value_BT = log_BT.exp() if keep_ratio else torch.ones_like(log_BT)
    return _weights(torch.where(inside_BT, value_BT, 0.0), masked_BT=~inside_BT)


def _sequence(delta_BT: Tensor) -> Tensor:
    """The log-ratio of the whole completion, at every token."""
    return delta_BT.sum(-1, keepdim=True).expand_as(delta_BT)


def sequence_mean(delta_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The mean log-ratio of a completion's tokens (the log of the geometric-mean ratio), at every token."""
    tokens_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1).to(delta_BT.dtype)
    inside_BT = torch.where(mask_BT.bool(), delta_BT, 0.0)
    return (inside_BT.sum(-1, keepdim=True) / tokens_B1).expand_as(delta_BT)


@POLICY_CORRECTIONS.register("none", source="every on-policy paper", claims=("on_policy",), role="none")
def none(delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> Weights:
    """Weight one everywhere (the neutral element)."""
    return _weights(torch.ones_like(delta_BT))


@POLICY_CORRECTIONS.register("token", source="1707.06347 without its clip", claims=("on_policy",), role="ratio")
def token(delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> Weights:
    """``rho_t`` of the token itself, unbounded. Misses the ratios of the other tokens."""
    return _weights(delta_BT.exp())


@POLICY_CORRECTIONS.register(
    "tis",
    source="Yao et al. 2025, truncated importance sampling; LlamaRL 2505.24034",
    claims=("on_policy",),
    role="ratio",
)
def tis(delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, cap: float = 2.0) -> Weights:
    """``min(rho_t, cap)``: the token ratio, truncated."""
    return _truncated(delta_BT, cap)


@POLICY_CORRECTIONS.register("icepop", source="Ling team 2510.18855 (IcePop)", claims=("on_policy",), role="ratio")
def icepop(delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, low: float = 0.5, high: float = 5.0) -> Weights:
    """``rho_t`` where ``low <= rho_t <= high``, else 0: the token ratio, masked on both sides."""
    return _masked(delta_BT, low, high, keep_ratio=True)


@POLICY_CORRECTIONS.register(
    "sequence",
    source="importance sampling over completions, Precup et al. 2000",
    claims=("on_policy", "off_policy"),
    role="ratio",
)
def sequence(delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> Weights:
    """``omega``: the ratio of the whole completion, unbounded. The only unbiased one; variance explodes with length."""
    return _weights(_sequence(delta_BT).exp())


@POLICY_CORRECTIONS.register(
    "sequence_tis",
    source="verl rollout_corr (Seq-TIS)",
    claims=("on_policy", "off_policy_unbounded"),
    role="ratio",
    unbounded={"cap": math.inf},
)
def sequence_tis(delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, cap: float = 2.0) -> Weights:
    """``min(omega, cap)``: the ratio of the completion, truncated."""
    return _truncated(_sequence(delta_BT), cap)


@POLICY_CORRECTIONS.register(
    "sequence_mis",
    source="verl rollout_corr (Seq-MIS)",
    claims=("on_policy", "off_policy_unbounded"),
    role="ratio",
    unbounded={"low": 0.0, "high": math.inf},
)
def sequence_mis(
    delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, low: float = 0.0, high: float = 2.0
) -> Weights:
    """``omega`` where ``low <= omega <= high``, else 0: the ratio of the completion, masked."""
    return _masked(_sequence(delta_BT), low, high, keep_ratio=True)


@POLICY_CORRECTIONS.register(
    "geometric_tis",
    source="the length-normalized ratio of GSPO 2507.18071 as a weight",
    claims=("on_policy",),
    role="ratio",
)
def geometric_tis(delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, cap: float = 2.0) -> Weights:
    """``min(omega^(1/length), cap)``: the geometric-mean ratio of the completion, truncated."""
    return _truncated(sequence_mean(delta_BT, mask_BT), cap)


@POLICY_CORRECTIONS.register(
    "geometric_mask",
    source="NeMo-RL seq-mask-tis; verl rollout_corr (geometric rejection)",
    claims=("on_policy",),
    role="mask",
)
def geometric_mask(
    delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, low: float = 0.99, high: float = 1.01
) -> Weights:
    """1 where the geometric-mean ratio lies in ``[low, high]``, else 0: drops completions; joins a token ratio."""
    return _masked(sequence_mean(delta_BT, mask_BT), low, high, keep_ratio=False)


@POLICY_CORRECTIONS.register(
    "opsm", source="DeepSeek-V3.2 2512.02556, off-policy sequence masking", claims=("on_policy",), role="mask"
)
def opsm(delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, threshold: float = 0.5) -> Weights:
    """0 on completions with a mean advantage below 0 whose mean ``log mu - log pi`` exceeds ``threshold`` nats."""
    far_BT = -sequence_mean(delta_BT, mask_BT) > threshold
    masked_BT = far_BT & (sequence_mean(advantage_BT, mask_BT) < 0)
    return _weights((~masked_BT).to(delta_BT.dtype), masked_BT=masked_BT)
