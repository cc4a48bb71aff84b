"""The study of policy corrections: the stored results are what the code gives, and the command writes them."""

from pathlib import Path

import pytest
from research.studies.__main__ import app
from research.studies.pages import read_frame
from research.studies.policy_corrections import CANDIDATES, study
from typer.testing import CliRunner

STORED = Path(__file__).parents[2] / "results" / "policy_corrections" / "policy_corrections.parquet"


@pytest.fixture(scope="module")
def frame():
    return study(lengths=(4, 8), staleness=(0.0, 0.3, 1.0), seeds=3)


def bias(frame, name, staleness):
    return frame[(frame.candidate == name) & (frame.staleness == staleness)].bias


def test_the_stored_results_are_those_of_this_code(frame):
    stored = read_frame(STORED)
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
    assert len(read_frame(tmp_path / "policy_corrections.parquet")) == 2 * 3 * 2 * len(CANDIDATES)
