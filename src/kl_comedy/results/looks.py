"""How a line or mark looks: its KL family gives colour and marker, whatever else tells it apart the line style.

The look of a family depends on its name alone, so it is the same in every figure, whichever other families are drawn
there and in whichever order. Runs without KL are grey.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kl_comedy.results.figures import LINES, MARKERS, WITHOUT_KL, look
from kl_comedy.results.runs import BETA, FAMILY, LABEL, NO_KL, family_of, sort_key

METHODS = (
    "k1_reverse_token in reward total before baseline",
    "k3_reverse_token in loss",
    "k1_reverse_token in loss",
    "k3_reverse_token in reward total before baseline",
    "k2_reverse_token in loss",
    "k1_reverse_token in reward to_go",
    "exact_reverse_token in loss",
    "exact_reverse_token in reward to_go",
)
"""The usual KL families. Each has a colour that no other family has, in the order of
:func:`kl_comedy.results.figures.look`."""

VARIANTS = (
    "exact_reverse_token in loss x prefix_previous",
    "k3_reverse_token in loss x token",
    "k3_reverse_token in loss x prefix",
    "k1_reverse_token in reward to_go x sequence",
    "exact_reverse_token in reward to_go x prefix_previous<=8 truncate own baseline",
    "k2_reverse_token in loss x token_detached",
    "exact_reverse_token in reward to_go own baseline",
    "k3_reverse_token in reward total before baseline + k3_reverse_token in loss",
    "k1_reverse_token in reward total before baseline + k1_reverse_token in loss",
    "k2_reverse_sequence in loss",
    "k3_reverse_token in loss input clamped at 20 output clamped at 10",
    "k1_reverse_token in reward to_go x prefix",
    "k2_reverse_token in loss output clamped at 10",
    "exact_reverse_token in reward to_go x prefix_previous own baseline",
    "k3_reverse_token in loss output clamped at 1",
    "exact_reverse_token in reward to_go x prefix_previous self-normalized",
    "exact_forward_token in loss",
    "k2_reverse_token in loss input clamped at 1",
    "k3_reverse_token in loss input clamped at 1",
    "k1_reverse_token in reward own x token<=1.2 clip",
)
"""Families that the stored studies often compare with one another, so that a hash must not give two of them one look.
The first six have six colours. New ones belong at the end: a place in this table is a look."""

POLICY_TERMS = (
    "ppo-clip",
    "dppo-tv",
    "dppo-kl",
    "cppo",
    "ess-linear",
    "ess-sqrt",
    "small-step",
    "trm",
    "trm-loose",
    "prefix-budget",
    "prefix-budget-loose",
)
"""What the study of trust regions has in place of a KL: there each is a family, and six neighbours have six colours."""

OTHER_COLOURS = ("#999933", "#7A4A1E", "#AA44DD", "#145A2A", "#EE6677", "#22AAAA")
"""Colours of all families that are not in :data:`METHODS`, so that an unusual one is never taken for a usual one."""
OTHER_MARKERS = "<>hd8"
"""Six colours and five markers: 30 looks, no two alike."""
OTHER_LOOKS = len(OTHER_COLOURS) * len(OTHER_MARKERS)

DASHES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)))
"""Line styles of a second key's values. None is dotted: dots are runs without KL, and collapse in a frontier."""
FILLS = ("full", "none", "left")
EDGES = ("white", "black", "0.6")
"""Fill and edge of the marks of a second key's values: three of them. More values have marks of other shapes."""


@dataclass(frozen=True, kw_only=True)
class LineLook:
    """How a line is drawn. A figure in which the fill of a mark means collapse draws ``edge`` instead of ``fill``."""

    colour: str
    marker: str
    dash: Any
    """Matplotlib's line style."""
    fill: str = "full"
    edge: str = "white"
    shows_dash: bool = False
    """Whether the line style tells this line from another one of its family."""

    def of_line(self) -> dict[str, Any]:
        """Matplotlib's keywords of a line with marks."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.dash,
            "fillstyle": self.fill,
            "markerfacecoloralt": "white",
        }

    def of_mark(self) -> dict[str, Any]:
        """Matplotlib's keywords of marks without a line."""
        edge_width = 0.4
        if self.edge != "white":
            edge_width = 0.8
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": "none",
            "markeredgecolor": self.edge,
            "markeredgewidth": edge_width,
        }


