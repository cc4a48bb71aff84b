"""The configs, grids and SLURM profiles that come with the package, by name from any folder.

In a checkout they are ``configs/`` and ``slurm/profiles`` at its root; ``setup.py`` copies them into the wheel.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_comedy.errors import UserError, nearest_names
from kl_comedy.io import read_text, read_yaml

PACKAGE = Path(__file__).parents[1]
CONFIGS = "configs"
PROFILES = "slurm/profiles"
SUFFIXES = (".yaml", ".yml")
SUGGESTED = 3
"""The most names that the message about an unknown name suggests."""
ABBREVIATIONS = ("Dr.", "Sec.", "al.")
"""Words whose dot does not end the sentence in which a file says what it is."""


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """A file that comes with the package."""

    name: str
    """Its path without the suffix, from the folder of its kind: ``quickstart``, ``sweeps/pocket_beta``."""
    path: Path
    kind: str
    """``run``, ``grid`` or ``profile``, as ``kl-comedy init`` calls them."""

    def row(self) -> dict[str, Any]:
        """What ``kl-comedy list configs`` prints."""
        return {"name": self.name, "kind": self.kind, "summary": summary_of(self.path), "source": str(self.path)}


def folder_of(kind: str) -> Path:
    """Where :data:`CONFIGS` or :data:`PROFILES` are: in the installed package, else at the root of the checkout."""
    installed = PACKAGE / "shipped"
    if installed.is_dir():
        return installed / kind
    return PACKAGE.parents[1] / kind


def shipped_names() -> dict[str, Path]:
    """The files of configs and grids by name."""
    return _files_in(CONFIGS)


def shipped_profiles() -> dict[str, Path]:
    """The files of SLURM profiles by name."""
    return _files_in(PROFILES)


def _files_in(kind: str) -> dict[str, Path]:
    folder = folder_of(kind)
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in sorted(folder.rglob("*.yaml"))}


def shipped_files() -> list[Shipped]:
    """Every file that comes with the package: runs, grids, profiles."""
    files = []
    for name, path in shipped_names().items():
        files.append(Shipped(name=name, path=path, kind=kind_of(path)))
    for name, path in shipped_profiles().items():
        files.append(Shipped(name=name, path=path, kind="profile"))
    return files


def kind_of(path: Path) -> str:
    """``grid`` for a file that names the config of its cells, else ``run``."""
    if "base" in read_yaml(path):
        return "grid"
    return "run"


def summary_of(path: Path) -> str:
    """The first sentence of the comment at the top of a file."""
    words: list[str] = []
    for line in read_text(path).splitlines():
        if not line.startswith("#"):
            break
        words += line.removeprefix("#").split()
    sentence: list[str] = []
    for word in words:
        sentence.append(word)
        if word.endswith(".") and word not in ABBREVIATIONS:
            break
    return " ".join(sentence).removesuffix(".")


def find_config(given: str | Path) -> Path:
    """The file that a command's CONFIG or GRID names: a path, or the name of a config that comes with the package.

    What ends with .yaml or .yml is a path; a text with a slash is one where it exists. A name is the whole one, as
    ``sweeps/pocket_beta``, or its last part where no other config has it. Raises :class:`UserError` with the nearest
    names.
    """
    text = str(given)
    path = Path(text)
    if path.suffix in SUFFIXES:
        if not path.is_file():
            _suggest_shipped(path)
        return path  # a missing file is reported where it is read, with the nearest one beside it
    if "/" in text and path.exists():
        return path
    shipped = shipped_config(text)
    if shipped is not None:
        return shipped
    # A file without a suffix, or the folder of a run, which the reader explains.
    if path.exists():
        return path
    raise _no_such_name(text)


def shipped_config(name: str) -> Path | None:
    """The config or grid of that name; None where there is none, or where several end with it."""
    names = shipped_names()
    if name in names:
        return names[name]
    matches = _ending_with(name)
    if len(matches) == 1:
        return names[matches[0]]
    return None


def named_config(name: str) -> Path:
    """The config or grid of that name. Raises :class:`UserError` with the nearest names."""
    path = shipped_config(name)
    if path is None:
        raise _no_such_name(name)
    return path


def beside(folder: Path, given: str) -> Path:
    """The file that a config in ``folder`` names (``extends``, a grid's ``base``): a path from there, or a name."""
    path = Path(os.path.normpath(folder / given))
    if path.suffix in SUFFIXES or path.exists():
        return path
    return shipped_config(given) or path


def _ending_with(name: str) -> list[str]:
    return [other for other in shipped_names() if other.rpartition("/")[2] == name]


def _no_such_name(text: str) -> UserError:
    several = _ending_with(text)
    if several:
        return UserError(f"several configs are named {text!r}; name one of them: {', '.join(several)}")
    names = list(shipped_names())
    # Last parts too: a user need not know the folder.
    last_parts = [name.rpartition("/")[2] for name in names]
    near = nearest_names(text, dict.fromkeys([*names, *last_parts]), SUGGESTED)
    hint = ""
    if near:
        hint = f"; did you mean {' or '.join(near)}?"
    return UserError(
        f"no config is named {text!r}{hint} (`kl-comedy list configs` lists them; a file's path ends with .yaml)"
    )


def _suggest_shipped(path: Path) -> None:
    """Raise :class:`UserError` for a missing path of a checkout, as ``configs/quickstart.yaml``, whose file has a name.

    The help of every command has such paths, and an installed package has no folder of them.
    """
    folder, _, name = path.with_suffix("").as_posix().partition("/")
    if folder == CONFIGS and name in shipped_names():
        raise UserError(f"no such config file: {path}; the one that comes with the package is named {name}")
