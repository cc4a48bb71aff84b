"""Pictures of finished runs: reward against KL, certificates beside outcomes, estimator x placement.

Means over seeds with 95% Student intervals. Collapsed runs are drawn hollow and counted, and a group's mean includes
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError
from kl_comedy.statistics import Interval, t_interval
from kl_comedy.tracking.derived import BETA, FAMILY
from kl_comedy.tracking.plots import DPI, add_legend, check_suffix, legend_height, plain
from kl_comedy.tracking.queries import short
from kl_comedy.tracking.stats import groups_of

if TYPE_CHECKING:
    import pandas as pd

BIAS, VARIANCE = "tags.kl.relative_bias", "tags.kl.variance"
MARKERS = "osD^vP*Xhd"
HEIGHT = 4.6
"""Inches of a panel."""


@dataclass(frozen=True, kw_only=True)
class Spot:
    """One configuration: where its seeds ended. ``collapsed`` of ``runs`` runs."""

    beta: str
    kl: Interval
    reward: Interval
    runs: int
    collapsed: int


def picture(
    kind: str, frame: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str], kl: str, out: Path | str
) -> Path:
    """Draw ``kind`` (frontier, plane, heatmap) of the runs into ``out``, a panel a metric. Returns its path."""
    target = check_suffix(out)
    if FAMILY not in frame:
        raise UserError("these runs lack the tag kl.label, by which families are drawn; they were not trained by us")
    figure = {"frontier": frontier, "plane": plane, "heatmap": heatmap}[kind](frame, groups, metrics, kl)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=DPI, bbox_inches="tight", metadata={"Date": None} if target.suffix == ".svg" else None)
    return target


def frontier(frame: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str], kl: str) -> Any:
    """A metric against KL; a line a group through its betas, in the order of KL."""
    below = legend_height([label for label, _ in _labelled(frame, groups)])
    figure, panels = _figure(1, len(metrics), height=HEIGHT + below)
    for axes, metric in zip(panels[:, 0], metrics, strict=True):
        _draw_frontier(axes, frame, groups, f"metrics.{metric}", kl)
        axes.set_ylabel(plain(metric))
        add_legend(axes, "numbers: beta; hollow: some of its runs collapsed", below=below > 0)
    return figure


def plane(frame: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str], kl: str) -> Any:
    """Left: bias and variance of each group's certificate. Right, in the same colours: what its runs reached."""
    for column in (BIAS, VARIANCE):
        if column not in frame or frame[column].isna().all():
            raise UserError(
                f"--kind: plane needs the tag {short(column)}, which these runs lack: an older version tracked them"
            )
    below = legend_height([label for label, _ in _labelled(frame, groups)])
    figure, panels = _figure(2, len(metrics), height=HEIGHT + below)
    for (left, right), metric in zip(panels, metrics, strict=True):
        for at, (label, members) in enumerate(_labelled(frame, groups)):
            known = members[[BIAS, VARIANCE]].dropna()
            if known.empty:
                continue
            bias, variance = (float(known[name].iloc[0]) for name in (BIAS, VARIANCE))
            left.plot([bias], [variance], MARKERS[at % len(MARKERS)], color=_colour(at), label=label)
        left.set_xlabel("relative bias of the gradient (0: descends KL(π‖ref))")
        left.set_ylabel("variance of one completion's gradient, relative")
        left.set_yscale("symlog", linthresh=0.1)
        left.grid(alpha=0.3)
        add_legend(left, "certificates", below=below > 0)
        _draw_frontier(right, frame, groups, f"metrics.{metric}", kl)
        right.set_ylabel(plain(metric))
    return figure


def heatmap(frame: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str], kl: str) -> Any:
    """Estimator by placement (credit and the like with it): the mean over all runs of a cell, with their number."""
    import numpy as np

    split = frame[FAMILY].astype(str).str.partition(" in ")
    cells = frame.assign(estimator=split[0], placement=split[2].where(split[2] != "", "-"))
    rows, columns = (list(dict.fromkeys(cells[name])) for name in ("estimator", "placement"))
    figure, panels = _figure(1, len(metrics), width=2.4 + 1.3 * len(columns), height=1.6 + 0.6 * len(rows))
    for axes, metric in zip(panels[:, 0], metrics, strict=True):
        grid = np.full((len(rows), len(columns)), np.nan)
        for (row, column), members in cells.groupby(["estimator", "placement"]):
            at = rows.index(row), columns.index(column)
            values = [float(x) for x in members[f"metrics.{metric}"] if np.isfinite(x)]
            grid[at] = np.mean(values) if values else np.nan
            lost = int(members["collapsed"].eq(True).sum()) if "collapsed" in members else 0
            text = f"{grid[at]:.3g}\nn={len(values)}" + (f"\n{lost} collapsed" if lost else "")
            axes.text(at[1], at[0], text, ha="center", va="center", fontsize="x-small", bbox=_PAPER)
        shown = axes.imshow(grid, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(columns)), [plain(name) for name in columns], fontsize="x-small", rotation=15)
        axes.set_yticks(range(len(rows)), [plain(name) for name in rows], fontsize="x-small")
        figure.colorbar(shown, ax=axes, label=plain(metric))
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


_PAPER = {"boxstyle": "round,pad=0.2", "facecolor": "white", "alpha": 0.85, "linewidth": 0}


def _draw_frontier(axes: Any, frame: pd.DataFrame, groups: Sequence[str], metric: str, kl: str) -> None:
    drawn = False
    for at, (label, members) in enumerate(_labelled(frame, groups)):
        line = spots(members, metric, kl)
        drawn = drawn or bool(line)
        xs, ys = ([_mean(getattr(spot, name)) for spot in line] for name in ("kl", "reward"))
        axes.plot(xs, ys, "-", color=_colour(at), alpha=0.5)
        for spot, x, y in zip(line, xs, ys, strict=True):
            face = "none" if spot.collapsed else _colour(at)
            axes.errorbar(
                [x], [y], xerr=_bars(spot.kl), yerr=_bars(spot.reward), fmt=MARKERS[at % len(MARKERS)], capsize=2,
                color=_colour(at), markerfacecolor=face, label=label if spot is line[0] else None, elinewidth=0.8,
            )  # fmt: skip
            note = f"{spot.beta}" + (f" ({spot.collapsed}/{spot.runs})" if spot.collapsed else "")
            axes.annotate(plain(note), (x, y), textcoords="offset points", xytext=(4, 4), fontsize="xx-small")
    if not drawn:
        raise UserError(f"--metric: no run has a finite {short(metric)!r} and {short(kl)!r}")
    axes.set_xlabel(plain(f"{short(kl)} (nats)"))
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(left=min(0.0, *(float(value) for value in frame[kl] if value == value)))
    axes.grid(alpha=0.3)


def _labelled(frame: pd.DataFrame, groups: Sequence[str]) -> list[tuple[str, pd.DataFrame]]:
    return [(plain(", ".join(keys) or "all runs"), members) for keys, members in groups_of(frame, list(groups))]


def _bars(found: Interval) -> list[list[float]] | None:
    if found.mean is None or found.low is None or found.high is None:
        return None
    return [[found.mean - found.low], [found.high - found.mean]]


def _mean(found: Interval) -> float:
    assert found.mean is not None
    return found.mean


def _colour(at: int) -> Any:
    import matplotlib as mpl

    return mpl.color_sequences["tab10"][at % 10]


def _figure(columns: int, rows: int, width: float = 7.2, height: float = HEIGHT) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)
