"""What other systems' flags mean: readings against their formulas written out, enumerated; defaults; advice.

The formulas below are written from the published sources, not from the readings: their expected gradient must be
that of the equivalent terms.
"""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from kl_comedy.errors import UserError
from kl_comedy.kl import REGIMES, recipe
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, exact_moments, terms_loss
from kl_comedy.kl.oracle.certificate import certify
from kl_comedy.peers.systems import GOALS, SYSTEMS, advise, read, render, switched_on
from kl_comedy.registry import POLICY_CORRECTIONS

TREE = Tree.build(vocabulary=3, length=3)
# Distances from the reference: at NEAR no clamp acts, at FAR log-ratios reach the clamps of all systems.
NEAR = 0.5
FAR = 8.0


@cache
def setting(regime, distance=NEAR):
    return Instance.random(
        TREE, InstanceSettings(regime=regime, seed=7, parameters=5, distance=distance, staleness=0.4)
    )


def target_of(certificate):
    """The target hit while no clamp and no cap acts."""
    return certificate.target or certificate.near_target


def delta(rows):
    return torch.where(rows.mask_BT, rows.logp_BT - rows.ref_logp_BT, 0.0)


def old_delta(rows):
    return torch.where(rows.mask_BT, rows.behaviour_logp_BT - rows.ref_logp_BT, 0.0)


def log_ratio(rows):
    return torch.where(rows.mask_BT, rows.logp_BT - rows.behaviour_logp_BT, 0.0)


def ratio(rows):
    return log_ratio(rows).exp()


def k3(value):
    return (-value).exp() - 1 + value


def low_var(rows):
    """verl, SkyRL, ms-swift, Trinity-RFT: clamp, estimate, clamp."""
    return k3(delta(rows).clamp(-20, 20)).clamp(-10, 10)


def straight_through(rows):
    """verl ``k3+``."""
    half = 0.5 * delta(rows).square()
    return half - half.detach() + low_var(rows).detach()


def unbiased(rows):
    """OpenRLHF ``unbiased_gradient``."""
    half = ratio(rows).clamp(max=10).detach() * delta(rows).square() / 2
    return half - half.detach() + k3(delta(rows)).clamp(-10, 10).detach()


def self_weighted(kind):
    """NeMo-RL: the estimate times ``exp(x - stop(x))``."""
    estimates = {"k1": lambda d: d, "k2": lambda d: d.square() / 2, "k3": k3}

    def loss(rows):
        weight = torch.where(rows.mask_BT, rows.logp_BT - rows.logp_BT.detach(), 0.0).exp()
        return weight * estimates[kind](delta(rows))

    return loss


def to_go(costs):
    return costs.flip(-1).cumsum(-1).flip(-1)


def policy_loss(rows, cost):
    """What a policy loss without clip adds for a detached cost (minus an advantage)."""
    return ratio(rows) * cost.detach()


def in_old_reward(estimate, credit=to_go):
    """A token reward at rollout, through the policy loss."""

    def loss(rows):
        costs = torch.where(rows.mask_BT, estimate(old_delta(rows)), 0.0)
        return torch.where(rows.mask_BT, policy_loss(rows, credit(costs)), 0.0)

    return loss


def rloo(rows):
    """TRL: the whole completion's cost times its whole ratio."""
    omega = log_ratio(rows).sum(-1).exp()
    return omega * old_delta(rows).sum(-1)


def whole(costs):
    return costs.sum(-1, keepdim=True).expand_as(costs)


def own(costs):
    return costs


def own_score(rows, cost):
    """A detached cost that weights the token's own score, without a ratio."""
    return cost.detach() * rows.logp_BT.masked_fill(~rows.mask_BT, 0.0)


def k1(d):
    return d


def k2(d):
    return d.square() / 2


def clamped_k3(d):
    return k3(d.clamp(-20, 20)).clamp(-10, 10)


