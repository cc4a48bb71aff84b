"""``kl-comedy results verify``: a table against the store."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kl_comedy.cli.selection import DEFAULT_URI, Uri, check, runs, say
from kl_comedy.errors import RunFailed


def mount(app: typer.Typer) -> None:
    app.command(epilog="Example: kl-comedy results verify results/runs.csv --uri sqlite:///mlflow.db")(verify)


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
