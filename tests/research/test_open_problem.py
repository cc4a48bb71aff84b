"""The off-policy study on small instances: what must be unbiased is, and the report is written."""

import pytest
from research.studies import open_problem
from research.studies.open_problem import write_report
from research.studies.pages import read_frame

UNBIASED = (
    "sequence IS, k1 total",
    "sequence IS, k3 differentiated",
    "per decision, k1",
    "per decision, k3 differentiated",
    "RB per decision",
)


@pytest.fixture(scope="module")
def frame():
    return open_problem.study(lengths=(4, 6), staleness=(0.0, 0.8), seeds=2, batches=4, batch=2048)


@pytest.fixture(scope="module")
def largest_bias(frame):
    """The largest bias of each candidate on stale samples."""
    return frame[frame.staleness > 0].groupby("candidate").bias.max()


@pytest.mark.parametrize("name", UNBIASED)
def test_the_exact_solutions_are_unbiased(largest_bias, name):
    assert largest_bias[name] < 1e-10


def test_the_report_is_written(frame, tmp_path):
    lambdas = open_problem.lambda_study(lengths=(4, 6), staleness=(0.0, 0.8), seeds=2)
    write_report(frame, lambdas, tmp_path, command="python -m research.studies open-problem --quick")
    assert {path.name for path in tmp_path.iterdir()} == {
        "README.md",
        "open_problem.parquet",
        "k_lambda.parquet",
        "error.svg",
        "variance.svg",
        "knobs.svg",
    }
    assert len(read_frame(tmp_path / "open_problem.parquet")) == len(frame)
