"""The synthetic study on small instances: its measurements against the oracle, its claims, its page."""

import dataclasses
import math

import pytest
import torch
from research.studies import bias_variance, optimum
from research.studies import synthetic as study
from research.studies.bias_variance import CLAMPED, OFF_POLICY, ON_POLICY, OPTIMIZED, sampled_in_rounds, shared_setting
from research.studies.optimum import Optimization, logits_of, optimize, policy_figures, random_games
from research.studies.pages import update_page
from research.studies.synthetic import coverage
from typer.testing import CliRunner

from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import (
    Instance,
    Tree,
    exact_moments,
    exact_moments_by_loss,
    expected_gradient,
    log_probs,
    prefix_log_probs,
    sequence_kl,
    target_gradient,
    terms_loss,
)

BINARY = Tree.build(vocabulary=2, length=6, ends=False)
UNBIASED_ON = ("k1 in reward, total", "k1 in reward, to go", "k1 in both", "k3 in both", "exact KL to go (rb/full)")
UNBIASED_OFF = (
    "k1 x sequence ratio",
    "k1 x prefix ratio (per decision)",
    "exact KL x prefix ratio (rb/per_decision)",
)


# Policies of any length


def test_a_longer_policy_extends_the_shorter_one():
    short, long = (shared_setting(Tree.build(vocabulary=2, length=n, ends=False), seed=3, distance=0.5) for n in (4, 7))
    for name in ("ref_logp_NV", "sampler_logp_NV"):
        torch.testing.assert_close(getattr(long, name)[: short.tree.prefixes], getattr(short, name))
    torch.testing.assert_close(long.policy_logp()[: short.tree.prefixes], short.policy_logp())
    trees = {n: Tree.build(vocabulary=2, length=n, ends=False) for n in (4, 12)}
    per_token = [
        sum(sequence_kl(shared_setting(tree, seed=seed, distance=0.5)) for seed in range(12)) / n
        for n, tree in trees.items()
    ]
    assert max(per_token) < 1.3 * min(per_token), "the KL per token does not depend on the length"


@pytest.mark.parametrize("ends", [True, False])
def test_a_setting_is_a_policy(ends):
    tree = Tree.build(vocabulary=3, length=3, ends=ends)
    setting = shared_setting(tree, seed=1, distance=4.0)
    for logp_NV in (setting.policy_logp(), setting.ref_logp_NV, setting.sampler_logp_NV):
        torch.testing.assert_close(logp_NV.exp().sum(-1), torch.ones(tree.prefixes, dtype=torch.float64))
    assert sequence_kl(setting) > 0
    torch.testing.assert_close(setting.sampler_logp_NV, setting.policy_logp())


# Many losses at once


@pytest.mark.parametrize("tree", [BINARY, Tree.build(vocabulary=3, length=3)], ids=["binary", "with ends"])
def test_many_losses_agree_with_the_oracle(tree):
    setting = shared_setting(tree, seed=1, distance=0.7, staleness=0.4)
    losses = {name: terms_loss(terms) for name, terms in {**ON_POLICY, **OFF_POLICY, **CLAMPED}.items()}
    for name, moments in exact_moments_by_loss(setting, losses, chunk=7).items():
        truth = exact_moments(setting, losses[name])
        torch.testing.assert_close(moments.gradient_D, truth.gradient_D, rtol=1e-10, atol=1e-12)
        assert moments.variance == pytest.approx(truth.variance, rel=1e-9, abs=1e-12)


def test_no_terms_have_no_gradient():
    setting = shared_setting(BINARY, seed=0, distance=0.5)
    (moments,) = exact_moments_by_loss(setting, {"no KL": terms_loss(())}).values()
    assert float(moments.gradient_D.norm()) == 0.0 == moments.variance


# Length: exact and Monte Carlo


