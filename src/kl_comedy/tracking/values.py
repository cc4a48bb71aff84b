"""What a run's value of a metric is, by a stated rule; and which runs collapsed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kl_comedy.errors import bad_value
from kl_comedy.statistics import CollapseRule
from kl_comedy.tracking.queries import history, resolve

if TYPE_CHECKING:
    import pandas as pd

RULES = {
    "last": "the last recorded value",
    "first": "the first recorded value",
    "best": "the highest recorded value: chosen in hindsight, so optimistic, the more the noisier the curve",
    "lowest": "the lowest recorded value: chosen in hindsight",
    "mean:K": "the mean of the last K recorded values",
}


def check_rule(of: str) -> str:
    """``of`` if it names a rule. Raises :class:`UserError`."""
    if of not in RULES and not re.fullmatch(r"mean:[1-9]\d*", of):
        raise bad_value("--of", of, [*RULES], "mean:5 is the mean of the last five")
    return of


def meaning(of: str) -> str:
    """The rule in words."""
    return RULES["mean:K"].replace("K", of.split(":")[1]) if of.startswith("mean:") else RULES[of]


def with_values(uri: str, frame: pd.DataFrame, columns: Sequence[str], of: str) -> pd.DataFrame:
    """``frame`` with the metric ``columns`` replaced by each run's value under the rule ``of``.

    Points that are not finite take no part in best, lowest and mean; the last and first value are what they are.
    """
    if check_rule(of) == "last":
        return frame
    found = {}
    for column in columns:
        points = history(uri, frame["run_id"], column.removeprefix("metrics."))
        found[column] = frame["run_id"].map(_by_rule(points, of)).astype(float)
    return frame.assign(**found)


def with_collapsed(uri: str, frame: pd.DataFrame, rule: CollapseRule) -> pd.DataFrame:
    """``frame`` with ``collapsed``: True, False, or None for runs that measured nothing of what ``rule`` names.

    Raises :class:`UserError` where no run has a metric of the rule.
    """
    for metric in rule.metrics:
        resolve(frame[[name for name in frame.columns if name.startswith("metrics.")]], metric, "--collapse")
    starts = {metric: _by_rule(history(uri, frame["run_id"], metric), "first") for metric in rule.starts}
    last = {metric: frame[f"metrics.{metric}"].tolist() for metric in rule.metrics}
    reasons = frame["tags.failure.reason"].fillna("").tolist() if "tags.failure.reason" in frame else [""] * len(frame)
    absent = _never_logged(uri, frame, rule)
    judged = []
    for at, (run_id, status, reason) in enumerate(zip(frame["run_id"], frame["status"], reasons, strict=True)):
        ends = {metric: values[at] for metric, values in last.items() if (run_id, metric) not in absent}
        begins = {metric: values[run_id] for metric, values in starts.items() if run_id in values}
        judged.append(rule.collapsed(last=ends, first=begins, status=status, reason=reason))
    return frame.assign(collapsed=judged)


def _never_logged(uri: str, frame: pd.DataFrame, rule: CollapseRule) -> set[tuple[str, str]]:
    """(run, metric) whose empty cell means that nothing was logged, not that NaN was."""
    found = set()
    for metric in rule.metrics:
        empty = frame.loc[frame[f"metrics.{metric}"].isna(), "run_id"]
        logged = set(history(uri, empty, metric)["run_id"]) if len(empty) else set()
        found |= {(run_id, metric) for run_id in empty if run_id not in logged}
    return found


def _by_rule(points: pd.DataFrame, of: str) -> dict[str, float]:
    """Run id to value; ``points`` has columns run_id, step, value, steps ascending within a run."""
    if of == "first":
        return dict(points.groupby("run_id")["value"].first())
    finite = points[points["value"].map(math.isfinite)]
    by_run = finite.groupby("run_id")["value"]
    if of == "best":
        return dict(by_run.max())
    if of == "lowest":
        return dict(by_run.min())
    return dict(by_run.apply(lambda values: values.tail(int(of.split(":")[1])).mean()))
