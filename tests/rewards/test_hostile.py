"""Hostile answers to the mathematical verifier: bounded cost, a living pool, right verdicts beside them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import sympy
import sympy.core.random

from kl_comedy.records import STATUSES
from kl_comedy.rewards import RewardPool, score
from kl_comedy.rewards.base import failed
from kl_comedy.rewards.mathematics import math_verify, wrapped

ENDLESS = {
    "tower": "$9^{9^{9^9}}$",
    "factorials": "$((10!)!)!$",
    "integral": "$\\int e^{-x^{x^x}} dx$",
}
TOO_DEEP_OR_LONG = {
    "1000 braces": "{" * 1000 + "12" + "}" * 1000,
    "1 MB of openers": "{" * 1_000_000,
    "2000 fractions": "$" + "\\frac{1}{" * 2000 + "2" + "}" * 2000 + "$",
    "5000 parentheses": "(" * 5000 + "12" + ")" * 5000,
    "200k digits": "1" * 200_000,
}
ODD = {
    "null bytes": "\x00" * 100 + "\\boxed{1\x00}",
    "surrogates": "\ud800\udfff \\boxed{\ud800}",
    "control characters": "".join(map(chr, range(32))) * 50,
    "spaces": " " * 10_000,
    "only dollars": "$" * 16_000,
    "only boxes": "\\boxed{" * 60,
    "digits and commas": "1," * 100_000,
    "sum of 8000 terms": "$" + "x+" * 8000 + "x$",
    "set of 5000": "$\\{" + ",".join(map(str, range(5000))) + "\\}$",
    "big power": "$2^{100000000}$",
    "format directives": "%s{0.__class__}%n",
    "code": "__import__('os').system('exit 1')",
}
HONEST = {
    "plain": "The answer is $12$.",
    "odd bytes around": "\ud800\x00\\boxed{12}\x1b",
    "5 MB before": "so $x$ is a number. " * 250_000 + "\n\\boxed{12}",
    "5 MB on one line": "a" * 5_000_000 + " \\boxed{12}",
}


OPENERS = [
    *(("{", "}"), ("(", ")"), ("[", "]"), ("$", "$"), ("|", "|"), ("\\{", "\\}"), ("\\left(", "\\right)")),
    *(("\\frac{1}{", "}"), ("\\sqrt{", "}"), ("\\boxed{", "}"), ("\\text{", "}"), ("x^{", "}"), ("x_{", "}")),
    *(("\\begin{matrix}", "\\end{matrix}"), ("\\begin{align}", "\\end{align}"), ("\\overline{", "}")),
]
SYMBOLS = r"""1 9, 0. x+ - -- = < >= * / ^ _ ! % & # ~ \ \\ \frac \sqrt \pi \infty \sum_ \int \cdot \pm \boxed \text
    $ { } 0x 1e e ' ` <b> ${ {{ %s ../ ; or and"""
TOKENS = [
    *SYMBOLS.split(),
    *("\n", "\t", "\x00", "\x1b[2J", "\ud800", "\u202e", "\u200b", "\u00e9", "\U0001d7d9", '"'),
]
LENGTHS = (2, 9, 60, 400, 3000)
CODE = [
    *r"""__import__('os').system('exit 1') | exec('1') | lambda: 0 | S('x') | sympify('x') | 1 if 1 else 2 | $(touch x)
    ().__class__.__mro__ | open('/etc/passwd').read() | {0.__class__} | %(password)s | `touch x` | ${oc.env:HOME}
    \input{/etc/passwd} | \write18{touch x} | \def\x{\x\x}\x | \newcommand{\a}{\a}\a | \csname x\endcsname | nan | inf
    {"value": 1.0, "status": "ok"} | <script>alert(1)</script> | '; DROP TABLE runs; -- | =HYPERLINK('x') | -0 | 1/0
    !!python/object/apply:os.system | 0^0 | \log(0) | \tan(\pi/2) | i^i | \emptyset | \varnothing | (1, 2, 3 | 1 2 3
    [1;2] | 12e- | 0b1 | 1_000""".replace("\n", "|").split("|"),
    *("cos\nsystem\n(S'exit'\ntR.", "\x1b]8;;http://x\x07"),
]
WRAPPERS = ("{}", "\\boxed{{{}}}", "${}$", "\\[{}\\]", "A: {}", "```{}```", "\\text{{{}}}", "<answer>{}</answer>")
EXPENSIVE = [
    *("10^{{{}}}", "2^{{{}}}", "({})!", "\\binom{{{}}}{{7}}", "x^{{{}}}-1=0", "\\sum_{{k=1}}^{{{}}} k"),
    *("0.{}1", "\\sqrt[{}]{{2}}"),
]
"""Of numbers small enough for a sum, and large enough to be slow."""


