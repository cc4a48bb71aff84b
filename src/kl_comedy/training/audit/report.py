"""What an audit found: one frozen record per term, one for the whole; plain data, ready for JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kl_comedy.training.audit.statistics import Estimate

SIGNIFICANT = 0.01
"""A p-value below it is called a finding; one unbiased term in a hundred is then called biased by chance."""


@dataclass(frozen=True, kw_only=True)
class LayerFinding:
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
class TermFinding:
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
    layers: Mapping[str, LayerFinding]
    check: BetaCheck | None = None

    @property
    def verdict(self) -> str:
        """A few words for a table."""
        if self.check is not None and self.check.inert:
            return "INERT: beta does not change the gradient"
        if self.check is not None and self.check.wrong:
            return "WRONG: training descends another gradient"
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
    terms: Sequence[TermFinding]

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
