"""The study of estimated values: known figures, what must hold in general, and that the stored results are its own."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from research.studies.values import NAMES, error_table, gaussian_table, moments, token_errors

STORED = Path(__file__).parents[2] / "results" / "values" / "errors.csv"


def test_one_sample_of_a_gaussian_has_the_noise_that_schulman_gives():
    near, far, _, narrow = gaussian_table().to_dict("records")
    noise = [[row[f"{name}: sd / KL"] for name in NAMES] for row in (near, far)]
    np.testing.assert_allclose(noise, [[20, 1.42, 1.42], [2, 1.73, 1.7]], rtol=5e-3)
    assert near["k2: bias / KL"] == pytest.approx(0.0025, rel=1e-3) and narrow["k3: sd / KL"] == "infinite"


def test_an_average_has_the_bias_and_a_share_of_the_variance():
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logp, ref_logp = logits.log_softmax(-1)
    drawn = np.random.default_rng(0).choice(6, size=(200_000, 4), p=logp.exp())
    ratio = (logp - ref_logp).numpy()[drawn]
    for name, value in (("k1", ratio), ("k2", ratio**2 / 2), ("k3", np.expm1(-ratio) + ratio)):
        mean, variance = moments(logp, ref_logp, logp.exp())[name]
        assert value.mean() == pytest.approx(mean, abs=5 * (variance / value.size) ** 0.5)
        assert value.mean(1).var() == pytest.approx(variance / 4, rel=0.05), name


def test_the_stored_results_are_those_of_the_code():
    frame = token_errors(seeds=2)
    assert frame[frame.estimator != "k2"].bias.abs().max() < 1e-9
    stored = pd.read_csv(STORED)
    np.testing.assert_allclose(
        frame.error, stored[stored.seed < 2].sort_values(["seed"], kind="stable").error, rtol=1e-4
    )
    assert list(error_table(frame)["KL, nats"].unique()) == [0.001, 0.01, 0.1, 1.0, 5.0]
