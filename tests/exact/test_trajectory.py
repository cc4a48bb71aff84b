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


def fisher(instance):
    """The Fisher matrix ``[D, D]`` of whole completions: the mean of the outer product of their scores, in a loop."""
    completions = TREE.all
    size = len(instance.theta_D)
    matrix_DD = torch.zeros(size, size, dtype=torch.float64)
    for tokens, prefixes, mask in zip(completions.token_BT, completions.prefix_BT, completions.mask_BT, strict=True):
        leaf_D = instance.theta_D.clone().requires_grad_(True)
        log_prob = (instance.policy_logp(leaf_D)[prefixes, tokens] * mask).sum()
        (score_D,) = torch.autograd.grad(log_prob, leaf_D)
        matrix_DD += log_prob.detach().exp() * torch.outer(score_D, score_D)
    return matrix_DD


def path_to(end_D, steps_UD):
    """The parameters ``[U + 1, D]`` before and after each of these steps, of which the last ends at ``end_D``."""
    before_UD = torch.cat([torch.zeros_like(end_D)[None], steps_UD]).cumsum(0)
    return end_D + before_UD - before_UD[-1]


def cosine_and_ratio(instance, theta_UD, age, decay):
    """Of the gradient to the moving average and that to the policy ``age`` updates ago."""
    old_D = kl_gradient(instance, theta_UD[-1], theta_UD[-1 - age])
    average_D = kl_gradient(instance, theta_UD[-1], moving_average(theta_UD, decay))
    return float(old_D @ average_D / (old_D.norm() * average_D.norm())), float(average_D.norm() / old_D.norm())


@pytest.mark.parametrize("shrink", [0.95, 1.0, 1.05])
def test_where_steps_shrink_another_decay_matches(shrink):
    """Each step is ``shrink`` times the one before. Then the step of j updates ago is ``shrink ** -j`` of the last, so
    the old policy is away by ``S = sum_{j < D} shrink^-j`` last steps, the average by ``d / (1 - d / shrink)``."""
    instance = start(2)
    direction_D = torch.tensor([1.0, -2.0, 0.5, 1.5], dtype=torch.float64)
    age = 4
    # The last step has the same length in all cases; 200 updates are enough for the average to forget its first.
    sizes_U = torch.tensor([shrink**-j for j in reversed(range(200))], dtype=torch.float64)
    theta_UD = path_to(instance.theta_D, 1e-6 * sizes_U[:, None] * direction_D)
    away = sum(shrink**-j for j in range(age))
    cosine, ratio = cosine_and_ratio(instance, theta_UD, age, away / (1 + away / shrink))
    assert cosine == pytest.approx(1, abs=1e-3)
    assert ratio == pytest.approx(1, abs=1e-2)
    _, with_alike_steps = cosine_and_ratio(instance, theta_UD, age, age / (age + 1))
    alike_decay = age / (age + 1)
    assert with_alike_steps == pytest.approx(alike_decay / (1 - alike_decay / shrink) / away, rel=1e-2)


@pytest.mark.parametrize("age", [1, 2])
def test_where_steps_have_nothing_to_do_with_each_other_no_decay_matches(age):
    """Steps whose gradients are orthogonal and of one size: the old policy's is the sum of D, the average's of all,
    each times ``d^j``, so that only the D that both have count in their product."""
    instance = start(0)
    size = len(instance.theta_D)
    # Steps F^-1 e_i, whose gradients are e_i.
    steps_UD = 1e-6 * torch.linalg.inv(fisher(instance))
    theta_UD = path_to(instance.theta_D, steps_UD)
    decay = age / (age + 1)
    weights = [decay**j for j in range(1, size + 1)]
    norm = sum(weight**2 for weight in weights) ** 0.5
    cosine, ratio = cosine_and_ratio(instance, theta_UD, age, decay)
    assert cosine == pytest.approx(sum(weights[:age]) / (norm * age**0.5), rel=1e-3)
    assert ratio == pytest.approx(norm / age**0.5, rel=1e-3)
    assert cosine < 0.91


def test_sgd_steps_along_the_gradient():
    instance = start(3)
    theta_UD = train_on_reward(instance, updates=1, lr=0.5, optimizer_class=torch.optim.SGD)
    # The mean reward, by finite differences.
    slopes = []
    for unit_D in torch.eye(len(instance.theta_D), dtype=torch.float64):
        ends = []
        for sign in (1.0, -1.0):
            logp_NV = instance.policy_logp(instance.theta_D + sign * 1e-5 * unit_D)
            completions = TREE.all
            log_prob_B = (logp_NV[completions.prefix_BT, completions.token_BT] * completions.mask_BT).sum(-1)
            ends.append(float(log_prob_B.exp() @ instance.rows(completions).reward_B))
        slopes.append((ends[0] - ends[1]) / 2e-5)
    torch.testing.assert_close(theta_UD[1] - theta_UD[0], 0.5 * torch.tensor(slopes, dtype=torch.float64))
