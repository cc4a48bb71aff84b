"""Helpers of the generated tables."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from kl_comedy.registry import Entry, Registry

ROOT = Path(__file__).parents[3]
T = TypeVar("T", bound=Callable[..., Any])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; ``|`` and line breaks in a cell are escaped."""
    lines = [_table_line(head), _table_line(["---"] * len(head))]
    for row in rows:
        lines.append(_table_line([cell.replace("\n", " ").replace("|", "\\|") for cell in row]))
    return "\n".join(lines)


def _table_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def code_span(text: object) -> str:
    """``text`` as inline code in Markdown."""
    return f"`{text}`"


def is_built_in(entry: Entry[Any]) -> bool:
    """Whether the entry is registered by the package, not by a plugin."""
    return entry.origin.startswith("kl_comedy.")


def built_in(registry: Registry[T]) -> list[Entry[T]]:
    """The package's own entries: a plugin that is installed here must not change the docs."""
    return [entry for entry in registry if is_built_in(entry)]


def format_default(value: object) -> str:
    """A default value as in YAML, as inline code."""
    return code_span(_yaml(value))


def _yaml(value: object) -> str:
    if dataclasses.is_dataclass(value):
        # A section that is chosen by a name (a suite, a reward) is written as that name.
        value = getattr(value, "name", None) or dataclasses.asdict(cast(Any, value))
    if isinstance(value, list):
        return "[" + ", ".join(_yaml(item) for item in value) + "]"
    # Before the numbers, of which bool is one in Python.
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if value == "":
        return '""'
    return str(value)


def defaults_of(function: Callable[..., Any]) -> dict[str, object]:
    """The parameters of ``function`` that have a default, with it."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def options_of(entry: Entry[Any]) -> str:
    """Keyword options with their defaults; empty for datasets and rollouts, whose options are config keys."""
    if entry.kind in ("datasets", "rollouts"):
        return ""
    options = [code_span(f"{name}={_yaml(default)}") for name, default in defaults_of(entry.fn).items()]
    if entry.kind == "rewards" and entry.facts.get("isolated"):
        # The pool of processes takes this option itself, so that no reward function has it as a parameter.
        from kl_comedy.rewards.pool import TIMEOUT_S

        options.append(f"`timeout_s={TIMEOUT_S:g}`")
    return ", ".join(options)
