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
    Majority,
    check_k,
    clustered_interval,
    clustered_se,
    majority_at_k,
    pass_at_k,
)

MAX_CHARS = 16_384
"""How much of a completion's end is read: the time per completion is bounded, whatever a model writes."""
MOST_LETTERS = 10
"""The letters that may be chosen where the problem does not say how many choices it has."""
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|text(?:bf|rm|it)?|mathrm)(?![A-Za-z])|\\[,;:!]|[\s$]")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{?(-?\d+)\}?\{?(\d+)\}?")


def canonical(completion: str, form: str, choices: Sequence[str] = ()) -> str | None:
    r"""The completion's answer in the given ``form``, or None where it gives none.

    >>> canonical("so \\boxed{\\frac{1}{2}}", "math") == canonical("it is\n#### 0.50", "math") == "1/2"
    True
    >>> canonical("The answer is (B).", "letter", ("x", "y")), canonical("<answer> 3 + 4 </answer>", "answer_tag")
    ('B', '3+4')
    """
    # The same readers as the rewards, so that an answer that is right is also one that votes.
    text = answers.clean(answers.tail(completion, MAX_CHARS))
    if form == "math":
        return _math(text)
    if form == "number":
        return _number(text)
    if form == "letter":
        count = len(choices) or MOST_LETTERS
        return answers.chosen_letter(text, LETTERS[:count])
    if form == "answer_tag":
        return "".join(answers.answer_tag(text).split()).casefold() or None
    if form == "text":
        return _last_line(text)
    raise bad_value("answer", form, ("math", "number", "letter", "text", "answer_tag"))


def _math(text: str) -> str | None:
    boxed = last_box(text)
    if boxed is None:
        return _number(text)
    plain = _LAYOUT.sub("", boxed).rstrip(".")
    plain = plain.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    fraction = _FRACTION.fullmatch(plain)
    if fraction:
        sign, top, bottom = fraction.groups()
        # Two minus signs, before the fraction and in it, cancel.
        plain = f"{sign}{top}/{bottom}".replace("--", "")
    # Units that a reader may leave out: 50% and 90 degrees.
    plain = re.sub(r"\\%$|%$|\^\{?\\circ\}?$", "", plain)
    in_one_pair = plain.startswith("{") and plain.endswith("}") and plain.count("{") == 1
    if in_one_pair:
        plain = plain[1:-1]
    value = answers.number(plain)
    if value is not None:
        return str(value)
    return plain or None


def _number(text: str) -> str | None:
    segment, marked = answers.final_segment(text)
    numbers = answers.numbers_in(segment)
    if not numbers:
        return None
    # As exact_answer reads it: the first number after a marker, else the last of the last line.
    if marked:
        return str(numbers[0])
    return str(numbers[-1])


def _last_line(text: str) -> str | None:
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return None
    return lines[-1].strip(" .,;:!?\"'()[]{}*_`$").casefold() or None


