"""What every loader asks of its config: options it knows, settings it uses, a path that exists."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kl_comedy.config.schema import DatasetConfig
from kl_comedy.errors import UserError, bad_value, nearest


def known_options(config: DatasetConfig, allowed: Iterable[str], *, key: str) -> None:
    """Raise :class:`UserError` for the first option not in ``allowed``."""
    names = list(allowed)
    for option in config.options:
        if option not in names:
            raise bad_value(f"{key}.options", option, names)


def unused(config: DatasetConfig, *settings: str, key: str) -> None:
    """Raise :class:`UserError` for a setting the loader would silently ignore."""
    for setting in settings:
        if getattr(config, setting):
            raise UserError(
                f"{key}.{setting}: got {getattr(config, setting)!r}, but the dataset {config.dataset!r} "
                f"does not use it; leave it out"
            )


def existing_file(config: DatasetConfig, suffixes: tuple[str, ...], *, key: str) -> Path:
    """The file at ``config.path`` (``~`` expanded). A miss names the nearest file of that folder."""
    if not config.path:
        raise UserError(f"{key}.path: the dataset {config.dataset!r} needs the path of a file")
    path = Path(config.path).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise bad_value(f"{key}.path", config.path, "a file", "this is a folder")
    folder = path.parent
    if not folder.is_dir():
        raise bad_value(f"{key}.path", config.path, "an existing file", f"there is no folder {str(folder)!r}")
    files = sorted(file.name for file in folder.iterdir() if file.is_file())
    near = nearest(path.name, [name for name in files if name.endswith(suffixes)]) or nearest(path.name, files)
    hint = f"did you mean {str(folder / near)!r}?" if near else f"no similar name among the {len(files)} files there"
    raise bad_value(f"{key}.path", config.path, "an existing file", hint)
