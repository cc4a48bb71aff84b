"""Checks what an estimator of a log-ratio, or of an exact KL, declares: at every point of a grid of up to 100 nats.

The log-ratios ``l`` of two distributions obey ``E_pi[exp(-l)] = 1`` and nothing else. So the mean of ``f(l)`` is the
reverse KL for every policy and reference exactly where ``f(l) = l + c (exp(-l) - 1)`` with one constant ``c``, and the
mean of ``f'(l) grad log pi`` is the gradient of a KL exactly where ``f'`` is ``l`` (reverse) or ``-exp(-l)`` (forward)
plus a constant. A claim is thus an identity of numbers, which is checked at every point; no distribution is drawn.

Legend: ``P`` points of the grid, ``B`` rows and ``T`` columns of a batch of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_comedy.errors import UserError
from kl_comedy.kl.oracle.estimator_calls import (
    NEEDS_BY,
    EstimatorCheck,
    EstimatorCoverage,
    allowed,
    call_estimator,
    claims_apply,
    claims_never_checked,
    declaration_hint,
    differs,
    name_with,
    option_sets,
    slope_of,
    values_tried,
    with_options,
)
from kl_comedy.kl.term import estimator_defaults
from kl_comedy.registry import Entry

RANGE = 100.0
"""The largest log-ratio (nats) that is checked."""
SMALLEST = 1e-6
"""The least log-ratio (nats) that is checked, besides an end of the range."""
POINTS = 20_000
"""Half of them evenly spaced, half in constant proportion, each at random within its cell."""
UNIT = torch.finfo(torch.float32).eps / 2
"""The largest relative error of one rounding in float32."""
ROUNDINGS = 16
"""In float32 a figure may be off by what so many roundings of its argument or of an option do to it ..."""
FIGURE_ROUNDINGS = 256
"""... and by so many of itself, of 1, of its argument and of the options: ``(a - b) / (alpha (1 - alpha))`` multiplies
the roundings of ``a`` and ``b`` by 21 for an alpha of 0.05. Half precision is off by more."""
LARGEST32 = torch.finfo(torch.float32).max
NEAR_OVERFLOW = 1024.0
"""A figure of more than the largest number over this may overflow on its way, as ``-l exp(-l) - exp(-l) + 1`` does."""
LONGEST_ROWS = (1, 16, 200)
"""Longest rows of the batches, of up to :data:`LARGEST_BATCH` rows, in which figures must be those of one long list."""
LARGEST_BATCH = 60
CALLS = 500
"""How often an estimator is called with the same log-ratios, which must have the same value each time."""
CONSTANTS_AT = -1.0
"""The log-ratio (nats) at which the free constants of a claim are read off."""


@dataclass(frozen=True, kw_only=True)
class _Figures:
    """Value and derivative of an estimator at some arguments, with one set of options."""

    entry: Entry[Any]
    options: Mapping[str, Any]
    argument_P: Tensor
    value_P: Tensor
    slope_P: Tensor

    @property
    def name(self) -> str:
        return name_with(self.entry, self.options)

    @property
    def is_exact(self) -> bool:
        """Whether the arguments are exact KLs, and not log-ratios."""
        return reads_exact_kl(self.entry)


def check_log_ratio_estimator(
    entry: Entry[Any], options: Iterable[Mapping[str, Any]], generator: torch.Generator
) -> EstimatorCheck:
    """Check an estimator at every point of the grid, with its option sets and ``options``."""
    lowest = -RANGE
    if reads_exact_kl(entry):
        lowest = 0.0  # a KL is not negative
    argument_P = log_ratio_grid(lowest, generator)
    sets = option_sets(entry, generator)
    for given in options:
        if given:
            sets.append(dict(given))

    failures: dict[str, str] = {}
    unchecked = claims_never_checked(entry, sets)
    if unchecked is not None:
        failures["claims_need"] = unchecked
    low = float(argument_P[0])
    high = float(argument_P[-1])
    for chosen in sets:
        figures = _evaluate(entry, argument_P, chosen)
        broken = _broken_claims(figures)
        batch_failure = _depends_on_batch(figures, generator)
        if batch_failure is not None:
            broken["batch"] = f"{figures.name} {batch_failure}"
        float32_failure, finite_P = _float32(figures)
        if float32_failure is not None:
            broken["float32"] = f"{figures.name} {float32_failure}{declaration_hint(entry, chosen)}"
        for subject, sentence in broken.items():
            # One sentence per subject: with other options it would be false for the same reason.
            failures.setdefault(subject, sentence)
        if bool(finite_P.any()):
            low = max(low, float(argument_P[finite_P].min()))
            high = min(high, float(argument_P[finite_P].max()))
    if "batch" not in failures:
        # What depends on the batch depends on the calls before it too, and one sentence is enough.
        calls_failure = _depends_on_calls(entry, argument_P, generator)
        if calls_failure is not None:
            failures["calls"] = f"estimator {entry.name!r} {calls_failure}"
    covered = EstimatorCoverage(options=values_tried(sets), float32=(low, high))
    return EstimatorCheck(failures=list(failures.values()), covered=covered)


def log_ratio_grid(low: float, generator: torch.Generator) -> Tensor:
    """Points from ``low`` to :data:`RANGE`, with both ends, in ascending order; float64, exact in float32."""
    cells = torch.arange(POINTS // 2, dtype=torch.float64)
    within_cell_2P = torch.rand(2, len(cells), generator=generator, dtype=torch.float64)
    even_P, proportion_P = (cells + within_cell_2P) / len(cells)
    evenly_P = low + (RANGE - low) * even_P
    in_proportion_P = SMALLEST * (RANGE / SMALLEST) ** proportion_P
    if low < 0:
        in_proportion_P[::2] *= -1
    ends = torch.tensor([low, RANGE], dtype=torch.float64)
    # By way of float32: a point that float32 does not have would have another figure there, by its rounding alone.
    return torch.cat([ends, evenly_P, in_proportion_P]).float().double().sort().values


def reads_exact_kl(entry: Entry[Any]) -> bool:
    """Whether the estimator's argument is an exact KL, and not a log-ratio."""
    return str(entry.facts.get("needs", "log_ratio")) != "log_ratio"


