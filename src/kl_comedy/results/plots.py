"""Pictures of runs: curves over updates or KL, reward against KL, certificates beside outcomes, KL family x beta.

A line or mark is a group of runs: its mean over seeds, with the 95% interval from :data:`SEEDS_OF_AN_INTERVAL` seeds
on, and with the single runs below that. On a logarithmic axis it is the geometric mean and the interval of the
logarithms.
A KL family has the same colour and marker in every figure (:mod:`kl_comedy.results.looks`). Collapsed runs are drawn
hollow in a frontier, and a group's mean includes them.
"""

from kl_comedy.results.plot_curves import plot_curves, smooth_curves
from kl_comedy.results.plot_frontier import frontier
from kl_comedy.results.plot_heatmap import heatmap
from kl_comedy.results.plot_panels import (
    KL_KEYS,
    MOST_LINES,
    NAME,
    SEEDS_OF_AN_INTERVAL,
    group_title,
    in_words,
    line_label,
    line_of,
    lines_and_panels,
    panels_of,
    plain_words,
)
from kl_comedy.results.plot_paths import plot_paths

__all__ = (
    "KL_KEYS",
    "MOST_LINES",
    "NAME",
    "SEEDS_OF_AN_INTERVAL",
    "frontier",
    "group_title",
    "heatmap",
    "in_words",
    "line_label",
    "line_of",
    "lines_and_panels",
    "panels_of",
    "plain_words",
    "plot_curves",
    "plot_paths",
    "smooth_curves",
)
