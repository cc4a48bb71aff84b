"""The judged grid has each form at what its tuning runs were best at; its edges are the protocol's."""

import pandas as pd
import pytest
from research.scripts import judged_grid
from research.scripts.judged_grid import OUTCOME, SEEDS_TUNED, TUNED

from kl_comedy.slurm.grid import expand, read_grid

NAME = "lag-10-k2-beta0.3-lr0.0001"
"""As kl-comedy sweep names the cell of configs/hack/tune.yaml with these values."""
EDGE_NAME = "lag-0-k3-beta0.1-lr0.0002"


@pytest.fixture(scope="module")
def tuned():
    return judged_grid.tuned_settings(TUNED)


@pytest.fixture(scope="module")
def best(tuned):
    """Chosen from runs with the same outcomes but for two names."""

    def outcome_of(name, seed):
        if name in (NAME, EDGE_NAME):
            return 0.6
        # One lucky seed of another setting is above both seeds of the best, and its mean is below.
        is_lucky = name == "lag-10-k2-beta1-lr0.0002" and seed == 41
        # Without a marked setting a form is best in the middle.
        is_middle = "beta0.3-lr0.0001" in name or (name.startswith("none") and name.endswith("1e-4"))
        return 0.9 if is_lucky else 0.2 if is_middle else 0.1

    rows = []
    for name in tuned:
        for seed in SEEDS_TUNED:
            row = {
                "tags.sweep": "hack_tune",
                "status": "FINISHED",
                "params.name": name,
                OUTCOME: outcome_of(name, seed),
            }
            rows.append(row)
    runs = pd.DataFrame(rows).assign(status="FINISHED", **{"tags.sweep": "hack_tune"})
    return judged_grid.best_of_each(tuned, judged_grid.mean_outcomes(runs))


def test_a_form_is_judged_at_its_best_mean_over_the_tuning_seeds(best):
    rows = judged_grid.judged(best.values(), name="hack_judged", seeds=(50, 51))["rows"]
    assert rows["k2-lag-10-start-3"] == {
        "kl": [{"estimator": "k2", "placement": "loss", "beta": 0.3}],
        "lag": {"mode": "replayed", "steps": 10},
        "optimizer.lr": 1e-4,
        "model.options.seed": 3,
    }
    assert rows["none-lag-0-start-1"]["lag"] == {"mode": "on_policy", "steps": 0}
    assert len(rows) == 16 * 5


def test_only_where_a_form_was_best_at_an_end_is_there_one_value_more(best, tuned, tmp_path):
    grid = judged_grid.extension(best.values(), list(tuned.values()), name="hack_tune_edge")
    assert set(grid["rows"]) == {
        "k3-lag-0-beta0.03-lr5e-05",
        "k3-lag-0-beta0.03-lr0.0001",
        "k3-lag-0-beta0.03-lr0.0002",
        "k3-lag-0-beta0.03-lr0.0004",
        "k3-lag-0-beta0.1-lr0.0004",
        "k3-lag-0-beta0.3-lr0.0004",
        "k3-lag-0-beta1-lr0.0004",
    }
    assert grid["rows"]["k3-lag-0-beta0.03-lr0.0004"] == {
        "kl": [{"estimator": "k3", "placement": "loss", "beta": 0.03}],
        "lag": {"mode": "on_policy", "steps": 0},
        "optimizer.lr": 4e-4,
    }


def test_the_extension_is_read_back_as_it_was_written(best, tuned, monkeypatch, tmp_path):
    monkeypatch.setattr(judged_grid, "ROOT", tmp_path)
    file = tmp_path / "tune_edge.yaml"
    judged_grid.write(file, judged_grid.extension(best.values(), list(tuned.values()), name="hack_tune_edge"))
    extended = judged_grid.tuned_settings(file)
    assert {(setting.form, setting.lag, setting.term["placement"]) for setting in extended.values()} == {
        ("k3", 0, "loss")
    }
    assert extended["k3-lag-0-beta0.03-lr0.0004"].beta == 0.03
    assert len(expand(read_grid(file))) == 2 * 7


def test_at_one_rate_only_beta_is_extended(best, tuned):
    at_one_rate = [setting for setting in tuned.values() if setting.rate == 2e-4]
    grid = judged_grid.extension([tuned[EDGE_NAME]], at_one_rate, name="hack_tune_edge_fast")
    assert set(grid["rows"]) == {"k3-lag-0-beta0.03-lr0.0002"}
