"""Divergences of the next token beside the two KLs, as targets: what a KL loss with a mistake may optimize instead.

They are not in :data:`kl_comedy.kl.claims.TARGETS`, whose order and length stored certificates have; only
:mod:`kl_comedy.conformance` compares with them.

Legend: ``N`` prefixes, ``V`` vocabulary, ``D`` parameters; ``p`` is the policy's, ``q`` the reference's next token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kl_comedy.kl.estimators import jensen_shannon
from kl_comedy.kl.oracle.enumeration import Instance


def _chi_square(logp_NV: Tensor, ref_logp_NV: Tensor) -> Tensor:
    """``sum p^2 / q - 1``."""
    return (2 * logp_NV - ref_logp_NV).exp().sum(-1) - 1


def _reverse_chi_square(logp_NV: Tensor, ref_logp_NV: Tensor) -> Tensor:
    """``sum q^2 / p - 1``."""
    return (2 * ref_logp_NV - logp_NV).exp().sum(-1) - 1


def _total_variation(logp_NV: Tensor, ref_logp_NV: Tensor) -> Tensor:
    """``1/2 sum |p - q|``."""
    return 0.5 * (logp_NV.exp() - ref_logp_NV.exp()).abs().sum(-1)


def _jensen_shannon(logp_NV: Tensor, ref_logp_NV: Tensor) -> Tensor:
    """``1/2 KL(p || m) + 1/2 KL(q || m)`` with ``m = (p + q) / 2``."""
    return jensen_shannon(logp_NV, ref_logp_NV, 0.5)


def _policy_square(logp_NV: Tensor, ref_logp_NV: Tensor) -> Tensor:
    """``1/2 sum p (log p/q)^2``: what k2 optimizes where its samples' score is differentiated too."""
    return 0.5 * (logp_NV.exp() * (logp_NV - ref_logp_NV) ** 2).sum(-1)


def _reference_square(logp_NV: Tensor, ref_logp_NV: Tensor) -> Tensor:
    """``1/2 sum q (log p/q)^2``: what the form ``r log r - r + 1`` with ``r = q/p`` optimizes, as in RAPO."""
    # On samples of p its derivative by log p is r log p/q, and the sum over p of that is the gradient of this one. As
    # an estimate of a value the form is that of KL(q || p); 2510.03865 uses it with a reweighted reference.
    return 0.5 * (ref_logp_NV.exp() * (logp_NV - ref_logp_NV) ** 2).sum(-1)


_DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token_chi_square": _chi_square,
    "token_reference_chi_square": _reverse_chi_square,
    "token_total_variation": _total_variation,
    "token_jensen_shannon": _jensen_shannon,
    "token_policy_square": _policy_square,
    "token_reference_square": _reference_square,
}
# An estimate that is a detached cost of the completion: what is missing is its own gradient.
_COSTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sequence_k2_cost": lambda log_ratio_NV: 0.5 * log_ratio_NV**2,
    "sequence_k3_cost": lambda log_ratio_NV: torch.expm1(-log_ratio_NV) + log_ratio_NV,
}
DIVERGENCES = (*_DIVERGENCES, *_COSTS)
DIVERGENCE_MEANINGS = {
    "token_chi_square": "optimizes the chi-square of policy against reference per visited prefix, not a KL",
    "token_reference_chi_square": "optimizes the chi-square of reference against policy per visited prefix, not a KL",
    "token_total_variation": "optimizes the total variation per visited prefix, not a KL",
    "token_jensen_shannon": "optimizes the Jensen-Shannon divergence per visited prefix, not a KL",
    "token_policy_square": "optimizes half the mean square log-ratio under the policy per visited prefix, not a KL",
    "token_reference_square": (
        "optimizes half the mean square log-ratio under the reference per visited prefix, not a KL"
    ),
    "sequence_k2_cost": (
        "k2 as a cost: optimizes its mean over completions less the reverse KL of each visited prefix; both are equal "
        "near the reference, where nothing is left"
    ),
    "sequence_k3_cost": (
        "k3 as a cost: optimizes the reverse KL of completions less the forward KL of each visited prefix; both are "
        "equal near the reference, where nothing is left"
    ),
}


def divergence_gradient(instance: Instance, name: str) -> Tensor:
    """The gradient ``[D]`` of a divergence, summed over the prefixes that the sampler visits, which are held fixed.

    Of an estimate as a cost: of its mean over the policy's completions, the estimate held fixed. It is not finite where
    the divergence itself is not, as a chi-square where the reference forbids a token.
    """
    theta_D = instance.theta_D.clone().requires_grad_(True)
    logp_NV = instance.policy_logp(theta_D)
    if name in _COSTS:
        cost_NV = _COSTS[name](logp_NV.detach() - instance.ref_logp_NV)
        total = instance.reach(logp_NV) @ (logp_NV.exp() * cost_NV).sum(-1)
    else:
        value_N = _DIVERGENCES[name](logp_NV, instance.ref_logp_NV)
        total = instance.reach(instance.sampler_logp_NV) @ value_N
    return torch.autograd.grad(total, theta_D)[0]
