"""The comment above each table of a page that `results verify` cannot make again."""

from __future__ import annotations

import re

TABLE = re.compile(r"^(?=\|.*\n\| ?---)", re.MULTILINE)
"""The place before the first line of a Markdown table."""


def with_unchecked_comments(page: str) -> str:
    """The page with a comment above each table: `results verify` makes none of them, which its command does."""
    return TABLE.sub("<!-- unchecked: rerun -->\n\n", page)
