"""Policies that arise by training: updates of Adam or SGD on the expected reward of an instance, in float64.

A sampler that is some updates old differs from the policy in the direction of training. Drawn noise does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from kl_comedy.kl.oracle.enumeration import Instance, log_probs


def train_on_reward(
    instance: Instance,
    *,
    updates: int,
    lr: float,
    samples: int | None = None,
    seed: int = 0,
    optimizer_class: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
) -> Tensor:
    """The parameters ``[updates + 1, D]`` before the first update and after each one.

    ``samples``: completions that each update draws, their mean reward as the baseline; None sums over all completions.
    """
    tree = instance.tree
    generator = torch.Generator().manual_seed(seed)
    theta_D = instance.theta_D.clone().requires_grad_(True)
    optimizer = optimizer_class([theta_D], lr=lr, maximize=True)
    versions = [theta_D.detach().clone()]
    for _ in range(updates):
        optimizer.zero_grad()
        logp_NV = instance.policy_logp(theta_D)
        if samples is None:
            probability_B = log_probs(tree.all, logp_NV).sum(-1).exp()
            objective = probability_B @ instance.rows(tree.all).reward_B
        else:
            completions = tree.sample(logp_NV.detach(), samples, generator)
            reward_B = instance.rows(completions).reward_B
            advantage_B = reward_B - reward_B.mean()
            objective = (advantage_B * log_probs(completions, logp_NV).sum(-1)).mean()
        objective.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        versions.append(theta_D.detach().clone())
    return torch.stack(versions)


def moving_average(theta_UD: Tensor, decay: float) -> Tensor:
    """The exponential moving average ``[D]`` of the parameters, from the first version on."""
    average_D = theta_UD[0]
    for theta_D in theta_UD[1:]:
        average_D = decay * average_D + (1 - decay) * theta_D
    return average_D


def sampled_by_an_older_policy(instance: Instance, *, age: int, updates: int, lr: float) -> Instance:
    """The instance after ``updates`` updates: its start is the reference, and its policy ``age`` before the sampler."""
    theta_UD = train_on_reward(instance, updates=updates, lr=lr)
    sampler_logp_NV = instance.policy_logp(theta_UD[-1 - age])
    return dataclasses.replace(
        instance,
        theta_D=theta_UD[-1],
        ref_logp_NV=instance.policy_logp(theta_UD[0]),
        sampler_logp_NV=sampler_logp_NV,
        recorded_logp_NV=sampler_logp_NV,
    )
