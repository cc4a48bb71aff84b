"""The summary that a run prints at its end: scores, and the commands to evaluate, plot and tabulate it."""

from __future__ import annotations

import shlex
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kl_comedy.training.run import Outcome


def show_outcome(outcome: Outcome, console: Console) -> None:
    """Print evaluation before and after, the run id, and commands to evaluate, plot and tabulate."""
    summary, path = outcome.summary, outcome.run.path
    if outcome.already_finished:
        console.print(f"{path} is already finished; nothing to do (resume=never trains again)", soft_wrap=True)
    console.print(_row(summary))
    uri = f" --uri {shlex.quote(summary['mlflow_uri'])}"
    lines = [
        f"run       {summary['run_id'] or '(MLflow not reached; metrics are in the folder)'}",
        f"folder    {path}",
        f"again     {summary['command']}",
        f"evaluate  {summary['evaluate_command']}",
        f"table     kl-comedy results table{uri}",
        f"plot      kl-comedy results plot{uri} --metric train/reward --out reward.png",
    ]
    seconds = summary.get("seconds")
    title = f"{summary['name']} seed {summary['seed']}: {summary['status'].lower()}"
    text = Text("\n".join(lines))  # a command may hold brackets, which are no markup
    console.print(Panel(text, title=title + (f" in {seconds:.0f} s" if seconds else ""), expand=False))


def _row(summary: dict[str, Any]) -> Table:
    """The run's row of the results table, one column per line so that nothing is cut."""
    table = Table.grid(padding=(0, 2))
    table.add_row("KL terms", summary["kl"])
    for key, score in (("evaluations", "reward"), ("accuracies", "accuracy")):
        for name, history in summary.get(key, {}).items():
            ordered = sorted((int(step), value) for step, value in history.items())
            first, last = ordered[0][1], ordered[-1][1]
            table.add_row(f"{name} {score}", f"{first:.3f} -> {last:.3f} ({last - first:+.3f})")
    metrics = summary.get("metrics", {})
    for key, title in _COLUMNS.items():
        if key in metrics:
            table.add_row(title, f"{metrics[key]:.3f}")
    return table


_COLUMNS = {
    "train/reward": "train reward",
    "kl/exact_reverse_sequence": "exact KL, nats a completion",
    "policy/entropy": "entropy, nats a token",
}
