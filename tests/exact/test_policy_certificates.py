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


def setting(regime="off_policy", seed=0, tree=TREE, **more):
    return Instance.random(tree, InstanceSettings(regime=regime, seed=seed, **{"parameters": 5, **more}))


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("parameters", [None, 5])
def test_the_reward_gradient_is_that_of_plain_reinforce_on_policy(ends, parameters):
    """Two roads: the chain over prefixes, and the score function over enumerated completions."""
    where = setting("on_policy", tree=Tree.build(vocabulary=3, length=3, ends=ends), parameters=parameters)
    for baseline in (0.0, 0.7):
        enumerated = exact_moments(where, reward_loss(PolicyTerm(), where, baseline=baseline))
        assert enumerated.relative_bias(reward_gradient(where)) < 1e-12


@pytest.mark.parametrize("regime", ["on_policy", "off_policy", "mixed"])
@pytest.mark.parametrize("name", NAMED)
def test_claims_hold_and_nothing_true_is_unclaimed(name, regime):
    (certificate,) = certify_policy(name, NAMED[name], regimes=[regime])
    assert certificate.exact == certificate.claimed, certificate.verdict
    if not certificate.exact:
        assert certificate.relative_bias > 1e-3


@pytest.mark.parametrize("regime", ["off_policy", "mixed"])
@pytest.mark.parametrize("name", ["sequence_tis", "sequence_mis"])
def test_bounded_sequence_ratios_are_exact_once_the_bounds_are_away(name, regime):
    unbounded = POLICY_CORRECTIONS.get(name).facts["unbounded"]
    term = PolicyTerm(corrections={name: unbounded})
    (certificate,) = certify_policy(name, term, regimes=[regime])
    assert certificate.claimed and certificate.exact


@pytest.mark.parametrize("regime", ["off_policy", "mixed"])
@pytest.mark.parametrize("name", ["decoupled_ppo", "sequence", "tis", "gspo", "aipo", "cispo"])
def test_at_a_later_update_nothing_with_a_recomputed_policy_is_exact_and_nothing_claims_it(name, regime):
    term = dataclasses.replace(NAMED[name], proximal="recomputed")
    first, later = certify_policy(name, term, regimes=[regime], updates=UPDATES)
    assert (first.update, later.update) == UPDATES and later.claim_holds
    assert not later.claimed and not later.exact and later.relative_bias > 0.01
    assert first.exact == (name == "sequence"), "once the ratio to the sampler is whole, the first update is exact"


def test_only_a_recomputed_policy_off_policy_has_later_updates_of_its_own():
    for name, regime in (("tis", "off_policy"), ("decoupled_ppo", "on_policy")):
        certificates = certify_policy(name, NAMED[name], regimes=[regime], updates=UPDATES)
        assert [certificate.update for certificate in certificates] == ["first"]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_decoupled_ppo_without_its_bounds_is_the_token_ratio_wherever_the_proximal_policy_lies(share):
    """(prox / mu) (pi / prox) = pi / mu, token by token; with the clip of 0.2 it is that no longer in between."""
    where = setting(staleness=0.8)
    token = exact_moments(where, reward_loss(PolicyTerm(corrections={"token": {}}), where)).gradient_D
    later = where.at_a_later_update(share)

    def gradient(**options):
        term = PolicyTerm(loss="ppo_clip", options=options, corrections={"token": {}}, proximal="recomputed")
        return exact_moments(later, reward_loss(term, later)).gradient_D

    assert torch.allclose(gradient(clip_low=1e9, clip_high=1e9), token, atol=1e-12)
    assert torch.allclose(gradient(), token, atol=1e-6) == (share == 1.0), "at a first update nothing is clipped"


