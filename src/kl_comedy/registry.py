"""One typed table per kind of registered part.

Registering is a decorator that returns the function unchanged. A duplicate name raises; an unknown
name raises with the alternatives. The first lookup imports the package that registers the built-ins of the
kind and the entry points of the group ``kl_comedy.<kind>``; files join by :func:`load_plugin_file`.

The source of every part from outside is known: of a file in :data:`PLUGIN_FILES`, of a package in :data:`PACKAGES`.
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
    *("kl_comedy", "torch", "transformers", "lightning", "mlflow", "peft", "datasets", "numpy", "vllm", "accelerate"),
    *("omegaconf", "math_verify", "pytorch_lightning"),
)
"""Packages that are no plugin where a function of theirs is registered: tags name the version of each already."""


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
        return {
            "name": self.name,
            "summary": self.summary,
            "source": self.source,
            "claims": list(self.claims),
            "origin": self.origin,
            **{
                key: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
                for key, value in self.facts.items()
                if not callable(value)
            },
        }


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
        registering = _registering_module(sys._getframe(1))

        def add(fn: T) -> T:
            if name in self._entries:
                taken = f"the name {name!r} is already registered by {self._entries[name].origin}"
                raise UserError(f"{self.kind}: {taken}; choose another name")
            line = summary or (fn.__doc__ or "").strip().split("\n")[0]
            if not line:
                raise UserError(f"{self.kind}: {name!r} needs a docstring or a summary")
            declared: dict[str, Any] = {"summary": line, "source": source, "claims": claims, "facts": facts}
            origin = getattr(fn, "__module__", None) or "?"
            modules = _outside_modules(registering, origin)
            self._entries[name] = Entry(kind=self.kind, name=name, fn=fn, origin=origin, modules=modules, **declared)
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
        return iter(list(self._entries.values()))

    def load(self) -> None:
        """Import the built-in entries and every entry point of ``kl_comedy.<kind>``, once."""
        if self._loaded:
            return
        self._loaded = True  # before the imports, which look names up
        try:
            for package in self._packages:
                importlib.import_module(package)
            for point in importlib.metadata.entry_points(group=f"kl_comedy.{self.kind}"):
                where = f"entry point {point.name!r} of group kl_comedy.{self.kind} ({point.value})"
                with _plugin_import(where, "failed to load"):
                    point.load()
        except BaseException:
            self._loaded = False  # a second lookup must not go on without the parts that failed
            raise


@contextlib.contextmanager
def _plugin_import(where: str, failed: str) -> Iterator[None]:
    """Import a plugin inside: whatever it raises is a :class:`UserError` that begins with ``where``.

    A plugin that calls ``sys.exit`` would otherwise end the command without a word, and with the code it likes. What a
    failed module had registered is forgotten, so that it can be imported again.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        for table in KINDS.values():
            for entry in [entry for entry in table._entries.values() if entry.modules]:
                if entry.modules[0] not in sys.modules:  # Python removes a module whose import failed
                    del table._entries[entry.name]
        if isinstance(error, UserError):
            raise UserError(f"{where}: {error}") from error
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            what = f"it ends the process (sys.exit({error.code!r}))"
        raise UserError(f"{where} {failed}: {what}") from error


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

KINDS: dict[str, Registry[Any]] = {
    table.kind: table for table in list(globals().values()) if isinstance(table, Registry)
}


PLUGIN_PATHS: set[str] = set()
"""The absolute path of each of :data:`PLUGIN_FILES`."""

