"""Arguments, loading of plugins and configs, checks of options, and output that several commands share."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from rich.box import Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kl_comedy import io
from kl_comedy.cli.completion import complete_config, complete_override
from kl_comedy.errors import UserError, bad_value, shown
from kl_comedy.redaction import one_line, printable, redact_command, redact_source, refuse_secrets

if TYPE_CHECKING:
    import pandas as pd

    from kl_comedy.config import Config

Options = TypeVar("Options")

RANK_VARIABLES = ("RANK", "SLURM_PROCID", "LOCAL_RANK")
"""Where launchers write a process's rank. RANK first: torchrun under srun sets both, and SLURM's is then the node's."""


def check_choice(option: str, value: str, allowed: Sequence[str]) -> None:
    """Raise :class:`UserError` unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise bad_value(option, value, allowed)


def choice_option(name: str, *allowed: str, help: str = "") -> Any:
    """The typer option ``name`` within an ``Annotated`` type; it takes the two or more ``allowed`` values only.

    ``help`` says what they mean where their names do not.

    Not an Enum of typer's: its error names no nearest value, and a wrong value would read otherwise than in a config.
    """

    def check(value: str) -> str:
        check_choice(name, value, allowed)
        return value

    *others, last = allowed
    meaning = ""
    if help:
        meaning = f": {help}"
    return typer.Option(name, help=f"{', '.join(others)} or {last}{meaning}", callback=check)


def output_option(help: str) -> Any:
    """The typer option ``--out`` within an ``Annotated`` type; a file that cannot be written is refused at once."""

    def check(value: Path | None) -> Path | None:
        if value is not None:
            io.check_writable(value, "--out")
        return value

    return typer.Option("--out", help=help, callback=check)


ConfigArgument = Annotated[
    str,
    typer.Argument(
        help="A YAML config, e.g. my_run.yaml, or a name of `kl-comedy list configs`, e.g. quickstart",
        autocompletion=complete_config,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="key=value, e.g. optimizer.lr=1e-4 kl.0.beta=0.1", autocompletion=complete_override),
]
Plugins = Annotated[list[Path] | None, typer.Option("--plugin", help="A Python file that registers parts")]
TableOrJson = Annotated[str, choice_option("--format", "table", "json")]


def load_plugins(plugins: Iterable[str | Path] | None) -> None:
    """Import each ``--plugin`` file. Raises :class:`UserError` for one that is missing or fails on import."""
    from kl_comedy.registry import load_plugin_file

    for file in plugins or ():
        # The path becomes part of the run's command, which is stored and shown.
        refuse_secrets({"--plugin": str(file)})
        load_plugin_file(file)


def load_run_plugins(target: str | Path, *, given: Iterable[str | Path] | None = None) -> None:
    """Load the plugins stored with the run whose folder, config.yaml or checkpoint is ``target``, if it is one.

    The files ``given`` with ``--plugin`` take the place of the stored files; load those before.
    """
    path = Path(target)
    folder = path
    # RUN/checkpoints/NAME.ckpt.
    if path.suffix == ".ckpt":
        folder = path.parent.parent
    elif path.name == "config.yaml":
        folder = path.parent
    # Anything else is a model's folder or a config, and has no plugins of its own.
    is_run = (folder / "config.yaml").is_file()
    has_plugins = (folder / "plugins.json").is_file()
    if not is_run or not has_plugins:
        return
    from kl_comedy.training.run_plugins import load_stored_plugins, stored_record

    record = stored_record(folder)
    if record is None:
        return
    # Every rank loads them, and one says so.
    for line in load_stored_plugins(folder, record, files=not given):
        if process_rank() == 0:
            message(line)


def load(
    config: str | Path, overrides: Sequence[str] | None = None, plugins: Iterable[str | Path] | None = None
) -> Config:
    """The config of a command, by path or name. Plugins are loaded first: the config may name their parts."""
    from kl_comedy.config import load_config
    from kl_comedy.config.shipped import find_config

    load_plugins(plugins)
    file = find_config(config)
    load_run_plugins(file, given=plugins)
    return load_config(file, list(overrides or []))


def command_line() -> str:
    """The command that runs, quoted for a shell and without secrets."""
    # sys.argv[0] is a path of this machine, which a command to repeat should not have.
    return redact_command(["kl-comedy", *sys.argv[1:]])


def print_rows(rows: Sequence[Mapping[str, Any]], format: str) -> None:
    """Print rows in a format of :func:`kl_comedy.results.tables.render`; text fits the terminal."""
    import pandas as pd

    print_frame(pd.DataFrame(rows), format)


def print_frame(frame: pd.DataFrame, format: str = "text", notes: Sequence[str] = ()) -> None:
    """Print a table in a format of :func:`kl_comedy.results.tables.render`, with ``notes`` below.

    On a terminal no line of a text is wider than that; in a pipe its lines are as long as they are.
    """
    from kl_comedy.results.tables import fitted, render

    if format not in ("text", "table"):
        typer.echo(render(frame, format, notes))
        return
    width = shutil.get_terminal_size((0, 0)).columns  # 0 where stdout is no terminal
    typer.echo("\n".join([fitted(frame, width), *notes]))


def parse_yaml(option: str, text: str) -> Any:
    """The YAML value of an option, e.g. ``'{estimator: k3}'``. Raises :class:`UserError`."""
    try:
        return io.parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{option} {shown(text)}: not a YAML mapping ({error})") from None


def plural(count: int, noun: str) -> str:
    """The noun, with an s (after an s: es) unless ``count`` is 1.

    >>> plural(1, "engine"), plural(2, "engine"), plural(2, "process")
    ('engine', 'engines', 'processes')
    """
    if count == 1:
        return noun
    if noun.endswith("s"):
        return f"{noun}es"
    return f"{noun}s"


def process_rank() -> int:
    """The rank of this process in a distributed run, from the variables of torchrun, srun or our launcher; else 0."""
    # A launcher that does not use a variable may still pass on an empty one.
    for name in RANK_VARIABLES:
        if os.environ.get(name):
            return int(os.environ[name])
    return 0


def message(text: str) -> None:
    """Print a message to stderr; stdout is for data."""
    # Every message passes here: a config or an error may hold a token, or a terminal's control characters,
    # which are taken away first: a token is not recognized with one inside.
    print(redact_source(printable(text)), file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[], None]]:
    """Progress on stderr: a bar where that is a terminal, else plain lines every few seconds.

    Yields the function that advances it by one.
    """
    from kl_comedy.progress import stages

    done = 0
    with stages(stderr_console(), transient=True) as show:
        show(description, done, total)

        def advance() -> None:
            nonlocal done
            done += 1
            show(description, done, total)

        yield advance


PIPE_WIDTH = 100_000
"""Columns where stdout is not a terminal: rich would wrap and cut at 80 what a program or a pager reads."""


def stdout_console() -> Console:
    """A console on stdout, which is for data. Its text is not read as markup."""
    console = Console(markup=False)
    if console.is_terminal:
        return console
    return Console(width=PIPE_WIDTH, markup=False)


RULE_UNDER_HEAD = Box("    \n    \n -  \n    \n    \n    \n    \n    \n", ascii=True)
"""Lines of a table: dashes under its head and nothing else, as tables of ``certify``, ``plan`` and ``results`` have."""


class PlainTable(Table):
    """A table whose cells are texts of somebody else (names of cells and suites): one line each, without escapes."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(Text(one_line(str(cell))) for cell in cells), **options)


