"""Replace links and figures outside docs/ (README, results, source) by paths, because the site has only docs/."""

import re

LINK_OUTSIDE = re.compile(r"!?\[([^\]]+)\]\((?:\.\./)+([^)#]*)[^)]*\)")
"""A Markdown link or figure whose path begins with ``../``: its text, and the path without an anchor."""


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs with the text of every page."""
    return LINK_OUTSIDE.sub(_as_path, markdown)


def _as_path(link: re.Match[str]) -> str:
    text, path = link.groups()
    return f"{text} (`{path.rstrip('/')}`)"
