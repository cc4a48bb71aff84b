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
from kl_comedy.tracking.metric_labels import LABELS, axis_label, column_head, metric_label, metric_range
from kl_comedy.tracking.plots import (
    MOST_LINES,
    SEEDS_OF_AN_INTERVAL,
    frontier,
    heatmap,
    line_label,
    lines_and_panels,
    panels_of,
    plot_curves,
    smooth_curves,
)
from kl_comedy.tracking.runs import sort_by_groups, sort_key, with_derived

LABEL = "tags.kl.label"
FAMILY = "tags.kl.family"
BETA = "tags.kl.betas"
LR = "params.optimizer.lr"
FAMILIES = ("k1_reverse_token in loss", "k1_reverse_token in reward total", "k3_reverse_token in loss")


def study(families=FAMILIES, betas=("0.05", "0.1", "1.0"), rates=("0.0001", "0.0004"), free=True, seeds=2):
    """So many seeds of each family, beta and learning rate; with ``free`` also without KL for each rate."""
    labels = [f"{beta} {family}" for family, beta in product(families, betas)]
    if free:
        labels.append("no KL")
    rows = []
    for seed, rate, label in product(range(seeds), rates, labels):
        run = {"run_id": f"{label}|{rate}|{seed}", LABEL: label, LR: rate, "params.name": f"{label}-{rate}"}
        rows.append(run)
    return with_derived(pd.DataFrame(rows))


def curves(frame, value=lambda number, step: step / 10):
    """Two points of each run; ``value`` gives that of a run's number at a step."""
    points = []
    for number, run_id in enumerate(frame["run_id"]):
        for step in (0, 5):
            points.append((run_id, step, value(number, step)))
    return pd.DataFrame(points, columns=["run_id", "step", "value"])


def legend_texts(figure):
    (legend,) = figure.legends
    return legend.get_title().get_text(), [text.get_text() for text in legend.get_texts()]


def test_runs_without_kl_stand_in_every_panel_of_their_rate():
    frame = study()
    panels = panels_of(frame, [LR, BETA])
    assert [title for title, _ in panels] == [
        "optimizer.lr=0.0001, beta 0.05",
        "optimizer.lr=0.0001, beta 0.1",
        "optimizer.lr=0.0001, beta 1.0",
        "optimizer.lr=0.0004, beta 0.05",
        "optimizer.lr=0.0004, beta 0.1",
        "optimizer.lr=0.0004, beta 1.0",
    ]
    for title, runs in panels:
        labels = runs[LABEL].value_counts()
        assert labels["no KL"] == 2
        assert labels.sum() == 2 * (len(FAMILIES) + 1)
        assert runs[LR].nunique() == 1
        assert title.startswith(f"optimizer.lr={runs[LR].iloc[0]}")


def test_runs_without_kl_have_a_panel_of_their_own_where_nothing_else_has_their_rate():
    frame = study()
    panels = panels_of(frame[(frame[LR] == "0.0001") | (frame[LABEL] == "no KL")], [LR, FAMILY])
    last_title, _ = panels[-1]
    assert last_title == "optimizer.lr=0.0004, no KL"
    assert len(panels) == len(FAMILIES) + 1


def test_the_titles_of_panels_name_their_keys():
    frame = study()
    assert [title for title, _ in panels_of(frame, [LR])] == ["optimizer.lr=0.0001", "optimizer.lr=0.0004"]
    assert [title for title, _ in panels_of(frame, [])] == [""]


@pytest.mark.parametrize(
    ("frame", "lines", "panels"),
    [
        (study(), [FAMILY], [LR, BETA]),
        (study(betas=("0.05", "0.1", "0.2", "1.0"), rates=("0.1",)), [BETA], [FAMILY]),
        (study(betas=("0.1",)), [LR, LABEL], []),
        (study(betas=("0.1",), rates=("1", "2", "3")), [FAMILY], [LR]),
    ],
    ids=["rates and betas", "one rate", "eight lines", "one beta"],
)
def test_more_lines_than_eight_are_spread_over_panels(frame, lines, panels):
    assert lines_and_panels(frame, [LR, LABEL]) == (lines, panels)
    too_many_lines = len(groups_of(frame, [LR, LABEL])) > MOST_LINES
    assert bool(panels) == too_many_lines


def test_names_that_separate_what_no_other_key_does_are_not_pooled():
    assert lines_and_panels(study(), ["params.name", LABEL]) == (["params.name", LABEL], [])
    _, panels = lines_and_panels(study(), ["params.name", LR, LABEL])
    assert panels == [LR, BETA]


@pytest.mark.parametrize(
    ("keys", "values", "label"),
    [
        ([LR, FAMILY, BETA], ["0.1", "k1 in loss", "0.3"], "optimizer.lr=0.1, k1 in loss, beta 0.3"),
        ([LR, FAMILY, BETA], ["0.1", "no KL", "0"], "optimizer.lr=0.1, no KL"),
        ([BETA], ["0"], "no KL"),
        ([FAMILY], ["no KL"], "no KL"),
        ([LABEL], ["no KL"], "no KL"),
        ([], [], "all runs"),
    ],
)
def test_the_label_of_a_line(keys, values, label):
    assert line_label(keys, values) == label


