"""What every KL term optimizes, by enumeration in float64: claims, the master table, and identities, each to 1e-10.

``G`` is the gradient of the sequence-level reverse KL, ``PARTIAL`` that of the reverse KL of each visited prefix with
the visits fixed, ``FKL`` the same of the forward KL.
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
from kl_comedy.kl.claims import KIND_WORDS, NO_TARGET, all_terms, own_targets
from kl_comedy.kl.estimators import TopTokens, jensen_shannon, k1, k3, k_lambda
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient, log_probs, target_gradient
from kl_comedy.objective import returns_with_costs
from kl_comedy.registry import ADVANTAGES, CORRECTIONS, ESTIMATORS, RECIPES

TOLERANCE = 1e-10
# (seed, parameters): a table of logits for every prefix, and logits that share 5 parameters.
INSTANCES = [(0, None), (0, 5), (1, None), (1, 5)]
BUILT_IN = [entry for entry in ESTIMATORS if entry.origin.startswith("kl_comedy.")]
BUILT_IN_CORRECTIONS = [entry.name for entry in CORRECTIONS if entry.origin.startswith("kl_comedy.")]
TERMS = all_terms([entry.name for entry in BUILT_IN], BUILT_IN_CORRECTIONS)
"""Every combination of built-in parts that has a meaning."""


@cache
def setting(regime, seed=0, parameters=None):
    return Instance.random(TREE, InstanceSettings(regime=regime, seed=seed, parameters=parameters))


def expected(where, *terms):
    return expected_gradient(where, terms).gradient_D


def same(a, b):
    scale = max(float(a.norm()), float(b.norm()), 1.0)
    return float((a - b).norm()) <= TOLERANCE * scale


def claims_of(term, regime):
    """The target that a term claims, as a list: empty where it claims none."""
    claimed = claimed_target(term, regime)
    if claimed is None:
        return []
    return [claimed]


def targets_hit(gradient, targets):
    """The names of those targets that a gradient equals."""
    return [name for name, target_D in targets.items() if gradient.relative_bias(target_D) < TOLERANCE]


# --- claims: every term, every regime, both directions --------------------------------------------------------------
def test_there_are_many_terms():
    """So that a mistake in the enumeration of terms does not empty the tests below."""
    assert len(TERMS) > 150


@pytest.mark.parametrize("parameters", [None, 5], ids=["tabular", "shared"])
@pytest.mark.parametrize("regime", REGIMES)
def test_every_term_hits_exactly_the_target_it_claims(regime, parameters):
    """Fails where a claim does not hold, and where a target is hit that nothing claims."""
    where = setting(regime, 11, parameters)
    common_targets = {target: target_gradient(where, target) for target in TARGETS}
    wrong = []
    for term in TERMS:
        own = {name: target_gradient(where, name, term) for name in own_targets(term)}
        hit = targets_hit(expected_gradient(where, [term]), {**common_targets, **own})
        claims = claims_of(term, regime)
        if hit != claims:
            wrong.append(f"{term.label()}: hits {hit}, claims {claims}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("clamp", [{"input_clamp": 0.01}, {"output_clamp": 1e-4}], ids=str)
def test_the_gradient_of_k2_does_not_end_at_a_clamp_and_the_estimates_own_does(clamp):
    where = setting("off_policy", 11, None)
    for gradient, ends in (("natural", True), ("k2", False)):
        term = KLTerm("k3", placement="loss", gradient=gradient)
        assert same(expected(where, replace(term, **clamp)), expected(where, term)) != ends


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
    terms = []
    for term in all_terms(["k1", "k3", "exact"]):
        if term.anchor == "current":
            # Not every term takes every option.
            with contextlib.suppress(UserError):
                terms.append(replace(term, **option))
    return terms


def option_id(option):
    return " ".join(f"{name}={value}" for name, value in option.items())


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("option", OPTIONS, ids=option_id)
def test_every_option_of_a_term_is_in_what_it_claims(option, regime):
    """No claim that an option breaks."""
    terms = with_option(option)
    assert terms
    where = setting(regime, 11, 5)
    targets = {target: target_gradient(where, target) for target in TARGETS}
    # A bound claims too little: where it cannot act, a target may be hit that is not claimed. A discount always acts.
    may_hit_unclaimed = "discount" not in option
    wrong = []
    for term in terms:
        hit = targets_hit(expected_gradient(where, [term]), targets)
        claims = claims_of(term, regime)
        if claims == [] and may_hit_unclaimed:
            continue
        if hit != claims:
            wrong.append(f"{term.label()}: hits {hit}, claims {claims}")
    assert not wrong, "\n".join(wrong)


def plain_term_for(option):
    """A term that has a target off-policy without the option, and takes it."""
    if option.get("cap_mode") == "clip":
        return KLTerm("k1", correction="token", credit="own")
    return KLTerm("k1", correction="prefix")


@pytest.mark.parametrize("option", [*OPTIONS, {"anchor": "behaviour"}], ids=str)
def test_a_user_is_warned_of_an_option_that_takes_the_target_away(option):
    """The start of a run says so of k1 to go on stale samples with the ratio of the prefix, which it optimizes."""
    plain = plain_term_for(option)
    changed = replace(plain, **option)
    assert term_warnings(plain, off_policy=True) == []
    (warning,) = term_warnings(changed, off_policy=True)
    assert changed.label() in warning
    assert any(words in warning for words in (NO_TARGET, "while no bound acts", *KIND_WORDS.values()))


@pytest.mark.parametrize("option", [*OPTIONS, {"anchor": "behaviour"}], ids=str)
def test_on_policy_a_user_is_warned_of_an_option_if_nothing_is_claimed_with_it(option):
    changed = replace(plain_term_for(option), **option)
    warnings = term_warnings(changed, off_policy=False)
    assert bool(warnings) == (claimed_target(changed, "on_policy") is None)


ELEMENTWISE = [entry for entry in BUILT_IN if entry.facts["needs"] != "top_k"]


def random_logits_and_reference(seed):
    """Policy logits that record gradients, and log-probs of a reference, over 5 tokens in float64."""
    generator = torch.Generator().manual_seed(seed)
    logits_V, ref_logits_V = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    return logits_V.requires_grad_(True), ref_logits_V.log_softmax(-1)


def gaps_to_facts(entry, seed):
    """How far an estimator is from each claim, on one random distribution over 5 tokens."""
    logits_V, ref_V = random_logits_and_reference(seed)
    logp_V = logits_V.log_softmax(-1)
    reverse = (logp_V.exp() * (logp_V - ref_V)).sum()
    forward = (ref_V.exp() * (ref_V - logp_V)).sum()
    mixture = _mixture_by_definition(logp_V, ref_V, 0.5)

    exact = {"exact_reverse": reverse, "exact_forward": forward, "exact_mixture": mixture}
    if entry.facts["needs"] in exact:
        argument_V = exact[entry.facts["needs"]].expand_as(logp_V)
    else:
        argument_V = logp_V - ref_V
    # The probabilities are those of the draw: a loss does not differentiate them.
    mean = (logp_V.detach().exp() * entry.fn(argument_V)).sum()

    def gradient(scalar):
        return torch.autograd.grad(scalar, logits_V, retain_graph=True)[0]

    return {
        "value:reverse": mean - reverse,
        "value:forward": mean - forward,
        "value:mixture": mean - mixture,
        "pathwise:token_reverse": (gradient(mean) - gradient(reverse)).norm(),
        "pathwise:token_forward": (gradient(mean) - gradient(forward)).norm(),
        "pathwise:token_mixture": (gradient(mean) - gradient(mixture)).norm(),
        "pathwise:zero": gradient(mean).norm(),
    }


def facts_that_hold(entry):
    """The claims that an estimator could make: those that hold on three distributions, and its sign."""
    facts = set()
    gaps_by_seed = [gaps_to_facts(entry, seed) for seed in (0, 1, 2)]
    for fact in gaps_by_seed[0]:
        if all(abs(gaps[fact].item()) < TOLERANCE for gaps in gaps_by_seed):
            facts.add(fact)

    lowest = 0.0  # an exact divergence is never negative; a log-ratio may be
    if entry.facts["needs"] == "log_ratio":
        lowest = -100.0
    values = entry.fn(torch.linspace(lowest, 100.0, 40001, dtype=torch.float64))
    if bool((values >= -1e-12).all()):
        facts.add("nonnegative")
    return facts


@pytest.mark.parametrize("entry", ELEMENTWISE, ids=lambda entry: entry.name)
def test_every_estimator_claims_exactly_the_facts_that_hold(entry):
    """On categorical distributions: the mean of the value, of the gradient, and the sign."""
    assert facts_that_hold(entry) == set(entry.claims)


@pytest.mark.parametrize("entry", ELEMENTWISE, ids=lambda entry: entry.name)
def test_every_estimator_is_zero_at_the_reference(entry):
    assert float(entry.fn(torch.zeros(1))) == 0.0


def _mixture_by_definition(logp_V, ref_V, share):
    """share KL(ref || m) + (1 - share) KL(policy || m), with m = share ref + (1 - share) policy."""
    mixture_V = (share * ref_V.exp() + (1 - share) * logp_V.exp()).log()
    from_ref = (ref_V.exp() * (ref_V - mixture_V)).sum()
    from_policy = (logp_V.exp() * (logp_V - mixture_V)).sum()
    return share * from_ref + (1 - share) * from_policy


SHARES = pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.99])


@SHARES
def test_the_jensen_shannon_divergence_is_that_of_its_definition(share):
    """Value and gradient."""
    logits_V, ref_V = random_logits_and_reference(seed=0)
    value = jensen_shannon(logits_V.log_softmax(-1), ref_V, share)
    by_definition = _mixture_by_definition(logits_V.log_softmax(-1), ref_V, share)
    assert math.isclose(float(value.detach()), float(by_definition.detach()), rel_tol=1e-10)
    (gradient_V,) = torch.autograd.grad(value, logits_V)
    (wanted_V,) = torch.autograd.grad(by_definition, logits_V)
    torch.testing.assert_close(gradient_V, wanted_V, rtol=1e-10, atol=1e-12)


@SHARES
def test_the_jensen_shannon_divergence_at_the_reference_is_zero_to_the_bit(share):
    _, ref_V = random_logits_and_reference(seed=0)
    assert float(jensen_shannon(ref_V, ref_V, share)) == 0.0


@SHARES
def test_the_jensen_shannon_divergence_of_disjoint_distributions_is_finite(share):
    """Where no token is possible under both, it is the entropy of the share: at most log 2."""
    logits_V = torch.tensor([0.0, -1e4, 0.0], dtype=torch.float64).requires_grad_(True)
    ref_V = torch.tensor([-1e4, 0.0, -1e4], dtype=torch.float64)
    value = jensen_shannon(logits_V.log_softmax(-1), ref_V, share)
    (slope_V,) = torch.autograd.grad(value, logits_V)
    entropy = -share * math.log(share) - (1 - share) * math.log1p(-share)
    assert math.isclose(float(value.detach()), entropy, rel_tol=1e-12)
    assert bool(torch.isfinite(slope_V).all())


@pytest.mark.parametrize(("share", "target"), [(0.01, "token_forward"), (0.99, "token_reverse")])
def test_the_gradient_of_jsd_tends_to_those_of_both_kls(share, target):
    """Near either end it is the KL from that end times the small share, here 0.01."""
    where = setting("on_policy")
    gradient = expected_gradient(where, [KLTerm("exact_jsd", placement="loss", options={"share": share})])
    assert gradient.relative_bias(0.01 * target_gradient(where, target)) < 0.03


def test_k_lambda_lies_between_k1_at_0_and_k3_at_1():
    log_ratio = torch.linspace(-3, 3, 7, dtype=torch.float64)
    assert torch.equal(k_lambda(log_ratio, lam=0.0), k1(log_ratio))
    assert torch.allclose(k_lambda(log_ratio, lam=1.0), k3(log_ratio), atol=1e-14)
    mixed = 0.75 * k1(log_ratio) + 0.25 * k3(log_ratio)
    assert torch.allclose(k_lambda(log_ratio, lam=0.25), mixed, atol=1e-14)


def test_k_lambda_in_loss_has_lambda_times_the_gradient_of_k3():
    where = setting("on_policy")
    term = KLTerm("k_lambda", placement="loss", options={"lam": 0.25})
    assert same(expected(where, term), 0.25 * target_gradient(where, "token_forward"))


# --- the master table: what each configuration optimizes ------------------------------------------------------------
class Facts:
    """The gradients that the table's right-hand sides are made of, at one setting; by autograd over all completions."""

    def __init__(self, setting: Instance) -> None:
        self.setting = setting
        self.G = self.of("sequence_reverse")
        self.PARTIAL = self.of("token_reverse")
        self.FKL = self.of("token_forward")
        self.zero = self.of("zero")

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


