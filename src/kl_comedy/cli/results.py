"""``kl-comedy results``: tables, plots and exports from the MLflow store; upload of spooled runs.

Data goes to stdout, talk to stderr. Exits 0 when done, 1 when there is nothing to show or the store fails, 2 on
misuse (unknown key, metric, experiment, format, or no store at that address).
"""

from __future__ import annotations

import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kl_comedy.errors import RunFailed, UserError, bad_value

if TYPE_CHECKING:
    import pandas as pd

app = typer.Typer(help="Tables, plots and exports of tracked runs.", no_args_is_help=True)

DEFAULT_GROUP = ("params.name", "tags.kl.label")
DEFAULT_METRICS = ("eval/*/reward", "train/reward", "kl/exact_reverse_token")
STATUSES = ("finished", "running", "failed", "killed", "all")
EXPORT_FORMATS = ("csv", "json", "parquet")

Uri = Annotated[str, typer.Option(envvar="MLFLOW_TRACKING_URI", help="MLflow store or server.")]
Experiment = Annotated[str | None, typer.Option(help="Only this experiment; default: all.")]
Where = Annotated[str | None, typer.Option(help="Filter, e.g. \"seed = 0 and algorithm.advantage = 'rloo'\".")]
Group = Annotated[list[str] | None, typer.Option(help="Config keys or tags, comma-separated; default: name,kl.label.")]
Status = Annotated[str, typer.Option(help=f"Which runs count: {', '.join(STATUSES)}.")]
Repeats = Annotated[bool, typer.Option("--keep-repeats", help="Count every run of the same configuration and seed.")]
DEFAULT_URI = "sqlite:///mlflow.db"


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
    format: Annotated[str, typer.Option(help="text, markdown, csv, json or latex.")] = "text",
) -> None:
    """Mean and 95% interval over seeds of the final value of metrics, grouped by config keys."""
    from kl_comedy.tracking.stats import METHODS, summarize
    from kl_comedy.tracking.tables import FORMATS, MACHINE_FORMATS, readable, render

    _check("--format", format, FORMATS)
    _check("--interval", interval, METHODS)
    statuses = _statuses(status)
    frame = _runs(uri, experiment, where, mark_dead=True)
    groups, metrics = _group_columns(frame, group), _metric_columns(frame, metric)
    frame = frame if keep_repeats else _without_repeats(frame, statuses)
    _tell_pooled(frame, groups)
    summary = summarize(frame, groups, metrics, interval, statuses)
    if not summary["n"].any():
        counts = ", ".join(f"{number} {name}" for name, number in frame["status"].value_counts().items())
        _say(f"no run with status {status} has a value yet ({counts}); --status all counts every run")
    shown = _short_names(summary) if format in MACHINE_FORMATS else readable(summary, groups)
    typer.echo(render(shown, format))


@app.command(epilog="Example: kl-comedy results plot --metric train/reward --group kl.label --out reward.png")
def plot(
    metric: Annotated[list[str], typer.Option(help="Metrics, comma-separated; one panel each; * matches anything.")],
    out: Annotated[Path, typer.Option(help="File to write: .png, .svg or .pdf.")],
    uri: Uri = DEFAULT_URI,
    experiment: Experiment = None,
    where: Where = None,
    group: Group = None,
    status: Status = "finished",
    keep_repeats: Repeats = False,
) -> None:
    """Curves of metrics: mean line and 95% band over seeds, one line a group."""
    from kl_comedy.tracking.plots import check_suffix
    from kl_comedy.tracking.plots import plot as draw

    check_suffix(out)
    statuses = _statuses(status)
    frame = _runs(uri, experiment, where)
    groups, metrics = _group_columns(frame, group), _metric_columns(frame, metric)
    frame = frame[frame["status"].isin(statuses)]
    if frame.empty:
        raise RunFailed(f"no run with status {status}; --status all draws every run")
    frame = frame if keep_repeats else _without_repeats(frame, statuses)
    _tell_pooled(frame, groups)
    names = [column.removeprefix("metrics.") for column in metrics]
    typer.echo(str(draw(uri, frame, groups, names, out)))


