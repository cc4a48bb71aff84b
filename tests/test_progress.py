"""The time left, by fake time; bars and plain lines; phases, and log lines above a bar."""

import io
import logging
import sys
import threading
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from kl_comedy.phases import listen, phase, within
from kl_comedy.progress import Bars, TimeLeft, TimeLeftColumn, duration, memory_text, stages


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def heard():
    """The phases that were reported in this test."""
    texts = []
    listen(texts.append)
    yield texts
    listen(None)


# --- the time left ---


@pytest.mark.parametrize("update_s", [0.1, 40.0, 900.0])
def test_updates_of_any_length_have_an_estimate_after_the_first(clock, update_s):
    left = TimeLeft(100, clock=clock)
    assert left.seconds() is None
    for done in range(1, 100):
        clock.pass_(update_s)
        left.reach(done)
        assert left.seconds() == pytest.approx((100 - done) * update_s)


@pytest.mark.parametrize("update_s", [0.1, 40.0, 900.0])
def test_the_update_under_way_counts_down_and_no_further_than_its_usual_end(clock, update_s):
    left = TimeLeft(10, clock=clock)
    clock.pass_(update_s)
    left.reach(1)
    clock.pass_(update_s / 2)
    assert left.seconds() == pytest.approx(8.5 * update_s)
    clock.pass_(50 * update_s)
    assert left.seconds() == pytest.approx(8 * update_s)


def test_an_estimate_follows_a_change_of_speed_and_evens_out_one_slow_update(clock):
    left = TimeLeft(200, clock=clock)
    for done in range(1, 101):
        clock.pass_(900.0)
        left.reach(done)
    for done in range(101, 121):
        clock.pass_(40.0)
        left.reach(done)
    assert left.seconds() == pytest.approx(80 * 40.0), "the last updates alone"
    clock.pass_(440.0)
    left.reach(121)
    assert left.seconds() == pytest.approx(79 * 60.0), "one of twenty took 400 s longer"


def test_a_resumed_run_is_estimated_by_its_own_updates(clock):
    left = TimeLeft(100, done=90, clock=clock)
    assert left.text() == ""
    clock.pass_(60.0)
    left.reach(91)
    assert left.text() == "9 min left"
    left.reach(91)
    assert left.text() == "9 min left", "the same update again is no news"


def test_durations_change_their_unit_where_a_reader_would():
    assert [duration(s) for s in (0, 59, 60, 3570, 3600, 86_399, 86_400)] == [
        "0 s",
        "59 s",
        "1 min",
        "1 h 00 min",
        "1 h 00 min",
        "1 d 0 h",
        "1 d 0 h",
    ]


# --- stages ---


def shown(console):
    return Text.from_ansi(console.file.getvalue()).plain.splitlines()


@pytest.mark.parametrize("step_s", [0.1, 40.0, 900.0])
def test_a_terminal_shows_the_time_left_of_slow_steps(clock, step_s):
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with stages(console, clock=clock) as show:
        show("auditing [1/2]", 0, 4)
        clock.pass_(step_s)
        show("auditing [1/2]", 1, 4)
    (line,) = [line for line in shown(console) if "1/4" in line][-1:]
    assert f"{duration(3 * step_s)} left" in line
    assert "auditing [1/2]" in line, "a name is no markup"


def test_without_a_terminal_quick_stages_print_nothing(clock):
    console = Console(file=io.StringIO(), width=100)
    with stages(console, clock=clock) as show:
        for done in range(5):
            show("enumerating", done, 4)
            clock.pass_(0.5)
    assert console.file.getvalue() == ""


def test_without_a_terminal_slow_stages_print_plain_lines_to_the_end(clock):
    console = Console(file=io.StringIO(), width=20)
    with stages(console, clock=clock) as show:
        for done in range(5):
            show("auditing", done, 4)
            if done < 3:
                clock.pass_(40.0)
    assert shown(console) == [
        "auditing 1/4  2 min left",
        "auditing 2/4  1 min left",
        "auditing 3/4  40 s left",
        "auditing 4/4  0 s left",
    ]


def test_a_phase_stands_beside_its_stage(clock):
    terminal = Console(file=io.StringIO(), width=100, force_terminal=True)
    log = Console(file=io.StringIO(), width=100)
    for console in (terminal, log):
        with stages(console, clock=clock) as show:
            show("evaluating", 0, 2)
            clock.pass_(30.0)
            phase("sampling", 1, 512)
            clock.pass_(31.0)
            phase("sampling", 64, 512)
    assert shown(terminal)[-1].endswith("sampling 64 of 512")
    assert shown(log) == ["evaluating 0/2  sampling 64 of 512"], "in a log, where nothing else is printed for a minute"


def test_the_phase_of_a_stage_ends_with_it(clock):
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with stages(console, clock=clock) as show:
        show("evaluating", 0, 2)
        phase("sampling", 1, 512)
        show("evaluating", 2, 2)
    last_line = shown(console)[-1]
    assert "2/2" in last_line
    assert "sampling" not in last_line


def test_nobody_listens_to_phases_after_the_stages(clock):
    log = Console(file=io.StringIO(), width=100)
    with stages(log, clock=clock) as show:
        show("evaluating", 0, 2)
    clock.pass_(100.0)
    phase("sampling", 1, 512)
    assert log.file.getvalue() == ""


def test_log_lines_stand_above_a_bar(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    bars = Bars(TimeLeftColumn(), console=Console(stderr=True, width=60, force_terminal=True))
    bars.add_task("train", total=9, time_left=TimeLeft(9))
    try:
        bars.start()
        assert handler.stream is not terminal
        logging.getLogger("kl_comedy").warning("no signal")
        bars.stop()
        assert handler.stream is terminal, "as it was before"
    finally:
        logging.getLogger().removeHandler(handler)
    assert "no signal\x1b" not in terminal.getvalue()
    assert "no signal\n" in terminal.getvalue()


def test_a_bar_without_a_terminal_leaves_the_log_alone():
    handler = logging.StreamHandler(io.StringIO())
    logging.getLogger().addHandler(handler)
    before = handler.stream
    try:
        with Bars(TimeLeftColumn(), console=Console(file=io.StringIO())):
            assert handler.stream is before
    finally:
        logging.getLogger().removeHandler(handler)


def test_the_memory_is_that_of_this_process():
    ballast = bytearray(b"x" * 2**28)
    name, gib, unit = memory_text().split()
    assert (name, unit) == ("memory", "GiB")
    assert 0.2 < float(gib) < 64
    assert len(ballast) == 2**28


def test_on_a_gpu_the_memory_is_what_torch_reserved_at_most(monkeypatch):
    cuda = SimpleNamespace(is_initialized=lambda: True, max_memory_reserved=lambda: 34.5 * 2**30)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert memory_text() == "GPU 34.5 GiB"


# --- phases ---


def test_phases_name_what_they_are_within(heard):
    phase("scoring")
    with within("evaluating heldout"):
        phase("sampling", 12, 32)
    with within("evaluating"), within("heldout"):
        phase("scoring")
    phase("learning", 0, 3)
    assert heard == [
        "scoring",
        "evaluating heldout: sampling 12 of 32",
        "evaluating: heldout: scoring",
        "learning 0 of 3",
    ]


def test_another_threads_phases_are_not_those_of_the_listener(heard):
    producer = threading.Thread(target=phase, args=("sampling", 1, 2))
    producer.start()
    producer.join()
    assert heard == []


def test_without_a_listener_a_phase_is_nothing():
    listen(None)
    phase("sampling", 1, 2)
