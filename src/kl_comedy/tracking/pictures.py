"""Pictures of finished runs: reward against KL, certificates beside outcomes, estimator x placement.

Means over seeds with 95% Student intervals. Collapsed runs are drawn hollow and counted, and a group's mean includes
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError
from kl_comedy.statistics import Interval, t_interval
from kl_comedy.tracking.derived import BETA, FAMILY
from kl_comedy.tracking.panels import (
    Panel,
    beside,
    layout,
    legend,
    line_label,
    looks,
    name_axes,
    panels_of,
    plain,
    wrapped,
)
from kl_comedy.tracking.plots import DPI, check_suffix
from kl_comedy.tracking.queries import short
from kl_comedy.tracking.stats import groups_of

if TYPE_CHECKING:
    import pandas as pd

BIAS, VARIANCE = "tags.kl.relative_bias", "tags.kl.variance"
Look = Mapping[str, tuple[Any, str]]
"""Colour and mark of each label."""

MARKERS = "osD^vP*Xh"  # nine, beside ten colours: ninety pairs before one comes again
SIZE = (7.2, 4.6)
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
    kind: str, frame: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str], kl: str, out: Path | str, *,
    panels: Sequence[str] = (),
) -> Path:  # fmt: skip
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
    figure, grid = layout(parts, metrics, SIZE, share=False)
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
    figure, grid = beside(parts, metrics, SIZE)
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
    axes: Any, found: dict[tuple[int, int], tuple[float | None, str]], rows: Sequence[str], columns: Sequence[str],
    limits: tuple[float, float],
) -> Any:  # fmt: skip
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
            axes.plot([_mean(left.kl), _mean(right.kl)], [_mean(left.reward), _mean(right.reward)], style,
                      color=colour, alpha=0.5)  # fmt: skip
        for spot in line:
            x, y = _mean(spot.kl), _mean(spot.reward)
            axes.errorbar([x], [y], xerr=_bars(spot.kl), yerr=_bars(spot.reward), color=colour, fmt="none",
                          elinewidth=0.7, alpha=0.4)  # fmt: skip
            axes.plot([x], [y], mark, color=colour, markersize=5, label=plain(label),
                      markerfacecolor="none" if spot.collapsed else colour)  # fmt: skip
            axes.annotate(plain(spot.note), (x, y), textcoords="offset points", xytext=(4, 4 if at % 2 else -9),
                          fontsize="xx-small", color=colour)  # fmt: skip


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