def test_the_exact_values_lie_in_the_monte_carlo_intervals():
    """Intervals of 99.9%: by chance one seed in a thousand fails, and a slip in either statistic always does."""
    setting = shared_setting(BINARY, seed=0, distance=0.5)
    target_D = target_gradient(setting, "sequence_reverse")
    losses = {name: terms_loss(terms) for name, terms in ON_POLICY.items()}
    exact = exact_moments_by_loss(setting, losses)
    rounds = sampled_in_rounds(setting, losses, rounds=60, samples=500, generator=torch.Generator().manual_seed(1))
    for name, (gradient_RD, variance_R) in rounds.items():
        bias = exact[name].relative_bias(target_D) * float(target_D.norm())
        _, low, high = bias_variance.debiased_norm(gradient_RD - target_D, 0.999)
        assert low - 1e-12 <= bias <= high + 1e-12, name
        _, low, high = bias_variance.mean_interval(variance_R, 0.999)
        assert low <= exact[name].variance <= high, name


def test_the_rounds_of_the_paper_overstate_the_bias_of_a_noisy_unbiased_form():
    rows = bias_variance.one_policy(
        shared_setting(BINARY, seed=0, distance=0.5), {"k1": ON_POLICY["k1 in both"]}, {}, protocol=(40, 250)
    )
    exact, sampled = rows
    assert exact["bias"] < 1e-10
    assert sampled["naive_bias_low"] > 0.2
    assert sampled["bias_low"] == 0.0


def test_length_study_finds_what_the_theory_says():
    frame = bias_variance.length_study(lengths=(5, 8), seeds=2, sampled_seeds=1, rounds=10, samples=100)
    exact = frame[frame.method == "exact"].set_index(["regime", "configuration"])
    for regime, names in (("on_policy", UNBIASED_ON), ("off_policy", UNBIASED_OFF)):
        biases = exact.loc[regime].bias
        assert (biases[biases.index.isin(names)] < 1e-9).all()
        assert (biases[~biases.index.isin(names)] > 1e-3).all()
    on = exact.loc["on_policy"]
    assert on.loc["k1 in loss"].bias.to_numpy() == pytest.approx(1.0, abs=1e-9)
    assert on.loc["k2 in loss"].bias.to_numpy() == pytest.approx(
        on.loc["exact KL in loss (rb/token)"].bias.to_numpy(), rel=1e-9
    )
    assert (on.loc["exact KL to go (rb/full)"].variance.to_numpy() < on.loc["k3 in both"].variance.to_numpy()).all()
    covered = coverage(frame)
    assert len(covered) == len(ON_POLICY) + len(OFF_POLICY)


def test_token_level_forms_miss_more_where_the_policy_remembers_longer():
    frame = bias_variance.memory_study(lengths=(5, 10), persistences=(0.0, 0.9, 1.0), seeds=3)
    bias = frame[frame.configuration == "k2 in loss"].groupby(["persistence", "length"]).bias.mean()
    assert bias[0.9, 10] > 1.3 * bias[0.9, 5]
    assert bias[0.9, 10] > 1.3 * bias[0.0, 10]
    assert bias[1.0, 10] == pytest.approx(0.0, abs=1e-9)  # independent tokens: nothing to come can be changed


def test_a_debiased_norm_without_noise_is_the_norm():
    row = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert bias_variance.debiased_norm(row.repeat(9, 1)) == pytest.approx((5.0, 5.0, 5.0))
    noise = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    middle, low, high = bias_variance.debiased_norm(noise)
    assert 0 <= low <= middle <= high < float(noise.norm(dim=1).mean())


# Distance


def test_bias_grows_with_distance_and_clamps_add_to_it():
    frame = bias_variance.distance_study(distances=(0.1, 0.5, 4.0), seeds=2)
    bias = frame.groupby(["configuration", "distance"]).bias.mean()
    assert bias["k2 in loss"].is_monotonic_increasing
    assert bias["k3 in loss"].is_monotonic_increasing
    assert bias["k2 in loss, clamped as in OpenRLHF"][0.1] == pytest.approx(bias["k2 in loss"][0.1], rel=1e-9)
    assert bias["k2 in loss, clamped as in OpenRLHF"][4.0] > 1.5 * bias["k2 in loss"][4.0]
    assert frame[frame.configuration == "k1 in loss"].cosine.isna().all()


