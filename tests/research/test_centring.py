"""The prediction of block 3: its gradient, against a sum over completions with scores from finite differences."""

import dataclasses

import pytest
import torch
from research.studies.centring import ARMS, BETA, RATIO_BOUND, STEPS, Tables, loss, train

TABLES = Tables.random(1, length=3, features=5)


def slow_gradient(theta_D, sampler_D, arm):
    """Expected gradient, completion by completion; scores and the KL's gradient by central differences."""
    completions = TABLES.completions

    def logp(theta_D):
        return TABLES.logp(theta_D[None])[0]

    def gradient(function):
        eye_DD = torch.eye(len(theta_D), dtype=torch.float64) * 1e-5
        return torch.stack([(function(theta_D + step_D) - function(theta_D - step_D)) / 2e-5 for step_D in eye_DD])

    policy, sampler, reference = logp(theta_D), logp(sampler_D), logp(TABLES.initial_WD[0])

    def kl(theta_D, n):
        own = logp(theta_D)[n]
        return sum(own[v].exp() * (own[v] - reference[n, v]) for v in range(2))

    prefixes = completions.prefix_BT.tolist()
    tokens = completions.token_BT.tolist()
    paths = [list(zip(*steps, strict=True)) for steps in zip(prefixes, tokens, strict=True)]
    shares = [torch.exp(sum(sampler[n, v] for n, v in path)) for path in paths]
    rewards = TABLES.reward_WB[0]
    mean_reward = sum(share * reward for share, reward in zip(shares, rewards, strict=True))

    def cost(path, t):
        if arm.exact:
            return sum(kl(theta_D, n) for n, _ in path[t + 1 :])
        return sum(policy[n, v] - reference[n, v] for n, v in path[t:])

    total_D = torch.zeros_like(theta_D)
    for share, path, reward in zip(shares, paths, rewards, strict=True):
        for t, (n, v) in enumerate(path):
            mean_cost = sum(p * cost(other, t) for p, other in zip(shares, paths, strict=True))
            score_D = gradient(lambda theta_D, n=n, v=v: logp(theta_D)[n, v])
            kl_score_D = score_D
            if arm.centred_score:
                scores = [gradient(lambda theta_D, n=n, w=w: logp(theta_D)[n, w]) for w in range(2)]
                kl_score_D = score_D - sum(sampler[n, w].exp() * scores[w] for w in range(2))
            ratio = (policy[n, v] - sampler[n, v]).exp().clamp(max=RATIO_BOUND)
            total_D -= share * ratio * (reward - mean_reward) * score_D
            total_D += share * arm.beta * (cost(path, t) - arm.c * mean_cost) * kl_score_D
            if arm.exact:
                total_D += share * arm.beta * gradient(lambda theta_D, n=n: kl(theta_D, n))
    return total_D


@pytest.mark.parametrize("name", ["none", "exact-c0", "exact-c0.5", "exact-score", "k1-c1"])
def test_gradient_is_the_expectation_over_completions(name):
    generator = torch.Generator().manual_seed(1)
    theta_WD = TABLES.initial_WD + torch.randn(1, 5, generator=generator, dtype=torch.float64)
    sampler_WD = TABLES.initial_WD + torch.randn(1, 5, generator=generator, dtype=torch.float64)
    # A beta of 1 makes an error of the KL part as visible as one of the reward part.
    arm = ARMS[name]
    if name != "none":
        assert arm.beta == BETA
        arm = dataclasses.replace(arm, beta=1.0)
    theta_WD.requires_grad_(True)
    loss(TABLES, theta_WD, sampler_WD, arm).backward()
    expected_D = slow_gradient(theta_WD[0].detach(), sampler_WD[0], arm)
    torch.testing.assert_close(theta_WD.grad[0], expected_D, rtol=1e-6, atol=1e-8)


def test_samples_are_as_old_as_the_lag():
    """With SGD the first update that differs from on-policy training is the second, and lag 1 is used from there on."""
    step = STEPS["sgd"][0]
    fresh = train(TABLES, ARMS["exact-c0"], lag=0, optimizer="sgd", step=step, updates=3)
    stale = train(TABLES, ARMS["exact-c0"], lag=1, optimizer="sgd", step=step, updates=3)
    oldest = train(TABLES, ARMS["exact-c0"], lag=9, optimizer="sgd", step=step, updates=3)
    torch.testing.assert_close(fresh.kl[:2], stale.kl[:2], rtol=0, atol=0)
    assert not torch.equal(fresh.kl[2], stale.kl[2])
    torch.testing.assert_close(stale.kl[:3], oldest.kl[:3], rtol=0, atol=0)
    assert not torch.equal(stale.kl[3], oldest.kl[3])
