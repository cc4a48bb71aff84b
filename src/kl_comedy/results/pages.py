"""The tables of Markdown pages, checked without a store: each is made again by the command that the page names.

    <!-- kl-comedy results table --group kl.label --metric eval/heldout/reward --uri export.parquet -->

above a table: the table is made from an export. The path after ``--uri`` is relative to the page; without it the export
is ``export.parquet`` beside the page.

    <!-- python research/scripts/stored_tables.py values -->

above one or more tables: the script, a file of the repository that holds the page, is run there without a shell and
prints these tables in their order, up to the next such comment.

    <!-- unchecked: measured -->

above a table that nothing can make again, with the reason in one word.
"""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kl_comedy.errors import RunFailed, UserError
from kl_comedy.results.runs import Export, NoCurves, open_runs
from kl_comedy.results.verify import listed

TABLE_COMMANDS = ("table", "compare", "power", "aggregate")
"""Commands of ``kl-comedy results`` that print tables."""

FORBIDDEN_OPTIONS = ("--out", "--uri", "--format")
"""Options that a page's command may not have, because the check sets them (``--uri`` is taken out before)."""

VERDICTS = ("changed", "failed", "unchecked", "no command", "same")
MOST_SHOWN = 3
"""The reason of a verdict lists at most this many differences."""

SCRIPT_LIMIT_S = 300.0

_COMMAND_COMMENT = re.compile(r"<!-- (kl-comedy results .*|unchecked: \S+) -->")
_SCRIPT_COMMENT = re.compile(r"<!-- (python (?:-m )?\S.*) -->")
_RULE_LINE = re.compile(r"[|: -]+")
_CELL_BORDER = re.compile(r"(?<!\\)\|")

Recompute = Callable[[Sequence[str], Path], str]
"""Runs the words after ``kl-comedy results`` on an export and returns Markdown."""


class MarkdownTable(NamedTuple):
    """A table of a page.

    ``line`` is where it begins, from 1; ``command`` the command or reason in the comment above it, or empty; ``place``
    its place among the tables of that comment.
    """

    line: int
    command: str
    header: list[str]
    rows: list[list[str]]
    place: int = 0


def markdown_tables(text: str) -> list[MarkdownTable]:
    """The tables of a page.

    >>> markdown_tables("<!-- kl-comedy results table -->\\n\\n| a | b |\\n|---|---:|\\n| 1 | 2 |")[0].rows
    [['1', '2']]
    """
    tables: list[MarkdownTable] = []
    block: list[str] = []
    line_above = ""
    script = ""
    tables_of_script = 0
    # The empty line at the end closes a table that is the last thing on the page.
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.startswith("|"):
            block.append(line)
            continue
        if len(block) > 1 and _RULE_LINE.fullmatch(block[1]):
            header = _cells(block[0])
            rows = [_cells(row) for row in block[2:]]
            own_command = _COMMAND_COMMENT.fullmatch(line_above.strip())
            if own_command:
                tables.append(MarkdownTable(number - len(block), own_command[1], header, rows))
            else:
                tables.append(MarkdownTable(number - len(block), script, header, rows, tables_of_script))
                tables_of_script += 1
        script_comment = _SCRIPT_COMMENT.fullmatch(line.strip())
        if script_comment:
            script = script_comment[1]
            tables_of_script = 0
        # Empty lines may stand between a comment and its table, but a comment belongs to one table only.
        if line.strip() or block:
            line_above = line
        block = []
    return tables


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in _CELL_BORDER.split(row)[1:-1]]


def _show_nothing(done: int, total: int) -> None:
    """The default progress."""


def verify_pages(
    path: Path, recompute: Recompute, *, progress: Callable[[int, int], None] = _show_nothing
) -> list[dict[str, Any]]:
    """A row for each table of the page ``path``, or of the pages of a folder and of the README.md beside it.

    ``verdict``: ``same``, ``changed`` (``why`` says where), ``failed`` (its command fails), ``unchecked`` (``why``: the
    page's word; no export; one that lacks the curves) or ``no command``. ``cells`` counts those compared;
    ``unchecked`` names columns that the export cannot give. ``progress`` is called with the number of tables that are
    verified, and of all. Raises :class:`UserError` where there is no page.
    """
    tables: list[tuple[Path, MarkdownTable]] = []
    for page in _pages(path):
        tables += [(page, table) for table in markdown_tables(page.read_text(encoding="utf-8"))]
    verdicts = []
    for number, (page, table) in enumerate(tables):
        progress(number, len(tables))
        name = f"{page}:{table.line}"
        verdict = {"table": name, "verdict": "no command", "cells": 0, "unchecked": "", "why": ""}
        if table.command:
            verdict |= _verify_table(table, page.resolve(), recompute)
        verdicts.append(verdict)
    progress(len(tables), len(tables))
    # A script is run once for its tables on all pages, but again by the next call: it may have changed.
    _tables_of_script.cache_clear()
    return verdicts


def _pages(path: Path) -> list[Path]:
    if not path.is_dir():
        pages = [path]
    else:
        pages = sorted(path.rglob("*.md"))
        readme = path.absolute().parent / "README.md"
        if readme.is_file():
            pages.append(readme)
    if not pages or not pages[0].is_file():
        raise UserError(f"{path}: no such page, or a folder without any")
    return pages


