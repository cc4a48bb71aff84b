"""Checks what estimators and corrections declare: at log-ratios of up to 100 nats, in float64 and in float32.

The log-ratios ``l`` of two distributions obey ``E_pi[exp(-l)] = 1`` and nothing else. So the mean of ``f(l)`` is the
reverse KL for every policy and reference exactly where ``f(l) = l + c (exp(-l) - 1)`` with one constant ``c``, and the
mean of ``f'(l) grad log pi`` is the gradient of a KL exactly where ``f'`` is ``l`` (reverse) or ``-exp(-l)`` (forward)
plus a constant. A claim is thus an identity of numbers, which is checked at every point of a grid; no distribution is
drawn, but for a top-k estimator, whose sampled token is summed over. A correction is checked against the product of the
ratios in its scope, in completions of up to 512 tokens.

Legend: ``P`` points of the grid, ``B`` completions, ``T`` tokens.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_comedy.config.validate import check_rules
from kl_comedy.errors import UserError, bad_value, unknown_key
from kl_comedy.kl.estimators import TopK, TopTokens, estimate
from kl_comedy.kl.term import estimator_defaults
from kl_comedy.registry import CORRECTIONS, ESTIMATORS, Entry, plugin_line

VALUES = ("value:reverse", "value:forward", "value:mixture")
PATHWISE = ("pathwise:zero", "pathwise:token_reverse", "pathwise:token_forward", "pathwise:token_mixture")
CLAIMS = (*VALUES, *PATHWISE, "nonnegative")
OPTION_RULES = ("choices", "minimum", "maximum", "above", "whole")
OPTIONS_NEEDED = {"top_k": ("k", "tokens"), "exact_mixture": ("share",)}
"""Options that a term reads to make the argument of an estimator, by what the estimator needs."""
RANGE = 100.0
"""The largest log-ratio (nats) that is checked."""
RANGE32 = 80.0
"""The same for the ratios of corrections in float32, which overflow at 88.7 nats."""
SMALLEST = 1e-6
"""The least log-ratio that is checked, besides an end of the range."""
POINTS = 20_000
"""Half of them evenly spaced, half in constant proportion, each at random within its cell."""
TOLERANCE = 1e-10
"""In float64: relative to the figures compared, and absolute below 1."""
UNIT = torch.finfo(torch.float32).eps / 2
ROUNDINGS = 16
"""In float32 a figure may be off by what so many roundings of its argument or of an option do to it ..."""
FIGURE_ROUNDINGS = 256
"""... and by so many of itself, of 1, of its argument and of the options: ``(a - b) / (alpha (1 - alpha))`` multiplies
the roundings of ``a`` and ``b`` by 21 for an alpha of 0.05. Half precision is off by more."""
LARGEST32 = torch.finfo(torch.float32).max
NEAR_OVERFLOW = 1024.0
"""A figure of more than the largest number over this may overflow on its way, as ``-l exp(-l) - exp(-l) + 1`` does."""
SHAPES = (1, 16, 200)
"""Longest rows of the batches, of up to :data:`LARGEST_BATCH` rows, in which figures must be those of one long list."""
LARGEST_BATCH = 60
CALLS = 500
"""How often an estimator is called with the same log-ratios, which must have the same value each time."""
NEEDS_BY = ("on_policy", "off_policy")
"""The regimes in which an estimator may say which options its claims need."""
SCOPES = ("none", "token", "prefix", "sequence")
LENGTHS = (1, 8, 32)
"""Tokens of the completions in which a correction is checked; a fourth length of up to :data:`LONGEST` is drawn."""
LONGEST = 512
WINDOW = 5
ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class EstimatorCoverage:
    """With what an estimator was checked.

    ``options``: the values of each option, ascending. ``float32``: the least and the largest argument (nats) at which
    its value and its gradient are finite in float32; None for a top-k estimator, which reads distributions and no
    log-ratio. ``distributions``, ``vocabulary``: of a top-k estimator, how many it was given, of how many tokens.
    """

    options: dict[str, list[float] | list[str]]
    float32: tuple[float, float] | None = None
    distributions: int = 0
    vocabulary: int = 0


@dataclass(frozen=True, kw_only=True)
class CorrectionCoverage:
    """With what a correction was checked: lengths of completions, windows, and the log-ratios (nats) in float32."""

    tokens: list[int]
    windows: list[int]
    float32: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class EstimatorCheck:
    """The declarations of an estimator that are false, one sentence each, and with what it was checked."""

    failures: list[str]
    covered: EstimatorCoverage


@dataclass(frozen=True, kw_only=True)
class CorrectionCheck:
    """The declarations of a correction that are false, one sentence each, and with what it was checked."""

    failures: list[str]
    covered: CorrectionCoverage


@dataclass(frozen=True, kw_only=True)
class PartsCoverage:
    """With what all estimators and corrections of a call were checked, by name."""

    seed: int
    log_ratios: tuple[float, float]
    points: int
    dtypes: tuple[str, ...]
    estimators: dict[str, EstimatorCoverage]
    corrections: dict[str, CorrectionCoverage]


# --- estimators -----------------------------------------------------------------------------------------------------
def check_estimator(entry: Entry[Any], *, seed: int = 0, options: Iterable[Mapping[str, Any]] = ()) -> EstimatorCheck:
    """Check the claims of an estimator for its default options, for draws of them and for ``options``.

    With claims or without, float32 must have the values and gradients of float64, up to rounding. Raises
    :class:`UserError` for an unknown claim and for an estimator that fails, or does not return a finite tensor of its
    argument's shape.
    """
    for claim in entry.claims:
        if claim not in CLAIMS:
            raise UserError(f"estimator {entry.name!r} claims {claim!r}; allowed: {', '.join(CLAIMS)}")
    generator = torch.Generator().manual_seed(seed)
    if entry.facts.get("needs") == "top_k":
        return _check_top_k(entry, [*option_sets(entry, generator), *options], generator)
    argument_P = _grid(0.0 if _exact(entry) else -RANGE, generator)
    failures: dict[str, str] = {}
    low, high = float(argument_P[0]), float(argument_P[-1])
    sets = [*option_sets(entry, generator), *(dict(each) for each in options if each)]
    if unchecked := _claims_never_checked(entry, sets):
        failures["claims_need"] = unchecked
    for chosen in sets:
        value_P, slope_P = _evaluate(entry, argument_P, chosen)
        hint = _declare(entry, chosen)
        claims = entry.claims if any(_claims_apply(entry, chosen, regime) for regime in NEEDS_BY) else ()
        for claim in claims:
            reason = _broken_claim(entry, claim, argument_P, value_P, slope_P)
            if reason:
                sentence = f"estimator {entry.name!r} claims {claim}{_with(chosen)}, and {reason}{hint}"
                failures.setdefault(claim, sentence)
        if reason := _depends_on_batch(entry, argument_P, value_P, slope_P, chosen, generator):
            failures.setdefault("batch", f"estimator {entry.name!r}{_with(chosen)} {reason}")
        reason, finite_P = _float32(entry, chosen, argument_P, value_P, slope_P)
        if reason:
            failures.setdefault("float32", f"estimator {entry.name!r}{_with(chosen)} {reason}{hint}")
        if bool(finite_P.any()):
            low = max(low, float(argument_P[finite_P].min()))
            high = min(high, float(argument_P[finite_P].max()))
    if "batch" not in failures and (reason := _depends_on_calls(entry, argument_P, generator)):
        failures["calls"] = f"estimator {entry.name!r} {reason}"
    covered = EstimatorCoverage(options=_tried(sets), float32=(low, high))
    return EstimatorCheck(failures=list(failures.values()), covered=covered)


def _claims_apply(entry: Entry[Any], chosen: Mapping[str, Any], regime: str) -> bool:
    """Whether the claims are meant to hold in ``regime`` with these options (the fact ``claims_need``)."""
    needed = entry.facts.get("claims_need", {}).get(regime, {})
    options = {**estimator_defaults(entry), **chosen}
    return all(options[name] in values for name, values in needed.items())


def _claims_never_checked(entry: Entry[Any], sets: Sequence[Mapping[str, Any]]) -> str | None:
    """That claims hold with options only that no value is allowed to have: such claims say nothing."""
    needed = entry.facts.get("claims_need", {})
    taken = estimator_defaults(entry)
    for regime, options in needed.items():
        if regime not in NEEDS_BY:
            raise unknown_key(f"estimator {entry.name!r}: claims_need.{regime}", options, NEEDS_BY)
        for name in options:
            if name not in taken:
                raise unknown_key(f"estimator {entry.name!r}: claims_need.{regime}.{name}", options[name], list(taken))
    if not entry.claims or any(_claims_apply(entry, chosen, regime) for chosen in sets for regime in NEEDS_BY):
        return None
    return f"estimator {entry.name!r} makes claims for options only that it never has (claims_need: {needed})"


def _declare(entry: Entry[Any], options: Mapping[str, Any]) -> str:
    """How a plugin declares what its options may be, where some of ``options`` have no declaration; else nothing."""
    declared = entry.facts.get("options", {})
    defaults = estimator_defaults(entry)
    missing: dict[str, dict[str, float]] = {}
    for name, value in options.items():
        if name in declared or isinstance(value, str):
            continue
        default = float(defaults[name])
        if value <= 0 < default:
            missing[name] = {"above": 0}
        elif value < default:
            missing[name] = {"minimum": default}
        elif value > default:
            missing[name] = {"maximum": default}
    if not missing:
        return ""
    return f"; declare what the option may be, as options={missing}"


def _tried(sets: Sequence[Mapping[str, Any]]) -> dict[str, list[float] | list[str]]:
    """The values that each option has in some of the sets, ascending; an option has numbers or words, never both."""
    tried: dict[str, set[Any]] = {}
    for chosen in sets:
        for name, value in chosen.items():
            tried.setdefault(name, set()).add(value if isinstance(value, str) else float(value))
    return {name: sorted(values) for name, values in tried.items()}


TOP_VOCABULARY = 40
TOP_POINTS = 12
"""Tokens and distributions with which a top-k estimator is checked; the spread of their logits is 0.1 to 32 nats."""
TOP_POINTS32 = 6
"""Of these, those of less than 2 nats are compared in float32: beside a sure token, masses are differences of ones."""
TOLERANCE_TOP32 = 1e-3


@dataclass(frozen=True, kw_only=True)
class _Distributions:
    """Next-token log-probs (nats) at some prefixes, ``[P, V]``, and the policy's logits, of which they are made."""

    logits_PV: Tensor
    ref_PV: Tensor
    stale_PV: Tensor

    @property
    def policy_PV(self) -> Tensor:
        return self.logits_PV.log_softmax(-1)

    def select(self, rows: slice) -> _Distributions:
        return _Distributions(**{name: tensor[rows] for name, tensor in vars(self).items()})

    def float(self) -> _Distributions:
        """In float32."""
        return _Distributions(**{name: tensor.float() for name, tensor in vars(self).items()})


