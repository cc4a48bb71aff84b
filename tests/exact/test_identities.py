"""The golden identities of the KL matrix beyond what a configuration descends (test_master_table), in float64.

Each holds to 1e-10: equivalences sample by sample, coefficients, costs before a baseline, forward estimators.
"""

import math

import pytest
import torch

from kl_comedy.kl import KLTerm, claimed_target, kl_parts, kl_surrogate
from kl_comedy.kl.oracle import Setting, Tree, expected_gradient, log_probs, target_gradient
from kl_comedy.objective import returns_with_costs
from kl_comedy.registry import ADVANTAGES, ESTIMATORS, RECIPES

TREE = Tree.build(vocabulary=3, length=4, ends=True)
REGIMES = ("on_policy", "off_policy", "mixed")
TOLERANCE = 1e-10


@pytest.fixture(scope="module", params=[(seed, parameters) for seed in (0, 1) for parameters in (None, 4)], ids=str)
def settings(request):
    seed, parameters = request.param
    return {r: Setting.random(TREE, regime=r, seed=seed, parameters=parameters) for r in REGIMES}


def expected(setting, *terms):
    return expected_gradient(setting, terms).gradient_D


def same(a, b):
    scale = max(float(a.norm()), float(b.norm()), 1.0)
    return float((a - b).norm()) <= TOLERANCE * scale


def per_sample(setting, term):
    """The gradient of each completion's surrogate, ``[B, D]``."""
    theta_D = setting.theta_D.clone().requires_grad_(True)
    logp_NV = setting.policy_logp(theta_D)
    logp_BT = log_probs(TREE, logp_NV)
    ref_BT = log_probs(TREE, setting.ref_logp_NV)
    exact_BT = (logp_NV.exp() * (logp_NV - setting.ref_logp_NV)).sum(-1)[TREE.prefix_BT] * TREE.mask_BT
    surrogate_BT = kl_surrogate(
        term,
        logp_BT=logp_BT,
        ref_logp_BT=ref_BT,
        behaviour_logp_BT=setting.behaviour_logp_BT,
        mask_BT=TREE.mask_BT,
        exact_kl_BT=exact_BT,
    )
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


@pytest.mark.parametrize(("one", "other"), EQUAL_SAMPLE_BY_SAMPLE_ON_POLICY, ids=lambda term: term.label())
def test_equal_sample_by_sample_on_policy(settings, one, other):
    assert same(per_sample(settings["on_policy"], one), per_sample(settings["on_policy"], other))


def test_ratio_times_k3_has_coefficient_rho_l_off_policy(settings):
    """rho (k3 + 1 - r) = rho l for every token: TRL's and DeepSeek's forms are one estimator."""
    setting = settings["off_policy"]
    k3 = per_sample(setting, KLTerm("k3", placement="loss", correction="token"))
    k1 = per_sample(setting, KLTerm("k1", placement="reward", credit="own", correction="token"))
    k2 = per_sample(setting, KLTerm("k2", placement="loss", correction="token_detached"))
    assert same(k3, k1) and same(k3, k2)


def test_two_betas_are_two_coefficients(settings):
    setting = settings["on_policy"]
    reward, loss = KLTerm("k3", placement="reward", beta=0.3), KLTerm("k3", placement="loss", beta=0.7)
    apart = 0.3 * expected(setting, KLTerm("k3", placement="reward")) + 0.7 * expected(
        setting, KLTerm("k3", placement="loss")
    )
    assert same(expected(setting, reward, loss), apart)


def test_past_costs_have_zero_mean_on_policy(settings):
    setting = settings["on_policy"]
    for estimator in ("k1", "k2", "k3", "abs", "exact", "exact_forward"):
        total = expected(setting, KLTerm(estimator, placement="reward", credit="total"))
        assert same(total, expected(setting, KLTerm(estimator, placement="reward", credit="to_go")))


def test_a_term_against_the_sampler_is_zero_at_the_sampler_and_restores_it(settings):
    trust = KLTerm("k2", placement="loss", reference="sampler", correction="token_detached")
    assert float(expected(settings["on_policy"], trust).norm()) < TOLERANCE
    assert float(expected(settings["off_policy"], trust).norm()) > 1e-3


def test_every_recipe_has_an_expected_gradient(settings):
    for entry in RECIPES:
        for regime in REGIMES:
            assert bool(torch.isfinite(expected(settings[regime], *entry.fn())).all())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "k_lambda", "exact", "exact_forward"])
