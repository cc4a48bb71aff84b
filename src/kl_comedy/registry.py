"""One typed table per kind of registered part.

Registering is a decorator that returns the function unchanged. A duplicate name raises; an unknown
name raises with the alternatives. The first lookup imports the package that registers the built-ins of the
kind and the entry points of the group ``kl_comedy.<kind>``; files join by :func:`load_plugin_file`.

The source of every part from outside this package is recorded: that of a file in :data:`PLUGIN_FILES`, that of a
package in :data:`PACKAGES`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Generic, TypeVar

from kl_comedy.errors import UserError, bad_value

log = logging.getLogger("kl_comedy")

T = TypeVar("T", bound=Callable[..., Any])

OWN_PART = "a part of your own: --plugin FILE"
"""The remark that ends the error about an unknown name."""

PLUGIN_MODULE = "kl_comedy_plugin_"
"""How the module name of a plugin file begins."""

MOST_NAMES = 4
"""Names of changed files in a message."""

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


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[T]):
    """A registered part: the function and the facts it declares about itself.

    ``claims`` are statements a test can check (their meaning belongs to the kind); ``facts`` is any
    further declared data. ``origin`` says where the entry comes from: the defining module. ``modules`` are the ones
    from outside this package that registered it and that define it; empty for a built-in entry.
    """

    kind: str
    name: str
    fn: T
    summary: str
    source: str
    claims: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    modules: tuple[str, ...] = ()

    def row(self) -> dict[str, Any]:
        """The entry as one row of ``kl-comedy list``."""
        row: dict[str, Any] = {
            "name": self.name,
            "summary": self.summary,
            "source": self.source,
            "claims": list(self.claims),
            "origin": self.origin,
        }
        for key, fact in self.facts.items():
            if callable(fact):  # a function or a class: nothing to print
                continue
            row[key] = fact
            # The second question is for the type checker: a class was left out above.
            if is_dataclass(fact) and not isinstance(fact, type):
                row[key] = asdict(fact)
        return row


class Registry(Generic[T]):
    """The table of one kind. Names are unique; the order is the order of registration.

    ``packages`` register the built-in entries when they are imported, which the first lookup does.
    """

    def __init__(self, kind: str, *packages: str) -> None:
        self.kind = kind
        self._packages = packages
        self._entries: dict[str, Entry[T]] = {}
        self._loaded = False

    def register(
        self, name: str, *, source: str, summary: str | None = None, claims: tuple[str, ...] = (), **facts: Any
    ) -> Callable[[T], T]:
        """Decorator that registers a function under ``name`` and returns it unchanged.

        ``source`` is the paper and equation, or the code, it comes from; ``summary`` defaults to the docstring's first
        line. Raises :class:`UserError` when the name is taken.
        """
        # Here and not in `add`: the caller of `add` is whoever applies the decorator, which may be a helper of ours.
        caller = sys._getframe(1)
        registering = _registering_module(caller)
        called_at = f"{caller.f_code.co_filename}:{caller.f_lineno}"

        def add(fn: T) -> T:
            if name in self._entries:
                taken = f"the name {name!r} is already registered by {self._entries[name].origin}"
                raise UserError(f"{self.kind}: {taken}; choose another name")
            line = summary or (fn.__doc__ or "").strip().split("\n")[0]
            if not line:
                # A class has no code: it is found where its decorator is called.
                code = getattr(fn, "__code__", None)
                place = called_at
                if code is not None:
                    place = f"{code.co_filename}:{code.co_firstlineno}"
                raise UserError(f"{self.kind}: {name!r} needs a docstring or a summary ({place})")
            origin = getattr(fn, "__module__", None) or "?"
            modules = _outside_modules(registering, origin)
            self._entries[name] = Entry(
                kind=self.kind,
                name=name,
                fn=fn,
                summary=line,
                source=source,
                claims=claims,
                facts=facts,
                origin=origin,
                modules=modules,
            )
            # Now: the source must be read before anybody can edit the file that this process has imported.
            for module in modules:
                _remember_package(module)
            return fn

        return add

    def get(self, name: str, *, key: str | None = None) -> Entry[T]:
        """The entry called ``name``; a miss names the alternatives. ``key`` is the config key at fault."""
        if name not in self._entries:
            self.load()
        if name not in self._entries:
            raise bad_value(key or self.kind, name, sorted(self._entries), OWN_PART)
        return self._entries[name]

    def names(self) -> list[str]:
        self.load()
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        self.load()
        return name in self._entries

    def __iter__(self) -> Iterator[Entry[T]]:
        self.load()
        # A copy: the loop's body may register a part.
        return iter(list(self._entries.values()))

    def load(self) -> None:
        """Import the built-in entries and every entry point of ``kl_comedy.<kind>``, once."""
        if self._loaded:
            return
        self._loaded = True  # before the imports, which look names up
        try:
            for package in self._packages:
                importlib.import_module(package)
            self._order_built_in_entries()
            for point in importlib.metadata.entry_points(group=f"kl_comedy.{self.kind}"):
                place = f"entry point {point.name!r} of group kl_comedy.{self.kind} ({point.value})"
                with _plugin_import(place, "failed to load"):
                    point.load()
        except BaseException:
            self._loaded = False  # a second lookup must fail too, instead of missing parts without saying so
            raise

    def _order_built_in_entries(self) -> None:
        """Put entries of the first package first, whichever of them a program has imported before the lookup."""

        def position(entry: Entry[T]) -> int:
            module = getattr(entry.fn, "__module__", None) or ""
            for index, package in enumerate(self._packages):
                if module == package or module.startswith(f"{package}."):
                    return index
            return len(self._packages)

        self._entries = {entry.name: entry for entry in sorted(self._entries.values(), key=position)}


@contextlib.contextmanager
def _plugin_import(place: str, failed: str) -> Iterator[None]:
    """Turn every error of a plugin's import, which runs in this context, into a :class:`UserError`.

    The message begins with ``place`` and says what ``failed``. The parts that a failed module had registered are
    removed, so that it can be imported again.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Also SystemExit: a plugin that calls sys.exit would end the command without a message, with its own exit code.
        _forget_failed_modules()
        if isinstance(error, UserError):
            raise UserError(f"{place}: {error}") from error
        description = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            description = f"it ends the process (sys.exit({error.code!r}))"
        raise UserError(f"{place} {failed}: {description}") from error


