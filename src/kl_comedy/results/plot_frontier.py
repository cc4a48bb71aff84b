"""Reward against KL, a line through the betas of a group; beside it, on request, bias and variance of certificates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kl_comedy.errors import UserError
from kl_comedy.results import plot_panels
from kl_comedy.results.compare import by_seed, collapsed_runs, groups_of
from kl_comedy.results.figures import legend_below, paper_style, plain_ticks
from kl_comedy.results.looks import Line, LineLook
from kl_comedy.results.metric_labels import axis_label, metric_range
from kl_comedy.results.runs import BETA, FAMILY, NO_KL, short, sort_key
from kl_comedy.statistics import Interval, geometric_interval, interval

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

BIAS = "tags.kl.relative_bias"
VARIANCE = "tags.kl.variance"


@paper_style()
def frontier(
    frame: pd.DataFrame,
    groups: Sequence[str],
    metrics: Sequence[str],
    kl: str,
    panels: Sequence[str] = (),
    *,
    certificates: bool = False,
) -> Figure:
    """A metric against KL, a line for each group through its betas in the order of KL; before it, where
    ``certificates``, bias and variance of each group's certificate. A row of panels for each metric.

    The size of a mark is its beta, and a hollow one collapsed. A mark of fewer than
    ``plot_panels.SEEDS_OF_AN_INTERVAL`` seeds has its runs as small marks and no bars. KL is on a logarithmic axis
    where all of it is above 0. Raises :class:`UserError` where no run has what is drawn.
    """
    parts = plot_panels.panels_of(frame, panels)
    lines = [key for key in groups if key not in panels]
    looks = plot_panels.looks_of_panels(parts, lines)
    sizes = _mark_sizes(frame)
    all_parts = parts
    if certificates:
        _check_certificates(frame)
        # The first panel, which pools all others.
        all_parts = [("certificates", frame), *parts]
        looks = plot_panels.looks_of_panels(all_parts, lines)
    figure, grid = plot_panels.layout(all_parts, len(metrics))
    logs = []
    spots: list[_Spot] = []
    for row, metric in zip(grid, metrics, strict=True):
        # A run has a place only if both of its values are known.
        finite = (frame[f"metrics.{metric}"].abs() < math.inf) & (frame[kl].abs() < math.inf)
        if not finite.any():
            raise UserError(f"--metric: no run has a finite {metric!r} and {short(kl)!r}")
        log = bool((frame.loc[finite, kl] > 0).all())
        logs.append(log)
        ranges = _Ranges(
            x=metric_range(short(kl), frame.loc[finite, kl]),
            y=metric_range(metric, frame.loc[finite, f"metrics.{metric}"]),
        )
        for axes, (_, runs) in zip(row[-len(parts) :], parts, strict=True):
            placed = runs.assign(x=runs[kl].where(finite[runs.index]), y=runs[f"metrics.{metric}"])
            for line, members in _members_of_lines(placed, lines).items():
                spots_of_line = _spots(members, ranges, log=log)
                _draw_line(axes, line, spots_of_line, looks[line], sizes)
                spots += spots_of_line
            _limit_frontier(axes, placed, ranges, log=log)
        plot_panels.name_axes(row, axis_label(short(kl), 40, plot_panels.notes_of_axis(1, log=log)), metric)
        if certificates:
            row[1].set_ylabel(row[0].get_ylabel())
            _draw_certificates(row[0], frame, lines, looks)
    marks = _frontier_marks(looks, sizes, has_collapsed=bool(collapsed_runs(frame)))
    legend_below(figure, _frontier_title(spots, log=any(logs)), marks)
    return figure


def _frontier_title(spots: Sequence[_Spot], *, log: bool) -> str:
    """What a mark and its bars are."""
    seed_counts = {spot.n for spot in spots}
    common_count = ""
    if len(seed_counts) == 1:
        common_count = str(min(seed_counts))
    title = plot_panels.what_is_drawn("mean", seed_counts, common_count)
    # A single run has no mean.
    if log and common_count != "1":
        title += " (of KL in logarithms)"
    if any(spot.x_bar or spot.y_bar for spot in spots):
        title += ", cut at the edges"
    if any(spot.is_cut for spot in spots):
        title += " and at the range of the metric"
    return title


def _members_of_lines(frame: pd.DataFrame, groups: Sequence[str]) -> dict[Line, pd.DataFrame]:
    """The runs of each line, in the order of the groups."""
    return {plot_panels.line_of(groups, values, members): members for values, members in groups_of(frame, groups)}


def _check_certificates(frame: pd.DataFrame) -> None:
    """Raise :class:`UserError` where no run has the tags of a certificate."""
    for column in (BIAS, VARIANCE):
        if column not in frame or frame[column].isna().all():
            why = "which these runs lack: an older version tracked them"
            raise UserError(f"--kind: plane needs the tag {short(column)}, {why}")


def _mark_sizes(frame: pd.DataFrame) -> dict[str, float]:
    """The size of a mark in points, by beta; larger betas have larger marks."""
    if FAMILY not in frame:
        return {}
    betas = sorted(set(frame.loc[frame[FAMILY] != NO_KL, BETA]), key=sort_key)
    # From just above a line's width to as large as marks can be without hiding each other: above 3 to 6.5 points.
    return {beta: 3.0 + 3.5 * (place + 1) / len(betas) for place, beta in enumerate(betas)}


def _frontier_marks(looks: plot_panels.Looks, sizes: Mapping[str, float], *, has_collapsed: bool) -> list[Line2D]:
    """The legend's entries: groups by colour and marker, betas by size, collapsed runs by how a mark is filled."""
    from matplotlib.lines import Line2D

    def plain_mark(label: str, **options: Any) -> Line2D:
        # Black is the colour of no family; grey would be runs without KL.
        return Line2D([], [], marker="o", label=label, color="black", linestyle="none", **options)

    marks = []
    in_black = plot_panels.labels_of_several_families(looks)
    labels: set[str] = set()
    for line, style in looks.items():
        if line.label in labels:
            continue
        labels.add(line.label)
        options = style.of_mark()
        if style.shows_dash:
            options["linestyle"] = style.dash
        if line.label in in_black:
            options["color"] = plot_panels.SEVERAL_FAMILIES
        marks.append(Line2D([], [], label=plot_panels.in_words(line.label), **options))
    marks += [plain_mark(f"beta {beta}", markersize=size) for beta, size in sizes.items()]
    if has_collapsed:
        marks.append(plain_mark("some runs collapsed", fillstyle="left", markerfacecoloralt="white"))
        marks.append(plain_mark("all runs collapsed", fillstyle="none"))
    return marks


