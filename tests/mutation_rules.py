"""Code patterns over syntax trees: where a planted bug goes, whatever its variables and files are called.

A pattern is a piece of Python, an expression, a statement or ``keyword: name=value`` of a call, in which ``$name`` stands for
anything: an expression, a name, an attribute or a keyword. The same ``$name`` stands for the same thing everywhere in the
pattern, and in the replacement. So ``0.5 * $l.square()`` is k2 in any file, function and variable.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

META = "META_"
"""What ``$`` becomes, so that a pattern is Python."""

Bindings = dict[str, str]
"""What each ``$name`` stands for, as source."""


@dataclass(frozen=True)
class Place:
    """A match: the file, the node and what the pattern's ``$names`` stand for."""

    file: Path
    node: ast.AST
    bindings: Bindings


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


def matches(pattern: ast.AST, node: ast.AST, source: str, bindings: Bindings) -> bool:
    """Whether ``node`` is what the pattern says; extends ``bindings``."""
    if isinstance(pattern, ast.Name) and pattern.id.startswith(META) and isinstance(node, ast.expr):
        return bind(pattern.id, ast.unparse(node), bindings)
    if type(pattern) is not type(node):
        return False
    return all(
        _fields_match(getattr(pattern, name), getattr(node, name, None), source, bindings)
        for name in pattern._fields
        if name not in ("ctx", "type_comment", "kind")
    )


def bind(name: str, text: str, bindings: Bindings) -> bool:
    """Whether ``name`` may stand for ``text``: it stands for nothing else yet."""
    return bindings.setdefault(name, text) == text


def _fields_match(wanted: object, given: object, source: str, bindings: Bindings) -> bool:
    if isinstance(wanted, ast.AST):
        return isinstance(given, ast.AST) and matches(wanted, given, source, bindings)
    if isinstance(wanted, list):
        if not isinstance(given, list) or len(wanted) != len(given):
            return False
        return all(_fields_match(a, b, source, bindings) for a, b in zip(wanted, given, strict=True))
    if isinstance(wanted, str) and wanted.startswith(META):  # an attribute, or the name of a keyword
        return isinstance(given, str) and bind(wanted, given, bindings)
    return wanted == given and type(wanted) is type(given)


def places(pattern: str, root: Path, inside: str | None = None) -> Iterator[Place]:
    """Where the pattern stands in the Python files under ``root``.

    ``inside``: only in functions and classes whose source, decorators included, has this text, as the name under which a
    part is registered.
    """
    wanted = parse(pattern)
    for file in sorted(root.rglob("*.py")):
        source = file.read_text()
        tree = ast.parse(source)
        for scope in _scopes(tree, source, inside):
            for node in ast.walk(scope):
                bindings: Bindings = {}
                if matches(wanted, node, source, bindings):
                    yield Place(file=file, node=node, bindings=bindings)


def _scopes(tree: ast.Module, source: str, inside: str | None) -> list[ast.AST]:
    if inside is None:
        return [tree]
    scopes: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            text = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
            if inside in text:
                scopes.append(node)
    # Of nested scopes the innermost: a class is not searched again for its method.
    return [scope for scope in scopes if not any(other is not scope and other in ast.walk(scope) for other in scopes)]


def replaced(place: Place, new: str) -> str:
    """The source of the place's file with the match replaced by ``new``."""
    text = new
    for name, bound in sorted(place.bindings.items(), key=lambda pair: -len(pair[0])):
        text = text.replace(name.replace(META, "$"), _in_parentheses(bound))
    missing = re.findall(r"\$\w+", text)
    if missing:
        raise ValueError(f"{', '.join(missing)} of the replacement stand for nothing in the pattern")
    text = text.removeprefix("keyword:").strip()
    node = place.node
    lines = place.file.read_bytes().splitlines(keepends=True)
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    changed = (before + text.encode() + after).decode()
    ast.parse(changed)  # a replacement that is no Python would be found by any test
    return changed


def _in_parentheses(text: str) -> str:
    return text if re.fullmatch(r"[\w.]+", text) else f"({text})"
