"""The display of a training run, by fake time: a bar with its phase and memory, or plain lines."""

import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from kl_comedy.config import load_config
from kl_comedy.phases import listen, phase
from kl_comedy.progress import duration
from kl_comedy.training.callbacks import ConsoleProgress
from kl_comedy.training.run import train

METRICS = {"train/reward": 0.5, "kl/exact_reverse_sequence": 0.1, "policy/entropy": 0.087, "train/length": 123.4}


TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"


def test_a_run_reports_its_phases_in_the_order_of_its_work(tmp_path, monkeypatch):
    phases = []
    monkeypatch.setattr(ConsoleProgress, "_show_phase", lambda self, text: phases.append(text))
    changes = ["train.steps=1", "eval.at_end=false", "rollout.batch_sequences=8", "data.eval.heldout.limit=4"]
    changes.append("train.microbatch_tokens=96")
    config = load_config(TINY, [f"output={tmp_path}", *changes])
    train(config, console=Console(file=io.StringIO()), command="kl-comedy train tiny.yaml")
    # How many have ended grows from pass to pass.
    assert "sampling 8 of 16" in phases
    order = list(dict.fromkeys(re.sub(r"\d+ of", "N of", text) for text in phases))
    micro_batches = int(order[7].removeprefix("learning N of "))
    assert order == [
        "evaluating heldout: sampling N of 4",
        "evaluating heldout: scoring",
        "evaluating heldout: measuring the policy",
        "sampling",
        "sampling N of 16",
        "scoring",
        "learning",
        f"learning N of {micro_batches}",
        "publishing the weights",
        "saving a checkpoint",
    ]
    assert micro_batches > 1
    first_update = phases[phases.index("learning") + 1 :][:micro_batches]
    assert first_update == [f"learning {number} of {micro_batches}" for number in range(1, micro_batches + 1)]
    phase("after the run")
    assert phases[-1] == "saving a checkpoint", "nobody listens any more"


class Run:
    """A run that a display watches: its clock and its updates, without a model."""

    def __init__(self, *, terminal, steps=100, width=80):
        self.now = 0.0
        self.console = Console(file=io.StringIO(), width=width, force_terminal=terminal)
        self.progress = ConsoleProgress(self.console, steps, clock=lambda: self.now)
        metrics = METRICS | {"time/tokens_per_second": 12345.0, "time/flop_utilization": 0.25}
        self.module = SimpleNamespace(version=0, last_metrics=metrics)
        self.progress.on_fit_start(None, self.module)

    def update(self, seconds):
        self.now += seconds
        self.module.version += 1
        self.progress.on_train_batch_end(None, self.module)

    def end(self):
        self.progress.on_train_end(None, self.module)
        return Text.from_ansi(self.console.file.getvalue()).plain.splitlines()


@pytest.fixture(autouse=True)
def no_listener_is_left():
    yield
    listen(None)


@pytest.mark.parametrize("update_s", [0.1, 40.0, 900.0])
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_updates_of_any_length_show_the_time_left(update_s, terminal):
    run = Run(terminal=terminal)
    run.progress.on_train_start(None, run.module)
    for _ in range(60):
        run.update(update_s)
    expected = f"{duration(40 * update_s)} left"
    if terminal:
        bar, _, _ = run.end()[-3:]
        assert "60/100" in bar
        assert bar.rstrip().endswith(expected)
    else:
        lines = run.end()
        if update_s > 5:
            assert lines[-1].startswith("update 60/100  reward 0.500")
            assert lines[-1].endswith(expected)
            assert len(lines) == 60
        else:  # 6 seconds in all: the first update, and one more line
            assert lines[0].startswith("update 1/100")
            assert len(lines) == 2


def test_a_terminal_of_80_columns_holds_the_bar_the_phase_and_the_numbers():
    run = Run(terminal=True, steps=1000)
    run.progress.on_train_start(None, run.module)
    run.module.version = 249
    run.update(40.0)
    phase("learning", 3, 8)
    run.progress._bar.refresh()
    while_learning = Text.from_ansi(run.console.file.getvalue()).plain.splitlines()[-2]
    assert while_learning.startswith("learning 3 of 8  ")
    assert "GiB" in while_learning
    bar, memory, numbers = run.end()[-3:]
    assert "250/1000" in bar
    assert "left" in bar
    assert memory.endswith("GiB  FLOP utilization 25%")
    assert "learning" not in memory, "nothing is under way after the end"
    assert numbers.endswith("12345 tok/s")


def test_the_phase_shows_before_the_first_update():
    run = Run(terminal=True)
    phase("sampling", 12, 32)
    run.progress._bar.refresh()
    assert any(line.startswith("sampling 12 of 32") for line in run.end())


def test_in_a_log_an_update_of_minutes_says_what_it_does():
    run = Run(terminal=False)
    run.progress.on_train_start(None, run.module)
    for done in range(32):
        run.now += 10.0
        phase("sampling", done, 32)
    run.update(1.0)
    phase("sampling", 0, 32)
    lines = run.end()
    assert lines[:5] == [f"update 1/100  sampling {done} of 32" for done in (5, 11, 17, 23, 29)]
    (update,) = lines[5:]
    assert update.startswith("update 1/100  reward")
    assert "GiB" in update
    assert update.endswith(f"{duration(99 * 321)} left")


def test_a_resumed_run_counts_from_its_checkpoint():
    run = Run(terminal=False)
    run.module.version = 90
    run.progress.on_train_start(None, run.module)
    run.update(60.0)
    (line,) = run.end()
    assert line.startswith("update 91/100")
    assert line.endswith("9 min left")


def test_a_quiet_rank_neither_prints_nor_listens():
    run = Run(terminal=True)
    run.end()
    console = Console(file=io.StringIO(), force_terminal=True, quiet=True)
    progress = ConsoleProgress(console, 10)
    progress.on_fit_start(None, run.module)
    progress.on_train_start(None, run.module)
    phase("sampling", 1, 2)
    progress.on_train_batch_end(None, run.module)
    progress.on_train_end(None, run.module)
    assert console.file.getvalue() == ""


def test_the_clock_runs_from_the_evaluation_before_the_first_update():
    run = Run(terminal=True)
    run.now += 90
    run.progress._bar.refresh()
    assert "0/100 0:01:30" in Text.from_ansi(run.console.file.getvalue()).plain
    run.progress.on_train_start(None, run.module)
    run.update(10)
    assert "1/100 0:01:40" in "\n".join(run.end())


def test_after_an_error_the_bar_is_gone_and_phases_are_nobodys():
    run = Run(terminal=True)
    run.progress.on_exception(None, run.module, RuntimeError())
    before = run.console.file.getvalue()
    phase("sampling", 1, 2)
    assert run.console.file.getvalue() == before
    assert not run.progress._bar.live.is_started
