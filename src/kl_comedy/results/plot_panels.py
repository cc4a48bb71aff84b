"""What every picture of runs shares: its panels and lines, their words and looks, and what a legend says of seeds."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kl_comedy.results.compare import groups_of
from kl_comedy.results.figures import COLUMN, PAGE, new_figure
from kl_comedy.results.looks import Line, LineLook, family_of_runs, line_looks, values_beside_family
from kl_comedy.results.metric_labels import axis_label, key_label
from kl_comedy.results.runs import BETA, FAMILY, LABEL, NO_KL, short

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LINES = 8
"""More lines than this cannot be told apart in one panel."""

SEEDS_OF_AN_INTERVAL = 5
"""Single runs are drawn where there are fewer: Student's interval of two seeds reaches 12.7 standard errors, and its
band would hide the panel."""

SEVERAL_FAMILIES = "black"
"""The colour of a legend's entry whose line has another family, and so another colour, in each panel."""

WORDS = {
    "_reverse_token": "",
    "exact in": "exact KL in",
    "_": " ",
}
"""What titles and legends write instead of parts of KL labels. KL is reverse and per token where nothing else is
said."""
_KEY_AND_EQUALS = re.compile(r"\b([a-z]\w*(?:\.\w+)+)=")
"""A key with a dot before its value, as ``optimizer.lr=``; the options of an estimator, as ``k=16``, have no dot."""

KL_KEYS = (FAMILY, BETA, LABEL)
NAME = "params.name"
SELF_EXPLANATORY = (FAMILY, LABEL, NAME, "tags.sweep")
"""Keys whose values need no name beside them."""

ROW_HEIGHTS = {1: 2.5, 2: 2.5, 3: 2.3, 4: 2.0}
"""Inches: the height of a row of panels, by the number of columns."""

Looks = Mapping[Line, LineLook]
Panels = list[tuple[str, "pd.DataFrame"]]
"""Titles (empty: the only panel) and the runs under them."""


def panels_of(frame: pd.DataFrame, keys: Sequence[str]) -> Panels:
    """A panel for each combination of ``keys``.

    Runs without KL are beta 0 of every family. Where ``keys`` separate families or betas, these runs stand in each
    panel that shares their other keys, and have a panel to themselves only where there is none.
    """
    import pandas as pd

    if not keys:
        return [("", frame)]
    others = [key for key in keys if key not in KL_KEYS]
    by_kl = FAMILY in frame and len(others) < len(keys)
    # Split by KL, the runs without any would be a panel of their own, and compared with nothing.
    without_kl = pd.Series(False, frame.index)
    if by_kl:
        without_kl = frame[FAMILY] == NO_KL
    shared = dict(groups_of(frame[without_kl], others))
    covered: set[tuple[str, ...]] = set()
    panels: Panels = []
    for values, members in groups_of(frame[~without_kl], keys):
        other_values = tuple(value for key, value in zip(keys, values, strict=True) if key in others)
        covered.add(other_values)
        no_runs = members[:0]
        runs = pd.concat([shared.get(other_values, no_runs), members])
        panels.append((group_title(keys, values), runs))
    for other_values, runs in shared.items():
        if other_values not in covered:
            panels.append((_no_kl(others, other_values), runs))
    return panels


def lines_and_panels(frame: pd.DataFrame, groups: Sequence[str]) -> tuple[list[str], list[str]]:
    """Line keys and panel keys for groups that may be too many for one panel.

    Up to ``MOST_LINES`` groups are lines of one panel. Beyond, a line is a KL family and a panel a beta, or the other
    way round where that makes fewer panels; other keys make panels.
    """
    names = list(groups)
    separates_by_kl = any(key in names for key in KL_KEYS)
    if FAMILY not in frame or not separates_by_kl:
        return names, []
    number_of_groups = len(groups_of(frame, names))
    if number_of_groups <= MOST_LINES:
        return names, []
    others = []
    for name in names:
        if name not in (*KL_KEYS, NAME) and frame[name].nunique() > 1:
            others.append(name)
    if NAME in names and len(groups_of(frame, [*others, LABEL])) < number_of_groups:
        # The names separate what no other key does.
        return names, []
    with_kl = frame[frame[FAMILY] != NO_KL]
    families = with_kl[FAMILY].nunique()
    betas = with_kl[BETA].nunique()
    line = FAMILY
    panel = BETA
    # The key with fewer values makes the panels.
    if betas > families:
        line = BETA
        panel = FAMILY
    if min(families, betas) <= 1:
        return [line], others
    return [line], [*others, panel]


