"""The study of estimated values: known figures, what must hold in general, and that the stored results are its own."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from research.studies.values import NAMES, error_table, gaussian_table, moments, token_errors

STORED = Path(__file__).parents[2] / "results" / "values" / "errors.csv"


@pytest.fixture(scope="module")
def gaussians():
    """The rows of the table: a mean of 0.1 and of 1; then 0.1 with a standard deviation of 0.8 and of 0.2."""
    return gaussian_table().to_dict("records")


def noise(row):
    """The standard deviation of one sample over the KL, of k1, k2 and k3."""
    return [row[f"{name}: sd / KL"] for name in NAMES]


def test_one_sample_of_a_gaussian_has_the_noise_that_schulman_gives(gaussians):
    near, far, _, _ = gaussians
    np.testing.assert_allclose(noise(near), [20, 1.42, 1.42], rtol=5e-3)
    np.testing.assert_allclose(noise(far), [2, 1.73, 1.7], rtol=5e-3)


def test_k2_is_biased_in_proportion_to_the_kl(gaussians):
    near, _, _, _ = gaussians
    assert near["k2: bias / KL"] == pytest.approx(0.0025, rel=1e-3)


def test_k3_of_a_narrow_gaussian_has_no_finite_variance(gaussians):
    _, _, _, narrow = gaussians
    assert narrow["k3: sd / KL"] == "infinite"


@pytest.fixture(scope="module")
def drawn():
    """Log-probs of two distributions over six tokens, and the log-ratios [N, 4] of 200,000 averages of four."""
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logp, ref_logp = logits.log_softmax(-1)
    tokens = np.random.default_rng(0).choice(6, size=(200_000, 4), p=logp.exp())
    return logp, ref_logp, (logp - ref_logp).numpy()[tokens]


@pytest.mark.parametrize(
    ("name", "estimate"),
    [("k1", lambda ratio: ratio), ("k2", lambda ratio: ratio**2 / 2), ("k3", lambda ratio: np.expm1(-ratio) + ratio)],
    ids=["k1", "k2", "k3"],
)
def test_an_average_has_the_bias_and_a_share_of_the_variance(drawn, name, estimate):
    logp, ref_logp, ratio = drawn
    values = estimate(ratio)
    mean, variance = moments(logp, ref_logp, logp.exp())[name]
    # Five standard errors.
    assert values.mean() == pytest.approx(mean, abs=5 * (variance / values.size) ** 0.5)
    assert values.mean(1).var() == pytest.approx(variance / 4, rel=0.05)


@pytest.fixture(scope="module")
def frame():
    return token_errors(seeds=2)


def test_all_estimators_but_k2_are_unbiased(frame):
    assert frame[frame.estimator != "k2"].bias.abs().max() < 1e-9


def test_the_stored_results_are_those_of_the_code(frame):
    stored = pd.read_csv(STORED)
    of_these_seeds = stored[stored.seed < 2].sort_values(["seed"], kind="stable")
    np.testing.assert_allclose(frame.error, of_these_seeds.error, rtol=1e-4)


def test_the_table_has_a_row_for_each_kl(frame):
    assert list(error_table(frame)["KL, nats"].unique()) == [0.001, 0.01, 0.1, 1.0, 5.0]
