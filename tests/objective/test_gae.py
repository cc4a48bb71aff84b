"""GAE against its definition, the value loss, and what its gradient may reach."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.config import load_config
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm, kl_parts
from kl_comedy.objective import returns_with_costs, value_loss
from kl_comedy.objective.advantages import gae, token_rewards
from kl_comedy.training.build import check_training
from kl_comedy.training.metrics import critic_metrics
from kl_comedy.training.models import ValueHead

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
GROUP_B = torch.zeros(3, dtype=torch.long)
SIZES = [5, 3, 1]
MASK_BT = torch.arange(5)[None] < torch.tensor(SIZES)[:, None]
FIFTEEN = st.lists(st.floats(-2, 2), min_size=15, max_size=15)
UNIT = st.floats(0, 1)


def grid(numbers):
    return torch.tensor(numbers, dtype=torch.float64).reshape(3, 5)


def returns_of(reward_B, cost_BT):
    """The return of each token as preparation makes it: the reward less the costs to go."""
    inside_BT = torch.where(MASK_BT, cost_BT, 0.0)
    return returns_with_costs(reward_B, inside_BT.flip(-1).cumsum(-1).flip(-1), 5)


def gae_by_hand(rewards, values, last_value, gamma, lam):
    """sum_n (gamma lam)^n delta_{t+n}, with delta_t = r_t + gamma V_{t+1} - V_t."""
    next_values = [*values[1:], last_value]
    differences = []
    for reward, value, next_value in zip(rewards, values, next_values, strict=True):
        differences.append(reward + gamma * next_value - value)
    advantages = []
    for token in range(len(differences)):
        later = differences[token:]
        advantages.append(sum((gamma * lam) ** steps * difference for steps, difference in enumerate(later)))
    return advantages


@settings(max_examples=60, deadline=None)
@given(costs=FIFTEEN, values=FIFTEEN, gamma=UNIT, lam=UNIT, last=st.lists(st.floats(-1, 1), min_size=3, max_size=3))
def test_it_is_the_discounted_sum_of_temporal_differences(costs, values, gamma, lam, last):
    """1506.02438 Eq. 16, summed term by term. The KL cost of a token is a reward of that token."""
    reward_B = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    last_B = torch.tensor(last, dtype=torch.float64)
    advantage_BT = gae(
        returns_of(reward_B, grid(costs)),
        MASK_BT,
        GROUP_B,
        values_BT=grid(values),
        last_value_B=last_B,
        gamma=gamma,
        lam=lam,
    )
    for row, size in enumerate(SIZES):
        rewards = [-cost for cost in grid(costs)[row, :size].tolist()]
        rewards[-1] += reward_B[row].item()
        expected = gae_by_hand(rewards, grid(values)[row, :size].tolist(), last_B[row].item(), gamma, lam)
        assert advantage_BT[row, :size].tolist() == pytest.approx(expected, abs=1e-9)
        assert not advantage_BT[row, size:].any(), "a token outside the mask has an advantage"


@settings(max_examples=60, deadline=None)
@given(costs=FIFTEEN, values=FIFTEEN)
def test_with_lambda_one_it_is_the_return_to_go_less_the_value(costs, values):
    returns_BT = returns_of(torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64), grid(costs))
    advantage_BT = gae(returns_BT, MASK_BT, GROUP_B, values_BT=grid(values), gamma=1.0, lam=1.0)
    assert torch.allclose(advantage_BT, torch.where(MASK_BT, returns_BT - grid(values), 0.0), atol=1e-12)


def test_with_lambda_zero_it_is_one_temporal_difference():
    """Costs of 0.1 and equal values: -0.1, and at the end the reward of 1 less the cost and the value of 0.5."""
    returns_BT = returns_of(torch.ones(3).double(), grid([0.1] * 15))
    advantage_BT = gae(returns_BT, MASK_BT, GROUP_B, values_BT=grid([0.5] * 15), lam=0.0)
    assert advantage_BT[0].tolist() == pytest.approx([-0.1, -0.1, -0.1, -0.1, 0.4])


LOGP_BT = grid([-0.1 * number for number in range(15)])
REF_BT = grid([-0.2 * number + 0.05 for number in range(15)])
EXACT_BT = torch.where(MASK_BT, grid([0.01 * number for number in range(15)]), 0.0)


def rewards_of_a_term(estimator):
    """What a term before the baseline, in completions without any other reward, pays each token."""
    term = KLTerm(estimator, placement="reward", credit="to_go", baseline="before")
    tensors = {"logp_BT": LOGP_BT, "ref_logp_BT": REF_BT, "behaviour_logp_BT": LOGP_BT}
    cost_BT = kl_parts(term, **tensors, mask_BT=MASK_BT, exact_kl_BT=EXACT_BT).cost_BT
    return token_rewards(returns_with_costs(torch.zeros(3).double(), cost_BT, 5), MASK_BT)


def test_k1_before_the_baseline_is_a_cost_of_its_token():
    expected_BT = torch.where(MASK_BT, REF_BT - LOGP_BT, 0.0)
    assert torch.allclose(rewards_of_a_term("k1"), expected_BT, atol=1e-12)


def test_an_exact_kl_before_the_baseline_is_a_cost_of_the_token_that_led_to_its_prefix():
    """The step from the prefix itself is a loss."""
    next_token_BT = torch.nn.functional.pad(-EXACT_BT[:, 1:], (0, 1))
    expected_BT = torch.where(MASK_BT, next_token_BT, 0.0)
    assert torch.allclose(rewards_of_a_term("exact"), expected_BT, atol=1e-12)


def test_a_reward_before_a_tools_reply_counts_once():
    """A reward of 1 at the end, no cost and no value: each token of the policy has the return of 1, discounted by the
    policy's tokens after it."""
    mask_BT = torch.tensor([[True, True, False, False, True, True]])
    returns_BT = torch.ones(1, 6, dtype=torch.float64)
    assert token_rewards(returns_BT, mask_BT).tolist() == [[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]]
    group_B = torch.zeros(1)
    whole_BT = gae(returns_BT, mask_BT, group_B, values_BT=torch.zeros(1, 6), gamma=1.0, lam=1.0)
    assert whole_BT.tolist() == [[1.0, 1.0, 0.0, 0.0, 1.0, 1.0]]
    discounted_BT = gae(returns_BT, mask_BT, group_B, values_BT=torch.zeros(1, 6), gamma=0.5, lam=1.0)
    assert discounted_BT.tolist() == [[0.125, 0.25, 0.0, 0.0, 0.5, 1.0]]