def hostile_families() -> dict[str, list[str]]:
    """Over 1,500 answers, none of which is right, by how they are made."""
    return {
        "nested": ["$" + a * n + "1" + b * n + "$" for a, b in OPENERS for n in (2, 9, 3000)],
        "unclosed": ["$" + (a * n)[:16_000] for a, _ in OPENERS for n in LENGTHS],
        "unopened": [(b * n)[:16_000] + "$" for _, b in OPENERS for n in LENGTHS[:3]],
        "repeated": [(token * n)[:16_000] for token in TOKENS for n in LENGTHS],
        "in pairs": [f"\\boxed{{{a}{b}1}}" for a in TOKENS[::2] for b in TOKENS[1::2]],
        "code": [wrapper.format(text) for text in CODE for wrapper in WRAPPERS],
        "expensive": [f"\\boxed{{{form.format(n)}}}" for form in EXPENSIVE for n in (3, 40, 500, 7001)],
    }


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(workers=2) as pool:
        yield pool


def test_hostile_answers_are_bounded_and_change_no_verdict_beside_them(pool: RewardPool) -> None:
    score("math_verify", completions=["12"] * 2, answers=["12"] * 2, pool=pool)
    pids, started = set(pool.pids), time.monotonic()
    for texts, value, statuses in (
        (TOO_DEEP_OR_LONG, 0.0, {"refused"}),
        (HONEST, 1.0, {"ok"}),
        (ODD, 0.0, {"ok", "unparseable", "timeout", "refused"}),
        (ENDLESS, 0.0, {"timeout"}),
    ):
        completions = [text for hostile in texts.values() for text in (hostile, "it is $12$", "A: 13")]
        answers = ["12"] * len(completions)
        rewards = score("math_verify", completions=completions, answers=answers, pool=pool, timeout_s=0.3)
        for name, hostile, right, wrong in zip(texts, rewards[::3], rewards[1::3], rewards[2::3], strict=True):
            assert (hostile.value, hostile.status in statuses) == (value, True), (name, hostile)
            assert [(r.value, r.status) for r in (right, wrong)] == [(1.0, "ok"), (0.0, "ok")], name
        if texts is TOO_DEEP_OR_LONG:
            assert pids <= set(pool.pids) and time.monotonic() - started < 20.0, "such a text must not cost a worker"
    assert time.monotonic() - started < 120.0


COMPARISONS = [
    *(r"3 \le x < \infty", r"-\infty < x \le 3", r"\infty \ge y > 2", r"(3 \le x) \cup (x < \infty)"),
    *(r"\sqrt{-\infty}<x", r"x < \infty", r"-\infty<x<\infty", r"\infty < \infty", r"3 < \infty < 5", r"x = \infty"),
    *(r"\frac{\infty}{\infty}", r"\infty-\infty", r"0\cdot\infty", r"i\infty<2", r"1<i<\infty", r"\infty!"),
    *(
        r"\int_0^\infty x dx < y",
        r"\log(0)<x",
        r"\binom{\infty}{2}",
        r"\min(x,\infty)<3",
        r"x \in \mathbb{R}, x<\infty",
    ),
]


def test_no_answer_ends_a_batch_by_what_the_verifier_raises(pool: RewardPool) -> None:
    """math_verify raises on some of these, on others with other versions of sympy."""
    texts = [f"\\boxed{{{text}}}" for text in COMPARISONS]
    rewards = score("math_verify", completions=[*texts, "it is $12$"], answers=["12"] * (len(texts) + 1), pool=pool)
    assert [reward.value for reward in rewards] == [0.0] * len(texts) + [1.0]
    assert {reward.status for reward in rewards if failed(reward)} <= {"refused"}