# A row of the table: the terms, and what they optimize.
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


@cache
def facts_of(regime, seed, parameters):
    return Facts(setting(regime, seed, parameters))


def assert_row_holds(terms, wanted, regime):
    """On every instance, so that no equality is one of a particular policy."""
    for seed, parameters in INSTANCES:
        facts = facts_of(regime, seed, parameters)
        assert same(expected(facts.setting, *terms), wanted(facts)), f"seed {seed}, parameters {parameters}"


@pytest.mark.parametrize("row", ON_POLICY)
def test_the_master_table_on_policy(row):
    terms, wanted = ON_POLICY[row]
    assert_row_holds(terms, wanted, "on_policy")


@pytest.mark.parametrize("regime", ["off_policy", "mixed"])
@pytest.mark.parametrize("row", OFF_POLICY)
def test_the_master_table_off_policy(row, regime):
    terms, wanted = OFF_POLICY[row]
    assert_row_holds(terms, wanted, regime)


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
def test_biased_off_policy(row):
    """More than 1 percent off the sequence-level reverse KL on every instance."""
    for seed, parameters in INSTANCES:
        where = setting("off_policy", seed, parameters)
        moments = expected_gradient(where, [BIASED_OFF_POLICY[row]])
        assert moments.relative_bias(target_gradient(where, "sequence_reverse")) > 0.01, (seed, parameters)


