"""Token weights and the batch mean as a baseline: what they do to the expected gradient, enumerated in float64."""

import math

import pytest
import torch

from kl_comedy.errors import UserError
from kl_comedy.kl import REGIMES, TARGETS, KLTerm, claimed_target, kl_surrogate, term_warnings
from kl_comedy.kl.claims import all_terms, own_targets
from kl_comedy.kl.estimators import certainty
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient, target_gradient
from kl_comedy.kl.oracle.certificate import certify

TREE = Tree.build(vocabulary=3, length=3)


def weighted_terms():
    """Every term of four estimators at level token whose log-ratio uses the current weights, weighted by either."""
    for term in all_terms(["k1", "k3", "exact", "exact_jsd"]):
        if term.level == "token" and term.anchor == "current":
            fields = {**term.to_mapping(), "beta": 1.0}
            yield KLTerm(**fields, weight="policy")
            yield KLTerm(**fields, weight="reference", weight_power=2.0)


@pytest.mark.parametrize("regime", REGIMES)
def test_a_weighted_term_hits_exactly_the_weighted_target_it_claims(regime):
    """The weight depends on the prefix alone and is held fixed, so a claim carries over to the weighted divergence."""
    where, wrong = Instance.random(TREE, InstanceSettings(regime=regime, seed=1, parameters=5)), []
    for term in weighted_terms():
        gradient = expected_gradient(where, [term])
        names = (*TARGETS, *own_targets(term))
        hit = [name for name in names if gradient.relative_bias(target_gradient(where, name, term)) < 1e-10]
        claimed = claimed_target(term, regime)
        assert claimed in (None, "zero") or claimed.endswith("_weighted")
        if hit != [name for name in (claimed,) if name]:
            wrong.append(f"{term.label()}: hits {hit}, claims {claimed}")
    assert not wrong, "\n".join(wrong)


def test_the_certainty_is_that_of_the_paper():
    """2502.06533: (H_max - H) / H_max; 0 for the uniform distribution, 1 for a sure token."""
    assert float(certainty(torch.zeros(7, dtype=torch.float64).log_softmax(-1))) == pytest.approx(0.0, abs=1e-12)
    assert float(certainty(torch.tensor([0.0, -1e4], dtype=torch.float64))) == pytest.approx(1.0)
    half = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64).clamp(min=1e-300).log()
    assert float(certainty(half)) == pytest.approx(0.5)


@pytest.mark.parametrize("completions", [2, 3])
def test_the_mean_of_the_batch_costs_a_share_of_the_sequence_level_gradient(completions):
    """With ``N`` tokens whatever is drawn: the target less ``1 / N`` of the sequence-level reverse-KL gradient."""
    where = Instance.random(
        Tree.build(vocabulary=2, length=3, ends=False), InstanceSettings(regime="on_policy", seed=1, parameters=5)
    )
    term = KLTerm("k1", credit="own", baseline="batch")
    gradient = expected_gradient(where, [term], group_size=completions)
    target_D, sequence_D = (target_gradient(where, name) for name in ("token_reverse", "sequence_reverse"))
    assert gradient.relative_bias(target_D - sequence_D / (3 * completions)) < 1e-12
    assert gradient.relative_bias(target_D) > 0.05


def test_a_certificate_of_the_centred_term_names_the_limit_and_the_bias():
    (certificate,) = certify("x", [KLTerm("k1", credit="own", baseline="batch")], regimes=["on_policy"])
    assert (certificate.target, certificate.near_target) == (None, "token_reverse") and certificate.claim_holds
    assert certificate.verdict.startswith("token_reverse as the batch grows, ")
    assert certificate.batch_bias[2] > certificate.batch_bias[3] > 0.01
    assert certificate.batch_bias[2] / certificate.batch_bias[3] == pytest.approx(1.5, rel=0.15)  # one over n
    assert certificate.row()["batch_bias"] == certificate.batch_bias


def test_centring_takes_noise_away_where_the_log_ratios_share_a_mean():
    where = Instance.random(TREE, InstanceSettings(regime="on_policy", seed=1, parameters=5, distance=2.0))
    plain, centred = (
        expected_gradient(where, [KLTerm("k1", credit="own", baseline=baseline)], group_size=3).variance
        for baseline in ("after", "batch")
    )
    assert centred < plain


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"estimator": "k1", "weight_power": 2.0}, "weight_power is the exponent of weight"),
        ({"estimator": "k2", "level": "sequence", "placement": "loss", "weight": "policy"}, "weight is of a token"),
        ({"estimator": "k1", "reference": "sampler", "weight": "policy"}, "reference: sampler has none"),
        ({"estimator": "k1", "baseline": "batch"}, "use credit: own"),
        ({"estimator": "exact", "credit": "own", "baseline": "batch"}, "a sampled estimator"),
        ({"estimator": "k1", "weight": "both"}, "weight"),
    ],
)
def test_impossible_terms_name_the_reason(fields, reason):
    with pytest.raises(UserError, match=reason):
        KLTerm(**fields)


def test_the_weight_is_not_differentiated():
    logp_BT, certainty_BT = (torch.tensor([row], requires_grad=True) for row in ([-1.0, -2.0], [0.5, 0.25]))
    kl_surrogate(
        KLTerm("k2", placement="loss", weight="policy"),
        logp_BT=logp_BT,
        ref_logp_BT=torch.tensor([[-2.0, -1.0]]),
        behaviour_logp_BT=logp_BT.detach(),
        mask_BT=torch.tensor([[True, True]]),
        certainty_BT=certainty_BT,
    ).sum().backward()
    assert certainty_BT.grad is None
    assert logp_BT.grad.tolist() == [[0.5, -0.25]], "the weight times the log-ratio"


def test_a_weighted_term_needs_the_certainty_and_warns_of_nothing():
    term = KLTerm("k1", weight="reference", weight_power=2.0)
    assert term.label() == "k1_reverse_token in reward to_go x reference certainty^2"
    assert term_warnings(term, off_policy=False) == [] and math.isclose(term.weight_power, 2.0)
    row_BT = torch.zeros(1, 1)
    tensors = {"logp_BT": row_BT, "ref_logp_BT": row_BT, "behaviour_logp_BT": row_BT, "mask_BT": row_BT == 0}
    with pytest.raises(UserError, match="needs certainty_BT"):
        kl_surrogate(term, **tensors)