# Flags, and the loss they make (detached parts detached) with its coefficient. Clamps are the system's own.
ONE_BY_ONE = {
    "verl:use_kl_loss=true": (low_var, 0.001),
    "verl:use_kl_loss=true,kl_loss_type=k3+": (straight_through, 0.001),
    "verl:use_kl_loss=true,kl_loss_type=mse,kl_loss_coef=0.2": (lambda r: delta(r).square() / 2, 0.2),
    "verl:use_kl_loss=true,kl_loss_type=abs": (lambda r: delta(r).abs(), 0.001),
    "verl:use_kl_in_reward=true": (in_old_reward(lambda d: d), 0.001),
    "verl:use_kl_in_reward=true,adv_estimator=grpo,kl_penalty=low_var_kl": (
        in_old_reward(lambda d: k3(d.clamp(-20, 20)).clamp(-10, 10), whole),
        0.001,
    ),
    "verl:use_kl_in_reward=true,use_kl_loss=true,kl_coef=0.002": (
        lambda r: 2 * in_old_reward(lambda d: d)(r) + low_var(r),
        0.001,
    ),
    "verl:distillation=true": (low_var, 1.0),
    "verl:distillation=true,distillation_loss_coef=0.3,loss_max_clamp=5": (lambda r: low_var(r).clamp(-5, 5), 0.3),
    "verl:distillation=true,distillation_loss_mode=kl,loss_max_clamp=5": (lambda r: delta(r).clamp(-5, 5), 1.0),
    "verl:distillation=true,distillation_loss_mode=k1,use_policy_gradient=true,use_task_rewards=false": (
        lambda r: policy_loss(r, delta(r)),
        1.0,
    ),
    "verl:distillation=true,use_policy_gradient=true,loss_max_clamp=20,use_kl_loss=true,kl_loss_type=k2": (
        lambda r: policy_loss(r, low_var(r)) + 1e-3 * delta(r).square() / 2,
        1.0,
    ),
    "trl:beta=0.04": (lambda r: ratio(r) * k3(delta(r)), 0.04),
    "trl:beta=0.04,use_bias_correction_kl=false": (lambda r: k3(delta(r)), 0.04),
    "trl:trainer=rloo": (rloo, 0.05),
    "trl:trainer=rloo,kl_coef=0.02": (rloo, 0.02),
    "trl:trainer=ppo": (in_old_reward(k1), 0.05),
    "trl:trainer=ppo,kl_estimator=k3": (in_old_reward(k3), 0.05),
    "openrlhf:": (in_old_reward(lambda d: d.clamp(-10, 10)), 0.01),
    "openrlhf:advantage_estimator=group_norm,kl_estimator=k3": (in_old_reward(lambda d: k3(d).clamp(-10, 10)), 0.01),
    "openrlhf:use_loss=true,kl_estimator=k3": (lambda r: k3(delta(r).clamp(min=-10)).clamp(-10, 10), 0.01),
    "openrlhf:use_loss=true,kl_estimator=k2": (lambda r: (delta(r).square() / 2).clamp(-10, 10), 0.01),
    "openrlhf:use_loss=true,unbiased_gradient=true,kl_estimator=k3": (unbiased, 0.01),
    "slime:use_kl_loss=true,kl_loss_coef=0.01": (delta, 0.01),
    "slime:use_kl_loss=true,kl_loss_coef=0.01,kl_loss_type=low_var_kl": (lambda r: k3(delta(r)).clamp(-10, 10), 0.01),
    "slime:use_kl_loss=true,kl_loss_coef=0.01,kl_loss_type=k2,use_unbiased_kl=true": (
        lambda r: ratio(r) * delta(r).square() / 2,
        0.01,
    ),
    "slime:use_opd=true,opd_kl_coef=0.5": (in_old_reward(lambda d: d, own), 0.5),
    "slime:kl_coef=0.01,advantage_estimator=reinforce_plus_plus": (in_old_reward(lambda d: d), 0.01),
    "slime:kl_coef=0.01,advantage_estimator=reinforce_plus_plus_baseline": (in_old_reward(lambda d: d, own), 0.01),
    "skyrl:": (low_var, 0.001),
    "skyrl:use_kl_loss=false,use_kl_in_reward=true,kl_estimator_type=k1": (in_old_reward(lambda d: d, whole), 0.001),
    "open-instruct:": (lambda r: torch.expm1(-delta(r).clamp(-40, 40)) + delta(r).clamp(-40, 40), 0.05),
    "open-instruct:kl_estimator=3": (lambda r: ratio(r) * delta(r).clamp(-40, 40), 0.05),
    "open-instruct:trainer=ppo,kl_estimator=0": (in_old_reward(k1), 0.05),
    "open-instruct:trainer=ppo": (in_old_reward(k3), 0.05),
    "prime-rl:": (lambda r: log_ratio(r).square(), 1e-3),
    "prime-rl:algo=opd": (
        lambda r: ratio(r) * delta(r).detach() + 1e-3 * log_ratio(r).square(),
        1.0,
    ),
    "pipelinerl:kl_coef=0.1,clamp_log_ratio_ref_new_value=5": (lambda r: k3(delta(r).clamp(-5, 5)), 0.1),
    "areal:ref=set": (in_old_reward(lambda d: d.clamp(-10, 10)), 0.1),
    "roll:add_token_level_kl=true,lambd=1": (in_old_reward(lambda d: d), 0.2),
    "roll:use_kl_loss=true,kl_loss_coef=0.1": (lambda r: k3(delta(r)).clamp(-10, 10), 0.1),
    "tinker:kl_penalty_coef=0.1": (in_old_reward(lambda d: d, own), 0.1),
    "tinker:kl_penalty_coef=1,reference=teacher": (in_old_reward(lambda d: d, own), 1.0),
    "trinity:": (lambda r: delta(r).square() / 2, 0.001),
    "trinity:kl_loss_fn=corrected_k3": (lambda r: ratio(r).clamp(0, 2) * k3(delta(r)), 0.001),
    "trinity:algorithm_type=rloo,kl_loss_fn=none,kl_penalty_fn=k1": (in_old_reward(lambda d: d, whole), 0.001),
    "oat:": (lambda r: k3(delta(r).clamp(-40, 40)), 0.1),
    "oat:beta=0,kl_penalty_coef=0.1": (in_old_reward(lambda d: d, whole), 0.1),
    "torchforge:": (lambda r: k3(delta(r)), 0.1),
    "ms-swift:": (low_var, 0.04),
    "ms-swift:advantage_estimator=rloo": (in_old_reward(lambda d: d, whole), 0.04),
    "open-instruct:kl_estimator=0": (lambda r: delta(r).clamp(-40, 40), 0.05),
    "open-instruct:kl_estimator=1": (lambda r: delta(r).clamp(-40, 40).square() / 2, 0.05),
    "slime:kl_coef=0.01,advantage_estimator=ppo,kl_loss_type=k3": (in_old_reward(k3), 0.01),
    "roll:add_token_level_kl=true,lambd=1,kl_penalty=abs": (in_old_reward(torch.abs), 0.2),
    "roll:add_token_level_kl=true,lambd=1,kl_penalty=mse": (in_old_reward(k2), 0.2),
    "verl:use_kl_in_reward=true,adv_estimator=rloo,bypass_mode=true,rollout_correction_loss=reinforce,"
    "rollout_is=sequence": (rloo, 0.001),
    "ms-swift:beta=0,teacher=true,teacher_kl_coef=0.5": (in_old_reward(k1, own), 0.5),
    "nemo-rl:adv_estimator=opd,reference_policy_kl_penalty=0": (in_old_reward(k1, own), 1.0),
    "nemo-rl:adv_estimator=opd,reference_policy_kl_penalty=0,disable_ppo_ratio=true": (
        lambda r: own_score(r, old_delta(r)),
        1.0,
    ),
    "unsloth:": (lambda r: k3(delta(r)), 0.001),
    "axolotl:rl_beta=0.04": (lambda r: k3(delta(r)), 0.04),
    "axolotl:beta=0.04,rl_beta=0.1,use_bias_correction_kl=true": (lambda r: ratio(r) * k3(delta(r)), 0.04),
    "miles:use_kl_loss=true,kl_loss_coef=0.01": (delta, 0.01),
    "miles:use_kl_loss=true,kl_loss_coef=0.01,kl_loss_type=low_var_kl": (
        lambda r: k3(delta(r).clamp(-20, 20)).clamp(-10, 10),
        0.01,
    ),
    "miles:use_kl_loss=true,kl_loss_coef=0.01,kl_loss_type=k2,use_unbiased_kl=true": (
        lambda r: ratio(r) * k2(delta(r)),
        0.01,
    ),
    "miles:use_opd=true,opd_kl_coef=0.5": (in_old_reward(k1, own), 0.5),
    "miles:kl_coef=0.01,advantage_estimator=reinforce_plus_plus_baseline": (in_old_reward(k1, own), 0.01),
    "miles:kl_coef=0.01,advantage_estimator=ppo,kl_loss_type=k3": (in_old_reward(k3), 0.01),
    "rlinf:adv_type=opd": (in_old_reward(k1, own), 1.0),
    "rlinf:kl_beta=0.1,kl_penalty_type=k2": (lambda r: k2(-delta(r)), 0.1),
    "tunix:": (delta, 0.04),
    "tunix:kl_loss_mode=mse_kl": (lambda r: k2(delta(r)), 0.04),
    "tunix:kl_loss_mode=low_var_kl": (lambda r: k3(delta(r)), 0.04),
    "tunix:algorithm=ppo": (in_old_reward(k3), 0.04),
    "tunix:algorithm=ppo,kl_method=kl": (in_old_reward(k1), 0.04),
    "tunix:algorithm=ppo,kl_method=mse_kl,kl_clamp_value=4": (in_old_reward(lambda d: k2(d).clamp(-4, 4)), 0.04),
    "molt:": (in_old_reward(k1), 0.01),
    "molt:kl_estimator=k2,advantage_estimator=gae": (in_old_reward(lambda d: k2(d).clamp(-10, 10)), 0.01),
    "molt:kl_estimator=k3": (in_old_reward(lambda d: k3(d).clamp(-10, 10)), 0.01),
    "molt:use_loss=true": (delta, 0.01),
    "molt:use_loss=true,kl_estimator=k2": (lambda r: k2(delta(r)).clamp(-10, 10), 0.01),
    "molt:use_loss=true,kl_estimator=k3": (lambda r: k3(delta(r)).clamp(-10, 10), 0.01),
    "molt:advantage_estimator=on_policy_distill": (in_old_reward(k1, own), 1.0),
}