# --- sizes: the order on the mean over instances -----------------------------------------------------------------
@cache
def noise(regime, *terms):
    """Variance over ``|G|^2``, mean over 4 instances with shared parameters."""
    total = 0.0
    for seed in range(4):
        where = Instance.random(TREE, InstanceSettings(regime=regime, seed=seed, parameters=6))
        size = float(target_gradient(where, "sequence_reverse").square().sum())
        total += expected_gradient(where, terms).variance / size / 4
    return total


QUIETER_ON_POLICY = {
    "exact to go < K3 in both places": ([reward("exact", "to_go")], [reward("k3"), loss("k3")]),
    "K3 in both places < K1": ([reward("k3"), loss("k3")], [reward("k1")]),
    "exact to go < K1 to go": ([reward("exact", "to_go")], [reward("k1", "to_go")]),
    "K1 to go < K1: reward-to-go takes noise away": ([reward("k1", "to_go")], [reward("k1")]),
    "K1 < K1 in loss, which is noise and nothing else": ([reward("k1")], [loss("k1")]),
}


@pytest.mark.parametrize("row", QUIETER_ON_POLICY)
def test_noise_on_policy_has_the_order_of_the_table(row):
    quieter, noisier = QUIETER_ON_POLICY[row]
    assert noise("on_policy", *quieter) < noise("on_policy", *noisier)


