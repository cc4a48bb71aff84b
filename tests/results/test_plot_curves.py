"""Curves over updates: means, bands and single runs; files are the same twice."""

import math

import pandas as pd
import pytest

from kl_comedy.errors import UserError
from kl_comedy.results.figures import save_figure
from kl_comedy.results.plots import SEEDS_OF_AN_INTERVAL, plot_curves
from plotted_runs import FAMILIES, FAMILY, curves, legend_texts, study


def test_a_line_is_the_mean_and_its_band_the_interval():
    frame = study(families=FAMILIES[:1], betas=("0.1",), rates=("0.1",), free=False, seeds=5)
    frame = pd.concat([frame, frame.iloc[:1].assign(run_id="x", **{"params.name": "_$k"})])
    figure = plot_curves({"r": curves(frame, lambda number, step: number + step)}, frame, ["params.name"])
    (axes,) = figure.axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[2.0, 7.0], [5.0, 10.0]]
    assert legend_texts(figure)[1] == ["0.1 k1 in loss-0.1 (n=5)", r" \$k (n=1)"]
    assert axes.get_xlabel() == "optimizer updates"
    assert axes.get_ylabel() == "r"
    (filled,) = axes.collections
    bounds = filled.get_datalim(axes.transData)
    # Student's t of 0, 1, 2, 3, 4.
    half = 2.776445 * math.sqrt(2.5) / math.sqrt(5)
    assert (bounds.y0, bounds.y1) == pytest.approx((2.0 - half, 7.0 + half), abs=1e-5)


def test_fewer_than_five_seeds_are_single_runs_without_a_band():
    frame = study(families=FAMILIES[:1], betas=("0.1",), rates=("0.1",), free=False, seeds=SEEDS_OF_AN_INTERVAL - 1)
    figure = plot_curves({"r": curves(frame, lambda number, step: number + step)}, frame, [FAMILY])
    (axes,) = figure.axes
    assert not axes.collections
    *singles, mean = axes.lines
    assert [line.get_ydata().tolist() for line in singles] == [[number, number + 5] for number in range(4)]
    assert mean.get_ydata().tolist() == [1.5, 6.5]
    assert all(line.get_linewidth() < mean.get_linewidth() for line in singles)
    assert legend_texts(figure)[0] == "mean of 4 seeds, single runs thin or small (no interval\nbelow 5 seeds)"


def test_a_metric_without_a_finite_point_is_refused():
    frame = study()
    with pytest.raises(UserError, match="no finite point of 'r'"):
        plot_curves({"r": curves(frame, lambda number, step: math.nan)}, frame, ["params.name"])


@pytest.mark.parametrize("suffix", ["svg", "pdf", "png"])
def test_files_are_the_same_twice_and_hold_no_date(tmp_path, suffix):
    frame = study(families=FAMILIES[:1], betas=("0.1",), rates=("0.1",), free=False)

    def saved(name):
        file = tmp_path / f"{name}.{suffix}"
        save_figure(plot_curves({"grad/norm": curves(frame)}, frame, [FAMILY], log=["grad/norm"]), file)
        return file.read_bytes()

    first = saved("first")
    assert first == saved("second")
    assert b"Date" not in first
