"""Rows of a source become problems; an error names the place of the row and the fields it has.

The row format is the same for every source (JSONL, Parquet, hub). ``config.fields`` maps our names to the
source's; a dotted source name (``reward_model.ground_truth``) reaches into nested objects where no column
has that very name. Choices become lettered lines under the text, and the answer the letter of the right one. ``labels``
names the list of what the source calls its choices (ARC: some rows ``A`` to ``D``, some ``1`` to ``4``), in which the
answer is looked up.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kl_comedy.config.schema import DatasetConfig
from kl_comedy.config.validate import option
from kl_comedy.errors import UserError, bad_value, nearest
from kl_comedy.records import Problem

LETTERS = string.ascii_uppercase


def read_choices(value: Any, *, field: str, place: str) -> tuple[str, ...]:
    """The choices of a row: 2 to 26 non-empty strings or numbers. Raises :class:`UserError` otherwise."""
    is_list = isinstance(value, list | tuple)
    if not is_list or not 2 <= len(value) <= len(LETTERS):
        what = f"a list of {len(value)}" if is_list else type(value).__name__
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


TEXT_NAMES = ("problem", "question", "text")
"""Source fields that can only be the problem's text; used where exactly one of them is present."""

_GROUPED_NUMBER = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def _marker(value: Any, key: str) -> str | None:
    if value is not None and not (isinstance(value, str) and value):
        raise bad_value(key, value, "a non-empty string")
    return value


@dataclass
class RowOptions:
    """Options of every source of rows."""

    text_after: str | None = option(None, "Only what follows the last such marker in the text.", parse=_marker)
    answer_after: str | None = option(None, "The same of the answer (`####` for GSM8K).", parse=_marker)
    answer_boxed: bool = option(False, "The answer is the content of the last \\boxed{...} (MATH solutions).")
    render_choices: bool = option(True, "Write the lettered choices under the text.")

    def __post_init__(self) -> None:
        if self.answer_boxed and self.answer_after:
            raise UserError("answer_boxed and answer_after exclude each other; keep one")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFormat:
    """The source's names of the fields. ``id``, ``choices`` and ``labels``: None where it has none."""

    text: str
    answer: str
    id: str | None
    choices: str | None
    labels: str | None
    extras: Mapping[str, str]


def row_format(config: DatasetConfig, first: Mapping[str, Any], *, key: str, place: str) -> RowFormat:
    """The format, from the config and the first row; every later row must fit it.

    Raises :class:`UserError` where none or several of the fields may be the text or the answer.
    """
    fields = config.fields
    return RowFormat(
        text=fields.get("text") or _default_text(first, key=key, place=place),
        answer=fields.get("answer") or _default_answer(first, key=key, place=place),
        id=fields.get("id") or ("id" if "id" in first else None),
        choices=fields.get("choices") or ("choices" if first.get("choices") is not None else None),
        labels=fields.get("labels"),
        extras={
            ours: theirs for ours, theirs in fields.items() if ours not in ("text", "answer", "id", "choices", "labels")
        },
    )


def read_rows(
    rows: Iterable[tuple[str, str, Mapping[str, Any]]],
    config: DatasetConfig,
    options: RowOptions,
    *,
    key: str,
    source: str,
) -> list[Problem]:
    """The problems of ``(place, fallback id, row)`` triples, in order.

    ``place`` is the row's name in messages (``train.jsonl:17``). Raises :class:`UserError` for the first
    malformed row, for an id used twice, and where there are no rows.
    """
    form: RowFormat | None = None
    places: dict[str, str] = {}
    problems = []
    for place, fallback_id, row in rows:
        form = form or row_format(config, row, key=key, place=place)
        problem = read_row(row, form, options, key=key, place=place, fallback_id=fallback_id)
        if problem.id in places:
            raise UserError(f"{place}: the id {problem.id!r} was already used at {places[problem.id]}")
        places[problem.id] = place
        problems.append(problem)
    if not problems:
        raise UserError(f"{key}: {source} has no rows")
    return problems


