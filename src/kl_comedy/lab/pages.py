"""What the studies' pages share: figures without a display, Markdown tables of three digits, CSV files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.tracking import tables

if TYPE_CHECKING:
    import pandas as pd


@contextmanager
def figure(
    path: Path, rows: int, columns: int, size: tuple[float, float], *, dpi: int = 110, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """A figure and its grid of panels ``[rows, columns]``, saved to ``path`` at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawing, panels = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)
    try:
        yield drawing, panels
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, dpi=dpi)
    finally:
        plt.close(drawing)


def legend_below(drawing: Any, axes: Any, columns: int) -> None:
    """The legend of one panel below the whole figure."""
    handles, labels = axes.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9)


def tab10() -> Any:
    """Ten colors."""
    import matplotlib

    return matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]


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
