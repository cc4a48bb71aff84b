"""The weighted sum a run is configured with: parts, status, early checks, and the checks of ``score``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.config.schema import GoldConfig, RewardConfig
from kl_comedy.errors import UserError
from kl_comedy.records import Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.registry import REWARDS
from kl_comedy.rewards import BadGold, RewardPool, RewardSum, score


def problem(answer: str) -> Problem:
    return Problem(id=f"p/{answer}", text="?", answer=answer)


def rollout(text: str, answer: str) -> Rollout:
    sampled = {"completion_ids": (2,), "logps": (-0.5,), "versions": (0,), "stop_reason": "eos", "text": text}
    return Rollout(prompt=Prompt(problem=problem(answer), text="?", token_ids=(1,)), group_id=0, **sampled)


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(workers=2) as pool:
        yield pool


TEXTS = ["\\boxed{7}", "7", "none", "{" * 200]


@pytest.fixture(scope="module")
def sum_of_four(pool: RewardPool) -> RewardSum:
    configs = [
        RewardConfig(name="math_verify", weight=2.0),
        RewardConfig(name="format", weight=0.25),
        RewardConfig(name="format", weight=0.5, options={"style": "number"}),
        RewardConfig(name="length", weight=-1.0, options={"full": 100}),
    ]
    return RewardSum(configs, pool=pool)


@pytest.fixture(scope="module")
def scored(sum_of_four: RewardSum) -> list[Scored]:
    return sum_of_four.score([rollout(text, "7") for text in TEXTS])


def test_scored_rollouts_are_in_their_order(scored: list[Scored]) -> None:
    assert [item.rollout.text for item in scored] == TEXTS


def test_parts_are_unweighted_and_numbered_where_a_name_is_used_twice(scored: list[Scored]) -> None:
    assert dict(scored[0].reward.parts) == {"math_verify": 1.0, "format": 1.0, "format_2": 0.0, "length": 0.09}


def test_the_value_is_the_weighted_sum(scored: list[Scored]) -> None:
    # The last terms are the lengths: 9, 1, 4 and 200 characters, of which 100 count.
    expected = [2 + 0.25 - 0.09, 2 + 0.5 - 0.01, -0.04, -1.0]
    assert [item.reward.value for item in scored] == pytest.approx(expected)


def test_the_status_is_the_worst_of_the_parts(scored: list[Scored]) -> None:
    assert [item.reward.status for item in scored] == ["ok", "ok", "unparseable", "refused"]


def test_length_in_tokens_counts_what_the_policy_drew_and_not_what_a_tool_wrote() -> None:
    """A dialogue of three tokens of the policy around four of the tool, and a completion of one token."""
    dialogue = Rollout(
        prompt=Prompt(problem=problem("7"), text="?", token_ids=(1,)),
        group_id=0,
        completion_ids=(5, 6, 9, 9, 9, 9, 2),
        logps=(-0.5, -0.5, 0.0, 0.0, 0.0, 0.0, -0.5),
        versions=(0, 0, -1, -1, -1, -1, 0),
        stop_reason="eos",
        text="a long text",
        trained=(True, True, False, False, False, False, True),
    )
    options = {"unit": "tokens", "full": 10}
    proxy = RewardConfig(name="length", weight=-1.0, options=options)
    penalty = RewardSum([proxy], gold=GoldConfig(name="length", options=options))
    with penalty:
        rewards = [row.reward for row in penalty.score([dialogue, rollout("a longer text", "7")])]
        penalty.check([problem("7")])
    assert [reward.value for reward in rewards] == [-0.3, -0.1]
    assert [reward.gold for reward in rewards] == [0.3, 0.1]


def test_nothing_to_score_is_no_error(sum_of_four: RewardSum) -> None:
    assert sum_of_four.score([]) == []


def test_completions_are_rewarded_without_a_pool_where_none_is_needed() -> None:
    rewards = RewardSum([RewardConfig(name="zero"), RewardConfig(name="exact_answer")])
    expected = Reward(value=1.0, parts={"zero": 0.0, "exact_answer": 1.0})
    assert rewards.rewards(["7"], [problem("7")]) == [expected]


@pytest.mark.parametrize("names", [("length", "math_verify"), ("math_verify", "length")])
def test_the_status_is_the_worst_of_the_parts_in_any_order(pool: RewardPool, names: tuple[str, str]) -> None:
    options = {"length": {"full": 100}, "math_verify": {}}
    configs = [RewardConfig(name=name, options=options[name]) for name in names]
    with RewardSum(configs, pool=pool) as rewards:
        scored = rewards.score([rollout(text, "7") for text in ("\\boxed{7}", "none")])
    assert [item.reward.status for item in scored] == ["ok", "unparseable"]


@settings(max_examples=40, deadline=None)
@given(weights=st.lists(st.floats(-10, 10), min_size=1, max_size=5), text=st.text(max_size=50))
def test_the_value_is_the_weighted_sum_of_the_parts(weights: list[float], text: str) -> None:
    configs = [RewardConfig(name="length", weight=weight, options={"full": 20}) for weight in weights]
    with RewardSum(configs) as rewards:
        (scored,) = rewards.score([rollout(text, "7")])
    parts = list(scored.reward.parts.values())
    assert len(parts) == len(weights)
    assert scored.reward.value == math.fsum(weight * part for weight, part in zip(weights, parts, strict=True))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("math_verfy", {}, r"rewards\.1\.name: got 'math_verfy'.*did you mean 'math_verify'"),
        ("math_verify", {"max_char": 5}, r"rewards\.1\.options\.max_char: no such key.*'max_chars'"),
        ("math_verify", {"max_chars": "5"}, r"rewards\.1\.options\.max_chars: got '5'.*whole number"),
        ("math_verify", {"timeout_s": 0}, r"timeout_s: got 0.*above 0"),
        ("zero", {"timeout_s": 1}, r"options\.timeout_s: no such key \(given 1\); allowed: \(nothing\)"),
        ("format", {"pattern": "("}, r"options\.pattern: got '\('.*regular expression"),
        ("format", {"style": "box"}, r"options\.style: got 'box'.*did you mean 'boxed'"),
        ("format", {"style": "boxed", "pattern": "a"}, r"rewards\.1.*exclude each other"),
        ("length", {"free": 9, "full": 9}, r"rewards\.1.*0 <= free < full"),
        ("length", {"unit": "words"}, r"rewards\.1\.options\.unit: got 'words'; allowed: characters, tokens"),
        ("exact_answer", {"markers": "A:"}, r"markers: got 'A:'.*list"),
    ],
)
def test_mistakes_are_reported_when_it_is_built(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RewardSum([RewardConfig(name="zero"), RewardConfig(name=name, options=options)])


def test_an_infinite_weight_is_refused() -> None:
    with pytest.raises(UserError, match=r"rewards\.0\.weight: got inf"):
        RewardSum([RewardConfig(name="zero", weight=math.inf)])


def test_problems_that_can_be_judged_pass_the_check(pool: RewardPool) -> None:
    RewardSum([RewardConfig(name="math_verify")], pool=pool).check([problem(str(n)) for n in range(5)])


def test_check_names_the_problems_that_cannot_be_judged(pool: RewardPool) -> None:
    rewards = RewardSum([RewardConfig(name="math_verify")], pool=pool)
    problems = [problem(str(n)) for n in range(5)]
    with pytest.raises(UserError, match=r"math_verify cannot judge the answers of 1 of 6 problems: p/ \(''\)"):
        rewards.check([*problems, problem("")])


@pytest.fixture
def judged(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The completions that a reward in this process is given; the parameter has its facts, and a status of its own."""
    completions: list[str] = []
    facts = dict(request.param)
    status = facts.pop("status", "ok")

    def listening(completion: str, answer: str, meta: object) -> Reward:
        """Remembers what it is given."""
        completions.append(completion)
        return Reward(value=float(status == "ok"), status=status)

    REWARDS.register("listening", source="the tests", **facts)(listening)
    yield completions
    del REWARDS._entries["listening"]