def test_with_the_sampler_as_proximal_policy_decoupled_ppo_is_ppo_and_with_the_policy_its_first_update():
    where, decoupled = setting(staleness=0.8), NAMED["decoupled_ppo"]

    def gradient(term, at):
        return exact_moments(at, reward_loss(term, at)).gradient_D

    sampler, between, policy = (gradient(decoupled, where.at_a_later_update(share)) for share in (0.0, 0.5, 1.0))
    first = gradient(decoupled, where)
    assert torch.allclose(sampler, gradient(PolicyTerm(loss="ppo_clip"), where), atol=1e-12)
    assert torch.allclose(policy, first, atol=1e-12)
    assert float((between - sampler).norm()) > 0.01 < float((between - first).norm())


@pytest.mark.parametrize("baseline", [0.0, 1.0, None])
def test_the_sequence_ratio_is_exact_whatever_the_baseline_and_token_ratios_are_not(baseline):
    where = setting(staleness=0.8)
    target_D = reward_gradient(where)

    def bias(**fields):
        return exact_moments(where, reward_loss(PolicyTerm(**fields), where, baseline=baseline)).relative_bias(target_D)

    assert bias(corrections={"sequence": {}}) < 1e-12
    assert bias(loss="ppo_clip", proximal="recomputed", corrections={"sequence": {}}) < 1e-12
    assert min(bias(), bias(corrections={"token": {}}), bias(corrections={"geometric_tis": {}})) > 0.02


def test_which_ratios_are_exact():
    """Of one token its own; at a temperature, those of an engine that records log-probs after it."""
    short = setting(tree=Tree.build(vocabulary=4, length=1), parameters=None, staleness=1.0)
    drawn, raw = (setting(temperature=0.7, records=records) for records in ("drawn", "raw"))
    for name, where in (("token", short), ("sequence", short), ("sequence", drawn), ("sequence", raw)):
        moments = exact_moments(where, reward_loss(PolicyTerm(corrections={name: {}}), where))
        assert moments.equals(reward_gradient(where)) == (where is not raw)


def test_bias_and_variance_are_those_of_the_definition():
    (certificate,) = certify_policy("tis", NAMED["tis"], regimes=["off_policy"])
    (whole,) = certify_policy("sequence", NAMED["sequence"], regimes=["off_policy"])
    assert 0.1 < certificate.relative_bias < 0.3 and 0.9 < certificate.cosine < 1 and not certificate.exact
    assert whole.relative_bias < 1e-12 and whole.strength == pytest.approx(1.0)
    row = certificate.row()
    assert row["target"] is None and row["relative_bias"] == {"reward": certificate.relative_bias} and row["kept"]


def test_the_dropped_share_is_that_of_tokens_without_gradient():
    """Against probabilities of completions and weights by hand; a bound that keeps the gradient drops nothing."""
    where = setting(staleness=0.8)
    rows = where.rows(where.tree.all)
    delta_BT = torch.where(rows.mask_BT, rows.logp_BT - rows.behaviour_logp_BT, 0.0).detach()
    drawn_B = where.probability(where.tree.all)
    k3_BT = torch.expm1(delta_BT) - delta_BT
    expected = {
        "reinforce": torch.zeros_like(rows.mask_BT),
        "icepop": (delta_BT.exp() < 0.9) | (delta_BT.exp() > 1.2),
        "tis": torch.zeros_like(rows.mask_BT),
        "trm": (k3_BT.max(-1, keepdim=True).values > 0.1).expand_as(k3_BT),
        "prefix_budget": torch.stack([k3_BT[:, :t].sum(-1) > 0.1 for t in range(k3_BT.shape[1])], 1),
    }
    options = {
        "icepop": {"low": 0.9, "high": 1.2},
        "tis": {},
        "trm": {"threshold": 0.1},
        "prefix_budget": {"budget": 0.1},
    }
    losses = {
        name: reward_loss(PolicyTerm(corrections={name: options[name]} if name in options else {}), where)
        for name in expected
    }
    for name, share in silent_shares(where, losses).items():
        by_hand = float(drawn_B @ (expected[name] & rows.mask_BT).sum(-1).double())
        assert share == pytest.approx(by_hand / float(drawn_B @ rows.mask_BT.sum(-1).double()), abs=1e-12), name
        assert (share > 0.05) == (name not in ("reinforce", "tis"))
    (certificate,) = certify_policy("geometric_mask", NAMED["geometric_mask"], regimes=["off_policy"])
    assert 0.2 < certificate.dropped_share < 1.0 and certificate.row()["dropped_share"] == certificate.dropped_share


