"""Train from a command, and print how the run ended, where it is, and the command that comes next."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kl_comedy.config import Config, load_config
from kl_comedy.config.shipped import find_config
from kl_comedy.records import RUN_SCORES
from kl_comedy.redaction import one_line
from kl_comedy.training.run import train
from kl_comedy.training.run_folder import Outcome

METRICS = {
    "train/reward": "train reward",
    "train/gold": "gold verdict in training",
    "kl/exact_reverse_sequence": "exact KL, nats per completion",
    "policy/entropy": "entropy, nats per token",
}


def train_and_show(config: Config, console: Console, command: str, *, folder: Path | None = None) -> None:
    """Train unless the run is finished, and print how it ended. ``folder`` is that of a sweep's cell."""
    outcome = train(config, console=console, command=command, folder=folder)
    has_evaluation = bool(config.data.eval or config.eval.suites)
    show_outcome(outcome, console, has_evaluation=has_evaluation)


FAST_DEV_RUN = (
    "train.steps=1",
    "train.eval_every=0",
    "train.checkpoint_every=0",
    "train.record_rollouts=none",
    "optimizer.warmup_steps=0",
    "eval.at_start=false",
    "eval.at_end=true",
    "eval.samples=1",
    "eval.suites=[]",
    "audit.every=0",
    "tracking.uri=none",
    "tracking.loggers=[]",
    "resume=never",
)
"""What ``--fast-dev-run`` changes. The batch keeps its size: whether it fits into memory is what the try is for."""

FAST_DEV_PROBLEMS = 4
"""Problems of each set of the evaluation in a fast dev run."""


def try_and_show(given: str, overrides: Sequence[str], config: Config, console: Console) -> None:
    """Train one update of a config in a temporary folder, evaluate a few problems, and print the scores.

    ``config`` is that of the file or name ``given`` under the ``overrides``.
    """
    changes = [*overrides, *FAST_DEV_RUN]
    for name, dataset in config.data.eval.items():
        limit = min(dataset.limit or FAST_DEV_PROBLEMS, FAST_DEV_PROBLEMS)
        changes.append(f"data.eval.{name}.limit={limit}")
    with tempfile.TemporaryDirectory(prefix="kl_comedy_fast_dev_run_") as folder:
        # Read again and not changed in place, so that every rule of configs holds for what is tried.
        tried = load_config(find_config(given), [*changes, f"output={folder}"])
        outcome = train(tried, console=console, command="kl-comedy train --fast-dev-run")
        console.print(_scores_table(outcome.summary))
        seconds = outcome.summary["seconds"]
    tried_what = "one update and one evaluation of a few problems"
    console.print(f"fast dev run: {tried_what} in {seconds:.0f} s; nothing was kept", highlight=False, soft_wrap=True)


def show_outcome(outcome: Outcome, console: Console, *, has_evaluation: bool = True) -> None:
    """Print how the run ended, where it is, and the command that comes next.

    ``has_evaluation``: whether the config names something to evaluate on.
    """
    path = outcome.run.path
    if outcome.already_finished:
        console.print(
            f"{one_line(str(path))} is already finished; nothing to do (resume=never trains again)", soft_wrap=True
        )
    # A command may hold brackets, which are no markup here, and could not be copied from a wrapped line.
    for line in _lines_about_run(outcome.summary, path, has_evaluation):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _scores_table(summary: Mapping[str, Any]) -> Table:
    """One row per score, because a terminal cuts wide rows: first and last evaluation, and final metrics."""
    table = Table.grid(padding=(0, 2))
    table.add_row("KL terms", one_line(summary["kl"]))
    for key, score in RUN_SCORES.items():
        for name, change in _changes(summary, key, score):
            table.add_row(one_line(name), change)
    for key, title in METRICS.items():
        if key in summary.get("metrics", {}):
            table.add_row(title, f"{summary['metrics'][key]:.3f}")
    return table


def _changes(summary: Mapping[str, Any], key: str, score: str) -> list[tuple[str, str]]:
    """For each set that was evaluated ``NAME SCORE``, and its change from the first to the last evaluation."""
    changes = []
    for name, history in summary.get(key, {}).items():
        # JSON has texts as keys: "10" must come after "9".
        score_of_update = {int(update): value for update, value in history.items()}
        changes.append((f"{name} {score}", _change(score_of_update, summary.get("steps"))))
    return changes


def _change(score_of_update: Mapping[int, float], steps: int | None) -> str:
    """A score at the first and at the last update that was evaluated, in a run of ``steps`` updates.

    >>> _change({0: 0.25, 8: 0.5}, 8), _change({6: 0.25}, 8)
    ('0.250 -> 0.500 (+0.250)', '0.250 at update 6')
    """
    first_update = min(score_of_update)
    last_update = max(score_of_update)
    last = score_of_update[last_update]
    if first_update == last_update:
        # A single evaluation is no change of zero.
        return f"{last:.3f} at update {last_update}"
    first = score_of_update[first_update]
    change = f"{first:.3f} -> {last:.3f} ({last - first:+.3f})"
    # The run's policy is that of its last update, at which it may not have been evaluated.
    if steps is not None and last_update != steps:
        change += f" at update {last_update}"
    return change


def _lines_about_run(summary: Mapping[str, Any], path: Path, has_evaluation: bool) -> list[str]:
    """How the run ended, where it is, and the command that comes next; summary.json has the other ones."""
    uri = summary["mlflow_uri"]
    is_tracked = uri != "none"
    ending = f"{summary['name']} seed {summary['seed']}: {summary['status'].lower()}"
    if summary.get("seconds"):
        ending += f" in {summary['seconds']:.0f} s"
    changes = []
    for key, score in RUN_SCORES.items():
        changes += [f"{name} {change}" for name, change in _changes(summary, key, score)]
    is_uploaded = summary["run_id"] is not None
    if is_uploaded:
        place = f"run {summary['run_id']} in {path}"
    elif is_tracked:
        place = f"run (MLflow not reached; metrics are in the folder) in {path}"
    else:
        place = f"run in {path}"
    lines = ["; ".join([ending, *changes]), place]

    if is_uploaded:
        lines.append(f"kl-comedy results table --uri {shlex.quote(uri)}")
    elif is_tracked:
        # A table of a store that has not got the run would be empty, or not be there at all.
        lines.append(f"kl-comedy results sync {shlex.quote(str(path))}")
    elif has_evaluation:
        lines.append(summary["evaluate_command"])
    return lines
