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


BRACKETS = [
    ("{", "}"),
    ("(", ")"),
    ("[", "]"),
    ("$", "$"),
    ("|", "|"),
    (r"\{", r"\}"),
    (r"\left(", r"\right)"),
    (r"\frac{1}{", "}"),
    (r"\sqrt{", "}"),
    (r"\boxed{", "}"),
    (r"\text{", "}"),
    ("x^{", "}"),
    ("x_{", "}"),
    (r"\begin{matrix}", r"\end{matrix}"),
    (r"\begin{align}", r"\end{align}"),
    (r"\overline{", "}"),
]
TOKENS = [
    "1",
    "9,",
    "0.",
    "x+",
    "-",
    "--",
    "=",
    "<",
    ">=",
    "*",
    "/",
    "^",
    "_",
    "!",
    "%",
    "&",
    "#",
    "~",
    "\\",
    "\\\\",
    r"\frac",
    r"\sqrt",
    r"\pi",
    r"\infty",
    r"\sum_",
    r"\int",
    r"\cdot",
    r"\pm",
    r"\boxed",
    r"\text",
    "$",
    "{",
    "}",
    "0x",
    "1e",
    "e",
    "'",
    "`",
    "<b>",
    "${",
    "{{",
    "%s",
    "../",
    ";",
    "or",
    "and",
    "\n",
    "\t",
    "\x00",
    "\x1b[2J",
    "\ud800",
    "\u202e",
    "\u200b",
    "é",
    "𝟙",
    '"',
]
LENGTHS = (2, 9, 60, 400, 3000)
CODE = [
    "__import__('os').system('exit 1') ",
    " exec('1') ",
    " lambda: 0 ",
    " S('x') ",
    " sympify('x') ",
    " 1 if 1 else 2 ",
    " $(touch x)",
    "    ().__class__.__mro__ ",
    " open('/etc/passwd').read() ",
    " {0.__class__} ",
    " %(password)s ",
    " `touch x` ",
    " ${oc.env:HOME}",
    r"    \input{/etc/passwd} ",
    r" \write18{touch x} ",
    r" \def\x{\x\x}\x ",
    r" \newcommand{\a}{\a}\a ",
    r" \csname x\endcsname ",
    " nan ",
    " inf",
    '    {"value": 1.0, "status": "ok"} ',
    " <script>alert(1)</script> ",
    " '; DROP TABLE runs; -- ",
    " =HYPERLINK('x') ",
    " -0 ",
    " 1/0",
    "    !!python/object/apply:os.system ",
    " 0^0 ",
    r" \log(0) ",
    r" \tan(\pi/2) ",
    " i^i ",
    r" \emptyset ",
    r" \varnothing ",
    " (1, 2, 3 ",
    " 1 2 3",
    "    [1;2] ",
    " 12e- ",
    " 0b1 ",
    " 1_000",
    "cos\nsystem\n(S'exit'\ntR.",
    "\x1b]8;;http://x\x07",
]
WRAPPERS = [
    "{}",
    r"\boxed{{{}}}",
    "${}$",
    r"\[{}\]",
    "A: {}",
    "```{}```",
    r"\text{{{}}}",
    "<answer>{}</answer>",
]
EXPENSIVE = [
    "10^{{{}}}",
    "2^{{{}}}",
    "({})!",
    r"\binom{{{}}}{{7}}",
    "x^{{{}}}-1=0",
    r"\sum_{{k=1}}^{{{}}} k",
    "0.{}1",
    r"\sqrt[{}]{{2}}",
]
"""Forms with a place for a number: small enough for a sum, and large enough to be slow."""
LONGEST = 16_000


def hostile_families() -> dict[str, list[str]]:
    """Answers, none of which is right, by how they are made."""
    families: dict[str, list[str]] = {
        "nested": [],
        "unclosed": [],
        "unopened": [],
        "repeated": [],
        "in pairs": [],
        "code": [],
        "expensive": [],
    }
    for opening, closing in BRACKETS:
        for depth in (2, 9, 3000):
            families["nested"].append("$" + opening * depth + "1" + closing * depth + "$")
        for count in LENGTHS:
            families["unclosed"].append("$" + (opening * count)[:LONGEST])
        for count in LENGTHS[:3]:
            families["unopened"].append((closing * count)[:LONGEST] + "$")
    for token in TOKENS:
        for count in LENGTHS:
            families["repeated"].append((token * count)[:LONGEST])
    for first in TOKENS[::2]:
        for second in TOKENS[1::2]:
            families["in pairs"].append(f"\\boxed{{{first}{second}1}}")
    for text in CODE:
        for wrapper in WRAPPERS:
            families["code"].append(wrapper.format(text))
    for form in EXPENSIVE:
        for number in (3, 40, 500, 7001):
            families["expensive"].append(f"\\boxed{{{form.format(number)}}}")
    return families


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(workers=2) as pool:
        yield pool


