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
import reprlib
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kl_comedy.config.schema import DatasetConfig
from kl_comedy.config.validate import option
from kl_comedy.errors import SHOWN, UserError, bad_value, error_prefix, nearest, shown
from kl_comedy.records import Problem

LETTERS = string.ascii_uppercase
TEXT_NAMES = ("problem", "question", "text")
"""Source fields that can only be the problem's text; used where exactly one of them is present."""
MAX_LISTED = 30
"""Names of fields in a message."""
_GROUPED_NUMBER = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")

Rows = Iterable[tuple[str, str, Mapping[str, Any]]]
"""Triples of place (``train.jsonl:17``, for messages), id of a row that has none, and row."""


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


def read_rows(rows: Rows, config: DatasetConfig, options: RowOptions, *, key: str, source: str) -> list[Problem]:
    """The problems of ``rows``, in order; every row has the fields of the first.

    Raises :class:`UserError` for the first malformed row, for an id used twice, and where there are no rows.
    """
    fields: dict[str, str] = {}
    places: dict[str, str] = {}
    problems = []
    for place, fallback_id, row in rows:
        with error_prefix(place):
            fields = fields or _source_fields(config, row, key)
            problem = _problem(row, fields, options, key, fallback_id)
            if problem.id in places:
                raise UserError(f"the id {shown(problem.id)} was already used at {places[problem.id]}")
        places[problem.id] = place
        problems.append(problem)
    if not problems:
        raise UserError(f"{key}: {source} has no rows")
    return problems


def _source_fields(config: DatasetConfig, first: Mapping[str, Any], key: str) -> dict[str, str]:
    """Our names to the source's: those of the config, and defaults where the first row is unambiguous."""
    fields = {ours: theirs for ours, theirs in config.fields.items() if theirs}
    names = _names(first)
    if "text" not in fields:
        present = [name for name in TEXT_NAMES if name in first]
        if len(present) != 1:
            candidates = f"several of {', '.join(present)}" if present else f"none of {', '.join(TEXT_NAMES)}"
            what = f"cannot tell which field is the problem's text: the row has {candidates}"
            raise UserError(f"{what}; name it with {key}.fields.text=FIELD (fields: {names})")
        fields["text"] = present[0]
    if "answer" not in fields and "answer" not in first:
        hint = "; if the last \\boxed of the solution holds the answer, set "
        hint += f"{key}.fields.answer=solution and {key}.options.answer_boxed=true"
        what = f"cannot tell which field is the answer: the row has no 'answer'; name it with {key}.fields.answer=FIELD"
        raise UserError(f"{what} (fields: {names}){hint if 'solution' in first else ''}")
    optional = [name for name in ("id", "choices") if name in first and (name == "id" or first[name] is not None)]
    return {**{name: name for name in ("answer", *optional)}, **fields}


