"""The study of estimated values: against draws, and the stored results are its own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from research.studies.pages import read_frame
from research.studies.values import moments, token_errors

STORED = Path(__file__).parents[2] / "results" / "values" / "errors.parquet"


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


def test_the_stored_results_are_those_of_the_code(frame):
    stored = read_frame(STORED)
    of_these_seeds = stored[stored.seed < 2].sort_values(["seed"], kind="stable")
    np.testing.assert_allclose(frame.error, of_these_seeds.error, rtol=1e-4)
