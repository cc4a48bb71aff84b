"""Import a peer's modules from its own folder, with stand-ins for heavy packages its functions do not use.

A stand-in is an empty module of a given name: at import it may be a decorator, a base class or an
annotation. Once loading is over it raises when anything of it is called or read, so a function under test
can never quietly run on one.
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

from peers.wheels import Pin, pins, sha256


class StandInUsed(RuntimeError):
    """The function under test reached into a package that is not there."""


class _State:
    loading = False
    touched: set[str] = set()  # noqa: RUF012


class _Meta(type):
    """Stand-in objects: any attribute is another one; called on a function, they return it (a decorator)."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or not cls.__dict__.get("_stand_in"):
            raise AttributeError(name)
        _check(f"{cls.__qualname__}.{name}")
        return _stand_in(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not cls.__dict__.get("_stand_in"):
            return super().__call__(*args, **kwargs)
        _check(f"{cls.__qualname__}()")
        if len(args) == 1 and callable(args[0]) and not isinstance(args[0], type) and not kwargs:
            return args[0]
        return _stand_in(f"{cls.__qualname__}()")

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


def _stand_in(name: str) -> Any:
    return _Meta(name, (_Base,), {"_stand_in": True, "__qualname__": name, "__module__": "stand_in"})


def _check(name: str) -> None:
    if not _State.loading:
        raise StandInUsed(f"{name} was used, and is a stand-in")


class _StandInModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _check(f"{self.__name__}.{name}")
        return _stand_in(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins by their top-level name (first of all), and peers' packages in their own folders."""

    def __init__(self) -> None:
        self.stood_in: set[str] = set()
        self.folders: dict[str, Path] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        top = fullname.partition(".")[0]
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self.stood_in):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if fullname == top and top in self.folders:
            return importlib.machinery.PathFinder.find_spec(fullname, [str(self.folders[top])])
        return None

    def create_module(self, spec: Any) -> ModuleType:
        _State.touched.add(spec.name.partition(".")[0] if spec.name not in self.stood_in else spec.name)
        return _StandInModule(spec.name)

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
    """One system: its wheel, the packages it needs beside it, and the names that are stood in.

    Raises :class:`FileNotFoundError` on load where its wheel has not been fetched.
    """

    def __init__(
        self,
        dist: str,
        *,
        packages: Sequence[str],
        stand_ins: Sequence[str] = (),
        extras: Sequence[tuple[str, Sequence[str]]] = (),
    ) -> None:
        self.pin: Pin = pins()[dist]
        self.packages, self.stand_ins, self.extras = tuple(packages), tuple(stand_ins), tuple(extras)

    @property
    def version(self) -> str:
        return self.pin.version

    @property
    def pins(self) -> tuple[Pin, ...]:
        """Its wheel and those it needs beside it."""
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
            import transformers  # noqa: F401  (looks for optional packages, so before any stand-in is there)

            sys.meta_path.insert(0, _FINDER)
        _FINDER.stood_in.update(self.stand_ins)
        _FINDER.folders.update({name: self.pin.folder for name in self.packages})
        for dist, packages in self.extras:
            _FINDER.folders.update({name: pins()[dist].folder for name in packages})
        for folder in [self.pin.folder, *(pins()[dist].folder for dist, _ in self.extras)]:
            if str(folder) not in sys.path:
                sys.path.append(str(folder))  # for the versions packages ask about themselves

    def loaded(self, module: str) -> dict[str, Any]:
        """What a row records: the module file, its sha256, the wheel's, and the stand-ins it met."""
        file = Path(sys.modules[module].__file__ or "")
        return {
            "module": str(file.relative_to(self.pin.folder)),
            "module_sha256": sha256(file),
            "wheel": self.pin.file.name if self.pin.file else "",
            "wheel_sha256": sha256(self.pin.file) if self.pin.file else "",
            "stand_ins": sorted(_State.touched & set(self.stand_ins)),
        }
