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

EXPLAIN = 'kl-comedy explain "verl:use_kl_loss=true,kl_loss_type=low_var_kl"'
CERTIFY = "kl-comedy certify grpo rb/per_decision"
TABLE = """\
kl-comedy results table --uri results/evidence/export.parquet --group kl.label --metric eval/heldout/reward \\
    --where "tags.sweep = 'evidence_core' and optimizer.lr = 0.0008"
"""


@contextlib.contextmanager
def _narrow_terminal() -> Iterator[None]:
    """Within: the repository is the working folder, and tables are as wide as :data:`WIDTH`."""
    before = dict(os.environ)
    os.environ |= {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb"}
    try:
        with contextlib.chdir(ROOT):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def output_of(command: str) -> str:
    """What ``kl-comedy ...`` prints on stdout. Raises SystemExit where it fails."""
    # Imported here: a page without commands does not need the command line.
    from kl_comedy.cli.main import app

    words = shlex.split(command.replace("\\\n", " "))
    out = io.StringIO()
    with _narrow_terminal(), contextlib.redirect_stdout(out):
        code = app(words[1:], standalone_mode=False)
    if code:
        raise SystemExit(f"{command}: exit code {code}")
    return out.getvalue()


def shown(command: str) -> Callable[[], str]:
    """A generated part: the command in a block that can be copied, and its output in another."""

    def part() -> str:
        lines = [line.rstrip() for line in output_of(command).rstrip("\n").split("\n")]
        output = "\n".join(lines)
        return f"```bash\n{command.rstrip()}\n```\n\n```text\n{output}\n```"

    return part


PARTS = {"explain": shown(EXPLAIN), "certify": shown(CERTIFY), "table": shown(TABLE)}
"""The generated parts of the start page."""
