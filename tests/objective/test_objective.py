"""Advantages, policy losses and reductions against hand-written references."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kl_comedy.errors import UserError
from kl_comedy.objective import REDUCTIONS, returns_with_costs, sequence_weights
from kl_comedy.registry import ADVANTAGES, POLICY_LOSSES

GROUP_B = torch.tensor([0, 0, 0, 1, 1, 1])
REWARD_B = torch.tensor([1.0, 0.0, 0.5, 0.2, 0.2, 0.8], dtype=torch.float64)
MASK_BT = torch.arange(4)[None] < torch.tensor([4, 2, 3, 1, 4, 2])[:, None]


def advantage(name, returns_BT, group_B=GROUP_B):
    return ADVANTAGES.get(name).fn(returns_BT, MASK_BT, group_B)


def flat(reward_B):
    return returns_with_costs(reward_B, None, 4)


def test_rloo_is_leave_one_out():
    # The reward of each completion less the mean of the two others of its group.
    expected = [1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5, 0.2 - 0.5, 0.2 - 0.5, 0.8 - 0.2]
    assert torch.allclose(advantage("rloo", flat(REWARD_B))[:, 0], torch.tensor(expected, dtype=torch.float64))


def test_rloo_baseline_of_a_sample_does_not_depend_on_it():
    returns_BT = flat(REWARD_B).clone().requires_grad_(True)
    baseline_BT = returns_BT - advantage("rloo", returns_BT)
    (gradient_BT,) = torch.autograd.grad(baseline_BT[1].sum(), returns_BT)
    assert torch.all(gradient_BT[1] == 0)
    assert torch.any(gradient_BT[0] != 0), "it does depend on the others of the group"


def test_dr_grpo_is_rloo_times_one_minus_one_over_group_size():
    assert torch.allclose(advantage("dr_grpo", flat(REWARD_B)), advantage("rloo", flat(REWARD_B)) * (2 / 3))


def test_grpo_divides_by_the_groups_sample_deviation():
    first_group = REWARD_B[:3]
    expected = (first_group - first_group.mean()) / (first_group.std() + 1e-6)
    assert torch.allclose(advantage("grpo", flat(REWARD_B))[:3, 0], expected)


def test_grpo_is_zero_where_all_rewards_of_a_group_are_equal():
    assert torch.equal(advantage("grpo", flat(torch.ones(6))), torch.zeros(6, 4))


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_reinforce_pp_is_white_over_tokens(name):
    values = advantage(name, flat(REWARD_B))[MASK_BT]
    assert abs(float(values.mean())) < 1e-12
    assert float(values.std(correction=0)) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("name", ["rloo", "grpo"])
def test_a_group_of_one_is_refused(name):
    with pytest.raises(UserError, match="group_size"):
        advantage(name, flat(REWARD_B), torch.arange(6))


@pytest.mark.parametrize("name", ["rloo", "dr_grpo", "grpo", "batch_mean"])
def test_interleaved_groups_give_the_same_as_sorted_ones(name):
    order = torch.tensor([3, 0, 4, 1, 5, 2])
    assert torch.allclose(
        advantage(name, flat(REWARD_B))[order], advantage(name, flat(REWARD_B[order]), GROUP_B[order])
    )


@given(scale=st.floats(0.1, 5.0))
def test_a_cost_to_go_enters_each_column(scale):
    cost_BT = scale * torch.arange(24, dtype=torch.float64).reshape(6, 4)
    advantage_BT = advantage("rloo", returns_with_costs(REWARD_B, cost_BT, 4))
    for token in range(4):
        of_the_token = advantage("rloo", flat(REWARD_B - cost_BT[:, token]))[:, 0]
        assert torch.allclose(advantage_BT[:, token], of_the_token)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@given(lengths=st.lists(st.integers(1, 6), min_size=2, max_size=9), cut=st.integers(1, 8), seed=st.integers(0, 99))
def test_micro_batches_add_up_to_the_full_batch(reduction, lengths, cut, seed):
    mask_BT = torch.arange(6)[None] < torch.tensor(lengths)[:, None]
    loss_BT = torch.randn(mask_BT.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * mask_BT
    weight_B = sequence_weights(reduction, mask_BT, constant=5.0).double()
    sum_of_parts = 0.0
    for part_weight_B, part_loss_BT in zip(weight_B.split(cut), loss_BT.split(cut), strict=True):
        sum_of_parts += float((part_weight_B * part_loss_BT.sum(-1)).sum())
    length_B = torch.tensor(lengths, dtype=torch.float64)
    full_batch = {
        "token_mean": loss_BT.sum() / length_B.sum(),
        "sequence_mean_token_mean": (loss_BT.sum(-1) / length_B).mean(),
        "sequence_sum": loss_BT.sum(-1).mean() / 5.0,
    }
    assert sum_of_parts == pytest.approx(float(full_batch[reduction]), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_dropped_sequences_leave_the_denominator(reduction):
    keep_B = torch.tensor([True, False, True, True, False, True])
    weight_B = sequence_weights(reduction, MASK_BT, keep_B=keep_B)
    assert torch.all(weight_B[~keep_B] == 0)
    assert torch.allclose(weight_B[keep_B], sequence_weights(reduction, MASK_BT[keep_B]))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_where_every_sequence_is_dropped_all_weights_are_zero(reduction):
    """And not NaN, of 0 / 0."""
    assert torch.equal(sequence_weights(reduction, MASK_BT, keep_B=torch.zeros(6)), torch.zeros(6))


@pytest.mark.parametrize("name", ["reinforce", "ppo_clip"])
def test_at_ratio_one_the_gradient_is_the_score_function(name):
    logp_BT = torch.randn(6, 4, requires_grad=True)
    advantage_BT = torch.randn(6, 4)
    POLICY_LOSSES.get(name).fn(logp_BT, logp_BT.detach(), advantage_BT).sum().backward()
    assert torch.allclose(logp_BT.grad, -advantage_BT)


# The two bounds differ, so that swapped bounds fail.
BOUNDS = {"clip_low": 0.1, "clip_high": 0.4}
OPTIONS = {"ppo_clip": BOUNDS, "gspo": BOUNDS, "cispo": BOUNDS, "aipo": {"cap": 1.4}}
# (ratio, sign of the advantage, weight of the score). A weight that is not the ratio is a bound that acts.
CLIPPED = [(1.3, 1, 1.3), (1.5, 1, 0.0), (1.5, -1, 1.5), (0.8, 1, 0.8), (0.8, -1, 0.0), (0.95, -1, 0.95)]
WEIGHTS = {
    "ppo_clip": CLIPPED,
    "gspo": CLIPPED,
    "cispo": [(1.3, 1, 1.3), (1.5, 1, 1.4), (1.5, -1, 1.4), (0.8, 1, 0.9), (0.95, -1, 0.95)],
    "aipo": [(1.3, 1, 1.3), (1.5, 1, 1.4), (1.5, -1, 1.4), (0.2, 1, 0.2)],
}


@pytest.mark.parametrize(
    ("name", "ratio", "sign", "weight"), [(name, *row) for name, rows in WEIGHTS.items() for row in rows]
)
def test_bounds_act_on_their_side_of_the_ratio(name, ratio, sign, weight):
    entry = POLICY_LOSSES.get(name)
    options = dict(OPTIONS[name])
    if entry.facts["scope"] == "sequence":
        options["mask_BT"] = torch.ones(1, 1, dtype=torch.bool)
    logp_BT = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    behaviour_logp_BT = -torch.tensor([[ratio]], dtype=torch.float64).log()
    advantage_BT = torch.tensor([[float(sign)]])
    entry.fn(logp_BT, behaviour_logp_BT, advantage_BT, **options).sum().backward()
    assert float(logp_BT.grad) == pytest.approx(-sign * weight)
    bound_acts = bool(entry.facts["bounded"](logp_BT, behaviour_logp_BT, advantage_BT, **options))
    assert bound_acts == (weight != ratio)
