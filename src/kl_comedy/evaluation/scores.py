"""The answer that a completion gives, in a canonical form, so that equal answers vote together.

String rules only: no gold is looked at, and nothing is evaluated, so hostile text costs linear time. The verifier's
verdict is another matter; a winning answer is as right as the verifier says of its samples.

- ``math``: the last ``\boxed{}``, else what follows the last marker (``####``, ``A:``, ``=``), numbers as fractions
  (``0.5``, ``\frac{1}{2}`` and ``1/2`` are one answer), else LaTeX without spaces, sizing and text commands;
- ``number``: the first number after the last marker, else the last of the last line;
- ``letter``: the letter a multiple-choice completion settles on;
- ``text``: the last line, case and outer punctuation dropped; ``answer_tag``: what stands inside ``<answer>``.

From records to scores: accuracy, pass@k, maj@k with intervals over problems; how completions ended and were read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kl_comedy.data.rows import LETTERS
from kl_comedy.errors import bad_value
from kl_comedy.rewards import text as guards
from kl_comedy.rewards.text import chosen_letter, final_segment, number, numbers_in
from kl_comedy.statistics import (
    Interval,
    check_k,
    clustered_interval,
    clustered_se,
    generator,
    majority_at_k,
    pass_at_k,
)

if TYPE_CHECKING:
    import numpy as np


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


STATUS_SHARES = ("unparseable", "timeout", "refused")


@dataclass(frozen=True, kw_only=True)
class SuiteScore:
    """What an evaluation found. ``values``: by name, with ``NAME_low`` and ``NAME_high`` where it has an interval."""

    suite: str
    problems: int
    samples: int
    values: Mapping[str, float]

    def metrics(self) -> dict[str, float]:
        """Under ``eval/<suite>/...``."""
        return {f"eval/{self.suite}/{name}": value for name, value in self.values.items()}


def default_ks(samples: int) -> tuple[int, ...]:
    """Powers of two below the number of samples, and the number itself, from 2 on.

    >>> default_ks(1), default_ks(6)
    ((), (2, 4, 6))
    """
    powers = (2**n for n in range(1, samples.bit_length()))
    return tuple(sorted({*(k for k in powers if k < samples), samples})) if samples > 1 else ()


def check_ks(ks: Sequence[int], samples: int) -> tuple[int, ...]:
    """``ks`` as they can be had of so many samples. Raises :class:`~kl_comedy.errors.UserError` for more."""
    for k in ks:
        check_k(k, samples, key="--k")
    return tuple(sorted(set(ks)))


def score_generated(
    suite: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    ks: Sequence[int],
    method: str = "wilson",
    rng: np.random.Generator | None = None,
) -> SuiteScore:
    """Scores of completions. ``rows``: records of kind ``generate``, equally many samples of each problem, in order.

    ``accuracy`` is avg@n, the mean over problems and samples; its interval treats the problem as what is drawn at
    random. ``pass@k`` is unbiased, ``maj@k`` the vote over canonical answers with ties by lot (``maj@k_ties``: share of
    problems with a tie). ``unparseable``: completions in which the verifier found no answer; ``unanswered``: those
    without a canonical answer, which do not vote. Shares are of completions, ``tokens`` their mean length.
    """
    groups = _groups(rows)
    samples = len(groups[0])
    rng = generator() if rng is None else rng
    correct = [[float(row["correct"]) for row in group] for group in groups]
    values = _with_interval("accuracy", clustered_interval(correct, method, rng=rng))
    se = clustered_se(correct)
    if se is not None:
        values["accuracy_se"] = se
    for k in check_ks(ks, samples):
        passed = [[pass_at_k(samples, int(sum(group)), k)] for group in correct]
        values |= _with_interval(f"pass@{k}", clustered_interval(passed, method, rng=rng))
        votes = [
            majority_at_k([row["answer"] for row in group], [row["correct"] for row in group], k) for group in groups
        ]
        values |= _with_interval(f"maj@{k}", clustered_interval([[vote.correct] for vote in votes], method, rng=rng))
        values[f"maj@{k}_ties"] = sum(vote.tied for vote in votes) / len(votes)
    values["truncated_share"] = _share(rows, lambda row: row["stop_reason"] == "length")
    for status in STATUS_SHARES:
        values[f"{status}_share"] = _share(rows, lambda row, status=status: row["status"] == status)
    values["unanswered_share"] = _share(rows, lambda row: row["answer"] is None)
    values["tokens"] = sum(row["tokens"] for row in rows) / len(rows)
    values["reward"] = sum(row["reward"] for row in rows) / len(rows)
    return SuiteScore(suite=suite, problems=len(groups), samples=samples, values=values)


def score_compared(
    suite: str, rows: Sequence[Mapping[str, Any]], *, method: str = "wilson", rng: np.random.Generator | None = None
) -> SuiteScore:
    """Scores of choices: ``accuracy`` of the likeliest, ``accuracy_norm`` of the likeliest per character."""
    rng = generator() if rng is None else rng
    values: dict[str, float] = {}
    for name, field in (("accuracy", "correct"), ("accuracy_norm", "correct_norm")):
        clusters = [[float(row[field])] for row in rows]
        values |= _with_interval(name, clustered_interval(clusters, method, rng=rng))
        se = clustered_se(clusters)
        if se is not None:
            values[f"{name}_se"] = se
    return SuiteScore(suite=suite, problems=len(rows), samples=1, values=values)


def _groups(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Records by problem, in order."""
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["index"], []).append(row)
    if len({len(group) for group in groups.values()}) != 1:
        raise bad_value("records", "problems with different numbers of samples", "equally many of each problem")
    return list(groups.values())


def _with_interval(name: str, found: Interval) -> dict[str, float]:
    bounds = {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
    return {key: value for key, value in bounds.items() if value is not None}


def _share(rows: Sequence[Mapping[str, Any]], holds: Any) -> float:
    return sum(map(holds, rows)) / len(rows)
