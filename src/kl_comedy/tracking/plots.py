"""Pictures of runs: curves over updates, reward against KL, certificates beside outcomes, KL family x beta.

A line or mark is a group of runs: its mean over seeds, with the 95% interval from :data:`SEEDS_OF_AN_INTERVAL` seeds
on, and with the single runs below that. On a logarithmic axis it is the geometric mean and the interval of the
logarithms.
A KL family has the same colour and marker in every figure (:mod:`kl_comedy.tracking.looks`). Collapsed runs are drawn
hollow in a frontier, and a group's mean includes them.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kl_comedy.errors import UserError
from kl_comedy.statistics import Interval, geometric_interval, interval
from kl_comedy.tracking.compare import band, by_seed, collapsed_runs, groups_of, seeds_of
from kl_comedy.tracking.figures import COLUMN, PAGE, legend_below, new_figure, paper_style, plain_ticks
from kl_comedy.tracking.looks import (
    Line,
    LineLook,
    family_of_runs,
    line_looks,
    values_beside_family,
)
from kl_comedy.tracking.metric_labels import axis_label, key_label, metric_label, metric_range
from kl_comedy.tracking.runs import BETA, FAMILY, LABEL, NO_KL, short, sort_key

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from matplotlib.lines import Line2D

MOST_LINES = 8
"""More lines than this cannot be told apart in one panel."""

SEEDS_OF_AN_INTERVAL = 5
"""Single runs are drawn where there are fewer: Student's interval of two seeds reaches 12.7 standard errors, and its
band would hide the panel."""

SEVERAL_FAMILIES = "black"
"""The colour of a legend's entry whose line has another family, and so another colour, in each panel."""

DECADES = 5
"""A logarithmic axis of curves shows at most so many below the largest value."""

WORDS = {
    "_reverse_token": "",
    "exact in": "exact KL in",
    "_": " ",
}
"""What titles and legends write instead of parts of KL labels. KL is reverse and per token where nothing else is
said."""
_KEY_AND_EQUALS = re.compile(r"\b([a-z]\w*(?:\.\w+)+)=")
"""A key with a dot before its value, as ``optimizer.lr=``; the options of an estimator, as ``k=16``, have no dot."""

KL_KEYS = (FAMILY, BETA, LABEL)
NAME = "params.name"
SELF_EXPLANATORY = (FAMILY, LABEL, NAME, "tags.sweep")
"""Keys whose values need no name beside them."""

BIAS = "tags.kl.relative_bias"
VARIANCE = "tags.kl.variance"
ROW_HEIGHTS = {1: 2.5, 2: 2.5, 3: 2.3, 4: 2.0}
"""Inches: the height of a row of panels, by the number of columns."""

Looks = Mapping[Line, LineLook]
Panels = list[tuple[str, "pd.DataFrame"]]
"""Titles (empty: the only panel) and the runs under them."""


def panels_of(frame: pd.DataFrame, keys: Sequence[str]) -> Panels:
    """A panel for each combination of ``keys``.

    Runs without KL are beta 0 of every family. Where ``keys`` separate families or betas, these runs stand in each
    panel that shares their other keys, and have a panel to themselves only where there is none.
    """
    import pandas as pd

    if not keys:
        return [("", frame)]
    others = [key for key in keys if key not in KL_KEYS]
    by_kl = FAMILY in frame and len(others) < len(keys)
    # Split by KL, the runs without any would be a panel of their own, and compared with nothing.
    without_kl = pd.Series(False, frame.index)
    if by_kl:
        without_kl = frame[FAMILY] == NO_KL
    shared = dict(groups_of(frame[without_kl], others))
    covered: set[tuple[str, ...]] = set()
    panels: Panels = []
    for values, members in groups_of(frame[~without_kl], keys):
        other_values = tuple(value for key, value in zip(keys, values, strict=True) if key in others)
        covered.add(other_values)
        no_runs = members[:0]
        runs = pd.concat([shared.get(other_values, no_runs), members])
        panels.append((group_title(keys, values), runs))
    for other_values, runs in shared.items():
        if other_values not in covered:
            panels.append((_no_kl(others, other_values), runs))
    return panels


