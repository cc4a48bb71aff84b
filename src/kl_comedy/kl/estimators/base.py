"""The contract of an estimator."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Estimator(Protocol):
    """A function from a log-ratio (or an exact KL, for ``needs="exact_*"``) to an estimate in nats."""

    def __call__(self, log_ratio: Tensor, /, **options: float) -> Tensor:
        """Map ``log_ratio`` (any shape, nats, ``log pi - log ref``) to an estimate of the same shape.

        Pure and elementwise: no mask, no reduction, no coefficient, no clamp inside. The estimate must
        be differentiable in ``log_ratio``; whether the gradient is used is the placement's business.
        Keyword options become ``KLTerm.options``.
        """
        ...
