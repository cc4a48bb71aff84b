"""Which runs stand in which panel, what a line is called, and the order of groups."""

from itertools import pairwise, product

import pytest

from kl_comedy.results.compare import groups_of
from kl_comedy.results.plots import MOST_LINES, line_label, lines_and_panels, panels_of, plot_curves
from kl_comedy.results.runs import sort_by_groups, sort_key
from plotted_runs import BETA, FAMILIES, FAMILY, LABEL, LR, curves, study


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


def test_a_long_title_stays_above_its_panel():
    frame = study(families=FAMILIES[:1], betas=("0.1",), rates=("1", "2", "3", "4"), free=False)
    frame = frame.assign(**{"tags.sweep": "masks by the sign of the advantage " + frame[LR]})
    figure = plot_curves({"r": curves(frame)}, frame, [FAMILY], panels=["tags.sweep"])
    figure.draw_without_rendering()
    boxes = [axes._left_title.get_window_extent() for axes in figure.axes]
    assert len(boxes) == 4
    assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))
