"""What every KL term optimizes, by enumeration in float64: claims, the master table, and identities, each to 1e-10.

``G`` is the gradient of the sequence-level reverse KL, ``PARTIAL`` that of the reverse KL of each visited prefix with
the visits fixed, ``FKL`` the same of the forward KL. A test goes through all its rows and reports every row that fails.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property

import pytest
import torch

from claim_tree import TREE
from kl_comedy.errors import UserError
from kl_comedy.kl import REGIMES, TARGETS, KLTerm, claimed_target, kl_parts, kl_surrogate, term_warnings
from kl_comedy.kl.claims import all_terms, own_targets
from kl_comedy.kl.estimators import TopTokens, jensen_shannon, k1, k3, k_lambda
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient, log_probs, target_gradient
from kl_comedy.objective import returns_with_costs
from kl_comedy.registry import ADVANTAGES, CORRECTIONS, ESTIMATORS, RECIPES

TOLERANCE = 1e-10
INSTANCES = [(seed, parameters) for seed in (0, 1) for parameters in (None, 5)]
BUILT_IN = [entry for entry in ESTIMATORS if entry.origin.startswith("kl_comedy.")]
TERMS = all_terms([e.name for e in BUILT_IN], [e.name for e in CORRECTIONS if e.origin.startswith("kl_comedy.")])
"""Every combination of built-in parts that has a meaning."""


@cache
def setting(regime, seed=0, parameters=None):
    return Instance.random(TREE, InstanceSettings(regime=regime, seed=seed, parameters=parameters))


def expected(where, *terms):
    return expected_gradient(where, terms).gradient_D


def same(a, b):
    scale = max(float(a.norm()), float(b.norm()), 1.0)
    return float((a - b).norm()) <= TOLERANCE * scale


# --- claims: every term, every regime, both directions --------------------------------------------------------------
def test_every_term_hits_exactly_the_target_it_claims():
    """Fails where a claim does not hold, and where a target is hit that nothing claims."""
    assert len(TERMS) > 150
    wrong = []
    for regime in REGIMES:
        for parameters in (None, 5):
            where = setting(regime, 11, parameters)
            targets = {target: target_gradient(where, target) for target in TARGETS}
            for term in TERMS:
                gradient = expected_gradient(where, [term])
                own = {name: target_gradient(where, name, term) for name in own_targets(term)}
                hit = [
                    name
                    for name, target_D in {**targets, **own}.items()
                    if gradient.relative_bias(target_D) < TOLERANCE
                ]
                if hit != [name for name in (claimed_target(term, regime),) if name]:
                    wrong.append(f"{term.label()} {regime}: hits {hit}, claims {claimed_target(term, regime)}")
    assert not wrong, "\n".join(wrong)


OPTIONS = (
    {"discount": 0.5},
    {"window": 1},
    {"window": 2},
    {"cap": 1.2},
    {"cap": 0.9},
    {"cap": 1.2, "cap_mode": "mask"},
    {"cap": 1.2, "cap_mode": "each"},
    {"cap": 1.2, "cap_mode": "clip"},
    {"input_clamp": 0.1},
    {"output_clamp": 0.05},
)


def with_option(option):
    """Every term of three estimators that an option of the term changes, current log-probs."""
    for term in all_terms(["k1", "k3", "exact"]):
        if term.anchor == "current":
            with contextlib.suppress(UserError):
                yield replace(term, **option)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: " ".join(f"{k}={v}" for k, v in option.items()))
def test_every_option_of_a_term_is_in_what_it_claims(option):
    """No claim that an option breaks. A bound claims too little: where it cannot act, a target may be hit unclaimed."""
    terms, wrong = list(with_option(option)), []
    assert terms
    for regime in REGIMES:
        where = setting(regime, 11, 5)
        targets = {target: target_gradient(where, target) for target in TARGETS}
        for term in terms:
            claimed, gradient = claimed_target(term, regime), expected_gradient(where, [term])
            hit = [name for name, target_D in targets.items() if gradient.relative_bias(target_D) < TOLERANCE]
            expected = [name for name in (claimed,) if name]
            if hit != expected and (expected or "discount" in option):
                wrong.append(f"{term.label()} {regime}: hits {hit}, claims {claimed}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("option", [*OPTIONS, {"anchor": "behaviour"}], ids=str)
def test_a_user_is_warned_of_an_option_that_takes_the_target_away(option):
    """The start of a run says so of k1 to go on stale samples with the ratio of the prefix, which it optimizes."""
    plain = KLTerm("k1", correction="prefix")
    if option.get("cap_mode") == "clip":
        plain = KLTerm("k1", correction="token", credit="own")
    changed = replace(plain, **option)
    assert term_warnings(plain, off_policy=True) == []
    (warning,) = term_warnings(changed, off_policy=True)
    assert changed.label() in warning and "a biased gradient that equals no target" in warning
    discounted = term_warnings(changed, off_policy=False)
    assert bool(discounted) == (claimed_target(changed, "on_policy") is None)


def test_every_estimator_claims_exactly_the_facts_that_hold():
    """On categorical distributions: the mean of the value, of the gradient, and the sign."""
    facts, elementwise = {}, [entry for entry in BUILT_IN if entry.facts["needs"] != "top_k"]
    for entry in elementwise:
        holds = {"value:reverse", "value:forward", "value:mixture", "pathwise:token_reverse", "pathwise:token_forward"}
        holds |= {"pathwise:token_mixture", "pathwise:zero"}
        for seed in (0, 1, 2):
            generator = torch.Generator().manual_seed(seed)
            logits_V, ref_V = torch.randn(2, 5, generator=generator, dtype=torch.float64)
            logits_V, ref_V = logits_V.requires_grad_(True), ref_V.log_softmax(-1)
            logp_V = logits_V.log_softmax(-1)
            reverse, forward = (logp_V.exp() * (logp_V - ref_V)).sum(), (ref_V.exp() * (ref_V - logp_V)).sum()
            mixture = _mixture_by_definition(logp_V, ref_V, 0.5)
            exact = {"exact_reverse": reverse, "exact_forward": forward, "exact_mixture": mixture}.get(
                entry.facts["needs"]
            )
            argument_V = logp_V - ref_V if exact is None else exact.expand_as(logp_V)
            mean = (logp_V.detach().exp() * entry.fn(argument_V)).sum()
            gradients = [
                torch.autograd.grad(x, logits_V, retain_graph=True)[0]
                for x in (mean, reverse, forward, 0 * mean, mixture)
            ]
            checks = {
                "value:reverse": mean - reverse,
                "value:forward": mean - forward,
                "value:mixture": mean - mixture,
                "pathwise:token_reverse": (gradients[0] - gradients[1]).norm(),
                "pathwise:token_forward": (gradients[0] - gradients[2]).norm(),
                "pathwise:zero": (gradients[0] - gradients[3]).norm(),
                "pathwise:token_mixture": (gradients[0] - gradients[4]).norm(),
            }
            holds -= {name for name, gap in checks.items() if abs(gap.item()) >= TOLERANCE}
        low = 0.0 if entry.facts["needs"] != "log_ratio" else -100.0
        if bool((entry.fn(torch.linspace(low, 100.0, 40001, dtype=torch.float64)) >= -1e-12).all()):
            holds.add("nonnegative")
        assert float(entry.fn(torch.zeros(1))) == 0.0, f"{entry.name} at the reference"
        facts[entry.name] = holds
    assert facts == {entry.name: set(entry.claims) for entry in elementwise}


def _mixture_by_definition(logp_V, ref_V, share):
    mixture_V = (share * ref_V.exp() + (1 - share) * logp_V.exp()).log()
    from_ref = (ref_V.exp() * (ref_V - mixture_V)).sum()
    return share * from_ref + (1 - share) * (logp_V.exp() * (logp_V - mixture_V)).sum()


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.99])
def test_the_jensen_shannon_divergence_is_that_of_its_definition(share):
    """Value and gradient; zero bit by bit at the reference; finite and below log 2 where tokens are impossible."""
    generator = torch.Generator().manual_seed(0)
    logits_V, ref_V = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    logits_V, ref_V = logits_V.requires_grad_(True), ref_V.log_softmax(-1)
    values = [f(logits_V.log_softmax(-1), ref_V, share) for f in (jensen_shannon, _mixture_by_definition)]
    assert math.isclose(*(float(value.detach()) for value in values), rel_tol=1e-10)
    gradients = [torch.autograd.grad(value, logits_V)[0] for value in values]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    assert float(jensen_shannon(ref_V, ref_V, share)) == 0.0
    logits_V = torch.tensor([0.0, -1e4, 0.0], dtype=torch.float64).requires_grad_(True)
    apart = jensen_shannon(logits_V.log_softmax(-1), torch.tensor([-1e4, 0.0, -1e4], dtype=torch.float64), share)
    (slope_V,) = torch.autograd.grad(apart, logits_V)
    entropy = -share * math.log(share) - (1 - share) * math.log1p(-share)
    assert math.isclose(float(apart.detach()), entropy, rel_tol=1e-12) and bool(torch.isfinite(slope_V).all())


def test_the_gradient_of_jsd_tends_to_those_of_both_kls():
    where = setting("on_policy")
    for share, scale, target in ((0.01, 0.01, "token_forward"), (0.99, 0.01, "token_reverse")):
        term = KLTerm("exact_jsd", placement="loss", options={"share": share})
        gradient = expected_gradient(where, [term])
        assert gradient.relative_bias(scale * target_gradient(where, target)) < 0.03, target


def test_k_lambda_lies_between_k1_at_0_and_k3_at_1():
    log_ratio = torch.linspace(-3, 3, 7, dtype=torch.float64)
    assert torch.equal(k_lambda(log_ratio, lam=0.0), k1(log_ratio))
    assert torch.allclose(k_lambda(log_ratio, lam=1.0), k3(log_ratio), atol=1e-14)
    mixed = 0.75 * k1(log_ratio) + 0.25 * k3(log_ratio)
    assert torch.allclose(k_lambda(log_ratio, lam=0.25), mixed, atol=1e-14)
    where = setting("on_policy")
    term = KLTerm("k_lambda", placement="loss", options={"lam": 0.25})
    assert same(expected(where, term), 0.25 * target_gradient(where, "token_forward"))


# --- the master table: what each configuration optimizes ------------------------------------------------------------
class Facts:
    """The gradients that the table's right-hand sides are made of, at one setting; by autograd over all completions."""

    def __init__(self, setting: Instance) -> None:
        self.setting = setting
        self.G, self.PARTIAL, self.FKL, self.zero = map(
            self.of, ("sequence_reverse", "token_reverse", "token_forward", "zero")
        )

    def of(self, target: str) -> torch.Tensor:
        return target_gradient(self.setting, target)

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
            lambda p, q, m: (m.sum(-1).exp() * (coefficient((p - q).detach()) * TREE.all.mask_BT * p).sum(-1)).sum()
        )

    @cached_property
    def on_policy(self) -> Instance:
        """The same policy and reference, sampled from the policy itself."""
        logp_NV = self.setting.policy_logp()
        return replace(self.setting, sampler_logp_NV=logp_NV, recorded_logp_NV=logp_NV)