def _forget_failed_modules() -> None:
    """Remove the entries of modules whose import failed; a second import would find their names taken."""
    for table in KINDS.values():
        for entry in list(table._entries.values()):
            # Python removes a module whose import failed from sys.modules.
            if entry.modules and entry.modules[0] not in sys.modules:
                del table._entries[entry.name]


ESTIMATORS: Registry[Any] = Registry("estimators", "kl_comedy.kl")
CORRECTIONS: Registry[Any] = Registry("corrections", "kl_comedy.kl")
ADVANTAGES: Registry[Any] = Registry("advantages", "kl_comedy.objective")
POLICY_LOSSES: Registry[Any] = Registry("policy_losses", "kl_comedy.objective")
POLICY_CORRECTIONS: Registry[Any] = Registry("policy_corrections", "kl_comedy.objective")
REWARDS: Registry[Any] = Registry("rewards", "kl_comedy.rewards")
ROLLOUTS: Registry[Any] = Registry("rollouts", "kl_comedy.rollouts")
DATASETS: Registry[Any] = Registry("datasets", "kl_comedy.data")
CALLBACKS: Registry[Any] = Registry("callbacks", "kl_comedy.training", "kl_comedy.lab.audit")
LOGGERS: Registry[Any] = Registry("loggers", "kl_comedy.tracking")
RECIPES: Registry[Any] = Registry("recipes", "kl_comedy.kl")
SUITES: Registry[Any] = Registry("suites", "kl_comedy.evaluation.built_in_suites")

_TABLES = (
    ESTIMATORS,
    CORRECTIONS,
    ADVANTAGES,
    POLICY_LOSSES,
    POLICY_CORRECTIONS,
    REWARDS,
    ROLLOUTS,
    DATASETS,
    CALLBACKS,
    LOGGERS,
    RECIPES,
    SUITES,
)
KINDS: dict[str, Registry[Any]] = {table.kind: table for table in _TABLES}
"""Every table by its kind, in the order of ``kl-comedy list``."""

PLUGIN_PATHS: set[str] = set()
"""The absolute path of each of :data:`PLUGIN_FILES`."""

