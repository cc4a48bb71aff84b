"""A KL family has one colour in every figure, read from the SVG, and no two families look the same."""

import re
from itertools import combinations, product
from xml.etree import ElementTree

import pandas as pd

from kl_comedy.results.figures import COLOURS, svg
from kl_comedy.results.looks import (
    METHODS,
    OTHER_COLOURS,
    VARIANTS,
    family_look,
    looks_of_families,
)
from kl_comedy.results.plots import frontier, plot_curves
from kl_comedy.results.runs import sort_by_groups, with_derived
from svg_texts import texts_of, tree_of

LABEL = "tags.kl.label"
FAMILY = "tags.kl.family"
LR = "params.optimizer.lr"
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
    return texts_of(tree_of(svg(figure)))


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
