"""Exact expectations over policies whose completions can be enumerated, in float64.

Instance (policy, reference, sampler over a Tree) + Loss (terms, a training loss, other people's code)
    -> Moments (expected gradient, trace variance) -> compared with target gradients -> Certificate
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kl_comedy.lazy import lazy_names

if TYPE_CHECKING:
    from kl_comedy.kl.oracle.algorithm_context import AlgorithmContext, kl_effect, training_loss
    from kl_comedy.kl.oracle.enumeration import (
        Completions,
        Instance,
        InstanceSettings,
        Loss,
        Rows,
        Tree,
        log_probs,
        prefix_log_probs,
    )
    from kl_comedy.kl.oracle.gradients import (
        Moments,
        effective_sample_share,
        exact_moments,
        exact_moments_by_loss,
        expected_gradient,
        gradients_by_loss,
        sampled_moments,
        sequence_kl,
        target_gradient,
        terms_loss,
    )

__all__ = [
    "AlgorithmContext",
    "Completions",
    "Instance",
    "InstanceSettings",
    "Loss",
    "Moments",
    "Rows",
    "Tree",
    "effective_sample_share",
    "exact_moments",
    "exact_moments_by_loss",
    "expected_gradient",
    "gradients_by_loss",
    "kl_effect",
    "log_probs",
    "prefix_log_probs",
    "sampled_moments",
    "sequence_kl",
    "target_gradient",
    "terms_loss",
    "training_loss",
]

# On first use: a stored certificate is read without torch.
__getattr__ = lazy_names(
    __name__,
    {
        "AlgorithmContext": "kl_comedy.kl.oracle.algorithm_context",
        "Completions": "kl_comedy.kl.oracle.enumeration",
        "Instance": "kl_comedy.kl.oracle.enumeration",
        "InstanceSettings": "kl_comedy.kl.oracle.enumeration",
        "Loss": "kl_comedy.kl.oracle.enumeration",
        "Moments": "kl_comedy.kl.oracle.gradients",
        "Rows": "kl_comedy.kl.oracle.enumeration",
        "Tree": "kl_comedy.kl.oracle.enumeration",
        "effective_sample_share": "kl_comedy.kl.oracle.gradients",
        "exact_moments": "kl_comedy.kl.oracle.gradients",
        "exact_moments_by_loss": "kl_comedy.kl.oracle.gradients",
        "expected_gradient": "kl_comedy.kl.oracle.gradients",
        "gradients_by_loss": "kl_comedy.kl.oracle.gradients",
        "kl_effect": "kl_comedy.kl.oracle.algorithm_context",
        "log_probs": "kl_comedy.kl.oracle.enumeration",
        "prefix_log_probs": "kl_comedy.kl.oracle.enumeration",
        "sampled_moments": "kl_comedy.kl.oracle.gradients",
        "sequence_kl": "kl_comedy.kl.oracle.gradients",
        "target_gradient": "kl_comedy.kl.oracle.gradients",
        "terms_loss": "kl_comedy.kl.oracle.gradients",
        "training_loss": "kl_comedy.kl.oracle.algorithm_context",
    },
)
