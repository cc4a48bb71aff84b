"""``synthetic``, ``open-problem``, ``policy-corrections``: the studies with the oracle; data, figures and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Quick = Annotated[bool, typer.Option("--quick", help="Two lengths, three degrees of staleness, two seeds")]
QUICK_LENGTHS, QUICK_STALENESS, QUICK_SEEDS = (4, 8), (0.0, 0.3, 1.0), 2


def mount(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(synthetic)
    app.command("open-problem")(open_problem)
    app.command("policy-corrections")(policy_corrections)


def synthetic(
    part: Annotated[str, typer.Argument(help="length, distance, optimum, modes or all")] = "all",
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

    from kl_comedy.cli.common import check_choice
    from kl_comedy.lab.synthetic import PARTS, Size, run_part

    check_choice("PART", part, (*PARTS, "all"))
    size = Size(quick=quick, seeds=seeds)
    options = [*(["--quick"] if quick else []), *([f"--seeds {seeds}"] if seeds is not None else [])]
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        for each in PARTS if part == "all" else (part,):
            task = progress.add_task(each, total=size.steps(each))
            command = " ".join(["kl-comedy synthetic", each, *options])
            run_part(each, out, size, command=command, done=lambda task=task: progress.advance(task))  # type: ignore[misc]
            console.print(f"{each}: {out / f'{each}.csv'}", soft_wrap=True, highlight=False)


def open_problem(
    out: Annotated[Path, typer.Option(help="Folder for data, figures and README")] = Path("results/open_problem"),
    seeds: Annotated[int, typer.Option(min=1, help="Random problems per length and staleness")] = 5,
    quick: Quick = False,
) -> None:
    """Measure bias, variance and error of every off-policy KL gradient we know, by length and staleness.

    About five minutes on one core; `--quick` about ten seconds.

    Example: `kl-comedy open-problem --out results/open_problem`
    """
    from rich.console import Console
    from rich.progress import Progress

    from kl_comedy.lab.open_problem import LENGTHS, STALENESS, lambda_study, study, write_report

    lengths, staleness, seeds = (QUICK_LENGTHS, QUICK_STALENESS, QUICK_SEEDS) if quick else (LENGTHS, STALENESS, seeds)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("random problems", total=len(lengths) * len(staleness) * seeds)
        frame = study(
            lengths=lengths,
            staleness=staleness,
            seeds=seeds,
            batches=4 if quick else 12,
            batch=2048 if quick else 8192,
            done=lambda: progress.advance(task),
        )
    lambdas = lambda_study(lengths=lengths, staleness=staleness, seeds=seeds)
    write_report(frame, lambdas, out, command=f"kl-comedy open-problem {'--quick' if quick else f'--seeds {seeds}'}")
    console.print(f"{out / 'README.md'}")


def policy_corrections(
    out: Annotated[Path, typer.Option(help="Folder for data, figure and README")] = Path("results/policy_corrections"),
    seeds: Annotated[int, typer.Option(min=1, help="Random problems per length and staleness")] = 20,
    quick: Quick = False,
) -> None:
    """Measure what every off-policy correction of the policy term leaves of the reward gradient.

    About a minute on one core; `--quick` a second.

    Example: `kl-comedy policy-corrections --out results/policy_corrections`
    """
    from rich.console import Console
    from rich.progress import Progress

    from kl_comedy.lab.policy_corrections import LENGTHS, STALENESS, study, write_report

    lengths, staleness, seeds = (QUICK_LENGTHS, QUICK_STALENESS, QUICK_SEEDS) if quick else (LENGTHS, STALENESS, seeds)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("random problems", total=len(lengths) * len(staleness) * seeds)
        frame = study(lengths=lengths, staleness=staleness, seeds=seeds, done=lambda: progress.advance(task))
    write_report(frame, out, command=f"kl-comedy policy-corrections {'--quick' if quick else f'--seeds {seeds}'}")
    console.print(f"{out / 'README.md'}")
