"""KLTerm: one KL penalty, written down as data.

The same object drives training, the exact oracle and the results table. Combinations without a meaning raise with the
reason; combinations that do something other than regularize are allowed, and :mod:`kl_comedy.kl.claims` says what.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kl_comedy.config.validate import check_record, check_rules, option, scalar
from kl_comedy.errors import UserError, bad_value, first_refusal, unknown_key
from kl_comedy.kl import corrections as _corrections  # noqa: F401  (registers the built-ins)
from kl_comedy.kl import estimators as _estimators  # noqa: F401  (registers the built-ins)
from kl_comedy.kl.beta import Beta, BetaSchedule, BetaTarget, parse_beta
from kl_comedy.kl.estimators import TopRequest
from kl_comedy.kl.term_label import term_label
from kl_comedy.kl.term_rules import RULES
from kl_comedy.registry import ESTIMATORS, Entry

LEVELS = ("token", "sequence")
PLACEMENTS = ("reward", "loss")
CREDITS = ("total", "to_go", "own")
GRADIENTS = ("natural", "k2")
ANCHORS = ("current", "behaviour")
REFERENCES = ("initial", "ema", "periodic", "old", "sampler", "teacher")
BASELINES = ("before", "after", "own", "exact", "batch")
WEIGHTS = ("none", "reference", "policy")
CAP_MODES = ("truncate", "mask", "each", "clip")

DEFAULT_CREDIT = {"token": "to_go", "sequence": "total"}
"""By level: past costs only add noise, and a completion's one cost has no past."""
ALL_TOKENS = sys.maxsize
"""A number of top tokens that is that of the vocabulary, whatever its size."""
ALWAYS_WRITTEN = ("estimator", "beta")
"""Fields that plain data names at their defaults too, so that a stored term says how strong it was."""


def parse_score_centring(value: Any, key: str) -> str | int | None:
    """A field's value as it is stored. Raises :class:`UserError`."""
    if value is None:
        return None
    if value == "exact":
        return "exact"
    allowed = "exact, a number of tokens of at least 1, or null"
    if not isinstance(value, int | float):
        raise bad_value(key, value, allowed)
    tokens = scalar(value, int, key)
    if tokens < 1:
        raise bad_value(key, value, allowed)
    return int(tokens)


