"""Is it the same run again? What differs between a stored run and here, and between its final metrics and new ones.

A table against the store it came from: which rows the runs still bear out.

Two kinds of table are understood. One row a run (``results export``, or any with ``run_id``): every cell whose column
the store knows is compared. One row a group (``results table --run-ids``): ``mean`` and ``n``, and the bounds of
Student's interval, are computed again from the runs named in ``run_ids``, and the keys of the group are compared with
each of these runs. Numbers are equal when they agree to 12 digits, more than a CSV loses. What the store cannot
speak to is named: a row of which nothing could be compared is ``unchecked``, never ``same``.
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
from kl_comedy.tracking.runs import PREFIXES, short, with_values
from kl_comedy.tracking.spool import Spool

if TYPE_CHECKING:
    import pandas as pd


NEAR = 1e-3
"""Relative difference up to which two values count as near."""

WALL_CLOCK = ("time/",)
"""Metrics that measure the machine, not the run."""

PLACE = ("git.", "version.", "host.")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A final metric: was, now, and ``equal`` (to the bit), ``near``, ``different``,
    ``absent`` (the new run lacks it) or ``new`` (the old run lacked it: newer code measures more)."""

    metric: str
    was: float | None
    now: float | None
    verdict: str


def find_run(uri: str, run: str) -> Any:
    """The run with this id, or the only one whose id or name begins so. Raises :class:`UserError`."""
    from kl_comedy.tracking.runs import runs_frame

    client = store.open_existing(uri)
    frame = runs_frame(uri)
    if frame.empty:
        raise UserError(f"no runs in {uri}")
    hits = frame[frame["run_id"].str.startswith(run) | (frame["run_name"] == run)]["run_id"]
    if len(hits) != 1:
        raise UserError(f"RUN: got {run!r}, which {len(hits)} runs of the store answer to; `kl-comedy results export`")
    return client.get_run(hits.iloc[0])


def stored_config(uri: str, run: Any, folder: Path) -> Path:
    """The run's resolved config, fetched into ``folder``. Raises :class:`UserError` where the run kept none."""
    client = store.open_existing(uri)
    try:
        return Path(client.download_artifacts(run.info.run_id, "config/config.yaml", str(folder)))
    except Exception as error:
        raise UserError(
            f"run {run.info.run_id} has no config that can be fetched ({store.first_line(error)}); "
            "runs keep it when they end"
        ) from error


