"""Policies that arise by training: updates of Adam on the exact expected reward of an instance, in float64.

A sampler that is some updates old differs from the policy in the direction of training. Drawn noise does not.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kl_comedy.kl.oracle.enumeration import Instance, log_probs


def train_on_reward(instance: Instance, *, updates: int, lr: float) -> Tensor:
    """The parameters ``[updates + 1, D]`` before the first update and after each one."""
    tree = instance.tree
    reward_B = instance.rows(tree.all).reward_B
    theta_D = instance.theta_D.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([theta_D], lr=lr, maximize=True)
    versions = [theta_D.detach().clone()]
    for _ in range(updates):
        optimizer.zero_grad()
        # The mean over all completions, so that no noise of sampling is in the path.
        probability_B = log_probs(tree.all, instance.policy_logp(theta_D)).sum(-1).exp()
        (probability_B @ reward_B).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        versions.append(theta_D.detach().clone())
    return torch.stack(versions)


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
