"""Claims that need no training: certificates of their terms, or numbers of a stored study.

Data: enumerated.yaml. The page of :mod:`research.studies.evidence_page` has a row for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kl_comedy.io import read_yaml
from kl_comedy.kl import resolve_terms
from kl_comedy.kl.oracle.certificate import Certificate, certify
from research.studies.pages import two_digits

CLAIMS = Path(__file__).with_name("enumerated.yaml")
RESULTS = Path(__file__).parents[2] / "results"


@dataclass(frozen=True, kw_only=True)
class EnumeratedClaim:
    """A claim; the fields are those of enumerated.yaml."""

    name: str
    hypothesis: str
    optimizes: list[tuple[Any, str, str | None]] = field(default_factory=list)
    """Terms, regime, and the target that the claim says they have; None where it says that they have none."""
    numbers: list[tuple[str, str, dict[str, Any], str, str]] = field(default_factory=list)
    """Label, CSV file under results/, values that select its rows, column, and how its values become one number."""
    verdict: str = ""
    """Stated where no certificate decides; else empty."""
    remark: str = ""


def read_claims(path: Path = CLAIMS) -> list[EnumeratedClaim]:
    """The claims of ``path``."""
    return [EnumeratedClaim(name=name, **raw) for name, raw in read_yaml(path, "table of claims").items()]


def certificates(claim: EnumeratedClaim) -> list[Certificate]:
    """One for each row of ``optimizes``; the name is the recipe's, or the terms' label."""
    # A recipe has a name that a reader can type; a list of terms has only its label.
    rows = []
    for raw_terms, regime, _ in claim.optimizes:
        terms = resolve_terms(raw_terms)
        if isinstance(raw_terms, str):
            name = raw_terms
        else:
            name = " + ".join(term.label() for term in terms)
        (certificate,) = certify(name, terms, regimes=(regime,))
        rows.append(certificate)
    return rows


def numbers(claim: EnumeratedClaim) -> list[tuple[str, float]]:
    """Label and value of each of the claim's numbers."""
    import pandas as pd

    rows = []
    # From the stored file and not from a new run of the study, so that the page and the file cannot differ.
    for label, file, where, column, aggregate in claim.numbers:
        frame = pd.read_parquet(RESULTS / file)
        for name, value in where.items():
            frame = frame[frame[name] == value]
        rows.append((label, float(frame[column].agg(aggregate))))
    return rows


def decide(claim: EnumeratedClaim, rows: Sequence[Certificate]) -> str:
    """The stated verdict, or how many certificates are as claimed, how many are not, and of how many."""
    if claim.verdict:
        return claim.verdict
    claimed_targets = [target for _, _, target in claim.optimizes]
    as_claimed = [row.target == target for row, target in zip(rows, claimed_targets, strict=True)]
    return f"{as_claimed.count(True)} / {as_claimed.count(False)} / {len(as_claimed)}"


def key_number(claim: EnumeratedClaim, rows: Sequence[Certificate]) -> str:
    """The claim's numbers of a study; else the first of its terms, with the bias of its gradient."""
    values = numbers(claim)
    if values:
        return "; ".join(f"{label}: {two_digits(value)}" for label, value in values)
    if not rows:
        return "-"
    # Against the KL of completions, whatever the target of the claim: one scale for all claims.
    bias = rows[0].relative_bias["sequence_reverse"]
    return f"{rows[0].name}: bias {two_digits(bias)}"
