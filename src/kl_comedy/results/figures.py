"""How every figure looks: a paper's widths, fonts and colours; a legend below; files as SVG, PDF or PNG.

Figures are made without pyplot's global state and need no display. What makes or saves one runs within
:func:`paper_style`.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError
from kl_comedy.io import atomic_write

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType

SUFFIXES = (".svg", ".pdf", ".png")
COLUMN = 3.4
PAGE = 7.0
"""Inches: the widths of a column and of a page of two columns."""

MOST_ENTRIES_IN_A_COLUMN = 8
"""The legend of a wide figure has two columns at least where it has more entries."""

STYLE: dict[RcKeyType, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.title_fontsize": 7,
    "legend.frameon": False,
    "axes.grid": True,
    # Not grey, which is the colour of runs without KL.
    "grid.color": "black",
    "grid.alpha": 0.1,
    "grid.linewidth": 0.5,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.5,
    # Text and not outlines: smaller, and a reader can search it. Verdana is as wide, where there is no DejaVu.
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    # Without a salt the ids in an SVG are random, and no figure could be compared with a stored one.
    "svg.hashsalt": "kl_comedy",
    "pdf.fonttype": 42,
}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#882255")
"""Colours of Okabe and Ito (2008) and Paul Tol, told apart by colour-blind readers too."""

MARKERS = "osD^vP*X<>h"
LINES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
"""Eight colours, eleven markers, five line styles: no two of 88 looks share colour and marker."""

Look = dict[str, Any]
WITHOUT_KL: Look = {"color": "0.45", "linestyle": ":", "marker": "p"}
"""Grey in every figure, and nothing else is."""


def look(number: int) -> Look:
    """Colour, marker and line style number ``number``, as matplotlib's keywords."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[number % len(LINES)],
    }


@contextmanager
def paper_style() -> Iterator[None]:
    """Fonts, lines and grids of our figures, as a ``with`` block or a decorator."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that many inches, which lays itself out."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plain_ticks(axis: Axis) -> None:
    """Ticks as 0.1 or 20 of an axis whose limits are set; of a short logarithmic one also between powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    if axis.get_scale() == "log":
        ticks_of_decade: tuple[float, ...] = (1.0,)
        if high < 10 * low:
            ticks_of_decade = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
        elif high < 300 * low:
            ticks_of_decade = (1.0, 2.0, 5.0)
        axis.set_major_locator(LogLocator(subs=ticks_of_decade, numticks=8))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Figure, title: str = "", more: Sequence[Artist] = ()) -> None:
    """Each name once, and the handles ``more``, below all panels; the figure grows by the legend's height."""
    # The figure grows, so that the panels keep the size that they were given.
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            # Panels repeat the same lines.
            handles.setdefault(label, handle)
    handles |= {str(handle.get_label()): handle for handle in more}
    # Inches, measured for the sizes of STYLE: a character is 0.055 wide in the title and 0.052 in an entry, a handle
    # takes 0.5, a line is 0.155 high.
    width, height = figure.get_size_inches()
    title = "\n".join(textwrap.wrap(title, int((width - 0.1) / 0.055)))
    # A label that is wider than the figure would leave it.
    entry_width = width
    # One long name must not put many short ones into a single column.
    if len(handles) > MOST_ENTRIES_IN_A_COLUMN and width > COLUMN:
        entry_width = width / 2
    labels = ["\n".join(textwrap.wrap(label, int((entry_width - 0.6) / 0.052))) for label in handles]
    widest_entry = 0.5 + 0.052 * max(len(line) for label in labels for line in label.split("\n"))
    columns = max(1, min(len(handles), int((width - 0.1) / widest_entry)))
    broken = sum(label.count("\n") for label in labels)
    lines = math.ceil(len(handles) / columns) + broken + title.count("\n") + 1
    figure.set_size_inches(width, height + 0.1 + 0.155 * lines)
    figure.legend(
        list(handles.values()),
        labels,
        loc="outside lower left",
        title=title or None,
        alignment="left",
        ncols=columns,
        columnspacing=1.2,
        handlelength=2.6,
        borderpad=0.1,
    )


def check_suffix(out: Path, option: str = "--out") -> None:
    """Raise :class:`UserError` where the suffix of a figure's file names no format that we write."""
    if out.suffix.lower() not in SUFFIXES:
        raise UserError(f"{option}: got {str(out)!r}; allowed: a file that ends in {', '.join(SUFFIXES)}")


_COORDINATES = re.compile(r' (?:d|x|y)="[^"]*"|translate\([^)]*\)')
"""Other attributes hold versions, scales and ids with dots."""
_MARKS = re.compile(r'<g( clip-path="[^"]*")?>((?:\s*<use [^>]*/>)+\s*)</g>')


@paper_style()
def svg(figure: Figure) -> str:
    """The figure as SVG, with text that can be searched.

    Coordinates have hundredths of a point, and the style of a line's marks stands once: a third of the bytes that
    matplotlib writes, with no visible difference.
    """
    out = io.StringIO()
    # Date and Creator would make the bytes differ from run to run and version to version.
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    rounded = _COORDINATES.sub(_to_hundredths, out.getvalue())
    without_indents = re.sub(r"\n +", "\n", rounded)
    return _MARKS.sub(_with_one_style, without_indents)


def _to_hundredths(coordinates: re.Match[str]) -> str:
    one_line = coordinates[0].replace("\n", "")
    return re.sub(r"-?\d+\.\d{3,}", lambda digits: f"{float(digits[0]):.2f}", one_line)


def _with_one_style(group: re.Match[str]) -> str:
    """A group of marks whose style is the group's, where they have one style."""
    styles = set(re.findall(r' style="[^"]*"', group[2]))
    if len(styles) != 1:
        return group[0]
    style = styles.pop()
    return f"<g{group[1] or ''}{style}>{group[2].replace(style, '')}</g>"


@paper_style()
def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure in the format that the suffix of ``path`` names: the same bytes for the same data."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".svg":
        atomic_write(path, svg(figure))
        return
    metadata = None
    if path.suffix.lower() == ".pdf":
        # Without this, a PDF holds the time at which it was made, and its bytes differ from run to run.
        metadata = {"CreationDate": None}
    figure.savefig(path, dpi=300, metadata=metadata)
