"""Policy terms under the oracle: what claims the reward gradient has it, what has it claims it; KL terms stay apart."""

import dataclasses
import math

import pytest
import torch

from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import (
    AlgorithmContext,
    Instance,
    InstanceSettings,
    Tree,
    exact_moments,
    expected_gradient,
    kl_effect,
    target_gradient,
    training_loss,
)
from kl_comedy.kl.oracle.gradients import silent_shares
from kl_comedy.kl.oracle.policy_certificate import (
    UPDATES,
    certify_policy,
    claims_exact,
    named_policy_terms,
    reward_gradient,
    reward_loss,
)
from kl_comedy.objective import PolicyTerm
from kl_comedy.objective.policy_corrections import Weights
from kl_comedy.registry import POLICY_CORRECTIONS, Registry

NAMED = dict(named_policy_terms())
TREE = Tree.build(vocabulary=3, length=3)


def setting(regime="off_policy", seed=0, tree=TREE, parameters=5, **options):
    return Instance.random(tree, InstanceSettings(regime=regime, seed=seed, parameters=parameters, **options))


def moments_of(term, where, baseline=0.0):
    """The mean and the variance of the gradient of a policy term's loss, enumerated."""
    return exact_moments(where, reward_loss(term, where, baseline=baseline))


def certificate_of(name, regime):
    """The certificate of a built-in policy term."""
    (certificate,) = certify_policy(name, NAMED[name], regimes=[regime])
    return certificate


@pytest.mark.parametrize("baseline", [0.0, 0.7])
@pytest.mark.parametrize("ends", [True, False], ids=["ends", "full"])
@pytest.mark.parametrize("parameters", [None, 5], ids=["tabular", "shared"])
def test_the_reward_gradient_is_that_of_plain_reinforce_on_policy(ends, parameters, baseline):
    """Two derivations: the chain over prefixes, and the score function over enumerated completions."""
    where = setting("on_policy", tree=Tree.build(vocabulary=3, length=3, ends=ends), parameters=parameters)
    enumerated = moments_of(PolicyTerm(), where, baseline)
    assert enumerated.relative_bias(reward_gradient(where)) < 1e-12


@pytest.mark.parametrize("regime", ["on_policy", "off_policy", "mixed"])
@pytest.mark.parametrize("name", NAMED)
def test_claims_hold_and_nothing_true_is_unclaimed(name, regime):
    certificate = certificate_of(name, regime)
    assert certificate.exact == certificate.claimed, certificate.verdict
    if not certificate.exact:
        assert certificate.relative_bias > 1e-3


@pytest.mark.parametrize("regime", ["off_policy", "mixed"])
@pytest.mark.parametrize("name", ["sequence_tis", "sequence_mis"])
def test_bounded_sequence_ratios_are_exact_once_the_bounds_are_away(name, regime):
    unbounded = POLICY_CORRECTIONS.get(name).facts["unbounded"]
    (certificate,) = certify_policy(name, PolicyTerm(corrections={name: unbounded}), regimes=[regime])
    assert certificate.claimed
    assert certificate.exact


@pytest.mark.parametrize("regime", ["off_policy", "mixed"])
@pytest.mark.parametrize("name", ["decoupled_ppo", "sequence", "tis", "gspo", "aipo", "cispo"])
def test_at_a_later_update_nothing_with_a_recomputed_policy_is_exact_and_nothing_claims_it(name, regime):
    term = dataclasses.replace(NAMED[name], proximal="recomputed")
    first, later = certify_policy(name, term, regimes=[regime], updates=UPDATES)
    assert (first.update, later.update) == UPDATES
    assert later.claim_holds
    assert not later.claimed
    assert not later.exact
    assert later.relative_bias > 0.01
    # Only "sequence" has the whole ratio to the sampler, which makes a first update exact.
    assert first.exact == (name == "sequence")


