"""A term's own baseline: unbiased wherever the term is, on- and off-policy, and less noisy. Groups enumerated."""

import pytest
import torch

from kl_comedy.kl import KLTerm, TermParts, own_baseline
from kl_comedy.kl.oracle import (
    AlgorithmContext,
    Instance,
    InstanceSettings,
    Tree,
    expected_gradient,
    kl_effect,
    sampled_moments,
    target_gradient,
    terms_loss,
)

TREE = Tree.build(vocabulary=2, length=4, ends=False)
UNBIASED = [
    KLTerm("exact", credit="to_go", correction="prefix_previous", baseline="own"),
    KLTerm("k1", credit="to_go", correction="prefix", baseline="own"),
    KLTerm("k1", credit="total", correction="sequence", baseline="own"),
]


def setting(regime, seed=0, distance=1.0):
    return Instance.random(
        TREE, InstanceSettings(regime=regime, seed=seed, parameters=4, distance=distance, staleness=0.6)
    )


@pytest.mark.parametrize("term", UNBIASED, ids=lambda term: term.label())
@pytest.mark.parametrize("regime", ["on_policy", "off_policy", "mixed"])
@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_it_leaves_an_unbiased_term_unbiased(term, regime, group_size):
    where = setting(regime)
    moments = expected_gradient(where, [term], group_size=group_size)
    assert moments.relative_bias(target_gradient(where, "sequence_reverse")) < 1e-10


@pytest.mark.parametrize("regime", ["on_policy", "off_policy"])
def test_it_lowers_the_variance_of_exact_returns_in_groups_of_8(regime):
    """Sampled (groups of 8 cannot be enumerated), on average over instances.

    In groups of 2 or 3 the mean over so few others is itself too noisy to help, and returns of k1, which
    are mostly noise around a small mean, gain nothing.
    """
    tree = Tree.build(vocabulary=2, length=8, ends=False)
    bare = KLTerm("exact", correction="prefix_previous", baseline="after")
    centred = KLTerm("exact", correction="prefix_previous", baseline="own")
    variance_ratios = []
    for seed in range(4):
        where = Instance.random(tree, InstanceSettings(regime=regime, seed=seed, parameters=8, staleness=0.6))
        generator = torch.Generator().manual_seed(seed)
        moments = sampled_moments(where, terms_loss([centred]), samples=16_000, group_size=8, generator=generator)
        variance_ratios.append(moments.variance / expected_gradient(where, [bare]).variance)
    assert sum(variance_ratios) / len(variance_ratios) < 0.9, variance_ratios


def bias_off_policy(baseline):
    """The relative bias within RLOO, whose own baseline is the mean of the other completions of a group."""
    where = setting("off_policy")
    term = KLTerm("exact", correction="prefix_previous", baseline=baseline)
    effect = kl_effect(where, [term], AlgorithmContext(advantage="rloo", group_size=2))
    return effect.relative_bias(target_gradient(where, "sequence_reverse"))


def test_a_cost_before_the_baseline_is_biased_off_policy():
    """The advantage's baseline multiplies the plain score, whose mean is not zero under the sampler."""
    assert bias_off_policy("before") > 0.01


@pytest.mark.parametrize("baseline", ["after", "own"])
def test_a_cost_after_the_baseline_or_with_its_own_is_unbiased_off_policy(baseline):
    assert bias_off_policy(baseline) < 1e-10


# --- one batch, by hand -----------------------------------------------------------------------------------------------
def baseline_of_a_batch(first_cost):
    """``[4, 3]``: three completions of 3, 2 and 1 tokens in a group, one alone; each token of the first costs this."""
    mask_BT = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    group_B = torch.tensor([5, 5, 5, 9])
    cost_BT = torch.rand(4, 3, generator=torch.Generator().manual_seed(1))
    cost_BT[0] = first_cost
    ones_BT = torch.ones(4, 3)
    parts = TermParts(
        cost_BT=cost_BT,
        weight_BT=ones_BT,
        baseline_weight_BT=ones_BT,
        pathwise_BT=ones_BT,
        cost_after_B=ones_BT[:, 0],
    )
    return own_baseline(parts, mask_BT, group_B)


def test_a_completion_never_sees_itself():
    cheap_BT = baseline_of_a_batch(first_cost=0.0)
    dear_BT = baseline_of_a_batch(first_cost=100.0)
    assert torch.allclose(cheap_BT[0], dear_BT[0], atol=1e-5)
    assert not torch.allclose(cheap_BT[1], dear_BT[1]), "the others of its group do see it"


def test_a_group_of_one_has_nothing_to_compare_with():
    assert torch.equal(baseline_of_a_batch(first_cost=0.0)[3], torch.zeros(3))


def test_there_is_no_baseline_at_a_token_that_no_other_completion_reaches():
    baseline_BT = baseline_of_a_batch(first_cost=0.0)
    assert baseline_BT[0, 2] == 0
    assert baseline_BT[1, 2] == 0
