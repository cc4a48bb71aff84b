"""KLTerm: one KL penalty, written down as data.

The same object drives training, the exact oracle and the results table. Cells that cannot mean anything
are rejected here with the reason; cells that mean something else than regularization are allowed, and
:mod:`kl_comedy.kl.claims` says what they do.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kl_comedy.errors import UserError, bad_value, unknown_key
from kl_comedy.kl import corrections as _corrections  # noqa: F401  (registers the built-ins)
from kl_comedy.kl import estimators as _estimators  # noqa: F401  (registers the built-ins)
from kl_comedy.kl.beta import Beta, BetaSchedule, BetaTarget, parse_beta
from kl_comedy.registry import CORRECTIONS, ESTIMATORS, Entry

LEVELS = ("token", "sequence")
PLACEMENTS = ("reward", "loss")
CREDITS = ("total", "to_go", "own")
GRADIENTS = ("natural", "k2")
ANCHORS = ("current", "behaviour")
REFERENCES = ("initial", "ema", "periodic", "sampler")
BASELINES = ("before", "after", "own")
CAP_MODES = ("truncate", "mask", "each")

_CHOICES = {
    "level": LEVELS,
    "placement": PLACEMENTS,
    "gradient": GRADIENTS,
    "anchor": ANCHORS,
    "reference": REFERENCES,
    "cap_mode": CAP_MODES,
}


@dataclass(frozen=True)
class KLTerm:
    """One KL penalty (DESIGN: the KL term).

    Args:
        estimator: registered name; ``k1 k2 k3 abs k_lambda exact exact_forward`` are built in.
        level: ``token`` (each token's ratio) or ``sequence`` (the ratio of the whole completion).
        placement: ``reward`` (detached cost that weights the score function) or ``loss`` (differentiated).
        credit: for ``reward``: the costs that weight the score of token t: ``total``, ``to_go`` (u >= t,
            the default at token level) or ``own``. Empty for ``loss``.
        correction: registered importance ratio pi/mu on the KL part; with ``cap`` and ``cap_mode``.
        gradient: for ``loss``: ``natural``, or ``k2`` (the value of the estimate, the gradient of k2).
        anchor: log-probs the estimate is evaluated at: ``current``, or ``behaviour`` (frozen at rollout).
        reference: ``initial``, ``ema``, ``periodic`` or ``sampler`` (the behaviour policy).
        beta: a number, a :class:`BetaSchedule` or a :class:`BetaTarget`.
        baseline: for ``reward``: whether the cost enters ``before`` or ``after`` (default) the advantage
            baseline and normalization; ``own`` is after it, less the term's own leave-one-out mean over
            the group, weighted so that it stays unbiased off-policy. Empty for ``loss``.
        cap, cap_mode: bound the ratio of the correction: ``truncate`` it at the cap, ``mask`` it to zero
            beyond, or truncate ``each`` token's ratio before the product (V-trace, 1802.01561).
        window: for prefix ratios: the product of the last ``window`` ratios instead of all.
        input_clamp: clamp of the log-ratio to ``+-input_clamp`` nats before the estimator.
        output_clamp: clamp of the estimate to ``+-output_clamp`` nats. Neither has a gradient beyond.
        options: keyword arguments of the estimator (``{"lam": 0.5}`` for ``k_lambda``).

    Raises:
        UserError: an unknown name, or a cell that cannot mean anything, with the reason.

    >>> KLTerm("k1", placement="reward", beta=0.1).credit
    'to_go'
    """

    estimator: str
    level: str = "token"
    placement: str = "reward"
    credit: str | None = None
    correction: str = "none"
    gradient: str = "natural"
    anchor: str = "current"
    reference: str = "initial"
    beta: Beta = 1.0
    baseline: str | None = None
    cap: float | None = None
    cap_mode: str = "truncate"
    window: int | None = None
    input_clamp: float | None = None
    output_clamp: float | None = None
    options: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", parse_beta(self.beta, "beta"))
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise bad_value(name, getattr(self, name), allowed)
        estimator = ESTIMATORS.get(self.estimator, key="estimator")
        CORRECTIONS.get(self.correction, key="correction")
        _check_options(self, estimator)
        if self.placement == "reward":
            if self.credit is None:
                object.__setattr__(self, "credit", "to_go" if self.level == "token" else "total")
            if self.baseline is None:
                object.__setattr__(self, "baseline", "after")
        reason = _impossible(self)
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
        """Plain data that :meth:`from_mapping` reads back; fields at their defaults are left out."""
        plain: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, BetaSchedule | BetaTarget):
                value = dataclasses.asdict(value)
            default = {} if item.name == "options" else item.default
            if item.name in ("estimator", "beta") or value != default:
                plain[item.name] = dict(value) if isinstance(value, Mapping) else value
        return plain

    @classmethod
    def from_mapping(cls, value: Any, key: str) -> KLTerm:
        """Build a term from config data; every error names the full config key under ``key``."""
        if not isinstance(value, Mapping):
            raise bad_value(key, value, f"a mapping with the fields {', '.join(cls.__dataclass_fields__)}")
        allowed = list(cls.__dataclass_fields__)
        for name in value:
            if name not in allowed:
                raise unknown_key(f"{key}.{name}", value[name], allowed)
        if "estimator" not in value:
            raise UserError(f"{key}: needs an estimator; allowed: {', '.join(ESTIMATORS.names())}")
        plain = dict(value)
        if "beta" in plain:
            plain["beta"] = parse_beta(plain["beta"], f"{key}.beta")
        try:
            return cls(**plain)
        except UserError as error:
            text = str(error)
            raise UserError(f"{key}: {text}" if text.startswith("impossible") else f"{key}.{text}") from None


def _check_options(term: KLTerm, estimator: Entry[Any]) -> None:
    if not isinstance(term.options, Mapping):
        raise bad_value("options", term.options, "a mapping of the estimator's keyword arguments")
    allowed = [p.name for p in list(inspect.signature(estimator.fn).parameters.values())[1:]]
    for name, value in term.options.items():
        if name not in allowed:
            raise unknown_key(f"options.{name}", value, allowed, f"{term.estimator} takes no such option")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise bad_value(f"options.{name}", value, "a finite number")


def _impossible_bounds(term: KLTerm, *, scope: object) -> str | None:
    """The reason why a cap, a window or a clamp cannot mean anything, or None."""
    for name in ("cap", "input_clamp", "output_clamp"):
        bound = getattr(term, name)
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float) or not bound > 0):
            return f"{name} must be a number above 0, got {bound!r}"
    if term.cap is not None and term.correction == "none":
        return "cap bounds the ratio of a correction, and correction is none"
    if term.input_clamp is not None and term.needs != "log_ratio":
        return f"input_clamp bounds a log-ratio, and {term.estimator} reads none"
    if term.window is not None:
        if isinstance(term.window, bool) or not isinstance(term.window, int) or term.window < 1:
            return f"window must be a whole number of at least 1, got {term.window!r}"
        if scope != "prefix":
            return f"window keeps the last ratios of a prefix, and correction {term.correction} has no prefix"
    return None


def _impossible(term: KLTerm) -> str | None:
    """The reason why a cell cannot mean anything, or None."""
    exact = term.needs != "log_ratio"
    correction = CORRECTIONS.get(term.correction)
    per_decision = correction.facts.get("weights") == "cost"
    reason = _impossible_bounds(term, scope=correction.facts.get("scope"))
    if reason:
        return reason
    if exact and term.level == "sequence":
        return f"{term.estimator} sums over the vocabulary at each prefix, and level sequence has none"
    if exact and term.anchor == "behaviour":
        return (
            f"{term.estimator} needs the full distribution, and only sampled log-probs of the behaviour policy are kept"
        )
    if exact and term.reference == "sampler":
        return f"{term.estimator} needs the sampler's full distribution, which rollouts do not carry"
    if exact and term.gradient == "k2":
        return f"{term.estimator} already has the gradient of its own KL; gradient: k2 is for sampled estimates"
    if term.level == "sequence" and term.correction not in ("none", "sequence", "token", "token_detached"):
        return f"correction {term.correction} weights per-token costs, and level sequence has one cost"
    if term.anchor == "behaviour" and term.reference == "sampler":
        return "the log-ratio of the sampler to itself is zero everywhere"
    if term.placement == "loss":
        if term.credit is not None:
            return "credit says which costs weight a score, and a term in loss has no score; leave credit out"
        if term.baseline is not None:
            return "baseline is about rewards; a term in loss never meets it"
        if term.anchor == "behaviour":
            return "log-probs frozen at rollout carry no gradient, so a term in loss would do nothing"
        if term.level == "sequence" and term.correction in ("token", "token_detached"):
            return f"correction {term.correction} is per token, and level sequence has one ratio; use sequence"
        return None
    if term.gradient != "natural":
        return "gradient is for terms in loss; in reward the estimate is a detached cost"
    if term.credit not in CREDITS:
        return f"credit must be one of {', '.join(CREDITS)}, got {term.credit!r}"
    if term.level == "sequence" and term.credit != "total":
        return f"level sequence has one cost for the whole completion, so credit must be total, not {term.credit}"
    if term.baseline not in BASELINES:
        return f"baseline must be one of {', '.join(BASELINES)}, got {term.baseline!r}"
    if term.baseline == "before" and term.correction != "none" and not per_decision:
        return (
            f"before the baseline the cost is part of the reward, and the policy loss weights its score; "
            f"correction {term.correction} would weight it twice (use baseline: after)"
        )
    return None
