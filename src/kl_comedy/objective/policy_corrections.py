"""Corrections of the policy term for stale samples: detached weights on the per-token policy loss.

Legend: ``B`` sequences, ``T`` completion tokens. ``delta_BT = log anchor - log mu`` (nats, zero outside the mask):
``mu`` is the policy that sampled, as recorded; the anchor is the current policy or, with ``algorithm.proximal:
recomputed``, the policy at the batch's first use. ``rho = anchor / mu`` is the ratio of a token, ``omega`` that of a
completion (the product over its tokens). A KL term never sees these weights: it has a ``correction`` of its own.

Facts an entry declares: ``role`` (``ratio``: an importance weight, at most one per run; ``mask``: drops tokens or
completions, any number), ``unbounded`` (the options that remove its bounds), ``probabilities`` (it also takes
``behaviour_logp_BT``, ``log mu``) and, as claims, the regimes in which ``E_mu`` of the weighted policy gradient is the
policy's own reward gradient: ``on_policy``, ``off_policy``, and ``off_policy_unbounded`` (with its bounds removed).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kl_comedy.cuda import running_sum
from kl_comedy.registry import POLICY_CORRECTIONS


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A correction of some completions."""

    weight_BT: Tensor
    """Multiplies the loss."""
    truncated_BT: Tensor
    """Where a bound capped the weight (bool)."""
    masked_BT: Tensor
    """Where the weight is 0 because the token or its completion was dropped (bool)."""


class PolicyCorrection(Protocol):
    """A function from log-ratios to weights."""

    def __call__(self, delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, /, **options: float) -> Weights:
        """Map ``delta_BT`` (nats, detached) and advantages, ``[B, T]`` each, to :class:`Weights`; never differentiated.

        An entry that declares ``probabilities`` also takes ``behaviour_logp_BT`` (nats, zero outside the mask).
        """
        ...


def _weights(weight_BT: Tensor, *, truncated_BT: Tensor | None = None, masked_BT: Tensor | None = None) -> Weights:
    """The weights; a bound that is not given acted nowhere."""
    nowhere_BT = torch.zeros_like(weight_BT, dtype=torch.bool)
    if truncated_BT is None:
        truncated_BT = nowhere_BT
    if masked_BT is None:
        masked_BT = nowhere_BT
    return Weights(weight_BT=weight_BT, truncated_BT=truncated_BT, masked_BT=masked_BT)


def _truncated(log_BT: Tensor, cap: float) -> Weights:
    """``min(exp(log), cap)``."""
    # Compared as logarithms, and the cap put in place: the exponential of a long completion's log-ratio overflows.
    beyond_BT = log_BT > math.log(cap)
    weight_BT = torch.where(beyond_BT, torch.full_like(log_BT, cap), log_BT.exp())
    return _weights(weight_BT, truncated_BT=beyond_BT)


def _masked(log_BT: Tensor, low: float, high: float, *, keep_ratio: bool) -> Weights:
    """0 where ``exp(log)`` is outside ``[low, high]``; inside, the ratio itself or 1."""
    # The logarithm of 0, which math.log refuses; a ratio is above it in any case.
    log_low = -math.inf
    if low > 0:
        log_low = math.log(low)
    inside_BT = (log_BT >= log_low) & (log_BT <= math.log(high))
    # A mask drops and does not weight: the ratio is then another correction's.
    value_BT = torch.ones_like(log_BT)
    if keep_ratio:
        value_BT = log_BT.exp()
    return _weights(torch.where(inside_BT, value_BT, 0.0), masked_BT=~inside_BT)


def _dropped(masked_BT: Tensor, delta_BT: Tensor) -> Weights:
    """Weight 0 where masked, else 1, in the dtype of the log-ratios."""
    return _weights((~masked_BT).to(delta_BT.dtype), masked_BT=masked_BT)


def _moves_away(delta_BT: Tensor, advantage_BT: Tensor) -> Tensor:
    """Whether an update along the advantage moves the token's probability further from the sampler's (bool)."""
    # It raises the probability where A > 0, and the probability is above the sampler's where delta > 0.
    return advantage_BT * delta_BT > 0


