"""One typed table per kind of registered part.

Registering is a decorator that returns the function unchanged. A duplicate name raises; an unknown
name raises with the alternatives. The first lookup imports the package that registers the built-ins of the
kind and the entry points of the group ``kl_comedy.<kind>``; files join by :func:`load_plugin_file`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from kl_comedy.errors import UserError, bad_value

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[T]):
    """A registered part: the function and the facts it declares about itself.

    ``claims`` are statements a test can check (their meaning belongs to the kind); ``facts`` is any
    further declared data. ``origin`` says where the entry comes from: the defining module.
    """

    kind: str
    name: str
    fn: T
    summary: str
    source: str
    claims: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""

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

    ``package`` registers the built-in entries when it is imported, which the first lookup does.
    """

    def __init__(self, kind: str, package: str | None = None) -> None:
        self.kind = kind
        self._package = package
        self._entries: dict[str, Entry[T]] = {}
        self._loaded = False

    def register(
        self, name: str, *, source: str, summary: str | None = None, claims: tuple[str, ...] = (), **facts: Any
    ) -> Callable[[T], T]:
        """Decorator that registers a function under ``name`` and returns it unchanged.

        ``source`` is the paper and equation, or the code, it comes from; ``summary`` defaults to the docstring's first
        line. Raises :class:`UserError` when the name is taken.
        """

        def add(fn: T) -> T:
            if name in self._entries:
                taken = f"the name {name!r} is already registered by {self._entries[name].origin}"
                raise UserError(f"{self.kind}: {taken}; choose another name")
            line = summary or (fn.__doc__ or "").strip().split("\n")[0]
            if not line:
                raise UserError(f"{self.kind}: {name!r} needs a docstring or a summary")
            declared: dict[str, Any] = {"summary": line, "source": source, "claims": claims, "facts": facts}
            origin = getattr(fn, "__module__", "?")
            self._entries[name] = Entry(kind=self.kind, name=name, fn=fn, origin=origin, **declared)
            return fn

        return add

    def get(self, name: str, *, key: str | None = None) -> Entry[T]:
        """The entry called ``name``; a miss names the alternatives. ``key`` is the config key at fault."""
        if name not in self._entries:
            self.load()
        if name not in self._entries:
            raise bad_value(key or self.kind, name, sorted(self._entries))
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
        self._loaded = True
        if self._package is not None:
            importlib.import_module(self._package)
        for point in importlib.metadata.entry_points(group=f"kl_comedy.{self.kind}"):
            try:
                point.load()
            except UserError:
                raise
            except Exception as error:
                which, why = f"{point.name!r} of group kl_comedy.{self.kind}", f"{type(error).__name__}: {error}"
                raise UserError(f"entry point {which} ({point.value}) failed to load: {why}") from error


ESTIMATORS: Registry[Any] = Registry("estimators", "kl_comedy.kl")
CORRECTIONS: Registry[Any] = Registry("corrections", "kl_comedy.kl")
ADVANTAGES: Registry[Any] = Registry("advantages", "kl_comedy.objective")
POLICY_LOSSES: Registry[Any] = Registry("policy_losses", "kl_comedy.objective")
POLICY_CORRECTIONS: Registry[Any] = Registry("policy_corrections", "kl_comedy.objective")
REWARDS: Registry[Any] = Registry("rewards", "kl_comedy.rewards")
ROLLOUTS: Registry[Any] = Registry("rollouts", "kl_comedy.rollouts")
DATASETS: Registry[Any] = Registry("datasets", "kl_comedy.data")
CALLBACKS: Registry[Any] = Registry("callbacks", "kl_comedy.training")
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
    name = f"kl_comedy_plugin_{file.stem}"
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
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        if isinstance(error, UserError):
            raise
        PLUGIN_PATHS.add(str(file))
        raise UserError(f"--plugin: {path} failed on import: {type(error).__name__}: {error}") from error
    PLUGIN_FILES.update(sources)
    PLUGIN_PATHS.update(str(file.parent / other) for other in sources)


def plugin_line(error: BaseException | None) -> str | None:
    """The innermost line of a plugin that raised ``error`` or its cause, as ``FILE, line 3, in NAME``; else None."""
    while error is not None:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in PLUGIN_PATHS]
        if frames:
            return f"{frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name}"
        error = error.__cause__ or error.__context__
    return None


def plugin_sources(file: Path) -> dict[str, bytes]:
    """The content of a plugin file and of the modules and packages in its folder that it imports, theirs included.

    Found by reading ``import`` statements, those within functions too. Raises :class:`UserError` for a missing file.
    """
    folder, sources = file.resolve().parent, dict[str, bytes]()
    waiting = [file.resolve()]
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
        for module in {module.partition(".")[0] for module in modules} - {__package__}:
            beside = folder / module
            waiting += [beside.with_suffix(".py")] if beside.with_suffix(".py").is_file() else []
            waiting += sorted(beside.rglob("*.py")) if (beside / "__init__.py").is_file() else []
    return dict(sorted(sources.items()))


def plugin_hashes(sources: Mapping[str, bytes]) -> dict[str, str]:
    """The sha256 (first 12 hex digits) of each source by its name."""
    return {name: hashlib.sha256(content).hexdigest()[:12] for name, content in sorted(sources.items())}
