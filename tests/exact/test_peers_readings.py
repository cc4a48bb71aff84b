"""What other systems' flags mean: readings against their formulas written out, enumerated; defaults; advice.

The formulas below are written from the published sources, not from the readings: their expected gradient must be
that of the equivalent terms. A test goes through all its rows and reports every row that fails.
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
from kl_comedy.lab.peers import GOALS, SYSTEMS, advise, read, render, switched_on
from kl_comedy.registry import POLICY_CORRECTIONS

TREE = Tree.build(vocabulary=3, length=3)
NEAR, FAR = 0.5, 8.0


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


LOSSES = {
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
    "trinity:": (lambda r: delta(r).square() / 2, 0.001),
    "trinity:kl_loss_fn=corrected_k3": (lambda r: ratio(r).clamp(0, 2) * k3(delta(r)), 0.001),
    "trinity:algorithm_type=rloo,kl_loss_fn=none,kl_penalty_fn=k1": (in_old_reward(lambda d: d, whole), 0.001),
    "oat:": (lambda r: k3(delta(r).clamp(-40, 40)), 0.1),
    "oat:beta=0,kl_penalty_coef=0.1": (in_old_reward(lambda d: d, whole), 0.1),
    "torchforge:": (lambda r: k3(delta(r)), 0.1),
    "ms-swift:": (low_var, 0.04),
    "ms-swift:advantage_estimator=rloo": (in_old_reward(lambda d: d, whole), 0.04),
}
"""Flags -> the loss they make (detached parts detached), and its coefficient. Clamps are the system's own."""

BY_ADVANTAGE = {
    "verl:use_kl_in_reward=true,adv_estimator={}": (
        0.001,
        "gae reinforce_plus_plus",
        "grpo grpo_vectorized grpo_passk rloo rloo_vectorized reinforce_plus_plus_baseline opo gpg",
    ),
    "skyrl:use_kl_loss=false,use_kl_in_reward=true,kl_estimator_type=k1,advantage_estimator={}": (
        0.001,
        "gae reinforce++",
        "grpo rloo maxrl",
    ),
    "roll:add_token_level_kl=true,lambd=1,adv_estimator={}": (0.2, "gae reinforce grpo gigpo step_reinforce", ""),
    "slime:kl_coef=0.01,advantage_estimator={}": (0.01, "ppo reinforce_plus_plus", ""),
    "oat:beta=0,kl_penalty_coef=0.1,critic_type={}": (0.1, "ppo", "drgrpo"),
    "trinity:kl_loss_fn=none,kl_penalty_fn=k1,algorithm_type={}": (0.001, "", "rloo grpo_verl"),
    "ms-swift:kl_in_reward=true,advantage_estimator={}": (0.04, "", "grpo rloo reinforce_plus_plus"),
}
"""k1 in the reward, with {} one of the system's advantage estimators: the coefficient, the estimators under which a
token's cost is that to go, and those under which it is that of the whole completion."""
for _text, (_beta, _to_go, _whole) in BY_ADVANTAGE.items():
    for _names, _credit in ((_to_go, to_go), (_whole, whole)):
        LOSSES |= {_text.format(name): (in_old_reward(lambda d: d, _credit), _beta) for name in _names.split()}
LOSSES |= {
    f"openrlhf:advantage_estimator={name}": (in_old_reward(lambda d: d.clamp(-10, 10)), 0.01)
    for name in ("reinforce", "rloo", "reinforce_baseline", "dr_grpo", "flash_reinforce")
}


def of_k2(estimate):
    """verl's names with ``+``: the value of an estimate, the gradient of k2."""
    return lambda r: (half := delta(r).square() / 2) - half.detach() + estimate(delta(r)).detach()


def clamped_k3(d):
    return k3(d.clamp(-20, 20)).clamp(-10, 10)


