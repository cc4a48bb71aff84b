"""The study of predictors: figures of gradients whose expectations are known, labels of runs, and the stored scores."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from research.studies.predictor import (
    CANDIDATES,
    OUTCOMES,
    _parse_label,
    explained,
    gradient_figures,
    per_configuration,
    rank_correlation,
    separation,
)

STORED = Path(__file__).parents[2] / "results" / "predictor"


def test_figures_of_a_biased_and_of_an_unbiased_form():
    blocks, width = 16, 8
    policy, reference = torch.zeros(2, blocks, width, dtype=torch.float64)
    policy[:, 1], reference[:, 0] = 2.0, 1.0
    twice_and_aside = 2.0 * reference
    twice_and_aside[:, 2] = 1.0
    losses = torch.stack([policy, reference, reference, twice_and_aside])
    gram = torch.einsum("cjw,dkw->cdjk", losses, losses)
    unbiased = gradient_figures(gram, {2: 1.0}, 0.5, math.inf)
    assert unbiased["bias"] == unbiased["error"] == 0.0 and unbiased["strength"] == unbiased["cosine"] == 1.0
    assert unbiased["projection"] == unbiased["projection_after_clip"] == pytest.approx(0.25)
    biased = gradient_figures(gram, {3: 1.0}, 0.5, math.inf)
    assert biased["bias"] == biased["error"] == pytest.approx(math.sqrt(2)) and biased["strength"] == 2.0
    assert biased["cosine"] == biased["sample_cosine"] == pytest.approx(2 / math.sqrt(5))
    both = gradient_figures(gram, {2: 1.0, 3: 1.0}, 0.5, math.inf)
    assert both["strength"] == 3.0
    clipped = gradient_figures(gram, {3: 1.0}, 0.5, 1.0)
    assert clipped["projection_after_clip"] == pytest.approx(1 / math.sqrt(1 + 2**2 + 0.5**2))


def test_configurations_are_compared_with_no_kl_of_their_source():
    rows = [("a", "no KL", 0.0, 0.2), ("a", "f", 0.1, 0.5), ("b", "no KL", 0.0, 0.4), ("b", "f", 0.1, 0.5)]
    runs = pd.DataFrame(rows, columns=["source", "form", "beta", "reward"]).assign(setting="s", seed=0, kl=1.0)
    (row,) = per_configuration(runs).to_dict("records")
    assert row["gain"] == pytest.approx(0.2) and row["seeds"] == 2 and row["collapsed"] == 0
    assert _parse_label("0.1 a + 0.1 b") == ("a + b", 0.1) and _parse_label("0.1 a + 0.2 b")[0] == ""


def test_what_a_perfect_and_a_constant_candidate_explain():
    table = pd.DataFrame({"x": range(20), "y": range(20), "c": 1.0, "form": [n % 4 for n in range(20)]})
    assert explained(table, ["x"], "y", leave_out="form") == pytest.approx(1.0)
    assert explained(table, ["c"], "y", leave_out=None) == pytest.approx(0.0)
    assert math.isnan(rank_correlation(table.c, table.y)) and rank_correlation(table.x, -table.y) == pytest.approx(-1.0)
    assert separation(table.x, (table.y > 10).astype(float)) == 1.0


def test_the_stored_scores_are_those_of_the_stored_configurations():
    table, scored = pd.read_csv(STORED / "configurations.csv"), pd.read_csv(STORED / "scores.csv")
    everything = scored[scored.subset == "all"].set_index("candidate")
    assert set(everything.index) == set(CANDIDATES)
    for name in CANDIDATES:
        for outcome in OUTCOMES:
            expected = rank_correlation(table[name], table[outcome])
            assert everything.loc[name, f"{outcome}_rank"] == pytest.approx(expected, abs=1e-5), (name, outcome)
