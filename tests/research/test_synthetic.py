"""The synthetic study on small instances: its measurements against the oracle, its claims, its page."""

import dataclasses
import functools
import math

import pytest
import torch
from research.studies import bias_variance, optimum
from research.studies import synthetic as study
from research.studies.__main__ import app
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


def binary_tree(length):
    return Tree.build(vocabulary=2, length=length, ends=False)


def test_a_longer_policy_extends_the_shorter_one():
    short = shared_setting(binary_tree(4), seed=3, distance=0.5)
    long = shared_setting(binary_tree(7), seed=3, distance=0.5)
    shared = short.tree.prefixes
    torch.testing.assert_close(long.ref_logp_NV[:shared], short.ref_logp_NV)
    torch.testing.assert_close(long.sampler_logp_NV[:shared], short.sampler_logp_NV)
    torch.testing.assert_close(long.policy_logp()[:shared], short.policy_logp())


def test_the_kl_per_token_does_not_depend_on_the_length():
    per_token = []
    for length in (4, 12):
        tree = binary_tree(length)
        total = sum(sequence_kl(shared_setting(tree, seed=seed, distance=0.5)) for seed in range(12))
        per_token.append(total / length)
    assert max(per_token) < 1.3 * min(per_token)


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


@pytest.fixture(scope="module")
def length_frame():
    return bias_variance.length_study(lengths=(5, 8), seeds=2, sampled_seeds=1, rounds=10, samples=100)


@pytest.fixture(scope="module")
def exact_figures(length_frame):
    """The enumerated figures, by regime and configuration."""
    return length_frame[length_frame.method == "exact"].set_index(["regime", "configuration"])


@pytest.mark.parametrize(("regime", "unbiased"), [("on_policy", UNBIASED_ON), ("off_policy", UNBIASED_OFF)])
def test_length_study_finds_what_the_theory_says(exact_figures, regime, unbiased):
    biases = exact_figures.loc[regime].bias
    assert (biases[biases.index.isin(unbiased)] < 1e-9).all()
    assert (biases[~biases.index.isin(unbiased)] > 1e-3).all()


def test_k1_in_loss_has_no_gradient_at_any_length(exact_figures):
    bias = exact_figures.loc["on_policy"].loc["k1 in loss"].bias.to_numpy()
    assert bias == pytest.approx(1.0, abs=1e-9)


def test_k2_in_loss_is_as_biased_as_the_exact_kl_in_loss(exact_figures):
    on_policy = exact_figures.loc["on_policy"]
    expected = on_policy.loc["exact KL in loss (rb/token)"].bias.to_numpy()
    assert on_policy.loc["k2 in loss"].bias.to_numpy() == pytest.approx(expected, rel=1e-9)


def test_the_exact_kl_to_go_has_less_variance_than_k3_in_both(exact_figures):
    on_policy = exact_figures.loc["on_policy"]
    exact = on_policy.loc["exact KL to go (rb/full)"].variance.to_numpy()
    assert (exact < on_policy.loc["k3 in both"].variance.to_numpy()).all()


def test_the_coverage_of_every_configuration_is_counted(length_frame):
    assert len(coverage(length_frame)) == len(ON_POLICY) + len(OFF_POLICY)


def test_token_level_forms_miss_more_where_the_policy_remembers_longer():
    frame = bias_variance.memory_study(lengths=(5, 10), persistences=(0.0, 0.9, 1.0), seeds=3)
    bias = frame[frame.configuration == "k2 in loss"].groupby(["persistence", "length"]).bias.mean()
    assert bias[0.9, 10] > 1.3 * bias[0.9, 5]
    assert bias[0.9, 10] > 1.3 * bias[0.0, 10]
    assert bias[1.0, 10] == pytest.approx(0.0, abs=1e-9)  # independent tokens: nothing to come can be changed


def test_a_debiased_norm_without_noise_is_the_norm():
    row = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert bias_variance.debiased_norm(row.repeat(9, 1)) == pytest.approx((5.0, 5.0, 5.0))


def test_a_debiased_norm_of_noise_is_less_than_the_noise():
    noise = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    middle, low, high = bias_variance.debiased_norm(noise)
    assert 0 <= low <= middle <= high
    assert high < float(noise.norm(dim=1).mean())


