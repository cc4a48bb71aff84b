"""Studies without tracked runs, one command each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kl_comedy.cli.common import check_choice, message, progress_bar
from kl_comedy.errors import UserError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
Out = Annotated[Path, typer.Option(help="Folder for data, figures and README")]
Problems = Annotated[int, typer.Option(min=1, help="Random problems per length and staleness")]
Quick = Annotated[bool, typer.Option("--quick", help="Two lengths, three degrees of staleness, two seeds")]
FiguresOnly = Annotated[bool, typer.Option("--figures-only", help="Make figures (and page) again from the data")]

# Each command imports its study inside: `--help` must not wait for torch and matplotlib.
# A page's command is part of the page (results verify repeats it): it names the options that change the numbers only.


@dataclass(frozen=True, kw_only=True)
class StudySize:
    """The random problems of a study: one for each length, staleness and seed."""

    lengths: Sequence[int]
    staleness: Sequence[float]
    seeds: int

    @property
    def problems(self) -> int:
        return len(self.lengths) * len(self.staleness) * self.seeds

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a study's function."""
        return {"lengths": self.lengths, "staleness": self.staleness, "seeds": self.seeds}


QUICK = StudySize(lengths=(4, 8), staleness=(0.0, 0.3, 1.0), seeds=2)


@app.command()
def synthetic(
    part: Annotated[str, typer.Argument(help="length, distance, optimum, modes or all")] = "all",
    out: Out = Path("results/synthetic"),
    quick: Annotated[bool, typer.Option("--quick", help="Short lengths, a tenth of the updates, two seeds")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Policies or games (default: 5; distance 20)")] = None,
    figures_only: FiguresOnly = False,
) -> None:
    """Regenerate the synthetic study: exact where enumerable, Monte Carlo with intervals beside it.

    About a quarter of an hour on one core, most of it for length and modes; `--quick` under two minutes. Only the
    generated blocks of the README in the folder are replaced.

    Example: `python -m research.studies synthetic all --out results/synthetic`

    Example: `python -m research.studies synthetic optimum --seeds 3 --out optimum_study`
    """
    from research.studies.synthetic import PARTS, Size, draw, run_part

    check_choice("PART", part, (*PARTS, "all"))
    parts = list(PARTS) if part == "all" else [part]
    # From the CSV files in the folder, whatever size they were measured at.
    if figures_only:
        for name in parts:
            draw(name, out)
        return

    size = Size(quick=quick, seeds=seeds)
    options = ""
    if quick:
        options += " --quick"
    if seeds is not None:
        options += f" --seeds {seeds}"
    for name in parts:
        command = f"python -m research.studies synthetic {name}{options}"
        with progress_bar(name, size.steps(name)) as advance:
            run_part(name, out, size, command=command, done=advance)
        message(f"{name}: {out / f'{name}.parquet'}")


@app.command()
def values(
    out: Out = Path("results/values"),
    seeds: Annotated[int, typer.Option(min=1, help="Random policies")] = 10,
    figures_only: FiguresOnly = False,
) -> None:
    """Compute the error of an estimated KL by the number of samples (2506.09477, Fig. 1), and two Gaussians' noise.

    It takes a second.

    Example: `python -m research.studies values --out results/values`
    """
    from research.studies.values import draw, token_errors, write_report

    if figures_only:
        draw(out)
        return
    write_report(token_errors(seeds), out, command=f"python -m research.studies values --seeds {seeds}")
    message(f"{out / 'README.md'}")


@app.command()
def open_problem(
    out: Out = Path("results/open_problem"),
    seeds: Problems = 5,
    quick: Quick = False,
    figures_only: FiguresOnly = False,
) -> None:
    """Measure bias, variance and error of every known off-policy KL gradient, by length and staleness.

    About five minutes on one core; `--quick` about ten seconds.

    Example: `python -m research.studies open-problem --out results/open_problem`
    """

    from research.studies.open_problem import BATCH, BATCHES, LENGTHS, STALENESS, lambda_study, study, write_report
    from research.studies.pages import read_frame

    if figures_only:
        # The number of seeds is in the data; a quick study's would be wrong here, and is not published.
        frame = read_frame(out / "open_problem.parquet")
        lambdas = read_frame(out / "k_lambda.parquet")
        command = f"python -m research.studies open-problem --seeds {frame.seed.nunique()}"
        write_report(frame, lambdas, out, command=command)
        return

    # A quick run tests the code; its sampled biases have wide intervals.
    if quick:
        size = QUICK
        batches = 4
        batch = 2048
        options = "--quick"
    else:
        size = StudySize(lengths=LENGTHS, staleness=STALENESS, seeds=seeds)
        batches = BATCHES
        batch = BATCH
        options = f"--seeds {seeds}"
    with progress_bar("random problems", size.problems) as advance:
        frame = study(**size.arguments, batches=batches, batch=batch, done=advance)
    command = f"python -m research.studies open-problem {options}"
    write_report(frame, lambda_study(**size.arguments), out, command=command)
    message(f"{out / 'README.md'}")


@app.command()
def policy_corrections(
    out: Out = Path("results/policy_corrections"),
    seeds: Problems = 20,
    quick: Quick = False,
    figures_only: FiguresOnly = False,
) -> None:
    """Measure how much of the reward gradient each off-policy correction of the policy term preserves.

    About a minute on one core; `--quick` takes a second.

    Example: `python -m research.studies policy-corrections --out results/policy_corrections`
    """
    from research.studies.open_problem import STALENESS
    from research.studies.policy_corrections import LENGTHS, draw, study, write_report

    if figures_only:
        draw(out)
        return
    if quick:
        size = QUICK
        options = "--quick"
    else:
        size = StudySize(lengths=LENGTHS, staleness=STALENESS, seeds=seeds)
        options = f"--seeds {seeds}"
    with progress_bar("random problems", size.problems) as advance:
        frame = study(**size.arguments, done=advance)
    write_report(frame, out, command=f"python -m research.studies policy-corrections {options}")
    message(f"{out / 'README.md'}")


@app.command()
def centring(
    out: Out = Path("results/evidence"),
    tables: Annotated[int, typer.Option(min=1, help="Random policies")] = 48,
) -> None:
    """Predict by lag what a stale KL cost does, less c times its mean, from training without noise.

    A few minutes on one core.

    Example: `python -m research.studies centring --out results/evidence`
    """
    from research.studies.centring import LAGS, STEPS, Tables, study, write

    file = out / "centring_prediction.json"
    with progress_bar("optimizers and lags", len(STEPS) * len(LAGS)) as advance:
        outcome = study(Tables.random(tables), done=advance)
    write(outcome, file, command=f"python -m research.studies centring --tables {tables}")
    message(f"{file}")


@app.command()
def december(
    out: Out = Path("results/evidence_2026_12"),
    print_only: Annotated[bool, typer.Option("--print", help="Print the page; write nothing")] = False,
) -> None:
    """Decide the claims of the protocol of December 2026 from results/evidence_2026_12/export.parquet.

    Example: `python -m research.studies december`
    """
    from research.studies.december import FOLDER, page, write_page

    export = FOLDER / "export.parquet"
    if print_only:
        print(page(export), end="")
        return
    write_page(export, out)
    message(f"{out / 'README.md'}")


@app.command()
def evidence(
    uri: Annotated[str, typer.Option(help="Export or store of the runs")] = "results/evidence/export.parquet",
    out: Annotated[Path, typer.Option(help="Folder for the page, its tables and its figure")] = Path(
        "results/evidence"
    ),
    print_only: Annotated[bool, typer.Option("--print", help="Print the page; write nothing")] = False,
    figures: Annotated[Path | None, typer.Option(help="Draw the figure of every claim in this folder too")] = None,
) -> None:
    """Decide the claims of the protocol from the runs of its blocks: README.md, contrasts.csv, blocks.csv, a figure.

    A claim with missing runs is marked as such.

    Example: `python -m research.studies evidence`

    Example: `python -m research.studies evidence --uri sqlite:///evidence.db --out evidence_so_far`
    """
    from research.studies.evidence_page import FIGURES, draw_figures, page, read_evidence, texts

    evidence = read_evidence(uri)
    if print_only:
        print(page(evidence))
        return
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts(evidence).items():
        (out / name).write_text(text, encoding="utf-8")
    draw_figures(evidence, FIGURES, out)
    if figures is not None:
        figures.mkdir(parents=True, exist_ok=True)
        draw_figures(evidence, list(evidence.trained), figures)
    message(f"{out / 'README.md'}")


if __name__ == "__main__":
    # One line for a mistake of the user; a traceback is for a bug.
    try:
        app()
    except UserError as error:
        sys.exit(f"error: {error}")