def _token_kl(delta_BT: Tensor) -> Tensor:
    """k3 of ``KL(mu || pi)`` per token: ``rho - 1 - log rho``, nats, at least 0."""
    # expm1, because rho - 1 cancels for ratios near one.
    return torch.expm1(delta_BT) - delta_BT


def _binary_tv(delta_BT: Tensor, behaviour_logp_BT: Tensor) -> Tensor:
    """``|pi - mu|`` of the token: the total variation of the two outcomes "this token" and "any other"."""
    # delta = log pi - log mu, so that log pi need not be given.
    pi_BT = (behaviour_logp_BT + delta_BT).exp()
    mu_BT = behaviour_logp_BT.exp()
    return (pi_BT - mu_BT).abs()


def _before(cost_BT: Tensor) -> Tensor:
    """The sum over the tokens before each token, itself excluded."""
    # Shifted by one: a token may not decide by its own cost whether it is kept.
    return torch.nn.functional.pad(running_sum(cost_BT)[:, :-1], (1, 0))


def _sequence(delta_BT: Tensor) -> Tensor:
    """The log-ratio of the whole completion, at every token."""
    # The log-ratios are zero outside the mask, so that padding adds nothing.
    return delta_BT.sum(-1, keepdim=True).expand_as(delta_BT)


def sequence_mean(delta_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The mean log-ratio of a completion's tokens (the log of the geometric-mean ratio), at every token."""
    # At least 1, so that a completion without tokens has the mean 0 and not NaN.
    tokens_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1).to(delta_BT.dtype)
    inside_BT = torch.where(mask_BT.bool(), delta_BT, 0.0)
    return (inside_BT.sum(-1, keepdim=True) / tokens_B1).expand_as(delta_BT)


