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
"""In float32 a figure may be off by so many roundings of its argument, of itself, of 1 and of the options."""
LARGEST32 = torch.finfo(torch.float32).max
SHAPES = (1, 16, 200)
"""Longest rows of the batches, of up to :data:`LARGEST_BATCH` rows, in which figures must be those of one long list."""
LARGEST_BATCH = 60
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
    for chosen in sets:
        value_P, slope_P = _evaluate(entry, argument_P, chosen)
        for claim in entry.claims:
            reason = _broken_claim(entry, claim, argument_P, value_P, slope_P)
            if reason:
                failures.setdefault(claim, f"estimator {entry.name!r} claims {claim}{_with(chosen)}, and {reason}")
        if reason := _depends_on_batch(entry, argument_P, value_P, slope_P, chosen, generator):
            failures.setdefault("batch", f"estimator {entry.name!r}{_with(chosen)} {reason}")
        reason, finite_P = _float32(entry, chosen, argument_P, value_P, slope_P)
        if reason:
            failures.setdefault("float32", f"estimator {entry.name!r}{_with(chosen)} {reason}")
        low, high = max(low, float(argument_P[finite_P].min())), min(high, float(argument_P[finite_P].max()))
    covered = EstimatorCoverage(options=_tried(sets), float32=(low, high))
    return EstimatorCheck(failures=list(failures.values()), covered=covered)


def _tried(sets: Sequence[Mapping[str, Any]]) -> dict[str, list[float] | list[str]]:
    """The values that each option has in some of the sets, ascending; an option has numbers or words, never both."""
    tried: dict[str, set[Any]] = {}
    for chosen in sets:
        for name, value in chosen.items():
            tried.setdefault(name, set()).add(value if isinstance(value, str) else float(value))
    return {name: sorted(values) for name, values in tried.items()}


def _check_top_k(entry: Entry[Any], sets: Sequence[Mapping[str, Any]], generator: torch.Generator) -> EstimatorCheck:
    """Check the claims of a top-k estimator on random distributions, the sampled token summed over, ``[P, V, V]``.

    The policy's log-probs reach down to about -100 nats; the sampler is the policy, or another one.
    """
    vocabulary, points = 40, 12
    failures: dict[str, str] = {}
    for chosen in sets:
        options = {**estimator_defaults(entry), **chosen}
        spread_P11 = torch.logspace(-1, 1.5, points, dtype=torch.float64)[:, None, None]
        logits_3PV = spread_P11 * torch.randn(points, 3, vocabulary, generator=generator, dtype=torch.float64)
        policy_PV, ref_PV, stale_PV = logits_3PV.log_softmax(-1).unbind(1)
        for regime, sampler_PV in (("on_policy", policy_PV), ("off_policy", stale_PV)):
            needed = entry.facts.get("claims_need", {}).get(regime, {})
            if not all(options[name] in values for name, values in needed.items()):
                continue
            logits_PV = policy_PV.clone().requires_grad_(True)
            logp_PV = logits_PV.log_softmax(-1)
            k = min(int(options["k"]), vocabulary)
            ids_PK = (ref_PV if options["tokens"] == "reference" else policy_PV).topk(k).indices
            inside_PV = torch.zeros_like(policy_PV, dtype=torch.bool).scatter(1, ids_PK, True)
            ids_PVK = ids_PK[:, None].expand(-1, vocabulary, -1)
            logp_PVK, ref_PVK = (
                each[:, None].expand(-1, vocabulary, -1).gather(2, ids_PVK) for each in (logp_PV, ref_PV)
            )
            top = TopTokens(logp_PVK, ref_PVK, inside_PV)
            at = TopK(top=top, logp_BT=logp_PV, ref_logp_BT=ref_PV, behaviour_logp_BT=sampler_PV)
            value_PV = estimate(entry, at, **chosen)
            mean_P = (sampler_PV.exp() * value_PV).sum(1)
            exact = {
                "reverse": (logp_PV.exp() * (logp_PV - ref_PV)).sum(1),
                "forward": (ref_PV.exp() * (ref_PV - logp_PV)).sum(1),
            }
            for claim in entry.claims:
                if reason := _broken_top_k_claim(claim, value_PV, mean_P, exact, logits_PV):
                    claims = f"estimator {entry.name!r} claims {claim}{_with(chosen)}"
                    failures.setdefault(claim, f"{claims}, and {regime.replace('_', '-')} {reason}")
    covered = EstimatorCoverage(options=_tried(sets), distributions=points, vocabulary=vocabulary)
    return EstimatorCheck(failures=list(failures.values()), covered=covered)


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
    together = [{name: values[n % len(values)] for name, values in points.items()} for n in (-1, -2)]
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
            quiet_BT = estimate(entry, among_BT, **options)
        figures = (("is", value_BT, value_P), ("is, without gradients recorded,", quiet_BT, value_P))
        for what, figure_BT, alone_P in (*figures, ("has the gradient", slope_BT, slope_P)):
            expected_P, figure_P = alone_P[order_P], figure_BT.flatten()
            wrong_P = _differ(figure_P, expected_P, expected_P)
            if bool(wrong_P.any()):
                at = _point_to_report(wrong_P, argument_P[order_P])
                where = f"{_at(entry, argument_P[order_P][at])} in a batch of shape {list(among_BT.shape)}"
                return f"{what} {float(figure_P[at]):.6g} {where}, and {float(expected_P[at]):.6g} in one list"
    return None


