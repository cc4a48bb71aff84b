"""The one table of the project: text, Markdown, CSV, JSON or LaTeX.

Markup in a cell is escaped, never interpreted: pipes and HTML in Markdown, macros in LaTeX, formulas in CSV. Terminal
escapes are removed.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import bad_value
from kl_comedy.redaction import one_line, printable
from kl_comedy.results.compare import groups_of
from kl_comedy.results.runs import short

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
        safe = frame.set_axis([csv_cell(name) for name in names], axis=1).map(csv_cell)
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


# --- tables that fit a terminal ---------------------------------------------------------------------------------------

SHORT_HEADS = {
    "kl/exact_reverse_sequence": "KL/completion",
    "kl/exact_reverse_token": "KL/token",
    "policy/entropy": "entropy",
    "train/reward": "training reward",
    "train/gold": "training gold",
}
"""Heads of frequent metrics; others keep the last part of their name."""

COUNTS = ("failed", "collapsed")
"""Columns of a table that say nothing where all of their counts are 0."""

NONNEGATIVE = re.compile(r"(^|/)exact_(reverse|forward)_(token|sequence)$")
"""Metrics that are KLs of whole distributions, of which none is below 0; a Student interval knows nothing of that."""

MOST_DECIMALS = 5
"""Decimals of a number beside its interval; a smaller one is written as 1.2e-07."""

GAP = 2
"""Spaces between two columns."""

NARROWEST = 16
"""Characters: a word of a text column is broken only where it is longer."""

NO_BREAK = "\u00a0"
"""Stands for the spaces of an estimate while cells are wrapped: a mean and its interval stay on one line."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A cell with a mean and its interval (NaN where it has none). As text, in every format, it has four digits."""

    metric: str
    mean: float
    low: float
    high: float
    remark: str = ""

    def __str__(self) -> str:
        interval = ""
        if not math.isnan(self.low):
            interval = f" [{number(self.low)}, {number(self.high)}]"
        return f"{number(self.mean)}{interval}{self.remark}"

    def fitted(self) -> str:
        """As a terminal shows it: two significant digits of the interval's half width, and no KL below 0.

        >>> Estimate(metric="train/reward", mean=0.49411, low=0.46317, high=0.52505).fitted()
        '0.494 [0.463, 0.525]'
        >>> Estimate(metric="kl/exact_reverse_sequence", mean=5.238, low=-7.444, high=17.92).fitted()
        '5 [0, 18]'
        """
        half_width = (self.high - self.low) / 2
        if not 0 < half_width < math.inf:
            return str(self)
        # The exponent after rounding: a half width of 0.0996 is 0.10.
        decimals = 1 - int(f"{half_width:.1e}".partition("e")[2])
        low = self.low
        if NONNEGATIVE.search(self.metric):
            low = max(low, 0.0)
        mean_text, low_text, high_text = (_to_decimals(value, decimals) for value in (self.mean, low, self.high))
        return f"{mean_text} [{low_text}, {high_text}]{self.remark}"


def _to_decimals(value: float, decimals: int) -> str:
    """``value`` rounded to ``decimals`` places after the point; below 0 these are tens, hundreds, ...

    >>> _to_decimals(1234.5, -2), _to_decimals(0.125, 5), _to_decimals(-0.001, 2), _to_decimals(0.0, 2)
    ('1200', '0.12500', '0.00', '0')
    """
    if value == 0:
        return "0"
    # Plus 0: no number is written as -0.
    rounded = round(value, decimals) + 0.0
    if decimals > MOST_DECIMALS:
        return f"{rounded:.2g}"
    return f"{rounded:.{max(decimals, 0)}f}"


def fitted(frame: pd.DataFrame, width: int) -> str:
    """``frame`` as text of lines of at most ``width`` characters; 0 is any number, and estimates with four digits.

    What does not fit gets short heads, explained below, and loses counts that are all 0. What then does not fit is
    wrapped within its columns, and as a last resort printed as a block per row. Nothing is cut.
    """
    if width == 0:
        return render(frame, "text")
    shown = frame.map(lambda value: value.fitted() if isinstance(value, Estimate) else value)
    text = render(shown, "text")
    if _widest(text.splitlines()) <= width:
        return text
    silent = [name for name in COUNTS if name in frame and not frame[name].any()]
    shorter = shown.drop(columns=silent)
    has_estimates = [any(isinstance(value, Estimate) for value in frame[name]) for name in shorter]
    names = [printable(str(name)) for name in shorter.columns]
    heads = _short_heads(names)
    legend = []
    for head, name in zip(heads, names, strict=True):
        if head != name:
            legend += textwrap.wrap(f"{head} = {name}", width, subsequent_indent="  ")

    rows = list(shorter.itertuples(index=False, name=None))
    cells = [[_text(value) for value in row] for row in rows]
    numeric = [all(map(_is_number, column)) for column in zip(*rows, strict=True)]
    lines = _tabulated(cells, heads, "simple", numeric)
    if _widest(lines) > width:
        unbroken = []
        for row in cells:
            texts = zip(row, has_estimates, strict=True)
            unbroken.append([text.replace(" ", NO_BREAK) if is_estimate else text for text, is_estimate in texts])
        wrapped = _wrapped(unbroken, heads, numeric, width, whole=has_estimates)
        lines = [line.replace(NO_BREAK, " ") for line in wrapped]
    if legend:
        lines += ["", *legend]
    return "\n".join(lines)


