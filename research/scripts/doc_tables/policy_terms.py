"""Tables of docs/algorithms.md, from registries and certificates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from doc_tables.common import ROOT, built_in, code_span, is_built_in, options_of, table

from kl_comedy.kl.oracle.policy_certificate import UPDATES, PolicyCertificate, certify_policy, named_policy_terms
from kl_comedy.registry import ADVANTAGES, POLICY_CORRECTIONS, POLICY_LOSSES


@cache
def certificates() -> dict[str, dict[str, PolicyCertificate]]:
    """The certificates of every built-in policy term, by name and regime. Asserts that claims hold."""
    by_name = {}
    for name, term in named_policy_terms():
        if not _belongs_to_package(name):
            continue
        by_regime = {_regime(certificate): certificate for certificate in certify_policy(name, term, updates=UPDATES)}
        assert all(certificate.claim_holds for certificate in by_regime.values()), name
        # On-policy, every ratio is 1: a term that is not exact there has a bug.
        assert by_regime["on_policy"].exact, name
        by_name[name] = by_regime
    return by_name


def _belongs_to_package(name: str) -> bool:
    """Whether a policy term comes with the package. ``decoupled_ppo`` combines two entries and has none of its own."""
    for registry in (POLICY_LOSSES, POLICY_CORRECTIONS):
        if name in registry:
            return is_built_in(registry.get(name))
    return True


def _regime(certificate: PolicyCertificate) -> str:
    """The key of a certificate; a later update of the same batch is a regime of its own."""
    if certificate.update == "first":
        return certificate.regime
    return f"{certificate.regime}, later"


def policy_terms() -> str:
    """A row per term at its first update off-policy; a second row where later updates differ."""
    # Noise is relative to plain REINFORCE on-policy.
    base_variance = certificates()["reinforce"]["on_policy"].variance
    rows = []
    for name, by_regime in certificates().items():
        first = by_regime.get("off_policy")
        if first is not None:
            kind, formula = _kind_and_formula(name)
            rows.append((code_span(name), kind, formula, *_figures(first, base_variance)))
        # A clip does nothing at the first update of a batch, where the policy is the proximal one.
        later = by_regime.get("off_policy, later")
        if later is not None:
            rows.append((f"{code_span(name)}, a later update", "", "", *_figures(later, base_variance)))
    return table(("name", "kind", "formula", "bias", "cosine", "strength", "noise", "dropped"), rows)


def _figures(certificate: PolicyCertificate, base_variance: float) -> tuple[str, str, str, str, str]:
    """Bias, cosine, strength, noise and share of dropped tokens."""
    return (
        _percent(certificate.relative_bias),
        f"{certificate.cosine:.2f}",
        f"{certificate.strength:.2f}",
        f"{certificate.variance / base_variance:.2g}x",
        f"{certificate.dropped_share:.0%}",
    )


def _kind_and_formula(name: str) -> tuple[str, str]:
    if name == "decoupled_ppo":
        return "loss + ratio", "`ppo_clip` against the recomputed policy, times `min(prox / mu, 5)`"
    if name in POLICY_LOSSES:
        entry = POLICY_LOSSES.get(name)
        kind = "loss"
    else:
        entry = POLICY_CORRECTIONS.get(name)
        kind = entry.facts["role"]
    formula = entry.summary.replace("``", "`")
    options = options_of(entry)
    if options:
        formula += f" Options: {options}."
    return kind, formula


def _percent(value: float) -> str:
    """Whole percents, or a tenth below one; 0 for what is zero up to rounding."""
    if value < 1e-9:
        return "0"
    if value < 0.01:
        return f"{value:.1%}"
    return f"{value:.0%}"


def advantages() -> str:
    rows = [(code_span(entry.name), entry.summary.replace("``", "`")) for entry in built_in(ADVANTAGES)]
    return table(("name", "formula"), rows)


# Few: the page says what to choose, the study's page has all of them. The names are those of the CSV.
CHOSEN_CANDIDATES = (
    "reinforce (no ratio)",
    "tis 2",
    "ppo_clip 0.2",
    "decoupled ppo",
    "sequence",
    "sequence_tis 8",
)
"""Candidates of the study in the table of what to use on stale samples."""


def policy_term() -> str:
    """Medians over seeds at the longest length of the study: bias and error at 1024 completions, by staleness."""
    from research.studies.pages import read_frame

    frame = read_frame(ROOT / "results/policy_corrections/policy_corrections.parquet")
    stale = frame[(frame.length == frame.length.max()) & (frame.staleness > 0)]
    levels = sorted(stale.staleness.unique())
    # In the head, because the share and not the staleness is what a reader can measure in his own run.
    ess = stale.groupby("staleness").ess.median()
    rows = []
    for name in CHOSEN_CANDIDATES:
        medians = stale[stale.candidate == name].groupby("staleness")[["bias", "error_1024"]].median()
        cells = [f"{medians.bias[level]:.0%}, {medians.error_1024[level]:.2f}" for level in levels]
        rows.append([name, *cells])
    head = [f"staleness {level:g} (ESS {ess[level]:.2f})" for level in levels]
    return table(["policy term", *head], rows)


PARTS: dict[str, Callable[[], str]] = {
    "policy terms": policy_terms,
    "policy term": policy_term,
    "advantages": advantages,
}
