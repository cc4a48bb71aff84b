"""``kl-comedy results``: tables, plots and exports from the MLflow store; upload of spooled runs.

Data goes to stdout, talk to stderr. Exits 0 when done, 1 when there is nothing to show or the store fails, 2 on
misuse (unknown key, metric, experiment, format, or no store at that address).

``kl-comedy results compare`` and ``aggregate``: configurations against each other.

``kl-comedy results report``: a study as one HTML page.

``kl-comedy results verify``: a table against the store.
"""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kl_comedy.cli.results_query import (
    DEFAULT_URI,
    Collapse,
    Experiment,
    Group,
    Kl,
    Of,
    Repeats,
    SplitVersions,
    Status,
    Uri,
    Where,
    check,
    kl_column,
    lines_and_panels,
    panel_columns,
    runs,
    say,
    select,
    short_names,
    split,
    statuses_of,
    write,
)
from kl_comedy.errors import RunFailed, UserError, bad_value

app = typer.Typer(help="Tables, plots, reports and exports of tracked runs; comparisons; checks.", no_args_is_help=True)

EXPORT_FORMATS = ("csv", "json", "parquet")
KINDS = ("curves", "frontier", "plane", "heatmap")


@app.command(
    epilog="Example: kl-comedy results table --group kl.label,lag.steps --metric 'eval/*/reward' --format markdown"
)
def table(
    uri: Uri = DEFAULT_URI,
    experiment: Experiment = None,
    where: Where = None,
    group: Group = None,
    metric: Annotated[list[str] | None, typer.Option(help="Metrics, comma-separated; * matches anything.")] = None,
    status: Status = "finished",
    interval: Annotated[str, typer.Option(help="95% interval: t (Student) or bootstrap.")] = "t",
    keep_repeats: Repeats = False,
    of: Of = "last",
    collapse: Collapse = None,
    split_versions: SplitVersions = False,
    run_ids: Annotated[
        bool, typer.Option("--run-ids", help="Name the runs of each mean, for `results verify`.")
    ] = False,
    format: Annotated[str, typer.Option(help="text, markdown, csv, json, latex, or parquet with --out.")] = "text",
    out: Annotated[Path | None, typer.Option(help="File to write; default: stdout.")] = None,
) -> None:
    """Mean and 95% interval over seeds of the final value of metrics, grouped by config keys."""
    from kl_comedy.statistics import METHODS, generator
    from kl_comedy.tracking.compare import summarize
    from kl_comedy.tracking.tables import FORMATS, MACHINE_FORMATS, readable

    check("--format", format, (*FORMATS, "parquet"))
    check("--interval", interval, METHODS)
    if format == "parquet" and out is None:
        raise UserError("--out: parquet is binary; name a file")
    frame, groups, metrics = select(
        uri,
        experiment,
        where,
        group,
        metric,
        status=status,
        keep_repeats=keep_repeats,
        mark_dead=True,
        of=of,
        collapse=collapse,
        split_versions=split_versions,
    )
    if run_ids and format not in (machine := (*MACHINE_FORMATS, "parquet")):
        raise UserError(f"--run-ids: is for {', '.join(machine)}; got --format {format}")
    summary = summarize(frame, groups, metrics, interval, statuses_of(status), generator(), run_ids=run_ids)
    summary = summary.assign(of=of, interval=interval) if run_ids else summary
    if not summary["n"].any():
        counts = ", ".join(f"{number} {name}" for name, number in frame["status"].value_counts().items())
        say(f"no run with status {status} has a value yet ({counts}); --status all counts every run")
    write(short_names(summary) if format in (*MACHINE_FORMATS, "parquet") else readable(summary, groups), format, out)


