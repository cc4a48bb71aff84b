"""Frames of runs made ready to compare: which runs count, a run's value of a metric, whether it collapsed.

Frames are those of :func:`kl_comedy.results.runs.runs_frame`; ``uri`` is the store or export that they came from.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kl_comedy.config import Config, flatten, to_plain
from kl_comedy.config.load import MAY_CHANGE
from kl_comedy.errors import bad_value
from kl_comedy.results.runs import CODE, NEVER_THINNED, PLUGINS, history, resolve, short
from kl_comedy.statistics import Condition
from kl_comedy.tracking import store

if TYPE_CHECKING:
    import pandas as pd


NOT_A_SETTING = tuple(f"params.{key}" for key in MAY_CHANGE)
"""Params, and beginnings of params, in which runs may differ and be the same run."""

RULES = {
    "last": "the value at the run's last update; none where that update did not measure it",
    "recorded": "the last recorded value, of whichever update",
    "first": "the first recorded value",
    "best": "the highest recorded value: chosen in hindsight, so optimistic, the more the noisier the curve",
    "lowest": "the lowest recorded value: chosen in hindsight",
    "mean:K": "the mean of the last K recorded values",
    "area": "the area under the curve over updates, by trapezoids, divided by the updates: the mean over training",
}
"""Which of its recorded values a run's value of a metric is."""

_NOT_FINITE = re.compile(r"\b(?:nan|inf|non-?finite|not finite)\b", re.IGNORECASE)


def drop_repeats(
    frame: pd.DataFrame, statuses: Sequence[str] = ("FINISHED",), groups: Sequence[str] = ()
) -> pd.DataFrame:
    """One run of each configuration and seed in each group: a repeat adds no evidence in an interval over seeds.

    The newest of those with one of ``statuses`` stays, else the newest. Names do not make two configurations.
    """
    settings = _settings(frame)
    if frame.empty or settings.empty:
        return frame
    ranked = frame.assign(counted=frame["status"].isin(list(statuses)))
    # Of repeats the newest stays: it ran the latest code.
    newest = ranked.sort_values(["counted", "start_time"], ascending=False).index
    group_values = {f"group.{position}": frame[group].fillna("") for position, group in enumerate(groups)}
    keys = settings.assign(**group_values).loc[newest]
    # The order of the rows stays: groups appear in the order of their first run.
    return frame.loc[newest[~keys.duplicated()]].sort_index()


def separating_keys(frame: pd.DataFrame, groups: Sequence[str], pool: Collection[str] = ()) -> list[str]:
    """The params (and ``plugins``) that keep runs of another configuration out of each other's group, seeds aside.

    A key is taken where runs differ in it that ``groups`` and the keys before it do not separate yet; never one of
    ``pool``, nor a further seed that has one value for each ``seed``.
    """
    settings = _settings(frame)
    seed = settings.get("params.seed", frame["run_id"])
    further_seeds = [name for name in settings.columns if name.endswith(".seed") and name != "params.seed"]
    # A seed that follows from the run's seed separates repetitions, not configurations.
    following_seeds = [name for name in further_seeds if (settings[name].groupby(seed).nunique() <= 1).all()]
    ignored = {"params.seed", *groups, *pool, *following_seeds}
    separating: list[str] = []
    # The column of one value lets the runs be grouped where there are no groups yet.
    keys = frame[list(dict.fromkeys(groups))].fillna("").astype(str).assign(all="")
    for name in settings.columns:
        if name in ignored or settings[name].nunique() <= 1:
            continue
        values_in_groups = settings[name].groupby([keys[key] for key in keys]).nunique()
        if (values_in_groups > 1).any():
            separating.append(name)
            keys[name] = settings[name]
    return separating


def mixed_code(frame: pd.DataFrame, groups: Sequence[str]) -> list[str]:
    """What differs between the code of runs of one group: ``code``, versions of packages, Python.

    The same code is the same source of the package and the same diff of tracked files; of runs from before that source
    was hashed, the same commit. Plugins are settings (:func:`separating_keys`).
    """
    names = [name for name in frame.columns if name.startswith("tags.version.") or name == "tags.host.python"]
    # Unlike NaN, this text counts as a value: a run without a version differs from one that has it.
    compared = frame[[name for name in names if name not in groups]].fillna("\0")
    if CODE in frame and CODE not in groups:
        texts = frame.reindex(columns=["tags.code.package", "tags.git.diff", CODE]).fillna("").astype(str)
        sources = []
        for package, diff, code in texts.itertuples(index=False):
            if package:
                sources.append(package + diff)
            else:
                sources.append(code)
        compared = compared.assign(**{CODE: sources})
    keys = [frame[group].fillna("") for group in groups]
    if not keys:
        # pandas needs a key; this one has the same value in all runs, which are one group.
        keys = [frame["status"].map(lambda _: "")]
    counts = compared.groupby(keys).nunique()
    return [name for name in compared.columns if (counts[name] > 1).any()]


