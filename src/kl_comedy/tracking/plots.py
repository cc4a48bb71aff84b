"""Panels of a picture: which runs stand in which, how they are laid out, how lines look, one legend for all.

Curves from the store: one line a group, the mean over its runs, with the 95% band where there are two or more.

Pictures of finished runs: reward against KL, certificates beside outcomes, estimator x placement.

Means over seeds with 95% Student intervals. Collapsed runs are drawn hollow and counted, and a group's mean includes
them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError
from kl_comedy.statistics import Interval, t_interval
from kl_comedy.tracking.compare import band, groups_of
from kl_comedy.tracking.runs import BETA, FAMILY, LABEL, NO_KL, history, short

if TYPE_CHECKING:
    import pandas as pd


WIDEST = 16.0
"""Inches of a figure of several panels."""

MOST_LINES = 8
"""More lines than this are not told apart in one panel."""

INSIDE = 6
"""More names than this, or longer ones than 40 characters, go below the axes."""

KL_KEYS = (FAMILY, BETA, LABEL)
NAME = "params.name"
SPEAKING = (FAMILY, LABEL, NAME, "tags.sweep")
"""Keys whose values need no name beside them."""

GREY = "0.3"

SEVERAL = (3.9, 3.3)
"""Inches of a panel among others."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """The runs of ``frame`` under the heading ``title`` (empty: the only panel)."""

    title: str
    frame: pd.DataFrame


def panels_of(frame: pd.DataFrame, keys: Sequence[str]) -> list[Panel]:
    """A panel a combination of ``keys``. Runs without KL are beta 0 of every family: where ``keys`` part families or
    betas, they stand in each panel that shares their other keys, and have none of their own beside it."""
    import pandas as pd

    if not keys:
        return [Panel(title="", frame=frame)]
    parts = groups_of(frame, list(keys))
    if FAMILY not in frame or not any(key in KL_KEYS for key in keys):
        return [Panel(title=title_of(keys, values), frame=members) for values, members in parts]
    free: dict[tuple[str, ...], pd.DataFrame] = {}
    bound: list[tuple[tuple[str, ...], pd.DataFrame]] = []
    for values, members in parts:
        without = members[FAMILY] == NO_KL
        if without.any():
            free[_rest(keys, values)] = members[without]
        if not without.all():
            bound.append((values, members[~without]))
    found = [
        Panel(title=title_of(keys, values), frame=pd.concat([free.get(_rest(keys, values), members[:0]), members]))
        for values, members in bound
    ]
    seen = {_rest(keys, values) for values, _ in bound}
    return found + [
        Panel(title=", ".join([*_named([key for key in keys if key not in KL_KEYS], rest), NO_KL]), frame=members)
        for rest, members in free.items()
        if rest not in seen
    ]


def of_many(frame: pd.DataFrame, groups: Sequence[str]) -> tuple[list[str], list[str]]:
    """Lines and panels for groups that are too many for one panel: ``(line keys, panel keys)``.

    Up to ``MOST_LINES`` groups are lines of one panel. Beyond, a line is a KL family and a panel a beta, or the other
    way round where that makes fewer panels; other keys part panels.
    """
    names = list(groups)
    if FAMILY not in frame or not {*KL_KEYS} & {*names} or len(groups_of(frame, names)) <= MOST_LINES:
        return names, []
    others = [name for name in names if name not in (*KL_KEYS, NAME) and frame[name].nunique() > 1]
    if NAME in names and len(groups_of(frame, [*others, LABEL])) < len(groups_of(frame, names)):
        return names, []  # the names part what no other key does
    with_kl = frame[frame[FAMILY] != NO_KL]
    families, betas = with_kl[FAMILY].nunique(), with_kl[BETA].nunique()
    line, panel = (FAMILY, BETA) if betas <= families else (BETA, FAMILY)
    return [line], [*others, panel] if min(families, betas) > 1 else others


def title_of(keys: Sequence[str], values: Sequence[str]) -> str:
    """The values of ``keys``, with the names of those keys that do not speak for themselves."""
    return ", ".join(_named(keys, values))


def layout(
    panels: Sequence[Panel],
    metrics: Sequence[str],
    size: tuple[float, float],
    several: tuple[float, float] = SEVERAL,
    *,
    share: bool = True,
) -> tuple[Any, list[list[Any]]]:
    """A figure and its axes, ``[metric][panel]``, those of one metric with the same scales where they ``share``.

    ``size`` is that of the only panel, ``several`` that of each of several, in inches.
    """
    columns = _columns(panels, several[0])
    rows = -(-len(panels) // columns)
    width, height = size if len(panels) == 1 else several
    figure, grid = _figure(rows * len(metrics), columns, (max(width * columns, size[0]), height * rows * len(metrics)))
    found = []
    for at in range(len(metrics)):
        line = list(grid[at * rows : (at + 1) * rows].flat)
        for spare in line[len(panels) :]:
            spare.set_axis_off()
        for axes, panel in zip(line, panels, strict=False):
            if share and axes is not line[0]:
                axes.sharex(line[0])
                axes.sharey(line[0])
            axes.set_title(plain(panel.title), fontsize="small", loc="left")
            axes.grid(alpha=0.3)
        found.append(line[: len(panels)])
    return figure, found


def beside(panels: Sequence[Panel], metrics: Sequence[str], size: tuple[float, float]) -> tuple[Any, list[list[Any]]]:
    """A figure with a row a metric: an axes for something else, then one a panel, each with its own scales."""
    width, height = size if len(panels) == 1 else SEVERAL
    columns = 1 + len(panels)
    figure, grid = _figure(len(metrics), columns, (width * columns, height * len(metrics)))
    for row in grid:
        for axes, title in zip(row, ("", *(panel.title for panel in panels)), strict=True):
            axes.set_title(plain(title), fontsize="small", loc="left")
            axes.grid(alpha=0.3)
    return figure, [list(row) for row in grid]


def name_axes(line: Sequence[Any], x: str, y: str) -> None:
    """``x`` below the panels with none beneath them, ``y`` at the left ones."""
    columns = _columns(line, SEVERAL[0])
    for at, axes in enumerate(line):
        if at + columns >= len(line):
            axes.set_xlabel(plain(x))
        if at % columns == 0:
            axes.set_ylabel(plain(y))


def looks(labels: Sequence[str]) -> Mapping[str, tuple[Any, str]]:
    """Colour and line style of each label; without KL is grey and dotted wherever it stands."""
    import matplotlib as mpl

    colours = mpl.color_sequences["tab10"]
    shown = [label for label in dict.fromkeys(labels) if label != NO_KL]
    found = {
        label: (colours[at % len(colours)], ("-", "--", "-.", (0, (1, 1)))[at // len(colours) % 4])
        for at, label in enumerate(shown)
    }
    return {**found, NO_KL: (GREY, ":")}


def legend(figure: Any, axes: Sequence[Any], title: str) -> None:
    """Each name once: inside the only panel where few and short names leave room, else below all, left aligned."""
    named: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    if not named:
        return
    longest = max(map(len, named))
    if len(axes) == 1 and len(named) <= INSIDE and longest <= 40:
        axes[0].legend(fontsize="small", title=title, title_fontsize="small", alignment="left")
        return
    width, height = figure.get_size_inches()
    columns = max(1, min(len(named), int(width / (0.5 + 0.075 * longest))))
    figure.set_size_inches(width, height + 0.35 + 0.17 * -(-len(named) // columns))
    figure.legend(
        named.values(),
        named.keys(),
        loc="outside lower left",
        ncols=columns,
        fontsize="x-small",
        title=title,
        title_fontsize="x-small",
        alignment="left",
        frameon=False,
    )


def line_label(groups: Sequence[str], values: Sequence[str]) -> str:
    """The name of a line: its values, ``no KL`` for whatever has none."""
    given = dict(zip(groups, values, strict=True))
    if NO_KL in (given.get(FAMILY), given.get(LABEL)) or (given.get(BETA) == "0" and FAMILY not in given):
        rest = [(key, value) for key, value in given.items() if key not in KL_KEYS]
        return ", ".join([*_named(*zip(*rest, strict=True)), NO_KL]) if rest else NO_KL
    return title_of(groups, values) or "all runs"


def plain(text: str) -> str:
    """``$`` would start a formula, and a leading ``_`` would hide a legend entry."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def wrapped(text: str, most: int = 16) -> str:
    """``text`` in lines of about ``most`` characters, for the ticks of an axis."""
    import textwrap

    return plain("\n".join(textwrap.wrap(text, most)) or text)