def lines_and_panels(frame: pd.DataFrame, groups: Sequence[str]) -> tuple[list[str], list[str]]:
    """Line keys and panel keys for groups that may be too many for one panel.

    Up to ``MOST_LINES`` groups are lines of one panel. Beyond, a line is a KL family and a panel a beta, or the other
    way round where that makes fewer panels; other keys make panels.
    """
    names = list(groups)
    separates_by_kl = any(key in names for key in KL_KEYS)
    if FAMILY not in frame or not separates_by_kl:
        return names, []
    number_of_groups = len(groups_of(frame, names))
    if number_of_groups <= MOST_LINES:
        return names, []
    others = [name for name in names if name not in (*KL_KEYS, NAME) and frame[name].nunique() > 1]
    if NAME in names and len(groups_of(frame, [*others, LABEL])) < number_of_groups:
        return names, []  # the names separate what no other key does
    with_kl = frame[frame[FAMILY] != NO_KL]
    families = with_kl[FAMILY].nunique()
    betas = with_kl[BETA].nunique()
    line = FAMILY
    panel = BETA
    # The key with fewer values makes the panels.
    if betas > families:
        line = BETA
        panel = FAMILY
    if min(families, betas) <= 1:
        return [line], others
    return [line], [*others, panel]


def group_title(keys: Sequence[str], values: Sequence[str]) -> str:
    """The values of ``keys``, with the names of those keys that need them."""
    parts = []
    for key, value in zip(keys, values, strict=True):
        if key == BETA:
            parts.append(f"beta {value}")
        elif key in SELF_EXPLANATORY:
            parts.append(value)
        else:
            parts.append(f"{short(key)}={value}")
    return ", ".join(parts)


def _no_kl(keys: Sequence[str], values: Sequence[str]) -> str:
    title = group_title(keys, values)
    if not title:
        return NO_KL
    return f"{title}, {NO_KL}"


def line_label(groups: Sequence[str], values: Sequence[str]) -> str:
    """The name of a line: its values, ``no KL`` for whatever has none."""
    given = dict(zip(groups, values, strict=True))
    is_named_no_kl = NO_KL in (given.get(FAMILY), given.get(LABEL))
    # Where families are panels, a line is a beta, and runs without KL are beta 0.
    is_beta_0 = given.get(BETA) == "0" and FAMILY not in given
    if is_named_no_kl or is_beta_0:
        others = [key for key in groups if key not in KL_KEYS]
        return _no_kl(others, [given[key] for key in others])
    return group_title(groups, values) or "all runs"


def plain_words(text: str) -> str:
    """A title or legend entry without raw keys.

    >>> plain_words("optimizer.lr=0.1, k1_reverse_token in reward to_go")
    'learning rate 0.1, k1 in reward to go'
    """
    text = _KEY_AND_EQUALS.sub(lambda match: f"{key_label(match[1])} ", text)
    for part, words in WORDS.items():
        text = text.replace(part, words)
    return text


def in_words(text: str) -> str:
    """:func:`plain_words` as matplotlib shows them: ``$`` would start a formula, a ``_`` in front hide an entry."""
    return plain_words(text).replace("$", r"\$")


def line_of(groups: Sequence[str], values: Sequence[str], members: pd.DataFrame) -> Line:
    """The line of a group of runs: its label and its KL family."""
    families: list[str] = []
    if FAMILY in members:
        families = [str(family) for family in members[FAMILY].unique()]
    family = family_of_runs(dict(zip(groups, values, strict=True)), families)
    # A term with beta 0 does not act.
    if BETA in members and set(members[BETA].astype(str)) == {"0.0"}:
        family = NO_KL
    return Line(label=line_label(groups, values), family=family)


def looks_of_panels(parts: Panels, groups: Sequence[str]) -> dict[Line, LineLook]:
    """The look of each line in any panel. Where families are panels, one label has a line of each family."""
    lines: dict[Line, dict[str, str]] = {}
    for _, runs in parts:
        for values, members in groups_of(runs, groups):
            line = line_of(groups, values, members)
            lines[line] = values_beside_family(dict(zip(groups, values, strict=True)))
    return line_looks(lines)


def _labels_of_several_families(looks: Iterable[Line]) -> set[str]:
    """Labels of lines that have one colour in a panel and another one elsewhere."""
    families: dict[str, set[str]] = {}
    for line in looks:
        families.setdefault(line.label, set()).add(line.family)
    return {label for label, names in families.items() if len(names) > 1}


