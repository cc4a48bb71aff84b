"""``kl-comedy audit``: the gradient of each KL term on the model of a config or of a run."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kl_comedy.cli.common import Overrides, Plugins, check_choice, load_plugins
from kl_comedy.errors import RunFailed

if TYPE_CHECKING:
    from rich.console import Console

    from kl_comedy.lab.audit.report import AuditReport
    from kl_comedy.lab.audit.source import AuditSource


def mount(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(audit)


def audit(
    config: Annotated[Path, typer.Argument(help="A YAML config, or the folder of a run (its newest checkpoint)")],
    overrides: Overrides = None,
    terms: Annotated[str, typer.Option(help="own, panel or recipes, comma-separated")] = "own,panel",
    updates: Annotated[int, typer.Option(min=1, help="From a config: updates trained first")] = 20,
    samples: Annotated[int, typer.Option(min=1, help="Completions audited, in whole groups")] = 1024,
    blocks: Annotated[int, typer.Option(min=3, help="Blocks of groups that intervals are made from")] = 16,
    sketch: Annotated[int, typer.Option(min=0, help="Numbers stored of a layer group's gradient; 0: all")] = 65536,
    format: Annotated[str, typer.Option(help="table, markdown, csv or json")] = "table",
    out: Annotated[Path | None, typer.Option(help="Folder of the JSON file; default: the run's, or `output`")] = None,
    plugin: Plugins = None,
) -> None:
    """Compare the gradient of KL terms with a low-variance reference gradient, on a real model.

    Says of each term how much of the reference gradient it delivers, its cosine, bias, variance and norm against
    the policy loss, how many tokens get no gradient, and whether beta changes the gradient at all. Exit code 1 when
    a term of the config has no effect, or another gradient than its loss.

    Example: `kl-comedy audit configs/quickstart.yaml --updates 20 --samples 2048`

    Example: `kl-comedy audit runs/RUN --terms own,grpo,rb/per_decision --format json`
    """
    check_choice("--format", format, ("table", "markdown", "csv", "json"))
    load_plugins(plugin)
    from rich.console import Console

    from kl_comedy.lab.audit.report import render
    from kl_comedy.lab.audit.source import AuditSource

    source = AuditSource.read(config, overrides or [])
    console = Console(stderr=True)
    names = [name.strip() for name in terms.split(",") if name.strip()]
    report = _report(source, names, console, updates=updates, samples=samples, blocks=blocks, sketch=sketch)
    path = _save(report, source, out or (config if config.is_dir() else Path(source.config.output)))
    console.print(f"wrote {path}", soft_wrap=True, highlight=False)
    print(render(report, format))
    if report.failures:
        raise RunFailed("; ".join(report.failures))


def _report(
    source: AuditSource, names: list[str], console: Console, *, updates: int, samples: int, blocks: int, sketch: int
) -> AuditReport:
    """Train the policy to where it is audited and audit it, with a progress bar on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from kl_comedy.kl import BetaState, resolve_terms
    from kl_comedy.lab.audit.measure import audit_blocks, equal_blocks, select_terms
    from kl_comedy.lab.audit.source import audited_policy, staleness

    on_policy = staleness(source.config) == 0
    config_terms = resolve_terms(source.config.kl)
    betas = [BetaState(term.beta).value for term in config_terms]
    # refuses unknown names before anything is trained
    select_terms(names, config_terms, betas, on_policy=on_policy, key="--terms")
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    tasks: dict[str, Any] = {}

    def show_progress(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, total=total)
            if not console.is_terminal:
                console.print(stage)
        bar.update(tasks[stage], completed=done)

    with bar, audited_policy(source, updates=updates, samples=samples, progress=show_progress) as policy:
        module = policy.module
        betas = [beta.value for beta in module.betas]
        rows = equal_blocks(policy.rows, blocks)
        done = iter(range(1, len(rows) + 1))
        show_progress("auditing", 0, len(rows))
        with policy.trainer.precision_plugin.forward_context():
            return audit_blocks(
                module,
                rows,
                select_terms(names, module.terms, betas, on_policy=on_policy, key="--terms"),
                on_policy=on_policy,
                sketch=sketch,
                seed=source.config.seed,
                progress=lambda: show_progress("auditing", next(done), len(rows)),
            )


def _save(report: AuditReport, source: AuditSource, folder: Path) -> Path:
    """Write the whole report as JSON, with what it was made from."""
    from kl_comedy.config import config_hash
    from kl_comedy.io import atomic_write
    from kl_comedy.tracking import provenance_tags

    identity = config_hash(source.config)
    path = folder / f"audit-{report.name}-{identity}-{report.version}.json"
    whole = {
        "command": shlex.join(["kl-comedy", *sys.argv[1:]]),
        "config_hash": identity,
        "checkpoint": None if source.checkpoint is None else str(source.checkpoint),
        "provenance": provenance_tags(),
        **report.to_plain(),
    }
    atomic_write(path, json.dumps(whole, indent=1, allow_nan=False) + "\n")
    return path
