"""``kl-comedy init``: write a small commented file to begin with."""

from __future__ import annotations

import shlex
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from kl_comedy.cli.common import check_choice, message
from kl_comedy.config.load import EXTENDS
from kl_comedy.config.shipped import kind_of, named_config, shipped_names, shipped_profiles
from kl_comedy.errors import UserError, bad_value
from kl_comedy.redaction import one_line

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
    origin: Annotated[
        str | None, typer.Option("--from", metavar="NAME", help="Copy a file of `kl-comedy list configs`")
    ] = None,
) -> None:
    """Write a small commented FILE: a run's config, a grid, a plugin, a SLURM profile or an estimator.

    Example: `kl-comedy init run my_run.yaml`

    Example: `kl-comedy init run my_qwen.yaml --from qwen2.5_0.5b_gsm8k`
    """
    check_choice("KIND", kind, list(KINDS))
    suffix, commands = KINDS[kind]
    path = file or Path(f"my_{kind}{suffix}")
    if path.suffix != suffix:
        raise UserError(f"FILE: got {str(path)!r}; did you mean '{path.name}{suffix}'? it is a {suffix} file")
    if origin is None:
        # From the package's resources: it may be installed in an archive.
        text = files("kl_comedy.cli").joinpath(f"templates/{kind}{suffix}").read_text(encoding="utf-8")
    else:
        text = _copy_of(kind, origin)
    try:
        # x: a second call must not overwrite what the user has edited since the first.
        with path.open("x", encoding="utf-8") as output:
            output.write(text)
    except FileExistsError:
        raise UserError(f"FILE: {path} exists; name a new file") from None
    except OSError as error:
        raise UserError(f"FILE: cannot write {path}: {error.strerror}") from None
    print(one_line(str(path)))
    message("next:")
    for command in commands:
        message(command.format(file=shlex.quote(str(path))))


def _copy_of(kind: str, origin: str) -> str:
    """The text of a file that comes with the package. Raises :class:`UserError` for an unknown name or another kind."""
    if kind == "profile":
        profiles = shipped_profiles()
        if origin not in profiles:
            raise bad_value("--from", origin, list(profiles))
        return profiles[origin].read_text(encoding="utf-8")
    if kind not in ("run", "grid"):
        raise UserError(f"--from: a {kind} has no copies; allowed: run, grid, profile")
    source = named_config(origin)
    kind_of_source = kind_of(source)
    if kind_of_source != kind:
        raise UserError(f"--from: {origin} is a {kind_of_source}: kl-comedy init {kind_of_source} --from {origin}")
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(_with_name(line, source.parent) for line in lines)


def _with_name(line: str, folder: Path) -> str:
    """The line of a shipped file; where it names another file beside it, with that file's name in place of its path.

    The copy looks for a path beside itself, and finds a name everywhere.
    """
    key, _, value = line.partition(":")
    if key not in ("base", EXTENDS):
        return line
    name_of_path = {path.resolve(): name for name, path in shipped_names().items()}
    file = value.split("#")[0].strip()
    return line.replace(file, name_of_path[(folder / file).resolve()], 1)
