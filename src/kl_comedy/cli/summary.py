"""The closing words of a run: what happened, and the commands that go on from here."""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from kl_comedy.training.run import Outcome


def show_outcome(outcome: Outcome, console: Console) -> None:
    """Print evaluation before and after, the run id, and commands to evaluate, plot and tabulate."""
    summary, path = outcome.summary, outcome.run.path
    if outcome.already_finished:
        console.print(f"{path} is already finished; nothing to do (resume=never trains anew)", soft_wrap=True)
    table = Table("evaluation", "at start", "at end", "change")
    for name, history in summary.get("evaluations", {}).items():
        ordered = sorted((int(step), value) for step, value in history.items())
        first, last = ordered[0][1], ordered[-1][1]
        table.add_row(name, f"{first:.3f}", f"{last:.3f}", f"{last - first:+.3f}")
    if table.row_count:
        console.print(table)
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
