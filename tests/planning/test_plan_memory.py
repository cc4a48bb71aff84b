"""The plan's memory beside a whole small run in a process of its own, and what results/plan says of others."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "plan.py"
MODEL = BENCH.parents[1] / "models" / "SmolLM2-135M-Instruct"
LEAST_RATIO = 0.6
MOST_RATIO = 1.6
"""Planned over measured bytes, at this size; results/plan has larger models, whose constant parts weigh less."""


@pytest.fixture(scope="module")
def bench():
    """The benchmark, imported from its file. Its import changes sys.path, which other tests must not see."""
    path_before = list(sys.path)
    spec = importlib.util.spec_from_file_location("bench_plan", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path_before


@pytest.fixture(scope="module")
def measured_rows(bench):
    return json.loads(bench.FILE.read_text())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_what_an_update_adds_is_what_was_planned(bench):
    row = bench.planned(bench.measure_in_subprocess("pocket-tiny"))
    assert row["measured_bytes"] > 100 * 2**20, "activations, not noise"
    assert LEAST_RATIO < row["planned_over_measured"] < MOST_RATIO, row


def test_every_cell_was_measured(bench, measured_rows):
    assert [row["cell"] for row in measured_rows] == list(bench.CELLS)


def test_the_plan_of_every_cell_is_near_what_was_measured(measured_rows):
    for row in measured_rows:
        assert LEAST_RATIO < row["planned_over_measured"] < MOST_RATIO, row["cell"]


def test_the_page_has_the_ratio_of_every_cell(bench, measured_rows):
    page = (bench.OUT / "README.md").read_text()
    for row in measured_rows:
        assert f"| {row['cell']} | " in page
        assert f"| {row['planned_over_measured']:.2f} |" in page


def test_the_plan_of_today_says_what_was_planned(bench, measured_rows):
    """After a change to the plan: ``python bench/plan.py --replan``, and read what became of the ratios."""
    for row in measured_rows:
        if "smollm2" in row["cell"] and not MODEL.is_dir():
            continue  # its sizes are read from its files
        assert bench.planned(row)["planned_bytes"] == pytest.approx(row["planned_bytes"], rel=1e-6), row["cell"]
