"""The plan's memory beside a whole small run in a process of its own, and what results/plan says of others."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "plan.py"
MODEL = BENCH.parents[1] / "models" / "SmolLM2-135M-Instruct"
LEAST, MOST = 0.6, 1.6
"""Planned / measured, at this size; results/plan has larger models, whose constant parts weigh less."""


@pytest.fixture(scope="module")
def bench():
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("bench_plan", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_what_an_update_adds_is_what_was_planned(bench):
    row = bench.planned(bench.measure_in_subprocess("pocket-tiny"))
    assert row["measured_bytes"] > 100 * 2**20, "activations, not noise"
    assert LEAST < row["planned_over_measured"] < MOST, row


def test_every_cell_was_measured_and_the_plan_of_today_says_the_same(bench):
    """After a change to the plan: ``python bench/plan.py --replan``, and read what became of the ratios."""
    rows = json.loads(bench.FILE.read_text())
    assert [row["cell"] for row in rows] == list(bench.CELLS)
    page = (bench.OUT / "README.md").read_text()
    for row in rows:
        assert LEAST < row["planned_over_measured"] < MOST, row["cell"]
        assert f"| {row['cell']} | " in page and f"| {row['planned_over_measured']:.2f} |" in page
        if "smollm2" not in row["cell"] or MODEL.is_dir():
            assert bench.planned(row)["planned_bytes"] == pytest.approx(row["planned_bytes"], rel=1e-6), row["cell"]