def _evaluate(entry: Entry[Any], argument: Tensor, options: Mapping[str, Any]) -> _Figures:
    """Value and derivative at each argument, of any shape.

    Raises :class:`UserError` where the estimator raises or changes its argument, and for a value in float64 that is not
    finite.
    """
    leaf = argument.clone().requires_grad_(True)
    given = leaf * 1.0  # not a leaf, as in training, where a change in place raises nothing
    value = call_estimator(entry, given, (given,), options)
    slope = slope_of(entry, value, leaf, options)
    value = value.detach()
    bad = ~torch.isfinite(value)
    if argument.dtype == torch.float64 and bool(bad.any()):
        worst = _point_to_report(bad, argument)
        hint = declaration_hint(entry, options)
        place = _place(entry, argument[worst])
        raise UserError(f"{name_with(entry, options)} is {float(value[worst])} {place}{hint}")
    return _Figures(entry=entry, options=options, argument_P=argument, value_P=value, slope_P=slope)


def _place(entry: Entry[Any], argument: Tensor) -> str:
    """As ``at a log-ratio of -2 nats``."""
    kind = "a log-ratio"
    if reads_exact_kl(entry):
        kind = "an exact KL"
    return f"at {kind} of {float(argument):.4g} nats"


def _point_to_report(wrong_P: Tensor, argument_P: Tensor) -> int:
    """The wrong point nearest to two nats: neither where everything is small nor where everything is huge."""
    return int(torch.where(wrong_P, (argument_P.abs() / 2.0).log().abs(), torch.inf).argmin())


# --- claims -----------------------------------------------------------------------------------------------------------


def _broken_claims(figures: _Figures) -> dict[str, str]:
    """By claim, a sentence why it does not hold; empty where claims are not meant to hold with these options."""
    entry = figures.entry
    if not any(claims_apply(entry, figures.options, regime) for regime in NEEDS_BY):
        return {}
    broken = {}
    for claim in entry.claims:
        reason = _broken_claim(figures, claim)
        if reason is not None:
            about = f"estimator {entry.name!r} claims {claim}{with_options(figures.options)}"
            broken[claim] = f"{about}, and {reason}{declaration_hint(entry, figures.options)}"
    return broken


def _broken_claim(figures: _Figures, claim: str) -> str | None:
    """Why a claim does not hold; None if it does."""
    entry = figures.entry
    argument_P = figures.argument_P
    if claim == "nonnegative":
        worst = int(figures.value_P.argmin())
        least = float(figures.value_P[worst])
        if least < -1e-12:
            return f"is {least:.3g} {_place(entry, argument_P[worst])}"
        return None
    if figures.is_exact and claim != "pathwise:zero":
        # An exact estimator is given one divergence, and can claim nothing of another one.
        needs = str(entry.facts["needs"])
        if needs[len("exact_") :] not in claim:
            return f"it reads the {needs.replace('_', ' ')} KL"

    expected_value_P, expected_slope_P = _expected(figures, claim)
    comparisons = [("has the gradient", figures.slope_P, expected_slope_P)]
    if expected_value_P is not None:
        comparisons.insert(0, ("is", figures.value_P, expected_value_P))
    for verb, figure_P, expected_P in comparisons:
        wrong_P = differs(figure_P, expected_P, torch.maximum(figure_P.abs(), expected_P.abs()))
        if not bool(wrong_P.any()):
            continue
        worst = _point_to_report(wrong_P, argument_P)
        constant = ""
        if verb == "has the gradient" and not figures.is_exact:
            constant = f" (up to a constant, read off at {CONSTANTS_AT:g} nats)"
        place = _place(entry, argument_P[worst])
        needed = f"where the claim needs {float(expected_P[worst]):.6g}{constant}"
        return f"it {verb} {float(figure_P[worst]):.6g} {place}, {needed}"
    return None