RIGHT = "it is $12$"
WRONG = "A: 13"


def check_bounded(pool: RewardPool, texts: dict[str, str], value: float, statuses: set[str]) -> None:
    """Each text has the value and one of the statuses; a right and a wrong answer after each are judged as ever."""
    completions = []
    for text in texts.values():
        completions += [text, RIGHT, WRONG]
    rewards = score("math_verify", completions=completions, answers=["12"] * len(completions), pool=pool, timeout_s=0.3)
    for name, hostile, right, wrong in zip(texts, rewards[::3], rewards[1::3], rewards[2::3], strict=True):
        assert hostile.value == value, name
        assert hostile.status in statuses, name
        assert (right.value, right.status) == (1.0, "ok"), name
        assert (wrong.value, wrong.status) == (0.0, "ok"), name


@pytest.mark.parametrize(
    ("texts", "value", "statuses"),
    [
        pytest.param(HONEST, 1.0, {"ok"}, id="honest"),
        pytest.param(ODD, 0.0, {"ok", "unparseable", "timeout", "refused"}, id="odd"),
        pytest.param(ENDLESS, 0.0, {"timeout"}, id="endless"),
    ],
)
def test_hostile_answers_are_bounded_and_change_no_verdict_beside_them(
    pool: RewardPool, texts: dict[str, str], value: float, statuses: set[str]
) -> None:
    started = time.monotonic()
    check_bounded(pool, texts, value, statuses)
    assert time.monotonic() - started < 120.0


