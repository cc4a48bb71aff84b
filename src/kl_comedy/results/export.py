"""An export of a store: all that tables, figures and checks read, in two Parquet files without MLflow.

FILE.parquet         one row per run: a runs frame, sampled completions, source of plugins
FILE.curves.parquet  one row per point: run_id, metric, step, value, recorded
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.results.runs import (
    COMPLETIONS,
    CURVE_COLUMNS,
    NEVER_THINNED,
    PLUGIN_SOURCE,
    PLUGINS,
    Runs,
    curves_file,
    short,
)
from kl_comedy.tracking import store

if TYPE_CHECKING:
    import pandas as pd

CURVES = (
    "eval/*",
    "train/reward",
    "train/gold",
    "train/length",
    "train/truncated_share",
    "kl/*_reverse_*",
    "kl/k3_behaviour_token",
    "beta/*",
    "grad/norm",
    "policy/entropy*",
    "policy/ess",
    "policy/staleness",
)
"""Metrics whose curves are exported by default."""

LONGEST_COMPLETION = 2000
"""Characters of a completion in an export and on a page."""


def write_export(
    runs: Runs,
    frame: pd.DataFrame,
    out: Path,
    curves: Sequence[str] = CURVES,
    points: int = 2 * NEVER_THINNED,
    *,
    append: bool = False,
) -> pd.DataFrame:
    """Write ``frame``, runs of ``runs``, to ``out`` (.parquet), and the curves of the metrics that match ``curves``.

    A curve of more than ``points`` points is thinned (:func:`thinned`); 0 keeps all. ``append``: other runs that the
    export ``out`` has stay. Returns the curves.
    """
    import pandas as pd

    ids = frame["run_id"]
    extra: dict[str, pd.Series[Any]] = {}
    completions = []
    for run_id in ids:
        rows = [shortened(row) for row in runs.completions(run_id)]
        completions.append(json.dumps(rows))
    extra[COMPLETIONS] = pd.Series(completions, frame.index)
    if PLUGINS in frame:
        sources = [_plugin_source(runs, run_id) for run_id in ids.where(frame[PLUGINS].notna())]
        extra[PLUGIN_SOURCE] = pd.Series(sources, frame.index)
    names = [short(name) for name in frame.columns if name.startswith("metrics.")]
    # The empty frame gives the table its columns where no metric matches.
    parts = [pd.DataFrame(columns=CURVE_COLUMNS)]
    for name in names:
        if any(fnmatch(name, pattern) for pattern in curves):
            parts.append(thinned(runs.history(ids, name), points).assign(metric=name))
    table = pd.concat(parts, ignore_index=True)[list(CURVE_COLUMNS)]
    # 32 bits are enough for steps and halve those columns.
    table = table.astype({"step": "int32", "value": float, "recorded": "int32"})
    out.parent.mkdir(parents=True, exist_ok=True)
    # The copy is in one block: assigning to a frame of hundreds of columns warns of fragmentation otherwise.
    frame = frame.copy().assign(**extra)
    # Rows of the same runs are replaced: they may have ended, or been evaluated, since the last export.
    if append and out.is_file():
        frame = pd.concat([_rows_of_other_runs(out, ids), frame], ignore_index=True)
        table = pd.concat([_rows_of_other_runs(curves_file(out), ids), table], ignore_index=True)
    write_parquet(frame, out)
    write_parquet(table, curves_file(out))
    return table


def write_parquet(frame: pd.DataFrame, file: Path) -> None:
    """Write ``frame`` to ``file`` in half to nine tenths of the bytes that ``DataFrame.to_parquet`` takes.

    A table of runs has hundreds of columns and few rows: their statistics, and schemas of Arrow and pandas beside
    Parquet's own, are up to two thirds of such a file, and nothing reads them here.
    """
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    # Texts and whole numbers repeat; floats do not, and their bytes compress better when split.
    floats = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    pa.parquet.write_table(
        table,
        file,
        compression="zstd",
        compression_level=19,
        use_dictionary=[name for name in table.column_names if name not in floats],
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
        write_statistics=False,
        store_schema=False,
    )


def _rows_of_other_runs(file: Path, ids: pd.Series[str]) -> pd.DataFrame:
    import pandas as pd

    rows = pd.read_parquet(file)
    return rows[~rows["run_id"].isin(ids)]


def thinned(curves: pd.DataFrame, most: int) -> pd.DataFrame:
    """``curves`` (run_id, step, value) with ``recorded``, the number of points of each run, and at most ``most`` of
    them: the first, the lowest, the highest, the last :data:`NEVER_THINNED`, and of the others every k-th.
    """
    import pandas as pd

    counted = curves.assign(recorded=curves.groupby("run_id")["step"].transform("size"))
    if not most or counted.empty or counted["recorded"].max() <= most:
        return counted

    def thin(run: pd.DataFrame) -> pd.DataFrame:
        if len(run) <= most:
            return run
        values = run["value"].reset_index(drop=True)
        # The last points stay, because rules such as mean:5 read them.
        first_of_last = len(run) - NEVER_THINNED
        # Two places are for the lowest and the highest point, which best and lowest read.
        stride = math.ceil(first_of_last / max(most - NEVER_THINNED - 2, 1))
        positions = {*range(0, first_of_last, stride), *range(first_of_last, len(run))}
        if values.notna().any():
            positions |= {values.idxmin(), values.idxmax()}
        return run.iloc[sorted(positions)]

    return pd.concat([thin(run) for _, run in counted.groupby("run_id", sort=False)], ignore_index=True)


def shortened(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a table of completions with its long texts cut."""
    short_row = dict(row)
    for name, value in row.items():
        if isinstance(value, str):
            short_row[name] = store.shorten(value, LONGEST_COMPLETION)
    return short_row


def _plugin_source(runs: Runs, run_id: Any) -> str | None:
    """JSON of the source of the run's plugin files by name; None for a run without plugins."""
    if not isinstance(run_id, str):
        return None
    with tempfile.TemporaryDirectory() as folder:
        files = runs.plugins(run_id, Path(folder))
        root = Path(folder) / "plugins"
        return json.dumps({file.relative_to(root).as_posix(): file.read_text("utf-8") for file in files})
