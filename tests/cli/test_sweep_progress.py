"""The line about a local sweep: what is done, what runs, and the time left, by fake time."""

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from kl_comedy.cli.sweep_progress import SweepEstimate, sweep_progress
from kl_comedy.slurm.local import StageState

STEPS = 100


class FakeSweep:
    """Cells of 100 updates, whose runs have the spool that a test writes."""

    def __init__(self, folder, cells):
        self.path = folder
        self.manifest = SimpleNamespace(cells=range(cells))

    def cell(self, index):
        return SimpleNamespace(steps=STEPS)

    def run(self, index):
        return self.path / f"cell{index}"

    def reach(self, index, update):
        run = self.run(index)
        run.mkdir(exist_ok=True)
        event = {"kind": "metrics", "step": update, "data": {"train/reward": 0.5}, "time": 0.0}
        (run / "spool.jsonl").write_text(json.dumps(event) + "\n")


def training(cells, *, running=(), ended=(), failures=()):
    return StageState(
        stage="train",
        cells=tuple(range(cells)),
        running=tuple(running),
        ended=frozenset([*ended, *failures]),
        failures=frozenset(failures),
    )


@pytest.fixture
def clock():
    return SimpleNamespace(now=0.0)


@pytest.fixture
def estimate(tmp_path, clock):
    return SweepEstimate(FakeSweep(tmp_path, 6), lambda: clock.now)


def test_the_line_counts_cells_and_updates_and_estimates_from_both(tmp_path, clock, estimate):
    sweep = FakeSweep(tmp_path, 6)
    assert estimate.line(training(6, running=[0])) == "0 of 6 cells done; cell 0 update 0/100"
    clock.now = 50.0
    sweep.reach(0, 50)
    assert estimate.line(training(6, running=[0])) == "0 of 6 cells done; cell 0 update 50/100; 9 min left"
    clock.now = 234.0
    sweep.reach(0, 100)
    sweep.reach(1, 100)
    sweep.reach(3, 34)
    line = estimate.line(training(6, running=[3], ended=[0, 1]))
    assert line == "2 of 6 cells done; cell 3 update 34/100; 6 min left"


def test_the_time_left_does_not_grow_while_a_cell_loads(tmp_path, clock, estimate):
    sweep = FakeSweep(tmp_path, 2)
    estimate.line(training(2, running=[0]))
    clock.now = 1000.0
    sweep.reach(0, 100)
    seconds_left = []
    for waited in (0.0, 4.0, 8.0, 60.0, 600.0):
        clock.now = 1000.0 + waited
        seconds_left.append(estimate._training_left_s(training(2, running=[1], ended=[0])))
    # 10 s per update: the one under way counts down, and then the others stay as they are.
    assert seconds_left == [1000.0, 996.0, 992.0, 990.0, 990.0]


def test_what_was_trained_before_counts_as_done_and_not_as_speed(tmp_path, clock, estimate):
    sweep = FakeSweep(tmp_path, 2)
    sweep.reach(0, 90)
    estimate.line(training(2, running=[0, 1]))
    clock.now = 100.0
    sweep.reach(0, 95)
    sweep.reach(1, 5)
    # 10 updates in 100 s, 100 are left.
    assert estimate.line(training(2, running=[0, 1])).endswith("; 17 min left")


def test_nothing_is_left_of_a_cell_that_failed(tmp_path, clock, estimate):
    sweep = FakeSweep(tmp_path, 2)
    estimate.line(training(2, running=[0, 1]))
    clock.now = 100.0
    sweep.reach(1, 50)
    line = estimate.line(training(2, running=[1], failures=[0]))
    assert line == "1 of 2 cells done (1 failed); cell 1 update 50/100; 2 min left"


def test_a_cell_that_resumes_does_not_count_backwards(tmp_path, clock, estimate):
    sweep = FakeSweep(tmp_path, 1)
    sweep.reach(0, 90)
    estimate.line(training(1, running=[0]))
    clock.now = 10.0
    sweep.reach(0, 4)
    assert estimate.line(training(1, running=[0])) == "0 of 1 cells done; cell 0 update 4/100"


def test_many_running_cells_do_not_fill_the_line(estimate):
    line = estimate.line(training(6, running=[0, 1, 2, 3, 4]))
    assert line.endswith("cell 2 update 0/100; 2 more")


def test_an_evaluation_is_estimated_by_its_cells(clock, estimate):
    state = {"stage": "evaluate", "cells": (0, 1, 2, 3), "running": (1,), "failures": frozenset()}
    assert estimate.line(StageState(**state, ended=frozenset())) == "0 of 4 cells evaluated"
    clock.now = 60.0
    assert estimate.line(StageState(**state, ended=frozenset([0]))) == "1 of 4 cells evaluated; 3 min left"


def test_a_terminal_shows_the_line_and_takes_it_away_at_the_end(tmp_path, clock):
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with sweep_progress(FakeSweep(tmp_path, 6), console, clock=lambda: clock.now) as show:
        show(training(6, running=[0]))
        clock.now = 3.0
        show(training(6, running=[1], ended=[0]))
    text = console.file.getvalue()
    assert "1 of 6 cells done; cell 1 update 0/100" in Text.from_ansi(text).plain
    assert text.rstrip().endswith("\x1b[2K") or "\x1b[2K" in text[-40:]


def test_the_end_of_a_cell_and_the_report_show_at_once(tmp_path, clock):
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with sweep_progress(FakeSweep(tmp_path, 2), console, clock=lambda: clock.now) as show:
        show(training(2, running=[0, 1]))
        show(training(2, running=[1], ended=[0]))
        show(training(2, ended=[0, 1]))
        show(StageState(stage="report", cells=(), running=(), ended=frozenset(), failures=frozenset()))
    assert "writing the report" in Text.from_ansi(console.file.getvalue()).plain


def test_a_log_has_a_line_a_minute(tmp_path, clock):
    console = Console(file=io.StringIO(), width=20)
    with sweep_progress(FakeSweep(tmp_path, 6), console, clock=lambda: clock.now) as show:
        for second in range(0, 150):
            clock.now = float(second)
            show(training(6, running=[0]))
    assert console.file.getvalue().splitlines() == ["0 of 6 cells done; cell 0 update 0/100"] * 2