def _check_top_k(entry: Entry[Any], sets: Sequence[Mapping[str, Any]], generator: torch.Generator) -> EstimatorCheck:
    """Check a top-k estimator on random distributions, the sampled token summed over, ``[P, V, V]``.

    The policy's log-probs reach down to about -100 nats; the sampler is the policy, or another one.
    """
    spread_P11 = torch.logspace(-1, 1.5, TOP_POINTS, dtype=torch.float64)[:, None, None]
    noise_P3V = torch.randn(TOP_POINTS, 3, TOP_VOCABULARY, generator=generator, dtype=torch.float64)
    logits_PV, ref_PV, stale_PV = (spread_P11 * noise_P3V).unbind(1)
    at = _Distributions(logits_PV=logits_PV, ref_PV=ref_PV.log_softmax(-1), stale_PV=stale_PV.log_softmax(-1))
    sets = [*sets, *_sets_with_a_tail(entry, sets, generator)]
    failures: dict[str, str] = {}
    if unchecked := _claims_never_checked(entry, sets):
        failures["claims_need"] = unchecked
    for chosen in sets:
        for regime in NEEDS_BY:
            reasons = _top_k_reasons(entry, at, chosen, regime)
            for subject, reason in reasons.items():
                failures.setdefault(subject, f"{reason}{_declare(entry, chosen)}")
    covered = EstimatorCoverage(options=_tried(sets), distributions=TOP_POINTS, vocabulary=TOP_VOCABULARY)
    return EstimatorCheck(failures=list(failures.values()), covered=covered)


