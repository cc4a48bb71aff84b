"""Which runs stand in which panel, what a line is called and how it looks, what axes and legends say."""

import math

import pandas as pd
import pytest

from kl_comedy.errors import UserError
from kl_comedy.tracking.compare import groups_of
from kl_comedy.tracking.plots import (
    MOST_LINES,
    frontier,
    line_label,
    lines_and_panels,
    panels_of,
    plot_curves,
    plot_families,
    smooth_curves,
    styles,
)
from kl_comedy.tracking.runs import sort_by_groups, sort_key, with_derived

LABEL, FAMILY, BETA, LR = "tags.kl.label", "tags.kl.family", "tags.kl.betas", "params.optimizer.lr"
FAMILIES = ("k1_reverse_token in loss", "k1_reverse_token in reward total", "k3_reverse_token in loss")


def study(families=FAMILIES, betas=("0.05", "0.1", "1.0"), rates=("0.0001", "0.0004"), seeds=2, free=True):
    labels = [f"{beta} {family}" for family in families for beta in betas] + (["no KL"] if free else [])
    rows = [
        {"run_id": f"{label}|{rate}|{seed}", LABEL: label, LR: rate, "params.name": f"{label}-{rate}"}
        for seed in range(seeds)
        for rate in rates
        for label in labels
    ]
    return with_derived(pd.DataFrame(rows))


def curves(frame, value=lambda at, step: step / 10):
    rows = [(run, step, value(at, step)) for at, run in enumerate(frame["run_id"]) for step in (0, 5)]
    return pd.DataFrame(rows, columns=["run_id", "step", "value"])


def legend_texts(figure):
    (legend,) = figure.legends
    return legend.get_title().get_text(), [text.get_text() for text in legend.get_texts()]


def test_runs_without_kl_stand_in_every_panel_of_their_rate_and_in_none_of_their_own():
    panels = panels_of(study(), [LR, BETA])
    assert [panel.title for panel in panels] == [
        f"optimizer.lr={rate}, beta {beta}" for rate in ("0.0001", "0.0004") for beta in ("0.05", "0.1", "1.0")
    ]
    for panel in panels:
        labels = panel.frame[LABEL].value_counts()
        assert labels["no KL"] == 2 and labels.sum() == 2 * (len(FAMILIES) + 1)
        assert panel.frame[LR].nunique() == 1 and panel.title.startswith(f"optimizer.lr={panel.frame[LR].iloc[0]}")
    frame = study()
    lonely = frame[(frame[LR] == "0.0001") | (frame[LABEL] == "no KL")]
    titles = [panel.title for panel in panels_of(lonely, [LR, FAMILY])]
    assert titles[-1] == "optimizer.lr=0.0004, no KL" and len(titles) == len(FAMILIES) + 1
    assert [panel.title for panel in panels_of(study(), [LR])] == ["optimizer.lr=0.0001", "optimizer.lr=0.0004"]
    assert [panel.title for panel in panels_of(frame, [])] == [""]


@pytest.mark.parametrize(
    ("frame", "lines", "panels"),
    [
        (study(), [FAMILY], [LR, BETA]),
        (study(betas=("0.05", "0.1", "0.2", "1.0"), rates=("0.1",)), [BETA], [FAMILY]),
        (study(betas=("0.1",)), [LR, LABEL], []),  # 8 lines
        (study(betas=("0.1",), rates=("1", "2", "3")), [FAMILY], [LR]),
    ],
)
def test_more_lines_than_one_can_tell_apart_are_spread_over_panels(frame, lines, panels):
    assert lines_and_panels(frame, [LR, LABEL]) == (lines, panels)
    assert bool(panels) == (len(groups_of(frame, [LR, LABEL])) > MOST_LINES)


def test_names_that_separate_what_no_other_key_does_are_not_pooled_away():
    frame = study()
    assert lines_and_panels(frame, ["params.name", LABEL]) == (["params.name", LABEL], [])
    assert lines_and_panels(frame, ["params.name", LR, LABEL])[1] == [LR, BETA]


