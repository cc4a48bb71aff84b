"""Modules and names that are imported when they are first used, so that light commands stay fast.

torch takes more than a second to import. `kl-comedy explain` reads terms and stored certificates, and needs none of it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


class LazyModule:
    """Stands for a module that is imported at the first access to one of its attributes.

    >>> LazyModule("math").floor(2.5)
    2
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        # The next access does not come here.
        setattr(self, attribute, value)
        return value


def lazy_names(package: str, defined_in: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package (PEP 562) whose public names are imported when they are first used.

    ``defined_in`` says by name the module that defines it, as ``module``, or ``module:name`` where it is called
    otherwise there.
    """

    def import_name(name: str) -> Any:
        if name not in defined_in:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, original_name = defined_in[name].partition(":")
        value = getattr(importlib.import_module(module), original_name or name)
        # The next use does not come here.
        setattr(sys.modules[package], name, value)
        return value

    return import_name
