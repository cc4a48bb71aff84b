"""KL terms: estimators, corrections, placements, claims, recipes, and the exact oracle; pure torch.

A term is data: torch is imported where a value is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kl_comedy.kl.beta import BetaSchedule, BetaState, BetaTarget
from kl_comedy.kl.claims import REGIMES, TARGETS, claimed_target, term_warnings, verdict
from kl_comedy.kl.recipes import recipe, resolve_terms
from kl_comedy.kl.term import KLTerm
from kl_comedy.lazy import lazy_names

if TYPE_CHECKING:
    from kl_comedy.kl.surrogate import (
        TermParts,
        batch_baseline,
        kl_diagnostics,
        kl_parts,
        kl_surrogate,
        kl_value,
        own_baseline,
    )

__all__ = [
    "REGIMES",
    "TARGETS",
    "BetaSchedule",
    "BetaState",
    "BetaTarget",
    "KLTerm",
    "TermParts",
    "batch_baseline",
    "claimed_target",
    "kl_diagnostics",
    "kl_parts",
    "kl_surrogate",
    "kl_value",
    "own_baseline",
    "recipe",
    "resolve_terms",
    "term_warnings",
    "verdict",
]

_IN_SURROGATE = (
    "TermParts",
    "batch_baseline",
    "kl_diagnostics",
    "kl_parts",
    "kl_surrogate",
    "kl_value",
    "own_baseline",
)
__getattr__ = lazy_names(__name__, dict.fromkeys(_IN_SURROGATE, "kl_comedy.kl.surrogate"))
