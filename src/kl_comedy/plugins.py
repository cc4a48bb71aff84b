"""The source of parts from outside this package: of a file that ``--plugin`` names, and of a package.

It is read when the part is registered, because that is the code that runs: a file may be edited while this process is
at work. :mod:`kl_comedy.training.run_plugins` copies it into a run's folder and compares it when the run is resumed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from kl_comedy.errors import UserError
from kl_comedy.redaction import redact_source

log = logging.getLogger("kl_comedy")

PLUGIN_MODULE = "kl_comedy_plugin_"
"""How the module name of a plugin file begins."""

MOST_NAMES = 4
"""Names of changed files in a message."""

SCRIPT = "__main__"
"""The package of the parts that a script itself registers."""

MOST_ARCHIVED_FILES = 500
MOST_ARCHIVED_BYTES = 10_000_000
"""A package with more source than this is known by its version, and not copied into every run's folder."""

LIBRARIES = (
    "kl_comedy",
    "torch",
    "transformers",
    "lightning",
    "mlflow",
    "peft",
    "datasets",
    "numpy",
    "vllm",
    "accelerate",
    "omegaconf",
    "math_verify",
    "pytorch_lightning",
)
"""Packages that are not plugins where a function of theirs is registered: tags name the version of each already."""

PLUGIN_PATHS: set[str] = set()
"""The absolute path of each of :data:`PLUGIN_FILES`."""

PLUGIN_FILES: dict[str, bytes] = {}
"""Every plugin file that this process loaded, and the local modules it imports, as read, by the path from the plugin's
folder. A config may name what they register, so that they count in every run of this process."""


# --- files -----------------------------------------------------------------------------------------------------------


def plugin_sources(file: Path) -> dict[str, bytes]:
    """The content of a plugin file and of the modules and packages in its folder that it imports, theirs included.

    They are found by reading ``import`` statements, those within functions too. The names are paths from the folder.
    Raises :class:`UserError` for a missing file.
    """
    folder = file.resolve().parent
    sources: dict[str, bytes] = {}
    waiting = [file.resolve()]
    while waiting:
        source = waiting.pop()
        name = source.relative_to(folder).as_posix()
        if name in sources:
            continue
        try:
            sources[name] = source.read_bytes()
        except OSError:
            raise UserError(f"--plugin: no such file: {source}") from None
        for module in _imported_modules(sources[name]):
            # A plugin may lie beside this package, as in a checkout's src; that is not one of the plugin's modules.
            if module != __package__:
                waiting += _files_beside(folder, module)
    # Sorted: the imports of a file are a set, whose order depends on the hash seed of Python.
    return dict(sorted(sources.items()))


def _imported_modules(source: bytes) -> set[str]:
    """The top-level modules that a file imports; none where it is not Python, which its import reports better."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return set()
    modules: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules.update(package_of(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(package_of(node.module))
    return modules


def _files_beside(folder: Path, module: str) -> list[Path]:
    """The files of a module, and of a package with all its modules, in ``folder``; empty where there is neither."""
    files = []
    single_file = (folder / module).with_suffix(".py")
    if single_file.is_file():
        files.append(single_file)
    package = folder / module
    if (package / "__init__.py").is_file():
        files += sorted(package.rglob("*.py"))
    return files


def plugin_hashes(sources: Mapping[str, bytes]) -> dict[str, str]:
    """The sha256 (first 12 hex digits) of each source by its name."""
    # Tags and records of evaluations have these texts: their length must not change.
    return {name: hashlib.sha256(content).hexdigest()[:12] for name, content in sorted(sources.items())}


def changed_names(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The names whose values differ, the first few of many."""
    return listed(sorted(name for name in {*before, *now} if before.get(name) != now.get(name)))


def listed(names: list[str]) -> str:
    """The first few of many names, and how many more there are."""
    text = ", ".join(names[:MOST_NAMES])
    if len(names) <= MOST_NAMES:
        return text
    return f"{text} and {len(names) - MOST_NAMES} more"