def test_gaps_are_proportional_to_small_distances_and_placed_beside_the_reported():
    frame = bias_variance.gap_study(distances=(0.01, 0.1), seeds=20)
    table = bias_variance.gap_table(frame).set_index(["gap", "logit distance"])["ours (median), %"]
    for name in bias_variance.REPORTED_GAPS:
        assert table[name, 0.1] == pytest.approx(10 * table[name, 0.01], rel=0.2)


# Games and their optimum

SMALL = Tree.build(vocabulary=3, length=3)


def test_optima_are_distributions_with_the_conditions_that_define_them():
    games = random_games(SMALL, seeds=3, betas=(0.1, 1.0))
    ref_SB = games.of_completions(games.ref_logp_SNV)
    for optimum_SB in (games.optimum(), games.forward_optimum()):
        torch.testing.assert_close(optimum_SB.exp().sum(-1), torch.ones(6, dtype=torch.float64))
    level_SB = games.reward_SB - games.beta_S[:, None] * (games.optimum() - ref_SB)
    torch.testing.assert_close(level_SB, level_SB[:, :1].expand_as(level_SB))
    level_SB = games.reward_SB + games.beta_S[:, None] * (ref_SB - games.forward_optimum()).exp()
    torch.testing.assert_close(level_SB, level_SB[:, :1].expand_as(level_SB))


def test_policies_at_the_optimum_and_the_gap_in_j():
    games = random_games(SMALL, seeds=1, betas=(0.3,))
    at_best = policy_figures(games, logits_of(SMALL, games.optimum()[0])[None])
    at_start = policy_figures(games, games.start_SNV)
    assert float(at_best["to_optimum"]) == pytest.approx(0.0, abs=1e-12)
    assert float(at_start["to_ref"]) == pytest.approx(0.0, abs=1e-12)

    def objective(figures):
        return float(figures["reward"] - games.beta_S * figures["to_ref"])

    assert float(at_start["gap"]) == pytest.approx(objective(at_best) - objective(at_start), rel=1e-9)
    halved = dataclasses.replace(games, beta_S=games.beta_S / 2)
    at_half = policy_figures(games, logits_of(SMALL, halved.optimum()[0])[None])
    assert float(at_half["to_half_beta_optimum"]) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", ["k3 in loss", "k3 in reward", "exact KL x prefix ratio (rb/per_decision)"])
def test_one_step_of_gradient_descent_is_the_gradient_of_the_oracle(name):
    games = random_games(SMALL, seeds=1, betas=(0.4,))
    games = dataclasses.replace(
        games,
        start_SNV=games.start_SNV
        + 0.3 * torch.randn(games.start_SNV.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64),
    )
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
    torch.testing.assert_close(step_D, 0.4 * expected_gradient(setting, terms).gradient_D - reward_D)


def test_sampled_gradients_average_to_the_expected_one():
    one, copies = random_games(SMALL, seeds=1, betas=(0.4,)), 400
    tensors = {name: value for name, value in vars(one).items() if isinstance(value, torch.Tensor)}
    many = dataclasses.replace(one, **{n: t.repeat(copies, *[1] * (t.dim() - 1)) for n, t in tensors.items()})
    how = Optimization(steps=1, rate=1.0, rule="gd")
    truth = optimize(one, OPTIMIZED["k2 in loss"], how).logits_SNV - one.start_SNV
    drawn = optimize(many, OPTIMIZED["k2 in loss"], dataclasses.replace(how, batch=64)).logits_SNV - many.start_SNV
    error = (drawn.mean(0) - truth[0]) / (drawn.std(0) / copies**0.5 + 1e-12)
    assert float(error.abs().max()) < 5.0


