"""``kl-comedy results``: tables, comparisons, plots, reports and exports of tracked runs; upload; verification.

Data goes to stdout, notes to stderr. Exits 0 when done, 1 when there is nothing to show or the store fails, 2 on
misuse (unknown key, metric, experiment, format, or no store at that address).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kl_comedy.cli.common import (
    check_choice,
    choice_option,
    command_line,
    message,
    output_option,
    print_rows,
    stderr_console,
)
from kl_comedy.cli.results_options import (
    DEFAULT_URI,
    EXPORT_FORMATS,
    TEXT_FORMATS,
    Baseline,
    Format,
    Interval,
    Kl,
    Metrics,
    Out,
    Query,
    ResultTable,
    Source,
    Uri,
    command,
    parse_options,
    select,
    split,
    split_unless_none,
    write_table,
)
from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.io import atomic_write, check_writable, existing_file
from kl_comedy.progress import stages
from kl_comedy.redaction import check_address, one_line
from kl_comedy.statistics import MARGIN, POWER

if TYPE_CHECKING:
    import pandas as pd

    from kl_comedy.results.selection import RunQuery, Selection

Margin = Annotated[
    float | None,
    typer.Option(min=0, help=f"Differences within this are the same (TOST). Default: {MARGIN} for rewards, else none."),
]

app = typer.Typer(help="Tables, plots, reports and exports of tracked runs; comparisons; checks.", no_args_is_help=True)

DEFAULT_KL = (
    "eval/heldout/kl/exact_reverse_sequence",
    "eval/*/kl/exact_reverse_sequence",
    "kl/exact_reverse_sequence",
)
"""The KL to match or draw against: held-out before other sets, and these before training."""


def kl_column(frame: pd.DataFrame, kl: str | None) -> str | None:
    """The column of the KL asked for, else the exact KL of a completion, held-out before train; None without any."""
    from kl_comedy.results.selection import metric_columns
    from kl_comedy.results.values import stale_notes

    names = split([kl]) if kl else None
    hits = metric_columns(frame, names, "--kl", DEFAULT_KL)
    if not hits:
        return None
    column = hits[0]
    # Chosen for the user, who has to know which one it is.
    if kl is None:
        message(f"KL: {column.removeprefix('metrics.')} (nats per completion)")
    for note in stale_notes(frame, [column]):
        message(note)
    return column


def required_kl(frame: pd.DataFrame, kl: str | None) -> str:
    """:func:`kl_column`. Raises :class:`UserError` where the runs measured none."""
    column = kl_column(frame, kl)
    if column is None:
        raise UserError("--kl: these runs measured no exact KL of a completion; name another metric to match")
    return column


# --- table ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class TableOptions(Query):
    """Options of ``results table``."""

    metric: Metrics = None
    interval: Interval = "t"
    run_ids: Annotated[bool, typer.Option("--run-ids", help="Name the runs of each mean, for `results verify`.")] = (
        False
    )
    rows: Annotated[
        list[str] | None, typer.Option(help="Row order, by label of the last group: LABEL or LABEL=NAME. Text formats.")
    ] = None
    format: Format = "text"
    out: Out = None

    def check(self) -> None:
        """Raise :class:`UserError` for an option that the format has no place for."""
        if self.run_ids and self.format not in EXPORT_FORMATS:
            raise UserError(f"--run-ids: is for {', '.join(EXPORT_FORMATS)}; got --format {self.format}")
        if self.rows and self.format in EXPORT_FORMATS:
            raise UserError(f"--rows: is for {', '.join(TEXT_FORMATS[:2])} and latex; got --format {self.format}")


@command(app, "table --group kl.label,lag.steps --metric 'eval/*/reward' --format markdown")
def table(wanted: TableOptions) -> None:
    """Mean and 95% interval over seeds of the final value of metrics, grouped by config keys."""
    write_table(make_table(wanted), wanted.format, wanted.out, wanted.uri)


def make_table(wanted: TableOptions) -> ResultTable:
    """The table of ``results table``: one column per metric to read, one row per group and metric as data."""
    from kl_comedy.results.compare import summarize
    from kl_comedy.results.runs import short
    from kl_comedy.results.selection import without_second_name
    from kl_comedy.results.tables import readable

    wanted.check()
    chosen = select(wanted.run_query(wanted.metric, mark_dead=True))
    groups = chosen.groups
    # Data keeps every key, and so does who asks for the name.
    if wanted.format not in EXPORT_FORMATS and not wanted.group:
        groups = without_second_name(chosen.frame, groups)
    summary = summarize(chosen.frame, groups, chosen.metrics, wanted.interval, wanted.statuses, run_ids=wanted.run_ids)
    # A table of empty cells looks like a bug: most often the runs are still running.
    if not summary["n"].any():
        statuses = chosen.frame["status"].value_counts()
        counts = ", ".join(f"{number} {name}" for name, number in statuses.items())
        message(f"no run with status {wanted.status} has a value yet ({counts}); --status all counts every run")
    if wanted.format not in EXPORT_FORMATS:
        frame = named_rows(readable(summary, groups), split(wanted.rows))
        return ResultTable(frame=frame, notes=chosen.notes)

    if wanted.run_ids:
        # What `results verify` needs to compute the mean again.
        summary = summary.assign(of=wanted.of, interval=wanted.interval)
    names = [short(str(column)) for column in summary]
    # A param and a tag may have one short name; the long ones then stay.
    if len(set(names)) == len(names):
        summary = summary.set_axis(names, axis=1)
    return ResultTable(frame=summary.assign(metric=summary["metric"].map(short)), notes=chosen.notes)


def named_rows(table: pd.DataFrame, rows: Sequence[str]) -> pd.DataFrame:
    """The rows of a readable ``table`` that ``rows`` name by their last group, in that order and by the names given.

    The last group is the column before n. Without ``rows`` all of them. Raises :class:`UserError` for a row that is
    not there.
    """
    import pandas as pd

    if not rows:
        return table
    # The keys of the groups stand before n, and the last one tells most rows apart.
    group = table.columns[list(table.columns).index("n") - 1]
    labels = list(table[group])
    names: dict[str, str] = {}
    for row in rows:
        label = name = row
        # A label may have an = itself, so the whole text is tried first.
        if row not in labels:
            label, _, name = row.rpartition("=")
        check_choice("--rows", label, labels)
        names[label] = name
    chosen = [table[table[group] == label].assign(**{group: name}) for label, name in names.items()]
    return pd.concat(chosen)


# --- plot -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class PlotOptions(Query):
    """Options of ``results plot``."""

    metric: Annotated[list[str], typer.Option(help="Metrics, comma-separated; a row of panels each; * matches any.")]
    out: Annotated[Path, output_option("File to write: .svg, .pdf or .png.")]
    kind: Annotated[str, choice_option("--kind", "curves", "path", "frontier", "plane", "heatmap")] = "curves"
    kl: Kl = None
    log: Annotated[
        list[str] | None, typer.Option(help="Curves: metrics on a logarithmic axis; only values above 0 are drawn.")
    ] = None
    smooth: Annotated[int, typer.Option(min=1, help="Curves and path: draw the mean of a run's last N points.")] = 1
    panels: Annotated[
        list[str] | None,
        typer.Option(help="A panel for each value of these keys; none: no panels. Default: by kind."),
    ] = None

    def check(self) -> None:
        """Raise :class:`UserError` for an option that this kind of figure does not have."""
        if self.kind == "curves":
            return
        nothing = f"nothing with --kind {self.kind}"
        if self.log:
            raise bad_value("--log", ",".join(self.log), nothing, "only curves have such an axis")
        if self.smooth > 1 and self.kind != "path":
            raise bad_value("--smooth", str(self.smooth), nothing, "--of mean:K is the value of a run")


@command(app, "plot --metric train/reward --group kl.label --out reward.svg")
def plot(wanted: PlotOptions) -> None:
    """Plot metrics over seeds with 95% intervals.

    curves: mean line and band over updates; more than eight lines are spread over panels. path: the mean line against
    the KL at the same updates. frontier: final metric against final KL, one line per KL family. plane: bias and
    variance of each family's certificate beside what its runs reached. heatmap: KL family x beta. Runs without KL stand
    in the panels of every family and beta. Axes and legends are in words, widths are a paper's column (3.4 in) or page
    (7 in); on logarithmic axes means are geometric and intervals are of the logarithms.
    """
    from kl_comedy.results.figures import check_suffix, save_figure

    # Both before runs are read and curves fetched, which takes seconds.
    check_suffix(wanted.out)
    wanted.check()
    if wanted.kind in ("curves", "path"):
        figure = _over_training(wanted)
    elif wanted.kind == "heatmap":
        figure = _heatmap(wanted)
    else:
        figure = _frontier(wanted)
    save_figure(figure, wanted.out)
    typer.echo(one_line(str(wanted.out)))


def _over_training(wanted: PlotOptions) -> Any:
    """Matplotlib's figure of metrics over updates, or against the KL at the same updates."""
    from kl_comedy.results import plots
    from kl_comedy.results.runs import history, short, sort_by_groups
    from kl_comedy.results.selection import without_second_name

    chosen = wanted.counted(wanted.run_query(wanted.metric, panels=split_unless_none(wanted.panels)))
    lines = chosen.groups
    if not wanted.group:
        lines = without_second_name(chosen.frame, lines)
    panels = chosen.panels
    if wanted.panels is None:
        # With --panels the user has decided, and every group becomes a line.
        lines, panels = plots.lines_and_panels(chosen.frame, lines)
        if panels:
            per_line = ", ".join(map(short, lines))
            per_panel = ", ".join(map(short, panels))
            message(
                f"note: too many lines for one panel: one line per {per_line}, one panel per {per_panel} "
                "(--panels chooses)"
            )
    names = [short(column) for column in chosen.metrics]
    logarithmic = split(wanted.log)
    for name in logarithmic:
        check_choice("--log", name, names)

    frame = sort_by_groups(chosen.frame, [*panels, *lines])
    points = {name: history(wanted.uri, frame["run_id"], name) for name in names}
    if wanted.kind == "path":
        kl = short(required_kl(frame, wanted.kl))
        kl_points = history(wanted.uri, frame["run_id"], kl)
        return plots.plot_paths(points, kl, kl_points, frame, lines, panels=panels, smooth=wanted.smooth)
    return plots.plot_curves(points, frame, lines, panels=panels, log=logarithmic, smooth=wanted.smooth)


