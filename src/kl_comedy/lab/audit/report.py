"""The results of an audit, one frozen record per term and one for the whole, and how they are printed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kl_comedy.tracking import tables

SIGNIFICANT = 0.01
"""A p-value below it is called a finding; one unbiased term in a hundred is then called biased by chance."""


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
    """One audited term, whole model. What compares with the reference gradient is undefined where there is none.

    ``delivered``: ``<E g, E r> / |E r|^2``. ``cosine``: None where no mean gradient is found. ``bias``: ``|E(g - r)| /
    |E r|``. ``p_unbiased``, ``p_no_mean``: p-values of "the bias is zero" and "the mean gradient is zero".
    ``variance``: trace of the covariance over that of the reference gradient, at equal completions. ``kl_to_policy``:
    norm of beta times its gradient over that of the policy loss, root mean square over batches of the run's size.
    ``silent_share``: tokens that get no gradient at all; ``clamped_share`` and ``capped_share`` where it has such.
    ``layers``: ``cosine``, ``delivered`` and ``bias`` over the parameters of each layer group alone.
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

    def flat_row(self) -> dict[str, Any]:
        """A row for CSV; empty where undefined."""
        row: dict[str, Any] = {"term": self.label, "beta": self.beta}
        for name in ("delivered", "cosine", "bias"):
            value: Estimate = getattr(self, name) or UNDEFINED
            row |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
        names = ("p_unbiased", "p_no_mean", "variance", "kl_to_policy", "silent_share", "clamped_share", "capped_share")
        row |= {name: getattr(self, name) for name in names}
        for name in ("change", "disagreement"):
            row[f"beta_{name}"] = None if self.check is None else getattr(self.check, name)
        row["verdict"] = self.verdict
        return row | {f"cosine[{name}]": figures["cosine"] for name, figures in self.layers.items()}

    def table_row(self) -> dict[str, str]:
        bias = self.bias
        return {
            "term": self.label,
            "delivered": _plus_minus(self.delivered),
            "cosine": _plus_minus(self.cosine),
            "bias": "–" if math.isnan(bias.value) else f"{bias.value:.3f} [{bias.low:.3f}, {bias.high:.3f}]",
            "variance": _number(self.variance, ".3g"),
            "KL/policy": _number(self.kl_to_policy, ".3g"),
            "silent": f"{self.silent_share:.1%}",
            "verdict": self.verdict,
        }

    def layer_row(self) -> dict[str, str]:
        cosines = {name: figures["cosine"] if self.cosine else math.nan for name, figures in self.layers.items()}
        return {"cosine by layer": self.label, **{name: _number(value, ".3f") for name, value in cosines.items()}}


def _interval(value: Estimate) -> str:
    return f"{value.value:.2g} [{value.low:.2g}, {value.high:.2g}]"


def _plus_minus(value: Estimate | None) -> str:
    return "–" if value is None or math.isnan(value.value) else f"{value.value:.3f} ± {value.half_width:.3f}"


def _number(value: float, format: str) -> str:
    return "–" if math.isnan(value) else f"{value:{format}}"


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """An audit: on what, and its results. ``seconds`` is its cost without training and sampling."""

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
        bad = [term for term in self.terms if term.check is not None and (term.check.inert or term.check.wrong)]
        return [f"{term.label}: {term.verdict}" for term in bad]

    @property
    def drives_away(self) -> str:
        """A sentence where the KL terms move the update away from the reference, beyond the noise; else empty."""
        if not self.kl_projection.high < 0:
            return ""
        size = f"projection {_interval(self.kl_projection)} policy gradient norms"
        return f"the KL terms move the clipped update away from the reference: {size}"

    def metrics(self) -> dict[str, float]:
        """The report as a run's metrics; what is undefined is left out."""
        noise, ratio = self.reference_noise, self.total_kl_to_policy
        metrics = {"audit/reference_noise": noise, "audit/kl_to_policy_norm": ratio, "time/audit": self.seconds}
        metrics["audit/kl_projection"] = self.kl_projection.value
        for term in self.terms:
            values = {
                "cosine": (term.cosine or UNDEFINED).value,
                "delivered": term.delivered.value,
                "bias": term.bias.value,
                "variance": term.variance,
                "kl_to_policy_norm": term.kl_to_policy,
                "silent_share": term.silent_share,
            }
            metrics |= {f"audit/{term.key}/{name}": value for name, value in values.items()}
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def to_plain(self) -> dict[str, Any]:
        """Nested plain data; NaN becomes None, as JSON has none."""
        terms = [{**dataclasses.asdict(term), "verdict": term.verdict} for term in self.terms]
        plain: dict[str, Any] = _without_nan({**dataclasses.asdict(self), "terms": terms})
        return plain

    def headline(self) -> str:
        """On what the audit was made."""
        noise = "hidden by noise" if math.isnan(self.reference_noise) else f"known to {self.reference_noise:.1%}"
        clip = "" if self.clip_share is None else f", clipped at {self.clip_share:.1%} of tokens"
        ratio = self.total_kl_to_policy
        share = "" if math.isnan(ratio) else f"; KL part over policy part {ratio:.3g}"
        projection = self.kl_projection
        share += "" if math.isnan(projection.value) else f"; projection after clipping {_interval(projection)}"
        return (
            f"{self.name} at update {self.version}, {self.regime.replace('_', '-')}: {self.completions} "
            f"completions in {self.blocks} blocks, exact KL {self.exact_kl_sequence:.4g} nats a completion\n"
            f"reference gradient: {self.reference_term}, {noise}{share}; "
            f"policy loss silent at {self.policy_silent_share:.1%} of tokens{clip}"
        )

    def render(self, format: str) -> str:
        """The report as ``table``, ``markdown``, ``csv`` or ``json``."""
        import pandas as pd

        if format == "json":
            return json.dumps(self.to_plain(), indent=1, allow_nan=False)
        if format == "csv":
            return tables.render(pd.DataFrame([term.flat_row() for term in self.terms]), "csv")
        parts = [[term.table_row() for term in self.terms], [term.layer_row() for term in self.terms if term.layers]]
        shown = [pd.DataFrame(rows) for rows in parts if rows and len(rows[0]) > 2]
        return "\n\n".join([self.headline(), *(tables.render(frame, format) for frame in shown)])


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value
