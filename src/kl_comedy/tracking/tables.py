"""The one table of the project: text, Markdown, CSV, JSON or LaTeX.

Markup in a cell is escaped, never interpreted: pipes and HTML in Markdown, macros in LaTeX, formulas in CSV. Terminal
escapes are removed.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import bad_value
from kl_comedy.redaction import printable
from kl_comedy.tracking.compare import groups_of
from kl_comedy.tracking.runs import short

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("text", "table", "markdown", "csv", "json", "latex")
"""``table`` is another name of ``text``. csv and json have full precision; the others are for reading."""


def render(frame: pd.DataFrame, format: str, notes: Sequence[str] = ()) -> str:
    """``frame`` in ``format``, without a final newline; text, Markdown and LaTeX have ``notes`` below.

    Raises :class:`UserError` for an unknown format.
    """
    if format not in FORMATS:
        raise bad_value("--format", format, FORMATS)
    names = [printable(str(name)) for name in frame.columns]
    rows = list(frame.itertuples(index=False, name=None))
    if format == "json":
        return json.dumps([dict(zip(names, map(_json, row), strict=True)) for row in rows], indent=1)
    if format == "csv":
        # Names of metrics and tags come from configs and plugins, so the header is escaped too.
        safe = frame.set_axis([_csv(name) for name in names], axis=1).map(_csv)
        return str(safe.to_csv(index=False, lineterminator="\n")).rstrip("\n")

    # Notes quote labels of the store, which may hold terminal escapes.
    notes = [printable(note) for note in notes]
    cells = [[_text(value) for value in row] for row in rows]
    numeric = [all(map(_is_number, column)) for column in zip(*rows, strict=True)]
    if format == "markdown":
        lines = [markdown(names, cells, numeric)]
        # An empty line before each note makes it a paragraph.
        lines += [f"\n{_escaped(note)}" for note in notes]
        return "\n".join(lines)
    if format == "latex":
        # This style escapes the cells; a note is escaped here.
        lines = _tabulated(cells, names, "latex_booktabs", numeric)
        lines += [rf"\par{{\footnotesize {_latex(note)}}}" for note in notes]
        return "\n".join(lines)
    return "\n".join([*_tabulated(cells, names, "simple", numeric), *notes])


def _is_number(value: Any) -> bool:
    import numpy as np

    return isinstance(value, int | float | np.number)


def _tabulated(
    rows: Sequence[Sequence[str]], names: Sequence[str], style: str, numeric: Sequence[bool] = ()
) -> list[str]:
    """The lines of a table of texts, as tabulate lays it out; ``numeric`` columns stand right."""
    from tabulate import tabulate  # type: ignore[import-untyped]  # its stubs are a package of their own

    options: dict[str, Any] = {}
    # tabulate refuses an alignment for a table without rows.
    if rows and numeric:
        options["colalign"] = ["right" if is_number else "left" for is_number in numeric]
    # The cells are formatted already; tabulate would parse them and round again.
    text: str = tabulate(rows, headers=names, tablefmt=style, disable_numparse=True, **options)
    return [line.rstrip() for line in text.splitlines()]


def markdown(names: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[bool] = ()) -> str:
    """A Markdown table of texts, without padding, so that a changed cell changes one line. ``numeric``: stands right.

    >>> print(markdown(["a", "b"], [["x|y", "1"]], [False, True]))
    | a | b |
    |---|---:|
    | x\\|y | 1 |
    """

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(map(_escaped, cells))} |"

    rules = ["---:" if is_number else "---" for is_number in numeric]
    rules += ["---"] * (len(names) - len(numeric))
    rule = "|".join(rules)
    return "\n".join([line(names), f"|{rule}|", *map(line, rows)])


def readable(summary: pd.DataFrame, group: list[str]) -> pd.DataFrame:
    """The long frame of :func:`kl_comedy.tracking.compare.summarize` as one row per group, one column per metric.

    A cell reads ``mean [low, high]``; where it rests on another number of runs than the column n says, it adds it.
    """
    import pandas as pd

    rows = []
    for keys, lines in groups_of(summary, group):
        # The column n is that of the metric that most runs have; the others say theirs in the cell.
        n = lines["n"].max()
        row = dict(zip(map(short, group), keys, strict=True)) | {"n": n}
        for line in lines.to_dict("records"):
            cell = "-"
            if line["n"]:
                cell = f"{number(line['mean'])}{bounds(line, n)}"
            row[short(line["metric"])] = cell
        for name in ("runs", "failed", "collapsed"):
            if name in lines:
                row[name] = lines[name].iloc[0]
        rows.append(row)
    return pd.DataFrame(rows)


def number(value: float) -> str:
    """Four significant digits.

    >>> number(0.123456), number(12.0), number(1e-7)
    ('0.1235', '12', '1e-07')
    """
    return f"{value:.4g}"


def bounds(line: Mapping[Any, Any], runs: int) -> str:
    """`` [low, high]`` of a row of a summary where it has them, and its n where that is not ``runs``."""
    text = ""
    if not math.isnan(line["low"]):
        text += f" [{number(line['low'])}, {number(line['high'])}]"
    if line["n"] != runs:
        text += f" (n={line['n']})"
    return text


def _escaped(text: str) -> str:
    """A text on one line of Markdown, in a cell too. A ``<`` is escaped only where it would begin an HTML tag: ``p <
    0.05`` stays."""
    text = " ".join(printable(text).split()).replace("\\", "\\\\").replace("|", "\\|")
    return re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", text)


_PLAIN_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|-", re.IGNORECASE | re.ASCII)
_FORMULA_SIGNS = ("=", "+", "-", "\u2212", "@")


def _csv(value: Any) -> Any:
    """A value as a spreadsheet shows it: a text that may begin a formula has an apostrophe in front, a number has not.

    Spreadsheets take full-width and other forms of a sign for it, and skip spaces and marks without width before it.
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    if _PLAIN_NUMBER.fullmatch(text):
        return text
    first = ""
    for character in text:
        is_invisible = character.isspace() or unicodedata.category(character) in ("Cf", "Mn")
        if not is_invisible:
            first = character
            break
    is_formula = unicodedata.normalize("NFKC", first) in _FORMULA_SIGNS
    if is_formula or text.startswith("\t"):
        return f"'{text}"
    return text


def _latex(text: str) -> str:
    """``text`` with the characters escaped that LaTeX would interpret, as tabulate does it in a cell."""
    # The third line is the row of the only cell; above it are the beginning of the table and a rule.
    row = _tabulated([[" ".join(text.split())]], (), "latex")[2]
    return row.removesuffix("\\\\").strip()


def _text(value: Any) -> str:
    """A value as a reader sees it, on one line; nothing for a missing one."""
    if value is None:
        return ""
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        return number(value)
    return " ".join(printable(str(value)).split())


def _json(value: Any) -> Any:
    """A value strict JSON can hold: missing and non-finite numbers are null."""
    if hasattr(value, "item"):  # a number of numpy
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)
