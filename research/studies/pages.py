"""What the studies' pages share: figures without a display, Markdown tables of three digits, CSV files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.tracking import tables
from kl_comedy.tracking.figures import PAGE, Look, legend_below, new_figure, paper_style, plain_ticks, save_figure

if TYPE_CHECKING:
    import pandas as pd

Looks = Mapping[str, Look]
"""How each name is drawn, in the order of the legend."""


@contextmanager
def figure(path: Path, rows: int, columns: int, height: float, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure as wide as a page and its panels ``[rows, columns]``, each ``height`` inches high, saved to ``path``."""
    with paper_style():
        drawing = new_figure(PAGE, height * rows)
        yield drawing, drawing.subplots(rows, columns, squeeze=False, **options)
        save_figure(drawing, path)


def lines_by_length(frame: pd.DataFrame, path: Path, looks: Looks, values: Mapping[str, str], how: str) -> None:
    """Candidates against staleness, a panel per length and column of ``frame``.

    ``looks`` has the candidates, ``values`` maps columns to the labels of their axes; ``how`` aggregates over seeds.
    """
    lengths = sorted(frame.length.unique())
    columns = 2 if len(lengths) == 4 else len(lengths)
    rows = -(-len(lengths) // columns) * len(values)
    with figure(path, rows, columns, 2.4, sharex=True, sharey="row" if len(values) > 1 else True) as (drawing, panels):
        for axes, (value, length) in zip(panels.flat, itertools.product(values, lengths), strict=False):
            for name, style in looks.items():
                here = frame[(frame.length == length) & (frame.candidate == name)]
                middle = here.groupby("staleness")[value].agg(how).clip(lower=1e-3)
                axes.plot(middle.index, middle, label=name, **style)
            axes.set(yscale="log", title=f"{length} tokens")
        for axes in panels[-1]:
            axes.set_xlabel("staleness (logit noise, nats)")
        for line, label in zip(
            panels, [label for label in values.values() for _ in range(rows // len(values))], strict=True
        ):
            plain_ticks(line[0].yaxis)
            line[0].set_ylabel(label)
        legend_below(drawing, f"{how} over seeds")


def by_length_and_staleness(frame: pd.DataFrame, column: str, names: Sequence[str], how: str) -> pd.DataFrame:
    """One row per candidate, one column per length and staleness; ``how`` aggregates over seeds."""
    keys = ["length", "staleness"]
    table = frame[frame.candidate.isin(names)].pivot_table(index="candidate", columns=keys, values=column, aggfunc=how)
    table.columns = [f"T={length}, {staleness:g}" for length, staleness in table.columns]
    return table.reindex(list(names)).reset_index()


def page(parts: Sequence[str | pd.DataFrame]) -> str:
    """A page out of texts and tables."""
    return "\n\n".join(part if isinstance(part, str) else markdown(part) for part in parts) + "\n"


def write_page(folder: Path, parts: Sequence[str | pd.DataFrame]) -> None:
    """README.md out of texts and tables."""
    (folder / "README.md").write_text(page(parts))


def markdown(frame: pd.DataFrame) -> str:
    """A Markdown table; figures have three digits and numbers stand right.

    >>> import pandas as pd
    >>> print(markdown(pd.DataFrame({"name": ["a"], "x": [0.12345]})))
    | name | x |
    |---|---:|
    | a | 0.123 |
    """
    import pandas as pd

    numeric = [pd.api.types.is_numeric_dtype(frame[name]) for name in frame.columns]
    rows = [
        [three_digits(value) if isinstance(value, float) else str(value) for value in row]
        for row in frame.itertuples(index=False, name=None)
    ]
    return tables.markdown([str(name) for name in frame.columns], rows, numeric)


def three_digits(value: float) -> str:
    """Three digits; what is zero up to rounding is 0."""
    return "0" if abs(value) < 1e-9 else f"{value:.3g}"


def save_csv(frame: pd.DataFrame, path: Path) -> None:
    """Six digits, the same bytes on every system."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")


def update_page(path: Path, part: str, text: str) -> None:
    """Replace the generated block of ``part`` in the page ``path``, or append one; text around it stays."""
    begin, end = (f"<!-- generated {part}: {mark} -->" for mark in ("begin", "end"))
    page = path.read_text() if path.exists() else f"# {path.parent.name.capitalize()}\n"
    block = f"{begin}\n\n{text}\n\n{end}"
    before, mark, rest = page.partition(begin)
    if not mark:
        page = f"{page.rstrip()}\n\n## {part.capitalize()}\n\n{block}\n"
    else:
        page = before + block + rest.partition(end)[2]
    path.write_text(page)
