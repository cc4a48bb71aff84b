"""The verifiers against published verdicts on real model answers, and MATH golds against themselves.

The 32 rows of the fixture always run. The full files run where they are found: in the folder named by
``KL_COMEDY_DATA``, or in ``../shared/data`` beside the checkout.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
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
    folder = Path(os.environ.get("KL_COMEDY_DATA", CHECKOUT.parent / "shared" / "data"))
    if not (folder / name).is_file():
        pytest.skip(f"{name} is not here; set KL_COMEDY_DATA to the folder that holds it")
    return folder / name


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool() as pool:
        yield pool


def disagreements(name: str, rows: list[dict[str, Any]], pool: RewardPool) -> list[str]:
    rewards = score(name, completions=[row["answer"] for row in rows], answers=[row["gold"] for row in rows], pool=pool)
    return [row["id"] for row, reward in zip(rows, rewards, strict=True) if (reward.value == 1.0) != row["expected"]]


@pytest.mark.parametrize("name", ["math_verify", "exact_answer"])
def test_the_fixture_is_judged_as_published(name: str, pool: RewardPool) -> None:
    rows = read(FIXTURE)
    assert len(rows) == 32 and sum(row["expected"] for row in rows) == 16
    assert disagreements(name, rows, pool) == []


@pytest.mark.parametrize("name", ["math_verify", "exact_answer"])
def test_all_published_verdicts_on_gsm8k(name: str, pool: RewardPool) -> None:
    rows = read(data_file("verify_gsm8k_openai.jsonl"))
    assert len(rows) == 5276
    differing = disagreements(name, rows, pool)
    assert len(rows) - len(differing) >= 5270, differing[:20]


@pytest.mark.parametrize(("name", "step"), [("math500.jsonl", 1), ("math_train7500.jsonl", 15)])
def test_golds_of_math_verify_against_themselves_and_not_against_their_neighbours(
    name: str, step: int, pool: RewardPool
) -> None:
    golds = [row["answer"] for row in read(data_file(name))][::step]
    same = score("math_verify", completions=[f"so \\boxed{{{gold}}}." for gold in golds], answers=golds, pool=pool)
    assert [gold for gold, reward in zip(golds, same, strict=True) if reward.value != 1.0] == []
    shifted = golds[1:] + golds[:1]
    other = score("math_verify", completions=[f"so \\boxed{{{gold}}}." for gold in shifted], answers=golds, pool=pool)
    equal = [(a, b) for a, b, reward in zip(golds, shifted, other, strict=True) if reward.value == 1.0 and a != b]
    assert len(equal) <= len(golds) // 100, equal
    assert all(reward.status == "ok" for reward in same)


def test_solutions_of_math_earn_their_own_golds(pool: RewardPool) -> None:
    rows = [row for row in read(data_file("math500.jsonl"))]
    rewards = score(
        "math_verify", completions=[row["solution"] for row in rows], answers=[row["answer"] for row in rows], pool=pool
    )
    assert sum(reward.value for reward in rewards) >= 0.98 * len(rows)
    assert {reward.status for reward in rewards} == {"ok"}


@pytest.mark.slow
def test_different_golds_of_math_are_different_answers(pool: RewardPool) -> None:
    """Random pairs; those that are equal were looked at: all of them are the same number written twice."""
    golds = sorted(
        {row["answer"] for name in ("math500.jsonl", "math_train7500.jsonl") for row in read(data_file(name))}
    )
    rng = random.Random(1)
    pairs = [rng.sample(golds, 2) for _ in range(5000)]
    completions = [f"so \\boxed{{{given}}}." for given, _ in pairs]
    rewards = score("math_verify", completions=completions, answers=[gold for _, gold in pairs], pool=pool)
    assert [pair for pair, reward in zip(pairs, rewards, strict=True) if reward.value == 1.0] == []


def test_golds_of_math_in_another_base_are_wrong(pool: RewardPool) -> None:
    golds = {row["answer"] for row in read(data_file("math_train7500.jsonl"))}
    numerals = sorted(gold for gold in golds if re.fullmatch(r"-?\d+_\{?\d+\}?", gold))
    assert len(numerals) > 30
    other = [re.sub(r"\d+(?=\}?$)", lambda base: str(int(base[0]) + 1), gold) for gold in numerals]
    for given, value in ((numerals, 1.0), (other, 0.0)):
        completions = [f"so \\boxed{{{each}}}." for each in given]
        rewards = score("math_verify", completions=completions, answers=numerals, pool=pool)
        assert [reward.value for reward in rewards] == [value] * len(numerals)


def test_options_of_mmlu_are_their_own_letters_and_no_others(pool: RewardPool) -> None:
    rows = read(data_file("mmlu_stem_test.jsonl"))
    golds = [row["answer"] for row in rows]
    metas = [{"choices": row["choices"]} for row in rows]
    for form in ("The answer is ({}).", "\\boxed{{{}}}"):
        for shift, value in ((0, 1.0), (1, 0.0)):
            letters = ["ABCD"[("ABCD".index(gold) + shift) % 4] for gold in golds]
            for written in (str.upper, str.lower):
                completions = [form.format(written(letter)) for letter in letters]
                rewards = score("multiple_choice", completions=completions, answers=golds, metas=metas, pool=pool)
                assert {reward.value for reward in rewards} == {value}
