"""Credit and control variates of costs in the reward, by enumeration in float64."""

import pytest
import torch

from kl_comedy.errors import UserError
from kl_comedy.kl import REGIMES, KLTerm
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient, target_gradient
from kl_comedy.kl.surrogate import credit_costs

TREE = Tree.build(vocabulary=4, length=4)


def bias_and_variance(regime, term):
    """The term's relative bias against what its credit optimizes, and the trace of its variance."""
    setting = Instance.random(TREE, InstanceSettings(regime=regime, seed=3, parameters=6))
    target = "token_reverse"
    if term.credit == "to_go":
        target = "sequence_reverse"
    moments = expected_gradient(setting, [term])
    return moments.relative_bias(target_gradient(setting, target)), moments.variance


@pytest.mark.parametrize("regime", REGIMES)
def test_the_exact_kl_of_the_prefix_is_a_baseline_that_leaves_the_mean(regime):
    """(l_t - sg KL_t) s_t, with the ratio of the token where samples are stale."""
    bias, variance = bias_and_variance(regime, KLTerm("k1", credit="own", correction="token", baseline="exact"))
    _, variance_without = bias_and_variance(regime, KLTerm("k1", credit="own", correction="token"))
    assert bias < 1e-10
    assert variance != pytest.approx(variance_without)


@pytest.mark.parametrize("regime", REGIMES)
def test_the_exact_kl_as_a_baseline_of_costs_to_go_leaves_the_mean(regime):
    bias, _ = bias_and_variance(regime, KLTerm("k1", correction="prefix", baseline="exact"))
    assert bias < 1e-10


def test_discounted_costs_to_go_on_one_completion():
    """3 = 1 + 0.5 (2 + 0.5 * 4), and 4 = 2 + 0.5 * 4."""
    costs_BT = torch.tensor([[1.0, 2.0, 4.0]])
    assert credit_costs(costs_BT, "to_go", 0.5).tolist() == [[3.0, 4.0, 4.0]]


def test_discounted_credit_lies_between_own_and_to_go():
    """A discount near 0 leaves each token its own cost, a discount of 1 all the later ones."""
    biases = {}
    variances = {}
    for discount in (1e-9, 0.3, 0.6, 0.9, 1.0):
        biases[discount], variances[discount] = bias_and_variance("on_policy", KLTerm("k1", discount=discount))
    assert biases[1.0] < 1e-10
    assert biases[0.9] > 1e-10
    assert biases[0.9] < biases[0.6]
    assert biases[0.6] < biases[0.3]
    assert variances[1e-9] < variances[1.0]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"estimator": "k1", "discount": 0.5, "credit": "own"}, "use credit: to_go"),
        ({"estimator": "k1", "discount": 0.5, "placement": "loss"}, "use credit: to_go"),
        ({"estimator": "k1", "discount": 0.0}, "discount: got 0.0; allowed: above 0"),
        ({"estimator": "exact", "baseline": "exact"}, "has no noise"),
    ],
    ids=["discount of own costs", "discount in loss", "discount of 0", "exact baseline of exact"],
)
def test_a_credit_or_a_baseline_without_a_meaning_is_refused(fields, reason):
    with pytest.raises(UserError, match=reason):
        KLTerm(**fields)
