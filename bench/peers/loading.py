"""Import a peer's modules from its own folder, with stubs for heavy packages its functions do not use.

During import, attributes of a stub may be used as decorators, base classes or annotations. After import, any use of
a stub raises :class:`StubUsed`, so measured code cannot depend on one.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from kl_comedy.io import sha256_file
from peers.wheels import Pin, pins


class StubUsed(RuntimeError):
    """The measured function used a stubbed package."""


class _State:
    loading = False
    touched: set[str] = set()  # noqa: RUF012


class _Meta(type):
    """Metaclass of stubs. Attributes are stubs; a call with a function returns the function (decorator)."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or not cls.__dict__.get("_is_stub"):
            raise AttributeError(name)
        _raise_after_import(f"{cls.__qualname__}.{name}")
        return _stub(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not cls.__dict__.get("_is_stub"):
            return super().__call__(*args, **kwargs)
        _raise_after_import(f"{cls.__qualname__}()")
        if len(args) == 1 and callable(args[0]) and not isinstance(args[0], type) and not kwargs:
            return args[0]
        return _stub(f"{cls.__qualname__}()")

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return Any

    def __ror__(cls, other: Any) -> Any:
        return Any


class _Base(metaclass=_Meta):
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
        top = fullname.partition(".")[0]
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self.stubbed):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if fullname == top and top in self.folders:
            return importlib.machinery.PathFinder.find_spec(fullname, [str(self.folders[top])])
        return None

    def create_module(self, spec: Any) -> ModuleType:
        _State.touched.add(spec.name.partition(".")[0] if spec.name not in self.stubbed else spec.name)
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


_FINDER = _Finder()


@contextmanager
def _loading() -> Any:
    before, _State.loading = _State.loading, True
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
        self.packages, self.stubs, self.extras = tuple(packages), tuple(stubs), tuple(extras)

    @property
    def version(self) -> str:
        return self.pin.version

    @property
    def pins(self) -> tuple[Pin, ...]:
        """Its wheel and those of ``extras``."""
        return (self.pin, *(pins()[dist] for dist, _ in self.extras))

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
            import transformers  # noqa: F401  (looks for optional packages, so it must precede the stubs)

            sys.meta_path.insert(0, _FINDER)
        _FINDER.stubbed.update(self.stubs)
        _FINDER.folders.update({name: self.pin.folder for name in self.packages})
        for dist, packages in self.extras:
            _FINDER.folders.update({name: pins()[dist].folder for name in packages})
        for folder in [self.pin.folder, *(pins()[dist].folder for dist, _ in self.extras)]:
            if str(folder) not in sys.path:
                sys.path.append(str(folder))  # for packages that look up their own version

    def loaded(self, module: str) -> dict[str, Any]:
        """Provenance of a row: module file, wheel, their sha256 and the stubs that were imported."""
        file = Path(sys.modules[module].__file__ or "")
        return {
            "module": str(file.relative_to(self.pin.folder)),
            "module_sha256": sha256_file(file),
            "wheel": self.pin.file.name if self.pin.file else "",
            "wheel_sha256": sha256_file(self.pin.file) if self.pin.file else "",
            "stand_ins": sorted(_State.touched & set(self.stubs)),
        }
