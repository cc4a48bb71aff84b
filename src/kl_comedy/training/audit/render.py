"""An audit as text: a table to read, Markdown for a page, CSV and JSON for programs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kl_comedy.training.audit.report import AuditReport, TermFinding
from kl_comedy.training.audit.statistics import Estimate

FORMATS = ("table", "markdown", "csv", "json")

HEAD = ("term", "delivered", "cosine", "bias", "variance", "KL/policy", "silent", "verdict")


def render(report: AuditReport, format: str) -> str:
    """The report in one of :data:`FORMATS`."""
    if format == "json":
        return json.dumps(report.to_plain(), indent=1, allow_nan=False)
    if format == "csv":
        return _csv([flat_row(term) for term in report.terms])
    rows = [_cells(term) for term in report.terms]
    layers = list(report.terms[0].layers) if report.terms else []
    by_layer = [(t.label, *(_cosine_at(t, name) for name in layers)) for t in report.terms if t.layers]
    head = ("cosine by layer", *layers)
    made = _markdown if format == "markdown" else _text
    parts = [headline(report), made(HEAD, rows)]
    if len(layers) > 1 and by_layer:
        parts.append(made(head, by_layer))
    return "\n\n".join(parts)


def headline(report: AuditReport) -> str:
    """On what the audit was made."""
    noise = (
        "not to be told from noise" if math.isnan(report.reference_noise) else f"known to {report.reference_noise:.1%}"
    )
    clip = "" if report.clip_share is None else f", clipped at {report.clip_share:.1%} of tokens"
    ratio = (
        "" if math.isnan(report.total_kl_to_policy) else f"; KL part over policy part {report.total_kl_to_policy:.3g}"
    )
    return (
        f"{report.name} at update {report.version}, {report.regime.replace('_', '-')}: {report.completions} "
        f"completions in {report.blocks} blocks, exact KL {report.exact_kl_sequence:.4g} nats a completion\n"
        f"reference gradient: {report.reference_term}, {noise}{ratio}; "
        f"policy loss silent at {report.policy_silent_share:.1%} of tokens{clip}"
    )


def flat_row(term: TermFinding) -> dict[str, Any]:
    """One term as a flat row; empty where undefined."""
    row: dict[str, Any] = {"term": term.label, "beta": term.beta}
    for name in ("delivered", "cosine", "bias"):
        value: Estimate | None = getattr(term, name)
        for end in ("value", "low", "high"):
            row[name if end == "value" else f"{name}_{end}"] = math.nan if value is None else getattr(value, end)
    for name in (
        "p_unbiased", "p_no_mean", "variance", "kl_to_policy", "silent_share", "clamped_share", "capped_share",
    ):  # fmt: skip
        row[name] = getattr(term, name)
    row["beta_change"] = None if term.check is None else term.check.change
    row["beta_disagreement"] = None if term.check is None else term.check.disagreement
    row["verdict"] = term.verdict
    row |= {f"cosine[{name}]": finding.cosine for name, finding in term.layers.items()}
    return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in row.items()}


def _cells(term: TermFinding) -> tuple[str, ...]:
    return (
        term.label, _interval(term.delivered), _interval(term.cosine), _range(term.bias), _number(term.variance),
        _number(term.kl_to_policy), f"{term.silent_share:.1%}", term.verdict,
    )  # fmt: skip


def _interval(value: Estimate | None) -> str:
    if value is None or math.isnan(value.value):
        return "–"
    return f"{value.value:.3f} ± {value.half_width:.3f}"


def _range(value: Estimate) -> str:
    return "–" if math.isnan(value.value) else f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"


def _cosine_at(term: TermFinding, layer: str) -> str:
    found = term.layers[layer].cosine
    return "–" if term.cosine is None or math.isnan(found) else f"{found:.3f}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as wide as it needs to be: a cut number is worse than a wrapped line."""
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=1000).print(table)
    return out.getvalue().rstrip("\n")


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")
