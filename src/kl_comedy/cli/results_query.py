"""What the ``results`` commands share: options, which runs, which groups, which metrics, and what to say about them."""

from __future__ import annotations

import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kl_comedy.errors import RunFailed, UserError, bad_value

if TYPE_CHECKING:
    import pandas as pd


DEFAULT_GROUP = ("params.name", "tags.kl.label")
DEFAULT_METRICS = ("eval/*/reward", "train/reward", "kl/exact_reverse_token")
STATUSES = ("finished", "running", "failed", "killed", "all")
DEFAULT_URI = "sqlite:///mlflow.db"

Uri = Annotated[str, typer.Option(envvar="MLFLOW_TRACKING_URI", help="MLflow store or server.")]
Experiment = Annotated[str | None, typer.Option(help="Only this experiment; default: all.")]
Where = Annotated[str | None, typer.Option(help="Filter, e.g. \"seed = 0 and algorithm.advantage = 'rloo'\".")]
Group = Annotated[list[str] | None, typer.Option(help="Config keys or tags, comma-separated; default: name,kl.label.")]
Status = Annotated[str, typer.Option(help=f"Which runs count: {', '.join(STATUSES)}.")]
Repeats = Annotated[bool, typer.Option("--keep-repeats", help="Count every run of the same configuration and seed.")]
Of = Annotated[str, typer.Option(help="A run's value: last, first, best, lowest or mean:K (of the last K).")]
Collapse = Annotated[
    str | None, typer.Option(help="Rule of collapsed runs, as 'eval/heldout/reward < 0.5 start' (the default).")
]
Kl = Annotated[str | None, typer.Option(help="The KL metric to match or draw against; default: held-out, else train.")]
SplitVersions = Annotated[bool, typer.Option("--split-versions", help="Part groups by the commit they ran on.")]


def runs(uri: str, experiment: str | None, where: str | None, *, mark_dead: bool = False) -> pd.DataFrame:
    from kl_comedy.tracking.runs import runs_frame
    from kl_comedy.tracking.store import redact

    frame = runs_frame(uri, experiment, where, mark_dead=mark_dead)
    if frame.empty:
        place = f"{redact(uri)}" + (f", experiment {experiment!r}" if experiment else "")
        raise RunFailed(f"no runs in {place}" + (f" match {where!r}" if where else "; train one first"))
    return frame


def group_columns(frame: pd.DataFrame, group: list[str] | None, option: str = "--group") -> list[str]:
    from kl_comedy.tracking.runs import resolve

    if group is None:
        return [column for column in DEFAULT_GROUP if column in frame.columns]
    return list(dict.fromkeys(resolve(frame, key, option) for key in split(group)))


def metric_columns(frame: pd.DataFrame, metric: list[str] | None) -> list[str]:
    """Columns of the metrics asked for; without a wish the default ones that exist."""
    from kl_comedy.tracking.runs import resolve

    present = [str(column) for column in frame.columns if str(column).startswith("metrics.")]
    found: list[str] = []
    for name in split(metric) if metric else DEFAULT_METRICS:
        pattern = f"metrics.{name.removeprefix('metrics.')}"
        hits = sorted(column for column in present if fnmatch(column, pattern))
        if metric and not hits:
            hits = [resolve(frame[present], pattern.removeprefix("metrics."), "--metric")]
        found += hits
    if not found:
        names = ", ".join(column.removeprefix("metrics.") for column in present[:40]) or "(no metrics)"
        raise RunFailed(f"these runs have none of {', '.join(DEFAULT_METRICS)}; choose with --metric from: {names}")
    return list(dict.fromkeys(found))


def without_repeats(frame: pd.DataFrame, statuses: tuple[str, ...], notes: list[str]) -> pd.DataFrame:
    from kl_comedy.tracking.runs import drop_repeats

    kept = drop_repeats(frame, statuses)
    if len(kept) < len(frame):
        say(
            f"note: {len(frame) - len(kept)} runs repeat a configuration and seed and are left out "
            "(--keep-repeats counts them)",
            notes,
        )
    return kept


def tell_pooled(frame: pd.DataFrame, groups: list[str], notes: list[str]) -> None:
    """An interval over runs that differ in more than the seed is not an interval over seeds: say so."""
    from kl_comedy.tracking.runs import short, varying

    names = [short(column) for column in varying(frame, groups)]
    if names:
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        say(
            f"note: some rows pool runs that differ in {', '.join(names[:6])}{more}; --group with the key parts them",
            notes,
        )


def short_names(summary: pd.DataFrame) -> pd.DataFrame:
    from kl_comedy.tracking.runs import short

    names = [short(str(column)) for column in summary.columns]
    unique = len(set(names)) == len(names)
    renamed = summary.set_axis(names, axis=1) if unique else summary.copy()
    return renamed.assign(metric=summary["metric"].str.removeprefix("metrics."))


def statuses_of(status: str) -> tuple[str, ...]:
    chosen = [word.strip().lower() for word in status.split(",")]
    for word in chosen:
        check("--status", word, STATUSES)
    every = tuple(name.upper() for name in STATUSES[:-1])
    return every if "all" in chosen else tuple(word.upper() for word in chosen)


def split(values: list[str]) -> list[str]:
    return [word.strip() for value in values for word in value.split(",") if word.strip()]


