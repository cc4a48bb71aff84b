"""Cheap, linear checks on hostile text before anything that can be slow looks at it.

They do not decide how long an item may take (the pool's clock does); they make the common attacks cost
microseconds instead of the whole limit.
"""

from __future__ import annotations

import re

_MIRROR = {"{": "}", "}": "{", "(": ")", ")": "(", "[": "]", "]": "["}
_CONTROLS = {code: " " for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def clean(text: str) -> str:
    """``text`` without control characters (each becomes a space) and lone surrogates (each becomes ``?``).

    >>> clean("4" + chr(0) + "2")
    '4 2'
    """
    return text.translate(_CONTROLS).encode("utf-8", "replace").decode("utf-8")


def tail(text: str, max_chars: int) -> str:
    """The last ``max_chars`` characters, from the first line break among them on.

    The tail is kept, and long text is not refused, because the final answer of a reasoning stands at its
    end: a long honest completion keeps its verdict. Starting at a line keeps inline formulas whole.

    >>> tail("first line; second; last", 6), tail("a $x$ b\\nthe $answer$", 18)
    ('; last', 'the $answer$')
    """
    if len(text) <= max_chars:
        return text
    end = text[-max_chars:] if max_chars > 0 else ""
    _, newline, rest = end.partition("\n")
    return rest if newline and rest.strip() else end


def depth(text: str) -> int:
    """The deepest nesting of ``{([`` in ``text``; braces count across lines, the others within one line.

    Closers without openers count as well: the openers may lie before the part of the text that was kept.

    >>> depth("{{(x)}}"), depth("a) {"), depth("}" * 9)
    (3, 1, 9)
    """
    brackets = re.findall(r"[{}()\[\]\n]", text)
    mirrored = [_MIRROR.get(char, char) for char in reversed(brackets)]
    return max(_depth(brackets), _depth(mirrored))


def _depth(brackets: list[str]) -> int:
    deepest = braces = others = 0
    for char in brackets:
        if char == "\n":
            others = 0
        elif char == "{":
            braces += 1
        elif char == "}":
            braces = max(braces - 1, 0)
        elif char in "([":
            others += 1
        else:
            others = max(others - 1, 0)
        deepest = max(deepest, braces + others)
    return deepest


def has_long_number(text: str, max_digits: int) -> bool:
    """Whether ``text`` holds a run of more than ``max_digits`` digits."""
    return re.search(rf"\d{{{max_digits + 1}}}", text) is not None
