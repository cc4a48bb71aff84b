"""One self-contained HTML page per study: results, curves, certificates, completions, provenance, commands.

Nothing on it comes from a network: pictures are data URLs, style and script are inline and the only ones its content
security policy admits. Whatever comes from the store (labels, tags, completions) is text, escaped by the template.
What stands on the page is gathered by :mod:`kl_comedy.tracking.report_page`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "templates"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """``value`` sorts it; ``soft`` follows the text in a softer colour; ``bar`` draws (low, mean, high) in percent;
    ``link`` leads to an id of the page; ``details`` and ``commands`` unfold below the text; ``bad`` marks it."""

    text: str
    value: float | None = None
    soft: str = ""
    bar: tuple[float, float, float] | None = None
    link: str = ""
    details: tuple[tuple[str, str], ...] = ()
    commands: tuple[str, ...] = ()
    bad: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """The first cell of a row names it."""

    names: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One table of results with the pictures of the same runs; ``title`` is empty where the page has one part."""

    title: str
    results: Table
    pictures: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Page:
    """What the template shows. ``headline`` and ``warnings`` stand at the top, ``rules`` above the tables they govern,
    ``common`` is what all runs share."""

    title: str
    summary: str
    command: str
    parts: tuple[Part, ...]
    runs: Table
    configurations: tuple[Mapping[str, Any], ...]
    common: tuple[tuple[str, str], ...] = ()
    headline: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())


def render_page(page: Page) -> str:
    """The whole page as HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    style, script = ((FOLDER / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("report.html.j2").render(
        page=page, style=Markup(style), script=Markup(script), style_hash=_hash(style), script_hash=_hash(script)
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
