"""Read the curves of three figures back from their SVG, whose runs are in no export: writes results/curves.csv.

python research/scripts/curves_of_figures.py

The figures are those of the commits in :data:`FIGURES`. A coordinate has two digits, so that a value is right to about
a thousandth of its axis. Of the three seeds of the quickstart the figure had the mean.
"""

from __future__ import annotations

import csv
import re
import subprocess
from pathlib import Path

OUT = Path(__file__).resolve().parents[2] / "results" / "curves.csv"
QUICKSTART = ("train/reward", "eval/heldout/reward", "kl/exact_reverse_sequence", "policy/entropy")
FIGURES = {
    "quickstart": ("d0bd75f", QUICKSTART),
    "smollm2_chain_sum": ("785208a", QUICKSTART),
    "smollm2_gsm8k": (
        "785208a",
        ("train/reward", "kl/k1_reverse_sequence", "train/truncated_share", "policy/behaviour_gap_max"),
    ),
}
"""Figure to the commit that has it as it was first drawn, and the metrics of its panels."""

TICK = re.compile(
    r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)"[^>]*/>\s*</g>\s*</g>\s*<g id="text_\d+">\s*<!-- (.*?) -->'
)
LINE = re.compile(r'<g id="(?:line2d_\d+|mean[^"]*)">\s*<path d="([^"]*)" clip-path')


def scale_of(ticks: list[tuple[float, float]]) -> tuple[float, float]:
    """Offset and factor from a coordinate of the SVG to the value of the axis, from its first and last tick."""
    (first_place, first), (last_place, last) = ticks[0], ticks[-1]
    factor = (last - first) / (last_place - first_place)
    return first - factor * first_place, factor


def curve_of(panel: str) -> list[tuple[int, float]]:
    """Updates and values of the only line of a panel."""
    ticks = {"x": [], "y": []}
    for x, y, text in TICK.findall(panel):
        value = float(text.replace("\N{MINUS SIGN}", "-"))
        # All ticks of the x axis have one height, at the bottom, and come first.
        is_x = not ticks["y"] and (not ticks["x"] or float(y) == ticks["x"][0][2])
        name = "x" if is_x else "y"
        ticks[name].append((float(x if is_x else y), value, float(y)))
    x_offset, x_factor = scale_of([tick[:2] for tick in ticks["x"]])
    power = re.search(r"<!-- 1e(.*?) -->", panel)
    unit = 1.0 if power is None else 10 ** float(power[1].replace("\N{MINUS SIGN}", "-"))
    y_offset, y_factor = scale_of([(place, unit * value) for place, value, _ in ticks["y"]])
    # The line of the data is the longest: the others are grid lines of two points.
    paths = [re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", path) for path in LINE.findall(panel)]
    longest = max(paths, key=len)
    return [(round(x_offset + x_factor * float(x)), y_offset + y_factor * float(y)) for x, y in longest]


def main() -> None:
    rows = []
    for name, (commit, metrics) in FIGURES.items():
        command = ["git", "show", f"{commit}:results/{name}.svg"]
        text = subprocess.run(command, capture_output=True, text=True, check=True, cwd=OUT.parent).stdout
        panels = [panel.split('<g id="legend_')[0] for panel in re.split(r'<g id="axes_\d+">', text)[1:]]
        for metric, panel in zip(metrics, panels, strict=True):
            rows += [(name, metric, step, f"{value:.4g}") for step, value in curve_of(panel)]
    with OUT.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("figure", "metric", "step", "value"))
        writer.writerows(rows)
    print(f"wrote {len(rows)} points to {OUT}")


if __name__ == "__main__":
    main()
