"""``kl-comedy results``: tables, comparisons, plots, reports and exports of tracked runs; upload; verification.

Data goes to stdout, notes to stderr. Exits 0 when done, 1 when there is nothing to show or the store fails, 2 on
misuse (unknown key, metric, experiment, format, or no store at that address).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from kl_comedy.cli.common import check_choice, choice_option, command_line, message, print_rows
from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.io import atomic_write, existing_file
from kl_comedy.redaction import redact_command

if TYPE_CHECKING:
    import pandas as pd

app = typer.Typer(help="Tables, plots, reports and exports of tracked runs; comparisons; checks.", no_args_is_help=True)

DEFAULT_GROUP = ("params.name", "tags.kl.label")
DEFAULT_METRICS = ("eval/*/reward", "train/reward", "kl/exact_reverse_token")
DEFAULT_KL = tuple(f"{prefix}kl/exact_reverse_sequence" for prefix in ("eval/heldout/", "eval/*/", ""))
STATUSES = ("finished", "running", "failed", "killed", "all")
DEFAULT_URI = "sqlite:///mlflow.db"

Uri = Annotated[str, typer.Option(envvar="MLFLOW_TRACKING_URI", help="MLflow store or server, or an export's path.")]
Metrics = Annotated[list[str] | None, typer.Option(help="Metrics, comma-separated; * matches anything.")]
Baseline = Annotated[str | None, typer.Option(help="The row the others are compared with, by its name in the table.")]
Kl = Annotated[str | None, typer.Option(help="The KL metric to match or draw against; default: held-out, else train.")]
Interval = Annotated[str, choice_option("--interval", "t", "bootstrap")]
TEXT_FORMATS = ("text", "markdown", "csv", "json", "latex", "table")
EXPORT_FORMATS = ("csv", "json", "parquet")
Format = Annotated[str, choice_option("--format", *TEXT_FORMATS, "parquet")]
Out = Annotated[Path | None, typer.Option(help="File to write; default: stdout.")]
Where = Annotated[str | None, typer.Option(help="Filter, e.g. \"seed = 0 and algorithm.advantage = 'rloo'\".")]
Group = Annotated[list[str] | None, typer.Option(help="Config keys or tags, comma-separated; default: by command.")]
KeepRepeats = Annotated[
    bool, typer.Option("--keep-repeats", help="Average runs of the same configuration and seed, not only the newest.")
]
Pool = Annotated[
    list[str] | None, typer.Option(help="Keys in which runs of one row may differ, comma-separated; n counts seeds.")
]
Of = Annotated[str, typer.Option(help="A run's value: last, recorded, first, best, lowest or mean:K (of the last K).")]
Collapse = Annotated[
    str | None, typer.Option(help="Rule of collapsed runs, as 'eval/heldout/reward < 0.5 start' (the default).")
]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Options of every command that reads runs."""

    uri: Uri = DEFAULT_URI
    experiment: Annotated[str | None, typer.Option(help="Only this experiment; default: all.")] = None
    where: Where = None

    def runs(self, *, mark_dead: bool = False) -> pd.DataFrame:
        """The runs frame. Raises :class:`RunFailed` where no run matches."""
        from kl_comedy.tracking.runs import runs_frame

        frame = runs_frame(self.uri, self.experiment, self.where, mark_dead=mark_dead)
        if frame.empty:
            store = self.uri + (f", experiment {self.experiment!r}" if self.experiment else "")
            raise RunFailed(f"no runs in {store}" + (f" match {self.where!r}" if self.where else "; train one first"))
        return frame


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Runs with their values, in the order of panels and groups; columns of panels, groups and metrics; notes.

    ``added`` are the last of ``groups``: keys nobody asked for, in which runs of one row would differ.
    """

    frame: pd.DataFrame
    panels: list[str]
    groups: list[str]
    added: list[str]
    metrics: list[str]
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class Query(Source):
    """Options of every command that compares groups of runs."""

    group: Group = None
    status: Annotated[str, typer.Option(help=f"Which runs count: {', '.join(STATUSES)}.")] = "finished"
    pool: Pool = None
    keep_repeats: KeepRepeats = False
    of: Of = "last"
    collapse: Collapse = None
    split_versions: Annotated[
        bool, typer.Option("--split-versions", help="Separate groups by the commit they ran on.")
    ] = False

    @property
    def statuses(self) -> tuple[str, ...]:
        """The statuses of the runs that count, as MLflow writes them. Raises :class:`UserError`."""
        words = [word.lower() for word in split([self.status])]
        for word in words:
            check_choice("--status", word, STATUSES)
        return tuple(word.upper() for word in (STATUSES[:-1] if "all" in words else words))

    def select(
        self,
        metric: list[str] | None,
        default_group: list[str] | None = None,
        *,
        all_statuses: bool = False,
        families: bool = False,
        panels: list[str] | None = None,
        panels_option: str = "--panels",
        needs_collapsed: bool = False,
    ) -> Selection:
        """The runs with their values of the metrics, and notes on what is left out, pooled, mixed, stale or collapsed.

        Runs of one row differ in their seed and in the keys to ``pool`` only: other keys are added to the groups.

        ``all_statuses``: also runs that do not count, and this host's dead runs are first marked as FAILED.
        ``families``: groups hold several betas on purpose. ``panels`` separate runs as groups do. ``needs_collapsed``:
        which runs collapsed changes the result. Raises :class:`UserError` for a key, metric or rule that fits no run,
        and :class:`RunFailed` where no run counts.
        """
        from kl_comedy.tracking import runs as reader
        from kl_comedy.tracking import values

        statuses, value = self.statuses, values.describe_rule(self.of)
        every = self.runs(mark_dead=all_statuses)
        if families and reader.FAMILY not in every:
            raise UserError("these runs lack the tag kl.label, by which families are compared; did we train them?")
        keys, metrics = self.group or default_group, metric_columns(every, metric)
        groups = [name for name in DEFAULT_GROUP if name in every] if keys is None else columns(every, keys, "--group")
        if self.split_versions and reader.CODE in every:
            groups = list(dict.fromkeys([*groups, reader.CODE]))
        parts = [] if panels is None or split(panels) == ["none"] else columns(every, panels, panels_option)
        separated = [*parts, *groups, *([reader.LABEL] if families and reader.LABEL in every else [])]
        pool = pooled_columns(every, self.pool or [])
        frame = every if self.keep_repeats else values.drop_repeats(every, statuses, separated)
        notes = []
        if left_out := len(every) - len(frame):
            why = "are older runs of the same configuration and seed and are left out (--keep-repeats averages them)"
            notes.append(f"note: {left_out} runs {why}")
        added = values.separating_keys(frame, separated, pool)
        if added:
            names = ",".join(map(reader.short, added))
            notes.append(f"note: runs differ in {names} and are separate rows; --pool {names} pools them")
        groups, separated = [*groups, *added], [*separated, *added]
        if pooled := [reader.short(name) for name in values.separating_keys(frame, separated)]:
            notes.append(f"note: some rows pool runs that differ in {', '.join(pooled)} (--pool); n counts their seeds")
        if mixed := list(map(reader.short, values.mixed_code(frame, separated))):
            names = ", ".join(name.removeprefix("version.") for name in mixed)
            hint = "--split-versions separates them by commit"
            notes.append(f"warning: some rows mix runs of different code or packages ({names}); {hint}")
        frame, collapsed = self._with_collapsed(frame, needs_collapsed)
        stale = values.stale_notes(frame, metrics) if self.of == "last" else [f"note: value of a run: {value}"]
        notes += [*collapsed, *stale]
        for note in notes:
            message(note)
        frame = values.with_values(self.uri, reader.sort_by_groups(frame, separated), metrics, self.of)
        if not all_statuses:
            frame = frame[frame["status"].isin(statuses)]
            if frame.empty:
                raise RunFailed(f"no run with status {self.status}; --status all counts every run")
        return Selection(frame=frame, panels=parts, groups=groups, added=added, metrics=metrics, notes=notes)

    def _with_collapsed(self, frame: pd.DataFrame, needed: bool) -> tuple[pd.DataFrame, list[str]]:
        """``collapsed`` by the rule asked for, or by the default one where its metric was measured; notes."""
        from kl_comedy.statistics import DEFAULT_RULE, parse_rule
        from kl_comedy.tracking.runs import NoCurves
        from kl_comedy.tracking.values import with_collapsed

        text = (self.collapse or DEFAULT_RULE).strip()
        rule = parse_rule(text)
        if self.collapse is None and any(f"metrics.{condition.metric}" not in frame for condition in rule):
            return frame, []
        try:
            frame = with_collapsed(self.uri, frame, rule)
        except NoCurves as error:
            if needed or self.collapse:
                raise
            return frame, [f"note: collapsed runs are not counted: {error}"]
        count, unknown = int(frame["collapsed"].eq(True).sum()), int(frame["collapsed"].isna().sum())
        more = f"; {unknown} measured nothing of it" if unknown else ""
        note = f"note: {count} of {len(frame)} runs collapsed ({text}){more}; they stay in the means"
        return frame, [note] if count or self.collapse else []


def command(example: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a command of ``app``. Where its first parameter is one of the records above, the fields of the record
    become options."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        first, *others = inspect.signature(function).parameters.values()
        hints = get_type_hints(function, include_extras=True)
        record = hints[first.name]
        expanded = function
        if dataclasses.is_dataclass(record):
            types, keyword = get_type_hints(record, include_extras=True), inspect.Parameter.KEYWORD_ONLY
            fields = [
                inspect.Parameter(field.name, keyword, annotation=types[field.name], default=field.default)
                for field in dataclasses.fields(record)
            ]

            @functools.wraps(function)
            def expanded(**options: Any) -> None:
                chosen = {field.name: options.pop(field.name, field.default) for field in fields}
                function(record(**chosen), **options)

            arguments = [parameter.replace(kind=keyword, annotation=hints[parameter.name]) for parameter in others]
            vars(expanded)["__signature__"] = inspect.Signature([*arguments, *fields])
        return app.command(epilog=f"Example: `kl-comedy results {example}`")(expanded)

    return register


def columns(frame: pd.DataFrame, keys: list[str], option: str) -> list[str]:
    """The columns that comma-separated ``keys`` name. Raises :class:`UserError` for one that no run has."""
    from kl_comedy.tracking.runs import resolve

    return list(dict.fromkeys(resolve(frame, key, option) for key in split(keys)))


def pooled_columns(frame: pd.DataFrame, keys: list[str]) -> list[str]:
    """The columns that ``keys`` of ``--pool`` name, where ``*`` matches any param."""
    params = [name for name in frame if name.startswith("params.")]
    hits = {key: [name for name in params if fnmatch(name, f"params.{key}")] for key in split(keys)}
    return [name for key, names in hits.items() for name in names or columns(frame, [key], "--pool")]


def metric_columns(
    frame: pd.DataFrame, names: list[str] | None, option: str = "--metric", default: Iterable[str] = DEFAULT_METRICS
) -> list[str]:
    """Columns of the metrics asked for, where ``*`` matches anything; by default those of ``default`` that exist."""
    from kl_comedy.tracking.runs import matching_metrics, resolve

    present = frame.filter(regex=r"^metrics\.")
    hits: list[str] = []
    for name in split(names) if names else default:
        matching = matching_metrics(frame, name)
        if names and not matching:
            matching = [resolve(present, name.removeprefix("metrics."), option)]
        hits += matching
    if not hits and option == "--metric":
        known = ", ".join(column.removeprefix("metrics.") for column in [*present][:40]) or "(no metrics)"
        raise RunFailed(f"these runs have none of {', '.join(default)}; choose with --metric from: {known}")
    return list(dict.fromkeys(hits))


def kl_column(frame: pd.DataFrame, kl: str | None) -> str | None:
    """The column of the KL asked for, else the exact KL of a completion, held-out before train; None without any."""
    from kl_comedy.tracking.values import stale_notes

    hits = metric_columns(frame, [kl] if kl else None, "--kl", DEFAULT_KL)
    if hits and kl is None:
        message(f"KL: {hits[0].removeprefix('metrics.')} (nats a completion)")
    for note in stale_notes(frame, hits[:1]):
        message(note)
    return hits[0] if hits else None


def required_kl(frame: pd.DataFrame, kl: str | None) -> str:
    """:func:`kl_column`. Raises :class:`UserError` where the runs measured none."""
    column = kl_column(frame, kl)
    if column is None:
        raise UserError("--kl: these runs measured no exact KL of a completion; name another metric to match")
    return column


def split(values: Iterable[str]) -> list[str]:
    return [word.strip() for value in values for word in value.split(",") if word.strip()]


def write(
    frame: pd.DataFrame, format: str, out: Path | None, notes: Sequence[str] = (), uri: str | None = None
) -> None:
    """``frame`` to stdout, or to ``out``, whose path is then printed. ``notes`` were printed to stderr before; they
    stay with the table in every format, and below text in files only. A Markdown file begins with the command that
    made it from the runs of ``uri``."""
    from kl_comedy.tracking.tables import render

    if out is None and format == "parquet":
        raise UserError("--out: parquet is binary; name a file")
    if notes and format in EXPORT_FORMATS:
        frame = frame.assign(notes="; ".join(notes))
    beside = () if out is None and format in ("text", "table") else notes
    if out is None:
        typer.echo(render(frame, format, beside))
        return
    if format == "parquet":
        out.parent.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(out, index=False)
    else:
        made_by = f"<!-- {provenance(uri, out)} -->\n\n" if format == "markdown" and uri else ""
        atomic_write(out, made_by + render(frame, format, beside) + "\n")
    typer.echo(str(out))


def provenance(uri: str, out: Path) -> str:
    """The command that runs, as the table ``out`` names it: without --out and --format, and with the path of its export
    from the folder of ``out``. A store's address is left out: `results verify` takes the export beside the table."""
    from kl_comedy.tracking.runs import EXPORTS

    words, given = [], iter(sys.argv[1:])
    for word in given:
        if word.partition("=")[0] not in ("--out", "--format", "--uri"):
            words.append(word)
        elif "=" not in word:
            next(given, None)
    if Path(uri).suffix in EXPORTS:
        words += ["--uri", Path(os.path.relpath(uri, out.parent)).as_posix()]
    return redact_command(["kl-comedy", *words]).replace("--" + ">", "-- >")