@pytest.mark.slow  # one step of each form is compared with the oracle above
def test_unbiased_forms_reach_the_optimum_and_the_others_do_not():
    games = random_games(SMALL, seeds=2, betas=(0.5,))
    how = Optimization(steps=700, rate=0.08)

    def final(name, **changes):
        path = optimize(games, OPTIMIZED[name], dataclasses.replace(how, **changes))
        return policy_figures(games, path.logits_SNV)

    for name in ("exact KL to go (rb/full)", "k1 in reward, total", "k3 in both"):
        assert float(final(name)["to_optimum"].max()) < 1e-6, name
    for name in ("k2 in loss", "k3 in loss", "k3 in reward", "k3 in both, half of beta each"):
        assert float(final(name)["to_optimum"].min()) > 1e-4, name
    nothing, k1_loss = final("no KL"), final("k1 in loss")
    torch.testing.assert_close(k1_loss["to_ref"], nothing["to_ref"], rtol=1e-6, atol=0)
    assert float(final("k3 of the completion in loss")["to_forward_optimum"].max()) < 1e-6
    off = {"sampler": "reference"}
    assert float(final("exact KL x prefix ratio (rb/per_decision)", **off)["to_optimum"].max()) < 1e-6
    assert float(final("exact KL to go (rb/full)", **off)["to_optimum"].min()) > 1e-4
    frozen = final("k1 frozen at rollout x sequence ratio", **off)
    torch.testing.assert_close(frozen["to_ref"], final("no KL", **off)["to_ref"], rtol=1e-6, atol=0)


def test_at_the_optimum_the_sampled_cost_cancels_the_rewards_noise():
    """R - beta k1 is constant there, so k1 in reward has the less noisy update, though not the less noisy KL part."""
    games = random_games(optimum.TREE, seeds=3, betas=(0.2,))
    logp_SB = games.optimum()
    theta_SNV = torch.stack([logits_of(games.tree, logp_B) for logp_B in logp_SB]).requires_grad_(True)
    p_SB = logp_SB.exp()
    advantage_SB = games.reward_SB - (p_SB * games.reward_SB).sum(-1, keepdim=True)

    def variance_S(terms, *, with_reward):
        logp_SNV = prefix_log_probs(theta_SNV)
        surrogate_SB = terms_loss(terms)(games.rows(logp_SNV, logp_SNV.detach())).sum(-1).reshape(p_SB.shape)
        loss_SB = games.beta_S[:, None] * surrogate_SB
        if with_reward:
            loss_SB = loss_SB - advantage_SB * games.of_completions(logp_SNV)
        sums_B = loss_SB.sum(0)  # games do not share parameters
        gradient_BSD = torch.stack(
            [torch.autograd.grad(each, theta_SNV, retain_graph=True)[0].flatten(1) for each in sums_B]
        )
        mean_SD = torch.einsum("sb,bsd->sd", p_SB, gradient_BSD)
        if with_reward:
            torch.testing.assert_close(mean_SD, torch.zeros_like(mean_SD), atol=1e-12, rtol=0)
        return torch.einsum("sb,bsd->s", p_SB, gradient_BSD.square()) - mean_SD.square().sum(-1)

    k1, exact = OPTIMIZED["k1 in reward, total"], OPTIMIZED["exact KL to go (rb/full)"]
    assert (variance_S(k1, with_reward=True) < variance_S(exact, with_reward=True) / 1.4).all()
    assert (variance_S(k1, with_reward=False) > 2 * variance_S(exact, with_reward=False)).all()


