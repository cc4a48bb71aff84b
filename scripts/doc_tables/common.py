"""What the generated tables share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kl_comedy.registry import Entry, Registry

ROOT = Path(__file__).parents[2]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; ``|`` and line breaks in a cell are escaped."""
    cells = [[cell.replace("\n", " ").replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(head), ["---"] * len(head), *cells])


def is_built_in(entry: Entry[Any]) -> bool:
    """Whether the package itself registers the entry, not a plugin loaded in this process."""
    return entry.origin.startswith("kl_comedy.")


def built_in(registry: Registry[Any]) -> list[Entry[Any]]:
    return [entry for entry in registry if is_built_in(entry)]