@command("table --group kl.label,lag.steps --metric 'eval/*/reward' --format markdown")
def table(
    query: Query,
    metric: Metrics = None,
    interval: Interval = "t",
    run_ids: Annotated[
        bool, typer.Option("--run-ids", help="Name the runs of each mean, for `results verify`.")
    ] = False,
    rows: Annotated[
        list[str] | None, typer.Option(help="For reading: rows by their last group, in order; LABEL or LABEL=NAME.")
    ] = None,
    format: Format = "text",
    out: Out = None,
) -> None:
    """Mean and 95% interval over seeds of the final value of metrics, grouped by config keys."""
    from kl_comedy.tracking.compare import summarize
    from kl_comedy.tracking.runs import short
    from kl_comedy.tracking.tables import readable

    if run_ids and format not in EXPORT_FORMATS:
        raise UserError(f"--run-ids: is for {', '.join(EXPORT_FORMATS)}; got --format {format}")
    if rows and format in EXPORT_FORMATS:
        raise UserError(f"--rows: is for {', '.join(TEXT_FORMATS[:2])} and latex; got --format {format}")
    chosen = query.select(metric, all_statuses=True)
    summary = summarize(chosen.frame, chosen.groups, chosen.metrics, interval, query.statuses, run_ids=run_ids)
    if not summary["n"].any():
        counts = ", ".join(f"{number} {name}" for name, number in chosen.frame["status"].value_counts().items())
        message(f"no run with status {query.status} has a value yet ({counts}); --status all counts every run")
    if format not in EXPORT_FORMATS:
        shown = readable(summary, chosen.groups)
        write(named_rows(shown, split(rows or [])), format, out, chosen.notes, query.uri)
        return
    summary = summary.assign(of=query.of, interval=interval) if run_ids else summary
    names = [short(column) for column in summary]
    if len(set(names)) == len(names):
        summary = summary.set_axis(names, axis=1)
    write(summary.assign(metric=summary["metric"].map(short)), format, out, chosen.notes)


