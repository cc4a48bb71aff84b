"""Do stored results still hold? A table against the runs it came from, and a run against its repetition.

The tables of a page are made again by their commands (:mod:`kl_comedy.results.pages`). A table in a file has one row
per run (``results export``, or any with a column ``run_id``): every cell whose column the store knows is compared. Or
it has one row per group (``results table --run-ids``): ``n`` and ``mean``, and the bounds of Student's interval, are
computed again from the runs in ``run_ids``, and the group's keys are compared with each of these runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError, bad_value
from kl_comedy.results.compare import by_seed
from kl_comedy.results.runs import COMPLETIONS, PLUGIN_SOURCE, PLUGINS, PREFIXES, read_table, runs_frame, short
from kl_comedy.results.tables import csv_cell
from kl_comedy.results.values import with_values
from kl_comedy.statistics import interval
from kl_comedy.tracking.provenance import FOLDER
from kl_comedy.tracking.spool import Spool, merged

if TYPE_CHECKING:
    import pandas as pd

VERDICTS = ("absent", "different", "near", "new", "equal")
"""Verdicts on a metric of a repeated run, the worst first."""

ENVIRONMENT = ("git.", "code.", "plugins", "version.", "host.")
"""Beginnings of the tags that describe code, packages and machine."""

MOST_SHOWN = 4
"""A message names at most this many differences or runs."""

MOST_CHARACTERS = 40
"""A message shows at most this many characters of a cell."""

QUESTIONS = ("run_id", "run_ids", "metric", "of", "interval", "notes", COMPLETIONS, PLUGIN_SOURCE)
"""Columns that say which run or what was computed, not what came out."""


def find_run(uri: str, run: str) -> pd.Series[Any]:
    """The row of the run with this name or folder, or of the only one whose id begins so. Raises :class:`UserError`."""
    frame = runs_frame(uri)
    if frame.empty:
        raise UserError(f"no runs in {uri}")
    has_id = frame["run_id"].str.startswith(run)
    # A run of an earlier version has the name of its folder.
    has_name = (frame["run_name"] == run) | (_folders(frame) == run)
    matches = frame[has_id | has_name]
    # Several: names are not unique, and a short beginning of an id is not either.
    if len(matches) != 1:
        problem = f"RUN: got {run!r}, which matches {len(matches)} runs of the store"
        if len(matches) == 0:
            raise UserError(f"{problem}; see `kl-comedy results export`")
        # Runs of several folders have folders of the same names, so that ids are shown too.
        folders = _folders(matches)
        names = [f"{run_id[:8]} ({folder})" for run_id, folder in zip(matches["run_id"], folders, strict=True)]
        shown = ", ".join(names[:MOST_SHOWN])
        if len(names) > MOST_SHOWN:
            shown += ", ..."
        raise UserError(f"{problem}; name one by its id or folder: {shown}")
    return matches.iloc[0].dropna()


def _folders(frame: pd.DataFrame) -> pd.Series[str]:
    """The name of each run's folder; where a run has none, its id."""
    tag = f"tags.{FOLDER}"
    if tag not in frame:
        return frame["run_id"]
    return frame[tag].fillna(frame["run_id"])


def plugins_of(runs: pd.DataFrame, path: Path) -> dict[str, int]:
    """Names and hashes of the plugins of the runs in the table ``path``, with the number of runs."""
    table = read_table(path)
    run_ids: set[str] = set()
    for column in ("run_id", "run_ids"):
        if column in table:
            for cell in table[column]:
                run_ids.update(str(cell).split())
    members = runs[runs["run_id"].isin(run_ids)]
    if PLUGINS not in members:
        return {}
    return dict(members[PLUGINS].value_counts())


def environment_differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Tags of code, packages and machine that changed, as ``name: then -> now``."""
    differences = []
    for name in sorted({*then, *now}):
        # The GPUs of each rank have tags of their own, and host.gpus has them all.
        if not name.startswith(ENVIRONMENT) or "host.gpus." in name:
            continue
        if then.get(name) != now.get(name):
            differences.append(f"{name}: {then.get(name, '-')} -> {now.get(name, '-')}")
    return differences


def final_metrics(run_dir: Path) -> dict[str, float]:
    """The last value of each metric in a run folder's spool."""
    # By step and not in the order of writing: an evaluation of an earlier checkpoint may be logged last.
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
        tolerances = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            tolerances[name.strip()] = float(value)
        return tolerances
    except ValueError:
        raise bad_value("--tolerance", text, "a number as 1e-3, or METRIC=NUMBER as eval/*/reward=0.1") from None


