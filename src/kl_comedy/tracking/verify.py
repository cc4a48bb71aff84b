"""Do stored results still hold? A table against the runs it came from, and a run against its repetition.

A table of text is made again by its command (:mod:`kl_comedy.tracking.pages`). Other tables have
one row per run (``results export``, or any with ``run_id``): every cell whose column the store knows is
compared. Or it has one row per group (``results table --run-ids``): ``n`` and ``mean``, and the bounds of Student's
interval, are computed again from the runs in ``run_ids``, and the group's keys are compared with each of these runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError, bad_value
from kl_comedy.statistics import interval
from kl_comedy.tracking.compare import by_seed
from kl_comedy.tracking.runs import COMPLETIONS, PLUGIN_SOURCE, PLUGINS, PREFIXES, read_table, runs_frame, short
from kl_comedy.tracking.spool import Spool, merged
from kl_comedy.tracking.values import with_values

if TYPE_CHECKING:
    import pandas as pd

VERDICTS = ("absent", "different", "near", "new", "equal")
ENVIRONMENT = ("git.", "code.", "plugins", "version.", "host.")
MOST_SHOWN = 4
QUESTIONS = ("run_id", "run_ids", "metric", "of", "interval", "notes", COMPLETIONS, PLUGIN_SOURCE)
"""Columns that say which run or what was computed, not what came out."""


def find_run(uri: str, run: str) -> pd.Series[Any]:
    """The row of the run with this name, or of the only one whose id begins so. Raises :class:`UserError`."""
    frame = runs_frame(uri)
    if frame.empty:
        raise UserError(f"no runs in {uri}")
    hits = frame[frame["run_id"].str.startswith(run) | (frame["run_name"] == run)]
    if len(hits) != 1:
        raise UserError(f"RUN: got {run!r}, which {len(hits)} runs of the store answer to; `kl-comedy results export`")
    return hits.iloc[0].dropna()


def plugins_of(runs: pd.DataFrame, path: Path) -> dict[str, int]:
    """Names and hashes of the plugins of the runs in the table ``path``, with the number of runs."""
    table = read_table(path)
    ids = {
        name
        for column in ("run_id", "run_ids")
        if column in table
        for ids in table[column]
        for name in str(ids).split()
    }
    members = runs[runs["run_id"].isin(ids)]
    return dict(members[PLUGINS].value_counts()) if PLUGINS in members else {}


def environment_differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Tags of code, packages and machine that changed, as ``name: then -> now``."""
    names = sorted(name for name in {*then, *now} if name.startswith(ENVIRONMENT) and "host.gpus." not in name)
    changed = [name for name in names if then.get(name) != now.get(name)]
    return [f"{name}: {then.get(name, '-')} -> {now.get(name, '-')}" for name in changed]


def final_metrics(run_dir: Path) -> dict[str, float]:
    """The last value of each metric in a run folder's spool."""
    return merged(sorted(Spool(run_dir).read(), key=lambda event: event.step or 0), "metrics")


def final_tags(run_dir: Path) -> dict[str, str]:
    """The tags in a run folder's spool."""
    return merged(Spool(run_dir).read(), "tags")


def parse_tolerance(text: str) -> float | dict[str, float]:
    """A relative difference for every metric, or absolute ones by metric. Raises :class:`UserError`.

    >>> parse_tolerance("1e-3"), parse_tolerance("eval/*/reward=0.1")
    (0.001, {'eval/*/reward': 0.1})
    """
    try:
        if "=" not in text:
            return float(text)
        return {name.strip(): float(value) for name, _, value in (part.partition("=") for part in text.split(","))}
    except ValueError:
        raise bad_value("--tolerance", text, "a number as 1e-3, or METRIC=NUMBER as eval/*/reward=0.1") from None