@dataclass(frozen=True)
class KLTerm:
    """One KL penalty; also the schema of an item of ``kl`` in a config.

    With ``l = log pi - log ref`` the log-ratio in nats of policy and reference, and ``mu`` the sampler:

    - ``estimator``, ``options``: the function from ``l`` (or from the next-token distributions) to nats, by its
      registered name, and its own options.
    - ``level``: whether ``l`` is that of a token or of the whole completion.
    - ``placement``: ``reward``, a detached cost that weights the score function, or ``loss``, differentiated.
    - ``credit``, ``discount``: in the reward, which costs weight the score of a token, and the factor by which later
      ones fade per token. ``credit`` defaults to ``to_go`` at level token and to ``total`` at level sequence.
    - ``baseline``: in the reward, whether the cost enters before the advantage's baseline or after it (the default), or
      after it less a baseline of its own. Like ``credit`` it is None for ``placement: loss``.
    - ``score_centring``: in the reward, whether the score is taken less its expectation under the sampler: ``exact``,
      or from how many of the sampler's likeliest tokens; None for the score itself.
    - ``correction``, ``cap``, ``cap_mode``, ``window``: the importance ratio pi / mu, the bound of that ratio, how the
      bound acts, and how many of the last tokens a prefix ratio covers. A bound of None never acts.
    - ``gradient``: in the loss, the estimate's own gradient or that of k2.
    - ``anchor``: whether ``l`` is taken at the current log-probs or at those recorded at the rollout.
    - ``reference``: which policy ``ref`` is.
    - ``beta``: the coefficient, without unit: the loss gains ``beta`` per nat.
    - ``input_clamp``, ``output_clamp``: bounds in nats of ``l`` and of the estimate, on both sides; None for no bound.
    - ``weight``, ``weight_power``: a detached weight of each token, its certainty (0 to 1) to that power.

    Raises :class:`UserError` for an unknown name, a value out of range, or a combination without a meaning, with the
    reason (:mod:`kl_comedy.kl.term_rules`).

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
        "[What the divergence is measured against](references.md): the initial policy, a moving average, a periodic "
        "copy, the learner before a batch's first update, the sampler, or [`reference.teacher`](#reference).",
        choices=REFERENCES,
    )
    beta: Beta = option(
        1.0,
        "What the loss gains per nat, without unit. At least 0 (negative where the betas of the other terms outweigh "
        "it); a schedule `{start, end, steps, shape: linear or cosine}` in updates; or `{target: nats}`, adapted to "
        "the KL per completion to `reference`, exact where measured, else k1 (`init` 0.1, `gain` 0.1, `minimum` "
        "1e-06, `maximum` 1000).",
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
    score_centring: str | int | None = option(
        None,
        "In reward: each token's score less its [expectation under the sampler](off_policy_terms.md#score-centring) "
        "(2609.20807): `exact`, or from so many of the sampler's likeliest tokens. With the backend `hf`.",
        parse=parse_score_centring,
    )
    cap: float | None = option(None, "Bound of the correction's ratio; biased. Logged.", above=0)
    cap_mode: str = option(
        "truncate",
        "`truncate`: min(ratio, cap). `mask`: 0 beyond it. `each`: truncate every token's ratio before the product "
        "(V-trace). `clip`: PPO's, with credit `own`: 0 where the ratio has left `[2 - cap, cap]` towards less cost.",
        choices=CAP_MODES,
    )
    window: int | None = option(
        None, "How many tokens' ratios, the last ones, a prefix ratio multiplies; by default all.", minimum=1
    )
    input_clamp: float | None = option(
        None,
        "Bound of the log-ratio (nats, both sides). The estimate's own gradient ends there; that of `gradient: k2` "
        "does not. Logged.",
        above=0,
    )
    output_clamp: float | None = option(
        None, "Bound of the estimate (nats, both sides), as `input_clamp`. Logged.", above=0
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
        # The class is frozen: what a field becomes is set past its own guard, here and nowhere else.
        object.__setattr__(self, "beta", parse_beta(self.beta, "beta", signed=True))
        check_record(self)
        object.__setattr__(self, "options", _checked_options(ESTIMATORS.get(self.estimator), self.options))
        if self.placement == "reward":
            if self.credit is None:
                object.__setattr__(self, "credit", DEFAULT_CREDIT[self.level])
            if self.baseline is None:
                object.__setattr__(self, "baseline", "after")
        # Last, because a rule may ask for anything that is filled in above.
        reason = first_refusal(RULES, self)
        if reason is not None:
            raise UserError(f"impossible KL term {self.label()}: {reason}")

    @property
    def needs(self) -> str:
        """What the estimator reads: ``log_ratio``, ``exact_reverse`` (``_forward``, ``_mixture``) or ``top_k``."""
        return str(ESTIMATORS.get(self.estimator).facts.get("needs", "log_ratio"))

    @property
    def reads(self) -> set[str]:
        """What the term reads: :attr:`needs`, an exact KL that is its baseline, ``certainty``, ``sampler_top``."""
        # A pass computes only what some term reads: each of these costs a sum over the vocabulary.
        read = {self.needs}
        if self.baseline == "exact":
            read.add("exact_reverse")
        if self.weight != "none":
            read.add("certainty")
        if self.score_centring is not None:
            read.add("sampler_top")
        return read

    @property
    def reads_past_policy(self) -> bool:
        """Whether it reads probabilities under the sampler that rollouts do not record: those of tokens not drawn."""
        if self.reference != "sampler":
            return False
        read = self.reads - {"log_ratio", "sampler_top"}
        if self.weight == "policy":
            read.discard("certainty")
        return bool(read)

    @property
    def needs_update(self) -> bool:
        """Whether its costs of all rows of an update are needed before the first of them can be learned from."""
        return self.baseline in ("before", "own", "batch")

    @property
    def estimator_options(self) -> dict[str, Any]:
        """The estimator's options, defaults included."""
        return {**estimator_defaults(ESTIMATORS.get(self.estimator)), **self.options}

    @property
    def top(self) -> TopRequest | None:
        """The top tokens that the estimator reads, of the policy or the reference; None if it reads none."""
        if self.needs != "top_k":
            return None
        options = self.estimator_options
        return TopRequest(int(options["k"]), str(options["tokens"]))

    @property
    def sampler_top(self) -> TopRequest | None:
        """The sampler's top tokens that ``score_centring`` reads; None if it reads none."""
        if self.score_centring is None:
            return None
        if self.score_centring == "exact":
            return TopRequest(ALL_TOKENS, "sampler")
        return TopRequest(int(self.score_centring), "sampler")

    @property
    def mixture(self) -> float | None:
        """The reference's share (0 to 1) of the mixture in a Jensen-Shannon divergence; None for other divergences."""
        if self.needs != "exact_mixture":
            return None
        return float(self.estimator_options["share"])

    @property
    def direction(self) -> str:
        """What the value estimates: ``reverse`` (pi || ref), ``forward`` (ref || pi), ``mixture`` (Jensen-Shannon)."""
        # By what is read and not by the name: a plugin may call its forward KL as it likes.
        if self.needs == "exact_forward":
            return "forward"
        if self.needs == "exact_mixture":
            return "mixture"
        return "reverse"

    def label(self) -> str:
        """A short name: estimator, direction and level, then whatever differs from the defaults.

        >>> KLTerm("k3", placement="loss", beta=0.04).label()
        'k3_reverse_token in loss'
        """
        return term_label(self)

    def to_mapping(self) -> dict[str, Any]:
        """Plain data that :func:`~kl_comedy.kl.resolve_terms` reads back; fields at their defaults are left out.

        Hashes of configs and stored certificates depend on which fields are written and in which order: a new field
        must have the default under which older terms keep their meaning.
        """
        # In the order of the fields, which is that of every stored term.
        mapping: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            default = item.default
            if item.name == "options":
                default = {}
            if item.name not in ALWAYS_WRITTEN and value == default:
                continue
            if isinstance(value, BetaSchedule | BetaTarget):
                value = dataclasses.asdict(value)
            elif isinstance(value, Mapping):
                value = dict(value)
            mapping[item.name] = value
        return mapping