def compare_metrics(
    was: Mapping[str, float], now: Mapping[str, float], tolerance: float | Mapping[str, float] = 1e-3
) -> list[dict[str, Any]]:
    """Every metric of either side, the worst first, except ``time/``, which measures the machine.

    ``tolerance`` is a relative difference, or absolute ones by pattern of metrics: others are then left out. Rows of
    metric, was, now and verdict: ``equal`` (to the bit), ``near`` (within the tolerance), ``different``, ``absent``
    (the new run lacks it) or ``new`` (the old run lacked it: newer code measures more).

    >>> [row["verdict"] for row in compare_metrics({"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1.0, "b": 1.0001})]
    ['absent', 'near', 'equal']
    >>> [row["verdict"] for row in compare_metrics({"a": 0.31, "b": 1.0}, {"a": 0.4, "b": 2.0}, {"a": 0.1})]
    ['near']
    """
    rows = []
    for name in sorted({*was, *now}):
        if name.startswith("time/"):
            continue
        if isinstance(tolerance, Mapping) and _tolerance_of(name, tolerance) is None:
            continue
        if name not in now:
            verdict = "absent"
        elif name not in was:
            verdict = "new"
        else:
            verdict = _metric_verdict(name, was[name], now[name], tolerance)
        rows.append({"metric": name, "was": was.get(name), "now": now.get(name), "verdict": verdict})
    return sorted(rows, key=lambda row: VERDICTS.index(row["verdict"]))


