"""A KL family looks the same in every figure: colours, layers and words are read from the SVG."""

import re
from itertools import combinations, product
from xml.etree import ElementTree

import pandas as pd
import pytest

from kl_comedy.results.figures import COLOURS, WITHOUT_KL, svg
from kl_comedy.results.looks import (
    DASHES,
    METHODS,
    OTHER_COLOURS,
    VARIANTS,
    Line,
    family_look,
    line_looks,
    looks_of_families,
    other_look,
    values_beside_family,
)
from kl_comedy.results.plots import frontier, plot_curves
from kl_comedy.results.runs import sort_by_groups, with_derived

LABEL = "tags.kl.label"
FAMILY = "tags.kl.family"
BETA = "tags.kl.betas"
LR = "params.optimizer.lr"
NAME = "params.name"
REWARD = "eval/heldout/reward"
KL = "eval/heldout/kl/exact_reverse_sequence"
K1_REWARD, K3_LOSS, K1_LOSS = METHODS[:3]
GREY = "#737373"
"""WITHOUT_KL as matplotlib writes it into an SVG."""


def runs(families, betas=("0.1",), rates=("0.0001",), seeds=2):
    """Runs of each family (``no KL`` for one), beta, rate and seed, with a final reward and KL of their own."""
    rows = []
    labels = [f"{beta} {family}" for family in families if family != "no KL" for beta in betas]
    if "no KL" in families:
        labels.append("no KL")
    for label, rate, seed in product(labels, rates, range(seeds)):
        row = {"run_id": f"{label}|{rate}|{seed}", LABEL: label, LR: rate, "params.seed": str(seed)}
        number = len(rows)
        row |= {f"metrics.{REWARD}": 0.2 + number / 100, f"metrics.{KL}": 0.5 + number}
        rows.append(row)
    return sort_by_groups(with_derived(pd.DataFrame(rows)), [FAMILY, LR])


def points(frame):
    rows = [(run, step, 0.1 + step / 10) for run in frame["run_id"] for step in (0, 1, 2)]
    return pd.DataFrame(rows, columns=["run_id", "step", "value"])


def drawn(figure):
    """The things with an id of ours in a figure's SVG, in the order in which they are drawn: id to its SVG text."""
    root = ElementTree.fromstring(svg(figure))
    things = {}
    for element in root.iter():
        name = element.get("id", "")
        if re.match(r"(mean|band|run\d+|runs\d+|mark-\w+|join\d+|certificate)\.", name):
            assert name not in things, "an id stands once in a file"
            things[name] = ElementTree.tostring(element, encoding="unicode")
    return things


def colours(things, kind, family=""):
    """The colours of lines and fills of those things whose id begins with ``kind`` and ends with the family's name."""
    ending = re.sub(r"[^A-Za-z0-9_.-]+", "-", family)
    found = set()
    for name, text in things.items():
        if name.startswith(kind) and ending in name:
            found.update(re.findall(r"(?:stroke|fill): (#\w{6})", text))
    return found - {"#ffffff", "#000000"}


def words(figure):
    """The texts of a figure, which matplotlib writes as comments above their outlines."""
    return re.findall(r"<!-- (.*?) -->", svg(figure), re.DOTALL)


def test_a_family_has_one_colour_in_figures_of_different_kinds_and_subsets():
    three = runs(["no KL", K1_LOSS, K3_LOSS])
    curves = drawn(plot_curves({REWARD: points(three)}, three, [LABEL]))
    # Another order, another beta, other neighbours, another kind of figure.
    others = runs([K1_REWARD, K3_LOSS, VARIANTS[0], "no KL"], betas=("0.3", "1.0"))
    marks = drawn(frontier(others, [FAMILY], [REWARD], f"metrics.{KL}"))
    assert colours(curves, "mean", K3_LOSS) == colours(marks, "mark", K3_LOSS) == {"#d55e00"}
    assert colours(curves, "mean", "no KL") == colours(marks, "mark", "no KL") == {GREY}
    every_family = [colours(marks, "mark", family) for family in (K1_REWARD, VARIANTS[0])]
    every_family += [colours(curves, "mean", family) for family in (K1_LOSS, K3_LOSS, "no KL")]
    assert all(len(of_family) == 1 for of_family in every_family)
    for one, other in combinations(every_family, 2):
        assert one != other


