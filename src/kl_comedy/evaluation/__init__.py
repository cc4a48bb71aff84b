"""Evaluation: held-out problems, sampled or greedy, with intervals over problems."""

from kl_comedy.evaluation.evaluate import EvalResult, EvalSet, Measure, evaluate

__all__ = ["EvalResult", "EvalSet", "Measure", "evaluate"]