def _verify_table(table: MarkdownTable, page: Path, recompute: Recompute) -> dict[str, Any]:
    # A table that cannot be made again is a row of the result: the others are checked all the same.
    try:
        program, *words = shlex.split(table.command)
        if program == "unchecked:":
            return {"verdict": "unchecked", "why": words[0]}
        if program == "python":
            return _verify_by_script(table, page, tuple(words))
        return _verify_by_command(table, page, words[1:], recompute)
    except NoCurves as error:
        return {"verdict": "unchecked", "why": str(error)}
    except (UserError, RunFailed, ValueError, IndexError) as error:
        return {"verdict": "failed", "why": str(error)}


def _verify_by_script(table: MarkdownTable, page: Path, words: tuple[str, ...]) -> dict[str, Any]:
    """``words`` are those after ``python``."""
    repository = page.parent
    for folder in page.parents:
        if (folder / "pyproject.toml").is_file():
            repository = folder
            break
    printed = _tables_of_script(repository, words)
    if table.place >= len(printed):
        raise UserError(f"{table.command!r} prints {len(printed)} tables, and this is number {table.place + 1}")
    current = printed[table.place]
    # A column that the script does not print was measured, or written by hand.
    not_printed = [name for name in table.header if name not in current.header]
    return _compare(table, current, not_printed)


def _verify_by_command(table: MarkdownTable, page: Path, words: list[str], recompute: Recompute) -> dict[str, Any]:
    """``words`` are those after ``kl-comedy results``."""
    export = page.parent / "export.parquet"
    if "--uri" in words:
        position = words.index("--uri")
        export = page.parent / words[position + 1]
        words = words[:position] + words[position + 2 :]
    # startswith, because --out=FILE is one word. A page must not make the check write or fetch anything.
    has_forbidden_option = any(word.startswith(FORBIDDEN_OPTIONS) for word in words)
    if words[0] not in TABLE_COMMANDS or has_forbidden_option:
        raise UserError(f"{table.command!r} does not print a table ({', '.join(TABLE_COMMANDS)})")
    if not export.is_file():
        return {"verdict": "unchecked", "why": f"there is no {export}"}
    current = markdown_tables(recompute(words, export))[0]
    runs = open_runs(export)
    has_curves = isinstance(runs, Export) and len(runs.curves) > 0
    not_computable = []
    # The rule of collapse compares with the first value of a curve.
    if "collapsed" in table.header and not has_curves:
        not_computable = ["collapsed"]
    return _compare(table, current, not_computable)


def _compare(table: MarkdownTable, current: MarkdownTable, unchecked: Sequence[str]) -> dict[str, Any]:
    """The verdict on every cell except those of the columns ``unchecked``; a page may leave columns out."""
    differences = []
    compared_cells = 0
    if len(table.rows) != len(current.rows):
        differences.append(f"{len(table.rows)} rows -> {len(current.rows)}")
    # Columns of one name are in the same order on both sides.
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(current.header):
        positions.setdefault(name, []).append(position)
    for position, name in enumerate(table.header):
        if name in unchecked:
            continue
        if not positions.get(name):
            differences.append(f"the command gives no column {name!r}")
            continue
        current_position = positions[name].pop(0)
        compared_cells += len(table.rows)
        # Not strict: a difference in the number of rows is reported above.
        for row, current_row in zip(table.rows, current.rows, strict=False):
            if row[position] != current_row[current_position]:
                differences.append(f"{name}: {row[position]!r} -> {current_row[current_position]!r}")
    verdict = "same"
    if differences:
        verdict = "changed"
    return {
        "verdict": verdict,
        "cells": compared_cells,
        "unchecked": ", ".join(unchecked),
        "why": listed(differences, MOST_SHOWN),
    }


@functools.cache
def _tables_of_script(repository: Path, words: tuple[str, ...]) -> list[MarkdownTable]:
    """The tables that ``python`` with ``words`` prints, run in the folder ``repository``.

    Raises :class:`UserError` for a script outside the repository, and :class:`RunFailed` where it fails.
    """
    if words[0] == "-m":
        name = words[1].replace(".", "/")
        files = [repository / name / "__main__.py", repository / f"{name}.py"]
    else:
        name = words[0]
        files = [repository / name]
    # A page may come from somewhere else: it runs scripts of this repository and nothing more.
    if not any(file.is_file() and file.resolve().is_relative_to(repository) for file in files):
        raise UserError(f"{name} is not a script of {repository}")
    command = [sys.executable, *words]
    try:
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=SCRIPT_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{shlex.join(words)} took more than {SCRIPT_LIMIT_S:.0f} s") from None
    if done.returncode != 0:
        error_lines = done.stderr.strip().splitlines() or ["no message"]
        raise RunFailed(f"{shlex.join(words)} fails: {error_lines[-1]}")
    return markdown_tables(done.stdout)


def summary(verdicts: Iterable[dict[str, Any]]) -> list[str]:
    """What :func:`verify_pages` compared, with what verdicts, and on which pages tables name no command."""
    rows = list(verdicts)
    counts = Counter(row["verdict"] for row in rows)
    counted = ", ".join(f"{counts[verdict]} {verdict}" for verdict in reversed(VERDICTS))
    cells = sum(row["cells"] for row in rows)
    line = f"{len(rows)} tables: {counted} ({cells} cells compared)"
    partly_checked = sum(bool(row["unchecked"]) for row in rows)
    if partly_checked:
        line += f"; in {partly_checked} tables a column is not checked"
    lines = [line]
    without_command = Counter(row["table"].rpartition(":")[0] for row in rows if row["verdict"] == "no command")
    if without_command:
        pages = ", ".join(f"{page} ({number})" for page, number in without_command.items())
        lines.append(f"no command: {pages}")
    return lines