def _metric_verdict(name: str, was: float, now: float, tolerance: float | Mapping[str, float]) -> str:
    if was == now:
        return "equal"
    # NaN differs from itself, and a run that repeats it has repeated its metric.
    if math.isnan(was) and math.isnan(now):
        return "equal"
    if isinstance(tolerance, Mapping):
        largest = _tolerance_of(name, tolerance)
        is_near = largest is not None and abs(was - now) <= largest
    else:
        # Near 0 a relative difference would call rounding a change.
        is_near = math.isclose(was, now, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
    if is_near:
        return "near"
    return "different"


def _tolerance_of(name: str, tolerances: Mapping[str, float]) -> float | None:
    """The largest tolerance of the patterns that match ``name``; None where none does."""
    matching = [most for pattern, most in tolerances.items() if fnmatch(name, pattern)]
    return max(matching, default=None)


def verify(uri: str, runs: pd.DataFrame, path: Path) -> list[dict[str, Any]]:
    """A row for each row of the table ``path``; ``runs`` has all runs of the store.

    ``verdict``: ``same``, ``changed`` (``why`` says where), ``missing`` (a run is gone), ``unchecked`` (no cell could
    be compared). ``checked`` counts cells; ``unchecked`` names columns that the store lacks. Raises
    :class:`UserError` for a file that is not a table, or names no runs.
    """
    table = read_table(path)
    if table.empty:
        raise UserError(f"{path}: holds no rows")
    if not {"run_id", "run_ids"} & set(table):
        raise UserError(
            f"{path}: names no runs (column run_id or run_ids); `kl-comedy results export` and "
            "`kl-comedy results table --run-ids` write tables that do"
        )
    # A table may have whole names or short ones. Reversed, so that of two columns with one short name the first counts;
    # whole names last, so that they come before all short ones.
    columns = {short(column): column for column in reversed(list(runs.columns))}
    columns.update({column: column for column in runs.columns})
    runs = runs.set_index("run_id", drop=False)
    return [_verify_row(uri, runs, _TableRow.of(cells), columns) for cells in table.to_dict("records")]


@dataclass(frozen=True, kw_only=True)
class _TableRow:
    """A row of a table: what it says, and of which runs."""

    cells: Mapping[Any, Any]
    run_ids: list[str]
    metric: str
    """The metric whose mean it states; empty for a row of one run."""
    is_group: bool

    @staticmethod
    def of(cells: Mapping[Any, Any]) -> _TableRow:
        is_group = "run_ids" in cells
        if is_group:
            run_ids = str(cells["run_ids"]).split()
        else:
            run_ids = [str(cells["run_id"])]
        return _TableRow(cells=cells, run_ids=run_ids, metric=str(cells.get("metric", "")), is_group=is_group)

    @property
    def name(self) -> str:
        if not self.is_group:
            return self.run_ids[0]
        name = f"{self.metric} of {len(self.run_ids)} runs"
        if self.run_ids:
            name += f", {self.run_ids[0][:8]} ..."
        return name

    @property
    def results(self) -> list[str]:
        """The columns that state a result."""
        return [name for name in self.cells if name not in QUESTIONS]


def _verify_row(uri: str, runs: pd.DataFrame, row: _TableRow, columns: Mapping[str, str]) -> dict[str, Any]:
    result = {"row": row.name, "verdict": "missing", "checked": 0, "why": "", "unchecked": ""}
    missing_runs = [run_id for run_id in row.run_ids if run_id not in runs.index]
    if missing_runs:
        return result | {"why": f"the store has no run {', '.join(missing_runs[:MOST_SHOWN])}"}
    if row.is_group and f"metrics.{row.metric}" not in runs:
        return result | {"verdict": "changed", "why": f"no run has the metric {row.metric!r} any more"}

    members = runs.loc[row.run_ids].reset_index(drop=True)
    stored = {name: list(members[columns[name]]) for name in row.results if name in columns}
    # After the columns of the runs: "mean" of a group is its statistic, even if a run has a tag of that name.
    if row.is_group:
        stored |= _group_statistics(uri, members, row)
    lacking = [name for name in row.results if name not in stored]
    # The store knows every param, tag and metric of its runs, so one that it lacks was removed since.
    removed = [name for name in lacking if name.startswith(PREFIXES)]
    unchecked = [name for name in lacking if name not in removed]
    differences = _differences(row, stored | {name: [None] for name in removed})

    result |= {"checked": len(stored), "unchecked": ", ".join(unchecked)}
    if differences:
        return result | {"verdict": "changed", "why": listed(differences, MOST_SHOWN)}
    if stored:
        return result | {"verdict": "same"}
    return result | {"verdict": "unchecked", "why": "the store has no column of this table"}


def _group_statistics(uri: str, members: pd.DataFrame, row: _TableRow) -> dict[str, list[Any]]:
    """What the store gives now for the statistics of a group's row."""
    column = f"metrics.{row.metric}"
    # A table that does not say its rule is taken to have the default one.
    rule = str(row.cells.get("of") or "last")
    current = interval(by_seed(with_values(uri, members, [column], rule), column))
    statistics: dict[str, list[Any]] = {"n": [current.n], "mean": [current.mean]}
    # A bootstrap draws at random, so only the bounds of Student's interval can be computed again.
    if row.cells.get("interval") == "t":
        statistics |= {"low": [current.low], "high": [current.high]}
    return statistics


def _differences(row: _TableRow, stored: Mapping[str, list[Any]]) -> list[str]:
    """The cells of the row that differ from what the store has for one of its runs."""
    differences = []
    for name, values in stored.items():
        stated = row.cells.get(name)
        other_values = [value for value in values if not _same(stated, value)]
        if other_values:
            differences.append(f"{short(name)}: {_shown(stated)} -> {_shown(other_values[0])}")
    return differences


def listed(differences: list[str], most: int) -> str:
    """The first ``most`` differences, and how many more there are."""
    shown = differences[:most]
    if len(differences) > most:
        shown.append(f"and {len(differences) - most} more")
    return "; ".join(shown)


def _same(stated: Any, stored: Any) -> bool:
    """Whether texts are equal, or numbers to 12 digits, which is more than a CSV loses."""
    if _empty(stated) or _empty(stored):
        # JSON cannot hold an infinite number and writes nothing in its place.
        is_infinite = isinstance(stored, float) and math.isinf(stored)
        return _empty(stated) and (_empty(stored) or is_infinite)
    # In CSV a text that may begin a formula has an apostrophe in front.
    if str(stated) in (str(stored), str(csv_cell(stored))):
        return True
    try:
        return math.isclose(float(stated), float(stored), rel_tol=1e-12, abs_tol=0.0)
    except (TypeError, ValueError):
        return False


def _empty(value: Any) -> bool:
    """Whether a cell holds nothing. CSV and JSON cannot tell a missing value from NaN."""
    return value is None or str(value) in ("", "nan")


def _shown(value: Any) -> str:
    if _empty(value):
        return "nothing"
    text = str(value)
    if len(text) > MOST_CHARACTERS:
        return text[:MOST_CHARACTERS] + "..."
    return text
