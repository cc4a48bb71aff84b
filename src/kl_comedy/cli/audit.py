"""``kl-comedy audit``: the gradient of each KL term on the model of a config or of a run."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kl_comedy.errors import RunFailed, bad_value

if TYPE_CHECKING:
    from rich.console import Console

    from kl_comedy.lab.audit.measure import Origin
    from kl_comedy.lab.audit.report import AuditReport


FORMATS = ("table", "markdown", "csv", "json")


def mount(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(audit)


def audit(
    config: Annotated[Path, typer.Argument(help="A YAML config, or the folder of a run (its newest checkpoint)")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, as optimizer.lr=1e-4 kl.0.beta=0.1")] = None,
    terms: Annotated[str, typer.Option(help="own, panel or recipes, comma-separated")] = "own,panel",
    updates: Annotated[int, typer.Option(min=1, help="From a config: updates trained first")] = 20,
    samples: Annotated[int, typer.Option(min=1, help="Completions audited, in whole groups")] = 1024,
    blocks: Annotated[int, typer.Option(min=3, help="Blocks of groups that intervals are made from")] = 16,
    sketch: Annotated[int, typer.Option(min=0, help="Numbers kept of a layer group's gradient; 0: all")] = 65536,
    format: Annotated[str, typer.Option(help="table, markdown, csv or json")] = "table",
    out: Annotated[Path | None, typer.Option(help="Folder of the JSON file; default: the run's, or `output`")] = None,
    plugin: Annotated[list[Path] | None, typer.Option("--plugin", help="A Python file that registers parts")] = None,
) -> None:
    """Compare the gradient of KL terms with a low-variance reference gradient, on a real model.

    Says of each term how much of the reference gradient it delivers, its cosine, bias, variance and norm against
    the policy loss, how many tokens get no gradient, and whether beta changes the gradient at all. Exit code 1 when
    a term of the config does nothing, or something else than it says.

    Example: `kl-comedy audit configs/quickstart.yaml --updates 20 --samples 2048`

    Example: `kl-comedy audit runs/RUN --terms own,grpo,rb/per_decision --format json`
    """
    if format not in FORMATS:
        raise bad_value("--format", format, FORMATS)
    from kl_comedy.registry import load_plugin_file

    for file in plugin or []:
        load_plugin_file(file)
    from rich.console import Console

    from kl_comedy.lab.audit.measure import Origin
    from kl_comedy.lab.audit.report import render

    origin = Origin.read(config, overrides or [])
    console = Console(stderr=True)
    names = [name.strip() for name in terms.split(",") if name.strip()]
    report = _report(origin, names, console, updates=updates, samples=samples, blocks=blocks, sketch=sketch)
    folder = out or (config if config.is_dir() else Path(origin.config.output))
    console.print(f"wrote {_save(report, origin, folder)}", soft_wrap=True, highlight=False)
    print(render(report, format))
    if report.failures:
        raise RunFailed("; ".join(report.failures))


def _report(
    origin: Origin, names: list[str], console: Console, *, updates: int, samples: int, blocks: int, sketch: int
) -> AuditReport:
    """Bring the policy to where it is audited and audit it, with a bar on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from kl_comedy.kl import BetaState, resolve_terms
    from kl_comedy.lab.audit.measure import audit_blocks, equal_blocks, select, staleness, subject

    on_policy = staleness(origin.config) == 0
    own = resolve_terms(origin.config.kl)
    select(names, own, [BetaState(term.beta).value for term in own], on_policy=on_policy, key="--terms")
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    tasks: dict[str, Any] = {}

    def tell(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, total=total)
            if not console.is_terminal:
                console.print(stage)
        bar.update(tasks[stage], completed=done)

    with bar, subject(origin, updates=updates, samples=samples, tell=tell) as found:
        module = found.module
        audited = select(names, module.terms, [beta.value for beta in module.betas], on_policy=on_policy, key="--terms")
        parts = equal_blocks(found.rows, blocks)
        done = iter(range(1, len(parts) + 1))
        tell("auditing", 0, len(parts))
        with found.trainer.precision_plugin.forward_context():
            return audit_blocks(
                module,
                parts,
                audited,
                on_policy=on_policy,
                sketch=sketch,
                seed=origin.config.seed,
                progress=lambda: tell("auditing", next(done), len(parts)),
            )


def _save(report: AuditReport, origin: Origin, folder: Path) -> Path:
    """The whole report as JSON, with what it was made from."""
    from kl_comedy.config import config_hash
    from kl_comedy.tracking import provenance_tags

    folder.mkdir(parents=True, exist_ok=True)
    identity = config_hash(origin.config)
    path = folder / f"audit-{report.name}-{identity}-{report.version}.json"
    whole = {
        "command": shlex.join(["kl-comedy", *sys.argv[1:]]),
        "config_hash": identity,
        "checkpoint": None if origin.checkpoint is None else str(origin.checkpoint),
        "provenance": provenance_tags(),
        **report.to_plain(),
    }
    path.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n")
    return path