def named_rows(table: pd.DataFrame, rows: Sequence[str]) -> pd.DataFrame:
    """The rows of a readable ``table`` that ``rows`` name by their last group (the column before n), in that order, by
    the names given. All of them without ``rows``. Raises :class:`UserError` for a row that is not there."""
    import pandas as pd

    if not rows:
        return table
    group = table.columns[list(table.columns).index("n") - 1]
    names = {}
    for row in rows:
        label, _, name = (row, "", row) if row in set(table[group]) else row.rpartition("=")  # a label may have an =
        check_choice("--rows", label, list(table[group]))
        names[label] = name
    chosen = [table[table[group] == label].assign(**{group: name}) for label, name in names.items()]
    return pd.concat(chosen)


@command("plot --metric train/reward --group kl.label --out reward.svg")
def plot(
    query: Query,
    metric: Annotated[list[str], typer.Option(help="Metrics, comma-separated; a row of panels each; * matches any.")],
    out: Annotated[Path, typer.Option(help="File to write: .svg, .pdf or .png.")],
    kind: Annotated[str, choice_option("--kind", "curves", "frontier", "plane", "heatmap")] = "curves",
    kl: Kl = None,
    log: Annotated[
        list[str] | None, typer.Option(help="Of curves: metrics on a logarithmic axis, whose values above 0 are drawn.")
    ] = None,
    smooth: Annotated[int, typer.Option(min=1, help="Of curves: the mean of a run's last so many points.")] = 1,
    panels: Annotated[
        list[str] | None,
        typer.Option(help="A panel for each value of these keys; none: no panels. Default: by kind."),
    ] = None,
) -> None:
    """Pictures of metrics over seeds with 95% intervals.

    curves: mean line and band over updates; more than eight lines are spread over panels. frontier: final metric
    against final KL, a line a KL family. plane: bias and variance of each family's certificate beside what its runs
    reached. heatmap: KL family x beta. Runs without KL stand in the panels of every family and beta. Axes and legends
    are in words, widths are a paper's column (3.4 in) or page (7 in); on logarithmic axes means are geometric and
    intervals are of the logarithms.
    """
    from kl_comedy.tracking import plots
    from kl_comedy.tracking.figures import check_suffix, save_figure
    from kl_comedy.tracking.runs import history, short, sort_by_groups

    check_suffix(out)
    curves, nothing = kind == "curves", f"nothing with --kind {kind}"
    if log and not curves:
        raise bad_value("--log", ",".join(log), nothing, "only curves have such an axis")
    if smooth > 1 and not curves:
        raise bad_value("--smooth", str(smooth), nothing, "--of mean:K is the value of a run")
    chosen = query.select(metric, None if curves else ["kl.family"], families=not curves, panels=panels)
    frame, lines, parts, names = chosen.frame, chosen.groups, chosen.panels, list(map(short, chosen.metrics))
    if panels is None and curves:
        lines, parts = plots.lines_and_panels(frame, lines)
        if parts:
            words = (", ".join(map(short, keys)) for keys in (lines, parts))
            message("note: too many lines for one panel: a line a {}, a panel a {} (--panels chooses)".format(*words))
    elif kind == "heatmap":
        parts = [*parts, *chosen.added]
    frame = sort_by_groups(frame, [*parts, *lines])
    if curves:
        logarithmic = split(log or [])
        for name in logarithmic:
            check_choice("--log", name, names)
        points = {name: history(query.uri, frame["run_id"], name) for name in names}
        figure = plots.plot_curves(points, frame, lines, panels=parts, log=logarithmic, smooth=smooth)
    elif kind == "heatmap":
        figure = plots.heatmap(frame, names, parts)
    else:
        figure = plots.frontier(frame, lines, names, required_kl(frame, kl), parts, certificates=kind == "plane")
    save_figure(figure, out)
    typer.echo(str(out))


