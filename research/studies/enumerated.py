"""Claims that need no training: certificates of their terms, or numbers of a stored study.

Data: enumerated.yaml. The page of :mod:`research.studies.evidence` has a section for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kl_comedy.io import read_yaml
from kl_comedy.kl import resolve_terms
from kl_comedy.kl.oracle.certificate import Certificate, certify
from kl_comedy.results import tables
from research.studies.pages import three_digits

CLAIMS = Path(__file__).with_name("enumerated.yaml")
RESULTS = Path(__file__).parents[2] / "results"
# "optimizes" is what enumeration finds, "claimed" what the paper says.
CERTIFICATES = ["term", "regime", "optimizes", "claimed", "bias", "cosine", "variance"]


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
    figure: str = ""
    command: str = ""


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
        frame = pd.read_csv(RESULTS / file)
        for name, value in where.items():
            frame = frame[frame[name] == value]
        rows.append((label, float(frame[column].agg(aggregate))))
    return rows


def decide(claim: EnumeratedClaim, rows: Sequence[Certificate]) -> str:
    """The stated verdict, or how many certificates are as claimed and how many are not."""
    if claim.verdict:
        return claim.verdict
    claimed_targets = [target for _, _, target in claim.optimizes]
    as_claimed = [row.target == target for row, target in zip(rows, claimed_targets, strict=True)]
    return f"{as_claimed.count(True)} for, {as_claimed.count(False)} against, of {len(as_claimed)}"


def section(claim: EnumeratedClaim) -> tuple[list[str], list[str]]:
    """The claim's row of the summary, and its section of the page."""
    rows = certificates(claim)
    values = [[label, three_digits(value)] for label, value in numbers(claim)]
    figures = [_figures(row) for row in rows]
    verdict = decide(claim, rows)

    sentence = f"{claim.hypothesis[0].upper()}{claim.hypothesis[1:]}."
    parts = [f"## {claim.name}", sentence, f"**Verdict: {verdict}.** No training."]
    if claim.remark:
        parts.append(claim.remark)
    if rows:
        parts.append(_certificate_table(claim, figures))
    if values:
        parts.append(tables.markdown(["number", "value"], values))
    if claim.figure:
        parts.append(f"![{claim.hypothesis}](../{claim.figure})")
    parts.append(f"    {claim.command or _certify_command(claim)}")

    key_numbers = [f"{name}: {value}" for name, value in values]
    for term, regime, target, bias, *_ in figures:
        key_numbers.append(f"{term}, {regime}: {target}, bias {bias}")
    shown_verdict = f"{verdict}, with a remark" if claim.remark else verdict
    link = f"[{claim.name}](#{claim.name.lower()})"
    return [link, claim.hypothesis, shown_verdict, "; ".join(key_numbers), "none needed"], parts


def _certificate_table(claim: EnumeratedClaim, figures: Sequence[Sequence[str]]) -> str:
    """The certificates, with the claimed target beside the enumerated one."""
    cells = []
    for (_, _, claimed), (term, regime, target, *others) in zip(claim.optimizes, figures, strict=True):
        cells.append([term, regime, target, claimed or "none", *others])
    return tables.markdown(CERTIFICATES, cells)


def _certify_command(claim: EnumeratedClaim) -> str:
    """The command that certifies the claim's recipes, each once; terms that are no recipe have no name to type."""
    recipes = [terms for terms, _, _ in claim.optimizes if isinstance(terms, str)]
    return "kl-comedy certify " + " ".join(dict.fromkeys(recipes))


def _figures(row: Certificate) -> list[str]:
    """Term, regime, target; bias, cosine and variance of one completion's gradient, against the KL of completions."""
    bias = row.relative_bias["sequence_reverse"]
    cosine = row.cosine["sequence_reverse"]
    # A gradient of zero has no direction.
    cosine_text = "-" if math.isnan(cosine) else f"{cosine:.2f}"
    regime = row.regime.replace("_", "-")
    return [row.name, regime, row.target or "none", three_digits(bias), cosine_text, three_digits(row.variance)]
