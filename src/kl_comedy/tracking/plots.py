"""Curves from the store: one line a group, the mean over its runs, with the 95% band where there are two or more."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError
from kl_comedy.tracking.panels import Panel, layout, legend, line_label, looks, name_axes, panels_of, plain
from kl_comedy.tracking.queries import history
from kl_comedy.tracking.stats import band

if TYPE_CHECKING:
    import pandas as pd

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
    uri: str, frame: pd.DataFrame, group: Sequence[str], metrics: Sequence[str], out: Path | str, *,
    panels: Sequence[str] = (), log: Collection[str] = (), smooth: int = 1,
) -> Path:  # fmt: skip
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
    points: Mapping[str, pd.DataFrame], frame: pd.DataFrame, group: Sequence[str], *, panels: Sequence[str] = (),
    log: Collection[str] = (),
) -> Any:  # fmt: skip
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
    parts: Sequence[Panel], found: dict[str, list[Bands]], log: Collection[str],
    ranges: Mapping[str, tuple[float, float]],
) -> Any:  # fmt: skip
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