def place_differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Commit, change, packages and machine, where they are not what they were: ``name: then -> now``."""
    names = sorted({name for name in (*then, *now) if name.startswith(PLACE) and not name.startswith("host.gpus.")})
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


def compare_metrics(was: Mapping[str, float], now: Mapping[str, float], near: float = NEAR) -> list[Compared]:
    """Every metric of either side but the wall clock's, the worst first.

    >>> [item.verdict for item in compare_metrics({"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1.0, "b": 1.0001})]
    ['absent', 'near', 'equal']
    """
    found = []
    for name in sorted({*was, *now}):
        if not name.startswith(WALL_CLOCK):
            found.append(
                Compared(metric=name, was=was.get(name), now=now.get(name), verdict=_judge(was, now, name, near))
            )
    return sorted(found, key=lambda item: ("absent", "different", "near", "new", "equal").index(item.verdict))


def _judge(was: Mapping[str, float], now: Mapping[str, float], name: str, near: float) -> str:
    if name not in was:
        return "new"
    if name not in now:
        return "absent"
    old, new = was[name], now[name]
    if old == new or (math.isnan(old) and math.isnan(new)):
        return "equal"
    return "near" if math.isclose(old, new, rel_tol=near, abs_tol=near * 1e-3) else "different"


RELATIVE = 1e-12
MOST_SHOWN = 4
ASKED = ("run_ids", "metric", "of", "interval")
"""Columns of a group's row that say what was computed, not what came out."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of one row: ``same``, ``changed`` (``why`` says where), ``missing`` (a run is gone), ``unchecked`` (no cell could
    be compared). ``checked`` cells; ``unchecked`` columns, which the store has under no such name."""

    row: str
    verdict: str
    checked: int
    why: str = ""
    unchecked: tuple[str, ...] = ()


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV, JSON or Parquet table. Raises :class:`UserError` for what is none, or names no runs."""
    import pandas as pd

    if not path.is_file():
        raise UserError(f"no such table: {path}")
    try:
        if path.suffix == ".csv":
            rows = pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")
        elif path.suffix == ".parquet":
            rows = pd.read_parquet(path).to_dict("records")
        elif path.suffix == ".json":
            rows = json.loads(path.read_text(encoding="utf-8"))
        else:
            raise UserError(f"{path}: allowed: a table that ends in .csv, .json or .parquet")
    except (ValueError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be read as a table: {str(error).splitlines()[0]}") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: holds no rows")
    if not all("run_id" in row or "run_ids" in row for row in rows):
        raise UserError(
            f"{path}: names no runs (column run_id or run_ids); `kl-comedy results export` and "
            "`kl-comedy results table --run-ids` write tables that do"
        )
    return [{str(key): value for key, value in row.items()} for row in rows]


def verify(uri: str, frame: pd.DataFrame, table: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """One verdict a row of ``table``; ``frame`` has all runs of the store."""
    runs = frame.set_index("run_id", drop=False)
    return [_of_group(uri, runs, row) if "run_ids" in row else _of_run(runs, row) for row in table]


def _of_run(runs: pd.DataFrame, row: Mapping[str, Any]) -> Verdict:
    run_id = str(row["run_id"])
    if run_id not in runs.index:
        return Verdict(row=run_id, verdict="missing", checked=0, why="the store has no such run")
    known = {str(key): value for key, value in runs.loc[run_id].items()}
    names = _columns_of(known)
    checked, wrong, unchecked = 0, [], []
    for name, given in row.items():
        if name == "run_id":
            continue
        column = names.get(name)
        if column is not None:
            checked += 1
            if not _same(given, known[column]):
                wrong.append(f"{short(name)}: {_shown(given)} -> {_shown(known[column])}")
        elif name.startswith(PREFIXES) and not _empty(given):
            wrong.append(f"{short(name)}: {_shown(given)} -> nothing")
        elif not name.startswith(PREFIXES):
            unchecked.append(name)
    return _verdict(run_id, checked, wrong, unchecked)


def _of_group(uri: str, runs: pd.DataFrame, row: Mapping[str, Any]) -> Verdict:
    ids, metric = str(row["run_ids"]).split(), str(row.get("metric", ""))
    name = f"{metric} of {len(ids)} runs" + (f", {ids[0][:8]} ..." if ids else "")
    gone = [run_id for run_id in ids if run_id not in runs.index]
    if gone:
        return Verdict(
            row=name, verdict="missing", checked=0, why=f"the store has no run {', '.join(gone[:MOST_SHOWN])}"
        )
    column = f"metrics.{metric}"
    if column not in runs:
        return Verdict(row=name, verdict="changed", checked=0, why=f"no run has the metric {metric!r} any more")
    members = runs.loc[ids].reset_index(drop=True)
    values = with_values(uri, members, [column], str(row.get("of") or "last"))[column]
    now = _again([float(value) for value in values if math.isfinite(value)], student=row.get("interval") == "t")
    wrong = [
        f"{key}: {_shown(row.get(key))} -> {_shown(value)}"
        for key, value in now.items()
        if not _same(row.get(key), value)
    ]
    names, checked, unchecked = _columns_of(members.columns), len(now), []
    for key, given in row.items():
        if key in now or key in ASKED:
            continue
        if key not in names:
            unchecked.append(key)
            continue
        checked += 1
        other = [value for value in members[names[key]] if not _same(given, value)]
        wrong += [f"{key}: {_shown(given)} -> {_shown(other[0])}"] if other else []
    return _verdict(name, checked, wrong, unchecked)


def _again(values: list[float], *, student: bool) -> dict[str, float | None]:
    """What a row of a table says of ``values``; the bounds only of ``student``'s interval, which draws nothing."""
    found = t_interval(values)
    bounds = {"low": found.low, "high": found.high} if student else {}
    return {"n": float(found.n), "mean": found.mean, **bounds}


def _columns_of(names: Iterable[Any]) -> dict[str, str]:
    """Name or short name to column; the first of equal short names has it."""
    columns = [str(name) for name in names]
    shorts: dict[str, str] = {}
    for column in columns:
        shorts.setdefault(short(column), column)
    return shorts | {column: column for column in columns}


def _verdict(row: str, checked: int, wrong: list[str], unchecked: Sequence[str]) -> Verdict:
    more = f"; and {len(wrong) - MOST_SHOWN} more" if len(wrong) > MOST_SHOWN else ""
    verdict = "changed" if wrong else "same" if checked else "unchecked"
    why = "; ".join(wrong[:MOST_SHOWN]) + more if checked or wrong else "the store has no column of this table"
    return Verdict(row=row, verdict=verdict, checked=checked, why=why, unchecked=tuple(unchecked))


def _same(given: Any, stored: Any) -> bool:
    if _empty(given) or _empty(stored):
        infinite = isinstance(stored, float) and math.isinf(stored)  # which JSON cannot hold
        return _empty(given) and (_empty(stored) or infinite)
    if str(given) == str(stored):
        return True
    try:
        return math.isclose(float(given), float(stored), rel_tol=RELATIVE, abs_tol=0.0)
    except (TypeError, ValueError):
        return False


def _empty(value: Any) -> bool:
    """What CSV and JSON hold for nothing, NaN included: neither format can tell them apart."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value)) or str(value) == "nan"


def _shown(value: Any) -> str:
    text = "nothing" if _empty(value) else str(value)
    return text if len(text) <= 40 else text[:40] + "..."
