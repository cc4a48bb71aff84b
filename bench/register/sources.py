"""Released code at a pinned commit: single functions or statements, read from a git folder and never stored here.

A function's body runs as it was released. Its decorators (compilers, remote workers, type checkers) are left out, its
annotations are not evaluated, and names that it imports within itself can be given.
"""

from __future__ import annotations
import __future__

import ast
import hashlib
import math
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn


class SourceMissing(Exception):
    """There is no such source in the folder of sources. The message says which."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file of a repository at a commit, and what is taken from it.

    ``objects``: top-level functions, classes or constants. ``within`` and ``statements``: names whose assignments are
    taken from one function or method (``Class.method``), for code that has no function of its own.
    """

    repository: str
    commit: str
    path: str
    objects: tuple[str, ...] = ()
    within: str = ""
    statements: tuple[str, ...] = ()

    def text(self, folder: Path) -> str:
        """The file at the commit. Raises :class:`SourceMissing`."""
        git = _git_folder(folder, self.repository)
        command = ["git", "-C", str(git), "show", f"{self.commit}:{self.path}"]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        if completed.returncode != 0:
            raise SourceMissing(f"the clone of {self.repository} has no {self.path} at {self.commit[:7]}")
        return completed.stdout


def _git_folder(folder: Path, repository: str) -> Path:
    """The clone of a repository: FOLDER/OWNER/NAME, or a git directory FOLDER/OWNER+NAME/repo."""
    joined = repository.replace("/", "+")
    for candidate in (folder / repository, folder / joined / "repo", folder / joined):
        if candidate.is_dir():
            return candidate
    # The message is stored beside the row, so that it names no folder of this machine.
    raise SourceMissing(f"no clone of {repository}")


def newest(folder: Path, repository: str) -> tuple[str, str]:
    """The commit that a clone has checked out, and its date. Raises :class:`SourceMissing`."""
    git = _git_folder(folder, repository)
    command = ["git", "-C", str(git), "log", "-1", "--format=%H %cs"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        raise SourceMissing(f"{repository} has no commit in {folder}")
    commit, date = completed.stdout.split()
    return commit, date


def sha256_text(text: str) -> str:
    """The hash that is stored beside a row in place of the code."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


class Code:
    """The released code of a source, ready to be called.

    Functions and classes are attributes. :meth:`run` runs the statements of the source with the names that are given.
    """

    def __init__(self, text: str, source: Source) -> None:
        self._names: dict[str, Any] = {"torch": torch, "F": functional, "nn": nn, "math": math}
        self._names |= {"dataclass": dataclass, "field": field}
        module = ast.parse(text)
        self._statements: ast.Module | None = None
        if source.objects:
            chosen = _objects(module, source.objects)
            _execute(ast.Module(body=chosen, type_ignores=[]), self._names)
        if source.statements:
            function = _function(module, source.within)
            self._statements = ast.Module(body=_assignments(function, source.statements), type_ignores=[])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._names[name]

    @property
    def names(self) -> dict[str, Any]:
        """Everything that the released code defines or was given."""
        return dict(self._names)

    def give(self, **names: Any) -> Code:
        """Define names that the functions read from their module, such as a helper of another file."""
        self._names.update(names)
        return self

    def run(self, result: str, **names: Any) -> Any:
        """Run the statements with these names, and return the value of ``result``."""
        assert self._statements is not None, "the source names statements"
        local_names = {**self._names, **names}
        _execute(self._statements, local_names)
        return local_names[result]


def _execute(module: ast.Module, names: dict[str, Any]) -> None:
    # As with `from __future__ import annotations`: annotations name packages that are not installed here.
    compiled = compile(module, "<released code>", "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
    exec(compiled, names)


def _objects(module: ast.Module, names: Sequence[str]) -> list[ast.stmt]:
    """The top-level functions, classes and constants of these names, in the order of the file.

    Raises :class:`SourceMissing` for a name that the file does not define.
    """
    chosen: list[ast.stmt] = []
    missing = list(names)
    for statement in module.body:
        name = getattr(statement, "name", None)
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
        if name not in names:
            continue
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            statement.decorator_list = [item for item in statement.decorator_list if _is_dataclass(item)]
        chosen.append(statement)
        # A file may define a name twice.
        if name in missing:
            missing.remove(name)
    if missing:
        raise SourceMissing(f"the source has no {', '.join(missing)}")
    return chosen


def _is_dataclass(decorator: ast.expr) -> bool:
    """The one decorator without which a class has no constructor."""
    return isinstance(decorator, ast.Name) and decorator.id == "dataclass"


def _function(module: ast.Module, path: str) -> ast.FunctionDef:
    """A function or ``Class.method``."""
    body = module.body
    node: ast.stmt | None = None
    for part in path.split("."):
        named = [statement for statement in body if getattr(statement, "name", None) == part]
        node = named[0] if named else None
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            raise SourceMissing(f"the source has no {path}")
        body = node.body
    assert isinstance(node, ast.FunctionDef), f"{path} is a class"
    return node


def _assignments(function: ast.FunctionDef, names: Sequence[str]) -> list[ast.stmt]:
    """The first assignment to each name, in the order of the names; the second to a name that stands there twice."""
    by_name: dict[str, list[ast.stmt]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            by_name.setdefault(node.targets[0].id, []).append(node)
    # ast.walk goes level by level, so that a later line that stands less deep would come first.
    for assignments in by_name.values():
        assignments.sort(key=lambda node: node.lineno)
    chosen = []
    for name in names:
        if not by_name.get(name):
            raise SourceMissing(f"{function.name} has no assignment to {name}")
        chosen.append(by_name[name].pop(0))
    return chosen
