"""Curves over updates: a line is the mean of a group's runs, with its interval or its single runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kl_comedy.errors import UserError
from kl_comedy.results import plot_panels
from kl_comedy.results.compare import band, groups_of, seeds_of
from kl_comedy.results.figures import legend_below, paper_style, plain_ticks
from kl_comedy.results.looks import Line
from kl_comedy.results.metric_labels import metric_range
from kl_comedy.results.runs import LABEL

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

MANY_BANDS = 4
"""Bands of a panel from which on each is drawn in a lighter shade."""
DECADES = 5
"""A logarithmic axis of curves shows at most so many below the largest value."""


@paper_style()
def plot_curves(
    points: Mapping[str, pd.DataFrame],
    frame: pd.DataFrame,
    groups: Sequence[str],
    *,
    panels: Sequence[str] = (),
    log: Collection[str] = (),
    smooth: int = 1,
    columns: int = 0,
) -> Figure:
    """The figure of metrics over updates, a row of panels for each; a line is the mean over a group's runs.

    ``points``: metric to columns run_id, step, value (:func:`kl_comedy.results.runs.history`). ``smooth`` replaces
    each value by the mean of the run's last so many. Metrics in ``log`` get a logarithmic axis: values not above 0 are
    left out, a line is the geometric mean and its band the interval of the logarithms. A band is drawn where a line has
    at least ``plot_panels.SEEDS_OF_AN_INTERVAL`` seeds; a line of fewer has its runs as thin lines. ``columns`` of
    panels: as many as fit by default. Raises :class:`UserError` when a metric has no point to draw.
    """
    parts = plot_panels.panels_of(frame, panels)
    lines = [key for key in groups if key not in panels]
    # Each run before the mean over runs, so that the band is that of smoothed runs.
    smoothed = {metric: smooth_curves(values, smooth) for metric, values in points.items()}
    curves_of_panels: dict[str, list[list[_Curve]]] = {}
    drawn: list[_Curve] = []
    for metric, values in smoothed.items():
        bounds = metric_range(metric, values["value"])
        curves_of_panels[metric] = []
        for _, runs in parts:
            curves = _curves_of(values, runs, lines, bounds, log=metric in log)
            curves_of_panels[metric].append(curves)
            drawn += curves
        if not any(curves_of_panels[metric]):
            condition = ""
            if metric in log:
                condition = " above 0, as --log needs,"
            raise UserError(f"--metric: no finite point{condition} of {metric!r} in these {len(frame)} runs")
    looks = plot_panels.looks_of_panels(parts, lines)
    seed_counts = _seed_counts(drawn)
    common_count = _common_count(seed_counts)
    names = {label: _curve_name(label, counts, common_count) for label, counts in seed_counts.items()}

    figure, grid = plot_panels.layout(parts, len(points), share=True, columns=columns)
    for row, (metric, panel_curves) in zip(grid, curves_of_panels.items(), strict=True):
        for axes, curves in zip(row, panel_curves, strict=True):
            _draw_curves(axes, curves, names, looks)
            if metric in log:
                axes.set_yscale("log")
        # All panels of a metric share the axis.
        _limit_curves(row[0], smoothed[metric]["value"], log=metric in log)
        plot_panels.name_axes(row, "optimizer updates", metric, plot_panels.notes_of_axis(smooth, log=metric in log))

    most_seeds = [curve.most_seeds for curve in drawn]
    title = plot_panels.what_is_drawn(_middle_of_curves(points, log), most_seeds, common_count)
    if any(curve.is_cut for curve in drawn):
        title += "; bands are cut at the range of the metric"
    if LABEL in lines:
        title += "; number before a term: beta"
    in_black = plot_panels.labels_of_several_families(curve.line for curve in drawn)
    legend_below(figure, title, _black_entries(in_black, names, looks))
    return figure


def _black_entries(labels: Collection[str], names: Mapping[str, str], looks: plot_panels.Looks) -> list[Line2D]:
    """A legend's entries of lines whose colour is that of their panel's family: line style and marker are common."""
    from matplotlib.lines import Line2D

    entries = []
    for line, style in looks.items():
        if line.label in labels:
            options = style.of_line() | {"color": plot_panels.SEVERAL_FAMILIES}
            entries.append(Line2D([], [], label=names[line.label], **options))
            labels = [label for label in labels if label != line.label]
    return entries


def _seed_counts(curves: Iterable[_Curve]) -> dict[str, set[int]]:
    """Label of a line to the numbers of seeds that its points have, over all metrics and panels."""
    counts: dict[str, set[int]] = {}
    for curve in curves:
        counts.setdefault(curve.line.label, set()).update(curve.mean["n"])
    return counts


def _common_count(seed_counts: Mapping[str, set[int]]) -> str:
    """The number of seeds that every point of every line has; empty where they differ."""
    all_counts = set.union(*seed_counts.values())
    if len(all_counts) > 1:
        return ""
    return str(min(all_counts))


def _curve_name(label: str, counts: set[int], common_count: str) -> str:
    """The legend's entry of a line, with its number of seeds unless the title states it for all lines."""
    if common_count:
        return plot_panels.in_words(label)
    n = str(min(counts))
    if len(counts) > 1:
        n = f"{min(counts)}–{max(counts)}"
    return plot_panels.in_words(f"{label} (n={n})")


