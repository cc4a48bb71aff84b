"""Which runs stand in which panel, what a line is called and how it looks, what axes and legends say."""

import math
import re
from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from kl_comedy.errors import UserError
from kl_comedy.tracking.compare import groups_of
from kl_comedy.tracking.figures import COLUMN, PAGE, WITHOUT_KL, save_figure
from kl_comedy.tracking.metric_labels import LABELS, axis_label, metric_label
from kl_comedy.tracking.plots import (
    METHODS,
    MOST_LINES,
    frontier,
    heatmap,
    line_label,
    lines_and_panels,
    panels_of,
    plot_curves,
    smooth_curves,
    styles,
)
from kl_comedy.tracking.runs import sort_by_groups, sort_key, with_derived

LABEL, FAMILY, BETA, LR = "tags.kl.label", "tags.kl.family", "tags.kl.betas", "params.optimizer.lr"
FAMILIES = ("k1_reverse_token in loss", "k1_reverse_token in reward total", "k3_reverse_token in loss")


def study(families=FAMILIES, betas=("0.05", "0.1", "1.0"), rates=("0.0001", "0.0004"), free=True):
    labels = [f"{beta} {family}" for family in families for beta in betas] + (["no KL"] if free else [])
    rows = [
        {"run_id": f"{label}|{rate}|{seed}", LABEL: label, LR: rate, "params.name": f"{label}-{rate}"}
        for seed, rate, label in product(range(2), rates, labels)
    ]
    return with_derived(pd.DataFrame(rows))


def curves(frame, value=lambda at, step: step / 10):
    rows = [(run, step, value(at, step)) for at, run in enumerate(frame["run_id"]) for step in (0, 5)]
    return pd.DataFrame(rows, columns=["run_id", "step", "value"])


def legend_texts(figure):
    (legend,) = figure.legends
    return legend.get_title().get_text(), [text.get_text() for text in legend.get_texts()]


def test_runs_without_kl_stand_in_every_panel_of_their_rate():
    frame = study()
    panels = panels_of(frame, [LR, BETA])
    assert [title for title, _ in panels] == [
        f"optimizer.lr={rate}, beta {beta}" for rate in ("0.0001", "0.0004") for beta in ("0.05", "0.1", "1.0")
    ]
    for title, runs in panels:
        labels = runs[LABEL].value_counts()
        assert labels["no KL"] == 2 and labels.sum() == 2 * (len(FAMILIES) + 1)
        assert runs[LR].nunique() == 1 and title.startswith(f"optimizer.lr={runs[LR].iloc[0]}")
    lonely = panels_of(frame[(frame[LR] == "0.0001") | (frame[LABEL] == "no KL")], [LR, FAMILY])
    assert lonely[-1][0] == "optimizer.lr=0.0004, no KL" and len(lonely) == len(FAMILIES) + 1
    assert [title for title, _ in panels_of(frame, [LR])] == ["optimizer.lr=0.0001", "optimizer.lr=0.0004"]
    assert [title for title, _ in panels_of(frame, [])] == [""]


@pytest.mark.parametrize(
    ("frame", "lines", "panels"),
    [
        (study(), [FAMILY], [LR, BETA]),
        (study(betas=("0.05", "0.1", "0.2", "1.0"), rates=("0.1",)), [BETA], [FAMILY]),
        (study(betas=("0.1",)), [LR, LABEL], []),  # 8 lines
        (study(betas=("0.1",), rates=("1", "2", "3")), [FAMILY], [LR]),
    ],
)
def test_more_lines_than_eight_are_spread_over_panels(frame, lines, panels):
    assert lines_and_panels(frame, [LR, LABEL]) == (lines, panels)
    assert bool(panels) == (len(groups_of(frame, [LR, LABEL])) > MOST_LINES)


def test_names_that_separate_what_no_other_key_does_are_not_pooled():
    assert lines_and_panels(study(), ["params.name", LABEL]) == (["params.name", LABEL], [])
    assert lines_and_panels(study(), ["params.name", LR, LABEL])[1] == [LR, BETA]


def test_labels_and_styles_of_lines():
    assert line_label([LR, FAMILY, BETA], ["0.1", "k1 in loss", "0.3"]) == "optimizer.lr=0.1, k1 in loss, beta 0.3"
    assert line_label([LR, FAMILY, BETA], ["0.1", "no KL", "0"]) == "optimizer.lr=0.1, no KL"
    assert line_label([BETA], ["0"]) == line_label([FAMILY], ["no KL"]) == line_label([LABEL], ["no KL"]) == "no KL"
    assert line_label([], []) == "all runs"
    look = styles([f"line {at}" for at in range(60)] + ["no KL"])
    assert len({(style["color"], style["marker"]) for style in look.values()}) == 61
    eight = [style for label, style in look.items() if label != "no KL"][:MOST_LINES]
    assert len({style["marker"] for style in eight}) == MOST_LINES
    assert look["no KL"] == styles(["no KL"])["no KL"] == WITHOUT_KL