@command("export --without 'run.*,output,tracking.*' --out study/export.parquet")
def export(
    source: Source,
    format: Annotated[str | None, typer.Option(help="csv, json or parquet; default: by --out, else csv.")] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="Keys to leave out, comma-separated; * matches anything.")
    ] = None,
    curves: Annotated[
        list[str] | None,
        typer.Option(help="Of parquet: metrics whose curves are written, or none. Default: those that tables use."),
    ] = None,
    points: Annotated[int, typer.Option(min=0, help="Of parquet: thin curves of more points; 0 thins none.")] = 200,
    append: Annotated[bool, typer.Option("--append", help="Of parquet: other runs that --out has stay.")] = False,
    out: Out = None,
) -> None:
    """Every run with all its params, tags, final metrics and status, one row a run.

    A Parquet export, with its curves in FILE.curves.parquet beside it, takes the place of the store in `results table`,
    `compare`, `aggregate`, `plot`, `report`, `verify` and in `reproduce`: `--uri FILE.parquet`.
    """
    from kl_comedy.tracking.export import CURVES, write_export
    from kl_comedy.tracking.runs import NEVER_THINNED, curves_file, drop_columns, open_runs

    chosen = format or (out.suffix.lstrip(".").lower() if out else "csv")
    check_choice("--format" if format else "--out", chosen, EXPORT_FORMATS)
    if curves and chosen != "parquet":
        raise bad_value("--curves", ",".join(curves), f"nothing with {chosen}", "only parquet has curves")
    if append and chosen != "parquet":
        raise bad_value("--append", chosen, "an export to parquet")
    if 0 < points < 2 * NEVER_THINNED:
        raise bad_value("--points", str(points), f"0, or {2 * NEVER_THINNED} or more")
    frame = drop_columns(source.runs(), split(without or []))
    message(f"{len(frame)} runs, {len(frame.columns)} columns")
    if out is None or out.suffix != ".parquet" or chosen != "parquet":
        write(frame, chosen, out)
        return
    patterns = [] if split(curves or []) == ["none"] else split(curves) if curves else CURVES
    table = write_export(open_runs(source.uri), frame, out, patterns, points, append=append)
    thin = table[table["recorded"] > points] if points else table[:0]
    more = f", {len(thin)} of them of thinned curves" if len(thin) else ""
    message(f"{len(table)} points of {table['metric'].nunique()} metrics in {curves_file(out)}{more}")
    typer.echo(str(out))


