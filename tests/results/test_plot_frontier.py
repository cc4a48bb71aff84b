"""Reward against KL: marks, axes, and what is refused."""

import math

import pytest

from kl_comedy.errors import UserError
from kl_comedy.results.plots import frontier
from plotted_runs import FAMILIES, FAMILY, frontier_study, legend_texts


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
