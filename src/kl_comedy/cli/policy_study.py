"""``policy-corrections``: bias and variance of the policy term on stale samples, data, figure and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def mount(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("policy-corrections")(policy_corrections)


def policy_corrections(
    out: Annotated[Path, typer.Option(help="Folder for data, figure and README")] = Path("results/policy_corrections"),
    seeds: Annotated[int, typer.Option(min=1, help="Instances per length and staleness")] = 20,
    quick: Annotated[bool, typer.Option("--quick", help="Two lengths, three degrees of staleness, two seeds")] = False,
) -> None:
    """Measure what every off-policy correction of the policy term leaves of the reward gradient.

    About a minute on one core; `--quick` a second.

    Example: `kl-comedy policy-corrections --out results/policy_corrections`
    """
    from rich.console import Console
    from rich.progress import Progress

    import kl_comedy.training.rooms  # noqa: F401  (fills the registries)
    from kl_comedy.laboratory.policy_corrections import LENGTHS, STALENESS, study, write_report

    lengths, staleness, seeds = ((4, 8), (0.0, 0.3, 1.0), 2) if quick else (LENGTHS, STALENESS, seeds)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("instances", total=len(lengths) * len(staleness) * seeds)
        frame = study(lengths=lengths, staleness=staleness, seeds=seeds, done=lambda: progress.advance(task))
    write_report(frame, out, command=f"kl-comedy policy-corrections {'--quick' if quick else f'--seeds {seeds}'}")
    console.print(f"{out / 'README.md'}")
