"""``kl-comedy evaluate``: the model of a config, a run or a checkpoint, on evaluation sets and suites."""

from __future__ import annotations

import csv
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kl_comedy.cli.common import Plugins, choice_option, load_plugins, load_run_plugins, stderr_console
from kl_comedy.errors import UserError, bad_value
from kl_comedy.statistics import CLUSTER_METHODS

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
IntervalOption = Annotated[str, choice_option("--interval", *CLUSTER_METHODS)]
ShardOption = Annotated[
    str | None, typer.Option("--shard", help="I/N, this process's part; read from torchrun and srun")
]
Chunk = Annotated[int, typer.Option(min=1, help="Problems sampled at a time; another number draws other samples")]
Out = Annotated[Path, typer.Option(help="The folder of records; the same call resumes there")]
Format = Annotated[str, choice_option("--format", "table", "json", "csv", "markdown")]


def evaluate(
    target: TargetArgument,
    overrides: Overrides = None,
    suite: Suites = None,
    k: Ks = None,
    limit: Limit = None,
    data_root: DataRoot = None,
    data: Data = None,
    template: Template = "auto",
    interval: IntervalOption = "auto",
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
    from kl_comedy.cli.evaluation_runs import EvaluationRequest, evaluate_sets, evaluate_suites, resolve_target
    from kl_comedy.evaluation.records import parse_shard
    from kl_comedy.evaluation.suites import get_suite, parse_data_files

    load_plugins(plugin)
    load_run_plugins(target, given=plugin)
    ks = _parse_ks(k)
    part = parse_shard(shard)
    files = parse_data_files(data or [])
    names = [name for word in suite or [] for name in word.split(",") if name]
    for name in names:
        get_suite(name)  # a misspelled suite is refused before data.eval is evaluated
    for text in overrides or []:
        key, _, value = text.partition("=")
        if key.strip() == "eval.reference":
            load_run_plugins(value, given=plugin)
    console = stderr_console()
    with resolve_target(target, overrides or []) as resolved:
        config = resolved.config
        suites = names or config.eval.suites
        if not suites and not config.data.eval:
            raise UserError("data.eval: names no set to evaluate on; name suites with --suite (kl-comedy list suites)")
        if not suites:
            _refuse_options_of_suites({"--k": k, "--limit": limit, "--data": data, "--shard": shard})
        if not suite and config.data.eval:
            show_sets(evaluate_sets(config, console), format)
        if not suites:
            return
        root = data_root or (Path(config.eval.data_root) if config.eval.data_root else None)
        request = EvaluationRequest(
            suites=suites,
            out=out,
            shard=part,
            launched=shard is None and part.count > 1,
            ks=ks,
            limit=limit,
            root=root,
            files=files,
            template=template,
            interval=interval,
            chunk=chunk,
        )
        rows = evaluate_suites(resolved, request, console)
    if rows:
        show_suites(rows, format)


def _refuse_options_of_suites(options: Mapping[str, Any]) -> None:
    """Raise :class:`UserError` for an option that has no effect, because no suite is evaluated."""
    for option, value in options.items():
        if value is not None:
            raise UserError(
                f"{option}: got {value!r}, but no suite is evaluated; name one with --suite (kl-comedy list suites)"
            )


def _parse_ks(text: str | None) -> list[int] | None:
    if text is None:
        return None
    if not re.fullmatch(r"\s*[0-9]+\s*(,\s*[0-9]+\s*)*", text):
        raise bad_value("--k", text, "whole numbers with commas, as 1,4,8")
    return [int(word) for word in text.split(",")]


MEASURED = {
    "kl/exact_reverse_sequence": "KL, nats/completion",
    "kl/total_variation_token": "total variation/token",
    "policy/entropy": "entropy, nats/token",
}
"""Metrics of completions in the table; ``--format json`` prints all."""


def show_sets(rows: Sequence[Mapping[str, Any]], format: str) -> None:
    """Print scores of evaluation sets, in the table a column per set."""
    if format == "json":
        print(json.dumps(rows, indent=1))
        return
    measured = [name for name in MEASURED if any(name in row for row in rows)]
    headings = ("set", "problems", "samples", "reward [95%]", "length", "truncated", *(MEASURED[n] for n in measured))
    cells = []
    for row in rows:
        numbers = (f"{row['length']:.1f}", f"{row['truncated_share']:.1%}", *(f"{row[name]:.4f}" for name in measured))
        cells.append((row["set"], str(row["problems"]), str(row["samples"]), _with_interval(row, "reward"), *numbers))
    (first, *sets), *lines = zip(headings, *cells, strict=True)
    table = Table(first, *map(escape, sets))
    for heading, *values in lines:
        table.add_row(escape(heading), *map(escape, values))
    Console().print(table)


def show_suites(rows: Sequence[Mapping[str, Any]], format: str) -> None:
    """Print scores of suites: a row per suite, in the table a row per score."""
    cells = [{"suite": row["suite"], "problems": _size(row), **_scores(row)} for row in rows]
    if format == "json":
        print(json.dumps(rows, indent=1))
    elif format == "csv":
        writer = csv.DictWriter(sys.stdout, list(dict.fromkeys(itertools.chain(*rows))), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif format == "markdown":
        from kl_comedy.tracking.tables import markdown

        names = list(dict.fromkeys(itertools.chain(*cells)))
        print(markdown(names, [[row.get(name, "") for name in names] for row in cells]))
    else:
        table = Table("suite", "problems", "score", f"value [95%, {rows[0]['interval']}]")
        for row in cells:
            first = [row.pop("suite"), row.pop("problems")]
            for name, value in row.items():
                table.add_row(*first, name, escape(value))
                first = ["", ""]
            table.add_section()
        Console().print(table)


def _size(row: Mapping[str, Any]) -> str:
    return f"{row['problems']} x {row['samples']}" if row["samples"] > 1 else str(row["problems"])


def _with_interval(row: Mapping[str, Any], name: str) -> str:
    bounds = [row.get(f"{name}_{end}") for end in ("low", "high")]
    return f"{row[name]:.3f}" + (f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if None not in bounds else "")


def _scores(row: Mapping[str, Any]) -> dict[str, str]:
    """The scores with an interval, shares of failed completions that are not zero, and the mean length."""
    cells = {name: _with_interval(row, name) for name in row if f"{name}_low" in row}
    for name in ("truncated", "unparseable", "timeout", "refused"):
        share = row.get(f"{name}_share")
        if share or (share is not None and name in ("truncated", "unparseable")):
            cells[name] = f"{share:.1%}"
    return {**cells, "tokens": f"{row['tokens']:.1f}"} if "tokens" in row else cells
