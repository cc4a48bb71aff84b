"""Curves from the store: one line a group, the mean over its runs, with the 95% band where there are two or more."""

from __future__ import annotations

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
    return _draw(parts, found, log)


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

    return _draw([Panel(title="", frame=pd.DataFrame())], {name: [found] for name, found in panels.items()}, log)


def check_suffix(out: Path | str) -> Path:
    """``out`` as a path. Raises :class:`UserError` when its suffix names no format we write."""
    target = Path(out)
    if target.suffix.lower() not in SUFFIXES:
        raise UserError(f"--out: got {str(out)!r}; allowed: a file that ends in {', '.join(SUFFIXES)}")
    return target


def _draw(parts: Sequence[Panel], found: dict[str, list[Bands]], log: Collection[str]) -> Any:
    look = looks([label for drawn in found.values() for part in drawn for label in part])
    counts = {int(n) for drawn in found.values() for part in drawn for band in part.values() for n in band["n"]}
    same = counts.pop() if len(counts) == 1 else None
    over = "one run each" if same == 1 else f"mean and 95% interval {f'of {same}' if same else 'over'} runs"
    figure, grid = layout(parts, list(found), SIZE)
    for line, (metric, drawn) in zip(grid, found.items(), strict=True):
        for axes, part in zip(line, drawn, strict=True):
            for label, curve in part.items():
                if len(curve):
                    _line(axes, curve, label, look[label], counted=same is None)
            if metric in log:
                axes.set_yscale("log", nonpositive="mask")
        name_axes(line, "step (optimizer updates)", metric)
    legend(figure, [axes for line in grid for axes in line], over)
    return figure


def _line(axes: Any, curve: pd.DataFrame, label: str, look: tuple[Any, Any], *, counted: bool) -> None:
    fewest, most = int(curve["n"].min()), int(curve["n"].max())
    count = f" (n={most})" if fewest == most else f" (n={fewest}–{most})"
    marker = "o" if len(curve) == 1 else None
    colour, style = look
    axes.plot(
        curve["step"], curve["mean"], linestyle=style, color=colour, label=plain(label) + (count if counted else ""),
        marker=marker,
    )  # fmt: skip
    axes.fill_between(curve["step"], curve["low"], curve["high"], color=colour, alpha=0.2, linewidth=0)