class Line(NamedTuple):
    """A line of a figure: its label, and the KL family of its runs (empty: unknown, or several)."""

    label: str
    family: str


def family_look(family: str) -> LineLook:
    """The look of a KL family: the same in every process and figure.

    >>> family_look("k3_reverse_token in loss").colour, family_look("no KL").colour
    ('#D55E00', '0.45')
    """
    if family == NO_KL:
        return _as_look(WITHOUT_KL)
    if family in METHODS:
        return _as_look(look(METHODS.index(family)))
    return _other_look(_place(family), LINES)


def _as_look(style: Mapping[str, Any]) -> LineLook:
    return LineLook(colour=style["color"], marker=style["marker"], dash=style["linestyle"])


def _place(family: str) -> int:
    """The place of a family in the 30 looks of the families that are not usual."""
    if family in VARIANTS:
        return VARIANTS.index(family)
    if family in POLICY_TERMS:
        return POLICY_TERMS.index(family)
    # Not hash(): it differs from process to process. After the table's places, which are taken.
    free = OTHER_LOOKS - len(VARIANTS)
    return len(VARIANTS) + zlib.crc32(family.encode()) % free


def _other_look(place: int, lines: Sequence[Any]) -> LineLook:
    return LineLook(
        colour=OTHER_COLOURS[place % len(OTHER_COLOURS)],
        marker=OTHER_MARKERS[place % len(OTHER_MARKERS)],
        dash=lines[place % len(lines)],
    )


def other_look(number: int) -> LineLook:
    """Look ``number`` of 60 for what has no KL family, as a policy correction: none has a usual family's colour.

    >>> other_look(0).colour, other_look(30).colour, other_look(0).marker, other_look(30).marker
    ('#999933', '#999933', '<', 'o')
    """
    style = _other_look(number, DASHES)
    if number % (2 * OTHER_LOOKS) >= OTHER_LOOKS:
        style = replace(style, marker=MARKERS[number % len(OTHER_MARKERS)])
    return style


def looks_of_families(families: Iterable[str]) -> dict[str, LineLook]:
    """:func:`family_look` of each family. Where two hashes agree, one family gets the next free marker: its colour is
    that of its name even then."""
    looks: dict[str, LineLook] = {}
    taken: set[tuple[str, str]] = set()
    # Sorted, so that the markers do not depend on the order in which a figure has its lines.
    for family in sorted(set(families)):
        style = family_look(family)
        for marker in (style.marker, *OTHER_MARKERS, *MARKERS):
            if (style.colour, marker) not in taken:
                style = replace(style, marker=marker)
                break
        taken.add((style.colour, style.marker))
        looks[family] = style
    return looks


def line_looks(lines: Mapping[Line, Mapping[str, str]]) -> dict[Line, LineLook]:
    """The look of each line of a figure. ``lines`` maps a line to the values of the keys that name it.

    Colour and marker are the family's. Lines of one family differ in line style and in the fill and edge of their
    marks, by the value of the keys that tell them apart. Where a figure has a single family, or more values than fills,
    they differ in the shape of the marks instead, and the first value has the family's marker.
    """
    if not any(line.family for line in lines):
        return {line: other_look(number) for number, line in enumerate(lines)}
    family_of_line = {line: line.family or line.label for line in lines}
    looks = looks_of_families(family_of_line.values())
    numbers = _variant_numbers(family_of_line, lines)
    if not any(numbers.values()):
        return {line: looks[family_of_line[line]] for line in lines}

    by_shape = len(looks) == 1 or max(numbers.values()) >= len(FILLS)
    return {line: _variant(looks[family_of_line[line]], numbers[line], by_shape=by_shape) for line in lines}


