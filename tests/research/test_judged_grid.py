"""The judged grid has each form at what its tuning runs were best at."""

import pandas as pd
import pytest
from research.scripts import judged_grid

NAME = "lag-10-k2-beta0.3-lr0.0001"
"""As kl-comedy sweep names the cell of configs/hack/tune.yaml with these values."""


@pytest.fixture(scope="module")
def points():
    return judged_grid.expand(judged_grid.read_grid(judged_grid.TUNED))


def runs(points, outcome_of):
    rows = []
    for point in points:
        rows.append(
            {
                "tags.sweep": "hack_tune",
                "status": "FINISHED",
                "params.name": point.label,
                judged_grid.OUTCOME: outcome_of(point),
            }
        )
    return pd.DataFrame(rows)


def judged_rows(points, frame):
    outcomes = judged_grid.mean_outcomes(frame, seeds=2)
    return judged_grid.judged(judged_grid.best_of_each(points, outcomes))["rows"]


def test_a_form_is_judged_at_its_best_mean_over_the_tuning_seeds(points):
    # One lucky seed of another point is above both seeds of the best, and its mean is below.
    def outcome_of(point):
        if point.label == NAME:
            return 0.6
        is_lucky = point.label == "lag-10-k2-beta1-lr0.0002" and point.seed == 41
        return 0.9 if is_lucky else 0.1

    row = judged_rows(points, runs(points, outcome_of))["k2-lag-10-start-3"]
    assert row == {
        "kl": [{"estimator": "k2", "placement": "loss", "beta": 0.3}],
        "lag": {"mode": "replayed", "steps": 10},
        "optimizer.lr": 1e-4,
        "model.options.seed": 3,
    }
