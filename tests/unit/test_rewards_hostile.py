"""Hostile answers to the mathematical verifier: bounded cost, a living pool, right verdicts beside them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kl_comedy.rewards import RewardPool, score
from kl_comedy.rewards.mathematics import wrapped

LIMIT_S = 0.5
REFUSED, TIMEOUT, ANY = ("refused",), ("timeout",), ("ok", "unparseable", "timeout", "refused")
ENDLESS = {
    "tower": "$9^{9^{9^9}}$",
    "python tower": "A: 9**9**9**9",
    "factorials": "$((10!)!)!$",
    "binomial": "$\\binom{100000000}{50000000}$",
    "polynomial": "$(x+1)^{5000}$",
    "integral": "$\\int e^{-x^{x^x}} dx$",
}
GUARDED = {
    "1000 braces": "{" * 1000 + "12" + "}" * 1000,
    "1 MB of braces": "{" * 500_000 + "}" * 500_000,
    "1 MB of openers": "{" * 1_000_000,
    "2000 fractions": "$" + "\\frac{1}{" * 2000 + "2" + "}" * 2000 + "$",
    "5000 parentheses": "(" * 5000 + "12" + ")" * 5000,
    "200k digits": "1" * 200_000,
}
ODD = {
    "null bytes": "\x00" * 100 + "\\boxed{1\x00}",
    "surrogates": "\ud800\udfff \\boxed{\ud800}",
    "control characters": "".join(map(chr, range(32))) * 50,
    "empty": "",
    "spaces": " " * 10_000,
    "only dollars": "$" * 16_000,
    "only boxes": "\\boxed{" * 60,
    "digits and commas": "1," * 100_000,
    "sixty fractions": "$" + "\\frac{1}{" * 60 + "2" + "}" * 60 + "$",
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
CASES = [
    *((name, text, 0.0, TIMEOUT) for name, text in ENDLESS.items()),
    *((name, text, 0.0, REFUSED) for name, text in GUARDED.items()),
    *((name, text, 0.0, ANY) for name, text in ODD.items()),
    *((name, text, 1.0, ("ok",)) for name, text in HONEST.items()),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(workers=2) as pool:
        yield pool


@pytest.mark.parametrize(("text", "value", "statuses"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_one_hostile_answer_is_bounded_and_the_pool_lives_on(
    pool: RewardPool, text: str, value: float, statuses: tuple[str, ...]
) -> None:
    honest = "\\boxed{12}"
    score("math_verify", completions=[honest], answers=["12"], pool=pool)
    started = time.monotonic()
    rewards = score(
        "math_verify", completions=[honest, text, "A: 13"], answers=["12"] * 3, pool=pool, timeout_s=LIMIT_S
    )
    seconds = time.monotonic() - started
    assert [rewards[0].value, rewards[2].value] == [1.0, 0.0]
    assert rewards[0].status == rewards[2].status == "ok"
    assert rewards[1].value == value
    assert rewards[1].status in statuses
    assert seconds < 60.0


def test_a_guard_costs_nearly_nothing(pool: RewardPool) -> None:
    score("math_verify", completions=["12"], answers=["12"], pool=pool)
    pids = pool.pids
    started = time.monotonic()
    score("math_verify", completions=list(GUARDED.values()), answers=["12"] * len(GUARDED), pool=pool, timeout_s=1.0)
    assert time.monotonic() - started < 20.0
    assert set(pids) <= set(pool.pids), "a guard must not cost a worker"


def test_all_of_them_in_one_batch(pool: RewardPool) -> None:
    cases = [case for case in CASES if case[0] not in ENDLESS or case[0] in ("tower", "factorials")]
    completions = [text for _, hostile, _, _ in cases for text in (hostile, "it is $12$")]
    rewards = score("math_verify", completions=completions, answers=["12"] * len(completions), pool=pool, timeout_s=0.5)
    assert [reward.value for reward in rewards[1::2]] == [1.0] * len(cases)
    assert [reward.value for reward in rewards[::2]] == [value for _, _, value, _ in cases]


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("8+4i", "\\boxed{4i+8}", "\\boxed{8}"),
        ("3\\sqrt{2}", "$\\sqrt{18}$", "$3$"),
        ("\\frac{1}{2}", "0.5", "0.2"),
        ("$18$", "A: 18", "A: 8"),
        ("\\$18", "$\\$18$ dollars: \\boxed{18}", "\\boxed{19}"),
        ("\\boxed{7}", "7", "77"),
        ("(1, 2)", "$(1,2)$", "$(2,1)$"),
        ("10{,}000", "\\boxed{10,000}", "\\boxed{10}"),
        ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}", "\\boxed{\\text{Carla}}"),
    ],
)
def test_golds_are_wrapped_before_parsing(pool: RewardPool, gold: str, right: str, wrong: str) -> None:
    rewards = score("math_verify", completions=[right, wrong], answers=[gold] * 2, pool=pool)
    assert [reward.value for reward in rewards] == [1.0, 0.0]


def test_the_last_formula_counts_and_bare_boxes_are_one_answer_together(pool: RewardPool) -> None:
    formulas, boxes = "I had $\\boxed{11}$. No, it is $\\boxed{12}$.", "It is \\boxed{11} or \\boxed{12}."
    rewards = score("math_verify", completions=[formulas] * 2 + [boxes] * 2, answers=["12", "11"] * 2, pool=pool)
    assert [reward.value for reward in rewards] == [1.0, 0.0, 0.0, 0.0]
    both = score("math_verify", completions=[boxes], answers=["\\{11, 12\\}"], pool=pool)
    assert both[0].value == 1.0


def test_wrapping_keeps_a_dollar_apart() -> None:
    assert wrapped("5\\$ or $6") == "\\boxed{5\\$ or $6}"
    assert wrapped(" $$x$$ ") == "$x$"


def test_a_bad_gold_costs_its_item_and_one_warning(pool: RewardPool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="kl_comedy.rewards"):
        rewards = score("math_verify", completions=["12", "1", "12"], answers=["", "", "12"], pool=pool)
    assert [(reward.value, reward.status) for reward in rewards] == [(0.0, "refused"), (0.0, "refused"), (1.0, "ok")]
    assert len(caplog.records) == 1 and "gold answer ''" in caplog.text
