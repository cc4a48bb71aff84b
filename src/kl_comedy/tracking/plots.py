"""Pictures of runs: curves over updates, reward against KL, certificates beside outcomes, estimator x placement.

A line or mark is a group of runs: its mean over seeds with the 95% interval. Groups differ in colour, marker and line
style. Collapsed runs are drawn hollow and counted, and a group's mean includes them. Figures are made without pyplot's
global state and need no display.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError
from kl_comedy.statistics import Interval, t_interval
from kl_comedy.tracking.compare import band, collapsed_runs, groups_of
from kl_comedy.tracking.runs import BETA, FAMILY, LABEL, NO_KL, short

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".png", ".svg", ".pdf")
DPI = 150
PAGE, PANEL, SMALL_PANEL = 16.0, (6.8, 4.2), (3.9, 3.3)
"""Inches: the width of a figure of several panels, the only panel, a panel among others."""

MOST_LINES = 8
"""More lines than this cannot be told apart in one panel."""

KL_KEYS = (FAMILY, BETA, LABEL)
NAME = "params.name"
SELF_EXPLANATORY = (FAMILY, LABEL, NAME, "tags.sweep")
"""Keys whose values need no name beside them."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#882255")
"""Of Okabe and Ito (2008) and Paul Tol, told apart by colour-blind readers too."""

MARKERS = "osD^vP*Xh<>"
LINES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
"""Eight colours, eleven markers, five line styles: no two of 88 groups share colour and marker."""

BIAS, VARIANCE = "tags.kl.relative_bias", "tags.kl.variance"
FRONTIER_LEGEND = "numbers: beta; hollow: runs collapsed, their count where not all; bars: 95%, cut at edges"
Style = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """The runs of ``frame`` under the heading ``title`` (empty: the only panel)."""

    title: str
    frame: pd.DataFrame


def panels_of(frame: pd.DataFrame, keys: Sequence[str]) -> list[Panel]:
    """A panel for each combination of ``keys``.

    Runs without KL are beta 0 of every family. Where ``keys`` separate families or betas, these runs stand in each
    panel that shares their other keys, and have a panel of their own only where there is none.
    """
    import pandas as pd

    if not keys:
        return [Panel(title="", frame=frame)]
    by_kl = FAMILY in frame and not {*keys}.isdisjoint(KL_KEYS)
    shared: dict[tuple[str, ...], pd.DataFrame] = {}
    parts = []
    for values, members in groups_of(frame, keys):
        without_kl = members[FAMILY] == NO_KL if by_kl else members["run_id"].isna()
        if without_kl.any():
            shared[_other_values(keys, values)] = members[without_kl]
        if not without_kl.all():
            parts.append((values, members[~without_kl]))
    panels = []
    for values, members in parts:
        without_kl = shared.get(_other_values(keys, values), members[:0])
        panels.append(Panel(title=group_title(keys, values), frame=pd.concat([without_kl, members])))
    covered = {_other_values(keys, values) for values, _ in parts}
    others = [key for key in keys if key not in KL_KEYS]
    lonely = [(values, members) for values, members in shared.items() if values not in covered]
    return panels + [
        Panel(title=", ".join(filter(None, [group_title(others, values), NO_KL])), frame=members)
        for values, members in lonely
    ]


def lines_and_panels(frame: pd.DataFrame, groups: Sequence[str]) -> tuple[list[str], list[str]]:
    """Line keys and panel keys for groups that may be too many for one panel.

    Up to ``MOST_LINES`` groups are lines of one panel. Beyond, a line is a KL family and a panel a beta, or the other
    way round where that makes fewer panels; other keys make panels.
    """
    names = list(groups)
    if FAMILY not in frame or not {*KL_KEYS} & {*names} or len(groups_of(frame, names)) <= MOST_LINES:
        return names, []
    others = [name for name in names if name not in (*KL_KEYS, NAME) and frame[name].nunique() > 1]
    if NAME in names and len(groups_of(frame, [*others, LABEL])) < len(groups_of(frame, names)):
        return names, []  # the names separate what no other key does
    with_kl = frame[frame[FAMILY] != NO_KL]
    families, betas = with_kl[FAMILY].nunique(), with_kl[BETA].nunique()
    line, panel = (FAMILY, BETA) if betas <= families else (BETA, FAMILY)
    return [line], [*others, panel] if min(families, betas) > 1 else others