def _expected(figures: _Figures, claim: str) -> tuple[Tensor | None, Tensor]:
    """What a claim says of the value (None: nothing) and of the derivative at each point (see the module's docstring).

    A claim about the value says of the derivative that it is the value's own: corrections differentiate both.
    """
    l_P = figures.argument_P
    kind, _, target = claim.partition(":")
    if figures.is_exact:
        slope_P = torch.ones_like(l_P)
        if target == "zero":
            slope_P = torch.zeros_like(l_P)
        if kind == "value":
            return l_P, slope_P
        return None, slope_P

    read_off = int((l_P - CONSTANTS_AT).abs().argmin())
    inverse_P = (-l_P).exp()
    value_P = None
    if kind == "value":
        # f(l) = base + c (exp(-l) - 1)
        if target == "reverse":
            base_P = l_P
        else:
            base_P = -l_P * inverse_P
        constant = float((figures.value_P - base_P)[read_off] / torch.expm1(-l_P[read_off]))
        if abs(constant) < 1e-12:
            constant = 0.0  # rounding, which exp(100) would multiply
        value_P = base_P + constant * torch.expm1(-l_P)
        # f'(l), up to the constant that is added below
        if target == "reverse":
            slope_P = -constant * inverse_P
        else:
            slope_P = (l_P - 1.0 - constant) * inverse_P
    elif target == "token_reverse":
        slope_P = l_P
    elif target == "token_forward":
        slope_P = -inverse_P
    else:
        slope_P = 0.0 * l_P
    # E_pi[grad log pi] = 0, so a constant in f' changes no gradient.
    return value_P, slope_P + (figures.slope_P - slope_P)[read_off]


# --- purity -----------------------------------------------------------------------------------------------------------


def _depends_on_batch(figures: _Figures, generator: torch.Generator) -> str | None:
    """How the figure of a log-ratio depends on the shape, on its neighbours or on gradients being recorded."""
    entry = figures.entry
    for longest in LONGEST_ROWS:
        rows = int(torch.randint(1, LARGEST_BATCH + 1, (1,), generator=generator))
        columns = int(torch.randint(1, longest + 1, (1,), generator=generator))
        order_P = torch.randperm(len(figures.argument_P), generator=generator)[: rows * columns]
        batch_BT = figures.argument_P[order_P].reshape(-1, min(columns, len(order_P)))
        in_batch = _evaluate(entry, batch_BT, figures.options)
        with torch.no_grad():
            without_gradients_BT = call_estimator(entry, batch_BT, (batch_BT,), figures.options)
        comparisons = (
            ("is", in_batch.value_P, figures.value_P),
            ("is, without gradients recorded,", without_gradients_BT, figures.value_P),
            ("has the gradient", in_batch.slope_P, figures.slope_P),
        )
        for verb, figure_BT, in_list_P in comparisons:
            figure_P = figure_BT.flatten()
            expected_P = in_list_P[order_P]
            wrong_P = differs(figure_P, expected_P, expected_P)
            if bool(wrong_P.any()):
                worst = _point_to_report(wrong_P, figures.argument_P[order_P])
                place = (
                    f"{_place(entry, figures.argument_P[order_P][worst])} in a batch of shape {list(batch_BT.shape)}"
                )
                return f"{verb} {float(figure_P[worst]):.6g} {place}, and {float(expected_P[worst]):.6g} in one list"
    return None


def _depends_on_calls(entry: Entry[Any], argument_P: Tensor, generator: torch.Generator) -> str | None:
    """How the value of the same log-ratios changes from call to call: by a counter, a running mean, noise."""
    some_P = argument_P[torch.randint(len(argument_P), (8,), generator=generator)]
    first_P = call_estimator(entry, some_P, (some_P,), {})
    for call in range(CALLS):
        later_P = call_estimator(entry, some_P, (some_P,), {})
        if not torch.equal(first_P, later_P):
            changed = int((first_P != later_P).nonzero()[0])
            figures = (
                f"{float(first_P[changed]):.6g} at first, and {float(later_P[changed]):.6g} {call + 1} calls later"
            )
            return f"depends on earlier calls: it is {figures} {_place(entry, some_P[changed])}"
    return None