@pytest.mark.parametrize(
    ("name", "regime"),
    [("tis", "off_policy"), ("decoupled_ppo", "on_policy")],
    ids=["not recomputed", "recomputed on-policy"],
)
def test_only_a_recomputed_policy_off_policy_has_later_updates_of_its_own(name, regime):
    certificates = certify_policy(name, NAMED[name], regimes=[regime], updates=UPDATES)
    assert [certificate.update for certificate in certificates] == ["first"]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_decoupled_ppo_without_its_bounds_is_the_token_ratio_wherever_the_proximal_policy_lies(share):
    """(prox / mu) (pi / prox) = pi / mu, token by token; with the clip of 0.2 it is that no longer in between."""
    where = setting(staleness=0.8)
    token_D = moments_of(PolicyTerm(corrections={"token": {}}), where).gradient_D
    later = where.at_a_later_update(share)

    def decoupled_gradient(**options):
        term = PolicyTerm(loss="ppo_clip", options=options, corrections={"token": {}}, proximal="recomputed")
        return moments_of(term, later).gradient_D

    assert torch.allclose(decoupled_gradient(clip_low=1e9, clip_high=1e9), token_D, atol=1e-12)
    # At a share of 1 the proximal policy is the policy, as at a first update: every ratio is 1 and nothing is clipped.
    nothing_clipped = share == 1.0
    assert torch.allclose(decoupled_gradient(), token_D, atol=1e-6) == nothing_clipped


@pytest.fixture(scope="module")
def decoupled_gradients():
    """Gradients of decoupled PPO; a key of 0 is the sampler as the proximal policy, 1 the policy itself."""
    where = setting(staleness=0.8)
    gradients = {}
    for share in (0.0, 0.5, 1.0):
        gradients[share] = moments_of(NAMED["decoupled_ppo"], where.at_a_later_update(share)).gradient_D
    return gradients


def test_with_the_sampler_as_proximal_policy_decoupled_ppo_is_ppo(decoupled_gradients):
    ppo_D = moments_of(PolicyTerm(loss="ppo_clip"), setting(staleness=0.8)).gradient_D
    assert torch.allclose(decoupled_gradients[0.0], ppo_D, atol=1e-12)


def test_with_the_policy_as_proximal_policy_decoupled_ppo_is_its_first_update(decoupled_gradients):
    first_D = moments_of(NAMED["decoupled_ppo"], setting(staleness=0.8)).gradient_D
    assert torch.allclose(decoupled_gradients[1.0], first_D, atol=1e-12)


@pytest.mark.parametrize("end", [0.0, 1.0], ids=["sampler", "policy"])
def test_with_a_proximal_policy_in_between_decoupled_ppo_is_neither(decoupled_gradients, end):
    assert float((decoupled_gradients[0.5] - decoupled_gradients[end]).norm()) > 0.01


@pytest.mark.parametrize("baseline", [0.0, 1.0, None])
@pytest.mark.parametrize(
    "fields",
    [
        {"corrections": {"sequence": {}}},
        {"corrections": {"sequence": {}}, "loss": "ppo_clip", "proximal": "recomputed"},
    ],
    ids=["reinforce", "decoupled"],
)
def test_the_sequence_ratio_is_exact_whatever_the_baseline(baseline, fields):
    where = setting(staleness=0.8)
    assert moments_of(PolicyTerm(**fields), where, baseline).relative_bias(reward_gradient(where)) < 1e-12


@pytest.mark.parametrize("baseline", [0.0, 1.0, None])
@pytest.mark.parametrize("corrections", [{}, {"token": {}}, {"geometric_tis": {}}], ids=str)
def test_no_ratio_and_ratios_of_tokens_are_biased_whatever_the_baseline(baseline, corrections):
    where = setting(staleness=0.8)
    moments = moments_of(PolicyTerm(corrections=corrections), where, baseline)
    assert moments.relative_bias(reward_gradient(where)) > 0.02


@pytest.mark.parametrize("name", ["token", "sequence"])
def test_the_ratio_of_a_completion_of_one_token_is_exact(name):
    where = setting(tree=Tree.build(vocabulary=4, length=1), parameters=None, staleness=1.0)
    assert moments_of(PolicyTerm(corrections={name: {}}), where).equals(reward_gradient(where))


@pytest.mark.parametrize(("records", "exact"), [("drawn", True), ("raw", False)])
def test_at_a_temperature_the_ratio_needs_log_probs_recorded_after_it(records, exact):
    where = setting(temperature=0.7, records=records)
    moments = moments_of(PolicyTerm(corrections={"sequence": {}}), where)
    assert moments.equals(reward_gradient(where)) == exact


def test_a_certificate_of_a_bounded_token_ratio_has_a_bias():
    certificate = certificate_of("tis", "off_policy")
    assert 0.1 < certificate.relative_bias < 0.3
    assert 0.9 < certificate.cosine < 1
    assert not certificate.exact


