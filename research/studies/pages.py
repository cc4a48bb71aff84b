"""Helpers of the studies' pages: figures without a display, Markdown tables of three digits, data as Parquet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kl_comedy.results import tables
from kl_comedy.results.figures import PAGE, Look, legend_below, new_figure, paper_style, plain_ticks, save_figure
from kl_comedy.results.looks import METHODS, VARIANTS, looks_of_families
from kl_comedy.results.runs import NO_KL

if TYPE_CHECKING:
    import pandas as pd

Looks = Mapping[str, Look]
"""How each name is drawn, in the order of the legend."""
Aggregate = Literal["mean", "median"]

FAMILIES = {
    NO_KL: NO_KL,
    "k1 in reward": METHODS[0],
    "k1 in reward, total": METHODS[0],
    "k3 in loss": METHODS[1],
    "bare k3 in loss": METHODS[1],
    "k1 in loss": METHODS[2],
    "k3 in reward": METHODS[3],
    "k2 in loss": METHODS[4],
    "k1 in reward, to go": METHODS[5],
    "k1 to go": METHODS[5],
    "exact KL in loss (rb/token)": METHODS[6],
    "exact, own token": METHODS[6],
    "exact KL to go (rb/full)": METHODS[7],
    "exact to go": METHODS[7],
    "RB without prefix ratio": METHODS[7],
    "exact KL x prefix ratio (rb/per_decision)": VARIANTS[0],
    "exact x prefix (rb/per_decision)": VARIANTS[0],
    "exact x prefix": VARIANTS[0],
    "RB per decision": VARIANTS[0],
    "k3 x token ratio": VARIANTS[1],
    "token ratio x k3": VARIANTS[1],
    "k3 x prefix": VARIANTS[2],
    "per decision, k3 differentiated": VARIANTS[2],
    "k1 x sequence ratio": VARIANTS[3],
    "sequence IS, k1 total": VARIANTS[3],
    "exact x prefix, bounded": VARIANTS[4],
    "the same, ratio up to 8 (rb/robust)": VARIANTS[4],
    "RB, prefix truncated at 8 + own baseline": VARIANTS[4],
    "k2 x ratio": VARIANTS[5],
    "exact to go, own baseline": VARIANTS[6],
    "k3 in both": VARIANTS[7],
    "k1 in both": VARIANTS[8],
    "k1 x prefix ratio (per decision)": "k1_reverse_token in reward to_go x prefix",
    "per decision, k1": "k1_reverse_token in reward to_go x prefix",
    "RB + own baseline": "exact_reverse_token in reward to_go x prefix_previous own baseline",
    "RB, self-normalized over the group": "exact_reverse_token in reward to_go x prefix_previous self-normalized",
    "k2 x ratio, clipped": "k1_reverse_token in reward own x token<=1.2 clip",
    "k2 in loss, bounded": "k2_reverse_token in loss input clamped at 1",
    "k3 in loss, bounded": "k3_reverse_token in loss input clamped at 1",
    "k3 in loss, clamped as in verl": "k3_reverse_token in loss input clamped at 20 output clamped at 10",
    "k2 in loss, clamped as in OpenRLHF": "k2_reverse_token in loss output clamped at 10",
    "k3 in loss, clamped at 1": "k3_reverse_token in loss output clamped at 1",
    "exact forward KL in loss": "exact_forward_token in loss",
}
"""The names of KL terms on the pages and in the stored data of all studies: each to its family, which has a look.
Estimators of one gradient have one family, as total and to-go credit times a sequence ratio."""


def looks_of(names: Sequence[str]) -> dict[str, Look]:
    """How each of these names of :data:`FAMILIES` is drawn: as its family in figures of runs."""
    looks = looks_of_families(FAMILIES[name] for name in names)
    return {name: looks[FAMILIES[name]].of_line() for name in names}


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
        legend_below(drawing, f"{how} of {frame.seed.nunique()} seeds")


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


def two_digits(value: float) -> str:
    """Two digits, from 10 on without decimals; what is zero up to rounding is 0.

    >>> [two_digits(value) for value in (0.02514, -0.4, 131.2, 1458.0, 1e-12)]
    ['0.025', '-0.4', '131', '1458', '0']
    """
    if abs(value) < 1e-9:
        return "0"
    if abs(value) >= 10:
        return f"{value:.0f}"
    return f"{value:.2g}"


def save_frame(frame: pd.DataFrame, path: Path) -> None:
    """Write a study's data as Parquet: six digits (more differ between CPUs), in single precision where it has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = _six_digits(frame, frame.select_dtypes("float64").columns)
    single = rounded.astype(dict.fromkeys(rounded.select_dtypes("float64").columns, "float32"))
    # A probability of 1e-300 is 0 in single precision.
    read_back = _six_digits(single, single.select_dtypes("float32").columns)
    held = [name for name in frame.columns if read_back[name].equals(rounded[name])]
    rounded.assign(**{name: single[name] for name in held}).to_parquet(path, index=False, compression="zstd")


def read_frame(path: Path) -> pd.DataFrame:
    """What :func:`save_frame` wrote: the six digits of each number, so that 0.3 is 0.3 again."""
    import pandas as pd

    frame = pd.read_parquet(path)
    return _six_digits(frame, frame.select_dtypes("float32").columns)


def _six_digits(frame: pd.DataFrame, columns: Iterable[str]) -> pd.DataFrame:
    return frame.assign(**{name: frame[name].map(lambda value: float(f"{value:.6g}")) for name in columns})


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