def read_row(
    row: Mapping[str, Any], form: RowFormat, options: RowOptions, *, key: str, place: str, fallback_id: str
) -> Problem:
    """One row as a problem. Raises :class:`UserError` naming ``place`` and the wrong field."""

    def lookup(ours: str, theirs: str) -> Any:
        return _lookup(row, theirs, ours=ours, key=key, place=place)

    text = _string(lookup("text", form.text), form.text, place)
    answer = lookup("answer", form.answer)
    meta = {ours: _jsonable(lookup(ours, theirs), theirs, place) for ours, theirs in form.extras.items()}
    if options.text_after is not None:
        text = _after(text, options.text_after, form.text, place)
    if form.choices is None:
        answer = _answer(_scalar(answer, form.answer, place), form.answer, options, place)
    else:
        choices = read_choices(lookup("choices", form.choices), field=form.choices, place=place)
        if form.labels is not None:
            labels = lookup("labels", form.labels)
            answer = label_position(answer, labels, len(choices), field=form.answer, place=place)
        answer = choice_letter(answer, choices, field=form.answer, place=place)
        meta |= {"choices": choices, "question": text}
        if options.render_choices:
            lines = [f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
            text = "\n".join([text, *lines])
    problem_id = fallback_id if form.id is None else _scalar(lookup("id", form.id), form.id, place)
    return Problem(id=problem_id, text=text, answer=answer, meta=meta)


def _default_text(row: Mapping[str, Any], *, key: str, place: str) -> str:
    present = [name for name in TEXT_NAMES if name in row]
    if len(present) == 1:
        return present[0]
    candidates = f"several of {', '.join(present)}" if present else f"none of {', '.join(TEXT_NAMES)}"
    raise UserError(
        f"{place}: cannot tell which field is the problem's text: the row has {candidates}; "
        f"name it with {key}.fields.text=FIELD (fields: {_names(row)})"
    )


def _default_answer(row: Mapping[str, Any], *, key: str, place: str) -> str:
    if "answer" in row:
        return "answer"
    hint = ""
    if "solution" in row:
        hint = (
            f"; 'solution' is a worked solution by that name: if its last \\boxed holds the answer, set "
            f"{key}.fields.answer=solution and {key}.options.answer_boxed=true"
        )
    raise UserError(
        f"{place}: cannot tell which field is the answer: the row has no 'answer'; "
        f"name it with {key}.fields.answer=FIELD (fields: {_names(row)}){hint}"
    )


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(str(name) for name in row) or "(none)"


def _lookup(row: Mapping[str, Any], name: str, *, ours: str, key: str, place: str) -> Any:
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            near = nearest(name, [str(field) for field in row])
            hint = f"; did you mean {near!r}?" if near else ""
            raise UserError(f"{place}: no field {name!r} ({key}.fields.{ours}); the row has: {_names(row)}{hint}")
        value = value[part]
    return value


def _string(value: Any, field: str, place: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{place}: field {field!r} must be a string, got {type(value).__name__}: {_short(value)}")
    if not value.strip():
        raise UserError(f"{place}: field {field!r} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: field {field!r} holds half of a surrogate pair, which is no text") from error
    return value


def _scalar(value: Any, field: str, place: str) -> str:
    """A string, or a finite number written as Python writes it."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(
            f"{place}: field {field!r} must be a string or a number, got {type(value).__name__}: {_short(value)}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{place}: field {field!r} is {value}, not a finite number")
    return _string(value if isinstance(value, str) else repr(value), field, place)


def _jsonable(value: Any, field: str, place: str) -> Any:
    try:
        json.dumps(value, allow_nan=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{place}: field {field!r} does not fit into JSON: {error}") from error
    return value


def _answer(answer: str, field: str, options: RowOptions, place: str) -> str:
    if options.answer_after is not None:
        answer = _after(answer, options.answer_after, field, place)
        return answer.replace(",", "") if _GROUPED_NUMBER.fullmatch(answer) else answer
    if options.answer_boxed:
        return _string(last_boxed(answer, field=field, place=place), field, place)
    return answer


def _after(text: str, marker: str, field: str, place: str) -> str:
    _, separator, tail = text.rpartition(marker)
    if not separator:
        raise UserError(f"{place}: field {field!r} does not contain the marker {marker!r}: {_short(text)}")
    if not tail.strip():
        raise UserError(f"{place}: field {field!r} has nothing after the marker {marker!r}")
    return tail.strip()


def last_boxed(text: str, *, field: str, place: str) -> str:
    r"""The content of the last ``\boxed{...}`` with its braces balanced; ``\boxed 9`` counts too.

    >>> last_boxed(r"so $x = \boxed{\frac{1}{2}}$", field="solution", place="row 1")
    '\\frac{1}{2}'

    Raises :class:`UserError` where there is no box or its braces do not close.
    """
    _, box, tail = text.rpartition("\\boxed")
    bare = re.match(r"\s+([^\s{}$\\]+?)\.?(?=[\s$]|$)", tail) if box else None
    if bare:
        return bare.group(1)
    content, depth = tail.lstrip(), 0
    for position, char in enumerate(content if box and content.startswith("{") else ""):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth == 0:
            return content[1:position].strip()
    raise UserError(f"{place}: field {field!r} has no complete \\boxed{{...}}: {_short(text)}")


def _short(value: Any, limit: int = 60) -> str:
    shown = repr(value)
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."