class _Ranges(NamedTuple):
    """The least and the greatest value that KL (x) and the metric (y) can have."""

    x: tuple[float, float]
    y: tuple[float, float]


class _Spot(NamedTuple):
    """The runs of one group and beta as a mark: their KL and metric, and matplotlib's ``fillstyle``."""

    x: float
    y: float
    n: int
    """Number of seeds."""
    x_bar: list[list[float]] | None
    """The interval, below and above the mean; None for too few seeds."""
    y_bar: list[list[float]] | None
    is_cut: bool
    """Whether an interval reaches beyond its range, at which it is cut."""
    seeds: list[tuple[float, float]]
    """KL and metric of each seed where there are too few for an interval, but more than one."""
    beta: str
    fill: str


MARK_LAYERS = {"none": 2.4, "left": 2.6, "full": 2.8}
"""Matplotlib's zorder by fill: an open mark, which is white or empty inside, must not hide a filled one."""


def _draw_line(axes: Axes, line: Line, spots: Sequence[_Spot], style: LineLook, sizes: Mapping[str, float]) -> None:
    """The betas of a group in the order of their mean KL, joined by solid lines only where no run collapsed: nothing is
    read off across a collapsed one either."""
    for place, (left, right) in enumerate(itertools.pairwise(spots)):
        # A dotted line is no frontier: reward_at_kl does not interpolate across a collapsed run.
        dash: Any = ":"
        if left.fill == right.fill == "full":
            dash = "-"
            if style.shows_dash:
                dash = style.dash
        axes.plot(
            [left.x, right.x],
            [left.y, right.y],
            linestyle=dash,
            color=style.colour,
            alpha=0.5,
            linewidth=0.9,
            zorder=1.8,
            gid=plot_panels.svg_id(axes, f"join{place}", 0, line.label),
        )
    for place, spot in enumerate(spots):
        _draw_mark(axes, spot, style, sizes.get(spot.beta, 5.0), place=place, name=f"{line.label}-{spot.beta}")


def _draw_mark(axes: Axes, spot: _Spot, style: LineLook, size: float, *, place: int, name: str) -> None:
    """The mark of one beta, its bars, and its seeds as small marks. ``place`` and ``name`` make the ids in an SVG."""
    axes.errorbar(
        [spot.x],
        [spot.y],
        xerr=spot.x_bar,
        yerr=spot.y_bar,
        fmt="none",
        ecolor=(style.colour, 0.35),
        elinewidth=0.6,
        zorder=1.5,
    )
    mark = style.of_mark() | {"fillstyle": spot.fill, "markerfacecoloralt": "white"}
    # Only full marks: without its edge a hollow one would be invisible.
    if spot.fill != "full":
        mark["markeredgecolor"] = style.colour
        mark["markeredgewidth"] = 0.8
    if spot.seeds:
        kls, rewards = zip(*spot.seeds, strict=True)
        small = mark | {"markersize": 2.6, "alpha": 0.55, "zorder": 2.0, "fillstyle": "full", "markeredgewidth": 0}
        axes.plot(kls, rewards, gid=plot_panels.svg_id(axes, f"runs{place}", 0, name), **small)
    mark |= {"markersize": size, "zorder": MARK_LAYERS[spot.fill]}
    axes.plot([spot.x], [spot.y], gid=plot_panels.svg_id(axes, f"mark-{spot.fill}", place, name), **mark)


