"""The one table of the project: text, Markdown, CSV, JSON or LaTeX. Markup in a cell is escaped, never interpreted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import bad_value
from kl_comedy.tracking.runs import short

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("text", "table", "markdown", "csv", "json", "latex")
"""``table`` is another name of ``text``."""

MACHINE_FORMATS = ("csv", "json")
"""Formats that keep full precision and one number a field; the others are for reading."""


def render(frame: pd.DataFrame, format: str) -> str:
    """``frame`` in ``format``, without a final newline. Raises :class:`UserError` for an unknown format."""
    if format not in FORMATS:
        raise bad_value("--format", format, FORMATS)
    names = [str(name) for name in frame.columns]
    rows = [list(row) for row in frame.itertuples(index=False, name=None)]
    if format == "json":
        return json.dumps([dict(zip(names, map(_json, row), strict=True)) for row in rows], indent=1)
    if format == "csv":
        return str(frame.to_csv(index=False, lineterminator="\n")).rstrip("\n")
    numeric = [bool(rows) and all(_is_number(row[column]) for row in rows) for column in range(len(names))]
    cells = [[_text(value) for value in row] for row in rows]
    if format == "markdown":
        return markdown(names, cells, numeric)
    from tabulate import tabulate

    align = ["right" if right else "left" for right in numeric]
    style = "latex_booktabs" if format == "latex" else "simple"  # the former escapes the cells
    options = {"colalign": align} if rows else {}
    text = tabulate(cells, headers=names, tablefmt=style, disable_numparse=True, **options)
    return "\n".join(line.rstrip() for line in text.splitlines())


def markdown(names: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[bool] = ()) -> str:
    """A Markdown table of texts, without padding, so that a changed cell changes one line. ``numeric``: stands right.

    >>> print(markdown(["a", "b"], [["x|y", "1"]], [False, True]))
    | a | b |
    |---|---:|
    | x\\|y | 1 |
    """

    def line(cells: Iterable[str]) -> str:
        escaped = (" ".join(cell.split()).replace("\\", "\\\\").replace("|", "\\|") for cell in cells)
        return f"| {' | '.join(escaped)} |"

    rule = "|".join("---:" if right else "---" for right in (*numeric, *[False] * (len(names) - len(numeric))))
    return "\n".join([line(names), f"|{rule}|", *map(line, rows)])


def readable(summary: pd.DataFrame, group: list[str]) -> pd.DataFrame:
    """The long frame of :func:`kl_comedy.tracking.compare.summarize` as one row a group, one column a metric.

    A cell reads ``mean [low, high]``; where it rests on another number of runs than the column n says, it adds it.
    """
    import pandas as pd

    lines = summary.to_dict("records")
    counts: dict[tuple[Any, ...], int] = {}
    for line in lines:
        key = tuple(line[name] for name in group)
        counts[key] = max(counts.get(key, 0), line["n"])
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        key = tuple(line[name] for name in group)
        row = rows.setdefault(key, {short(name): line[name] for name in group} | {"n": counts[key]})
        row[short(line["metric"])] = f"{number(line['mean'])}{bounds(line, counts[key])}" if line["n"] else "-"
        row |= {name: row.pop(name, line[name]) for name in ("runs", "failed", "collapsed") if name in line}
    return pd.DataFrame(list(rows.values()))


def number(value: float) -> str:
    """Four significant digits.

    >>> number(0.123456), number(12.0), number(1e-7)
    ('0.1235', '12', '1e-07')
    """
    return f"{value:.4g}"


def bounds(line: Mapping[Any, Any], runs: int) -> str:
    """`` [low, high]`` of a row of a summary where it has them, and its n where that is not ``runs``."""
    ends = "" if math.isnan(line["low"]) else f" [{number(line['low'])}, {number(line['high'])}]"
    return ends + (f" (n={line['n']})" if line["n"] != runs else "")


def _text(value: Any) -> str:
    if _missing(value):
        return ""
    return " ".join((number(value) if isinstance(value, float) else str(value)).split())


def _json(value: Any) -> Any:
    """A value strict JSON can hold: missing and non-finite numbers are null."""
    value = value.item() if hasattr(value, "item") else value
    if _missing(value) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value if isinstance(value, str | int | float | bool) else str(value)


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or hasattr(value, "item")