# Distance


@pytest.fixture(scope="module")
def distance_frame():
    return bias_variance.distance_study(distances=(0.1, 0.5, 4.0), seeds=2)


@pytest.fixture(scope="module")
def mean_bias(distance_frame):
    """The mean bias, by configuration and distance."""
    return distance_frame.groupby(["configuration", "distance"]).bias.mean()


@pytest.mark.parametrize("name", ["k2 in loss", "k3 in loss"])
def test_bias_grows_with_distance(mean_bias, name):
    assert mean_bias[name].is_monotonic_increasing


def test_clamps_add_to_the_bias_far_from_the_reference_only(mean_bias):
    clamped = mean_bias["k2 in loss, clamped as in OpenRLHF"]
    assert clamped[0.1] == pytest.approx(mean_bias["k2 in loss"][0.1], rel=1e-9)
    assert clamped[4.0] > 1.5 * mean_bias["k2 in loss"][4.0]


def test_a_form_without_a_gradient_has_no_cosine(distance_frame):
    assert distance_frame[distance_frame.configuration == "k1 in loss"].cosine.isna().all()


def test_gaps_are_proportional_to_small_distances_and_placed_beside_the_reported():
    frame = bias_variance.gap_study(distances=(0.01, 0.1), seeds=20)
    table = bias_variance.gap_table(frame).set_index(["gap", "logit distance"])["ours (median), %"]
    for name in bias_variance.REPORTED_GAPS:
        assert table[name, 0.1] == pytest.approx(10 * table[name, 0.01], rel=0.2)


# Games and their optimum

SMALL = Tree.build(vocabulary=3, length=3)


@pytest.fixture(scope="module")
def games():
    return random_games(SMALL, seeds=3, betas=(0.1, 1.0))


def check_level(values_SB):
    """The values are the same for every completion of a game: the condition of first order for an optimum."""
    torch.testing.assert_close(values_SB, values_SB[:, :1].expand_as(values_SB))


def test_optima_are_distributions(games):
    for optimum_SB in (games.optimum(), games.forward_optimum()):
        torch.testing.assert_close(optimum_SB.exp().sum(-1), torch.ones(6, dtype=torch.float64))


def test_the_optimum_of_a_reverse_kl_has_its_condition(games):
    ref_SB = games.of_completions(games.ref_logp_SNV)
    check_level(games.reward_SB - games.beta_S[:, None] * (games.optimum() - ref_SB))


def test_the_optimum_of_a_forward_kl_has_its_condition(games):
    ref_SB = games.of_completions(games.ref_logp_SNV)
    check_level(games.reward_SB + games.beta_S[:, None] * (ref_SB - games.forward_optimum()).exp())


@pytest.fixture(scope="module")
def game():
    return random_games(SMALL, seeds=1, betas=(0.3,))


def figures_at_optimum(game, of_game):
    """The figures in ``game`` of the optimum of another with the same rewards."""
    return policy_figures(game, logits_of(SMALL, of_game.optimum()[0])[None])


def test_the_optimum_is_at_no_distance_from_itself(game):
    assert float(figures_at_optimum(game, game)["to_optimum"]) == pytest.approx(0.0, abs=1e-12)


def test_a_game_begins_at_its_reference(game):
    assert float(policy_figures(game, game.start_SNV)["to_ref"]) == pytest.approx(0.0, abs=1e-12)


def test_the_gap_is_the_difference_of_the_objective(game):
    def objective(figures):
        return float(figures["reward"] - game.beta_S * figures["to_ref"])

    at_optimum = figures_at_optimum(game, game)
    at_start = policy_figures(game, game.start_SNV)
    assert float(at_start["gap"]) == pytest.approx(objective(at_optimum) - objective(at_start), rel=1e-9)


def test_the_optimum_of_half_the_beta_is_found(game):
    halved = dataclasses.replace(game, beta_S=game.beta_S / 2)
    figures = figures_at_optimum(game, halved)
    assert float(figures["to_half_beta_optimum"]) == pytest.approx(0.0, abs=1e-12)


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