@command("sync runs/my-run --uri http://tracking:5000")
def sync(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs.")],
    uri: Annotated[str | None, typer.Option(help="Where to; default: where the run was to be tracked.")] = None,
    experiment: Annotated[str | None, typer.Option(help="Experiment; default: the run's own.")] = None,
) -> None:
    """Upload the spool of runs that could not reach MLflow. Doing it twice changes nothing."""
    from kl_comedy.tracking import sync as upload
    from kl_comedy.tracking.spool import Spool, unreadable_lines
    from kl_comedy.tracking.store import first_line

    for folder in run_dirs:
        try:
            done = upload(folder, uri, experiment)
        except UserError:
            raise
        except Exception as error:
            raise RunFailed(f"{folder}: the upload failed: {first_line(error)}") from error
        notes = [f"{done.events} events uploaded to experiment {done.state.experiment!r}"]
        spool = Spool(folder)
        unreadable = unreadable_lines(spool.read())
        if unreadable:
            notes.append(f"{unreadable} unreadable lines of the spool were left out")
        if not spool.ended():
            notes.append("the record does not say how the run ended: it goes on, or was killed")
        for note in [*notes, *(f"{file} and was not uploaded" for file in done.left_out)]:
            message(f"{folder}: {note}")
        typer.echo(done.state.run_id)