def _limit_frontier(axes: Axes, frame: pd.DataFrame, ranges: _Ranges, *, log: bool) -> None:
    """The axes hold every placed run, a quarter wider, but hardly more than the range of the metric; bars may be cut.

    ``frame`` has the runs' ``x`` and ``y``.
    """
    finite = frame[frame["x"].notna()]
    if finite.empty:
        return
    low = finite["y"].min()
    high = finite["y"].max()
    margin = 0.25 * (high - low) or 0.05 * abs(high) or 0.05
    # A mark at the end of the range needs a little room for its own size.
    least_y, most_y = ranges.y
    room = 0.2 * margin
    axes.set_ylim(max(low - margin, least_y - room), min(high + margin, most_y + room))
    least = finite["x"].min()
    most = finite["x"].max()
    if log:
        axes.set_xscale("log")
        axes.set_xlim(least / 1.5, most * 1.5)
        plain_ticks(axes.xaxis)
    else:
        axes.set_xlim(min(0.0, 1.3 * least), 1.3 * max(most, 0.1))


def _spots(members: pd.DataFrame, ranges: _Ranges, *, log: bool) -> list[_Spot]:
    """A mark for each beta that has a placed run, in the order of their KL."""
    spots = []
    for (beta,), runs in groups_of(members, [BETA]):
        if runs["x"].notna().any():
            spots.append(_spot(beta, runs, ranges, log=log))
    # By KL and not by beta: a line that went back and forth could not be read off.
    return sorted(spots, key=lambda spot: spot.x)


def _spot(beta: str, runs: pd.DataFrame, ranges: _Ranges, *, log: bool) -> _Spot:
    """The mark of the runs of one beta, at least one of which is placed."""
    placed = runs[runs["x"].notna()]
    kls = by_seed(placed, "x")
    rewards = by_seed(placed, "y")
    kl = interval(kls)
    if log:
        kl = geometric_interval(kls)
    reward = interval(rewards)
    # A placed run has both values, so that neither mean is None.
    assert kl.mean is not None
    assert reward.mean is not None
    x_bar = None
    y_bar = None
    is_cut = False
    seeds: list[tuple[float, float]] = []
    if reward.n >= plot_panels.SEEDS_OF_AN_INTERVAL:
        x_bar, x_is_cut = _reach(kl, ranges.x)
        y_bar, y_is_cut = _reach(reward, ranges.y)
        is_cut = x_is_cut or y_is_cut
    elif reward.n > 1:
        seeds = list(zip(kls, rewards, strict=True))
    return _Spot(
        x=kl.mean,
        y=reward.mean,
        n=reward.n,
        x_bar=x_bar,
        y_bar=y_bar,
        is_cut=is_cut,
        seeds=seeds,
        beta=beta,
        # Of all runs: one that collapsed may have no place.
        fill=_fill_style(runs),
    )


def _fill_style(runs: pd.DataFrame) -> str:
    """Matplotlib's ``fillstyle`` of a mark: full, half where some of its runs collapsed, hollow where all did."""
    collapsed = collapsed_runs(runs)
    if not collapsed:
        return "full"
    if collapsed == len(runs):
        return "none"
    return "left"


def _reach(bar: Interval, bounds: tuple[float, float]) -> tuple[list[list[float]] | None, bool]:
    """The bar of an interval, below and above its mean, cut at ``bounds``; and whether anything was cut."""
    if bar.mean is None or bar.low is None or bar.high is None:
        return None, False
    low, high = bounds
    # A mean that rounding puts beyond the range has a bar of length 0 on that side, not a negative one.
    below = max(0.0, bar.mean - max(bar.low, low))
    above = max(0.0, min(bar.high, high) - bar.mean)
    is_cut = bar.low < low or bar.high > high
    return [[below], [above]], is_cut


def _draw_certificates(axes: Axes, frame: pd.DataFrame, groups: Sequence[str], looks: plot_panels.Looks) -> None:
    """Relative bias and variance of each group's certificate, a mark for each line."""
    for place, (line, members) in enumerate(_members_of_lines(frame, groups).items()):
        # A group has one configuration, so the certificates of its runs are the same.
        known = members[[BIAS, VARIANCE]].dropna().astype(float)[:1]
        axes.plot(
            known[BIAS],
            known[VARIANCE],
            gid=plot_panels.svg_id(axes, "certificate", place, line.label),
            **looks[line].of_mark(),
        )
    axes.set_xlabel("relative bias of the gradient\n(0: optimizes KL(π‖ref))")
    axes.set_ylabel("relative variance\nof the gradient (log axis)")
    # An exact gradient has variance 0, which a logarithmic axis cannot show.
    axes.set_yscale("symlog", linthresh=0.1)
    plain_ticks(axes.yaxis)
