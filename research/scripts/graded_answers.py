"""Agreement of answer graders with hand-graded answers: writes results/graded/README.md, verdicts.csv and issues.md.

python bench/peers/fetch.py trl verl tensordict pyvers codetiming torchdata pylatexenc
python research/scripts/graded_answers.py [--pages | --new]

``--pages``: the pages alone, from the verdicts in verdicts.csv and verdicts_new.csv. ``--new``: the verdicts on the new
answers (tests/fixtures/graded_answers_new.jsonl) are computed, those on the others are read. Every grader gets the same
completion and gold. The peers' graders are the functions of their released wheels.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from statistics import NormalDist
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(ROOT / "research" / "scripts"))

from graded_faults import DOCUMENTED, FAULTS, Fault, Probe  # noqa: E402
from peers.loading import Peer  # noqa: E402
from table_comments import with_unchecked_comments  # noqa: E402

from kl_comedy.registry import REWARDS  # noqa: E402
from kl_comedy.rewards.mathematics import wrapped  # noqa: E402

ANSWERS = ROOT / "tests" / "fixtures" / "graded_answers_wide.jsonl"
NEW_ANSWERS = ROOT / "tests" / "fixtures" / "graded_answers_new.jsonl"
TARGET = ROOT / "results" / "graded"
SECONDS = 10
"""CPU time for one verdict; math-verify alone would take hours for thirty pairs of braces."""
LETTERS = ("A", "B", "C", "D", "E")
OURS = "kl_comedy"
MATH_VERIFY = "math-verify"

VERL = Peer(
    "verl",
    packages=("verl",),
    stubs=("ray", "orjson"),
    extras=(
        ("tensordict", ("tensordict",)),
        ("pyvers", ("pyvers",)),
        ("codetiming", ("codetiming",)),
        ("torchdata", ("torchdata",)),
        ("pylatexenc", ("pylatexenc",)),
    ),
)
TRL = Peer("trl", packages=("trl",))

Row = dict[str, Any]
Grade = Callable[[Row], float]


@dataclass(frozen=True, kw_only=True)
class Grader:
    """A grader: its name in the tables, what it is, and its verdict (0 or 1) on a row."""

    name: str
    description: str
    grade: Grade


# --- the graders -------------------------------------------------------------------------------------------------
@lru_cache
def function_of(peer: Peer, module: str, name: str) -> Callable[..., Any]:
    """A function of a peer, imported when it is first used."""
    return getattr(peer.module(module), name)


def verl_math_reward(row: Row) -> float:
    """verl's grader of MATH."""
    compute_score = function_of(VERL, "verl.utils.reward_score.math_reward", "compute_score")
    return float(compute_score(row["completion"], row["answer"]))


def verl_prime_math(row: Row) -> float:
    """verl's grader of the NuminaMath sets, which returns the verdict first."""
    compute_score = function_of(VERL, "verl.utils.reward_score.prime_math", "compute_score")
    return float(compute_score(row["completion"], row["answer"])[0])


def trl_accuracy_reward(row: Row) -> float:
    """TRL's reward, with the gold in dollar signs, as its datasets write it."""
    accuracy_reward = function_of(TRL, "trl.rewards.accuracy_rewards", "accuracy_reward")
    rewards = accuracy_reward([[{"content": row["completion"]}]], [wrapped(row["answer"])])
    # None, for a gold that cannot be parsed, teaches as little as 0.
    return float(rewards[0] or 0.0)