def group_title(keys: Sequence[str], values: Sequence[str]) -> str:
    """The values of ``keys``, with the names of those keys that need them."""
    names = ("beta " if key == BETA else "" if key in SELF_EXPLANATORY else f"{short(key)}=" for key in keys)
    return ", ".join(f"{name}{value}" for name, value in zip(names, values, strict=True))


def line_label(groups: Sequence[str], values: Sequence[str]) -> str:
    """The name of a line: its values, ``no KL`` for whatever has none."""
    given = dict(zip(groups, values, strict=True))
    if NO_KL in (given.get(FAMILY), given.get(LABEL)) or (given.get(BETA) == "0" and FAMILY not in given):
        others = [key for key in groups if key not in KL_KEYS]
        return ", ".join(filter(None, [group_title(others, [given[key] for key in others]), NO_KL]))
    return group_title(groups, values) or "all runs"


def styles(labels: Sequence[str]) -> dict[str, Style]:
    """Colour, marker and line style of each label, as matplotlib's keywords; without KL is grey and dotted."""
    found: dict[str, Style] = {}
    for at, label in enumerate(label for label in dict.fromkeys(labels) if label != NO_KL):
        line, marker = LINES[at % len(LINES)], MARKERS[at % len(MARKERS)]
        found[label] = {"color": COLOURS[at % len(COLOURS)], "linestyle": line, "marker": marker}
    return found | {NO_KL: {"color": "0.3", "linestyle": ":", "marker": "p"}}


def save(figure: Any, out: Path | str) -> Path:
    """Write the figure as ``out`` says by its suffix (.png, .svg or .pdf); the path."""
    target = check_suffix(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=DPI, bbox_inches="tight", metadata={"Date": None} if target.suffix == ".svg" else None)
    return target


def check_suffix(out: Path | str) -> Path:
    """``out`` as a path. Raises :class:`UserError` when its suffix names no format we write."""
    target = Path(out)
    if target.suffix.lower() not in SUFFIXES:
        raise UserError(f"--out: got {str(out)!r}; allowed: a file that ends in {', '.join(SUFFIXES)}")
    return target


def plain(text: str) -> str:
    """``$`` would start a formula, and a leading ``_`` would hide a legend entry."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def plot_curves(
    points: Mapping[str, pd.DataFrame],
    frame: pd.DataFrame,
    groups: Sequence[str],
    *,
    panels: Sequence[str] = (),
    log: Collection[str] = (),
    smooth: int = 1,
) -> Any:
    """The figure of metrics over updates, a row of panels for each; a line is the mean over a group's runs.

    ``points``: metric to columns run_id, step, value (:func:`kl_comedy.tracking.runs.history`). ``smooth`` replaces
    each value by the mean of the run's last so many. Metrics in ``log`` get a logarithmic axis, without what is not
    above 0. Raises :class:`UserError` when a metric has no finite point.
    """
    parts = panels_of(frame, panels)
    lines = [key for key in groups if key not in panels]
    smoothed = {metric: smooth_curves(values, smooth) for metric, values in points.items()}
    bands = {metric: [_bands(values, part.frame, lines) for part in parts] for metric, values in smoothed.items()}
    counts: dict[str, set[int]] = {}
    for metric, drawn in bands.items():
        if not any(drawn):
            raise UserError(f"--metric: no finite point of {metric!r} in these {len(frame)} runs")
        for label, curve in itertools.chain.from_iterable(each.items() for each in drawn):
            counts.setdefault(label, set()).update(curve["n"])
    look = styles(list(counts))
    spans = {label: f"{min(n)}–{max(n)}" if len(n) > 1 else str(min(n)) for label, n in counts.items()}
    same = spans[next(iter(spans))] if len(set(spans.values())) == 1 and max(map(len, counts.values())) == 1 else ""
    figure, grid = _layout(parts, len(points), share=True)
    for row, (metric, drawn) in zip(grid, bands.items(), strict=True):
        floor = _smallest_positive(drawn) if metric in log else None
        for axes, curves in zip(row, drawn, strict=True):
            for label, curve in curves.items():
                name = label if same else f"{label} (n={spans[label]})"
                _draw_curve(axes, curve, plain(name), look[label], floor)
            if metric in log:
                axes.set_yscale("log", nonpositive="mask")
        _limit(row[0], smoothed[metric]["value"], floor)  # when all panels, which share the axis, are drawn
        _name_axes(row, "step (optimizer updates)", metric)
    if smooth > 1:
        figure.suptitle(f"each point: mean of a run's last {smooth}", fontsize="x-small", x=0.01, ha="left")
    interval = f"mean and 95% interval {f'of {same}' if same else 'over'} runs"
    _legend(figure, "one run each" if same == "1" else interval)
    return figure


def smooth_curves(points: pd.DataFrame, last: int) -> pd.DataFrame:
    """``points`` (run_id, step, value; steps ascending within a run) with each value the mean of the ``last`` up to it,
    fewer at the start. Values that are not finite are left out of a mean."""
    if last <= 1 or points.empty:
        return points
    windows = points.groupby("run_id", sort=False)["value"].rolling(last, min_periods=1)
    return points.assign(value=windows.mean().reset_index(level=0, drop=True))


def _bands(points: pd.DataFrame, frame: pd.DataFrame, groups: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Label of a line to its band, for those groups that have a finite point."""
    curves = {
        line_label(groups, keys): band(points[points["run_id"].isin(list(members["run_id"]))])
        for keys, members in groups_of(frame, groups)
    }
    return {label: curve for label, curve in curves.items() if len(curve)}


