"""Countdown through reasoning-gym: problems, their own scorer, and what a clever answer may not do."""

import pytest

pytest.importorskip("reasoning_gym")

from kl_comedy.config.schema import DatasetConfig, RewardConfig
from kl_comedy.data import load_problems
from kl_comedy.rewards import RewardSum, score, shared_pool

PROBLEMS = 6


def problems(seed):
    """Problems of three or four numbers."""
    config = DatasetConfig(
        dataset="reasoning_gym",
        name="countdown",
        limit=PROBLEMS,
        seed=seed,
        options={"min_numbers": 3, "max_numbers": 4},
    )
    return load_problems(config, key="data.train", training=True, allow_test_split=False)


@pytest.fixture(scope="module")
def drawn():
    return problems(seed=3)


def verdicts(completions, drawn, **options):
    answers = [problem.answer for problem in drawn]
    metas = [problem.meta for problem in drawn]
    return score("reasoning_gym", completions=completions, answers=answers, metas=metas, **options)


def test_a_problem_states_its_target_and_has_the_numbers_asked_for(drawn):
    for problem in drawn:
        metadata = problem.meta["entry"]["metadata"]
        assert str(metadata["target"]) in problem.text
        assert 3 <= len(metadata["numbers"]) <= 4


def test_the_tasks_own_answers_are_right(drawn):
    rewards = verdicts([problem.answer for problem in drawn], drawn)
    assert [reward.value for reward in rewards] == [1.0] * PROBLEMS


def test_the_tasks_own_answers_are_right_in_tags(drawn):
    completions = [f"Let me think.\n<answer> {problem.answer} </answer>" for problem in drawn]
    rewards = verdicts(completions, drawn, part="answer_tag")
    assert [reward.value for reward in rewards] == [1.0] * PROBLEMS


@pytest.mark.parametrize(
    ("form", "value"),
    [
        pytest.param("(({answer}))", 1.0, id="more parentheses"),
        pytest.param("({answer}) * 1", 0.0, id="a number that was not given"),
        pytest.param("{answer} + 1", 0.0, id="another value"),
    ],
)
def test_another_expression_is_right_with_the_same_numbers_and_value(drawn, form, value):
    problem = drawn[0]
    (reward,) = verdicts([form.format(answer=problem.answer)], [problem])
    assert reward.value == value


def test_the_target_itself_is_no_solution(drawn):
    problem = drawn[0]
    (reward,) = verdicts([str(problem.meta["entry"]["metadata"]["target"])], [problem])
    assert reward.value == 0.0


def test_an_answer_without_the_tag_is_unparseable(drawn):
    (reward,) = verdicts(["no tag"], drawn[:1], part="answer_tag")
    assert reward.status == "unparseable"


def test_code_is_refused(drawn):
    (reward,) = verdicts(["__import__('os').getpid()"], drawn[:1])
    assert reward.status == "refused"


@pytest.mark.parametrize("options", [{}, {"part": "answer_tag"}, {"part": "first_line", "partial": True}])
def test_its_answers_pass_the_check_at_the_beginning_of_a_run(drawn, options):
    """The guard on answers that are evaluated refuses a backslash, so golds must not be shown to it in a box."""
    with RewardSum([RewardConfig(name="reasoning_gym", options=options)], pool=shared_pool()) as rewards:
        rewards.check(drawn)


def test_seeds_far_apart_share_no_problem():
    first = {problem.text for problem in problems(seed=1)}
    second = {problem.text for problem in problems(seed=1_000_001)}
    assert not first & second