def test_sampled_gradients_average_to_the_expected_one():
    copies = 400
    one = random_games(SMALL, seeds=1, betas=(0.4,))
    repeated = {}
    for name, value in vars(one).items():
        if isinstance(value, torch.Tensor):
            repeated[name] = value.repeat(copies, *[1] * (value.dim() - 1))
    many = dataclasses.replace(one, **repeated)
    terms = OPTIMIZED["k2 in loss"]
    expected_step = Optimization(steps=1, rate=1.0, rule="gd")
    sampled_step = dataclasses.replace(expected_step, batch=64)
    expected = optimize(one, terms, expected_step).logits_SNV - one.start_SNV
    drawn = optimize(many, terms, sampled_step).logits_SNV - many.start_SNV
    standard_error = drawn.std(0) / copies**0.5 + 1e-12  # finite where there is no gradient
    assert float(((drawn.mean(0) - expected[0]) / standard_error).abs().max()) < 5.0


# --- what each form converges to; slow, because one step of each is compared with the oracle above ---
@functools.cache
def final_figures(name, sampler="policy"):
    """The figures of two games after 700 steps with a form, from samples of the policy or of the reference."""
    games = random_games(SMALL, seeds=2, betas=(0.5,))
    path = optimize(games, OPTIMIZED[name], Optimization(steps=700, rate=0.08, sampler=sampler))
    return policy_figures(games, path.logits_SNV)


@pytest.mark.slow
def test_an_unbiased_form_reaches_the_optimum():
    assert float(final_figures("exact KL to go (rb/full)")["to_optimum"].max()) < 1e-6


@pytest.mark.slow
def test_a_biased_form_does_not_reach_the_optimum():
    assert float(final_figures("k3 in loss")["to_optimum"].min()) > 1e-4


