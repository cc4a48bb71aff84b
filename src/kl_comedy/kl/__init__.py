"""The heart: KL estimators, placements, corrections, and the one object that composes them. Pure torch."""

from kl_comedy.kl.beta import BetaSchedule, BetaState, BetaTarget
from kl_comedy.kl.claims import REGIMES, TARGETS, claimed_target, verdict, warnings
from kl_comedy.kl.recipes import recipe, resolve_terms
from kl_comedy.kl.surrogate import TermParts, kl_diagnostics, kl_parts, kl_surrogate, own_baseline
from kl_comedy.kl.term import KLTerm

__all__ = [
    "REGIMES",
    "TARGETS",
    "BetaSchedule",
    "BetaState",
    "BetaTarget",
    "KLTerm",
    "TermParts",
    "claimed_target",
    "kl_diagnostics",
    "kl_parts",
    "kl_surrogate",
    "own_baseline",
    "recipe",
    "resolve_terms",
    "verdict",
    "warnings",
]
