"""KL terms: estimators, corrections, placements, claims, recipes, and the exact oracle; pure torch."""

from kl_comedy.kl.beta import BetaSchedule, BetaState, BetaTarget
from kl_comedy.kl.claims import REGIMES, TARGETS, claimed_target, term_warnings, verdict
from kl_comedy.kl.recipes import recipe, resolve_terms
from kl_comedy.kl.surrogate import (
    TermParts,
    batch_baseline,
    kl_diagnostics,
    kl_parts,
    kl_surrogate,
    kl_value,
    own_baseline,
)
from kl_comedy.kl.term import KLTerm

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
