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
    where = Instance.random(TREE, InstanceSettings(regime=regime, seed=1, parameters=5))
    wrong = []
    for term in weighted_terms():
        gradient = expected_gradient(where, [term])
        hit = []
        for name in (*TARGETS, *own_targets(term)):
            if gradient.relative_bias(target_gradient(where, name, term)) < 1e-10:
                hit.append(name)

        claimed = claimed_target(term, regime)
        if claimed is None:
            expected = []
        else:
            assert claimed == "zero" or claimed.endswith("_weighted"), term.label()
            expected = [claimed]
        if hit != expected:
            wrong.append(f"{term.label()}: hits {hit}, claims {claimed}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [([1 / 7] * 7, 0.0), ([1.0, 0.0], 1.0), ([0.5, 0.5, 0.0, 0.0], 0.5)],
    ids=["uniform", "sure", "two of four"],
)
def test_the_certainty_is_that_of_the_paper(probabilities, expected):
    """2502.06533: (H_max - H) / H_max; 0 for the uniform distribution, 1 for a sure token."""
    # The smallest float64: its product with its logarithm is finite, and zero.
    probability_V = torch.tensor(probabilities, dtype=torch.float64).clamp(min=1e-300)
    assert float(certainty(probability_V.log())) == pytest.approx(expected, abs=1e-12)


def test_the_certainty_of_a_token_ten_thousand_nats_ahead_is_one():
    assert float(certainty(torch.tensor([0.0, -1e4], dtype=torch.float64))) == pytest.approx(1.0)


def test_the_certainty_of_equal_logits_is_zero():
    assert float(certainty(torch.zeros(7, dtype=torch.float64).log_softmax(-1))) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("completions", [2, 3])
def test_the_mean_of_the_batch_costs_a_share_of_the_sequence_level_gradient(completions):
    """With ``N`` tokens whatever is drawn: the target less ``1 / N`` of the sequence-level reverse-KL gradient."""
    length = 3
    tree = Tree.build(vocabulary=2, length=length, ends=False)
    where = Instance.random(tree, InstanceSettings(regime="on_policy", seed=1, parameters=5))
    gradient = expected_gradient(where, [KLTerm("k1", credit="own", baseline="batch")], group_size=completions)
    token_D = target_gradient(where, "token_reverse")
    sequence_D = target_gradient(where, "sequence_reverse")
    tokens = length * completions
    assert gradient.relative_bias(token_D - sequence_D / tokens) < 1e-12
    assert gradient.relative_bias(token_D) > 0.05


@pytest.fixture(scope="module")
def centred_certificate():
    (certificate,) = certify("x", [KLTerm("k1", credit="own", baseline="batch")], regimes=["on_policy"])
    return certificate


def test_a_certificate_of_the_centred_term_names_the_limit(centred_certificate):
    assert centred_certificate.target is None
    assert centred_certificate.near_target == "token_reverse"
    assert centred_certificate.claim_holds
    assert centred_certificate.verdict.startswith("token_reverse as the batch grows, ")


def test_a_certificate_of_the_centred_term_has_its_bias_by_the_size_of_the_batch(centred_certificate):
    bias = centred_certificate.batch_bias
    assert bias[2] > bias[3]
    assert bias[3] > 0.01
    assert bias[2] / bias[3] == pytest.approx(3 / 2, rel=0.15), "it falls as one over the batch"
    assert centred_certificate.row()["batch_bias"] == bias


def test_centring_takes_noise_away_where_the_log_ratios_share_a_mean():
    where = Instance.random(TREE, InstanceSettings(regime="on_policy", seed=1, parameters=5, distance=2.0))
    plain = expected_gradient(where, [KLTerm("k1", credit="own", baseline="after")], group_size=3)
    centred = expected_gradient(where, [KLTerm("k1", credit="own", baseline="batch")], group_size=3)
    assert centred.variance < plain.variance


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"estimator": "k1", "weight_power": 2.0}, "weight_power is the exponent of weight"),
        ({"estimator": "k2", "level": "sequence", "placement": "loss", "weight": "policy"}, "weight is of a token"),
        ({"estimator": "k1", "baseline": "batch"}, "use credit: own"),
        ({"estimator": "exact", "credit": "own", "baseline": "batch"}, "a sampled estimator"),
        ({"estimator": "k1", "weight": "both"}, "weight"),
    ],
    ids=[
        "exponent without weight",
        "weight of a completion",
        "centred to go",
        "centred exact",
        "unknown weight",
    ],
)
def test_impossible_terms_name_the_reason(fields, reason):
    with pytest.raises(UserError, match=reason):
        KLTerm(**fields)


def test_the_weight_is_not_differentiated():
    logp_BT = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    certainty_BT = torch.tensor([[0.5, 0.25]], requires_grad=True)
    surrogate_BT = kl_surrogate(
        KLTerm("k2", placement="loss", weight="policy"),
        logp_BT=logp_BT,
        ref_logp_BT=torch.tensor([[-2.0, -1.0]]),
        behaviour_logp_BT=logp_BT.detach(),
        mask_BT=torch.tensor([[True, True]]),
        certainty_BT=certainty_BT,
    )
    surrogate_BT.sum().backward()
    assert certainty_BT.grad is None
    assert logp_BT.grad.tolist() == [[0.5, -0.25]], "the weight times the log-ratio"


WEIGHTED = KLTerm("k1", weight="reference", weight_power=2.0)


def test_the_label_of_a_weighted_term_has_its_weight_and_exponent():
    assert WEIGHTED.label() == "k1_reverse_token in reward to_go x reference certainty^2"
    assert math.isclose(WEIGHTED.weight_power, 2.0)


def test_a_weighted_term_warns_of_nothing_on_policy():
    assert term_warnings(WEIGHTED, off_policy=False) == []


def test_a_weighted_term_needs_the_certainty():
    row_BT = torch.zeros(1, 1)
    tensors = {"logp_BT": row_BT, "ref_logp_BT": row_BT, "behaviour_logp_BT": row_BT, "mask_BT": row_BT == 0}
    with pytest.raises(UserError, match="needs certainty_BT"):
        kl_surrogate(WEIGHTED, **tensors)