def reward(estimator, credit="total", **more):
    return KLTerm(estimator, placement="reward", credit=credit, **more)


def loss(estimator, **more):
    return KLTerm(estimator, placement="loss", **more)


# row of the table: the terms, and what they optimize
ON_POLICY = {
    "K1 in reward, full return = G": ([reward("k1")], lambda f: f.G),
    "K1 in reward, reward-to-go = G": ([reward("k1", "to_go")], lambda f: f.G),
    "K1 in reward, own token only = PARTIAL": ([reward("k1", "own")], lambda f: f.PARTIAL),
    "K1 in loss = 0": ([loss("k1")], lambda f: f.zero),
    "K2 in loss, token = PARTIAL": ([loss("k2")], lambda f: f.PARTIAL),
    "K2 in loss, token + K1 to go = G + PARTIAL": ([loss("k2"), reward("k1", "to_go")], lambda f: f.G + f.PARTIAL),
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
    "exact in loss + K1 to go = G + PARTIAL": ([loss("exact"), reward("k1", "to_go")], lambda f: f.G + f.PARTIAL),
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


def failing_rows(table, regimes):
    """Rows of the table that do not hold, on every instance."""
    wrong = []
    for regime in regimes:
        for seed, parameters in INSTANCES:
            facts = Facts(setting(regime, seed, parameters))
            for row, (terms, wanted) in table.items():
                if not same(expected(facts.setting, *terms), wanted(facts)):
                    wrong.append(f"{row}: {regime}, seed {seed}, parameters {parameters}")
    return wrong


def test_the_master_table():
    assert failing_rows(ON_POLICY, ["on_policy"]) == []
    assert failing_rows(OFF_POLICY, ["off_policy", "mixed"]) == []


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


def bias_of(where, term, target_D):
    return expected_gradient(where, [term]).relative_bias(target_D)


def test_biased_off_policy():
    """More than 1 percent off the sequence-level reverse KL on every instance."""
    for seed, parameters in INSTANCES:
        where = setting("off_policy", seed, parameters)
        target_D = target_gradient(where, "sequence_reverse")
        bias = {row: bias_of(where, term, target_D) for row, term in BIASED_OFF_POLICY.items()}
        assert min(bias.values()) > 0.01, bias


# --- sizes: the order on the mean over instances -----------------------------------------------------------------
def noise(regime, *terms):
    """Variance over ``|G|^2``, mean over 4 instances with shared parameters."""
    total = 0.0
    for seed in range(4):
        setting = Instance.random(TREE, InstanceSettings(regime=regime, seed=seed, parameters=6))
        size = float(target_gradient(setting, "sequence_reverse").square().sum())
        total += expected_gradient(setting, terms).variance / size / 4
    return total


def test_noise_has_the_order_of_the_table():
    full, to_go = noise("on_policy", reward("k1")), noise("on_policy", reward("k1", "to_go"))
    k1_loss = noise("on_policy", loss("k1"))
    k2_loss, exact_loss = noise("on_policy", loss("k2")), noise("on_policy", loss("exact"))
    exact_full, both = noise("on_policy", reward("exact", "to_go")), noise("on_policy", reward("k3"), loss("k3"))
    assert exact_full < both < full, "exact < K3 in both places < K1, among the unbiased"
    assert exact_full < to_go < full, "reward-to-go takes noise away"
    assert k1_loss > full, "K1 in loss is noise and nothing else"
    assert k2_loss > 3 * exact_loss
    sequence = noise("off_policy", reward("k1", correction="sequence"))
    per_decision = noise("off_policy", reward("k1", "to_go", correction="prefix"))
    exact = noise("off_policy", loss("exact", correction="prefix_previous"))
    assert 3 * exact < per_decision < sequence
    for regime in ("on_policy", "off_policy"):
        assert noise(regime, loss("k1", correction="token")) > 2 * noise(regime, loss("k3", correction="token"))


def test_k2_and_k3_in_reward_vanish_to_second_order_near_the_reference():
    """Halving the distance halves G and quarters what is left of them."""
    sizes: dict[str, list[float]] = {"k2": [], "k3": []}
    for distance in (0.02, 0.01):
        setting = Instance.random(TREE, InstanceSettings(regime="on_policy", seed=0, distance=distance))
        size = float(target_gradient(setting, "sequence_reverse").norm())
        for name, norms in sizes.items():
            norms.append(float(expected(setting, reward(name)).norm()) / size)
    for norms in sizes.values():
        assert norms[0] < 0.05 and norms[1] == pytest.approx(norms[0] / 2, rel=0.1)


def test_token_losses_are_off_by_more_on_longer_completions_and_k3_in_reward_by_most_at_every_length():
    """Binary completions of 2, 4 and 7 tokens, mean over instances."""
    bias: dict[str, list[float]] = {"k2 in loss": [], "k3 in loss": [], "k3 in reward": []}
    terms = {"k2 in loss": loss("k2"), "k3 in loss": loss("k3"), "k3 in reward": reward("k3")}
    for length in (2, 4, 7):
        tree = Tree.build(vocabulary=2, length=length, ends=False)
        settings = [
            Instance.random(tree, InstanceSettings(regime="on_policy", seed=seed, parameters=4)) for seed in range(8)
        ]
        targets = [target_gradient(setting, "sequence_reverse") for setting in settings]
        for name, term in terms.items():
            biases = [expected_gradient(s, [term]).relative_bias(g) for s, g in zip(settings, targets, strict=True)]
            bias[name].append(sum(biases) / len(biases))
    for name in ("k2 in loss", "k3 in loss"):
        assert 2 * bias[name][0] < min(bias[name][1:]), bias
        assert max(bias[name]) < min(bias["k3 in reward"]), bias


# --- identities ------------------------------------------------------------------------------------------------------
def per_sample(where, term):
    """The gradient of each completion's surrogate, ``[B, D]``."""
    theta_D = where.theta_D.clone().requires_grad_(True)
    logp_NV = where.policy_logp(theta_D)
    logp_BT = log_probs(TREE, logp_NV)
    ref_BT = log_probs(TREE, where.ref_logp_NV)
    exact_BT = (logp_NV.exp() * (logp_NV - where.ref_logp_NV)).sum(-1)[TREE.all.prefix_BT] * TREE.all.mask_BT
    sampled = {"ref_logp_BT": ref_BT, "behaviour_logp_BT": where.behaviour_logp_BT, "mask_BT": TREE.all.mask_BT}
    surrogate_BT = kl_surrogate(term, logp_BT=logp_BT, exact_kl_BT=exact_BT, **sampled)
    rows = [torch.autograd.grad(row, theta_D, retain_graph=True)[0] for row in surrogate_BT.sum(-1)]
    return torch.stack(rows)


K1_OWN = KLTerm("k1", placement="reward", credit="own")
EQUAL_SAMPLE_BY_SAMPLE_ON_POLICY = [
    (KLTerm("k1", placement="reward", credit="total"), KLTerm("k2", level="sequence", placement="loss")),
    (KLTerm("k1", placement="reward", credit="total"), KLTerm("k1", level="sequence", placement="reward")),
    (K1_OWN, KLTerm("k2", placement="loss")),
    (K1_OWN, KLTerm("k3", placement="loss", correction="token")),
    (K1_OWN, KLTerm("k3", placement="loss", gradient="k2")),
    (K1_OWN, KLTerm("abs", placement="loss", gradient="k2")),
]


def test_equal_sample_by_sample_on_policy():
    for seed, parameters in INSTANCES:
        where = setting("on_policy", seed, parameters)
        for first, second in EQUAL_SAMPLE_BY_SAMPLE_ON_POLICY:
            assert same(per_sample(where, first), per_sample(where, second)), (first.label(), second.label())


def test_ratio_times_k3_has_coefficient_rho_l_off_policy():
    """rho (k3 + 1 - r) = rho l for every token: TRL's and DeepSeek's forms are one estimator."""
    where = setting("off_policy")
    with_k3 = per_sample(where, KLTerm("k3", placement="loss", correction="token"))
    with_k1 = per_sample(where, KLTerm("k1", placement="reward", credit="own", correction="token"))
    with_k2 = per_sample(where, KLTerm("k2", placement="loss", correction="token_detached"))
    assert same(with_k3, with_k1) and same(with_k3, with_k2)


def test_past_costs_betas_the_sampler_as_reference_and_recipes():
    where = setting("on_policy")
    in_reward, in_loss = expected(where, reward("k3", "to_go")), expected(where, loss("k3"))
    both = expected(where, reward("k3", "to_go", beta=0.3), loss("k3", beta=0.7))
    assert same(both, 0.3 * in_reward + 0.7 * in_loss)
    for estimator in ("k1", "k2", "k3", "abs", "exact", "exact_forward"):
        assert same(expected(where, reward(estimator)), expected(where, reward(estimator, "to_go")))
    trust = KLTerm("k2", placement="loss", reference="sampler", correction="token_detached")
    assert float(expected(setting("on_policy"), trust).norm()) < TOLERANCE
    assert float(expected(setting("off_policy"), trust).norm()) > 1e-3
    for entry in RECIPES:
        for regime in REGIMES:
            assert bool(torch.isfinite(expected(setting(regime), *entry.fn())).all())


def test_at_the_reference_the_estimate_is_exactly_zero():
    """Bitwise zero cost and value when policy and reference are the same numbers."""
    logp_BT, zeros_BT = torch.randn(5, 6), torch.zeros(5, 6)
    mask_BT = torch.arange(6)[None] < torch.tensor([[6], [1], [3], [4], [2]])
    same_BT = {"logp_BT": logp_BT, "ref_logp_BT": logp_BT.clone(), "behaviour_logp_BT": logp_BT, "mask_BT": mask_BT}
    logp_BTK = logp_BT[..., None].expand(-1, -1, 2)
    top = TopTokens(logp_BTK, logp_BTK.clone(), logp_BT > 0)
    for entry in BUILT_IN:
        for placement in ("reward", "loss"):
            parts = kl_parts(KLTerm(entry.name, placement=placement), **same_BT, exact_kl_BT=zeros_BT, top=top)
            assert torch.equal(parts.cost_BT, zeros_BT) and torch.equal(parts.pathwise_BT, zeros_BT), entry.name


@pytest.mark.parametrize(("advantage", "factor"), [("none", 1.0), ("rloo", 1.0), ("dr_grpo", 2 / 3)])
@pytest.mark.parametrize("credit", ["total", "to_go", "own"])
def test_a_cost_before_the_baseline_keeps_its_expectation(advantage, factor, credit):
    """Groups of 3 independent completions, every triple enumerated: leave-one-out is unbiased, the group
    mean shrinks the gradient by 1 - 1/G."""
    tree = Tree.build(vocabulary=2, length=3, ends=True)
    where = Instance.random(tree, InstanceSettings(regime="on_policy", seed=3))
    term = KLTerm("k1", placement="reward", credit=credit, baseline="before")
    theta_D = where.theta_D.clone().requires_grad_(True)
    logp_BT = log_probs(tree, where.policy_logp(theta_D))
    sampled = {"behaviour_logp_BT": where.behaviour_logp_BT, "mask_BT": tree.all.mask_BT}
    ref_BT = log_probs(tree, where.ref_logp_NV)
    cost_BT = kl_parts(term, logp_BT=logp_BT.detach(), ref_logp_BT=ref_BT, **sampled).cost_BT
    n = len(tree.all.mask_BT)
    triples = torch.cartesian_prod(torch.arange(n), torch.arange(n), torch.arange(n))
    probability = where.behaviour_logp_BT.sum(-1).exp()[triples].prod(-1)
    reward = torch.linspace(0, 1, n, dtype=torch.float64)
    flat = triples.flatten()
    returns_BT = returns_with_costs(reward[flat], cost_BT[flat], tree.length)
    group_B = torch.arange(len(triples)).repeat_interleave(3)
    advantage_BT = ADVANTAGES.get(advantage).fn(returns_BT, tree.all.mask_BT[flat], group_B)
    loss_B = -(advantage_BT * logp_BT[flat] * tree.all.mask_BT[flat]).sum(-1)
    got = torch.autograd.grad((probability.repeat_interleave(3) * loss_B).sum() / 3, theta_D, retain_graph=True)[0]
    score = torch.autograd.grad((logp_BT.detach().sum(-1).exp() * reward * logp_BT.sum(-1)).sum(), theta_D)[0]
    wanted = -score + expected_gradient(where, [KLTerm("k1", placement="reward", credit=credit)]).gradient_D
    assert same(got, factor * wanted)


def test_nothing_is_clamped_far_from_the_reference():
    """Gradients stay alive at log-ratios where clamped implementations return zero."""
    logp_BT = torch.tensor([[-30.0, 25.0 - 26.0]], dtype=torch.float64, requires_grad=True)
    ref_BT = torch.tensor([[-1.0, -26.0]], dtype=torch.float64)
    for estimator, wanted in (("k3", [1 - math.exp(29), 1 - math.exp(-25)]), ("k2", [-29.0, 25.0])):
        sampled = {"behaviour_logp_BT": logp_BT.detach(), "mask_BT": torch.ones(1, 2, dtype=torch.bool)}
        surrogate_BT = kl_surrogate(loss(estimator), logp_BT=logp_BT, ref_logp_BT=ref_BT, **sampled)
        (gradient,) = torch.autograd.grad(surrogate_BT.sum(), logp_BT)
        assert torch.allclose(gradient, torch.tensor([wanted], dtype=torch.float64), rtol=1e-12)


def test_an_estimator_of_the_forward_kl_claims_it_once_its_score_is_there(monkeypatch):
    """``r log r - (r - 1)`` has the forward KL as its mean; times the differentiated ratio, its gradient too."""
    monkeypatch.setattr(ESTIMATORS, "_entries", dict(ESTIMATORS._entries))

    def forward(log_ratio):
        """Forward KL, sampled from the policy."""
        return -log_ratio * (-log_ratio).exp() - torch.expm1(-log_ratio)

    ESTIMATORS.register("forward", source="this test", claims=("value:forward",), needs="log_ratio")(forward)
    term = KLTerm("forward", placement="loss", correction="token")
    for regime in REGIMES:
        assert claimed_target(term, regime) == "token_forward"
        assert same(expected(setting(regime), term), target_gradient(setting(regime), "token_forward"))
