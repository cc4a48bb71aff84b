"""What several commands share: arguments, loading plugins and configs, checks of options, messages on stderr."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kl_comedy.errors import UserError, bad_value

if TYPE_CHECKING:
    from kl_comedy.config import Config

ConfigArgument = Annotated[Path, typer.Argument(help="A YAML config, as configs/quickstart.yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, as optimizer.lr=1e-4 kl.0.beta=0.1")]
Plugins = Annotated[list[Path] | None, typer.Option("--plugin", help="A Python file that registers parts")]
TableOrJson = Annotated[str, typer.Option("--format", help="table or json")]

RANK_VARIABLES = ("RANK", "SLURM_PROCID", "LOCAL_RANK")


def load_plugins(plugins: Iterable[str | Path] | None) -> None:
    """Import each ``--plugin`` file. Raises :class:`UserError` for one that is missing or fails on import."""
    from kl_comedy.registry import load_plugin_file

    for file in plugins or ():
        load_plugin_file(file)


def load(config: Path, overrides: Sequence[str] | None = None, plugins: Iterable[str | Path] | None = None) -> Config:
    """The config of a command. Plugins are loaded first: the config may name their parts."""
    from kl_comedy.config import load_config

    load_plugins(plugins)
    return load_config(config, list(overrides or []))


def check_choice(option: str, value: str, allowed: Sequence[str] = ("table", "json")) -> None:
    """Raise :class:`UserError` unless ``value`` is allowed; the default is what ``--format`` takes."""
    if value not in allowed:
        raise bad_value(option, value, allowed)


def parse_yaml(option: str, text: str) -> Any:
    """The YAML value of an option, as ``'{estimator: k3}'``. Raises :class:`UserError`."""
    from omegaconf import OmegaConf

    try:
        return OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except Exception as error:
        raise UserError(f"{option} {text!r}: not a YAML mapping ({str(error).splitlines()[0]})") from None


def process_rank() -> int:
    """The rank of this process in a distributed run, from the variables of torchrun, srun or our launcher; else 0."""
    return int(next((os.environ[name] for name in RANK_VARIABLES if os.environ.get(name)), 0))


def stderr_console() -> Console:
    """Messages go to stderr, data to stdout. Only rank 0 prints messages."""
    return Console(stderr=True, quiet=process_rank() != 0)