def _draw_curves(axes: Axes, curves: Sequence[_Curve], names: Mapping[str, str], looks: plot_panels.Looks) -> None:
    """Bands below single runs, and these below the means; open marks below filled ones."""
    # Many bands over one another would hide the lines.
    shade = 0.15
    if len(curves) >= MANY_BANDS:
        shade = 0.07
    for place, curve in enumerate(curves):
        style = looks[curve.line]
        family = curve.line.family
        mean = curve.mean
        if curve.has_band:
            band_of_mean = axes.fill_between(
                mean["step"], mean["low"], mean["high"], color=style.colour, alpha=shade, linewidth=0, zorder=1.0
            )
            band_of_mean.set_gid(plot_panels.svg_id(axes, "band", place, family))
        elif len(curve.seeds) > 1:
            for number, single in enumerate(curve.seeds):
                axes.plot(
                    single["step"],
                    single["value"],
                    color=style.colour,
                    alpha=0.5,
                    linewidth=0.5,
                    zorder=1.7,
                    gid=plot_panels.svg_id(axes, f"run{number}", place, family),
                )
        # An open mark would hide a filled one below it.
        zorder = 3.0
        if style.fill != "full":
            zorder = 2.5
        # Markers of different lines at different steps, so that lines on top of one another stay visible.
        stride = max(1, len(mean) // 8)
        axes.plot(
            mean["step"],
            mean["mean"],
            label=names[curve.line.label],
            markevery=(place % stride, stride),
            zorder=zorder,
            gid=plot_panels.svg_id(axes, "mean", place, family),
            **style.of_line(),
        )


def _limit_curves(axes: Axes, values: pd.Series[float], *, log: bool) -> None:
    """Cut bands that reach far beyond the runs' own points, as those of two seeds do."""
    shown = values[values.abs() < math.inf]
    if log:
        shown = shown[shown > 0]
    least, most = shown.agg(["min", "max"])
    low, high = axes.get_ylim()
    if log:
        axes.set_ylim(max(low, least / 1.3, most / 10**DECADES), min(high, most * 1.3))
        plain_ticks(axes.yaxis)
    else:
        # A flat curve has no range: it gets a margin of its size, and one of zeros a fixed one.
        margin = 0.05 * (most - least) or 0.05 * abs(most) or 0.05
        axes.set_ylim(max(low, least - margin), min(high, most + margin))


def _middle_of_curves(metrics: Collection[str], log: Collection[str]) -> str:
    """Which mean a line is."""
    logarithmic = [metric for metric in metrics if metric in log]
    if not logarithmic:
        return "mean"
    if len(logarithmic) == len(metrics):
        return "geometric mean"
    return "mean (log: geometric)"


def smooth_curves(points: pd.DataFrame, last: int) -> pd.DataFrame:
    """``points`` (run_id, step, value; steps ascending within a run) with each value the mean of the ``last`` up to it,
    fewer at the start. Values that are not finite are left out of a mean."""
    if last <= 1 or points.empty:
        return points
    windows = points.groupby("run_id", sort=False)["value"].rolling(last, min_periods=1)
    return points.assign(value=windows.mean().reset_index(level=0, drop=True))


class _Curve(NamedTuple):
    """The runs of one line: their mean over seeds and the seeds themselves."""

    line: Line
    mean: pd.DataFrame
    """Columns step, n, mean, low, high; the bounds are NaN at steps that have too few seeds for an interval."""
    seeds: list[pd.DataFrame]
    """A frame with step and value for each seed."""
    is_cut: bool
    """Whether the interval reaches beyond the metric's range, at which it is cut."""

    @property
    def has_band(self) -> bool:
        return self.most_seeds >= plot_panels.SEEDS_OF_AN_INTERVAL

    @property
    def most_seeds(self) -> int:
        """The number of seeds at the step that has most of them."""
        return int(max(self.mean["n"]))


def _curves_of(
    points: pd.DataFrame, frame: pd.DataFrame, groups: Sequence[str], bounds: tuple[float, float], *, log: bool
) -> list[_Curve]:
    """The curves of those groups that have a point to draw; ``bounds`` is the range of the metric."""
    low, high = bounds
    curves = []
    for keys, members in groups_of(frame, groups):
        seeds = seeds_of(members.set_index("run_id", drop=False))
        of_this_line = points["run_id"].isin(seeds.index)
        finite = points[of_this_line & (points["value"].abs() < math.inf)]
        seed_of_point = finite["run_id"].map(seeds).rename("seed")
        # Runs of one seed are not independent, so their mean at a step is one observation of the band.
        values = finite.groupby([seed_of_point, "step"], sort=False)["value"].mean().reset_index()
        mean = band(values, log=log)
        if len(mean) == 0:
            continue
        enough = mean["n"] >= plot_panels.SEEDS_OF_AN_INTERVAL
        mean = mean.assign(low=mean["low"].where(enough), high=mean["high"].where(enough))
        # Student's interval does not know that an accuracy is at most 1.
        is_cut = bool((mean["low"] < low).any() or (mean["high"] > high).any())
        mean = mean.assign(low=mean["low"].clip(lower=low), high=mean["high"].clip(upper=high))
        shown = values
        if log:
            shown = values[values["value"] > 0]
        singles = [single for _, single in shown.groupby("seed", sort=False)]
        curves.append(_Curve(line=plot_panels.line_of(groups, keys, members), mean=mean, seeds=singles, is_cut=is_cut))
    return curves