def _named(keys: Sequence[str], values: Sequence[str]) -> list[str]:
    shown = []
    for key, value in zip(keys, values, strict=True):
        name = "beta " if key == BETA else "" if key in SPEAKING else f"{short(key)}="
        shown.append(f"{name}{value}")
    return shown


def _columns(panels: Sequence[Any], width: float) -> int:
    """Panels beside each other: as many as a page is wide."""
    return max(1, min(len(panels), int(WIDEST / width)))


def _figure(rows: int, columns: int, inches: tuple[float, float]) -> tuple[Any, Any]:
    """A figure of its own, without pyplot's global state and without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _rest(keys: Sequence[str], values: Sequence[str]) -> tuple[str, ...]:
    return tuple(value for key, value in zip(keys, values, strict=True) if key not in KL_KEYS)


SUFFIXES = (".png", ".svg", ".pdf")
SIZE = (6.4, 3.6)
"""Inches of a panel."""

DPI = 150

Bands = dict[str, "pd.DataFrame"]
"""Label of a line to its band: step, n, mean, low, high."""


def curves(uri: str, frame: pd.DataFrame, group: Sequence[str], metric: str) -> Bands:
    """The band of ``metric`` (short name) for each group of the runs frame, in the order of the runs."""
    return bands(history(uri, frame["run_id"], metric), frame, group)


def bands(points: pd.DataFrame, frame: pd.DataFrame, group: Sequence[str]) -> Bands:
    """``points`` (run_id, step, value) of the runs in ``frame`` as a band a group."""
    keys = frame[list(group)].fillna("").astype(str)
    labels = [line_label(group, values) for values in keys.itertuples(index=False, name=None)]
    of_run = dict(zip(frame["run_id"], labels, strict=True))
    chosen = points[points["run_id"].isin(list(of_run))]
    parts = dict(list(chosen.groupby(chosen["run_id"].map(of_run), sort=False)))
    return {label: band(parts[label]) for label in dict.fromkeys(labels) if label in parts}


def plot(
    uri: str,
    frame: pd.DataFrame,
    group: Sequence[str],
    metrics: Sequence[str],
    out: Path | str,
    *,
    panels: Sequence[str] = (),
    log: Collection[str] = (),
    smooth: int = 1,
) -> Path:
    """Draw each metric into ``out`` (.png, .svg or .pdf), a panel a value of ``panels``. Needs no display.

    ``smooth`` takes the mean of the last so many points of a run for each. Metrics in ``log`` get a logarithmic axis,
    on which what is not above 0 is left out. Returns the path. Raises :class:`UserError` for another suffix, and when
    no run has a point of a metric.
    """
    target = check_suffix(out)
    points = {metric: smoothed(history(uri, frame["run_id"], metric), smooth) for metric in metrics}
    figure = draw_panels(points, frame, group, panels=panels, log=log)
    if smooth > 1:
        figure.suptitle(f"each point: mean of a run's last {smooth}", fontsize="x-small", x=0.01, ha="left")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=DPI, bbox_inches="tight", metadata={"Date": None} if target.suffix == ".svg" else None)
    return target


def draw_panels(
    points: Mapping[str, pd.DataFrame],
    frame: pd.DataFrame,
    group: Sequence[str],
    *,
    panels: Sequence[str] = (),
    log: Collection[str] = (),
) -> Any:
    """The figure of :func:`plot` from each metric's ``points`` (run_id, step, value) of the runs in ``frame``."""
    parts = panels_of(frame, panels)
    lines = [key for key in group if key not in panels]
    found = {metric: [bands(curve, part.frame, lines) for part in parts] for metric, curve in points.items()}
    for metric, drawn in found.items():
        if not any(len(band) for part in drawn for band in part.values()):
            raise UserError(f"--metric: no finite point of {metric!r} in these {len(frame)} runs")
    return _draw(parts, found, log, {metric: _range(curve) for metric, curve in points.items()})


