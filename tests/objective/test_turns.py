"""Rewards and advantages by turn, and discounts over gaps, against sums written token by token from their equations."""

import dataclasses
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.config import AlgorithmConfig, load_config
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm
from kl_comedy.kl.surrogate import TermParts
from kl_comedy.objective.advantages import EPSILON, gae
from kl_comedy.records import FOREIGN_VERSION, Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.training.loss import Preparation, UpdateTensors, advantage_signal, update_returns

CPU = torch.device("cpu")
TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
WEIGHTS = {"solved": 2.0, "tidy": -0.5}
REWARD_WEIGHT = 1.5
NUMBERS = st.floats(-2, 2)


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn of the policy: the KL cost of each of its tokens, what was paid for it, the reply's tokens before it."""

    costs: list
    paid: dict
    gap: int


TURN = st.builds(
    Turn,
    costs=st.lists(NUMBERS, min_size=1, max_size=3),
    paid=st.fixed_dictionaries({"solved": NUMBERS, "tidy": NUMBERS, "unweighted": NUMBERS}),
    # An observation may be empty: the next turn then follows at once.
    gap=st.integers(0, 2),
)
DIALOGUES = st.lists(st.lists(TURN, min_size=1, max_size=3), min_size=4, max_size=4)
OUTCOMES = st.lists(NUMBERS, min_size=4, max_size=4)


def scored(number, turns, outcome):
    """A dialogue and its reward; two of one prompt follow each other."""
    trained = []
    ends = []
    for position, turn in enumerate(turns):
        if position > 0:
            trained += [False] * turn.gap
        trained += [True] * len(turn.costs)
        ends.append(len(trained))
    parts = {name: tuple(turn.paid[name] for turn in turns) for name in turns[0].paid}
    rollout = Rollout(
        prompt=Prompt(problem=Problem(id="p", text="", answer=""), text="", token_ids=(1,)),
        group_id=number // 2,
        completion_ids=(2,) * len(trained),
        logps=tuple(-1.0 if own else 0.0 for own in trained),
        versions=tuple(0 if own else FOREIGN_VERSION for own in trained),
        stop_reason="eos",
        text="",
        trained=tuple(trained),
        turn_ends=tuple(ends),
        turn_parts=parts,
    )
    value = outcome + sum(WEIGHTS[name] * sum(parts[name]) for name in WEIGHTS)
    return Scored(rollout=rollout, reward=Reward(value=value))


def returns_of(rows, dialogues, credit):
    """The update, and what a token's score is to be multiplied by before the baseline, by the code."""
    update = UpdateTensors.of(rows, CPU, WEIGHTS if credit == "turn" else None)
    costs_BT = torch.zeros_like(update.mask_BT, dtype=torch.float64)
    for row, turns in enumerate(dialogues):
        costs_BT[row, update.mask_BT[row]] = torch.tensor(
            [cost for turn in turns for cost in turn.costs], dtype=torch.float64
        )
    to_go_BT = costs_BT.flip(-1).cumsum(-1).flip(-1)
    parts = TermParts(
        cost_BT=to_go_BT,
        weight_BT=to_go_BT,
        baseline_weight_BT=to_go_BT,
        pathwise_BT=to_go_BT,
        cost_after_B=to_go_BT.new_zeros(len(rows)),
    )
    plan = Preparation(
        terms={"kl_0": KLTerm("k1", baseline="before")},
        algorithm=AlgorithmConfig(reward_weight=REWARD_WEIGHT),
        packer=None,
    )
    return update, update_returns({"kl_0": parts}, plan, {"kl_0": 0.7}, update)


def returns_by_hand(turns, outcome, credit):
    """For each turn its tokens' returns: all that is paid from the turn on, less the costs from the token on."""
    by_turn = []
    for number, turn in enumerate(turns):
        counted = turns[number:] if credit == "turn" else turns
        reward = outcome
        for other in counted:
            reward += sum(WEIGHTS[name] * other.paid[name] for name in WEIGHTS)
        of_tokens = []
        for position in range(len(turn.costs)):
            costs = sum(turn.costs[position:])
            for later in turns[number + 1 :]:
                costs += sum(later.costs)
            of_tokens.append(REWARD_WEIGHT * reward - 0.7 * costs)
        by_turn.append(of_tokens)
    return by_turn


def flat(by_turn):
    return [number for turn in by_turn for number in turn]


@settings(deadline=None)
@given(dialogues=DIALOGUES, outcomes=OUTCOMES, credit=st.sampled_from(["dialogue", "turn"]))
def test_a_token_has_the_return_of_what_is_paid_from_its_turn_on(dialogues, outcomes, credit):
    rows = [scored(number, turns, outcomes[number]) for number, turns in enumerate(dialogues)]
    update, returns_BT = returns_of(rows, dialogues, credit)
    for row, turns in enumerate(dialogues):
        expected = flat(returns_by_hand(turns, outcomes[row], credit))
        assert returns_BT[row, update.mask_BT[row]].tolist() == pytest.approx(expected, abs=1e-9)


def others_at(returns, number, column):
    """The return of another dialogue at this turn and column; beyond the turn's end that of its last token."""
    turn = returns[number]
    return turn[min(column, len(turn) - 1)]


