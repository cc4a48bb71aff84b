"""``open-problem``: the off-policy study of the sequence-level reverse-KL gradient, data, figures and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def mount(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("open-problem")(open_problem)


def open_problem(
    out: Annotated[Path, typer.Option(help="Folder for data, figures and README")] = Path("results/open_problem"),
    seeds: Annotated[int, typer.Option(min=1, help="Instances per length and staleness")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Two lengths, three degrees of staleness, two seeds")] = False,
) -> None:
    """Measure bias, variance and error of every off-policy KL gradient we know, by length and staleness.

    About five minutes on one core; `--quick` about ten seconds.

    Example: `kl-comedy open-problem --out results/open_problem`
    """
    from rich.console import Console
    from rich.progress import Progress

    from kl_comedy.laboratory.open_problem import LENGTHS, STALENESS, lambda_study, study
    from kl_comedy.laboratory.open_problem_report import write_report

    lengths, staleness, seeds = ((4, 8), (0.0, 0.3, 1.0), 2) if quick else (LENGTHS, STALENESS, seeds)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("instances", total=len(lengths) * len(staleness) * seeds)
        frame = study(
            lengths=lengths, staleness=staleness, seeds=seeds, batches=4 if quick else 12,
            batch=2048 if quick else 8192, done=lambda: progress.advance(task),
        )  # fmt: skip
    lambdas = lambda_study(lengths=lengths, staleness=staleness, seeds=seeds)
    words = "--quick" if quick else f"--seeds {seeds}"
    write_report(frame, lambdas, out, command=f"kl-comedy open-problem {words}")
    console.print(f"{out / 'README.md'}")
