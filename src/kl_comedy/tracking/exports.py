"""Runs outside their store: what an export leaves out, and an export read back as the frame it was."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from kl_comedy.errors import UserError
from kl_comedy.tracking.queries import resolve, runs_frame, short

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".parquet", ".csv")
NUMBERS = ("metrics.", "duration_s")


def without(frame: pd.DataFrame, patterns: Sequence[str]) -> pd.DataFrame:
    """``frame`` less the columns whose name or short name matches a pattern; ``*`` matches anything.

    Raises :class:`UserError` for a pattern that matches none, and for ``run_id``, by which rows are known.
    """
    names = [str(name) for name in frame.columns]
    dropped: set[str] = set()
    for pattern in patterns:
        hits = [name for name in names if fnmatch(name, pattern) or fnmatch(short(name), pattern)]
        dropped |= set(hits or [resolve(frame, pattern, "--without")])
    if "run_id" in dropped:
        raise UserError("--without: run_id stays: rows are known by it")
    return frame[[name for name in names if name not in dropped]]


def read_runs(source: str | Path) -> pd.DataFrame:
    """The runs of a store (its address) or of a file that ``kl-comedy results export`` wrote (.parquet, .csv).

    Params and tags are texts, metrics are numbers, whichever it came from. Raises :class:`UserError` for what is
    neither.
    """
    import pandas as pd

    path = Path(source)
    if path.suffix not in SUFFIXES:
        return runs_frame(str(source))
    if not path.is_file():
        raise UserError(f"no such export: {path}")
    try:
        frame = pd.read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read as an export: {str(error).splitlines()[0]}") from None
    if "run_id" not in frame or "status" not in frame:
        raise UserError(f"{path}: is no export of runs (it lacks run_id or status)")
    return frame


def _read_csv(path: Path) -> pd.DataFrame:
    import pandas as pd

    texts = pd.read_csv(path, dtype=str, keep_default_na=False)
    numbers = {name: pd.to_numeric(texts[name]) for name in texts if str(name).startswith(NUMBERS)}
    return texts.mask(texts == "").assign(**numbers)
