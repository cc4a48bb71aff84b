"""Draws curves.svg from the export: each kind of trust region in a column of its own, beside the cap alone."""

from pathlib import Path

import pandas as pd

from kl_comedy.results.figures import save_figure
from kl_comedy.results.plots import plot_curves
from kl_comedy.results.runs import FAMILY, NO_KL, history, read_runs

EXPORT = str(Path(__file__).parent / "export.parquet")
METRICS = ("train/reward", "kl/exact_reverse_sequence")
CAP = "cap"
KINDS = {
    "KL to a reference": ("cap-k3-loss", "cap-exact", "reset"),
    "masks by the sign of the advantage": ("ppo-clip", "dppo-tv", "dppo-kl", "cppo"),
    "smaller steps": ("ess-linear", "ess-sqrt", "small-step"),
    "masks of completions": ("trm", "trm-loose", "prefix-budget", "prefix-budget-loose"),
}
KIND = "tags.sweep"
"""The column that tells the kinds apart: a panel's title does not name this one."""
NAME = "params.name"

runs = read_runs(EXPORT)
runs = runs[runs["tags.sweep"] == "trust_regions"]
# Only the cap alone is what other figures call no KL: what replaces the KL is a family of its own here.
is_other = (runs[FAMILY] == NO_KL) & (runs[NAME] != CAP)
runs = runs.assign(**{FAMILY: runs[FAMILY].mask(is_other, runs[NAME])})
columns = []
for kind, names in KINDS.items():
    members = [runs[runs[NAME] == name] for name in (CAP, *names)]
    columns.append(pd.concat(members).assign(**{KIND: kind}))
points = {metric: history(EXPORT, runs["run_id"], metric) for metric in METRICS}

figure = plot_curves(points, pd.concat(columns), [NAME], panels=[KIND], log=METRICS[1:], smooth=5)
save_figure(figure, Path(__file__).parent / "curves.svg")
