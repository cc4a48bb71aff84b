"""The synthetic study on small instances: its gradients are the oracle's, and every part of it runs."""

import dataclasses

import pytest
import torch
from research.studies import optimum
from research.studies import synthetic as study
from research.studies.__main__ import app
from research.studies.bias_variance import CLAMPED, OFF_POLICY, ON_POLICY, OPTIMIZED, shared_setting
from research.studies.optimum import Optimization, optimize, random_games
from typer.testing import CliRunner

from kl_comedy.kl.oracle import (
    Instance,
    Tree,
    exact_moments,
    exact_moments_by_loss,
    expected_gradient,
    log_probs,
    prefix_log_probs,
    terms_loss,
)

BINARY = Tree.build(vocabulary=2, length=6, ends=False)


@pytest.mark.parametrize("tree", [BINARY, Tree.build(vocabulary=3, length=3)], ids=["binary", "with ends"])
def test_many_losses_agree_with_the_oracle(tree):
    setting = shared_setting(tree, seed=1, distance=0.7, staleness=0.4)
    losses = {name: terms_loss(terms) for name, terms in {**ON_POLICY, **OFF_POLICY, **CLAMPED}.items()}
    for name, moments in exact_moments_by_loss(setting, losses, chunk=7).items():
        truth = exact_moments(setting, losses[name])
        torch.testing.assert_close(moments.gradient_D, truth.gradient_D, rtol=1e-10, atol=1e-12)
        assert moments.variance == pytest.approx(truth.variance, rel=1e-9, abs=1e-12)


SMALL = Tree.build(vocabulary=3, length=3)


@pytest.mark.parametrize("name", ["k3 in loss", "k3 in reward", "exact KL x prefix ratio (rb/per_decision)"])
def test_one_step_of_gradient_descent_is_the_gradient_of_the_oracle(name):
    games = random_games(SMALL, seeds=1, betas=(0.4,))
    # Away from the reference, where most forms have no gradient.
    generator = torch.Generator().manual_seed(5)
    noise_SNV = torch.randn(games.start_SNV.shape, generator=generator, dtype=torch.float64)
    games = dataclasses.replace(games, start_SNV=games.start_SNV + 0.3 * noise_SNV)
    terms = OPTIMIZED[name]
    path = optimize(games, terms, Optimization(steps=1, rate=1.0, rule="gd", sampler="reference"))
    step_D = (games.start_SNV - path.logits_SNV).flatten()

    setting = Instance(
        tree=SMALL,
        features_NVD=None,
        theta_D=games.start_SNV.flatten(),
        ref_logp_NV=games.ref_logp_SNV[0],
        sampler_logp_NV=games.ref_logp_SNV[0],
        recorded_logp_NV=games.ref_logp_SNV[0],
        reward_N2=torch.zeros(SMALL.prefixes, 2, dtype=torch.float64),
    )
    theta_D = setting.theta_D.clone().requires_grad_(True)
    p_B = log_probs(SMALL, prefix_log_probs(theta_D.reshape(SMALL.prefixes, 3))).sum(-1).exp()
    (reward_D,) = torch.autograd.grad(p_B @ games.reward_SB[0], theta_D)
    # The loss is beta times the KL terms minus the reward.
    torch.testing.assert_close(step_D, 0.4 * expected_gradient(setting, terms).gradient_D - reward_D)


def test_the_command_writes_data_figures_and_page(tmp_path):
    result = CliRunner().invoke(app, ["synthetic", "distance", "--quick", "--seeds", "1", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {
        "distance.parquet",
        "gaps.parquet",
        "distance.svg",
        "README.md",
    }
    assert "python -m research.studies synthetic distance --quick --seeds 1" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_every_part_runs_in_the_small(tmp_path, monkeypatch):
    for name in ("SETTINGS", "MODE_SETTINGS"):
        short = {key: dataclasses.replace(setting, steps=40) for key, setting in getattr(optimum, name).items()}
        monkeypatch.setattr(optimum, name, short)
    monkeypatch.setattr(study.Size, "lengths", (5, 6, 7))
    for part in study.PARTS:
        study.run_part(part, tmp_path, study.Size(quick=True, seeds=1), command="test")
    assert len(list(tmp_path.glob("*.svg"))) == 5
    assert len(list(tmp_path.glob("*.parquet"))) == 7
