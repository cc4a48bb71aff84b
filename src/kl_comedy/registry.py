"""One typed table per kind of registered part.

Registering is a decorator that returns the function unchanged. A duplicate name raises; an unknown
name raises with the alternatives. The first lookup imports the package that registers the built-ins of the
kind and the entry points of the group ``kl_comedy.<kind>``; files join by :func:`load_plugin_file`.

The source of every part from outside this package is read (:mod:`kl_comedy.plugins`).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

from kl_comedy.errors import UserError, bad_value
from kl_comedy.plugins import (
    PACKAGES,
    PLUGIN_FILES,
    PLUGIN_MODULE,
    PLUGIN_PATHS,
    SCRIPT,
    is_library,
    package_of,
    plugin_sources,
    remember_package,
)

log = logging.getLogger("kl_comedy")

T = TypeVar("T", bound=Callable[..., Any])
F = TypeVar("F", bound=Callable[..., Any])

OWN_PART = "a part of your own: --plugin FILE"
"""The remark that ends the error about an unknown name."""


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
        self._check: Callable[[Any, str], Any] | None = None

    def checked_by(self, function: F) -> F:
        """Decorator of the function of value and key that says what a config may write beside the names."""
        self._check = function
        return function

    def check(self, value: Any, key: str) -> None:
        """Raise :class:`UserError` for what a config may not write at ``key``, where parts of this kind are named."""
        self.load()
        assert self._check is not None
        self._check(value, key)

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
                remember_package(module)
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
ENVIRONMENTS: Registry[Any] = Registry("environments", "kl_comedy.rewards")
ROLLOUTS: Registry[Any] = Registry("rollouts", "kl_comedy.rollouts")
DATASETS: Registry[Any] = Registry("datasets", "kl_comedy.data")
CALLBACKS: Registry[Any] = Registry("callbacks", "kl_comedy.training", "kl_comedy.audit")
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
    ENVIRONMENTS,
    ROLLOUTS,
    DATASETS,
    CALLBACKS,
    LOGGERS,
    RECIPES,
    SUITES,
)
KINDS: dict[str, Registry[Any]] = {table.kind: table for table in _TABLES}
"""Every table by its kind, in the order of ``kl-comedy list``."""


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
                is_of_same_package = package_of(error.name or "") == package_of(name)
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
    if defining == "?" or is_library(package_of(defining)):
        return (registering,)
    return tuple(dict.fromkeys((registering, defining)))