def _settings(frame: pd.DataFrame) -> pd.DataFrame:
    """What makes a run's configuration, seed included: a param that a run lacks is at its default."""
    defaults = store.param_texts(flatten(to_plain(Config())))
    settings: dict[str, pd.Series[Any]] = {}
    for name in frame.columns:
        if _is_setting(name):
            # Options of a part have no default here; this text, which no param has, tells a run without one apart.
            settings[name] = frame[name].fillna(defaults.get(short(name), "\0")).astype(str)
    if PLUGINS in frame:
        settings[PLUGINS] = frame[PLUGINS].fillna("")
    return frame[[]].assign(**settings)


def _is_setting(column: str) -> bool:
    """Whether runs that differ in this column are of different configurations, or of different seeds."""
    if not column.startswith("params.") or column == "params.name":
        return False
    sections = tuple(f"{key}." for key in NOT_A_SETTING)
    return column not in NOT_A_SETTING and not column.startswith(sections)


def tidy(uri: str, frame: pd.DataFrame, keys: Sequence[str], metrics: Sequence[str], of: str = "last") -> pd.DataFrame:
    """One row per run and metric: ``run_id``, ``status``, ``seed``, the short names of ``keys``, ``metric``, ``value``.

    ``of`` is one of :data:`RULES`. A run without a metric has NaN. Raises :class:`UserError` for a key or metric that
    no run has.
    """
    columns = [resolve(frame, metric, "--metric") for metric in metrics]
    groups = [resolve(frame, key, "--group") for key in dict.fromkeys(["seed", *keys])]
    wide = with_values(uri, frame, columns, of)[["run_id", "status", *groups, *columns]]
    long = wide.melt(id_vars=["run_id", "status", *groups], var_name="metric", value_name="value")
    return long.rename(columns=short).assign(metric=long["metric"].map(short))


def describe_rule(of: str) -> str:
    """The rule ``of``, as ``best`` or ``mean:5``, in words. Raises :class:`UserError` for another."""
    if re.fullmatch(r"mean:[1-9]\d*", of):
        return RULES["mean:K"].replace("K", of.removeprefix("mean:"))
    if of not in RULES or of == "mean:K":
        raise bad_value("--of", of, [*RULES], "mean:5 is the mean of the last five")
    return RULES[of]


def with_values(uri: str, frame: pd.DataFrame, columns: Sequence[str], of: str) -> pd.DataFrame:
    """``frame`` with the metric ``columns`` replaced by each run's value under the rule ``of``.

    Points that are not finite take no part in best, lowest and mean; the last and first value are as recorded.
    """
    describe_rule(of)
    if of == "recorded":
        # Without stale metrics, stale_notes does not say that these values are left out.
        return frame.assign(stale="")
    frame = at_last_update(frame)
    if of == "last":
        return frame
    curves = {column: history(uri, frame["run_id"], short(column)) for column in columns}
    return frame.assign(**{name: frame["run_id"].map(_values(points, of)) for name, points in curves.items()})


def at_last_update(frame: pd.DataFrame) -> pd.DataFrame:
    """``frame`` without values of metrics that belong to an earlier update than the run's last (column ``stale``)."""
    import numpy as np

    stale_of_runs = _stale_metrics(frame)
    stale_names = {name for stale in stale_of_runs for name in stale}
    current = {}
    for name in stale_names:
        column = f"metrics.{name}"
        if column in frame:
            is_stale = np.array([name in stale for stale in stale_of_runs])
            current[column] = frame[column].mask(is_stale)
    # All at once: assigning columns one by one is slow in wide frames.
    return frame.assign(**current)


def stale_notes(frame: pd.DataFrame, columns: Iterable[str]) -> list[str]:
    """A sentence for each of the metric ``columns`` that :func:`at_last_update` empties, with the updates measured."""
    stale_of_runs = _stale_metrics(frame)
    notes = []
    for column in columns:
        name = short(column)
        updates = [stale[name] for stale in stale_of_runs if name in stale]
        if not updates:
            continue
        different_updates = sorted(set(updates))
        shown_updates = ", ".join(str(update) for update in different_updates[:3])
        if len(different_updates) > 3:
            shown_updates += ", ..."
        which = "these runs"
        if len(updates) < len(frame):
            which = f"{len(updates)} of {len(frame)} runs"
        reason = f"{which} measured it last at update {shown_updates}, before their last update"
        notes.append(f"note: {name}: {reason}, and it is shown as - (--of recorded takes that value)")
    return notes


