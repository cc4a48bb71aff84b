"""Do stored results still hold? A table against the store it came from, and a run against its repetition.

A table has one row per run (``results export``, or any with ``run_id``): every cell whose column the store knows is
compared. Or it has one row per group (``results table --run-ids``): ``n`` and ``mean``, and the bounds of Student's
interval, are computed again from the runs in ``run_ids``, and the group's keys are compared with each of these runs.
Numbers are equal when they agree to 12 digits, more than a CSV loses. A row of which nothing could be compared is
``unchecked``, never ``same``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError
from kl_comedy.statistics import t_interval
from kl_comedy.tracking import store
from kl_comedy.tracking.runs import PREFIXES, runs_frame, short, with_values
from kl_comedy.tracking.spool import Spool

if TYPE_CHECKING:
    import pandas as pd

NEAR = 1e-3
"""Relative difference up to which two values count as near."""

VERDICTS = ("absent", "different", "near", "new", "equal")
ENVIRONMENT = ("git.", "version.", "host.")
DIGITS = 1e-12
MOST_SHOWN = 4
QUESTIONS = ("run_ids", "metric", "of", "interval")
"""Columns of a group's row that say what was computed, not what came out."""


def find_run(uri: str, run: str) -> Any:
    """The run with this name, or the only one whose id begins so. Raises :class:`UserError`."""
    client = store.open_existing(uri)
    frame = runs_frame(uri)
    if frame.empty:
        raise UserError(f"no runs in {uri}")
    hits = frame[frame["run_id"].str.startswith(run) | (frame["run_name"] == run)]["run_id"]
    if len(hits) != 1:
        raise UserError(f"RUN: got {run!r}, which {len(hits)} runs of the store answer to; `kl-comedy results export`")
    return client.get_run(hits.iloc[0])


def stored_config(uri: str, run: Any, folder: Path) -> Path:
    """The run's resolved config, fetched into ``folder``. Raises :class:`UserError` where the store has none."""
    client = store.open_existing(uri)
    try:
        return Path(client.download_artifacts(run.info.run_id, "config/config.yaml", str(folder)))
    except Exception as error:
        raise UserError(
            f"run {run.info.run_id} has no config that can be fetched ({store.first_line(error)}); "
            "runs keep it when they end"
        ) from error


def environment_differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Tags of code, packages and machine that changed, as ``name: then -> now``."""
    names = sorted(name for name in {*then, *now} if name.startswith(ENVIRONMENT) and "host.gpus." not in name)
    return [
        f"{name}: {then.get(name, '-')} -> {now.get(name, '-')}" for name in names if then.get(name) != now.get(name)
    ]


def final_metrics(run_dir: Path) -> dict[str, float]:
    """The last value of each metric in a run folder's spool."""
    last: dict[str, tuple[int, float]] = {}
    for event in Spool(run_dir).events():
        if event.kind == "metrics" and event.step is not None:
            for name, value in event.data.items():
                if name not in last or event.step >= last[name][0]:
                    last[name] = (event.step, float(value))
    return {name: value for name, (_, value) in last.items()}


@dataclass(frozen=True, kw_only=True)
class MetricComparison:
    """A final metric of the old and the new run. ``verdict``: ``equal`` (to the bit), ``near``, ``different``,
    ``absent`` (the new run lacks it) or ``new`` (the old run lacked it: newer code measures more)."""

    metric: str
    was: float | None
    now: float | None
    verdict: str


def compare_metrics(was: Mapping[str, float], now: Mapping[str, float], near: float = NEAR) -> list[MetricComparison]:
    """Every metric of either side, the worst first; but ``time/``, which measures the machine.

    >>> [item.verdict for item in compare_metrics({"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1.0, "b": 1.0001})]
    ['absent', 'near', 'equal']
    """

    def verdict(name: str) -> str:
        if name not in was or name not in now:
            return "absent" if name in was else "new"
        old, new = was[name], now[name]
        if old == new or (math.isnan(old) and math.isnan(new)):
            return "equal"
        return "near" if math.isclose(old, new, rel_tol=near, abs_tol=near * 1e-3) else "different"

    names = sorted(name for name in {*was, *now} if not name.startswith("time/"))
    compared = [
        MetricComparison(metric=name, was=was.get(name), now=now.get(name), verdict=verdict(name)) for name in names
    ]
    return sorted(compared, key=lambda item: VERDICTS.index(item.verdict))