def _heatmap(wanted: PlotOptions) -> Any:
    from kl_comedy.results import plots
    from kl_comedy.results.runs import short, sort_by_groups

    chosen = _families(wanted)
    # Family and beta are the two axes, so that a key in which runs differ besides needs a panel.
    panels = [*chosen.panels, *chosen.added]
    frame = sort_by_groups(chosen.frame, [*panels, *chosen.groups])
    return plots.heatmap(frame, [short(column) for column in chosen.metrics], panels)


def _frontier(wanted: PlotOptions) -> Any:
    """Final metric against final KL; with ``--kind plane`` the certificates beside it."""
    from kl_comedy.results import plots
    from kl_comedy.results.runs import short, sort_by_groups

    chosen = _families(wanted)
    frame = sort_by_groups(chosen.frame, [*chosen.panels, *chosen.groups])
    names = [short(column) for column in chosen.metrics]
    kl = required_kl(frame, wanted.kl)
    return plots.frontier(frame, chosen.groups, names, kl, chosen.panels, certificates=wanted.kind == "plane")


def _families(wanted: PlotOptions) -> Selection:
    query = wanted.run_query(wanted.metric, ["kl.family"], families=True, panels=split_unless_none(wanted.panels))
    return wanted.counted(query)


# --- export and sync ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class ExportOptions(Source):
    """Options of ``results export``."""

    format: Annotated[str | None, typer.Option(help="csv, json or parquet; default: by --out, else csv.")] = None
    without: Annotated[
        list[str] | None, typer.Option(help="Keys to leave out, comma-separated; * matches anything.")
    ] = None
    curves: Annotated[
        list[str] | None,
        typer.Option(help="Parquet: metrics whose curves are written, or none. Default: those that tables use."),
    ] = None
    points: Annotated[int, typer.Option(min=0, help="Parquet: thin curves to this many points; 0 thins none.")] = 200
    append: Annotated[bool, typer.Option("--append", help="Parquet: keep the other runs that --out has.")] = False
    out: Out = None

    @property
    def file_format(self) -> str:
        """The format asked for, else that of the file's name."""
        if self.format:
            return self.format
        if self.out:
            return self.out.suffix.lstrip(".").lower()
        return "csv"

    @property
    def curve_patterns(self) -> Sequence[str]:
        """The metrics whose curves are written."""
        from kl_comedy.results.export import CURVES

        if not self.curves:
            return CURVES
        return split_unless_none(self.curves)

    def check(self) -> None:
        """Raise :class:`UserError` for a format that is unknown, and for an option that it does not have."""
        from kl_comedy.results.runs import NEVER_THINNED

        option = "--format" if self.format else "--out"
        check_choice(option, self.file_format, EXPORT_FORMATS)
        if self.file_format != "parquet":
            if self.curves:
                nothing = f"nothing with {self.file_format}"
                raise bad_value("--curves", ",".join(self.curves), nothing, "only parquet has curves")
            if self.append:
                raise bad_value("--append", self.file_format, "an export to parquet")
        # The last points of a curve always stay, and a thinned curve needs some before them.
        if 0 < self.points < 2 * NEVER_THINNED:
            raise bad_value("--points", str(self.points), f"0, or {2 * NEVER_THINNED} or more")


