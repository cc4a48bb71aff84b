"""``kl-comedy results compare`` and ``aggregate``: configurations against each other."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from kl_comedy.cli.selection import (
    DEFAULT_URI,
    Collapse,
    Experiment,
    Kl,
    Of,
    Repeats,
    SplitVersions,
    Status,
    Uri,
    Where,
    check,
    kl_column,
    select,
    split,
    statuses_of,
    write,
)
from kl_comedy.errors import RunFailed, UserError, bad_value

AtKl = Annotated[str | None, typer.Option(help="Match at these KLs (nats), comma-separated; default: at equal beta.")]
Baseline = Annotated[str | None, typer.Option(help="The row the others are compared with, by its name in the table.")]
Within = Annotated[list[str] | None, typer.Option(help="Compare within equal values of these keys, comma-separated.")]
Interval = Annotated[str, typer.Option(help="95% interval: t (Student) or bootstrap.")]
Format = Annotated[str, typer.Option(help="text, markdown, csv, json, latex, or parquet with --out.")]
Out = Annotated[Path | None, typer.Option(help="File to write; default: stdout.")]


def mount(app: typer.Typer) -> None:
    app.command(
        epilog="Example: kl-comedy results compare --metric eval/heldout/reward --at-kl 0.5,1,2 --baseline 'no KL' "
        "--group optimizer.lr"
    )(compare)
    app.command(
        epilog="Example: kl-comedy results aggregate --metric 'eval/*/reward' --group kl.label --baseline 'no KL'"
    )(aggregate)


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
    from kl_comedy.tracking import comparing
    from kl_comedy.tracking.tables import FORMATS

    check("--interval", interval, METHODS)
    check("--format", format, (*FORMATS, "parquet"))
    _needs_file(format, out)
    frame, groups, metrics = select(
        uri, experiment, where, group or [], [metric], status=status, keep_repeats=keep_repeats, of=of,
        collapse=collapse, split_versions=split_versions, families=True,
    )  # fmt: skip
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
    from kl_comedy.tracking import comparing
    from kl_comedy.tracking.tables import FORMATS

    check("--format", format, (*FORMATS, "parquet"))
    _needs_file(format, out)
    frame, groups, metrics = select(
        uri, experiment, where, group or ["kl.label"], metric, status=status, keep_repeats=keep_repeats, of=of,
        collapse=collapse, split_versions=split_versions,
    )  # fmt: skip
    counted = frame[frame["status"].isin(statuses_of(status))]
    found = comparing.aggregate(counted, groups, metrics, baseline, generator())
    if found.empty:
        raise RunFailed(f"no run with status {status} has a value of {', '.join(metric)}")
    write(found, format, out)


def _check_family(frame: object, baseline: str | None) -> None:
    from kl_comedy.tracking.comparing import FAMILY, SEED, families_of

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
