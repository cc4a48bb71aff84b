"""Exact per-prefix KL over the whole vocabulary: the Rao-Blackwellized estimators.

They receive the exact KL of the next-token distributions (``exact_kl_BT``) in place of a log-ratio.
"""

from __future__ import annotations

from torch import Tensor

from kl_comedy.registry import ESTIMATORS


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