def test_a_certificate_of_the_sequence_ratio_has_none_and_the_whole_strength():
    certificate = certificate_of("sequence", "off_policy")
    assert certificate.relative_bias < 1e-12
    assert certificate.strength == pytest.approx(1.0)


def test_the_row_of_a_certificate_says_what_it_misses():
    certificate = certificate_of("tis", "off_policy")
    row = certificate.row()
    assert row["target"] is None
    assert row["relative_bias"] == {"reward": certificate.relative_bias}
    assert row["kept"]


OPTIONS_OF_MASKS = {
    "reinforce": {},
    "icepop": {"low": 0.9, "high": 1.2},
    "tis": {},
    "trm": {"threshold": 0.1},
    "prefix_budget": {"budget": 0.1},
}


def dropped_by_hand(name, delta_BT):
    """Which tokens lose their gradient, by their log-ratio to the sampler."""
    k3_BT = torch.expm1(delta_BT) - delta_BT
    if name == "icepop":
        return (delta_BT.exp() < 0.9) | (delta_BT.exp() > 1.2)
    if name == "trm":
        return (k3_BT.max(-1, keepdim=True).values > 0.1).expand_as(k3_BT)
    if name == "prefix_budget":
        length = k3_BT.shape[1]
        return torch.stack([k3_BT[:, :position].sum(-1) > 0.1 for position in range(length)], 1)
    # Plain REINFORCE masks nothing; tis bounds the ratio and keeps the gradient.
    return torch.zeros_like(delta_BT, dtype=torch.bool)


@pytest.fixture(scope="module")
def dropped_shares():
    """The shares of all masks, of one call: no mask may get another's."""
    where = setting(staleness=0.8)
    losses = {}
    for name, options in OPTIONS_OF_MASKS.items():
        corrections = {name: options}
        if name == "reinforce":
            corrections = {}
        losses[name] = reward_loss(PolicyTerm(corrections=corrections), where)
    return silent_shares(where, losses)


@pytest.mark.parametrize("name", OPTIONS_OF_MASKS)
def test_the_dropped_share_is_that_of_tokens_without_gradient(dropped_shares, name):
    """Against probabilities of completions and weights by hand; a bound that keeps the gradient drops nothing."""
    where = setting(staleness=0.8)
    rows = where.rows(where.tree.all)
    delta_BT = torch.where(rows.mask_BT, rows.logp_BT - rows.behaviour_logp_BT, 0.0).detach()
    drawn_B = where.probability(where.tree.all)
    dropped_tokens = float(drawn_B @ (dropped_by_hand(name, delta_BT) & rows.mask_BT).sum(-1).double())
    all_tokens = float(drawn_B @ rows.mask_BT.sum(-1).double())
    assert dropped_shares[name] == pytest.approx(dropped_tokens / all_tokens, abs=1e-12)
    # So that the comparison is not one of zeros.
    assert (dropped_shares[name] > 0.05) == (name not in ("reinforce", "tis"))


def test_a_certificate_and_its_row_have_the_dropped_share():
    certificate = certificate_of("geometric_mask", "off_policy")
    assert 0.2 < certificate.dropped_share < 1.0
    assert certificate.row()["dropped_share"] == certificate.dropped_share


@pytest.mark.parametrize(
    ("name", "options", "unbounded"),
    [
        ("dppo_tv", {"threshold": 0.05}, {"threshold": math.inf}),
        ("dppo_kl", {"threshold": 0.01}, {"threshold": math.inf}),
        ("cppo", {}, {"threshold": math.inf, "budget": math.inf}),
        ("trm", {}, {"threshold": math.inf}),
    ],
    ids=["dppo_tv", "dppo_kl", "cppo", "trm"],
)
def test_a_mask_takes_from_the_sequence_ratio_what_makes_it_exact_and_gives_it_back_without_its_bound(
    name, options, unbounded
):
    where = setting(staleness=0.8)
    target_D = reward_gradient(where)
    bounded = PolicyTerm(corrections={"sequence": {}, name: options})
    without_bound = PolicyTerm(corrections={"sequence": {}, name: unbounded})
    assert moments_of(bounded, where).relative_bias(target_D) > 0.05
    assert moments_of(without_bound, where).relative_bias(target_D) < 1e-12


