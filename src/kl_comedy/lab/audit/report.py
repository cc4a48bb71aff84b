"""The results of an audit, one frozen record per term and one for the whole, and how they are printed."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from kl_comedy.lab.audit.statistics import Estimate
from kl_comedy.tracking.tables import markdown

SIGNIFICANT = 0.01
"""A p-value below it is called a finding; one unbiased term in a hundred is then called biased by chance."""


@dataclass(frozen=True, kw_only=True)
class LayerResult:
    """One layer group: the same numbers, over its parameters alone; NaN where they are undefined."""

    cosine: float
    delivered: float
    bias: float


@dataclass(frozen=True, kw_only=True)
class BetaCheck:
    """What changing beta does to the whole gradient of the training step on one block.

    ``change`` is ``|G(2 beta) - G(0)| / (|G(2 beta)| + |G(0)|)``; ``disagreement`` is the relative distance between
    that difference over ``2 beta`` and the term's own gradient, NaN where the term has none.
    """

    change: float
    disagreement: float
    inert: bool
    wrong: bool


@dataclass(frozen=True, kw_only=True)
class TermResult:
    """One audited term, whole model.

    ``delivered``: ``<E g, E r> / |E r|^2``. ``cosine``: None where no mean gradient is found. ``bias``: ``|E(g - r)| /
    |E r|``. ``p_unbiased``, ``p_no_mean``: p-values of "the bias is zero" and "the mean gradient is zero".
    ``variance``: trace of the covariance over that of the reference gradient, at equal completions. ``kl_to_policy``:
    norm of beta times its gradient over that of the policy loss, root mean square over batches of the run's size.
    ``silent_share``: tokens that get no gradient at all; ``clamped_share`` and ``capped_share`` where it has such.
    """

    key: str
    label: str
    position: int | None
    beta: float
    delivered: Estimate
    cosine: Estimate | None
    bias: Estimate
    p_unbiased: float
    p_no_mean: float
    variance: float
    kl_to_policy: float
    silent_share: float
    clamped_share: float | None
    capped_share: float | None
    layers: Mapping[str, LayerResult]
    check: BetaCheck | None = None

    @property
    def verdict(self) -> str:
        """A few words for a table."""
        if self.check is not None and self.check.inert:
            return "INERT: beta does not change the gradient"
        if self.check is not None and self.check.wrong:
            return "WRONG: training follows another gradient"
        if math.isnan(self.bias.value):
            return "no reference gradient to compare with"
        if self.p_no_mean >= SIGNIFICANT:
            return "no mean gradient found: noise"
        if self.p_unbiased < SIGNIFICANT:
            return "biased (p < 0.001)" if self.p_unbiased < 0.001 else f"biased (p {self.p_unbiased:.3f})"
        return "no bias found"


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """An audit: on what, and what it found. ``seconds`` is its cost without training and sampling."""

    name: str
    version: int
    regime: str
    completions: int
    blocks: int
    length: float
    exact_kl_token: float
    exact_kl_sequence: float
    reference_term: str
    reference_noise: float
    policy_silent_share: float
    clip_share: float | None
    total_kl_to_policy: float
    sketch: int
    seconds: float
    terms: Sequence[TermResult]

    @property
    def failures(self) -> list[str]:
        """One line per term of the config that does nothing, or something else than it says."""
        bad = [term for term in self.terms if term.check is not None and (term.check.inert or term.check.wrong)]
        return [f"{term.label}: {term.verdict}" for term in bad]

    def to_plain(self) -> dict[str, Any]:
        """Nested plain data; NaN becomes None, as JSON has none."""
        plain = _without_nan(dataclasses.asdict(self))
        for row, term in zip(plain["terms"], self.terms, strict=True):
            row["verdict"] = term.verdict
        return dict(plain)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value


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
    table = markdown if format == "markdown" else _text
    parts = [headline(report), table(HEAD, rows)]
    if len(layers) > 1 and by_layer:
        parts.append(table(head, by_layer))
    return "\n\n".join(parts)


def headline(report: AuditReport) -> str:
    """On what the audit was made."""
    noise = "hidden by noise" if math.isnan(report.reference_noise) else f"known to {report.reference_noise:.1%}"
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


def flat_row(term: TermResult) -> dict[str, Any]:
    """One term as a flat row; empty where undefined."""
    row: dict[str, Any] = {"term": term.label, "beta": term.beta}
    for name in ("delivered", "cosine", "bias"):
        value: Estimate | None = getattr(term, name)
        for end in ("value", "low", "high"):
            row[name if end == "value" else f"{name}_{end}"] = math.nan if value is None else getattr(value, end)
    for name in (
        "p_unbiased",
        "p_no_mean",
        "variance",
        "kl_to_policy",
        "silent_share",
        "clamped_share",
        "capped_share",
    ):
        row[name] = getattr(term, name)
    row["beta_change"] = None if term.check is None else term.check.change
    row["beta_disagreement"] = None if term.check is None else term.check.disagreement
    row["verdict"] = term.verdict
    row |= {f"cosine[{name}]": result.cosine for name, result in term.layers.items()}
    return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in row.items()}


def _cells(term: TermResult) -> tuple[str, ...]:
    return (
        term.label,
        _interval(term.delivered),
        _interval(term.cosine),
        _range(term.bias),
        _number(term.variance),
        _number(term.kl_to_policy),
        f"{term.silent_share:.1%}",
        term.verdict,
    )


def _interval(value: Estimate | None) -> str:
    if value is None or math.isnan(value.value):
        return "–"
    return f"{value.value:.3f} ± {value.half_width:.3f}"


def _range(value: Estimate) -> str:
    return "–" if math.isnan(value.value) else f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"


def _cosine_at(term: TermResult, layer: str) -> str:
    value = term.layers[layer].cosine
    return "–" if term.cosine is None or math.isnan(value) else f"{value:.3f}"


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