def plain_table(*columns: str, title: str | None = None) -> PlainTable:
    """An empty table in the style of every command: a head, a rule of dashes, and rows. Long words are folded.

    Print it with :func:`stdout_console`, which cuts nothing in a pipe.
    """
    table = PlainTable(
        title=None if title is None else Text(one_line(title)),
        title_justify="left",
        title_style="",
        header_style="",
        box=RULE_UNDER_HEAD,
        show_edge=False,
        pad_edge=False,
        # The divider between two columns is a space too.
        padding=(0, 1, 0, 0),
    )
    for column in columns:
        table.add_column(Text(one_line(column)), overflow="fold")
    return table


def print_columns(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """Print texts as a table on a terminal, in which long words are folded; else one line per row, with tabs.

    Nothing is cut: neither on a narrow terminal, nor in a pipe, where a line can be searched and split.
    """
    console = Console(markup=False)
    if not console.is_terminal:
        for row in (columns, *rows):
            print("\t".join(" ".join(one_line(text).split()) for text in row))
        return
    table = plain_table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def stderr_console() -> Console:
    """A console on stderr that is quiet on all ranks but rank 0."""
    return Console(stderr=True, quiet=process_rank() != 0)


def with_options(function: Callable[[Options], Any], record: type[Options]) -> Callable[..., Any]:
    """``function`` as typer reads it: with the fields of ``record`` as parameters, the command's own ones first.

    Typer knows parameters of functions only. As a record, the options of a command are passed on as one thing, and
    several commands share those that they have in common.
    """

    def call(**options: Any) -> Any:
        return function(record(**options))

    types = get_type_hints(record, include_extras=True)
    own_names = inspect.get_annotations(record)
    fields = list(dataclasses.fields(record))  # type: ignore[arg-type]
    # Stable, so that both parts keep the order in which they were written.
    fields.sort(key=lambda field: field.name not in own_names)
    parameters = []
    for field in fields:
        parameter = inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, annotation=types[field.name])
        # dataclasses and inspect have each their own mark for "no default".
        if field.default is not dataclasses.MISSING:
            parameter = parameter.replace(default=field.default)
        parameters.append(parameter)
    vars(call)["__signature__"] = inspect.Signature(parameters)
    call.__doc__ = function.__doc__
    call.__name__ = function.__name__
    # Typer asks for type hints beside the signature.
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def options_in_a_record(function: Callable[[Options], Any]) -> Callable[..., Any]:
    """Decorate a command: the fields of its only parameter, a record, become its options."""
    # By its type and not by its name: a command may call its options as it likes.
    (record,) = (hint for name, hint in get_type_hints(function).items() if name != "return")
    return with_options(function, record)
