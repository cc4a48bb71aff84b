"""The study of policy corrections: what it must show, and that the stored results are what the code gives."""

from pathlib import Path

import pandas as pd
import pytest
from research.studies.__main__ import app
from research.studies.policy_corrections import CANDIDATES, SAMPLES, study, winners
from typer.testing import CliRunner

STORED = Path(__file__).parents[2] / "results" / "policy_corrections" / "policy_corrections.csv"


@pytest.fixture(scope="module")
def frame():
    return study(lengths=(4, 8), staleness=(0.0, 0.3, 1.0), seeds=3)


def bias(frame, name, staleness):
    return frame[(frame.candidate == name) & (frame.staleness == staleness)].bias


def test_everything_is_exact_on_policy(frame):
    assert frame[frame.staleness == 0].bias.max() < 1e-9


def test_the_sequence_ratio_is_always_exact(frame):
    assert frame[frame.candidate == "sequence"].bias.max() < 1e-9


def test_every_other_correction_is_biased_on_stale_samples(frame):
    others = frame[(frame.staleness == 1.0) & (frame.candidate != "sequence")]
    # Ratios above 8 are too rare here to be sure of.
    others = others[~others.candidate.str.startswith("sequence_tis 8")]
    assert others.bias.min() > 1e-3


@pytest.mark.parametrize("name", [name for name in CANDIDATES if not name.startswith("sequence")])
def test_bias_grows_with_staleness(frame, name):
    assert bias(frame, name, 1.0).median() > bias(frame, name, 0.3).median() > 1e-3


def test_a_bound_on_the_sequence_ratio_buys_variance_with_bias(frame):
    stale = frame[frame.staleness == 1.0].groupby("candidate")[["bias", "variance"]].median()
    tight = stale.loc["sequence_tis 2"]
    loose = stale.loc["sequence_tis 8"]
    unbounded = stale.loc["sequence"]
    assert tight.bias > loose.bias > unbounded.bias
    assert tight.variance < loose.variance < unbounded.variance


@pytest.mark.parametrize("samples", SAMPLES)
def test_errors_are_bias_and_variance_at_equal_samples(frame, samples):
    expected = (frame.bias**2 + frame.variance / samples) ** 0.5
    assert (frame[f"error_{samples}"] - expected).abs().max() < 1e-12


def test_the_best_corrections_are_named(frame):
    assert set(winners(frame)["least at N=64"]) - {"all alike"}


def test_the_stored_results_are_those_of_this_code(frame):
    stored = pd.read_csv(STORED)
    assert set(stored.candidate) == set(CANDIDATES)
    keys = ["length", "staleness", "seed", "candidate"]
    both = frame.merge(stored, on=keys, suffixes=("", "_stored"))
    assert len(both) == len(frame)
    for column in ("bias", "variance", "ess", "error_1024"):
        assert (both[column] - both[f"{column}_stored"]).abs().max() <= 1e-5 * both[column].abs().max(), column


def test_the_command_writes_data_figure_and_page(tmp_path):
    result = CliRunner().invoke(app, ["policy-corrections", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "README.md").read_text()
    assert "python -m research.studies policy-corrections --quick" in page
    assert "| sequence_tis 8 |" in page
    assert (tmp_path / "policy_corrections.svg").stat().st_size > 10_000
    # Two lengths, three stalenesses and two seeds.
    assert len(pd.read_csv(tmp_path / "policy_corrections.csv")) == 2 * 3 * 2 * len(CANDIDATES)
