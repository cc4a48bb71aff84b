"""The verifiers against published verdicts on real model answers, and MATH golds against themselves.

The 32 rows of the fixture always run. The full files run where they are found: in the folder named by
``KL_COMEDY_DATA``, or in ``../shared/data`` beside the checkout.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kl_comedy.rewards import RewardPool, score

CHECKOUT = Path(__file__).parents[2]
FIXTURE = CHECKOUT / "tests" / "fixtures" / "verify_gsm8k_32.jsonl"


def read(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def data_file(name: str) -> Path:
    """A full file of answers; the test is skipped where it is not on this machine."""
    folder = Path(os.environ.get("KL_COMEDY_DATA", CHECKOUT.parent / "shared" / "data"))
    if not (folder / name).is_file():
        pytest.skip(f"{name} is not here; set KL_COMEDY_DATA to the folder that holds it")
    return folder / name


def boxed(text: str) -> str:
    """A completion that ends with the text as its answer."""
    return f"so \\boxed{{{text}}}."


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool() as pool:
        yield pool


# --- verdicts of GSM8K --------------------------------------------------------------------------------------------
def disagreements(name: str, rows: list[dict[str, Any]], pool: RewardPool) -> list[str]:
    """The rows that the reward judges in another way than was published."""
    rewards = score(name, completions=[row["answer"] for row in rows], answers=[row["gold"] for row in rows], pool=pool)
    differing = []
    for row, reward in zip(rows, rewards, strict=True):
        is_right = reward.value == 1.0
        if is_right != row["expected"]:
            differing.append(row["id"])
    return differing


def test_half_of_the_fixture_is_right() -> None:
    rows = read(FIXTURE)
    assert len(rows) == 32
    assert sum(row["expected"] for row in rows) == 16


@pytest.mark.parametrize("name", ["math_verify", "exact_answer"])
def test_the_fixture_is_judged_as_published(name: str, pool: RewardPool) -> None:
    assert disagreements(name, read(FIXTURE), pool) == []


@pytest.mark.parametrize(
    ("name", "step"), [pytest.param("math_verify", 6, marks=pytest.mark.slow), ("exact_answer", 1)]
)
def test_published_verdicts_on_gsm8k(name: str, step: int, pool: RewardPool) -> None:
    """Of all, and for the slow verifier of every sixth."""
    rows = read(data_file("verify_gsm8k_openai.jsonl"))
    assert len(rows) == 5276
    rows = rows[::step]
    differing = disagreements(name, rows, pool)
    # A few verdicts may differ: they are shown if the number grows.
    assert len(rows) - len(differing) >= len(rows) * 0.9988, differing[:20]


# --- golds of MATH ------------------------------------------------------------------------------------------------
# Of the 7,500 every fifteenth.
math_golds = pytest.mark.parametrize(("name", "step"), [("math500.jsonl", 1), ("math_train7500.jsonl", 15)])


@math_golds
def test_golds_of_math_verify_against_themselves(name: str, step: int, pool: RewardPool) -> None:
    golds = [row["answer"] for row in read(data_file(name))][::step]
    rewards = score("math_verify", completions=[boxed(gold) for gold in golds], answers=golds, pool=pool)
    assert [gold for gold, reward in zip(golds, rewards, strict=True) if reward.value != 1.0] == []
    assert {reward.status for reward in rewards} == {"ok"}


@math_golds
def test_golds_of_math_do_not_verify_against_their_neighbours(name: str, step: int, pool: RewardPool) -> None:
    golds = [row["answer"] for row in read(data_file(name))][::step]
    neighbours = golds[1:] + golds[:1]
    rewards = score("math_verify", completions=[boxed(text) for text in neighbours], answers=golds, pool=pool)
    equal = []
    for gold, neighbour, reward in zip(golds, neighbours, rewards, strict=True):
        if reward.value == 1.0 and gold != neighbour:
            equal.append((gold, neighbour))
    # Some neighbours are the same number, written in another way.
    assert len(equal) <= len(golds) // 100, equal


def test_solutions_of_math_earn_their_own_golds(pool: RewardPool) -> None:
    rows = read(data_file("math500.jsonl"))
    rewards = score(
        "math_verify", completions=[row["solution"] for row in rows], answers=[row["answer"] for row in rows], pool=pool
    )
    assert sum(reward.value for reward in rewards) >= 0.98 * len(rows)
    assert {reward.status for reward in rewards} == {"ok"}


@pytest.mark.slow
def test_different_golds_of_math_are_different_answers(pool: RewardPool) -> None:
    """Random pairs; those that are equal were looked at: all of them are the same number written twice."""
    golds = set()
    for name in ("math500.jsonl", "math_train7500.jsonl"):
        golds.update(row["answer"] for row in read(data_file(name)))
    ordered = sorted(golds)
    rng = random.Random(1)
    pairs = [rng.sample(ordered, 2) for _ in range(250)]
    completions = [boxed(given) for given, _ in pairs]
    rewards = score("math_verify", completions=completions, answers=[gold for _, gold in pairs], pool=pool)
    assert [pair for pair, reward in zip(pairs, rewards, strict=True) if reward.value == 1.0] == []


@pytest.fixture(scope="module")
def numerals() -> list[str]:
    """Golds with a base, as 1011_2 and 43_{5}."""
    golds = {row["answer"] for row in read(data_file("math_train7500.jsonl"))}
    numerals = sorted(gold for gold in golds if re.fullmatch(r"-?\d+_\{?\d+\}?", gold))
    assert len(numerals) > 30
    return numerals


def test_golds_of_math_in_their_own_base_are_right(numerals: list[str], pool: RewardPool) -> None:
    rewards = score("math_verify", completions=[boxed(text) for text in numerals], answers=numerals, pool=pool)
    assert [reward.value for reward in rewards] == [1.0] * len(numerals)


def test_golds_of_math_in_another_base_are_wrong(numerals: list[str], pool: RewardPool) -> None:
    in_another_base = [re.sub(r"\d+(?=\}?$)", lambda base: str(int(base[0]) + 1), text) for text in numerals]
    rewards = score("math_verify", completions=[boxed(text) for text in in_another_base], answers=numerals, pool=pool)
    assert [reward.value for reward in rewards] == [0.0] * len(numerals)


# --- options of MMLU ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", ["The answer is ({}).", "\\boxed{{{}}}"])
@pytest.mark.parametrize("written", [str.upper, str.lower], ids=["capital", "small"])
@pytest.mark.parametrize(("shift", "value"), [(0, 1.0), (1, 0.0)], ids=["its own letter", "the next letter"])
def test_options_of_mmlu_are_their_own_letters_and_no_others(
    form: str, written: Callable[[str], str], shift: int, value: float, pool: RewardPool
) -> None:
    rows = read(data_file("mmlu_stem_test.jsonl"))
    golds = [row["answer"] for row in rows]
    letters = ["ABCD"[("ABCD".index(gold) + shift) % 4] for gold in golds]
    rewards = score(
        "multiple_choice",
        completions=[form.format(written(letter)) for letter in letters],
        answers=golds,
        metas=[{"choices": row["choices"]} for row in rows],
        pool=pool,
    )
    assert {reward.value for reward in rewards} == {value}
