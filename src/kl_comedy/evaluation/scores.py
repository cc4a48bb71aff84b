"""Scores of an evaluation: accuracy, pass@k and maj@k with intervals over problems, and the answers that vote.

:func:`canonical` reads the answer of a completion in a canonical form, so that equal answers vote together. It uses
string rules only, never the gold answer, and takes linear time on hostile text:

- ``math``: the last ``\boxed{}``, else what follows the last marker (``####``, ``A:``, ``=``), numbers as fractions
  (``0.5``, ``\frac{1}{2}`` and ``1/2`` are one answer), else LaTeX without spaces, sizing and text commands;
- ``number``: the first number after the last marker, else the last of the last line;
- ``letter``: the letter that a multiple-choice completion settles on;
- ``text``: the last line without case and outer punctuation; ``answer_tag``: the content of ``<answer>``.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kl_comedy.data.rows import LETTERS, in_braces
from kl_comedy.errors import bad_value
from kl_comedy.rewards import text as answers
from kl_comedy.statistics import (
    Interval,
    check_k,
    clustered_interval,
    clustered_se,
    majority_at_k,
    pass_at_k,
)

MAX_CHARS = 16_384
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|text(?:bf|rm|it)?|mathrm)(?![A-Za-z])|\\[,;:!]|[\s$]")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{?(-?\d+)\}?\{?(\d+)\}?")


def canonical(completion: str, form: str, choices: Sequence[str] = ()) -> str | None:
    r"""The completion's answer in the given ``form``, or None where it gives none.

    >>> canonical("so \\boxed{\\frac{1}{2}}", "math") == canonical("it is\n#### 0.50", "math") == "1/2"
    True
    >>> canonical("The answer is (B).", "letter", ("x", "y")), canonical("<answer> 3 + 4 </answer>", "answer_tag")
    ('B', '3+4')
    """
    text = answers.clean(answers.tail(completion, MAX_CHARS))
    if form == "math":
        return _math(text)
    if form == "number":
        return _number(text)
    if form == "letter":
        return answers.chosen_letter(text, LETTERS[: len(choices) or 10])
    if form == "answer_tag":
        return "".join(answers.answer_tag(text).split()).casefold() or None
    if form == "text":
        lines = [line for line in text.split("\n") if line.strip()]
        return (lines[-1].strip(" .,;:!?\"'()[]{}*_`$").casefold() or None) if lines else None
    raise bad_value("answer", form, ("math", "number", "letter", "text", "answer_tag"))


def _math(text: str) -> str | None:
    boxed = last_box(text)
    if boxed is None:
        return _number(text)
    plain = _LAYOUT.sub("", boxed).rstrip(".").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    if fraction := _FRACTION.fullmatch(plain):
        plain = "{}{}/{}".format(*fraction.groups()).replace("--", "")
    plain = re.sub(r"\\%$|%$|\^\{?\\circ\}?$", "", plain)
    if plain.startswith("{") and plain.endswith("}") and plain.count("{") == 1:
        plain = plain[1:-1]
    value = answers.number(plain)
    return str(value) if value is not None else plain or None


def _number(text: str) -> str | None:
    segment, marked = answers.final_segment(text)
    numbers = answers.numbers_in(segment)
    return str(numbers[0 if marked else -1]) if numbers else None


def last_box(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` whose braces close; None without one.

    >>> last_box("\\boxed{1} then \\boxed{\\frac{1}{2}} and \\boxed{3"), last_box("none")
    ('\\frac{1}{2}', None)
    """
    contents = map(in_braces, reversed(text.split("\\boxed")[1:]))
    return next((content for content in contents if content is not None), None)


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """The scores of a set or suite by name: means over problems with their intervals, and plain numbers.

    The first of ``values`` is the main one. ``rows``: the completions or records behind the scores, where wanted.
    """

    name: str
    problems: int
    samples: int
    values: Mapping[str, Interval | float]
    standard_errors: Mapping[str, float] = field(default_factory=dict)
    rows: tuple[Any, ...] = ()

    def row(self) -> dict[str, float]:
        """Every number by name; an interval as ``NAME``, ``NAME_low``, ``NAME_high`` (from two problems on)."""
        row: dict[str, Any] = {}
        for name, value in self.values.items():
            row[name] = value.mean if isinstance(value, Interval) else value
            if isinstance(value, Interval):
                row |= {f"{name}_low": value.low, f"{name}_high": value.high}
                row[f"{name}_se"] = self.standard_errors.get(name)
        return {name: number for name, number in row.items() if number is not None}

    def metrics(self) -> dict[str, float]:
        """The metrics of a run, under ``eval/<name>/``: means and half widths of 95% intervals, and plain numbers."""
        metrics: dict[str, Any] = {}
        for name, value in self.values.items():
            metrics[name] = value.mean if isinstance(value, Interval) else value
            if isinstance(value, Interval):
                metrics[f"{name}_half_width"] = value.half_width
        return {f"eval/{self.name}/{name}": number for name, number in metrics.items() if number is not None}

    def line(self) -> str:
        """The main score with its interval, as ``reward 0.738 [0.690, 0.780] (256 problems, length 12.0)``."""
        name, interval = next((n, v) for n, v in self.values.items() if isinstance(v, Interval))
        length = f", length {self.values['length']:.1f}" if "length" in self.values else ""
        return f"{name} {interval:.3f} ({self.problems} problems{length})"


