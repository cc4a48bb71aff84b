"""Every stored figure, read from its SVG: a KL family has its colour, no KL is grey and nothing else, words and n."""

import math
import re
import statistics
from pathlib import Path
from xml.etree import ElementTree

import pytest
from research.studies.evidence import FORMS
from research.studies.pages import FAMILIES

from kl_comedy.results.looks import METHODS, VARIANTS, family_look
from kl_comedy.results.plots import plain_words
from kl_comedy.results.runs import NO_KL
from svg_texts import texts_of, tree_of

ROOT = Path(__file__).parents[2]
FIGURES = sorted((ROOT / "results").rglob("*.svg"))
NAMES = {plain_words(family): family for family in (NO_KL, *METHODS, *VARIANTS)} | FAMILIES
"""What a legend calls a family."""

RUNS_WITHOUT_KL = ("cap", "rl", "rl-fast")
"""The runs without KL of figures that name their runs."""

GREY = family_look(NO_KL).colour
RAW_KEY = re.compile(
    r"\b(?:train|eval|kl|kl_error|kl_term|policy|grad|value|audit|time)/[a-z]"
    r"|\b(?:kl|lag|optimizer|algorithm|params|tags|metrics)\.[a-z]|_reverse_|_forward_"
)
NUMBER = re.compile(
    r"\b(?:\d+|five) (?:seeds|policies|games|completions of each age)\b|n=\d|\bone (?:run each|policy)\b"
)
POWER_OF_TEN = r"\mathdefault{10^"


def hexadecimal(colour):
    """A colour of ours as matplotlib writes it into an SVG."""
    if colour.startswith("#"):
        return colour.lower()
    level = round(255 * float(colour))
    return "#" + 3 * f"{level:02x}"


def is_grey(colour):
    """Whether red, green and blue are the same, and it is neither black nor white."""
    return colour[1:3] == colour[3:5] == colour[5:7] and colour not in ("#000000", "#ffffff")


def colours(element):
    """The colours of all lines and fills in an element."""
    return set(re.findall(r"(?:stroke|fill): (#[0-9a-f]{6})", ElementTree.tostring(element, encoding="unicode")))


def legend_entries(root):
    """The label of each entry of a legend, and the colours of the line and marks before it."""
    entries = []
    for legend in root.iter():
        if not legend.get("id", "").startswith("legend_"):
            continue
        handle = set()
        for part in legend:
            if part.get("id", "").startswith("text_"):
                # The legend's title has no handle.
                if handle:
                    entries.append((" ".join(" ".join(texts_of(part)).split()), handle))
                handle = set()
            else:
                handle |= colours(part)
    return entries


def family_of_label(label):
    """The KL family that a legend's entry names; None where it names something else, as a contrast or a discount."""
    without_number_of_seeds = re.sub(r" \(n=[\d–]+\)$", "", label)
    without_beta = re.sub(r"^[\d.]+ ", "", without_number_of_seeds)
    return NAMES.get(without_beta)


def name_of(path):
    return str(path.relative_to(ROOT / "results"))


@pytest.fixture(scope="module", params=FIGURES, ids=name_of)
def figure(request):
    return tree_of(request.param.read_text("utf-8"))


def test_pictures_of_results_can_be_read():
    assert FIGURES
    assert not list((ROOT / "results").rglob("*.png")), "a figure of results is an SVG, which this test can read"


def test_every_form_of_a_claim_has_a_look():
    assert set(FORMS.values()) <= set(FAMILIES)


def test_labels_are_words(figure):
    texts = texts_of(figure)
    assert texts
    assert [text for text in texts if RAW_KEY.search(text)] == []


def test_a_family_has_its_colour(figure):
    wrong = {}
    for label, handle in legend_entries(figure):
        family = family_of_label(label)
        if family is not None:
            expected = hexadecimal(family_look(family).colour)
            # Marks have white or black edges and halves.
            if expected not in handle or handle - {expected, "#ffffff", "#000000"}:
                wrong[label] = handle
    assert wrong == {}


def test_grey_is_no_kl_and_nothing_else(figure):
    grey = hexadecimal(GREY)
    assert {colour for colour in colours(figure) if is_grey(colour)} <= {grey}
    for label, handle in legend_entries(figure):
        is_without_kl = label in RUNS_WITHOUT_KL or NO_KL in label
        if grey in handle:
            assert is_without_kl, label


def test_the_number_of_seeds_is_said(figure):
    text = " ".join(" ".join(texts_of(figure)).split())
    assert NUMBER.search(text), text


def value_of_tick(text):
    """The number of a tick's label, as 0.1 and as a power of ten; None for words."""
    power = re.search(r"\\mathdefault\{(?:(-?[\d.]+)\\times)?10\^\{?(-?\d+)", text)
    if power is not None:
        return float(power[1] or 1) * 10 ** int(power[2])
    try:
        return float(text.replace("\N{MINUS SIGN}", "-"))
    except ValueError:
        return None


def ticks_of(axis):
    """``(value, position)`` of the ticks of one axis that have numbers."""
    ticks = []
    for tick in axis:
        direction = "x" if tick.get("id", "").startswith("xtick") else "y"
        marks = [node.get(direction) for node in tick.iter() if str(node.tag).endswith("}use") and node.get(direction)]
        values = [value_of_tick(text) for text in texts_of(tick)]
        if marks and len(values) == 1 and values[0] is not None:
            ticks.append((values[0], float(marks[0])))
    return ticks


def is_logarithmic(ticks):
    """Whether positions are proportional to the logarithms of the numbers, and not to the numbers."""
    values = [value for value, _ in ticks]
    if len(set(values)) < 3 or min(values) <= 0:
        return False
    positions = [position for _, position in ticks]
    logarithms = [math.log(value) for value in values]
    return correlation(logarithms, positions) > 0.9999 > correlation(values, positions)


def correlation(values, positions):
    """The absolute correlation of two lists."""
    return abs(statistics.correlation(values, positions))


def test_a_logarithmic_axis_is_said(figure):
    texts = texts_of(figure)
    axes = [node for node in figure.iter() if node.get("id", "").startswith("matplotlib.axis_")]
    assert axes, "no axis is found"
    has_one = any(POWER_OF_TEN in text for text in texts) or any(is_logarithmic(ticks_of(axis)) for axis in axes)
    if has_one:
        assert any("log axis" in text for text in texts)


@pytest.mark.parametrize(
    ("values", "expected"), [((0.1, 1, 10), True), ((1, 2, 4, 8), True), ((1, 2, 3), False), ((0, 1, 10), False)]
)
def test_a_logarithmic_axis_is_told_by_its_ticks(values, expected):
    if expected:
        places = [5 + 30 * math.log(value) for value in values]
    else:
        places = [5 + 30 * value for value in values]
    assert is_logarithmic(list(zip(values, places, strict=True))) == expected