def _gid(axes: Axes, kind: str, place: int, family: str) -> str:
    """The id of a drawn thing in an SVG: what it is, its panel, its place there and its KL family."""
    subplot = axes.get_subplotspec()
    assert subplot is not None  # every panel is a subplot of _layout's grid
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", family) or "none"
    return f"{kind}.{subplot.num1}.{place}.{name}"


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

    ``points``: metric to columns run_id, step, value (:func:`kl_comedy.tracking.runs.history`). ``smooth`` replaces
    each value by the mean of the run's last so many. Metrics in ``log`` get a logarithmic axis: values not above 0 are
    left out, a line is the geometric mean and its band the interval of the logarithms. A band is drawn where a line has
    at least :data:`SEEDS_OF_AN_INTERVAL` seeds; a line of fewer has its runs as thin lines. ``columns`` of panels: as
    many as fit by default. Raises :class:`UserError` when a metric has no point to draw.
    """
    parts = panels_of(frame, panels)
    lines = [key for key in groups if key not in panels]
    # Each run before the mean over runs, so that the band is that of smoothed runs.
    smoothed = {metric: smooth_curves(values, smooth) for metric, values in points.items()}
    curves_of_panels: dict[str, list[list[_Curve]]] = {}
    for metric, values in smoothed.items():
        bounds = metric_range(metric, values["value"])
        curves_of_panels[metric] = [_curves_of(values, runs, lines, bounds, log=metric in log) for _, runs in parts]
        if not any(curves_of_panels[metric]):
            condition = ""
            if metric in log:
                condition = " above 0, as --log needs,"
            raise UserError(f"--metric: no finite point{condition} of {metric!r} in these {len(frame)} runs")
    drawn = [curve for panel_curves in curves_of_panels.values() for curves in panel_curves for curve in curves]
    looks = looks_of_panels(parts, lines)
    seed_counts = _seed_counts(drawn)
    common_count = _common_count(seed_counts)
    names = {label: _curve_name(label, counts, common_count) for label, counts in seed_counts.items()}

    figure, grid = _layout(parts, len(points), share=True, columns=columns)
    for row, (metric, panel_curves) in zip(grid, curves_of_panels.items(), strict=True):
        for axes, curves in zip(row, panel_curves, strict=True):
            _draw_curves(axes, curves, names, looks)
            if metric in log:
                axes.set_yscale("log")
        # All panels of a metric share the axis.
        _limit_curves(row[0], smoothed[metric]["value"], log=metric in log)
        _name_axes(row, "optimizer updates", metric, _notes_of_axis(smooth, log=metric in log))

    most_seeds = [curve.most_seeds for curve in drawn]
    title = _what_is_drawn(_middle_of_curves(points, log), most_seeds, common_count)
    if any(curve.is_cut for curve in drawn):
        title += "; bands are cut at the range of the metric"
    if LABEL in lines:
        title += "; number before a term: beta"
    in_black = _labels_of_several_families(curve.line for curve in drawn)
    legend_below(figure, title, _black_entries(in_black, names, looks))
    return figure


def _notes_of_axis(smooth: int, *, log: bool) -> list[str]:
    """What the label of an axis says beside metric and unit."""
    notes = []
    if log:
        notes.append("log axis")
    if smooth > 1:
        notes.append(f"mean of last {smooth} points")
    return notes


def _black_entries(labels: Collection[str], names: Mapping[str, str], looks: Looks) -> list[Line2D]:
    """A legend's entries of lines whose colour is that of their panel's family: line style and marker are common."""
    from matplotlib.lines import Line2D

    entries = []
    for line, style in looks.items():
        if line.label in labels:
            options = style.of_line() | {"color": SEVERAL_FAMILIES}
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
        return in_words(label)
    n = str(min(counts))
    if len(counts) > 1:
        n = f"{min(counts)}–{max(counts)}"
    return in_words(f"{label} (n={n})")


def _draw_curves(axes: Axes, curves: Sequence[_Curve], names: Mapping[str, str], looks: Looks) -> None:
    """Bands below single runs, and these below the means; open marks below filled ones."""
    # Many bands over one another would hide the lines.
    shade = 0.15
    if len(curves) >= 4:
        shade = 0.07
    for place, curve in enumerate(curves):
        style = looks[curve.line]
        family = curve.line.family
        mean = curve.mean
        if curve.has_band:
            band_of_mean = axes.fill_between(
                mean["step"], mean["low"], mean["high"], color=style.colour, alpha=shade, linewidth=0, zorder=1.0
            )
            band_of_mean.set_gid(_gid(axes, "band", place, family))
        elif len(curve.seeds) > 1:
            for number, single in enumerate(curve.seeds):
                options: dict[str, Any] = {"color": style.colour, "alpha": 0.5, "linewidth": 0.5, "zorder": 1.7}
                options["gid"] = _gid(axes, f"run{number}", place, family)
                axes.plot(single["step"], single["value"], **options)
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
            gid=_gid(axes, "mean", place, family),
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


def _what_is_drawn(middle: str, seed_counts: Collection[int], common_count: str) -> str:
    """The mean ``middle`` and what is drawn beside it: intervals, single runs, or both, by the lines' numbers of seeds.

    ``common_count`` is the number of seeds of every point of every line; empty where they differ.
    """
    if common_count == "1":
        return "one run each"
    seeds = "seeds"
    if common_count:
        seeds = f"{common_count} seeds"
    have_interval = [count >= SEEDS_OF_AN_INTERVAL for count in seed_counts]
    if all(have_interval):
        if common_count:
            return f"{middle} and 95% interval of {seeds}"
        return f"{middle} and 95% interval over seeds"
    fewest = SEEDS_OF_AN_INTERVAL
    if not any(have_interval):
        return f"{middle} of {seeds}, single runs thin or small (no interval below {fewest} seeds)"
    return f"{middle} over seeds; 95% interval from {fewest} seeds on, below that single runs, thin or small"


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
        return self.most_seeds >= SEEDS_OF_AN_INTERVAL

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
        finite = points[points["run_id"].isin(seeds.index) & (points["value"].abs() < math.inf)]
        seed_of_point = finite["run_id"].map(seeds).rename("seed")
        # Runs of one seed are not independent, so their mean at a step is one observation of the band.
        values = finite.groupby([seed_of_point, "step"], sort=False)["value"].mean().reset_index()
        mean = band(values, log=log)
        if len(mean) == 0:
            continue
        enough = mean["n"] >= SEEDS_OF_AN_INTERVAL
        mean = mean.assign(low=mean["low"].where(enough), high=mean["high"].where(enough))
        is_cut = bool((mean["low"] < low).any() or (mean["high"] > high).any())
        mean = mean.assign(low=mean["low"].clip(lower=low), high=mean["high"].clip(upper=high))
        shown = values
        if log:
            shown = values[values["value"] > 0]
        singles = [single for _, single in shown.groupby("seed", sort=False)]
        curves.append(_Curve(line=line_of(groups, keys, members), mean=mean, seeds=singles, is_cut=is_cut))
    return curves


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

    The size of a mark is its beta, and a hollow one collapsed. A mark of fewer than :data:`SEEDS_OF_AN_INTERVAL` seeds
    has its runs as small marks and no bars. KL is on a logarithmic axis where all of it is above 0. Raises
    :class:`UserError` where no run has what is drawn.
    """
    parts = panels_of(frame, panels)
    lines = [key for key in groups if key not in panels]
    looks = looks_of_panels(parts, lines)
    sizes = _mark_sizes(frame)
    first: Panels = []
    if certificates:
        _check_certificates(frame)
        first = [("certificates", frame)]
        # The panel of the certificates pools all others.
        looks = looks_of_panels([*first, *parts], lines)
    figure, grid = _layout([*first, *parts], len(metrics))
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
        for axes, (_, runs) in zip(row[len(first) :], parts, strict=True):
            placed = runs.assign(x=runs[kl].where(finite[runs.index]), y=runs[f"metrics.{metric}"])
            for line, members in _members_of_lines(placed, lines).items():
                spots_of_line = _spots(members, ranges, log=log)
                _draw_line(axes, line, spots_of_line, looks[line], sizes)
                spots += spots_of_line
            _limit_frontier(axes, placed, ranges, log=log)
        _name_axes(row, axis_label(short(kl), 40, _notes_of_axis(1, log=log)), metric)
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
    title = _what_is_drawn("mean", seed_counts, common_count)
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
    return {line_of(groups, values, members): members for values, members in groups_of(frame, groups)}


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
    # From just above a line's width to as large as marks can be without hiding each other.
    return {beta: 3.0 + 3.5 * (place + 1) / len(betas) for place, beta in enumerate(betas)}


