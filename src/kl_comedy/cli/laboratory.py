"""``synthetic``: length and distance curves, the closed-form optimum, lost modes; data, figures and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ALL = "all"


def mount(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(synthetic)


def synthetic(
    part: Annotated[str, typer.Argument(help="length, distance, optimum, modes or all")] = ALL,
    out: Annotated[Path, typer.Option(help="Folder for data, figures and README")] = Path("results/synthetic"),
    quick: Annotated[bool, typer.Option("--quick", help="Short lengths, a tenth of the updates, two seeds")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Policies or games (default: 5; distance 20)")] = None,
) -> None:
    """Regenerate the synthetic study: exact where enumerable, Monte Carlo with intervals beside it.

    About a quarter of an hour on one core, most of it for length and modes; `--quick` under two minutes. Only the
    generated blocks of the README in the folder are replaced.

    Example: `kl-comedy synthetic all --out results/synthetic`

    Example: `kl-comedy synthetic optimum --seeds 3 --out optimum_study`
    """
    from rich.console import Console
    from rich.progress import Progress

    from kl_comedy.errors import bad_value
    from kl_comedy.laboratory.study import PARTS, Size, run_part

    if part not in (*PARTS, ALL):
        raise bad_value("PART", part, (*PARTS, ALL))
    size = Size(quick=quick, seeds=seeds)
    options = [*(["--quick"] if quick else []), *([f"--seeds {seeds}"] if seeds is not None else [])]
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        for each in PARTS if part == ALL else (part,):
            task = progress.add_task(each, total=size.steps(each))
            command = " ".join(["kl-comedy synthetic", each, *options])
            run_part(each, out, size, command=command, done=lambda task=task: progress.advance(task))  # type: ignore[misc]
            console.print(f"{each}: {out / f'{each}.csv'}", soft_wrap=True, highlight=False)
