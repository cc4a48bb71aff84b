"""The closing words of a run: what happened, and the commands that go on from here."""

from __future__ import annotations

import shlex
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from kl_comedy.training.run import Outcome


def show_outcome(outcome: Outcome, console: Console) -> None:
    """Print evaluation before and after, the run id, and commands to evaluate, plot and tabulate."""
    summary, path = outcome.summary, outcome.run.path
    if outcome.already_finished:
        console.print(f"{path} is already finished; nothing to do (resume=never trains anew)", soft_wrap=True)
    console.print(_row(summary))
    config = path / "config.yaml"
    policy = shlex.quote(str(outcome.run.policy))
    uri = f" --uri {shlex.quote(summary['mlflow_uri'])}"
    lines = [
        f"run       {summary['run_id'] or '(MLflow not reached; kept in the folder)'}",
        f"folder    {path}",
        f"again     {summary['command']}",
        f"evaluate  kl-comedy evaluate {shlex.quote(str(config))} model.source={policy}",
        f"table     kl-comedy results table{uri}",
        f"plot      kl-comedy results plot{uri} --metric train/reward --out reward.png",
    ]
    seconds = summary.get("seconds")
    title = f"{summary['name']} seed {summary['seed']}: {summary['status'].lower()}"
    console.print(Panel("\n".join(lines), title=title + (f" in {seconds:.0f} s" if seconds else ""), expand=False))


def _row(summary: dict[str, Any]) -> Table:
    """The run as a row of the results table: KL terms, each evaluation before and after, KL, entropy."""
    table = Table("KL terms", "seed")
    cells = [summary["kl"], str(summary["seed"])]
    for name, history in summary.get("evaluations", {}).items():
        ordered = sorted((int(step), value) for step, value in history.items())
        first, last = ordered[0][1], ordered[-1][1]
        table.add_column(f"{name} reward")
        cells.append(f"{first:.3f} -> {last:.3f} ({last - first:+.3f})")
    metrics = summary.get("metrics", {})
    for key, title in _COLUMNS.items():
        if key in metrics:
            table.add_column(title)
            cells.append(f"{metrics[key]:.3f}")
    table.add_row(*cells)
    return table


_COLUMNS = {
    "train/reward": "train reward",
    "kl/exact_reverse_sequence": "exact KL, nats a completion",
    "policy/entropy": "entropy, nats a token",
}
