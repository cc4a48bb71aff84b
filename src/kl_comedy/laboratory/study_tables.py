"""Frames as Markdown with three digits, for the pages of a study."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def markdown(frame: pd.DataFrame) -> str:
    """A Markdown table; figures have three digits and numbers stand right.

    >>> import pandas as pd
    >>> print(markdown(pd.DataFrame({"name": ["a"], "x": [0.12345]})))
    | name | x |
    | --- | ---: |
    | a | 0.123 |
    """
    import pandas as pd

    numeric = [pd.api.types.is_numeric_dtype(frame[name]) for name in frame.columns]
    lines = [[str(name) for name in frame.columns], ["---:" if right else "---" for right in numeric]]
    lines += [[_cell(value) for value in row] for row in frame.itertuples(index=False, name=None)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "0" if abs(value) < 1e-9 else f"{value:.3g}"
    return str(value).replace("|", "\\|")