VERL = {
    "kl": lambda d: d,
    "k1": lambda d: d,
    "abs": torch.abs,
    "mse": lambda d: d.square() / 2,
    "k2": lambda d: d.square() / 2,
    "low_var_kl": clamped_k3,
    "k3": clamped_k3,
}
"""verl's estimates, in loss, in reward and of a teacher."""
for _name, _estimate in VERL.items():
    LOSSES |= {
        f"verl:use_kl_loss=true,kl_loss_type={_name}": (lambda r, f=_estimate: f(delta(r)), 0.001),
        f"verl:use_kl_loss=true,kl_loss_type={_name}+": (of_k2(_estimate), 0.001),
    }
    if _name != "k1":  # which verl refuses in loss; kl is the same estimate
        LOSSES[f"verl:distillation=true,distillation_loss_mode={_name}"] = (lambda r, f=_estimate: f(delta(r)), 1.0)
    LOSSES |= {
        f"verl:use_kl_in_reward=true,adv_estimator=rloo,kl_penalty={name}": (in_old_reward(_estimate, whole), 0.001)
        for name in (_name, f"{_name}+")
    }
TRINITY = {
    "k1": lambda d: d,
    "k2": VERL["k2"],
    "k3": k3,
    "low_var_kl": clamped_k3,
    "abs": torch.abs,
    "corrected_k3": k3,
}
LOSSES |= {
    f"trinity:kl_loss_fn=none,kl_penalty_fn={name}": (in_old_reward(estimate), 0.001)
    for name, estimate in TRINITY.items()
}
LOSSES |= {
    "open-instruct:kl_estimator=0": (lambda r: delta(r).clamp(-40, 40), 0.05),
    "open-instruct:kl_estimator=1": (lambda r: delta(r).clamp(-40, 40).square() / 2, 0.05),
    "slime:kl_coef=0.01,advantage_estimator=ppo,kl_loss_type=k3": (in_old_reward(k3), 0.01),
    "roll:add_token_level_kl=true,lambd=1,kl_penalty=abs": (in_old_reward(torch.abs), 0.2),
    "roll:add_token_level_kl=true,lambd=1,kl_penalty=mse": (in_old_reward(VERL["mse"]), 0.2),
}

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
"""Where the notes say that the equivalent term leaves a clamp out."""


def agree(text, formula, coefficient, at):
    terms = read(text).certified_terms()
    ours = exact_moments(at, terms_loss(terms))
    theirs = exact_moments(at, formula)
    target_D = coefficient * theirs.gradient_D
    scale = max(float(target_D.norm()), 1e-3 * coefficient)
    assert float((ours.gradient_D - target_D).norm()) <= 1e-8 * scale, text
    # A token's score has mean zero whatever came before, so the cost to go and the whole cost differ in noise alone.
    noise = coefficient**2 * theirs.variance
    assert abs(ours.variance - noise) <= 1e-8 * max(noise, (1e-3 * coefficient) ** 2), f"{text}: another variance"