def smoothed(points: pd.DataFrame, last: int) -> pd.DataFrame:
    """``points`` (run_id, step, value; steps ascending within a run) with each value the mean of the ``last`` up to it,
    fewer at the start. Values that are not finite are left out of a mean, as they are of a band's."""
    if last <= 1 or points.empty:
        return points
    windows = points.groupby("run_id", sort=False)["value"].rolling(last, min_periods=1)
    return points.assign(value=windows.mean().reset_index(level=0, drop=True))


def draw(panels: dict[str, Bands], *, log: Collection[str] = ()) -> Any:
    """A matplotlib figure of ``{metric: {label: band}}`` without touching pyplot's global state."""
    import pandas as pd

    return _draw([Panel(title="", frame=pd.DataFrame())], {name: [found] for name, found in panels.items()}, log, {})


def check_suffix(out: Path | str) -> Path:
    """``out`` as a path. Raises :class:`UserError` when its suffix names no format we write."""
    target = Path(out)
    if target.suffix.lower() not in SUFFIXES:
        raise UserError(f"--out: got {str(out)!r}; allowed: a file that ends in {', '.join(SUFFIXES)}")
    return target


def _range(points: pd.DataFrame) -> tuple[float, float]:
    """From the least to the greatest finite value."""
    values = [value for value in points["value"] if math.isfinite(value)]
    return min(values), max(values)


