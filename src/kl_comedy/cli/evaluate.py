"""``kl-comedy evaluate``: evaluate the model of a config, a run or a checkpoint on evaluation sets and suites."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kl_comedy.cli.common import (
    Plugins,
    choice_option,
    load_plugins,
    load_run_plugins,
    options_in_a_record,
    plain_table,
    stderr_console,
    stdout_console,
)
from kl_comedy.errors import UserError, bad_value
from kl_comedy.statistics import CLUSTER_METHODS

if TYPE_CHECKING:
    from kl_comedy.cli.evaluation_runs import EvaluationRequest, Target

TargetArgument = Annotated[
    str, typer.Argument(help="A config, a run, a checkpoint, a model's folder or hub id, or pocket")
]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, e.g. eval.samples=8 eval.temperature=0.7")]
Suites = Annotated[list[str] | None, typer.Option("--suite", help="Names (`kl-comedy list suites`) or YAML files")]
Ks = Annotated[
    str | None, typer.Option("--k", help="Comma-separated k for pass@k and maj@k; each at most eval.samples")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Evaluate only the first N problems of each suite")]
DataRoot = Annotated[
    Path | None,
    typer.Option(envvar="KL_COMEDY_DATA", help="Folder of the suites' files; default: download from the hub"),
]
Data = Annotated[list[str] | None, typer.Option("--data", help="SUITE=FILE or SUITE=FILE#SHA256, for one suite")]
Template = Annotated[str, typer.Option(help="auto (the suite's choice), plain or chat")]
IntervalOption = Annotated[str, choice_option("--interval", *CLUSTER_METHODS)]
ShardOption = Annotated[str | None, typer.Option("--shard", hidden=True, help="Refused, with the reason")]
Chunk = Annotated[int, typer.Option(min=1, help="Problems sampled at a time; another number draws other samples")]
Out = Annotated[Path, typer.Option(help="Folder of records; the same call resumes there")]
Format = Annotated[str, choice_option("--format", "table", "json", "csv", "markdown")]


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of ``kl-comedy evaluate``."""

    target: TargetArgument
    overrides: Overrides = None
    suite: Suites = None
    k: Ks = None
    limit: Limit = None
    data_root: DataRoot = None
    data: Data = None
    template: Template = "auto"
    interval: IntervalOption = "auto"
    shard: ShardOption = None
    chunk: Chunk = 32
    out: Out = Path("evaluations")
    plugin: Plugins = None
    format: Format = "table"


@options_in_a_record
def evaluate(wanted: EvaluateOptions) -> None:
    """Evaluate TARGET on suites, or without `--suite` on its config's `data.eval` sets and `eval.suites`.

    Examples: `kl-comedy evaluate runs/RUN --suite gsm8k,math500 --data-root data eval.samples=8 eval.temperature=0.7`,
    `kl-comedy evaluate configs/quickstart.yaml model.source=runs/RUN/policy eval.samples=8`
    """
    _check_one_process(wanted.shard)
    overrides = wanted.overrides or []
    load_plugins(wanted.plugin)
    load_run_plugins(wanted.target, given=wanted.plugin)
    _load_plugins_of_reference(overrides, wanted.plugin)
    _check_config(wanted.target, overrides)
    from kl_comedy.cli.evaluation_runs import EvaluationRequest, resolve_target
    from kl_comedy.evaluation.suites import get_suite, parse_data_files

    # Everything that needs no model is checked before one is loaded.
    request = EvaluationRequest(
        suites=_suite_names(wanted.suite or []),
        out=wanted.out,
        ks=_parse_ks(wanted.k),
        limit=wanted.limit,
        root=wanted.data_root,
        files=parse_data_files(wanted.data or []),
        template=wanted.template,
        interval=wanted.interval,
        chunk=wanted.chunk,
    )
    for name in request.suites:
        get_suite(name)  # a misspelled suite is refused before data.eval is evaluated
    with resolve_target(wanted.target, overrides) as resolved:
        config = resolved.config
        if not request.suites and not config.eval.suites:
            if not config.data.eval:
                nothing = "data.eval: names no set to evaluate on"
                raise UserError(f"{nothing}; name suites with --suite (kl-comedy list suites)")
            _refuse_options_of_suites({"--k": wanted.k, "--limit": wanted.limit, "--data": wanted.data})
        _evaluate(resolved, request, wanted.format)


def _check_config(target: str, overrides: Sequence[str]) -> None:
    """Raise :class:`UserError` for a mistake in the config that ``target`` names, before torch is imported.

    A run's folder and a model are read later, with what they need.
    """
    from kl_comedy.config import load_config
    from kl_comedy.config.shipped import shipped_config

    path = Path(target)
    if not path.exists():
        path = shipped_config(target) or path
    if path.suffix in (".yaml", ".yml"):
        load_config(path, overrides)


def _check_one_process(shard: str | None) -> None:
    """Raise :class:`UserError` where several processes are to share the problems of a suite."""
    advice = "one process evaluates a suite; give each call suites of its own"
    if shard is not None:
        raise UserError(f"--shard: there are no shards any more (got {shard!r}); {advice}")
    # Every rank of torchrun or srun would evaluate everything, into one folder. SLURM_NTASKS would say nothing: in a
    # batch script it is that of the allocation. All ranks raise, because only the first one prints.
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        processes = int(os.environ.get(name) or 1)
        if processes > 1:
            raise UserError(f"this is one of {processes} processes ({name}); {advice}")


