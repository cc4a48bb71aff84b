"""Helpers of the generated tables."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from kl_comedy.registry import Entry, Registry

ROOT = Path(__file__).parents[3]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; ``|`` and line breaks in a cell are escaped."""
    cells = [[cell.replace("\n", " ").replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(head), ["---"] * len(head), *cells])


def is_built_in(entry: Entry[Any]) -> bool:
    """Whether the entry is registered by the package, not by a plugin."""
    return entry.origin.startswith("kl_comedy.")


def built_in(registry: Registry[Any]) -> list[Entry[Any]]:
    return [entry for entry in registry if is_built_in(entry)]


def format_default(value: Any) -> str:
    """A default value as in YAML."""
    if dataclasses.is_dataclass(value):
        value = getattr(value, "name", None) or dataclasses.asdict(cast(Any, value))
    if isinstance(value, list):
        return "`[" + ", ".join(format_default(item).strip("`") for item in value) + "]`"
    if isinstance(value, bool) or value is None:
        return {True: "`true`", False: "`false`", None: "`null`"}[value]
    return '`""`' if value == "" else f"`{value}`"


def options_of(entry: Entry[Any]) -> str:
    """Keyword options with their defaults; empty for datasets and rollouts, whose options are config keys."""
    if entry.kind in ("datasets", "rollouts"):
        return ""
    parameters = [
        p for p in inspect.signature(entry.fn).parameters.values() if p.default is not inspect.Parameter.empty
    ]
    options = [f"`{p.name}={format_default(p.default).strip('`')}`" for p in parameters]
    if entry.kind == "rewards" and entry.facts.get("isolated"):
        from kl_comedy.rewards.pool import TIMEOUT_S

        options.append(f"`timeout_s={TIMEOUT_S:g}`")
    return ", ".join(options)
