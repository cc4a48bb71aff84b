"""Metrics over training against the KL at the same updates: how much of each reward a KL buys, and where it turns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kl_comedy.errors import UserError
from kl_comedy.results import plot_panels
from kl_comedy.results.compare import groups_of, seeds_of
from kl_comedy.results.figures import legend_below, paper_style
from kl_comedy.results.looks import Line, LineLook
from kl_comedy.results.metric_labels import axis_label
from kl_comedy.results.plot_curves import smooth_curves

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


@paper_style()
def plot_paths(
    points: Mapping[str, pd.DataFrame],
    kl: str,
    kl_points: pd.DataFrame,
    frame: pd.DataFrame,
    groups: Sequence[str],
    *,
    panels: Sequence[str] = (),
    smooth: int = 1,
) -> Figure:
    """A metric against KL, a row of panels for each; a line goes through the updates of a group's runs, in order.

    ``points`` and ``kl_points`` have the columns run_id, step, value (:func:`kl_comedy.results.runs.history`). A point
    of a line is the mean over seeds of both values at one update, of updates that all seeds of the group have. The mark
    is at the last one. Thin lines are single seeds. KL is on a square-root axis, as in 2210.10760, whose rewards are
    functions of the root. Raises :class:`UserError` where no run has both values at an update.
    """
    parts = plot_panels.panels_of(frame, panels)
    lines = [key for key in groups if key not in panels]
    looks = plot_panels.looks_of_panels(parts, lines)
    smooth_kl = smooth_curves(kl_points, smooth).rename(columns={"value": "kl"})
    paths_of_panels: dict[str, list[list[_Path]]] = {}
    for metric, values in points.items():
        smoothed = smooth_curves(values, smooth)
        both = smoothed.merge(smooth_kl[["run_id", "step", "kl"]], on=["run_id", "step"])
        both = both[(both["value"].abs() < math.inf) & (both["kl"].abs() < math.inf)]
        paths_of_panels[metric] = [_paths(both, runs, lines) for _, runs in parts]
        if not any(paths_of_panels[metric]):
            raise UserError(f"--metric: no run has a finite {metric!r} and {kl!r} at the same update")

    figure, grid = plot_panels.layout(parts, len(points), share=True)
    seed_counts: set[int] = set()
    for row, (metric, panel_paths) in zip(grid, paths_of_panels.items(), strict=True):
        for axes, paths in zip(row, panel_paths, strict=True):
            for place, path in enumerate(paths):
                _draw_path(axes, path, looks[path.line], place)
                seed_counts.add(len(path.seeds))
            # Differences at small KL, where most updates are, would not be seen on a plain axis.
            axes.set_xscale("function", functions=(_signed_root, _signed_square))
        notes = ["square-root axis", *plot_panels.notes_of_axis(smooth, log=False)]
        plot_panels.name_axes(row, axis_label(kl, 40, notes), metric)
    title = "mean over seeds at each update, single seeds thin; the mark is at the last update"
    if seed_counts == {1}:
        title = "one run each; the mark is at the last update"
    legend_below(figure, title, _legend_entries(looks))
    return figure


class _Path(NamedTuple):
    """The runs of one line; frames have the columns kl and value, in the order of the updates."""

    line: Line
    mean: pd.DataFrame
    seeds: list[pd.DataFrame]


def _paths(points: pd.DataFrame, frame: pd.DataFrame, groups: Sequence[str]) -> list[_Path]:
    """The path of each group that has a point; ``points`` has the columns run_id, step, kl, value."""
    paths = []
    for keys, members in groups_of(frame, groups):
        seeds = seeds_of(members.set_index("run_id", drop=False))
        of_this_line = points[points["run_id"].isin(seeds.index)]
        if of_this_line.empty:
            continue
        seed_of_point = of_this_line["run_id"].map(seeds).rename("seed")
        # Runs of one seed are one observation, as in every mean over seeds.
        by_seed = of_this_line.groupby([seed_of_point, "step"])[["kl", "value"]].mean().reset_index()
        by_step = by_seed.groupby("step")
        counts = by_step.size()
        # A mean over fewer seeds would jump where a run ends, and a jump reads as a change of the policy.
        shared_steps = counts.index[counts == counts.max()]
        mean = by_step[["kl", "value"]].mean().loc[shared_steps]
        singles = [single for _, single in by_seed.groupby("seed")]
        paths.append(_Path(line=plot_panels.line_of(groups, keys, members), mean=mean, seeds=singles))
    return paths


def _draw_path(axes: Axes, path: _Path, look: LineLook, place: int) -> None:
    """Single seeds below their mean, and the mark of its last update above both."""
    family = path.line.family
    if len(path.seeds) > 1:
        for number, single in enumerate(path.seeds):
            axes.plot(
                single["kl"],
                single["value"],
                color=look.colour,
                alpha=0.35,
                linewidth=0.5,
                zorder=1.7,
                gid=plot_panels.svg_id(axes, f"run{number}", place, family),
            )
    last = len(path.mean) - 1
    axes.plot(
        path.mean["kl"],
        path.mean["value"],
        markevery=[last],
        zorder=3.0,
        gid=plot_panels.svg_id(axes, "mean", place, family),
        **look.of_line(),
    )


def _legend_entries(looks: Mapping[Line, LineLook]) -> list[Line2D]:
    """An entry for each label; black where its line has another colour in each panel."""
    from matplotlib.lines import Line2D

    in_black = plot_panels.labels_of_several_families(looks)
    entries: dict[str, Line2D] = {}
    for line, look in looks.items():
        options = look.of_line()
        if line.label in in_black:
            options["color"] = plot_panels.SEVERAL_FAMILIES
        if line.label not in entries:
            entries[line.label] = Line2D([], [], label=plot_panels.in_words(line.label), **options)
    return list(entries.values())


def _signed_root(kl: np.ndarray) -> np.ndarray:
    """The square root; of a negative estimate of a KL, minus that of its size."""
    root: np.ndarray = np.sign(kl) * np.sqrt(np.abs(kl))
    return root


def _signed_square(root: np.ndarray) -> np.ndarray:
    kl: np.ndarray = np.sign(root) * root**2
    return kl
