"""The HTML page of a sweep: what ``kl-comedy results report`` makes of its runs, one for each store."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kl_comedy.errors import UserError

if TYPE_CHECKING:
    from kl_comedy.slurm.manifest import Sweep


def write_pages(found: Sweep) -> Iterator[Path]:
    """Write report/report.html (``report-2.html``, ... where cells log to several stores) and yield their paths.

    A store that cannot be read, or holds no finished run of the sweep, is told on stderr; report.md has every cell
    whatever the stores say.
    """
    from kl_comedy.cli.results_report import report

    stores = [(uri, experiment) for uri, experiment in found.manifest.stores if uri != "none"]
    for number, (uri, experiment) in enumerate(stores, start=1):
        page = found.path / "report" / ("report.html" if number == 1 else f"report-{number}.html")
        try:
            with contextlib.chdir(found.manifest.directory), contextlib.redirect_stdout(sys.stderr):
                report(
                    out=page, title=f"Sweep {found.manifest.name}", uri=uri, experiment=experiment,
                    where=f"tags.sweep = '{found.manifest.name}'",
                )  # fmt: skip
        except UserError as error:
            print(f"no {page.name}: {error}", file=sys.stderr)
            continue
        yield page