# k1 in the reward, with {} one of the system's advantage estimators: the coefficient, the estimators under which a
# token's cost is that to go, and those under which it is that of the whole completion.
BY_ADVANTAGE = {
    "verl:use_kl_in_reward=true,adv_estimator={}": (
        0.001,
        ["gae", "reinforce_plus_plus"],
        [
            "grpo",
            "grpo_vectorized",
            "grpo_passk",
            "rloo",
            "rloo_vectorized",
            "reinforce_plus_plus_baseline",
            "opo",
            "gpg",
        ],
    ),
    "skyrl:use_kl_loss=false,use_kl_in_reward=true,kl_estimator_type=k1,advantage_estimator={}": (
        0.001,
        ["gae", "reinforce++"],
        ["grpo", "rloo", "maxrl"],
    ),
    "roll:add_token_level_kl=true,lambd=1,adv_estimator={}": (
        0.2,
        ["gae", "reinforce", "grpo", "gigpo", "step_reinforce"],
        [],
    ),
    "slime:kl_coef=0.01,advantage_estimator={}": (0.01, ["ppo", "reinforce_plus_plus"], []),
    "miles:kl_coef=0.01,advantage_estimator={}": (0.01, ["ppo", "reinforce_plus_plus"], []),
    "easyr1:use_kl_loss=false,kl_penalty=kl,adv_estimator={}": (
        0.01,
        ["gae", "reinforce_plus_plus"],
        ["grpo", "grpo_passk", "rloo", "remax"],
    ),
    "oat:beta=0,kl_penalty_coef=0.1,critic_type={}": (0.1, ["ppo"], ["drgrpo"]),
    "trinity:kl_loss_fn=none,kl_penalty_fn=k1,algorithm_type={}": (0.001, [], ["rloo", "grpo_verl"]),
    "ms-swift:kl_in_reward=true,advantage_estimator={}": (0.04, [], ["grpo", "rloo", "reinforce_plus_plus"]),
}


def formulas_by_advantage():
    formulas = {}
    for text, (coefficient, with_cost_to_go, with_whole_cost) in BY_ADVANTAGE.items():
        for name in with_cost_to_go:
            formulas[text.format(name)] = (in_old_reward(k1, to_go), coefficient)
        for name in with_whole_cost:
            formulas[text.format(name)] = (in_old_reward(k1, whole), coefficient)
    for name in ("reinforce", "rloo", "reinforce_baseline", "dr_grpo", "flash_reinforce"):
        formulas[f"openrlhf:advantage_estimator={name}"] = (in_old_reward(lambda d: d.clamp(-10, 10)), 0.01)
    return formulas


def in_loss(estimate):
    return lambda rows: estimate(delta(rows))


def with_the_gradient_of_k2(estimate):
    """verl's names with ``+``: the value of an estimate, the gradient of k2."""

    def loss(rows):
        half = k2(delta(rows))
        return half - half.detach() + estimate(delta(rows)).detach()

    return loss


