"""The figure of a claim: the levels of both sides of every contrast, and below them their differences."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.results.figures import MARKERS, Look, legend_below
from kl_comedy.results.plots import SEEDS_OF_AN_INTERVAL
from research.studies import pages
from research.studies.evidence import LABELS, MARGIN, REWARDS, Row
from research.studies.pages import Looks

if TYPE_CHECKING:
    from matplotlib.lines import Line2D

LEAST = {"length_sd": 0.0, "reward_sd": 0.0, "kl": 0.0, "entropy": 0.0}
BETWEEN_0_AND_1 = (*REWARDS, "collapsed")
SAME = "#FFF3C4"
"""The colour of the margin within which two rewards are the same."""


def draw(rows: Sequence[Row], path: Path) -> None:
    """For each outcome the levels of both sides over cells, and below them the differences."""
    shown = [row for row in rows if row.get("difference") is not None]
    outcomes = list(dict.fromkeys(row["outcome"] for row in shown))
    looks = _contrast_looks(shown)
    forms = pages.looks_of(list(dict.fromkeys(form for row in shown for form in row["forms"])))
    with pages.figure(path, 2 * len(outcomes), 1, 1.7) as (drawing, panels):
        for outcome, levels, differences in zip(outcomes, panels.flat[::2], panels.flat[1::2], strict=True):
            rows_of_outcome = [row for row in shown if row["outcome"] == outcome]
            places = list(dict.fromkeys(row["at"] for row in rows_of_outcome))
            _draw_levels(levels, rows_of_outcome, places, looks, forms)
            levels.set_ylabel(textwrap.fill(LABELS[outcome], 24))
            differences.axhline(0.0, color="black", linewidth=0.8)
            if outcome in REWARDS:
                differences.axhspan(-MARGIN, MARGIN, color=SAME, linewidth=0)
            _draw_differences(differences, rows_of_outcome, places, looks)
            differences.set_ylabel("difference")
            for axes in (levels, differences):
                axes.set_xlim(-0.5, len(places) - 0.5)
                axes.set_xticks(range(len(places)), [_tick(place) for place in places])
            differences.set_xlabel(_shared(places))
        legend_below(drawing, _drawn_in_words(shown), _form_entries(forms))


def _tick(place: str) -> str:
    return place.replace("learning rate ", "").replace(", ", "\n")


def _shared(places: Sequence[str]) -> str:
    """What both sides of a contrast share, as the label of the axis."""
    if any("learning rate" in place for place in places):
        return "learning rate, and what else both sides share"
    return "what both sides share"


def _contrast_looks(rows: Sequence[Row]) -> dict[str, Look]:
    """Colour and marker of each contrast: those of its first side, or of the second where only that one varies."""
    forms = {row["contrast"]: row["forms"] for row in rows}
    firsts = {first for first, _ in forms.values()}
    seconds = {second for _, second in forms.values()}
    side = 0
    if len(seconds) > len(firsts):
        side = 1
    styles = pages.looks_of(list(dict.fromkeys(pair[side] for pair in forms.values())))
    looks: dict[str, Look] = {}
    for contrast, pair in forms.items():
        style = styles[pair[side]] | {"linestyle": "none"}
        # Contrasts of one form have its colour, and each another marker.
        taken = [other["marker"] for other in looks.values() if other["color"] == style["color"]]
        free = [marker for marker in (style["marker"], *MARKERS) if marker not in taken]
        looks[contrast] = style | {"marker": free[0]}
    return looks


def _drawn_in_words(rows: Sequence[Row]) -> str:
    """The title of the legend."""
    counts = {row["pairs"] for row in rows}
    seeds = f"{min(counts)} to {max(counts)} seeds"
    if len(counts) == 1:
        seeds = f"{min(counts)} seeds"
    text = f"levels: means of {seeds}, filled for the first side of a contrast, open for the second; difference: "
    text += "filled where resolved after Holm, or the same"
    if any(row["outcome"] in REWARDS for row in rows):
        text += f" (shaded: within {MARGIN})"
    if max(counts) < SEEDS_OF_AN_INTERVAL:
        return f"{text}; no interval below {SEEDS_OF_AN_INTERVAL} seeds"
    text += "; bars: 95% interval"
    if min(counts) < SEEDS_OF_AN_INTERVAL:
        text += f" from {SEEDS_OF_AN_INTERVAL} seeds on"
    return text


def _form_entries(forms: Looks) -> list[Line2D]:
    """The legend's entries of the forms whose levels are drawn."""
    from matplotlib.lines import Line2D

    return [Line2D([], [], label=name, **style | {"linestyle": "none"}) for name, style in forms.items()]


def _offset(number: int, count: int) -> float:
    """The place of contrast ``number`` in a cell: within 0.7 of the distance of two cells, so that they stay apart."""
    return 0.7 * ((number + 0.5) / count - 0.5)


def _draw_levels(axes: Any, rows: Sequence[Row], places: Sequence[str], looks: Looks, forms: Looks) -> None:
    """Both sides of each contrast side by side, above its difference."""
    # A sixth of a contrast's width, but near each other where a cell has few contrasts.
    half = min(0.06, 0.7 / len(looks) / 6)
    # Contrasts of one cell often have a side in common, whose level stands there once.
    drawn: set[tuple[str, str, float]] = set()
    for number, contrast in enumerate(looks):
        for row in [row for row in rows if row["contrast"] == contrast]:
            middle = places.index(row["at"]) + _offset(number, len(looks))
            first, second = row["forms"]
            for side, form, x, fill in (("a", first, middle - half, "full"), ("b", second, middle + half, "none")):
                level = (row["at"], form, row[side])
                if level in drawn:
                    continue
                drawn.add(level)
                style = forms[form] | {"linestyle": "none", "fillstyle": fill}
                error = _bar(row, row[side], row[f"{side}_low"], row[f"{side}_high"], _range(row["outcome"]))
                axes.errorbar([x], [row[side]], yerr=error, capsize=1.5, elinewidth=0.7, **style)


def _draw_differences(axes: Any, rows: Sequence[Row], places: Sequence[str], looks: Looks) -> None:
    """The differences of one outcome: cells from left to right, and in each cell the contrasts side by side."""
    for number, (contrast, style) in enumerate(looks.items()):
        points = [row for row in rows if row["contrast"] == contrast]
        for index, row in enumerate(points):
            label = contrast if index == 0 else None
            x = places.index(row["at"]) + _offset(number, len(looks))
            fill = "full" if row["decision"] else "none"
            low, high = _range(row["outcome"])
            error = _bar(row, row["difference"], row["low"], row["high"], (low - high, high - low))
            options = style | {"fillstyle": fill}
            axes.errorbar([x], [row["difference"]], yerr=error, capsize=2, elinewidth=0.9, label=label, **options)


def _range(outcome: str) -> tuple[float, float]:
    """The least and the greatest value of an outcome."""
    if outcome in BETWEEN_0_AND_1:
        return 0.0, 1.0
    return LEAST[outcome], math.inf


def _bar(
    row: Row, middle: float, low: float | None, high: float | None, bounds: tuple[float, float]
) -> list[list[float]] | None:
    """The interval below and above ``middle``, cut at ``bounds``; None where there is none or too few seeds."""
    if low is None or high is None or math.isnan(low) or row["pairs"] < SEEDS_OF_AN_INTERVAL:
        return None
    least, greatest = bounds
    below = max(0.0, middle - max(low, least))
    above = max(0.0, min(high, greatest) - middle)
    return [[below], [above]]
