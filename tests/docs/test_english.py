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
    parts_of_f_strings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts_of_f_strings.update(id(part) for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, text_of_f_string(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts_of_f_strings:
            yield node.lineno, node.value


def text_of_f_string(node):
    text = ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += str(part.value)
        else:
            text += "{}"
    return text


def phrases(text):
    """What a pattern matches in a text, spaces and line ends as one space."""
    for pattern in PATTERNS.values():
        for match in pattern.finditer(text):
            yield " ".join(match[0].split()).strip(".:;!? ")


def mistakes_in(folder):
    mistakes = []
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(folder).as_posix()
        allowed = ALLOWED.get(name, ())
        for line, text in texts(file):
            for phrase in phrases(text):
                if phrase not in allowed:
                    mistakes.append((name, line, phrase))
    return mistakes


def test_docstrings_and_messages_are_plain_english():
    assert mistakes_in(SOURCE) == []


def test_each_pattern_finds_its_mistake():
    text = "KL in nats a token.\n\nOf each rank. 'x' is no number, sent once a run."
    assert sorted(phrases(text)) == ["Of each", "is no number", "nats a token", "once a run"]


def test_no_pattern_finds_plain_english():
    text = "There is no file; nats per token, of each rank, is no longer sent. Of course."
    assert list(phrases(text)) == []
