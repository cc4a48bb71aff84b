"""The tables that ``kl-comedy sweep --dry-run`` and ``kl-comedy status`` print."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kl_comedy.slurm.manifest import Sweep
from kl_comedy.slurm.status import Board

PIPE_WIDTH = 200
"""Columns where stdout is no terminal, so that nothing is cut."""


def show_cells(planned: Sweep) -> None:
    """Every cell: number, name, seed, updates, values, config hash; nodes and processes on each where some differ."""
    cells = planned.manifest.cells
    sized = len({cell.size for cell in cells}) > 1
    keys = list(dict.fromkeys(key for cell in cells for key in cell.values))
    sizes = ["nodes x processes"] if sized else []
    table = Table(
        "cell", "name", "seed", "updates", *sizes, *keys, "config", title=f"{planned.path}: {len(cells)} cells"
    )
    for cell in cells:
        values = [cell.values.get(key, "") for key in keys]
        size = [f"{cell.nodes} x {cell.devices}"] if sized else []
        table.add_row(str(cell.index), cell.name, str(cell.seed), str(cell.steps), *size, *values, cell.config_hash)
    _console().print(table)


def show_status(found: Sweep, seen: Board) -> None:
    """Every cell's state, and the count of each state."""
    evaluates = found.manifest.evaluate is not None
    headers = ["cell", "name", "seed", "state", "step", "reward", "node", "job", "tries"]
    table = Table(*headers, *(["evaluated"] if evaluates else []), "why")
    for row in seen.rows:
        reward = "" if row.reward is None else f"{row.reward:.3f}"
        evaluated = "yes" if row.evaluated else "under way" if row.cell in seen.evaluating else "no"
        table.add_row(
            str(row.cell), row.name, str(row.seed), row.state, f"{row.step}/{row.steps}", reward, row.node, row.job,
            str(row.attempts), *([evaluated] if evaluates else []), row.why,
        )  # fmt: skip
    console = _console()
    console.print(table)
    console.print(", ".join(f"{number} {state.lower()}" for state, number in seen.counts().items()), highlight=False)


def _console() -> Console:
    console = Console(markup=False)
    return console if console.is_terminal else Console(width=PIPE_WIDTH, markup=False)