PLUGIN_FILES: dict[str, bytes] = {}
"""Every plugin file that this process loaded, and the local modules it imports, as read, by the path from the plugin's
folder. Names and bytes are part of the hash of every config, because a config may name what they register: a change of
what is read here changes the hashes of stored runs."""


def load_plugin_file(path: str | Path, *, check_names: bool = True) -> None:
    """Import a Python file whose ``register`` calls add entries (``--plugin FILE``).

    ``check_names`` first imports every built-in entry (and torch), so that a plugin that takes a built-in name is
    refused. Raises :class:`UserError` when the file is missing or fails on import.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise UserError(f"--plugin: no such file: {path}")
    name = f"{PLUGIN_MODULE}{file.stem}"
    sources = plugin_sources(file)
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(file):
        # Imported before. What is recorded stays, even if a file was edited since: that is the code that runs.
        PLUGIN_FILES.update({**sources, **PLUGIN_FILES})
        return
    for other in sources.keys() & PLUGIN_FILES.keys():
        # One name can stand for one content only, in the hash and in a run's archive.
        if sources[other] != PLUGIN_FILES[other]:
            raise UserError(f"--plugin: {path}: two plugins bring different files {other}; rename one of them")
    # Last on the path: a module beside the plugin must not hide an installed one.
    if len(sources) > 1 and str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    if check_names:
        for table in KINDS.values():
            table.load()
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"--plugin: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Before the import: the parts that these files register belong to no package, and errors name lines of them.
    PLUGIN_PATHS.update(str(file.parent / other) for other in sources)
    sys.modules[name] = module
    with _plugin_import(f"--plugin: {path}", "failed on import"):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    PLUGIN_FILES.update(sources)


def import_modules(names: Iterable[str], where: str) -> None:
    """Import modules that register parts; one that an installed package no longer has is left out.

    Raises :class:`UserError` that begins with ``where`` for a module that fails on import.
    """
    for name in names:
        with _plugin_import(where, "failed on import"):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                # A missing module of another package is a missing dependency, which the user must install.
                is_of_same_package = _package_of(error.name or "") == _package_of(name)
                if not is_of_same_package:
                    raise


def plugin_line(error: BaseException | None) -> str | None:
    """The innermost line of a plugin that raised ``error`` or its cause, as ``FILE, line 3, in NAME``; else None."""
    paths = set(PLUGIN_PATHS)
    for package in PACKAGES.values():
        paths |= package.paths
    while error is not None:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in paths]
        if frames:
            innermost = frames[-1]
            return f"{innermost.filename}, line {innermost.lineno}, in {innermost.name}"
        error = error.__cause__ or error.__context__
    return None


def plugin_sources(file: Path) -> dict[str, bytes]:
    """The content of a plugin file and of the modules and packages in its folder that it imports, theirs included.

    They are found by reading ``import`` statements, those within functions too. Raises :class:`UserError` for a missing
    file.
    """

    def is_this_package(module: str) -> bool:
        # A plugin may lie beside the package, as in a checkout's src; the package is not one of the plugin's modules.
        return module == __package__

    return _with_local_imports([file.resolve()], file.resolve().parent, is_this_package)


def _with_local_imports(files: Iterable[Path], folder: Path, is_foreign: Callable[[str], bool]) -> dict[str, bytes]:
    """The content of ``files`` and of what they import from ``folder``, except for top-level modules that are foreign.

    The names are paths from ``folder``. Raises :class:`UserError` for a file that cannot be read.
    """
    sources: dict[str, bytes] = {}
    waiting = list(files)
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
            if not is_foreign(module):
                waiting += _files_beside(folder, module)
    # Sorted: the imports of a file are a set, whose order depends on the hash seed of Python; the archive must not.
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
            modules.update(_package_of(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(_package_of(node.module))
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
    # The hashes of stored configs cover these: their length and their order must not change.
    return {name: hashlib.sha256(content).hexdigest()[:12] for name, content in sorted(sources.items())}


def changed_names(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The names whose hashes differ, the first few of many."""
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    listed = ", ".join(names[:MOST_NAMES])
    if len(names) <= MOST_NAMES:
        return listed
    return f"{listed} and {len(names) - MOST_NAMES} more"


# --- packages --------------------------------------------------------------------------------------------------------


SCRIPT = "__main__"
"""The package of the parts that a script itself registers."""