@command(app, "export --without 'run.*,output,tracking.*' --out study/export.parquet")
def export(wanted: ExportOptions) -> None:
    """Every run with all its params, tags, final metrics and status, one row per run.

    A Parquet export, with its curves in FILE.curves.parquet beside it, takes the place of the store in `results table`,
    `compare`, `aggregate`, `plot`, `report`, `verify` and in `reproduce`: `--uri FILE.parquet`.
    """
    from kl_comedy.results.export import write_export
    from kl_comedy.results.runs import curves_file, drop_columns, open_runs
    from kl_comedy.results.selection import read_matching

    wanted.check()
    runs = read_matching(wanted.uri, wanted.experiment, wanted.where)
    frame = drop_columns(runs, split(wanted.without))
    message(f"{len(frame)} runs, {len(frame.columns)} columns")
    out = wanted.out
    # An export with curves is two files, whose names must match.
    if out is None or out.suffix != ".parquet" or wanted.file_format != "parquet":
        write_table(ResultTable(frame=frame), wanted.file_format, out)
        return

    # The store again, because curves are not among the columns of the runs.
    check_writable(curves_file(out), "--out")
    store = open_runs(wanted.uri)
    curves = write_export(store, frame, out, wanted.curve_patterns, wanted.points, append=wanted.append)
    written = f"{len(curves)} points of {curves['metric'].nunique()} metrics in {curves_file(out)}"
    if wanted.points:
        thinned = int((curves["recorded"] > wanted.points).sum())
        if thinned:
            written += f", {thinned} of them of thinned curves"
    message(written)
    typer.echo(one_line(str(out)))


