"""Commands of a page, each with what it prints."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from collections.abc import Callable, Iterator

from doc_tables.common import ROOT

WIDTH = 96
"""Columns of the terminal: what fits beside a page's menu without a scroll bar."""
BESIDE_TWO_MENUS = 78
"""Columns that fit where the page has a table of contents too."""

OPENING = "kl-comedy certify trl/default --regime on_policy"
CERTIFY = "kl-comedy certify grpo rb/per_decision"
TABLE = """\
kl-comedy results table --uri results/evidence/export.parquet --group kl.label --metric eval/heldout/reward \\
    --where "tags.sweep = 'evidence_core' and optimizer.lr = 0.0008"
"""


@contextlib.contextmanager
def _narrow_terminal(width: int) -> Iterator[None]:
    """Within: the repository is the working folder, and tables are ``width`` columns wide."""
    before = dict(os.environ)
    os.environ |= {"COLUMNS": str(width), "NO_COLOR": "1", "TERM": "dumb"}
    try:
        with contextlib.chdir(ROOT):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def output_of(command: str, width: int = WIDTH) -> str:
    """What ``kl-comedy ...`` prints on stdout. Raises SystemExit where it fails."""
    # Imported here: a page without commands does not need the command line.
    from kl_comedy.cli.main import app

    words = shlex.split(command.replace("\\\n", " "))
    out = io.StringIO()
    with _narrow_terminal(width), contextlib.redirect_stdout(out):
        code = app(words[1:], standalone_mode=False)
    if code:
        raise SystemExit(f"{command}: exit code {code}")
    return out.getvalue()


def shown(command: str, *, first: int | None = None) -> Callable[[], str]:
    """A generated part: the command in a block that can be copied, and its output (``first`` lines) in another."""

    def part() -> str:
        width = WIDTH if first is None else BESIDE_TWO_MENUS
        lines = [line.rstrip() for line in output_of(command, width).rstrip("\n").split("\n")]
        if first is not None and len(lines) > first:
            lines = [*lines[:first], "..."]
        output = "\n".join(lines)
        return f"```bash\n{command.rstrip()}\n```\n\n```text\n{output}\n```"

    return part


PARTS = {"opening": shown(OPENING, first=6), "certify": shown(CERTIFY), "table": shown(TABLE)}
"""The generated parts of the start page."""
