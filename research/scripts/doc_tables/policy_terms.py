"""Tables of docs/algorithms.md, from registries and certificates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from doc_tables.common import ROOT, built_in, is_built_in, options_of, table

from kl_comedy.kl.oracle.policy_certificate import UPDATES, PolicyCertificate, certify_policy, named_policy_terms
from kl_comedy.registry import ADVANTAGES, POLICY_CORRECTIONS, POLICY_LOSSES


@cache
def certificates() -> tuple[tuple[str, dict[str, PolicyCertificate]], ...]:
    """Every built-in policy term with its certificate per regime. Asserts that claims hold."""
    certificates_by_name = []
    for name, term in named_policy_terms():
        entry = next((t.get(name) for t in (POLICY_LOSSES, POLICY_CORRECTIONS) if name in t), None)
        if entry is None or is_built_in(entry):
            by_regime = {_regime(c): c for c in certify_policy(name, term, updates=UPDATES)}
            assert all(c.claim_holds for c in by_regime.values()) and by_regime["on_policy"].exact, name
            certificates_by_name.append((name, by_regime))
    return tuple(certificates_by_name)


def _regime(certificate: PolicyCertificate) -> str:
    return certificate.regime if certificate.update == "first" else f"{certificate.regime}, later"


def policy_terms() -> str:
    plain = dict(certificates())["reinforce"]["on_policy"].variance
    rows = []
    for name, by_regime in certificates():
        kind, summary = _facts(name)
        for regime, note in (("off_policy", ""), ("off_policy, later", ", a later update")):
            if (off := by_regime.get(regime)) is not None:
                if note:
                    kind, summary = "", ""
                figures = (
                    _percent(off.relative_bias),
                    f"{off.cosine:.2f}",
                    f"{off.strength:.2f}",
                    f"{off.variance / plain:.2g}x",
                    f"{off.dropped_share:.0%}",
                )
                rows.append((f"`{name}`{note}", kind, summary, *figures))
    return table(("name", "kind", "formula", "bias", "cosine", "strength", "noise", "dropped"), rows)


def _facts(name: str) -> tuple[str, str]:
    if name == "decoupled_ppo":
        return "loss + ratio", "`ppo_clip` against the recomputed policy, times `min(prox / mu, 5)`"
    if name in POLICY_LOSSES:
        entry, kind = POLICY_LOSSES.get(name), "loss"
    else:
        entry = POLICY_CORRECTIONS.get(name)
        kind = entry.facts["role"]
    options = options_of(entry)
    return kind, entry.summary.replace("``", "`") + (f" Options: {options}." if options else "")


def _percent(value: float) -> str:
    return "0" if value < 1e-9 else f"{value:.0%}" if value >= 0.01 else f"{value:.1%}"


def advantages() -> str:
    return table(("name", "formula"), [(f"`{e.name}`", e.summary.replace("``", "`")) for e in built_in(ADVANTAGES)])


DECISION_CANDIDATES = (
    "reinforce (no ratio)",
    "tis 2",
    "ppo_clip 0.2",
    "decoupled ppo",
    "sequence",
    "sequence_tis 8",
)
"""Candidates of the study in the table of the decision page."""


def policy_decision() -> str:
    """Medians over seeds at the longest length of the study: bias and error at 1024 completions, by staleness."""
    import pandas as pd

    frame = pd.read_csv(ROOT / "results/policy_corrections/policy_corrections.csv")
    stale = frame[(frame.length == frame.length.max()) & (frame.staleness > 0)]
    levels = sorted(stale.staleness.unique())
    ess = stale.groupby("staleness").ess.median()
    rows = []
    for name in DECISION_CANDIDATES:
        medians = stale[stale.candidate == name].groupby("staleness")[["bias", "error_1024"]].median()
        rows.append([f"{name}", *(f"{medians.bias[v]:.0%}, {medians.error_1024[v]:.2f}" for v in levels)])
    return table(["policy term", *(f"staleness {v:g} (ESS {ess[v]:.2f})" for v in levels)], rows)


PARTS: dict[str, Callable[[], str]] = {"policy terms": policy_terms, "advantages": advantages}
DECISION: dict[str, Callable[[], str]] = {"policy term": policy_decision}
