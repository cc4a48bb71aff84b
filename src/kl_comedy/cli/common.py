"""Arguments, loading of plugins and configs, checks of options, and output that several commands share."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kl_comedy import io
from kl_comedy.cli.completion import complete_config, complete_override
from kl_comedy.errors import UserError, bad_value, shown
from kl_comedy.redaction import printable, redact_command, redact_source, refuse_secrets

if TYPE_CHECKING:
    from kl_comedy.config import Config

RANK_VARIABLES = ("RANK", "SLURM_PROCID", "LOCAL_RANK")
"""Where launchers write a process's rank. RANK first: torchrun under srun sets both, and SLURM's is then the node's."""


def check_choice(option: str, value: str, allowed: Sequence[str]) -> None:
    """Raise :class:`UserError` unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise bad_value(option, value, allowed)


def choice_option(name: str, *allowed: str) -> Any:
    """The typer option ``name`` within an ``Annotated`` type; it takes the two or more ``allowed`` values only.

    Not an Enum of typer's: its error names no nearest value, and a wrong value would read otherwise than in a config.
    """

    def check(value: str) -> str:
        check_choice(name, value, allowed)
        return value

    *others, last = allowed
    return typer.Option(name, help=f"{', '.join(others)} or {last}", callback=check)


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
    from kl_comedy.training.run_folder import load_stored_plugins, stored_record

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
    """Print rows in a format of :func:`kl_comedy.tracking.tables.render`."""
    import pandas as pd

    from kl_comedy.tracking.tables import render

    print(render(pd.DataFrame(rows), format))


def parse_yaml(option: str, text: str) -> Any:
    """The YAML value of an option, e.g. ``'{estimator: k3}'``. Raises :class:`UserError`."""
    try:
        return io.parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{option} {shown(text)}: not a YAML mapping ({error})") from None


def plural(count: int, noun: str) -> str:
    """The noun, with an s unless ``count`` is 1.

    >>> plural(1, "engine"), plural(2, "engine")
    ('engine', 'engines')
    """
    return noun if count == 1 else f"{noun}s"


def process_rank() -> int:
    """The rank of this process in a distributed run, from the variables of torchrun, srun or our launcher; else 0."""
    # A launcher that does not use a variable may still pass on an empty one.
    for name in RANK_VARIABLES:
        if os.environ.get(name):
            return int(os.environ[name])
    return 0


def message(text: str) -> None:
    """Print a message to stderr; stdout is for data."""
    # Every message passes here: a config or an error may hold a token, or a terminal's control characters.
    print(printable(redact_source(text)), file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, where that is a terminal. Yields the function that advances it by one."""
    from rich.progress import Progress

    # A bar in a log file is a page of control characters.
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)


def stderr_console() -> Console:
    """A console on stderr that is quiet on all ranks but rank 0."""
    return Console(stderr=True, quiet=process_rank() != 0)
