"""Doubly robust and truncated-then-corrected forms of the off-policy KL gradient, from tables of a small tree.

With a value ``Q(h, v)`` of the KL still to come after token ``v`` (nats), the future part of the gradient is
``grad sum_v pi(v|h) Q(h, v)`` summed over the vocabulary, plus the ratio-weighted score of what ``Q`` missed:

    sum_t W_{t-1} (grad KL_t + grad sum_v pi(v|h_t) Q(h_t, v)) + sum_t W_t s_t (F_t - Q(h_t, y_t)),

unbiased for any ``Q``. Truncating the ratio of the second sum only (as ACER does, 1611.01224) trades its
variance for a bias that vanishes with the error of ``Q``. A language model would need ``Q`` for every next
token, so these are yardsticks of what a learned value could bring, not estimators one can train with today.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kl_comedy.errors import UserError
from kl_comedy.kl.corrections import weights_of
from kl_comedy.kl.oracle import Setting

VALUE_ERROR = 0.5
"""Relative noise of the imperfect value."""


def doubly_robust_moments(setting: Setting, target_D: Tensor) -> dict[str, tuple[float, float]]:
    """By candidate: relative bias and relative trace variance, enumerated. For shared parameters."""
    tables = _Tables(setting)
    generator = torch.Generator().manual_seed(77)
    exact_NV = tables.value_NV
    noisy_NV = exact_NV * (1 + VALUE_ERROR * torch.randn(exact_NV.shape, generator=generator, dtype=torch.float64))
    candidates = {
        "doubly robust, exact value": tables.gradient(exact_NV, outer=None, inner=None),
        "doubly robust, value off by 50%": tables.gradient(noisy_NV, outer=None, inner=None),
        "truncated at 2 then corrected, exact value": tables.gradient(exact_NV, outer=2.0, inner=2.0),
        "truncated at 2 then corrected, value off by 50%": tables.gradient(noisy_NV, outer=2.0, inner=2.0),
        "value only, off by 50%, truncated at 2": tables.gradient(noisy_NV, outer=2.0, inner=0.0),
    }
    return {name: _moments(tables.probability_B, g_BD, target_D) for name, g_BD in candidates.items()}


def _moments(probability_B: Tensor, gradient_BD: Tensor, target_D: Tensor) -> tuple[float, float]:
    mean_D = probability_B @ gradient_BD
    size = float(target_D.square().sum())
    variance = float(probability_B @ gradient_BD.square().sum(-1)) - float(mean_D.square().sum())
    return float((mean_D - target_D).norm()) / size**0.5, variance / size


class _Tables:
    """Scores, exact KLs and the exact value of what is still to come, over prefixes and completions."""

    def __init__(self, setting: Setting) -> None:
        if setting.features_NVD is None:
            raise UserError("doubly robust forms are enumerated for shared parameters only")
        rows = setting.tree.all
        logp_NV = setting.policy_logp()
        p_NV = logp_NV.exp()
        ratio_NV = logp_NV - setting.ref_logp_NV
        self.p_NV = p_NV
        self.kl_N = setting.kl_N[0]
        self.score_NVD = setting.features_NVD - torch.einsum("nv,nvd->nd", p_NV, setting.features_NVD)[:, None]
        self.kl_gradient_ND = torch.einsum("nv,nvd->nd", p_NV * ratio_NV, self.score_NVD)
        self.rows = rows
        self.probability_B = setting.probability(rows)
        delta_NV = logp_NV - setting.recorded_logp_NV
        self.delta_BT = torch.where(rows.mask_BT, delta_NV[rows.prefix_BT, rows.token_BT], 0.0)
        self.value_NV = self._value(setting)

    def _value(self, setting: Setting) -> Tensor:
        """``Q[h, v]``: expected KL (nats) of the prefixes after token v, by recursion from the leaves."""
        tree = setting.tree
        value_NV = torch.zeros_like(self.p_NV)
        onward = slice(1, None) if tree.ends else slice(None)
        after_N = self.kl_N.clone()
        for depth in reversed(range(tree.length - 1)):
            here = slice(tree.first(depth), tree.first(depth + 1))
            below = slice(tree.first(depth + 1), tree.first(depth + 2))
            value_NV[here, onward] = after_N[below].reshape(-1, tree.goes_on)
            after_N[here] = self.kl_N[here] + (self.p_NV[here] * value_NV[here]).sum(-1)
        return value_NV

    def gradient(self, value_NV: Tensor, *, outer: float | None, inner: float | None) -> Tensor:
        """The gradient of each completion ``[B, D]``; ``outer`` caps the prefix ratio, ``inner`` the correction's."""
        at, token, mask_BT = self.rows.prefix_BT, self.rows.token_BT, self.rows.mask_BT
        before_BT = weights_of("prefix_previous", self.delta_BT, cap=outer) * mask_BT
        all_actions_ND = torch.einsum("nv,nvd->nd", self.p_NV * value_NV, self.score_NVD)
        gradient_BD = torch.einsum("bt,btd->bd", before_BT, (self.kl_gradient_ND + all_actions_ND)[at])
        if inner == 0.0:
            return gradient_BD
        cost_BT = before_BT * self.kl_N[at] * mask_BT
        future_BT = cost_BT.flip(-1).cumsum(-1).flip(-1) - cost_BT
        up_to_BT = weights_of("prefix", self.delta_BT, cap=inner) * mask_BT
        missed_BT = future_BT - up_to_BT * value_NV[at, token]
        return gradient_BD + torch.einsum("bt,btd->bd", missed_BT * mask_BT, self.score_NVD[at, token])
