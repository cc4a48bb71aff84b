"""Replace links from docs/ to files outside it (README, configs, source) by paths, because the site has only docs/."""

import re

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)#]*)[^)]*\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs with the text of every page."""
    return OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2].rstrip('/')}`)", markdown)