@app.command(epilog="Example: `kl-comedy results sync runs/my-run --uri http://tracking:5000`")
def sync(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs.")],
    uri: Annotated[str | None, typer.Option(help="Where to; default: where the run was to be tracked.")] = None,
    experiment: Annotated[str | None, typer.Option(help="Experiment; default: the run's own.")] = None,
) -> None:
    """Upload the spool of runs that could not reach MLflow. Safe to repeat."""
    from kl_comedy.tracking import sync as upload
    from kl_comedy.tracking.spool import Spool, unreadable_lines
    from kl_comedy.tracking.store import first_line

    for folder in run_dirs:
        try:
            done = upload(folder, uri, experiment)
        except UserError:
            raise  # a mistake of the user stays one: exit code 2 and not 1
        except Exception as error:
            raise RunFailed(f"{folder}: the upload failed: {first_line(error)}") from error
        spool = Spool(folder)
        message(f"{folder}: {done.events} events uploaded to experiment {done.state.experiment!r}")
        unreadable = unreadable_lines(spool.read())
        if unreadable:
            message(f"{folder}: {unreadable} unreadable lines of the spool were left out")
        if not spool.ended():
            message(f"{folder}: the record does not say how the run ended: it is still running, or was killed")
        for file in done.left_out:
            message(f"{folder}: {file} and was not uploaded")
        typer.echo(done.state.run_id)


# --- compare and aggregate ------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class CompareOptions(Query):
    """Options of ``results compare``."""

    metric: Annotated[str, typer.Option(help="The metric to compare.")]
    at_kl: Annotated[
        str | None, typer.Option(help="Match at these KLs (nats), comma-separated; default: at equal beta.")
    ] = None
    baseline: Baseline = None
    margin: Margin = None
    from_start: Annotated[
        bool, typer.Option("--from-start", help="With --at-kl: each frontier begins at 0 nats with the first reward.")
    ] = False
    kl: Kl = None
    interval: Interval = "t"
    format: Format = "text"
    out: Out = None

    @property
    def matched_kls(self) -> list[float]:
        """The KLs (nats) after ``--at-kl``. Raises :class:`UserError`."""
        text = self.at_kl or ""
        try:
            nats = [float(word) for word in split([text])]
        except ValueError:
            nats = []
        possible = all(0 <= value < math.inf for value in nats)
        if not nats or not possible:
            raise bad_value("--at-kl", text, "numbers of nats, as 0.5,1,2")
        return nats


