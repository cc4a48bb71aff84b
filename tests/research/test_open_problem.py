"""The off-policy study on small instances: what must be unbiased is, what is sampled agrees with what is enumerated."""

import itertools

import pandas as pd
import pytest
import torch
from research.studies import open_problem
from research.studies.open_problem import (
    COMPARISONS,
    Comparison,
    comparison_table,
    doubly_robust_moments,
    regret_table,
    write_report,
)

from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, exact_moments, target_gradient, terms_loss

TREE = Tree.build(vocabulary=2, length=5, ends=False)
UNBIASED = (
    "sequence IS, k1 total",
    "sequence IS, k3 differentiated",
    "per decision, k1",
    "per decision, k3 differentiated",
    "RB per decision",
)
BIASED = ("RB without prefix ratio", "RB, prefix truncated at 1", "RB, window of 1", "token ratio x k3")


@pytest.fixture(scope="module")
def setting():
    return Instance.random(TREE, InstanceSettings(regime="off_policy", seed=1, parameters=6, staleness=0.8))


@pytest.fixture(scope="module")
def frame():
    return open_problem.study(lengths=(4, 6), staleness=(0.0, 0.8), seeds=2, batches=4, batch=2048)


@pytest.fixture(scope="module")
def largest_bias(frame):
    """The largest bias of each candidate on stale samples."""
    return frame[frame.staleness > 0].groupby("candidate").bias.max()


@pytest.mark.parametrize("name", UNBIASED)
def test_the_exact_solutions_are_unbiased(largest_bias, name):
    assert largest_bias[name] < 1e-10


@pytest.mark.parametrize("name", BIASED)
def test_the_knobs_are_biased(largest_bias, name):
    assert largest_bias[name] > 0.01


def test_the_sampled_bias_of_an_unbiased_candidate_is_zero_within_its_bounds(frame):
    rows = frame[frame.candidate == "RB + own baseline"]
    # Intervals of 95 % of a few rows: most of them reach zero.
    assert (rows.bias_low == 0.0).mean() > 0.7
    assert rows.bias_high.max() < 0.1


def test_on_policy_every_ratio_is_one():
    on_policy = Instance.random(TREE, InstanceSettings(regime="on_policy", seed=1, parameters=6))
    rb = open_problem.exact_candidates()["RB per decision"]
    expected = exact_moments(on_policy, terms_loss([rb]), group_size=2)
    moments = exact_moments(on_policy, open_problem.self_normalized(None), group_size=2)
    assert moments.relative_bias(expected.gradient_D) < 1e-10
    assert moments.variance == pytest.approx(expected.variance, rel=1e-9)


@pytest.fixture(scope="module")
def target_D(setting):
    return target_gradient(setting, "sequence_reverse")


@pytest.fixture(scope="module")
def doubly_robust(setting, target_D):
    """The relative bias and variance of each doubly robust form."""
    return doubly_robust_moments(setting, target_D)


@pytest.mark.parametrize("name", ["doubly robust, exact value", "doubly robust, value off by 50%"])
def test_doubly_robust_forms_are_unbiased_whatever_the_value(doubly_robust, name):
    bias, _ = doubly_robust[name]
    assert bias < 1e-10


def test_a_value_alone_is_biased_where_it_is_wrong(doubly_robust):
    bias, _ = doubly_robust["value only, off by 50%, truncated at 2"]
    assert bias > 0.01


def test_a_doubly_robust_form_with_the_exact_value_has_less_variance(setting, target_D, doubly_robust):
    rb = exact_moments(setting, terms_loss([open_problem.exact_candidates()["RB per decision"]]))
    _, variance = doubly_robust["doubly robust, exact value"]
    assert variance < rb.variance / float(target_D.square().sum())


def test_the_best_lambda_is_the_least_of_the_parabola():
    rows = open_problem.lambda_study(lengths=(4,), staleness=(0.3,), seeds=2)
    assert (rows.best <= rows.k1 + 1e-12).all()
    assert (rows.best <= rows.k3 + 1e-12).all()
    assert (rows.rb < rows.best).all()


def test_the_report_is_written(frame, tmp_path):
    lambdas = open_problem.lambda_study(lengths=(4, 6), staleness=(0.0, 0.8), seeds=2)
    write_report(frame, lambdas, tmp_path, command="python -m research.studies open-problem --quick")
    assert {path.name for path in tmp_path.iterdir()} == {
        "README.md",
        "open_problem.csv",
        "k_lambda.csv",
        "error.svg",
        "variance.svg",
        "knobs.svg",
    }
    assert len(pd.read_csv(tmp_path / "open_problem.csv")) == len(frame)


def test_regrets_start_at_one(frame):
    assert regret_table(frame)["mean, N=1024"].min() >= 1.0


def test_every_comparison_is_of_candidates_of_the_study(frame):
    named = {name for comparison in COMPARISONS for name in (comparison.first, comparison.second)}
    assert named <= set(frame.candidate)
    assert {comparison.figure for comparison in COMPARISONS} <= set(frame.columns)


def test_a_comparison_shows_the_settings_in_which_its_ratio_is_least_and_greatest(monkeypatch):
    """The median over seeds, not the mean; nothing of completions that are too short."""
    one = Comparison(words="a over b", figure="variance", first="a", second="b", staleness=(0.0, 0.5))
    monkeypatch.setattr(open_problem, "COMPARISONS", (one,))
    ratios = {(4, 0.0): 0.01, (8, 0.0): 2.0, (8, 0.5): 0.5, (12, 0.0): 3.0, (12, 0.5): 1.0, (12, 1.0): 99.0}
    rows = []
    for ((length, staleness), ratio), seed in itertools.product(ratios.items(), range(3)):
        setting = {"length": length, "staleness": staleness, "seed": seed}
        outlier = 50.0 if seed == 2 else 1.0
        rows.append({**setting, "candidate": "a", "variance": 10.0 * ratio * outlier})
        rows.append({**setting, "candidate": "b", "variance": 10.0})
    (row,) = comparison_table(pd.DataFrame(rows)).to_dict("records")
    assert (row["least"], row["where least"]) == (0.5, "8 tokens, staleness 0.5")
    assert (row["greatest"], row["where greatest"]) == (3.0, "12 tokens, staleness 0")


def test_the_closed_form_of_lognormal_prefix_ratios_is_that_of_drawn_ones():
    table = open_problem.lognormal_ratios(kls=(0.002,), lengths=(50, 200), cap=2.0)
    steps = torch.randn(40_000, 200, generator=torch.Generator().manual_seed(0)) * 0.004**0.5 - 0.002
    for _, row in table.iterrows():
        ratio = steps[:, : row.tokens].sum(-1).exp()
        assert row["effective sample share"] == pytest.approx(float(1 / ratio.square().mean()), rel=0.05)
        assert row["mean up to 2"] == pytest.approx(float(ratio.clamp(max=2.0).mean()), abs=0.02)
    assert (table["over the completion"] > table["mean up to 2"]).all()