def _frontier_marks(looks: Looks, sizes: Mapping[str, float], *, has_collapsed: bool) -> list[Line2D]:
    """The legend's entries: groups by colour and marker, betas by size, collapsed runs by how a mark is filled."""
    from matplotlib.lines import Line2D

    def plain_mark(label: str, **options: Any) -> Line2D:
        # Black is the colour of no family; grey would be runs without KL.
        return Line2D([], [], marker="o", label=label, color="black", linestyle="none", **options)

    marks = []
    in_black = _labels_of_several_families(looks)
    labels: set[str] = set()
    for line, style in looks.items():
        if line.label in labels:
            continue
        labels.add(line.label)
        options = style.of_mark()
        if style.shows_dash:
            options["linestyle"] = style.dash
        if line.label in in_black:
            options["color"] = SEVERAL_FAMILIES
        marks.append(Line2D([], [], label=in_words(line.label), **options))
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
            dash = style.dash if style.shows_dash else "-"
        options: dict[str, Any] = {"color": style.colour, "alpha": 0.5, "linewidth": 0.9, "zorder": 1.8}
        options["gid"] = _gid(axes, f"join{place}", 0, line.label)
        axes.plot([left.x, right.x], [left.y, right.y], linestyle=dash, **options)
    for place, spot in enumerate(spots):
        size = sizes.get(spot.beta, 5.0)
        name = f"{line.label}-{spot.beta}"
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
            small = mark | {"markersize": 2.6, "alpha": 0.55, "zorder": 2.0, "fillstyle": "full", "markeredgewidth": 0}
            axes.plot(*zip(*spot.seeds, strict=True), gid=_gid(axes, f"runs{place}", 0, name), **small)
        mark |= {"markersize": size, "zorder": MARK_LAYERS[spot.fill]}
        axes.plot([spot.x], [spot.y], gid=_gid(axes, f"mark-{spot.fill}", place, name), **mark)


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
    interval_of_kl = geometric_interval if log else interval
    spots = []
    for (beta,), runs in groups_of(members, [BETA]):
        placed = runs[runs["x"].notna()]
        if placed.empty:
            continue
        kls = by_seed(placed, "x")
        rewards = by_seed(placed, "y")
        kl = interval_of_kl(kls)
        reward = interval(rewards)
        # A placed run has both values, so that neither mean is None.
        assert kl.mean is not None
        assert reward.mean is not None
        x_bar = None
        y_bar = None
        is_cut = False
        seeds: list[tuple[float, float]] = []
        if reward.n >= SEEDS_OF_AN_INTERVAL:
            x_bar, x_is_cut = _reach(kl, ranges.x)
            y_bar, y_is_cut = _reach(reward, ranges.y)
            is_cut = x_is_cut or y_is_cut
        elif reward.n > 1:
            seeds = list(zip(kls, rewards, strict=True))
        spots.append(
            _Spot(
                x=kl.mean,
                y=reward.mean,
                n=reward.n,
                x_bar=x_bar,
                y_bar=y_bar,
                is_cut=is_cut,
                seeds=seeds,
                beta=beta,
                fill=_fill_style(runs),
            )
        )
    # By KL and not by beta: a line that went back and forth could not be read off.
    return sorted(spots, key=lambda spot: spot.x)


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
    return [[below], [above]], bar.low < low or bar.high > high


