"""How a check calls an estimator: with which options, guarded against plugins that raise, and what it says of a
failure.

An estimator declares what its options may be by the fact ``options``, as ``{"width": {"above": 0}}``, and which options
its claims need by ``claims_need``. Both are read here, for log-ratio and for top-k estimators.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_comedy.config.validate import check_rules
from kl_comedy.errors import UserError, bad_value, unknown_key
from kl_comedy.kl.estimators import TopK, estimate
from kl_comedy.kl.term import estimator_defaults
from kl_comedy.registry import Entry, plugin_line

OPTION_RULES = ("choices", "minimum", "maximum", "above", "whole")
OPTIONS_NEEDED = {"top_k": ("k", "tokens"), "exact_mixture": ("share",)}
"""Options that a term reads to make the argument of an estimator, by what the estimator needs."""
NEEDS_BY = ("on_policy", "off_policy")
"""The regimes in which an estimator may say which options its claims need."""
TOLERANCE = 1e-10
"""In float64: relative to the figures compared, and absolute below 1."""
DRAWS_PER_OPTION = 4


@dataclass(frozen=True, kw_only=True)
class EstimatorCoverage:
    """With what an estimator was checked."""

    options: dict[str, list[float] | list[str]]
    """The values of each option, ascending."""
    float32: tuple[float, float] | None = None
    """The least and the largest argument (nats) at which its value and its gradient are finite in float32; None for a
    top-k estimator, which reads distributions and no log-ratio."""
    distributions: int = 0
    vocabulary: int = 0
    """For a top-k estimator: how many distributions it was given, over how many tokens."""


@dataclass(frozen=True, kw_only=True)
class EstimatorCheck:
    """The declarations of an estimator that are false, one sentence each, and with what it was checked."""

    failures: list[str]
    covered: EstimatorCoverage


# --- which options ----------------------------------------------------------------------------------------------------


def option_sets(entry: Entry[Any], generator: torch.Generator) -> list[dict[str, Any]]:
    """The options to check an estimator with: none, each on its own at its bounds and at random, all together.

    An option without a declaration may be any number. Raises :class:`UserError` for a declaration without a meaning.
    """
    declared = entry.facts.get("options", {})
    _check_declaration(entry, declared)
    points: dict[str, list[Any]] = {}
    for name, default in estimator_defaults(entry).items():
        points[name] = _points(default, declared.get(name, {}), generator)

    sets: list[dict[str, Any]] = [{}]
    for name, values in points.items():
        sets += [{name: value} for value in values]
    if len(points) > 1:
        # The last points are the draws: several options at once, none of them at a bound.
        for position in range(-1, -DRAWS_PER_OPTION - 1, -1):
            sets.append({name: values[position % len(values)] for name, values in points.items()})
    return sets


def _check_declaration(entry: Entry[Any], declared: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise :class:`UserError` where the fact ``options`` does not fit the estimator's parameters."""
    key = f"estimator {entry.name!r}: options"
    defaults = estimator_defaults(entry)
    needs = str(entry.facts.get("needs", "log_ratio"))
    needed = OPTIONS_NEEDED.get(needs, ())
    for name in needed:
        if name not in defaults:
            raise UserError(f"{key}: needs={needs!r} is for an estimator with the options {needed}")
    for name, rules in declared.items():
        if name not in defaults:
            raise unknown_key(f"{key}.{name}", rules, list(defaults))
        for rule in rules:
            if rule not in OPTION_RULES:
                raise unknown_key(f"{key}.{name}.{rule}", rules[rule], OPTION_RULES)
    for name, default in defaults.items():
        rules = declared.get(name, {})
        is_choice = isinstance(default, str) and "choices" in rules
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        if not is_choice and not is_number:
            raise bad_value(f"{key}.{name}", default, "a number as the default")
        check_rules(default, rules, f"{key}.{name}")


def _points(default: Any, rules: Mapping[str, Any], generator: torch.Generator) -> list[Any]:
    """The default, the bounds, 0, 1 and -1 and four draws, as far as they are allowed; every one of ``choices``."""
    if "choices" in rules:
        return list(rules["choices"])
    default = float(default)
    low = rules.get("minimum", rules.get("above", -math.inf))
    high = rules.get("maximum", math.inf)
    # Without bounds, ten times the default on both sides: an option of another size makes another estimator.
    reach = 10.0 * max(1.0, abs(default))
    start = max(low, default - reach)
    stop = min(high, default + reach)
    uniform = torch.rand(DRAWS_PER_OPTION, generator=generator, dtype=torch.float64)
    draws: list[float] = (start + (stop - start) * uniform).tolist()
    if rules.get("whole"):
        draws = [float(round(draw)) for draw in draws]
    # A dictionary and not a set: the order decides which options are tried together.
    candidates = dict.fromkeys([default, low, high, 0.0, 1.0, -1.0, default / 10, default * 10, *draws])
    return [point for point in candidates if math.isfinite(point) and allowed(point, rules)]


def allowed(point: float, rules: Mapping[str, Any]) -> bool:
    """Whether the declared rules of an option allow a number."""
    try:
        check_rules(point, rules, "")
    except UserError:
        return False
    return True


