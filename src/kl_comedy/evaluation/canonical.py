r"""The answer that a completion gives, in a canonical form, so that equal answers vote together.

String rules only: no gold is looked at, and nothing is evaluated, so hostile text costs linear time. The verifier's
verdict is another matter; a winning answer is as right as the verifier says of its samples.

- ``math``: the last ``\boxed{}``, else what follows the last marker (``####``, ``A:``, ``=``), numbers as fractions
  (``0.5``, ``\frac{1}{2}`` and ``1/2`` are one answer), else LaTeX without spaces, sizing and text commands;
- ``number``: the first number after the last marker, else the last of the last line;
- ``letter``: the letter a multiple-choice completion settles on;
- ``text``: the last line, case and outer punctuation dropped; ``answer_tag``: what stands inside ``<answer>``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kl_comedy.data.choices import LETTERS
from kl_comedy.errors import bad_value
from kl_comedy.rewards import guards
from kl_comedy.rewards.answers import chosen_letter, final_segment, number, numbers_in

MAX_CHARS = 16_384
_DROPPED = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|text(?:bf|rm|it)?|mathrm)(?![A-Za-z])|\\[,;:!]|[\s$]")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{?(-?\d+)\}?\{?(\d+)\}?")


def canonical(completion: str, form: str, choices: Sequence[str] = ()) -> str | None:
    r"""The completion's answer in the given ``form``, or None where it gives none.

    >>> canonical("so \\boxed{\\frac{1}{2}}", "math") == canonical("it is\n#### 0.50", "math") == "1/2"
    True
    >>> canonical("The answer is (B).", "letter", ("x", "y")), canonical("<answer> 3 + 4 </answer>", "answer_tag")
    ('B', '3+4')
    """
    text = guards.clean(guards.tail(completion, MAX_CHARS))
    if form == "math":
        return _math(text)
    if form == "number":
        return _number(text)
    if form == "letter":
        return chosen_letter(text, LETTERS[: len(choices) or 10])
    if form == "answer_tag":
        _, opened, rest = text.rpartition("<answer>")
        inside, closed, _ = rest.partition("</answer>")
        return ("".join(inside.split()).casefold() or None) if opened and closed else None
    if form == "text":
        lines = [line for line in text.split("\n") if line.strip()]
        return (lines[-1].strip(" .,;:!?\"'()[]{}*_`$").casefold() or None) if lines else None
    raise bad_value("answer", form, ("math", "number", "letter", "text", "answer_tag"))


def _math(text: str) -> str | None:
    boxed = last_box(text)
    if boxed is None:
        return _number(text)
    plain = _DROPPED.sub("", boxed).rstrip(".").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    fraction = _FRACTION.fullmatch(plain)
    if fraction:
        sign, top, bottom = fraction.groups()
        plain = f"{sign}{top}/{bottom}".replace("--", "")
    plain = re.sub(r"\\%$|%$|\^\{?\\circ\}?$", "", plain)
    if plain.startswith("{") and plain.endswith("}") and plain.count("{") == 1:
        plain = plain[1:-1]
    value = number(plain)
    return str(value) if value is not None else plain or None


def _number(text: str) -> str | None:
    segment, marked = final_segment(text)
    found = numbers_in(segment)
    return str(found[0 if marked else -1]) if found else None


def last_box(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` whose braces close; None without one.

    >>> last_box("\\boxed{1} then \\boxed{\\frac{1}{2}} and \\boxed{3"), last_box("none")
    ('\\frac{1}{2}', None)
    """
    before, found, tail = text.rpartition("\\boxed")
    while found:
        depth = 0
        for position, char in enumerate(tail if tail.startswith("{") else ""):
            depth += {"{": 1, "}": -1}.get(char, 0)
            if depth == 0:
                return tail[1:position].strip()
        before, found, last = before.rpartition("\\boxed")
        tail = last
    return None
