"""``kl-comedy evaluate``: the model of a config, a run or a checkpoint, on evaluation sets and suites."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kl_comedy.cli.common import load_plugins, stderr_console
from kl_comedy.errors import UserError, bad_value
from kl_comedy.statistics import CLUSTER_METHODS

FORMATS = ("table", "json", "csv", "markdown")


def mount(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(evaluate)


TargetArgument = Annotated[
    str, typer.Argument(help="A config, a run, a checkpoint, a model's folder or hub id, or pocket")
]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, as eval.samples=8 eval.temperature=0.7")]
Suites = Annotated[list[str] | None, typer.Option("--suite", help="Names (`kl-comedy list suites`) or YAML files")]
Ks = Annotated[str | None, typer.Option("--k", help="Of pass@k and maj@k, with commas; at most eval.samples")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first so many problems of each suite")]
DataRoot = Annotated[
    Path | None, typer.Option(envvar="KL_COMEDY_DATA", help="The folder of the suites' files; else by hub name")
]
Data = Annotated[list[str] | None, typer.Option("--data", help="SUITE=FILE or SUITE=FILE#SHA256, for one suite")]
Template = Annotated[str, typer.Option(help="auto (the suite's choice), plain or chat")]
IntervalOption = Annotated[str, typer.Option(help="wilson, t or bootstrap; all over problems")]
ShardOption = Annotated[
    str | None, typer.Option("--shard", help="I/N, this process's part; torchrun and srun tell it themselves")
]
Chunk = Annotated[int, typer.Option(min=1, help="Problems drawn at a time; another number draws other samples")]
Out = Annotated[Path, typer.Option(help="The folder of records; the same call goes on there")]
Plugins = Annotated[list[Path] | None, typer.Option("--plugin", help="A Python file that registers parts")]
Format = Annotated[str, typer.Option(help="table or json; with --suite also csv or markdown")]


def evaluate(
    target: TargetArgument,
    overrides: Overrides = None,
    suite: Suites = None,
    k: Ks = None,
    limit: Limit = None,
    data_root: DataRoot = None,
    data: Data = None,
    template: Template = "auto",
    interval: IntervalOption = "wilson",
    shard: ShardOption = None,
    chunk: Chunk = 32,
    out: Out = Path("evaluations"),
    plugin: Plugins = None,
    format: Format = "table",
) -> None:
    """Evaluate TARGET on suites, or without `--suite` on its config's `data.eval` sets and `eval.suites`.

    Examples: `kl-comedy evaluate runs/RUN --suite gsm8k,math500 --data-root data eval.samples=8 eval.temperature=0.7`,
    `kl-comedy evaluate configs/quickstart.yaml model.source=runs/RUN/policy eval.samples=8`
    """
    if format not in FORMATS:
        raise bad_value("--format", format, FORMATS)
    from kl_comedy.cli.evaluation_runs import Asked, evaluate_config, evaluate_suites, resolved
    from kl_comedy.evaluation.evaluate import parse_shard
    from kl_comedy.evaluation.suites import parse_own_data

    load_plugins(plugin)
    console = stderr_console()
    with resolved(target, overrides or []) as found:
        names = [name for word in suite or [] for name in word.split(",") if name] or found.config.eval.suites
        if not suite and found.config.data.eval:
            evaluate_config(found.config, console, as_json=format == "json")
        elif not names:
            raise UserError("data.eval: names no set to evaluate on; name suites with --suite (kl-comedy list suites)")
        if not names:
            return
        if interval not in CLUSTER_METHODS:
            raise bad_value("--interval", interval, CLUSTER_METHODS)
        root = data_root or (Path(found.config.eval.data_root) if found.config.eval.data_root else None)
        own = parse_own_data(data or [])
        part = parse_shard(shard)
        asked = Asked(
            suites=names,
            out=out,
            shard=part,
            launched=shard is None and part.count > 1,
            ks=_numbers(k),
            limit=limit,
            root=root,
            own=own,
            template=template,
            interval=interval,
            chunk=chunk,
        )
        rows = evaluate_suites(found, asked, console)
    if rows:
        show(rows, format)


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    words = text.split(",")
    if not all(word.strip().isdigit() for word in words):
        raise bad_value("--k", text, "whole numbers with commas, as 1,4,8")
    return [int(word) for word in words]


def show(rows: Sequence[Mapping[str, Any]], format: str) -> None:
    """Scores on stdout: a row a suite; in the table for people, a row a score."""
    if format == "json":
        print(json.dumps(list(rows), indent=1))
    elif format == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        print(text.getvalue(), end="")
    elif format == "markdown":
        cells = [{"suite": row["suite"], "problems": _size(row), **_scores(row)} for row in rows]
        head = list(dict.fromkeys(name for row in cells for name in row))
        from kl_comedy.tracking.tables import markdown

        print(markdown(head, [[row.get(name, "") for name in head] for row in cells]))
    else:
        table = Table("suite", "problems", "score", f"value [95%, {rows[0]['interval']}]")
        for row in rows:
            first = [row["suite"], _size(row)]
            for name, value in _scores(row).items():
                table.add_row(*first, name, escape(value))
                first = ["", ""]
            table.add_section()
        Console().print(table)


def _size(row: Mapping[str, Any]) -> str:
    return f"{row['problems']} x {row['samples']}" if row["samples"] > 1 else str(row["problems"])


def _scores(row: Mapping[str, Any]) -> dict[str, str]:
    """What people compare, in words."""
    cells = {
        name: f"{row[name]:.3f} [{row[f'{name}_low']:.3f}, {row[f'{name}_high']:.3f}]"
        for name in row
        if f"{name}_low" in row
    }
    shares = ("truncated", "unparseable", "timeout", "refused")
    cells |= {
        what: f"{row[f'{what}_share']:.1%}"
        for what in shares
        if row.get(f"{what}_share") or (what in shares[:2] and f"{what}_share" in row)
    }
    return {**cells, "tokens": f"{row['tokens']:.1f}"} if "tokens" in row else cells
