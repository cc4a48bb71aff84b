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


POLICY = 0
REFERENCE = 1
UNBIASED = 2
BIASED = 3
"""Places of the gradients in the Gram matrix below: the biased form is twice the reference, and as much aside."""


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


def test_figures_of_an_unbiased_form(gram):
    figures = gradient_figures(gram, {UNBIASED: 1.0}, 0.5, math.inf)
    assert figures["bias"] == 0.0
    assert figures["error"] == 0.0
    assert figures["strength"] == 1.0
    assert figures["cosine"] == 1.0
    # Half the reference gradient of norm 1, over the policy's norm 2.
    assert figures["projection"] == pytest.approx(0.25)
    assert figures["projection_after_clip"] == figures["projection"]


def test_figures_of_a_biased_form(gram):
    figures = gradient_figures(gram, {BIASED: 1.0}, 0.5, math.inf)
    # It differs from the reference by 1 along it and by 1 aside.
    assert figures["bias"] == pytest.approx(math.sqrt(2))
    assert figures["error"] == figures["bias"]
    assert figures["strength"] == 2.0
    assert figures["cosine"] == pytest.approx(2 / math.sqrt(5))
    assert figures["sample_cosine"] == figures["cosine"]


def test_the_strengths_of_two_terms_add_up(gram):
    assert gradient_figures(gram, {UNBIASED: 1.0, BIASED: 1.0}, 0.5, math.inf)["strength"] == 3.0


def test_the_projection_after_clipping(gram):
    clipped = gradient_figures(gram, {BIASED: 1.0}, 0.5, 1.0)
    # The update (1, 2, 0.5) is scaled to norm 1; the clipped policy gradient has norm 1.
    assert clipped["projection_after_clip"] == pytest.approx(1 / math.sqrt(1 + 2**2 + 0.5**2))


# --- labels and scores --------------------------------------------------------------------------------------------
def test_configurations_are_compared_with_no_kl_of_their_source():
    rows = [("a", "no KL", 0.0, 0.2), ("a", "f", 0.1, 0.5), ("b", "no KL", 0.0, 0.4), ("b", "f", 0.1, 0.5)]
    runs = pd.DataFrame(rows, columns=["source", "form", "beta", "reward"]).assign(setting="s", seed=0, kl=1.0)
    (row,) = per_configuration(runs).to_dict("records")
    # 0.5 - 0.2 in source a, 0.5 - 0.4 in source b.
    assert row["gain"] == pytest.approx(0.2)
    assert row["seeds"] == 2
    assert row["collapsed"] == 0


@pytest.mark.parametrize(
    ("label", "form"), [("0.1 a + 0.1 b", "a + b"), ("0.1 a + 0.2 b", "")], ids=["one beta", "two betas"]
)
def test_the_form_of_a_label_has_one_beta(label, form):
    assert _parse_label(label)[0] == form


def test_the_beta_of_a_label():
    assert _parse_label("0.1 a + 0.1 b")[1] == 0.1


@pytest.fixture(scope="module")
def table():
    """An outcome y, a candidate that is equal to it, and a constant one."""
    return pd.DataFrame({"x": range(20), "y": range(20), "c": 1.0, "form": [n % 4 for n in range(20)]})


def test_a_perfect_candidate_explains_everything(table):
    assert explained(table, ["x"], "y", leave_out="form") == pytest.approx(1.0)


def test_a_constant_candidate_explains_nothing(table):
    assert explained(table, ["c"], "y", leave_out=None) == pytest.approx(0.0)


def test_rank_correlations_of_a_constant_and_of_a_reversed_candidate(table):
    assert math.isnan(rank_correlation(table.c, table.y))
    assert rank_correlation(table.x, -table.y) == pytest.approx(-1.0)


def test_a_perfect_candidate_separates_two_groups(table):
    assert separation(table.x, (table.y > 10).astype(float)) == 1.0


# --- the stored scores --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def stored_scores():
    scores = pd.read_csv(STORED / "scores.csv")
    return scores[scores.subset == "all"].set_index("candidate")


def test_every_candidate_has_a_stored_score(stored_scores):
    assert set(stored_scores.index) == set(CANDIDATES)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_the_stored_scores_are_those_of_the_stored_configurations(stored_scores, outcome):
    table = pd.read_csv(STORED / "configurations.csv")
    for name in CANDIDATES:
        expected = rank_correlation(table[name], table[outcome])
        assert stored_scores.loc[name, f"{outcome}_rank"] == pytest.approx(expected, abs=1e-5), name