VERL_ESTIMATES = {
    "kl": k1,
    "k1": k1,
    "abs": torch.abs,
    "mse": k2,
    "k2": k2,
    "low_var_kl": clamped_k3,
    "k3": clamped_k3,
}


def formulas_of_verls_estimates():
    """In loss, in reward and of a teacher."""
    formulas = {}
    for name, estimate in VERL_ESTIMATES.items():
        in_reward = (in_old_reward(estimate, whole), 0.001)
        formulas[f"verl:use_kl_loss=true,kl_loss_type={name}"] = (in_loss(estimate), 0.001)
        formulas[f"verl:use_kl_loss=true,kl_loss_type={name}+"] = (with_the_gradient_of_k2(estimate), 0.001)
        formulas[f"verl:use_kl_in_reward=true,adv_estimator=rloo,kl_penalty={name}"] = in_reward
        formulas[f"verl:use_kl_in_reward=true,adv_estimator=rloo,kl_penalty={name}+"] = in_reward
        if name != "k1":  # verl refuses k1 of a teacher in loss; kl is the same estimate
            formulas[f"verl:distillation=true,distillation_loss_mode={name}"] = (in_loss(estimate), 1.0)
    return formulas


def formulas_of_verls_estimates_elsewhere():
    """rLLM, which hands its flags to verl, and RLinf's Megatron actor, which has a copy of verl's function."""
    formulas = {}
    for name, estimate in VERL_ESTIMATES.items():
        formulas[f"rllm:kl_beta=0.1,kl_loss_type={name}"] = (in_loss(estimate), 0.1)
        formulas[f"rllm:use_kl_loss=true,kl_loss_coef=0.1,kl_loss_type={name}+"] = (
            with_the_gradient_of_k2(estimate),
            0.1,
        )
        megatron = f"rlinf:training_backend=megatron,kl_beta=0.1,kl_penalty_type={name}"
        formulas[megatron] = (in_loss(estimate), 0.1)
        if name in ("kl", "abs", "mse", "low_var_kl"):
            formulas[f"easyr1:kl_penalty={name}"] = (in_loss(estimate), 0.01)
            in_reward = (in_old_reward(estimate, whole), 0.01)
            formulas[f"easyr1:use_kl_loss=false,kl_penalty={name}"] = in_reward
        formulas[f"rlinf:adv_type=reinpp,reinpp_kl_beta=0.1,kl_penalty_type={name}"] = (in_old_reward(estimate), 0.1)
    return formulas


TRINITY_ESTIMATES = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var_kl": clamped_k3,
    "abs": torch.abs,
    "corrected_k3": k3,
}


def formulas_of_trinitys_estimates():
    formulas = {}
    for name, estimate in TRINITY_ESTIMATES.items():
        formulas[f"trinity:kl_loss_fn=none,kl_penalty_fn={name}"] = (in_old_reward(estimate), 0.001)
    return formulas


LOSSES = {
    **ONE_BY_ONE,
    **formulas_by_advantage(),
    **formulas_of_verls_estimates(),
    **formulas_of_verls_estimates_elsewhere(),
    **formulas_of_trinitys_estimates(),
}

# Where the notes say that the equivalent term leaves a clamp out.
WITHIN_CLAMPS = {
    "nemo-rl:": (self_weighted("k3"), 0.01),
    "nemo-rl:reference_policy_kl_type=k1": (self_weighted("k1"), 0.01),
    "nemo-rl:reference_policy_kl_type=k2": (self_weighted("k2"), 0.01),
    "nemo-rl:use_on_policy_kl_approximation=true": (lambda r: ratio(r) * k3(delta(r)), 0.01),
    "nemo-rl:use_kl_in_reward=true,adv_estimator=reinforce_plus_plus,reference_policy_kl_type=k1": (
        in_old_reward(lambda d: d, own),
        0.01,
    ),
    "slime:use_kl_loss=true,kl_loss_coef=0.01,kl_loss_type=low_var_kl,use_unbiased_kl=true": (
        lambda r: (ratio(r) * k3(delta(r))).clamp(-10, 10),
        0.01,
    ),
}


def assert_terms_have_the_moments_of(formula, coefficient, text, regime, distance=NEAR):
    """``formula`` is the system's loss at a coefficient of 1, ``text`` the flags whose reading is compared."""
    at = setting(regime, distance)
    terms = read(text).certified_terms()
    ours = exact_moments(at, terms_loss(terms))
    theirs = exact_moments(at, formula)
    target_D = coefficient * theirs.gradient_D
    scale = max(float(target_D.norm()), 1e-3 * coefficient)
    assert float((ours.gradient_D - target_D).norm()) <= 1e-8 * scale, f"another gradient {regime}"
    # A token's score has mean zero whatever came before, so the cost to go and the whole cost differ in noise alone.
    variance = coefficient**2 * theirs.variance
    tolerance = 1e-8 * max(variance, (1e-3 * coefficient) ** 2)
    assert abs(ours.variance - variance) <= tolerance, f"another variance {regime}"


@pytest.mark.parametrize("distance", [NEAR, FAR], ids=["near", "far"])
@pytest.mark.parametrize("text", LOSSES)
def test_terms_have_the_gradient_of_the_systems_formula(text, distance):
    formula, coefficient = LOSSES[text]
    for regime in REGIMES:
        assert_terms_have_the_moments_of(formula, coefficient, text, regime, distance)


@pytest.mark.parametrize("text", WITHIN_CLAMPS)
def test_terms_have_the_gradient_of_the_systems_formula_while_no_clamp_acts(text):
    formula, coefficient = WITHIN_CLAMPS[text]
    for regime in REGIMES:
        assert_terms_have_the_moments_of(formula, coefficient, text, regime)