@pytest.fixture
def replaced(pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slots whose judge or worker the pool has ended since the beginning of the test.

    Process ids do not tell: the id of a slot also changes at the first item after an earlier replacement, and one
    thread may judge a whole batch, so that no batch is sure to bring every slot past its first item.
    """
    slots: list[int] = []
    renew = pool._renew
    drop = pool._drop

    def recorded_renew(slot: int) -> None:
        slots.append(slot)
        renew(slot)

    def recorded_drop(slot: int) -> int:
        slots.append(slot)
        return drop(slot)

    monkeypatch.setattr(pool, "_renew", recorded_renew)
    monkeypatch.setattr(pool, "_drop", recorded_drop)
    return slots


def test_texts_too_deep_or_too_long_are_refused_without_a_worker(pool: RewardPool, replaced: list[int]) -> None:
    # An endless answer before, as in the tests above: its slot has no judge when the texts come.
    score("math_verify", completions=[ENDLESS["tower"]], answers=["12"], pool=pool, timeout_s=0.1)
    assert replaced == [0]
    replaced.clear()
    started = time.monotonic()
    check_bounded(pool, TOO_DEEP_OR_LONG, 0.0, {"refused"})
    assert replaced == [], "such a text must not cost a worker"
    assert time.monotonic() - started < 20.0


COMPARISONS = [
    r"3 \le x < \infty",
    r"-\infty < x \le 3",
    r"\infty \ge y > 2",
    r"(3 \le x) \cup (x < \infty)",
    r"\sqrt{-\infty}<x",
    r"x < \infty",
    r"-\infty<x<\infty",
    r"\infty < \infty",
    r"3 < \infty < 5",
    r"x = \infty",
    r"\frac{\infty}{\infty}",
    r"\infty-\infty",
    r"0\cdot\infty",
    r"i\infty<2",
    r"1<i<\infty",
    r"\infty!",
    r"\int_0^\infty x dx < y",
    r"\log(0)<x",
    r"\binom{\infty}{2}",
    r"\min(x,\infty)<3",
    r"x \in \mathbb{R}, x<\infty",
]


def test_no_answer_ends_a_batch_by_what_the_verifier_raises(pool: RewardPool) -> None:
    """math_verify raises on some of these, on others with other versions of sympy."""
    completions = [f"\\boxed{{{text}}}" for text in COMPARISONS]
    completions.append(RIGHT)
    rewards = score("math_verify", completions=completions, answers=["12"] * len(completions), pool=pool)
    assert [reward.value for reward in rewards] == [0.0] * len(COMPARISONS) + [1.0]
    assert {reward.status for reward in rewards if failed(reward)} <= {"refused"}


# --- golds --------------------------------------------------------------------------------------------------------
GOLDS = [
    # gold, right, wrong
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


@pytest.mark.parametrize(("gold", "right", "wrong"), GOLDS, ids=[gold for gold, _, _ in GOLDS])
def test_golds_are_wrapped_before_parsing(pool: RewardPool, gold: str, right: str, wrong: str) -> None:
    rewards = score("math_verify", completions=[right, wrong], answers=[gold] * 2, pool=pool)
    assert [reward.value for reward in rewards] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("gold", "formula"),
    [("5\\$ or $6", "\\boxed{5\\$ or $6}"), (" $$x$$ ", "$x$")],
    ids=["a text with dollars", "a formula"],
)
def test_a_gold_that_is_no_formula_is_put_into_a_box(gold: str, formula: str) -> None:
    assert wrapped(gold) == formula


def test_the_last_formula_counts(pool: RewardPool) -> None:
    completion = "I had $\\boxed{11}$. No, it is $\\boxed{12}$."
    rewards = score("math_verify", completions=[completion] * 2, answers=["12", "11"], pool=pool)
    assert [reward.value for reward in rewards] == [1.0, 0.0]


def test_bare_boxes_are_one_answer_together(pool: RewardPool) -> None:
    completion = "It is \\boxed{11} or \\boxed{12}."
    rewards = score("math_verify", completions=[completion] * 3, answers=["12", "11", "\\{11, 12\\}"], pool=pool)
    assert [reward.value for reward in rewards] == [0.0, 0.0, 1.0]


def test_a_bad_gold_costs_its_item_and_one_warning(pool: RewardPool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="kl_comedy.rewards"):
        rewards = score("math_verify", completions=["12", "1", "12"], answers=["", "", "12"], pool=pool)
    assert [(reward.value, reward.status) for reward in rewards] == [(0.0, "refused"), (0.0, "refused"), (1.0, "ok")]
    assert len(caplog.records) == 1, "one warning for both items"
    assert "gold answer ''" in caplog.text


@pytest.mark.parametrize("infinite", ["-\\infty1", "\\infty1", "\\pi\\infty1", "1\\infty", "-\\infty"])
def test_infinity_equals_no_number_in_any_order_of_deduction(infinite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """sympy deduces in a random order, and 1 order in 25 to 100 was wrong."""
    set_seed = sympy.core.random.seed
    boxed_infinite = f"\\boxed{{{infinite}}}"
    for number in range(40):
        sympy.core.cache.clear_cache()
        # The reward sets a seed of its own; here it sets this one instead.
        monkeypatch.setattr(sympy.core.random, "seed", lambda _, number=number: set_seed(number))
        assert math_verify(boxed_infinite, "987654321", {}).value == 0.0, number
        assert math_verify("\\boxed{987654321}", infinite, {}).value == 0.0, number
        assert math_verify(boxed_infinite, infinite, {}).value == 1.0, number


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "texts"), hostile_families().items(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_corpus_of_hostile_answers_earns_nothing_and_costs_seconds(
    pool: RewardPool, family: str, texts: list[str]
) -> None:
    """Of every second one: each form stands there with several lengths or depths."""
    texts = texts[::2]
    gold = "987654321"
    honest = [f"it is ${gold}$"] * (len(texts) // 50 + 1)
    score("math_verify", completions=["12"] * 2, answers=["12"] * 2, pool=pool)  # both workers run
    started = time.monotonic()
    completions = [*texts, *honest]
    rewards = score("math_verify", completions=completions, answers=[gold] * len(completions), pool=pool, timeout_s=0.5)
    for text, reward in zip(texts, rewards[: len(texts)], strict=True):
        assert reward.value == 0.0, text[:80]
        assert reward.status in STATUSES, text[:80]
    assert [reward.value for reward in rewards[len(texts) :]] == [1.0] * len(honest)
    assert time.monotonic() - started < 120.0