def default_ks(samples: int) -> tuple[int, ...]:
    """Powers of two from 2 below the number of samples, and that number.

    >>> default_ks(1), default_ks(6)
    ((), (2, 4, 6))
    """
    return (*(2**n for n in range(1, samples.bit_length()) if 2**n < samples), samples) if samples > 1 else ()


def check_ks(ks: Sequence[int], samples: int) -> tuple[int, ...]:
    """``ks`` in ascending order. Raises :class:`~kl_comedy.errors.UserError` for one above ``samples``."""
    for k in ks:
        check_k(k, samples, key="--k")
    return tuple(sorted(set(ks)))


def score_completions(
    suite: str, rows: Sequence[Mapping[str, Any]], *, ks: Sequence[int], method: str = "auto"
) -> EvalResult:
    """Scores of completions. ``rows``: records of kind ``generate``, equally many samples of each problem, in order.

    ``accuracy`` is the mean over problems and samples, ``pass@k`` unbiased, ``maj@k`` the vote over canonical answers
    with ties by lot (``maj@k_ties``: share of problems with one). Completions without a canonical answer are
    ``unanswered`` and do not vote. ``method``: of :func:`kl_comedy.statistics.clustered_interval`.
    """
    groups = [list(group) for _, group in itertools.groupby(rows, key=operator.itemgetter("index"))]
    samples = len(groups[0])
    if any(len(group) != samples for group in groups):
        raise bad_value("records", "problems with different numbers of samples", "equally many of each problem")
    correct = [[float(row["correct"]) for row in group] for group in groups]
    values: dict[str, Interval | float] = {"accuracy": clustered_interval(correct, method)}
    for k in check_ks(ks, samples):
        passed = [[pass_at_k(samples, int(sum(group)), k)] for group in correct]
        values[f"pass@{k}"] = clustered_interval(passed, method)
        answers_of = ([row["answer"] for row in group] for group in groups)
        votes = [majority_at_k(given, right, k) for given, right in zip(answers_of, correct, strict=True)]
        values[f"maj@{k}"] = clustered_interval([[vote.correct] for vote in votes], method)
        values[f"maj@{k}_ties"] = sum(vote.tied for vote in votes) / len(votes)

    def mean(numbers: Iterable[float]) -> float:
        return sum(numbers) / len(rows)

    values["truncated_share"] = mean(row["stop_reason"] == "length" for row in rows)
    for status in ("unparseable", "timeout", "refused"):
        values[f"{status}_share"] = mean(row["status"] == status for row in rows)
    values["failed_share"] = mean(bool(row.get("failed")) for row in rows)  # earlier records do not have it
    values["unanswered_share"] = mean(row["answer"] is None for row in rows)
    values |= {name: mean(row[name] for row in rows) for name in ("tokens", "reward")}
    return _result(suite, samples, values, {"accuracy": correct})


def score_choices(suite: str, rows: Sequence[Mapping[str, Any]], *, method: str = "auto") -> EvalResult:
    """``accuracy`` of the likeliest choice, and ``accuracy_norm`` of the likeliest per character."""
    clusters = {
        name: [[float(row[key])] for row in rows]
        for name, key in (("accuracy", "correct"), ("accuracy_norm", "correct_norm"))
    }
    values = {name: clustered_interval(each, method) for name, each in clusters.items()}
    return _result(suite, 1, values, clusters, rows)


def _result(
    name: str,
    samples: int,
    values: Mapping[str, Interval | float],
    clusters: Mapping[str, Sequence[Sequence[float]]],
    rows: Sequence[Any] = (),
) -> EvalResult:
    errors = {key: error for key, each in clusters.items() if (error := clustered_se(each)) is not None}
    problems = len(clusters["accuracy"])
    return EvalResult(
        name=name, problems=problems, samples=samples, values=values, standard_errors=errors, rows=tuple(rows)
    )