def _sets_with_a_tail(
    entry: Entry[Any], sets: Sequence[Mapping[str, Any]], generator: torch.Generator
) -> list[dict[str, Any]]:
    """Each set of options again with a k that leaves tokens outside S, drawn anew, as far as it is allowed."""
    rules = entry.facts.get("options", {}).get("k", {})
    with_a_tail = []
    for chosen in sets:
        k = float(torch.randint(1, TOP_VOCABULARY, (1,), generator=generator))
        if _allowed(k, rules):
            with_a_tail.append({**chosen, "k": k})
    return with_a_tail


def _top_k_reasons(entry: Entry[Any], at: _Distributions, chosen: Mapping[str, Any], regime: str) -> dict[str, str]:
    """What is false of a top-k estimator with one set of options, by claim or subject."""
    about = f"estimator {entry.name!r}{_with(chosen)}"
    where = regime.replace("_", "-")
    logits_PV = at.logits_PV.clone().requires_grad_(True)
    at = dataclasses.replace(at, logits_PV=logits_PV)
    sampler_PV = at.stale_PV if regime == "off_policy" else at.policy_PV.detach()
    value_PV = _top_k_value(entry, at, chosen, regime)
    if not bool(torch.isfinite(value_PV).all()):
        return {"finite": f"{about} has a value {where} that is not finite"}
    reasons = {}
    if _claims_apply(entry, chosen, regime):
        logp_PV = at.policy_PV
        mean_P = (sampler_PV.exp() * value_PV).sum(1)
        exact = {
            "reverse": (logp_PV.exp() * (logp_PV - at.ref_PV)).sum(1),
            "forward": (at.ref_PV.exp() * (at.ref_PV - logp_PV)).sum(1),
        }
        for claim in entry.claims:
            if reason := _broken_top_k_claim(claim, value_PV, mean_P, exact, logits_PV):
                reasons[claim] = f"estimator {entry.name!r} claims {claim}{_with(chosen)}, and {where} {reason}"
    value_PV = value_PV.detach()
    some = slice(2, 5)
    alone_PV = _top_k_value(entry, at.select(some), chosen, regime).detach()
    with torch.no_grad():
        quiet_PV = _top_k_value(entry, at, chosen, regime)
    if bool(_differ(alone_PV, value_PV[some], value_PV[some]).any()):
        reasons["batch"] = f"{about} has other values {where} when prefixes stand in a smaller batch"
    elif bool(_differ(quiet_PV, value_PV, value_PV).any()):
        reasons["calls"] = f"{about} has another value {where} in a second call, without gradients recorded"
    return reasons | _top_k_float32(entry, at, chosen, regime)


def _top_k_float32(entry: Entry[Any], at: _Distributions, chosen: Mapping[str, Any], regime: str) -> dict[str, str]:
    """That value or gradient in float32 are not those of float64, where no token is nearly sure."""
    figures = {}
    narrow = at.select(slice(0, TOP_POINTS32)).float()
    for dtype in (torch.float64, torch.float32):
        logits_PV = narrow.logits_PV.detach().to(dtype).requires_grad_(True)
        same = _Distributions(logits_PV=logits_PV, ref_PV=narrow.ref_PV.to(dtype), stale_PV=narrow.stale_PV.to(dtype))
        value_PV = _top_k_value(entry, same, chosen, regime)
        figures[dtype] = (value_PV.detach().double(), _slope(entry, value_PV, logits_PV, chosen).double())
    for number, what in enumerate(("value", "gradient")):
        wide, small = figures[torch.float64][number], figures[torch.float32][number]
        if not bool(((small - wide).abs() <= TOLERANCE_TOP32 * (1 + wide.abs())).all()):
            about = f"estimator {entry.name!r}{_with(chosen)}"
            return {"float32": f"{about} has another {what} {regime.replace('_', '-')} in float32 than in float64"}
    return {}


