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
    bare, centred = (KLTerm("exact", correction="prefix_previous", baseline=baseline) for baseline in ("after", "own"))
    gains = []
    for seed in range(4):
        where = Instance.random(tree, InstanceSettings(regime=regime, seed=seed, parameters=8, staleness=0.6))
        generator = torch.Generator().manual_seed(seed)
        own = sampled_moments(where, terms_loss([centred]), samples=16_000, group_size=8, generator=generator)
        gains.append(own.variance / expected_gradient(where, [bare]).variance)
    assert sum(gains) / len(gains) < 0.9, gains


def test_before_the_baseline_is_biased_off_policy_where_own_is_not():
    """The advantage's baseline multiplies the plain score, whose mean is not zero under the sampler."""
    where = setting("off_policy")
    target_D = target_gradient(where, "sequence_reverse")
    around = AlgorithmContext(advantage="rloo", group_size=2)
    terms = [
        KLTerm("exact", correction="prefix_previous", baseline=baseline) for baseline in ("before", "after", "own")
    ]
    before, after, own = (kl_effect(where, [term], around).relative_bias(target_D) for term in terms)
    assert after < 1e-10 and own < 1e-10 and before > 0.01


def test_a_completion_never_sees_itself():
    generator = torch.Generator().manual_seed(0)
    mask_BT = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    group_B = torch.tensor([5, 5, 5, 9])

    def baseline(first_cost):
        cost_BT = torch.rand(4, 3, generator=generator.manual_seed(1))
        cost_BT[0] = first_cost
        ones = torch.ones(4, 3)
        parts = TermParts(
            cost_BT=cost_BT, weight_BT=ones, baseline_weight_BT=ones, pathwise_BT=ones, cost_after_B=ones[:, 0]
        )
        return own_baseline(parts, mask_BT, group_B)

    one, other = baseline(0.0), baseline(100.0)
    assert torch.allclose(one[0], other[0], atol=1e-5) and not torch.allclose(one[1], other[1])
    assert torch.equal(one[3], torch.zeros(3)), "a group of one has nothing to compare with"
    assert one[0, 2] == 0 and one[1, 2] == 0, "nobody else reaches the third token"
