"""Curves from the store: one line a group, the mean over its runs, with the 95% band where there are two or more."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError
from kl_comedy.tracking.queries import history, short
from kl_comedy.tracking.stats import band

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".png", ".svg", ".pdf")
PANEL_INCHES = (6.4, 3.6)
DPI = 150


def curves(uri: str, frame: pd.DataFrame, group: list[str], metric: str) -> dict[str, pd.DataFrame]:
    """The band of ``metric`` (short name) for each group of the runs frame: label -> step, n, mean, low, high."""
    points = history(uri, frame["run_id"], metric)
    labels = {
        run_id: ", ".join(f"{short(key)}={_shown(row[key])}" for key in group) or "all runs"
        for run_id, row in frame.set_index("run_id").iterrows()
    }
    points = points.assign(label=points["run_id"].map(labels))
    return {str(label): band(members) for label, members in points.groupby("label", sort=False)}


def plot(
    uri: str, frame: pd.DataFrame, group: list[str], metrics: Sequence[str], out: Path | str, *,
    log: Collection[str] = (),
) -> Path:  # fmt: skip
    """Draw one panel a metric into ``out`` (.png, .svg or .pdf) and return its path. Needs no display.

    Metrics in ``log`` get a logarithmic axis, on which what is not above 0 is left out. Raises :class:`UserError` for
    another suffix, and when no run has a point of a metric.
    """
    target = check_suffix(out)
    panels = {metric: curves(uri, frame, group, metric) for metric in metrics}
    for metric, found in panels.items():
        if not any(len(curve) for curve in found.values()):
            raise UserError(f"--metric: no finite point of {metric!r} in these {len(frame)} runs")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure = draw(panels, log=log)
    figure.savefig(target, dpi=DPI, bbox_inches="tight", metadata={"Date": None} if target.suffix == ".svg" else None)
    return target


def draw(panels: dict[str, dict[str, pd.DataFrame]], *, log: Collection[str] = ()) -> Any:
    """A matplotlib figure of ``{metric: {label: band}}`` without touching pyplot's global state."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = mpl.color_sequences["tab10"]
    labels = list(dict.fromkeys(label for found in panels.values() for label in found))
    width, height = PANEL_INCHES
    below = legend_height(labels)
    figure = Figure(figsize=(width, (height + below) * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (metric, found) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels.items(), strict=True):
        for label, curve in found.items():
            if len(curve):
                at = labels.index(label)
                _line(axes, curve, plain(label), colours[at % len(colours)], ("-", "--", ":", "-.")[at // 10 % 4])
        axes.set_xlabel("step (optimizer updates)")
        axes.set_ylabel(plain(metric))
        if metric in log:
            axes.set_yscale("log", nonpositive="mask")
        axes.grid(alpha=0.3)
        add_legend(axes, "mean and 95% interval over runs", below=below > 0)
    return figure


def legend_height(labels: Sequence[str]) -> float:
    """Inches that a legend below the axes needs; 0 where it fits into them."""
    return 0.0 if len(labels) <= 6 and max(map(len, labels), default=0) <= 40 else 0.35 + 0.17 * len(labels)


def add_legend(axes: Any, title: str, *, below: bool) -> None:
    """The legend in the axes, or below them at the left edge, where long names do not cover the curves."""
    place = {"loc": "upper left", "bbox_to_anchor": (-0.1, -0.14), "frameon": False} if below else {}
    size = "x-small" if below else "small"
    axes.legend(fontsize=size, title=title, title_fontsize=size, alignment="left", **place)


def check_suffix(out: Path | str) -> Path:
    """``out`` as a path. Raises :class:`UserError` when its suffix names no format we write."""
    target = Path(out)
    if target.suffix.lower() not in SUFFIXES:
        raise UserError(f"--out: got {str(out)!r}; allowed: a file that ends in {', '.join(SUFFIXES)}")
    return target


def _line(axes: Any, curve: pd.DataFrame, label: str, colour: Any, style: str) -> None:
    fewest, most = int(curve["n"].min()), int(curve["n"].max())
    count = f"n={most}" if fewest == most else f"n={fewest}–{most}"
    marker = "o" if len(curve) == 1 else None
    axes.plot(curve["step"], curve["mean"], style, color=colour, label=f"{label} ({count})", marker=marker)
    axes.fill_between(curve["step"], curve["low"], curve["high"], color=colour, alpha=0.2, linewidth=0)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, str) else ""


def plain(text: str) -> str:
    """``$`` would start a formula, and a leading ``_`` would hide a legend entry."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
