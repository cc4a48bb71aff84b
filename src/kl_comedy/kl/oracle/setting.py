"""A policy, a reference and a sampler over one tree: the instance on which a loss is judged."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kl_comedy.errors import bad_value
from kl_comedy.kl.oracle.policies import Completions, Tree, log_probs, prefix_log_probs
from kl_comedy.kl.oracle.rows import Rows

REGIMES = ("on_policy", "off_policy", "mixed")
IMPOSSIBLE = -1e4
"""Log-prob (nats) that stands for probability zero, so that rows nobody draws stay finite."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """Float64 tables over the prefixes of a tree, in nats.

    The policy's logits are linear in the parameters: ``features_NVD @ theta_D``, so that prefixes share
    them; ``features_NVD=None`` is tabular, one logit per prefix and token (``D = N V``).
    ``sampler_logp_NV`` is the distribution that really draws each token: the policy's own, a stale one,
    or several versions by position; with temperature and top-p applied. ``recorded_logp_NV`` is what the
    sampler writes down for it, which is the same unless an engine records something else.
    ``reward_N2`` gives the task's reward of a completion by its last prefix: ended there, truncated there.
    ``proximal_logp_NV`` is the policy at the batch's first use, None where that is the policy itself.
    """

    tree: Tree
    features_NVD: Tensor | None
    theta_D: Tensor
    ref_logp_NV: Tensor
    sampler_logp_NV: Tensor
    recorded_logp_NV: Tensor
    reward_N2: Tensor
    proximal_logp_NV: Tensor | None = None

    @classmethod
    def random(
        cls, tree: Tree, *, regime: str, seed: int, distance: float = 0.5, staleness: float = 0.3,
        parameters: int | None = None, temperature: float = 1.0, top_p: float = 1.0, records: str = "drawn",
    ) -> Setting:  # fmt: skip
        """A seeded random instance. ``parameters=None`` is tabular.

        Args:
            tree: the completions.
            regime: ``on_policy`` (sampler = policy), ``off_policy`` (a stale version) or ``mixed`` (the
                version changes within the completion, as in-flight weight updates do).
            seed: of the one generator that draws features, parameters, noise and rewards.
            distance: standard deviation of the logit noise between policy and reference.
            staleness: the same between policy and sampler.
            parameters: number of shared parameters ``D``.
            temperature, top_p: of the sampler, applied to its distribution.
            records: ``drawn``, the log-probs of the distribution drawn from, or ``raw``, those at
                temperature 1 and top-p 1 (the default of some engines).
        """
        if regime not in REGIMES:
            raise bad_value("regime", regime, REGIMES)
        if records not in ("drawn", "raw"):
            raise bad_value("records", records, ("drawn", "raw"))
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        n, v = tree.prefixes, tree.vocabulary
        features_NVD = None if parameters is None else normal(n, v, parameters)
        theta_D = normal(n * v if parameters is None else parameters)
        logits_NV = _logits(features_NVD, theta_D, n, v)
        ref_logp_NV = prefix_log_probs(logits_NV + distance * normal(n, v))
        stale = [logits_NV + staleness * normal(n, v) for _ in range(2)]
        if regime == "on_policy":
            sampler_NV = logits_NV
        elif regime == "off_policy":
            sampler_NV = stale[0]
        else:
            late_N1 = (tree.depth_N >= (tree.length + 1) // 2)[:, None]
            sampler_NV = torch.where(late_N1, stale[1], stale[0])
        drawn_NV = nucleus(prefix_log_probs(sampler_NV / temperature), top_p)
        return cls(
            tree=tree,
            features_NVD=features_NVD,
            theta_D=theta_D,
            ref_logp_NV=ref_logp_NV,
            sampler_logp_NV=drawn_NV,
            recorded_logp_NV=drawn_NV if records == "drawn" else prefix_log_probs(sampler_NV),
            reward_N2=torch.rand(n, 2, generator=generator, dtype=torch.float64).round(),
        )

    def policy_logp(self, theta_D: Tensor | None = None) -> Tensor:
        """The policy's next-token log-probs ``[N, V]``, at other parameters where given; differentiable."""
        theta = self.theta_D if theta_D is None else theta_D
        return prefix_log_probs(_logits(self.features_NVD, theta, self.tree.prefixes, self.tree.vocabulary))

    def at_a_later_update(self, share: float) -> Setting:
        """The same batch, some updates on: its first use was at the policy whose logits lie ``share`` of the way from
        the sampler to the policy (0: the sampler, 1: the policy)."""
        between_NV = (1 - share) * self.recorded_logp_NV + share * self.policy_logp().detach()
        return dataclasses.replace(self, proximal_logp_NV=prefix_log_probs(between_NV))

    @property
    def behaviour_logp_BT(self) -> Tensor:
        """What the sampler recorded for every completion of a small tree, ``[B, T]``."""
        return log_probs(self.tree, self.recorded_logp_NV)

    @cached_property
    def kl_N(self) -> tuple[Tensor, Tensor]:
        """Exact ``KL(pi || ref)`` and ``KL(ref || pi)`` of the next token at each prefix (nats)."""
        logp_NV = self.policy_logp()
        ratio_NV = logp_NV - self.ref_logp_NV
        return (logp_NV.exp() * ratio_NV).sum(-1), -(self.ref_logp_NV.exp() * ratio_NV).sum(-1)

    def rows(self, completions: Completions) -> Rows:
        """What a loss sees of these completions; log-probs and exact KLs are leaves that ask for gradient."""
        mask_BT, prefix_BT = completions.mask_BT, completions.prefix_BT
        reverse_N, forward_N = self.kl_N
        proximal_NV = self.proximal_logp_NV
        last_B = mask_BT.sum(-1) - 1
        last_prefix_B = prefix_BT.gather(1, last_B[:, None])[:, 0]
        return Rows(
            logp_BT=log_probs(completions, self.policy_logp()).requires_grad_(True),
            ref_logp_BT=log_probs(completions, self.ref_logp_NV),
            behaviour_logp_BT=log_probs(completions, self.recorded_logp_NV),
            mask_BT=mask_BT,
            reverse_kl_BT=torch.where(mask_BT, reverse_N[prefix_BT], 0.0).requires_grad_(True),
            forward_kl_BT=torch.where(mask_BT, forward_N[prefix_BT], 0.0).requires_grad_(True),
            reward_B=self.reward_N2[last_prefix_B, completions.truncated_B.long()],
            group_B=torch.arange(len(mask_BT)),
            truncated_B=completions.truncated_B,
            proximal_logp_BT=None if proximal_NV is None else log_probs(completions, proximal_NV),
        )

    def probability(self, completions: Completions) -> Tensor:
        """The probability ``[B]`` with which the sampler really draws each completion."""
        return log_probs(completions, self.sampler_logp_NV).sum(-1).exp()


def nucleus(logp_NV: Tensor, top_p: float) -> Tensor:
    """Keep the likeliest tokens whose mass reaches ``top_p``, renormalized; the others get :data:`IMPOSSIBLE`."""
    if not 0 < top_p <= 1:
        raise bad_value("top_p", top_p, "a number above 0 and at most 1")
    if top_p == 1:
        return logp_NV
    sorted_NV, order_NV = logp_NV.sort(-1, descending=True)
    before_NV = sorted_NV.exp().cumsum(-1) - sorted_NV.exp()
    kept_NV = torch.zeros_like(logp_NV, dtype=torch.bool).scatter(-1, order_NV, before_NV < top_p)
    inside_NV = torch.where(kept_NV, logp_NV, -torch.inf).log_softmax(-1)
    return torch.where(kept_NV, inside_NV, IMPOSSIBLE)


def _logits(features_NVD: Tensor | None, theta_D: Tensor, n: int, v: int) -> Tensor:
    return theta_D.reshape(n, v) if features_NVD is None else features_NVD @ theta_D