@pytest.mark.parametrize("text", WITHIN_CLAMPS)
def test_a_reading_that_leaves_a_clamp_out_has_a_note(text):
    assert read(text).notes


def system_of(text):
    return text.split(":")[0]


WITHOUT_KL = {"torchtitan-rl"}
"""Systems with no KL at all."""


def test_every_system_has_a_formula_here():
    assert {system_of(text) for text in (*LOSSES, *WITHIN_CLAMPS)} | WITHOUT_KL == set(SYSTEMS)


@pytest.mark.parametrize("name", WITHOUT_KL)
def test_a_system_without_a_kl_has_no_terms_whatever_its_flags(name):
    for flag in SYSTEMS[name].flags:
        for choice in flag.choices:
            assert read(f"{name}:{flag.name}={choice}").terms == ()


def test_rlinfs_fsdp_loss_has_the_gradient_of_half_the_chi_square_divergence():
    """The formula with its arguments swapped, as the source has it, against the divergence by enumeration."""
    at = setting("on_policy")
    swapped = exact_moments(at, lambda rows: k3(-delta(rows))).gradient_D
    half_chi_square = exact_moments(at, lambda rows: own_score(rows, torch.expm1(delta(rows)))).gradient_D
    assert float((swapped - half_chi_square).norm()) <= 1e-8 * float(swapped.norm())
    kl = exact_moments(at, lambda rows: k2(delta(rows))).gradient_D
    assert float((swapped - kl).norm()) > 0.1 * float(kl.norm())
    assert "chi-square" in read("rlinf:kl_beta=0.001").instead