def group_title(keys: Sequence[str], values: Sequence[str]) -> str:
    """The values of ``keys``, with the names of those keys that need them."""
    parts = []
    for key, value in zip(keys, values, strict=True):
        if key == BETA:
            parts.append(f"beta {value}")
        elif key in SELF_EXPLANATORY:
            parts.append(value)
        else:
            parts.append(f"{short(key)}={value}")
    return ", ".join(parts)


def _no_kl(keys: Sequence[str], values: Sequence[str]) -> str:
    """The title of runs without KL: the values of their other keys, and that there is none."""
    title = group_title(keys, values)
    if not title:
        return NO_KL
    return f"{title}, {NO_KL}"


def line_label(groups: Sequence[str], values: Sequence[str]) -> str:
    """The name of a line: its values, ``no KL`` for whatever has none."""
    value_of_key = dict(zip(groups, values, strict=True))
    is_named_no_kl = NO_KL in (value_of_key.get(FAMILY), value_of_key.get(LABEL))
    # Where families are panels, a line is a beta, and runs without KL are beta 0.
    is_beta_0 = value_of_key.get(BETA) == "0" and FAMILY not in value_of_key
    if is_named_no_kl or is_beta_0:
        others = [key for key in groups if key not in KL_KEYS]
        return _no_kl(others, [value_of_key[key] for key in others])
    return group_title(groups, values) or "all runs"


def plain_words(text: str) -> str:
    """A title or legend entry without raw keys.

    >>> plain_words("optimizer.lr=0.1, k1_reverse_token in reward to_go")
    'learning rate 0.1, k1 in reward to go'
    """
    text = _KEY_AND_EQUALS.sub(lambda match: f"{key_label(match[1])} ", text)
    for part, words in WORDS.items():
        text = text.replace(part, words)
    return text


def in_words(text: str) -> str:
    """:func:`plain_words` as matplotlib shows them: ``$`` would start a formula, a ``_`` in front hide an entry."""
    return plain_words(text).replace("$", r"\$")


def line_of(groups: Sequence[str], values: Sequence[str], members: pd.DataFrame) -> Line:
    """The line of a group of runs: its label and its KL family."""
    families: list[str] = []
    if FAMILY in members:
        families = [str(family) for family in members[FAMILY].unique()]
    family = family_of_runs(dict(zip(groups, values, strict=True)), families)
    # A term with beta 0 does not act.
    if BETA in members and set(members[BETA].astype(str)) == {"0.0"}:
        family = NO_KL
    return Line(label=line_label(groups, values), family=family)


def looks_of_panels(parts: Panels, groups: Sequence[str]) -> dict[Line, LineLook]:
    """The look of each line in any panel. Where families are panels, one label has a line of each family."""
    lines: dict[Line, dict[str, str]] = {}
    for _, runs in parts:
        for values, members in groups_of(runs, groups):
            line = line_of(groups, values, members)
            lines[line] = values_beside_family(dict(zip(groups, values, strict=True)))
    return line_looks(lines)


def labels_of_several_families(looks: Iterable[Line]) -> set[str]:
    """Labels of lines that have one colour in a panel and another one elsewhere."""
    families: dict[str, set[str]] = {}
    for line in looks:
        families.setdefault(line.label, set()).add(line.family)
    return {label for label, names in families.items() if len(names) > 1}


def svg_id(axes: Axes, kind: str, place: int, family: str) -> str:
    """The id of a drawn thing in an SVG: what it is, its panel, its place there and its KL family."""
    subplot = axes.get_subplotspec()
    assert subplot is not None  # every panel is a subplot of layout's grid
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", family) or "none"
    return f"{kind}.{subplot.num1}.{place}.{name}"


