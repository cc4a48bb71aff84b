"""``kl-comedy results report``: a study as one HTML page."""

from __future__ import annotations

import shlex
import sys
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
    panel_columns,
    select,
    statuses_of,
)
from kl_comedy.errors import UserError


def mount(app: typer.Typer) -> None:
    app.command(
        epilog="Example: kl-comedy results report --experiment study --parts sweep,optimizer.lr --group kl.label "
        "--out study.html"
    )(report)


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
    from kl_comedy.statistics import METHODS, generator
    from kl_comedy.tracking.report import render_page
    from kl_comedy.tracking.report_page import build_page
    from kl_comedy.tracking.spool import write_atomic
    from kl_comedy.tracking.stats import summarize

    check("--interval", interval, METHODS)
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out: got {str(out)!r}; allowed: a file that ends in .html")
    notes: list[str] = []
    frame, groups, metrics = select(
        uri, experiment, where, group, metric, status=status, keep_repeats=keep_repeats, mark_dead=True, of=of,
        collapse=collapse, split_versions=split_versions, notes=notes, panels=parts, panels_option="--parts",
    )  # fmt: skip
    sections = panel_columns(frame, parts, "--parts")
    groups = [*sections, *(group for group in groups if group not in sections)]
    summary = summarize(frame, groups, metrics, interval, statuses_of(status), generator())
    rule = f"Means over seeds with 95% intervals ({interval}) of runs with status {status}."
    page = build_page(
        uri, frame, summary, groups, metrics, title=title, command=shlex.join(["kl-comedy", *sys.argv[1:]]),
        rules=[rule, *(note.removeprefix("note: ") for note in notes if not note.startswith("warning"))],
        warnings=[note for note in notes if note.startswith("warning")], kl=_kl(frame, kl),
        parts=sections,
    )  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, render_page(page).encode("utf-8"))
    typer.echo(str(out))


def _kl(frame: object, kl: str | None) -> str | None:
    """The KL to draw against; None where nobody asked and nothing was measured."""
    try:
        return kl_column(frame, kl)  # type: ignore[arg-type]
    except UserError:
        if kl is not None:
            raise
        return None
