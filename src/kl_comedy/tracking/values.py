"""Frames of runs made ready to compare: which runs count, a run's value of a metric, whether it collapsed.

Frames are those of :func:`kl_comedy.tracking.runs.runs_frame`; ``uri`` is the store or export that they came from.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from kl_comedy.config import Config, flatten, to_plain
from kl_comedy.config.load import NOT_IDENTITY, NOT_IDENTITY_WITHIN, REMOVED
from kl_comedy.errors import bad_value
from kl_comedy.statistics import Condition
from kl_comedy.tracking import store
from kl_comedy.tracking.runs import CODE, NEVER_THINNED, PLUGINS, history, resolve, short

if TYPE_CHECKING:
    import pandas as pd

NOT_A_SETTING = (
    *(f"params.{name}" for name in NOT_IDENTITY),
    *(f"params.{section}.{name}" for section, names in NOT_IDENTITY_WITHIN.items() for name in names),
)
"""Params, and beginnings of params, that are not part of the config's hash: runs that differ in them are the same."""

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
    """One run of each configuration and seed in each group: a repeat is no new evidence in an interval over seeds.

    The newest of those with one of ``statuses`` stays, else the newest. Names do not make two configurations.
    """
    settings = _settings(frame)
    if frame.empty or settings.empty:
        return frame
    ranked = frame.assign(counted=frame["status"].isin(list(statuses)))
    newest = ranked.sort_values(["counted", "start_time"], ascending=False).index
    keys = settings.assign(**{f"group.{at}": frame[group].fillna("") for at, group in enumerate(groups)}).loc[newest]
    return frame.loc[newest[~keys.duplicated()]].sort_index()


def separating_keys(frame: pd.DataFrame, groups: Sequence[str], pool: Collection[str] = ()) -> list[str]:
    """The params (and ``plugins``) that keep runs of another configuration out of each other's group, seeds aside.

    A key is taken where runs differ in it that ``groups`` and the keys before it do not separate yet; never one of
    ``pool``, nor a further seed that has one value for each ``seed``.
    """
    settings, taken = _settings(frame), list[str]()
    seed = settings.get("params.seed", frame["run_id"])
    further = [name for name in settings if name.endswith(".seed") and name != "params.seed"]
    seeds = [name for name in further if (settings[name].groupby(seed).nunique() <= 1).all()]
    names = [name for name in settings if name not in {"params.seed", *groups, *pool, *seeds}]
    keys = frame[list(dict.fromkeys(groups))].fillna("").astype(str).assign(all="")
    for name in names:
        if settings[name].nunique() > 1 and (settings[name].groupby([keys[key] for key in keys]).nunique() > 1).any():
            taken.append(name)
            keys[name] = settings[name]
    return taken


def mixed_code(frame: pd.DataFrame, groups: Sequence[str]) -> list[str]:
    """What differs between the code of runs of one group: ``code``, versions of packages, Python.

    The same code is the same source of the package and the same diff of tracked files; of runs from before that source
    was hashed, the same commit. Plugins are settings (:func:`separating_keys`).
    """
    names = [name for name in frame if name.startswith("tags.version.") or name == "tags.host.python"]
    compared = frame[[name for name in names if name not in groups]].fillna("\0")
    if CODE in frame and CODE not in groups:
        texts = frame.reindex(columns=["tags.code.package", "tags.git.diff", CODE]).fillna("").astype(str)
        same = [package + diff if package else code for package, diff, code in texts.itertuples(index=False)]
        compared = compared.assign(**{CODE: same})
    keys = [frame[group].fillna("") for group in groups] or [frame["status"].map(lambda _: "")]
    counts = compared.groupby(keys).nunique()
    return [name for name in compared if (counts[name] > 1).any()]


def _settings(frame: pd.DataFrame) -> pd.DataFrame:
    """What makes a run's configuration, seed included: a param that a run lacks is at its default."""
    defaults = store.param_texts(flatten(to_plain(Config()))) | {
        ".".join(key): str(value) for key, value in REMOVED.items()
    }

    def is_setting(name: str) -> bool:
        below = tuple(f"{key}." for key in NOT_A_SETTING)
        return name.startswith("params.") and name not in (*NOT_A_SETTING, "params.name") and not name.startswith(below)

    names = [name for name in frame if is_setting(name)]
    settings = {name: frame[name].fillna(defaults.get(short(name), "\0")).astype(str) for name in names}
    return frame[[]].assign(**settings, **({PLUGINS: frame[PLUGINS].fillna("")} if PLUGINS in frame else {}))


