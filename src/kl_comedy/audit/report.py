"""The results of an audit, one frozen record per term and one for the whole, and how they are printed.

``AuditReport.to_plain`` is the JSON of ``kl-comedy audit``: fields of these records are keys of stored files.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kl_comedy.results import tables

SIGNIFICANT = 0.01
"""A p-value below it is called a finding; one unbiased term in a hundred is then called biased by chance."""

VERY_SIGNIFICANT = 0.001
"""p-values below it are not written out: flips resolve them to 0.0005."""

UNKNOWN = "–"
"""An undefined value in a printed table."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value and its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


UNDEFINED = Estimate(value=math.nan, low=math.nan, high=math.nan)


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
    """One audited term, whole model. ``g`` is its gradient and ``r`` the reference gradient.

    Everything that compares with ``r`` is undefined where there is none, or where noise hides it.

    - ``delivered``: ``<E g, E r> / |E r|^2``.
    - ``cosine``: that of ``E g`` and ``E r``; None where no mean gradient is found.
    - ``bias``: ``|E(g - r)| / |E r|``.
    - ``p_unbiased``, ``p_no_mean``: p-values of "the bias is zero" and "the mean gradient is zero".
    - ``variance``: trace of the covariance over that of ``r``, at the same number of completions.
    - ``kl_to_policy``: norm of beta times ``g`` over that of the policy loss's gradient, root mean square over batches
      of the run's size.
    - ``silent_share``: share of tokens that get no gradient at all. ``clamped_share``, ``capped_share``: shares whose
      value or ratio was bounded; None for a term without such a bound.
    - ``layers``: ``cosine``, ``delivered`` and ``bias`` over the parameters of each layer group alone.
    """

    key: str
    label: str
    position: int | None
    beta: float
    delivered: Estimate = UNDEFINED
    cosine: Estimate | None = None
    bias: Estimate = UNDEFINED
    p_unbiased: float = math.nan
    p_no_mean: float
    variance: float = math.nan
    kl_to_policy: float
    silent_share: float
    clamped_share: float | None
    capped_share: float | None
    layers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    check: BetaCheck | None = None

    @property
    def verdict(self) -> str:
        """A few words for a table."""
        # The check of beta comes first: it needs no reference gradient, and what it finds is a defect of training.
        if self.check is not None and self.check.inert:
            return "INERT: beta does not change the gradient"
        if self.check is not None and self.check.wrong:
            return "WRONG: training follows another gradient"
        if math.isnan(self.bias.value):
            return "no reference gradient to compare with"
        # Before the bias: a term that is noise has no direction that could be called right or wrong.
        if self.p_no_mean >= SIGNIFICANT:
            return "no mean gradient found: noise"
        if self.p_unbiased < VERY_SIGNIFICANT:
            return "biased (p < 0.001)"
        if self.p_unbiased < SIGNIFICANT:
            return f"biased (p {self.p_unbiased:.3f})"
        return "no bias found"

    def flat_row(self) -> dict[str, Any]:
        """A row for CSV; empty where undefined."""
        row: dict[str, Any] = {"term": self.label, "beta": self.beta}
        # Value and both ends of the interval: a table without intervals would show differences that are noise.
        for name in ("delivered", "cosine", "bias"):
            estimate: Estimate = getattr(self, name) or UNDEFINED
            row[name] = estimate.value
            row[f"{name}_low"] = estimate.low
            row[f"{name}_high"] = estimate.high
        row["p_unbiased"] = self.p_unbiased
        row["p_no_mean"] = self.p_no_mean
        row["variance"] = self.variance
        row["kl_to_policy"] = self.kl_to_policy
        row["silent_share"] = self.silent_share
        row["clamped_share"] = self.clamped_share
        row["capped_share"] = self.capped_share
        # Present for every term, or a table whose first term was not checked would miss the columns.
        row["beta_change"] = None
        row["beta_disagreement"] = None
        if self.check is not None:
            row["beta_change"] = self.check.change
            row["beta_disagreement"] = self.check.disagreement
        row["verdict"] = self.verdict
        for layer, figures in self.layers.items():
            row[f"cosine[{layer}]"] = figures["cosine"]
        return row

    def table_row(self) -> dict[str, str]:
        """A row of the printed table: the whole model."""
        bias = UNKNOWN
        if not math.isnan(self.bias.value):
            bias = f"{self.bias.value:.3f} [{self.bias.low:.3f}, {self.bias.high:.3f}]"
        return {
            "term": self.label,
            "delivered": _plus_minus(self.delivered),
            "cosine": _plus_minus(self.cosine),
            "bias": bias,
            "variance": _number(self.variance, ".3g"),
            "KL/policy": _number(self.kl_to_policy, ".3g"),
            "silent": f"{self.silent_share:.1%}",
            "verdict": self.verdict,
        }

    def layer_row(self) -> dict[str, str]:
        """A row of the second printed table: the cosine per layer group, where the whole model's is known."""
        row = {"cosine by layer": self.label}
        for layer, figures in self.layers.items():
            row[layer] = UNKNOWN
            if self.cosine is not None:
                row[layer] = _number(figures["cosine"], ".3f")
        return row


