"""The judged grid of a tuned one: each form at the rate and beta that its tuning runs were best at.

python research/scripts/judged_grid.py [EXPORT] [-o GRID]

Reads the runs of configs/hack/tune.yaml from a store or an export and writes configs/hack/judged.yaml. Best is the
highest mean of held-out gold reward over the tuning seeds. A best value at the end of its axis is printed: the protocol
(results/evidence/protocol_2026_12.md) then extends the tuning grid there once.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from kl_comedy.config import load_config
from kl_comedy.results.runs import read_runs
from kl_comedy.slurm.grid import GridPoint, expand, read_grid

ROOT = Path(__file__).parents[2]
TUNED = ROOT / "configs" / "hack" / "tune.yaml"
BASE = ROOT / "configs" / "hack" / "base.yaml"
JUDGED = ROOT / "configs" / "hack" / "judged.yaml"
EXPORT = ROOT / "results" / "evidence_2026_12" / "export.parquet"
WARM_STARTS = (1, 2, 3, 4, 5)
SEEDS = (50, 51, 52, 53)
OUTCOME = "metrics.eval/heldout/reward"
"""Of a run whose config has `gold`, this is the gold reward."""
HEAD = """\
# Block 1, judged: each form at its best rate and beta of tune.yaml, five warm starts with four fresh seeds each.
# Written by research/scripts/judged_grid.py.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", default=EXPORT, help="a tracking store, or an export of it")
    parser.add_argument("-o", "--out", type=Path, default=JUDGED)
    given = parser.parse_args()
    tuned = read_grid(TUNED)
    points = expand(tuned)
    outcomes = mean_outcomes(read_runs(given.runs), len(tuned.seeds))
    missing = sorted({point.label for point in points} - set(outcomes.index))
    if missing:
        raise SystemExit(f"{len(missing)} points have fewer than {len(tuned.seeds)} finished runs, as {missing[0]}")
    chosen = best_of_each(points, outcomes)
    for point in chosen.values():
        at_end = at_the_end(point, points)
        print(f"{point.label}: {outcomes[point.label]:.4f}", *[f"({key} is at the end of its axis)" for key in at_end])
    given.out.write_text(HEAD + yaml.safe_dump(judged(chosen), sort_keys=False, width=160, default_flow_style=None))


def mean_outcomes(runs: pd.DataFrame, seeds: int) -> pd.Series:
    """The mean outcome of each tuned configuration that has all its ``seeds``, by its name."""
    finished = runs[(runs["tags.sweep"] == "hack_tune") & (runs["status"] == "FINISHED")]
    by_name = finished.groupby("params.name")[OUTCOME]
    return by_name.mean()[by_name.count() == seeds]


def best_of_each(points: Sequence[GridPoint], outcomes: pd.Series) -> dict[tuple[int, str], GridPoint]:
    """The best point of each lag and form."""
    chosen: dict[tuple[int, str], GridPoint] = {}
    for point in points:
        arm = (lag_of(point), form_of(point))
        if arm not in chosen or outcomes[point.label] > outcomes[chosen[arm].label]:
            chosen[arm] = point
    return chosen


def lag_of(point: GridPoint) -> int:
    """Updates between sampler and policy; a row without a lag has that of the base."""
    if "lag" not in point.settings:
        return load_config(BASE).lag.steps
    return int(point.settings["lag"]["steps"])


def form_of(point: GridPoint) -> str:
    return point.values.get("kl", "none")


def at_the_end(point: GridPoint, points: Sequence[GridPoint]) -> list[str]:
    """The keys whose value in ``point`` is the smallest or largest of its arm."""
    keys = []
    for key in ("optimizer.lr", "kl.0.beta"):
        values = [other.settings[key] for other in points if form_of(other) == form_of(point) and key in other.settings]
        if values and point.settings[key] in (min(values), max(values)):
            keys.append(key)
    return keys


def judged(chosen: Mapping[tuple[int, str], GridPoint]) -> dict[str, Any]:
    """The content of the judged grid: a row for each arm and warm start, each with all seeds."""
    rows = {}
    for (lag, form), point in chosen.items():
        for start in WARM_STARTS:
            kl = point.settings["kl"]
            if isinstance(kl, list):
                kl = [kl[0] | {"beta": point.settings["kl.0.beta"]}]
            rows[f"{form}-lag-{lag}-start-{start}"] = {
                "kl": kl,
                "lag": {"mode": "replayed" if lag else "on_policy", "steps": lag},
                "optimizer.lr": point.settings["optimizer.lr"],
                "model.options.seed": start,
            }
    return {"name": "hack_judged", "base": "base.yaml", "seeds": list(SEEDS), "rows": rows}


if __name__ == "__main__":
    main()
