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


@settings(max_examples=60, deadline=None)
@given(costs=FIFTEEN, values=FIFTEEN, gamma=UNIT, lam=UNIT, last=st.lists(st.floats(-1, 1), min_size=3, max_size=3))
def test_it_is_the_discounted_sum_of_temporal_differences(costs, values, gamma, lam, last):
    """1506.02438 Eq. 16, summed term by term. The KL cost of a token is a reward of that token."""
    reward_B, last_B = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64), torch.tensor(last, dtype=torch.float64)
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
        r = [-grid(costs)[row, t].item() + (reward_B[row].item() if t == size - 1 else 0.0) for t in range(size)]
        v = [*grid(values)[row, :size].tolist(), last_B[row].item()]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(size)]
        expected = [sum((gamma * lam) ** n * delta[t + n] for n in range(size - t)) for t in range(size)]
        assert advantage_BT[row, :size].tolist() == pytest.approx(expected, abs=1e-9)
        assert not advantage_BT[row, size:].any()


@settings(max_examples=60, deadline=None)
@given(costs=FIFTEEN, values=FIFTEEN)
def test_with_lambda_one_it_is_the_return_to_go_less_the_value(costs, values):
    returns_BT = returns_of(torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64), grid(costs))
    advantage_BT = gae(returns_BT, MASK_BT, GROUP_B, values_BT=grid(values), gamma=1.0, lam=1.0)
    assert torch.allclose(advantage_BT, torch.where(MASK_BT, returns_BT - grid(values), 0.0), atol=1e-12)


def test_with_lambda_zero_it_is_one_temporal_difference():
    values_BT = grid([0.5] * 15)
    advantage_BT = gae(
        returns_of(torch.ones(3).double(), grid([0.1] * 15)), MASK_BT, GROUP_B, values_BT=values_BT, lam=0.0
    )
    assert advantage_BT[0].tolist() == pytest.approx([-0.1] * 4 + [0.4])


@pytest.mark.parametrize(
    ("term", "shift"),
    [
        (KLTerm("k1", placement="reward", credit="to_go", baseline="before"), 0),
        (KLTerm("exact", placement="reward", credit="to_go", baseline="before"), 1),
    ],
    ids=["k1", "exact"],
)
def test_a_kl_term_before_the_baseline_is_a_cost_of_its_token(term, shift):
    """k1 costs the token it is of; an exact KL costs the token that led to its prefix (its own step is a loss)."""
    logp_BT, ref_BT = grid([-0.1 * n for n in range(15)]), grid([-0.2 * n + 0.05 for n in range(15)])
    exact_BT = torch.where(MASK_BT, grid([0.01 * n for n in range(15)]), 0.0)
    cost_BT = kl_parts(
        term, logp_BT=logp_BT, ref_logp_BT=ref_BT, behaviour_logp_BT=logp_BT, mask_BT=MASK_BT, exact_kl_BT=exact_BT
    ).cost_BT
    rewards_BT = token_rewards(returns_with_costs(torch.zeros(3).double(), cost_BT, 5), MASK_BT)
    own_BT = torch.where(MASK_BT, exact_BT if shift else logp_BT - ref_BT, 0.0)
    expected_BT = torch.nn.functional.pad(-own_BT[:, shift:], (0, shift))
    assert torch.allclose(rewards_BT, torch.where(MASK_BT, expected_BT, 0.0), atol=1e-12)


def test_a_total_cost_is_a_cost_of_the_last_token():
    returns_BT = returns_with_costs(torch.ones(3).double(), torch.full((3, 5), 0.3).double(), 5)
    expected_BT = torch.zeros(3, 5).double()
    expected_BT[[0, 1, 2], [4, 2, 0]] = 0.7
    assert torch.allclose(token_rewards(returns_BT, MASK_BT), expected_BT)


def test_the_oracle_and_others_without_values_are_told():
    with pytest.raises(UserError, match="value head"):
        gae(grid([0.0] * 15), MASK_BT, GROUP_B)


# --- the critic -----------------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(values=FIFTEEN, olds=FIFTEEN, targets=FIFTEEN, clip=st.floats(0.05, 1.0))
def test_the_clipped_value_loss_is_the_larger_of_two_and_counts_where_it_is_silent(values, olds, targets, clip):
    value_BT = grid(values).requires_grad_(True)
    loss_BT, silent_BT = value_loss(value_BT, grid(olds), grid(targets), clip)
    clipped_BT = torch.maximum(torch.minimum(grid(values), grid(olds) + clip), grid(olds) - clip)
    free_BT, other_BT = (grid(values) - grid(targets)) ** 2 / 2, (clipped_BT - grid(targets)) ** 2 / 2
    assert torch.allclose(loss_BT, torch.maximum(free_BT, other_BT), atol=1e-12)
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), value_BT)
    assert not gradient_BT[silent_BT].any()
    loss_BT, silent_BT = value_loss(grid(values), grid(olds), grid(targets), None)
    assert torch.equal(loss_BT, 0.5 * (grid(values) - grid(targets)).square()) and not silent_BT.any()


def explained_variance(value, target):
    experience = SimpleNamespace(mask_BT=torch.ones_like(value, dtype=torch.bool))
    micro = SimpleNamespace(experience=experience, old_value_BT=value, value_target_BT=target, empty=False)
    return critic_metrics([micro])["value/explained_variance"]


def test_a_fresh_value_head_is_zero_and_learns_the_targets():
    torch.manual_seed(0)
    head = ValueHead(4, torch.device("cpu"))
    hidden_NH, target_BT = torch.randn(9, 4), torch.where(MASK_BT, torch.rand(3, 5), 0.0)
    assert not head(hidden_NH, MASK_BT).any()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        value_loss(head(hidden_NH, MASK_BT), target_BT, target_BT, None)[0].sum().mul(0.5).backward()
        optimizer.step()
    assert explained_variance(head(hidden_NH, MASK_BT)[MASK_BT].detach(), target_BT[MASK_BT]) > 0.3


def test_explained_variance_by_definition():
    target = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(target, target) == 1.0
    assert explained_variance(torch.full((4,), 7.0), target) == pytest.approx(0.0)
    assert explained_variance(-target, target) == pytest.approx(-3.0)
    assert explained_variance(target, torch.ones(4)) == 0.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["algorithm.advantage=rloo", "algorithm.advantage_options.lam=0.9"],
            "algorithm.advantage_options: rloo has no value function",
        ),
        (
            ["algorithm.advantage=gae", "kl=[{estimator: k1, placement: reward, credit: own, baseline: before}]"],
            "kl.0.credit: got 'own'",
        ),
        (["algorithm.advantage=gea"], "algorithm.advantage: got 'gea'.*did you mean 'gae'"),
    ],
)
def test_a_critic_that_cannot_work_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        check_training(load_config(TINY, words))
