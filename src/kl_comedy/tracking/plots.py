"""Pictures of runs: curves over updates, reward against KL, certificates beside outcomes, KL family x beta.

A line or mark is a group of runs: its mean over seeds with the 95% interval; on a logarithmic axis the geometric mean
and the interval of the logarithms. A KL family looks the same in every figure of a study. Collapsed runs are drawn
hollow, and a group's mean includes them.
"""

from __future__ import annotations

import itertools
import math
import textwrap
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kl_comedy.errors import UserError
from kl_comedy.statistics import Interval, geometric_interval, interval
from kl_comedy.tracking.compare import band, by_seed, collapsed_runs, groups_of, seeds_of
from kl_comedy.tracking.figures import (
    COLOURS,
    COLUMN,
    MARKERS,
    PAGE,
    WITHOUT_KL,
    Look,
    legend_below,
    look,
    new_figure,
    paper_style,
    plain_ticks,
)
from kl_comedy.tracking.metric_labels import axis_label, metric_label
from kl_comedy.tracking.runs import BETA, FAMILY, LABEL, NO_KL, family_of, short, sort_key

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from matplotlib.lines import Line2D

MOST_LINES = 8
"""More lines than this cannot be told apart in one panel."""

DECADES = 5
"""A logarithmic axis of curves shows at most so many below the largest value."""

METHODS = (
    "k1_reverse_token in reward total before baseline",
    "k3_reverse_token in loss",
    "k1_reverse_token in loss",
    "k3_reverse_token in reward total before baseline",
    "k2_reverse_token in loss",
    "k1_reverse_token in reward to_go",
    "exact_reverse_token in loss",
    "exact_reverse_token in reward to_go",
)
"""The KL families with a colour and a marker of their own, in the order of :func:`kl_comedy.tracking.figures.look`."""

OTHER_LOOKS = [at for at in range(len(COLOURS) * len(MARKERS)) if at % len(MARKERS) >= len(METHODS)]
"""Another family has one of these, by a hash of its name; the next one where two in a figure would have the same."""

WORDS = {
    "_reverse_token": "",
    "exact in": "exact KL in",
    "optimizer.lr=": "learning rate ",
    "algorithm.updates_per_batch=": "updates of a batch: ",
    "lag.steps=": "lag ",
    "_": " ",
}
"""What titles and legends write instead of parts of KL labels and keys. KL is reverse and per token where nothing else
is said."""

KL_KEYS = (FAMILY, BETA, LABEL)
NAME = "params.name"
SELF_EXPLANATORY = (FAMILY, LABEL, NAME, "tags.sweep")
"""Keys whose values need no name beside them."""

BIAS = "tags.kl.relative_bias"
VARIANCE = "tags.kl.variance"
ROW_HEIGHTS = {1: 2.5, 2: 2.5, 3: 2.3, 4: 2.0}
"""Inches: the height of a row of panels, by the number of columns."""

Looks = Mapping[str, Look]
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


def in_words(text: str) -> str:
    """A title or legend entry without raw keys, as matplotlib shows it: ``$`` would start a formula, and a leading
    ``_`` would hide a legend entry.

    >>> in_words("optimizer.lr=0.1, k1_reverse_token in reward to_go")
    'learning rate 0.1, k1 in reward to go'
    """
    for key, words in WORDS.items():
        text = text.replace(key, words)
    return text.replace("$", r"\$")


def styles(lines: Iterable[str], families: Iterable[str] | None = None) -> dict[str, Look]:
    """The look of each line: by its KL family where ``families`` names a different one for each, else by its place.

    Without KL is grey and dotted.
    """
    if families is None:
        family_of_line = dict.fromkeys(lines, "")
    else:
        family_of_line = dict(zip(lines, families, strict=True))
    looks: dict[str, Look] = {}
    if NO_KL in family_of_line:
        looks[NO_KL] = WITHOUT_KL
    labels = [label for label in family_of_line if label != NO_KL]
    names = [family_of_line[label] for label in labels]
    # Without names, or with one for two lines, a look by family would be ambiguous.
    is_ambiguous = "" in names or len(set(names)) < len(names)
    if is_ambiguous or len(names) > len(OTHER_LOOKS):
        for number, label in enumerate(labels):
            looks[label] = look(number)
        return looks
    look_of_family = {family: number for number, family in enumerate(METHODS)}
    for family in names:
        if family in METHODS:
            continue
        # Not hash(): it differs from process to process, and a family must look the same in every figure.
        place = zlib.crc32(family.encode())
        while OTHER_LOOKS[place % len(OTHER_LOOKS)] in look_of_family.values():
            place += 1
        look_of_family[family] = OTHER_LOOKS[place % len(OTHER_LOOKS)]
    for label in labels:
        looks[label] = look(look_of_family[family_of_line[label]])
    return looks


