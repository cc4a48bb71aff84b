"""Exact expectations over policies whose completions can be enumerated, in float64.

Setting (policy, reference, sampler over a Tree) + Loss (terms, a training loss, other people's code)
    -> Moments (expected gradient, trace variance) -> compared with target gradients -> Certificate
"""

from kl_comedy.kl.oracle.expectation import (
    effective_sample_share,
    expected_gradient,
    sequence_kl,
    target_gradient,
    terms_loss,
)
from kl_comedy.kl.oracle.moments import Moments, exact_moments, sampled_moments
from kl_comedy.kl.oracle.policies import Completions, Tree, log_probs, prefix_log_probs
from kl_comedy.kl.oracle.rows import Loss, Rows
from kl_comedy.kl.oracle.setting import Setting
from kl_comedy.kl.oracle.surroundings import Surroundings, kl_effect, training_loss

__all__ = [
    "Completions",
    "Loss",
    "Moments",
    "Rows",
    "Setting",
    "Surroundings",
    "Tree",
    "effective_sample_share",
    "exact_moments",
    "expected_gradient",
    "kl_effect",
    "log_probs",
    "prefix_log_probs",
    "sampled_moments",
    "sequence_kl",
    "target_gradient",
    "terms_loss",
    "training_loss",
]