@pytest.mark.parametrize(
    ("finite", "to_optimum", "gradient", "verdict"),
    [
        (True, 1e-9, 1e-3, "reached"),
        (True, 0.1, 1e-9, "missed"),
        (True, 0.1, 1e-2, "drifts"),
        (True, 0.1, math.inf, "diverged"),
        (False, 0.1, 0.0, "diverged"),
    ],
)
def test_verdicts(finite, to_optimum, gradient, verdict):
    assert optimum.verdict({"finite": finite, "to_optimum": to_optimum, "gradient": gradient}) == verdict


# Modes


def test_mode_games_are_what_they_say():
    lost, invented = optimum.mode_games("lost", rare=(1e-3,)), optimum.mode_games("invented", rare=(1e-3,), copies=2)
    assert invented.count == 2
    a, b = optimum._number(0), optimum._number(1)
    assert torch.equal(optimum.MODE_TREE.all.token_BT[[a, b]], torch.tensor([[0, 0, 0], [1, 1, 1]]))
    assert float(lost.optimum()[0, a]) == pytest.approx(float(lost.optimum()[0, b]))
    start = lost.of_completions(lost.start_SNV).exp()[0]
    assert float(start[b]) == pytest.approx(1e-3 * 0.64)


def test_what_brings_a_lost_mode_back():
    """k3 in loss is a forward KL in expectation, and fast; its samples need the mode drawn, the exact one's do not."""
    chosen = {name: optimum.RECOVERING[name] for name in ("k1 in loss", "k2 in loss", "k3 in loss")}
    chosen["exact forward KL in loss"] = (KLTerm("exact_forward", placement="loss"),)
    how = {
        "expected": Optimization(steps=150, rate=1.0, rule="gd"),
        "sampled": Optimization(steps=150, rate=1.0, rule="gd", batch=64),
    }
    frame = optimum.mode_study(seeds=2, settings=how, configurations=chosen, rare=(1e-7,))
    came = frame[frame.kind == "lost"].groupby(["setting", "configuration"]).step.count()
    assert came["expected", "k3 in loss"] == 1
    assert came["expected", "exact forward KL in loss"] == 1
    assert came["sampled", "exact forward KL in loss"] == 2
    for setting, name in (("sampled", "k3 in loss"), ("expected", "k2 in loss"), ("expected", "k1 in loss")):
        assert came[setting, name] == 0


# The page and the command


def test_a_block_of_the_page_is_replaced_and_the_prose_stays(tmp_path):
    page = tmp_path / "README.md"
    update_page(page, "length", "first")
    page.write_text(page.read_text() + "\nWritten by a person.\n")
    update_page(page, "length", "second")
    update_page(page, "modes", "third")
    text = page.read_text()
    assert "first" not in text
    assert text.index("second") < text.index("Written by a person.") < text.index("third")
    assert text.count("generated length: begin") == 1


def test_an_unknown_part_is_one_clear_error(tmp_path):
    from research.studies.__main__ import app

    result = CliRunner().invoke(app, ["synthetic", "lenght", "--out", str(tmp_path)])
    assert isinstance(result.exception, UserError)
    assert "did you mean 'length'" in str(result.exception)


def test_the_command_writes_data_figures_and_page(tmp_path):
    from research.studies.__main__ import app

    result = CliRunner().invoke(app, ["synthetic", "distance", "--quick", "--seeds", "1", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {"distance.csv", "gaps.csv", "distance.svg", "README.md"}
    assert "python -m research.studies synthetic distance --quick --seeds 1" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_every_part_runs_in_the_small(tmp_path, monkeypatch):
    for name in ("SETTINGS", "MODE_SETTINGS"):
        settings = {key: dataclasses.replace(each, steps=40) for key, each in getattr(optimum, name).items()}
        monkeypatch.setattr(optimum, name, settings)
    monkeypatch.setattr(study.Size, "lengths", (5, 6, 7))
    for part in study.PARTS:
        study.run_part(part, tmp_path, study.Size(quick=True, seeds=1), command="test")
    assert len(list(tmp_path.glob("*.svg"))) == 5
    assert len(list(tmp_path.glob("*.csv"))) == 7