def compare_metrics(
    was: Mapping[str, float], now: Mapping[str, float], tolerance: float | Mapping[str, float] = 1e-3
) -> list[dict[str, Any]]:
    """Every metric of either side, the worst first; but ``time/``, which measures the machine.

    ``tolerance`` is a relative difference, or absolute ones by pattern of metrics: others are then left out. Rows of
    metric, was, now and verdict: ``equal`` (to the bit), ``near`` (within the tolerance), ``different``, ``absent``
    (the new run lacks it) or ``new`` (the old run lacked it: newer code measures more).

    >>> [row["verdict"] for row in compare_metrics({"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1.0, "b": 1.0001})]
    ['absent', 'near', 'equal']
    >>> [row["verdict"] for row in compare_metrics({"a": 0.31, "b": 1.0}, {"a": 0.4, "b": 2.0}, {"a": 0.1})]
    ['near']
    """

    def is_near(name: str, old: float, new: float) -> bool:
        if isinstance(tolerance, float | int):
            return math.isclose(old, new, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
        return any(fnmatch(name, pattern) and abs(old - new) <= most for pattern, most in tolerance.items())

    def verdict(name: str) -> str:
        if name not in was or name not in now:
            return "absent" if name in was else "new"
        old, new = was[name], now[name]
        if old == new or (math.isnan(old) and math.isnan(new)):
            return "equal"
        return "near" if is_near(name, old, new) else "different"

    names = sorted(name for name in {*was, *now} if not name.startswith("time/"))
    if not isinstance(tolerance, float | int):
        names = [name for name in names if any(fnmatch(name, pattern) for pattern in tolerance)]
    rows = [{"metric": name, "was": was.get(name), "now": now.get(name), "verdict": verdict(name)} for name in names]
    return sorted(rows, key=lambda row: VERDICTS.index(row["verdict"]))


def verify(uri: str, runs: pd.DataFrame, path: Path) -> list[dict[str, Any]]:
    """A row for each row of the table ``path``; ``runs`` has all runs of the store.

    ``verdict``: ``same``, ``changed`` (``why`` says where), ``missing`` (a run is gone), ``unchecked`` (no cell could
    be compared). ``checked`` counts cells; ``unchecked`` names columns that the store lacks. Raises
    :class:`UserError` for a file that is no table, or names no runs.
    """
    table = read_table(path)
    if table.empty:
        raise UserError(f"{path}: holds no rows")
    if not {"run_id", "run_ids"} & set(table):
        raise UserError(
            f"{path}: names no runs (column run_id or run_ids); `kl-comedy results export` and "
            "`kl-comedy results table --run-ids` write tables that do"
        )
    columns = {short(column): column for column in reversed(runs.columns)} | {column: column for column in runs}
    runs = runs.set_index("run_id", drop=False)
    return [_verify_row(uri, runs, row, columns) for row in table.to_dict("records")]


def _verify_row(uri: str, runs: pd.DataFrame, row: dict[Any, Any], columns: dict[str, str]) -> dict[str, Any]:
    grouped, metric = "run_ids" in row, str(row.get("metric", ""))
    ids = str(row["run_ids"]).split() if grouped else [str(row["run_id"])]
    name = f"{metric} of {len(ids)} runs" + (f", {ids[0][:8]} ..." if ids else "") if grouped else ids[0]
    result = {"row": name, "verdict": "missing", "checked": 0, "why": "", "unchecked": ""}
    if gone := [run_id for run_id in ids if run_id not in runs.index]:
        return result | {"why": f"the store has no run {', '.join(gone[:MOST_SHOWN])}"}
    column = f"metrics.{metric}"
    if grouped and column not in runs:
        return result | {"verdict": "changed", "why": f"no run has the metric {metric!r} any more"}
    members = runs.loc[ids].reset_index(drop=True)
    given = {name: value for name, value in row.items() if name not in QUESTIONS}
    stored = {name: list(members[columns[name]]) for name in given if name in columns}
    if grouped:
        now = interval(by_seed(with_values(uri, members, [column], str(row.get("of") or "last")), column))
        bounds = ("low", "high") if row.get("interval") == "t" else ()  # a bootstrap draws
        stored |= {name: [getattr(now, name)] for name in ("n", "mean", *bounds)}
    unknown = [name for name in given if name not in stored]
    removed = {name: [None] for name in unknown if name.startswith(PREFIXES)}
    wrong = []
    for name, alternatives in {**stored, **removed}.items():
        others = [value for value in alternatives if not _same(row.get(name), value)]
        wrong += [f"{short(name)}: {_shown(row.get(name))} -> {_shown(others[0])}"] if others else []
    more = [f"and {len(wrong) - MOST_SHOWN} more"] if len(wrong) > MOST_SHOWN else []
    return result | {
        "verdict": "changed" if wrong else "same" if stored else "unchecked",
        "checked": len(stored),
        "why": "; ".join(wrong[:MOST_SHOWN] + more) if stored or wrong else "the store has no column of this table",
        "unchecked": ", ".join(name for name in unknown if name not in removed),
    }


def _same(given: Any, stored: Any) -> bool:
    """Whether texts are equal, or numbers to 12 digits, which is more than a CSV loses."""
    if _empty(given) or _empty(stored):
        infinite = isinstance(stored, float) and math.isinf(stored)  # which JSON cannot hold
        return _empty(given) and (_empty(stored) or infinite)
    try:
        return str(given) == str(stored) or math.isclose(float(given), float(stored), rel_tol=1e-12, abs_tol=0.0)
    except (TypeError, ValueError):
        return False


def _empty(value: Any) -> bool:
    """CSV and JSON cannot tell a missing value from NaN."""
    return value is None or str(value) in ("", "nan")


def _shown(value: Any) -> str:
    text = "nothing" if _empty(value) else str(value)
    return text if len(text) <= 40 else text[:40] + "..."
