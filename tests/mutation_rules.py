"""Code patterns over syntax trees: where a planted bug goes, whatever its variables and files are called.

A pattern is a piece of Python, an expression, a statement or ``keyword: name=value`` of a call, in which ``$name``
stands for anything: an expression, a name, an attribute or a keyword. The same ``$name`` stands for the same thing
everywhere in the pattern, and in the replacement. So ``0.5 * $l.square()`` is k2 in any file, function and variable.
What is no syntax, as a part of a regular expression or of a YAML file of the package, is ``text: ...``, which is taken
literally.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

META = "META_"
"""What ``$`` becomes, so that a pattern is Python."""

Bindings = dict[str, str]
"""What each ``$name`` stands for, as source."""

TEXT = "text: "
"""How a pattern begins that is taken literally."""


@dataclass(frozen=True)
class Place:
    """A match: the file, the node and what the pattern's ``$names`` stand for; of a literal text where it begins."""

    file: Path
    node: ast.AST | None
    bindings: Bindings
    start: int = 0
    length: int = 0


def parse(pattern: str) -> ast.AST:
    """The syntax tree of a pattern. Raises :class:`SyntaxError`."""
    text = pattern.replace("$", META)
    if text.startswith("keyword:"):
        call = ast.parse(f"f({text.removeprefix('keyword:')})", mode="eval").body
        assert isinstance(call, ast.Call)
        return call.keywords[0]
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        (statement,) = ast.parse(text).body
        return statement


def matches(pattern: ast.AST, node: ast.AST, bindings: Bindings) -> bool:
    """Whether ``node`` is what the pattern says; extends ``bindings``."""
    if isinstance(pattern, ast.Name) and pattern.id.startswith(META) and isinstance(node, ast.expr):
        return bind(pattern.id, ast.unparse(node), bindings)
    if type(pattern) is not type(node):
        return False
    for name in pattern._fields:
        # Whether a name is read or written, and how a string was quoted, is no part of a pattern.
        if name in ("ctx", "type_comment", "kind"):
            continue
        if not _fields_match(getattr(pattern, name), getattr(node, name, None), bindings):
            return False
    return True


def bind(name: str, text: str, bindings: Bindings) -> bool:
    """Whether ``name`` may stand for ``text``: it stands for nothing else yet."""
    return bindings.setdefault(name, text) == text


def _fields_match(pattern: object, field: object, bindings: Bindings) -> bool:
    if isinstance(pattern, ast.AST):
        return isinstance(field, ast.AST) and matches(pattern, field, bindings)
    if isinstance(pattern, list):
        if not isinstance(field, list) or len(pattern) != len(field):
            return False
        return all(_fields_match(part, item, bindings) for part, item in zip(pattern, field, strict=True))
    if isinstance(pattern, str) and pattern.startswith(META):  # an attribute, or the name of a keyword
        return isinstance(field, str) and bind(pattern, field, bindings)
    # True == 1, which is another constant.
    return pattern == field and type(pattern) is type(field)


def places(pattern: str, root: Path, inside: str | None = None) -> Iterator[Place]:
    """Where the pattern stands in the Python files under ``root``.

    ``inside``: only in functions and classes whose source, decorators included, has this text, as the name under which
    a part is registered.
    """
    if pattern.startswith(TEXT):
        yield from _texts(pattern.removeprefix(TEXT), root)
        return
    tree_of_pattern = parse(pattern)
    for file in sorted(root.rglob("*.py")):
        source = file.read_text()
        if inside is not None and inside not in source:
            continue
        for node in _nodes(source, inside):
            bindings: Bindings = {}
            if matches(tree_of_pattern, node, bindings):
                yield Place(file=file, node=node, bindings=bindings)


def _nodes(source: str, inside: str | None) -> Iterator[ast.AST]:
    if inside is None:
        yield from _nodes_of_file(source)
        return
    for scope in _scopes(_tree(source), source, inside):
        yield from ast.walk(scope)


@cache
def _tree(source: str) -> ast.Module:
    """A file is parsed once for all rules."""
    return ast.parse(source)


@cache
def _nodes_of_file(source: str) -> list[ast.AST]:
    return list(ast.walk(_tree(source)))


def _texts(text: str, root: Path) -> Iterator[Place]:
    for file in sorted([*root.rglob("*.py"), *root.rglob("*.yaml")]):
        source = file.read_text()
        for match in re.finditer(re.escape(text), source):
            yield Place(file=file, node=None, bindings={}, start=match.start(), length=len(text))


def _scopes(tree: ast.Module, source: str, inside: str) -> list[ast.AST]:
    """The innermost functions and classes with the text ``inside``."""
    lines = source.splitlines()
    scopes: list[ast.AST] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        first_line = min([node.lineno, *[decorator.lineno for decorator in node.decorator_list]])
        if inside in "\n".join(lines[first_line - 1 : node.end_lineno]):
            scopes.append(node)
    # A class is not searched again for its method.
    return [scope for scope in scopes if not _contains_another(scope, scopes)]


def _contains_another(scope: ast.AST, scopes: list[ast.AST]) -> bool:
    return any(node in scopes for node in ast.walk(scope) if node is not scope)


def replaced(place: Place, new: str) -> str:
    """The source of the place's file with the match replaced by ``new``."""
    if place.node is None:
        source = place.file.read_text()
        return source[: place.start] + new.removeprefix(TEXT) + source[place.start + place.length :]
    text = new
    # The longest names first: $ab is not $a with a b after it.
    for name, bound in sorted(place.bindings.items(), key=lambda pair: -len(pair[0])):
        text = text.replace(name.replace(META, "$"), _in_parentheses(bound))
    missing = re.findall(r"\$\w+", text)
    if missing:
        raise ValueError(f"{', '.join(missing)} of the replacement stand for nothing in the pattern")
    text = text.removeprefix("keyword:").strip()
    node = place.node
    if isinstance(node, ast.expr):
        text = f"({text})"
    # In bytes, because an offset in a line counts bytes.
    lines = place.file.read_bytes().splitlines(keepends=True)
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    changed = (before + text.encode() + after).decode()
    ast.parse(changed)  # a replacement that is no Python would be found by any test
    return changed


def _in_parentheses(text: str) -> str:
    if re.fullmatch(r"[\w.]+", text):
        return text
    return f"({text})"
