"""The folder of a run: what is in it, and who trains in it.

runs/NAME-N/  config.yaml  plugins/  checkpoints/  policy/  spool.jsonl  tables/  summary.json
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kl_comedy.config import Config, config_reader
from kl_comedy.config.validate import parse_record
from kl_comedy.errors import UserError
from kl_comedy.io import (
    LockHeld,
    check_tree,
    file_lock,
    inside,
    read_json,
    set_aside,
    write_json,
    yaml_is_changed,
)
from kl_comedy.registry import (
    KINDS,
    PACKAGES,
    PLUGIN_FILES,
    changed_names,
    import_modules,
    load_plugin_file,
    plugin_hashes,
    plugin_sources,
)

log = logging.getLogger("kl_comedy")

PLUGINS = "plugins.json"
"""In the folder of a run with plugins: their record (:meth:`kl_comedy.registry.PluginSet.record`)."""

PLUGIN_FOLDER = "plugins"
"""Their source, credentials hidden."""

PLUGIN_KEYS = {"sources": dict}
REDACTED = "credentials are hidden in the stored source, or it was edited"

CONFIG = "config.yaml"
SUMMARY = "summary.json"
EXTENSION = "extends.json"
"""In the folder of a run that extends another (:mod:`kl_comedy.training.extension`)."""

# A folder may come from elsewhere, with links in these places that lead out of it.
RUN_FILES = (
    CONFIG,
    SUMMARY,
    PLUGINS,
    EXTENSION,
    "spool.jsonl",
    "tracking.json",
    "params.json",
    ".lock",
    "tracking.lock",
)
RUN_FOLDERS = (
    "checkpoints",
    "policy",
    "adapter",
    "plugins",
    "provenance",
    "tables",
    "files",
    "rollouts",
    "sampler",
    "csv",
    "tensorboard",
)
"""What a run writes and reads in its folder. W&B's folder is not here: its own links lead to the user's cache."""
SUMMARY_KEYS = dict.fromkeys(("status", "name", "kl", "command", "evaluate_command", "mlflow_uri"), str)


class RunDir:
    """A run's folder. ``adapter`` is there beside the merged ``policy`` of a LoRA run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.policy = path / "policy"
        self.adapter = path / "adapter"

    @property
    def label(self) -> str:
        """Its name among other runs: that of its folder. Those of a sweep's cells are all called ``run``."""
        path = self.path.resolve()
        is_of_cell = path.name == "run" and path.parent.parent.name == "cells"
        if is_of_cell:
            return f"{path.parents[2].name}-{path.parent.name}"
        return path.name

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint that was renamed to its final name, or None."""
        return next(reversed(saved(self.checkpoints)), None)

    def check_links(self) -> None:
        """Raise :class:`UserError` for a link out of the folder, and for a pipe or a folder in a file's place.

        Called before anything of a folder that exists already is read or written: it may come from elsewhere.
        """
        check_tree(self.path, RUN_FILES, RUN_FOLDERS)
        inside(self.path / "wandb", self.path)

    def config_reader(self) -> Callable[[Sequence[str]], Config]:
        """Its config under overrides, as :func:`kl_comedy.config.config_reader`.

        Raises :class:`UserError`, also as :meth:`check_links`.
        """
        self.check_links()
        file = self.path / CONFIG
        # Every resolved config has a name. A file that was cut short may be a valid config of defaults.
        if file.is_file() and re.search(rb"^name:", file.read_bytes(), re.MULTILINE) is None:
            raise UserError(f"{file} is damaged: it does not hold the config of a run")
        return config_reader(file)

    def stored_config(self) -> Config:
        """The config that the run was started with. Raises :class:`UserError` for a file that is not as it was written.

        It says which run this is, so that a changed digit in it must not make another run of it.
        """
        read = self.config_reader()
        if yaml_is_changed(self.path / CONFIG):
            raise UserError(f"{self.path / CONFIG} is damaged: it is not as it was written")
        level = log.level
        # Its warnings were printed when it was started.
        log.setLevel(logging.ERROR)
        try:
            return read([])
        finally:
            log.setLevel(level)

    def summary(self) -> dict[str, Any] | None:
        """What the run ended with, or None while it has not ended. Raises :class:`UserError` for a damaged file."""
        file = self.path / SUMMARY
        if not file.is_file():
            return None
        content: dict[str, Any] = read_json(file, "summary of a run", SUMMARY_KEYS, root=self.path)
        return content

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_json(self.path / SUMMARY, summary, private=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder for this process. Raises :class:`UserError` where a live process has locked it."""
        try:
            # Without waiting: whoever starts a run twice wants to know it, not to train it again afterwards.
            with file_lock(self.path / ".lock", wait_s=0):
                yield
        except LockHeld as error:
            raise UserError(f"{self.path} is being trained by process {error.holder}; wait for it, or end it") from None


def saved(root: Path) -> list[Path]:
    """Checkpoints under their final names, oldest first; their files are not checked here. Other names are ignored."""
    return sorted((path for path in root.glob("step-*.ckpt") if _is_step(path)), key=step_of)


def _is_step(path: Path) -> bool:
    return re.fullmatch(r"step-[0-9]{1,18}\.ckpt", path.name) is not None


def step_of(checkpoint: Path) -> int:
    """The update after which it was made."""
    return int(checkpoint.stem.split("-")[1])


