"""Rows of a source become problems; an error names the place of the row and the fields it has.

The row format is the same for every source (JSONL, Parquet, hub). ``config.fields`` maps our names to the
source's; a dotted source name (``reward_model.ground_truth``) reaches into nested objects, unless a column has exactly
that name. Choices become lettered lines under the text, and the answer becomes the letter of the right one. ``labels``
is the field with the source's own names of the choices (ARC: some rows ``A`` to ``D``, some ``1`` to ``4``); the answer
is looked up there.
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
MAX_CHARACTERS = 1_000_000
"""The longest text, answer or choice: a tokenizer takes some hundred bytes of memory per character."""
MAX_LISTED = 30
"""How many names of fields a message lists."""
_GROUPED_NUMBER = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")

Rows = Iterable[tuple[str, str, Mapping[str, Any]]]
"""Triples of place (``train.jsonl:17``, for messages), id of a row that has none, and row."""


def _marker(value: object, key: str) -> str | None:
    """``value`` where it is a marker or None. Raises :class:`UserError`."""
    if value is None:
        return None
    if not isinstance(value, str) or not value:
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
            # Fields are chosen once: a source whose rows name them differently is two sources.
            if not fields:
                fields = _source_fields(config, row, key)
            problem = _problem(row, fields, options, key, fallback_id)
            # Scores and checkpoints name problems by their id.
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
    defaults = {}
    if "text" not in fields:
        defaults["text"] = _text_field(first, key)
    if "answer" not in fields:
        _check_answer_field(first, key)
        defaults["answer"] = "answer"
    if "id" in first:
        defaults["id"] = "id"
    # A column of choices may be there for other rows of the source, empty for this task.
    if first.get("choices") is not None:
        defaults["choices"] = "choices"
    # What the config names wins over what a row happens to be called.
    return defaults | fields


def _text_field(first: Mapping[str, Any], key: str) -> str:
    """The one field that can be the problem's text. Raises :class:`UserError` where none or several can."""
    present = [name for name in TEXT_NAMES if name in first]
    if len(present) == 1:
        return present[0]
    if present:
        candidates = f"several of {', '.join(present)}"
    else:
        candidates = f"none of {', '.join(TEXT_NAMES)}"
    raise UserError(
        f"cannot tell which field is the problem's text: the row has {candidates}; name it with "
        f"{key}.fields.text=FIELD (fields: {_names(first)})"
    )


def _check_answer_field(first: Mapping[str, Any], key: str) -> None:
    """Raise :class:`UserError` where the row has no ``answer``."""
    if "answer" in first:
        return
    hint = ""
    if "solution" in first:
        hint = (
            f"; if the last \\boxed of the solution holds the answer, set {key}.fields.answer=solution and "
            f"{key}.options.answer_boxed=true"
        )
    raise UserError(
        "cannot tell which field is the answer: the row has no 'answer'; name it with "
        f"{key}.fields.answer=FIELD (fields: {_names(first)}){hint}"
    )


_NOT_META = ("text", "answer", "id", "choices", "labels")
"""Fields that become something else than a value of the problem's meta."""


def _problem(
    row: Mapping[str, Any], fields: Mapping[str, str], options: RowOptions, key: str, fallback_id: str
) -> Problem:
    """The problem of one row; ``fields`` maps our names to the source's. Raises :class:`UserError`."""
    values = {}
    for ours, theirs in fields.items():
        values[ours] = _lookup(row, theirs, f"{key}.fields.{ours}")
    text = _string(values["text"], fields["text"])
    meta = {ours: values[ours] for ours in fields if ours not in _NOT_META}
    _check_json(meta, fields)
    if options.text_after is not None:
        text = _after(text, options.text_after, fields["text"])
    if "choices" in fields:
        choices = read_choices(values["choices"], field=fields["choices"])
        answer = values["answer"]
        if "labels" in fields:
            # First the position, then the letter: labels may be numbers, or letters in another order.
            answer = label_position(answer, values["labels"], len(choices), field=fields["answer"])
        answer = choice_letter(answer, choices, field=fields["answer"])
        # The text without choices, for suites that write them in their own way.
        meta |= {"choices": choices, "question": text}
        if options.render_choices:
            lines = [f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
            text = "\n".join([text, *lines])
    else:
        answer = _answer(_scalar(values["answer"], fields["answer"]), fields["answer"], options)
    problem_id = fallback_id
    if "id" in fields:
        problem_id = _scalar(values["id"], fields["id"])
    return Problem(id=problem_id, text=text, answer=answer, meta=meta)


def _check_json(meta: Mapping[str, Any], fields: Mapping[str, str]) -> None:
    """Raise :class:`UserError` for a value that JSON cannot hold: records are JSON, and jobs of rewards travel."""
    for ours, value in meta.items():
        try:
            json.dumps(value, allow_nan=False).encode("utf-8")
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"field {fields[ours]!r} does not fit into JSON: {error}") from error


def read_choices(value: Any, *, field: str) -> tuple[str, ...]:
    """The choices of a row: 2 to 26 non-empty strings or numbers. Raises :class:`UserError` otherwise."""
    expected = f"field {field!r} must be a list of 2 to {len(LETTERS)} choices"
    if not isinstance(value, list | tuple):
        raise UserError(f"{expected}, got {type(value).__name__}")
    if not 2 <= len(value) <= len(LETTERS):
        raise UserError(f"{expected}, got a list of {len(value)}")
    for choice in value:
        # bool is an int to Python; a choice "True" would be a mistake of the data's types.
        text_or_number = isinstance(choice, str | int | float) and not isinstance(choice, bool)
        if not text_or_number or not str(choice).strip():
            raise UserError(f"field {field!r} holds the choice {shown(choice)}; each must be a non-empty string")
        _check_length(str(choice), field)
    # Numbers become text here, once: a choice is compared, shown and tokenized as text.
    return tuple(str(choice) for choice in value)


