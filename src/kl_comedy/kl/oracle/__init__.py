"""Exact expectations over policies whose completions can be enumerated, in float64."""

from kl_comedy.kl.oracle.expectation import Expectation, Setting, expected_gradient, target_gradient
from kl_comedy.kl.oracle.policies import Tree, log_probs, prefix_log_probs

__all__ = [
    "Expectation",
    "Setting",
    "Tree",
    "expected_gradient",
    "log_probs",
    "prefix_log_probs",
    "target_gradient",
]