@command(app, "compare --metric eval/heldout/reward --at-kl 0.5,1,2 --baseline 'no KL' --group optimizer.lr")
def compare(wanted: CompareOptions) -> None:
    """KL families at equal beta, or at equal exact KL (interpolated between runs, never beyond them).

    outside: seeds whose runs do not reach that KL; gap: seeds with only a collapsed run on one side of it. p_holm and q
    are p adjusted for all contrasts of the table (Holm; false discovery rate by Benjamini and Hochberg). power: the
    probability of resolving a difference of the margin as one of these contrasts. verdict: above or below (p_holm), the
    same (within the margin, with a power of 0.8 or more), else not resolved.
    """
    write_table(make_comparison(wanted), wanted.format, wanted.out, wanted.uri)


def make_comparison(wanted: CompareOptions) -> ResultTable:
    """The table of ``results compare``."""
    from kl_comedy.results.compare import EqualKL, compare_families
    from kl_comedy.results.values import with_values

    at_equal_kl = wanted.at_kl is not None
    # A collapsed run is no point of a frontier, so that at equal KL the rule decides.
    query = wanted.run_query([wanted.metric], [], families=True, needs_collapsed=at_equal_kl)
    chosen, column = _one_metric(wanted, query)
    frame = chosen.frame
    at_kl = None
    if at_equal_kl:
        nats = wanted.matched_kls
        at_kl = EqualKL(column=required_kl(frame, wanted.kl), nats=nats)
        if wanted.from_start:
            # compare_families takes the first reward from a column of the frame.
            frame = frame.assign(start=with_values(wanted.uri, frame, [column], "first")[column])
            at_kl = replace(at_kl, start="start")
    comparison = compare_families(
        frame,
        chosen.groups,
        column,
        wanted.baseline,
        wanted.interval,
        at_kl=at_kl,
        margin=margin_of(column, wanted.margin),
    )
    return ResultTable(frame=comparison, notes=chosen.notes)


def margin_of(column: str, margin: float | None) -> float | None:
    """The margin asked for, else that of rewards; None where the metric is none, whose unit a user has to know."""
    if margin is None and column.rpartition("/")[2] in ("reward", "accuracy"):
        return MARGIN
    return margin


# --- power ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class PowerOptions(Query):
    """Options of ``results power``."""

    metric: Annotated[str | None, typer.Option(help="The metric to compare; without --sd.")] = None
    baseline: Baseline = None
    margin: Margin = None
    sd: Annotated[float | None, typer.Option(help="Standard deviation of paired differences; no runs are read.")] = None
    seeds: Annotated[int | None, typer.Option(min=2, help="With --sd: the power of this many pairs.")] = None
    tests: Annotated[int | None, typer.Option(min=1, help="Contrasts to adjust for; default: those of the table.")] = (
        None
    )
    power: Annotated[float, typer.Option(help="The power that `seeds_needed` has.")] = POWER
    format: Format = "text"
    out: Out = None

    def check(self) -> None:
        """Raise :class:`UserError` for numbers without a meaning, and for options that do not go together."""
        if not 0 < self.power < 1:
            raise bad_value("--power", self.power, "a probability between 0 and 1")
        if self.margin == 0:
            raise bad_value(
                "--margin", self.margin, "a number above 0", "no number of seeds resolves a difference of 0"
            )
        if self.sd is None:
            if self.metric is None or self.baseline is None:
                raise UserError("--sd: name a standard deviation, or runs by --metric and --baseline")
            if self.seeds is not None:
                raise bad_value("--seeds", self.seeds, "nothing without --sd", "stored runs have their seeds")
            return
        if not 0 < self.sd < math.inf:
            raise bad_value("--sd", self.sd, "a number above 0")
        if self.metric is not None or self.baseline is not None:
            raise bad_value("--sd", self.sd, "nothing with --metric or --baseline", "stored runs have a deviation")
        for field in dataclasses.fields(Query):
            # Not --uri, which may come from the environment.
            if field.name != "uri" and getattr(self, field.name) != field.default:
                name = f"--{field.name.replace('_', '-')}"
                raise bad_value(
                    "--sd", self.sd, f"nothing with {name}", "a plan reads no runs, so that selects nothing"
                )


