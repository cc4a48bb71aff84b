"""``kl-comedy audit``: measure the gradient of each KL term on the model of a config or of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kl_comedy.cli.common import (
    Overrides,
    Plugins,
    choice_option,
    command_line,
    load_plugins,
    load_run_plugins,
    message,
    options_in_a_record,
    stderr_console,
)
from kl_comedy.config.shipped import find_config
from kl_comedy.errors import RunFailed
from kl_comedy.io import check_writable
from kl_comedy.progress import stages

if TYPE_CHECKING:
    from kl_comedy.audit.report import AuditReport
    from kl_comedy.audit.source import AuditSource


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Options of ``kl-comedy audit``."""

    config: Annotated[str, typer.Argument(help="A YAML config or its name, or a run's folder (its newest checkpoint)")]
    overrides: Overrides = None
    terms: Annotated[str, typer.Option(help="own, panel or recipes, comma-separated")] = "own,panel"
    updates: Annotated[int, typer.Option(min=1, help="Train this many updates before the audit (configs only)")] = 20
    samples: Annotated[int, typer.Option(min=1, help="Number of completions, in whole groups")] = 1024
    blocks: Annotated[int, typer.Option(min=3, help="Number of blocks of groups that intervals are made from")] = 16
    sketch: Annotated[int, typer.Option(min=0, help="Size of the stored gradient sketch per layer group; 0: all")] = (
        65536
    )
    format: Annotated[str, choice_option("--format", "table", "markdown", "csv", "json")] = "table"
    out: Annotated[Path | None, typer.Option(help="Folder of the JSON file; default: the run's, or `output`")] = None
    plugin: Plugins = None


@options_in_a_record
def audit(wanted: AuditOptions) -> None:
    """Compare the gradient of KL terms with a low-variance reference gradient, on a real model.

    Prints for each term how much of the reference gradient it delivers, its cosine, bias, variance and norm against
    the policy loss, how many tokens get no gradient, and whether beta changes the gradient at all. Exit code 1 when
    a term of the config has no effect, or another gradient than its loss.

    Example: `kl-comedy audit configs/quickstart.yaml --updates 20 --samples 2048`

    Example: `kl-comedy audit runs/RUN --terms own,grpo,rb/per_decision --format json`
    """
    load_plugins(wanted.plugin)
    target = find_config(wanted.config)
    load_run_plugins(target, given=wanted.plugin)
    from kl_comedy.audit.source import AuditSource, check_term_names

    # Empty parts are dropped: a trailing comma names no term.
    names = [name.strip() for name in wanted.terms.split(",") if name.strip()]
    check_term_names(names, "--terms")
    source = AuditSource.read(target, wanted.overrides or [])
    folder = Path(source.config.output)
    if wanted.out is not None:
        folder = wanted.out
    elif target.is_dir():
        # The audit of a run belongs beside its checkpoints.
        folder = target
    # The report is written last, after minutes of work.
    check_writable(folder, "--out", is_folder=True)
    # Imports Lightning, which takes seconds: a mistake in the config is reported before it.
    from kl_comedy.audit.run import run_audit

    with stages(stderr_console()) as show_progress:
        report = run_audit(
            source,
            names,
            updates=wanted.updates,
            samples=wanted.samples,
            blocks=wanted.blocks,
            sketch=wanted.sketch,
            progress=show_progress,
        )
    path = _save(report, source, folder)
    message(f"wrote {path}")
    print(report.render(wanted.format))
    # After the report, which shows what failed.
    if report.failures:
        raise RunFailed("; ".join(report.failures))


def _save(report: AuditReport, source: AuditSource, folder: Path) -> Path:
    """Write the report as JSON, with the command, config and code that made it; return the file's path."""
    from kl_comedy.config import config_hash
    from kl_comedy.io import atomic_write
    from kl_comedy.tracking import provenance_tags
    from kl_comedy.training.run_plugins import plugins_of

    # In the name, so that audits of two configs, or of two updates, do not overwrite each other.
    identity = config_hash(source.config)
    path = folder / f"audit-{report.name}-{identity}-{report.version}.json"
    checkpoint = None if source.checkpoint is None else str(source.checkpoint)
    record = {
        "command": command_line(),
        "config_hash": identity,
        "checkpoint": checkpoint,
        "provenance": provenance_tags(plugins=plugins_of(source.config)),
        **report.to_plain(),
    }
    # allow_nan=False: NaN is no JSON, and most readers refuse the whole file.
    atomic_write(path, json.dumps(record, indent=1, allow_nan=False) + "\n")
    return path