def test_k2_in_loss_has_three_times_the_noise_of_the_exact_kl():
    assert noise("on_policy", loss("k2")) > 3 * noise("on_policy", loss("exact"))


def test_noise_off_policy_has_the_order_of_the_table():
    exact = noise("off_policy", loss("exact", correction="prefix_previous"))
    per_decision = noise("off_policy", reward("k1", "to_go", correction="prefix"))
    sequence = noise("off_policy", reward("k1", correction="sequence"))
    assert 3 * exact < per_decision
    assert per_decision < sequence


@pytest.mark.parametrize("regime", ["on_policy", "off_policy"])
def test_k1_times_the_token_ratio_has_twice_the_noise_of_k3(regime):
    assert noise(regime, loss("k1", correction="token")) > 2 * noise(regime, loss("k3", correction="token"))


def relative_size_in_reward(estimator, distance):
    """The norm of the gradient over that of G, at a distance from the reference."""
    where = Instance.random(TREE, InstanceSettings(regime="on_policy", seed=0, distance=distance))
    gradient_D = expected(where, reward(estimator))
    return float(gradient_D.norm()) / float(target_gradient(where, "sequence_reverse").norm())


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_k2_and_k3_in_reward_vanish_to_second_order_near_the_reference(estimator):
    """Halving the distance halves G and quarters what is left of them."""
    size = relative_size_in_reward(estimator, 0.02)
    assert size < 0.05
    assert relative_size_in_reward(estimator, 0.01) == pytest.approx(size / 2, rel=0.1)