def test_what_lines_are_called_and_how_they_look():
    assert line_label([LR, FAMILY, BETA], ["0.1", "k1 in loss", "0.3"]) == "optimizer.lr=0.1, k1 in loss, beta 0.3"
    assert line_label([LR, FAMILY, BETA], ["0.1", "no KL", "0"]) == "optimizer.lr=0.1, no KL"
    assert line_label([BETA], ["0"]) == line_label([FAMILY], ["no KL"]) == line_label([LABEL], ["no KL"]) == "no KL"
    assert line_label([], []) == "all runs"
    look = styles([f"line {at}" for at in range(60)] + ["no KL"])
    assert len({(style["color"], style["marker"]) for style in look.values()}) == 61, "marks tell apart without colour"
    eight = [style for label, style in look.items() if label != "no KL"][:MOST_LINES]
    assert len({style["marker"] for style in eight}) == MOST_LINES
    assert look["no KL"] == styles(["no KL"])["no KL"] and look["no KL"]["linestyle"] == ":"


def test_groups_are_ordered_by_what_they_say():
    shuffled = study().sample(frac=1.0, random_state=1)
    labels = list(dict.fromkeys(sort_by_groups(shuffled, [LR, LABEL])[LABEL]))
    assert labels == ["no KL", *(f"{beta} {family}" for family in sorted(FAMILIES) for beta in ("0.05", "0.1", "1.0"))]
    ordered = sort_by_groups(shuffled, [LABEL])
    for label in labels:
        assert list(ordered[ordered[LABEL] == label]["run_id"]) == list(shuffled[shuffled[LABEL] == label]["run_id"])
    texts = ["", "a", "10", "9", "é1", "1e-3", "nan", "-", "9a", " "]
    assert sorted(sorted(texts, key=lambda text: sort_key("params.name", text))) == sorted(texts), (
        "any texts have an order"
    )


def test_a_line_is_the_mean_and_its_band_the_interval():
    frame = study(families=FAMILIES[:1], betas=("0.1",), rates=("0.1",), free=False)
    frame = pd.concat([frame, frame.iloc[:1].assign(run_id="x", **{"params.name": "_$k"})])
    figure = plot_curves({"r": curves(frame, lambda at, step: at + step)}, frame, ["params.name"])
    (axes,) = figure.axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[0.5, 5.5], [2.0, 7.0]]
    assert legend_texts(figure)[1] == [f"0.1 {FAMILIES[0]}-0.1 (n=2)", r" _\$k (n=1)"]
    assert axes.get_xlabel() == "step (optimizer updates)" and axes.get_ylabel() == "r"
    filled, empty = axes.collections
    bounds = filled.get_datalim(axes.transData)
    assert (bounds.y0, bounds.y1) == pytest.approx((0.5 - 6.353102, 5.5 + 6.353102))
    assert len(empty.get_paths()) == 0 or math.isnan(empty.get_paths()[0].vertices).all()
    with pytest.raises(UserError, match="no finite point of 'r'"):
        plot_curves({"r": curves(frame, lambda at, step: math.nan)}, frame, ["params.name"])


def test_panels_of_curves_share_scales_names_and_one_legend():
    frame = sort_by_groups(study(), [LR, BETA, FAMILY])
    figure = plot_curves({"train/reward": curves(frame)}, frame, [FAMILY], panels=[LR, BETA])
    drawn = [axes for axes in figure.axes if axes.get_title(loc="left")]
    assert len(drawn) == 6 and all(len(axes.lines) == len(FAMILIES) + 1 for axes in drawn)
    assert len({axes.get_ylim() for axes in drawn}) == 1
    assert [axes.get_ylabel() for axes in drawn] == ["train/reward", "", "", "", "train/reward", ""]
    assert [bool(axes.get_xlabel()) for axes in drawn] == [False, False, True, True, True, True]
    title, texts = legend_texts(figure)
    assert sorted(texts) == sorted(["no KL", *FAMILIES]) and title == "mean and 95% interval of 2 runs"
    colours = {line.get_color() for axes in drawn for line in axes.lines if line.get_label() == "no KL"}
    assert colours == {styles(["no KL"])["no KL"]["color"]}