MOST_ARCHIVED_FILES = 500
MOST_ARCHIVED_BYTES = 10_000_000
"""A package with more source than this is hashed whole, and not copied into every run's folder."""


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
        sources = {path: file.read_bytes() for path, file in files.items()}
        return cls(name=name, files=files, sources=sources)

    @property
    def paths(self) -> set[str]:
        """The absolute paths of its files."""
        return set(map(str, self.files.values()))

    @functools.cached_property
    def version(self) -> str | None:
        """The version of the distribution that installed it, else its ``__version__``; None where it has neither."""
        if self.name == SCRIPT:
            return None
        # First by entry points: an editable install by hatchling or flit lists neither its modules nor its files
        # (setuptools lists its modules), so that _distributions does not know it.
        for distribution in importlib.metadata.distributions():
            for point in distribution.entry_points:
                registers_parts = point.group.startswith("kl_comedy.")
                is_of_this_package = _package_of(point.module) == self.name
                if registers_parts and is_of_this_package and distribution.version:
                    return distribution.version
        for distribution_name in _distributions().get(self.name, ()):
            if distribution_name:
                return importlib.metadata.version(distribution_name)
        version = getattr(sys.modules.get(self.name), "__version__", None)
        if version is None:
            return None
        return str(version)

    @functools.cached_property
    def all_sources(self) -> dict[str, bytes]:
        """Its source, and that of the modules beside it that it imports and no other distribution installed."""
        if not self.is_archived or not self.files:
            return self.sources
        # A path is relative to the folder that holds the package: as many levels up as it has slashes.
        path, file = next(iter(self.files.items()))
        folder = file.parents[path.count("/")]
        if file != folder / path:  # the package's folder has another name
            return self.sources
        beside = {file.stem for file in folder.glob("*.py")}
        beside |= {file.parent.name for file in folder.glob("*/__init__.py")}
        # A quick look first, because most packages import nothing beside them: _distributions reads files of every
        # installed package (0.2 s for 200 of them).
        text = b"\n".join(self.sources.values())
        mentioned = {module for module in beside - {self.name} if module.encode() in text}
        if all(_is_library(module) for module in mentioned):
            return self.sources
        own_distributions = set(_distributions().get(self.name, ()))

        def is_foreign(module: str) -> bool:
            """Whether another distribution installed the module, whose version is recorded elsewhere."""
            if _is_library(module):
                return True
            distributions = set(_distributions().get(module, ()))
            return bool(distributions) and distributions.isdisjoint(own_distributions)

        inside = [file for file in self.files.values() if file.is_relative_to(folder)]
        sources = _with_local_imports(inside, folder, is_foreign)
        # The package's own files as they were when it registered its first part, and not as they are now.
        sources.update(self.sources)
        return dict(sorted(sources.items()))

    @functools.cached_property
    def hashes(self) -> dict[str, str]:
        """The hash of each source. Without any (an extension, an archive) the version, which is all that is known."""
        if self.sources:
            return plugin_hashes(self.all_sources)
        return {f"{self.name} (no source)": f"version {self.version or 'unknown'}"}

    @property
    def is_archived(self) -> bool:
        """Whether it is small enough to be copied into a run's folder."""
        size = sum(map(len, self.sources.values()))
        return len(self.sources) <= MOST_ARCHIVED_FILES and size <= MOST_ARCHIVED_BYTES

    @property
    def tag(self) -> str:
        """Its name, and the hash of its source (12 hex digits) or its version."""
        if not self.sources:
            return " ".join(f"{name} {version}" for name, version in self.hashes.items())
        # Stored runs are compared by this tag: another form of the text would make every plugin look changed.
        text = "".join(f"{path}\0{digest}\n" for path, digest in self.hashes.items())
        name = self.name
        if self.name == SCRIPT:
            name = next(iter(self.sources))
        return f"{name} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


PACKAGES: dict[str, PluginPackage] = {}
"""Every package from outside that registered a part in this process. Those whose parts a config uses are part of its
hash (:func:`kl_comedy.config.plugins_of`); an installed package that it does not use changes nothing."""


