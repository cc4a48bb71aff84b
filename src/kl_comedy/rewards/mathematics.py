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
from kl_comedy.rewards.notation import bases, digits_and_base, readable
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
    text = readable(clean(tail(completion, max_chars)))
    if nesting_depth(text) > max_depth or re.search(rf"\d{{{max_digits + 1}}}", text):
        return Reward(value=0.0, status="refused")
    from math_verify import parse
    from sympy.core.random import seed

    seed(0)  # sympy tries facts in a random order
    gold = _parsed_gold(answer)
    given = _evaluated(parse(text, parsing_timeout=None))
    if not given:
        return Reward(value=0.0, status="unparseable")
    return Reward(value=float(_equal(gold, given, float_rounding)))


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
    return f"\\boxed{{{text}}}" if "$" in text or "\n" in text else f"${text}$"


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
        return gold_numeral[0] == given_text.replace(" ", "")  # to sympy 2A and A2 are one product
    if bases(gold_text) and bases(given_text) and bases(gold_text) != bases(given_text):
        return False
    given = _as_sets(given, gold)
    if not verify(gold, given, float_rounding=float_rounding, timeout_seconds=None):
        return False
    places, digits = _needed_precision([*gold, *given], float_rounding)
    if places == float_rounding and digits == DIGITS:
        return True
    if gold[0] == given[0]:
        return True
    if max(places, digits) > MAX_DIGITS:
        return bool(gold[0].doit() == given[0].doit())
    return bool(verify(gold, given, float_rounding=places, numeric_precision=digits, timeout_seconds=None))


def _formula_text(parsed: list[Any]) -> str:
    """The text of the formula as math-verify read it; its last form, where it is there."""
    return parsed[-1] if isinstance(parsed[-1], str) else ""


DIGITS = 15
"""math-verify takes a difference for zero when it is below 10^-DIGITS."""
MAX_DIGITS = 10_000
"""Numbers that would need more are equal only where sympy evaluates them to the same expression."""


def _needed_precision(expressions: list[Any], float_rounding: int) -> tuple[int, int]:
    """Decimal places and digits at which math-verify tells numbers of this size apart.

    It rounds decimals to fixed places and takes small differences for zero, so that at its defaults all small numbers
    are equal, and large ones whose difference is small.
    """
    values = [value for each in expressions for value in _numbers(each, parts=False)]
    parts = [value for each in expressions for value in _numbers(each, parts=True)]
    zeros = max([-exponent - 1 for exponent in values], default=0)
    size = max([abs(exponent) for exponent in parts], default=0)
    places = float_rounding + zeros if 2 * zeros > float_rounding else float_rounding
    digits = DIGITS - 2 + size if 2 * size > DIGITS else DIGITS
    return places, digits


def _numbers(expression: Any, *, parts: bool) -> Iterator[int]:
    """The decimal exponents of the numbers in ``expression``, with ``parts`` also of what they are made of."""
    from sympy import Basic, Expr, MatrixBase

    pending = [expression]
    while pending:
        each = pending.pop()
        if isinstance(each, MatrixBase):
            pending.extend(each.flat())
            continue
        if not isinstance(each, Basic):
            continue
        is_number = isinstance(each, Expr) and each.is_number
        if is_number:
            exponent = _exponent(each)
            if exponent is not None:
                yield exponent
        if parts or not is_number:
            pending.extend(each.args)


def _exponent(number: Any) -> int | None:
    """The decimal exponent of a number; None for zero, and for what has none."""
    from sympy import UnevaluatedExpr

    try:
        value = number.doit() if number.has(UnevaluatedExpr) else number  # a percent sign is one
        return Decimal(str(abs(value.evalf(3)))).adjusted() if value != 0 else None
    except Exception:  # whatever sympy raises: then math-verify's own precision stands
        return None


# --- infinity and intervals --------------------------------------------------------------------------------------
def _evaluated(parsed: list[Any]) -> list[Any]:
    """``parsed`` with its infinite expressions evaluated, and without those that sympy cannot evaluate.

    math-verify parses ``\\infty 1`` to a product that stays unevaluated, and sympy takes the difference of such a
    product and any number for zero in some of its random orders of deduction.
    """
    from sympy import Basic, nan, oo, zoo

    evaluated = []
    for each in parsed:
        if isinstance(each, Basic) and each.has(oo, -oo, zoo, nan):
            try:
                each = _bounded(each)
            except Exception:  # sympy raises many kinds on formulas that mean nothing
                continue
        evaluated.append(each)
    return evaluated


def _bounded(expression: Any) -> Any:
    """``expression`` evaluated; of inequalities, those that hold for every number are dropped (``x < \\infty``)."""
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
    left = [member for member in evaluated if member != S.true]
    if not left:
        return S.Reals
    return left[0] if len(left) == 1 else type(expression)(*left)


def _members(expression: Any) -> list[Any]:
    """The relations of a chain such as ``1 < x < 2``, in order; else the expression alone."""
    from sympy import And

    return list(expression._unsorted_args) if isinstance(expression, And) else [expression]


def _as_sets(given: list[Any], gold: list[Any]) -> list[Any]:
    """``given`` with inequalities as intervals where the gold is a set; math-verify converts only the gold.

    Only bounds of a bare variable (``1 < x \\le 2``): an inequality that is still to be solved is no answer.
    """
    from sympy import Eq, Interval, Union

    wanted = [each.rhs if isinstance(each, Eq) else each for each in gold]
    if not any(isinstance(each, (Interval, Union)) for each in wanted):
        return given
    sets = []
    for each in given:
        is_bounds = all(_is_bound(member) for member in _members(each))
        if is_bounds and len(each.free_symbols) == 1:
            with contextlib.suppress(Exception):  # sympy raises many kinds; then the inequality stays one
                each = each.as_set()
        sets.append(each)
    return sets


def _is_bound(expression: Any) -> bool:
    """Whether ``expression`` compares a bare variable with a number, as ``x > 2`` does."""
    from sympy import Eq, Rel

    if not isinstance(expression, Rel) or isinstance(expression, Eq):
        return False
    sides = (expression.lhs, expression.rhs)
    return any(side.is_Symbol for side in sides) and any(not side.free_symbols for side in sides)
