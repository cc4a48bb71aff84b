"""Checks what estimators and corrections declare: at log-ratios of up to 100 nats, in float64 and in float32.

An estimator of a log-ratio, or of an exact KL, is checked in :mod:`~kl_comedy.kl.oracle.log_ratio_checks`, a top-k
estimator in :mod:`~kl_comedy.kl.oracle.top_k_checks`, and a correction in
:mod:`~kl_comedy.kl.oracle.correction_checks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kl_comedy.errors import UserError
from kl_comedy.kl.oracle.correction_checks import CorrectionCoverage, check_correction
from kl_comedy.kl.oracle.estimator_calls import EstimatorCheck, EstimatorCoverage
from kl_comedy.kl.oracle.log_ratio_checks import POINTS, RANGE, check_log_ratio_estimator
from kl_comedy.kl.oracle.top_k_checks import check_top_k
from kl_comedy.registry import CORRECTIONS, ESTIMATORS, Entry

CLAIMS = (
    "value:reverse",
    "value:forward",
    "value:mixture",
    "pathwise:zero",
    "pathwise:token_reverse",
    "pathwise:token_forward",
    "pathwise:token_mixture",
    "nonnegative",
)
"""What an estimator may claim: of which KL its value is an unbiased estimate, of which target its derivative times the
score, and that it is never below 0."""


@dataclass(frozen=True, kw_only=True)
class PartsCoverage:
    """With what all estimators and corrections of a call were checked, by name."""

    seed: int
    log_ratios: tuple[float, float]
    """The least and the largest one (nats)."""
    points: int
    dtypes: tuple[str, ...]
    estimators: dict[str, EstimatorCoverage]
    corrections: dict[str, CorrectionCoverage]


def check_estimator(entry: Entry[Any], *, seed: int = 0, options: Iterable[Mapping[str, Any]] = ()) -> EstimatorCheck:
    """Check the claims of an estimator for its default options, for draws of them and for ``options``.

    With claims or without, float32 must have the values and gradients of float64, up to rounding. Raises
    :class:`UserError` for an unknown claim and for an estimator that fails, or does not return a finite tensor of its
    argument's shape.
    """
    for claim in entry.claims:
        if claim not in CLAIMS:
            raise UserError(f"estimator {entry.name!r} claims {claim!r}; allowed: {', '.join(CLAIMS)}")
    # One generator for all draws: the same seed checks the same points, on every machine.
    generator = torch.Generator().manual_seed(seed)
    if entry.facts.get("needs") == "top_k":
        return check_top_k(entry, options, generator)
    return check_log_ratio_estimator(entry, options, generator)


def check_parts(
    estimators: Mapping[str, Sequence[Mapping[str, Any]]], corrections: Iterable[str], *, seed: int
) -> tuple[list[str], PartsCoverage]:
    """Check registered parts by name, estimators with the options given too: the failures, and what was covered."""
    failures = []
    estimators_covered = {}
    for name, options in estimators.items():
        estimator_check = check_estimator(ESTIMATORS.get(name), seed=seed, options=options)
        # All failures of all parts: who writes a plugin mends them in one go.
        failures += estimator_check.failures
        estimators_covered[name] = estimator_check.covered
    corrections_covered = {}
    for name in corrections:
        correction_check = check_correction(CORRECTIONS.get(name), seed=seed)
        failures += correction_check.failures
        corrections_covered[name] = correction_check.covered
    covered = PartsCoverage(
        seed=seed,
        log_ratios=(-RANGE, RANGE),
        points=POINTS,
        dtypes=("float64", "float32"),
        estimators=estimators_covered,
        corrections=corrections_covered,
    )
    return failures, covered