def test_a_method_looks_the_same_in_every_figure_and_unlike_its_neighbours():
    others = [f"{estimator}_reverse_token in loss x prefix" for estimator in ("k1", "k3", "exact", "mine")]
    whole = styles([*METHODS[:3], *others, "no KL"], [*METHODS[:3], *others, "no KL"])
    assert len({(style["color"], style["marker"]) for style in whole.values()}) == 8
    for names in (METHODS[2:3], others[1:2], ("no KL", METHODS[0], others[0])):
        labels = [f"0.1 {name}" if name != "no KL" else name for name in names]
        assert list(styles(labels, names).values()) == [whole[name] for name in names]
    betas = styles(["beta 0.1", "beta 0.3"], [METHODS[0], METHODS[0]])
    assert betas["beta 0.1"]["color"] != betas["beta 0.3"]["color"], "where only beta differs, a look is a beta"


def test_axes_say_every_documented_metric_in_words_with_its_unit():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| .* \| (.*) \|$", page, flags=re.MULTILINE)
    named = [(name, unit) for name, unit in rows if name.startswith("eval/<") or "/<name>" not in name]
    assert len(named) > 90
    for name, unit in named:
        if name.endswith("/<name>"):
            continue
        given = name.replace("<set>", "heldout").replace("<level>", "sequence").replace("<k>", "k1")
        words, shown = metric_label(re.sub(r"<[a-z]+>", "1", given))
        fallback = given.replace("_", " ").replace("/", ": ")
        assert words != fallback and not re.search(r"[_<>/](?!π|ref|μ)", words.replace("π/", "")), name
        for measure in ("nats", "s", "tokens", "tokens/s"):
            assert re.match(rf"{measure}\b(?!/)", unit) is None or shown.startswith(measure), (name, unit, shown)
    assert axis_label("eval/two_digits/policy/entropy") == "policy entropy on two digits\n(nats/token)"
    assert metric_label("train/reward/x/score") == ("training reward: x/score", "per completion")
    assert len(LABELS) < len(named) + 6, "and hardly one that is not documented"


def test_groups_are_sorted_by_rate_family_and_beta():
    shuffled = study().sample(frac=1.0, random_state=1)
    labels = list(dict.fromkeys(sort_by_groups(shuffled, [LR, LABEL])[LABEL]))
    assert labels == ["no KL", *(f"{beta} {family}" for family in sorted(FAMILIES) for beta in ("0.05", "0.1", "1.0"))]
    ordered = sort_by_groups(shuffled, [LABEL])
    for label in labels:
        assert list(ordered[ordered[LABEL] == label]["run_id"]) == list(shuffled[shuffled[LABEL] == label]["run_id"])
    texts = ["", "a", "10", "9", "é1", "1e-3", "nan", "-", "9a", " "]
    assert len(sorted(texts, key=sort_key)) == len(texts), "any texts have an order"


def test_a_line_is_the_mean_and_its_band_the_interval():
    frame = study(families=FAMILIES[:1], betas=("0.1",), rates=("0.1",), free=False)
    frame = pd.concat([frame, frame.iloc[:1].assign(run_id="x", **{"params.name": "_$k"})])
    figure = plot_curves({"r": curves(frame, lambda at, step: at + step)}, frame, ["params.name"])
    (axes,) = figure.axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[0.5, 5.5], [2.0, 7.0]]
    assert legend_texts(figure)[1] == ["0.1 k1 in loss-0.1 (n=2)", r" \$k (n=1)"]
    assert axes.get_xlabel() == "optimizer updates" and axes.get_ylabel() == "r"
    filled, empty = axes.collections
    bounds = filled.get_datalim(axes.transData)
    assert (bounds.y0, bounds.y1) == pytest.approx((0.5 - 6.353102, 5.5 + 6.353102))
    assert len(empty.get_paths()) == 0 or math.isnan(empty.get_paths()[0].vertices).all()
    with pytest.raises(UserError, match="no finite point of 'r'"):
        plot_curves({"r": curves(frame, lambda at, step: math.nan)}, frame, ["params.name"])