def test_golds_are_wrapped_before_parsing(pool: RewardPool) -> None:
    cases = [
        ("8+4i", "\\boxed{4i+8}", "\\boxed{8}"),
        ("3\\sqrt{2}", "$\\sqrt{18}$", "$3$"),
        ("\\frac{1}{2}", "0.5", "0.2"),
        ("$18$", "A: 18", "A: 8"),
        ("\\$18", "$\\$18$ dollars: \\boxed{18}", "\\boxed{19}"),
        ("\\boxed{7}", "7", "77"),
        ("(1, 2)", "$(1,2)$", "$(2,1)$"),
        ("10{,}000", "\\boxed{10,000}", "\\boxed{10}"),
        ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}", "\\boxed{\\text{Carla}}"),
    ]
    golds = [gold for gold, _, _ in cases]
    for column, value in ((1, 1.0), (2, 0.0)):
        rewards = score("math_verify", completions=[case[column] for case in cases], answers=golds, pool=pool)
        assert [reward.value for reward in rewards] == [value] * len(cases)
    assert wrapped("5\\$ or $6") == "\\boxed{5\\$ or $6}"
    assert wrapped(" $$x$$ ") == "$x$"


def test_the_last_formula_counts_and_bare_boxes_are_one_answer_together(pool: RewardPool) -> None:
    formulas, boxes = "I had $\\boxed{11}$. No, it is $\\boxed{12}$.", "It is \\boxed{11} or \\boxed{12}."
    answers = ["12", "11", "12", "11", "\\{11, 12\\}"]
    rewards = score("math_verify", completions=[formulas] * 2 + [boxes] * 3, answers=answers, pool=pool)
    assert [reward.value for reward in rewards] == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_a_bad_gold_costs_its_item_and_one_warning(pool: RewardPool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="kl_comedy.rewards"):
        rewards = score("math_verify", completions=["12", "1", "12"], answers=["", "", "12"], pool=pool)
    assert [(reward.value, reward.status) for reward in rewards] == [(0.0, "refused"), (0.0, "refused"), (1.0, "ok")]
    assert len(caplog.records) == 1 and "gold answer ''" in caplog.text


@pytest.mark.parametrize("infinite", ["-\\infty1", "\\infty1", "\\pi\\infty1", "1\\infty", "-\\infty"])
def test_infinity_equals_no_number_in_any_order_of_deduction(infinite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """sympy deduces in a random order, and 1 order in 25 to 100 was wrong."""
    set_seed = sympy.core.random.seed
    for number in range(40):
        sympy.core.cache.clear_cache()
        monkeypatch.setattr(sympy.core.random, "seed", lambda _, number=number: set_seed(number))
        for completion, answer, value in (
            (f"\\boxed{{{infinite}}}", "987654321", 0.0),
            ("\\boxed{987654321}", infinite, 0.0),
            (f"\\boxed{{{infinite}}}", infinite, 1.0),
        ):
            assert math_verify(completion, answer, {}).value == value, (number, completion)


@pytest.mark.slow
def test_a_corpus_of_hostile_answers_earns_nothing_and_costs_seconds(pool: RewardPool) -> None:
    families = hostile_families()
    assert sum(map(len, families.values())) > 1500
    score("math_verify", completions=["12"] * 2, answers=["12"] * 2, pool=pool)
    for name, texts in families.items():
        honest = ["it is $987654321$"] * (len(texts) // 50 + 1)
        started = time.monotonic()
        answers = ["987654321"] * (len(texts) + len(honest))
        rewards = score("math_verify", completions=[*texts, *honest], answers=answers, pool=pool, timeout_s=0.5)
        for text, reward in zip(texts, rewards, strict=False):
            assert reward.value == 0.0 and reward.status in STATUSES, (name, text[:80], reward)
        assert [reward.value for reward in rewards[len(texts) :]] == [1.0] * len(honest), name
        assert time.monotonic() - started < 120.0, name
