r"""Lists with dots, as ``1, 2, 3, \ldots, 10``: math-verify would read the 10, or 1.2."""

from __future__ import annotations

import re
from fractions import Fraction

_DOTS = r"\\[lcv]?dots[bcmio]?(?![A-Za-z])|\.\.\.|…"
_ENTRY = rf"(?:{_DOTS}|(?:[-\w^+*/(){{}}]|\\(?![lcv]?dots)[A-Za-z]{{1,12}} ?|\.(?=\d)){{1,60}}?)"
_SEPARATOR = r" ?(?:,|;)(?:[ ~]|\\[ ,;:!]){0,4}+"
_LIST = re.compile(rf"(?<![\w.,\\])((?:{_ENTRY}{_SEPARATOR}){{1,60}}{_ENTRY})\Z")
_ANSWER = re.compile(r"\\\(([^$\n]*)\\\)[\s.*!]*\Z|\$([^$\n]+)\$[\s.*!]*\Z|([^\n$]+)\s*\Z")


def dotted_list(text: str) -> tuple[str, ...]:
    r"""The entries of the list with dots that is the answer in ``text``; empty for any other answer.

    >>> dotted_list(r"so $\boxed{1, 2, \ldots, 10}$."), dotted_list("It is 2, 4, 8, ...")
    (('1', '2', '...', '10'), ('2', '4', '8', '...'))
    >>> dotted_list("From 1, 2, ..., 10 the sum is 55.")
    ()
    """
    entries = _entries(_answer(text))
    return entries if "..." in entries else ()


def same_list(gold: tuple[str, ...], text: str) -> bool:
    r"""Whether the answer in ``text`` is the list ``gold``: the same entries, or the same arithmetic sequence.

    >>> same_list(("1", "2", "...", "5"), "1, 2, 3, 4, 5"), same_list(("1", "2", "...", "5"), "1, 2, 4, ..., 5")
    (True, False)
    """
    given = _entries(_answer(text))
    if not given:
        return False
    progression = _progression(gold)
    return gold == given or (progression is not None and progression == _progression(given))


def _answer(text: str) -> str:
    """What stands in the last box, in a formula at the end, or at the end of the last line."""
    _, box, boxed = text.rpartition("\\boxed{")
    if box:
        depth = 1
        for place, character in enumerate(boxed):
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                return boxed[:place].strip()
        return boxed.strip()
    match = _ANSWER.search(text.strip()[-2000:])
    if match is None:
        return ""
    return next(part for part in match.groups() if part is not None).strip()


def _entries(answer: str) -> tuple[str, ...]:
    """The entries of the list at the end of ``answer``, dots as ``...``; empty where there is no list."""
    answer = re.sub(r"\\(?:left|right)(?![A-Za-z])|\\[{}]|[\[\]]", "", answer).rstrip("*! ")
    answer = re.sub(r"(?<!\.)\.\Z", "", answer).strip()
    if answer.startswith("(") and answer.endswith(")"):
        answer = answer[1:-1].strip()
    elif answer.endswith(")") and answer.count("(") == 1:
        answer = answer.partition("(")[2][:-1].strip()
    match = _LIST.search(answer)
    if match is None:
        return ()
    entries = []
    for entry in re.split(_SEPARATOR, match[1]):
        is_dots = re.fullmatch(_DOTS, entry.strip()) is not None
        entries.append("..." if is_dots else re.sub(r"[\s{}]", "", entry))
    return tuple(entry for entry in entries if entry)


def _progression(entries: tuple[str, ...]) -> tuple[Fraction, Fraction, Fraction | None] | None:
    """First, step and last (None: without an end) of an arithmetic sequence; None for another list."""
    numbers = []
    before_dots = len(entries)
    for place, entry in enumerate(entries):
        if entry == "...":
            if before_dots < len(entries):
                return None
            before_dots = place
        elif re.fullmatch(r"-?\d{1,30}(?:[./]\d{1,30})?", entry) and not entry.endswith("/0"):
            numbers.append(Fraction(entry))
        else:
            return None
    if before_dots < 2 or len(numbers) < 3:
        return None
    step = numbers[1] - numbers[0]
    is_endless = before_dots == len(entries) - 1
    has_dots = before_dots < len(entries)
    for place in range(1, len(numbers)):
        difference = numbers[place] - numbers[place - 1]
        across_dots = has_dots and not is_endless and place == before_dots
        if across_dots:
            if step == 0 or difference % step != 0 or difference / step < 1:
                return None
        elif difference != step:
            return None
    return numbers[0], step, None if is_endless else numbers[-1]
