"""KLTerm: one KL penalty, written down as data.

The same object drives training, the exact oracle and the results table. Combinations without a meaning raise with the
reason; combinations that do something other than regularize are allowed, and :mod:`kl_comedy.kl.claims` says what.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kl_comedy.config.validate import check_record, check_rules, option, scalar
from kl_comedy.errors import UserError, unknown_key
from kl_comedy.kl import corrections as _corrections  # noqa: F401  (registers the built-ins)
from kl_comedy.kl import estimators as _estimators  # noqa: F401  (registers the built-ins)
from kl_comedy.kl.beta import Beta, BetaSchedule, BetaTarget, parse_beta
from kl_comedy.kl.term_rules import broken_rule
from kl_comedy.registry import ESTIMATORS, Entry

LEVELS = ("token", "sequence")
PLACEMENTS = ("reward", "loss")
CREDITS = ("total", "to_go", "own")
GRADIENTS = ("natural", "k2")
ANCHORS = ("current", "behaviour")
REFERENCES = ("initial", "ema", "periodic", "sampler", "teacher")
BASELINES = ("before", "after", "own", "exact", "batch")
WEIGHTS = ("none", "reference", "policy")
CAP_MODES = ("truncate", "mask", "each", "clip")


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
        "From `l = logp - ref_logp` to nats; `exact*`: over the whole vocabulary.",
        registry="estimators",
    )
    level: str = option("token", "The log-ratio of each token, or of the whole completion.", choices=LEVELS)
    placement: str = option(
        "reward",
        "`reward`: a detached cost that weights the score function. `loss`: differentiated.",
        choices=PLACEMENTS,
    )
    credit: str | None = option(
        None,
        "In reward: costs that weight the score of token t: all, those at u >= t, its own.",
        choices=CREDITS,
    )
    discount: float = option(
        1.0,
        "With credit `to_go`: the cost at u weights the score at t by `discount^(u - t)` (2603.25562).",
        above=0,
        maximum=1,
    )
    correction: str = option("none", "[Ratio](#names) of policy to behaviour policy.", registry="corrections")
    gradient: str = option(
        "natural",
        "In loss: the estimate's own, or its value with that of k2 (straight-through).",
        choices=GRADIENTS,
    )
    anchor: str = option("current", "Log-probs of the estimate: current, or recorded at rollout.", choices=ANCHORS)
    reference: str = option(
        "initial",
        "The initial policy, a moving average, a periodic copy, the sampler, or [`reference.teacher`](#reference).",
        choices=REFERENCES,
    )
    beta: Beta = option(
        1.0,
        "At least 0 (below, where the other terms outweigh it); a schedule `{start, end, steps, shape: linear or "
        "cosine}` in updates; or `{target: nats}`, adapted to a completion's KL to `reference`, exact where measured, "
        "else k1 (`init` 0.1, `gain` 0.1, `minimum` 1e-06, `maximum` 1000).",
        parse=partial(parse_beta, signed=True),
    )
    baseline: str | None = option(
        None,
        "In reward: the cost enters before or after the advantage's baseline and normalization; `own`: after, less the "
        "group's leave-one-out mean of the term's returns, weighted to stay unbiased off-policy; `exact`: after, less "
        "the exact KL of the token's own prefix (vOPD, 2605.07865); `batch`: after, less the mean cost of the batch's "
        "tokens, own ones included (SkyRL #1262), with credit `own`.",
        choices=BASELINES,
    )
    cap: float | None = option(None, "Bound of the correction's ratio: biased. Logged.", above=0)
    cap_mode: str = option(
        "truncate",
        "`truncate`: min(ratio, cap). `mask`: 0 beyond it. `each`: truncate every token's ratio before the product "
        "(V-trace). `clip`: PPO's, with credit `own`: 0 where the ratio has left `[2 - cap, cap]` towards less cost.",
        choices=CAP_MODES,
    )
    window: int | None = option(None, "Prefix ratios: the product of the last so many.", minimum=1)
    input_clamp: float | None = option(
        None, "Bound of the log-ratio (nats, both sides): no gradient beyond. Logged.", above=0
    )
    output_clamp: float | None = option(
        None, "Bound of the estimate (nats, both sides): no gradient beyond. Logged.", above=0
    )
    weight: str = option(
        "none",
        "Detached weight of each token's beta: the certainty `1 - H / log V` of the next token, `H` the entropy (nats) "
        "under the reference (2502.06533) or the policy (in the spirit of 2507.15778, which splits at a quantile).",
        choices=WEIGHTS,
    )
    weight_power: float = option(1.0, "Exponent of `weight`: large ones free the uncertain tokens.", above=0)
    options: Mapping[str, float | str] = dataclasses.field(
        default_factory=dict,
        hash=False,
        metadata={"doc": "Options of the estimator, as `{lam: 0.5}` of `k_lambda`."},
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", parse_beta(self.beta, "beta", signed=True))
        check_record(self)
        estimator = ESTIMATORS.get(self.estimator)
        allowed = estimator_defaults(estimator)
        options = dict(self.options)
        for name, value in options.items():
            if name not in allowed:
                raise unknown_key(f"options.{name}", value, list(allowed), f"{self.estimator} takes no such option")
            options[name] = scalar(value, str if isinstance(allowed[name], str) else float, f"options.{name}")
            check_rules(options[name], estimator.facts.get("options", {}).get(name, {}), f"options.{name}")
        object.__setattr__(self, "options", options)
        if self.placement == "reward":
            if self.credit is None:
                object.__setattr__(self, "credit", "to_go" if self.level == "token" else "total")
            if self.baseline is None:
                object.__setattr__(self, "baseline", "after")
        rule = broken_rule(self)
        if rule is not None:
            reason = rule.message.format(term=self)
            raise UserError(f"impossible KL term {self.label()}: {reason}")

    @property
    def needs(self) -> str:
        """What the estimator reads: ``log_ratio``, ``exact_reverse`` (``_forward``, ``_mixture``) or ``top_k``."""
        return str(ESTIMATORS.get(self.estimator).facts.get("needs", "log_ratio"))

    @property
    def reads(self) -> set[str]:
        """What the term reads: :attr:`needs`, the exact KL where that is its baseline, ``certainty`` for a weight."""
        extra = {"exact_reverse"} if self.baseline == "exact" else set()
        return {self.needs} | extra | ({"certainty"} if self.weight != "none" else set())

    @property
    def needs_update(self) -> bool:
        """Whether its costs of all rows of an update are needed before the first of them can be learned from."""
        return self.baseline in ("before", "own", "batch")

    @property
    def estimator_options(self) -> dict[str, Any]:
        """The estimator's options, defaults included."""
        return {**estimator_defaults(ESTIMATORS.get(self.estimator)), **self.options}

    @property
    def top(self) -> tuple[int, str] | None:
        """How many top tokens the estimator reads, and whose (``policy`` or ``reference``); None without any."""
        options = self.estimator_options
        return (int(options["k"]), str(options["tokens"])) if self.needs == "top_k" else None

    @property
    def mixture(self) -> float | None:
        """The reference's share of the mixture to which a Jensen-Shannon divergence is measured; None without any."""
        return float(self.estimator_options["share"]) if self.needs == "exact_mixture" else None

    @property
    def direction(self) -> str:
        """``reverse`` (pi || ref), ``forward`` or ``mixture`` (Jensen-Shannon): what its value estimates."""
        return {"exact_forward": "forward", "exact_mixture": "mixture"}.get(self.needs, "reverse")

    def label(self) -> str:
        """A short name: estimator, direction and level, then whatever differs from the defaults.

        >>> KLTerm("k3", placement="loss", beta=0.04).label()
        'k3_reverse_token in loss'
        """
        words = [f"{self.estimator}_{self.direction}_{self.level} in {self.placement}"]
        if self.placement == "reward" and self.level == "token":
            words.append(str(self.credit) + (f" x {self.discount:g}^n" if self.discount != 1 else ""))
        if self.options:
            words.append(",".join(f"{name}={_short(value)}" for name, value in sorted(self.options.items())))
        if self.correction != "none":
            cap = "" if self.cap is None else f"<={self.cap:g} {self.cap_mode}"
            window = "" if self.window is None else f" last {self.window}"
            words.append(f"x {self.correction}{window}{cap}")
        for name, bound in (("input", self.input_clamp), ("output", self.output_clamp)):
            if bound is not None:
                words.append(f"{name} clamped at {bound:g}")
        if self.weight != "none":
            words.append(f"x {self.weight} certainty" + (f"^{self.weight_power:g}" if self.weight_power != 1 else ""))
        for name, default in (("gradient", "natural"), ("anchor", "current"), ("reference", "initial")):
            if getattr(self, name) != default:
                words.append(f"{name}={getattr(self, name)}")
        if self.baseline not in (None, "after"):
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


def estimator_defaults(estimator: Entry[Any]) -> dict[str, Any]:
    """The options that an estimator takes, and their defaults."""
    parameters = list(inspect.signature(estimator.fn).parameters.values())[1:]
    return {parameter.name: parameter.default for parameter in parameters}


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