def _evaluate(entry: Entry[Any], argument_P: Tensor, options: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """Value and derivative at each point. Raises :class:`UserError` where a value in float64 is not finite."""
    argument_P = argument_P.clone().requires_grad_(True)
    about = f"estimator {entry.name!r}{_with(options)}"
    try:
        value_P = estimate(entry, argument_P, **options)
        slope_P = None
        if value_P.requires_grad:
            (slope_P,) = torch.autograd.grad(value_P.sum(), argument_P, allow_unused=True)
    except UserError:
        raise
    except Exception as error:
        where = f" ({line})" if (line := plugin_line(error)) else ""
        raise UserError(f"{about} raised {type(error).__name__}: {error}{where}") from error
    value_P, argument_P = value_P.detach(), argument_P.detach()
    bad_P = ~torch.isfinite(value_P)
    if argument_P.dtype == torch.float64 and bool(bad_P.any()):
        at = _point_to_report(bad_P, argument_P)
        declare = "; declare what the option may be, as options={'width': {'above': 0}}" if options else ""
        raise UserError(f"{about} is {float(value_P[at])} {_at(entry, argument_P[at])}{declare}")
    return value_P, torch.zeros_like(argument_P) if slope_P is None else slope_P


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
    entry: Entry[Any], options: Mapping[str, float], argument_P: Tensor, value_P: Tensor, slope_P: Tensor
) -> tuple[str | None, Tensor]:
    """How float32 differs from float64 by more than rounding; the points where both of its figures are finite.

    It may overflow where the figure itself does, or ``exp(|l|)``, the ratio of the two probabilities.
    """
    shifted = [_evaluate(entry, argument_P * (1.0 + sign * ROUNDINGS * UNIT), options) for sign in (-1, 1)]
    finite_P = torch.ones_like(argument_P, dtype=torch.bool)
    defaults = [float(parameter.default) for parameter in list(inspect.signature(entry.fn).parameters.values())[1:]]
    size = max(1.0, *map(abs, [*defaults, *options.values()]), 0.0)
    reason = None
    narrow = _evaluate(entry, argument_P.float(), options)
    for number, (what, wide_P) in enumerate((("is", value_P), ("has the gradient", slope_P))):
        narrow_P = narrow[number].double()
        rounding_P = ROUNDINGS * UNIT * (size + argument_P.abs() + wide_P.abs())
        rounding_P = rounding_P + (shifted[1][number] - shifted[0][number]).abs()
        fits_P = (wide_P.abs() + rounding_P < LARGEST32) & (argument_P.abs() < math.log(LARGEST32))
        wrong_P = ~((narrow_P - wide_P).abs() <= rounding_P) & (fits_P | torch.isfinite(narrow_P))
        if reason is None and bool(wrong_P.any()):
            at = _point_to_report(wrong_P, argument_P)
            where = f"{_at(entry, argument_P[at])} in float32, and {float(wide_P[at]):.6g} in float64"
            reason = f"{what} {float(narrow_P[at]):.6g} {where}"
        finite_P &= torch.isfinite(narrow_P)
    return reason, finite_P


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
    ratio_BT = entry.fn(delta_BT, **options)
    if not isinstance(ratio_BT, Tensor) or ratio_BT.shape != delta_BT.shape:
        returned = tuple(ratio_BT.shape) if isinstance(ratio_BT, Tensor) else type(ratio_BT).__name__
        raise UserError(f"correction {entry.name!r} must return a tensor of shape [B, T], and returned {returned}")
    some = int(torch.randint(1, 100, (1,), generator=generator))
    with torch.no_grad():
        alone_BT = entry.fn(delta_BT[:some], **options)
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
