"""The report of a sweep, from its folder alone: every cell, and mean and interval over seeds."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.slurm.manifest import Sweep
from kl_comedy.slurm.status import Board, CellStatus

if TYPE_CHECKING:
    import pandas as pd

LAST_METRICS = ("train/reward", "kl/exact_reverse_sequence", "policy/entropy")
"""Of a run's last update, where it was measured."""


def write_report(sweep: Sweep, seen: Board) -> Path:
    """Write report/{cells.csv, cells.json, table.csv, report.md}; the page's path."""
    import pandas as pd

    from kl_comedy.tracking.stats import summarize
    from kl_comedy.tracking.tables import readable, render

    folder = sweep.path / "report"
    folder.mkdir(exist_ok=True)
    cells = [{**asdict(row), **_measured(sweep, row)} for row in seen.rows]
    frame = pd.DataFrame(cells)
    metrics = [name for name in frame.columns if "/" in name]
    counted = frame.assign(status=frame["state"].replace({"DIED": "FAILED", "CANCELLED": "KILLED"}))
    summary = summarize(counted, ["name"], metrics)
    columns = ["cell", "name", "seed", "state", "step", "why", *metrics]
    _write(folder / "cells.csv", render(frame, "csv"))
    _write(folder / "cells.json", json.dumps(cells, indent=1))
    _write(folder / "table.csv", render(summary, "csv"))
    table = render(readable(summary, ["name"]), "markdown") if metrics else "No cell has finished."
    _write(folder / "report.md", _page(sweep, seen, table, render(_rounded(frame[columns]), "markdown")))
    return folder / "report.md"


def _page(sweep: Sweep, seen: Board, table: str, cells: str) -> str:
    counts = ", ".join(f"{number} {state.lower()}" for state, number in seen.counts().items())
    return "\n".join([
        f"# Sweep {sweep.manifest.name}", "",
        f"{len(seen.rows)} cells: {counts}. Manifest {sweep.manifest.digest}, kl_comedy "
        f"{sweep.manifest.package_version}.", "",
        "## Over seeds", "", "Mean and 95% interval (Student) of finished cells.", "", table, "",
        "## Cells", "", cells,
    ])  # fmt: skip


def _measured(sweep: Sweep, row: CellStatus) -> dict[str, float]:
    """The last update's metrics, the run's own last evaluations, and those of the evaluation job."""
    found: dict[str, float] = {}
    summary = _read(Path(row.run) / "summary.json") if row.run else None
    if summary is not None and row.state == "FINISHED":
        last = summary.get("metrics", {})
        found |= {name: float(last[name]) for name in LAST_METRICS if name in last}
        for kept, score in (("evaluations", "reward"), ("accuracies", "accuracy")):
            for name, history in summary.get(kept, {}).items():
                found[f"eval/{name}/{score}"] = float(history[max(history, key=int)])
    for item in _read(sweep.evaluation(row.cell)) or []:
        found |= _scores(item)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _scores(item: dict[str, Any]) -> dict[str, float]:
    """An evaluation's row: the reward of a set, or every score of a suite that has an interval."""
    if "set" in item:
        return {f"evaluate/{item['set']}/reward": float(item["reward"])}
    return {f"evaluate/{item['suite']}/{name}": float(item[name]) for name in item if f"{name}_low" in item}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _rounded(frame: pd.DataFrame) -> pd.DataFrame:
    numbers = frame.select_dtypes("float").columns
    return frame.assign(**{str(name): frame[name].map(lambda value: f"{value:.4g}") for name in numbers})


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(text.rstrip("\n") + "\n")
    draft.replace(path)