def _draw(
    parts: Sequence[Panel],
    found: dict[str, list[Bands]],
    log: Collection[str],
    ranges: Mapping[str, tuple[float, float]],
) -> Any:
    """Bands that reach beyond the ``ranges`` of the runs' own points, as those of two seeds do, are cut there."""
    look = looks([label for drawn in found.values() for part in drawn for label in part])
    counts = _counts(found)
    several = {count for span in counts.values() for count in span}
    same = several.pop() if len(several) == 1 else None
    over = "one run each" if same == 1 else f"mean and 95% interval {f'of {same}' if same else 'over'} runs"
    figure, grid = layout(parts, list(found), SIZE)
    for line, (metric, drawn) in zip(grid, found.items(), strict=True):
        least = _least_positive(drawn) if metric in log else None
        for axes, part in zip(line, drawn, strict=True):
            for label, curve in part.items():
                if len(curve):
                    name = label if same else f"{label} ({_said(counts[label])})"
                    _line(axes, curve, plain(name), look[label], least)
            if metric in log:
                axes.set_yscale("log", nonpositive="mask")
        if metric in ranges:
            _cut(line[0], *ranges[metric], least)  # when all panels, which share the axis, are drawn
        name_axes(line, "step (optimizer updates)", metric)
    legend(figure, [axes for line in grid for axes in line], over)
    return figure


def _counts(found: Mapping[str, Sequence[Bands]]) -> dict[str, tuple[int, int]]:
    """The fewest and the most runs at a step of each label's curves, wherever it is drawn."""
    counts: dict[str, list[int]] = {}
    for label, curve in (item for drawn in found.values() for part in drawn for item in part.items()):
        counts.setdefault(label, []).extend(int(n) for n in curve["n"])
    return {label: (min(each), max(each)) for label, each in counts.items() if each}


def _said(span: tuple[int, int]) -> str:
    fewest, most = span
    return f"n={most}" if fewest == most else f"n={fewest}–{most}"


def _least_positive(drawn: Sequence[Bands]) -> float:
    """The bottom of a logarithmic axis: the least mean above 0 (1.0 where there is none)."""
    means = [value for part in drawn for curve in part.values() for value in curve["mean"] if value > 0]
    return min(means, default=1.0)


def _cut(axes: Any, least: float, most: float, positive: float | None) -> None:
    """The axis as drawn, but little further than the points. ``positive``: the least mean of a logarithmic axis."""
    low, high = axes.get_ylim()
    if positive is not None:
        axes.set_ylim(positive / 1.3, max(1.3 * most, 1.3 * positive))
        return
    more = 0.05 * (most - least) or 0.05 * abs(most) or 0.05
    axes.set_ylim(max(low, least - more), min(high, most + more))