def _variant(family: LineLook, number: int, *, by_shape: bool) -> LineLook:
    """The look of variant ``number`` of a family in a figure that has several variants of any family."""
    dash = DASHES[number % len(DASHES)]
    if not by_shape:
        fill = FILLS[number % len(FILLS)]
        edge = EDGES[number % len(EDGES)]
        return replace(family, dash=dash, fill=fill, edge=edge, shows_dash=True)
    # The family's own marker first. Other families may have the other shapes, but in another colour.
    shapes = [family.marker, *(marker for marker in MARKERS if marker != family.marker)]
    return replace(family, dash=dash, marker=shapes[number % len(shapes)], shows_dash=True)


def _variant_numbers(family_of_line: Mapping[Line, str], lines: Mapping[Line, Mapping[str, str]]) -> dict[Line, int]:
    """Which variant of its family each line is, from 0. A value that two families share has one number in both."""
    keys = _separating_keys(family_of_line, lines)
    variants = {line: tuple(values.get(key, "") for key in keys) for line, values in lines.items()}
    families_of_variant: dict[tuple[str, ...], set[str]] = {}
    for line, variant in variants.items():
        families_of_variant.setdefault(variant, set()).add(family_of_line[line])
    is_shared = any(len(families) > 1 for families in families_of_variant.values())

    def scope(line: Line) -> str:
        """Lines of one scope are numbered together."""
        family = family_of_line[line]
        # Runs without KL have no beta, and so no value in common with the other families.
        has_no_beta = family == NO_KL and BETA in keys
        if is_shared and not has_no_beta:
            return ""
        return family

    values_of_scope: dict[str, set[tuple[str, ...]]] = {}
    for line, variant in variants.items():
        values_of_scope.setdefault(scope(line), set()).add(variant)
    numbers = {}
    for line, variant in variants.items():
        ordered = sorted(values_of_scope[scope(line)], key=lambda values: [sort_key(value) for value in values])
        numbers[line] = ordered.index(variant)
    return numbers


def _separating_keys(family_of_line: Mapping[Line, str], lines: Mapping[Line, Mapping[str, str]]) -> list[str]:
    """The keys that tell lines of one family apart; a key that repeats what others say is left out."""
    candidates = list(dict.fromkeys(key for values in lines.values() for key in values))
    # A run's name often repeats its other keys, and no two families share one.
    candidates.sort(key=lambda key: key == "params.name")
    keys: list[str] = []
    parts = len(set(family_of_line.values()))
    for key in candidates:
        tried = [*keys, key]
        tuples = {(family_of_line[line], *(values.get(name, "") for name in tried)) for line, values in lines.items()}
        if len(tuples) > parts:
            keys = tried
            parts = len(tuples)
    return keys


def values_beside_family(values: Mapping[str, str]) -> dict[str, str]:
    """The values of a line's keys without its KL family: of a KL label only the beta stays, of no KL nothing.

    >>> values_beside_family({"tags.kl.label": "0.1 k3_reverse_token in loss", "params.seed": "1"})
    {'tags.kl.betas': '0.1', 'params.seed': '1'}
    """
    others: dict[str, str] = {}
    is_without_kl = NO_KL in (values.get(FAMILY), values.get(LABEL))
    for key, value in values.items():
        if key == FAMILY:
            continue
        if key == LABEL:
            key = BETA
            _, value = family_of(value)
        if key == BETA and is_without_kl:
            continue
        others[key] = value
    return others


def family_of_runs(values: Mapping[str, str], families: Collection[str]) -> str:
    """The KL family of a line: from its keys, else the one that its runs have in common; empty where there is none."""
    if values.get(FAMILY):
        return values[FAMILY]
    if values.get(LABEL):
        family, _ = family_of(values[LABEL])
        return family
    known = set(families)
    if len(known) == 1:
        return known.pop()
    return ""