def graders() -> list[Grader]:
    """Ours, math-verify alone and the peers'."""
    return [
        Grader(
            name=OURS,
            description="the reward that the row names: `math_verify`, `exact_answer` or `multiple_choice`",
            grade=lambda row: float(REWARDS.get(row["reward"]).fn(row["completion"], row["answer"], {}).value),
        ),
        Grader(
            name=MATH_VERIFY,
            description=f"math-verify {version('math-verify')} alone: `verify(parse(gold), parse(completion))` at its "
            "defaults, the gold in dollar signs; for choices with its `StringExtractionConfig`",
            grade=math_verify_alone,
        ),
        Grader(
            name="verl math_reward",
            description=f"`verl.utils.reward_score.math_reward.compute_score` of verl {VERL.version}, its grader of "
            "MATH: the text of the last box, normalized",
            grade=verl_math_reward,
        ),
        Grader(
            name="verl prime_math",
            description=f"`verl.utils.reward_score.prime_math.compute_score` of verl {VERL.version}, its grader of the "
            "NuminaMath sets: rules and sympy. Its last resort, sympy's LaTeX parser, asks for antlr4 4.11 and does "
            f"not run beside the {version('antlr4-python3-runtime')} of this environment",
            grade=verl_prime_math,
        ),
        Grader(
            name="TRL accuracy_reward",
            description=f"`trl.rewards.accuracy_reward` of TRL {TRL.version}: math-verify, with options of its own",
            grade=trl_accuracy_reward,
        ),
    ]


def math_verify_alone(row: Row) -> float:
    """The verdict of math-verify without our rules."""
    from math_verify import StringExtractionConfig, parse, verify

    if row["reward"] == "multiple_choice":
        config = [StringExtractionConfig(strings=LETTERS)]
        gold = parse(row["answer"], config, parsing_timeout=None)
        given = parse(row["completion"], config, parsing_timeout=None)
    else:
        gold = parse(wrapped(row["answer"]), parsing_timeout=None)
        given = parse(row["completion"], parsing_timeout=None)
    return float(verify(gold, given, timeout_seconds=None))


class OverTime(BaseException):
    """The time for a verdict is over. Graders catch every Exception."""


def end_verdict(signal_number: int, frame: Any) -> None:
    raise OverTime


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Raise :class:`OverTime` after :data:`SECONDS` of CPU time."""
    signal.signal(signal.SIGVTALRM, end_verdict)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def verdicts(grader: Grader, rows: Sequence[Row]) -> list[float]:
    """The verdict of ``grader`` on every row. An error or a time limit is no reward, as in training."""
    results = []
    for row in rows:
        # sympy draws random numbers: the verdict on a row must not depend on the rows before it.
        from sympy.core.random import seed

        seed(0)
        try:
            # Some graders print.
            with contextlib.redirect_stdout(io.StringIO()), time_limit():
                value = grader.grade(row)
        except (Exception, OverTime):
            value = 0.0
        results.append(value)
    return results


# --- the page ----------------------------------------------------------------------------------------------------
def wilson(hits: int, size: int) -> tuple[float, float]:
    """Wilson's score interval at 95 % of the share ``hits / size``.

    That of :mod:`kl_comedy.statistics` is for clusters of samples; these answers are independent.
    """
    z = NormalDist().inv_cdf(0.975)
    share = hits / size
    middle = (share + z**2 / (2 * size)) / (1 + z**2 / size)
    half = z * math.sqrt(share * (1 - share) / size + z**2 / (4 * size**2)) / (1 + z**2 / size)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def agreement(values: Sequence[bool]) -> str:
    """``49/50 (0.90 to 1.00)``: how many agree, with Wilson's interval at 95 %."""
    low, high = wilson(sum(values), len(values))
    return f"{sum(values)}/{len(values)} ({low:.2f} to {high:.2f})"


SUBSETS: dict[str, Callable[[Row], bool]] = {
    "**all**": lambda row: True,
    "without choices": lambda row: row["reward"] != "multiple_choice",
    "with a box": lambda row: "\\boxed" in row["completion"],
    "right answers": lambda row: row["value"] == 1.0,
    "wrong answers": lambda row: row["value"] == 0.0,
}
"""Rows of the agreement table below those of the kinds, by label."""


def agreement_table(rows: Sequence[Row], results: dict[str, list[float]]) -> list[str]:
    """A line per kind, and lines for all rows, for those with a box, for right and for wrong answers."""
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row["kind"], []).append(index)
    for label, is_member in SUBSETS.items():
        groups[label] = [index for index, row in enumerate(rows) if is_member(row)]
    lines = [f"| kind | {' | '.join(results)} |", "| --- " * (len(results) + 1) + "|"]
    for label, indices in groups.items():
        cells = []
        for values in results.values():
            cells.append(agreement([values[index] == rows[index]["value"] for index in indices]))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def code(text: str) -> str:
    """``text`` as code in a cell of a table, cut after 200 characters."""
    if len(text) > 200:
        text = f"{text[:60]}... ({len(text):,} characters)"
    return "`" + text.replace("\n", " ").replace("|", "\\|") + "`"