def test_a_claim_that_does_not_hold_is_not_kept(monkeypatch):
    entries = Registry("policy_corrections")

    @entries.register("optimist", source="test", claims=("on_policy", "off_policy"), role="ratio")
    def optimist(delta_BT, advantage_BT, mask_BT):
        """Claims what only the whole ratio has."""
        nowhere_BT = torch.zeros_like(mask_BT)
        return Weights(weight_BT=delta_BT.exp(), truncated_BT=nowhere_BT, masked_BT=nowhere_BT)

    monkeypatch.setitem(POLICY_CORRECTIONS._entries, "optimist", entries.get("optimist"))
    term = PolicyTerm(corrections={"optimist": {}})
    on_policy, off_policy = certify_policy("optimist", term, regimes=["on_policy", "off_policy"])
    assert on_policy.claim_holds
    assert off_policy.claimed
    assert not off_policy.claim_holds


# --- the policy's ratio and the KL terms' never mix -----------------------------------------------------------------
TERMS = [
    KLTerm("k1", placement="reward", credit="to_go"),
    KLTerm("k1", placement="reward", credit="to_go", correction="prefix"),
    KLTerm("k3", placement="loss", correction="token"),
    KLTerm("exact", placement="loss", correction="prefix_previous"),
    KLTerm("k2", placement="loss"),
]
AROUND = {
    "tis": {"correction": {"tis": {}}},
    "sequence": {"correction": {"sequence": {}}},
    "geometric_mask": {"correction": {"geometric_mask": {}}},
    "opsm": {"correction": {"opsm": {}}},
    "dppo_tv": {"correction": {"dppo_tv": {}}},
    "trm": {"correction": {"trm": {}}},
    "ppo_clip": {"policy_loss": "ppo_clip"},
    "gspo": {"policy_loss": "gspo"},
    "cispo": {"policy_loss": "cispo"},
    "decoupled": {"policy_loss": "ppo_clip", "correction": {"tis": {"cap": 1.1}}, "proximal": "recomputed"},
}


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.label())
@pytest.mark.parametrize("name", AROUND)
def test_a_kl_term_keeps_its_own_ratio_under_every_policy_correction(name, term):
    where = setting(seed=3, staleness=0.8)
    alone = expected_gradient(where, [dataclasses.replace(term, beta=1.0)])
    effect = kl_effect(where, [dataclasses.replace(term, beta=1.0)], AlgorithmContext(**AROUND[name]))
    assert torch.allclose(effect.gradient_D, alone.gradient_D, atol=1e-10)


@pytest.mark.parametrize("correction", ["none", "token", "prefix", "sequence"])
def test_a_kl_terms_ratio_does_not_reach_the_policy_term(correction):
    """The reward part of the whole loss is the same whichever ratio the KL term has."""
    where = setting(seed=4, staleness=0.8)
    term = KLTerm("k1", placement="reward", credit="to_go", correction=correction, beta=0.0)
    context = AlgorithmContext(correction={"tis": {}})
    with_term = exact_moments(where, training_loss([term], context))
    without = exact_moments(where, training_loss([], context))
    assert torch.equal(with_term.gradient_D, without.gradient_D)


@pytest.mark.parametrize(("name", "exact"), [("sequence", True), ("tis", False)])
def test_a_cost_before_the_baseline_is_reward_so_the_policys_ratio_corrects_it(name, exact):
    where = setting(seed=5, staleness=0.8)
    term = KLTerm("k1", placement="reward", credit="total", baseline="before", beta=1.0)
    effect = kl_effect(where, [term], AlgorithmContext(correction={name: {}}))
    bias = effect.relative_bias(target_gradient(where, "sequence_reverse"))
    assert (bias < 1e-9) == exact


@pytest.mark.parametrize(
    ("corrections", "claimed"),
    [
        ({"sequence": {}}, True),
        ({"sequence": {}, "opsm": {}}, False),
        ({"sequence_tis": {"cap": 3.0}}, False),
        ({"sequence_tis": {"cap": math.inf}}, True),
    ],
    ids=str,
)
def test_a_term_claims_exactness_off_policy_if_all_its_parts_do(corrections, claimed):
    assert claims_exact(PolicyTerm(corrections=corrections), "off_policy") == claimed
