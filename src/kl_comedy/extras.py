"""Optional packages: which extra of this package brings one, and a message of one line where it is missing.

``pip install kl_comedy`` brings what the KL terms, the oracle, ``certify``, ``explain`` and ``conformance`` need. A
command or function that trains, or reads runs, imports its packages when it is called, inside :func:`named_extras`.
Those that could not begin without a package ask for it first, by :func:`require`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kl_comedy.errors import UserError

CHECKOUT = Path(__file__).parents[2]
"""The root of the checkout, unless the package is installed from a wheel."""

TRAIN = (
    "accelerate",
    "datasets",
    "fastapi",
    "gguf",
    "huggingface_hub",
    "jinja2",
    "lightning",
    "math_verify",
    "matplotlib",
    "mlflow",
    "peft",
    "pyarrow",
    "safetensors",
    "scipy",
    "sympy",
    "tokenizers",
    "transformers",
    "uvicorn",
)
"""Modules of the extra ``train``: those that pyproject.toml names, and those that come with them and that we import."""

EXTRA_OF = {**dict.fromkeys(TRAIN, "train"), "reasoning_gym": "gym"}
"""The extra that brings a module, by the module's top-level name."""


NEEDED_BY = {
    "audit": ("lightning", "transformers"),
    "cell": ("lightning", "transformers"),
    "evaluate": ("transformers", "scipy"),
    "export": ("transformers", "safetensors"),
    "reproduce": ("lightning", "transformers", "mlflow"),
    "results": ("pyarrow", "scipy"),
    "sweep": ("lightning", "mlflow", "jinja2"),
    "sweep-report": ("mlflow", "scipy"),
    "train": ("lightning", "transformers"),
}
"""By command, the modules without which nothing of it works.

MLflow is not among those of ``train``, which then writes files, and of ``results``, which reads exports without it.
"""


class MissingExtra(UserError):
    """A package is not installed, and an extra of this package brings it."""


def require(command: str | None) -> None:
    """Raise :class:`MissingExtra` where a module of :data:`NEEDED_BY` is not installed. Nothing is imported.

    Asked before the command begins: later its own errors, as "the store cannot be created", would hide the reason.
    """
    # find_spec looks a module up and does not run it: importing all of them takes seconds.
    for module in NEEDED_BY.get(command or "", ()):
        if not _is_installed(module):
            raise _missing(module, f"{command} needs")


def require_module(module: str, who_needs: str) -> None:
    """Raise :class:`MissingExtra` where a module that ``who_needs``, as an option, is not installed.

    Nothing is imported. Ask before long work, whose result the missing module would throw away.
    """
    if not _is_installed(module):
        raise _missing(module, f"{who_needs} needs")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False  # a finder may raise where it refuses a name, as those of sandboxes and tests do


def install_command(extra: str) -> str:
    """The command that installs an extra: in the checkout of this package, or where it came as a wheel, from that."""
    if (CHECKOUT / "pyproject.toml").is_file():
        return f"pip install -e '.[{extra}]'"
    version = importlib.metadata.version("kl_comedy")
    return f"pip install 'kl_comedy-{version}-py3-none-any.whl[{extra}]'"


def _missing(module: str, who_needs: str) -> MissingExtra:
    extra = EXTRA_OF[module]
    return MissingExtra(f"{who_needs} {module}, which the extra {extra} brings: {install_command(extra)}")


@contextmanager
def named_extras() -> Iterator[None]:
    """Turn a failed import of an optional package into :class:`MissingExtra`, which names the extra.

    A missing module that no extra brings is a bug of ours or of a plugin, and its error is raised as it is.

    >>> with named_extras():
    ...     raise ModuleNotFoundError("No module named 'mlflow'", name="mlflow.tracking")
    Traceback (most recent call last):
    kl_comedy.extras.MissingExtra: this needs mlflow, which the extra train brings: pip install -e '.[train]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # The error names the submodule that was asked for first, as mlflow.tracking.
        module = str(error.name).partition(".")[0]
        if module not in EXTRA_OF:
            raise
        raise _missing(module, "this needs") from error
