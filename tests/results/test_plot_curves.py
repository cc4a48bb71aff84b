"""Curves over updates: means, bands, single runs, axes and legends."""

import math

import pandas as pd
import pytest

from kl_comedy.errors import UserError
from kl_comedy.results.figures import PAGE, WITHOUT_KL, save_figure
from kl_comedy.results.plots import SEEDS_OF_AN_INTERVAL, plot_curves, smooth_curves
from kl_comedy.results.runs import sort_by_groups
from plotted_runs import BETA, FAMILIES, FAMILY, LR, curves, legend_texts, study


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


def test_a_band_ends_where_its_seeds_are_too_few():
    frame = study(families=FAMILIES[:1], betas=("0.1",), rates=("0.1",), free=False, seeds=5)
    points = curves(frame, lambda number, step: number + step)
    # The last seed stops before the second point.
    figure = plot_curves({"r": points.iloc[:-1]}, frame, [FAMILY])
    (filled,) = figure.axes[0].collections
    assert {path.vertices[:, 0].max() for path in filled.get_paths()} <= {0.0}


def test_a_band_is_cut_at_the_range_of_its_metric_and_the_legend_says_so():
    frame = study(families=FAMILIES[:1], betas=("0.1",), rates=("0.1",), free=False, seeds=5)
    values = {"train/reward": lambda number, step: number % 2, "r": lambda number, step: number % 2}
    ends = {}
    for metric, value in values.items():
        figure = plot_curves({metric: curves(frame, value)}, frame, [FAMILY])
        (filled,) = figure.axes[0].collections
        vertices = filled.get_paths()[0].vertices[:, 1]
        ends[metric] = (vertices.min(), vertices.max())
        title = legend_texts(figure)[0].replace("\n", " ")
        assert ("cut at the range of the metric" in title) == (metric == "train/reward")
    assert ends["train/reward"] == (0.0, 1.0)
    assert ends["r"] < (0.0, 1.0), "nothing is known of the range of a metric of a plugin"
    assert ends["r"][1] > 1.0


def test_a_metric_without_a_finite_point_is_refused():
    frame = study()
    with pytest.raises(UserError, match="no finite point of 'r'"):
        plot_curves({"r": curves(frame, lambda number, step: math.nan)}, frame, ["params.name"])


def test_panels_of_curves_share_scales_and_one_legend():
    frame = sort_by_groups(study(), [LR, BETA, FAMILY])
    figure = plot_curves({"train/reward": curves(frame)}, frame, [FAMILY], panels=[LR, BETA])
    drawn = [axes for axes in figure.axes if axes.get_title(loc="left")]
    assert len(drawn) == 6
    for axes in drawn:
        named = [line for line in axes.lines if not line.get_label().startswith("_")]
        assert len(named) == len(FAMILIES) + 1
    assert len({axes.get_ylim() for axes in drawn}) == 1
    assert drawn[0].get_title(loc="left") == "learning rate 0.0001, beta 0.05"
    assert drawn[5].get_title(loc="left") == "learning rate 0.0004, beta 1.0"
    assert [axes.get_ylabel() for axes in drawn] == ["training reward\n(per completion)", "", ""] * 2
    assert [bool(axes.get_xlabel()) for axes in drawn] == [False] * 3 + [True] * 3
    assert figure.get_figwidth() == PAGE
    title, texts = legend_texts(figure)
    assert sorted(texts) == ["k1 in loss", "k1 in reward total", "k3 in loss", "no KL"]
    assert title == "mean of 2 seeds, single runs thin or small (no interval below 5 seeds)"
    colours = set()
    for axes in drawn:
        colours.update(line.get_color() for line in axes.lines if line.get_label() == "no KL")
    assert colours == {WITHOUT_KL["color"]}


def test_the_legend_counts_the_seeds_where_they_differ():
    frame = study(families=FAMILIES[:2], rates=("0.1",), free=False)
    frame = frame[frame["run_id"] != f"0.1 {FAMILIES[0]}|0.1|1"]
    figure = plot_curves({"r": curves(frame)}, frame, [FAMILY], panels=[BETA])
    assert legend_texts(figure)[1] == ["k1 in loss (n=1–2)", "k1 in reward total (n=2)"]


def test_smoothing_takes_the_last_points_of_each_run():
    points = pd.DataFrame(
        [("b", 1, 1.0), ("b", 2, 3.0), ("b", 3, math.nan), ("b", 4, 8.0), ("a", 1, 10.0), ("a", 2, 20.0)],
        columns=["run_id", "step", "value"],
        index=[5, 6, 7, 8, 1, 2],
    )
    smooth = smooth_curves(points, 2)
    assert smooth_curves(points, 1) is points
    assert smooth["value"].tolist() == [1.0, 2.0, 3.0, 8.0, 10.0, 15.0]
    assert smooth[["run_id", "step"]].equals(points[["run_id", "step"]])
    infinite = smooth_curves(points.assign(value=[1.0, math.inf, 3.0, 1.0, 1.0, 1.0]), 3)["value"].tolist()
    assert infinite == pytest.approx([1.0, 1.0, 2.0, 2.0, 1.0, 1.0]), "what is not finite is left out"


@pytest.mark.parametrize("log", [(), ("r",)])
def test_wide_bands_are_cut_and_no_curve_is(log):
    """Panels share the axis, and the first has the smallest values: what is cut must not be the others' means."""
    frame = sort_by_groups(study(families=FAMILIES[:1], rates=("0.1",), free=False, seeds=5), [BETA])
    # Five seeds each: four of 1 and one of 10, times a power of ten.
    points = curves(frame, lambda number, step: 10.0 ** (number // 5) * (10.0 if number % 5 == 4 else 1.0))
    drawn = plot_curves({"r": points}, frame, [FAMILY], panels=[BETA], log=log).axes
    low, high = drawn[0].get_ylim()
    assert {axes.get_ylim() for axes in drawn} == {(low, high)}
    assert len(drawn) == 3
    # The runs are from 1 to 1000, and the interval of the last panel is 280 ± 500.
    if log:
        assert high <= 1300.0
        assert low == pytest.approx(1 / 1.3)
    else:
        assert high <= 1000.0 + 0.05 * 999.0
        assert low == pytest.approx(1.0 - 0.05 * 999.0)
    for axes, smallest in zip(drawn, (1.0, 10.0, 100.0), strict=True):
        (line,) = axes.lines
        (filled,) = axes.collections
        mean = 2.8 * smallest
        if log:
            mean = smallest * 10**0.2
        assert line.get_ydata().tolist() == pytest.approx([mean, mean])
        assert low < mean < high
        if log:
            ends = filled.get_paths()[0].vertices[:, 1]
            # The deviation of four 0 and one 1 is sqrt(0.2).
            reach = 10 ** (2.776445 * math.sqrt(0.2) / math.sqrt(5))
            assert (ends.min(), ends.max()) == pytest.approx((mean / reach, mean * reach), rel=1e-4)


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