@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_at_the_reference_the_estimate_is_exactly_zero(estimator, placement):
    """Bitwise zero cost and value when policy and reference are the same numbers."""
    logp_BT = torch.randn(5, 6)
    mask_BT = torch.arange(6)[None] < torch.tensor([[6], [1], [3], [4], [2]])
    parts = kl_parts(
        KLTerm(estimator, placement=placement),
        logp_BT=logp_BT,
        ref_logp_BT=logp_BT.clone(),
        behaviour_logp_BT=logp_BT,
        mask_BT=mask_BT,
        exact_kl_BT=torch.zeros(5, 6),
    )
    assert torch.equal(parts.cost_BT, torch.zeros(5, 6)) and torch.equal(parts.pathwise_BT, torch.zeros(5, 6))


@pytest.mark.parametrize(("advantage", "factor"), [("none", 1.0), ("rloo", 1.0), ("dr_grpo", 2 / 3)])
@pytest.mark.parametrize("credit", ["total", "to_go", "own"])
def test_a_cost_before_the_baseline_keeps_its_expectation(advantage, factor, credit):
    """Groups of 3 independent completions, every triple enumerated: leave-one-out is unbiased, the group
    mean shrinks the gradient by 1 - 1/G."""
    tree = Tree.build(vocabulary=2, length=3, ends=True)
    setting = Setting.random(tree, regime="on_policy", seed=3)
    term = KLTerm("k1", placement="reward", credit=credit, baseline="before")
    theta_D = setting.theta_D.clone().requires_grad_(True)
    logp_BT = log_probs(tree, setting.policy_logp(theta_D))
    cost_BT = kl_parts(
        term,
        logp_BT=logp_BT.detach(),
        ref_logp_BT=log_probs(tree, setting.ref_logp_NV),
        behaviour_logp_BT=setting.behaviour_logp_BT,
        mask_BT=tree.mask_BT,
    ).cost_BT
    n = len(tree.mask_BT)
    triples = torch.cartesian_prod(torch.arange(n), torch.arange(n), torch.arange(n))
    probability = setting.behaviour_logp_BT.sum(-1).exp()[triples].prod(-1)
    reward = torch.linspace(0, 1, n, dtype=torch.float64)
    flat = triples.flatten()
    returns_BT = returns_with_costs(reward[flat], cost_BT[flat], tree.length)
    group_B = torch.arange(len(triples)).repeat_interleave(3)
    advantage_BT = ADVANTAGES.get(advantage).fn(returns_BT, tree.mask_BT[flat], group_B)
    loss_B = -(advantage_BT * logp_BT[flat] * tree.mask_BT[flat]).sum(-1)
    got = torch.autograd.grad((probability.repeat_interleave(3) * loss_B).sum() / 3, theta_D, retain_graph=True)[0]
    score = torch.autograd.grad((logp_BT.detach().sum(-1).exp() * reward * logp_BT.sum(-1)).sum(), theta_D)[0]
    wanted = -score + expected_gradient(setting, [KLTerm("k1", placement="reward", credit=credit)]).gradient_D
    assert same(got, factor * wanted)


def test_nothing_is_clamped_far_from_the_reference():
    """Gradients stay alive at log-ratios where clamped implementations return zero."""
    logp_BT = torch.tensor([[-30.0, 25.0 - 26.0]], dtype=torch.float64, requires_grad=True)
    ref_BT = torch.tensor([[-1.0, -26.0]], dtype=torch.float64)
    for estimator, wanted in (("k3", [1 - math.exp(29), 1 - math.exp(-25)]), ("k2", [-29.0, 25.0])):
        surrogate_BT = kl_surrogate(
            KLTerm(estimator, placement="loss"),
            logp_BT=logp_BT,
            ref_logp_BT=ref_BT,
            behaviour_logp_BT=logp_BT.detach(),
            mask_BT=torch.ones(1, 2, dtype=torch.bool),
        )
        (gradient,) = torch.autograd.grad(surrogate_BT.sum(), logp_BT)
        assert torch.allclose(gradient, torch.tensor([wanted], dtype=torch.float64), rtol=1e-12)


def test_an_estimator_of_the_forward_kl_claims_it_once_its_score_is_there(settings, monkeypatch):
    """``r log r - (r - 1)`` has the forward KL as its mean; times the differentiated ratio, its gradient too."""
    monkeypatch.setattr(ESTIMATORS, "_entries", dict(ESTIMATORS._entries))

    def forward(log_ratio):
        """Forward KL, sampled from the policy."""
        return -log_ratio * (-log_ratio).exp() - torch.expm1(-log_ratio)

    ESTIMATORS.register("forward", source="this test", claims=("value:forward",), needs="log_ratio")(forward)
    term = KLTerm("forward", placement="loss", correction="token")
    for regime in REGIMES:
        assert claimed_target(term, regime) == "token_forward"
        assert same(expected(settings[regime], term), target_gradient(settings[regime], "token_forward"))