def _draw_certificates(axes: Axes, frame: pd.DataFrame, groups: Sequence[str], looks: Looks) -> None:
    for place, (line, members) in enumerate(_members_of_lines(frame, groups).items()):
        # A group has one configuration, so the certificates of its runs are the same.
        known = members[[BIAS, VARIANCE]].dropna().astype(float)[:1]
        axes.plot(
            known[BIAS], known[VARIANCE], gid=_gid(axes, "certificate", place, line.label), **looks[line].of_mark()
        )
    axes.set_xlabel("relative bias of the gradient\n(0: optimizes KL(π‖ref))")
    axes.set_ylabel("relative variance\nof the gradient (log axis)")
    # An exact gradient has variance 0, which a logarithmic axis cannot show.
    axes.set_yscale("symlog", linthresh=0.1)
    plain_ticks(axes.yaxis)


@paper_style()
def heatmap(frame: pd.DataFrame, metrics: Sequence[str], panels: Sequence[str]) -> Figure:
    """KL family by beta: the mean over the seeds of a cell. Runs without KL are one row.

    Raises :class:`UserError` for a metric that no run has.
    """
    with_kl = frame[frame[FAMILY] != NO_KL]
    families = list(dict.fromkeys(frame[FAMILY].astype(str)))
    betas = sorted(set(with_kl[BETA].astype(str)), key=sort_key) or ["0"]
    parts = panels_of(frame, [key for key in panels if key not in KL_KEYS])
    # Inches: 1.9 for the families' names and the colour bar, 0.6 for a column of cells with its text.
    columns = min(len(parts), max(1, int((PAGE - 1.9) / (0.6 * len(betas)))))
    width = max(COLUMN, min(PAGE, 2.2 + 0.62 * len(betas) * columns))
    row_height = 0.45 + 0.4 * len(families)
    figure, grid = _layout(parts, len(metrics), columns=columns, size=(width, row_height))
    for axes_of_metric, metric in zip(grid, metrics, strict=True):
        cells_of_panels = [_cells(runs, f"metrics.{metric}", families, betas) for _, runs in parts]
        known: list[float] = []
        seed_counts: set[int] = set()
        for cells in cells_of_panels:
            known += cells.means.values()
            seed_counts.update(cells.seeds.values())
        if not known:
            raise UserError(f"--metric: no run has a finite {metric!r}")
        for axes, cells, (_, runs) in zip(axes_of_metric, cells_of_panels, parts, strict=True):
            # All panels of a metric have one scale of colours, which the colour bar of the last one shows.
            image = axes.imshow(cells.image(), cmap="viridis", aspect="auto", vmin=min(known), vmax=max(known))
            _write_cells(axes, image, cells, runs, with_counts=len(seed_counts) > 1)
            names = ["\n".join(textwrap.wrap(in_words(name), 18)) for name in families]
            axes.set_xticks(range(len(betas)), betas)
            axes.set_yticks(range(len(families)), names)
            axes.grid(visible=False)
            axes.set_xlabel("beta")
            axes.label_outer(remove_inner_ticks=True)
        seeds = "mean over seeds"
        if len(seed_counts) == 1:
            seeds = f"mean of {min(seed_counts)} seeds"
        words, unit = metric_label(metric)
        in_brackets = seeds
        if unit:
            in_brackets = f"{unit}, {seeds}"
        text = "\n".join(textwrap.wrap(f"{words} ({in_brackets})", 30))
        figure.colorbar(image, ax=axes_of_metric, label=text, aspect=30)
    return figure


