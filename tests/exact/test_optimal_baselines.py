"""Optimal token baselines: unbiased over the other completions, biased with the own one, and what they save."""

import pytest
import torch
from research.studies.baselines import GROUP, candidates, costs, energy
from research.studies.bias_variance import DISTANCE, shared_setting

from kl_comedy.kl.oracle import Tree, exact_moments_by_loss, target_gradient


@pytest.fixture(scope="module")
def figures():
    setting = shared_setting(Tree.build(vocabulary=2, length=3, ends=False), seed=0, distance=DISTANCE)
    target_D = target_gradient(setting, "sequence_reverse")
    moments = exact_moments_by_loss(setting, candidates(setting), group_size=GROUP)
    return {name: (each.relative_bias(target_D), each.variance) for name, each in moments.items()}


def test_the_mean_of_the_group_is_biased_and_that_of_the_others_is_not(figures):
    biased = [name for name, (bias, _) in figures.items() if bias > 1e-9]
    assert biased == ["optimal, own completion included (verl)"]
    assert figures[biased[0]][0] > 0.05


def test_known_expectations_are_the_limit_of_the_estimated_ones(figures):
    variance = {name: each for name, (_, each) in figures.items()}
    assert variance["optimal, expectations known"] < variance["optimal, leave one out"]
    assert variance["optimal, expectations known"] < variance["none"]


def test_the_energy_is_the_squared_norm_of_the_scores_in_the_logits():
    setting = shared_setting(Tree.build(vocabulary=3, length=2, ends=False), seed=0, distance=DISTANCE)
    rows = setting.rows(setting.tree.all)
    score_BTV = torch.nn.functional.one_hot(rows.token_BT, 3) - rows.next_logp_BTV.detach().exp()
    torch.testing.assert_close(energy(rows), score_BTV.square().sum(-1).cumsum(-1))
    log_ratio_BT = rows.logp_BT.detach() - rows.ref_logp_BT
    torch.testing.assert_close(costs(rows)[:, 0], log_ratio_BT.sum(-1))
