"""The weighted sum a run is configured with: parts, status, early checks, and the checks of ``score``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.config.schema import RewardConfig
from kl_comedy.errors import UserError
from kl_comedy.records import Problem, Prompt, Reward, Rollout
from kl_comedy.registry import REWARDS
from kl_comedy.rewards import BadGold, RewardPool, RewardSum, score


def rollout(text: str, answer: str, **meta: Any) -> Rollout:
    problem = Problem(id=f"p/{answer}", text="?", answer=answer, meta=meta)
    return Rollout(
        prompt=Prompt(problem=problem, text="?", token_ids=(1,)),
        group_id=0,
        completion_ids=(2,),
        logps=(-0.5,),
        versions=(0,),
        stop_reason="eos",
        text=text,
    )


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(workers=2) as pool:
        yield pool


def test_weighted_sum_with_parts_and_worst_status(pool: RewardPool) -> None:
    configs = [
        RewardConfig(name="math_verify", weight=2.0),
        RewardConfig(name="format", weight=0.25),
        RewardConfig(name="format", weight=0.5, options={"style": "number"}),
        RewardConfig(name="length", weight=-1.0, options={"full": 100}),
    ]
    texts = ["\\boxed{7}", "7", "none", "{" * 200]
    with RewardSum(configs, pool=pool) as rewards:
        scored = rewards.score([rollout(text, "7") for text in texts])
    assert [item.rollout.text for item in scored] == texts
    assert dict(scored[0].reward.parts) == {"math_verify": 1.0, "format": 1.0, "format_2": 0.0, "length": 0.09}
    expected = [2 + 0.25 - 0.09, 2 + 0.5 - 0.01, -0.04, -1.0]
    assert [item.reward.value for item in scored] == pytest.approx(expected)
    assert [item.reward.status for item in scored] == ["ok", "ok", "unparseable", "refused"]
    assert rewards.score([]) == []


@settings(max_examples=40, deadline=None)
@given(weights=st.lists(st.floats(-10, 10), min_size=1, max_size=5), text=st.text(max_size=50))
def test_the_value_is_the_weighted_sum_of_the_parts(weights: list[float], text: str) -> None:
    configs = [RewardConfig(name="length", weight=weight, options={"full": 20}) for weight in weights]
    with RewardSum(configs) as rewards:
        (scored,) = rewards.score([rollout(text, "7")])
    parts = list(scored.reward.parts.values())
    assert len(parts) == len(weights)
    assert scored.reward.value == math.fsum(weight * part for weight, part in zip(weights, parts, strict=True))


def test_the_zero_reward_is_neutral() -> None:
    alone, with_zero = (
        [RewardConfig(name="exact_answer")],
        [RewardConfig(name="exact_answer"), RewardConfig(name="zero")],
    )
    for text in ("7", "8", ""):
        values = [RewardSum(configs).score([rollout(text, "7")])[0].reward for configs in (alone, with_zero)]
        assert values[0].value == values[1].value and values[0].status == values[1].status


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RewardConfig(name="math_verfy"), r"rewards\.1\.name: got 'math_verfy'.*did you mean 'math_verify'"),
        (
            RewardConfig(name="math_verify", options={"max_char": 5}),
            r"rewards\.1\.options: got 'max_char'.*'max_chars'",
        ),
        (
            RewardConfig(name="math_verify", options={"max_chars": "5"}),
            r"rewards\.1\.options\.max_chars: got '5'.*integer",
        ),
        (RewardConfig(name="math_verify", options={"max_chars": True}), r"max_chars: got True"),
        (RewardConfig(name="math_verify", options={"timeout_s": 0}), r"timeout_s: got 0.*above 0"),
        (RewardConfig(name="zero", options={"timeout_s": 1}), r"options: got 'timeout_s'; allowed: \(nothing\)"),
        (RewardConfig(name="format", options={"pattern": "("}), r"options\.pattern: got '\('.*regular expression"),
        (RewardConfig(name="format", options={"style": "box"}), r"options\.style: got 'box'.*did you mean 'boxed'"),
        (RewardConfig(name="format", options={"style": "boxed", "pattern": "a"}), r"rewards\.1.*exclude each other"),
        (RewardConfig(name="length", options={"free": 9, "full": 9}), r"rewards\.1.*0 <= free < full"),
        (RewardConfig(name="exact_answer", options={"markers": "A:"}), r"markers: got 'A:'.*list of str"),
        (RewardConfig(name="zero", weight=math.inf), r"rewards\.1\.weight: got inf"),
    ],
)
def test_mistakes_are_found_when_it_is_built(config: RewardConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RewardSum([RewardConfig(name="zero"), config])


def test_no_rewards_is_a_mistake() -> None:
    with pytest.raises(UserError, match="at least one"):
        RewardSum([])


def test_check_names_the_problems_that_cannot_be_judged(pool: RewardPool) -> None:
    rewards = RewardSum([RewardConfig(name="math_verify")], pool=pool)
    good = [Problem(id=f"good/{n}", text="?", answer=str(n)) for n in range(5)]
    rewards.check(good)
    with pytest.raises(UserError, match=r"math_verify cannot judge the answers of 1 of 6 problems: bad/0 \(''\)"):
        rewards.check([*good, Problem(id="bad/0", text="?", answer="")])


def test_missing_meta_is_a_mistake_of_the_config(pool: RewardPool) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UserError, match="needs problems of the dataset reasoning_gym"):
        score("reasoning_gym", completions=["3"], answers=["3"], pool=pool)


def test_own_pool_is_closed_a_given_one_is_not(pool: RewardPool) -> None:
    config = [RewardConfig(name="format")]
    with RewardSum(config) as own:
        own.score([rollout("a", "b")])
        assert own.pool.pids
    assert own.pool.pids == []
    with RewardSum(config, pool=pool) as borrowed:
        borrowed.score([rollout("a", "b")])
    assert pool.pids


def test_a_reward_may_report_parts_and_bad_golds_in_process() -> None:
    def picky(completion: str, answer: str, meta: object) -> Reward:
        """Reports how long the completion is."""
        if not answer:
            raise BadGold("picky needs an answer")
        return Reward(value=1.0, parts={"chars": float(len(completion))})

    REWARDS.register("picky", source="the tests")(picky)
    try:
        rewards = RewardSum([RewardConfig(name="picky"), RewardConfig(name="picky")])
        first, second = rewards.score([rollout("abc", "x"), rollout("abc", "")])
    finally:
        del REWARDS._entries["picky"]
    assert dict(first.reward.parts) == {"picky": 1.0, "picky/chars": 3.0, "picky_2": 1.0, "picky_2/chars": 3.0}
    assert (second.reward.value, second.reward.status) == (0.0, "refused")


@pytest.mark.parametrize(
    ("completions", "answers", "message"),
    [
        (["a", "b"], ["a"], "2 completions, 1 answers"),
        ("ab", ["a", "b"], "completions: got 'ab'; allowed: a list of strings"),
        (["a"], [7], r"answers\[0\]: got 7; allowed: a string"),
        ([None], ["a"], r"completions\[0\]: got None"),
    ],
)
def test_lists_must_pair_up(completions: Any, answers: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        score("exact_answer", completions=completions, answers=answers)


def test_an_unknown_reward_names_the_alternatives() -> None:
    with pytest.raises(UserError, match="did you mean 'exact_answer'"):
        score("exact_anser", completions=[], answers=[])