class _Cells(NamedTuple):
    """The cells of a heatmap: a row for each family and a column for each beta."""

    families: Sequence[str]
    betas: Sequence[str]
    means: Mapping[tuple[str, str], float]
    """Mean over seeds by family and beta; runs without KL are beta 0. Cells without a finite value are left out."""
    seeds: Mapping[tuple[str, str], int]
    """Number of seeds by family and beta."""

    def mean(self, family: str, beta: str) -> float:
        """What a cell shows: NaN where there is no value, one value in the whole row of the runs without KL."""
        if family == NO_KL:
            beta = "0"
        return self.means.get((family, beta), math.nan)

    def image(self) -> list[list[float]]:
        return [[self.mean(family, beta) for beta in self.betas] for family in self.families]


def _cells(frame: pd.DataFrame, column: str, families: Sequence[str], betas: Sequence[str]) -> _Cells:
    finite = frame[frame[column].abs() < math.inf]
    means_of_seeds = finite.groupby([FAMILY, BETA, seeds_of(finite).rename("seed")])[column].mean()
    cells = means_of_seeds.groupby(level=[0, 1])
    # The cast: pandas' types do not say that the keys of an index with two levels are pairs.
    means = cast("dict[tuple[str, str], float]", cells.mean().to_dict())
    seeds = cast("dict[tuple[str, str], int]", cells.size().to_dict())
    return _Cells(families=families, betas=betas, means=means, seeds=seeds)


