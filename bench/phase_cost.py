"""Cost of reporting phases in a training run: python bench/phase_cost.py [CONFIG] [key=value ...]

It trains with the display of a terminal, counts the phases that each update reports, and between updates times a
thousand reports to the same display. Updates and reports are CPU seconds of one run, so that other load on the machine
hardly changes their ratio. Prints the median share of an update that its reports take, and fails above ``LIMIT``.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 0.001
"""Largest allowed share of an update."""

REPORTS = 1000
"""Reports that are timed together: one takes about a microsecond."""

WARM_UP = 2
"""Updates that are not measured."""


def timed_run(config: Any) -> tuple[list[float], list[int], list[float]]:
    """Train; the CPU seconds of each update, the phases it reported, and the seconds of one report after it."""
    import torch
    from rich.console import Console

    from kl_comedy.phases import phase
    from kl_comedy.training.callbacks import ConsoleProgress
    from kl_comedy.training.run import train

    update_s: list[float] = []
    phases: list[int] = []
    report_s: list[float] = []
    reported = 0
    update_began = time.process_time()
    show_phase = ConsoleProgress._show_phase
    end_update = ConsoleProgress.on_train_batch_end

    def counted(self: Any, text: str) -> None:
        nonlocal reported
        reported += 1
        show_phase(self, text)

    def timed_end(self: Any, *arguments: Any) -> None:
        nonlocal reported, update_began
        end_update(self, *arguments)
        report_began = time.process_time()
        update_s.append(report_began - update_began)
        phases.append(reported)
        for number in range(REPORTS):
            phase("sampling", number, REPORTS)
        report_s.append((time.process_time() - report_began) / REPORTS)
        reported = 0
        update_began = time.process_time()

    # CPU seconds of one thread add up; those of several include the time in which they wait for each other.
    torch.set_num_threads(1)
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with (
        patch.object(ConsoleProgress, "_show_phase", counted),
        patch.object(ConsoleProgress, "on_train_batch_end", timed_end),
    ):
        train(config, console=console, command="bench/phase_cost")
    return update_s, phases, report_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="quickstart")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()

    from kl_comedy.config import load_config
    from kl_comedy.config.shipped import find_config

    with tempfile.TemporaryDirectory(prefix="phase_cost_") as folder:
        overrides = ["train.steps=10", "train.eval_every=0", "train.threads=1", *arguments.overrides]
        overrides += [f"output={folder}", "tracking.uri=none"]
        update_s, phases, report_s = timed_run(load_config(find_config(arguments.config), overrides))

    shares = []
    for seconds, count, one in zip(update_s[WARM_UP:], phases[WARM_UP:], report_s[WARM_UP:], strict=True):
        shares.append(count * one / seconds)
    share = statistics.median(shares)
    print(
        f"{arguments.config}: {statistics.median(phases[WARM_UP:]):g} phases per update of "
        f"{statistics.median(update_s[WARM_UP:]):.2f} CPU s, {statistics.median(report_s) * 1e6:.1f} µs each: "
        f"{share:.5%} of an update"
    )
    if share > LIMIT:
        sys.exit(f"reports of phases take more than {LIMIT:.1%} of an update")


if __name__ == "__main__":
    main()
