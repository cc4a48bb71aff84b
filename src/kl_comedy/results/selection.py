"""Which runs a table or figure compares, in which groups, and their values: for the command line and the Python API.

    read_matching -> choose_runs -> with_run_values

Runs of one row differ in their seed only, and in the keys that a user pools: where they differ in other keys, these
keys become groups too. Whatever is left out, pooled, mixed, stale or collapsed is said in a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from kl_comedy.errors import RunFailed, UserError
from kl_comedy.results import runs as reader
from kl_comedy.results import values
from kl_comedy.statistics import DEFAULT_RULE, parse_rule

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_GROUP = ("params.name", "tags.kl.label")
DEFAULT_METRICS = ("eval/*/reward", "eval/*/proxy", "train/reward", "train/gold", "kl/exact_reverse_token")
MOST_METRICS_NAMED = 40


@dataclass(frozen=True)
class OptionNames:
    """What an error message calls the option that has a mistake."""

    group: str = "--group"
    pool: str = "--pool"
    metric: str = "--metric"
    panels: str = "--panels"


@dataclass(frozen=True, kw_only=True)
class RunQuery:
    """Which runs of the store or export at ``uri`` are compared, and how. Keys and metrics as a user writes them."""

    uri: str
    experiment: str | None = None
    where: str | None = None
    mark_dead: bool = False
    """Whether this host's dead runs are first marked as FAILED in the store."""
    metrics: Sequence[str] | None = None
    """``*`` matches anything. None: those of :data:`DEFAULT_METRICS` that the runs have."""
    group: Sequence[str] | None = None
    """Keys whose values make a row. None: those of :data:`DEFAULT_GROUP` that the runs have."""
    panels: Sequence[str] = ()
    """Keys that separate runs as groups do, and make a panel or section."""
    pool: Sequence[str] = ()
    """Keys in which runs of one row may differ; ``*`` matches any key of a config."""
    statuses: Sequence[str] = ("FINISHED",)
    """The statuses of the runs that count, as MLflow writes them."""
    of: str = "last"
    """The rule of a run's value, one of :data:`kl_comedy.results.values.RULES`."""
    collapse: str | None = None
    """The rule of collapsed runs. None: :data:`kl_comedy.statistics.DEFAULT_RULE`, where its metric was measured."""
    needs_collapsed: bool = False
    """Whether the result depends on which runs collapsed, so that it cannot do without the curves of the rule."""
    keep_repeats: bool = False
    """Whether runs of the same configuration and seed all count, and not only the newest."""
    split_versions: bool = False
    """Whether runs of different commits are separate rows."""
    families: bool = False
    """Whether KL families are compared, whose groups hold several betas on purpose."""
    options: OptionNames = OptionNames()


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Runs, the columns of their panels, groups and metrics, and notes on what a reader should know.

    ``added`` are the last of ``groups``: keys nobody asked for, in which runs of one row would differ. ``separated``
    are all columns that separate runs, in the order in which :func:`with_run_values` sorts.
    """

    frame: pd.DataFrame
    panels: list[str]
    groups: list[str]
    added: list[str]
    separated: list[str]
    metrics: list[str]
    notes: list[str]


def read_matching(
    uri: str, experiment: str | None = None, where: str | None = None, *, mark_dead: bool = False
) -> pd.DataFrame:
    """The runs frame. Raises :class:`RunFailed` where no run matches."""
    frame = reader.runs_frame(uri, experiment, where, mark_dead=mark_dead)
    if not frame.empty:
        return frame
    source = uri
    if experiment:
        source += f", experiment {experiment!r}"
    if where:
        raise RunFailed(f"no runs in {source} match {where!r}")
    raise RunFailed(f"no runs in {source}; train one first")


def choose_runs(query: RunQuery) -> Selection:
    """The runs that the query compares, in the order of the store, with the last recorded value of each metric.

    Raises :class:`UserError` for a key, metric or rule that fits no run, and :class:`RunFailed` where no run matches.
    """
    rule_in_words = values.describe_rule(query.of)
    runs = read_matching(query.uri, query.experiment, query.where, mark_dead=query.mark_dead)
    if query.families and reader.FAMILY not in runs:
        raise UserError("no tag kl.label, by which KL families are compared: these runs were not made by kl-comedy")

    metrics = metric_columns(runs, query.metrics, query.options.metric)
    groups = _group_columns(runs, query)
    panels = columns(runs, query.panels, query.options.panels)
    separated = [*panels, *groups]
    if query.families and reader.LABEL in runs:
        # The groups hold all betas of a family. Without the label, two runs that differ only in beta would count as
        # runs that should be separate rows.
        separated.append(reader.LABEL)
    pooled = pooled_columns(runs, query.pool, query.options.pool)

    notes: list[str] = []
    # Two runs of one configuration and seed are no two observations: an interval over both would be too narrow.
    frame = runs
    if not query.keep_repeats:
        frame = values.drop_repeats(runs, query.statuses, separated)
    if len(frame) < len(runs):
        reason = "are older runs of the same configuration and seed and are left out (--keep-repeats averages them)"
        notes.append(f"note: {len(runs) - len(frame)} runs {reason}")

    # A mean over runs that differ in more than their seed would be a number about nothing.
    added = values.separating_keys(frame, separated, pooled)
    groups += added
    separated += added
    notes += _notes_on_rows(frame, separated, added)

    frame, collapse_notes = _with_collapsed(query, frame)
    notes += collapse_notes
    # Other rules take earlier updates on purpose, so that none of their values is stale.
    if query.of == "last":
        notes += values.stale_notes(frame, metrics)
    else:
        notes.append(f"note: value of a run: {rule_in_words}")
    return Selection(
        frame=frame, panels=panels, groups=groups, added=added, separated=separated, metrics=metrics, notes=notes
    )


def with_run_values(query: RunQuery, selection: Selection) -> Selection:
    """The selection with each run's value of the metrics under the rule ``query.of``, sorted by its groups."""
    frame = reader.sort_by_groups(selection.frame, selection.separated)
    return replace(selection, frame=values.with_values(query.uri, frame, selection.metrics, query.of))