@command(app, "power --metric eval/heldout/reward --baseline 'no KL' --group optimizer.lr")
def power(wanted: PowerOptions) -> None:
    """How many seeds a difference of the margin needs, and with which power it was looked for.

    From stored runs: each contrast of `results compare` at equal beta, by the deviation of its differences, which are
    paired by seed and warm start. From --sd: a plan, before any run. The test is Student's, two-sided, at 0.05 over the
    number of contrasts (the first step of Holm).
    """
    wanted.check()
    write_table(make_power(wanted), wanted.format, wanted.out, wanted.uri)


def make_power(wanted: PowerOptions) -> ResultTable:
    """The table of ``results power``."""
    import pandas as pd

    if wanted.sd is not None:
        row: dict[str, Any] = {"sd": wanted.sd}
        if wanted.seeds is not None:
            row["pairs"] = wanted.seeds
        rows = [row | _power_of(wanted, wanted.sd, wanted.seeds, wanted.margin or MARGIN, wanted.tests or 1)]
        return ResultTable(frame=pd.DataFrame(rows))

    from kl_comedy.results.compare import compare_families

    chosen, column = _one_metric(wanted, wanted.run_query([wanted.metric or ""], [], families=True))
    margin = margin_of(column, wanted.margin)
    if margin is None:
        raise UserError(f"--margin: name one; only rewards have a default, and {wanted.metric!r} is none")
    table = compare_families(chosen.frame, chosen.groups, column, wanted.baseline, "t", margin=margin)
    # The baseline's own row, and sides with fewer than two common seeds, have no deviation.
    contrasts = table[table["sd"].notna()]
    if contrasts.empty:
        raise RunFailed(f"no two runs of one seed to pair with those of {wanted.baseline!r}; --sd plans without runs")
    tests = wanted.tests or max(int(table["p"].notna().sum()), 1)
    names = [*table.columns[: list(table.columns).index("at") + 1], "minus_baseline", "sd", "pairs"]
    rows = []
    for contrast in contrasts.to_dict("records"):
        shown = {name: contrast[name] for name in names}
        rows.append(shown | _power_of(wanted, contrast["sd"], int(contrast["pairs"]), margin, tests))
    return ResultTable(frame=pd.DataFrame(rows), notes=chosen.notes)


def _power_of(wanted: PowerOptions, sd: float, pairs: int | None, margin: float, tests: int) -> dict[str, Any]:
    """The columns of one contrast: the power of its pairs, if it has any, and the pairs that it needs."""
    from kl_comedy import statistics

    level = (1 - statistics.LEVEL) / tests
    columns: dict[str, Any] = {"margin": margin, "tests": tests}
    if pairs is not None:
        columns["power"] = statistics.power(margin, sd, pairs, level)
    needed = statistics.pairs_needed(margin, sd, level=level, wanted=wanted.power)
    columns["seeds_needed"] = needed if needed is not None else f"over {statistics.MOST_PAIRS}"
    return columns


def _one_metric(wanted: Query, query: RunQuery) -> tuple[Selection, str]:
    """The runs that count, and the column of the one metric they are compared by."""
    chosen = wanted.counted(query)
    if len(chosen.metrics) != 1:
        named = ", ".join(query.metrics or ())
        raise UserError(f"--metric: got {named!r}, which is {len(chosen.metrics)} metrics; name one")
    return chosen, chosen.metrics[0]


@dataclass(frozen=True, kw_only=True)
class AggregateOptions(Query):
    """Options of ``results aggregate``."""

    metric: Annotated[list[str], typer.Option(help="A metric for each task, comma-separated; * matches anything.")]
    baseline: Baseline = None
    format: Format = "text"
    out: Out = None


@command(app, "aggregate --metric 'eval/*/reward' --group kl.label --baseline 'no KL'")
def aggregate(wanted: AggregateOptions) -> None:
    """Several tasks as one number: interquartile mean (stratified bootstrap), probability of improvement."""
    write_table(make_aggregate(wanted), wanted.format, wanted.out, wanted.uri)


def make_aggregate(wanted: AggregateOptions) -> ResultTable:
    """The table of ``results aggregate``."""
    from kl_comedy.results.compare import aggregate as over_tasks

    chosen = wanted.counted(wanted.run_query(wanted.metric, ["kl.label"]))
    scores = over_tasks(chosen.frame, chosen.groups, chosen.metrics, wanted.baseline)
    if scores.empty:
        raise RunFailed(f"no run with status {wanted.status} has a value of {', '.join(wanted.metric)}")
    return ResultTable(frame=scores, notes=chosen.notes)