@pytest.fixture(scope="module")
def bias_by_length():
    """On binary completions of 2, 4 and 7 tokens, mean over 8 instances: ``{name: [bias at each length]}``."""
    terms = {"k2 in loss": loss("k2"), "k3 in loss": loss("k3"), "k3 in reward": reward("k3")}
    bias: dict[str, list[float]] = {name: [] for name in terms}
    for length in (2, 4, 7):
        tree = Tree.build(vocabulary=2, length=length, ends=False)
        totals = dict.fromkeys(terms, 0.0)
        for seed in range(8):
            where = Instance.random(tree, InstanceSettings(regime="on_policy", seed=seed, parameters=4))
            target_D = target_gradient(where, "sequence_reverse")
            for name, term in terms.items():
                totals[name] += expected_gradient(where, [term]).relative_bias(target_D)
        for name, total in totals.items():
            bias[name].append(total / 8)
    return bias


@pytest.mark.parametrize("name", ["k2 in loss", "k3 in loss"])
def test_token_losses_are_off_by_more_on_longer_completions(bias_by_length, name):
    shortest, *longer = bias_by_length[name]
    assert 2 * shortest < min(longer)


@pytest.mark.parametrize("name", ["k2 in loss", "k3 in loss"])
def test_k3_in_reward_is_off_by_more_than_token_losses_at_every_length(bias_by_length, name):
    assert max(bias_by_length[name]) < min(bias_by_length["k3 in reward"])


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


@pytest.mark.parametrize(
    ("first", "second"),
    EQUAL_SAMPLE_BY_SAMPLE_ON_POLICY,
    ids=[f"{first.label()} = {second.label()}" for first, second in EQUAL_SAMPLE_BY_SAMPLE_ON_POLICY],
)
def test_equal_sample_by_sample_on_policy(first, second):
    for seed, parameters in INSTANCES:
        where = setting("on_policy", seed, parameters)
        assert same(per_sample(where, first), per_sample(where, second)), (seed, parameters)


@pytest.mark.parametrize(
    "other",
    [
        KLTerm("k1", placement="reward", credit="own", correction="token"),
        KLTerm("k2", placement="loss", correction="token_detached"),
    ],
    ids=lambda term: term.label(),
)
def test_ratio_times_k3_has_coefficient_rho_l_off_policy(other):
    """rho (k3 + 1 - r) = rho l for every token: TRL's and DeepSeek's forms are one estimator."""
    where = setting("off_policy")
    with_k3 = per_sample(where, KLTerm("k3", placement="loss", correction="token"))
    assert same(with_k3, per_sample(where, other))


def test_terms_add_up_each_times_its_beta():
    where = setting("on_policy")
    in_reward_D = expected(where, reward("k3", "to_go"))
    in_loss_D = expected(where, loss("k3"))
    both_D = expected(where, reward("k3", "to_go", beta=0.3), loss("k3", beta=0.7))
    assert same(both_D, 0.3 * in_reward_D + 0.7 * in_loss_D)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "exact", "exact_forward"])
def test_past_costs_do_not_change_the_expected_gradient(estimator):
    """The score of a token has mean zero whatever came before it."""
    where = setting("on_policy")
    assert same(expected(where, reward(estimator)), expected(where, reward(estimator, "to_go")))


TRUST_REGION = KLTerm("k2", placement="loss", reference="sampler", correction="token_detached")


def test_a_trust_region_does_nothing_on_policy():
    assert float(expected(setting("on_policy"), TRUST_REGION).norm()) < TOLERANCE


def test_a_trust_region_pulls_off_policy():
    assert float(expected(setting("off_policy"), TRUST_REGION).norm()) > 1e-3


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("entry", RECIPES, ids=lambda entry: entry.name)
def test_the_gradient_of_every_recipe_is_finite(entry, regime):
    assert bool(torch.isfinite(expected(setting(regime), *entry.fn())).all())