@app.command(epilog="Example: kl-comedy results plot --metric train/reward --group kl.label --out reward.png")
def plot(
    metric: Annotated[list[str], typer.Option(help="Metrics, comma-separated; one panel each; * matches anything.")],
    out: Annotated[Path, typer.Option(help="File to write: .png, .svg or .pdf.")],
    kind: Annotated[str, typer.Option(help=f"{', '.join(KINDS)}.")] = "curves",
    uri: Uri = DEFAULT_URI,
    experiment: Experiment = None,
    where: Where = None,
    group: Group = None,
    status: Status = "finished",
    keep_repeats: Repeats = False,
    of: Of = "last",
    collapse: Collapse = None,
    split_versions: SplitVersions = False,
    kl: Kl = None,
    log: Annotated[list[str] | None, typer.Option(help="Of curves: metrics on a logarithmic axis.")] = None,
    smooth: Annotated[int, typer.Option(min=1, help="Of curves: the mean of a run's last so many points.")] = 1,
    panels: Annotated[
        list[str] | None,
        typer.Option(help="A panel a value of these keys; none: no panels. Default: by kind."),
    ] = None,
) -> None:
    """Pictures of metrics over seeds with 95% intervals.

    curves: mean line and band over updates; more than eight lines are parted into panels. frontier: final metric
    against final KL, a line a KL family. plane: bias and variance of each family's certificate beside what its runs
    reached. heatmap: estimator x placement, a panel a beta. Runs without KL stand in the panels of every family and
    beta.
    """
    from kl_comedy.tracking import plots as pictures
    from kl_comedy.tracking.plots import check_suffix
    from kl_comedy.tracking.plots import plot as draw_curves
    from kl_comedy.tracking.runs import sort_by_groups

    check_suffix(out)
    check("--kind", kind, KINDS)
    if log and kind != "curves":
        raise bad_value("--log", ",".join(log), f"nothing with --kind {kind}", "only curves have such an axis")
    if smooth > 1 and kind != "curves":
        raise bad_value("--smooth", str(smooth), f"nothing with --kind {kind}", "--of mean:K is the value of a run")
    keys = group or (None if kind == "curves" else ["kl.family"])
    frame, groups, metrics = select(
        uri,
        experiment,
        where,
        keys,
        metric,
        status=status,
        keep_repeats=keep_repeats,
        of=of,
        collapse=collapse,
        split_versions=split_versions,
        families=kind != "curves",
        panels=panels,
    )
    frame = frame[frame["status"].isin(statuses_of(status))]
    if frame.empty:
        raise RunFailed(f"no run with status {status}; --status all draws every run")
    names = [column.removeprefix("metrics.") for column in metrics]
    lines, parts = lines_and_panels(frame, groups, panels, kind)
    frame = sort_by_groups(frame, [*parts, *lines])
    if kind == "curves":
        logarithmic = split(log or [])
        for name in logarithmic:
            check("--log", name, tuple(names))
        typer.echo(str(draw_curves(uri, frame, lines, names, out, panels=parts, log=logarithmic, smooth=smooth)))
        return
    column = kl_column(frame, kl)
    typer.echo(str(pictures.picture(kind, frame, lines, names, column, out, panels=parts)))


@app.command(epilog="Example: kl-comedy results export --without 'run.*,output,tracking.*' --out runs.parquet")
def export(
    uri: Uri = DEFAULT_URI,
    experiment: Experiment = None,
    where: Where = None,
    format: Annotated[str | None, typer.Option(help="csv, json or parquet; default: by --out, else csv.")] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="Keys to leave out, comma-separated; * matches anything.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default: stdout.")] = None,
) -> None:
    """Every run with all its params, tags, final metrics and status, one row a run."""
    from kl_comedy.tracking import runs as exports

    chosen = format or (out.suffix.lstrip(".").lower() if out else "csv")
    check("--format" if format else "--out", chosen, EXPORT_FORMATS)
    if chosen == "parquet" and out is None:
        raise UserError("--out: parquet is binary; name a file")
    frame = exports.drop_columns(runs(uri, experiment, where), split(without or []))
    say(f"{len(frame)} runs, {len(frame.columns)} columns")
    write(frame, chosen, out)


@app.command(epilog="Example: kl-comedy results sync runs/my-run --uri http://tracking:5000")
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


AtKl = Annotated[str | None, typer.Option(help="Match at these KLs (nats), comma-separated; default: at equal beta.")]
Baseline = Annotated[str | None, typer.Option(help="The row the others are compared with, by its name in the table.")]
Within = Annotated[list[str] | None, typer.Option(help="Compare within equal values of these keys, comma-separated.")]
Interval = Annotated[str, typer.Option(help="95% interval: t (Student) or bootstrap.")]
Format = Annotated[str, typer.Option(help="text, markdown, csv, json, latex, or parquet with --out.")]
Out = Annotated[Path | None, typer.Option(help="File to write; default: stdout.")]