def top_logps_of(terms: Iterable[KLTerm]) -> int:
    """How many of the sampler's likeliest tokens ``terms`` read before each token; 0 where they read none."""
    return max((term.sampler_top[0] for term in terms if term.sampler_top is not None), default=0)


def estimator_defaults(estimator: Entry[Any]) -> dict[str, Any]:
    """The options that an estimator takes, and their defaults: its parameters after the first, its argument."""
    # From the signature, so that an estimator declares its options by being written.
    options = list(inspect.signature(estimator.fn).parameters.values())[1:]
    return {option.name: option.default for option in options}


def _checked_options(estimator: Entry[Any], given: Mapping[str, Any]) -> dict[str, float | str]:
    """The given options, of the type of their defaults. Raises :class:`UserError` for one that is not taken."""
    defaults = estimator_defaults(estimator)
    declared = estimator.facts.get("options", {})
    options: dict[str, float | str] = {}
    for name, value in given.items():
        key = f"options.{name}"
        if name not in defaults:
            raise unknown_key(key, value, list(defaults), f"{estimator.name} takes no such option")
        # Numbers are floats, also where the default is a whole number: a config may say 2 or 2.0.
        expected_type: type = float
        if isinstance(defaults[name], str):
            expected_type = str
        options[name] = scalar(value, expected_type, key)
        check_rules(options[name], declared.get(name, {}), key)
    return options