# --- report ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class ReportOptions(Query):
    """Options of ``results report``."""

    out: Annotated[Path, output_option("File to write: .html.")]
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Study"
    parts: Annotated[
        list[str] | None, typer.Option(help="A section with table and pictures for each value of these keys.")
    ] = None
    metric: Metrics = None
    kl: Kl = None
    interval: Interval = "t"


@command(app, "report --experiment study --parts sweep,optimizer.lr --group kl.label --out study.html")
def report(wanted: ReportOptions) -> None:
    """One self-contained HTML page: results, curves, certificates, completions, provenance, commands. No network."""
    if wanted.out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out: got {str(wanted.out)!r}; allowed: a file that ends in .html")
    write_report(wanted)
    typer.echo(one_line(str(wanted.out)))


def write_report(wanted: ReportOptions) -> None:
    """Write the page of ``results report`` to ``wanted.out``. Notes are printed to stderr."""
    from kl_comedy.results.compare import summarize
    from kl_comedy.results.report import Study
    from kl_comedy.results.selection import OptionNames
    from kl_comedy.results.values import stale_notes

    query = wanted.run_query(
        wanted.metric,
        mark_dead=True,
        panels=split_unless_none(wanted.parts),
        options=OptionNames(panels="--parts"),
    )
    chosen = select(query)
    kl = kl_column(chosen.frame, wanted.kl)
    notes = list(chosen.notes)
    # Of the metrics in the table the selection has notes already.
    if kl is not None and kl not in chosen.metrics:
        notes += stale_notes(chosen.frame, [kl])
    warnings = [note for note in notes if note.startswith("warning")]
    rules = [f"Means over seeds with 95% intervals ({wanted.interval}) of runs with status {wanted.status}."]
    rules += [note.removeprefix("note: ") for note in notes if note not in warnings]

    groups = list(dict.fromkeys([*chosen.panels, *chosen.groups]))
    summary = summarize(chosen.frame, groups, chosen.metrics, wanted.interval, wanted.statuses)
    page = Study(wanted.uri, chosen.frame, summary, groups, chosen.metrics).page(
        kl=kl, parts=chosen.panels, title=wanted.title, command=command_line(), rules=rules, warnings=warnings
    )
    atomic_write(wanted.out, page)


# --- link -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class LinkOptions(Source):
    """Options of ``results link``."""

    columns: Annotated[
        list[str] | None,
        typer.Option(help="Config keys or tags, comma-separated; default: KL, seed, and what the runs differ in."),
    ] = None
    metric: Metrics = None
    server: Annotated[
        str | None, typer.Option(help="Address of MLflow's pages; default: the server of --uri, else a local one.")
    ] = None

    @property
    def pages(self) -> str:
        """The address of MLflow's pages."""
        from kl_comedy.results.mlflow_pages import LOCAL_PAGES

        if self.server is not None:
            return self.server
        if self.uri.startswith("http"):
            return self.uri
        return LOCAL_PAGES

    def check(self) -> None:
        """Raise :class:`UserError` for a source that MLflow has no pages of, and for an address that is no server's."""
        from kl_comedy.results.runs import EXPORTS

        # The links are sent on: what they begin with must be an address, without a password.
        if self.server is not None:
            check_address(self.server, "--server")
        if Path(self.uri).suffix in EXPORTS and "://" not in self.uri:
            raise UserError(f"--uri: got {self.uri!r}; an export has no pages, name an MLflow store or server")


@command(app, "link --experiment study --columns kl.label,optimizer.lr --metric train/reward,eval/heldout/reward")
def link(wanted: LinkOptions) -> None:
    """Links into MLflow's pages with columns and charts chosen: the list of runs, and their charts.

    The choice is stored in the experiment (as the button Share of the page stores one), so the links can be sent on.
    """
    from kl_comedy.results.mlflow_pages import LOCAL_PAGES, choose_view, serve_command, share
    from kl_comedy.results.runs import DERIVED, short, translate
    from kl_comedy.results.selection import read_matching

    wanted.check()
    frame = read_matching(wanted.uri, wanted.experiment, wanted.where)
    experiments = sorted(set(frame["experiment"]))
    # A page shows one experiment.
    if len(experiments) > 1:
        raise UserError(f"--experiment: these runs are of {len(experiments)}: {', '.join(experiments)}; name one")
    page_filter, keys = translate(wanted.where or "", frame.columns)
    for key in keys:
        if key in DERIVED:
            source = short(DERIVED[key])
            raise UserError(f"--where: MLflow's pages do not have {short(key)}; filter by {source}")
    view = choose_view(frame, split(wanted.columns), split(wanted.metric), page_filter)
    for address in share(wanted.uri, experiments[0], view, wanted.pages):
        typer.echo(address)
    if wanted.pages == LOCAL_PAGES:
        message(f"the pages are served by: {serve_command(wanted.uri)}")