def _top_k_value(entry: Entry[Any], at: _Distributions, chosen: Mapping[str, Any], regime: str) -> Tensor:
    """The values ``[P, V]`` at each prefix, for each token that may be sampled there."""
    options = {**estimator_defaults(entry), **chosen}
    policy_PV = at.policy_PV
    k = min(int(options["k"]), TOP_VOCABULARY)
    ids_PK = (at.ref_PV if options["tokens"] == "reference" else policy_PV.detach()).topk(k).indices
    inside_PV = torch.zeros_like(policy_PV, dtype=torch.bool).scatter(1, ids_PK, True)
    ids_PVK = ids_PK[:, None].expand(-1, TOP_VOCABULARY, -1)
    logp_PVK = policy_PV[:, None].expand(-1, TOP_VOCABULARY, -1).gather(2, ids_PVK)
    ref_PVK = at.ref_PV[:, None].expand(-1, TOP_VOCABULARY, -1).gather(2, ids_PVK)
    sampler_PV = at.stale_PV if regime == "off_policy" else policy_PV.detach()
    argument = TopK(
        top=TopTokens(logp_PVK, ref_PVK, inside_PV),
        logp_BT=policy_PV,
        ref_logp_BT=at.ref_PV,
        behaviour_logp_BT=sampler_PV,
    )
    return _call(entry, argument, (logp_PVK, ref_PVK, inside_PV, policy_PV, at.ref_PV, sampler_PV), chosen)


def _broken_top_k_claim(
    claim: str, value_PV: Tensor, mean_P: Tensor, exact: Mapping[str, Tensor], logits_PV: Tensor
) -> str | None:
    """Why a claim of a top-k estimator does not hold; ``exact`` has the KLs ``[P]`` by direction."""
    kind, _, target = claim.partition(":")
    if kind == "nonnegative":
        wrong_P, reason = value_PV.amin(1) < -1e-12, "is negative"
    elif kind == "value":
        wrong_P, reason = _differ(mean_P, exact[target], exact[target]), f"its mean is not the {target} KL"
    else:
        aim_P = 0.0 * mean_P if target == "zero" else exact[target.removeprefix("token_")]
        slope_PV, aim_PV = (
            torch.autograd.grad(each.sum(), logits_PV, retain_graph=True)[0] for each in (mean_P, aim_P)
        )
        wrong_P = _differ(slope_PV, aim_PV, exact["reverse"][:, None]).any(1)
        reason = f"the mean of its gradient is not that of {target}"
    return reason if bool(wrong_P.any()) else None


def _differ(figure: Tensor, expected: Tensor, scale: Tensor) -> Tensor:
    """Where a figure is off by more than :data:`TOLERANCE` of ``scale``, or is not a number."""
    return ~((figure - expected).abs() <= TOLERANCE * scale.abs().clamp(min=1.0))


def option_sets(entry: Entry[Any], generator: torch.Generator) -> list[dict[str, Any]]:
    """The options to check an estimator with: none, each on its own at its bounds and at random, all together.

    An estimator declares what an option may be by the fact ``options``, as ``{"width": {"above": 0}}``; one without a
    declaration may be any number. Raises :class:`UserError` for a declaration that is none.
    """
    parameters = list(inspect.signature(entry.fn).parameters.values())[1:]
    declared = entry.facts.get("options", {})
    key, points = f"estimator {entry.name!r}: options", {}
    needs = str(entry.facts.get("needs", "log_ratio"))
    for name in OPTIONS_NEEDED.get(needs, ()):
        if name not in [parameter.name for parameter in parameters]:
            raise UserError(f"{key}: needs={needs!r} is for an estimator with the options {OPTIONS_NEEDED[needs]}")
    for name, rules in declared.items():
        if name not in [parameter.name for parameter in parameters]:
            raise unknown_key(f"{key}.{name}", rules, [parameter.name for parameter in parameters])
        for rule in rules:
            if rule not in OPTION_RULES:
                raise unknown_key(f"{key}.{name}.{rule}", rules[rule], OPTION_RULES)
    for parameter in parameters:
        rules = declared.get(parameter.name, {})
        worded = isinstance(parameter.default, str) and "choices" in rules
        if not worded and (isinstance(parameter.default, bool) or not isinstance(parameter.default, int | float)):
            raise bad_value(f"{key}.{parameter.name}", parameter.default, "a number as the default")
        check_rules(parameter.default, rules, f"{key}.{parameter.name}")
        points[parameter.name] = _points(parameter.default, rules, generator)
    single = [{name: point} for name in points for point in points[name]]
    together = [{name: values[n % len(values)] for name, values in points.items()} for n in (-1, -2, -3, -4)]
    return [{}, *single, *(together if len(points) > 1 else [])]