def test_a_second_key_is_a_line_style_and_no_colour():
    """What was wrong: with two rates a family occurs twice, and colours were those of places in the legend."""
    frame = runs(["no KL", K1_LOSS, K3_LOSS], rates=("0.0001", "0.0004"))
    things = drawn(plot_curves({REWARD: points(frame)}, frame, [LABEL, LR]))
    assert len([name for name in things if name.startswith("mean")]) == 6
    assert colours(things, "mean", K3_LOSS) == {"#d55e00"}
    assert colours(things, "mean", "no KL") == {GREY}
    for name, text in things.items():
        if name.startswith("mean"):
            place = int(name.split(".")[2])
            # Rates alternate within the families: the second one is dashed in each of them.
            assert ("stroke-dasharray" in text) == (place % 2 == 1)


def test_panels_of_families_keep_their_colours():
    frame = runs(["no KL", K1_LOSS, K3_LOSS], betas=("0.1", "0.3"))
    figure = plot_curves({REWARD: points(frame)}, frame, [BETA], panels=[FAMILY])
    things = drawn(figure)
    assert colours(things, "mean.0", K1_LOSS) == {"#009e73"}
    assert colours(things, "mean.1", K3_LOSS) == {"#d55e00"}
    assert colours(things, "mean", "no KL") == {GREY}
    handles = {handle.get_label(): handle.get_color() for handle in figure.legends[0].get_lines()}
    assert handles == {"no KL": WITHOUT_KL["color"], "beta 0.1": "black", "beta 0.3": "black"}


def test_filled_marks_are_in_front_of_open_ones_and_means_in_front_of_bands():
    frame = runs(["no KL", K1_LOSS, K3_LOSS], seeds=5)
    frame = frame.assign(collapsed=frame[FAMILY] == K3_LOSS)
    marks = list(drawn(frontier(frame, [FAMILY], [REWARD], f"metrics.{KL}")))
    kinds = [name.split(".")[0] for name in marks if name.startswith("mark")]
    assert kinds == ["mark-none", "mark-full", "mark-full"]
    names = list(drawn(plot_curves({REWARD: points(frame)}, frame, [LABEL])))
    assert [name.split(".")[0] for name in names] == ["band"] * 3 + ["mean"] * 3


def test_single_runs_are_behind_their_mean():
    frame = runs([K1_LOSS, K3_LOSS])
    names = [name.split(".")[0] for name in drawn(plot_curves({REWARD: points(frame)}, frame, [LABEL]))]
    assert names == ["run0", "run1"] * 2 + ["mean"] * 2
    names = [name.split(".")[0] for name in drawn(frontier(frame, [FAMILY], [REWARD], f"metrics.{KL}"))]
    assert names == ["runs0", "runs0", "mark-full", "mark-full"]


def test_axes_and_legends_are_words_and_say_what_was_done_to_the_values():
    frame = runs(["no KL", K3_LOSS], rates=("0.0001", "0.0004"))
    figure = plot_curves({KL: points(frame)}, frame, [LABEL, LR], log=[KL], smooth=2)
    text = " ".join(words(figure))
    for phrase in (
        "held-out exact KL(π‖ref)",
        "per completion (nats)",
        "(log axis, mean of last 2 points)",
        "learning rate 0.0004",
    ):
        assert phrase in text
    text += " ".join(words(frontier(frame, [FAMILY, LR], [REWARD], f"metrics.{KL}")))
    assert text.count("log axis") >= 1
    assert "held-out reward" in text
    assert not re.search(r"\w_\w|\w/\w*_|heldout|optimizer\.lr", text), "no raw keys"