def _write_cells(axes: Axes, image: AxesImage, cells: _Cells, runs: pd.DataFrame, *, with_counts: bool) -> None:
    """Write the mean into each cell that has a run, the number of seeds where it differs, and the collapsed runs."""
    import numpy as np

    # Sorted: a figure's bytes depend on the order of its texts, and the same data must give the same bytes.
    for (family, beta), members in sorted(groups_of(runs, [FAMILY, BETA]), key=itemgetter(0)):
        mean = cells.mean(family, beta)
        column_place = (len(cells.betas) - 1) / 2
        # Runs without KL have one text in the middle of their row, whose cells are all the same.
        if family != NO_KL:
            column_place = cells.betas.index(beta)
        text = "-"
        colour = "k"
        if not math.isnan(mean):
            text = f"{mean:.3g}"
            # The cast: the norm of one number is a number, which matplotlib's types do not say.
            brightness = cast("float", image.norm(np.asarray(mean)))
            if brightness < 0.6:
                colour = "w"
        if with_counts:
            text += f"\nn={cells.seeds.get((family, beta), 0)}"
        collapsed = collapsed_runs(members)
        if collapsed:
            text += f"\n{collapsed} of {len(members)}\ncollapsed"
        row = cells.families.index(family)
        axes.text(column_place, row, text, ha="center", va="center", fontsize=6, color=colour)


def _layout(
    panels: Panels, metrics: int, *, share: bool = False, columns: int = 0, size: tuple[float, float] | None = None
) -> tuple[Figure, list[list[Axes]]]:
    """A figure and its axes, ``[metric][panel]``, those of one metric with the same scales where they ``share``.

    One panel: metrics in two columns. Several: those of one metric below those of another, in up to four columns, as
    fill the rows best. ``size`` is the width of the figure and the height of a row.
    """
    single_panel = len(panels) == 1
    if columns == 0 and single_panel:
        columns = min(metrics, 2)
    elif columns == 0:
        # The widest of four to two columns that leaves the fewest places empty.
        columns = min(range(min(len(panels), 4), 1, -1), key=lambda n: -len(panels) % n)
    if size is None:
        width = PAGE if columns > 1 else COLUMN
        height = ROW_HEIGHTS[columns]
    else:
        width, height = size
    # Places of the grid for each metric: whole rows, except that single panels share them.
    places = 1 if single_panel else math.ceil(len(panels) / columns) * columns
    rows = math.ceil(metrics * places / columns)
    figure = new_figure(width, height * rows)
    flat = list(figure.subplots(rows, columns, squeeze=False).flat)
    blocks = [flat[start : start + len(panels)] for start in range(0, metrics * places, places)]
    # Places that no panel fills would show empty axes.
    for axes in set(flat).difference(*blocks):
        axes.set_axis_off()
    for block in blocks:
        for axes, (title, _) in zip(block, panels, strict=True):
            if share and axes is not block[0]:
                axes.sharex(block[0])
                axes.sharey(block[0])
            axes.set_title(_wrapped_title(in_words(title), width / columns))
    return figure, blocks


def _wrapped_title(title: str, width: float) -> str:
    """A panel's title on lines that do not reach into the next panel, which begins after ``width`` inches."""
    # Inches: 0.45 for the labels of the axis, and 0.06 for a character.
    return "\n".join(textwrap.wrap(title, int((width - 0.45) / 0.06)))


def _name_axes(row: Sequence[Axes], x: str, metric: str, notes: Sequence[str] = ()) -> None:
    """``x`` below the panels with none beneath them, ``metric`` in words with ``notes`` at the left ones."""
    place = row[0].get_subplotspec()
    assert place is not None  # every panel is a subplot of _layout's grid
    columns = place.get_gridspec().ncols
    for axes in row[-columns:]:
        axes.set_xlabel(x)
    for axes in row[::columns]:
        axes.set_ylabel(axis_label(metric, 34 if columns <= 2 else 24, notes))