WITHOUT_FORMULA = {
    ("trl", "sync_ref_model", "true"),  # another reference, the same terms
    ("verl", "distillation_loss_mode", "forward_kl_topk"),  # no term
    ("verl", "adv_estimator", "gdpo"),  # takes the cost out of the reward
    ("verl", "recipe_trainer", "prime"),  # never applies the KL in the reward
    ("nemo-rl", "adv_estimator", "gae"),  # with clamps that leave no formula
    ("prime-rl", "loss_type", "ipo"),  # another coefficient of the policy loss's own term
    ("prime-rl", "algo", "opsd"),  # as opd, with another teacher
    ("axolotl", "sync_ref_model", "true"),  # another reference, the same terms
    ("ms-swift", "kl_in_reward", "false"),  # the default of another estimator
    ("ms-swift", "scale_rewards", "gdpo"),  # takes the cost out of the reward
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_value_of_every_flag_that_changes_the_terms_has_a_formula_here(name):
    """A formula reads it, or WITHOUT_FORMULA says why none does. Each flag is set beside every setting of a formula."""
    system = SYSTEMS[name]
    readings = [read(text) for text in (*LOSSES, *WITHIN_CLAMPS, *MEASURED.values()) if system_of(text) == name]
    missing = set()
    for flag in system.flags:
        for value in other_values(flag):
            read_by_a_formula = any(reading.flags.get(flag.name) == value for reading in readings)
            if read_by_a_formula:
                continue
            if any(changes_the_terms(system, reading, flag, value) for reading in readings):
                missing.add((name, flag.name, str(value).lower()))
    assert missing - WITHOUT_FORMULA == set()


def other_values(flag):
    """The values of a flag with names, and of a switch, that are not its default."""
    choices = flag.choices
    if not choices and isinstance(flag.default, bool):
        choices = ("true", "false")
    return {flag.parse(choice, flag.name) for choice in choices or ()} - {flag.default}


def changes_the_terms(system, reading, flag, value):
    """Whether a value of a flag beside a reading's others makes other terms than its default."""
    try:
        with_value = read(render(system, {**reading.given, flag.name: value}))
        with_default = read(render(system, {**reading.given, flag.name: flag.default}))
    except UserError:  # the value does not go together with the others
        return False
    return bool(with_value.terms) and with_value.terms != with_default.terms


def test_the_comparison_can_fail():
    """TRL's default has the ratio of the token, which this formula lacks."""
    with pytest.raises(AssertionError, match="another gradient"):
        assert_terms_have_the_moments_of(in_loss(k3), 0.04, "trl:beta=0.04", "off_policy")


def test_far_settings_reach_the_clamps():
    at = setting("on_policy", FAR)
    clamped = exact_moments(at, low_var).gradient_D
    free = exact_moments(at, lambda r: k3(delta(r))).gradient_D
    assert float((clamped - free).norm()) > 0.01 * float(free.norm())


# --- policy losses ------------------------------------------------------------------------------------------------
def truncated(delta, cap):
    return delta.exp().clamp(max=cap)


def inside(risen, fallen, advantage):
    """Where the bound of the advantage's sign holds."""
    return torch.where(advantage > 0, risen, fallen).double()


def total_variation(low, high):
    def keep(delta, advantage, behaviour_logp):
        moved = (behaviour_logp + delta).exp() - behaviour_logp.exp()
        return inside(moved <= high, moved >= -low, advantage)

    return keep


def binary_kl(low, high):
    def keep(delta, advantage, behaviour_logp):
        old, new = behaviour_logp.exp(), (behaviour_logp + delta).exp()
        kl = -old * delta + (1 - old) * ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
        return inside((kl <= high) | (new <= old), (kl <= low) | (new >= old), advantage)

    return keep


# Flags, where the ratio is truncated, and which tokens keep a policy gradient.
POLICY_LOSSES = {
    "verl:loss_mode=dppo_tv": (3.0, total_variation(0.2, 0.2)),
    "verl:loss_mode=dppo_tv,clip_ratio=0.1,clip_ratio_low=none,clip_ratio_high=none,clip_ratio_c=1.5": (
        1.5,
        total_variation(0.1, 0.1),
    ),
    "verl:loss_mode=dppo_kl,clip_ratio_low=0.05,clip_ratio_high=0.05": (3.0, binary_kl(0.05, 0.05)),
    "prime-rl:dppo_mask_low=0.1,dppo_mask_high=0.1": (float("inf"), total_variation(0.1, 0.1)),
}


@pytest.mark.parametrize("text", POLICY_LOSSES)
def test_corrections_weight_tokens_as_the_systems_policy_loss_does(text):
    generator = torch.Generator().manual_seed(3)
    new = torch.rand(200, 10, generator=generator, dtype=torch.float64) * 0.98 + 0.01
    old = torch.rand(200, 10, generator=generator, dtype=torch.float64) * 0.98 + 0.01
    advantage = torch.randn(200, 1, generator=generator, dtype=torch.float64).expand_as(new)
    delta = new.log() - old.log()
    mask = torch.ones_like(new, dtype=torch.bool)
    cap, keep = POLICY_LOSSES[text]
    theirs = truncated(delta, cap) * keep(delta, advantage, old.log())
    assert (theirs == 0).any(), "no token is dropped: the comparison would say nothing of the bound"
    assert (theirs > 0).any()

    ours = torch.ones_like(new)
    for name, options in read(text).corrections.items():
        entry = POLICY_CORRECTIONS.get(name)
        arguments = dict(options)
        if entry.facts.get("probabilities"):
            arguments["behaviour_logp_BT"] = old.log()
        ours = ours * entry.fn(delta, advantage, mask, **arguments).weight_BT
    assert torch.allclose(ours, theirs, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    "text", ["verl:loss_mode=dppo_tv,clip_ratio_low=0.1", "prime-rl:loss.type=ipo", "prime-rl:dppo_mask_low=0.1"]
)
def test_a_policy_loss_without_an_equivalent_correction_is_described(text):
    reading = read(text)
    assert not reading.corrections
    assert "drops tokens" in "\n".join(reading.notes)


@pytest.mark.parametrize("text", ["verl:use_kl_loss=true", "prime-rl:algo=opd"])
def test_a_policy_loss_that_drops_no_token_has_no_correction(text):
    assert not read(text).corrections


# --- against the released code, as measured ------------------------------------------------------------------------
# Rows of results/peers, where the systems' own released code was run on the certificates' instances, and their flags.
MEASURED = {
    "trl:grpo": "trl:beta=1",
    "trl:grpo/no_bias_correction": "trl:beta=1,use_bias_correction_kl=false",
    "trl:grpo/sequence_ratio": "trl:beta=1,importance_sampling_level=sequence",
    "trl:grpo/sequence_ratio_no_bias_correction": (
        "trl:beta=1,use_bias_correction_kl=false,importance_sampling_level=sequence"
    ),
    "verl:actor/low_var_kl": "verl:use_kl_loss=true,kl_loss_type=low_var_kl",
    "verl:actor/k3+": "verl:use_kl_loss=true,kl_loss_type=k3+",
    "verl:actor/k1": "verl:use_kl_loss=true,kl_loss_type=k1",
    "verl:actor/k2": "verl:use_kl_loss=true,kl_loss_type=k2",
    "verl:abs": "verl:use_kl_loss=true,kl_loss_type=abs",
    "openrlhf:actor/k1": "openrlhf:use_loss=true,kl_estimator=k1",
    "openrlhf:actor/k2": "openrlhf:use_loss=true,kl_estimator=k2",
    "openrlhf:actor/k3": "openrlhf:use_loss=true,kl_estimator=k3",
    "openrlhf:actor/k1/unbiased_gradient": "openrlhf:use_loss=true,kl_estimator=k1,unbiased_gradient=true",
    "openrlhf:actor/k2/unbiased_gradient": "openrlhf:use_loss=true,kl_estimator=k2,unbiased_gradient=true",
    "openrlhf:actor/k3/unbiased_gradient": "openrlhf:use_loss=true,kl_estimator=k3,unbiased_gradient=true",
    "skyrl:k1": "skyrl:kl_estimator_type=k1",
    "skyrl:k2": "skyrl:kl_estimator_type=k2",
    "skyrl:k3": "skyrl:kl_estimator_type=k3",
    "skyrl:abs": "skyrl:kl_estimator_type=abs",
    "trinity:k1": "trinity:kl_loss_fn=k1",
    "trinity:k2": "trinity:kl_loss_fn=k2",
    "trinity:k3": "trinity:kl_loss_fn=k3",
    "trinity:low_var_kl": "trinity:kl_loss_fn=low_var_kl",
    "trinity:abs": "trinity:kl_loss_fn=abs",
    "trinity:corrected_k3": "trinity:kl_loss_fn=corrected_k3",
    "swift:dapo": "ms-swift:",
    "swift:dapo/sequence_ratio": "ms-swift:importance_sampling_level=sequence",
    "areal:reward/k1": "areal:ref=set,kl_estimator=k1",
    "areal:reward/k2": "areal:ref=set,kl_estimator=k2",
    "areal:reward/k3": "areal:ref=set,kl_estimator=k3",
}
ROWS = json.loads((Path(__file__).parents[2] / "results/peers/peers.json").read_text())["rows"]


@pytest.mark.parametrize("name", MEASURED)
def test_readings_are_what_the_released_code_was_measured_to_do(name):
    rows = {row["regime"]: row for row in ROWS if row["name"] == name and row["group_size"] == 1}
    assert set(rows) == {"on_policy", "off_policy"}
    reading = read(MEASURED[name])
    if reading.terms is None:
        for regime, row in rows.items():
            assert row["near_target"] is None, regime
            assert row["equal_to_ours"] is None, regime
        return
    certificates = reading.certificates()
    for regime, row in rows.items():
        certificate = certificates[regime]
        assert certificate.target == row["target"], regime
        assert certificate.near_target == row["near_target"], regime
        bias = certificate.relative_bias["sequence_reverse"]
        assert bias == pytest.approx(row["bias_sequence_reverse"], abs=1e-4), regime
        assert certificate.variance == pytest.approx(row["variance"], rel=1e-3), regime


# --- flags without an equivalent term ----------------------------------------------------------------------
def test_trl_sequence_level_is_no_reverse_kl():
    """`w k3_t` with the length-normalized, differentiated ratio of the completion: it misses its own target."""
    reading = read("trl:beta=0.04,importance_sampling_level=sequence")
    assert reading.terms is None
    assert "forward" in reading.instead
    assert reading.certificates() == {}

    def loss(rows):
        log_w = log_ratio(rows).sum(-1, keepdim=True)
        return (log_w / rows.mask_BT.sum(-1, keepdim=True)).exp() * k3(delta(rows))

    at = setting("on_policy")
    wrong = exact_moments(at, loss).gradient_D
    right = exact_moments(at, LOSSES["trl:beta=0.04"][0]).gradient_D
    assert float((wrong - right).norm()) > 0.05 * float(right.norm())


def test_openrlhf_gspo_weights_costs_by_position():
    """One ratio for all tokens times costs to go: the cost of token u counts u times."""
    reading = read("openrlhf:policy_loss_type=gspo")
    assert reading.terms is None
    assert "u/length" in reading.instead

    def loss(rows):
        length = rows.mask_BT.sum(-1, keepdim=True)
        log_w = log_ratio(rows).sum(-1, keepdim=True) / length
        return torch.where(rows.mask_BT, log_w.exp() * to_go(old_delta(rows)).detach(), 0.0)

    def by_position(rows):
        length = rows.mask_BT.sum(-1, keepdim=True)
        position = torch.arange(1, rows.mask_BT.shape[1] + 1).double()
        score = torch.where(rows.mask_BT, rows.logp_BT, 0.0).sum(-1)
        return score * (position / length * old_delta(rows)).sum(-1).detach()

    at = setting("on_policy")
    system_D = exact_moments(at, loss).gradient_D
    weighted_D = exact_moments(at, by_position).gradient_D
    assert float((system_D - weighted_D).norm()) < 1e-9 * float(system_D.norm())


def test_a_centred_cost_to_go_pays_for_length():
    """tinker-cookbook with a discount factor of 1: the KL to go, less a bonus for every further token."""
    reading = read("tinker:kl_penalty_coef=0.1,kl_discount_factor=1")
    assert reading.terms is None
    assert "longer completions" in reading.instead
    at = setting("on_policy")
    mean = 0.3
    centred_D = exact_moments(at, in_old_reward(lambda d: d - mean)).gradient_D
    kl_D = exact_moments(at, in_old_reward(k1)).gradient_D
    length_D = exact_moments(at, in_old_reward(torch.ones_like)).gradient_D
    assert float(length_D.norm()) > 0.01
    assert float((centred_D - (kl_D - mean * length_D)).norm()) < 1e-9 * float(kl_D.norm())


@pytest.mark.parametrize(
    "text",
    [
        "areal:",
        "areal:ref=none",
        "roll:add_token_level_kl=true,kl_penalty=full",
        "prime-rl:loss.type=custom",
        "slime:use_opd=true,advantage_estimator=gspo",
        "verl:distillation=true,distillation_loss_mode=k1",
        "verl:distillation=true,distillation_loss_mode=forward_kl_topk",
        "verl:use_kl_loss=true,kl_loss_type=full",
    ],
)
def test_flags_without_an_equivalent_term_are_described_in_words(text):
    reading = read(text)
    assert reading.terms is None
    assert reading.instead
    assert reading.certificates() == {}


def test_a_detached_divergence_of_the_whole_distribution_in_the_advantage_has_no_terms():
    """verl's forward_kl_topk as a cost: its value does not depend on the token that was sampled (miles #2362)."""
    reading = read("verl:distillation=true,distillation_loss_mode=forward_kl_topk,use_policy_gradient=true")
    assert reading.terms == ()
    assert "zero in the mean" in reading.no_ops[0]


@pytest.mark.parametrize("regime", REGIMES)
def test_a_detached_divergence_of_the_whole_distribution_in_the_advantage_trains_nothing(regime):
    def loss(rows):
        top_BTK, ids_BTK = rows.ref_next_logp_BTV.topk(2)
        value_BT = (top_BTK.exp() * (top_BTK - rows.next_logp_BTV.gather(-1, ids_BTK))).sum(-1)
        return torch.where(rows.mask_BT, policy_loss(rows, value_BT), 0.0)

    assert float(exact_moments(setting(regime), loss).gradient_D.norm()) < 1e-12


def test_flags_that_verls_distillation_takes_away_are_named():
    reading = read("verl:distillation=true,use_task_rewards=false,use_kl_loss=true,use_kl_in_reward=true")
    assert [term.reference for term in reading.terms] == ["teacher"]
    assert len(reading.no_ops) == 2


def test_a_flag_that_prime_rls_distillation_takes_away_is_named():
    assert read("prime-rl:algo=opd,adv_tau=0.5").no_ops
    assert not read("prime-rl:adv_tau=0.5").no_ops


def test_a_beta_that_trls_asynchronous_trainer_does_not_read_is_named():
    reading = read("trl:trainer=async_grpo,beta=0.1")
    assert reading.terms == ()
    assert reading.no_ops


# --- targets ------------------------------------------------------------------------------------------------------
# Flags, and what they optimize on-policy and off-policy, as long as no clamp or cap acts.
TARGETS = [
    ("verl:use_kl_loss=true,kl_loss_type=low_var_kl", "token_forward", None),
    ("verl:use_kl_loss=true,kl_loss_type=k1", "zero", None),
    ("verl:use_kl_loss=true,kl_loss_type=abs", None, None),
    ("verl:use_kl_loss=true,kl_loss_type=k3+", "token_reverse", None),
    ("verl:use_kl_loss=true,kl_loss_type=k2", "token_reverse", None),
    ("verl:use_kl_in_reward=true", "sequence_reverse", None),
    ("verl:use_kl_in_reward=true,adv_estimator=grpo", "sequence_reverse", None),
    ("trl:beta=0.04", "token_reverse", "token_reverse"),
    ("trl:beta=0.04,use_bias_correction_kl=false", "token_forward", None),
    ("trl:trainer=rloo", "sequence_reverse", None),
    ("openrlhf:", "sequence_reverse", None),
    ("openrlhf:use_loss=true,kl_estimator=k3", "token_forward", None),
    ("openrlhf:use_loss=true,unbiased_gradient=true", "token_reverse", "token_reverse"),
    ("nemo-rl:", "token_reverse", None),
    ("nemo-rl:use_on_policy_kl_approximation=true", "token_reverse", "token_reverse"),
    ("nemo-rl:reference_policy_kl_type=k2", None, None),
    ("nemo-rl:reference_policy_kl_type=k1", "token_reverse", None),
    ("slime:use_kl_loss=true,kl_loss_coef=0.01", "zero", None),
    ("slime:use_kl_loss=true,kl_loss_coef=0.01,kl_loss_type=k3,use_unbiased_kl=true", "token_reverse", "token_reverse"),
    ("slime:use_kl_loss=true,kl_loss_coef=0.01,kl_loss_type=k2,use_unbiased_kl=true", None, None),
    ("slime:kl_coef=0.01,advantage_estimator=reinforce_plus_plus_baseline", "token_reverse", None),
    ("skyrl:", "token_forward", None),
    ("open-instruct:", "token_forward", None),
    ("open-instruct:kl_estimator=3", "token_reverse", "token_reverse"),
    ("pipelinerl:kl_coef=0.1", "token_forward", None),
    ("areal:ref=set", "sequence_reverse", None),
    ("tinker:kl_penalty_coef=0.1", "token_reverse", None),
    ("oat:", "token_forward", None),
    ("torchforge:", "token_forward", None),
    ("ms-swift:", "token_forward", None),
    ("trinity:", "token_reverse", None),
    ("trinity:kl_loss_fn=corrected_k3", "token_reverse", None),
]


@pytest.mark.parametrize(("text", "on_policy", "off_policy"), TARGETS, ids=[text for text, _, _ in TARGETS])
def test_flags_optimize_what_the_survey_of_their_code_says(text, on_policy, off_policy):
    certificates = read(text).certificates(("on_policy", "off_policy"))
    assert target_of(certificates["on_policy"]) == on_policy
    assert target_of(certificates["off_policy"]) == off_policy


def default_switched_on(name):
    """The reading of a system's defaults, with its KL switched on where it is off by default."""
    reading = read(f"{name}:")
    return switched_on(reading) or reading


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name not in WITHOUT_KL])
def test_the_default_switched_on_has_certificates_or_words(name):
    reading = default_switched_on(name)
    certificates = reading.certificates()
    if not certificates:
        assert reading.terms is None
        assert reading.instead
    for regime, certificate in certificates.items():
        assert certificate.claim_holds, regime


