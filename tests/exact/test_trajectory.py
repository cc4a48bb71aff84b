"""Policies that arise by training, and the moving average of their parameters, against first-order arithmetic."""

import pytest
import torch

from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree
from kl_comedy.kl.oracle.trajectory import moving_average, train_on_reward

TREE = Tree.build(vocabulary=3, length=2)


def start(seed):
    return Instance.random(TREE, InstanceSettings(regime="on_policy", seed=seed, parameters=4))


def kl_gradient(instance, theta_D, reference_D):
    """The gradient of ``KL(pi, ref)`` over completions, by autograd through each completion's probability."""
    leaf_D = theta_D.clone().requires_grad_(True)
    logp_NV = instance.policy_logp(leaf_D)
    ref_logp_NV = instance.policy_logp(reference_D)
    completions = TREE.all
    mask_BT = completions.mask_BT

    def log_prob(table_NV):
        return (table_NV[completions.prefix_BT, completions.token_BT] * mask_BT).sum(-1)

    kl = (log_prob(logp_NV).exp() * (log_prob(logp_NV) - log_prob(ref_logp_NV))).sum()
    return torch.autograd.grad(kl, leaf_D)[0]


@pytest.mark.parametrize("age", [1, 4])
def test_on_a_straight_path_an_old_policy_and_an_average_pull_alike_to_first_order(age):
    instance = start(2)
    direction_D = torch.tensor([1.0, -2.0, 0.5, 1.5], dtype=torch.float64)
    errors = []
    for step in (1e-2, 1e-3):
        # Long enough that the average has forgotten its first version.
        theta_UD = torch.stack([instance.theta_D + step * update * direction_D for update in range(-200, 1)])
        old_D = kl_gradient(instance, theta_UD[-1], theta_UD[-1 - age])
        average_D = kl_gradient(instance, theta_UD[-1], moving_average(theta_UD, age / (age + 1)))
        errors.append(float((average_D - old_D).norm() / old_D.norm()))
    # What is left is of second order: ten times the step, about ten times the error.
    assert errors[1] < 0.02
    assert errors[1] < errors[0] / 5 or errors[0] < 1e-6


def test_many_samples_step_as_the_sum_over_all_completions():
    instance = start(3)
    exact_UD = train_on_reward(instance, updates=3, lr=0.05)
    sampled_UD = train_on_reward(instance, updates=3, lr=0.05, samples=200_000, seed=1)
    torch.testing.assert_close(sampled_UD, exact_UD, rtol=0, atol=0.01)
    few_UD = train_on_reward(instance, updates=3, lr=0.05, samples=2, seed=1)
    assert float((few_UD - exact_UD).abs().max()) > 0.01
