"""A frame as text, Markdown, CSV, JSON or LaTeX. Cell contents are data: markup in them is escaped, never obeyed."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import bad_value
from kl_comedy.tracking.runs import short

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("text", "table", "markdown", "csv", "json", "latex")
"""``table`` is another name of ``text``."""

MACHINE_FORMATS = ("csv", "json")
"""Formats that keep full precision and one number a field; the others are for reading."""

_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


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
    numeric = [_is_numeric([row[at] for row in rows]) for at in range(len(names))]
    cells = [[_text(value) for value in row] for row in rows]
    if format == "markdown":
        return _markdown(names, cells, numeric)
    if format == "latex":
        return _latex(names, cells, numeric)
    return _rich(names, cells, numeric)


def readable(summary: pd.DataFrame, group: list[str]) -> pd.DataFrame:
    """The long frame of :func:`kl_comedy.tracking.compare.summarize` as one row a group, one column a metric.

    A cell reads ``mean [low, high]``; where it rests on another number of runs than the column n says, it adds it.
    """
    import pandas as pd

    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in summary.to_dict("records"):
        key = tuple(line[name] for name in group)
        row = rows.setdefault(key, {short(name): line[name] for name in group} | {"n": 0})
        row["n"] = max(row["n"], line["n"])
    for line in summary.to_dict("records"):
        row = rows[tuple(line[name] for name in group)]
        row[short(line["metric"])] = _cell(line, row["n"])
        row |= {name: row.pop(name, line[name]) for name in ("runs", "failed", "collapsed") if name in line}
    return pd.DataFrame(list(rows.values()))


def number(value: float) -> str:
    """Four significant digits.

    >>> number(0.123456), number(12.0), number(1e-7)
    ('0.1235', '12', '1e-07')
    """
    return f"{value:.4g}"


def _cell(line: Mapping[Any, Any], n: int) -> str:
    if not line["n"]:
        return "-"
    bounds = "" if math.isnan(line["low"]) else f" [{number(line['low'])}, {number(line['high'])}]"
    count = f" (n={line['n']})" if line["n"] != n else ""
    return f"{number(line['mean'])}{bounds}{count}"


def _text(value: Any) -> str:
    if _missing(value):
        return ""
    text = number(value) if isinstance(value, float) else str(value)
    return " ".join(text.split())


def _json(value: Any) -> Any:
    """A value strict JSON can hold: missing and non-finite numbers are null."""
    value = value.item() if hasattr(value, "item") else value
    if _missing(value) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value if isinstance(value, str | int | float | bool) else str(value)


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _is_numeric(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, int | float) or hasattr(value, "item") for value in values)


def _markdown(names: list[str], cells: list[list[str]], numeric: list[bool]) -> str:
    def line(values: list[str]) -> str:
        return "| " + " | ".join(value.replace("\\", "\\\\").replace("|", "\\|") for value in values) + " |"

    rule = "|" + "|".join("---:" if right else "---" for right in numeric) + "|"
    return "\n".join([line(names), rule, *map(line, cells)])


def _latex(names: list[str], cells: list[list[str]], numeric: list[bool]) -> str:
    def line(values: list[str]) -> str:
        return "  " + " & ".join("".join(_LATEX.get(char, char) for char in value) for value in values) + r" \\"

    spec = "".join("r" if right else "l" for right in numeric)
    begin = [rf"\begin{{tabular}}{{{spec}}}", r"  \toprule", line(names), r"  \midrule"]
    return "\n".join([*begin, *map(line, cells), r"  \bottomrule", r"\end{tabular}"])


def _rich(names: list[str], cells: list[list[str]], numeric: list[bool]) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name, right in zip(names, numeric, strict=True):
        table.add_column(Text(name), justify="right" if right else "left", no_wrap=True)
    for row in cells:
        table.add_row(*map(Text, row))
    out = io.StringIO()
    Console(file=out, width=100_000, force_terminal=False, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