@pytest.mark.parametrize(
    ("judged", "gold"), [({}, "\\boxed{7}"), ({"boxed": False}, "7")], indirect=["judged"], ids=["boxed", "bare"]
)
def test_a_gold_is_checked_in_the_form_that_the_reward_reads(judged: list[str], gold: str) -> None:
    RewardSum([RewardConfig(name="listening")]).check([problem("7")])
    assert judged == [gold]


@pytest.mark.parametrize("judged", [{"status": "refused"}, {"status": "timeout"}], indirect=True)
def test_a_gold_that_costs_too_much_cannot_be_judged_either(judged: list[str]) -> None:
    with pytest.raises(UserError, match="listening cannot judge the answers of 1 of 1 problems"):
        RewardSum([RewardConfig(name="listening")]).check([problem("7")])


@pytest.mark.parametrize("judged", [{"status": "unparseable"}], indirect=True)
def test_a_gold_that_is_judged_wrong_passes_the_check(judged: list[str]) -> None:
    RewardSum([RewardConfig(name="listening")]).check([problem("7")])


@pytest.fixture
def fragile() -> Iterator[list[str]]:
    """The completions that a reward is given which fails on every text with an exclamation mark."""
    completions: list[str] = []

    def fragile(completion: str, answer: str, meta: object) -> float:
        """Fails on an exclamation mark."""
        completions.append(completion)
        if "!" in completion:
            raise RuntimeError("an exclamation mark")
        return 1.0

    REWARDS.register("fragile", source="the tests")(fragile)
    yield completions
    del REWARDS._entries["fragile"]