def _interval(value: Estimate) -> str:
    return f"{value.value:.2g} [{value.low:.2g}, {value.high:.2g}]"


def _plus_minus(value: Estimate | None) -> str:
    if value is None or math.isnan(value.value):
        return UNKNOWN
    return f"{value.value:.3f} ± {value.half_width:.3f}"


def _number(value: float, format: str) -> str:
    return UNKNOWN if math.isnan(value) else f"{value:{format}}"


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """An audit of a policy after ``version`` updates: what was audited, and the results.

    ``regime`` is ``on_policy`` or ``off_policy``. ``length`` is in tokens per completion; ``exact_kl_token`` and
    ``exact_kl_sequence`` are in nats, per token and per completion. ``reference_noise`` is the standard error of the
    reference gradient over its norm, NaN where noise hides it. ``seconds`` is the cost without training and sampling.
    """

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
    kl_projection: Estimate
    sketch: int
    seconds: float
    terms: Sequence[TermResult]

    @property
    def failures(self) -> list[str]:
        """One line per term of the config that does nothing, or something else than it says."""
        lines = []
        for term in self.terms:
            if term.check is not None and (term.check.inert or term.check.wrong):
                lines.append(f"{term.label}: {term.verdict}")
        return lines

    @property
    def drives_away(self) -> str:
        """A sentence where the KL terms move the update away from the reference, beyond the noise; else empty."""
        # The whole interval must be below zero: a callback logs this at every audit, and half of them are noise.
        if math.isnan(self.kl_projection.high) or self.kl_projection.high >= 0:
            return ""
        size = f"projection {_interval(self.kl_projection)} policy gradient norms"
        return f"the KL terms move the clipped update away from the reference: {size}"

    def metrics(self) -> dict[str, float]:
        """The report as a run's metrics; undefined values are left out."""
        metrics = {
            "audit/reference_noise": self.reference_noise,
            "audit/kl_to_policy_norm": self.total_kl_to_policy,
            "time/audit": self.seconds,
            "audit/kl_projection": self.kl_projection.value,
        }
        for term in self.terms:
            # Left out below, as all that is undefined: a metric of 0 would be a claim.
            cosine = UNDEFINED if term.cosine is None else term.cosine
            values = {
                "cosine": cosine.value,
                "delivered": term.delivered.value,
                "bias": term.bias.value,
                "variance": term.variance,
                "kl_to_policy_norm": term.kl_to_policy,
                "silent_share": term.silent_share,
            }
            for name, value in values.items():
                metrics[f"audit/{term.key}/{name}"] = value
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def to_plain(self) -> dict[str, Any]:
        """Nested plain data; NaN becomes None, because JSON has no NaN."""
        plain = dataclasses.asdict(self)
        # The verdict is a property, which asdict does not see.
        plain["terms"] = [{**dataclasses.asdict(term), "verdict": term.verdict} for term in self.terms]
        without_nan: dict[str, Any] = _without_nan(plain)
        return without_nan

    def headline(self) -> str:
        """Two lines above the tables: what was audited, and how well the reference gradient is known."""
        # NaN is no small number: it says that the reference gradient itself was not found.
        if math.isnan(self.reference_noise):
            noise = "hidden by noise"
        else:
            noise = f"known to {self.reference_noise:.1%}"
        remarks = ""
        if not math.isnan(self.total_kl_to_policy):
            remarks = f"; KL part over policy part {self.total_kl_to_policy:.3g}"
        if not math.isnan(self.kl_projection.value):
            remarks = f"{remarks}; projection after clipping {_interval(self.kl_projection)}"
        clipped = ""
        if self.clip_share is not None:
            clipped = f", clipped at {self.clip_share:.1%} of tokens"
        return (
            f"{self.name} at update {self.version}, {self.regime.replace('_', '-')}: {self.completions} "
            f"completions in {self.blocks} blocks, exact KL {self.exact_kl_sequence:.4g} nats per completion\n"
            f"reference gradient: {self.reference_term}, {noise}{remarks}; "
            f"policy loss silent at {self.policy_silent_share:.1%} of tokens{clipped}"
        )

    def render(self, format: str) -> str:
        """The report as ``table``, ``markdown``, ``csv`` or ``json``."""
        import pandas as pd

        if format == "json":
            return json.dumps(self.to_plain(), indent=1, allow_nan=False)
        if format == "csv":
            return tables.render(pd.DataFrame([term.flat_row() for term in self.terms]), "csv")

        parts = [self.headline()]
        if self.terms:
            whole_model = pd.DataFrame([term.table_row() for term in self.terms])
            parts.append(tables.render(whole_model, format))
        layer_rows = [term.layer_row() for term in self.terms if term.layers]
        # With one layer group its cosine is that of the whole model, which the first table has.
        if layer_rows and len(layer_rows[0]) > 2:  # the label and more than one group
            parts.append(tables.render(pd.DataFrame(layer_rows), format))
        return "\n\n".join(parts)


def _without_nan(value: Any) -> Any:
    # Infinity too: JSON knows neither.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value