@pytest.mark.parametrize("name", SYSTEMS)
def test_something_is_said_of_every_default(name):
    reading = read(f"{name}:")
    assert reading.terms or reading.instead or reading.notes or reading.no_ops or reading.switch_on


# --- advice -------------------------------------------------------------------------------------------------------
ADVICE = [(name, advice) for name, system in SYSTEMS.items() for advice in advise(system)]


@pytest.mark.parametrize(("name", "advice"), ADVICE, ids=[f"{name} {advice.goal.name}" for name, advice in ADVICE])
def test_advised_flags_hit_what_they_are_advised_for(name, advice):
    if advice.flags is None:
        assert advice.why_not.startswith("no flag of")
        return
    reading = read(advice.flags)
    assert reading.text == advice.flags
    assert not reading.no_ops
    regime = advice.goal.regime
    assert target_of(reading.certificates([regime])[regime]) == advice.goal.target


@cache
def cached_target(terms, regime):
    return target_of(certify("reading", terms, regimes=(regime,))[0])


def readings_one_flag_away(name):
    """Every flag moved to each of its names or switch positions, from the default switched on."""
    system = SYSTEMS[name]
    start = default_switched_on(name)
    readings = []
    for flag in system.flags:
        choices = flag.choices
        if not choices and flag.is_switch:
            choices = ("true", "false")
        for choice in choices or ():
            given = {**start.given, flag.name: flag.parse(choice, flag.name)}
            try:
                readings.append(read(render(system, given)))
            except UserError:
                continue  # the value does not go together with the others
    return readings


UNREACHED = {
    name: [advice.goal for advice in advise(system) if advice.flags is None] for name, system in SYSTEMS.items()
}


@pytest.mark.parametrize("name", [name for name, goals in UNREACHED.items() if goals])
def test_where_no_flag_is_advised_no_single_change_of_a_flag_does(name):
    for reading in readings_one_flag_away(name):
        if not reading.terms:
            continue
        if any(term.reference == "sampler" for term in reading.terms):
            continue  # prime-rl: a trust region, or distillation, which reads no reward beside its KL
        for goal in UNREACHED[name]:
            if goal.regime in reading.holds_in:
                target = cached_target(reading.certified_terms(), goal.regime)
                assert target != goal.target, (reading.given, goal.name)


@pytest.mark.parametrize("goal", GOALS.values(), ids=GOALS)
def test_goals_name_recipes_that_reach_them(goal):
    (certificate,) = certify(goal.name, recipe(goal.recipe), regimes=(goal.regime,))
    assert certificate.target == goal.target