def last_box(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` whose braces close; None without one.

    >>> last_box("\\boxed{1} then \\boxed{\\frac{1}{2}} and \\boxed{3"), last_box("none")
    ('\\frac{1}{2}', None)
    """
    boxes = text.split("\\boxed")[1:]
    # The last one that is complete: a completion may be cut off within its last box.
    for rest in reversed(boxes):
        content = in_braces(rest)
        if content is not None:
            return content
    return None


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """The scores of a set or suite by name: means over problems with their intervals, and plain numbers.

    The first of ``values`` is the main score. ``rows``: the completions or records behind the scores; may be empty.
    """

    name: str
    problems: int
    samples: int
    values: Mapping[str, Interval | float]
    standard_errors: Mapping[str, float] = field(default_factory=dict)
    rows: tuple[Any, ...] = ()

    def row(self) -> dict[str, float]:
        """Every number by name; an interval as ``NAME``, ``NAME_low``, ``NAME_high`` (from two problems on)."""
        row: dict[str, float] = {}
        for name, value in self.values.items():
            if not isinstance(value, Interval):
                row[name] = value
                continue
            numbers = {
                name: value.mean,
                f"{name}_low": value.low,
                f"{name}_high": value.high,
                f"{name}_se": self.standard_errors.get(name),
            }
            # One problem has a mean and no interval.
            row |= {key: number for key, number in numbers.items() if number is not None}
        return row

    def metrics(self) -> dict[str, float]:
        """The metrics of a run, under ``eval/<name>/``: means and half widths of 95% intervals, and plain numbers."""
        prefix = f"eval/{self.name}"
        metrics: dict[str, float] = {}
        for name, value in self.values.items():
            if not isinstance(value, Interval):
                metrics[f"{prefix}/{name}"] = value
                continue
            if value.mean is not None:
                metrics[f"{prefix}/{name}"] = value.mean
            if value.half_width is not None:
                metrics[f"{prefix}/{name}_half_width"] = value.half_width
        return metrics

    def line(self) -> str:
        """The main score with its interval, as ``reward 0.738 [0.690, 0.780] (256 problems, length 12.0)``."""
        main_name, main_score = next(
            (name, value) for name, value in self.values.items() if isinstance(value, Interval)
        )
        length = ""
        if "length" in self.values:
            length = f", length {self.values['length']:.1f}"
        return f"{main_name} {main_score:.3f} ({self.problems} problems{length})"


def default_ks(samples: int) -> tuple[int, ...]:
    """The powers of two from 2 on that are below the number of samples, and that number.

    >>> default_ks(1), default_ks(6)
    ((), (2, 4, 6))
    """
    if samples <= 1:
        # Accuracy is pass@1 already.
        return ()
    ks = []
    k = 2
    while k < samples:
        ks.append(k)
        k *= 2
    return (*ks, samples)


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
    ``unanswered`` and do not vote. ``method``: as :func:`kl_comedy.statistics.clustered_interval` takes it. Raises
    :class:`~kl_comedy.errors.UserError` where problems have different numbers of samples.
    """
    groups = [list(group) for _, group in itertools.groupby(rows, key=operator.itemgetter("index"))]
    samples = len(groups[0])
    if any(len(group) != samples for group in groups):
        raise bad_value("records", "problems with different numbers of samples", "equally many of each problem")
    correct = [[float(row["correct"]) for row in group] for group in groups]
    values: dict[str, Interval | float] = {"accuracy": clustered_interval(correct, method)}
    for k in check_ks(ks, samples):
        # One number per problem: pass@k is already a mean over the choices of k samples.
        passed = [[pass_at_k(samples, int(sum(group)), k)] for group in correct]
        values[f"pass@{k}"] = clustered_interval(passed, method)
        votes = [_vote(group, k) for group in groups]
        values[f"maj@{k}"] = clustered_interval([[vote.correct] for vote in votes], method)
        values[f"maj@{k}_ties"] = sum(vote.tied for vote in votes) / len(votes)
    # The order of what follows is that of the columns of stored tables.
    values["truncated_share"] = _share(row["stop_reason"] == "length" for row in rows)
    for status in ("unparseable", "timeout", "refused"):
        values[f"{status}_share"] = _share(row["status"] == status for row in rows)
    # Records of earlier versions do not have it.
    values["failed_share"] = _share(bool(row.get("failed")) for row in rows)
    values["unanswered_share"] = _share(row["answer"] is None for row in rows)
    for name in ("tokens", "reward"):
        values[name] = sum(row[name] for row in rows) / len(rows)
    return _result(suite, samples, values, {"accuracy": correct})


def _vote(group: Sequence[Mapping[str, Any]], k: int) -> Majority:
    """The majority of the canonical answers of one problem's records."""
    # The vote is over canonical answers, the verifier's verdict counts for the answer that wins: no gold in the vote.
    given = [row["answer"] for row in group]
    right = [bool(row["correct"]) for row in group]
    return majority_at_k(given, right, k)


def _share(conditions: Iterable[bool]) -> float:
    flags = list(conditions)
    return sum(flags) / len(flags)


def score_choices(suite: str, rows: Sequence[Mapping[str, Any]], *, method: str = "auto") -> EvalResult:
    """``accuracy`` of the likeliest choice, and ``accuracy_norm`` of the likeliest per character."""
    clusters = {
        "accuracy": [[float(row["correct"])] for row in rows],
        "accuracy_norm": [[float(row["correct_norm"])] for row in rows],
    }
    values = {name: clustered_interval(each_problem, method) for name, each_problem in clusters.items()}
    return _result(suite, 1, values, clusters, rows)


def _result(
    name: str,
    samples: int,
    values: Mapping[str, Interval | float],
    clusters: Mapping[str, Sequence[Sequence[float]]],
    rows: Sequence[Any] = (),
) -> EvalResult:
    standard_errors = {}
    for score, groups in clusters.items():
        standard_error = clustered_se(groups)
        # None for a single problem.
        if standard_error is not None:
            standard_errors[score] = standard_error
    return EvalResult(
        name=name,
        problems=len(clusters["accuracy"]),
        samples=samples,
        values=values,
        standard_errors=standard_errors,
        rows=tuple(rows),
    )
