"""KLTerm: one KL penalty, written down as data.

The same object drives training, the exact oracle and the results table. Combinations without a meaning raise with the
reason; combinations that do something other than regularize are allowed, and :mod:`kl_comedy.kl.claims` says what.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kl_comedy.config.validate import check_record, option
from kl_comedy.errors import UserError, unknown_key
from kl_comedy.kl import corrections as _corrections  # noqa: F401  (registers the built-ins)
from kl_comedy.kl import estimators as _estimators  # noqa: F401  (registers the built-ins)
from kl_comedy.kl.beta import Beta, BetaSchedule, BetaTarget, parse_beta
from kl_comedy.registry import CORRECTIONS, ESTIMATORS

LEVELS = ("token", "sequence")
PLACEMENTS = ("reward", "loss")
CREDITS = ("total", "to_go", "own")
GRADIENTS = ("natural", "k2")
ANCHORS = ("current", "behaviour")
REFERENCES = ("initial", "ema", "periodic", "sampler")
BASELINES = ("before", "after", "own")
CAP_MODES = ("truncate", "mask", "each")


@dataclass(frozen=True)
class KLTerm:
    """One KL penalty; also the schema of an item of ``kl`` in a config.

    ``credit`` defaults to ``to_go`` at level token and ``total`` at level sequence, ``baseline`` to ``after``; both are
    None for ``placement: loss``. Raises :class:`UserError` for an unknown name, a value out of range, or a combination
    without a meaning, with the reason.

    >>> KLTerm("k1", placement="reward", beta=0.1).credit
    'to_go'
    """

    estimator: str = option(
        ...,
        "From the log-ratio `l = logp - ref_logp` to nats. `exact*`: the KL over the whole vocabulary.",
        registry="estimators",
    )
    level: str = option("token", "Estimate each token's ratio, or the ratio of the whole completion.", choices=LEVELS)
    placement: str = option(
        "reward",
        "`reward`: a detached cost that weights the score function. `loss`: differentiated.",
        choices=PLACEMENTS,
    )
    credit: str | None = option(
        None,
        "In reward, the costs that weight the score of token t: all, those at u >= t, or its own.",
        choices=CREDITS,
    )
    correction: str = option(
        "none", "Ratio of policy to behaviour policy on the KL part ([names](#names)).", registry="corrections"
    )
    gradient: str = option(
        "natural",
        "In loss: the estimate's gradient, or its value with the gradient of k2 (straight-through).",
        choices=GRADIENTS,
    )
    anchor: str = option(
        "current", "The log-probs the estimate is evaluated at: current, or recorded at rollout.", choices=ANCHORS
    )
    reference: str = option(
        "initial",
        "What KL is measured against: the initial policy, a moving average, a periodic copy, the sampler.",
        choices=REFERENCES,
    )
    beta: Beta = option(
        1.0,
        "A number; a schedule `{start, end, steps, shape: linear or cosine}` in updates; or `{target: nats}`: adapted "
        "to keep the KL of a completion near it, exact where measured, else k1 "
        "(`init` 0.1, `gain` 0.1, `minimum` 1e-06, `maximum` 1000).",
        parse=parse_beta,
    )
    baseline: str | None = option(
        None,
        "In reward: the cost enters before or after the advantage's baseline and normalization; `own`: after it, less "
        "the leave-one-out mean of the term's returns over the group, weighted so that it stays unbiased off-policy.",
        choices=BASELINES,
    )
    cap: float | None = option(
        None, "The bound of the correction's ratio. Biased, so capped ratios are counted and logged.", above=0
    )
    cap_mode: str = option(
        "truncate",
        "`truncate`: min(ratio, cap). `mask`: ratios beyond it become 0. `each`: every token's ratio is truncated "
        "before the product (V-trace).",
        choices=CAP_MODES,
    )
    window: int | None = option(
        None, "For prefix ratios: the product of the last so many ratios instead of all.", minimum=1
    )
    input_clamp: float | None = option(
        None, "Bound of the log-ratio (nats, both sides) before the estimator: no gradient beyond. Logged.", above=0
    )
    output_clamp: float | None = option(
        None, "Bound of the estimate (nats, both sides): no gradient beyond. Counted and logged.", above=0
    )
    options: Mapping[str, float] = dataclasses.field(
        default_factory=dict,
        hash=False,
        metadata={"doc": "Keyword arguments of the estimator, as `{lam: 0.5}` of `k_lambda`."},
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", parse_beta(self.beta, "beta"))
        check_record(self)
        allowed = list(inspect.signature(ESTIMATORS.get(self.estimator).fn).parameters)[1:]
        for name, value in self.options.items():
            if name not in allowed:
                raise unknown_key(f"options.{name}", value, allowed, f"{self.estimator} takes no such option")
        if self.placement == "reward":
            if self.credit is None:
                object.__setattr__(self, "credit", "to_go" if self.level == "token" else "total")
            if self.baseline is None:
                object.__setattr__(self, "baseline", "after")
        reason = _why_impossible(self)
        if reason:
            raise UserError(f"impossible KL term {self.label()}: {reason}")

    @property
    def needs(self) -> str:
        """What the estimator reads: ``log_ratio``, ``exact_reverse`` or ``exact_forward``."""
        return str(ESTIMATORS.get(self.estimator).facts.get("needs", "log_ratio"))

    @property
    def direction(self) -> str:
        """``reverse`` (pi || ref) or ``forward``: the KL its value estimates."""
        return "forward" if self.needs == "exact_forward" else "reverse"

    def label(self) -> str:
        """A short name: estimator, direction and level, then whatever differs from the defaults.

        >>> KLTerm("k3", placement="loss", beta=0.04).label()
        'k3_reverse_token in loss'
        """
        words = [f"{self.estimator}_{self.direction}_{self.level} in {self.placement}"]
        if self.placement == "reward" and self.level == "token":
            words.append(str(self.credit))
        if self.options:
            words.append(",".join(f"{name}={value:g}" for name, value in sorted(self.options.items())))
        if self.correction != "none":
            cap = "" if self.cap is None else f"<={self.cap:g} {self.cap_mode}"
            window = "" if self.window is None else f" last {self.window}"
            words.append(f"x {self.correction}{window}{cap}")
        for name, bound in (("input", self.input_clamp), ("output", self.output_clamp)):
            if bound is not None:
                words.append(f"{name} clamped at {bound:g}")
        for name, default in (("gradient", "natural"), ("anchor", "current"), ("reference", "initial")):
            if getattr(self, name) != default:
                words.append(f"{name}={getattr(self, name)}")
        if self.baseline in ("before", "own"):
            words.append(f"{self.baseline} baseline")
        return " ".join(words)

    def to_mapping(self) -> dict[str, Any]:
        """Plain data that :func:`~kl_comedy.kl.resolve_terms` reads back; fields at their defaults are left out."""
        plain: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, BetaSchedule | BetaTarget):
                value = dataclasses.asdict(value)
            default = {} if item.name == "options" else item.default
            if item.name in ("estimator", "beta") or value != default:
                plain[item.name] = dict(value) if isinstance(value, Mapping) else value
        return plain


def _why_impossible(term: KLTerm) -> str | None:
    """The reason why a combination has no meaning, or None."""
    exact = term.needs != "log_ratio"
    correction = CORRECTIONS.get(term.correction).facts
    if term.cap is not None and term.correction == "none":
        return "cap bounds the ratio of a correction, and correction is none"
    if term.input_clamp is not None and exact:
        return f"input_clamp bounds a log-ratio, and {term.estimator} reads none"
    if term.window is not None and correction.get("scope") != "prefix":
        return f"window limits the ratios of a prefix, and correction {term.correction} has no prefix"
    if exact and term.level == "sequence":
        return f"{term.estimator} sums over the vocabulary at each prefix, and level sequence has none"
    if exact and term.anchor == "behaviour":
        return f"{term.estimator} needs the full distribution, and rollouts record sampled log-probs only"
    if exact and term.reference == "sampler":
        return f"{term.estimator} needs the sampler's full distribution, which rollouts do not carry"
    if exact and term.gradient == "k2":
        return f"{term.estimator} already has the gradient of its own KL; gradient: k2 is for sampled estimates"
    if term.level == "sequence" and term.correction not in ("none", "sequence", "token", "token_detached"):
        return f"correction {term.correction} weights per-token costs, and level sequence has one cost"
    if term.anchor == "behaviour" and term.reference == "sampler":
        return "the log-ratio of the sampler to itself is zero everywhere"
    if term.placement == "loss":
        return _why_impossible_in_loss(term)
    if term.gradient != "natural":
        return "gradient is for terms in loss; in reward the estimate is a detached cost"
    if term.level == "sequence" and term.credit != "total":
        return f"level sequence has one cost for the whole completion, so credit must be total, not {term.credit}"
    if term.baseline == "before" and term.correction != "none" and correction.get("weights") != "cost":
        return (
            f"before the baseline the cost is part of the reward, and the policy loss weights its score; "
            f"correction {term.correction} would weight it twice (use baseline: after)"
        )
    return None


def _why_impossible_in_loss(term: KLTerm) -> str | None:
    if term.credit is not None:
        return "credit says which costs weight a score, and a term in loss has no score; leave credit out"
    if term.baseline is not None:
        return "baseline is about costs in the reward; leave baseline out"
    if term.anchor == "behaviour":
        return "log-probs frozen at rollout carry no gradient, so a term in loss would do nothing"
    if term.level == "sequence" and term.correction in ("token", "token_detached"):
        return f"correction {term.correction} is per token, and level sequence has one ratio; use sequence"
    return None