def advantages_by_hand(name, own, other):
    """Of a group of two."""
    result = []
    for number, turn in enumerate(own):
        for column, value in enumerate(turn):
            if number >= len(other):
                result.append(value)
                continue
            opposite = others_at(other, number, column)
            mean = (value + opposite) / 2
            if name == "rloo":
                result.append(value - opposite)
            elif name == "dr_grpo":
                result.append(value - mean)
            else:
                assert name == "grpo"
                result.append((value - mean) / (statistics.stdev([value, opposite]) + EPSILON))
    return result


@settings(deadline=None)
@given(dialogues=DIALOGUES, outcomes=OUTCOMES, name=st.sampled_from(["none", "rloo", "dr_grpo", "grpo"]))
def test_a_turn_is_compared_with_those_of_its_number(dialogues, outcomes, name):
    rows = [scored(number, turns, outcomes[number]) for number, turns in enumerate(dialogues)]
    update, returns_BT = returns_of(rows, dialogues, "turn")
    advantage_BT = advantage_signal(rows, update, returns_BT, AlgorithmConfig(advantage=name), None).advantage_BT
    returns = [returns_by_hand(turns, outcomes[row], "turn") for row, turns in enumerate(dialogues)]
    for row in range(len(rows)):
        expected = flat(returns[row])
        if name != "none":
            expected = advantages_by_hand(name, returns[row], returns[row ^ 1])
        assert advantage_BT[row, update.mask_BT[row]].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


@settings(deadline=None)
@given(
    dialogues=DIALOGUES,
    outcomes=OUTCOMES,
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    last=NUMBERS,
    discount=st.sampled_from(["token", "turn"]),
)
def test_a_discount_counts_the_policys_tokens_or_its_turns(dialogues, outcomes, gamma, lam, last, discount):
    """``A_t = delta_t + gamma lam A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t``, at each token or at the last
    one of each turn; at the others both factors are 1. What is paid for a turn is a reward of its last token."""
    rows = [scored(number, turns, outcomes[number]) for number, turns in enumerate(dialogues)]
    update, returns_BT = returns_of(rows, dialogues, "turn")
    generator = torch.Generator().manual_seed(3)
    values_BT = torch.randn(returns_BT.shape, generator=generator, dtype=torch.float64)
    advantage_BT = gae(
        returns_BT,
        update.mask_BT,
        update.group_B,
        values_BT=values_BT,
        last_value_B=torch.full((len(rows),), last, dtype=torch.float64),
        gamma=gamma,
        lam=lam,
        turn_BT=update.turn_BT if discount == "turn" else None,
    )
    for row, turns in enumerate(dialogues):
        mask_T = update.mask_BT[row]
        rewards = []
        is_step = []
        for turn in turns:
            paid = sum(WEIGHTS[name] * turn.paid[name] for name in WEIGHTS)
            rewards += [-0.7 * cost for cost in turn.costs]
            rewards[-1] += REWARD_WEIGHT * paid
            is_step += [discount == "token"] * (len(turn.costs) - 1) + [True]
        rewards[-1] += REWARD_WEIGHT * outcomes[row]
        values = [*values_BT[row, mask_T].tolist(), last]
        expected = []
        running = 0.0
        for token in reversed(range(len(rewards))):
            here_gamma, here_lam = (gamma, lam) if is_step[token] else (1.0, 1.0)
            delta = rewards[token] + here_gamma * values[token + 1] - values[token]
            running = delta + here_gamma * here_lam * running
            expected.insert(0, running)
        assert advantage_BT[row, mask_T].tolist() == pytest.approx(expected, abs=1e-9)
        assert not advantage_BT[row, ~mask_T].any()


def test_the_two_discounts_of_a_reward_over_a_gap():
    """Two turns of two tokens, a reply of three between them, a reward of 1 at the end: gamma to the number of tokens
    of the policy after each one, or of turns. The reply's length is in neither."""
    mask_BT = torch.tensor([[True, True, False, False, False, True, True]])
    turn_BT = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    returns_BT = torch.ones(1, 7, dtype=torch.float64)
    rest = {"values_BT": torch.zeros(1, 7), "gamma": 0.5, "lam": 1.0}
    by_token = gae(returns_BT, mask_BT, torch.zeros(1), **rest)
    assert by_token[mask_BT].tolist() == [0.125, 0.25, 0.5, 1.0]
    by_turn = gae(returns_BT, mask_BT, torch.zeros(1), turn_BT=turn_BT, **rest)
    assert by_turn[mask_BT].tolist() == [0.5, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turn_ends": (1, 2)}, "turns that end at"),
        ({"turn_ends": (3, 1)}, "turns that end at"),
        ({"turn_ends": (1,), "turn_parts": {}}, "turns that end at"),
        ({"turn_ends": (1, 3), "turn_parts": {"a": (1.0,)}}, "not one for each of its 2 turns"),
    ],
    ids=["at a tool's token", "in another order", "before the last token", "a part of one turn of two"],
)
def test_turns_that_cannot_be_are_refused(change, message):
    paid = {"solved": 0.0, "tidy": 0.0}
    row = scored(0, [Turn([0.0], paid, 0), Turn([0.0], paid, 1)], 0.0).rollout
    assert row.turn_ends == (1, 3)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(row, **change)


@pytest.mark.parametrize("advantage", ["batch_mean", "reinforce_pp", "reinforce_pp_baseline"])
def test_a_baseline_over_the_batch_is_refused_by_turn(advantage):
    environment = "environment={name: calculator, turns: 2, credit: turn}"
    with pytest.raises(UserError, match=f"environment.credit: got 'turn'.*{advantage} normalizes over the batch"):
        load_config(TINY, [environment, f"algorithm.advantage={advantage}"])