def grade_in_words(row: Row) -> str:
    """What a person said of the answer."""
    if row["value"]:
        return "right"
    return "wrong"


def disagreements(rows: Sequence[Row], results: dict[str, list[float]]) -> list[str]:
    """The rows on which the graders do not all agree with the grade, by kind, with who is wrong."""
    lines: list[str] = []
    kind = None
    for index, row in enumerate(rows):
        wrong_graders = [name for name, values in results.items() if values[index] != row["value"]]
        if not wrong_graders:
            continue
        # The rows of a kind stand together in the file.
        if row["kind"] != kind:
            kind = row["kind"]
            lines += ["", f"### {kind}", "", "| completion | gold | it is | why | graded otherwise by |"]
            lines.append("| --- " * 5 + "|")
        names = ", ".join(wrong_graders)
        if len(wrong_graders) == len(results):
            names = "all"
        cells = [code(row["completion"]), code(row["answer"]), grade_in_words(row), row["why"], names]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def own_disagreements(rows: Sequence[Row], values: Sequence[float]) -> list[str]:
    """The rows that ours grades otherwise, each with the documented choice that explains it."""
    lines = ["| completion | gold | it is | ours | explained by |", "| --- " * 5 + "|"]
    for row, value in zip(rows, values, strict=True):
        if value == row["value"]:
            continue
        reason = DOCUMENTED.get(row.get("documented", ""), "nothing: a fault")
        cells = [code(row["completion"]), code(row["answer"]), grade_in_words(row), f"{value:g}", reason]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def new_answers(rows: Sequence[Row], results: dict[str, list[float]]) -> list[str]:
    """The section of the answers that were written after the rules."""
    first = [float(row["first"]) for row in rows]
    return [
        "## New answers",
        "",
        f"{len(rows)} further answers (`tests/fixtures/graded_answers_new.jsonl`) of kinds that the others do not "
        "have, hostile ones among them, with grades by construction. They were written before ours had read them; "
        "`kl_comedy, first` is that reading, and shows what to expect of new answers. Then our rules were extended in "
        f"view of them. A verdict may take {SECONDS} seconds of CPU time.",
        "",
        *agreement_table(rows, {f"{OURS}, first": first, **results}),
        "",
        "What ours still grades otherwise:",
        "",
        *own_disagreements(rows, results[OURS]),
        "",
    ]


def page(rows: Sequence[Row], used: Sequence[Grader], results: dict[str, list[float]], new: Sequence[str]) -> str:
    """results/graded/README.md. ``new``: the section of the new answers."""
    parts = [
        "# Graded answers",
        "",
        "Written by `python research/scripts/graded_answers.py` from `tests/fixtures/graded_answers_wide.jsonl`: "
        f"{len(rows)} answers, written for this comparison and graded by hand. The graders:",
        "",
        *[f"- **{grader.name}**: {grader.description}." for grader in used],
        "",
        "The grade is what a teacher would give who sees the gold. A missing unit is no fault and another unit is one. "
        "An order counts for coordinates and not for sets. Every answer that is asked for must be there, and no other. "
        "An exact gold is not met by rounded digits. `25%` is 0.25, and a bare 25 is accepted where the gold is a "
        "percentage.",
        "",
        "The answers were written before any grader had read them; one, a mixed number with `and`, which may be two "
        "numbers, was replaced. Then our rules were extended in view of them, so "
        "that our own column shows what is mended, and not what to expect of new answers. "
        "verl's and TRL's graders expect LaTeX or a box, and have no rules for choices; the line `with a box` compares "
        "them on their own ground.",
        "",
        "## Agreement",
        "",
        "Agreement with the grade, with Wilson's interval at 95 %.",
        "",
        *agreement_table(rows, results),
        "",
        "## What ours grades otherwise",
        "",
        *own_disagreements(rows, results[OURS]),
        "",
        *new,
        "## Disagreements",
        "",
        "The grade is right in each row; the last column names the graders that give another one.",
        *disagreements(rows, results),
        "",
    ]
    return "\n".join(parts)