def test_a_total_cost_is_a_cost_of_the_last_token():
    returns_BT = returns_with_costs(torch.ones(3).double(), torch.full((3, 5), 0.3).double(), 5)
    expected_BT = torch.zeros(3, 5).double()
    for row, size in enumerate(SIZES):
        expected_BT[row, size - 1] = 0.7
    assert torch.allclose(token_rewards(returns_BT, MASK_BT), expected_BT)


def test_gae_without_values_asks_for_a_value_head():
    """As the oracle, which has none."""
    with pytest.raises(UserError, match="value head"):
        gae(grid([0.0] * 15), MASK_BT, GROUP_B)


# --- the critic -----------------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(values=FIFTEEN, olds=FIFTEEN, targets=FIFTEEN, clip=st.floats(0.05, 1.0))
def test_the_clipped_value_loss_is_the_larger_of_two_and_counts_where_it_is_silent(values, olds, targets, clip):
    value_BT = grid(values).requires_grad_(True)
    old_BT = grid(olds)
    target_BT = grid(targets)
    loss_BT, silent_BT = value_loss(value_BT, old_BT, target_BT, clip)
    clipped_BT = torch.maximum(torch.minimum(grid(values), old_BT + clip), old_BT - clip)
    free_loss_BT = (grid(values) - target_BT) ** 2 / 2
    clipped_loss_BT = (clipped_BT - target_BT) ** 2 / 2
    assert torch.allclose(loss_BT, torch.maximum(free_loss_BT, clipped_loss_BT), atol=1e-12)
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), value_BT)
    assert not gradient_BT[silent_BT].any()


@settings(max_examples=60, deadline=None)
@given(values=FIFTEEN, olds=FIFTEEN, targets=FIFTEEN)
def test_the_value_loss_without_a_clip_is_half_the_squared_error(values, olds, targets):
    loss_BT, silent_BT = value_loss(grid(values), grid(olds), grid(targets), None)
    assert torch.equal(loss_BT, 0.5 * (grid(values) - grid(targets)).square())
    assert not silent_BT.any()


def explained_variance(value, target):
    experience = SimpleNamespace(mask_BT=torch.ones_like(value, dtype=torch.bool))
    micro = SimpleNamespace(experience=experience, old_value_BT=value, value_target_BT=target, empty=False)
    return critic_metrics([micro])["value/explained_variance"]


def test_a_fresh_value_head_is_zero():
    head = ValueHead(4, torch.device("cpu"))
    assert not head(torch.randn(9, 4), MASK_BT).any()


def test_a_value_head_learns_the_targets():
    torch.manual_seed(0)
    head = ValueHead(4, torch.device("cpu"))
    hidden_NH = torch.randn(9, 4)
    target_BT = torch.where(MASK_BT, torch.rand(3, 5), 0.0)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        loss_BT, _ = value_loss(head(hidden_NH, MASK_BT), target_BT, target_BT, None)
        loss_BT.sum().mul(0.5).backward()
        optimizer.step()
    values_BT = head(hidden_NH, MASK_BT).detach()
    assert explained_variance(values_BT[MASK_BT], target_BT[MASK_BT]) > 0.3


COUNTING = torch.tensor([0.0, 1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("value", "target", "expected"),
    [
        (COUNTING, COUNTING, 1.0),
        (torch.full((4,), 7.0), COUNTING, pytest.approx(0.0)),
        (-COUNTING, COUNTING, pytest.approx(-3.0)),
        (COUNTING, torch.ones(4), 0.0),
    ],
    ids=["the targets", "a constant", "the opposite", "targets without variance"],
)
def test_explained_variance_by_definition(value, target, expected):
    """1 - Var[target - value] / Var[target]."""
    assert explained_variance(value, target) == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.advantage=rloo", "algorithm.value.lam=0.9"],
            "algorithm.value: rloo has no value function",
        ),
        (
            ["algorithm.advantage=gae", "kl=[{estimator: k1, placement: reward, credit: own, baseline: before}]"],
            "kl.0.credit: got 'own'",
        ),
        (["algorithm.advantage=gea"], "algorithm.advantage: got 'gea'.*did you mean 'gae'"),
    ],
    ids=["values without a critic", "own credit", "misspelled"],
)
def test_a_critic_that_cannot_work_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        check_training(load_config(TINY, overrides))