def layout(
    panels: Panels, metrics: int, *, share: bool = False, columns: int = 0, size: tuple[float, float] | None = None
) -> tuple[Figure, list[list[Axes]]]:
    """A figure and its axes, ``[metric][panel]``, those of one metric with the same scales where they ``share``.

    One panel: metrics in two columns. Several: those of one metric below those of another, in up to four columns, as
    fill the rows best. ``size`` is the width of the figure and the height of a row.
    """
    single_panel = len(panels) == 1
    if columns == 0:
        columns = _columns(len(panels), metrics)
    if size is None:
        width = COLUMN
        if columns > 1:
            width = PAGE
        height = ROW_HEIGHTS[columns]
    else:
        width, height = size
    # Places of the grid for each metric: whole rows, except that single panels share them.
    places = 1
    if not single_panel:
        places = math.ceil(len(panels) / columns) * columns
    rows = math.ceil(metrics * places / columns)
    figure = new_figure(width, height * rows)
    flat = list(figure.subplots(rows, columns, squeeze=False).flat)
    blocks = [flat[start : start + len(panels)] for start in range(0, metrics * places, places)]
    # Places that no panel fills would show empty axes.
    for axes in set(flat).difference(*blocks):
        axes.set_axis_off()
    for block in blocks:
        for axes, (title, _) in zip(block, panels, strict=True):
            if share and axes is not block[0]:
                axes.sharex(block[0])
                axes.sharey(block[0])
            axes.set_title(_wrapped_title(in_words(title), width / columns))
    return figure, blocks


def _columns(panels: int, metrics: int) -> int:
    """How many panels stand side by side: two metrics of a single panel, or those of one metric, at most four."""
    if panels == 1:
        return min(metrics, 2)
    # The widest that leaves the fewest places of the last row empty; `min` keeps the first of equals.
    widths = range(min(panels, 4), 1, -1)
    return min(widths, key=lambda width: -panels % width)


def _wrapped_title(title: str, width: float) -> str:
    """A panel's title on lines that do not reach into the next panel, which begins after ``width`` inches."""
    # Inches: 0.45 for the labels of the axis, and 0.06 for a character.
    characters = int((width - 0.45) / 0.06)
    return "\n".join(textwrap.wrap(title, characters))


def name_axes(row: Sequence[Axes], x: str, metric: str, notes: Sequence[str] = ()) -> None:
    """``x`` below the panels with none beneath them, ``metric`` in words with ``notes`` at the left ones."""
    place = row[0].get_subplotspec()
    assert place is not None  # every panel is a subplot of layout's grid
    columns = place.get_gridspec().ncols
    for axes in row[-columns:]:
        axes.set_xlabel(x)
    # Characters on a line of the label: rows of more panels are lower.
    characters = 34
    if columns > 2:
        characters = 24
    for axes in row[::columns]:
        axes.set_ylabel(axis_label(metric, characters, notes))


def notes_of_axis(smooth: int, *, log: bool) -> list[str]:
    """What the label of an axis says beside metric and unit."""
    notes = []
    if log:
        notes.append("log axis")
    if smooth > 1:
        notes.append(f"mean of last {smooth} points")
    return notes


def what_is_drawn(middle: str, seed_counts: Collection[int], common_count: str) -> str:
    """The mean ``middle`` and what is drawn beside it: intervals, single runs, or both, by the lines' numbers of seeds.

    ``common_count`` is the number of seeds of every point of every line; empty where they differ.
    """
    if common_count == "1":
        return "one run each"
    seeds = "seeds"
    if common_count:
        seeds = f"{common_count} seeds"
    have_interval = [count >= SEEDS_OF_AN_INTERVAL for count in seed_counts]
    if all(have_interval):
        if common_count:
            return f"{middle} and 95% interval of {seeds}"
        return f"{middle} and 95% interval over seeds"
    fewest = SEEDS_OF_AN_INTERVAL
    if not any(have_interval):
        return f"{middle} of {seeds}, single runs thin or small (no interval below {fewest} seeds)"
    return f"{middle} over seeds; 95% interval from {fewest} seeds on, below that single runs, thin or small"
