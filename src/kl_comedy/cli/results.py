"""``kl-comedy results``: tables, comparisons, plots, reports and exports of tracked runs; upload; verification.

Data goes to stdout, notes to stderr. Exits 0 when done, 1 when there is nothing to show or the store fails, 2 on
misuse (unknown key, metric, experiment, format, or no store at that address).
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kl_comedy.cli.common import check_choice
from kl_comedy.cli.results_query import (
    DEFAULT_URI,
    Baseline,
    Format,
    Interval,
    Kl,
    Metrics,
    Out,
    Query,
    Source,
    Uri,
    check_format,
    expand,
    kl_column,
    panel_columns,
    say,
    split,
    statuses_of,
    write,
)
from kl_comedy.errors import RunFailed, UserError, bad_value

app = typer.Typer(help="Tables, plots, reports and exports of tracked runs; comparisons; checks.", no_args_is_help=True)

EXPORT_FORMATS = ("csv", "json", "parquet")
KINDS = ("curves", "frontier", "plane", "heatmap")


def command(example: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return lambda function: app.command(epilog=f"Example: `kl-comedy results {example}`")(expand(function))


@command("table --group kl.label,lag.steps --metric 'eval/*/reward' --format markdown")
def table(
    query: Query,
    metric: Metrics = None,
    interval: Interval = "t",
    run_ids: Annotated[
        bool, typer.Option("--run-ids", help="Name the runs of each mean, for `results verify`.")
    ] = False,
    format: Format = "text",
    out: Out = None,
) -> None:
    """Mean and 95% interval over seeds of the final value of metrics, grouped by config keys."""
    from kl_comedy.statistics import METHODS
    from kl_comedy.tracking.compare import summarize
    from kl_comedy.tracking.runs import short
    from kl_comedy.tracking.tables import MACHINE_FORMATS, readable

    check_format(format, out)
    check_choice("--interval", interval, METHODS)
    machine = (*MACHINE_FORMATS, "parquet")
    if run_ids and format not in machine:
        raise UserError(f"--run-ids: is for {', '.join(machine)}; got --format {format}")
    chosen = query.select(metric, mark_dead=True)
    statuses = statuses_of(query.status)
    summary = summarize(chosen.frame, chosen.groups, chosen.metrics, interval, statuses, run_ids=run_ids)
    if not summary["n"].any():
        counts = ", ".join(f"{number} {name}" for name, number in chosen.frame["status"].value_counts().items())
        say(f"no run with status {query.status} has a value yet ({counts}); --status all counts every run")
    if format not in machine:
        write(readable(summary, chosen.groups), format, out)
        return
    summary = summary.assign(of=query.of, interval=interval) if run_ids else summary
    names = [short(str(column)) for column in summary.columns]
    if len(set(names)) == len(names):
        summary = summary.set_axis(names, axis=1)
    write(summary.assign(metric=summary["metric"].str.removeprefix("metrics.")), format, out)


@command("plot --metric train/reward --group kl.label --out reward.png")
def plot(
    query: Query,
    metric: Annotated[list[str], typer.Option(help="Metrics, comma-separated; a row of panels each; * matches any.")],
    out: Annotated[Path, typer.Option(help="File to write: .png, .svg or .pdf.")],
    kind: Annotated[str, typer.Option(help=f"{', '.join(KINDS)}.")] = "curves",
    kl: Kl = None,
    log: Annotated[list[str] | None, typer.Option(help="Of curves: metrics on a logarithmic axis.")] = None,
    smooth: Annotated[int, typer.Option(min=1, help="Of curves: the mean of a run's last so many points.")] = 1,
    panels: Annotated[
        list[str] | None,
        typer.Option(help="A panel for each value of these keys; none: no panels. Default: by kind."),
    ] = None,
) -> None:
    """Pictures of metrics over seeds with 95% intervals.

    curves: mean line and band over updates; more than eight lines are spread over panels. frontier: final metric
    against final KL, a line a KL family. plane: bias and variance of each family's certificate beside what its runs
    reached. heatmap: estimator x placement, a panel a beta. Runs without KL stand in the panels of every family and
    beta.
    """
    from kl_comedy.tracking import plots
    from kl_comedy.tracking.runs import BETA, history, short, sort_by_groups

    plots.check_suffix(out)
    check_choice("--kind", kind, KINDS)
    if log and kind != "curves":
        raise bad_value("--log", ",".join(log), f"nothing with --kind {kind}", "only curves have such an axis")
    if smooth > 1 and kind != "curves":
        raise bad_value("--smooth", str(smooth), f"nothing with --kind {kind}", "--of mean:K is the value of a run")
    curves = kind == "curves"
    chosen = query.select(metric, None if curves else ["kl.family"], families=not curves, panels=panels)
    frame = chosen.with_status(query.status)
    if frame.empty:
        raise RunFailed(f"no run with status {query.status}; --status all draws every run")
    names = [column.removeprefix("metrics.") for column in chosen.metrics]
    lines, parts = chosen.groups, panel_columns(frame, panels)
    if panels is None and curves:
        lines, parts = plots.lines_and_panels(frame, lines)
        if parts:
            words = (", ".join(map(short, keys)) for keys in (lines, parts))
            say("note: too many lines for one panel: a line a {}, a panel a {} (--panels chooses)".format(*words))
    elif panels is None and kind == "heatmap":
        parts = [BETA]
    frame = sort_by_groups(frame, [*parts, *lines])
    if curves:
        logarithmic = split(log or [])
        for name in logarithmic:
            check_choice("--log", name, tuple(names))
        points = {name: history(query.uri, frame["run_id"], name) for name in names}
        figure = plots.plot_curves(points, frame, lines, panels=parts, log=logarithmic, smooth=smooth)
    else:
        figure = plots.plot_families(kind, frame, lines, names, kl_column(frame, kl), parts)
    typer.echo(str(plots.save(figure, out)))


@command("export --without 'run.*,output,tracking.*' --out runs.parquet")
def export(
    source: Source,
    format: Annotated[str | None, typer.Option(help="csv, json or parquet; default: by --out, else csv.")] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="Keys to leave out, comma-separated; * matches anything.")
    ] = None,
    out: Out = None,
) -> None:
    """Every run with all its params, tags, final metrics and status, one row a run."""
    from kl_comedy.tracking import runs

    chosen = format or (out.suffix.lstrip(".").lower() if out else "csv")
    check_choice("--format" if format else "--out", chosen, EXPORT_FORMATS)
    check_format(chosen, out, EXPORT_FORMATS)
    frame = runs.drop_columns(source.runs(), split(without or []))
    say(f"{len(frame)} runs, {len(frame.columns)} columns")
    write(frame, chosen, out)


@command("sync runs/my-run --uri http://tracking:5000")
def sync(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs.")],
    uri: Annotated[str | None, typer.Option(help="Where to; default: where the run was to be tracked.")] = None,
    experiment: Annotated[str | None, typer.Option(help="Experiment; default: the run's own.")] = None,
) -> None:
    """Upload the spool of runs that could not reach MLflow. Doing it twice changes nothing."""
    from kl_comedy.tracking import sync as upload
    from kl_comedy.tracking.store import first_line

    for folder in run_dirs:
        try:
            done = upload(folder, uri, experiment)
        except UserError:
            raise
        except Exception as error:
            raise RunFailed(f"{folder}: the upload failed: {first_line(error)}") from error
        say(f"{folder}: {done.events} events uploaded to experiment {done.state.experiment!r}")
        if done.unreadable:
            say(f"{folder}: {done.unreadable} unreadable lines of the spool were left out")
        for path in done.missing:
            say(f"{folder}: {path} is gone and was not uploaded")
        typer.echo(done.state.run_id)


@command("compare --metric eval/heldout/reward --at-kl 0.5,1,2 --baseline 'no KL' --group optimizer.lr")
def compare(
    query: Query,
    metric: Annotated[str, typer.Option(help="The metric to compare.")],
    at_kl: Annotated[
        str | None, typer.Option(help="Match at these KLs (nats), comma-separated; default: at equal beta.")
    ] = None,
    baseline: Baseline = None,
    kl: Kl = None,
    interval: Interval = "t",
    format: Format = "text",
    out: Out = None,
) -> None:
    """KL families at equal beta, or at equal exact KL (interpolated between runs, never beyond them).

    outside: seeds whose runs do not reach that KL; gap: seeds with only a collapsed run on one side of it.
    """
    from kl_comedy.statistics import METHODS, generator
    from kl_comedy.tracking.compare import compare_families

    check_choice("--interval", interval, METHODS)
    check_format(format, out)
    chosen = query.select([metric], [], families=True)
    if len(chosen.metrics) != 1:
        raise UserError(f"--metric: got {metric!r}, which is {len(chosen.metrics)} metrics; name one")
    at, column, frame = None, "", chosen.with_status(query.status)
    if at_kl is not None:
        try:
            at = [float(word) for word in split([at_kl])]
        except ValueError:
            at = []
        if not at or not all(math.isfinite(nats) and nats >= 0 for nats in at):
            raise bad_value("--at-kl", at_kl, "numbers of nats, as 0.5,1,2")
        column = kl_column(frame, kl)
    groups, name = chosen.groups, chosen.metrics[0]
    write(compare_families(frame, groups, name, baseline, interval, generator(), kl=column, at_kl=at), format, out)


@command("aggregate --metric 'eval/*/reward' --group kl.label --baseline 'no KL'")
def aggregate(
    query: Query,
    metric: Annotated[list[str], typer.Option(help="A metric for each task, comma-separated; * matches anything.")],
    baseline: Baseline = None,
    format: Format = "text",
    out: Out = None,
) -> None:
    """Several tasks as one number: interquartile mean (stratified bootstrap), probability of improvement."""
    from kl_comedy.statistics import generator
    from kl_comedy.tracking.compare import aggregate as over_tasks

    check_format(format, out)
    chosen = query.select(metric, ["kl.label"])
    scores = over_tasks(chosen.with_status(query.status), chosen.groups, chosen.metrics, baseline, generator())
    if scores.empty:
        raise RunFailed(f"no run with status {query.status} has a value of {', '.join(metric)}")
    write(scores, format, out)


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
    from kl_comedy.io import atomic_write
    from kl_comedy.statistics import METHODS
    from kl_comedy.tracking.compare import summarize
    from kl_comedy.tracking.report import build_page

    check_choice("--interval", interval, METHODS)
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out: got {str(out)!r}; allowed: a file that ends in .html")
    chosen = query.select(metric, mark_dead=True, panels=parts, panels_option="--parts")
    frame, metrics, notes = chosen.frame, chosen.metrics, chosen.notes
    sections = panel_columns(frame, parts, "--parts")
    groups = list(dict.fromkeys([*sections, *chosen.groups]))
    try:
        column = kl_column(frame, kl)
    except UserError:  # no KL was measured, so there is no frontier to draw; but one that was asked for must exist
        if kl is not None:
            raise
        column = None
    page = build_page(
        query.uri,
        frame,
        summarize(frame, groups, metrics, interval, statuses_of(query.status)),
        groups,
        metrics,
        title=title,
        command=shlex.join(["kl-comedy", *sys.argv[1:]]),
        rules=[
            f"Means over seeds with 95% intervals ({interval}) of runs with status {query.status}.",
            *(note.removeprefix("note: ") for note in notes if not note.startswith("warning")),
        ],
        warnings=[note for note in notes if note.startswith("warning")],
        kl=column,
        parts=sections,
    )
    atomic_write(out, page)
    typer.echo(str(out))


@command("verify results/runs.csv --uri sqlite:///mlflow.db")
def verify(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A CSV, JSON or Parquet table that names its runs.")],
    uri: Uri = DEFAULT_URI,
    format: Annotated[str, typer.Option(help="text, markdown, csv, json or latex.")] = "text",
) -> None:
    """Which rows of a table the store still confirms: same, changed (and where), missing or unchecked.

    Exits 1 unless every row is the same.
    """
    import pandas as pd

    from kl_comedy.tracking.tables import FORMATS, render
    from kl_comedy.tracking.verify import read_table
    from kl_comedy.tracking.verify import verify as check_rows

    check_choice("--format", format, FORMATS)
    rows = read_table(table)
    verdicts = check_rows(uri, Source(uri=uri).runs(), rows)
    bad = [row for row in verdicts if row.verdict != "same"]
    shown = verdicts if format in ("csv", "json") else bad
    if shown:
        lines = [asdict(row) | {"unchecked": ", ".join(row.unchecked)} for row in shown]
        typer.echo(render(pd.DataFrame(lines), format))
    cells = sum(row.checked for row in verdicts)
    say(f"{len(verdicts) - len(bad)} of {len(verdicts)} rows are the same ({cells} cells)")
    unchecked = dict.fromkeys(name for row in verdicts for name in row.unchecked)
    if unchecked:
        say(f"not checked, as the store has no such column: {', '.join(unchecked)}")
    if bad:
        raise RunFailed(f"{len(bad)} rows of {table} no longer reproduce from {uri}")


def mount(parent: typer.Typer) -> None:
    """Add the group of commands to the application."""
    parent.add_typer(app, name="results")