def without_second_name(frame: pd.DataFrame, groups: Sequence[str]) -> list[str]:
    """Default ``groups`` for a reader: without the runs' name where the KL label says the same.

    That is where each of several names has one label and each label one name, as ``k1-beta0.03`` and
    ``0.03 k1_reverse_token in loss``.
    """
    name, label = DEFAULT_GROUP
    if name not in groups or label not in groups:
        return list(groups)
    pairs = frame[[name, label]].fillna("").drop_duplicates()
    if pairs[name].duplicated().any() or pairs[label].duplicated().any():
        return list(groups)
    # The name of the only run is what its user calls it, and there is nothing to tell it apart from.
    if len(pairs) < 2:
        return list(groups)
    return [group for group in groups if group != name]


def _group_columns(runs: pd.DataFrame, query: RunQuery) -> list[str]:
    if query.group is None:
        groups = [name for name in DEFAULT_GROUP if name in runs]
    else:
        groups = columns(runs, query.group, query.options.group)
    # Runs of other programs have no commit.
    has_code = reader.CODE in runs
    if query.split_versions and has_code and reader.CODE not in groups:
        groups.append(reader.CODE)
    return groups


def _notes_on_rows(frame: pd.DataFrame, separated: Sequence[str], added: Sequence[str]) -> list[str]:
    """Which keys separate rows that nobody asked to separate, and which rows hold runs of several kinds."""
    notes = []
    if added:
        names = ",".join(map(reader.short, added))
        notes.append(f"note: runs differ in {names} and are separate rows; --pool {names} pools them")
    pooled = [reader.short(name) for name in values.separating_keys(frame, separated)]
    if pooled:
        notes.append(f"note: some rows pool runs that differ in {', '.join(pooled)} (--pool); n counts their seeds")
    mixed = [reader.short(name).removeprefix("version.") for name in values.mixed_code(frame, separated)]
    if mixed:
        hint = "--split-versions separates them by commit"
        notes.append(f"warning: some rows mix runs of different code or packages ({', '.join(mixed)}); {hint}")
    return notes


def _with_collapsed(query: RunQuery, frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The frame with the column ``collapsed``, and notes; as it was where the default rule cannot be asked."""
    text = (query.collapse or DEFAULT_RULE).strip()
    rule = parse_rule(text)
    asked_for = query.collapse is not None
    measured = all(f"metrics.{condition.metric}" in frame for condition in rule)
    # Nobody asked: a study without that metric is no mistake.
    if not asked_for and not measured:
        return frame, []
    try:
        frame = values.with_collapsed(query.uri, frame, rule)
    except reader.NoCurves as error:
        if query.needs_collapsed or asked_for:
            raise
        return frame, [f"note: collapsed runs are not counted: {error}"]

    count = int(frame["collapsed"].eq(True).sum())
    unknown = int(frame["collapsed"].isna().sum())
    # Nobody asked and nothing collapsed: there is nothing to say.
    if count == 0 and not asked_for:
        return frame, []
    note = f"note: {count} of {len(frame)} runs collapsed ({text})"
    if unknown:
        note += f"; {unknown} measured nothing of it"
    # Left out, they would make a configuration that collapses often look good.
    return frame, [f"{note}; they stay in the means"]


def columns(frame: pd.DataFrame, keys: Iterable[str], option: str) -> list[str]:
    """The columns that ``keys`` name, each once. Raises :class:`UserError` for a key that no run has."""
    return list(dict.fromkeys(reader.resolve(frame, key, option) for key in keys))


def pooled_columns(frame: pd.DataFrame, keys: Iterable[str], option: str = "--pool") -> list[str]:
    """The columns that may differ within a row; ``*`` matches any key of a config."""
    params = [name for name in frame.columns if name.startswith("params.")]
    pooled: list[str] = []
    for key in keys:
        # Only params: a pattern as kl* would match tags derived from them too, which pool nothing.
        matching = [name for name in params if fnmatch(name, f"params.{key}")]
        pooled += matching or columns(frame, [key], option)
    return pooled


def metric_columns(
    frame: pd.DataFrame, names: Iterable[str] | None, option: str = "--metric", default: Iterable[str] = DEFAULT_METRICS
) -> list[str]:
    """The columns of the metrics ``names``, else of those of ``default`` that the runs have; ``*`` matches anything.

    Raises :class:`UserError` for a name that no run has, and :class:`RunFailed` where the runs have no default metric.
    """
    # Only metrics, so that the nearest name in an error message is one.
    present = frame.filter(regex=r"^metrics\.")
    chosen: list[str] = []
    if names:
        for name in names:
            matching = reader.matching_metrics(frame, name)
            chosen += matching or [reader.resolve(present, name.removeprefix("metrics."), option)]
        return list(dict.fromkeys(chosen))

    for name in default:
        chosen += reader.matching_metrics(frame, name)
    # A KL to draw against may be missing: its command then says what it needs.
    if not chosen and option == "--metric":
        present_names = [reader.short(column) for column in present.columns]
        known = ", ".join(present_names[:MOST_METRICS_NAMED]) or "(no metrics)"
        raise RunFailed(f"these runs have none of {', '.join(default)}; choose with --metric from: {known}")
    return list(dict.fromkeys(chosen))