def compare(
    metric: Annotated[str, typer.Option(help="The metric to compare.")],
    at_kl: AtKl = None,
    baseline: Baseline = None,
    group: Within = None,
    uri: Uri = DEFAULT_URI,
    experiment: Experiment = None,
    where: Where = None,
    kl: Kl = None,
    status: Status = "finished",
    keep_repeats: Repeats = False,
    of: Of = "last",
    collapse: Collapse = None,
    split_versions: SplitVersions = False,
    interval: Interval = "t",
    format: Format = "text",
    out: Out = None,
) -> None:
    """KL families at equal beta, or at equal exact KL (interpolated between runs, never beyond them).

    outside: seeds whose runs do not reach that KL; gap: seeds with only a collapsed run on one side of it.
    """
    from kl_comedy.statistics import METHODS, generator
    from kl_comedy.tracking import compare as comparing
    from kl_comedy.tracking.tables import FORMATS

    check("--interval", interval, METHODS)
    check("--format", format, (*FORMATS, "parquet"))
    _needs_file(format, out)
    frame, groups, metrics = select(
        uri,
        experiment,
        where,
        group or [],
        [metric],
        status=status,
        keep_repeats=keep_repeats,
        of=of,
        collapse=collapse,
        split_versions=split_versions,
        families=True,
    )
    if len(metrics) != 1:
        raise UserError(f"--metric: got {metric!r}, which is {len(metrics)} metrics; name one")
    frame = frame[frame["status"].isin(statuses_of(status))]
    _check_family(frame, baseline)
    if at_kl is None:
        found = comparing.matched_beta(frame, groups, metrics[0], baseline, interval, generator())
    else:
        at = _numbers(at_kl)
        found = comparing.matched_kl(
            frame, groups, metrics[0], kl_column(frame, kl), at, baseline, interval, generator()
        )
    write(found, format, out)


def aggregate(
    metric: Annotated[list[str], typer.Option(help="One metric a task, comma-separated; * matches anything.")],
    group: Within = None,
    baseline: Baseline = None,
    uri: Uri = DEFAULT_URI,
    experiment: Experiment = None,
    where: Where = None,
    status: Status = "finished",
    keep_repeats: Repeats = False,
    of: Of = "last",
    collapse: Collapse = None,
    split_versions: SplitVersions = False,
    format: Format = "text",
    out: Out = None,
) -> None:
    """Several tasks as one number: interquartile mean (stratified bootstrap), probability of improvement."""
    from kl_comedy.statistics import generator
    from kl_comedy.tracking import compare as comparing
    from kl_comedy.tracking.tables import FORMATS

    check("--format", format, (*FORMATS, "parquet"))
    _needs_file(format, out)
    frame, groups, metrics = select(
        uri,
        experiment,
        where,
        group or ["kl.label"],
        metric,
        status=status,
        keep_repeats=keep_repeats,
        of=of,
        collapse=collapse,
        split_versions=split_versions,
    )
    counted = frame[frame["status"].isin(statuses_of(status))]
    found = comparing.aggregate(counted, groups, metrics, baseline, generator())
    if found.empty:
        raise RunFailed(f"no run with status {status} has a value of {', '.join(metric)}")
    write(found, format, out)


def _check_family(frame: object, baseline: str | None) -> None:
    from kl_comedy.tracking.compare import FAMILY, SEED, families_of

    for column, what in ((FAMILY, "the tag kl.label"), (SEED, "the param seed")):
        if column not in frame:  # type: ignore[operator]
            raise UserError(f"these runs lack {what}, by which families are compared; they were not trained by us")
    if baseline is not None and baseline not in (names := families_of(frame)):  # type: ignore[arg-type]
        raise bad_value("--baseline", baseline, names)


def _numbers(text: str) -> list[float]:
    try:
        found = [float(word) for word in split([text])]
    except ValueError:
        found = []
    if not found or not all(math.isfinite(value) and value >= 0 for value in found):
        raise bad_value("--at-kl", text, "numbers of nats, as 0.5,1,2")
    return found


def _needs_file(format: str, out: Path | None) -> None:
    if format == "parquet" and out is None:
        raise UserError("--out: parquet is binary; name a file")


