"""One typed table per kind of registered part: estimators, rewards, rollout backends, callbacks, ...

Registering is a decorator that returns the function unchanged. A duplicate name raises; an unknown
name raises with the alternatives. The first lookup imports the package that registers the built-ins of the
kind and the entry points of the group ``kl_comedy.<kind>``; files join by :func:`load_plugin_file`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
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
        """Decorator that files a function under ``name`` and returns it unchanged.

        ``source`` names the paper and equation, or the code, it comes from. ``summary`` defaults to
        the first line of the docstring. Raises :class:`UserError` when the name is taken.
        """

        def file(fn: T) -> T:
            taken = self._entries.get(name)
            if taken is not None:
                raise UserError(
                    f"{self.kind}: the name {name!r} is already registered by {taken.origin}; choose another name"
                )
            line = summary or (fn.__doc__ or "").strip().split("\n")[0]
            if not line:
                raise UserError(f"{self.kind}: {name!r} needs a docstring or a summary")
            self._entries[name] = Entry(
                kind=self.kind,
                name=name,
                fn=fn,
                summary=line,
                source=source,
                claims=claims,
                facts=facts,
                origin=getattr(fn, "__module__", "?"),
            )
            return fn

        return file

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
                raise UserError(
                    f"entry point {point.name!r} of group kl_comedy.{self.kind} ({point.value}) failed to load: "
                    f"{type(error).__name__}: {error}"
                ) from error


ESTIMATORS: Registry[Any] = Registry("estimators", "kl_comedy.kl")
CORRECTIONS: Registry[Any] = Registry("corrections", "kl_comedy.kl")
ADVANTAGES: Registry[Any] = Registry("advantages", "kl_comedy.objective")
POLICY_LOSSES: Registry[Any] = Registry("policy_losses", "kl_comedy.objective")
POLICY_CORRECTIONS: Registry[Any] = Registry("policy_corrections", "kl_comedy.objective")
REWARDS: Registry[Any] = Registry("rewards", "kl_comedy.rewards")
ROLLOUTS: Registry[Any] = Registry("rollouts", "kl_comedy.rollouts")
DATASETS: Registry[Any] = Registry("datasets", "kl_comedy.data")
CALLBACKS: Registry[Any] = Registry("callbacks", "kl_comedy.training")
RECIPES: Registry[Any] = Registry("recipes", "kl_comedy.kl")
SUITES: Registry[Any] = Registry("suites", "kl_comedy.evaluation")

KINDS: dict[str, Registry[Any]] = {
    table.kind: table
    for table in (
        ESTIMATORS,
        CORRECTIONS,
        ADVANTAGES,
        POLICY_LOSSES,
        POLICY_CORRECTIONS,
        REWARDS,
        ROLLOUTS,
        DATASETS,
        CALLBACKS,
        RECIPES,
        SUITES,
    )
}


def load_plugin_file(path: str | Path, *, check_names: bool = True) -> None:
    """Import a Python file whose ``register`` calls add entries (``--plugin FILE``).

    ``check_names`` first imports every built-in entry (and with them torch), so that a plugin that takes a built-in
    name is the one at fault; a process that only loads what another one has checked can do without.
    Raises :class:`UserError` when the file is missing or fails on import.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise UserError(f"--plugin: no such file: {path}")
    name = f"kl_comedy_plugin_{file.stem}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(file):
        return
    for table in KINDS.values() if check_names else ():
        table.load()
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"--plugin: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except UserError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"--plugin: {path} failed on import: {type(error).__name__}: {error}") from error