def values_tried(sets: Iterable[Mapping[str, Any]]) -> dict[str, list[float] | list[str]]:
    """The values that each option has in some of the sets, ascending; an option has numbers or words, never both."""
    tried: dict[str, set[Any]] = {}
    for options in sets:
        for name, value in options.items():
            if not isinstance(value, str):
                value = float(value)
            tried.setdefault(name, set()).add(value)
    return {name: sorted(values) for name, values in tried.items()}


# --- which claims apply -----------------------------------------------------------------------------------------------


def claims_apply(entry: Entry[Any], options: Mapping[str, Any], regime: str) -> bool:
    """Whether the claims are meant to hold in ``regime`` with these options (the fact ``claims_need``)."""
    needed = entry.facts.get("claims_need", {}).get(regime, {})
    chosen = {**estimator_defaults(entry), **options}
    return all(chosen[name] in values for name, values in needed.items())


def claims_never_checked(entry: Entry[Any], sets: Sequence[Mapping[str, Any]]) -> str | None:
    """The failure that claims are made for options only that no set has: such claims say nothing. None without it.

    Raises :class:`UserError` for a regime or an option that does not exist.
    """
    needed = entry.facts.get("claims_need", {})
    defaults = estimator_defaults(entry)
    for regime, options in needed.items():
        if regime not in NEEDS_BY:
            raise unknown_key(f"estimator {entry.name!r}: claims_need.{regime}", options, NEEDS_BY)
        for name in options:
            if name not in defaults:
                key = f"estimator {entry.name!r}: claims_need.{regime}.{name}"
                raise unknown_key(key, options[name], list(defaults))
    if not entry.claims:
        return None
    for options in sets:
        if any(claims_apply(entry, options, regime) for regime in NEEDS_BY):
            return None
    return f"estimator {entry.name!r} makes claims for options only that it never has (claims_need: {needed})"


# --- guarded calls ----------------------------------------------------------------------------------------------------


def call_estimator(
    entry: Entry[Any], argument: Tensor | TopK, tensors: Sequence[Tensor], options: Mapping[str, Any]
) -> Tensor:
    """The value (nats) of an estimator; ``tensors`` are those of its argument.

    Raises :class:`UserError` where the estimator raises, changes one of the tensors, or returns another shape.
    """
    # A change in place is found by comparison: autograd notices it only where a saved tensor is needed again.
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        value = estimate(entry, argument, **options)
    except UserError:
        raise
    except Exception as error:
        raise _raised(entry, options, error) from error
    for tensor, copy in zip(tensors, before, strict=True):
        if not torch.equal(tensor.detach(), copy):
            raise UserError(f"{name_with(entry, options)} changes its argument in place; work on a copy")
    return value


def slope_of(entry: Entry[Any], value: Tensor, leaf: Tensor, options: Mapping[str, Any]) -> Tensor:
    """The derivative of the sum of a value by ``leaf``; zero where it has none."""
    if not value.requires_grad:
        return torch.zeros_like(leaf)  # a detached value, which autograd refuses to differentiate
    try:
        (slope,) = torch.autograd.grad(value.sum(), leaf, allow_unused=True, materialize_grads=True)
    except Exception as error:
        raise _raised(entry, options, error) from error
    return slope


def _raised(entry: Entry[Any], options: Mapping[str, Any], error: Exception) -> UserError:
    """The error of a plugin in one line: what it raised, where, and how to declare the options that it did not take."""
    text = ""
    if str(error):
        text = str(error).splitlines()[0]
    where = ""
    line = plugin_line(error)
    if line:
        where = f" ({line})"
    hint = declaration_hint(entry, options)
    return UserError(f"{name_with(entry, options)} raised {type(error).__name__}: {text}{where}{hint}")


def differs(figure: Tensor, expected: Tensor, scale: Tensor) -> Tensor:
    """Where a figure is off by more than :data:`TOLERANCE` of ``scale``, or is not a number."""
    # Not ``difference > tolerance``: a comparison with NaN is false.
    return ~((figure - expected).abs() <= TOLERANCE * scale.abs().clamp(min=1.0))


# --- words ------------------------------------------------------------------------------------------------------------


def name_with(entry: Entry[Any], options: Mapping[str, Any]) -> str:
    """As ``estimator 'k_lambda' with lam=0.3``."""
    return f"estimator {entry.name!r}{with_options(options)}"


def with_options(options: Mapping[str, Any]) -> str:
    """As `` with lam=0.3, k=16``; empty without options."""
    if not options:
        return ""
    texts = []
    for name, value in options.items():
        if isinstance(value, str):
            texts.append(f"{name}={value}")
        else:
            texts.append(f"{name}={value:.4g}")
    return " with " + ", ".join(texts)


def declaration_hint(entry: Entry[Any], options: Mapping[str, Any]) -> str:
    """How a plugin declares what its options may be, where some of ``options`` have no declaration; else empty."""
    declared = entry.facts.get("options", {})
    defaults = estimator_defaults(entry)
    missing: dict[str, dict[str, float]] = {}
    for name, value in options.items():
        if name in declared or isinstance(value, str):
            continue
        default = float(defaults[name])
        # The least that the failure shows: the default works, and this side of it does not.
        if value <= 0 < default:
            missing[name] = {"above": 0}
        elif value < default:
            missing[name] = {"minimum": default}
        elif value > default:
            missing[name] = {"maximum": default}
    if not missing:
        return ""
    return f"; declare what the option may be, as options={missing}"
