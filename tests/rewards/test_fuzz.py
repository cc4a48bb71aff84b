"""Answers drawn from grammars: none runs code, none ends a batch, none is right.

Python-like answers go to the nine tasks whose scorers evaluate, formulas to math_verify. Some hundred draws are the
slow test, a few of them the fast one.
"""

from __future__ import annotations

import random
import string
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kl_comedy.records import STATUSES
from kl_comedy.rewards import RewardPool, gym, score

factory = pytest.importorskip("reasoning_gym.factory")
TASKS = (*gym.LISTS, *gym.EXPRESSIONS)
BATCH = 500

# A rule is a format string: each name in braces is replaced by a word that is drawn from its rules. A rule that is
# listed more than once is drawn more often. The order of the rules decides what a seed draws.
PYTHON = {
    "answer": ["{e}"] * 6 + ["{e}{odd}", "{odd}{e}", "{e} {e}", "{e}\n{e}", "{e}, {e}"],
    "e": ["{name}"] * 4
    + ["{number}"] * 4
    + [
        "({e})",
        "{e}{op}{e}",
        "{e}{op}{e}",
        "-{e}",
        "{call}",
        "{call}",
        "[{e}]",
        "[{e}, {e}]",
        "({e}, {e})",
        "{{{e}}}",
        "{{{e}: {e}}}",
        "{comprehension}",
        "{binding}",
        "{e}[{e}]",
        "{e}.{name}",
        "{e} if {e} else {e}",
        "{text}",
        "f'{{{e}}}'",
        "lambda {name}: {e}",
        "lambda {name}={e}: {e}",
        "*{e}",
        "{e}!",
        "={e}",
        "{name}={e}",
        "0.2[1]",
        "{e} and {e}",
        "not {e}",
        "{e} == {e}",
        "{e} in {e}",
        "await {e}",
        "(yield {e})",
        "`{e}`",
        "{e}#{e}",
        "{e};{e}",
    ],
    "call": ["{name}({mark}, 'w')"] * 4
    + [
        "{name} ({mark}, 'w')",
        "({name})({mark}, 'w')",
        "[{name}][0]({mark}, 'w')",
        "{name}({e})",
        "{name}(*{e})",
        '{name}("open({mark}, chr(119))")',
        "{name}({name}={e})",
        "{name}\n({mark}, 'w')",
        "{name}(**{e})",
    ],
    "comprehension": [
        "[{call} for {name} in [{name}]]",
        "{{{call} for {name} in ({name},)}}",
        "list({call} for {name} in [{e}])",
        "[{e} for {name} in {e} if {call}]",
        "{{1: {call} for {name} in [{name}]}}",
        "[{call} for {name} in [[{name}]] for {name} in {name}]",
    ],
    "binding": [
        "({name} := {e})",
        "({name}:={name}, {call})",
        "[{name} := {name}, {call}]",
        "({name} := {name})({mark}, 'w')",
    ],
    "name": [
        "open",
        "open",
        "exec",
        "eval",
        "sin",
        "exp",
        "sqrt",
        "abs",
        "x",
        "y",
        "C",
        "pi",
        "Q",
        "_",
        "S",
        "N",
        "Symbol",
        "sympify",
        "Rational",
        "Lambda",
        "Function",
        "parse_expr",
        "__import__",
        "getattr",
        "print",
        "None",
        "E",
    ],
    "number": [
        "0",
        "1",
        "24",
        "3.5",
        "1e9",
        "10**10**10",
        "9999999999999999999999999999999999999999",
        "0x1f",
        "1j",
        "1_0",
    ],
    "op": ["+", "-", "*", "/", "**", "^", "//", "%", "@", "|", "<<", " "],
    "text": ["'a'", "'a'*10**10", '"{name}"', "b'a'", "'''{e}'''", "r'\\'", "'{{0.__class__}}'"],
    "odd": [
        "\u0000",
        "\\",
        "#",
        "'",
        '"',
        ")",
        "(",
        "]",
        "{{",
        "\n",
        "\t",
        "\u0661",
        "\ufeff",
        "\u00a0",
        "\ud800",
        "?",
        "$",
        "!",
    ],
}
FORMULAS = {
    "answer": ["\\boxed{{{e}}}"] * 4
    + ["${e}$", "A: {e}", "\\[{e}\\]", "\\boxed{{{e}", "{e}", "\\boxed{{{e}}} or \\boxed{{{e}}}"],
    "e": ["{atom}"] * 8
    + ["{e}{op}{e}"] * 6
    + [
        "\\frac{{{e}}}{{{e}}}",
        "\\sqrt{{{e}}}",
        "{e}^{{{e}}}",
        "\\left({e}\\right)",
        "({e}, {e})",
        "[{e}, {e})",
        "\\{{{e}, {e}\\}}",
        "|{e}|",
        "\\{function}({e})",
        "\\{function} {e}",
        "\\sum_{{k=1}}^{{{e}}} {e}",
        "\\int_{{{e}}}^{{{e}}} {e} dx",
        "\\lim_{{x\\to {e}}} {e}",
        "\\binom{{{e}}}{{{e}}}",
        "{e}!",
        "{e}\\%",
        "{e}_{{{e}}}",
        "\\text{{{e}}}",
        "-{e}",
        "\\begin{{pmatrix}} {e} & {e} \\\\ {e} & {e} \\end{{pmatrix}}",
        "{e}\\cup {e}",
        "\\lfloor {e} \\rfloor",
        "{e}^\\circ",
    ],
    "atom": [
        "x",
        "y",
        "1",
        "2",
        "3",
        "0",
        "\\infty",
        "-\\infty",
        "i",
        "\\pi",
        "e",
        "\\emptyset",
        "\\mathbb{{R}}",
        "0.5",
        "10{{,}}000",
    ],
    "op": [
        "+",
        "-",
        "\\cdot ",
        "/",
        "=",
        "<",
        ">",
        "\\le ",
        "\\ge ",
        "\\ne ",
        "\\in ",
        ",",
        "\\pm ",
        " ",
        "\\mod ",
        "\\to ",
        ";",
        ":",
    ],
    "function": ["sin", "log", "ln", "gcd", "min", "max", "arctan", "exp", "det", "sec", "overline", "mathrm"],
}
SIMPLE_RULES = 8
"""So many rules of ``e`` come first that contain no other ``e``."""
DEEPEST = 4