@pytest.mark.parametrize(
    "masks", [{"dppo_tv": {"threshold": 0.05}}, {"dppo_kl": {"threshold": 0.01}}, {"cppo": {}}, {"trm": {}}]
)
def test_a_mask_takes_from_the_sequence_ratio_what_makes_it_exact_and_gives_it_back_without_its_bound(masks):
    where = setting(staleness=0.8)
    (name,) = masks
    target_D = reward_gradient(where)

    def bias(**options):
        term = PolicyTerm(corrections={"sequence": {}, name: {**masks[name], **options}})
        return exact_moments(where, reward_loss(term, where)).relative_bias(target_D)

    assert bias() > 0.05 and bias(threshold=math.inf, **({"budget": math.inf} if name == "cppo" else {})) < 1e-12


def test_a_claim_that_does_not_hold_is_not_kept(monkeypatch):
    entries = Registry("policy_corrections")

    @entries.register("optimist", source="test", claims=("on_policy", "off_policy"), role="ratio")
    def optimist(delta_BT, advantage_BT, mask_BT):
        """Claims what only the whole ratio has."""
        no_BT = torch.zeros_like(mask_BT)
        return Weights(weight_BT=delta_BT.exp(), truncated_BT=no_BT, masked_BT=no_BT)

    monkeypatch.setitem(POLICY_CORRECTIONS._entries, "optimist", entries.get("optimist"))
    term = PolicyTerm(corrections={"optimist": {}})
    on, off = certify_policy("optimist", term, regimes=["on_policy", "off_policy"])
    assert on.claim_holds and off.claimed and not off.claim_holds


# --- the policy's ratio and the KL terms' never mix -----------------------------------------------------------------
TERMS = [
    KLTerm("k1", placement="reward", credit="to_go"),
    KLTerm("k1", placement="reward", credit="to_go", correction="prefix"),
    KLTerm("k3", placement="loss", correction="token"),
    KLTerm("exact", placement="loss", correction="prefix_previous"),
    KLTerm("k2", placement="loss"),
]
AROUND = {
    **{name: {"correction": {name: {}}} for name in ("tis", "sequence", "geometric_mask", "opsm", "dppo_tv", "trm")},
    **{name: {"policy_loss": name} for name in ("ppo_clip", "gspo", "cispo")},
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
    with_term, without = (exact_moments(where, training_loss(terms, context)) for terms in ([term], []))
    assert torch.equal(with_term.gradient_D, without.gradient_D)


@pytest.mark.parametrize(("name", "exact"), [("sequence", True), ("tis", False)])
def test_a_cost_before_the_baseline_is_reward_so_the_policys_ratio_corrects_it(name, exact):
    where = setting(seed=5, staleness=0.8)
    term = KLTerm("k1", placement="reward", credit="total", baseline="before", beta=1.0)
    effect = kl_effect(where, [term], AlgorithmContext(correction={name: {}}))
    bias = effect.relative_bias(target_gradient(where, "sequence_reverse"))
    assert (bias < 1e-9) == exact


def test_claims_need_every_part():
    off = "off_policy"
    assert claims_exact(PolicyTerm(corrections={"sequence": {}}), off)
    assert not claims_exact(PolicyTerm(corrections={"sequence": {}, "opsm": {}}), off)
    assert not claims_exact(PolicyTerm(corrections={"sequence_tis": {"cap": 3.0}}), off)
    assert claims_exact(PolicyTerm(corrections={"sequence_tis": {"cap": math.inf}}), off)
