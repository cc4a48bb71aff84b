"""Helpers of the studies' pages: figures without a display, Markdown tables of three digits, CSV files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kl_comedy.tracking import tables
from kl_comedy.tracking.figures import PAGE, Look, legend_below, new_figure, paper_style, plain_ticks, save_figure

if TYPE_CHECKING:
    import pandas as pd

Looks = Mapping[str, Look]
"""How each name is drawn, in the order of the legend."""
Aggregate = Literal["mean", "median"]


@contextmanager
def figure(path: Path, rows: int, columns: int, height: float, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure as wide as a page and its panels ``[rows, columns]``, each ``height`` inches high, saved to ``path``."""
    with paper_style():
        drawing = new_figure(PAGE, height * rows)
        yield drawing, drawing.subplots(rows, columns, squeeze=False, **options)
        save_figure(drawing, path)


def lines_by_length(frame: pd.DataFrame, path: Path, looks: Looks, values: Mapping[str, str], how: Aggregate) -> None:
    """Candidates against staleness, a panel per length and column of ``frame``.

    ``looks`` has the candidates, ``values`` maps columns to the labels of their axes; ``how`` aggregates over seeds.
    """
    lengths = sorted(frame.length.unique())
    # Four panels in a row would be too narrow for their ticks.
    columns = 2 if len(lengths) == 4 else len(lengths)
    rows_per_value = math.ceil(len(lengths) / columns)
    rows = rows_per_value * len(values)
    # Different columns of the frame have different units, and only rows of one share their scale.
    sharey: bool | str = "row" if len(values) > 1 else True
    with figure(path, rows, columns, 2.4, sharex=True, sharey=sharey) as (drawing, panels):
        for axes, (value, length) in zip(panels.flat, itertools.product(values, lengths), strict=False):
            for name, style in looks.items():
                candidate = frame[(frame.length == length) & (frame.candidate == name)]
                # A logarithmic axis has no place for 0: what is exact is drawn at its lower end.
                middle = candidate.groupby("staleness")[value].agg(how).clip(lower=1e-3)
                axes.plot(middle.index, middle, label=name, **style)
            axes.set(yscale="log", title=f"{length} tokens")
        for axes in panels[-1]:
            axes.set_xlabel("staleness (logit noise, nats)")
        for row, (first_panel, *_) in enumerate(panels):
            plain_ticks(first_panel.yaxis)
            first_panel.set_ylabel(list(values.values())[row // rows_per_value])
        legend_below(drawing, f"{how} over seeds")


def by_length_and_staleness(frame: pd.DataFrame, column: str, names: Sequence[str], how: Aggregate) -> pd.DataFrame:
    """One row per candidate, one column per length and staleness; ``how`` aggregates over seeds."""
    keys = ["length", "staleness"]
    table = frame[frame.candidate.isin(names)].pivot_table(index="candidate", columns=keys, values=column, aggfunc=how)
    table.columns = [f"T={length}, {staleness:g}" for length, staleness in table.columns.to_flat_index()]
    return table.reindex(list(names)).reset_index()


def page(parts: Sequence[str | pd.DataFrame]) -> str:
    """A page out of texts and tables."""
    texts = [part if isinstance(part, str) else markdown(part) for part in parts]
    return "\n\n".join(texts) + "\n"


def write_page(folder: Path, parts: Sequence[str | pd.DataFrame]) -> None:
    """Write README.md out of texts and tables."""
    (folder / "README.md").write_text(page(parts))


def markdown(frame: pd.DataFrame) -> str:
    """A Markdown table; floats have three digits, and numbers are aligned at the right.

    >>> import pandas as pd
    >>> print(markdown(pd.DataFrame({"name": ["a"], "x": [0.12345]})))
    | name | x |
    |---|---:|
    | a | 0.123 |
    """
    import pandas as pd

    def text(value: object) -> str:
        return three_digits(value) if isinstance(value, float) else str(value)

    numeric = [pd.api.types.is_numeric_dtype(frame[name]) for name in frame.columns]
    rows = [[text(value) for value in row] for row in frame.itertuples(index=False, name=None)]
    return tables.markdown([str(name) for name in frame.columns], rows, numeric)


def three_digits(value: float) -> str:
    """Three digits; what is zero up to rounding is 0."""
    if abs(value) < 1e-9:
        return "0"
    return f"{value:.3g}"


def save_csv(frame: pd.DataFrame, path: Path) -> None:
    """Write six digits, the same bytes on every system. More digits would differ between CPUs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")


def update_page(path: Path, part: str, text: str) -> None:
    """Replace the generated block of ``part`` in the page ``path``, or append one; text around it stays."""
    begin = f"<!-- generated {part}: begin -->"
    end = f"<!-- generated {part}: end -->"
    block = f"{begin}\n\n{text}\n\n{end}"
    if path.exists():
        page = path.read_text()
    else:
        page = f"# {path.parent.name.capitalize()}\n"

    if begin in page:
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = before + block + after
    else:
        page = f"{page.rstrip()}\n\n## {part.capitalize()}\n\n{block}\n"
    path.write_text(page)
