"""The study of predictors: figures of a gradient whose expectation is known, and the stored scores."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from research.studies.predictor import (
    CANDIDATES,
    OUTCOMES,
    gradient_figures,
    rank_correlation,
)

STORED = Path(__file__).parents[2] / "results" / "predictor"


BIASED = 3
"""The place of a gradient that is twice the reference, and as much aside, in the Gram matrix below."""


@pytest.fixture(scope="module")
def gram():
    """Products of 16 equal blocks of four gradients: without noise, so that each figure is known."""
    blocks = 16
    width = 8
    policy, reference = torch.zeros(2, blocks, width, dtype=torch.float64)
    policy[:, 1] = 2.0
    reference[:, 0] = 1.0
    biased = 2.0 * reference
    biased[:, 2] = 1.0
    losses = torch.stack([policy, reference, reference, biased])
    return torch.einsum("cjw,dkw->cdjk", losses, losses)


def test_figures_of_a_biased_form(gram):
    figures = gradient_figures(gram, {BIASED: 1.0}, 0.5, math.inf)
    # It differs from the reference by 1 along it and by 1 aside.
    assert figures["bias"] == pytest.approx(math.sqrt(2))
    assert figures["error"] == figures["bias"]
    assert figures["strength"] == 2.0
    assert figures["cosine"] == pytest.approx(2 / math.sqrt(5))
    assert figures["sample_cosine"] == figures["cosine"]


# --- the stored scores --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def stored_scores():
    scores = pd.read_csv(STORED / "scores.csv")
    return scores[scores.subset == "all"].set_index("candidate")


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_the_stored_scores_are_those_of_the_stored_configurations(stored_scores, outcome):
    table = pd.read_csv(STORED / "configurations.csv")
    for name in CANDIDATES:
        expected = rank_correlation(table[name], table[outcome])
        assert stored_scores.loc[name, f"{outcome}_rank"] == pytest.approx(expected, abs=1e-5), name