def _styles_of(frame: pd.DataFrame, groups: Sequence[str]) -> dict[str, Look]:
    """:func:`styles` of the groups of ``frame`` as lines."""
    lines: dict[str, str] = {}
    for values, _ in groups_of(frame, groups):
        given = dict(zip(groups, values, strict=True))
        family = given.get(FAMILY, "")
        if not family:
            family, _ = family_of(given.get(LABEL, ""))
        lines[line_label(groups, values)] = family
    return styles(lines, lines.values())


@paper_style()
def plot_curves(
    points: Mapping[str, pd.DataFrame],
    frame: pd.DataFrame,
    groups: Sequence[str],
    *,
    panels: Sequence[str] = (),
    log: Collection[str] = (),
    smooth: int = 1,
) -> Figure:
    """The figure of metrics over updates, a row of panels for each; a line is the mean over a group's runs.

    ``points``: metric to columns run_id, step, value (:func:`kl_comedy.tracking.runs.history`). ``smooth`` replaces
    each value by the mean of the run's last so many. Metrics in ``log`` get a logarithmic axis: values not above 0 are
    left out, a line is the geometric mean and its band the interval of the logarithms. Raises :class:`UserError` when
    a metric has no point to draw.
    """
    parts = panels_of(frame, panels)
    lines = [key for key in groups if key not in panels]
    # Each run before the mean over runs, so that the band is that of smoothed runs.
    smoothed = {metric: smooth_curves(values, smooth) for metric, values in points.items()}
    curves_of_panels: dict[str, list[dict[str, pd.DataFrame]]] = {}
    for metric, values in smoothed.items():
        curves_of_panels[metric] = [_bands(values, runs, lines, log=metric in log) for _, runs in parts]
        if not any(curves_of_panels[metric]):
            condition = ""
            if metric in log:
                condition = " above 0, as --log needs,"
            raise UserError(f"--metric: no finite point{condition} of {metric!r} in these {len(frame)} runs")
    seed_counts = _seed_counts(curves_of_panels)
    looks = {label: style for label, style in _styles_of(frame, lines).items() if label in seed_counts}
    common_count = _common_count(seed_counts)
    names = {label: _curve_name(label, counts, common_count) for label, counts in seed_counts.items()}

    figure, grid = _layout(parts, len(points), share=True)
    for row, (metric, panel_curves) in zip(grid, curves_of_panels.items(), strict=True):
        for axes, curves in zip(row, panel_curves, strict=True):
            _draw_curves(axes, curves, names, looks)
            if metric in log:
                axes.set_yscale("log")
        # All panels of a metric share the axis.
        _limit_curves(row[0], smoothed[metric]["value"], log=metric in log)
        _name_axes(row, "optimizer updates", metric)

    title = _curves_title(points, log, common_count)
    if smooth > 1:
        title += f"; each point: mean of a run's last {smooth}"
    if LABEL in lines:
        title += "; number before a term: beta"
    legend_below(figure, title)
    return figure


def _seed_counts(curves_of_panels: Mapping[str, list[dict[str, pd.DataFrame]]]) -> dict[str, set[int]]:
    """Label of a line to the numbers of seeds that its points have, over all metrics and panels."""
    counts: dict[str, set[int]] = {}
    for panel_curves in curves_of_panels.values():
        for curves in panel_curves:
            for label, curve in curves.items():
                counts.setdefault(label, set()).update(curve["n"])
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


