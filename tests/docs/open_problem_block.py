"""The table of docs/open_problem.md, from the data of the study as it is committed."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parents[2] / "results" / "open_problem" / "open_problem.csv"


def open_problem() -> str:
    import pandas as pd

    from kl_comedy.lab.open_problem import error_table
    from kl_comedy.lab.synthetic import markdown

    frame = pd.read_csv(DATA)
    shown = frame[frame.length.isin((8, 16)) & frame.staleness.isin((0.0, 0.3, 0.6, 1.0))]
    return markdown(error_table(shown, 1024))