@dataclass(frozen=True, kw_only=True)
class RowVerdict:
    """Of one row: ``same``, ``changed`` (``why`` says where), ``missing`` (a run is gone), ``unchecked`` (no cell could
    be compared). ``checked`` counts cells; ``unchecked`` names columns that the store lacks."""

    row: str
    verdict: str
    checked: int = 0
    why: str = ""
    unchecked: tuple[str, ...] = ()


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV, JSON or Parquet table. Raises :class:`UserError` for another file, or without run ids."""
    import pandas as pd

    if not path.is_file():
        raise UserError(f"no such table: {path}")
    if path.suffix not in (".csv", ".json", ".parquet"):
        raise UserError(f"{path}: allowed: a table that ends in .csv, .json or .parquet")
    try:
        if path.suffix == ".json":
            rows = json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".csv":
            rows = pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")
        else:
            rows = pd.read_parquet(path).to_dict("records")
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read as a table: {str(error).splitlines()[0]}") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: holds no rows")
    if not all("run_id" in row or "run_ids" in row for row in rows):
        raise UserError(
            f"{path}: names no runs (column run_id or run_ids); `kl-comedy results export` and "
            "`kl-comedy results table --run-ids` write tables that do"
        )
    return rows


def verify(uri: str, frame: pd.DataFrame, table: Sequence[Mapping[str, Any]]) -> list[RowVerdict]:
    """One verdict per row of ``table``; ``frame`` has all runs of the store."""
    runs = frame.set_index("run_id", drop=False)
    columns: dict[str, str] = {}
    for column in map(str, frame.columns):  # of equal short names the first column has it
        columns.setdefault(short(column), column)
    columns |= {column: column for column in map(str, frame.columns)}
    return [
        _verify_group(uri, runs, row, columns) if "run_ids" in row else _verify_run(runs, row, columns) for row in table
    ]


def _verify_run(runs: pd.DataFrame, row: Mapping[str, Any], columns: Mapping[str, str]) -> RowVerdict:
    run_id = str(row["run_id"])
    if run_id not in runs.index:
        return RowVerdict(row=run_id, verdict="missing", why="the store has no such run")
    stored = runs.loc[run_id]
    given = {name: value for name, value in row.items() if name != "run_id"}
    wrong = [
        f"{short(name)}: {_shown(value)} -> {_shown(stored[columns[name]])}"
        for name, value in given.items()
        if name in columns and not _same(value, stored[columns[name]])
    ]
    unknown = [name for name in given if name not in columns]
    gone = [name for name in unknown if name.startswith(PREFIXES)]
    wrong += [f"{short(name)}: {_shown(given[name])} -> nothing" for name in gone if not _empty(given[name])]
    return _verdict(run_id, len(given) - len(unknown), wrong, [name for name in unknown if name not in gone])


def _verify_group(uri: str, runs: pd.DataFrame, row: Mapping[str, Any], columns: Mapping[str, str]) -> RowVerdict:
    ids, metric = str(row["run_ids"]).split(), str(row.get("metric", ""))
    title = f"{metric} of {len(ids)} runs" + (f", {ids[0][:8]} ..." if ids else "")
    gone = [run_id for run_id in ids if run_id not in runs.index]
    if gone:
        return RowVerdict(row=title, verdict="missing", why=f"the store has no run {', '.join(gone[:MOST_SHOWN])}")
    column = f"metrics.{metric}"
    if column not in runs:
        return RowVerdict(row=title, verdict="changed", why=f"no run has the metric {metric!r} any more")
    members = runs.loc[ids].reset_index(drop=True)
    values = with_values(uri, members, [column], str(row.get("of") or "last"))[column]
    now = t_interval([float(value) for value in values if math.isfinite(value)])
    stored: dict[str, list[Any]] = {"n": [now.n], "mean": [now.mean]}
    if row.get("interval") == "t":  # a bootstrap draws
        stored |= {"low": [now.low], "high": [now.high]}
    keys = [name for name in row if name not in stored and name not in QUESTIONS]
    stored |= {name: list(members[columns[name]]) for name in keys if name in columns}
    wrong = []
    for name, alternatives in stored.items():
        others = [value for value in alternatives if not _same(row.get(name), value)]
        wrong += [f"{name}: {_shown(row.get(name))} -> {_shown(others[0])}"] if others else []
    return _verdict(title, len(stored), wrong, [name for name in keys if name not in columns])


def _verdict(row: str, checked: int, wrong: list[str], unchecked: Iterable[str]) -> RowVerdict:
    more = f"; and {len(wrong) - MOST_SHOWN} more" if len(wrong) > MOST_SHOWN else ""
    why = "; ".join(wrong[:MOST_SHOWN]) + more if checked or wrong else "the store has no column of this table"
    verdict = "changed" if wrong else "same" if checked else "unchecked"
    return RowVerdict(row=row, verdict=verdict, checked=checked, why=why, unchecked=tuple(unchecked))


def _same(given: Any, stored: Any) -> bool:
    if _empty(given) or _empty(stored):
        infinite = isinstance(stored, float) and math.isinf(stored)  # which JSON cannot hold
        return _empty(given) and (_empty(stored) or infinite)
    try:
        return str(given) == str(stored) or math.isclose(float(given), float(stored), rel_tol=DIGITS, abs_tol=0.0)
    except (TypeError, ValueError):
        return False


def _empty(value: Any) -> bool:
    """CSV and JSON cannot tell a missing value from NaN."""
    return value is None or str(value) in ("", "nan")


def _shown(value: Any) -> str:
    text = "nothing" if _empty(value) else str(value)
    return text if len(text) <= 40 else text[:40] + "..."
