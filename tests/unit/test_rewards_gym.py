"""reasoning-gym's scorers: oracle answers count, parts of answers do not, and no answer is run as code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kl_comedy.errors import UserError
from kl_comedy.rewards import RewardPool, score
from kl_comedy.rewards.gym import is_plain

factory = pytest.importorskip("reasoning_gym.factory")
TASKS = ["chain_sum", "products", "gcd", "letter_counting", "basic_arithmetic", "spell_backward", "number_sorting"]
EVALUATING = ["n_queens", "polynomial_multiplication", "simple_integration", "spiral_matrix", "countdown", "puzzle24"]
TUPLES = ["arc_agi", "rearc"]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(workers=1) as pool:
        yield pool


def entries(task: str, size: int) -> list[dict[str, Any]]:
    build, settings = factory.DATASETS[task]
    return [dict(entry) for entry in build(config=settings(seed=5, size=size))]


def judge(pool: RewardPool, task: str, completions: list[str], items: list[Any], **options: Any) -> Any:
    metas = [{"task": task, "entry": entry} for entry in items]
    answers = [str(entry["answer"]) for entry in items]
    rewards = score("reasoning_gym", completions=completions, answers=answers, metas=metas, pool=pool, **options)
    return [(reward.value, reward.status) for reward in rewards]


@pytest.mark.parametrize("task", [*TASKS, *EVALUATING, *TUPLES])
def test_oracle_answers_are_right_and_empty_ones_unparseable(pool: RewardPool, task: str) -> None:
    items = entries(task, 3)
    assert judge(pool, task, [f" {entry['answer']}\n" for entry in items], items) == [(1.0, "ok")] * 3
    assert judge(pool, task, ["", " ", "\n"], items) == [(0.0, "unparseable")] * 3


def test_a_partial_score_counts_only_when_asked_for(pool: RewardPool) -> None:
    items = entries("chain_sum", 1)
    with pytest.raises(UserError, match="did you mean 'chain_sum'"):
        judge(pool, "chain_sums", ["3"], items)
    with pytest.raises(UserError, match="needs problems of the dataset reasoning_gym"):
        score("reasoning_gym", completions=["3"], answers=["3"], pool=pool)
    text = f"I believe the result is {items[0]['answer']}"
    assert judge(pool, "chain_sum", [text], items) == [(0.0, "ok")]
    ((partial, _),) = judge(pool, "chain_sum", [text], items, partial=True)
    assert 0.0 < partial < 0.99
    assert judge(pool, "chain_sum", [text], items, solved_at=partial) == [(1.0, "ok")]


def test_the_part_that_counts_is_an_option(pool: RewardPool) -> None:
    items = entries("chain_sum", 1)
    answer = items[0]["answer"]
    for part, text in (
        ("first_line", f"{answer}\n4 - 1 = 3"),
        ("last_line", f"Let me see.\n{answer}"),
        ("answer_tag", f"<answer>1</answer> no, <answer> {answer} </answer>"),
    ):
        assert judge(pool, "chain_sum", [text], items) == [(0.0, "ok")]
        assert judge(pool, "chain_sum", [text], items, part=part) == [(1.0, "ok")]
    assert judge(pool, "chain_sum", [answer], items, part="answer_tag") == [(0.0, "unparseable")]


@pytest.mark.parametrize("task", EVALUATING)
def test_answers_are_never_run_as_code(pool: RewardPool, task: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    attacks = [
        f"open({str(mark)!r}, 'w')",
        f"[open({str(mark)!r}, 'w')]",
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
        f"exec('open({str(mark)!r}, chr(119))')",
        f"(open#\n({str(mark)!r}, 'w'))",
        f"(lambda: open({str(mark)!r}, 'w'))()",
        f"(open)({str(mark)!r}, 'w')",
        f"\uff4fpen({str(mark)!r}, 'w')",
        f"S('open({str(mark)!r}, 1)')",
    ]
    items = entries(task, 1) * len(attacks)
    assert judge(pool, task, attacks, items) == [(0.0, "refused")] * len(attacks)
    assert not mark.exists()


PLAIN = ["x**2 + 3*x*(y - 1)", "-cos(2*x)/2 + C", "[[1, 2], [3, 4]]", "[['Q', '_']]", "Q _ _\n_ _ Q", "1.5*(2 + 3)"]
CODE = ["open('x')", "cosopen('x')", "x.y", "x. y", "3*(open)('x')", "[open][0]('x')", "open\\\n('x')", "print ('x')"]


def test_the_grammar_of_evaluated_answers() -> None:
    assert [text for text in [*PLAIN, *CODE, "f'{open(1)}'"] if is_plain(text)] == PLAIN
