"""Credit and control variates of costs in the reward, by enumeration in float64."""

import pytest
import torch

from kl_comedy.errors import UserError
from kl_comedy.kl import REGIMES, KLTerm
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient, target_gradient
from kl_comedy.kl.surrogate import credit_costs

TREE = Tree.build(vocabulary=4, length=4)


def figures(regime, term):
    where = Instance.random(TREE, InstanceSettings(regime=regime, seed=3, parameters=6))
    target = "sequence_reverse" if term.credit == "to_go" else "token_reverse"
    moments = expected_gradient(where, [term])
    return moments.relative_bias(target_gradient(where, target)), moments.variance


@pytest.mark.parametrize("regime", REGIMES)
def test_the_exact_kl_of_the_prefix_is_a_baseline_that_leaves_the_mean(regime):
    """(l_t - sg KL_t) s_t, with the ratio of the token where samples are stale."""
    bias, variance = figures(regime, KLTerm("k1", credit="own", correction="token", baseline="exact"))
    assert bias < 1e-10 and variance != pytest.approx(
        figures(regime, KLTerm("k1", credit="own", correction="token"))[1]
    )
    bias, _ = figures(regime, KLTerm("k1", correction="prefix", baseline="exact"))
    assert bias < 1e-10


def test_discounted_credit_lies_between_own_and_to_go():
    assert credit_costs(torch.tensor([[1.0, 2.0, 4.0]]), "to_go", 0.5).tolist() == [[3.0, 4.0, 4.0]]
    biases, variances = zip(
        *(figures("on_policy", KLTerm("k1", discount=discount)) for discount in (1e-9, 0.3, 0.6, 0.9, 1.0)), strict=True
    )
    assert biases[-1] < 1e-10 < biases[-2] < biases[-3] < biases[1]
    assert variances[0] < variances[-1]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"estimator": "k1", "discount": 0.5, "credit": "own"}, "use credit: to_go"),
        ({"estimator": "k1", "discount": 0.5, "placement": "loss"}, "use credit: to_go"),
        ({"estimator": "k1", "discount": 0.0}, "discount: got 0.0; allowed: above 0"),
        ({"estimator": "exact", "baseline": "exact"}, "has no noise"),
        ({"estimator": "k1", "baseline": "exact", "reference": "sampler"}, "rollouts do not carry"),
    ],
)
def test_what_has_no_meaning_is_refused(fields, reason):
    with pytest.raises(UserError, match=reason):
        KLTerm(**fields)
