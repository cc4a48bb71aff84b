"""Countdown through reasoning-gym: problems, their own scorer, and what a clever answer may not do."""

import pytest

pytest.importorskip("reasoning_gym")

from kl_comedy.config.schema import DatasetConfig, RewardConfig
from kl_comedy.data import load_problems
from kl_comedy.rewards import RewardSum, score, shared_pool

OPTIONS = {"min_numbers": 3, "max_numbers": 4}


def problems(**more):
    config = DatasetConfig(dataset="reasoning_gym", name="countdown", limit=6, options=dict(OPTIONS), **more)
    return load_problems(config, key="data.train", training=True, allow_test_split=False)


def verdicts(texts, drawn, **options):
    answers, metas = [p.answer for p in drawn], [p.meta for p in drawn]
    return score("reasoning_gym", completions=texts, answers=answers, metas=metas, **options)


def test_the_tasks_own_answers_are_right_in_tags_and_bare():
    drawn = problems(seed=3)
    assert all(str(p.meta["entry"]["metadata"]["target"]) in p.text for p in drawn)
    assert all(3 <= len(p.meta["entry"]["metadata"]["numbers"]) <= 4 for p in drawn)
    tagged = [f"Let me think.\n<answer> {p.answer} </answer>" for p in drawn]
    assert [r.value for r in verdicts(tagged, drawn, part="answer_tag")] == [1.0] * 6
    assert [r.value for r in verdicts([p.answer for p in drawn], drawn)] == [1.0] * 6


def test_another_expression_with_the_same_numbers_and_value_is_right_too():
    (one, *_) = problems(seed=3)
    (verdict,) = verdicts([f"({one.answer}) * 1"], [one])
    assert verdict.value == 0.0, "a number that was not given"
    (verdict,) = verdicts([f"(({one.answer}))"], [one])
    assert verdict.value == 1.0


def test_what_is_not_a_solution_gets_nothing():
    drawn = problems(seed=3)
    target = drawn[0].meta["entry"]["metadata"]["target"]
    assert verdicts([str(target)], drawn[:1])[0].value == 0.0
    assert verdicts([f"{drawn[0].answer} + 1"], drawn[:1])[0].value == 0.0
    assert verdicts(["no tag"], drawn[:1], part="answer_tag")[0].status == "unparseable"
    assert verdicts(["__import__('os').getpid()"], drawn[:1])[0].status == "refused"


@pytest.mark.parametrize("options", [{}, {"part": "answer_tag"}, {"part": "first_line", "partial": True}])
def test_its_answers_pass_the_check_at_the_beginning_of_a_run(options):
    """The guard on answers that are evaluated refuses a backslash, so golds must not be shown to it in a box."""
    with RewardSum([RewardConfig(name="reasoning_gym", options=options)], pool=shared_pool()) as rewards:
        rewards.check(problems(seed=3))


def test_seeds_far_apart_share_no_problem():
    texts = [{p.text for p in problems(seed=seed)} for seed in (1, 1_000_001)]
    assert not texts[0] & texts[1]