@command("compare --metric eval/heldout/reward --at-kl 0.5,1,2 --baseline 'no KL' --group optimizer.lr")
def compare(
    query: Query,
    metric: Annotated[str, typer.Option(help="The metric to compare.")],
    at_kl: Annotated[
        str | None, typer.Option(help="Match at these KLs (nats), comma-separated; default: at equal beta.")
    ] = None,
    baseline: Baseline = None,
    margin: Annotated[
        float | None, typer.Option(min=0, help="Differences within this are the same: adds p_equivalent (TOST).")
    ] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="With --at-kl: each frontier begins at 0 nats with the first reward.")
    ] = False,
    kl: Kl = None,
    interval: Interval = "t",
    format: Format = "text",
    out: Out = None,
) -> None:
    """KL families at equal beta, or at equal exact KL (interpolated between runs, never beyond them).

    outside: seeds whose runs do not reach that KL; gap: seeds with only a collapsed run on one side of it. p_holm is p
    adjusted for all contrasts of the table (Holm).
    """
    from kl_comedy.tracking.compare import compare_families
    from kl_comedy.tracking.values import with_values

    chosen = query.select([metric], [], families=True, needs_collapsed=at_kl is not None)
    if len(chosen.metrics) != 1:
        raise UserError(f"--metric: got {metric!r}, which is {len(chosen.metrics)} metrics; name one")
    match = None
    if at_kl is not None:
        try:
            nats = [float(word) for word in split([at_kl])]
        except ValueError:
            nats = []
        if not nats or not all(0 <= value < math.inf for value in nats):
            raise bad_value("--at-kl", at_kl, "numbers of nats, as 0.5,1,2")
        match = required_kl(chosen.frame, kl), nats
    frame, (column,) = chosen.frame, chosen.metrics
    if from_start:
        frame = frame.assign(start=with_values(query.uri, frame, [column], "first")[column])
    options = {"at_kl": match, "margin": margin, "start": "start" if from_start else None}
    table = compare_families(frame, chosen.groups, column, baseline, interval, **options)
    write(table, format, out, chosen.notes, query.uri)