# --- float32 ----------------------------------------------------------------------------------------------------------


def _float32(figures: _Figures) -> tuple[str | None, Tensor]:
    """How float32 differs from float64 by more than rounding; the points where both of its figures are finite.

    It may overflow where the figure itself does, or ``exp(|l|)``, the ratio of the two probabilities, but to minus
    infinity only where the figure goes there.
    """
    argument_P = figures.argument_P
    value_rounding_P, slope_rounding_P = _rounding32(figures)
    narrow = _evaluate(figures.entry, argument_P.float(), figures.options)
    comparisons = (
        ("is", narrow.value_P.double(), figures.value_P, value_rounding_P),
        ("has the gradient", narrow.slope_P.double(), figures.slope_P, slope_rounding_P),
    )
    limit = LARGEST32 / NEAR_OVERFLOW
    finite_P = torch.ones_like(argument_P, dtype=torch.bool)
    failure = None
    for verb, narrow_P, wide_P, rounding_P in comparisons:
        # A figure that does not fit may be an infinity; if it is a number, it must be the right one.
        fits_P = (wide_P.abs() + rounding_P < limit) & (argument_P.abs() < math.log(limit))
        is_off_P = ~((narrow_P - wide_P).abs() <= rounding_P)
        wrong_P = is_off_P & (fits_P | torch.isfinite(narrow_P))
        wrong_P |= (narrow_P == -torch.inf * wide_P.sign()) & (wide_P != 0)  # an infinity of the other sign
        if failure is None and bool(wrong_P.any()):
            worst = _point_to_report(wrong_P, argument_P)
            place = f"{_place(figures.entry, argument_P[worst])} in float32, and {float(wide_P[worst]):.6g} in float64"
            failure = f"{verb} {float(narrow_P[worst]):.6g} {place}"
        finite_P &= torch.isfinite(narrow_P)
    return failure, finite_P


def _rounding32(figures: _Figures) -> tuple[Tensor, Tensor]:
    """By how much value and derivative may differ in float32: some roundings of all that they are computed from.

    What a rounding of the argument, or of an option, does to a figure is seen by moving it: ``exp(bound)`` with a bound
    of 40 multiplies the bound's rounding by ``40 exp(40)``.
    """
    argument_P = figures.argument_P
    options = _numbers(figures)
    moved = [*_with_moved_argument(figures), *_with_moved_options(figures, options)]
    size = max([1.0, *(abs(number) for number in options.values())])
    value_rounding_P = FIGURE_ROUNDINGS * UNIT * (size + argument_P.abs() + figures.value_P.abs())
    slope_rounding_P = FIGURE_ROUNDINGS * UNIT * (size + argument_P.abs() + figures.slope_P.abs())
    for other in moved:
        value_rounding_P = value_rounding_P + (other.value_P - figures.value_P).abs()
        slope_rounding_P = slope_rounding_P + (other.slope_P - figures.slope_P).abs()
    return value_rounding_P, slope_rounding_P


def _numbers(figures: _Figures) -> dict[str, float]:
    """The options that are numbers, defaults included."""
    chosen = {**estimator_defaults(figures.entry), **figures.options}
    return {name: float(value) for name, value in chosen.items() if not isinstance(value, str)}


def _with_moved_argument(figures: _Figures) -> list[_Figures]:
    """The figures where each argument is some roundings less, and more."""
    argument_P = figures.argument_P
    # Ratios below the least normal number of float32 round coarsely, as log(exp(l)) shows.
    coarse = torch.finfo(torch.float32).smallest_normal * 2 * UNIT
    step_P = ROUNDINGS * UNIT * argument_P.abs() + (coarse * argument_P.abs().exp()).clamp(max=0.5)
    if figures.is_exact:
        argument_P = argument_P.clamp(min=0.0)
    return [_evaluate(figures.entry, argument_P + sign * step_P, figures.options) for sign in (-1, 1)]


def _with_moved_options(figures: _Figures, options: Mapping[str, float]) -> list[_Figures]:
    """The figures where one option is some roundings less, or more, as far as it is allowed."""
    declared = figures.entry.facts.get("options", {})
    moved = []
    for name, number in options.items():
        rules = declared.get(name, {})
        is_exact_in_float32 = number == 0 or rules.get("whole")
        if is_exact_in_float32:
            continue
        for factor in (1 - ROUNDINGS * UNIT, 1 + ROUNDINGS * UNIT):
            if allowed(number * factor, rules):
                moved.append(_evaluate(figures.entry, figures.argument_P, {**figures.options, name: number * factor}))
    return moved
