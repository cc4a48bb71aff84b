"""Docstrings and messages in src are written as an engineer writes them: "nats per token" and whole sentences."""

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "kl_comedy"

PATTERNS = {
    "nats a": re.compile(r"\bnats a (?!and\b)\w+"),
    "is no": re.compile(r"(?<!there )(?<!There )\b(?:is|are) no (?!longer\b|more\b|one\b)\w+"),
    "a for per": re.compile(
        r"\b(?:\d[\d,.]*|once|times|tokens?|rows?|passes|prompts?|bytes?) an? "
        r"(?:token|rank|run|completion|update|step|second)\b"
    ),
    "sentence with Of": re.compile(r"(?:^|[.:;!?]\s+|\n\s*\n\s*)Of (?!course\b)\w+"),
}

ALLOWED: dict[str, tuple[str, ...]] = {
    "kl/oracle/enumeration.py": ("prompt a completion",),
    "kl/surrogate.py": ("is no baseline",),
}
"""By file (from src/kl_comedy): phrases that are right where they stand."""


def texts(file):
    """Every string of a module with its line; an f-string as one text, with ``{}`` for each value."""
    tree = ast.parse(file.read_text("utf-8"))
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value


def phrases(text):
    """What a pattern matches in a text, spaces and line ends as one space."""
    for pattern in PATTERNS.values():
        for match in pattern.finditer(text):
            yield " ".join(match[0].split()).strip(".:;!? ")


def matches_in(folder):
    found = []
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(folder).as_posix()
        for line, text in texts(file):
            found += [(name, line, phrase) for phrase in phrases(text) if phrase not in ALLOWED.get(name, ())]
    return found


def test_docstrings_and_messages_are_plain_english():
    assert matches_in(SOURCE) == []


def test_each_pattern_finds_its_mistake():
    wrong = "KL in nats a token.\n\nOf each rank. 'x' is no number, sent once a run."
    assert sorted(phrases(wrong)) == ["Of each", "is no number", "nats a token", "once a run"]
    assert not list(phrases("There is no file; nats per token, of each rank, is no longer sent. Of course."))
