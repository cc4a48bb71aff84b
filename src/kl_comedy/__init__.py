"""kl_comedy: the reference laboratory for KL regularization in RL of language models.

The names in ``__all__`` are the Python API, which docs/stability.md describes. Each is imported when it is first used:
``import kl_comedy`` loads no torch, and ``from kl_comedy import KLTerm`` loads the KL terms alone, without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kl_comedy.lazy import lazy_names

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

__getattr__ = lazy_names(
    __name__,
    {
        "KLTerm": "kl_comedy.kl",
        "certify": "kl_comedy.api",
        "check_loss": "kl_comedy.conformance:check",
        "explain": "kl_comedy.api",
        "kl_surrogate": "kl_comedy.kl",
        "register_estimator": "kl_comedy.api",
        "results_table": "kl_comedy.api",
        "train": "kl_comedy.api",
    },
)


def __dir__() -> list[str]:
    # A reader completes names: what this file imports for itself is none of them.
    dunders = [name for name in globals() if name.startswith("__")]
    return sorted({*dunders, *__all__})