# --- packages --------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class PluginPackage:
    """A package, or a single module, from outside this one that registered parts, and its Python source.

    ``files`` are its .py files by their path from the folder that holds the package; ``sources`` is their content as it
    was when the package registered its first part, which is the code that runs. ``modules`` are those of its modules
    that registered or define parts, as imported.
    """

    name: str
    files: dict[str, Path]
    sources: dict[str, bytes]
    modules: dict[str, ModuleType | None] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str) -> PluginPackage:
        """The package as its files are now. Nothing of it is imported."""
        files = _python_files(name)
        if name == SCRIPT and files:
            # A script is no package: what it imports from its folder is a part of it, as of a plugin file.
            (script,) = files.values()
            sources = plugin_sources(script)
            return cls(name=name, files={path: script.parent / path for path in sources}, sources=sources)
        return cls(name=name, files=files, sources={path: file.read_bytes() for path, file in files.items()})

    @property
    def paths(self) -> set[str]:
        """The absolute paths of its files."""
        return set(map(str, self.files.values()))

    @functools.cached_property
    def version(self) -> str | None:
        """The version of the distribution that installed it, else its ``__version__``; None where it has neither."""
        if self._distribution is not None:
            return self._distribution.version
        version = getattr(sys.modules.get(self.name), "__version__", None)
        if version is None or self.name == SCRIPT:
            return None
        return str(version)

    @functools.cached_property
    def commit(self) -> str | None:
        """The commit that it was installed from; None where it was not installed from a repository."""
        if self._distribution is None:
            return None
        text = self._distribution.read_text("direct_url.json")
        if text is None:
            return None
        commit = json.loads(text).get("vcs_info", {}).get("commit_id")
        return None if commit is None else str(commit)

    @functools.cached_property
    def _distribution(self) -> importlib.metadata.Distribution | None:
        """What installed it; None for a script, and for a folder on the path."""
        if self.name == SCRIPT:
            return None
        # First by entry points: an editable install by hatchling or flit lists neither its modules nor its files.
        for distribution in importlib.metadata.distributions():
            for point in distribution.entry_points:
                registers_parts = point.group.startswith("kl_comedy.")
                if registers_parts and package_of(point.module) == self.name and distribution.version:
                    return distribution
        for name in importlib.metadata.packages_distributions().get(self.name, ()):
            if name:
                return importlib.metadata.distribution(name)
        return None

    @property
    def hashes(self) -> dict[str, str]:
        """The hash of each source. Without any (an extension, an archive) the version, which is all that is known."""
        if self.sources:
            return plugin_hashes(self.sources)
        return {f"{self.name} (no source)": f"version {self.version or 'unknown'}"}

    @property
    def is_archived(self) -> bool:
        """Whether it has source, and little enough to be copied into a run's folder."""
        size = sum(map(len, self.sources.values()))
        return 0 < len(self.sources) <= MOST_ARCHIVED_FILES and size <= MOST_ARCHIVED_BYTES

    @property
    def tag(self) -> str:
        """Its name, and the hash of its source (12 hex digits) or its version."""
        if not self.sources:
            return " ".join(f"{name} {version}" for name, version in self.hashes.items())
        # Stored runs are compared by this tag: another form of the text would make every plugin look changed.
        text = "".join(f"{path}\0{digest}\n" for path, digest in self.hashes.items())
        name = self.name
        if self.name == SCRIPT:
            name = next(iter(_python_files(SCRIPT)), SCRIPT)
        return f"{name} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


PACKAGES: dict[str, PluginPackage] = {}
"""Every package from outside that registered a part in this process. Those whose parts a config uses are part of its
runs (:func:`kl_comedy.training.run_plugins.plugins_of`); an installed package that it does not use changes nothing."""


