"""The ranges of `certify --range`, against loops over completions with autograd, in float64."""

import pytest
import torch

import brute
from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree
from kl_comedy.kl.oracle import ranges as module
from kl_comedy.kl.oracle.certificate import certify
from kl_comedy.kl.oracle.ranges import drawn_policies, kl_per_prefix, ranges
from kl_comedy.kl.oracle.trajectory import sampled_by_an_older_policy

K3 = KLTerm("k3", placement="loss")


class Loops:
    """Sums over completions and prefixes of an instance, one by one."""

    def __init__(self, instance):
        self.instance = instance
        self.theta_D = instance.theta_D.clone().requires_grad_(True)
        logits_NV = torch.stack([features_VD @ self.theta_D for features_VD in instance.features_NVD])
        self.pi = logits_NV - logits_NV.logsumexp(-1, keepdim=True)
        self.ref = instance.ref_logp_NV
        self.number = {prefix: n for n, prefix in enumerate(brute.prefixes(instance.tree))}
        self.completions = brute.completions(instance.tree)

    def logp(self, table, tokens):
        return sum(table[self.number[tokens[:t]], token] for t, token in enumerate(tokens))

    def gradient(self, value):
        (gradient_D,) = torch.autograd.grad(value, self.theta_D, retain_graph=True)
        return gradient_D

    def reverse_kl(self):
        """``KL(pi || ref)`` over completions, whose gradient error and strength are measured against."""
        return sum(
            self.logp(self.pi, y).exp() * (self.logp(self.pi, y) - self.logp(self.ref, y)) for y in self.completions
        )

    def moments(self, of_token):
        """Mean and trace variance of a completion's gradient, a sum over its tokens, under the sampler."""
        weights, gradients = [], []
        for y in self.completions:
            loss = sum(of_token(self.number[y[:t]], token) for t, token in enumerate(y))
            weights.append(self.logp(self.instance.sampler_logp_NV, y).exp())
            gradients.append(self.gradient(loss))
        weight_B = torch.stack(weights)
        gradient_BD = torch.stack(gradients)
        mean_D = weight_B @ gradient_BD
        return mean_D, float(weight_B @ (gradient_BD - mean_D).square().sum(-1))

    def k3(self, n, token):
        log_ratio = self.pi[n, token] - self.ref[n, token]
        return (-log_ratio).exp() - 1 + log_ratio

    def forward_kl(self, n, _):
        return (self.ref[n].exp() * (self.ref[n] - self.pi[n])).sum()


@pytest.mark.parametrize("regime", ["on_policy", "off_policy"])
def test_error_strength_and_noise_are_those_of_loops(regime, monkeypatch):
    monkeypatch.setattr(module, "POLICIES", 2)
    drawn_policies.cache_clear()
    (certificate,) = certify("k3", [K3], regimes=[regime])
    result = ranges(certificate, drawn_policies(regime, 7))
    errors, strengths, noises, distances = [], [], [], []
    policies = drawn_policies(regime, 7)
    assert [policy.tree.vocabulary for policy in policies] == [4, 8]
    for instance in policies:
        loops = Loops(instance)
        target_D = loops.gradient(loops.reverse_kl())
        mean_D, variance = loops.moments(loops.k3)
        errors.append(float((mean_D - target_D).norm() / target_D.norm()))
        strengths.append(float(mean_D @ target_D / target_D.square().sum()))
        # The one unbiased term for the forward KL of each prefix; on stale samples no target is hit.
        noises.append(variance / loops.moments(loops.forward_kl)[1])
        distances.append(float((loops.pi.exp() * (loops.pi - loops.ref)).sum(-1).mean().detach()))
    for span, values in ((result.error, errors), (result.strength, strengths), (result.kl_per_prefix, distances)):
        assert span == pytest.approx((min(values), sum(values) / 2, max(values)), rel=1e-9)
    if regime == "on_policy":
        assert result.noise == pytest.approx((min(noises), sum(noises) / 2, max(noises)), rel=1e-9)
    drawn_policies.cache_clear()


def test_policies_are_half_of_each_vocabulary_and_the_same_for_a_seed():
    policies = drawn_policies("off_policy", 0)
    assert len(policies) == 50
    assert [policy.tree.vocabulary for policy in policies] == [4, 8] * 25
    again = drawn_policies.__wrapped__("off_policy", 0)
    assert all(torch.equal(a.theta_D, b.theta_D) for a, b in zip(policies, again, strict=True))
    assert not torch.equal(policies[0].theta_D, drawn_policies.__wrapped__("off_policy", 1)[0].theta_D)
    # Near the reference and far from it.
    distances = [kl_per_prefix(policy) for policy in policies]
    assert min(distances) < 0.005
    assert max(distances) > 0.1


def versions_by_hand(start, updates, rate):
    """Adam's update written out, on the expected reward as a sum over completions."""
    tree = start.tree
    number = {prefix: n for n, prefix in enumerate(brute.prefixes(tree))}
    theta_D = start.theta_D.clone()
    mean_D, square_D = torch.zeros_like(theta_D), torch.zeros_like(theta_D)
    versions = [theta_D]
    for update in range(1, updates + 1):
        leaf_D = theta_D.clone().requires_grad_(True)
        reward = 0.0
        for y in brute.completions(tree):
            log_prob = 0.0
            for t, token in enumerate(y):
                logits_V = start.features_NVD[number[y[:t]]] @ leaf_D
                log_prob = log_prob + logits_V[token] - logits_V.logsumexp(0)
            ended = y[-1] == 0
            reward = reward + log_prob.exp() * start.reward_N2[number[y[:-1]], 0 if ended else 1]
        (gradient_D,) = torch.autograd.grad(reward, leaf_D)
        mean_D = 0.9 * mean_D + 0.1 * gradient_D
        square_D = 0.999 * square_D + 0.001 * gradient_D**2
        size_D = (square_D / (1 - 0.999**update)).sqrt() + 1e-8
        theta_D = theta_D + rate * mean_D / (1 - 0.9**update) / size_D
        versions.append(theta_D)
    return versions


@pytest.mark.parametrize("age", [1, 3])
def test_an_old_sampler_is_the_policy_some_updates_before(age):
    tree = Tree.build(vocabulary=3, length=2)
    start = Instance.random(tree, InstanceSettings(regime="on_policy", seed=5, parameters=4))
    versions = versions_by_hand(start, updates=3, rate=0.1)
    trained = sampled_by_an_older_policy(start, age=age, updates=3, lr=0.1)
    torch.testing.assert_close(trained.theta_D, versions[3], rtol=1e-9, atol=1e-12)
    for table_NV, version in ((trained.ref_logp_NV, 0), (trained.sampler_logp_NV, 3 - age)):
        logits_NV = start.features_NVD @ versions[version]
        torch.testing.assert_close(table_NV, logits_NV.log_softmax(-1), rtol=1e-9, atol=1e-12)
    assert torch.equal(trained.recorded_logp_NV, trained.sampler_logp_NV)
