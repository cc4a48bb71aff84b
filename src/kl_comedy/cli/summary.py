"""Training by a command, and the summary at the end: scores, and commands to evaluate, plot and tabulate the run."""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.table import Table

from kl_comedy.config import Config
from kl_comedy.training.run_folder import Outcome
from kl_comedy.training.start import train_unless_finished

METRICS = {
    "train/reward": "train reward",
    "kl/exact_reverse_sequence": "exact KL, nats a completion",
    "policy/entropy": "entropy, nats a token",
}


def train_and_show(config: Config, console: Console, command: str) -> None:
    """Check everything that needs no model, train unless the run is finished, and print how it ended."""
    show_outcome(train_unless_finished(config, console, command), console)


def show_outcome(outcome: Outcome, console: Console) -> None:
    """Print evaluation before and after, the run id, and commands to evaluate, plot and tabulate."""
    summary, path = outcome.summary, outcome.run.path
    if outcome.already_finished:
        console.print(f"{path} is already finished; nothing to do (resume=never trains again)", soft_wrap=True)
    table = Table.grid(padding=(0, 2))  # one score a line, so that nothing is cut
    table.add_row("KL terms", summary["kl"])
    for key, score in (("evaluations", "reward"), ("accuracies", "accuracy")):
        for name, history in summary.get(key, {}).items():
            ordered = sorted((int(update), value) for update, value in history.items())
            (_, first), (update, last) = ordered[0], ordered[-1]
            early = f" at update {update}" if update != summary.get("steps", update) else ""
            table.add_row(f"{name} {score}", f"{first:.3f} -> {last:.3f} ({last - first:+.3f}){early}")
    for key, title in METRICS.items():
        if key in summary.get("metrics", {}):
            table.add_row(title, f"{summary['metrics'][key]:.3f}")
    console.print(table)
    uri = f" --uri {shlex.quote(summary['mlflow_uri'])}"
    seconds = f" in {summary['seconds']:.0f} s" if summary.get("seconds") else ""
    tracked = summary["mlflow_uri"] != "none"
    unreachable = "(MLflow not reached; metrics are in the folder) " if tracked else ""
    lines = [
        f"{summary['name']} seed {summary['seed']}: {summary['status'].lower()}{seconds}",
        f"run {summary['run_id']} in {path}" if summary["run_id"] else f"run {unreachable}in {path}",
        "to repeat, evaluate and compare it:",
        summary["command"],
        summary["evaluate_command"],
    ]
    if tracked:
        lines += [
            f"kl-comedy results table{uri}",
            f"kl-comedy results plot{uri} --metric train/reward --out reward.svg",
        ]
    for line in lines:  # a command may hold brackets, which are no markup; a wrapped one could not be copied
        console.print(line, markup=False, highlight=False, soft_wrap=True)
