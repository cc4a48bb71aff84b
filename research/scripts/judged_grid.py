"""The judged grid of a tuned one: each form at the rate and beta that its tuning runs were best at.

python research/scripts/judged_grid.py --edges
python research/scripts/judged_grid.py
python research/scripts/judged_grid.py --edges --rate 2e-4
python research/scripts/judged_grid.py --rate 2e-4

Best is the highest mean of held-out gold reward over the tuning seeds. Where the best of configs/hack/tune.yaml has a
rate or beta at the end of its axis, ``--edges`` writes configs/hack/tune_edge.yaml, which has one value more there;
once, by the protocol (results/evidence/protocol_2026_12.md). Without it configs/hack/judged.yaml is written, from the
runs of both. With ``--rate`` both are of that rate alone: configs/hack/tune_edge_fast.yaml and judged_fast.yaml.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from kl_comedy.config import load_config
from kl_comedy.results.runs import read_runs
from kl_comedy.slurm.grid import GridPoint, expand, read_grid

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "hack"
TUNED = CONFIGS / "tune.yaml"
EDGE = CONFIGS / "tune_edge.yaml"
EDGE_FAST = CONFIGS / "tune_edge_fast.yaml"
JUDGED = CONFIGS / "judged.yaml"
FAST = CONFIGS / "judged_fast.yaml"
EXPORT = ROOT / "results" / "evidence_2026_12" / "export.parquet"
SEEDS_TUNED = (40, 41)
WARM_STARTS = (1, 2, 3, 4, 5)
SEEDS = (50, 51, 52, 53)
SEEDS_FAST = (54, 55)
BEYOND = {0.1: 0.03, 1.0: 3.0, 5e-5: 2.5e-5, 2e-4: 4e-4}
"""The value after each end of the axes of beta and rate."""
OUTCOME = "metrics.eval/heldout/reward"
"""Of a run whose config has `gold`, this is the gold reward."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A form at one lag, rate and beta."""

    form: str
    lag: int
    term: Mapping[str, Any] | None
    """The KL term without its beta; None without a KL."""
    beta: float | None
    rate: float

    @property
    def row(self) -> dict[str, Any]:
        """The settings of a row of a grid."""
        kl: Any = "none"
        if self.term is not None:
            kl = [{**self.term, "beta": self.beta}]
        mode = "replayed" if self.lag else "on_policy"
        return {"kl": kl, "lag": {"mode": mode, "steps": self.lag}, "optimizer.lr": self.rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", action="store_true", help="write the extension of the tuning grid")
    parser.add_argument("--rate", type=float, help="write the judged grid of this learning rate")
    given = parser.parse_args()
    edges = given.edges
    outcomes = mean_outcomes(read_runs(EXPORT))
    grids = [TUNED]
    if given.rate is not None or not edges:
        grids.append(EDGE)
    if given.rate is not None and not edges:
        grids.append(EDGE_FAST)
    tuned: dict[str, Setting] = {}
    for grid in grids:
        tuned |= tuned_settings(grid)
    missing = sorted(tuned.keys() - outcomes.keys())
    if missing:
        raise SystemExit(f"{len(missing)} settings have fewer than {len(SEEDS_TUNED)} finished runs, as {missing[0]}")
    if given.rate is not None:
        tuned = {name: setting for name, setting in tuned.items() if setting.rate == given.rate}
    best = best_of_each(tuned, outcomes)
    for name in best:
        print(f"{name}: {outcomes[name]:.4f}")
    if edges:
        file = EDGE if given.rate is None else EDGE_FAST
        write(file, extension(best.values(), list(tuned.values()), name=f"hack_{file.stem}"))
    elif given.rate is not None:
        write(FAST, judged(best.values(), name="hack_judged_fast", seeds=SEEDS_FAST))
    else:
        write(JUDGED, judged(best.values(), name="hack_judged", seeds=SEEDS))


def tuned_settings(grid: Path) -> dict[str, Setting]:
    """The settings of a tuning grid, by the names of their runs."""
    return {point.label: setting_of(point) for point in expand(read_grid(grid))}


def setting_of(point: GridPoint) -> Setting:
    """A point of the product, or a row, which is named by its form and lag."""
    settings = point.settings
    form = point.values.get("kl") or point.label.split("-lag-")[0]
    if "lag" in settings:
        lag = settings["lag"]["steps"]
    else:
        lag = load_config(CONFIGS / "base.yaml").lag.steps
    term = None
    beta = None
    if settings["kl"] != "none":
        term = dict(settings["kl"][0])
        beta = term.pop("beta", None) or settings["kl.0.beta"]
    return Setting(form=form, lag=lag, term=term, beta=beta, rate=settings["optimizer.lr"])


def mean_outcomes(runs: pd.DataFrame) -> dict[str, float]:
    """The mean outcome of each tuned setting that has all its seeds, by its name."""
    finished = runs[
        runs["tags.sweep"].isin(["hack_tune", "hack_tune_edge", "hack_tune_edge_fast"]) & (runs["status"] == "FINISHED")
    ]
    by_name = finished.groupby("params.name")[OUTCOME]
    is_whole = by_name.count() == len(SEEDS_TUNED)
    return {str(name): mean for name, mean in by_name.mean()[is_whole].items()}


def best_of_each(tuned: Mapping[str, Setting], outcomes: Mapping[str, float]) -> dict[str, Setting]:
    """The best setting of each lag and form, by its name."""
    best: dict[tuple[int, str], str] = {}
    for name, setting in tuned.items():
        arm = (setting.lag, setting.form)
        if arm not in best or outcomes[name] > outcomes[best[arm]]:
            best[arm] = name
    return {name: tuned[name] for name in best.values()}


def extension(best: Iterable[Setting], tuned: Sequence[Setting], *, name: str) -> dict[str, Any]:
    """The grid of one value more at each end where a form was best, with every value of the other axis."""
    rows = {}
    for setting in best:
        arm = [other for other in tuned if (other.lag, other.form) == (setting.lag, setting.form)]
        rates = {other.rate for other in arm}
        betas = {other.beta for other in arm}
        more_rates = _beyond(setting.rate, rates)
        more_betas = _beyond(setting.beta, betas)
        for rate in sorted(rates | more_rates):
            for beta in sorted(betas | more_betas, key=lambda beta: beta or 0.0):
                if rate in more_rates or beta in more_betas:
                    new = replace(setting, rate=rate, beta=beta)
                    strength = "" if beta is None else f"-beta{beta:g}"
                    rows[f"{setting.form}-lag-{setting.lag}{strength}-lr{rate:g}"] = new.row
    return {
        "name": name,
        "base": "base.yaml",
        "overrides": {"eval.at_start": False},
        "seeds": list(SEEDS_TUNED),
        "rows": rows,
    }


def _beyond(value: float | None, values: set[Any]) -> set[float]:
    """The value after ``value``, where this is the smallest or largest of several ``values``."""
    if value is None or len(values) == 1 or value not in (min(values), max(values)):
        return set()
    return {BEYOND[value]}


def judged(best: Iterable[Setting], *, name: str, seeds: Sequence[int]) -> dict[str, Any]:
    """The content of a judged grid: a row for each arm and warm start, each with all seeds."""
    rows = {}
    for setting in best:
        for start in WARM_STARTS:
            row = {**setting.row, "model.options.seed": start}
            rows[f"{setting.form}-lag-{setting.lag}-start-{start}"] = row
    return {"name": name, "base": "base.yaml", "seeds": list(seeds), "rows": rows}


def write(grid: Path, content: Mapping[str, Any]) -> None:
    head = "# Block 1 of results/evidence/protocol_2026_12.md, written by research/scripts/judged_grid.py.\n"
    grid.write_text(head + yaml.safe_dump(content, sort_keys=False, width=160, default_flow_style=None))
    print(f"{len(content['rows'])} rows in {grid.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