def test_panels_of_curves_share_scales_and_one_legend():
    frame = sort_by_groups(study(), [LR, BETA, FAMILY])
    figure = plot_curves({"train/reward": curves(frame)}, frame, [FAMILY], panels=[LR, BETA])
    drawn = [axes for axes in figure.axes if axes.get_title(loc="left")]
    assert len(drawn) == 6 and all(len(axes.lines) == len(FAMILIES) + 1 for axes in drawn)
    assert len({axes.get_ylim() for axes in drawn}) == 1
    assert [title.get_text() for title in (drawn[0]._left_title, drawn[5]._left_title)] == [
        "learning rate 0.0001, beta 0.05",
        "learning rate 0.0004, beta 1.0",
    ]
    assert [axes.get_ylabel() for axes in drawn] == ["training reward\n(per completion)", "", ""] * 2
    assert [bool(axes.get_xlabel()) for axes in drawn] == [False] * 3 + [True] * 3
    assert figure.get_figwidth() == PAGE
    title, texts = legend_texts(figure)
    assert (
        sorted(texts) == ["k1 in loss", "k1 in reward total", "k3 in loss", "no KL"]
        and title == "mean and 95% interval of 2 seeds"
    )
    colours = {line.get_color() for axes in drawn for line in axes.lines if line.get_label() == "no KL"}
    assert colours == {WITHOUT_KL["color"]}
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
    assert smooth_curves(points, 1) is points and smooth["value"].tolist() == [1.0, 2.0, 3.0, 8.0, 10.0, 15.0]
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
    assert low == pytest.approx(1 / 1.3 if log else 1.0 - 0.05 * 199.0)
    for axes, mean in zip(drawn, (1.5, 15.0, 150.0), strict=True):
        (line,), (filled,) = axes.lines, axes.collections
        mean = math.sqrt(mean / 1.5 * mean / 0.75) if log else mean
        assert line.get_ydata().tolist() == pytest.approx([mean, mean]) and low < mean < high
        if log:
            ends, reach = filled.get_paths()[0].vertices[:, 1], math.exp(12.7062 * math.log(2) / 2)
            assert (ends.min(), ends.max()) == pytest.approx((mean / reach, mean * reach), rel=1e-4)


def test_the_axes_of_a_frontier_hold_the_runs_and_not_the_widest_bar():
    frame = study(betas=("0.1", "1.0"), rates=("0.1",))
    frame = frame.assign(**{"metrics.r": [0.4 + at / 100 for at in range(len(frame))], "metrics.kl": range(len(frame))})
    figure = frontier(sort_by_groups(frame, [FAMILY]), [FAMILY], ["r"], "metrics.kl")
    (axes,) = figure.axes
    low, high = axes.get_ylim()
    assert low < 0.4 and high > 0.53 and high - low == pytest.approx(1.5 * 0.13), "two seeds: t has 12.7 deviations"
    assert axes.get_xscale() == "linear" and axes.get_xlim() == pytest.approx((0.0, 1.3 * 13)), "one KL is 0"
    assert figure.get_figwidth() == COLUMN
    figure.draw_without_rendering()
    assert figure.legends[0].get_window_extent().x1 <= figure.bbox.x1, "a long title is broken into lines"
    assert legend_texts(figure)[1][-2:] == ["beta 0.1", "beta 1.0"] and not axes.texts, "sizes of marks, no labels"
    dead = frame.assign(collapsed=(frame["run_id"] == f"0.1 {FAMILIES[0]}|0.1|0"), **{"metrics.kl": 2.0})
    figure = frontier(dead, [FAMILY], ["r"], "metrics.kl")
    (axes,) = figure.axes
    assert axes.get_xscale() == "log" and axes.get_xlim() == pytest.approx((2.0 / 1.5, 3.0))
    assert [line.get_fillstyle() for line in axes.lines].count("left") == 1, "one of two seeds collapsed"
    assert sum(line.get_linestyle() == ":" for line in axes.lines) == 1, "no solid line to a collapsed end"
    assert legend_texts(figure)[1][-2:] == ["some runs collapsed", "all runs collapsed"]
    with pytest.raises(UserError, match="no run has a finite 'r'"):
        frontier(frame.assign(**{"metrics.r": math.nan}), [FAMILY], ["r"], "metrics.kl")
    with pytest.raises(UserError, match="relative_bias"):
        frontier(frame, [FAMILY], ["r"], "metrics.kl", certificates=True)


def test_the_heat_map_has_one_row_without_kl():
    frame = study(rates=("0.1",)).iloc[:-1]
    frame = frame.assign(collapsed=False, **{"metrics.r": [at / 10 for at in range(len(frame))]})
    axes = heatmap(frame, ["r"], [BETA]).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert len(texts) == 10 and texts.count("0.9\nn=1") == 1 and "0.5\nn=2" in texts
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert sorted(rows) == ["k1 in loss", "k1 in reward total", "k3 in loss", "no KL"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.05", "0.1", "1.0"]


def test_files_are_the_same_twice_and_hold_no_date(tmp_path):
    frame = study(families=FAMILIES[:1], betas=("0.1",), rates=("0.1",), free=False)
    for suffix in ("svg", "pdf", "png"):
        for name in ("a", "b"):
            figure = plot_curves({"grad/norm": curves(frame)}, frame, [FAMILY], log=["grad/norm"])
            save_figure(figure, tmp_path / f"{name}.{suffix}")
        first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("a", "b"))
        assert first == second and b"Date" not in first
