"""Mathematical equality by math-verify: parse the gold and the completion, compare them with sympy.

math-verify's own time limits use SIGALRM in whole seconds of wall time, so that a verdict depends on
the machine's load. They stay off here; the pool's clock decides (:mod:`kl_comedy.rewards.pool`).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from kl_comedy.records import Reward
from kl_comedy.registry import REWARDS
from kl_comedy.rewards.base import BadGold, Meta
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

    ``unparseable``: there is no answer. ``refused``: nesting above ``max_depth``, or a number of more than
    ``max_digits`` digits. Text before the last ``max_chars`` characters is not read. Among several formulas the last
    counts, and several boxes outside formulas are one answer together, a set (math-verify's defaults). Raises
    :class:`BadGold` where the gold itself cannot be parsed.
    """
    text = clean(tail(completion, max_chars))
    if nesting_depth(text) > max_depth or re.search(rf"\d{{{max_digits + 1}}}", text):
        return Reward(value=0.0, status="refused")
    from math_verify import parse, verify
    from sympy.core.random import seed

    seed(0)  # sympy tries facts in a random order
    gold = _parsed_gold(answer)
    given = _evaluated(parse(text, parsing_timeout=None))
    if not given:
        return Reward(value=0.0, status="unparseable")
    equal = verify(gold, given, float_rounding=float_rounding, timeout_seconds=None)
    return Reward(value=float(bool(equal)))


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

    gold = parse(wrapped(answer), parsing_timeout=None)
    if not gold:
        raise BadGold(f"math_verify cannot parse the gold answer {answer!r}")
    return _evaluated(gold)


def _evaluated(parsed: list[Any]) -> list[Any]:
    """``parsed`` with its infinite expressions evaluated.

    math-verify parses ``\\infty 1`` to a product that stays unevaluated, and sympy takes the difference of such a
    product and any number for zero in some of its random orders of deduction.
    """
    from sympy import Basic, nan, oo, zoo

    return [each.doit() if isinstance(each, Basic) and each.has(oo, -oo, zoo, nan) else each for each in parsed]
