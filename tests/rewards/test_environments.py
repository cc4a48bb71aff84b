"""Environments in workers: what they answer, and what becomes of one that hangs, raises, floods or lies."""

import logging

import pytest

import hostile_environments
from kl_comedy.config.schema import EnvironmentConfig, RewardConfig
from kl_comedy.errors import UserError
from kl_comedy.records import Problem, Prompt, Rollout, Step
from kl_comedy.rewards import RewardPool, RewardSum
from kl_comedy.rewards.environments import ContainedEnvironment, check_environment
from kl_comedy.rewards.pool import Failure, Turn

assert hostile_environments, "registers the environment `obedient`"
PROBLEM = Problem(id="p", text="3+4=", answer="7")


@pytest.fixture(scope="module")
def pool():
    with RewardPool(workers=1) as pool:
        yield pool


def answers(pool, name, *texts, state=None, options=None, timeout_s=0.5):
    environment = ContainedEnvironment(EnvironmentConfig(name=name, options=options or {}, timeout_s=timeout_s), pool)
    return environment.answer([Turn(name, PROBLEM, text, state) for text in texts])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("37+45==", Step(observation="82;", state="null", parts={"calls": 1.0})),
        ("1;12-45==", Step(observation="-33;", state="null", parts={"calls": 1.0})),
        ("+==", Step(observation=";", state="null", parts={"calls": 1.0})),
        ("37+45=82", Step(done=True, state="null")),
        ("", Step(done=True, state="null")),
    ],
)
def test_the_calculator_answers_calls(pool, text, expected):
    assert answers(pool, "calculator", text, options={"after": ";"}) == [expected]


def test_the_state_comes_back_and_begins_with_the_problem(pool):
    (first,) = answers(pool, "obedient", "count")
    assert (first.observation, first.parts) == ("7 after 1", {"turns": 1.0})
    (second,) = answers(pool, "obedient", "count", state=first.state)
    assert second.observation == "7 after 2"
    (again,) = answers(pool, "obedient", "count", state=first.state)
    assert again == second, "an environment has no memory of its own"


FAULTS = {
    "hang": "timeout",
    "raise": "ValueError",
    "exit": "SystemExit",
    "flood": "takes",
    "number": "returned 5",
    "no text": "returned Step",
    "other part": "declares",
    "nan": "finite",
    "state": "JSON",
    "die": "died",
}


@pytest.mark.parametrize("order", FAULTS)
def test_a_faulty_step_is_a_failure_and_the_next_turn_is_answered(pool, order, caplog):
    with caplog.at_level(logging.WARNING):
        fault, honest = answers(pool, "obedient", order, "count")
    assert isinstance(fault, Failure)
    assert FAULTS[order] in str(fault), fault.text
    assert isinstance(honest, Step), "one turn costs no other turn its answer"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "environment obedient failed" in warning
    assert "\n" not in warning


def test_what_an_environment_prints_is_dropped(pool, capfd):
    (answer,) = answers(pool, "obedient", "print")
    assert answer.observation == "printed"
    captured = capfd.readouterr()
    assert len(captured.out) + len(captured.err) < 1000


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "calculater"}, ["environment.name", "did you mean 'calculator'"]),
        ({"name": "calculator", "options": {"aftr": ";"}}, ["environment.options.aftr", "did you mean 'after'"]),
        ({"name": "calculator", "weights": {"call": 1.0}}, ["environment.weights", "did you mean 'calls'"]),
        ({"name": "calculator", "weights": {"calls": float("inf")}}, ["environment.weights.calls", "finite"]),
    ],
)
def test_a_mistake_in_the_config_is_one_line(settings, words):
    with pytest.raises(UserError) as caught:
        check_environment(EnvironmentConfig(**settings))
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def rollout(text, parts):
    prompt = Prompt(problem=PROBLEM, text="", token_ids=(2,))
    return Rollout(
        prompt=prompt,
        group_id=0,
        completion_ids=(3,),
        logps=(-1.0,),
        versions=(0,),
        stop_reason="eos",
        text=text,
        trained=(True,),
        turn_ends=(1,),
        turn_parts={name: (value,) for name, value in parts.items()},
    )


@pytest.mark.parametrize(
    ("rewards", "weights", "value", "parts"),
    [
        (["exact_answer"], {}, 1.0, {"exact_answer": 1.0, "environment/calls": 2.0}),
        (["exact_answer"], {"calls": -0.25}, 0.5, {"exact_answer": 1.0, "calls": 2.0}),
        ([], {"calls": 0.5}, 1.0, {"calls": 2.0}),
    ],
)
def test_parts_of_the_environment_enter_the_reward_by_their_weights(rewards, weights, value, parts):
    environment = EnvironmentConfig(name="calculator", weights=weights)
    configs = [RewardConfig(name=name) for name in rewards]
    with RewardSum(configs, environment=environment) as total:
        (scored,) = total.score([rollout("=7", {"calls": 2.0})])
        assert total.weights == dict.fromkeys(rewards, 1.0) | weights
    assert (scored.reward.value, scored.reward.parts) == (value, parts)


def test_a_part_may_not_have_the_name_of_a_reward():
    environment = EnvironmentConfig(name="calculator", weights={"exact_answer": 1.0})
    with pytest.raises(UserError, match=r"environment\.weights"):
        RewardSum([RewardConfig(name="exact_answer")], environment=environment)