def check_all(rows, check):
    """Call ``check(*row)`` for every row; report all rows that fail."""
    failures = []
    for row in rows:
        try:
            check(*row)
        except AssertionError as error:
            failures.append(f"{row}: {str(error).splitlines()[0] if str(error) else 'not equal'}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("distance", [NEAR, FAR])
@pytest.mark.parametrize("regime", REGIMES)
def test_terms_have_the_gradient_of_the_systems_formula(regime, distance):
    at = setting(regime, distance)
    formulas = LOSSES | (WITHIN_CLAMPS if distance == NEAR else {})
    check_all([(text, *formula) for text, formula in formulas.items()], lambda *row: agree(*row, at))
    assert all(read(text).notes for text in WITHIN_CLAMPS)


def test_every_system_has_a_formula_here():
    assert {text.split(":")[0] for text in (*LOSSES, *WITHIN_CLAMPS)} == set(SYSTEMS)


WITHOUT_FORMULA = {
    ("trl", "sync_ref_model", "true"),  # another reference, the same terms
    ("verl", "distillation_loss_mode", "forward_kl_topk"),  # no term
    ("verl", "adv_estimator", "gdpo"),  # takes the cost out of the reward
    ("nemo-rl", "adv_estimator", "gae"),  # with clamps that leave no formula
    ("prime-rl", "loss_type", "ipo"),  # another coefficient of the policy loss's own term
    ("prime-rl", "algo", "opsd"),  # as opd, with another teacher
    ("ms-swift", "kl_in_reward", "false"),  # the default of another estimator
    ("ms-swift", "scale_rewards", "gdpo"),  # takes the cost out of the reward
}


def test_every_value_of_every_flag_that_changes_the_terms_has_a_formula_here():
    """A formula reads it, or WITHOUT_FORMULA says why none does. Each flag is set beside every setting of a formula."""
    missing = set()
    for name, system in SYSTEMS.items():
        texts = [text for text in (*LOSSES, *WITHIN_CLAMPS, *MEASURED.values()) if text.split(":")[0] == name]
        readings = [read(text) for text in texts]
        for flag in system.flags:
            choices = flag.choices or (("true", "false") if isinstance(flag.default, bool) else ())
            for value in {flag.parse(choice, flag.name) for choice in choices} - {flag.default}:
                if any(reading.flags.get(flag.name) == value for reading in readings):
                    continue
                if any(changes(system, reading, flag, value) for reading in readings):
                    missing.add((name, flag.name, str(value).lower()))
    assert missing <= WITHOUT_FORMULA, missing - WITHOUT_FORMULA


def changes(system, reading, flag, value):
    """Whether a value of a flag beside a reading's others makes other terms than its default."""
    try:
        one, other = (read(render(system, {**reading.given, flag.name: each})) for each in (value, flag.default))
    except UserError:  # the two do not go together
        return False
    return bool(one.terms) and one.terms != other.terms


def test_the_comparison_can_fail():
    with pytest.raises(AssertionError):
        agree("trl:beta=0.04", lambda r: k3(delta(r)), 0.04, setting("off_policy"))


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


POLICY_LOSSES = {
    "verl:loss_mode=dppo_tv": (3.0, total_variation(0.2, 0.2)),
    "verl:loss_mode=dppo_tv,clip_ratio=0.1,clip_ratio_low=none,clip_ratio_high=none,clip_ratio_c=1.5": (
        1.5,
        total_variation(0.1, 0.1),
    ),
    "verl:loss_mode=dppo_kl,clip_ratio_low=0.05,clip_ratio_high=0.05": (3.0, binary_kl(0.05, 0.05)),
    "prime-rl:dppo_mask_low=0.1,dppo_mask_high=0.1": (float("inf"), total_variation(0.1, 0.1)),
}
"""Flags -> where the ratio is truncated, and which tokens keep a policy gradient."""


@pytest.mark.parametrize("text", POLICY_LOSSES)
def test_corrections_weight_tokens_as_the_systems_policy_loss_does(text):
    generator = torch.Generator().manual_seed(3)
    new, old = (torch.rand(200, 10, generator=generator, dtype=torch.float64) * 0.98 + 0.01 for _ in range(2))
    advantage = torch.randn(200, 1, generator=generator, dtype=torch.float64).expand_as(new)
    delta, mask = new.log() - old.log(), torch.ones_like(new, dtype=torch.bool)
    cap, keep = POLICY_LOSSES[text]
    theirs = truncated(delta, cap) * keep(delta, advantage, old.log())
    assert (theirs == 0).any() and (theirs > 0).any()
    ours = torch.ones_like(new)
    for name, options in read(text).corrections.items():
        entry = POLICY_CORRECTIONS.get(name)
        taken = {"behaviour_logp_BT": old.log()} if entry.facts.get("probabilities") else {}
        ours = ours * entry.fn(delta, advantage, mask, **taken, **options).weight_BT
    assert torch.allclose(ours, theirs, rtol=1e-10, atol=0)


def test_a_policy_loss_without_an_equivalent_correction_names_none():
    for text in ("verl:loss_mode=dppo_tv,clip_ratio_low=0.1", "prime-rl:loss.type=ipo", "prime-rl:dppo_mask_low=0.1"):
        reading = read(text)
        assert not reading.corrections and any("drops tokens" in note for note in reading.notes), text
    assert not read("verl:use_kl_loss=true").corrections and not read("prime-rl:algo=opd").corrections


# --- against the released code, as measured ------------------------------------------------------------------------
MEASURED = {
    "trl:grpo": "trl:beta=1",
    "trl:grpo/no_bias_correction": "trl:beta=1,use_bias_correction_kl=false",
    "trl:grpo/sequence_ratio": "trl:beta=1,importance_sampling_level=sequence",
    "trl:grpo/sequence_ratio_no_bias_correction": (
        "trl:beta=1,use_bias_correction_kl=false,importance_sampling_level=sequence"
    ),
    **{f"verl:actor/{k}": f"verl:use_kl_loss=true,kl_loss_type={k}" for k in ("low_var_kl", "k3+", "k1", "k2")},
    "verl:abs": "verl:use_kl_loss=true,kl_loss_type=abs",
    **{f"openrlhf:actor/{k}": f"openrlhf:use_loss=true,kl_estimator={k}" for k in ("k1", "k2", "k3")},
    **{
        f"openrlhf:actor/{k}/unbiased_gradient": f"openrlhf:use_loss=true,kl_estimator={k},unbiased_gradient=true"
        for k in ("k1", "k2", "k3")
    },
    **{f"skyrl:{k}": f"skyrl:kl_estimator_type={k}" for k in ("k1", "k2", "k3", "abs")},
    **{f"trinity:{k}": f"trinity:kl_loss_fn={k}" for k in ("k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3")},
    "swift:dapo": "ms-swift:",
    "swift:dapo/sequence_ratio": "ms-swift:importance_sampling_level=sequence",
    **{f"areal:reward/{k}": f"areal:ref=set,kl_estimator={k}" for k in ("k1", "k2", "k3")},
}
"""Rows of results/peers, where the systems' own released code was run on the certificates' instances."""
ROWS = json.loads((Path(__file__).parents[2] / "results/peers/peers.json").read_text())["rows"]


def test_readings_are_what_the_released_code_was_measured_to_do():
    def check(name, text):
        rows = {row["regime"]: row for row in ROWS if row["name"] == name and row["group_size"] == 1}
        assert set(rows) == {"on_policy", "off_policy"}
        reading = read(text)
        if reading.terms is None:
            assert all(row["near_target"] is None and row["equal_to_ours"] is None for row in rows.values())
            return
        certificates = reading.certificates()
        for regime, row in rows.items():
            certificate = certificates[regime]
            assert (certificate.target, certificate.near_target) == (row["target"], row["near_target"])
            bias = certificate.relative_bias["sequence_reverse"]
            assert bias == pytest.approx(row["bias_sequence_reverse"], abs=1e-4)
            assert certificate.variance == pytest.approx(row["variance"], rel=1e-3)

    check_all(MEASURED.items(), check)


# --- flags without an equivalent term ----------------------------------------------------------------------
def test_trl_sequence_level_is_no_reverse_kl():
    """`w k3_t` with the length-normalized, differentiated ratio of the completion: it misses its own target."""
    reading = read("trl:beta=0.04,importance_sampling_level=sequence")
    assert reading.terms is None and "forward" in reading.instead and reading.certificates() == {}

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
    assert reading.terms is None and "u/length" in reading.instead

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
    system, weighted = (exact_moments(at, form).gradient_D for form in (loss, by_position))
    assert float((system - weighted).norm()) < 1e-9 * float(system.norm())


def test_a_centred_cost_to_go_pays_for_length():
    """tinker-cookbook with a discount factor of 1: the KL to go, less a bonus for every further token."""
    reading = read("tinker:kl_penalty_coef=0.1,kl_discount_factor=1")
    assert reading.terms is None and "longer completions" in reading.instead
    at = setting("on_policy")
    mean = 0.3

    def centred(rows):
        return in_old_reward(lambda d: d - mean)(rows)

    def plain(rows):
        return in_old_reward(lambda d: d)(rows)

    def tokens(rows):
        return in_old_reward(torch.ones_like)(rows)

    actual, kl, length = (exact_moments(at, form).gradient_D for form in (centred, plain, tokens))
    assert float(length.norm()) > 0.01
    assert float((actual - (kl - mean * length)).norm()) < 1e-9 * float(kl.norm())


def test_flags_without_an_equivalent_term_are_described_in_words():
    texts = ("areal:", "areal:ref=none", "roll:add_token_level_kl=true,kl_penalty=full")
    texts += ("prime-rl:loss.type=custom", "slime:use_opd=true,advantage_estimator=gspo")
    texts += tuple(f"verl:distillation=true,distillation_loss_mode={mode}" for mode in ("k1", "forward_kl_topk"))
    for text in (*texts, "verl:use_kl_loss=true,kl_loss_type=full"):
        reading = read(text)
        assert reading.terms is None and reading.instead and reading.certificates() == {}, text


def test_a_detached_divergence_of_the_whole_distribution_in_the_advantage_trains_nothing():
    """verl's forward_kl_topk as a cost: its value does not depend on the token that was sampled (miles #2362)."""
    reading = read("verl:distillation=true,distillation_loss_mode=forward_kl_topk,use_policy_gradient=true")
    assert reading.terms == () and "zero in the mean" in reading.no_ops[0]

    def loss(rows):
        ref_logp_BTV, logp_BTV = rows.ref_next_logp_BTV, rows.next_logp_BTV
        top_BTK, ids_BTK = ref_logp_BTV.topk(2)
        value_BT = (top_BTK.exp() * (top_BTK - logp_BTV.gather(-1, ids_BTK))).sum(-1)
        return torch.where(rows.mask_BT, policy_loss(rows, value_BT), 0.0)

    for regime in REGIMES:
        assert float(exact_moments(setting(regime), loss).gradient_D.norm()) < 1e-12


def test_flags_that_distillation_takes_away_are_named():
    reading = read("verl:distillation=true,use_task_rewards=false,use_kl_loss=true,use_kl_in_reward=true")
    assert [term.reference for term in reading.terms] == ["teacher"] and len(reading.no_ops) == 2
    assert read("prime-rl:algo=opd,adv_tau=0.5").no_ops and not read("prime-rl:adv_tau=0.5").no_ops
    assert read("trl:trainer=async_grpo,beta=0.1").terms == () and read("trl:trainer=async_grpo,beta=0.1").no_ops


# --- targets ------------------------------------------------------------------------------------------------------
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
"""Flags, and what they optimize on-policy and off-policy, as long as no clamp or cap acts."""


def test_flags_optimize_what_the_survey_of_their_code_says():
    def check(text, on_policy, off_policy):
        certificates = read(text).certificates(("on_policy", "off_policy"))
        assert target_of(certificates["on_policy"]) == on_policy
        assert target_of(certificates["off_policy"]) == off_policy

    check_all(TARGETS, check)


def test_defaults_have_certificates_or_words():
    def check(name):
        reading = read(f"{name}:")
        acting = switched_on(reading) or reading
        assert acting.certificates() or (acting.terms is None and acting.instead)
        assert reading.terms or reading.instead or reading.notes or reading.no_ops or reading.switch_on
        assert all(c.claim_holds for c in acting.certificates().values())

    check_all([(name,) for name in SYSTEMS], check)


# --- advice -------------------------------------------------------------------------------------------------------
def test_advised_flags_hit_what_they_are_advised_for():
    def check(name, advice):
        if advice.flags is None:
            assert advice.why_not.startswith("no flag of")
            return
        reading = read(advice.flags)
        assert reading.text == advice.flags and not reading.no_ops
        assert target_of(reading.certificates([advice.goal.regime])[advice.goal.regime]) == advice.goal.target

    check_all([(name, advice) for name, system in SYSTEMS.items() for advice in advise(system)], check)


@cache
def cached_target(terms, regime):
    return target_of(certify("reading", terms, regimes=(regime,))[0])


def test_where_no_flag_is_advised_no_single_change_of_a_flag_does():
    """Every flag moved to each of its names or switch positions, from the default switched on: none hits the goal."""

    def check(name):
        system = SYSTEMS[name]
        goals = [advice.goal for advice in advise(system) if advice.flags is None]
        start = switched_on(read(f"{name}:")) or read(f"{name}:")
        for flag in system.flags if goals else ():
            for choice in flag.choices or (("true", "false") if flag.is_switch else ()):
                given = {**start.given, flag.name: flag.parse(choice, flag.name)}
                try:
                    reading = read(render(system, given))
                except UserError:
                    continue
                if any(term.reference == "sampler" for term in reading.terms or ()):
                    continue  # prime-rl: a trust region, or distillation, which reads no reward beside its KL
                for goal in goals:
                    if reading.terms and goal.regime in reading.holds_in:
                        assert cached_target(reading.certified_terms(), goal.regime) != goal.target, (given, goal.name)

    check_all([(name,) for name in SYSTEMS], check)


def test_goals_name_recipes_that_reach_them():
    for goal in GOALS.values():
        assert certify(goal.name, recipe(goal.recipe), regimes=(goal.regime,))[0].target == goal.target
