"""The plugins of a run: which ones its config uses, their copy in its folder, and the way back from there.

    config -> plugins_of -> PluginSet -> write_plugins -> RUN/plugins/, RUN/plugins.json -> load_stored_plugins

A run is resumed where the sources are equal to the copy byte for byte (:func:`differing_plugins`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kl_comedy.config import Config
from kl_comedy.config.validate import fields_with_registry, parse_record
from kl_comedy.errors import UserError
from kl_comedy.io import atomic_write, read_json, write_json
from kl_comedy.plugins import PACKAGES, PLUGIN_FILES, PluginSet, listed, plugins_with
from kl_comedy.registry import KINDS, import_modules, load_plugin_file

PLUGINS = "plugins.json"
"""In a folder with plugins: what loads them again (:meth:`kl_comedy.plugins.PluginSet.record`)."""

PLUGIN_FOLDER = "plugins"
"""Their source, credentials hidden."""


# --- of a config -----------------------------------------------------------------------------------------------------


def plugins_of(config: Config, *records: Any) -> PluginSet:
    """Every plugin file that this process loaded, and the packages from outside whose parts the config uses.

    ``records``: further dataclasses whose parts count, as an evaluation suite.
    """
    names = dict.fromkeys([*_named_parts(config), *fields_with_registry(records)])
    # A name that is registered nowhere is reported where it is used, with the nearest right one.
    entries = [KINDS[kind].get(name) for kind, name in names if name in KINDS[kind]]
    return plugins_with(module for entry in entries for module in entry.modules)


def _named_parts(config: Config) -> Iterator[tuple[str, str]]:
    """Kind and name of each registered part that the config names, also within a recipe or a suite."""
    from kl_comedy.evaluation.suites import get_suite
    from kl_comedy.rollouts.sampler import sampler_name

    yield from fields_with_registry(config)
    yield "rollouts", sampler_name(config)
    for name in config.algorithm.correction:
        yield "policy_corrections", name
    if config.kl:
        yield from _names_in_terms(config.kl)
    # An audit that never happens uses no part.
    if config.audit.every:
        for terms in config.audit.terms:
            yield from _names_in_terms(terms)
    for name in config.eval.suites:
        yield "suites", name
        # Built-in suites use built-in parts only; reading each of their files here would cost every start its time.
        is_file = name.endswith((".yaml", ".yml"))
        if is_file or (name in KINDS["suites"] and KINDS["suites"].get(name).modules):
            with contextlib.suppress(UserError):  # a missing file is reported where the suite is loaded
                yield from fields_with_registry(get_suite(name))


def _names_in_terms(value: Any) -> Iterator[tuple[str, str]]:
    """Kind and name of the recipes and parts in KL terms as a config writes them."""
    from kl_comedy.kl import resolve_terms

    items = [value]
    if isinstance(value, list):
        items = value
    for item in items:
        recipe = item
        if isinstance(item, Mapping):
            recipe = item.get("recipe")
        if isinstance(recipe, str):
            yield "recipes", recipe
    with contextlib.suppress(UserError):  # `own` and `panel` of an audit are not recipes
        yield from fields_with_registry(resolve_terms(value))


# --- in a folder -----------------------------------------------------------------------------------------------------


def write_plugins(folder: Path, plugins: PluginSet) -> None:
    """Copy the plugins into a folder. Commands on it load them from there, after the files have changed."""
    for name, text in plugins.archive.items():
        atomic_write(folder / PLUGIN_FOLDER / name, text)
    if plugins.files or plugins.packages:
        write_json(folder / PLUGINS, plugins.record())


def differing_plugins(folder: Path, plugins: PluginSet) -> list[str]:
    """The names of the sources that are not those in ``folder``, in order; none where the plugins are the same.

    A package without a copy counts by its version and commit.
    """
    stored = stored_sources(folder)
    now = plugins.archive
    names = {name for name in {**stored, **now} if stored.get(name) != now.get(name)}
    record = stored_record(folder)
    packages_stored = {} if record is None else _without_copy(record)
    packages_now = _without_copy(parse_record(PluginRecord, plugins.record()))
    both = {**packages_stored, **packages_now}
    names |= {name for name in both if packages_stored.get(name) != packages_now.get(name)}
    return sorted(names)


def stored_sources(folder: Path) -> dict[str, str]:
    """The sources stored in a folder, by name."""
    root = folder / PLUGIN_FOLDER
    # Python alone: where it was imported from there, the interpreter has left its __pycache__ beside it.
    files = [file for file in root.rglob("*.py") if file.is_file()]
    return {file.relative_to(root).as_posix(): file.read_text(errors="replace") for file in files}


@dataclass(frozen=True, kw_only=True)
class PackageRecord:
    """A package of a run: its version and commit, whether its source was copied, and the modules that register."""

    version: str | None = None
    commit: str | None = None
    copied: bool = True
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PluginRecord:
    """:data:`PLUGINS`: the files of ``--plugin``, and the packages."""

    files: tuple[str, ...] = ()
    packages: dict[str, PackageRecord] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    """The sources in which credentials are hidden."""


def _without_copy(record: PluginRecord) -> dict[str, tuple[str | None, str | None]]:
    """Version and commit of the packages whose source was not copied."""
    return {name: (entry.version, entry.commit) for name, entry in record.packages.items() if not entry.copied}


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
        content = read_json(file, "record of plugins", root=file.parent)
        return parse_record(PluginRecord, content, origin=str(file))
    except UserError as error:
        raise UserError(f"{error}; name the run's plugins with --plugin, and remove {file}") from None


# --- loaded again ----------------------------------------------------------------------------------------------------


def load_stored_plugins(folder: Path, record: PluginRecord, *, files: bool = True) -> list[str]:
    """Load the plugins stored with a run, which is to run their code. What was done, in lines to print.

    ``record`` is :func:`stored_record`. A package that is installed is used as it is, since a copy of its Python source
    alone may not work. ``files`` is false where ``--plugin`` replaces the stored files. Raises :class:`UserError` for a
    plugin that fails on import.
    """
    # Built-in parts first: a plugin that registers one of their names is refused, whatever is loaded later.
    for table in KINDS.values():
        table.load()
    stored = stored_sources(folder)
    lines = []
    for name in record.packages:
        lines += _load_stored_package(folder, name, record.packages[name], stored)
    missing = _missing_files(record) if files else []
    if missing:
        lines.append(f"plugins of {folder}: {', '.join(missing)}")
        _put_first(folder)  # the modules that they import, as they were
    for name in missing:
        load_plugin_file(folder / PLUGIN_FOLDER / name)
    if missing:
        # A package's source is stored beside the files, which may import it; it is the package's source all the same.
        for name in [name for name in PLUGIN_FILES if _package_of_source(name) in record.packages]:
            del PLUGIN_FILES[name]
        hidden = [name for name in record.hidden if name in PLUGIN_FILES]
        if hidden:
            lines.append(f"{listed(hidden)}: credentials are hidden in the stored source, which is used")
    loaded = PluginSet(files=PLUGIN_FILES).archive
    changed = sorted(name for name, text in loaded.items() if stored.get(name, text) != text)
    if changed:
        lines.append(f"{listed(changed)} is not what {folder} was trained with (the one given is used)")
    return lines


def _package_of_source(name: str) -> str:
    """The package or single module of a source, by its path."""
    return name.partition("/")[0].removesuffix(".py")


def _missing_files(record: PluginRecord) -> list[str]:
    """The stored plugin files that are not loaded yet. A name with a folder would lead out of the stored ones."""
    missing = []
    for name in record.files:
        is_loaded = name in PLUGIN_FILES
        is_plain_name = Path(name).name == name
        if is_plain_name and not is_loaded:
            missing.append(name)
    return missing


def _load_stored_package(folder: Path, name: str, package: PackageRecord, stored: Mapping[str, str]) -> list[str]:
    """Import the modules of a package that register parts, from where it is installed, else from the folder."""
    copies = folder / PLUGIN_FOLDER
    is_installed = _is_installed(name, copies)
    has_copy = (copies / name).is_dir() or (copies / f"{name}.py").is_file()
    lines = []
    if not is_installed and has_copy:
        lines.append(f"{name} is not installed: its source in {copies} is used")
        _put_first(folder)
    elif not is_installed:
        lines.append(f"{name} {package.version or ''} is not installed, and {folder} has no copy of its source")
    import_modules(package.modules, f"the package {name} of {folder}")
    if not is_installed or name not in PACKAGES:
        return lines
    installed = PluginSet(packages=(PACKAGES[name],))
    before = {path: text for path, text in stored.items() if _package_of_source(path) == name}
    now = installed.archive
    changed = sorted(path for path in {**before, **now} if before.get(path) != now.get(path))
    if not package.copied and (package.version, package.commit) != (PACKAGES[name].version, PACKAGES[name].commit):
        changed = [name]
    if changed:
        reason = f"the package {name} is used as it is installed, not as it was"
        lines.append(f"{listed(changed)} changed since {folder}: {reason}")
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
