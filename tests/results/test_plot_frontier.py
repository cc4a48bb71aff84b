"""Reward against KL: marks, axes, and what is refused."""

import math

import pytest

from kl_comedy.errors import UserError
from kl_comedy.results.figures import COLUMN
from kl_comedy.results.plots import frontier
from kl_comedy.results.runs import sort_by_groups
from plotted_runs import FAMILIES, FAMILY, frontier_study, legend_texts, study, study_with_outcomes


def test_the_axes_of_a_frontier_hold_the_runs_and_not_the_widest_bar():
    frame = study(betas=("0.1", "1.0"), rates=("0.1",), seeds=5)
    rewards = [0.4 + number / 100 for number in range(len(frame))]
    frame = frame.assign(**{"metrics.r": rewards, "metrics.kl": range(len(frame))})
    figure = frontier(sort_by_groups(frame, [FAMILY]), [FAMILY], ["r"], "metrics.kl")
    (axes,) = figure.axes
    low, high = axes.get_ylim()
    # The runs are from 0.4 to 0.74; the bars of five seeds, of 2.8 deviations, are wider.
    assert low < 0.4
    assert high > 0.74
    assert high - low == pytest.approx(1.5 * 0.34)
    assert axes.get_xscale() == "linear", "one KL is 0"
    assert axes.get_xlim() == pytest.approx((0.0, 1.3 * 34))
    assert figure.get_figwidth() == COLUMN
    figure.draw_without_rendering()
    assert figure.legends[0].get_window_extent().x1 <= figure.bbox.x1, "a long title is broken into lines"
    assert legend_texts(figure)[1][-2:] == ["beta 0.1", "beta 1.0"], "a beta is the size of its mark"
    assert not axes.texts, "and no label beside it"


def test_a_frontier_marks_what_collapsed():
    frame = frontier_study()
    collapsed = frame["run_id"] == f"0.1 {FAMILIES[0]}|0.1|0"
    figure = frontier(frame.assign(collapsed=collapsed), [FAMILY], ["r"], "metrics.kl")
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert axes.get_xlim() == pytest.approx((2.0 / 1.5, 3.0))
    assert [line.get_fillstyle() for line in axes.lines].count("left") == 1, "one of two seeds collapsed"
    joins = [line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_marker() in ("None", "")]
    assert sum(line.get_linestyle() == ":" for line in joins) == 1, "no solid line to a collapsed end"
    assert legend_texts(figure)[1][-2:] == ["some runs collapsed", "all runs collapsed"]


def test_a_frontier_without_a_finite_value_is_refused():
    frame = frontier_study().assign(**{"metrics.r": math.nan})
    with pytest.raises(UserError, match="no run has a finite 'r'"):
        frontier(frame, [FAMILY], ["r"], "metrics.kl")


def test_a_plane_of_runs_without_certificates_is_refused():
    with pytest.raises(UserError, match="relative_bias"):
        frontier(frontier_study(), [FAMILY], ["r"], "metrics.kl", certificates=True)


def test_a_long_name_is_broken_and_not_cut_off():
    long = "exact_reverse_token in reward to_go x prefix_previous<=8 truncate own baseline"
    figure = frontier(study_with_outcomes((long, *FAMILIES)), [FAMILY], ["r"], "metrics.kl")
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x1 <= figure.bbox.x1
    assert box.y0 >= 0.0
    name = next(text for text in legend_texts(figure)[1] if text.startswith("exact KL"))
    assert "\n" in name
    assert name.endswith("own baseline")


def test_one_long_name_does_not_put_all_names_into_one_column():
    long_name = "exact_reverse_token in reward to_go x prefix_previous<=8 truncate own baseline and a remark on it"
    frame = study_with_outcomes([f"k{number}_reverse_token in loss" for number in range(9)] + [long_name])
    figure = frontier(frame.assign(**{"metrics.s": 0.5}), [FAMILY], ["r", "s"], "metrics.kl")
    (legend,) = figure.legends
    assert legend._ncols == 2