def report(
    out: Annotated[Path, typer.Option(help="File to write: .html.")],
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Study",
    uri: Uri = DEFAULT_URI,
    experiment: Experiment = None,
    where: Where = None,
    group: Group = None,
    parts: Annotated[
        list[str] | None, typer.Option(help="A section with table and pictures for each value of these keys.")
    ] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Metrics, comma-separated; * matches anything.")] = None,
    kl: Kl = None,
    status: Status = "finished",
    keep_repeats: Repeats = False,
    of: Of = "last",
    collapse: Collapse = None,
    split_versions: SplitVersions = False,
    interval: Annotated[str, typer.Option(help="95% interval: t (Student) or bootstrap.")] = "t",
) -> None:
    """One self-contained HTML page: results, curves, certificates, completions, provenance, commands. No network."""
    from kl_comedy.io import atomic_write
    from kl_comedy.statistics import METHODS, generator
    from kl_comedy.tracking.compare import summarize
    from kl_comedy.tracking.report import build_page, render_page

    check("--interval", interval, METHODS)
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out: got {str(out)!r}; allowed: a file that ends in .html")
    notes: list[str] = []
    frame, groups, metrics = select(
        uri,
        experiment,
        where,
        group,
        metric,
        status=status,
        keep_repeats=keep_repeats,
        mark_dead=True,
        of=of,
        collapse=collapse,
        split_versions=split_versions,
        notes=notes,
        panels=parts,
        panels_option="--parts",
    )
    sections = panel_columns(frame, parts, "--parts")
    groups = [*sections, *(group for group in groups if group not in sections)]
    summary = summarize(frame, groups, metrics, interval, statuses_of(status), generator())
    rule = f"Means over seeds with 95% intervals ({interval}) of runs with status {status}."
    page = build_page(
        uri,
        frame,
        summary,
        groups,
        metrics,
        title=title,
        command=shlex.join(["kl-comedy", *sys.argv[1:]]),
        rules=[rule, *(note.removeprefix("note: ") for note in notes if not note.startswith("warning"))],
        warnings=[note for note in notes if note.startswith("warning")],
        kl=_kl(frame, kl),
        parts=sections,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, render_page(page).encode("utf-8"))
    typer.echo(str(out))


def _kl(frame: object, kl: str | None) -> str | None:
    """The KL to draw against; None where nobody asked and nothing was measured."""
    try:
        return kl_column(frame, kl)  # type: ignore[arg-type]
    except UserError:
        if kl is not None:
            raise
        return None


def verify(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A CSV, JSON or Parquet table that names its runs.")],
    uri: Uri = DEFAULT_URI,
    format: Annotated[str, typer.Option(help="text, markdown, csv, json or latex.")] = "text",
) -> None:
    """Which rows of a table the store still bears out: same, changed (and where), or missing.

    Exits 1 unless every row is the same.
    """
    import pandas as pd

    from kl_comedy.tracking.tables import FORMATS, render
    from kl_comedy.tracking.verify import read_table
    from kl_comedy.tracking.verify import verify as check_rows

    check("--format", format, FORMATS)
    rows = read_table(table)
    found = check_rows(uri, runs(uri, None, None), rows)
    bad = [item for item in found if item.verdict != "same"]
    shown = found if format in ("csv", "json") else bad
    if shown:
        lines = [asdict(item) | {"unchecked": ", ".join(item.unchecked)} for item in shown]
        typer.echo(render(pd.DataFrame(lines), format))
    say(f"{len(found) - len(bad)} of {len(found)} rows are the same ({sum(item.checked for item in found)} cells)")
    unchecked = dict.fromkeys(name for item in found for name in item.unchecked)
    if unchecked:
        say(f"not checked, as the store has no such column: {', '.join(unchecked)}")
    if bad:
        raise RunFailed(f"{len(bad)} rows of {table} no longer reproduce from {uri}")


def mount(parent: typer.Typer) -> None:
    """Add the group of commands to the application."""
    app.command(
        epilog="Example: kl-comedy results compare --metric eval/heldout/reward --at-kl 0.5,1,2 --baseline 'no KL' "
        "--group optimizer.lr"
    )(compare)
    app.command(
        epilog="Example: kl-comedy results aggregate --metric 'eval/*/reward' --group kl.label --baseline 'no KL'"
    )(aggregate)
    app.command(
        epilog="Example: kl-comedy results report --experiment study --parts sweep,optimizer.lr --group kl.label "
        "--out study.html"
    )(report)
    app.command(epilog="Example: kl-comedy results verify results/runs.csv --uri sqlite:///mlflow.db")(verify)
    parent.add_typer(app, name="results")
