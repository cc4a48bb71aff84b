"""The tables of Markdown pages, checked without a store: each is made again by the command that the page names.

    <!-- kl-comedy results table --group kl.label --metric eval/heldout/reward --uri export.parquet -->

above a table: it is made from an export. The path after ``--uri`` is relative to the page; without it the export is
``export.parquet`` beside the page.

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
from kl_comedy.tracking.runs import NoCurves, open_runs

MADE_BY = ("table", "compare", "aggregate")
"""Commands of ``kl-comedy results`` that print tables."""

VERDICTS = ("changed", "failed", "unchecked", "no command", "same")
MOST_SHOWN = 3
SCRIPT_LIMIT_S = 300.0
_ABOVE = re.compile(r"<!-- (kl-comedy results .*|unchecked: \S+) -->")
_SCRIPT = re.compile(r"<!-- (python (?:-m )?\S.*) -->")


class MarkdownTable(NamedTuple):
    """Where a table begins (line, from 1), the command or reason in the comment above it (or empty), its rows of cells,
    and its place among the tables of that comment."""

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
    tables, block, above, script, place = list[MarkdownTable](), list[str](), "", "", 0
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.startswith("|"):
            block.append(line)
            continue
        if len(block) > 1 and re.fullmatch(r"[|: -]+", block[1]):
            own = _ABOVE.fullmatch(above.strip())
            header, _, *rows = ([cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in block)
            command, at = (own[1], 0) if own else (script, place)
            tables.append(MarkdownTable(number - len(block), command, header, rows, at))
            place += own is None
        if match := _SCRIPT.fullmatch(line.strip()):
            script, place = match[1], 0
        block, above = [], line if line.strip() or block else above
    return tables


def verify_pages(path: Path, recompute: Callable[[Sequence[str], Path], str]) -> list[dict[str, Any]]:
    """A row for each table of the page ``path``, or of the pages of a folder and of the README.md beside it.

    ``recompute`` runs the words after ``kl-comedy results`` on an export and returns Markdown. ``verdict``: ``same``,
    ``changed`` (``why`` says where), ``failed`` (its command fails), ``unchecked`` (``why``: the page's word; no
    export; one that lacks the curves) or ``no command``. ``cells`` counts those compared; ``unchecked`` names columns
    that the export cannot give. Raises :class:`UserError` where there is no page.
    """
    pages = sorted(path.rglob("*.md")) if path.is_dir() else [path]
    beside = path.absolute().parent / "README.md"
    if path.is_dir() and beside.is_file():
        pages.append(beside)
    if not pages or not pages[0].is_file():
        raise UserError(f"{path}: no such page, or a folder without any")
    verdicts = []
    for page in pages:
        for table in markdown_tables(page.read_text(encoding="utf-8")):
            where = f"{page}:{table.line}"
            verdicts.append({"table": where, "verdict": "no command", "cells": 0, "unchecked": "", "why": ""})
            if table.command:
                verdicts[-1] |= _verify_table(table, page.resolve(), recompute)
    _tables_of_script.cache_clear()
    return verdicts


def _verify_table(table: MarkdownTable, page: Path, recompute: Callable[[Sequence[str], Path], str]) -> dict[str, Any]:
    try:
        program, *words = shlex.split(table.command)
        if program == "unchecked:":
            return {"verdict": "unchecked", "why": words[0]}
        if program == "python":
            root = next((folder for folder in page.parents if (folder / "pyproject.toml").is_file()), page.parent)
            printed = _tables_of_script(root, tuple(words))
            if table.place >= len(printed):
                raise UserError(f"{table.command!r} prints {len(printed)} tables, and this is number {table.place + 1}")
            return _compare(
                table, printed[table.place], [name for name in table.header if name not in printed[table.place].header]
            )
        words, export = words[1:], page.parent / "export.parquet"
        if "--uri" in words:
            at = words.index("--uri")
            export = page.parent / words[at + 1]
            del words[at : at + 2]
        if words[0] not in MADE_BY or any(word.startswith(("--out", "--uri", "--format")) for word in words):
            raise UserError(f"{table.command!r} does not print a table ({', '.join(MADE_BY)})")
        if not export.is_file():
            return {"verdict": "unchecked", "why": f"there is no {export}"}
        now = markdown_tables(recompute(words, export))[0]
        lost = (
            [] if open_runs(export).curves else ["collapsed"] * ("collapsed" in table.header)
        )  # it needs first values
    except NoCurves as error:
        return {"verdict": "unchecked", "why": str(error)}
    except (UserError, RunFailed, ValueError, IndexError) as error:
        return {"verdict": "failed", "why": str(error)}
    return _compare(table, now, lost)


def _compare(table: MarkdownTable, now: MarkdownTable, lost: Sequence[str]) -> dict[str, Any]:
    """The verdict on every cell but those of the columns ``lost``; a page may leave columns out."""
    wrong, cells = [], 0
    if len(table.rows) != len(now.rows):
        wrong.append(f"{len(table.rows)} rows -> {len(now.rows)}")
    places = {name: [at for at, other in enumerate(now.header) if other == name] for name in now.header}
    for at, name in enumerate(table.header):
        if name in lost:
            continue
        if not places.get(name):
            wrong.append(f"the command gives no column {name!r}")
            continue
        beside = places[name].pop(0)  # columns of one name are in the same order
        given, computed = [row[at] for row in table.rows], [row[beside] for row in now.rows]
        cells += len(given)
        wrong += [f"{name}: {a!r} -> {b!r}" for a, b in zip(given, computed, strict=False) if a != b]
    more = [f"and {len(wrong) - MOST_SHOWN} more"] if len(wrong) > MOST_SHOWN else []
    why = "; ".join(wrong[:MOST_SHOWN] + more)
    return {"verdict": "changed" if wrong else "same", "cells": cells, "unchecked": ", ".join(lost), "why": why}


@functools.cache
def _tables_of_script(root: Path, words: tuple[str, ...]) -> list[MarkdownTable]:
    """The tables that ``python`` with ``words`` prints, run in the repository ``root``.

    Raises :class:`UserError` for what is no script of the repository, and :class:`RunFailed` where it fails.
    """
    name = f"{words[1].replace('.', '/')}" if words[0] == "-m" else words[0]
    files = [root / name / "__main__.py", root / f"{name}.py"] if words[0] == "-m" else [root / name]
    if not any(file.is_file() and file.resolve().is_relative_to(root) for file in files):
        raise UserError(f"{name} is no script of {root}")
    command = [sys.executable, *words]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=SCRIPT_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{shlex.join(words)} took more than {SCRIPT_LIMIT_S:.0f} s") from None
    if done.returncode:
        raise RunFailed(f"{shlex.join(words)} fails: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return markdown_tables(done.stdout)


def summary(verdicts: Iterable[dict[str, Any]]) -> list[str]:
    """What :func:`verify_pages` compared, with what verdicts, and on which pages tables name no command."""
    rows = list(verdicts)
    counts = Counter(row["verdict"] for row in rows)
    partly = sum(bool(row["unchecked"]) for row in rows)
    counted = ", ".join(f"{counts[verdict]} {verdict}" for verdict in reversed(VERDICTS))
    cells = sum(row["cells"] for row in rows)
    columns = f"; in {partly} tables a column is not checked" if partly else ""
    others = Counter(row["table"].rpartition(":")[0] for row in rows if row["verdict"] == "no command")
    listed = [f"no command: {', '.join(f'{page} ({number})' for page, number in others.items())}"] if others else []
    return [f"{len(rows)} tables: {counted} ({cells} cells compared){columns}", *listed]