def _problem(
    row: Mapping[str, Any], fields: Mapping[str, str], options: RowOptions, key: str, fallback_id: str
) -> Problem:
    values = {ours: _lookup(row, theirs, f"{key}.fields.{ours}") for ours, theirs in fields.items()}
    text, answer = _string(values["text"], fields["text"]), values["answer"]
    meta = {ours: values[ours] for ours in fields if ours not in ("text", "answer", "id", "choices", "labels")}
    for ours, value in meta.items():
        try:
            json.dumps(value, allow_nan=False).encode("utf-8")
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"field {fields[ours]!r} does not fit into JSON: {error}") from error
    if options.text_after is not None:
        text = _after(text, options.text_after, fields["text"])
    if "choices" not in fields:
        answer = _answer(_scalar(answer, fields["answer"]), fields["answer"], options)
    else:
        choices = read_choices(values["choices"], field=fields["choices"])
        if "labels" in fields:
            answer = label_position(answer, values["labels"], len(choices), field=fields["answer"])
        answer = choice_letter(answer, choices, field=fields["answer"])
        meta |= {"choices": choices, "question": text}
        if options.render_choices:
            lines = [f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
            text = "\n".join([text, *lines])
    problem_id = _scalar(values["id"], fields["id"]) if "id" in fields else fallback_id
    return Problem(id=problem_id, text=text, answer=answer, meta=meta)


def read_choices(value: Any, *, field: str) -> tuple[str, ...]:
    """The choices of a row: 2 to 26 non-empty strings or numbers. Raises :class:`UserError` otherwise."""
    is_list = isinstance(value, list | tuple)
    if not is_list or not 2 <= len(value) <= len(LETTERS):
        what = f"a list of {len(value)}" if is_list else type(value).__name__
        raise UserError(f"field {field!r} must be a list of 2 to {len(LETTERS)} choices, got {what}")
    for choice in value:
        if isinstance(choice, bool) or not isinstance(choice, str | int | float) or not str(choice).strip():
            raise UserError(f"field {field!r} holds the choice {shown(choice)}; each must be a non-empty string")
    return tuple(str(choice) for choice in value)


def choice_letter(answer: Any, choices: Sequence[str], *, field: str) -> str:
    """The letter of the right choice, from that letter or from a 0-based integer position.

    Another string raises :class:`UserError`: ``"2"`` may be a position counted from 0 or from 1, or a choice.
    """
    allowed = LETTERS[: len(choices)]
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return allowed[answer]
    if isinstance(answer, str) and len(answer.strip()) == 1 and answer.strip().upper() in allowed:
        return answer.strip().upper()
    raise UserError(
        f"field {field!r} is {shown(answer)}; with {len(choices)} choices it must be a letter "
        f"A to {allowed[-1]} or an integer position 0 to {len(choices) - 1}"
    )


def label_position(answer: Any, labels: Any, count: int, *, field: str) -> int:
    """The 0-based position of ``answer`` among the source's labels, one for each of its ``count`` choices."""
    names = [str(label) for label in labels] if isinstance(labels, list | tuple) else []
    if len(names) != count or len(set(names)) != count:
        raise UserError(f"{count} choices need as many different labels, got {shown(labels)}")
    if str(answer) not in names:
        raise UserError(f"field {field!r} is {shown(answer)}, which is none of the labels {', '.join(names)[:SHOWN]}")
    return names.index(str(answer))


def _names(row: Mapping[str, Any]) -> str:
    names = ", ".join(str(name)[:SHOWN] for name in list(row)[:MAX_LISTED]) or "(none)"
    return f"{names}, ... ({len(row):,})" if len(row) > MAX_LISTED else names


def _lookup(row: Mapping[str, Any], name: str, key: str) -> Any:
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            near = nearest(name, [str(field) for field in row])
            hint = f"; did you mean {near!r}?" if near else ""
            raise UserError(f"no field {name!r} ({key}); the row has: {_names(row)}{hint}")
        value = value[part]
    return value


def _string(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"field {field!r} must be a string, got {type(value).__name__}: {reprlib.repr(value)}")
    if not value.strip():
        raise UserError(f"field {field!r} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"field {field!r} holds half of a surrogate pair, which is no text") from error
    return value


def _scalar(value: Any, field: str) -> str:
    """A string, or a finite number written as Python writes it."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(
            f"field {field!r} must be a string or a number, got {type(value).__name__}: {reprlib.repr(value)}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"field {field!r} is {value}, not a finite number")
    return _string(value if isinstance(value, str) else repr(value), field)


def _answer(answer: str, field: str, options: RowOptions) -> str:
    if options.answer_after is not None:
        answer = _after(answer, options.answer_after, field)
        return answer.replace(",", "") if _GROUPED_NUMBER.fullmatch(answer) else answer
    return _string(last_boxed(answer, field=field), field) if options.answer_boxed else answer


def _after(text: str, marker: str, field: str) -> str:
    _, separator, tail = text.rpartition(marker)
    if not separator:
        raise UserError(f"field {field!r} does not contain the marker {marker!r}: {reprlib.repr(text)}")
    if not tail.strip():
        raise UserError(f"field {field!r} has nothing after the marker {marker!r}")
    return tail.strip()


def last_boxed(text: str, *, field: str) -> str:
    r"""The content of the last ``\boxed{...}`` with its braces balanced; ``\boxed 9`` counts too.

    >>> last_boxed(r"so $x = \boxed{\frac{1}{2}}$", field="solution")
    '\\frac{1}{2}'

    Raises :class:`UserError` where there is no box or its braces do not close.
    """
    _, box, tail = text.rpartition("\\boxed")
    bare = re.match(r"\s+([^\s{}$\\]+?)\.?(?=[\s$]|$)", tail) if box else None
    content = bare.group(1) if bare else in_braces(tail.lstrip()) if box else None
    if content is None:
        raise UserError(f"field {field!r} has no complete \\boxed{{...}}: {reprlib.repr(text)}")
    return content


def in_braces(text: str) -> str | None:
    """The content of the balanced braces that ``text`` begins with; None where it does not, or they do not close.

    >>> in_braces("{x_{1}} and {2}"), in_braces("{x_{1}")
    ('x_{1}', None)
    """
    depth = 0
    for position, char in enumerate(text if text.startswith("{") else ""):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth == 0:
            return text[1:position].strip()
    return None
