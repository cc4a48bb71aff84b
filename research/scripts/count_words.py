"""Count the words of the documentation that people wrote: `python research/scripts/count_words.py`.

README, CONTRIBUTING and docs/*.md count, less generated parts, the pages that are generated as a whole
(docs/estimators/), and those that mkdocs fills from docstrings (docs/api/). Code blocks count: they are read too.
The symptom pages (docs/symptoms/) are counted apart: each has a bound of its own (tests/docs/test_symptoms.py).
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = re.compile(r"<!-- generated: (?P<name>.*?) -->.*?<!-- end: (?P=name) -->", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


def words_of(page: str) -> int:
    """The words that somebody wrote: runs of characters between blanks with a letter or digit.

    >>> words_of("Two words. <!-- generated: a --> three more words <!-- end: a --> | --- |")
    2
    """
    written = COMMENT.sub("", GENERATED.sub("", page))
    return len(re.findall(r"\S*\w\S*", written))


def words_by_page() -> dict[str, int]:
    """The words of each page that counts, by its path."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(page.relative_to(ROOT)): words_of(page.read_text("utf-8")) for page in pages}


def words_of_symptoms() -> dict[str, int]:
    """The words of each symptom page, by its path."""
    pages = sorted((ROOT / "docs" / "symptoms").glob("*.md"))
    return {str(page.relative_to(ROOT)): words_of(page.read_text("utf-8")) for page in pages}


def print_words(counts: dict[str, int], name_of_sum: str) -> None:
    """The words of each page, the longest first, and their sum."""
    for name, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"{count:7,}  {name}")
    print(f"{sum(counts.values()):7,}  {name_of_sum}")


def main() -> None:
    """Print the words of the symptom pages, then of all others."""
    print_words(words_of_symptoms(), "symptom pages")
    print_words(words_by_page(), "all others")


if __name__ == "__main__":
    main()