def _points(default: Any, rules: Mapping[str, Any], generator: torch.Generator) -> list[Any]:
    """The default, the bounds, 0, 1 and -1 and four draws, as far as they are allowed; every one of ``choices``."""
    if "choices" in rules:
        return list(rules["choices"])
    default = float(default)
    low, high = rules.get("minimum", rules.get("above", -math.inf)), rules.get("maximum", math.inf)
    reach = 10.0 * max(1.0, abs(default))
    start, stop = max(low, default - reach), min(high, default + reach)
    draws: list[float] = (start + (stop - start) * torch.rand(4, generator=generator, dtype=torch.float64)).tolist()
    draws = [float(round(point)) for point in draws] if rules.get("whole") else draws
    candidates = dict.fromkeys([default, low, high, 0.0, 1.0, -1.0, default / 10, default * 10, *draws])
    return [point for point in candidates if math.isfinite(point) and _allowed(point, rules)]


def _allowed(point: float, rules: Mapping[str, Any]) -> bool:
    try:
        check_rules(point, rules, "")
    except UserError:
        return False
    return True


def _grid(low: float, generator: torch.Generator) -> Tensor:
    """Points from ``low`` to :data:`RANGE`, with both ends, in ascending order; float64, exact in float32."""
    cells = torch.arange(POINTS // 2, dtype=torch.float64)
    even_P, share_P = (cells + torch.rand(2, len(cells), generator=generator, dtype=torch.float64)) / len(cells)
    size_P = SMALLEST * (RANGE / SMALLEST) ** share_P
    if low < 0:
        size_P[::2] *= -1
    ends = torch.tensor([low, RANGE], dtype=torch.float64)
    return torch.cat([ends, low + (RANGE - low) * even_P, size_P]).float().double().sort().values


def _exact(entry: Entry[Any]) -> bool:
    return str(entry.facts.get("needs", "log_ratio")) != "log_ratio"


def _with(options: Mapping[str, float]) -> str:
    texts = [f"{name}={value if isinstance(value, str) else f'{value:.4g}'}" for name, value in options.items()]
    return " with " + ", ".join(texts) if options else ""


def _at(entry: Entry[Any], argument: Tensor) -> str:
    return f"at {'an exact KL' if _exact(entry) else 'a log-ratio'} of {float(argument):.4g} nats"


def _point_to_report(wrong_P: Tensor, argument_P: Tensor) -> int:
    """The wrong point nearest to two nats: neither where everything is small nor where everything is huge."""
    return int(torch.where(wrong_P, (argument_P.abs() / 2.0).log().abs(), torch.inf).argmin())


def _depends_on_batch(
    entry: Entry[Any],
    argument_P: Tensor,
    value_P: Tensor,
    slope_P: Tensor,
    options: Mapping[str, float],
    generator: torch.Generator,
) -> str | None:
    """Whether the figure of a log-ratio depends on the shape, on its neighbours or on gradients being recorded."""
    for longest in SHAPES:
        rows, columns = (
            int(torch.randint(1, most + 1, (1,), generator=generator)) for most in (LARGEST_BATCH, longest)
        )
        order_P = torch.randperm(len(argument_P), generator=generator)[: rows * columns]
        among_BT = argument_P[order_P].reshape(-1, min(columns, len(order_P)))
        value_BT, slope_BT = _evaluate(entry, among_BT, options)
        with torch.no_grad():
            quiet_BT = _call(entry, among_BT, (among_BT,), options)
        figures = (("is", value_BT, value_P), ("is, without gradients recorded,", quiet_BT, value_P))
        for what, figure_BT, alone_P in (*figures, ("has the gradient", slope_BT, slope_P)):
            expected_P, figure_P = alone_P[order_P], figure_BT.flatten()
            wrong_P = _differ(figure_P, expected_P, expected_P)
            if bool(wrong_P.any()):
                at = _point_to_report(wrong_P, argument_P[order_P])
                where = f"{_at(entry, argument_P[order_P][at])} in a batch of shape {list(among_BT.shape)}"
                return f"{what} {float(figure_P[at]):.6g} {where}, and {float(expected_P[at]):.6g} in one list"
    return None


def _depends_on_calls(entry: Entry[Any], argument_P: Tensor, generator: torch.Generator) -> str | None:
    """Whether the value of the same log-ratios changes from call to call: a counter, a running mean, noise."""
    some_P = argument_P[torch.randint(len(argument_P), (8,), generator=generator)]
    first_P = _call(entry, some_P, (some_P,), {})
    for call in range(CALLS):
        later_P = _call(entry, some_P, (some_P,), {})
        if not torch.equal(first_P, later_P):
            at = int((first_P != later_P).nonzero()[0])
            figures = f"{float(first_P[at]):.6g} at first, and {float(later_P[at]):.6g} {call + 1} calls later"
            return f"depends on earlier calls: it is {figures} {_at(entry, some_P[at])}"
    return None


def _evaluate(entry: Entry[Any], argument_P: Tensor, options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Value and derivative at each point.

    Raises :class:`UserError` where it raises, changes its argument, or a value in float64 is not finite.
    """
    leaf_P = argument_P.clone().requires_grad_(True)
    given_P = leaf_P * 1.0  # no leaf, as in training, where a change in place raises nothing
    value_P = _call(entry, given_P, (given_P,), options)
    slope_P = _slope(entry, value_P, leaf_P, options)
    value_P = value_P.detach()
    bad_P = ~torch.isfinite(value_P)
    if argument_P.dtype == torch.float64 and bool(bad_P.any()):
        at = _point_to_report(bad_P, argument_P)
        about = f"estimator {entry.name!r}{_with(options)}"
        raise UserError(f"{about} is {float(value_P[at])} {_at(entry, argument_P[at])}{_declare(entry, options)}")
    return value_P, slope_P


def _call(entry: Entry[Any], argument: Tensor | TopK, given: Sequence[Tensor], options: Mapping[str, Any]) -> Tensor:
    """The value of an estimator; ``given``: the tensors of its argument, which it must leave as they are."""
    before = [tensor.detach().clone() for tensor in given]
    try:
        value = estimate(entry, argument, **options)
    except UserError:
        raise
    except Exception as error:
        raise _raised(entry, options, error) from error
    if not all(torch.equal(tensor.detach(), copy) for tensor, copy in zip(given, before, strict=True)):
        raise UserError(f"estimator {entry.name!r}{_with(options)} changes its argument in place; work on a copy")
    return value


def _slope(entry: Entry[Any], value: Tensor, leaf: Tensor, options: Mapping[str, Any]) -> Tensor:
    """The derivative of the sum of a value by ``leaf``; zero where it has none."""
    if not value.requires_grad:
        return torch.zeros_like(leaf)
    try:
        (slope,) = torch.autograd.grad(value.sum(), leaf, allow_unused=True, materialize_grads=True)
    except Exception as error:
        raise _raised(entry, options, error) from error
    return slope


def _raised(entry: Entry[Any], options: Mapping[str, Any], error: Exception) -> UserError:
    """The error of a plugin in one line: what it raised, where, and how to declare the options that it did not take."""
    where = f" ({line})" if (line := plugin_line(error)) else ""
    text = str(error).splitlines()[0] if str(error) else ""
    about = f"estimator {entry.name!r}{_with(options)} raised {type(error).__name__}: {text}{where}"
    return UserError(about + _declare(entry, options))


def _broken_claim(entry: Entry[Any], claim: str, argument_P: Tensor, value_P: Tensor, slope_P: Tensor) -> str | None:
    """Why a claim does not hold."""
    if claim == "nonnegative":
        worst = int(value_P.argmin())
        sentence = f"is {float(value_P[worst]):.3g} {_at(entry, argument_P[worst])}"
        return sentence if float(value_P[worst]) < -1e-12 else None
    if _exact(entry) and claim != "pathwise:zero" and str(entry.facts["needs"])[len("exact_") :] not in claim:
        return f"it reads the {str(entry.facts['needs']).replace('_', ' ')} KL"
    figures = {"is": value_P, "has the gradient": slope_P}
    for what, expected_P in _identities(claim, argument_P, value_P, slope_P, exact=_exact(entry)):
        figure_P = figures[what]
        wrong_P = _differ(figure_P, expected_P, torch.maximum(figure_P.abs(), expected_P.abs()))
        if bool(wrong_P.any()):
            at = _point_to_report(wrong_P, argument_P)
            free = " (up to a constant, read off at -1 nats)" if what != "is" and not _exact(entry) else ""
            needs = f"where the claim needs {float(expected_P[at]):.6g}{free}"
            return f"it {what} {float(figure_P[at]):.6g} {_at(entry, argument_P[at])}, {needs}"
    return None


def _identities(
    claim: str, l_P: Tensor, value_P: Tensor, slope_P: Tensor, *, exact: bool
) -> Iterator[tuple[str, Tensor]]:
    """What a claim says of the value and of the derivative at each point (see the module's docstring).

    A claim about the value says of the derivative that it is the value's own: corrections differentiate both.
    """
    kind, _, target = claim.partition(":")
    if exact:
        if kind == "value":
            yield "is", l_P
        yield "has the gradient", torch.full_like(l_P, 0.0 if target == "zero" else 1.0)
        return
    near = int((l_P + 1.0).abs().argmin())  # where the free constants are read off
    inverse_P = (-l_P).exp()
    if kind == "value":
        base_P = l_P if target == "reverse" else -l_P * inverse_P
        free = float((value_P - base_P)[near] / torch.expm1(-l_P[near]))
        free = 0.0 if abs(free) < 1e-12 else free
        yield "is", base_P + free * torch.expm1(-l_P)
        expected_P = -free * inverse_P if target == "reverse" else (l_P - 1.0 - free) * inverse_P
    else:
        expected_P = {"zero": 0.0 * l_P, "token_reverse": l_P, "token_forward": -inverse_P}[target]
    yield "has the gradient", expected_P + (slope_P - expected_P)[near]


def _float32(
    entry: Entry[Any], options: Mapping[str, Any], argument_P: Tensor, value_P: Tensor, slope_P: Tensor
) -> tuple[str | None, Tensor]:
    """How float32 differs from float64 by more than rounding; the points where both of its figures are finite.

    It may overflow where the figure itself does, or ``exp(|l|)``, the ratio of the two probabilities, but to minus
    infinity only where the figure goes there.
    """
    rounding_2P = _rounding32(entry, options, argument_P, value_P, slope_P)
    finite_P = torch.ones_like(argument_P, dtype=torch.bool)
    reason = None
    narrow = _evaluate(entry, argument_P.float(), options)
    for number, (what, wide_P) in enumerate((("is", value_P), ("has the gradient", slope_P))):
        narrow_P = narrow[number].double()
        rounding_P = rounding_2P[number]
        limit = LARGEST32 / NEAR_OVERFLOW
        fits_P = (wide_P.abs() + rounding_P < limit) & (argument_P.abs() < math.log(limit))
        wrong_P = ~((narrow_P - wide_P).abs() <= rounding_P) & (fits_P | torch.isfinite(narrow_P))
        wrong_P |= (narrow_P == -torch.inf * wide_P.sign()) & (wide_P != 0)  # an infinity of the other sign
        if reason is None and bool(wrong_P.any()):
            at = _point_to_report(wrong_P, argument_P)
            where = f"{_at(entry, argument_P[at])} in float32, and {float(wide_P[at]):.6g} in float64"
            reason = f"{what} {float(narrow_P[at]):.6g} {where}"
        finite_P &= torch.isfinite(narrow_P)
    return reason, finite_P


def _rounding32(
    entry: Entry[Any], options: Mapping[str, Any], argument_P: Tensor, value_P: Tensor, slope_P: Tensor
) -> list[Tensor]:
    """By how much value and derivative may differ in float32: some roundings of all that they are computed from.

    What a rounding of the argument, or of an option, does to a figure is seen by moving it: ``exp(bound)`` with a bound
    of 40 multiplies the bound's rounding by ``40 exp(40)``. Ratios below the least normal number of float32 round
    coarsely, as ``log(exp(l))`` shows.
    """
    chosen = {**estimator_defaults(entry), **options}
    numbers = {name: float(value) for name, value in chosen.items() if not isinstance(value, str)}
    rules = entry.facts.get("options", {})
    smallest = torch.finfo(torch.float32).smallest_normal * 2 * UNIT
    step_P = ROUNDINGS * UNIT * argument_P.abs() + (smallest * argument_P.abs().exp()).clamp(max=0.5)
    inside_P = argument_P if not _exact(entry) else argument_P.clamp(min=0.0)
    moved = [_evaluate(entry, inside_P + sign * step_P, options) for sign in (-1, 1)]
    for name, number in numbers.items():
        if rules.get(name, {}).get("whole"):
            continue  # exact in float32
        for factor in (1 - ROUNDINGS * UNIT, 1 + ROUNDINGS * UNIT):
            if number and _allowed(number * factor, rules.get(name, {})):
                moved.append(_evaluate(entry, argument_P, {**options, name: number * factor}))
    size = max([1.0, *map(abs, numbers.values())])
    roundings = []
    for number_of_figure, figure_P in enumerate((value_P, slope_P)):
        rounding_P = FIGURE_ROUNDINGS * UNIT * (size + argument_P.abs() + figure_P.abs())
        for figures in moved:
            rounding_P = rounding_P + (figures[number_of_figure] - figure_P).abs()
        roundings.append(rounding_P)
    return roundings


# --- corrections ----------------------------------------------------------------------------------------------------
def check_correction(entry: Entry[Any], *, seed: int = 0) -> CorrectionCheck:
    """Check that the ratio at each token is the product of the ratios in the declared scope, and its derivative.

    Raises :class:`UserError` for a scope that does not exist and for a result of another shape.
    """
    scope = entry.facts.get("scope")
    if scope not in SCOPES:
        raise bad_value(f"correction {entry.name!r}: scope", scope, SCOPES)
    generator = torch.Generator().manual_seed(seed)
    drawn = int(torch.randint(LENGTHS[-1] + 1, LONGEST + 1, (1,), generator=generator))
    has_window = scope == "prefix" and "window" in inspect.signature(entry.fn).parameters
    reasons = (
        _broken_scope(entry, length, window, dtype, generator)
        for length in (*LENGTHS, drawn)
        for window in (None, WINDOW)[: 2 if has_window else 1]
        for dtype in (torch.float64, torch.float32)
    )
    failure = next(filter(None, reasons), None)
    covered = CorrectionCoverage(
        tokens=[*LENGTHS, drawn], windows=[WINDOW] if has_window else [], float32=(-RANGE32, RANGE32)
    )
    return CorrectionCheck(failures=[failure] if failure else [], covered=covered)


def _broken_scope(
    entry: Entry[Any], length: int, window: int | None, dtype: torch.dtype, generator: torch.Generator
) -> str | None:
    """Log-ratios of a nat in all plus one of the grid (up to 80 nats in float32) anywhere; the product in the scope."""
    scope_TT = _scope(entry.facts, length, window).to(dtype)
    jump_B = _grid(-RANGE, generator) * (1.0 if dtype == torch.float64 else RANGE32 / RANGE)
    if length > 1:
        jump_B = jump_B[torch.randperm(len(jump_B), generator=generator)[:ROWS]]
    row_B = torch.arange(len(jump_B))
    delta_BT = torch.randn(len(row_B), length, generator=generator, dtype=torch.float64) * ((length > 1) / length)
    at_B = torch.randint(length, row_B.shape, generator=generator)
    delta_BT[row_B, at_B] += jump_B
    delta_BT = delta_BT.to(dtype).requires_grad_(True)
    options = {} if window is None else {"window": window}
    given_BT = delta_BT * 1.0  # no leaf, as in training, where a change in place raises nothing
    ratio_BT = _ratio(entry, given_BT, options)
    if not isinstance(ratio_BT, Tensor) or ratio_BT.shape != delta_BT.shape:
        returned = tuple(ratio_BT.shape) if isinstance(ratio_BT, Tensor) else type(ratio_BT).__name__
        raise UserError(f"correction {entry.name!r} must return a tensor of shape [B, T], and returned {returned}")
    some = int(torch.randint(1, 100, (1,), generator=generator))
    with torch.no_grad():
        alone_BT = _ratio(entry, delta_BT[:some].clone(), options)
    if not torch.allclose(alone_BT, ratio_BT.detach()[:some], rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=0):
        return (
            f"correction {entry.name!r} declares scope {entry.facts['scope']}, and its ratios of {length} tokens "
            f"change when {some} of {len(delta_BT)} completions stand alone, without gradients recorded"
        )
    log_BT, fixed_BT = ratio_BT.log(), delta_BT.detach().double()
    value_BT, expected_BT = log_BT.detach().double(), fixed_BT @ scope_TT.double().T
    unit = TOLERANCE if dtype == torch.float64 else (ROUNDINGS + length) * UNIT
    wrong_BT = ~((value_BT - expected_BT).abs() <= unit * (1.0 + fixed_BT.abs().sum(-1, keepdim=True)))
    declares = f"correction {entry.name!r} declares scope {entry.facts['scope']}"
    declares += "" if window is None else f" (window {window})"
    where = f"of {length} tokens{' in float32' if dtype == torch.float32 else ''}"
    if bool(wrong_BT.any()):
        row, t = (int(index) for index in wrong_BT.nonzero()[0])
        got, expected = float(value_BT[row, t]), float(expected_BT[row, t])
        return (
            f"{declares}, and the logarithm of its ratio at token {t + 1} {where} is {got:.4g}, "
            f"where the log-ratios in scope add up to {expected:.4g} nats (most of it at token {int(at_B[row]) + 1})"
        )
    read_B = torch.randint(length, row_B.shape, generator=generator)
    slope_BT = torch.zeros_like(delta_BT)
    if log_BT.requires_grad:
        picked = log_BT[row_B, read_B].sum()
        slope_BT = torch.autograd.grad(picked, delta_BT, allow_unused=True, materialize_grads=True)[0]
    declared_BT = torch.zeros_like(slope_BT) if entry.facts.get("detached") else scope_TT[read_B]
    wrong_BT = ~((slope_BT - declared_BT).abs() <= unit)
    if bool(wrong_BT.any()):
        row, u = (int(index) for index in wrong_BT.nonzero()[0])
        return (
            f"{declares}, and the logarithm of its ratio at token {int(read_B[row]) + 1} {where} has the derivative "
            f"{float(slope_BT[row, u]):.4g} by the log-ratio of token {u + 1}, not {float(declared_BT[row, u]):.4g}"
        )
    return None


def _ratio(entry: Entry[Any], delta_BT: Tensor, options: Mapping[str, Any]) -> Any:
    """What a correction returns. Raises :class:`UserError` where it raises, or changes its argument."""
    before_BT = delta_BT.detach().clone()
    try:
        ratio_BT = entry.fn(delta_BT, **options)
    except Exception as error:
        where = f" ({line})" if (line := plugin_line(error)) else ""
        raise UserError(f"correction {entry.name!r} raised {type(error).__name__}: {error}{where}") from error
    if not torch.equal(delta_BT.detach(), before_BT):
        raise UserError(f"correction {entry.name!r} changes its argument in place; work on a copy")
    return ratio_BT


def _scope(facts: Mapping[str, Any], length: int, window: int | None) -> Tensor:
    """1 at ``[t, u]`` where the ratio of token u enters that at token t, ``[T, T]``."""
    one_TT = torch.ones(length, length, dtype=torch.float64)
    if facts["scope"] == "prefix":
        last = 0 if facts.get("own", True) else -1
        prefix_TT = one_TT.tril(last)
        return prefix_TT if window is None else prefix_TT - one_TT.tril(last - window)
    return {"none": 0.0 * one_TT, "token": torch.eye(length).double(), "sequence": one_TT}[facts["scope"]]


# --- both -----------------------------------------------------------------------------------------------------------
def check_parts(
    estimators: Mapping[str, Sequence[Mapping[str, Any]]], corrections: Iterable[str], *, seed: int
) -> tuple[list[str], PartsCoverage]:
    """Check registered parts by name, estimators with the options given too: the failures, and what was covered."""
    estimator_checks = {
        name: check_estimator(ESTIMATORS.get(name), seed=seed, options=options) for name, options in estimators.items()
    }
    correction_checks = {name: check_correction(CORRECTIONS.get(name), seed=seed) for name in corrections}
    failures = [line for check in estimator_checks.values() for line in check.failures]
    failures += [line for check in correction_checks.values() for line in check.failures]
    covered = PartsCoverage(
        seed=seed,
        log_ratios=(-RANGE, RANGE),
        points=POINTS,
        dtypes=("float64", "float32"),
        estimators={name: check.covered for name, check in estimator_checks.items()},
        corrections={name: check.covered for name, check in correction_checks.items()},
    )
    return failures, covered