def _line(axes: Any, curve: pd.DataFrame, name: str, look: tuple[Any, Any], least: float | None) -> None:
    """``least``: of a logarithmic axis, on which a band that reaches to 0 goes down to the bottom."""
    marker = "o" if len(curve) == 1 else None
    colour, style = look
    axes.plot(curve["step"], curve["mean"], linestyle=style, color=colour, label=name, marker=marker)
    low = curve["low"] if least is None else curve["low"].where(~(curve["low"] < least / 10), least / 10)
    axes.fill_between(curve["step"], low, curve["high"], color=colour, alpha=0.13, linewidth=0)


BIAS, VARIANCE = "tags.kl.relative_bias", "tags.kl.variance"
Look = Mapping[str, tuple[Any, str]]
"""Colour and mark of each label."""

MARKERS = "osD^vP*Xh"  # nine, beside ten colours: ninety pairs before one comes again
SIZE_pictures = (7.2, 4.6)
"""Inches of a panel."""

NO_PLACEMENT = "(none)"
FRONTIER_LEGEND = "numbers: beta; hollow: its runs collapsed, their count where not all; bars: 95%, cut at edges"


@dataclass(frozen=True, kw_only=True)
class Spot:
    """One configuration: where its seeds ended. ``collapsed`` of ``runs`` runs."""

    beta: str
    kl: Interval
    reward: Interval
    runs: int
    collapsed: int

    @property
    def note(self) -> str:
        """Beta, and how many collapsed where it is some and not all: beside a hollow mark, "all" needs no number."""
        some = 0 < self.collapsed < self.runs
        return f"{self.beta} ({self.collapsed}/{self.runs})" if some else self.beta


def picture(
    kind: str,
    frame: pd.DataFrame,
    groups: Sequence[str],
    metrics: Sequence[str],
    kl: str,
    out: Path | str,
    *,
    panels: Sequence[str] = (),
) -> Path:
    """Draw ``kind`` (frontier, plane, heatmap) of the runs into ``out``, a panel a metric and value of ``panels``.
    Returns its path."""
    target = check_suffix(out)
    if FAMILY not in frame:
        raise UserError("these runs lack the tag kl.label, by which families are drawn; they were not trained by us")
    figure = {"frontier": frontier, "plane": plane, "heatmap": heatmap}[kind](frame, groups, metrics, kl, panels)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=DPI, bbox_inches="tight", metadata={"Date": None} if target.suffix == ".svg" else None)
    return target


def frontier(
    frame: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str], kl: str, panels: Sequence[str] = ()
) -> Any:
    """A metric against KL; a line a group through its betas, in the order of KL."""
    parts = panels_of(frame, panels)
    lines = [key for key in groups if key not in panels]
    figure, grid = layout(parts, metrics, SIZE_pictures, share=False)
    for row, metric in zip(grid, metrics, strict=True):
        for axes, part in zip(row, parts, strict=True):
            _draw_frontier(axes, part.frame, lines, f"metrics.{metric}", kl, _look(frame, lines))
        _scale(row, parts, f"metrics.{metric}", kl)
        name_axes(row, f"{short(kl)} (nats)", metric)
    legend(figure, [axes for row in grid for axes in row], FRONTIER_LEGEND)
    return figure


def plane(
    frame: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str], kl: str, panels: Sequence[str] = ()
) -> Any:
    """Left: bias and variance of each group's certificate. Right, in the same colours: what its runs reached."""
    for column in (BIAS, VARIANCE):
        if column not in frame or frame[column].isna().all():
            raise UserError(
                f"--kind: plane needs the tag {short(column)}, which these runs lack: an older version tracked them"
            )
    parts = panels_of(frame, panels)
    lines = [key for key in groups if key not in panels]
    look = _look(frame, lines)
    figure, grid = beside(parts, metrics, SIZE_pictures)
    for (left, *row), metric in zip(grid, metrics, strict=True):
        _draw_certificates(left, frame, lines, look)
        for axes, part in zip(row, parts, strict=True):
            _draw_frontier(axes, part.frame, lines, f"metrics.{metric}", kl, look)
        _scale(row, parts, f"metrics.{metric}", kl)
        name_axes(row, f"{short(kl)} (nats)", metric)
    legend(figure, [axes for row in grid for axes in row], FRONTIER_LEGEND)
    return figure


