"""Panels of a picture: which runs stand in which, how they are laid out, how lines look, one legend for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kl_comedy.tracking.derived import BETA, FAMILY, LABEL, NO_KL
from kl_comedy.tracking.queries import short
from kl_comedy.tracking.stats import groups_of

if TYPE_CHECKING:
    import pandas as pd

WIDEST = 16.0
"""Inches of a figure of several panels."""

MOST_LINES = 8
"""More lines than this are not told apart in one panel."""

INSIDE = 6
"""More names than this, or longer ones than 40 characters, go below the axes."""

KL_KEYS = (FAMILY, BETA, LABEL)
NAME = "params.name"
SPEAKING = (FAMILY, LABEL, NAME, "tags.sweep")
"""Keys whose values need no name beside them."""

GREY = "0.3"

SEVERAL = (3.9, 3.3)
"""Inches of a panel among others."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """The runs of ``frame`` under the heading ``title`` (empty: the only panel)."""

    title: str
    frame: pd.DataFrame


def panels_of(frame: pd.DataFrame, keys: Sequence[str]) -> list[Panel]:
    """A panel a combination of ``keys``. Runs without KL are beta 0 of every family: where ``keys`` part families or
    betas, they stand in each panel that shares their other keys, and have none of their own beside it."""
    import pandas as pd

    if not keys:
        return [Panel(title="", frame=frame)]
    parts = groups_of(frame, list(keys))
    if FAMILY not in frame or not any(key in KL_KEYS for key in keys):
        return [Panel(title=title_of(keys, values), frame=members) for values, members in parts]
    free: dict[tuple[str, ...], pd.DataFrame] = {}
    bound: list[tuple[tuple[str, ...], pd.DataFrame]] = []
    for values, members in parts:
        without = members[FAMILY] == NO_KL
        if without.any():
            free[_rest(keys, values)] = members[without]
        if not without.all():
            bound.append((values, members[~without]))
    found = [
        Panel(title=title_of(keys, values), frame=pd.concat([free.get(_rest(keys, values), members[:0]), members]))
        for values, members in bound
    ]
    seen = {_rest(keys, values) for values, _ in bound}
    return found + [
        Panel(title=", ".join([*_named([key for key in keys if key not in KL_KEYS], rest), NO_KL]), frame=members)
        for rest, members in free.items()
        if rest not in seen
    ]


def of_many(frame: pd.DataFrame, groups: Sequence[str]) -> tuple[list[str], list[str]]:
    """Lines and panels for groups that are too many for one panel: ``(line keys, panel keys)``.

    Up to ``MOST_LINES`` groups are lines of one panel. Beyond, a line is a KL family and a panel a beta, or the other
    way round where that makes fewer panels; other keys part panels.
    """
    names = list(groups)
    if FAMILY not in frame or not {*KL_KEYS} & {*names} or len(groups_of(frame, names)) <= MOST_LINES:
        return names, []
    others = [name for name in names if name not in (*KL_KEYS, NAME) and frame[name].nunique() > 1]
    if NAME in names and len(groups_of(frame, [*others, LABEL])) < len(groups_of(frame, names)):
        return names, []  # the names part what no other key does
    with_kl = frame[frame[FAMILY] != NO_KL]
    families, betas = with_kl[FAMILY].nunique(), with_kl[BETA].nunique()
    line, panel = (FAMILY, BETA) if betas <= families else (BETA, FAMILY)
    return [line], [*others, panel] if min(families, betas) > 1 else others


def title_of(keys: Sequence[str], values: Sequence[str]) -> str:
    """The values of ``keys``, with the names of those keys that do not speak for themselves."""
    return ", ".join(_named(keys, values))


def layout(
    panels: Sequence[Panel], metrics: Sequence[str], size: tuple[float, float],
    several: tuple[float, float] = SEVERAL, *, share: bool = True,
) -> tuple[Any, list[list[Any]]]:  # fmt: skip
    """A figure and its axes, ``[metric][panel]``, those of one metric with the same scales where they ``share``.

    ``size`` is that of the only panel, ``several`` that of each of several, in inches.
    """
    columns = _columns(panels, several[0])
    rows = -(-len(panels) // columns)
    width, height = size if len(panels) == 1 else several
    figure, grid = _figure(rows * len(metrics), columns, (max(width * columns, size[0]), height * rows * len(metrics)))
    found = []
    for at in range(len(metrics)):
        line = list(grid[at * rows : (at + 1) * rows].flat)
        for spare in line[len(panels) :]:
            spare.set_axis_off()
        for axes, panel in zip(line, panels, strict=False):
            if share and axes is not line[0]:
                axes.sharex(line[0])
                axes.sharey(line[0])
            axes.set_title(plain(panel.title), fontsize="small", loc="left")
            axes.grid(alpha=0.3)
        found.append(line[: len(panels)])
    return figure, found


def beside(panels: Sequence[Panel], metrics: Sequence[str], size: tuple[float, float]) -> tuple[Any, list[list[Any]]]:
    """A figure with a row a metric: an axes for something else, then one a panel, each with its own scales."""
    width, height = size if len(panels) == 1 else SEVERAL
    columns = 1 + len(panels)
    figure, grid = _figure(len(metrics), columns, (width * columns, height * len(metrics)))
    for row in grid:
        for axes, title in zip(row, ("", *(panel.title for panel in panels)), strict=True):
            axes.set_title(plain(title), fontsize="small", loc="left")
            axes.grid(alpha=0.3)
    return figure, [list(row) for row in grid]


def name_axes(line: Sequence[Any], x: str, y: str) -> None:
    """``x`` below the panels with none beneath them, ``y`` at the left ones."""
    columns = _columns(line, SEVERAL[0])
    for at, axes in enumerate(line):
        if at + columns >= len(line):
            axes.set_xlabel(plain(x))
        if at % columns == 0:
            axes.set_ylabel(plain(y))


def looks(labels: Sequence[str]) -> Mapping[str, tuple[Any, str]]:
    """Colour and line style of each label; without KL is grey and dotted wherever it stands."""
    import matplotlib as mpl

    colours = mpl.color_sequences["tab10"]
    shown = [label for label in dict.fromkeys(labels) if label != NO_KL]
    found = {
        label: (colours[at % len(colours)], ("-", "--", "-.", (0, (1, 1)))[at // len(colours) % 4])
        for at, label in enumerate(shown)
    }
    return {**found, NO_KL: (GREY, ":")}


def legend(figure: Any, axes: Sequence[Any], title: str) -> None:
    """Each name once: inside the only panel where few and short names leave room, else below all, left aligned."""
    named: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    if not named:
        return
    longest = max(map(len, named))
    if len(axes) == 1 and len(named) <= INSIDE and longest <= 40:
        axes[0].legend(fontsize="small", title=title, title_fontsize="small", alignment="left")
        return
    width, height = figure.get_size_inches()
    columns = max(1, min(len(named), int(width / (0.5 + 0.075 * longest))))
    figure.set_size_inches(width, height + 0.35 + 0.17 * -(-len(named) // columns))
    figure.legend(
        named.values(), named.keys(), loc="outside lower left", ncols=columns, fontsize="x-small", title=title,
        title_fontsize="x-small", alignment="left", frameon=False,
    )  # fmt: skip


def line_label(groups: Sequence[str], values: Sequence[str]) -> str:
    """The name of a line: its values, ``no KL`` for whatever has none."""
    given = dict(zip(groups, values, strict=True))
    if NO_KL in (given.get(FAMILY), given.get(LABEL)) or (given.get(BETA) == "0" and FAMILY not in given):
        rest = [(key, value) for key, value in given.items() if key not in KL_KEYS]
        return ", ".join([*_named(*zip(*rest, strict=True)), NO_KL]) if rest else NO_KL
    return title_of(groups, values) or "all runs"


def plain(text: str) -> str:
    """``$`` would start a formula, and a leading ``_`` would hide a legend entry."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def wrapped(text: str, most: int = 16) -> str:
    """``text`` in lines of about ``most`` characters, for the ticks of an axis."""
    import textwrap

    return plain("\n".join(textwrap.wrap(text, most)) or text)


def _named(keys: Sequence[str], values: Sequence[str]) -> list[str]:
    shown = []
    for key, value in zip(keys, values, strict=True):
        name = "beta " if key == BETA else "" if key in SPEAKING else f"{short(key)}="
        shown.append(f"{name}{value}")
    return shown


def _columns(panels: Sequence[Any], width: float) -> int:
    """Panels beside each other: as many as a page is wide."""
    return max(1, min(len(panels), int(WIDEST / width)))


def _figure(rows: int, columns: int, inches: tuple[float, float]) -> tuple[Any, Any]:
    """A figure of its own, without pyplot's global state and without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _rest(keys: Sequence[str], values: Sequence[str]) -> tuple[str, ...]:
    return tuple(value for key, value in zip(keys, values, strict=True) if key not in KL_KEYS)