PLUGIN_FILES: dict[str, bytes] = {}
"""Every plugin file that this process loaded, and the local modules it imports, as read, by the path from the plugin's
folder. Part of the hash of every config: a config may name what they register."""


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
        PLUGIN_FILES.update({**sources, **PLUGIN_FILES})
        return
    for other in sources.keys() & PLUGIN_FILES.keys():
        if sources[other] != PLUGIN_FILES[other]:
            raise UserError(f"--plugin: {path}: two plugins bring another {other}; rename one of these files")
    if len(sources) > 1 and str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    for table in KINDS.values() if check_names else ():
        table.load()
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"--plugin: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Before the import: what these files register is theirs and of no package, and an error is in one of their lines.
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

    Raises :class:`UserError` that begins with ``where`` for one that fails on import.
    """
    for name in names:
        with _plugin_import(where, "failed on import"):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                if _package_of(error.name or "") != _package_of(name):
                    raise


def plugin_line(error: BaseException | None) -> str | None:
    """The innermost line of a plugin that raised ``error`` or its cause, as ``FILE, line 3, in NAME``; else None."""
    paths = PLUGIN_PATHS.union(*(package.paths for package in PACKAGES.values()))
    while error is not None:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in paths]
        if frames:
            return f"{frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name}"
        error = error.__cause__ or error.__context__
    return None


def plugin_sources(file: Path) -> dict[str, bytes]:
    """The content of a plugin file and of the modules and packages in its folder that it imports, theirs included.

    Found by reading ``import`` statements, those within functions too. Raises :class:`UserError` for a missing file.
    """
    return _with_local_imports([file.resolve()], file.resolve().parent, lambda module: module == __package__)


def _with_local_imports(files: Iterable[Path], folder: Path, is_foreign: Callable[[str], bool]) -> dict[str, bytes]:
    """The content of ``files`` and of what they import from ``folder``, but for top-level modules that are foreign."""
    sources = dict[str, bytes]()
    waiting = [*files]
    while waiting:
        source = waiting.pop()
        name = source.relative_to(folder).as_posix()
        if name in sources:
            continue
        try:
            sources[name] = source.read_bytes()
            nodes = list(ast.walk(ast.parse(sources[name])))
        except OSError:
            raise UserError(f"--plugin: no such file: {source}") from None
        except (SyntaxError, ValueError):  # the import that follows says where
            continue
        modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        for module in {module.partition(".")[0] for module in modules}:
            beside = folder / module
            is_package = (beside / "__init__.py").is_file()
            if (is_package or beside.with_suffix(".py").is_file()) and not is_foreign(module):
                waiting += [beside.with_suffix(".py")] if beside.with_suffix(".py").is_file() else []
                waiting += sorted(beside.rglob("*.py")) if is_package else []
    return dict(sorted(sources.items()))


def plugin_hashes(sources: Mapping[str, bytes]) -> dict[str, str]:
    """The sha256 (first 12 hex digits) of each source by its name."""
    return {name: hashlib.sha256(content).hexdigest()[:12] for name, content in sorted(sources.items())}


def changed_names(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The names whose hashes differ, the first few of many."""
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


# --- packages --------------------------------------------------------------------------------------------------------


SCRIPT = "__main__"
"""The package of the parts that a script itself registers."""

