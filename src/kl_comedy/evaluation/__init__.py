"""Evaluation on held-out problems, with intervals over problems; suites by name.

    YAML -> suite -> problems -> prompts -> SuitePlan -> chunks of records (any process, resumable) -> EvalResult

A run's evaluation sets go through :func:`evaluate`. Importing this package registers the built-in suites.
"""

from kl_comedy.evaluation.evaluate import EvalSet, EvalSettings, evaluate
from kl_comedy.evaluation.scores import EvalResult
from kl_comedy.evaluation.suites import get_suite, register_suite

__all__ = ["EvalResult", "EvalSet", "EvalSettings", "evaluate", "get_suite", "register_suite"]
