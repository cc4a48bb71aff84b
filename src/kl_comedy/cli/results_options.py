"""Options of ``kl-comedy results``: records whose fields are options, and what several of its commands do with them."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kl_comedy.cli.common import (
    Options,
    check_choice,
    choice_option,
    message,
    options_in_a_record,
    output_option,
    print_frame,
    with_options,
)
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.io import atomic_write
from kl_comedy.redaction import one_line, redact_command

if TYPE_CHECKING:
    import pandas as pd

    from kl_comedy.results.selection import RunQuery, Selection

DEFAULT_URI = "sqlite:///mlflow.db"
STATUSES = ("finished", "running", "failed", "killed", "all")
TEXT_FORMATS = ("text", "markdown", "csv", "json", "latex", "table")
EXPORT_FORMATS = ("csv", "json", "parquet")

Uri = Annotated[str, typer.Option(envvar="MLFLOW_TRACKING_URI", help="MLflow store or server, or an export's path.")]
Where = Annotated[str | None, typer.Option(help="Filter, e.g. \"seed = 0 and algorithm.advantage = 'rloo'\".")]
Group = Annotated[list[str] | None, typer.Option(help="Config keys or tags, comma-separated; default: by command.")]
Pool = Annotated[
    list[str] | None, typer.Option(help="Keys in which runs of one row may differ, comma-separated; n counts seeds.")
]
KeepRepeats = Annotated[
    bool, typer.Option("--keep-repeats", help="Average runs of the same configuration and seed, not only the newest.")
]
Of = Annotated[str, typer.Option(help="A run's value: last, recorded, first, best, lowest or mean:K (of the last K).")]
Collapse = Annotated[
    str | None, typer.Option(help="Rule of collapsed runs, e.g. 'eval/heldout/reward < 0.5 start' (the default).")
]
SplitVersions = Annotated[
    bool, typer.Option("--split-versions", help="Separate groups by the commit that they ran on.")
]
Metrics = Annotated[list[str] | None, typer.Option(help="Metrics, comma-separated; * matches anything.")]
Baseline = Annotated[str | None, typer.Option(help="The row the others are compared with, by its name in the table.")]
Kl = Annotated[str | None, typer.Option(help="The KL metric to match or draw against; default: held-out, else train.")]
Interval = Annotated[str, choice_option("--interval", "t", "bootstrap")]
Format = Annotated[str, choice_option("--format", *TEXT_FORMATS, "parquet")]
Out = Annotated[Path | None, output_option("File to write; default: stdout.")]


def split(values: Iterable[str] | None) -> list[str]:
    """The words of an option that takes them comma-separated and may be repeated.

    >>> split(["kl.label, seed", "optimizer.lr"])
    ['kl.label', 'seed', 'optimizer.lr']
    """
    words: list[str] = []
    for value in values or ():
        words += [word.strip() for word in value.split(",")]
    return [word for word in words if word]


def split_unless_none(values: Iterable[str] | None) -> list[str]:
    """:func:`split`, where the one word ``none`` stands for no word at all.

    >>> split_unless_none(["none"]), split_unless_none(["seed"])
    ([], ['seed'])
    """
    words = split(values)
    return [] if words == ["none"] else words


@dataclass(frozen=True, kw_only=True)
class Source:
    """Options of every command that reads runs."""

    uri: Uri = DEFAULT_URI
    experiment: Annotated[str | None, typer.Option(help="Only this experiment; default: all.")] = None
    where: Where = None


@dataclass(frozen=True, kw_only=True)
class Query(Source):
    """Options of every command that compares groups of runs."""

    group: Group = None
    status: Annotated[str, typer.Option(help=f"Which runs count: {', '.join(STATUSES)}.")] = "finished"
    pool: Pool = None
    keep_repeats: KeepRepeats = False
    of: Of = "last"
    collapse: Collapse = None
    split_versions: SplitVersions = False

    @property
    def statuses(self) -> tuple[str, ...]:
        """The statuses of the runs that count, as MLflow writes them. Raises :class:`UserError`."""
        words = [word.lower() for word in split([self.status])]
        for word in words:
            check_choice("--status", word, STATUSES)
        # Written out, because stores have no such status.
        if "all" in words:
            words = [word for word in STATUSES if word != "all"]
        return tuple(word.upper() for word in words)

    def run_query(
        self, metrics: Sequence[str] | None, default_group: Sequence[str] | None = None, **further: Any
    ) -> RunQuery:
        """The question that these options ask; ``further`` are fields of the question that a command sets."""
        from kl_comedy.results.selection import RunQuery

        group = default_group
        if self.group:
            group = split(self.group)
        return RunQuery(
            uri=self.uri,
            experiment=self.experiment,
            where=self.where,
            metrics=split(metrics) or None,
            group=group,
            pool=split(self.pool),
            statuses=self.statuses,
            of=self.of,
            collapse=self.collapse,
            keep_repeats=self.keep_repeats,
            split_versions=self.split_versions,
            **further,
        )

    def counted(self, query: RunQuery) -> Selection:
        """The selection of runs whose status counts. Raises :class:`RunFailed` where there is none."""
        chosen = select(query)
        # Chosen first and then filtered: repeats and collapsed runs are found among runs of every status.
        frame = chosen.frame[chosen.frame["status"].isin(self.statuses)]
        if frame.empty:
            raise RunFailed(f"no run with status {self.status}; --status all counts every run")
        return dataclasses.replace(chosen, frame=frame)


def select(query: RunQuery) -> Selection:
    """The runs of every status, with their values; the notes are printed."""
    from kl_comedy.results.selection import choose_runs, with_run_values

    chosen = choose_runs(query)
    # Before the values are read, which takes seconds and may fail: a note often says why.
    for note in chosen.notes:
        message(note)
    return with_run_values(query, chosen)


def command(app: typer.Typer, example: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a command of ``app``. The fields of its only parameter, a record, become options."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        app.command(function.__name__, epilog=f"Example: `kl-comedy results {example}`")(options_in_a_record(function))
        return function

    return register


def parse_options(record: type[Options], words: Sequence[str]) -> Options:
    """The record that the ``words`` of a command line stand for. Raises :class:`UserError` for a mistake in them."""
    parser = typer.Typer(add_completion=False)
    # Without --help, which would print a page instead of returning a record.
    parser.command(add_help_option=False)(with_options(lambda options: options, record))
    try:
        options: Options = typer.main.get_command(parser).main(args=list(words), standalone_mode=False)
    except typer.TyperException as error:
        raise UserError(error.format_message()) from None
    return options


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """A table, and the notes that stay with it."""

    frame: pd.DataFrame
    notes: Sequence[str] = ()


def write_table(made: ResultTable, format: str, out: Path | None, uri: str | None = None) -> None:
    """Print a table, or write it to ``out`` and print that path.

    The notes were printed to stderr before. They stay with the table in every format; below a text in files only. A
    Markdown file begins with the command that made it from the runs of ``uri``.
    """
    from kl_comedy.results.tables import render

    if out is None and format == "parquet":
        raise UserError("--out: parquet is binary; name a file")
    frame = made.frame
    # Data has no line below it: the notes become a column, and are read with the numbers.
    if made.notes and format in EXPORT_FORMATS:
        frame = frame.assign(notes="; ".join(made.notes))
    if out is None:
        # A reader of the terminal saw them on stderr; who copies Markdown or LaTeX needs them in the text.
        notes_below = () if format in ("text", "table") else made.notes
        print_frame(frame, format, notes_below)
        return

    if format == "parquet":
        out.parent.mkdir(parents=True, exist_ok=True)
        # Binary: it does not go through the text below.
        frame.to_parquet(out, index=False)
    else:
        text = render(frame, format, made.notes) + "\n"
        if format == "markdown" and uri:
            text = f"<!-- {provenance(uri, out)} -->\n\n{text}"
        atomic_write(out, text)
    typer.echo(one_line(str(out)))


def provenance(uri: str, out: Path) -> str:
    """The command that runs, as the table ``out`` names it, for ``results verify``.

    Without --out and --format, and with the path of its export from the folder of ``out``. A store's address is left
    out: `results verify` takes the export beside the table.
    """
    from kl_comedy.results.runs import EXPORTS

    words = ["kl-comedy"]
    given = iter(sys.argv[1:])
    for word in given:
        option, has_value, _ = word.partition("=")
        if option not in ("--out", "--format", "--uri"):
            words.append(word)
        elif not has_value:
            next(given, None)  # its value is the next word
    if Path(uri).suffix in EXPORTS:
        words += ["--uri", Path(os.path.relpath(uri, out.parent)).as_posix()]
    # Two dashes and > would end the HTML comment that the command stands in.
    return redact_command(words).replace("-->", "-- >")
