"""``kl-comedy results``: tables, plots and exports from the MLflow store; upload of spooled runs.

Data goes to stdout, talk to stderr. Exits 0 when done, 1 when there is nothing to show or the store fails, 2 on
misuse (unknown key, metric, experiment, format, or no store at that address).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kl_comedy.cli.selection import (
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
    from kl_comedy.tracking.stats import summarize
    from kl_comedy.tracking.tables import FORMATS, MACHINE_FORMATS, readable

    check("--format", format, (*FORMATS, "parquet"))
    check("--interval", interval, METHODS)
    if format == "parquet" and out is None:
        raise UserError("--out: parquet is binary; name a file")
    frame, groups, metrics = select(
        uri, experiment, where, group, metric, status=status, keep_repeats=keep_repeats, mark_dead=True, of=of,
        collapse=collapse, split_versions=split_versions,
    )  # fmt: skip
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
    from kl_comedy.tracking import pictures
    from kl_comedy.tracking.ordering import in_order
    from kl_comedy.tracking.plots import check_suffix
    from kl_comedy.tracking.plots import plot as draw_curves

    check_suffix(out)
    check("--kind", kind, KINDS)
    if log and kind != "curves":
        raise bad_value("--log", ",".join(log), f"nothing with --kind {kind}", "only curves have such an axis")
    if smooth > 1 and kind != "curves":
        raise bad_value("--smooth", str(smooth), f"nothing with --kind {kind}", "--of mean:K is the value of a run")
    keys = group or (None if kind == "curves" else ["kl.family"])
    frame, groups, metrics = select(
        uri, experiment, where, keys, metric, status=status, keep_repeats=keep_repeats, of=of, collapse=collapse,
        split_versions=split_versions, families=kind != "curves", panels=panels,
    )  # fmt: skip
    frame = frame[frame["status"].isin(statuses_of(status))]
    if frame.empty:
        raise RunFailed(f"no run with status {status}; --status all draws every run")
    names = [column.removeprefix("metrics.") for column in metrics]
    lines, parts = lines_and_panels(frame, groups, panels, kind)
    frame = in_order(frame, [*parts, *lines])
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
    from kl_comedy.tracking import exports

    chosen = format or (out.suffix.lstrip(".").lower() if out else "csv")
    check("--format" if format else "--out", chosen, EXPORT_FORMATS)
    if chosen == "parquet" and out is None:
        raise UserError("--out: parquet is binary; name a file")
    frame = exports.without(runs(uri, experiment, where), split(without or []))
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
    from kl_comedy.tracking.store import brief

    for folder in run_dirs:
        try:
            done = upload(folder, uri, experiment)
        except UserError:
            raise
        except Exception as error:
            raise RunFailed(f"{folder}: the upload failed: {brief(error)}") from error
        say(f"{folder}: {done.events} events uploaded to experiment {done.state.experiment!r}")
        if done.unreadable:
            say(f"{folder}: {done.unreadable} unreadable lines of the spool were left out")
        for path in done.missing:
            say(f"{folder}: {path} is gone and was not uploaded")
        typer.echo(done.state.run_id)