def heatmap(
    frame: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str], kl: str, panels: Sequence[str] = ()
) -> Any:
    """Estimator by placement (credit and the like with it): the mean over all runs of a cell, with their number.
    ``groups`` plays no part."""
    split = frame[FAMILY].astype(str).str.partition(" in ")
    cells = frame.assign(estimator=split[0], placement=split[2].where(split[2] != "", NO_PLACEMENT))
    rows, columns = (list(dict.fromkeys(cells[name])) for name in ("estimator", "placement"))
    parts = panels_of(cells, panels)
    size = (2.4 + 1.3 * len(columns), 1.6 + 0.6 * len(rows))
    figure, grid = layout(parts, metrics, size, several=(1.2 + 1.1 * len(columns), 0.9 + 0.55 * len(rows)))
    for line, metric in zip(grid, metrics, strict=True):
        means = [_cells(part.frame, f"metrics.{metric}", rows, columns) for part in parts]
        known = [value for found in means for value, _ in found.values() if value is not None]
        if not known:
            raise UserError(f"--metric: no run has a finite {metric!r}")
        for axes, found in zip(line, means, strict=True):
            shown = _draw_cells(axes, found, rows, columns, (min(known), max(known)))
            axes.label_outer(remove_inner_ticks=True)
        figure.colorbar(shown, ax=line, label=plain(metric), aspect=40)
    return figure


def spots(members: pd.DataFrame, metric: str, kl: str) -> list[Spot]:
    """The betas of one group, ordered by mean KL. Runs without a finite metric and KL are counted, not placed."""
    import numpy as np

    found = []
    for (beta,), side in groups_of(members, [BETA]):
        there = side[np.isfinite(side[metric]) & np.isfinite(side[kl])]
        if there.empty:
            continue
        lost = int(side["collapsed"].eq(True).sum()) if "collapsed" in side else 0
        x, y = (t_interval([float(value) for value in there[name]]) for name in (kl, metric))
        found.append(Spot(beta=beta, kl=x, reward=y, runs=len(side), collapsed=lost))
    return sorted(found, key=lambda spot: spot.kl.mean or 0.0)


def _cells(
    frame: pd.DataFrame, metric: str, rows: Sequence[str], columns: Sequence[str]
) -> dict[tuple[int, int], tuple[float | None, str]]:
    """(row, column) to the mean (None where no run has a finite value) and what the cell says."""
    import numpy as np

    found: dict[tuple[int, int], tuple[float | None, str]] = {}
    for (row, column), members in frame.groupby(["estimator", "placement"]):
        values = [float(x) for x in members[metric] if np.isfinite(x)]
        mean = float(np.mean(values)) if values else None
        lost = int(members["collapsed"].eq(True).sum()) if "collapsed" in members else 0
        text = ("-" if mean is None else f"{mean:.3g}") + f"\nn={len(values)}" + (f"\n{lost} collapsed" if lost else "")
        found[rows.index(row), columns.index(column)] = (mean, text)
    return found


def _draw_cells(
    axes: Any,
    found: dict[tuple[int, int], tuple[float | None, str]],
    rows: Sequence[str],
    columns: Sequence[str],
    limits: tuple[float, float],
) -> Any:
    import numpy as np

    grid = np.full((len(rows), len(columns)), np.nan)
    for at, (mean, text) in found.items():
        grid[at] = np.nan if mean is None else mean
        axes.text(at[1], at[0], text, ha="center", va="center", fontsize="x-small", bbox=_PAPER)
    axes.set_xticks(range(len(columns)), [wrapped(name) for name in columns], fontsize="x-small")
    axes.set_yticks(range(len(rows)), [plain(name) for name in rows], fontsize="x-small")
    axes.grid(visible=False)
    return axes.imshow(grid, cmap="viridis", aspect="auto", vmin=limits[0], vmax=limits[1])


