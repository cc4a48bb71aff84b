"""Gradient descent on a game under a list of KL terms, with expected gradients or with sampled ones.

A step follows ``grad E_mu[sum_t beta * surrogate_t] - grad E_pi[R]``. The part of the reward is always the
true policy gradient, so that what is reached or missed is the KL term's doing. With samples, the
probabilities of completions are replaced by the frequencies of a batch, and rewards are centred by the
mean of the others (RLOO).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_comedy.errors import bad_value
from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import prefix_log_probs, terms_loss
from kl_comedy.laboratory.games import Games

SAMPLERS = ("policy", "reference", "lagging")
RULES = ("adam", "gd")


@dataclass(frozen=True, kw_only=True)
class Descent:
    """How to descend.

    Args:
        steps: updates.
        rate: learning rate; for ``adam`` it falls to zero along a cosine where ``decays`` is set.
        rule: ``adam`` or plain gradient descent, ``gd``.
        sampler: who draws completions: the ``policy`` itself, the policy ``lag`` steps ago (``lagging``), or
            the ``reference`` throughout.
        batch: completions per step, or None for expected gradients.
        seed: of the batches.
    """

    steps: int
    rate: float
    rule: str = "adam"
    decays: bool = True
    sampler: str = "policy"
    lag: int = 0
    batch: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise bad_value("sampler", self.sampler, SAMPLERS)
        if self.rule not in RULES:
            raise bad_value("rule", self.rule, RULES)
        if self.batch is not None and (self.batch < 2 or self.sampler != "policy"):
            raise bad_value("batch", self.batch, "at least 2 completions, drawn by the policy")


@dataclass(frozen=True, kw_only=True)
class Path:
    """Where descent ended: logits, the norm of the last expected gradient per game, whether numbers stayed finite."""

    logits_SNV: Tensor
    gradient_S: Tensor
    finite_S: Tensor


def descend(
    games: Games,
    terms: Sequence[KLTerm],
    how: Descent,
    watch: Callable[[int, Tensor], None] = lambda step, logits: None,
) -> Path:
    """Descend from the games' start. ``watch`` sees the step and the logits ``[S, N, V]`` before each update."""
    theta_SNV = games.start_SNV.clone().requires_grad_(True)
    optimizer, schedule = _optimizer(theta_SNV, how)
    generator = torch.Generator().manual_seed(how.seed)
    past: deque[Tensor] = deque(maxlen=how.lag + 1)
    finite_S = torch.ones(games.count, dtype=torch.bool)
    for step in range(how.steps):
        logits_SNV = theta_SNV.detach().clone()
        watch(step, logits_SNV)
        past.append(prefix_log_probs(logits_SNV))
        sampler_SNV = games.ref_logp_SNV if how.sampler == "reference" else past[0]
        gradient_SNV = _gradient(games, terms, theta_SNV, sampler_SNV, how.batch, generator)
        finite_S &= torch.isfinite(gradient_SNV).all(-1).all(-1)
        theta_SNV.grad = torch.where(finite_S[:, None, None], gradient_SNV, 0.0)
        optimizer.step()
        schedule.step()
    final_SNV = theta_SNV.detach()
    watch(how.steps, final_SNV)
    sampler_SNV = games.ref_logp_SNV if how.sampler == "reference" else prefix_log_probs(final_SNV)
    last_SNV = _gradient(games, terms, theta_SNV, sampler_SNV, None, generator)
    return Path(logits_SNV=final_SNV, gradient_S=last_SNV.flatten(1).norm(dim=1), finite_S=finite_S)


def _optimizer(theta_SNV: Tensor, how: Descent) -> tuple[torch.optim.Optimizer, Any]:
    optimizer: torch.optim.Optimizer
    if how.rule == "adam":
        optimizer = torch.optim.Adam([theta_SNV], lr=how.rate)
    else:
        optimizer = torch.optim.SGD([theta_SNV], lr=how.rate)
    if how.rule == "adam" and how.decays:
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, how.steps)
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


def _gradient(
    games: Games, terms: Sequence[KLTerm], theta_SNV: Tensor, sampler_SNV: Tensor, batch: int | None,
    generator: torch.Generator,
) -> Tensor:  # fmt: skip
    """The gradient ``[S, N, V]`` of what is minimized: expected, or over a batch where one is asked for."""
    logp_SNV = prefix_log_probs(theta_SNV)
    logp_SB = games.of_completions(logp_SNV)
    if batch is None:
        weight_SB = games.of_completions(sampler_SNV).exp()
        reward_S = (logp_SB.exp() * games.reward_SB).sum(-1)
    else:
        p_SB = logp_SB.detach().exp()
        drawn_SN = torch.multinomial(p_SB, batch, replacement=True, generator=generator)
        weight_SB = torch.zeros_like(p_SB).scatter_add_(1, drawn_SN, p_SB.new_full(drawn_SN.shape, 1 / batch))
        total_S1 = batch * (weight_SB * games.reward_SB).sum(-1, keepdim=True)
        advantage_SB = games.reward_SB - (total_S1 - games.reward_SB) / (batch - 1)
        reward_S = (weight_SB * advantage_SB * logp_SB).sum(-1)
    surrogate_SB = terms_loss(terms)(games.rows(logp_SNV, sampler_SNV)).sum(-1).reshape(logp_SB.shape)
    penalty_S = games.beta_S * (weight_SB * surrogate_SB).sum(-1)
    (gradient_SNV,) = torch.autograd.grad((penalty_S - reward_S).sum(), theta_SNV)
    return gradient_SNV