MOST_ARCHIVED_FILES, MOST_ARCHIVED_BYTES = 500, 10_000_000
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
        return cls(name=name, files=files, sources={path: file.read_bytes() for path, file in files.items()})

    @property
    def paths(self) -> set[str]:
        """The absolute paths of its files."""
        return set(map(str, self.files.values()))

    @functools.cached_property
    def version(self) -> str | None:
        """Of the distribution that installed it, else its ``__version__``; None where it has none."""
        if self.name == SCRIPT:
            return None
        for distribution in importlib.metadata.distributions():
            points = [point for point in distribution.entry_points if point.group.startswith("kl_comedy.")]
            if distribution.version and self.name in [_package_of(point.module) for point in points]:
                return distribution.version
        for name in filter(None, _distributions().get(self.name, ())):
            return importlib.metadata.version(name)
        version = getattr(sys.modules.get(self.name), "__version__", None)
        return None if version is None else str(version)

    @functools.cached_property
    def all_sources(self) -> dict[str, bytes]:
        """Its source, and that of the modules beside it that it imports and no other distribution installed."""
        if not self.is_archived or not self.files:
            return self.sources
        path, file = next(iter(self.files.items()))
        folder = file.parents[path.count("/")]
        if file != folder / path:  # the package's folder has another name
            return self.sources
        beside = {file.stem for file in folder.glob("*.py")}
        beside |= {file.parent.name for file in folder.glob("*/__init__.py")}
        text = b"\n".join(self.sources.values())
        mentioned = {module for module in beside - {self.name} if module.encode() in text}
        if all(_is_library(module) for module in mentioned):
            return self.sources
        ours = set(_distributions().get(self.name, ()))

        def is_foreign(module: str) -> bool:
            others = set(_distributions().get(module, ()))
            return _is_library(module) or (bool(others) and not others & ours)

        inside = [file for file in self.files.values() if file.is_relative_to(folder)]
        return dict(sorted({**_with_local_imports(inside, folder, is_foreign), **self.sources}.items()))

    @functools.cached_property
    def hashes(self) -> dict[str, str]:
        """Of each source; without any (an extension, an archive), of the version, which is all that is known."""
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
        text = "".join(f"{path}\0{digest}\n" for path, digest in self.hashes.items())
        name = next(iter(self.sources)) if self.name == SCRIPT else self.name
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
        """Of every source by its name. Raises :class:`UserError` where a file and a package bring the same name."""
        hashes = plugin_hashes(self.files)
        for package in self.packages:
            for name, digest in package.hashes.items():
                if hashes.setdefault(name, digest) != digest:
                    raise UserError(f"--plugin: {name}: the package {package.name} brings another; rename your file")
        return dict(sorted(hashes.items()))

    @property
    def archive(self) -> dict[str, bytes]:
        """The sources to be stored with a run, by name."""
        archived = [package.all_sources for package in self.packages if package.is_archived]
        return {name: content for sources in (*archived, self.files) for name, content in sources.items()}

    def record(self) -> dict[str, Any]:
        """What loads them again from the archive, as plain data: the hash of each source, the names of the files that
        ``--plugin`` named, and the modules that each package registers parts in."""
        packages = {
            package.name: {"version": package.version, "modules": [*package.modules], "sources": [*package.hashes]}
            for package in self.packages
            if package.name != SCRIPT  # to import a script is to run it
        }
        files = [name for name in self.files if f"{PLUGIN_MODULE}{Path(name).stem}" in sys.modules and "/" not in name]
        return {"sources": self.hashes, "files": files, "packages": packages}

    def tags(self) -> dict[str, str]:
        """``plugins``: name and hash of each file and package; ``version.NAME`` of each package. Empty without any."""
        texts = [f"{name} {digest}" for name, digest in plugin_hashes(self.files).items()]
        texts += [package.tag for package in self.packages]
        versions = {f"version.{package.name}": package.version for package in self.packages}
        tags = {name: version for name, version in versions.items() if version is not None}
        return {**tags, "plugins": ", ".join(texts)} if texts else {}


def plugins_with(modules: Iterable[str]) -> PluginSet:
    """The plugin files of this process, and the packages of ``modules``, which registered parts that are used."""
    names = dict.fromkeys(_package_of(module) for module in modules)
    packages = tuple(PACKAGES[name] for name in sorted(names) if name in PACKAGES)
    return PluginSet(files=PLUGIN_FILES, packages=packages)


def _registering_module(frame: FrameType | None) -> str:
    """The name of the module that calls ``register``: from ``frame`` outwards the first one that is not ours.

    A helper of ours may stand between (``register_suite``). Where one of our own modules is being imported, the next
    caller is the import system, and the part is built in.
    """
    while frame is not None:
        name = _real_name(str(frame.f_globals.get("__name__")))
        if name.partition(".")[0] in ("importlib", "_frozen_importlib"):
            break
        if name.partition(".")[0] != __package__:
            return name
        frame = frame.f_back
    return __package__


def _real_name(module: str) -> str:
    """The name of the module; that of ``python -m NAME``, which runs as ``__main__``, is NAME."""
    spec = getattr(sys.modules.get(SCRIPT), "__spec__", None) if module == SCRIPT else None
    return module if spec is None else str(spec.name)


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
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__spec__", None) is None:  # a script
        places = None
        origin = getattr(module, "__file__", None)
    else:
        spec = importlib.util.find_spec(name)
        places = None if spec is None else spec.submodule_search_locations
        origin = None if spec is None else spec.origin
    if places is None:
        file = Path(origin or "")
        return {file.name: file.resolve()} if file.suffix == ".py" and file.is_file() else {}
    files: dict[str, Path] = {}
    for folder in map(Path, places):  # several of a namespace package
        for file in sorted(folder.rglob("*.py")):
            if file.is_file():
                files.setdefault(f"{name}/{file.relative_to(folder).as_posix()}", file)
    return files


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """The installed distributions by the top-level modules that they bring."""
    return importlib.metadata.packages_distributions()
