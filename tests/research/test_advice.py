"""The measurements of the advice: that the stored ones are those of the exports, and the arithmetic on known runs."""

import pandas as pd
import pytest
from research.studies.advice import cells_of, effective_sizes, measure, range_of, restricted, text_of

from kl_comedy.peers.advice import MEASURED, Contrast, Measured, Side, Spread, read_advice, read_measured

REWARD = "metrics.eval/heldout/reward"


def run(seed, label, reward, *, rate="0.0002", collapsed=False, beta="0.1"):
    return {
        "params.seed": str(seed),
        "status": "FINISHED",
        "tags.kl.family": label,
        "tags.kl.betas": beta,
        "params.optimizer.lr": rate,
        REWARD: reward,
        "collapsed": collapsed,
        "ess": float("nan"),
    }


K3 = "k3_reverse_token in loss"


@pytest.fixture
def runs():
    """Three seeds of two KLs, and one more of one of them."""
    rows = [run(seed, K3, 0.5 + 0.1 * seed) for seed in (0, 1, 2)]
    rows += [run(seed, "no KL", 0.4 + 0.1 * seed + 0.01 * (seed == 0), collapsed=seed == 2) for seed in (2, 1, 0)]
    rows.append(run(3, "no KL", 0.0, rate="5e-05"))
    return pd.DataFrame(rows)


def contrast(**changes):
    fields = {"a": Side(kl="grpo", beta=0.1), "b": Side(kl="none"), "cells": {"params.optimizer.lr": [2.0e-4]}}
    return Contrast(name="test", export="evidence", **{**fields, **changes})


@pytest.mark.slow
def test_the_stored_measurements_are_those_of_the_exports():
    assert text_of(measure(read_advice())) == MEASURED.read_text(), (
        "run python research/scripts/generate_docs.py --advice"
    )


def test_a_cell_is_paired_by_seed(runs):
    (cell,) = cells_of(contrast(), runs)
    assert (cell.a_mean, cell.b_mean) == (0.6, pytest.approx(0.503333))
    assert cell.difference == pytest.approx((0.09 + 0.1 + 0.1) / 3, abs=1e-6)
    assert cell.low < cell.difference < cell.high
    assert (cell.pairs, cell.ahead, cell.behind) == (3, 3, 0)
    assert (cell.a_collapsed, cell.a_runs, cell.b_collapsed, cell.b_runs) == (0, 3, 1, 3)
    assert cell.setting == "learning rate 2e-4"


def test_the_effective_size_of_a_run_is_of_the_first_third_of_its_updates(tmp_path):
    """What comes after depends on whether the run collapses."""
    rows = [("long", "policy/ess", step, 1.0 if step <= 20 else 0.0) for step in range(61)]
    rows += [("short", "policy/ess", step, 0.1 * step) for step in (1, 2, 3, 4, 5, 6)]
    rows += [("short", "train/reward", 1, 7.0), ("other", "train/reward", 1, 7.0)]
    curves = pd.DataFrame(rows, columns=["run_id", "metric", "step", "value"])
    curves.to_parquet(tmp_path / "export.curves.parquet")
    sizes = effective_sizes(tmp_path / "export.parquet")
    assert dict(sizes) == {"long": 1.0, "short": pytest.approx(0.15)}


def test_the_size_beside_a_cell_is_that_of_its_runs_without_a_kl(runs):
    runs = runs.assign(ess=[0.9, 0.9, 0.9, 0.2, 0.4, 0.6, 0.1])
    (cell,) = cells_of(contrast(), runs)
    assert cell.none_ess == pytest.approx(0.4)


def test_a_restriction_compares_numbers_and_texts(runs):
    assert len(restricted(runs, {"params.optimizer.lr": 0.0002})) == 6
    assert len(restricted(runs, {"params.optimizer.lr": [5e-5, "0.0002"], "tags.kl.family": "no KL"})) == 4


def test_the_stored_text_is_read_back(tmp_path, runs):
    cells = tuple(cells_of(contrast(), runs))
    spread = range_of(Spread(export="evidence", where={}), runs)
    result = Measured(contrasts={"test": cells}, spreads={"all": spread})
    file = tmp_path / "measured.yaml"
    file.write_text(text_of(result))
    assert read_measured(file) == result