@pytest.mark.slow
def test_k1_in_loss_ends_where_no_kl_does():
    expected = final_figures("no KL")["to_ref"]
    torch.testing.assert_close(final_figures("k1 in loss")["to_ref"], expected, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_k3_of_the_completion_reaches_the_optimum_of_a_forward_kl():
    assert float(final_figures("k3 of the completion in loss")["to_forward_optimum"].max()) < 1e-6


@pytest.mark.slow
def test_off_policy_a_prefix_ratio_reaches_the_optimum_and_no_ratio_does_not():
    with_ratio = final_figures("exact KL x prefix ratio (rb/per_decision)", sampler="reference")
    without = final_figures("exact KL to go (rb/full)", sampler="reference")
    assert float(with_ratio["to_optimum"].max()) < 1e-6
    assert float(without["to_optimum"].min()) > 1e-4


@pytest.mark.slow
def test_off_policy_a_frozen_k1_ends_where_no_kl_does():
    frozen = final_figures("k1 frozen at rollout x sequence ratio", sampler="reference")
    expected = final_figures("no KL", sampler="reference")["to_ref"]
    torch.testing.assert_close(frozen["to_ref"], expected, rtol=1e-6, atol=0)


def per_sample_gradients(games, terms, theta_SNV, *, with_reward):
    """The gradient [B, S, D] of each completion's loss in each game."""
    logp_SNV = prefix_log_probs(theta_SNV)
    logp_SB = games.of_completions(logp_SNV)
    surrogate_SB = terms_loss(terms)(games.rows(logp_SNV, logp_SNV.detach())).sum(-1).reshape(logp_SB.shape)
    loss_SB = games.beta_S[:, None] * surrogate_SB
    if with_reward:
        p_SB = logp_SB.exp().detach()
        advantage_SB = games.reward_SB - (p_SB * games.reward_SB).sum(-1, keepdim=True)
        loss_SB = loss_SB - advantage_SB * logp_SB
    gradients = []
    for loss in loss_SB.sum(0):  # over the games, which do not share parameters
        (gradient_SNV,) = torch.autograd.grad(loss, theta_SNV, retain_graph=True)
        gradients.append(gradient_SNV.flatten(1))
    return torch.stack(gradients)


def variances_at_optimum(terms, *, with_reward):
    """The variance [S] of one completion's update at the optimum of each game; its mean is zero there."""
    games = random_games(optimum.TREE, seeds=3, betas=(0.2,))
    p_SB = games.optimum().exp()
    theta_SNV = torch.stack([logits_of(games.tree, logp_B) for logp_B in games.optimum()]).requires_grad_(True)
    gradient_BSD = per_sample_gradients(games, terms, theta_SNV, with_reward=with_reward)
    mean_SD = torch.einsum("sb,bsd->sd", p_SB, gradient_BSD)
    if with_reward:
        torch.testing.assert_close(mean_SD, torch.zeros_like(mean_SD), atol=1e-12, rtol=0)
    return torch.einsum("sb,bsd->s", p_SB, gradient_BSD.square()) - mean_SD.square().sum(-1)


SAMPLED = OPTIMIZED["k1 in reward, total"]
EXACT = OPTIMIZED["exact KL to go (rb/full)"]


def test_at_the_optimum_the_sampled_cost_cancels_the_rewards_noise():
    """R - beta k1 is constant there, so k1 in reward has the less noisy update."""
    sampled_S = variances_at_optimum(SAMPLED, with_reward=True)
    exact_S = variances_at_optimum(EXACT, with_reward=True)
    assert (sampled_S < exact_S / 1.4).all()


def test_at_the_optimum_the_sampled_cost_alone_is_noisier():
    sampled_S = variances_at_optimum(SAMPLED, with_reward=False)
    exact_S = variances_at_optimum(EXACT, with_reward=False)
    assert (sampled_S > 2 * exact_S).all()


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


def test_the_modes_are_two_completions_of_one_token():
    a = optimum._number(0)
    b = optimum._number(1)
    assert torch.equal(optimum.MODE_TREE.all.token_BT[[a, b]], torch.tensor([[0, 0, 0], [1, 1, 1]]))


def test_a_game_with_a_lost_mode_has_two_equal_ones_and_starts_without_one():
    game = optimum.mode_games("lost", rare=(1e-3,))
    a = optimum._number(0)
    b = optimum._number(1)
    assert float(game.optimum()[0, a]) == pytest.approx(float(game.optimum()[0, b]))
    start_B = game.of_completions(game.start_SNV).exp()[0]
    # The first token is rare; the two after it have 0.8 each.
    assert float(start_B[b]) == pytest.approx(1e-3 * 0.64)


def test_a_game_is_copied_for_sampling():
    assert optimum.mode_games("invented", rare=(1e-3,), copies=2).count == 2


@pytest.fixture(scope="module")
def recoveries():
    """In how many of two games the lost mode comes back, by setting and form."""
    forms = {name: optimum.RECOVERING[name] for name in ("k1 in loss", "k2 in loss", "k3 in loss")}
    forms["exact forward KL in loss"] = (KLTerm("exact_forward", placement="loss"),)
    settings = {
        "expected": Optimization(steps=150, rate=1.0, rule="gd"),
        "sampled": Optimization(steps=150, rate=1.0, rule="gd", batch=64),
    }
    frame = optimum.mode_study(seeds=2, settings=settings, configurations=forms, rare=(1e-7,))
    return frame[frame.kind == "lost"].groupby(["setting", "configuration"]).step.count()


@pytest.mark.parametrize(
    ("setting", "form", "count"),
    [
        # In expectation k3 in loss is a forward KL. There is one game without sampling, whatever the seeds.
        ("expected", "k3 in loss", 1),
        ("expected", "exact forward KL in loss", 1),
        ("sampled", "exact forward KL in loss", 2),
        # Samples of k3 need the mode drawn, those of the exact one do not.
        ("sampled", "k3 in loss", 0),
        ("expected", "k2 in loss", 0),
        ("expected", "k1 in loss", 0),
    ],
)
def test_what_brings_a_lost_mode_back(recoveries, setting, form, count):
    assert recoveries[setting, form] == count


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
    result = CliRunner().invoke(app, ["synthetic", "lenght", "--out", str(tmp_path)])
    assert isinstance(result.exception, UserError)
    assert "did you mean 'length'" in str(result.exception)


def test_the_command_writes_data_figures_and_page(tmp_path):
    result = CliRunner().invoke(app, ["synthetic", "distance", "--quick", "--seeds", "1", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {"distance.csv", "gaps.csv", "distance.svg", "README.md"}
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
    assert len(list(tmp_path.glob("*.csv"))) == 7
