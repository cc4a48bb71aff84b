"""Optimal token baselines: unbiased over the other completions, biased with the own one, and what they save."""

import pytest
import torch
from research.studies.baselines import GROUP, candidates, costs, energy
from research.studies.bias_variance import DISTANCE, shared_setting

from kl_comedy.kl.oracle import Tree, exact_moments_by_loss, target_gradient


@pytest.fixture(scope="module")
def setting():
    return shared_setting(Tree.build(vocabulary=2, length=3, ends=False), seed=0, distance=DISTANCE)


@pytest.fixture(scope="module")
def moments(setting):
    """The moments of each candidate baseline, by its name."""
    return exact_moments_by_loss(setting, candidates(setting), group_size=GROUP)


def test_the_mean_of_the_group_is_biased_and_that_of_the_others_is_not(setting, moments):
    target_D = target_gradient(setting, "sequence_reverse")
    bias = {name: of_baseline.relative_bias(target_D) for name, of_baseline in moments.items()}
    with_own_completion = "optimal, own completion included (verl)"
    assert [name for name in bias if bias[name] > 1e-9] == [with_own_completion]
    assert bias[with_own_completion] > 0.05


@pytest.mark.parametrize("noisier", ["optimal, leave one out", "none"])
def test_known_expectations_are_the_limit_of_the_estimated_ones(moments, noisier):
    assert moments["optimal, expectations known"].variance < moments[noisier].variance


def test_the_energy_is_the_squared_norm_of_the_scores_in_the_logits():
    setting = shared_setting(Tree.build(vocabulary=3, length=2, ends=False), seed=0, distance=DISTANCE)
    rows = setting.rows(setting.tree.all)
    score_BTV = torch.nn.functional.one_hot(rows.token_BT, 3) - rows.next_logp_BTV.detach().exp()
    torch.testing.assert_close(energy(rows), score_BTV.square().sum(-1).cumsum(-1))
    log_ratio_BT = rows.logp_BT.detach() - rows.ref_logp_BT
    torch.testing.assert_close(costs(rows)[:, 0], log_ratio_BT.sum(-1))
