"""Mathematical equality by math-verify: parse the gold and the completion, compare them with sympy.

math-verify's own time limits use SIGALRM in whole seconds of wall time, so that a verdict depends on
the machine's load. They stay off here; the pool's clock decides (:mod:`kl_comedy.rewards.pool`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any

from kl_comedy.records import Reward
from kl_comedy.registry import REWARDS
from kl_comedy.rewards.base import BadGold, Meta
from kl_comedy.rewards.money import amounts
from kl_comedy.rewards.notation import (
    bases,
    clock_time,
    digits_and_base,
    is_ratio,
    long_ratio,
    plain_characters,
    ratios_in_words,
    readable,
)
from kl_comedy.rewards.sequences import dotted_list, same_list
from kl_comedy.rewards.text import clean, nesting_depth, tail


@REWARDS.register(
    "math_verify",
    source="math-verify (huggingface/Math-Verify, Apache-2.0) over latex2sympy2_extended and sympy",
    claims=("binary",),
    isolated=True,
    imports=("math_verify",),
    examples=(
        {"completion": "so it is $\\boxed{\\frac{1}{2}}$.", "answer": "0.5", "value": 1.0},
        {"completion": "4 + 5 = 9\nA: 9", "answer": "18", "value": 0.0},
        {"completion": "90 / 180 * 100% = 50%", "answer": "50\\%", "value": 1.0},
        {"completion": "I do not know.", "answer": "18", "value": 0.0, "status": "unparseable"},
        {"completion": "{" * 65 + "18", "answer": "18", "value": 0.0, "status": "refused"},
    ),
)
def math_verify(
    completion: str,
    answer: str,
    meta: Meta,
    *,
    max_chars: int = 16_384,
    max_depth: int = 64,
    max_digits: int = 1_000,
    float_rounding: int = 6,
) -> Reward:
    """1 where the completion's final answer equals the gold mathematically, else 0.

    Both are first rewritten to the notation that math-verify reads (docs/configuration.md lists the rules). A number
    with a base equals the same digits in the same base, and not the same number in another; where only one of the two
    names a base the digits count. Exact numbers are compared exactly, decimals after rounding to ``float_rounding``
    places; where zeros fill more than half of these, to ``float_rounding`` significant digits.

    ``unparseable``: there is no answer. ``refused``: nesting above ``max_depth``, or a number of more than
    ``max_digits`` digits. Text before the last ``max_chars`` characters is not read. Among several formulas the last
    counts, and several boxes outside formulas are one answer together, a set (math-verify's defaults). Raises
    :class:`BadGold` where the gold itself cannot be parsed.
    """
    # max_chars bounds the work of every pass below, on completions of any length.
    written = clean(tail(completion, max_chars))
    text = readable(written)
    # Deep nesting exhausts the stack of the LaTeX parser; a long number costs the int-to-text conversion its quadratic
    # time. Both would be killed by the clock too, but only after the whole limit.
    too_deep = max(nesting_depth(written), nesting_depth(text)) > max_depth
    long_number = re.search(rf"\d{{{max_digits + 1}}}", text)
    if too_deep or long_number:
        return Reward(value=0.0, status="refused")
    from math_verify import parse
    from sympy.core.random import seed

    # sympy tries facts in a random order, and some orders end in another verdict.
    seed(0)
    gold_time = clock_time(answer)
    if gold_time is not None and gold_time.half:
        given_time = clock_time(text)
        if given_time is None:
            return Reward(value=0.0, status="unparseable")
        return Reward(value=float(given_time.agrees_with(gold_time)))
    gold_list = dotted_list(plain_characters(answer))
    given_list = dotted_list(plain_characters(written))
    if gold_list or given_list:
        is_same = same_list(gold_list, written) if gold_list else same_list(given_list, answer)
        return Reward(value=float(is_same))
    gold_amounts = amounts(plain_characters(answer))
    given_amounts = amounts(plain_characters(written))
    # Cents and whole units are compared where both sides name one. A bare number on one side is the other's value, or
    # the number that is written there.
    readings = [(gold_amounts.values, given_amounts.values)]
    if not gold_amounts.named:
        readings.append((gold_amounts.values, given_amounts.written))
    if not given_amounts.named:
        readings.append((gold_amounts.written, given_amounts.values))
    is_read = False
    for gold_text, given_text in dict.fromkeys(readings):
        gold = _parsed_gold(gold_text)
        text = readable(given_text)
        if is_ratio(answer):
            text = ratios_in_words(text)
        given = _evaluated(parse(text, parsing_timeout=None))
        if not given:
            continue
        is_read = True
        if _equal(gold, given, float_rounding):
            return Reward(value=1.0)
    return Reward(value=0.0, status="ok" if is_read else "unparseable")


def wrapped(gold: str) -> str:
    """A gold answer as math-verify must see it: inside ``$...$``, or ``\\boxed{}`` where it holds a ``$``.

    Bare golds parse to something else in about one MATH answer in ten (``8+4i`` becomes 8).

    >>> wrapped("8+4i"), wrapped("$8+4i$"), wrapped("\\\\boxed{3}")
    ('$8+4i$', '$8+4i$', '\\\\boxed{3}')
    """
    text = gold.strip()
    if "\\boxed{" in text:
        return text
    delimited = re.fullmatch(r"\$\$?([^$]+)\$\$?", text)
    if delimited:
        text = delimited.group(1).strip()
    text = re.sub(r"^\\\$", "", text)
    if "$" in text or "\n" in text:
        return f"\\boxed{{{text}}}"
    return f"${text}$"


@lru_cache(maxsize=4096)
def _parsed_gold(answer: str) -> list[Any]:
    """The parsed gold. Failures raise, so that they are not cached."""
    from math_verify import parse

    gold = _evaluated(parse(readable(wrapped(answer)), parsing_timeout=None))
    if not gold:
        raise BadGold(f"math_verify cannot parse the gold answer {answer!r}")
    return gold


# --- the verdict -------------------------------------------------------------------------------------------------
def _equal(gold: list[Any], given: list[Any], float_rounding: int) -> bool:
    """Whether one of the forms of ``given`` (an expression, the text of the formula) equals one of ``gold``."""
    from math_verify import verify

    gold_text = _formula_text(gold)
    given_text = _formula_text(given)
    gold_numeral = digits_and_base(gold_text)
    given_numeral = digits_and_base(given_text)
    if gold_numeral and given_numeral:
        return gold_numeral == given_numeral
    if gold_numeral and not gold_numeral[0].lstrip("-").isdigit():
        # Digits above 9 are compared as text: to sympy 2A and A2 are one product.
        return gold_numeral[0] == given_text.replace(" ", "")
    if gold_text and _squeezed(gold_text) == _squeezed(given_text):
        # Of two equal texts math-verify may read nothing.
        return True
    gold_ratio = long_ratio(gold_text)
    given_ratio = long_ratio(given_text)
    if gold_ratio or given_ratio:
        # 1:2:3 would be the number 1/2/3, which is that of 1:3:2.
        return gold_ratio == given_ratio
    gold_bases = bases(gold_text)
    given_bases = bases(given_text)
    if gold_bases and given_bases and gold_bases != given_bases:
        return False
    if _is_point(gold_text) and _is_listed_set(given_text):
        # math-verify would compare the elements in the order of writing.
        return False
    given = _as_sets(given, gold)
    if not verify(gold, given, float_rounding=float_rounding, timeout_seconds=None):
        return _equal_complex(gold[0], given[0])
    # math-verify has said yes. For very small or very large numbers its defaults say yes too easily.
    places, digits = _needed_precision([*gold, *given], float_rounding)
    defaults_suffice = places == float_rounding and digits == DIGITS
    if defaults_suffice or gold[0] == given[0]:
        return True
    if max(places, digits) > MAX_DIGITS:
        return bool(gold[0].doit() == given[0].doit())
    return bool(verify(gold, given, float_rounding=places, numeric_precision=digits, timeout_seconds=None))


def _squeezed(formula: str) -> str:
    """``formula`` without spaces, but between letters or digits: ``1 2`` is not 12."""
    text = re.sub(r"(?:\s|\\[,;:! ]|~)++", " ", formula)
    return re.sub(r"(?<!\w) | (?!\w)", "", text)


def _equal_complex(gold: Any, given: Any) -> bool:
    """Whether two numbers are equal where ``i`` is the imaginary unit, which is a variable to math-verify."""
    from sympy import Expr, I, expand_complex

    if not (isinstance(gold, Expr) and isinstance(given, Expr)):
        return False
    names = gold.free_symbols | given.free_symbols
    if {str(name) for name in names} != {"i"}:
        return False
    # Names may carry assumptions, so that they are not equal to one symbol.
    difference = (gold - given).subs(dict.fromkeys(names, I))
    with contextlib.suppress(Exception):
        return bool(expand_complex(difference) == 0)
    return False


def _is_point(formula: str) -> bool:
    """Whether ``formula`` lists numbers in round brackets, as ``(1,2)`` does: a point, or an open interval."""
    return bool(re.fullmatch(r"(?:\\left)?\([^(){}\[\]]*,[^(){}\[\]]*\)", formula.strip()))


def _is_listed_set(formula: str) -> bool:
    """Whether ``formula`` lists its elements in braces."""
    return bool(re.fullmatch(r"(?:\\left)?\\\{.*\}", formula.strip()))


def _formula_text(parsed: list[Any]) -> str:
    """The text of the formula as math-verify read it, which it returns last; empty where it returns none."""
    last_form = parsed[-1]
    if isinstance(last_form, str):
        return last_form
    return ""


DIGITS = 15
"""math-verify takes a difference for zero when it is below 10^-DIGITS."""
MAX_DIGITS = 10_000
"""Numbers that would need more are equal only where sympy evaluates them to the same expression."""


def _needed_precision(expressions: list[Any], float_rounding: int) -> tuple[int, int]:
    """Decimal places and digits at which math-verify tells numbers of this size apart.

    It rounds decimals to fixed places and takes small differences for zero, so that at its defaults all small numbers
    are equal, and large ones whose difference is small.
    """
    most_zeros = 0
    largest_size = 0
    for expression in expressions:
        # Zeros between the point and the first digit: -1 - exponent, of numbers as a whole.
        for exponent in _exponents(expression, parts=False):
            most_zeros = max(most_zeros, -exponent - 1)
        # Sizes of what they are made of, too: 10^30 + 1 - 10^30 is small, and needs 31 digits.
        for exponent in _exponents(expression, parts=True):
            largest_size = max(largest_size, abs(exponent))
    # Only where zeros fill more than half of the places, so that ordinary verdicts stay math-verify's own.
    places = float_rounding
    if 2 * most_zeros > float_rounding:
        places = float_rounding + most_zeros
    digits = DIGITS
    if 2 * largest_size > DIGITS:
        digits = DIGITS - 2 + largest_size
    return places, digits


def _exponents(expression: Any, *, parts: bool) -> Iterator[int]:
    """The decimal exponents of the numbers in ``expression``, with ``parts`` also of what they are made of."""
    from sympy import Basic, Expr, MatrixBase

    # A stack and no recursion: expressions may be as deep as the text allows.
    pending = [expression]
    while pending:
        node = pending.pop()
        if isinstance(node, MatrixBase):
            pending.extend(node.flat())
            continue
        if not isinstance(node, Basic):
            continue
        is_number = isinstance(node, Expr) and node.is_number
        if is_number:
            exponent = _exponent(node)
            if exponent is not None:
                yield exponent
        if parts or not is_number:
            pending.extend(node.args)


def _exponent(number: Any) -> int | None:
    """The decimal exponent of a number; None for zero, and where it has none."""
    from sympy import UnevaluatedExpr

    try:
        # A percent sign is an UnevaluatedExpr.
        value = number.doit() if number.has(UnevaluatedExpr) else number
        if value == 0:
            return None
        return Decimal(str(abs(value.evalf(3)))).adjusted()
    except Exception:
        # Whatever sympy raises: then math-verify's own precision stands.
        return None


# --- infinity and intervals --------------------------------------------------------------------------------------
def _evaluated(parsed: list[Any]) -> list[Any]:
    """``parsed`` with its infinite expressions evaluated, and without those that sympy cannot evaluate.

    math-verify parses ``\\infty 1`` to a product that stays unevaluated, and sympy takes the difference of such a
    product and any number for zero in some of its random orders of deduction.
    """
    from sympy import Basic, nan, oo, zoo

    evaluated = []
    for form in parsed:
        if isinstance(form, Basic) and form.has(oo, -oo, zoo, nan):
            try:
                form = _bounded(form)
            except Exception:
                # sympy raises many kinds of errors on formulas without a meaning.
                continue
        evaluated.append(form)
    return evaluated


def _bounded(expression: Any) -> Any:
    """``expression`` evaluated; inequalities that hold for every number (``x < \\infty``) are dropped."""
    from sympy import And, Eq, Rel, S

    if not isinstance(expression, (And, Rel)):
        return expression.doit()
    if isinstance(expression, Eq):
        # Evaluated as a whole, the membership x \\in (2, \\infty), an equation to math-verify, would be false.
        return Eq(expression.lhs.doit(), expression.rhs.doit(), evaluate=False)
    members = _members(expression)
    evaluated = [member.doit() for member in members]
    if S.false in evaluated:
        return S.EmptySet
    bounds = [member for member in evaluated if member != S.true]
    if not bounds:
        return S.Reals
    if len(bounds) == 1:
        return bounds[0]
    return type(expression)(*bounds)


def _members(expression: Any) -> list[Any]:
    """The relations of a chain such as ``1 < x < 2``, in order; else the expression alone."""
    from sympy import And, FiniteSet

    if isinstance(expression, FiniteSet):
        return list(expression.args)
    if isinstance(expression, And):
        # `args` would be sorted, and the chain could no longer be read from left to right.
        return list(expression._unsorted_args)
    return [expression]


def _as_sets(given: list[Any], gold: list[Any]) -> list[Any]:
    """``given`` with inequalities as intervals where the gold is a set; math-verify converts only the gold.

    Only bounds of a bare variable (``1 < x \\le 2``): an inequality that is still to be solved is not an answer.
    """
    from sympy import Eq, FiniteSet, Interval, Union

    # The gold x \in (1, 2] is an equation to math-verify, with the set on its right side.
    gold_values = [form.rhs if isinstance(form, Eq) else form for form in gold]
    if not any(isinstance(value, (Interval, Union)) for value in gold_values):
        return given
    asks_for_union = any(isinstance(value, Union) for value in gold_values)
    sets = []
    for form in given:
        members = _members(form)
        is_bounds = all(_is_bound(member) for member in members)
        if isinstance(form, FiniteSet):
            is_alternatives = asks_for_union and is_bounds and len(form.free_symbols) == 1
            if not is_alternatives:
                sets.append(form)
                continue
            # "x < -2 or x > 2" is a set of two relations to math-verify, and so is "x > -2 and x < 2". The union of
            # the latter is no union of intervals, so that only the former can equal one.
            with contextlib.suppress(Exception):
                form = Union(*(member.as_set() for member in members))
        elif is_bounds and len(form.free_symbols) == 1:
            # sympy raises many kinds of errors; then the inequality stays as it is.
            with contextlib.suppress(Exception):
                form = form.as_set()
        sets.append(form)
    return sets


def _is_bound(expression: Any) -> bool:
    """Whether ``expression`` compares a bare variable with a number, as ``x > 2`` does."""
    from sympy import Eq, Rel

    if not isinstance(expression, Rel) or isinstance(expression, Eq):
        return False
    sides = (expression.lhs, expression.rhs)
    has_variable = any(side.is_Symbol for side in sides)
    has_number = any(not side.free_symbols for side in sides)
    return has_variable and has_number
