"""Exact expectations over policies whose completions can be enumerated, in float64.

Instance (policy, reference, sampler over a Tree) + Loss (terms, a training loss, other people's code)
    -> Moments (expected gradient, trace variance) -> compared with target gradients -> Certificate
"""

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