def _suite_names(words: Sequence[str]) -> list[str]:
    """The names after ``--suite``, which may be repeated and takes several with commas."""
    names: list[str] = []
    for word in words:
        names += [name for name in word.split(",") if name]
    return names


def _load_plugins_of_reference(overrides: Sequence[str], plugins: Sequence[Path] | None) -> None:
    """Load the plugins that the run behind ``eval.reference`` was trained with, where an override names one."""
    for text in overrides:
        key, _, value = text.partition("=")
        # The reference's own parts must be registered before its config is read.
        if key.strip() == "eval.reference":
            load_run_plugins(value, given=plugins)


def _evaluate(target: Target, request: EvaluationRequest, format: str) -> None:
    """Evaluate what the request names, else the sets and the suites of the target's config, and print the scores."""
    from kl_comedy.cli.evaluation_runs import evaluate_sets, evaluate_suites

    config = target.config
    console = stderr_console()
    # Named suites replace everything that the config would evaluate.
    if not request.suites and config.data.eval:
        show_sets(evaluate_sets(config, console), format)
    suites = request.suites or config.eval.suites
    if not suites:
        return

    root = request.root
    if root is None and config.eval.data_root:
        root = Path(config.eval.data_root)
    rows = evaluate_suites(target, replace(request, suites=suites, root=root), console)
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
    # int() alone would take "-1", and "1_0" for 10.
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
    """Print scores of evaluation sets; the table has one column per set."""
    if format == "json":
        print(json.dumps(rows, indent=1))
        return
    # A config without a reference measures no KL: rows without numbers are left out.
    measured = [name for name in MEASURED if any(name in row for row in rows)]
    table = plain_table("set", *(row["set"] for row in rows))

    def add_score(heading: str, cells: Sequence[str]) -> None:
        table.add_row(heading, *cells)

    add_score("problems", [str(row["problems"]) for row in rows])
    add_score("samples", [str(row["samples"]) for row in rows])
    add_score("reward [95%]", [_with_interval(row, "reward") for row in rows])
    if all("proxy" in row for row in rows):
        add_score("proxy [95%]", [_with_interval(row, "proxy") for row in rows])
    add_score("length", [f"{row['length']:.1f}" for row in rows])
    add_score("truncated", [f"{row['truncated_share']:.1%}" for row in rows])
    for name in measured:
        add_score(MEASURED[name], [f"{row[name]:.4f}" for row in rows])
    stdout_console().print(table)


def show_suites(rows: Sequence[Mapping[str, Any]], format: str) -> None:
    """Print scores of suites: one row per suite, in the table one row per score."""
    if format == "json":
        print(json.dumps(rows, indent=1))
        return
    if format == "csv":
        from kl_comedy.results.tables import csv_cell

        # Suites of choices have other scores than suites that generate: the columns are those of all rows.
        writer = csv.DictWriter(sys.stdout, _all_keys(rows), lineterminator="\n")
        writer.writeheader()
        # A suite is a file from elsewhere, and its name and what it names may begin a formula.
        for row in rows:
            writer.writerow({name: csv_cell(value) for name, value in row.items()})
        return

    if format == "markdown":
        from kl_comedy.results.tables import markdown

        cells = [{"suite": row["suite"], "problems": _size(row), **_scores(row)} for row in rows]
        names = _all_keys(cells)
        print(markdown(names, [[row.get(name, "") for name in names] for row in cells]))
        return
    table = plain_table("suite", "problems", "score", f"value [95%, {rows[0]['interval']}]")
    for row in rows:
        # Name and size stand in the first row of a suite only.
        first_cells = [row["suite"], _size(row)]
        for name, value in _scores(row).items():
            table.add_row(*first_cells, name, value)
            first_cells = ["", ""]
        table.add_section()
    stdout_console().print(table)


def _all_keys(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys of all rows, each once, in the order in which they first occur."""
    keys: dict[str, None] = {}
    for row in rows:
        keys |= dict.fromkeys(row)
    return list(keys)


def _size(row: Mapping[str, Any]) -> str:
    if row["samples"] > 1:
        return f"{row['problems']} x {row['samples']}"
    return str(row["problems"])


def _with_interval(row: Mapping[str, Any], name: str) -> str:
    low = row.get(f"{name}_low")
    high = row.get(f"{name}_high")
    if low is None or high is None:
        return f"{row[name]:.3f}"
    return f"{row[name]:.3f} [{low:.3f}, {high:.3f}]"


def _scores(row: Mapping[str, Any]) -> dict[str, str]:
    """The scores with an interval, shares of failed completions that are not zero, and the mean length."""
    cells = {name: _with_interval(row, name) for name in row if f"{name}_low" in row}
    for name in ("truncated", "unparseable", "timeout", "refused"):
        share = row.get(f"{name}_share")
        # These two are worth a 0.0%: they explain a low score more often than the others.
        always_shown = name in ("truncated", "unparseable")
        if share or (share is not None and always_shown):
            cells[name] = f"{share:.1%}"
    if "tokens" in row:
        cells["tokens"] = f"{row['tokens']:.1f}"
    return cells