@pytest.mark.parametrize("placement", ["reward", "loss"])
@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda entry: entry.name)
def test_at_the_reference_the_estimate_is_exactly_zero(entry, placement):
    """Bitwise zero cost and value when policy and reference are the same numbers."""
    logp_BT = torch.randn(5, 6)
    zeros_BT = torch.zeros(5, 6)
    mask_BT = torch.arange(6)[None] < torch.tensor([[6], [1], [3], [4], [2]])
    same_BT = {"logp_BT": logp_BT, "ref_logp_BT": logp_BT.clone(), "behaviour_logp_BT": logp_BT, "mask_BT": mask_BT}
    logp_BTK = logp_BT[..., None].expand(-1, -1, 2)
    top = TopTokens(logp_BTK, logp_BTK.clone(), logp_BT > 0)
    parts = kl_parts(KLTerm(entry.name, placement=placement), **same_BT, exact_kl_BT=zeros_BT, top=top)
    assert torch.equal(parts.cost_BT, zeros_BT)
    assert torch.equal(parts.pathwise_BT, zeros_BT)


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

    # Every group of three completions, one below the other, with the probability of the group.
    numbers = torch.arange(len(tree.all.mask_BT))
    triples_G3 = torch.cartesian_prod(numbers, numbers, numbers)
    probability_G = where.behaviour_logp_BT.sum(-1).exp()[triples_G3].prod(-1)
    rows = triples_G3.flatten()
    group_B = torch.arange(len(triples_G3)).repeat_interleave(3)

    reward = torch.linspace(0, 1, len(numbers), dtype=torch.float64)
    returns_BT = returns_with_costs(reward[rows], cost_BT[rows], tree.length)
    advantage_BT = ADVANTAGES.get(advantage).fn(returns_BT, tree.all.mask_BT[rows], group_B)
    loss_B = -(advantage_BT * logp_BT[rows] * tree.all.mask_BT[rows]).sum(-1)
    mean_loss = (probability_G.repeat_interleave(3) * loss_B).sum() / 3
    (actual_D,) = torch.autograd.grad(mean_loss, theta_D, retain_graph=True)

    mean_reward_times_score = (logp_BT.detach().sum(-1).exp() * reward * logp_BT.sum(-1)).sum()
    (reward_D,) = torch.autograd.grad(mean_reward_times_score, theta_D)
    kl_D = expected_gradient(where, [KLTerm("k1", placement="reward", credit=credit)]).gradient_D
    assert same(actual_D, factor * (kl_D - reward_D))


@pytest.mark.parametrize(
    ("estimator", "slopes"),
    [("k3", [1 - math.exp(29), 1 - math.exp(-25)]), ("k2", [-29.0, 25.0])],
    ids=["k3", "k2"],
)
def test_nothing_is_clamped_far_from_the_reference(estimator, slopes):
    """Gradients stay alive at log-ratios of -29 and 25 nats, where clamped implementations return zero."""
    logp_BT = torch.tensor([[-30.0, -1.0]], dtype=torch.float64, requires_grad=True)
    ref_BT = torch.tensor([[-1.0, -26.0]], dtype=torch.float64)
    sampled = {"behaviour_logp_BT": logp_BT.detach(), "mask_BT": torch.ones(1, 2, dtype=torch.bool)}
    surrogate_BT = kl_surrogate(loss(estimator), logp_BT=logp_BT, ref_logp_BT=ref_BT, **sampled)
    (gradient_BT,) = torch.autograd.grad(surrogate_BT.sum(), logp_BT)
    assert torch.allclose(gradient_BT, torch.tensor([slopes], dtype=torch.float64), rtol=1e-12)


@pytest.mark.parametrize("regime", REGIMES)
def test_an_estimator_of_the_forward_kl_claims_it_once_its_score_is_there(monkeypatch, regime):
    """``r log r - (r - 1)`` has the forward KL as its mean; times the differentiated ratio, its gradient too."""
    monkeypatch.setattr(ESTIMATORS, "_entries", dict(ESTIMATORS._entries))

    def forward(log_ratio):
        """Forward KL, sampled from the policy."""
        return -log_ratio * (-log_ratio).exp() - torch.expm1(-log_ratio)

    ESTIMATORS.register("forward", source="this test", claims=("value:forward",), needs="log_ratio")(forward)
    term = KLTerm("forward", placement="loss", correction="token")
    assert claimed_target(term, regime) == "token_forward"
    assert same(expected(setting(regime), term), target_gradient(setting(regime), "token_forward"))