def check(option: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise bad_value(option, given, allowed)


def say(message: str, notes: list[str] | None = None) -> None:
    """To stderr, and to ``notes`` for whoever repeats it elsewhere."""
    print(message, file=sys.stderr)
    if notes is not None:
        notes.append(message)


def select(
    uri: str,
    experiment: str | None,
    where: str | None,
    group: list[str] | None,
    metric: list[str] | None,
    *,
    status: str,
    keep_repeats: bool,
    split_versions: bool = False,
    mark_dead: bool = False,
    of: str = "last",
    collapse: str | None = None,
    families: bool = False,
    notes: list[str] | None = None,
    panels: list[str] | None = None,
    panels_option: str = "--panels",
) -> tuple[pd.DataFrame, list[str], list[str]]:
    """The runs with their values under ``of``, the group columns and the metric columns, after saying to stderr what
    is pooled, left out, mixed, and by which rule a run has a value and counts as collapsed. ``families``: groups hold
    several betas on purpose. ``panels`` (of ``panels_option``) part the runs as groups do. ``notes`` collects what is
    said. The runs stand in the order of panels and groups (:func:`kl_comedy.tracking.runs.sort_by_groups`).

    Raises :class:`UserError` for a key, metric or rule that fits no run.
    """
    from kl_comedy.tracking.runs import CODE, LABEL, check_rule, rule_description, sort_by_groups, with_values

    statuses = statuses_of(status)
    check_rule(of)
    notes = [] if notes is None else notes
    frame = runs(uri, experiment, where, mark_dead=mark_dead)
    groups, metrics = group_columns(frame, group), metric_columns(frame, metric)
    if split_versions:
        groups += [CODE] if CODE in frame and CODE not in groups else []
    frame = frame if keep_repeats else without_repeats(frame, statuses, notes)
    parts = panel_columns(frame, panels, panels_option)
    parted = [*parts, *groups, *([LABEL] if families and LABEL in frame else [])]
    tell_pooled(frame, parted, notes)
    tell_mixed(frame, parted, notes)
    frame = judged(uri, frame, collapse, notes)
    if of != "last":
        say(f"value of a run: {rule_description(of)}", notes)
    return with_values(uri, sort_by_groups(frame, parted), metrics, of), groups, metrics


def panel_columns(frame: pd.DataFrame, panels: list[str] | None, option: str = "--panels") -> list[str]:
    return [] if panels is None or split(panels) == ["none"] else group_columns(frame, panels, option)


def lines_and_panels(
    frame: pd.DataFrame, groups: list[str], panels: list[str] | None, kind: str
) -> tuple[list[str], list[str]]:
    """What a line is and what a panel: as asked for, else as many lines as one can tell apart, and of a heat map, in
    which lines play no part, a panel a beta."""
    from kl_comedy.tracking.plots import of_many
    from kl_comedy.tracking.runs import BETA, short

    if panels is not None:
        return groups, panel_columns(frame, panels)
    lines, parts = of_many(frame, groups) if kind == "curves" else (groups, [BETA] if kind == "heatmap" else [])
    if parts and kind == "curves":
        names = (", ".join(map(short, keys)) for keys in (lines, parts))
        say("note: too many lines for one panel: a line a {}, a panel a {} (--panels chooses)".format(*names))
    return lines, parts


def judged(uri: str, frame: pd.DataFrame, collapse: str | None, notes: list[str]) -> pd.DataFrame:
    """``frame`` with ``collapsed`` by the rule asked for, or by the default one where its metric was measured."""
    from kl_comedy.statistics import DEFAULT_RULE, parse_rule
    from kl_comedy.tracking.runs import with_collapsed

    rule = parse_rule(collapse or DEFAULT_RULE)
    if collapse is None and any(f"metrics.{metric}" not in frame for metric in rule.metrics):
        return frame
    found = with_collapsed(uri, frame, rule)
    number = int(found["collapsed"].eq(True).sum())
    unknown = int(found["collapsed"].isna().sum())
    if number or collapse:
        more = f"; {unknown} measured nothing of it" if unknown else ""
        say(f"note: {number} of {len(found)} runs collapsed ({rule.text}){more}; they stay in the means", notes)
    return found


def tell_mixed(frame: pd.DataFrame, groups: list[str], notes: list[str]) -> None:
    """A mean over runs of different code is not a mean over seeds: say so."""
    from kl_comedy.tracking.runs import mixed_code, short

    names = [short(name).removeprefix("version.") for name in mixed_code(frame, groups)]
    if names:
        say(
            f"warning: some rows mix runs of different code or packages ({', '.join(names)}); "
            "--split-versions parts them by commit",
            notes,
        )


def kl_column(frame: pd.DataFrame, kl: str | None) -> str:
    """The column of the KL to match: the one asked for, else the exact KL of a completion, held-out before train."""
    from kl_comedy.tracking.runs import resolve

    present = [str(name) for name in frame.columns if str(name).startswith("metrics.")]
    if kl is not None:
        return resolve(frame[present], kl, "--metric")
    for pattern in ("metrics.eval/*/kl/exact_reverse_sequence", "metrics.kl/exact_reverse_sequence"):
        hits = sorted(name for name in present if fnmatch(name, pattern))
        if hits:
            say(f"KL: {hits[0].removeprefix('metrics.')} (nats a completion)")
            return hits[0]
    raise UserError("--kl: these runs measured no exact KL of a completion; name another metric to match")


def write(frame: pd.DataFrame, format: str, out: Path | None) -> None:
    """``frame`` to stdout, or to ``out``, whose path is then printed."""
    from kl_comedy.tracking.tables import render

    if out is None:
        typer.echo(render(frame, format))
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    if format == "parquet":
        frame.to_parquet(out, index=False)
    else:
        out.write_text(render(frame, format) + "\n", encoding="utf-8")
    typer.echo(str(out))
