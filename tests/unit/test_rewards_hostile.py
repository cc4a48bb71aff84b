"""Hostile answers to the mathematical verifier: bounded cost, a living pool, right verdicts beside them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kl_comedy.rewards import RewardPool, score
from kl_comedy.rewards.mathematics import wrapped

ENDLESS = {
    "tower": "$9^{9^{9^9}}$",
    "python tower": "A: 9**9**9**9",
    "factorials": "$((10!)!)!$",
    "binomial": "$\\binom{100000000}{50000000}$",
    "polynomial": "$(x+1)^{5000}$",
    "integral": "$\\int e^{-x^{x^x}} dx$",
}
TOO_DEEP_OR_LONG = {
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
        rewards = score("math_verify", completions=completions, answers=answers, pool=pool, timeout_s=0.5)
        for name, hostile, right, wrong in zip(texts, rewards[::3], rewards[1::3], rewards[2::3], strict=True):
            assert (hostile.value, hostile.status in statuses) == (value, True), (name, hostile)
            assert [(r.value, r.status) for r in (right, wrong)] == [(1.0, "ok"), (0.0, "ok")], name
        if texts is TOO_DEEP_OR_LONG:
            assert pids <= set(pool.pids) and time.monotonic() - started < 20.0, "such a text must not cost a worker"
    assert time.monotonic() - started < 120.0


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