def _stale_metrics(frame: pd.DataFrame) -> list[dict[str, int]]:
    """For each run the metrics in its cell ``stale``; none in frames without that column."""
    if "stale" not in frame:
        return [{} for _ in range(len(frame))]
    stale_of_runs = []
    for text in frame["stale"]:
        stale: dict[str, int] = {}
        # An empty cell of a CSV export is read as NaN.
        if isinstance(text, str) and text != "":
            stale = json.loads(text)
        stale_of_runs.append(stale)
    return stale_of_runs


def _values(points: pd.DataFrame, of: str) -> pd.Series:
    """The value of each run under the rule ``of``, by run id.

    ``points`` has the columns run_id, step and value, steps ascending within a run; those of an export also
    ``recorded``, the number of points that the run's curve had before it was thinned.
    """
    if of == "first":
        return points.groupby("run_id")["value"].first()
    finite = points[points["value"].abs() < math.inf]
    by_run = finite.groupby("run_id")["value"]
    averaged_points = 0
    if of.startswith("mean:"):
        averaged_points = int(of.removeprefix("mean:"))
    # An export's curves are thinned, except for the first, lowest, highest and last points. What reads more would
    # silently have another value.
    needs_all_points = of == "area" or averaged_points > NEVER_THINNED
    if needs_all_points and "recorded" in points:
        lengths = points.groupby("run_id")["recorded"].agg(["size", "max"])
        if (lengths["size"] < lengths["max"]).any():
            reason = f"this export has thinned curves before their last {NEVER_THINNED} points"
            raise bad_value("--of", of, f"mean:{NEVER_THINNED} at most, or another rule", reason)
    if of == "area":
        return finite.groupby("run_id")[["step", "value"]].apply(_mean_over_updates)
    if averaged_points:
        return by_run.apply(lambda values: values.tail(averaged_points).mean())
    if of == "best":
        return by_run.max()
    assert of == "lowest", of
    return by_run.min()


def _mean_over_updates(curve: pd.DataFrame) -> float:
    """The area under the curve divided by its updates; a single point's value."""
    import numpy as np

    steps = curve["step"].to_numpy(float)
    values = curve["value"].to_numpy(float)
    if len(steps) == 1:
        return float(values[0])
    return float(np.trapezoid(values, steps) / np.ptp(steps))


def with_collapsed(uri: str, frame: pd.DataFrame, rule: Sequence[Condition]) -> pd.DataFrame:
    """``frame`` with ``collapsed``: whether a condition of ``rule`` holds, NA for runs that measured nothing of it.

    A run whose last value is not finite collapsed, and so did one that FAILED because something was not finite. A
    condition of the last N values says nothing of a run with fewer.
    Raises :class:`UserError` where no run has a metric of the rule.
    """
    import pandas as pd

    reason = frame.get("tags.failure.reason", pd.Series("", frame.index)).fillna("")
    # The last metrics of a run that failed at a NaN are from before it, and look sound.
    failed = frame["status"].eq("FAILED") & reason.str.contains(_NOT_FINITE)
    # NA where the run did not fail: that alone says nothing about the rule.
    verdicts = [failed.astype("boolean").where(failed)]
    metrics = frame.filter(regex=r"^metrics\.")
    for metric, compare, bound, of_start, last_values in rule:
        last = frame[resolve(metrics, metric, "--collapse")]
        # A bound that is not a share of the first value is multiplied by 1.
        start = pd.Series(1.0, frame.index)
        if of_start:
            start = frame["run_id"].map(_values(history(uri, frame["run_id"], metric), "first"))
        finite = last.abs() < math.inf
        # A missing last value is a NaN that was logged, or a metric that was not: its curve tells them apart.
        runs_with_nan = history(uri, frame.loc[last.isna(), "run_id"], metric)["run_id"]
        not_finite = ~finite & (last.notna() | frame["run_id"].isin(runs_with_nan))
        known = not_finite | (finite & (start.abs() < math.inf))
        if last_values > 1:
            points = history(uri, frame["run_id"], metric).groupby("run_id").tail(last_values)
            values = points.groupby("run_id")["value"]
            # The condition holds for all of these values if it holds for the one nearest to a sound run's.
            if compare in (operator.lt, operator.le):
                nearest_to_sound = values.max()
            else:
                nearest_to_sound = values.min()
            last = frame["run_id"].map(nearest_to_sound.where(values.size() == last_values))
            known = not_finite | (last.abs() < math.inf)
        verdicts.append((not_finite | compare(last, bound * start)).astype("boolean").where(known))
    # One condition is enough; NA only where no condition could be judged.
    table = pd.concat(verdicts, axis=1)
    return frame.assign(collapsed=table.any(axis=1).astype("boolean").where(table.notna().any(axis=1)))