def _smallest_positive(drawn: Sequence[Mapping[str, pd.DataFrame]]) -> float:
    means = [mean for curves in drawn for curve in curves.values() for mean in curve["mean"] if mean > 0]
    return min(means, default=1.0)


def _draw_curve(axes: Any, curve: pd.DataFrame, name: str, style: Style, floor: float | None) -> None:
    """``floor``: the least mean of a logarithmic axis; a band that reaches 0 ends below it instead of vanishing."""
    axes.plot(curve["step"], curve["mean"], label=name, markevery=max(1, len(curve) // 8), markersize=4, **style)
    low = curve["low"] if floor is None else curve["low"].clip(lower=floor / 10)
    axes.fill_between(curve["step"], low, curve["high"], color=style["color"], alpha=0.13, linewidth=0)


def _limit(axes: Any, values: pd.Series, floor: float | None) -> None:
    """Cut bands that reach far beyond the runs' own points, as those of two seeds do."""
    finite = values[values.abs() < math.inf]
    least, most = finite.min(), finite.max()
    if floor is not None:
        axes.set_ylim(floor / 1.3, 1.3 * max(most, floor))
        return
    low, high = axes.get_ylim()
    margin = 0.05 * (most - least) or 0.05 * abs(most) or 0.05
    axes.set_ylim(max(low, least - margin), min(high, most + margin))


def plot_families(
    kind: str, frame: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str], kl: str, panels: Sequence[str] = ()
) -> Any:
    """The figure ``kind`` (frontier, plane, heatmap) of the runs, a row of panels for each metric.

    Raises :class:`UserError` where no run has what is drawn.
    """
    if FAMILY not in frame:
        raise UserError("these runs lack the tag kl.label, by which families are drawn; they were not trained by us")
    if kind == "heatmap":
        return _heatmap(frame, metrics, panels)
    return frontier(frame, groups, metrics, kl, panels, certificates=kind == "plane")


def frontier(
    frame: pd.DataFrame,
    groups: Sequence[str],
    metrics: Sequence[str],
    kl: str,
    panels: Sequence[str] = (),
    *,
    certificates: bool = False,
) -> Any:
    """A metric against KL, a line for each group through its betas in the order of KL; before it, where
    ``certificates``, bias and variance of each group's certificate."""
    for column in (BIAS, VARIANCE) if certificates else ():
        if column not in frame or frame[column].isna().all():
            raise UserError(
                f"--kind: plane needs the tag {short(column)}, which these runs lack: an older version tracked them"
            )
    parts = panels_of(frame, panels)
    lines = [key for key in groups if key not in panels]
    look = styles([line_label(lines, keys) for keys, _ in groups_of(frame, lines)])
    first = [Panel(title="certificates", frame=frame)] if certificates else []
    figure, grid = _layout([*first, *parts], len(metrics))
    for row, metric in zip(grid, metrics, strict=True):
        reached = row[len(first) :]
        for axes, part in zip(reached, parts, strict=True):
            _draw_frontier(axes, part.frame, lines, f"metrics.{metric}", kl, look)
        if not any(axes.lines for axes in reached):
            raise UserError(f"--metric: no run has a finite {metric!r} and {short(kl)!r}")
        _name_axes(row, f"{short(kl)} (nats)", metric)
        if certificates:
            _draw_certificates(row[0], frame, lines, look)
            row[1].set_ylabel(plain(metric))
    _legend(figure, FRONTIER_LEGEND)
    return figure


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A configuration: where its seeds ended. ``collapsed`` of ``runs`` runs."""

    beta: str
    kl: Interval
    reward: Interval
    runs: int
    collapsed: int


def spots(members: pd.DataFrame, metric: str, kl: str) -> list[Spot]:
    """The betas of one group, ordered by mean KL. Runs without a finite metric and KL are counted, not placed."""
    found = []
    for (beta,), side in groups_of(members, [BETA]):
        finite = side[(side[metric].abs() < math.inf) & (side[kl].abs() < math.inf)]
        if len(finite):
            ends = {"kl": t_interval(list(finite[kl])), "reward": t_interval(list(finite[metric]))}
            found.append(Spot(beta=beta, runs=len(side), collapsed=collapsed_runs(side) or 0, **ends))
    return sorted(found, key=lambda spot: spot.kl.mean or 0.0)


def _draw_frontier(
    axes: Any, frame: pd.DataFrame, groups: Sequence[str], metric: str, kl: str, look: Mapping[str, Style]
) -> None:
    """Solid lines only between betas of which no run collapsed: nothing is read off across a collapsed one either."""
    for at, (keys, members) in enumerate(groups_of(frame, groups)):
        label = line_label(groups, keys)
        colour, marker = look[label]["color"], look[label]["marker"]
        line = spots(members, metric, kl)
        for left, right in itertools.pairwise(line):
            ends = [left.kl.mean, right.kl.mean], [left.reward.mean, right.reward.mean]
            axes.plot(*ends, ":" if left.collapsed or right.collapsed else "-", color=colour, alpha=0.5)
        for spot in line:
            where = (spot.kl.mean, spot.reward.mean)
            bars = {"xerr": _error_bar(spot.kl), "yerr": _error_bar(spot.reward), "ecolor": (colour, 0.4)}
            face = "none" if spot.collapsed else colour
            mark = {"fmt": marker, "color": colour, "markerfacecolor": face, "markersize": 5, "elinewidth": 0.7}
            axes.errorbar(*([x] for x in where), label=plain(label), **bars, **mark)
            note = f"{spot.beta} ({spot.collapsed}/{spot.runs})" if 0 < spot.collapsed < spot.runs else spot.beta
            offset = {"textcoords": "offset points", "xytext": (4, 4 if at % 2 else -9)}
            axes.annotate(plain(note), where, fontsize="xx-small", color=colour, **offset)
    axes.set_xscale("symlog", linthresh=1.0)
    finite = frame[(frame[metric].abs() < math.inf) & (frame[kl].abs() < math.inf)]
    if len(finite):  # the axes hold every run, a quarter wider; the bar of two seeds may reach far beyond
        low, high, most = finite[metric].min(), finite[metric].max(), finite[kl].max()
        margin = 0.25 * (high - low) or 0.05 * abs(high) or 0.05
        axes.set_xlim(min(0.0, 1.3 * finite[kl].min()), 1.3 * max(most, 0.1))
        axes.set_ylim(low - margin, high + margin)


def _error_bar(mean: Interval) -> list[list[float]] | None:
    return None if mean.low is None else [[mean.mean - mean.low], [mean.high - mean.mean]]


def _draw_certificates(axes: Any, frame: pd.DataFrame, groups: Sequence[str], look: Mapping[str, Style]) -> None:
    for keys, members in groups_of(frame, groups):
        known = members[[BIAS, VARIANCE]].dropna().astype(float)
        if len(known):
            style = look[line_label(groups, keys)] | {"linestyle": "none"}
            axes.plot(known[BIAS].iloc[:1], known[VARIANCE].iloc[:1], label=plain(line_label(groups, keys)), **style)
    axes.set_xlabel("relative bias of the gradient (0: optimizes KL(π‖ref))")
    axes.set_ylabel("relative variance of the gradient")
    axes.set_yscale("symlog", linthresh=0.1)


def _heatmap(frame: pd.DataFrame, metrics: Sequence[str], panels: Sequence[str]) -> Any:
    """Estimator by placement (credit and the like with it): the mean over all runs of a cell, with their number."""
    split = frame[FAMILY].astype(str).str.partition(" in ")
    frame = frame.assign(estimator=split[0], placement=split[2].where(split[2] != "", "(none)"))
    rows, columns = list(dict.fromkeys(frame["estimator"])), list(dict.fromkeys(frame["placement"]))
    parts = panels_of(frame, panels)
    single, several = (
        (a + b * len(columns), c + d * len(rows)) for a, b, c, d in ((2.4, 1.3, 1.6, 0.6), (1.2, 1.1, 0.9, 0.55))
    )
    figure, grid = _layout(parts, len(metrics), single, several)
    for line, metric in zip(grid, metrics, strict=True):
        column = f"metrics.{metric}"
        finite = [
            part.frame.assign(value=part.frame[column].where(part.frame[column].abs() < math.inf)) for part in parts
        ]
        cells = [values.groupby(["estimator", "placement"]) for values in finite]
        means = [groups["value"].mean() for groups in cells]
        known = [value for mean in means for value in mean.dropna()]
        if not known:
            raise UserError(f"--metric: no run has a finite {metric!r}")
        for axes, groups, mean in zip(line, cells, means, strict=True):
            image = mean.unstack().reindex(index=rows, columns=columns)
            shown = axes.imshow(image, cmap="viridis", aspect="auto", vmin=min(known), vmax=max(known))
            for key, members in groups:
                lost = collapsed_runs(members)
                value = "-" if math.isnan(mean[key]) else f"{mean[key]:.3g}"
                text = f"{value}\nn={members['value'].count()}" + (f"\n{lost} collapsed" if lost else "")
                paper = {"boxstyle": "round,pad=0.2", "facecolor": "white", "alpha": 0.85, "linewidth": 0}
                at = columns.index(key[1]), rows.index(key[0])
                axes.text(*at, text, ha="center", va="center", fontsize="x-small", bbox=paper)
            names = ["\n".join(textwrap.wrap(plain(name), 16)) for name in columns]
            axes.set_xticks(range(len(columns)), names, fontsize="x-small")
            axes.set_yticks(range(len(rows)), map(plain, rows), fontsize="x-small")
            axes.grid(visible=False)
            axes.label_outer(remove_inner_ticks=True)
        figure.colorbar(shown, ax=line, label=plain(metric), aspect=40)
    return figure


def _layout(
    panels: Sequence[Panel],
    metrics: int,
    single: tuple[float, float] = PANEL,
    several: tuple[float, float] = SMALL_PANEL,
    *,
    share: bool = False,
) -> tuple[Any, list[list[Any]]]:
    """A figure and its axes, ``[metric][panel]``, those of one metric with the same scales where they ``share``.

    ``single`` is the size of the only panel, ``several`` that of each of several, in inches.
    """
    from matplotlib.figure import Figure

    width, height = single if len(panels) == 1 else several
    columns = max(1, min(len(panels), int(PAGE / width)))
    rows = -(-len(panels) // columns)
    size = (max(width * columns, single[0]), height * rows * metrics)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows * metrics, columns, squeeze=False)
    blocks = [list(grid[at * rows : (at + 1) * rows].flat) for at in range(metrics)]
    for block in blocks:
        for spare in block[len(panels) :]:
            spare.set_axis_off()
        for axes, panel in zip(block, panels, strict=False):
            if share and axes is not block[0]:
                axes.sharex(block[0])
                axes.sharey(block[0])
            axes.set_title(plain(panel.title), fontsize="small", loc="left")
            axes.grid(alpha=0.3)
    return figure, [block[: len(panels)] for block in blocks]


def _name_axes(row: Sequence[Any], x: str, y: str) -> None:
    """``x`` below the panels with none beneath them, ``y`` at the left ones."""
    columns = row[0].get_subplotspec().get_gridspec().ncols
    for at, axes in enumerate(row):
        if at + columns >= len(row):
            axes.set_xlabel(plain(x))
        if at % columns == 0:
            axes.set_ylabel(plain(y))


def _legend(figure: Any, title: str) -> None:
    """Each name once, below all panels; the figure grows by the legend's height."""
    named: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    width, height = figure.get_size_inches()
    columns = max(1, min(len(named), int(width / (0.5 + 0.075 * max(map(len, named))))))
    figure.set_size_inches(width, height + 0.35 + 0.17 * -(-len(named) // columns))
    look = {"fontsize": "x-small", "title_fontsize": "x-small", "alignment": "left", "frameon": False}
    figure.legend(named.values(), named.keys(), loc="outside lower left", ncols=columns, title=title, **look)


def _other_values(keys: Sequence[str], values: Sequence[str]) -> tuple[str, ...]:
    return tuple(value for key, value in zip(keys, values, strict=True) if key not in KL_KEYS)