# --- the issues --------------------------------------------------------------------------------------------------
def probed(probe: Probe) -> str:
    """What math-verify says about a probe, now."""
    from math_verify import parse, verify

    gold = parse(probe.gold, parsing_timeout=None)
    given = parse(probe.answer, parsing_timeout=None)
    verdict = verify(gold, given, timeout_seconds=None)
    parsed = " ".join(repr(given).split())
    state = f"expected {probe.expected}"
    if verdict == probe.expected:
        state = "as expected"
    return f"verify(parse({probe.gold!r}), parse({probe.answer!r}))\n# {verdict}, {state}; parsed: {parsed}"


def issue(fault: Fault) -> list[str]:
    """One issue, ready to be sent."""
    return [
        f"## {fault.title}",
        "",
        fault.text,
        "",
        "```python",
        "from math_verify import parse, verify",
        "",
        *[probed(probe) for probe in fault.probes],
        "```",
        "",
        f"In front of it, kl_comedy: {fault.mended}",
        "",
    ]


def issues() -> str:
    """results/graded/issues.md."""
    lines = [
        "# Issues for math-verify",
        "",
        f"Faults of math-verify {version('math-verify')} (latex2sympy2_extended {version('latex2sympy2_extended')}) "
        "that the graded answers show. The outputs are those of the run of "
        "`python research/scripts/graded_answers.py` that wrote this page. None has been sent.",
        "",
    ]
    for fault in FAULTS:
        lines += issue(fault)
    return "\n".join(lines)


FACTS = ("kind", "reward", "completion", "answer", "value")
"""The columns of verdicts.csv before those of the graders."""


def write_verdicts(file: Path, rows: Sequence[Row], results: dict[str, list[float]]) -> None:
    """verdicts.csv: a line per row, with the verdict of each grader."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([*FACTS, *results])
        for index, row in enumerate(rows):
            facts = [row["kind"], row["reward"], row["completion"], row["answer"], f"{row['value']:g}"]
            writer.writerow([*facts, *[f"{values[index]:g}" for values in results.values()]])


def read_verdicts(file: Path, rows: Sequence[Row]) -> dict[str, list[float]]:
    """The verdicts of verdicts.csv. Raises :class:`SystemExit` where they are those of other rows."""
    with file.open(newline="", encoding="utf-8") as stream:
        lines = list(csv.DictReader(stream))
    stored_answers = [(line["completion"], line["answer"]) for line in lines]
    answers = [(row["completion"], row["answer"]) for row in rows]
    if stored_answers != answers:
        raise SystemExit(f"{file} has the verdicts of other answers; run the command without --pages")
    names = [name for name in lines[0] if name not in FACTS]
    return {name: [float(line[name]) for line in lines] for name in names}


def rows_and_verdicts(
    answers: Path, name: str, used: Sequence[Grader], *, is_stored: bool
) -> tuple[list[Row], dict[str, list[float]]]:
    """The rows of a corpus and every grader's verdicts on them: the stored ones, or new ones, which are stored."""
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    file = TARGET / name
    if is_stored:
        return rows, read_verdicts(file, rows)
    results = {grader.name: verdicts(grader, rows) for grader in used}
    write_verdicts(file, rows, results)
    return rows, results


def main(arguments: Sequence[str]) -> int:
    logging.disable(logging.WARNING)
    used = graders()
    TARGET.mkdir(parents=True, exist_ok=True)
    reads_pages = "--pages" in arguments
    rows, results = rows_and_verdicts(ANSWERS, "verdicts.csv", used, is_stored=reads_pages or "--new" in arguments)
    new_rows, new_results = rows_and_verdicts(NEW_ANSWERS, "verdicts_new.csv", used, is_stored=reads_pages)
    text = page(rows, used, results, new_answers(new_rows, new_results))
    (TARGET / "README.md").write_text(with_unchecked_comments(text), encoding="utf-8")
    (TARGET / "issues.md").write_text(issues(), encoding="utf-8")
    print("\n".join(agreement_table([*rows, *new_rows], {name: results[name] + new_results[name] for name in results})))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