@dataclass(frozen=True, kw_only=True)
class PluginSet:
    """The plugins of a run: files (:data:`PLUGIN_FILES`) and packages."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    packages: tuple[PluginPackage, ...] = ()

    @property
    def hashes(self) -> dict[str, str]:
        """The hash of every source by its name."""
        hashes = plugin_hashes(self.files)
        for package in self.packages:
            hashes.update(package.hashes)
        return dict(sorted(hashes.items()))

    @property
    def archive(self) -> dict[str, str]:
        """The sources to be stored with a run, by name, credentials hidden.

        Raises :class:`UserError` where a file and a package bring different sources under one name.
        """
        return {name: redact_source(content.decode("utf-8", "replace")) for name, content in self._sources().items()}

    def _sources(self) -> dict[str, bytes]:
        """What is stored, as it is."""
        sources = dict(self.files)
        for package in self.packages:
            if not package.is_archived:
                continue
            for name, content in package.sources.items():
                if sources.setdefault(name, content) != content:
                    raise UserError(f"--plugin: {name}: the package {package.name} brings another; rename your file")
        return sources

    def record(self) -> dict[str, Any]:
        """What loads them again from the archive, as plain data.

        The names of the files that ``--plugin`` named, of each package its version and the modules that it registers
        parts in, and the sources in which credentials are hidden.
        """
        packages = {}
        for package in self.packages:
            if package.name == SCRIPT:  # importing a script would run it
                continue
            packages[package.name] = {
                "version": package.version,
                "commit": package.commit,
                "copied": package.is_archived,
                "modules": list(package.modules),
            }
        files = []
        for name in self.files:
            # Files that a plugin imports are loaded by its import, under their own names.
            is_loaded_as_plugin = f"{PLUGIN_MODULE}{Path(name).stem}" in sys.modules
            if is_loaded_as_plugin and "/" not in name:
                files.append(name)
        hidden = [name for name, text in self.archive.items() if text.encode() != self._sources()[name]]
        return {"files": files, "packages": packages, "hidden": hidden}

    def tags(self) -> dict[str, str]:
        """``plugins``: name and hash of each file and package; ``version.NAME`` of each package. Empty without any."""
        plugins = [f"{name} {digest}" for name, digest in plugin_hashes(self.files).items()]
        plugins += [package.tag for package in self.packages]
        if not plugins:
            return {}
        tags = {}
        for package in self.packages:
            if package.version is not None:
                tags[f"version.{package.name}"] = package.version
        tags["plugins"] = ", ".join(plugins)
        return tags


def plugins_with(modules: Iterable[str]) -> PluginSet:
    """The plugin files of this process, and the packages of ``modules``, which registered parts that are used."""
    names = dict.fromkeys(package_of(module) for module in modules)
    packages = tuple(PACKAGES[name] for name in sorted(names) if name in PACKAGES)
    return PluginSet(files=PLUGIN_FILES, packages=packages)


def is_library(name: str) -> bool:
    """Whether a package comes with Python, or is one whose version every run records."""
    return name in LIBRARIES or name in sys.stdlib_module_names


def package_of(module: str) -> str:
    return module.partition(".")[0]


def remember_package(module: str) -> None:
    """Read the source of the package of ``module``, which registers a part, unless it was read for this import."""
    name = package_of(module)
    imported = sys.modules.get(module)
    file = getattr(imported, "__file__", None)
    is_of_plugin_file = file is not None and str(Path(file).resolve()) in PLUGIN_PATHS
    if name.startswith(PLUGIN_MODULE) or is_of_plugin_file:
        return
    package = PACKAGES.get(name)
    # A module that was imported anew (a notebook, a test) may have been edited since its source was read.
    if package is None or package.modules.get(module, imported) is not imported:
        package = PACKAGES[name] = PluginPackage.read(name)
        known = f"only its version, {package.version or 'which is unknown'}, is recorded with runs"
        if not package.sources:
            log.warning("%s registers parts and has no Python source that can be read: %s", name, known)
        elif not package.is_archived:
            limits = f"{MOST_ARCHIVED_FILES} files or {MOST_ARCHIVED_BYTES // 10**6} MB"
            log.warning("%s has more than %s of source: %s", name, limits, known)
    package.modules[module] = imported


def _python_files(name: str) -> dict[str, Path]:
    """The .py files of a package or a single module, by their path from the folder that holds it."""
    folders, single_file = _locations(name)
    if not folders:
        if single_file is None or single_file.suffix != ".py" or not single_file.is_file():
            return {}
        return {single_file.name: single_file.resolve()}
    files: dict[str, Path] = {}
    for folder in folders:  # several, of a namespace package
        for file in sorted(folder.rglob("*.py")):
            if file.is_file():
                # The first folder wins, as it does for the import.
                files.setdefault(f"{name}/{file.relative_to(folder).as_posix()}", file)
    return files


def _locations(name: str) -> tuple[list[Path], Path | None]:
    """The folders of a package; no folder and the file of a single module, where it has one."""
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__spec__", None) is None:
        # A script, which importlib cannot find by its name.
        file = getattr(module, "__file__", None)
    else:
        spec = importlib.util.find_spec(name)
        if spec is None:
            return [], None
        if spec.submodule_search_locations is not None:
            return [Path(place) for place in spec.submodule_search_locations], None
        file = spec.origin
    if file is None:
        return [], None
    return [], Path(file)
