"""Small games whose best policy is known in closed form, several at once, with tabular policies.

The objective is ``J(pi) = E_pi[R] - beta KL(pi || ref)`` over completions; its optimum is
``pi* = ref exp(R / beta) / Z`` with ``J* = beta log Z`` (nats). With the forward KL instead,
``E_pi[R] - beta KL(ref || pi)``, it is ``beta ref / (lambda - R)`` with ``lambda > max R`` such that it
sums to one (2510.20817).

Legend: ``S`` games side by side, ``N`` prefixes, ``V`` tokens, ``B`` completions, ``T`` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kl_comedy.kl.oracle import Rows, Tree, prefix_log_probs


@dataclass(frozen=True, kw_only=True)
class Games:
    """Games over one tree: a reference, where the policy starts (logits), a reward per completion, a beta."""

    tree: Tree
    ref_logp_SNV: Tensor
    start_SNV: Tensor
    reward_SB: Tensor
    beta_S: Tensor

    @property
    def count(self) -> int:
        return len(self.beta_S)

    def of_completions(self, logp_SNV: Tensor) -> Tensor:
        """Log-probs of whole completions, ``[S, B]``; differentiable."""
        return self.of_tokens(logp_SNV).sum(-1)

    def of_tokens(self, logp_SNV: Tensor) -> Tensor:
        """Log-probs of the tokens of every completion, ``[S, B, T]``, zero outside the mask."""
        rows = self.tree.all
        return torch.where(rows.mask_BT, logp_SNV[:, rows.prefix_BT, rows.token_BT], 0.0)

    def optimum(self) -> Tensor:
        """``log pi*`` of every completion for the reverse KL, ``[S, B]``."""
        return (self.of_completions(self.ref_logp_SNV) + self.reward_SB / self.beta_S[:, None]).log_softmax(-1)

    def forward_optimum(self, steps: int = 200) -> Tensor:
        """``log`` of ``beta ref / (lambda - R)``, ``[S, B]``; lambda by bisection between its two bounds."""
        ref_SB = self.of_completions(self.ref_logp_SNV).exp()
        beta_S1 = self.beta_S[:, None]
        low_S1 = (self.reward_SB + beta_S1 * ref_SB).amax(1, keepdim=True)
        high_S1 = self.reward_SB.amax(1, keepdim=True) + beta_S1
        for _ in range(steps):
            middle_S1 = (low_S1 + high_S1) / 2
            too_much = (beta_S1 * ref_SB / (middle_S1 - self.reward_SB)).sum(1, keepdim=True) > 1
            low_S1, high_S1 = torch.where(too_much, middle_S1, low_S1), torch.where(too_much, high_S1, middle_S1)
        return (beta_S1 * ref_SB / (high_S1 - self.reward_SB)).log()

    def rows(self, logp_SNV: Tensor, sampler_logp_SNV: Tensor) -> Rows:
        """Every completion of every game, ``[S * B, T]``, with log-probs and exact KLs that carry gradient."""
        tree = self.tree.all
        flat = (self.count * self.tree.completions, self.tree.length)
        ratio_SNV = logp_SNV - self.ref_logp_SNV
        reverse_SN = (logp_SNV.exp() * ratio_SNV).sum(-1)
        forward_SN = -(self.ref_logp_SNV.exp() * ratio_SNV).sum(-1)
        mask_SBT = tree.mask_BT.expand(self.count, *tree.mask_BT.shape)

        def at_prefixes(values_SN: Tensor) -> Tensor:
            return torch.where(mask_SBT, values_SN[:, tree.prefix_BT], 0.0).reshape(flat)

        return Rows(
            logp_BT=self.of_tokens(logp_SNV).reshape(flat),
            ref_logp_BT=self.of_tokens(self.ref_logp_SNV).reshape(flat),
            behaviour_logp_BT=self.of_tokens(sampler_logp_SNV).reshape(flat),
            mask_BT=mask_SBT.reshape(flat),
            reverse_kl_BT=at_prefixes(reverse_SN),
            forward_kl_BT=at_prefixes(forward_SN),
            reward_B=self.reward_SB.flatten(),
            group_B=torch.arange(flat[0]),
            truncated_B=tree.truncated_B.repeat(self.count),
        )


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where policies stand, one number per game: nats, rewards, probabilities.

    ``to_optimum_S`` is ``KL(pi || pi*)``, which is also ``(J* - J) / beta``; ``to_forward_optimum_S`` the
    KL to the optimum of the forward KL.
    """

    to_optimum_S: Tensor
    to_forward_optimum_S: Tensor
    gap_S: Tensor
    to_ref_S: Tensor
    entropy_S: Tensor
    reward_S: Tensor


def standing(games: Games, logits_SNV: Tensor) -> Standing:
    """Exact figures of policies given by their logits."""
    logp_SB = games.of_completions(prefix_log_probs(logits_SNV))
    p_SB = logp_SB.exp()

    def mean(values_SB: Tensor) -> Tensor:
        return torch.where(p_SB > 0, p_SB * values_SB, 0.0).sum(-1)

    to_optimum_S = mean(logp_SB - games.optimum())
    return Standing(
        to_optimum_S=to_optimum_S,
        to_forward_optimum_S=mean(logp_SB - games.forward_optimum()),
        gap_S=games.beta_S * to_optimum_S,
        to_ref_S=mean(logp_SB - games.of_completions(games.ref_logp_SNV)),
        entropy_S=-mean(logp_SB),
        reward_S=mean(games.reward_SB),
    )


def random_games(tree: Tree, *, seeds: int, betas: tuple[float, ...]) -> Games:
    """``seeds`` games at each beta (beta varies slowest): normal reference logits, uniform rewards in 0..1.

    The policy starts at the reference.
    """
    refs, rewards = [], []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        logits_NV = torch.randn(tree.prefixes, tree.vocabulary, generator=generator, dtype=torch.float64)
        refs.append(prefix_log_probs(logits_NV))
        rewards.append(torch.rand(tree.completions, generator=generator, dtype=torch.float64))
    ref_SNV = torch.stack(refs).repeat(len(betas), 1, 1)
    return Games(
        tree=tree,
        ref_logp_SNV=ref_SNV,
        start_SNV=ref_SNV.clone(),
        reward_SB=torch.stack(rewards).repeat(len(betas), 1),
        beta_S=torch.tensor(betas, dtype=torch.float64).repeat_interleave(seeds),
    )


def logits_of(tree: Tree, logp_B: Tensor) -> Tensor:
    """Next-token log-probs ``[N, V]`` of the autoregressive policy that gives completions these log-probs."""
    mass_N = logp_B.new_zeros(tree.prefixes)
    mass_NV = logp_B.new_zeros(tree.prefixes, tree.vocabulary)
    rows = tree.all
    for t in range(tree.length):
        inside = rows.mask_BT[:, t]
        at, token, weight = rows.prefix_BT[inside, t], rows.token_BT[inside, t], logp_B[inside].exp()
        mass_N.index_add_(0, at, weight)
        mass_NV.index_put_((at, token), weight, accumulate=True)
    return (mass_NV / mass_N[:, None]).log()