def test_intervals_of_a_frontier_end_at_the_range_of_the_metric():
    frame = runs([K3_LOSS], seeds=5).assign(**{f"metrics.{REWARD}": [0.0, 0.0, 0.0, 0.0, 1.0]})
    figure = frontier(frame, [FAMILY], [REWARD], f"metrics.{KL}")
    (axes,) = figure.axes
    lines = [segment for bar in axes.collections for segment in bar.get_segments()]
    heights = [height for segment in lines for _, height in segment]
    # The interval is 0.2 ± 0.56.
    assert min(heights) == 0.0
    assert max(heights) == pytest.approx(0.2 + 2.776445 * 0.2**0.5 / 5**0.5)
    assert "at the range of the metric" in " ".join(words(figure))


def test_no_look_of_two_families_is_the_same_whatever_the_order():
    names = [f"mine{number}_reverse_token in loss" for number in range(12)]
    families = [*METHODS, *VARIANTS, *names, "no KL"]
    looks = looks_of_families(families)
    assert len({(style.colour, style.marker) for style in looks.values()}) == len(families)
    assert looks == looks_of_families(reversed(families))
    for family in families:
        assert looks[family].colour == family_look(family).colour
        is_usual = family in METHODS
        assert (looks[family].colour in COLOURS) == is_usual
        assert (looks[family].colour in OTHER_COLOURS) == (not is_usual and family != "no KL")


def test_one_family_alone_differs_in_line_style_and_marker():
    lines = {Line(f"name {number}", "no KL"): {NAME: f"name {number}"} for number in range(8)}
    looks = line_looks(lines)
    assert {style.colour for style in looks.values()} == {WITHOUT_KL["color"]}
    assert len({style.marker for style in looks.values()}) == 8
    assert next(iter(looks.values())).marker == WITHOUT_KL["marker"], "the first one is that of every figure"


@pytest.mark.parametrize("number_of_rates", [3, 4])
def test_more_values_than_fills_differ_in_the_shape_of_the_marks(number_of_rates):
    rates = [f"{number / 10}" for number in range(number_of_rates)]
    lines = {Line(f"{family} {rate}", family): {LR: rate} for family in (K1_LOSS, K3_LOSS) for rate in rates}
    looks = line_looks(lines)
    for family in (K1_LOSS, K3_LOSS):
        styles = [style for line, style in looks.items() if line.family == family]
        assert {style.colour for style in styles} == {family_look(family).colour}
        assert styles[0].marker == family_look(family).marker
        assert len({(style.dash, style.fill, style.marker) for style in styles}) == number_of_rates
        shapes = {style.marker for style in styles}
        assert len(shapes) == (1 if number_of_rates == 3 else number_of_rates)


def test_a_name_that_repeats_other_keys_is_no_second_key():
    lines = {}
    for family, rate in product((K1_LOSS, K3_LOSS, "no KL"), ("0.1", "0.4")):
        if family == K1_LOSS and rate == "0.1":
            continue  # by its names alone, 0.4 would be the first variant of this family
        label = family
        if family != "no KL":
            label = f"0.1 {family}"
        values = {NAME: f"{family[:2]}-lr{rate}", LABEL: label, LR: rate}
        lines[Line(f"{label} {rate}", family)] = values_beside_family(values)
    looks = line_looks(lines)
    dash_of_rate = {}
    for line, style in looks.items():
        dash_of_rate.setdefault(line.label.split()[-1], set()).add(str(style.dash))
    assert dash_of_rate == {"0.1": {DASHES[0]}, "0.4": {DASHES[1]}}


def test_a_term_with_beta_0_is_drawn_as_no_kl():
    frame = runs([K3_LOSS], betas=("0.0", "0.1"))
    figure = plot_curves({REWARD: points(frame)}, frame, [LABEL])
    things = drawn(figure)
    assert colours({"mean": things["mean.0.0.no-KL"]}, "mean") == {GREY}
    assert colours(things, "mean", K3_LOSS) == {"#d55e00"}


def test_what_has_no_family_has_no_usual_colour():
    assert not {other_look(number).colour for number in range(60)} & set(COLOURS)


def test_lines_without_any_family_differ_by_place():
    looks = line_looks({Line(f"line {number}", ""): {} for number in range(60)})
    assert len({(style.colour, style.marker) for style in looks.values()}) == 60
    assert not {style.colour for style in looks.values()} & set(COLOURS)
