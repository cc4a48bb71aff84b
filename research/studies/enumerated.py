"""Claims that need no training: what their terms optimize, enumerated, or numbers of a stored study.

Data: enumerated.yaml. The page of :mod:`research.studies.evidence` has a section for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kl_comedy.io import read_yaml
from kl_comedy.kl import resolve_terms
from kl_comedy.kl.oracle.certificate import Certificate, certify
from kl_comedy.tracking import tables
from research.studies.pages import three_digits

CLAIMS = Path(__file__).with_name("enumerated.yaml")
RESULTS = Path(__file__).parents[2] / "results"
CERTIFICATES = ["term", "regime", "optimizes", "claimed", "bias", "cosine", "variance"]


@dataclass(frozen=True, kw_only=True)
class EnumeratedClaim:
    """A claim; the fields are those of enumerated.yaml."""

    name: str
    hypothesis: str
    optimizes: list[tuple[Any, str, str | None]] = field(default_factory=list)
    numbers: list[tuple[str, str, dict[str, Any], str, str]] = field(default_factory=list)
    verdict: str = ""
    remark: str = ""
    figure: str = ""
    command: str = ""


def read_claims(path: Path = CLAIMS) -> list[EnumeratedClaim]:
    """The claims of ``path``."""
    return [EnumeratedClaim(name=name, **raw) for name, raw in read_yaml(path, "table of claims").items()]


def certificates(claim: EnumeratedClaim) -> list[Certificate]:
    """One for each row of ``optimizes``; the name is the recipe's, or the terms' label."""

    def named(terms: Any) -> str:
        return terms if isinstance(terms, str) else " + ".join(term.label() for term in resolve_terms(terms))

    rows = [certify(named(terms), resolve_terms(terms), regimes=(regime,)) for terms, regime, _ in claim.optimizes]
    return [certificate for (certificate,) in rows]


def numbers(claim: EnumeratedClaim) -> list[tuple[str, float]]:
    """Label and value of each of the claim's numbers."""
    import pandas as pd

    rows = []
    for label, file, where, column, take in claim.numbers:
        frame = pd.read_csv(RESULTS / file)
        for name, value in where.items():
            frame = frame[frame[name] == value]
        rows.append((label, float(frame[column].agg(take))))
    return rows


def decide(claim: EnumeratedClaim, rows: Sequence[Certificate]) -> str:
    """The stated verdict, or from certificates: confirmed where each is as claimed, contradicted where none is."""
    if claim.verdict:
        return claim.verdict
    right = [row.target == target for row, (_, _, target) in zip(rows, claim.optimizes, strict=True)]
    return "confirmed" if all(right) else "mixed" if any(right) else "contradicted"


def section(claim: EnumeratedClaim) -> tuple[list[str], list[str]]:
    """The claim's row of the summary, and its section of the page."""
    rows, values = certificates(claim), [[label, three_digits(value)] for label, value in numbers(claim)]
    figures = [_figures(row) for row in rows]
    verdict = decide(claim, rows)
    sentence = f"{claim.hypothesis[0].upper()}{claim.hypothesis[1:]}."
    parts = [f"## {claim.name}", sentence, f"**Verdict: {verdict}.** No training."]
    parts += [claim.remark] * bool(claim.remark)
    if rows:
        claimed = [target or "none" for _, _, target in claim.optimizes]
        cells = [[*each[:3], target, *each[3:]] for each, target in zip(figures, claimed, strict=True)]
        parts.append(tables.markdown(CERTIFICATES, cells))
    if values:
        parts.append(tables.markdown(["number", "value"], values))
    parts += [f"![{claim.hypothesis}](../{claim.figure})"] * bool(claim.figure)
    recipes = [terms for terms, _, _ in claim.optimizes if isinstance(terms, str)]
    parts.append(f"    {claim.command or 'kl-comedy certify ' + ' '.join(dict.fromkeys(recipes))}")
    shown = [f"{name}: {value}" for name, value in values]
    shown += [f"{term}, {regime}: {target}, bias {bias}" for term, regime, target, bias, *_ in figures]
    noted = f"{verdict}, with a remark" if claim.remark else verdict
    return [f"[{claim.name}](#{claim.name.lower()})", claim.hypothesis, noted, "; ".join(shown), "none needed"], parts


def _figures(row: Certificate) -> list[str]:
    """Term, regime, target; bias, cosine and variance of one completion's gradient, against the KL of completions."""
    bias, cosine = row.relative_bias["sequence_reverse"], row.cosine["sequence_reverse"]
    figures = [three_digits(bias), "-" if cosine != cosine else f"{cosine:.2f}", three_digits(row.variance)]
    return [row.name, row.regime.replace("_", "-"), row.target or "none", *figures]