def drawn(grammar: dict[str, list[str]], rng: random.Random, symbol: str = "answer", depth: int = 0) -> str:
    """A word of the grammar. Deep inside a word ``e`` has its simple rules only, so that every word ends."""
    rules = grammar[symbol]
    if symbol == "e" and depth > DEEPEST:
        rules = rules[:SIMPLE_RULES]
    text = ""
    for literal, inner, _, _ in string.Formatter().parse(rng.choice(rules)):
        text += literal
        if inner == "mark":  # the file that code would make; its name is put in later
            text += "{mark}"
        elif inner is not None:
            text += drawn(grammar, rng, inner, depth + 1)
    return text


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(workers=2) as pool:
        yield pool


@pytest.fixture(scope="module")
def problems() -> dict[str, dict[str, Any]]:
    """One problem of each task whose scorer evaluates."""
    entries = {}
    for task in TASKS:
        build, settings = factory.DATASETS[task]
        entries[task] = dict(next(iter(build(config=settings(seed=5, size=1)))))
    return entries


def check_python(pool: RewardPool, problems: dict[str, dict[str, Any]], count: int, mark: Path) -> Counter[str]:
    """``count`` answers to the nine tasks. Returns how many were evaluated, refused, and so on."""
    rng = random.Random(31)
    outcomes = Counter[str]()
    for start in range(0, count, BATCH):
        size = min(BATCH, count - start)
        tasks = [rng.choice(TASKS) for _ in range(size)]
        texts = [drawn(PYTHON, rng).replace("{mark}", repr(str(mark))) for _ in range(size)]
        rewards = score(
            "reasoning_gym",
            completions=texts,
            answers=[""] * size,
            metas=[{"task": task, "entry": problems[task]} for task in tasks],
            pool=pool,
            timeout_s=1,
        )
        assert not mark.exists(), [text for text in texts if str(mark) in text]
        for text, task, reward in zip(texts, tasks, rewards, strict=True):
            assert reward.status in STATUSES, (task, text)
            if gym.is_expression(text.strip()):
                outcomes["evaluated"] += 1
            else:
                outcomes[reward.status] += 1
                assert reward.value == 0.0, (task, text)
    return outcomes


def check_formulas(pool: RewardPool, count: int) -> None:
    """``count`` formulas, none of which is the gold; a right answer at the end of each batch is right."""
    rng = random.Random(31)
    gold = "987654321"
    for start in range(0, count, BATCH):
        formulas = [drawn(FORMULAS, rng) for _ in range(min(BATCH, count - start))]
        completions = [*formulas, f"it is ${gold}$"]
        rewards = score(
            "math_verify", completions=completions, answers=[gold] * len(completions), pool=pool, timeout_s=1
        )
        assert [reward.value for reward in rewards] == [0.0] * len(formulas) + [1.0]
        for reward, completion in zip(rewards, completions, strict=True):
            assert reward.status in STATUSES, completion


def test_some_python_like_answers(pool: RewardPool, problems: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    outcomes = check_python(pool, problems, 300, tmp_path / "mark")
    # The grammar must reach both sides of the guard.
    assert outcomes["evaluated"] >= 10, outcomes
    assert outcomes["refused"] >= 100, outcomes


def test_some_formulas(pool: RewardPool) -> None:
    check_formulas(pool, 60)


@pytest.mark.slow
def test_many_python_like_answers(pool: RewardPool, problems: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    check_python(pool, problems, 600, tmp_path / "mark")


@pytest.mark.slow
def test_many_formulas(pool: RewardPool) -> None:
    check_formulas(pool, 200)
