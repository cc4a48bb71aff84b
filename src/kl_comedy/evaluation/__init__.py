"""Evaluation: held-out problems, sampled or greedy, with intervals over problems; suites by name.

    YAML -> suite -> problems -> prompts -> Plan -> chunks of records (any process, resumable) -> scores

Importing this room registers the suites of the package; a run's own sets are :func:`evaluate`'s.
"""

from kl_comedy.evaluation import suites
from kl_comedy.evaluation.evaluate import EvalResult, EvalSet, Measure, Result, evaluate
from kl_comedy.evaluation.suites import get_suite, register_suite

BUILT_IN = (suites,)
"""The module whose import registers the built-in suites."""

__all__ = ["BUILT_IN", "EvalResult", "EvalSet", "Measure", "Result", "evaluate", "get_suite", "register_suite"]