def test_axes_say_every_documented_metric_in_words_with_its_unit():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| .* \| (.*) \|$", page, flags=re.MULTILINE)
    documented = [(name, unit) for name, unit in rows if name.startswith("eval/<") or "/<name>" not in name]
    assert len(documented) > 90
    for name, unit in documented:
        if name.endswith("/<name>"):
            continue
        example = name.replace("<set>", "heldout").replace("<level>", "sequence").replace("<k>", "k1")
        label, unit_of_label = metric_label(re.sub(r"<[a-z]+>", "1", example))
        label_of_unknown_metric = example.replace("_", " ").replace("/", ": ")
        assert label != label_of_unknown_metric, name
        # Slashes are allowed in ratios of probabilities only.
        assert not re.search(r"[_<>/](?!π|ref|μ)", label.replace("π/", "")), name
        for measure in ("nats", "s", "tokens", "tokens/s"):
            if re.match(rf"{measure}\b(?!/)", unit):
                assert unit_of_label.startswith(measure), (name, unit, unit_of_label)
    assert axis_label("eval/two_digits/policy/entropy") == "policy entropy on two digits\nper token (nats)"
    assert metric_label("train/reward/x/score") == ("training reward: x/score", "per completion")
    assert len(LABELS) < len(documented) + 6, "hardly a label is of a metric that is not documented"


def test_heads_of_columns_have_the_unit_that_a_reader_needs():
    assert column_head("eval/heldout/reward") == "held-out reward"
    assert column_head("kl/exact_reverse_token") == "exact KL(π‖ref) per token (nats)"
    assert column_head("train/length") == "completion length (tokens)"
    assert column_head("train/truncated_share") == "truncated completions"


@pytest.mark.parametrize(
    ("metric", "values", "bounds"),
    [
        ("eval/heldout/reward", [0.2], (0.0, 1.0)),
        ("train/reward", [-1.0, 0.5], (-math.inf, math.inf)),
        ("train/truncated_share", [], (0.0, 1.0)),
        ("value/explained_variance", [], (-math.inf, math.inf)),
        ("eval/heldout/kl/exact_reverse_sequence", [-1e-9, 3.0], (0.0, math.inf)),
        ("kl/k3_reverse_token", [], (0.0, math.inf)),
        ("kl/k1_reverse_token", [], (-math.inf, math.inf)),
        ("kl_error/k3_reverse_token", [], (-math.inf, math.inf)),
        ("my/metric", [], (-math.inf, math.inf)),
    ],
)
def test_the_range_of_a_metric(metric, values, bounds):
    """A reward of another scale shows itself in its values; a KL of -1e-9 is rounding."""
    assert metric_range(metric, values) == bounds


def test_groups_are_sorted_by_rate_family_and_beta():
    shuffled = study().sample(frac=1.0, random_state=1)
    labels = list(dict.fromkeys(sort_by_groups(shuffled, [LR, LABEL])[LABEL]))
    expected = [f"{beta} {family}" for family, beta in product(sorted(FAMILIES), ("0.05", "0.1", "1.0"))]
    assert labels == ["no KL", *expected]
    ordered = sort_by_groups(shuffled, [LABEL])
    for label in labels:  # within a group the order stays
        assert list(ordered[ordered[LABEL] == label]["run_id"]) == list(shuffled[shuffled[LABEL] == label]["run_id"])


def test_any_texts_have_an_order():
    texts = ["", "a", "10", "9", "é1", "1e-3", "nan", "-", "9a", " "]
    assert len(sorted(texts, key=sort_key)) == len(texts)


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


def study_with_outcomes(families):
    frame = study(families=families, betas=("0.1",), rates=("0.1",))
    return frame.assign(**{"metrics.r": 0.5, "metrics.kl": [1.0 + number for number in range(len(frame))]})


def frontier_study():
    """Runs of two betas with a reward each, all with the same KL."""
    frame = study(betas=("0.1", "1.0"), rates=("0.1",))
    rewards = [0.4 + number / 100 for number in range(len(frame))]
    return frame.assign(**{"metrics.r": rewards, "metrics.kl": 2.0})


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


def test_the_heat_map_has_one_row_without_kl():
    frame = study(rates=("0.1",)).iloc[:-1]
    frame = frame.assign(collapsed=False, **{"metrics.r": [number / 10 for number in range(len(frame))]})
    axes = heatmap(frame, ["r"], [BETA]).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert len(texts) == 10
    assert texts.count("0.9\nn=1") == 1
    assert "0.5\nn=2" in texts
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert sorted(rows) == ["k1 in loss", "k1 in reward total", "k3 in loss", "no KL"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.05", "0.1", "1.0"]


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
