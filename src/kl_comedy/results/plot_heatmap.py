"""KL family by beta: the mean over the seeds of a cell."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, cast

from kl_comedy.errors import UserError
from kl_comedy.results.compare import collapsed_runs, groups_of, seeds_of
from kl_comedy.results.figures import COLUMN, PAGE, paper_style
from kl_comedy.results.metric_labels import metric_label
from kl_comedy.results.plot_panels import KL_KEYS, in_words, layout, panels_of
from kl_comedy.results.runs import BETA, FAMILY, NO_KL, sort_key

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


BRIGHT = 0.6
"""Share of the scale of colours from which on a cell's text is black, below white: viridis ends in yellow."""


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
    fitting_columns = max(1, int((PAGE - 1.9) / (0.6 * len(betas))))
    columns = min(len(parts), fitting_columns)
    width = max(COLUMN, min(PAGE, 2.2 + 0.62 * len(betas) * columns))
    row_height = 0.45 + 0.4 * len(families)
    figure, grid = layout(parts, len(metrics), columns=columns, size=(width, row_height))
    for axes_of_metric, metric in zip(grid, metrics, strict=True):
        cells_of_panels = [_cells(runs, f"metrics.{metric}", families, betas) for _, runs in parts]
        means: list[float] = []
        seed_counts: set[int] = set()
        for cells in cells_of_panels:
            means += cells.means.values()
            seed_counts.update(cells.seeds.values())
        if not means:
            raise UserError(f"--metric: no run has a finite {metric!r}")
        for axes, cells, (_, runs) in zip(axes_of_metric, cells_of_panels, parts, strict=True):
            # All panels of a metric have one scale of colours, which the colour bar of the last one shows.
            image = axes.imshow(cells.image(), cmap="viridis", aspect="auto", vmin=min(means), vmax=max(means))
            _write_cells(axes, image, cells, runs, with_counts=len(seed_counts) > 1)
            names = ["\n".join(textwrap.wrap(in_words(name), 18)) for name in families]
            axes.set_xticks(range(len(betas)), betas)
            axes.set_yticks(range(len(families)), names)
            axes.grid(visible=False)
            axes.set_xlabel("beta")
            axes.label_outer(remove_inner_ticks=True)
        figure.colorbar(image, ax=axes_of_metric, label=_colour_bar_label(metric, seed_counts), aspect=30)
    return figure


def _colour_bar_label(metric: str, seed_counts: set[int]) -> str:
    """The metric with its unit, and of how many seeds a cell is the mean."""
    in_brackets = "mean over seeds"
    if len(seed_counts) == 1:
        in_brackets = f"mean of {min(seed_counts)} seeds"
    words, unit = metric_label(metric)
    if unit:
        in_brackets = f"{unit}, {in_brackets}"
    return "\n".join(textwrap.wrap(f"{words} ({in_brackets})", 30))


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
        """The means, ``[family][beta]``."""
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
            if brightness < BRIGHT:
                colour = "w"
        if with_counts:
            text += f"\nn={cells.seeds.get((family, beta), 0)}"
        collapsed = collapsed_runs(members)
        if collapsed:
            text += f"\n{collapsed} of {len(members)}\ncollapsed"
        row = cells.families.index(family)
        axes.text(column_place, row, text, ha="center", va="center", fontsize=6, color=colour)