@dataclass(frozen=True, kw_only=True)
class PluginSet:
    """The plugins of a run: files (:data:`PLUGIN_FILES`) and packages."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    packages: tuple[PluginPackage, ...] = ()

    @property
    def hashes(self) -> dict[str, str]:
        """The hash of every source by its name.

        Raises :class:`UserError` where a file and a package bring different sources under one name.
        """
        hashes = plugin_hashes(self.files)
        for package in self.packages:
            for name, digest in package.hashes.items():
                if hashes.setdefault(name, digest) != digest:
                    raise UserError(f"--plugin: {name}: the package {package.name} brings another; rename your file")
        return dict(sorted(hashes.items()))

    @property
    def archive(self) -> dict[str, bytes]:
        """The sources to be stored with a run, by name."""
        archive: dict[str, bytes] = {}
        for package in self.packages:
            if package.is_archived:
                archive.update(package.all_sources)
        archive.update(self.files)
        return archive

    def record(self) -> dict[str, Any]:
        """What loads them again from the archive, as plain data: the hash of each source, the names of the files that
        ``--plugin`` named, and the modules that each package registers parts in."""
        packages = {}
        for package in self.packages:
            if package.name == SCRIPT:  # importing a script would run it
                continue
            packages[package.name] = {
                "version": package.version,
                "modules": list(package.modules),
                "sources": list(package.hashes),
            }
        files = []
        for name in self.files:
            # Files that a plugin imports are loaded by its import, under their own names.
            is_loaded_as_plugin = f"{PLUGIN_MODULE}{Path(name).stem}" in sys.modules
            if is_loaded_as_plugin and "/" not in name:
                files.append(name)
        return {"sources": self.hashes, "files": files, "packages": packages}

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
    names = dict.fromkeys(_package_of(module) for module in modules)
    packages = tuple(PACKAGES[name] for name in sorted(names) if name in PACKAGES)
    return PluginSet(files=PLUGIN_FILES, packages=packages)


def _registering_module(frame: FrameType | None) -> str:
    """The name of the module that calls ``register``: from ``frame`` outwards the first one that is not ours.

    A helper of ours may stand between (``register_suite``). A part is built in where the body of one of our own modules
    runs, whoever imports it: Python's import system, or a loader as that of pytest, which rewrites ``assert``.
    """
    while frame is not None:
        name = _real_name(str(frame.f_globals.get("__name__")))
        if name.partition(".")[0] != __package__:
            return name
        if frame.f_code.co_name == "<module>":
            break
        frame = frame.f_back
    return __package__


def _real_name(module: str) -> str:
    """The name of the module; for ``python -m NAME``, which runs as ``__main__``, it is NAME."""
    if module != SCRIPT:
        return module
    spec = getattr(sys.modules.get(SCRIPT), "__spec__", None)
    # python FILE has no spec.
    if spec is None:
        return module
    return str(spec.name)


def _outside_modules(registering: str, origin: str) -> tuple[str, ...]:
    """The modules whose source a part is: the one that registered it, and the one that defines it."""
    if registering.partition(".")[0] == __package__:
        return ()
    defining = _real_name(origin)
    if defining == "?" or _is_library(_package_of(defining)):
        return (registering,)
    return tuple(dict.fromkeys((registering, defining)))


def _is_library(name: str) -> bool:
    """Whether a package comes with Python, or is one whose version every run records."""
    return name in LIBRARIES or name in sys.stdlib_module_names


def _package_of(module: str) -> str:
    return module.partition(".")[0]


def _remember_package(module: str) -> None:
    """Read the source of the package of ``module``, which registers a part, unless it was read for this import."""
    name = _package_of(module)
    imported = sys.modules.get(module)
    file = getattr(imported, "__file__", None)
    is_of_plugin_file = file is not None and str(Path(file).resolve()) in PLUGIN_PATHS
    if name.startswith(PLUGIN_MODULE) or is_of_plugin_file:
        return
    package = PACKAGES.get(name)
    # A module that was imported anew (a notebook, a test) may have been edited since its source was read.
    if package is None or package.modules.get(module, imported) is not imported:
        package = PACKAGES[name] = PluginPackage.read(name)
        if not package.sources:
            known = f"only its version, {package.version or 'which is unknown'}, is recorded with runs"
            log.warning("%s registers parts and has no Python source that can be read: %s", name, known)
        elif not package.is_archived:
            limits = f"{MOST_ARCHIVED_FILES} files or {MOST_ARCHIVED_BYTES // 10**6} MB"
            log.warning("%s has more than %s of source: runs record its hash, without a copy", name, limits)
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


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """The installed distributions by the top-level modules that they bring."""
    return importlib.metadata.packages_distributions()