def readable_summary(run: RunDir) -> dict[str, Any] | None:
    """The run's summary. A damaged one is renamed with a warning, and None: the run then resumes and writes it anew."""
    try:
        return run.summary()
    except UserError as error:
        _set_aside(run.path / SUMMARY, f"{error}; the run resumes from its newest checkpoint")
        return None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: its folder and the summary written there."""

    run: RunDir
    summary: dict[str, Any]
    already_finished: bool = False


def finished_outcome(run: RunDir) -> Outcome:
    """The outcome of a run that has finished earlier."""
    summary = run.summary()
    assert summary is not None
    return Outcome(run=run, summary=summary, already_finished=True)


def _set_aside(file: Path, message: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        log.warning("%s (it is now %s)", message, set_aside(file).name)


@dataclass(frozen=True, kw_only=True)
class PackageRecord:
    """A package of a run: its version, the modules that register its parts, and the names of its sources."""

    version: str | None = None
    modules: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PluginRecord:
    """:data:`PLUGINS`: hashes by the name of the source, and what to load; ``files``: None in earlier versions."""

    sources: dict[str, str]
    files: tuple[str, ...] | None = None
    packages: dict[str, PackageRecord] = field(default_factory=dict)


def stored_record(folder: Path) -> PluginRecord | None:
    """The record of the plugins stored in a folder; None where there is none.

    Raises :class:`UserError` where it is damaged.
    """
    file = folder / PLUGINS
    if not file.is_file():
        file = folder / PLUGIN_FOLDER / PLUGINS  # where a tracking store keeps it
    if not file.is_file():
        return None
    try:
        content = read_json(file, "record of plugins", PLUGIN_KEYS, root=file.parent)
        record = parse_record(PluginRecord, content, origin=str(file))
    except UserError as error:
        raise UserError(f"{error}; name the run's plugins with --plugin, and remove {file}") from None
    if record.files is None:
        record = replace(record, files=_imported_by_none(folder / PLUGIN_FOLDER, record.sources))
    return record


def load_stored_plugins(folder: Path, record: PluginRecord, *, files: bool = True) -> list[str]:
    """Load the plugins stored with a run, which is to run their code. What was done, in lines to print.

    ``record`` is :func:`stored_record`. A package that is installed is used as it is, since a copy of its Python source
    alone may not work. ``files`` is false where ``--plugin`` replaces the stored files. Raises :class:`UserError` for a
    plugin that fails on import.
    """
    # Built-in parts first: a plugin that registers one of their names is refused, whatever is loaded later.
    for table in KINDS.values():
        table.load()
    lines = []
    for name in record.packages:
        lines += _load_stored_package(folder, name, record)
    missing = _missing_files(record) if files else []
    if missing:
        lines.append(f"plugins of {folder}: {', '.join(missing)}")
        _put_first(folder)  # the modules that they import, as they were
    for name in missing:
        load_plugin_file(folder / PLUGIN_FOLDER / name)
    if missing:
        # A package's source is stored beside the files, which may import it; it is the package's source all the same.
        for package in record.packages.values():
            for name in package.sources:
                PLUGIN_FILES.pop(name, None)
    loaded = {name: digest for name, digest in plugin_hashes(PLUGIN_FILES).items() if name in record.sources}
    before = {name: record.sources[name] for name in loaded}
    if before != loaded:
        reason = REDACTED if missing else "the one given is used"
        lines.append(f"{changed_names(before, loaded)} is not what {folder} was trained with ({reason})")
    return lines


def _missing_files(record: PluginRecord) -> list[str]:
    """The stored plugin files that are not loaded yet. A name with a folder would lead out of the stored ones."""
    missing = []
    for name in record.files or ():
        is_loaded = name in PLUGIN_FILES
        is_plain_name = Path(name).name == name
        if is_plain_name and not is_loaded:
            missing.append(name)
    return missing


def _load_stored_package(folder: Path, name: str, record: PluginRecord) -> list[str]:
    """Import the modules of a package that register parts, from where it is installed, else from the folder."""
    package = record.packages[name]
    stored = folder / PLUGIN_FOLDER
    is_installed = _is_installed(name, stored)
    has_copy = (stored / name).is_dir() or (stored / f"{name}.py").is_file()
    lines = []
    if not is_installed and has_copy:
        lines.append(f"{name} is not installed: its source in {stored} is used")
        _put_first(folder)
    elif not is_installed:
        lines.append(f"{name} {package.version or ''} is not installed, and {folder} has no copy of its source")
    import_modules(package.modules, f"the package {name} of {folder}")
    before = {path: record.sources.get(path, "") for path in package.sources}
    if name in PACKAGES and before != PACKAGES[name].hashes:
        changed = changed_names(before, PACKAGES[name].hashes)
        reason = REDACTED
        if is_installed:
            reason = f"the package {name} is used as it is installed, not as it was"
        lines.append(f"{changed} changed since {folder}: {reason}")
    return lines


def _put_first(folder: Path) -> None:
    """Let Python find the plugins stored in the folder before others of their names."""
    stored = str((folder / PLUGIN_FOLDER).resolve())
    if stored not in sys.path:
        sys.path.insert(0, stored)


def _is_installed(package: str, stored: Path) -> bool:
    """Whether Python finds the package elsewhere than in the folder of stored plugins."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    locations = list(spec.submodule_search_locations or [spec.origin or ""])
    folder = stored.resolve()
    return not any(Path(location).resolve().is_relative_to(folder) for location in locations)


def _imported_by_none(stored: Path, names: Iterable[str]) -> tuple[str, ...]:
    """The plugin files among the stored ones, of a run that did not record which: those that no other imports."""
    files = [name for name in names if "/" not in name and (stored / name).is_file()]
    imported: set[str] = set()
    for name in files:
        imported |= set(plugin_sources(stored / name)) - {name}
    plugin_files = [name for name in files if name not in imported]
    # Files that import each other: all of them.
    return tuple(plugin_files or files)