@command("aggregate --metric 'eval/*/reward' --group kl.label --baseline 'no KL'")
def aggregate(
    query: Query,
    metric: Annotated[list[str], typer.Option(help="A metric for each task, comma-separated; * matches anything.")],
    baseline: Baseline = None,
    format: Format = "text",
    out: Out = None,
) -> None:
    """Several tasks as one number: interquartile mean (stratified bootstrap), probability of improvement."""
    from kl_comedy.tracking.compare import aggregate as over_tasks

    chosen = query.select(metric, ["kl.label"])
    scores = over_tasks(chosen.frame, chosen.groups, chosen.metrics, baseline)
    if scores.empty:
        raise RunFailed(f"no run with status {query.status} has a value of {', '.join(metric)}")
    write(scores, format, out, chosen.notes, query.uri)


@command("report --experiment study --parts sweep,optimizer.lr --group kl.label --out study.html")
def report(
    query: Query,
    out: Annotated[Path, typer.Option(help="File to write: .html.")],
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Study",
    parts: Annotated[
        list[str] | None, typer.Option(help="A section with table and pictures for each value of these keys.")
    ] = None,
    metric: Metrics = None,
    kl: Kl = None,
    interval: Interval = "t",
) -> None:
    """One self-contained HTML page: results, curves, certificates, completions, provenance, commands. No network."""
    from kl_comedy.tracking.compare import summarize
    from kl_comedy.tracking.report import Study
    from kl_comedy.tracking.values import stale_notes

    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out: got {str(out)!r}; allowed: a file that ends in .html")
    chosen = query.select(metric, all_statuses=True, panels=parts, panels_option="--parts")
    frame, metrics, groups = chosen.frame, chosen.metrics, list(dict.fromkeys([*chosen.panels, *chosen.groups]))
    column = kl_column(frame, kl)
    rule = f"Means over seeds with 95% intervals ({interval}) of runs with status {query.status}."
    of_kl = [] if column is None or column in metrics else stale_notes(frame, [column])
    warnings = [note for note in chosen.notes if note.startswith("warning")]
    rules = [rule, *(note.removeprefix("note: ") for note in [*chosen.notes, *of_kl] if note not in warnings)]
    summary = summarize(frame, groups, metrics, interval, query.statuses)
    texts = {"title": title, "command": command_line(), "rules": rules, "warnings": warnings}
    atomic_write(out, Study(query.uri, frame, summary, groups, metrics).page(kl=column, parts=chosen.panels, **texts))
    typer.echo(str(out))