def choice_letter(answer: Any, choices: Sequence[str], *, field: str) -> str:
    """The letter of the right choice, from that letter or from a 0-based integer position.

    Another string raises :class:`UserError`: ``"2"`` may be a position counted from 0 or from 1, or a choice.
    """
    allowed = LETTERS[: len(choices)]
    # True would be the position 1.
    is_number = isinstance(answer, int) and not isinstance(answer, bool)
    if is_number and 0 <= answer < len(choices):
        return allowed[answer]
    if isinstance(answer, str):
        letter = answer.strip().upper()
        # Of length 1 before upper(), which makes two letters of one for some characters.
        if len(answer.strip()) == 1 and letter in allowed:
            return letter
    raise UserError(
        f"field {field!r} is {shown(answer)}; with {len(choices)} choices it must be a letter "
        f"A to {allowed[-1]} or an integer position 0 to {len(choices) - 1}"
    )


def label_position(answer: Any, labels: Any, count: int, *, field: str) -> int:
    """The 0-based position of ``answer`` among the source's labels, one for each of its ``count`` choices."""
    names = []
    if isinstance(labels, list | tuple):
        names = [str(label) for label in labels]
    # Compared as text: one row of a source may have the label 1 and the next "1".
    if len(names) != count or len(set(names)) != count:
        raise UserError(f"{count} choices need as many different labels, got {shown(labels)}")
    if str(answer) not in names:
        raise UserError(f"field {field!r} is {shown(answer)}, which is none of the labels {', '.join(names)[:SHOWN]}")
    return names.index(str(answer))


def _names(row: Mapping[str, Any]) -> str:
    """The fields of a row, for a message: a hostile file may have a million, or one of a million characters."""
    names = ", ".join(str(name)[:SHOWN] for name in list(row)[:MAX_LISTED])
    if not names:
        return "(none)"
    if len(row) > MAX_LISTED:
        return f"{names}, ... ({len(row):,})"
    return names


def _lookup(row: Mapping[str, Any], name: str, key: str) -> Any:
    """The value of a field, or of a dotted path into nested objects. Raises :class:`UserError`."""
    # A column that has a dot in its own name comes first.
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            near = nearest(name, [str(field) for field in row])
            hint = ""
            if near:
                hint = f"; did you mean {near!r}?"
            raise UserError(f"no field {name!r} ({key}); the row has: {_names(row)}{hint}")
        value = value[part]
    return value


def _string(value: Any, field: str) -> str:
    """``value`` where it is a non-empty string that UTF-8 can encode. Raises :class:`UserError`."""
    if not isinstance(value, str):
        raise UserError(f"field {field!r} must be a string, got {type(value).__name__}: {reprlib.repr(value)}")
    if not value.strip():
        raise UserError(f"field {field!r} is empty")
    _check_length(value, field)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"field {field!r} holds half of a surrogate pair, which is not valid text") from error
    return value


def _check_length(text: str, field: str) -> None:
    """Raise :class:`UserError` for a text that is longer than :data:`MAX_CHARACTERS`."""
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"field {field!r} has {len(text):,} characters; allowed: at most {MAX_CHARACTERS:,}")


def _scalar(value: Any, field: str) -> str:
    """A string, or a finite number written as Python writes it."""
    # A bool is an int in Python, and an answer of True would be read as 1.
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(
            f"field {field!r} must be a string or a number, got {type(value).__name__}: {reprlib.repr(value)}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"field {field!r} is {value}, not a finite number")
    if isinstance(value, str):
        return _string(value, field)
    return _string(repr(value), field)


def _answer(answer: str, field: str, options: RowOptions) -> str:
    """The final answer in the answer field: after a marker, in the last box, or all of it."""
    if options.answer_after is not None:
        answer = _after(answer, options.answer_after, field)
        if _GROUPED_NUMBER.fullmatch(answer):
            # GSM8K writes 1,000 where its problems say 1000.
            return answer.replace(",", "")
        return answer
    if options.answer_boxed:
        return _string(last_boxed(answer, field=field), field)
    return answer


def _after(text: str, marker: str, field: str) -> str:
    """What follows the last ``marker``, stripped. Raises :class:`UserError` where it or the rest is missing."""
    # The last one: a solution may quote the marker before it gives the answer.
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
    # The last box: a solution may box intermediate results.
    _, box, tail = text.rpartition("\\boxed")
    content = None
    if box:
        without_braces = re.match(r"\s+([^\s{}$\\]+?)\.?(?=[\s$]|$)", tail)
        if without_braces:
            content = without_braces.group(1)
        else:
            content = in_braces(tail.lstrip())
    if content is None:
        raise UserError(f"field {field!r} has no complete \\boxed{{...}}: {reprlib.repr(text)}")
    return content


def in_braces(text: str) -> str | None:
    """The content of the balanced braces that ``text`` begins with; None where it does not, or they do not close.

    >>> in_braces("{x_{1}} and {2}"), in_braces("{x_{1}")
    ('x_{1}', None)
    """
    if not text.startswith("{"):
        return None
    depth = 0
    for position, char in enumerate(text):
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
        if depth == 0:
            return text[1:position].strip()
    return None
