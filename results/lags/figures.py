"""Draws lags.svg from runs.csv: what the runs of each KL configuration end with, against the lag of their samples."""

from pathlib import Path

import pandas as pd

from kl_comedy.results.figures import save_figure
from kl_comedy.results.plots import plot_curves
from kl_comedy.results.runs import LABEL, with_derived

HERE = Path(__file__).parent
COLUMNS = {
    "heldout_reward": "eval/heldout/reward",
    "heldout_exact_kl": "eval/heldout/kl/exact_reverse_sequence",
    "ess_last20": "policy/ess",
    "grad_norm_last20": "grad/norm",
}
ON_LOG_AXES = ("eval/heldout/kl/exact_reverse_sequence", "grad/norm")

runs = pd.read_csv(HERE / "runs.csv").rename(columns={"lag": "step"})
# A curve over lags: the runs of one KL configuration and seed are its points.
runs["run_id"] = runs["kl"] + ", seed " + runs["seed"].astype(str)
points = {}
for column, metric in COLUMNS.items():
    points[metric] = runs[["run_id", "step", column]].rename(columns={column: "value"})
lines = runs.drop_duplicates("run_id")
lines = lines.assign(**{LABEL: lines["kl"], "params.seed": lines["seed"].astype(str)})

figure = plot_curves(points, with_derived(lines), [LABEL], log=ON_LOG_AXES)
for axes, column in zip(figure.axes, COLUMNS, strict=True):
    axes.set_xlabel("lag (updates)")
    axes.set_xticks(sorted(runs["step"].unique()))
    if column.endswith("_last20"):
        axes.set_ylabel(f"{axes.get_ylabel()}\n(mean of last 20 updates)")
save_figure(figure, HERE / "lags.svg")