@command("verify results")
def verify(
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", help="A table that names its runs, a Markdown page, or a folder of them.")
    ],
    uri: Uri = DEFAULT_URI,
    format: Annotated[str, choice_option("--format", *TEXT_FORMATS)] = "text",
) -> None:
    """Which rows of a table the store or export still confirms: same, changed (and where), missing or unchecked.

    Of a Markdown page, or of all pages of a folder and the README.md beside it: each table below a comment with its
    command is made again from the export that the comment names (else export.parquet beside the page) and compared
    cell by cell; no store is needed. A page may name a script of its repository instead, which is then run. Exits 1
    where a row or a cell differs, and where a row of TABLE is not confirmed.
    """
    from kl_comedy.tracking import pages
    from kl_comedy.tracking import verify as checks

    if table.is_dir() or table.suffix == ".md":
        verdicts = pages.verify_pages(table, recompute)
        good = () if format in ("csv", "json") else ("same", "no command")
        if shown := [row for row in verdicts if row["verdict"] not in good]:
            print_rows(shown, format)
        for line in pages.summary(verdicts):
            message(line)
        if bad := [row for row in verdicts if row["verdict"] in ("changed", "failed")]:
            raise RunFailed(f"{len(bad)} tables of {table} differ from their exports")
        return
    existing_file(table, "TABLE")  # before the store is read, which takes seconds
    runs = Source(uri=uri).runs()
    verdicts = checks.verify(uri, runs, table)
    bad = [row for row in verdicts if row["verdict"] != "same"]
    shown = verdicts if format in ("csv", "json") else bad
    if shown:
        print_rows(shown, format)
    cells = sum(row["checked"] for row in verdicts)
    message(f"{len(verdicts) - len(bad)} of {len(verdicts)} rows are the same ({cells} cells)")
    for plugins, count in checks.plugins_of(runs, table).items():
        message(f"{count} runs used plugins: {plugins} (their source: artifact folder plugins)")
    unchecked = dict.fromkeys(name for row in verdicts for name in row["unchecked"].split(", ") if name)
    if unchecked:
        message(f"not checked, as the store has no such column: {', '.join(unchecked)}")
    if bad:
        raise RunFailed(f"{len(bad)} rows of {table} no longer reproduce from {uri}")


def recompute(words: Sequence[str], export: Path) -> str:
    """The Markdown that ``kl-comedy results *words`` prints for ``export``. Raises what the command raises."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        options = [*words, "--uri", str(export), "--format", "markdown"]
        try:
            typer.main.get_command(app).main(args=options, standalone_mode=False)
        except typer.TyperException as error:
            raise UserError(error.format_message()) from None
    return out.getvalue()
