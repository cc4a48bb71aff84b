"""Every cell of the KL space that can mean something, generated from the registry."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from kl_comedy.errors import UserError
from kl_comedy.kl.term import ANCHORS, CREDITS, GRADIENTS, LEVELS, KLTerm
from kl_comedy.registry import CORRECTIONS, ESTIMATORS


def cells(estimators: Iterable[str] | None = None, corrections: Iterable[str] | None = None) -> list[KLTerm]:
    """All terms at beta 1 without caps, clamps and windows: estimator x level x correction x anchor x placement.

    ``None`` takes every registered name, so a new part is in the matrix the day it registers.
    """
    chosen = ESTIMATORS.names() if estimators is None else [ESTIMATORS.get(name).name for name in estimators]
    ratios = CORRECTIONS.names() if corrections is None else [CORRECTIONS.get(name).name for name in corrections]
    shapes: list[dict[str, Any]] = [{"placement": "reward", "credit": credit} for credit in CREDITS]
    shapes += [{"placement": "loss", "gradient": gradient} for gradient in GRADIENTS]
    found = []
    for estimator, level, ratio, anchor, shape in itertools.product(chosen, LEVELS, ratios, ANCHORS, shapes):
        try:
            found.append(KLTerm(estimator, level=level, correction=ratio, anchor=anchor, **shape))
        except UserError:
            continue
    return found
