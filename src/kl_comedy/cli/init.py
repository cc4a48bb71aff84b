"""``kl-comedy init``: write a small commented file to begin with."""

from __future__ import annotations

import shlex
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from kl_comedy.cli.common import check_choice, message
from kl_comedy.errors import UserError

KINDS = {
    "run": (".yaml", ("kl-comedy check {file}", "kl-comedy train {file}")),
    "grid": (".yaml", ("kl-comedy sweep {file} --dry-run", "kl-comedy sweep {file} --local 1")),
    "plugin": (".py", ("kl-comedy list rewards --plugin {file}", "kl-comedy list callbacks --plugin {file}")),
    "profile": (".yaml", ("kl-comedy sweep GRID --slurm {file} --dry-run",)),
    "estimator": (".py", ("kl-comedy certify --plugin {file}",)),
}
"""The suffix of each kind of file, and the commands that use it."""


def init(
    kind: Annotated[str, typer.Argument(help=", ".join(KINDS))],
    file: Annotated[Path | None, typer.Argument(help="A new file; default: my_KIND.yaml or .py")] = None,
) -> None:
    """Write a small commented FILE: a run's config, a grid, a plugin, a SLURM profile or an estimator.

    Example: `kl-comedy init run my_run.yaml`
    """
    check_choice("KIND", kind, list(KINDS))
    suffix, commands = KINDS[kind]
    path = file or Path(f"my_{kind}{suffix}")
    if path.suffix != suffix:
        raise UserError(f"FILE: got {str(path)!r}; a {kind} is a {suffix} file")
    # From the package's resources: it may be installed in an archive.
    text = files("kl_comedy.cli").joinpath(f"templates/{kind}{suffix}").read_text(encoding="utf-8")
    try:
        # x: a second call must not overwrite what the user has edited since the first.
        with path.open("x", encoding="utf-8") as output:
            output.write(text)
    except FileExistsError:
        raise UserError(f"FILE: {path} exists; name a new file") from None
    except OSError as error:
        raise UserError(f"FILE: cannot write {path}: {error.strerror}") from None
    print(path)
    for command in commands:
        message(command.format(file=shlex.quote(str(path))))