def _widest(lines: Sequence[str]) -> int:
    return max(map(len, lines), default=0)


def _short_heads(names: Sequence[str]) -> list[str]:
    """Heads for the columns ``names``; a name whose short head is not its own alone stays as it is."""
    heads = [_short_head(name) for name in names]
    return [head if heads.count(head) == 1 else name for head, name in zip(heads, names, strict=True)]


def _short_head(name: str) -> str:
    """A few words for the name of a metric or a config key.

    >>> _short_head("eval/heldout/kl/exact_reverse_sequence"), _short_head("optimizer.lr")
    ('heldout KL/completion', 'lr')
    """
    eval_set = ""
    metric = name
    of_evaluation = re.fullmatch(r"eval(?:uate)?/([^/]+)/(.+)", name)
    if of_evaluation is not None:
        eval_set = f"{of_evaluation[1]} "
        metric = of_evaluation[2]
    if metric in SHORT_HEADS:
        return eval_set + SHORT_HEADS[metric]
    if "/" in name:
        return eval_set + metric.rpartition("/")[2].replace("_", " ")
    return name.rpartition(".")[2]


def _wrapped(
    cells: list[list[str]], heads: Sequence[str], numeric: Sequence[bool], width: int, whole: Sequence[bool]
) -> list[str]:
    """The lines of a table whose cells are wrapped, or a block per row where the columns are too many for that.

    No word of a ``numeric`` or ``whole`` column is broken.
    """
    narrowest = []
    widths = []
    for position, head in enumerate(heads):
        column = [row[position] for row in cells]
        words = " ".join([head, *column]).split(" ")
        longest_word = max(map(len, words), default=1)
        # A number is never broken.
        is_numeric = numeric[position : position + 1] == [True]
        if is_numeric or whole[position]:
            narrowest.append(longest_word)
        else:
            narrowest.append(min(longest_word, NARROWEST))
        widths.append(max(map(len, [head, *column])))
    available = width - GAP * (len(heads) - 1)
    while sum(widths) > available:
        # The widest one gives way, so that columns end up about as wide as each other.
        shrinkable = [position for position in range(len(widths)) if widths[position] > narrowest[position]]
        if not shrinkable:
            return _blocks(cells, heads, width)
        widths[max(shrinkable, key=lambda position: widths[position])] -= 1

    # Laid out here: tabulate makes columns wider than their heads.
    lines = _row_lines(heads, widths, numeric)
    lines.append((" " * GAP).join("-" * size for size in widths))
    rows = [_row_lines(row, widths, numeric) for row in cells]
    has_wrapped_row = any(len(row_lines) > 1 for row_lines in rows)
    for number_of_row, row_lines in enumerate(rows):
        # An empty line between rows of several lines, which belong together.
        if has_wrapped_row and number_of_row:
            lines.append("")
        lines += row_lines
    return lines


def _row_lines(texts: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> list[str]:
    """The lines of one row, its texts wrapped to the widths of their columns."""
    wrapped = [textwrap.wrap(text, size) for text, size in zip(texts, widths, strict=True)]
    lines = []
    for parts in itertools.zip_longest(*wrapped, fillvalue=""):
        padded = []
        for position, part in enumerate(parts):
            is_number = numeric[position : position + 1] == [True]
            padded.append(part.rjust(widths[position]) if is_number else part.ljust(widths[position]))
        lines.append((" " * GAP).join(padded).rstrip())
    return lines


def _blocks(cells: Sequence[Sequence[str]], heads: Sequence[str], width: int) -> list[str]:
    """Each row as lines ``head: cell``, with an empty line between two rows."""
    lines: list[str] = []
    for row in cells:
        for head, cell in zip(heads, row, strict=True):
            lines += textwrap.wrap(f"{head}: {cell}", width, subsequent_indent="  ")
        lines.append("")
    return lines[:-1]


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
    """The long frame of :func:`kl_comedy.results.compare.summarize` as one row per group, one column per metric.

    A cell is an :class:`Estimate`, ``mean [low, high]``; where it rests on another number of runs than the
    column n says, it adds it.
    """
    import pandas as pd

    rows = []
    for keys, lines in groups_of(summary, group):
        # The column n is that of the metric that most runs have; the others say theirs in the cell.
        n = lines["n"].max()
        row = dict(zip(map(short, group), keys, strict=True)) | {"n": n}
        for line in lines.to_dict("records"):
            cell: Estimate | str = "-"
            if line["n"]:
                remark = f" (n={line['n']})" if line["n"] != n else ""
                bounds = {name: line[name] for name in ("mean", "low", "high")}
                cell = Estimate(metric=line["metric"], remark=remark, **bounds)
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


def _escaped(text: str) -> str:
    """A text on one line of Markdown, in a cell too. A ``<`` is escaped only where it would begin an HTML tag: ``p <
    0.05`` stays."""
    text = " ".join(one_line(text).split()).replace("\\", "\\\\").replace("|", "\\|")
    return re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", text)


_PLAIN_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|-", re.IGNORECASE | re.ASCII)
_FORMULA_SIGNS = ("=", "+", "-", "\u2212", "@")


def csv_cell(value: Any) -> Any:
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
    return " ".join(one_line(str(value)).split())


def _json(value: Any) -> Any:
    """A value strict JSON can hold: missing and non-finite numbers are null."""
    if hasattr(value, "item"):  # a number of numpy
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)