@app.command(epilog="Example: kl-comedy results export --format csv --out runs.csv")
def export(
    uri: Uri = DEFAULT_URI,
    experiment: Experiment = None,
    where: Where = None,
    format: Annotated[str | None, typer.Option(help="csv, json or parquet; default: by --out, else csv.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default: stdout.")] = None,
) -> None:
    """Every run with all its params, tags, final metrics and status, one row a run."""
    from kl_comedy.tracking.tables import render

    chosen = format or (out.suffix.lstrip(".").lower() if out else "csv")
    _check("--format" if format else "--out", chosen, EXPORT_FORMATS)
    if chosen == "parquet" and out is None:
        raise UserError("--out: parquet is binary; name a file")
    frame = _runs(uri, experiment, where)
    if out is None:
        typer.echo(render(frame, chosen))
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    if chosen == "parquet":
        frame.to_parquet(out, index=False)
    else:
        out.write_text(render(frame, chosen) + "\n", encoding="utf-8")
    _say(f"{len(frame)} runs")
    typer.echo(str(out))


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
        _say(f"{folder}: {done.events} events uploaded to experiment {done.state.experiment!r}")
        if done.unreadable:
            _say(f"{folder}: {done.unreadable} unreadable lines of the spool were left out")
        for path in done.missing:
            _say(f"{folder}: {path} is gone and was not uploaded")
        typer.echo(done.state.run_id)


def _runs(uri: str, experiment: str | None, where: str | None, *, mark_dead: bool = False) -> pd.DataFrame:
    from kl_comedy.tracking.queries import runs_frame
    from kl_comedy.tracking.redact import redact

    frame = runs_frame(uri, experiment, where, mark_dead=mark_dead)
    if frame.empty:
        place = f"{redact(uri)}" + (f", experiment {experiment!r}" if experiment else "")
        raise RunFailed(f"no runs in {place}" + (f" match {where!r}" if where else "; train one first"))
    return frame


def _group_columns(frame: pd.DataFrame, group: list[str] | None) -> list[str]:
    from kl_comedy.tracking.queries import resolve

    if group is None:
        return [column for column in DEFAULT_GROUP if column in frame.columns]
    return list(dict.fromkeys(resolve(frame, key, "--group") for key in _split(group)))


def _metric_columns(frame: pd.DataFrame, metric: list[str] | None) -> list[str]:
    """Columns of the metrics asked for; without a wish the default ones that exist."""
    from kl_comedy.tracking.queries import resolve

    present = [str(column) for column in frame.columns if str(column).startswith("metrics.")]
    found: list[str] = []
    for name in _split(metric) if metric else DEFAULT_METRICS:
        pattern = f"metrics.{name.removeprefix('metrics.')}"
        hits = sorted(column for column in present if fnmatch(column, pattern))
        if metric and not hits:
            hits = [resolve(frame[present], pattern.removeprefix("metrics."), "--metric")]
        found += hits
    if not found:
        names = ", ".join(column.removeprefix("metrics.") for column in present[:40]) or "(no metrics)"
        raise RunFailed(f"these runs have none of {', '.join(DEFAULT_METRICS)}; choose with --metric from: {names}")
    return list(dict.fromkeys(found))


def _without_repeats(frame: pd.DataFrame, statuses: tuple[str, ...]) -> pd.DataFrame:
    from kl_comedy.tracking.queries import drop_repeats

    kept = drop_repeats(frame, statuses)
    if len(kept) < len(frame):
        _say(
            f"note: {len(frame) - len(kept)} runs repeat a configuration and seed and are left out "
            "(--keep-repeats counts them)"
        )
    return kept


def _tell_pooled(frame: pd.DataFrame, groups: list[str]) -> None:
    """An interval over runs that differ in more than the seed is not an interval over seeds: say so."""
    from kl_comedy.tracking.queries import short, varying

    names = [short(column) for column in varying(frame, groups)]
    if names:
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        _say(f"note: some rows pool runs that differ in {', '.join(names[:6])}{more}; --group with the key parts them")


def _short_names(summary: pd.DataFrame) -> pd.DataFrame:
    from kl_comedy.tracking.queries import short

    names = [short(str(column)) for column in summary.columns]
    unique = len(set(names)) == len(names)
    renamed = summary.set_axis(names, axis=1) if unique else summary.copy()
    return renamed.assign(metric=summary["metric"].str.removeprefix("metrics."))


def _statuses(status: str) -> tuple[str, ...]:
    chosen = [word.strip().lower() for word in status.split(",")]
    for word in chosen:
        _check("--status", word, STATUSES)
    every = tuple(name.upper() for name in STATUSES[:-1])
    return every if "all" in chosen else tuple(word.upper() for word in chosen)


def _split(values: list[str]) -> list[str]:
    return [word.strip() for value in values for word in value.split(",") if word.strip()]


def _check(option: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise bad_value(option, given, allowed)


def _say(message: str) -> None:
    print(message, file=sys.stderr)