# --- verify ---------------------------------------------------------------------------------------------------------
@app.command(epilog="Example: `kl-comedy results verify results`")
def verify(
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", help="A table that names its runs, a Markdown page, or a folder of them.")
    ],
    uri: Uri = DEFAULT_URI,
    format: Annotated[str, choice_option("--format", *TEXT_FORMATS)] = "text",
) -> None:
    """Which rows of a table the store or export still confirms: same, changed (and where), missing or unchecked.

    For a Markdown page, or all pages of a folder and the README.md beside it: each table below a comment with its
    command is made again from the export that the comment names (else export.parquet beside the page) and compared
    cell by cell; no store is needed. A page may name a script of its repository instead, which is then run. Exits 1
    where a row or a cell differs, and where a row of TABLE is not confirmed.
    """
    if table.is_dir() or table.suffix == ".md":
        _verify_pages(table, format)
    else:
        _verify_rows(table, uri, format)


def _verify_pages(pages: Path, format: str) -> None:
    """Compare the tables of Markdown pages with what their commands print now."""
    from kl_comedy.results.pages import summary, verify_pages

    # Some tables take minutes: their scripts compute everything again.
    with stages(stderr_console(), transient=True) as show:
        verdicts = verify_pages(pages, recompute, progress=partial(show, "verifying tables"))
    # Data has every table; a reader gets what needs attention.
    shown = verdicts
    if format not in ("csv", "json"):
        shown = [row for row in verdicts if row["verdict"] not in ("same", "no command")]
    if shown:
        print_rows(shown, format)
    for line in summary(verdicts):
        message(line)
    differing = [row for row in verdicts if row["verdict"] in ("changed", "failed")]
    if differing:
        raise RunFailed(f"{len(differing)} tables of {pages} differ from their exports")


def _verify_rows(table: Path, uri: str, format: str) -> None:
    """Compare the rows of a data table with the runs that they name."""
    from kl_comedy.results import verify as checks
    from kl_comedy.results.selection import read_matching

    existing_file(table, "TABLE")  # before the store is read, which takes seconds
    runs = read_matching(uri)
    verdicts = checks.verify(uri, runs, table)
    unconfirmed = [row for row in verdicts if row["verdict"] != "same"]
    shown = verdicts if format in ("csv", "json") else unconfirmed
    if shown:
        print_rows(shown, format)

    # Said even where nothing is wrong: a row without cells is confirmed by nothing.
    cells = sum(row["checked"] for row in verdicts)
    message(f"{len(verdicts) - len(unconfirmed)} of {len(verdicts)} rows are the same ({cells} cells)")
    for plugins, count in checks.plugins_of(runs, table).items():
        message(f"{count} runs used plugins: {plugins} (their source: artifact folder plugins)")
    unchecked: dict[str, None] = {}
    for row in verdicts:
        unchecked |= dict.fromkeys(row["unchecked"].split(", "))
    unchecked.pop("", None)
    if unchecked:
        message(f"not checked, as the store has no such column: {', '.join(unchecked)}")
    if unconfirmed:
        raise RunFailed(f"{len(unconfirmed)} rows of {table} no longer reproduce from {uri}")


TABLE_COMMANDS: dict[str, tuple[type[Any], Callable[[Any], ResultTable]]] = {
    "table": (TableOptions, make_table),
    "compare": (CompareOptions, make_comparison),
    "power": (PowerOptions, make_power),
    "aggregate": (AggregateOptions, make_aggregate),
}
"""The commands that a Markdown page may name: their options, and what makes their table."""


def recompute(words: Sequence[str], export: Path) -> str:
    """The Markdown table that ``kl-comedy results *words`` prints for ``export``. Raises what the command raises."""
    from kl_comedy.results.tables import render

    # The words are a command line, which the options' own parser reads: a table is made as its command makes it.
    record, make = TABLE_COMMANDS[words[0]]
    wanted = parse_options(record, [*words[1:], "--uri", str(export), "--format", "markdown"])
    # The notes are part of the table; as messages they would be printed once for every table of a page.
    with contextlib.redirect_stderr(io.StringIO()):
        made = make(wanted)
    return render(made.frame, "markdown", made.notes)
