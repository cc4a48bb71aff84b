"""Import a peer's modules from its own folder, with stubs for heavy packages its functions do not use.

During import, attributes of a stub may be used as decorators, base classes or annotations. After import, any use of
a stub raises :class:`StubUsed`, so measured code cannot depend on one.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from kl_comedy.io import sha256_file
from peers.wheels import Pin, pins


class StubUsed(RuntimeError):
    """The measured function used a stubbed package."""


class _State:
    """The state of this process: import hooks are global, and so is what they saw."""

    loading = False
    """Whether a peer is being imported."""
    imported_stubs: set[str] = set()  # noqa: RUF012


class _Meta(type):
    """Metaclass of stubs. Attributes are stubs; a call with a function returns the function (decorator).

    A stub is a class, because a peer may inherit from it. A class of the peer that does so has this metaclass too, and
    is not a stub itself: it must behave as an ordinary class.
    """

    def __getattr__(cls, name: str) -> Any:
        # Special names are asked for by Python itself, which would take a stub for an answer.
        if name.startswith("__") or not cls.__dict__.get("_is_stub"):
            raise AttributeError(name)
        _raise_after_import(f"{cls.__qualname__}.{name}")
        return _stub(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not cls.__dict__.get("_is_stub"):
            return super().__call__(*args, **kwargs)
        _raise_after_import(f"{cls.__qualname__}()")
        one_argument = len(args) == 1 and not kwargs
        if one_argument and callable(args[0]) and not isinstance(args[0], type):
            return args[0]
        return _stub(f"{cls.__qualname__}()")

    def __getitem__(cls, item: Any) -> Any:
        return cls

    # In annotations such as ``Tensor | stub``.
    def __or__(cls, other: Any) -> Any:
        return Any

    def __ror__(cls, other: Any) -> Any:
        return Any


class _Base(metaclass=_Meta):
    # A peer's subclass may pass keywords that the real base class takes.
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__()

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


def _stub(name: str) -> Any:
    return _Meta(name, (_Base,), {"_is_stub": True, "__qualname__": name, "__module__": "stub"})


def _raise_after_import(name: str) -> None:
    if not _State.loading:
        raise StubUsed(f"{name} is a stub and was used after import")


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _raise_after_import(f"{self.__name__}.{name}")
        return _stub(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder for stubs (first) and for peers' packages in their folders."""

    def __init__(self) -> None:
        self.stubbed: set[str] = set()
        self.folders: dict[str, Path] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if self._is_stubbed(fullname):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        # Only the package itself: its path then leads Python to its submodules.
        if fullname in self.folders:
            return importlib.machinery.PathFinder.find_spec(fullname, [str(self.folders[fullname])])
        return None

    def _is_stubbed(self, fullname: str) -> bool:
        return any(fullname == name or fullname.startswith(f"{name}.") for name in self.stubbed)

    def create_module(self, spec: Any) -> ModuleType:
        # A stub may be a module within a package, such as swift.dataset; it is reported as such.
        name = spec.name
        if name not in self.stubbed:
            name = name.partition(".")[0]
        _State.imported_stubs.add(name)
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        # With a path it is a package, and the import of its submodules comes here again.
        module.__path__ = []


_FINDER = _Finder()


@contextmanager
def _loading() -> Iterator[None]:
    # Restored and not set to False: a peer may import within an import.
    before = _State.loading
    _State.loading = True
    try:
        yield
    finally:
        _State.loading = before


class Peer:
    """One system: its wheel, further packages that it needs (``extras``) and the names to stub.

    :meth:`module` raises :class:`FileNotFoundError` if a wheel has not been fetched.
    """

    def __init__(
        self,
        dist: str,
        *,
        packages: Sequence[str],
        stubs: Sequence[str] = (),
        extras: Sequence[tuple[str, Sequence[str]]] = (),
    ) -> None:
        self.pin: Pin = pins()[dist]
        self.packages = tuple(packages)
        self.stubs = tuple(stubs)
        self.extras = tuple(extras)

    @property
    def version(self) -> str:
        return self.pin.version

    @property
    def pins(self) -> tuple[Pin, ...]:
        """Its wheel and those of ``extras``."""
        extra_pins = [pins()[dist] for dist, _ in self.extras]
        return (self.pin, *extra_pins)

    def module(self, name: str) -> Any:
        """Import one of its modules."""
        self._install()
        with _loading():
            return importlib.import_module(name)

    def _install(self) -> None:
        missing = [f"{pin.dist}=={pin.version}" for pin in self.pins if not pin.fetched]
        if missing:
            raise FileNotFoundError(f"not fetched (bench/peers/fetch.py): {', '.join(missing)}")
        if _FINDER not in sys.meta_path:
            # It looks for optional packages when it is imported, and would find the stubs.
            import transformers  # noqa: F401

            sys.meta_path.insert(0, _FINDER)
        _FINDER.stubbed.update(self.stubs)
        _FINDER.folders.update({name: self.pin.folder for name in self.packages})
        for dist, packages in self.extras:
            _FINDER.folders.update({name: pins()[dist].folder for name in packages})
        # For packages that look up their own version: importlib.metadata searches sys.path.
        for pin in self.pins:
            if str(pin.folder) not in sys.path:
                sys.path.append(str(pin.folder))

    def loaded(self, module: str) -> dict[str, Any]:
        """Provenance of a row: module file, wheel, their sha256 and the stubs that were imported."""
        module_file = Path(sys.modules[module].__file__ or "")
        wheel = self.pin.file
        assert wheel is not None, "the module was imported from it"
        return {
            "module": str(module_file.relative_to(self.pin.folder)),
            "module_sha256": sha256_file(module_file),
            "wheel": wheel.name,
            "wheel_sha256": sha256_file(wheel),
            "stand_ins": sorted(_State.imported_stubs & set(self.stubs)),
        }