def tidy(uri: str, frame: pd.DataFrame, keys: Sequence[str], metrics: Sequence[str], of: str = "last") -> pd.DataFrame:
    """One row a run and metric: ``run_id``, ``status``, ``seed``, the short names of ``keys``, ``metric``, ``value``.

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
        return frame.assign(stale="")
    frame = at_last_update(frame)
    if of == "last":
        return frame
    curves = {column: history(uri, frame["run_id"], short(column)) for column in columns}
    return frame.assign(**{name: frame["run_id"].map(_values(points, of)) for name, points in curves.items()})


def at_last_update(frame: pd.DataFrame) -> pd.DataFrame:
    """``frame`` without values of metrics that belong to an earlier update than the run's last (column ``stale``)."""
    runs = _stale_metrics(frame)
    columns = {f"metrics.{name}" for stale in runs for name in stale} & set(frame)
    masks = {column: [short(column) in stale for stale in runs] for column in columns}
    return frame.assign(**{column: frame[column].mask(mask) for column, mask in masks.items()})


def stale_notes(frame: pd.DataFrame, columns: Iterable[str]) -> list[str]:
    """A sentence for each of the metric ``columns`` that :func:`at_last_update` empties, with the updates measured."""
    runs, notes = _stale_metrics(frame), []
    for name in map(short, columns):
        if steps := [stale[name] for stale in runs if name in stale]:
            at = ", ".join(map(str, sorted(set(steps))[:3])) + (", ..." if len(set(steps)) > 3 else "")
            which = f"{len(steps)} of {len(frame)} runs" if len(steps) < len(frame) else "these runs"
            why = f"{which} measured it last at update {at}, before their last update"
            notes.append(f"note: {name}: {why}, and it is shown as - (--of recorded takes that value)")
    return notes


def _stale_metrics(frame: pd.DataFrame) -> list[dict[str, int]]:
    """Of each run the metrics in its cell ``stale``; none in frames without that column."""
    texts = frame["stale"] if "stale" in frame else [""] * len(frame)
    return [json.loads(text) if isinstance(text, str) and text else {} for text in texts]


def _values(points: pd.DataFrame, of: str) -> pd.Series:
    """Value by run id; ``points`` has columns run_id, step, value, steps ascending within a run."""
    if of == "first":
        return points.groupby("run_id")["value"].first()
    finite = points[points["value"].abs() < math.inf]
    by_run, last = finite.groupby("run_id")["value"], int(of.removeprefix("mean:") if of.startswith("mean:") else 0)
    if (of == "area" or last > NEVER_THINNED) and "recorded" in points:
        lengths = points.groupby("run_id")["recorded"].agg(["size", "max"])
        if (lengths["size"] < lengths["max"]).any():
            why = f"this export has thinned curves before their last {NEVER_THINNED} points"
            raise bad_value("--of", of, f"mean:{NEVER_THINNED} at most, or another rule", why)
    if of == "area":
        return finite.groupby("run_id")[["step", "value"]].apply(_mean_over_updates)
    if last:
        return by_run.apply(lambda values: values.tail(last).mean())
    return by_run.max() if of == "best" else by_run.min()


def _mean_over_updates(curve: pd.DataFrame) -> float:
    """Of one point its value."""
    import numpy as np

    steps, values = curve["step"].to_numpy(float), curve["value"].to_numpy(float)
    return float(np.trapezoid(values, steps) / np.ptp(steps)) if len(steps) > 1 else float(values[0])


def with_collapsed(uri: str, frame: pd.DataFrame, rule: Sequence[Condition]) -> pd.DataFrame:
    """``frame`` with ``collapsed``: whether a condition of ``rule`` holds, NA for runs that measured nothing of it.

    A run whose last value is not finite collapsed, and so did one that FAILED because something was not finite. A
    condition of the last N values says nothing of a run with fewer.
    Raises :class:`UserError` where no run has a metric of the rule.
    """
    import pandas as pd

    reason = frame.get("tags.failure.reason", pd.Series("", frame.index)).fillna("")
    failed = frame["status"].eq("FAILED") & reason.str.contains(_NOT_FINITE)
    verdicts = [failed.astype("boolean").where(failed)]
    metrics = frame.filter(regex=r"^metrics\.")
    for metric, compare, bound, of_start, count in rule:
        last = frame[resolve(metrics, metric, "--collapse")]
        start = pd.Series(1.0, frame.index)
        if of_start:
            start = frame["run_id"].map(_values(history(uri, frame["run_id"], metric), "first"))
        finite = last.abs() < math.inf
        logged_nan = history(uri, frame.loc[last.isna(), "run_id"], metric)["run_id"]  # else nothing was logged
        lost = ~finite & (last.notna() | frame["run_id"].isin(logged_nan))
        known = lost | (finite & (start.abs() < math.inf))
        if count > 1:
            values = history(uri, frame["run_id"], metric).groupby("run_id").tail(count).groupby("run_id")["value"]
            nearest_to_sound = values.agg("max" if compare in (operator.lt, operator.le) else "min")
            last = frame["run_id"].map(nearest_to_sound.where(values.size() == count))
            known = lost | (last.abs() < math.inf)
        verdicts.append((lost | compare(last, bound * start)).astype("boolean").where(known))
    table = pd.concat(verdicts, axis=1)
    return frame.assign(collapsed=table.any(axis=1).astype("boolean").where(table.notna().any(axis=1)))
