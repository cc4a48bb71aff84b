"""Statistics of runs: intervals, paired differences, aggregates over tasks, frontiers, collapse.

Arrays, mappings and frozen records in, frozen records out; nothing here knows MLflow. Whatever draws takes the
caller's ``numpy.random.Generator``: one is made for a command (:func:`generator`) and threaded through, so the same
command on the same runs prints the same numbers. scipy and pandas are imported by the functions that use them.
"""

from kl_comedy.statistics.collapse import DEFAULT_RULE, CollapseRule, parse_rule
from kl_comedy.statistics.comparisons import (
    At,
    Paired,
    Point,
    Score,
    compare_at,
    frontier_at,
    iqm,
    iqm_interval,
    paired_difference,
    paired_items,
    probability_of_improvement,
    read_off,
)
from kl_comedy.statistics.intervals import (
    CLUSTER_METHODS,
    LEVEL,
    METHODS,
    Interval,
    bootstrap_interval,
    clustered_interval,
    clustered_se,
    generator,
    interval,
    t_interval,
)
from kl_comedy.statistics.pass_at_k import Majority, check_k, majority, majority_at_k, pass_at_k

__all__ = [
    "CLUSTER_METHODS",
    "DEFAULT_RULE",
    "LEVEL",
    "METHODS",
    "At",
    "CollapseRule",
    "Interval",
    "Majority",
    "Paired",
    "Point",
    "Score",
    "bootstrap_interval",
    "check_k",
    "clustered_interval",
    "clustered_se",
    "compare_at",
    "frontier_at",
    "generator",
    "interval",
    "iqm",
    "iqm_interval",
    "majority",
    "majority_at_k",
    "paired_difference",
    "paired_items",
    "parse_rule",
    "pass_at_k",
    "probability_of_improvement",
    "read_off",
    "t_interval",
]
