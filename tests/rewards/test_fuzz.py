"""Answers drawn from grammars: none runs code, none ends a batch, none is right.

Python-like answers go to the nine tasks whose scorers evaluate, formulas to math_verify. ``FUZZ_ANSWERS`` draws are the
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
FUZZ_ANSWERS = 20_000
BATCH = 500

PYTHON = {
    "answer": ["{e}"] * 6 + ["{e}{odd}", "{odd}{e}", "{e} {e}", "{e}\n{e}", "{e}, {e}"],
    "e": [
        *("{name}",) * 4,
        *("{number}",) * 4,
        *(
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
        ),
        *("{{{e}: {e}}}", "{comprehension}", "{binding}", "{e}[{e}]", "{e}.{name}", "{e} if {e} else {e}", "{text}"),
        *("f'{{{e}}}'", "lambda {name}: {e}", "lambda {name}={e}: {e}", "*{e}", "{e}!", "={e}", "{name}={e}", "0.2[1]"),
        *(
            "{e} and {e}",
            "not {e}",
            "{e} == {e}",
            "{e} in {e}",
            "await {e}",
            "(yield {e})",
            "`{e}`",
            "{e}#{e}",
            "{e};{e}",
        ),
    ],
    "call": [
        *("{name}({mark}, 'w')",) * 4,
        *("{name} ({mark}, 'w')", "({name})({mark}, 'w')", "[{name}][0]({mark}, 'w')", "{name}({e})", "{name}(*{e})"),
        *('{name}("open({mark}, chr(119))")', "{name}({name}={e})", "{name}\n({mark}, 'w')", "{name}(**{e})"),
    ],
    "comprehension": [
        *("[{call} for {name} in [{name}]]", "{{{call} for {name} in ({name},)}}", "list({call} for {name} in [{e}])"),
        *("[{e} for {name} in {e} if {call}]", "{{1: {call} for {name} in [{name}]}}"),
        "[{call} for {name} in [[{name}]] for {name} in {name}]",
    ],
    "binding": [
        "({name} := {e})",
        "({name}:={name}, {call})",
        "[{name} := {name}, {call}]",
        "({name} := {name})({mark}, 'w')",
    ],
    "name": [
        *(
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
        ),
        *("sympify", "Rational", "Lambda", "Function", "parse_expr", "__import__", "getattr", "print", "None", "E"),
    ],
    "number": ["0", "1", "24", "3.5", "1e9", "10**10**10", "9" * 40, "0x1f", "1j", "1_0"],
    "op": [*"+-*/", "**", "^", "//", "%", "@", "|", "<<", " "],
    "text": ["'a'", "'a'*10**10", '"{name}"', "b'a'", "'''{e}'''", "r'\\'", "'{{0.__class__}}'"],
    "odd": [
        "\x00",
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
        "\xa0",
        "\ud800",
        "?",
        "$",
        "!",
    ],
}
FORMULAS = {
    "answer": ["\\boxed{{{e}}}"] * 4
    + ["${e}$", "A: {e}", "\\[{e}\\]", "\\boxed{{{e}", "{e}", "\\boxed{{{e}}} or \\boxed{{{e}}}"],
    "e": [
        *("{atom}",) * 8,
        *("{e}{op}{e}",) * 6,
        *(
            "\\frac{{{e}}}{{{e}}}",
            "\\sqrt{{{e}}}",
            "{e}^{{{e}}}",
            "\\left({e}\\right)",
            "({e}, {e})",
            "[{e}, {e})",
            "\\{{{e}, {e}\\}}",
        ),
        *(
            "|{e}|",
            "\\{function}({e})",
            "\\{function} {e}",
            "\\sum_{{k=1}}^{{{e}}} {e}",
            "\\int_{{{e}}}^{{{e}}} {e} dx",
        ),
        *("\\lim_{{x\\to {e}}} {e}", "\\binom{{{e}}}{{{e}}}", "{e}!", "{e}\\%", "{e}_{{{e}}}", "\\text{{{e}}}", "-{e}"),
        *(
            "\\begin{{pmatrix}} {e} & {e} \\\\ {e} & {e} \\end{{pmatrix}}",
            "{e}\\cup {e}",
            "\\lfloor {e} \\rfloor",
            "{e}^\\circ",
        ),
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


def drawn(grammar: dict[str, list[str]], rng: random.Random, symbol: str = "answer", depth: int = 0) -> str:
    """A word of the grammar, whose rules are format strings. At some depth ``e`` has its first rules only."""
    rules = grammar[symbol]
    rule = rng.choice(rules[:8] if depth > 4 and symbol == "e" else rules)
    text = ""
    for literal, inner, _, _ in string.Formatter().parse(rule):
        text += literal
        if inner == "mark":
            text += "{mark}"
        elif inner is not None:
            text += drawn(grammar, rng, inner, depth + 1)
    return text


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(workers=2) as pool:
        yield pool


def check_python(pool: RewardPool, count: int, mark: Path) -> Counter[str]:
    """``count`` answers to the nine tasks. Returns how many were evaluated, refused, and so on."""
    rng, kinds = random.Random(31), Counter[str]()
    items: dict[str, Any] = {}
    for task in TASKS:
        build, settings = factory.DATASETS[task]
        items[task] = dict(next(iter(build(config=settings(seed=5, size=1)))))
    for start in range(0, count, BATCH):
        tasks = [rng.choice(TASKS) for _ in range(min(BATCH, count - start))]
        texts = [drawn(PYTHON, rng).replace("{mark}", repr(str(mark))) for _ in tasks]
        metas = [{"task": task, "entry": items[task]} for task in tasks]
        rewards = score(
            "reasoning_gym", completions=texts, answers=[""] * len(texts), metas=metas, pool=pool, timeout_s=1
        )
        assert not mark.exists(), [text for text in texts if str(mark) in text]
        for text, task, reward in zip(texts, tasks, rewards, strict=True):
            assert reward.status in STATUSES and (reward.value == 0.0 or gym.is_expression(text.strip())), (task, text)
            kinds["evaluated" if gym.is_expression(text.strip()) else reward.status] += 1
    return kinds


def check_formulas(pool: RewardPool, count: int) -> None:
    rng = random.Random(31)
    for start in range(0, count, BATCH):
        texts = [drawn(FORMULAS, rng) for _ in range(min(BATCH, count - start))]
        texts = [*texts, "it is $987654321$"]
        rewards = score("math_verify", completions=texts, answers=["987654321"] * len(texts), pool=pool, timeout_s=1)
        assert [reward.value for reward in rewards] == [0.0] * (len(texts) - 1) + [1.0]
        assert all(reward.status in STATUSES for reward in rewards)


def test_some_answers_of_the_grammars(pool: RewardPool, tmp_path: Path) -> None:
    kinds = check_python(pool, 300, tmp_path / "mark")
    assert kinds["evaluated"] >= 10 and kinds["refused"] >= 100, kinds
    check_formulas(pool, 60)


@pytest.mark.slow
def test_twenty_thousand_answers_of_the_grammars(pool: RewardPool, tmp_path: Path) -> None:
    check_python(pool, FUZZ_ANSWERS * 3 // 4, tmp_path / "mark")
    check_formulas(pool, FUZZ_ANSWERS // 4)
