"""kl_comedy: the reference laboratory for KL regularization in RL of language models.

The names in ``__all__`` are the Python API, which docs/stability.md describes. Each is imported when it is first used:
``import kl_comedy`` loads no torch, and ``from kl_comedy import KLTerm`` loads torch and the KL terms alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kl_comedy.api import certify, explain, register_estimator, results_table, train
    from kl_comedy.conformance import check as check_loss
    from kl_comedy.kl import KLTerm, kl_surrogate

__version__ = "0.2.0"

__all__ = [
    "KLTerm",
    "certify",
    "check_loss",
    "explain",
    "kl_surrogate",
    "register_estimator",
    "results_table",
    "train",
]

# The module that defines a public name, and the name there.
_DEFINED_IN = {
    "KLTerm": ("kl_comedy.kl", "KLTerm"),
    "certify": ("kl_comedy.api", "certify"),
    "check_loss": ("kl_comedy.conformance", "check"),
    "explain": ("kl_comedy.api", "explain"),
    "kl_surrogate": ("kl_comedy.kl", "kl_surrogate"),
    "register_estimator": ("kl_comedy.api", "register_estimator"),
    "results_table": ("kl_comedy.api", "results_table"),
    "train": ("kl_comedy.api", "train"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _DEFINED_IN[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