def test_only_a_reward_that_fails_on_every_text_is_tried_on_a_gold(fragile: list[str]) -> None:
    rewards = RewardSum([RewardConfig(name="fragile")])
    rewards.score([rollout("!", "7"), rollout("a", "7")])
    assert fragile == ["!", "a"]
    rewards.score([rollout("!", "7"), rollout("!!", "7")])
    assert fragile == ["!", "a", "!", "!!", "\\boxed{7}"]


def test_a_pool_of_its_own_is_closed() -> None:
    with RewardSum([RewardConfig(name="format")]) as rewards:
        rewards.score([rollout("a", "b")])
        assert rewards.pool.pids
    assert rewards.pool.pids == []


def test_a_given_pool_is_not_closed(pool: RewardPool) -> None:
    with RewardSum([RewardConfig(name="format")], pool=pool) as rewards:
        rewards.score([rollout("a", "b")])
    assert pool.pids


@pytest.fixture
def picky() -> Iterator[str]:
    """The name of a reward in this process that reports a part, and refuses a problem without an answer."""

    def picky(completion: str, answer: str, meta: object) -> Reward:
        """Reports how long the completion is."""
        if not answer:
            raise BadGold("picky needs an answer")
        return Reward(value=1.0, parts={"chars": float(len(completion))})

    REWARDS.register("picky", source="the tests")(picky)
    yield "picky"
    del REWARDS._entries["picky"]


def test_a_reward_may_report_parts(picky: str) -> None:
    rewards = RewardSum([RewardConfig(name=picky), RewardConfig(name=picky)])
    (scored,) = rewards.score([rollout("abc", "x")])
    assert dict(scored.reward.parts) == {"picky": 1.0, "picky/chars": 3.0, "picky_2": 1.0, "picky_2/chars": 3.0}


def test_a_bad_gold_in_process_costs_its_item(picky: str) -> None:
    rewards = RewardSum([RewardConfig(name=picky), RewardConfig(name=picky)])
    good, bad = rewards.score([rollout("abc", "x"), rollout("abc", "")])
    assert good.reward.status == "ok"
    assert (bad.reward.value, bad.reward.status) == (0.0, "refused")


@pytest.mark.parametrize(
    ("completions", "answers", "message"),
    [
        (["a", "b"], ["a"], "2 completions, 1 answers"),
        ("ab", ["a", "b"], "completions: got 'ab'; allowed: a list of strings"),
        (["a"], [7], r"answers\[0\]: got 7; allowed: a string"),
    ],
)
def test_lists_must_pair_up(completions: Any, answers: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        score("exact_answer", completions=completions, answers=answers)


def test_an_unknown_reward_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'exact_answer'"):
        score("exact_anser", completions=[], answers=[])


@given(text=st.sampled_from([";", "3+4=7", "3+4=8", ";7", "", "7;"]), weight=st.floats(-10, 10))
def test_the_gold_verdict_and_the_trained_reward_do_not_touch_each_other(text: str, weight: float) -> None:
    # Read here without the rewards' code: the number after the last "=", or the whole text.
    is_right = text.rpartition("=")[2].strip(";") == "7"
    proxy = [RewardConfig(name="fixed_text", weight=weight), RewardConfig(name="length", options={"full": 10})]
    with RewardSum(proxy, gold=GoldConfig(name="exact_answer")) as rewards:
        (reward,) = rewards.rewards([text], [problem("7")])
    assert reward.gold == float(is_right)
    assert reward.value == pytest.approx(weight * (text == ";") + len(text) / 10)
    with RewardSum(proxy) as rewards:
        (without_gold,) = rewards.rewards([text], [problem("7")])
    assert without_gold.gold is None
    assert without_gold.value == reward.value


def test_gold_answers_are_checked_by_the_gold_verdict_too() -> None:
    rewards = RewardSum([RewardConfig(name="zero")], gold=GoldConfig(name="exact_answer"))
    with rewards, pytest.raises(UserError, match="gold cannot judge the answers of 1 of 1 problems"):
        rewards.check([problem("?")])
