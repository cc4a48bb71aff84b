"""The master table of KL configurations, one test per row: what each descends, to 1e-10, on- and off-policy.

``G`` is the gradient of the sequence-level reverse KL, ``PARTIAL`` that of the reverse KL of each visited prefix
with the visits held fixed, ``FKL`` the same of the forward KL. Sizes (bias, variance) belong to an instance;
where the table orders them, the order is asserted on the mean over instances.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import Setting, Tree, expected_gradient, log_probs, target_gradient

TREE = Tree.build(vocabulary=3, length=4)
INSTANCES = [(seed, parameters) for seed in (0, 1) for parameters in (None, 5)]


@dataclass(frozen=True)
class Facts:
    """The gradients that the table's right-hand sides are made of, at one setting; by autograd over all completions."""

    setting: Setting

    def of(self, target: str) -> torch.Tensor:
        return target_gradient(self.setting, target)

    @property
    def G(self) -> torch.Tensor:
        return self.of("sequence_reverse")

    @property
    def PARTIAL(self) -> torch.Tensor:
        return self.of("token_reverse")

    @property
    def FKL(self) -> torch.Tensor:
        return self.of("token_forward")

    @property
    def zero(self) -> torch.Tensor:
        return self.of("zero")

    def _gradient(self, scalar: Callable[..., torch.Tensor]) -> torch.Tensor:
        theta_D = self.setting.theta_D.clone().requires_grad_(True)
        logp_BT = log_probs(TREE, self.setting.policy_logp(theta_D))
        ref_BT = log_probs(TREE, self.setting.ref_logp_NV)
        return torch.autograd.grad(scalar(logp_BT, ref_BT, self.setting.behaviour_logp_BT), theta_D)[0]

    @cached_property
    def mean_of_k2(self) -> torch.Tensor:
        """grad E_pi[sum_t k2_t]."""
        return self._gradient(lambda p, q, m: (p.sum(-1).exp() * (0.5 * (p - q).square()).sum(-1)).sum())

    @cached_property
    def mean_of_k2_on_fixed_prefixes(self) -> torch.Tensor:
        """sum_t E_h[grad E_{y ~ pi(.|h)} k2], prefixes as the sampler visits them."""
        theta_D = self.setting.theta_D.clone().requires_grad_(True)
        logp_NV = self.setting.policy_logp(theta_D)
        mean_N = (logp_NV.exp() * 0.5 * (logp_NV - self.setting.ref_logp_NV).square()).sum(-1)
        return torch.autograd.grad(TREE.reach(self.setting.sampler_logp_NV) @ mean_N, theta_D)[0]

    @cached_property
    def to_sampler(self) -> torch.Tensor:
        """grad KL(pi || mu)."""
        return self._gradient(lambda p, q, m: (p.sum(-1).exp() * (p.sum(-1) - m.sum(-1))).sum())

    @cached_property
    def from_sampler(self) -> torch.Tensor:
        """grad KL(mu || pi)."""
        return self._gradient(lambda p, q, m: (m.sum(-1).exp() * (m.sum(-1) - p.sum(-1))).sum())

    def weighted_score(self, coefficient: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """E_mu[sum_t c(l_t) s_t] with a coefficient of the detached log-ratio."""
        return self._gradient(
            lambda p, q, m: (m.sum(-1).exp() * (coefficient((p - q).detach()) * TREE.mask_BT * p).sum(-1)).sum()
        )

    @cached_property
    def on_policy(self) -> Setting:
        """The same policy and reference, sampled from the policy itself."""
        logp_NV = self.setting.policy_logp()
        return Setting(**{**_fields(self.setting), "sampler_logp_NV": logp_NV, "recorded_logp_NV": logp_NV})


def _fields(setting):
    return {name: getattr(setting, name) for name in Setting.__dataclass_fields__}


def reward(estimator, credit="total", **more):
    return KLTerm(estimator, placement="reward", credit=credit, **more)


def loss(estimator, **more):
    return KLTerm(estimator, placement="loss", **more)


def expected(setting, *terms):
    return expected_gradient(setting, terms).gradient_D


def same(one, other):
    scale = max(float(one.norm()), float(other.norm()), 1.0)
    return float((one - other).norm()) <= 1e-10 * scale


# row of the table: the terms, and what they descend
ON_POLICY = {
    "K1 in reward, full return = G": ([reward("k1")], lambda f: f.G),
    "K1 in reward, reward-to-go = G": ([reward("k1", "to_go")], lambda f: f.G),
    "K1 in reward, own token only = PARTIAL": ([reward("k1", "own")], lambda f: f.PARTIAL),
    "K1 in loss = 0": ([loss("k1")], lambda f: f.zero),
    "K2 in loss, token = PARTIAL": ([loss("k2")], lambda f: f.PARTIAL),
    "K2 in loss, token = G less the future of K1": (
        [loss("k2"), reward("k1", "to_go"), reward("k1", "own", beta=-1.0)],
        lambda f: f.G,
    ),
    "K2 in loss, sequence = G": ([loss("k2", level="sequence")], lambda f: f.G),
    "K2 in reward = grad E[K2] - PARTIAL": ([reward("k2")], lambda f: f.mean_of_k2 - f.PARTIAL),
    "K3 in loss, token = FKL": ([loss("k3")], lambda f: f.FKL),
    "K3 in loss, sequence = sequence forward KL": ([loss("k3", level="sequence")], lambda f: f.of("sequence_forward")),
    "K3 in reward = G - FKL": ([reward("k3")], lambda f: f.G - f.FKL),
    "K1 reward + K1 loss = G": ([reward("k1"), loss("k1")], lambda f: f.G),
    "K3 reward + K3 loss = G": ([reward("k3"), loss("k3")], lambda f: f.G),
    "k_lambda reward + k_lambda loss = G": ([reward("k_lambda"), loss("k_lambda")], lambda f: f.G),
    "half the beta of K3 in each = G / 2": ([reward("k3", beta=0.5), loss("k3", beta=0.5)], lambda f: 0.5 * f.G),
    "K2 reward + K2 loss = grad E[K2]": ([reward("k2"), loss("k2")], lambda f: f.mean_of_k2),
    "rho k3 = PARTIAL": ([loss("k3", correction="token")], lambda f: f.PARTIAL),
    "rho k1 = PARTIAL": ([loss("k1", correction="token")], lambda f: f.PARTIAL),
    "rho k2 = gradient of E[k2] per prefix": (
        [loss("k2", correction="token")],
        lambda f: f.mean_of_k2_on_fixed_prefixes,
    ),
    "k3+ (value k3, gradient k2) = PARTIAL": ([loss("k3", gradient="k2")], lambda f: f.PARTIAL),
    "exact in loss, no future = PARTIAL": ([loss("exact")], lambda f: f.PARTIAL),
    "exact in reward, to go = G": ([reward("exact", "to_go")], lambda f: f.G),
    "exact in loss plus the future of K1 = G": (
        [loss("exact"), reward("k1", "to_go"), reward("k1", "own", beta=-1.0)],
        lambda f: f.G,
    ),
}

OFF_POLICY = {
    "omega K1 = G": ([reward("k1", correction="sequence")], lambda f: f.G),
    "omega K1, reward-to-go = G": ([reward("k1", "to_go", correction="sequence")], lambda f: f.G),
    "per-decision K1 = G": ([reward("k1", "to_go", correction="prefix")], lambda f: f.G),
    "autodiff of sum_u W_u k1_u = G": ([loss("k1", correction="prefix")], lambda f: f.G),
    "autodiff of sum_u W_u k3_u = G": ([loss("k3", correction="prefix")], lambda f: f.G),
    "Rao-Blackwell per-decision = G": ([reward("exact", "to_go", correction="prefix_previous")], lambda f: f.G),
    "autodiff of sum_u W_{u-1} KL_u = G": ([loss("exact", correction="prefix_previous")], lambda f: f.G),
    "omega sum k3, differentiated = G": ([loss("k3", correction="sequence")], lambda f: f.G),
    "omega sum KL_h, differentiated = G": ([loss("exact", correction="sequence")], lambda f: f.G),
    "omega, K1 frozen at rollout = G - grad KL(pi || mu)": (
        [reward("k1", correction="sequence", anchor="behaviour")],
        lambda f: f.G - f.to_sampler,
    ),
    "token IS of K1, full return = its reward-to-go": (
        [reward("k1", correction="token")],
        lambda f: expected(f.setting, reward("k1", "to_go", correction="token")),
    ),
    "rho k3 = PARTIAL on the sampler's prefixes": ([loss("k3", correction="token")], lambda f: f.PARTIAL),
    "rho k1 = PARTIAL on the sampler's prefixes": ([loss("k1", correction="token")], lambda f: f.PARTIAL),
    "sg(rho) k2 = PARTIAL on the sampler's prefixes": ([loss("k2", correction="token_detached")], lambda f: f.PARTIAL),
    "exact in loss = PARTIAL on the sampler's prefixes": ([loss("exact")], lambda f: f.PARTIAL),
    "bare k2 in loss = E_mu[l s]": ([loss("k2")], lambda f: f.weighted_score(lambda ratio: ratio)),
    "bare k3 in loss = E_mu[(1 - r) s]": ([loss("k3")], lambda f: f.weighted_score(lambda ratio: -(-ratio).expm1())),
    "bare k1 in loss = -grad KL(mu || pi)": ([loss("k1")], lambda f: -f.from_sampler),
    "sg(rho) k1 in loss = 0": ([loss("k1", correction="token_detached")], lambda f: f.zero),
    "K3 in reward with omega = what it is on-policy": (
        [reward("k3", correction="sequence")],
        lambda f: expected(f.on_policy, reward("k3")),
    ),
    "K3 in reward with omega = G - on-policy FKL": (
        [reward("k3", correction="sequence")],
        lambda f: f.G - target_gradient(f.on_policy, "token_forward"),
    ),
}


@pytest.fixture(scope="module", params=INSTANCES, ids=str)
def facts(request):
    seed, parameters = request.param
    return {
        regime: Facts(Setting.random(TREE, regime=regime, seed=seed, parameters=parameters))
        for regime in ("on_policy", "off_policy", "mixed")
    }


@pytest.mark.parametrize("row", ON_POLICY)
def test_on_policy(row, facts):
    terms, wanted = ON_POLICY[row]
    assert same(expected(facts["on_policy"].setting, *terms), wanted(facts["on_policy"]))


@pytest.mark.parametrize("regime", ["off_policy", "mixed"])
@pytest.mark.parametrize("row", OFF_POLICY)
def test_off_policy(row, regime, facts):
    terms, wanted = OFF_POLICY[row]
    assert same(expected(facts[regime].setting, *terms), wanted(facts[regime]))


BIASED_OFF_POLICY = {
    "token IS of K1 lacks the ratio of the prefix": reward("k1", "to_go", correction="token"),
    "sg(rho) and rho alone have no future": loss("k3", correction="token"),
    "bare k2 has no ratio": loss("k2"),
    "bare k3": loss("k3"),
    "K1 in reward without a ratio": reward("k1"),
    "K1 frozen": reward("k1", correction="sequence", anchor="behaviour"),
    "K3 in reward": reward("k3", correction="sequence"),
    "omega times the squared log-ratio of the completion": loss("k2", level="sequence", correction="sequence"),
}


@pytest.mark.parametrize("row", BIASED_OFF_POLICY)
def test_biased_off_policy(row, facts):
    """More than 1 percent off the sequence-level reverse KL on every instance."""
    setting = facts["off_policy"].setting
    assert expected_gradient(setting, [BIASED_OFF_POLICY[row]]).relative_bias(facts["off_policy"].G) > 0.01


# --- sizes: the order on the mean over instances -----------------------------------------------------------------
def noise(regime, *terms):
    """Variance over ``|G|^2``, mean over 4 instances with shared parameters."""
    total = 0.0
    for seed in range(4):
        setting = Setting.random(TREE, regime=regime, seed=seed, parameters=6)
        size = float(target_gradient(setting, "sequence_reverse").square().sum())
        total += expected_gradient(setting, terms).variance / size / 4
    return total


def test_noise_on_policy_has_the_order_of_the_table():
    full, to_go = noise("on_policy", reward("k1")), noise("on_policy", reward("k1", "to_go"))
    k1_loss = noise("on_policy", loss("k1"))
    k2_loss, exact_loss = noise("on_policy", loss("k2")), noise("on_policy", loss("exact"))
    exact_full, both = noise("on_policy", reward("exact", "to_go")), noise("on_policy", reward("k3"), loss("k3"))
    assert exact_full < both < full, "exact < K3 in both places < K1, among the unbiased"
    assert exact_full < to_go < full, "reward-to-go takes noise away"
    assert k1_loss > full, "K1 in loss is noise and nothing else"
    assert k2_loss > 3 * exact_loss


def test_noise_off_policy_has_the_order_of_the_table():
    sequence = noise("off_policy", reward("k1", correction="sequence"))
    per_decision = noise("off_policy", reward("k1", "to_go", correction="prefix"))
    exact = noise("off_policy", loss("exact", correction="prefix_previous"))
    assert 3 * exact < per_decision < sequence


def test_rho_k1_is_noisier_than_rho_k3_whose_mean_it_shares():
    for regime in ("on_policy", "off_policy"):
        assert noise(regime, loss("k1", correction="token")) > 2 * noise(regime, loss("k3", correction="token"))


def test_k2_and_k3_in_reward_vanish_to_second_order_near_the_reference():
    """Halving the distance halves G and quarters what is left of them."""
    sizes: dict[str, list[float]] = {"k2": [], "k3": []}
    for distance in (0.02, 0.01):
        setting = Setting.random(TREE, regime="on_policy", seed=0, distance=distance)
        size = float(target_gradient(setting, "sequence_reverse").norm())
        for name, found in sizes.items():
            found.append(float(expected(setting, reward(name)).norm()) / size)
    for found in sizes.values():
        assert found[0] < 0.05 and found[1] == pytest.approx(found[0] / 2, rel=0.1)


def test_token_losses_are_off_by_more_on_longer_completions_and_k3_in_reward_by_most_at_every_length():
    """Binary completions of 2, 4 and 7 tokens, mean over instances."""
    bias: dict[str, list[float]] = {"k2 in loss": [], "k3 in loss": [], "k3 in reward": []}
    terms = {"k2 in loss": loss("k2"), "k3 in loss": loss("k3"), "k3 in reward": reward("k3")}
    for length in (2, 4, 7):
        tree = Tree.build(vocabulary=2, length=length, ends=False)
        settings = [Setting.random(tree, regime="on_policy", seed=seed, parameters=4) for seed in range(8)]
        targets = [target_gradient(setting, "sequence_reverse") for setting in settings]
        for name, term in terms.items():
            found = [expected_gradient(s, [term]).relative_bias(g) for s, g in zip(settings, targets, strict=True)]
            bias[name].append(sum(found) / len(found))
    for name in ("k2 in loss", "k3 in loss"):
        assert 2 * bias[name][0] < min(bias[name][1:]), bias
        assert max(bias[name]) < min(bias["k3 in reward"]), bias