@POLICY_CORRECTIONS.register("none", source="every on-policy paper", claims=("on_policy",), role="none")
def none(delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> Weights:
    """Weight one everywhere (the neutral element)."""
    return _weights(torch.ones_like(delta_BT))


@POLICY_CORRECTIONS.register("token", source="1707.06347 without its clip", claims=("on_policy",), role="ratio")
def token(delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> Weights:
    """``rho_t`` of the token itself, unbounded. It leaves out the ratios of the other tokens."""
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
    """``omega``: the ratio of the whole completion, unbounded; unbiased, with a variance that explodes with length."""
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
    """1 where the geometric-mean ratio is in ``[low, high]``, else 0: drops completions; joins a token ratio."""
    return _masked(sequence_mean(delta_BT, mask_BT), low, high, keep_ratio=False)


@POLICY_CORRECTIONS.register(
    "opsm", source="DeepSeek-V3.2 2512.02556, off-policy sequence masking", claims=("on_policy",), role="mask"
)
def opsm(delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, threshold: float = 0.5) -> Weights:
    """0 on completions with a mean advantage below 0 whose mean ``log mu - log pi`` exceeds ``threshold`` nats."""
    # The paper measures how much likelier the sampler found it: log mu - log pi.
    is_far_BT = -sequence_mean(delta_BT, mask_BT) > threshold
    is_bad_BT = sequence_mean(advantage_BT, mask_BT) < 0
    return _dropped(is_far_BT & is_bad_BT, delta_BT)


@POLICY_CORRECTIONS.register(
    "dppo_tv",
    source="Qi et al. 2602.04879 (DPPO), binary total variation; verl dppo_tv",
    claims=("on_policy",),
    role="mask",
    probabilities=True,
)
def dppo_tv(
    delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, behaviour_logp_BT: Tensor, threshold: float = 0.15
) -> Weights:
    """0 where ``A (pi - mu) > 0`` and ``|pi - mu| > threshold``: drops tokens that the update moves further away."""
    is_far_BT = _binary_tv(delta_BT, behaviour_logp_BT) > threshold
    return _dropped(is_far_BT & _moves_away(delta_BT, advantage_BT), delta_BT)


@POLICY_CORRECTIONS.register(
    "dppo_kl",
    source="Qi et al. 2602.04879 (DPPO), binary KL; verl dppo_kl",
    claims=("on_policy",),
    role="mask",
    probabilities=True,
)
def dppo_kl(
    delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, behaviour_logp_BT: Tensor, threshold: float = 0.05
) -> Weights:
    """0 where ``A (pi - mu) > 0`` and the binary ``KL(mu || pi)``, this token or any other, exceeds ``threshold``."""
    # KL(mu || pi) = (1 - mu) log((1 - mu) / (1 - pi)) + mu log(mu / pi), and log(mu / pi) = -delta.
    pi_other_BT = _probability_of_others(behaviour_logp_BT + delta_BT)
    mu_other_BT = _probability_of_others(behaviour_logp_BT)
    kl_BT = mu_other_BT * (mu_other_BT / pi_other_BT).log() - behaviour_logp_BT.exp() * delta_BT
    return _dropped((kl_BT > threshold) & _moves_away(delta_BT, advantage_BT), delta_BT)


def _probability_of_others(logp_BT: Tensor) -> Tensor:
    """``1 - p``, above 0 where p rounds to 1, because its logarithm is taken."""
    return (-torch.expm1(logp_BT)).clamp(min=torch.finfo(logp_BT.dtype).tiny)


@POLICY_CORRECTIONS.register(
    "cppo",
    source="Mao et al. 2606.10968 (CPPO), Eq. 10 with the binary total variation",
    claims=("on_policy",),
    role="mask",
    probabilities=True,
)
def cppo(
    delta_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    behaviour_logp_BT: Tensor,
    threshold: float = 0.15,
    budget: float = 0.015,
    floor: float = 0.8,
) -> Weights:
    """``dppo_tv`` with ``w_t |pi - mu|_t > min(threshold, threshold + sum_{u<t} w_u (budget - |pi - mu|_u))``.

    ``w`` falls linearly from 1 at the first token to ``floor`` at the last. Tokens that are dropped use the budget too.
    """
    inside_BT = mask_BT.to(delta_BT.dtype)
    # w_t = 1 - (1 - floor) (t - 1) / (length - 1)
    steps_B1 = (inside_BT.sum(-1, keepdim=True) - 1).clamp(min=1)
    weight_BT = inside_BT * (1 - (1 - floor) * (running_sum(inside_BT) - 1) / steps_B1)
    # What a token uses, w_t |pi - mu|_t, and what the tokens before it have left of their budget.
    spent_BT = weight_BT * _binary_tv(delta_BT, behaviour_logp_BT)
    saved_BT = _before(budget * weight_BT - spent_BT)
    is_far_BT = spent_BT > threshold + saved_BT.clamp(max=0)
    return _dropped(is_far_BT & _moves_away(delta_BT, advantage_BT), delta_BT)


@POLICY_CORRECTIONS.register(
    "trm",
    source="Li et al. 2512.23075 (trust region masking, max criterion), with k3 as in verl seq_max_k3",
    claims=("on_policy",),
    role="mask",
)
def trm(delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, threshold: float = 0.05) -> Weights:
    """0 on completions with a token whose k3 of ``KL(mu || pi)``, ``rho - 1 - log rho``, exceeds ``threshold`` nats.

    The paper's bound is on the exact KL of the whole next-token distribution, for which k3 of one token stands here.
    """
    # Over the padding too, where the log-ratio and so its k3 is 0.
    largest_BT = _token_kl(delta_BT).amax(-1, keepdim=True).expand_as(delta_BT)
    return _dropped(largest_BT > threshold, delta_BT)


@POLICY_CORRECTIONS.register(
    "prefix_budget",
    source="ours; 2606.10968 (cppo) budgets the mean total variation of a prefix instead",
    claims=("on_policy",),
    role="mask",
)
def prefix_budget(delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, budget: float = 1.0) -> Weights:
    """0 on tokens after a prefix over which the k3 of ``KL(mu || pi)`` sum up to more than ``budget`` nats."""
    return _dropped(_before(_token_kl(delta_BT)) > budget, delta_BT)