_PAPER = {"boxstyle": "round,pad=0.2", "facecolor": "white", "alpha": 0.85, "linewidth": 0}


def _draw_certificates(axes: Any, frame: pd.DataFrame, groups: Sequence[str], look: Look) -> None:
    for label, members in _labelled(frame, groups):
        known = members[[BIAS, VARIANCE]].dropna()
        if known.empty:
            continue
        bias, variance = (float(known[name].iloc[0]) for name in (BIAS, VARIANCE))
        colour, mark = look[label]
        axes.plot([bias], [variance], mark, color=colour, label=plain(label))
    axes.set_xlabel("relative bias of the gradient (0: descends KL(π‖ref))")
    axes.set_ylabel("variance of one completion's gradient, relative")
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_title("certificates", fontsize="small", loc="left")


def _draw_frontier(axes: Any, frame: pd.DataFrame, groups: Sequence[str], metric: str, kl: str, look: Look) -> None:
    """Lines only between betas of which no run collapsed: nothing is read off across a collapsed one either."""
    for at, (label, members) in enumerate(_labelled(frame, groups)):
        line = spots(members, metric, kl)
        colour, mark = look[label]
        for left, right in itertools.pairwise(line):
            style = ":" if left.collapsed or right.collapsed else "-"
            axes.plot(
                [_mean(left.kl), _mean(right.kl)],
                [_mean(left.reward), _mean(right.reward)],
                style,
                color=colour,
                alpha=0.5,
            )
        for spot in line:
            x, y = _mean(spot.kl), _mean(spot.reward)
            axes.errorbar(
                [x],
                [y],
                xerr=_bars(spot.kl),
                yerr=_bars(spot.reward),
                color=colour,
                fmt="none",
                elinewidth=0.7,
                alpha=0.4,
            )
            axes.plot(
                [x],
                [y],
                mark,
                color=colour,
                markersize=5,
                label=plain(label),
                markerfacecolor="none" if spot.collapsed else colour,
            )
            axes.annotate(
                plain(spot.note),
                (x, y),
                textcoords="offset points",
                xytext=(4, 4 if at % 2 else -9),
                fontsize="xx-small",
                color=colour,
            )


def _scale(row: Sequence[Any], parts: Sequence[Panel], metric: str, kl: str) -> None:
    """Axes that hold every run, a quarter wider: the interval of two seeds may reach far beyond, and is cut there.
    Raises :class:`UserError` where nothing was drawn."""
    import numpy as np

    if not any(axes.lines for axes in row):
        raise UserError(f"--metric: no run has a finite {short(metric)!r} and {short(kl)!r}")
    for axes, part in zip(row, parts, strict=True):
        axes.set_xscale("symlog", linthresh=1.0)
        there = part.frame[np.isfinite(part.frame[metric]) & np.isfinite(part.frame[kl])]
        if len(there):
            xs, ys = there[kl], there[metric]
            more = 0.25 * (ys.max() - ys.min()) or 0.05 * abs(ys.max()) or 0.05
            axes.set_xlim(min(0.0, 1.3 * xs.min()), 1.3 * max(xs.max(), 0.1))
            axes.set_ylim(ys.min() - more, ys.max() + more)


def _look(frame: pd.DataFrame, groups: Sequence[str]) -> Look:
    found = looks([label for label, _ in _labelled(frame, groups)])
    return {label: (colour, MARKERS[at % len(MARKERS)]) for at, (label, (colour, _)) in enumerate(found.items())}


def _labelled(frame: pd.DataFrame, groups: Sequence[str]) -> list[tuple[str, pd.DataFrame]]:
    return [(line_label(groups, keys), members) for keys, members in groups_of(frame, list(groups))]


def _bars(found: Interval) -> list[list[float]] | None:
    if found.mean is None or found.low is None or found.high is None:
        return None
    return [[found.mean - found.low], [found.high - found.mean]]


def _mean(found: Interval) -> float:
    assert found.mean is not None
    return found.mean
