"""Estimators of the log-ratio ``l = log pi - log ref`` of the sampled token (or of the completion), and exact ones.

Names follow Schulman's note (2020): k1 = l, k2 = l^2 / 2, k3 = exp(-l) - 1 + l. The exact (Rao-Blackwellized) ones
receive the KL of the next-token distributions over the whole vocabulary (``exact_kl_BT``) in place of a log-ratio.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kl_comedy.registry import ESTIMATORS


class Estimator(Protocol):
    """A function from a log-ratio (or an exact KL, for ``needs="exact_*"``) to an estimate in nats."""

    def __call__(self, log_ratio: Tensor, /, **options: float) -> Tensor:
        """Map ``log_ratio`` (any shape, nats, ``log pi - log ref``) to an estimate of the same shape.

        Pure and elementwise: no mask, no reduction, no coefficient, no clamp inside. The estimate must
        be differentiable in ``log_ratio``; whether the gradient is used is the placement's business.
        Keyword options become ``KLTerm.options``.
        """
        ...


@ESTIMATORS.register(
    "k1",
    source="Schulman 2020; 2512.21852 'naive'; 2506.09477 'vanilla'",
    claims=("value:reverse", "pathwise:zero"),
    needs="log_ratio",
)
def k1(log_ratio: Tensor) -> Tensor:
    """The log-ratio itself, ``l``: unbiased value, may be negative, its own gradient is pure noise.

    >>> k1(torch.tensor([0.5, -0.5]))
    tensor([ 0.5000, -0.5000])
    """
    return log_ratio


@ESTIMATORS.register(
    "k2",
    source="Schulman 2020; 2506.09477 'squared'; 2510.01555",
    claims=("pathwise:token_reverse", "nonnegative"),
    needs="log_ratio",
)
def k2(log_ratio: Tensor) -> Tensor:
    """Half the squared log-ratio, ``l^2 / 2``: biased value, its gradient is that of the reverse KL.

    The factor 1/2 belongs to the estimator here; libraries that call ``l^2`` "k2" double the coefficient.

    >>> k2(torch.tensor([2.0]))
    tensor([2.])
    """
    return 0.5 * log_ratio.square()


@ESTIMATORS.register(
    "k3",
    source="Schulman 2020; DeepSeekMath 2402.03300 (GRPO); 2506.09477 'var-reduced'",
    claims=("value:reverse", "pathwise:token_forward", "nonnegative"),
    needs="log_ratio",
)
def k3(log_ratio: Tensor) -> Tensor:
    """``exp(-l) - 1 + l``: unbiased value, never negative, its own gradient is that of the forward KL.

    Grows like ``exp(-l)`` where the reference is far likelier than the policy; nothing is clamped.

    >>> k3(torch.tensor([0.0]))
    tensor([0.])
    """
    return torch.expm1(-log_ratio) + log_ratio


@ESTIMATORS.register(
    "abs",
    source="verl kl_penalty 'abs'",
    claims=("nonnegative",),
    needs="log_ratio",
)
def absolute(log_ratio: Tensor) -> Tensor:
    """The absolute log-ratio, ``|l|``: neither its value nor its gradient is that of a KL.

    >>> absolute(torch.tensor([-0.25]))
    tensor([0.2500])
    """
    return log_ratio.abs()


@ESTIMATORS.register(
    "k_lambda",
    source="control-variate family between k1 (lam=0) and k3 (lam=1); Schulman 2020",
    claims=("value:reverse",),
    needs="log_ratio",
)
def k_lambda(log_ratio: Tensor, lam: float = 0.5) -> Tensor:
    """``l + lam * (exp(-l) - 1)``: unbiased value for every ``lam``; its gradient is ``lam`` x forward KL.

    >>> k_lambda(torch.tensor([0.3]), lam=0.0)
    tensor([0.3000])
    """
    return log_ratio + lam * torch.expm1(-log_ratio)


@ESTIMATORS.register(
    "exact",
    source="2506.09477 Sec. 4; Amini et al., Rao-Blackwellized KL estimation",
    claims=("value:reverse", "pathwise:token_reverse", "nonnegative"),
    needs="exact_reverse",
)
def exact(exact_kl: Tensor) -> Tensor:
    """``KL(pi(.|h) || ref(.|h))`` summed over the vocabulary at the prefix of the token: no sampling noise."""
    return exact_kl


@ESTIMATORS.register(
    "exact_forward",
    source="full-vocabulary counterpart of k3 in loss (DeepSeekMath 2402.03300)",
    claims=("value:forward", "pathwise:token_forward", "nonnegative"),
    needs="exact_forward",
)
def exact_forward(exact_kl: Tensor) -> Tensor:
    """``KL(ref(.|h) || pi(.|h))`` summed over the vocabulary at the prefix of the token."""
    return exact_kl