def _draw_curves(axes: Axes, curves: Mapping[str, pd.DataFrame], names: Mapping[str, str], looks: Looks) -> None:
    """Lines with their bands. Many bands over one another are paler, or they would hide the lines."""
    shade = 0.15 if len(curves) < 4 else 0.07
    for place, (label, curve) in enumerate(curves.items()):
        style = looks[label]
        # Markers of different lines at different steps, so that lines on top of one another stay visible.
        stride = max(1, len(curve) // 8)
        axes.plot(curve["step"], curve["mean"], label=names[label], markevery=(place % stride, stride), **style)
        axes.fill_between(curve["step"], curve["low"], curve["high"], color=style["color"], alpha=shade, linewidth=0)


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


def _curves_title(metrics: Collection[str], log: Collection[str], common_count: str) -> str:
    """What a line and a band are."""
    if common_count == "1":
        return "one run each"
    logarithmic = [metric for metric in metrics if metric in log]
    if not logarithmic:
        middle = "mean"
    elif len(logarithmic) == len(metrics):
        middle = "geometric mean"
    else:
        middle = "mean (log: geometric)"
    if not common_count:
        return f"{middle} and 95% interval over seeds"
    return f"{middle} and 95% interval of {common_count} seeds"


def smooth_curves(points: pd.DataFrame, last: int) -> pd.DataFrame:
    """``points`` (run_id, step, value; steps ascending within a run) with each value the mean of the ``last`` up to it,
    fewer at the start. Values that are not finite are left out of a mean."""
    if last <= 1 or points.empty:
        return points
    windows = points.groupby("run_id", sort=False)["value"].rolling(last, min_periods=1)
    return points.assign(value=windows.mean().reset_index(level=0, drop=True))


def _bands(points: pd.DataFrame, frame: pd.DataFrame, groups: Sequence[str], *, log: bool) -> dict[str, pd.DataFrame]:
    """Label of a line to its band over seeds, for those groups that have a point to draw."""
    curves = {}
    for keys, members in groups_of(frame, groups):
        seeds = seeds_of(members.set_index("run_id", drop=False))
        finite = points[points["run_id"].isin(seeds.index) & (points["value"].abs() < math.inf)]
        seed_of_point = finite["run_id"].map(seeds).rename("seed")
        # Runs of one seed are not independent, so their mean at a step is one observation of the band.
        values = finite.groupby([seed_of_point, "step"], sort=False)["value"].mean()
        curve = band(values.reset_index(), log=log)
        if len(curve) > 0:
            curves[line_label(groups, keys)] = curve
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

    The size of a mark is its beta, and a hollow one collapsed. KL is on a logarithmic axis where all of it is above 0.
    Raises :class:`UserError` where no run has what is drawn.
    """
    parts = panels_of(frame, panels)
    lines = [key for key in groups if key not in panels]
    looks = _styles_of(frame, lines)
    sizes = _mark_sizes(frame)
    first: Panels = []
    if certificates:
        _check_certificates(frame)
        first = [("certificates", frame)]
    figure, grid = _layout([*first, *parts], len(metrics))
    scale = ""
    for row, metric in zip(grid, metrics, strict=True):
        # A run has a place only if both of its values are known.
        finite = (frame[f"metrics.{metric}"].abs() < math.inf) & (frame[kl].abs() < math.inf)
        if not finite.any():
            raise UserError(f"--metric: no run has a finite {metric!r} and {short(kl)!r}")
        log = bool((frame.loc[finite, kl] > 0).all())
        scale = ""
        if log:
            scale = " (of KL in logarithms)"
        for axes, (_, runs) in zip(row[len(first) :], parts, strict=True):
            placed = runs.assign(x=runs[kl].where(finite[runs.index]), y=runs[f"metrics.{metric}"])
            _draw_frontier(axes, placed, lines, looks, sizes, log=log)
        _name_axes(row, axis_label(short(kl), 40), metric)
        if certificates:
            row[1].set_ylabel(row[0].get_ylabel())
            _draw_certificates(row[0], frame, lines, looks)
    title = f"mean and 95% interval over seeds{scale}, cut at the edges"
    legend_below(figure, title, _frontier_marks(looks, sizes, has_collapsed=bool(collapsed_runs(frame))))
    return figure


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

    def grey_mark(label: str, **options: Any) -> Line2D:
        return Line2D([], [], marker="o", label=label, color="0.4", linestyle="none", **options)

    marks = [Line2D([], [], label=in_words(label), **style | {"linestyle": "none"}) for label, style in looks.items()]
    marks += [grey_mark(f"beta {beta}", markersize=size) for beta, size in sizes.items()]
    if has_collapsed:
        marks.append(grey_mark("some runs collapsed", fillstyle="left", markerfacecoloralt="white"))
        marks.append(grey_mark("all runs collapsed", fillstyle="none"))
    return marks


class _Spot(NamedTuple):
    """The runs of one group and beta as a mark: their KL and metric, and matplotlib's ``fillstyle``."""

    x: float
    y: float
    x_bar: list[list[float]] | None
    """The interval, below and above the mean; None for a single seed."""
    y_bar: list[list[float]] | None
    beta: str
    fill: str


def _draw_frontier(
    axes: Axes, frame: pd.DataFrame, groups: Sequence[str], looks: Looks, sizes: Mapping[str, float], *, log: bool
) -> None:
    """The betas of each group in the order of their mean KL ``x``, joined by solid lines only where no run collapsed:
    nothing is read off across a collapsed one either. Runs whose ``x`` is missing are not placed."""
    for keys, members in groups_of(frame, groups):
        style = looks[line_label(groups, keys)]
        spots = _spots(members, log=log)
        colour = style["color"]
        for left, right in itertools.pairwise(spots):
            # A dotted line is no frontier: reward_at_kl does not interpolate across a collapsed run.
            dash = ":"
            if left.fill == right.fill == "full":
                dash = "-"
            axes.plot([left.x, right.x], [left.y, right.y], dash, color=colour, alpha=0.5, linewidth=0.9)
        for spot in spots:
            options: dict[str, Any] = {
                "xerr": spot.x_bar,
                "yerr": spot.y_bar,
                "ecolor": (colour, 0.35),
                "elinewidth": 0.6,
                "fmt": style["marker"],
                "color": colour,
                "fillstyle": spot.fill,
                "markerfacecoloralt": "white",
                "markersize": sizes.get(spot.beta, 5.0),
            }
            # Only full marks: without its edge a hollow one would be invisible.
            if spot.fill == "full":
                options |= {"markeredgecolor": "white", "markeredgewidth": 0.4}
            axes.errorbar([spot.x], [spot.y], **options)
    finite = frame[frame["x"].notna()]
    if finite.empty:
        return
    # The axes hold every run, a quarter wider; the bar of two seeds may reach far beyond.
    low = finite["y"].min()
    high = finite["y"].max()
    margin = 0.25 * (high - low) or 0.05 * abs(high) or 0.05
    axes.set_ylim(low - margin, high + margin)
    least = finite["x"].min()
    most = finite["x"].max()
    if log:
        axes.set_xscale("log")
        axes.set_xlim(least / 1.5, most * 1.5)
        plain_ticks(axes.xaxis)
    else:
        axes.set_xlim(min(0.0, 1.3 * least), 1.3 * max(most, 0.1))


def _spots(members: pd.DataFrame, *, log: bool) -> list[_Spot]:
    """A mark for each beta that has a placed run, in the order of their KL."""
    interval_of_kl = geometric_interval if log else interval
    spots = []
    for (beta,), runs in groups_of(members, [BETA]):
        placed = runs[runs["x"].notna()]
        if placed.empty:
            continue
        kl = interval_of_kl(by_seed(placed, "x"))
        reward = interval(by_seed(placed, "y"))
        # A placed run has both values, so that neither mean is None.
        assert kl.mean is not None
        assert reward.mean is not None
        spots.append(
            _Spot(x=kl.mean, y=reward.mean, x_bar=_reach(kl), y_bar=_reach(reward), beta=beta, fill=_fill_style(runs))
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


def _reach(bar: Interval) -> list[list[float]] | None:
    """The bar of an interval, below and above its mean."""
    if bar.mean is None or bar.low is None or bar.high is None:
        return None
    return [[bar.mean - bar.low], [bar.high - bar.mean]]


def _draw_certificates(axes: Axes, frame: pd.DataFrame, groups: Sequence[str], looks: Looks) -> None:
    for keys, members in groups_of(frame, groups):
        # A group has one configuration, so the certificates of its runs are the same.
        known = members[[BIAS, VARIANCE]].dropna().astype(float)[:1]
        axes.plot(known[BIAS], known[VARIANCE], **looks[line_label(groups, keys)] | {"linestyle": "none"})
    axes.set_xlabel("relative bias of the gradient\n(0: optimizes KL(π‖ref))")
    axes.set_ylabel("relative variance\nof the gradient")
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
            axes.set_title(in_words(title))
    return figure, blocks


def _name_axes(row: Sequence[Axes], x: str, metric: str) -> None:
    """``x`` below the panels with none beneath them, ``metric`` in words at the left ones."""
    place = row[0].get_subplotspec()
    assert place is not None  # every panel is a subplot of _layout's grid
    columns = place.get_gridspec().ncols
    for axes in row[-columns:]:
        axes.set_xlabel(x)
    for axes in row[::columns]:
        axes.set_ylabel(axis_label(metric, 34 if columns <= 2 else 24))