def test_the_legend_has_each_name_once_with_its_counts_everywhere():
    frame = study(families=FAMILIES[:2], rates=("0.1",), free=False)
    counted = frame[frame["run_id"] != f"0.1 {FAMILIES[0]}|0.1|1"]
    figure = plot_curves({"r": curves(counted)}, counted, [FAMILY], panels=[BETA])
    assert legend_texts(figure)[1] == [f"{FAMILIES[0]} (n=1–2)", f"{FAMILIES[1]} (n=2)"]


def test_smoothing_takes_each_runs_own_last_points():
    points = pd.DataFrame(
        [("b", 1, 1.0), ("b", 2, 3.0), ("b", 3, math.nan), ("b", 4, 8.0), ("a", 1, 10.0), ("a", 2, 20.0)],
        columns=["run_id", "step", "value"],
        index=[5, 6, 7, 8, 1, 2],
    )
    assert smooth_curves(points, 1) is points
    smooth = smooth_curves(points, 2)
    assert smooth["value"].tolist() == [1.0, 2.0, 3.0, 8.0, 10.0, 15.0]
    assert smooth[["run_id", "step"]].equals(points[["run_id", "step"]])
    infinite = smooth_curves(points.assign(value=[1.0, math.inf, 3.0, 1.0, 1.0, 1.0]), 3)["value"].tolist()
    assert infinite == pytest.approx([1.0, 1.0, 2.0, 2.0, 1.0, 1.0]), "what is not finite is left out"


@pytest.mark.parametrize("log", [(), ("r",)])
def test_bands_of_two_seeds_are_cut_and_no_curve_is(log):
    """Panels share the axis, and the first has the smallest values: what is cut must not be the others' means."""
    frame = sort_by_groups(study(families=FAMILIES[:1], rates=("0.1",), free=False), [BETA])
    points = curves(frame, lambda at, step: 10.0 ** (at // 2) * (1 + at % 2))
    drawn = plot_curves({"r": points}, frame, [FAMILY], panels=[BETA], log=log).axes
    low, high = drawn[0].get_ylim()
    assert {axes.get_ylim() for axes in drawn} == {(low, high)} and len(drawn) == 3
    assert high == pytest.approx(260.0 if log else 200.0 + 0.05 * 199.0), "the interval is 150 ± 635"
    assert low == pytest.approx(1.5 / 1.3 if log else 1.0 - 0.05 * 199.0)
    for axes, mean in zip(drawn, (1.5, 15.0, 150.0), strict=True):
        (line,), (filled,) = axes.lines, axes.collections
        assert line.get_ydata().tolist() == [mean, mean] and low < mean < high
        assert not log or filled.get_paths()[0].vertices[:, 1].min() > 0, "a band that reaches 0 ends at the bottom"


def test_the_axes_of_a_frontier_hold_the_runs_and_not_the_widest_bar():
    frame = study(betas=("0.1", "1.0"), rates=("0.1",))
    frame = frame.assign(**{"metrics.r": [0.4 + at / 100 for at in range(len(frame))], "metrics.kl": range(len(frame))})
    (axes,) = frontier(sort_by_groups(frame, [FAMILY]), [FAMILY], ["r"], "metrics.kl").axes
    low, high = axes.get_ylim()
    assert low < 0.4 and high > 0.53 and high - low == pytest.approx(1.5 * 0.13), "two seeds: t has 12.7 deviations"
    assert axes.get_xlim() == pytest.approx((0.0, 1.3 * 13))
    dead = frame.assign(collapsed=(frame["run_id"] == f"0.1 {FAMILIES[0]}|0.1|0"))
    (axes,) = plot_families("frontier", dead, [FAMILY], ["r"], "metrics.kl").axes
    assert "0.1 (1/2)" in [text.get_text() for text in axes.texts]
    assert sum(line.get_markerfacecolor() == "none" for line in axes.lines) == 1
    assert sum(line.get_linestyle() == ":" for line in axes.lines) == 1, "no solid line to a collapsed end"
    with pytest.raises(UserError, match="no run has a finite 'r'"):
        frontier(frame.assign(**{"metrics.r": math.nan}), [FAMILY], ["r"], "metrics.kl")
    with pytest.raises(UserError, match="relative_bias"):
        plot_families("plane", frame, [FAMILY], ["r"], "metrics.kl")
