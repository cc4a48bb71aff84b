"""Multiple choice: a list of choices becomes lettered lines, the answer the letter of the right one."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from kl_comedy.errors import UserError

LETTERS = string.ascii_uppercase


def read_choices(value: Any, *, field: str, place: str) -> tuple[str, ...]:
    """The choices of a row: 2 to 26 non-empty strings or numbers. Raises :class:`UserError` otherwise."""
    if not isinstance(value, list | tuple) or not 2 <= len(value) <= len(LETTERS):
        what = f"a list of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__
        raise UserError(f"{place}: field {field!r} must be a list of 2 to {len(LETTERS)} choices, got {what}")
    for choice in value:
        if isinstance(choice, bool) or not isinstance(choice, str | int | float) or not str(choice).strip():
            raise UserError(f"{place}: field {field!r} holds the choice {choice!r}; each must be a non-empty string")
    return tuple(str(choice) for choice in value)


def choice_letter(answer: Any, choices: Sequence[str], *, field: str, place: str) -> str:
    """The letter of the right choice, from that letter or from a 0-based integer position.

    >>> choice_letter(2, ["4", "5", "6"], field="answer", place="row 1")
    'C'

    A string that is not a letter in range raises :class:`UserError`: ``"2"`` may be a position counted from
    0 or from 1, or one of the choices.
    """
    allowed = LETTERS[: len(choices)]
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return allowed[answer]
    if isinstance(answer, str) and len(answer.strip()) == 1 and answer.strip().upper() in allowed:
        return answer.strip().upper()
    raise UserError(
        f"{place}: field {field!r} is {answer!r}; with {len(choices)} choices it must be a letter "
        f"A to {allowed[-1]} or an integer position 0 to {len(choices) - 1}"
    )


def label_position(answer: Any, labels: Any, count: int, *, field: str, place: str) -> int:
    """The 0-based position of ``answer`` among the source's own labels of its ``count`` choices.

    >>> label_position("3", ["1", "2", "3", "4"], 4, field="answerKey", place="row 1")
    2

    Raises :class:`UserError` where the labels are not one for each choice, or lack the answer.
    """
    names = [str(label) for label in labels] if isinstance(labels, list | tuple) else []
    if len(names) != count or len(set(names)) != count:
        raise UserError(f"{place}: {count} choices need as many different labels, got {labels!r}")
    if str(answer) not in names:
        raise UserError(f"{place}: field {field!r} is {answer!r}, which is none of the labels {', '.join(names)}")
    return names.index(str(answer))


def render_choices(text: str, choices: Sequence[str]) -> str:
    """The text, then one line a choice.

    >>> print(render_choices("1 + 1?", ["1", "2"]))
    1 + 1?
    (A) 1
    (B) 2
    """
    return "\n".join([text, *(f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False))])
