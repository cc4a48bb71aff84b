"""Draws quickstart.svg, smollm2_chain_sum.svg and smollm2_gsm8k.svg from curves.csv and runs.csv.

curves.csv was read from the first figures of these runs, whose store is lost, to a thousandth of an axis (the figures
of commits d0bd75f, the quickstart, and 785208a): the only run of a SmolLM2, and the mean of the three seeds of the
quickstart, of which runs.csv has the final values.
"""

from pathlib import Path

import pandas as pd

from kl_comedy.results.figures import save_figure
from kl_comedy.results.looks import family_look
from kl_comedy.results.plots import plot_curves
from kl_comedy.results.runs import FAMILY, LABEL, with_derived

HERE = Path(__file__).parent

curves = pd.read_csv(HERE / "curves.csv")
ends = pd.read_csv(HERE / "runs.csv")
for name, rows in curves.groupby("figure"):
    seeds = ends[ends["name"] == name]
    label = seeds["kl.label"].iloc[0]
    run = with_derived(pd.DataFrame([{"run_id": name, "params.seed": "0", LABEL: label}]))
    points = {metric: values.assign(run_id=name) for metric, values in rows.groupby("metric", sort=False)}
    figure = plot_curves(points, run, [LABEL])
    if len(seeds) > 1:
        look = family_look(run[FAMILY].iloc[0])
        for axes, (metric, values) in zip(figure.axes, points.items(), strict=True):
            if metric in seeds:
                last = [values["step"].max()] * len(seeds)
                axes.plot(last, seeds[metric], look.marker, color=look.colour, markersize=2.6, alpha=0.55)
                # A seed may lie beyond the mean of all.
                axes.autoscale(axis="y")
        (legend,) = figure.legends
        legend.set_title(f"mean of {len(seeds)} seeds, small: each seed at the end; number before a term: beta")
    save_figure(figure, HERE / f"{name}.svg")
