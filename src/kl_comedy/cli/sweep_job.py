"""``kl-comedy cell``, which an array task or local worker runs, and ``kl-comedy sweep-report``, a sweep's last job."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kl_comedy.cli.common import load_plugins, message, process_rank
from kl_comedy.errors import REQUEUE_EXIT_CODE, RunFailed, RunInterrupted, RunStopped, UserError
from kl_comedy.io import atomic_write
from kl_comedy.redaction import one_line
from kl_comedy.slurm.manifest import Cell, Sweep, read_sweep
from kl_comedy.slurm.servers import await_servers
from kl_comedy.slurm.status import read_status, write_report
from kl_comedy.training.run_folder import RunDir
from kl_comedy.training.stop_signals import stop_requests


def cell(
    sweep: Annotated[Path, typer.Argument(metavar="SWEEP", help="A sweep's folder")],
    index: Annotated[int, typer.Argument(help="The cell's number")],
    evaluate: Annotated[bool, typer.Option("--evaluate", help="Evaluate the trained cell instead")] = False,
) -> None:
    """Train one cell of a sweep, or resume it; every task of the array runs this command.

    Example: `kl-comedy cell sweeps/pocket_beta 3`
    """
    with stop_requests():  # before the heavy imports, so that an early signal is not lost
        loaded = read_sweep(sweep)
        chosen = loaded.cell(index)
        stage = "train"
        if evaluate:
            stage = "evaluate"
        with recorded_attempt(loaded, chosen, stage):
            await_servers()
            if evaluate:
                _evaluate(loaded, chosen)
            else:
                _train(loaded, chosen)


def sweep_report(sweep: Annotated[Path, typer.Argument(metavar="SWEEP", help="A sweep's folder or name")]) -> None:
    """Write SWEEP/report: every cell, means with intervals over seeds, and the page of `kl-comedy results report`.

    Example: `kl-comedy sweep-report pocket_beta`
    """
    loaded = read_sweep(sweep)
    print(one_line(str(write_report(loaded, read_status(loaded)))))
    for page in write_html_reports(loaded):
        print(one_line(str(page)))


def write_html_reports(sweep: Sweep) -> Iterator[Path]:
    """Write report/report.html (``report-2.html``, ... where cells log to several stores) and yield their paths.

    A store that cannot be read, or holds no finished run of the sweep, is reported on stderr; report.md has every
    cell in any case.
    """
    from kl_comedy.cli.results import ReportOptions
    from kl_comedy.cli.results import write_report as write_page

    name = sweep.manifest.name
    stores = [(uri, experiment) for uri, experiment in sweep.manifest.stores if uri != "none"]
    for number, (uri, experiment) in enumerate(stores, start=1):
        file_name = "report.html" if number == 1 else f"report-{number}.html"
        page = sweep.path / "report" / file_name
        wanted = ReportOptions(
            out=page, title=f"Sweep {name}", uri=uri, experiment=experiment, where=f"tags.sweep = '{name}'"
        )
        try:
            # A relative address of a store is relative to the folder that the sweep was planned in.
            with contextlib.chdir(sweep.manifest.directory):
                write_page(wanted)
        except UserError as error:
            # report.md is written by now, so that a missing page is no failure of the job.
            message(f"no {page.name}: {error}")
            continue
        yield page


@contextlib.contextmanager
def recorded_attempt(sweep: Sweep, cell: Cell, stage: str) -> Iterator[None]:
    """Record the start and the end of an attempt. In a job of several processes only rank 0 does."""
    from kl_comedy.tracking.provenance import process_tags

    # Other ranks of a job would write the same attempt again, and their end is not the job's.
    if process_rank() != 0:
        yield
        return
    process = process_tags()
    sweep.record_start(cell.index, stage, process)
    code = 1
    # What stays where neither an end nor an Exception is seen, as after Ctrl-C while the model is loaded.
    reason = "interrupted"
    interrupted = True
    try:
        yield
        code = 0
        reason = ""
        interrupted = False
    except (UserError, RunFailed) as error:
        code = _exit_code(error)
        reason = str(error).split("; resume with: ")[0]  # the sweep resumes by its own command
        interrupted = isinstance(error, RunInterrupted)
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        interrupted = False
        raise
    finally:
        sweep.record_end(cell.index, process["process.pid"], code, reason or None, interrupted=interrupted)


def _exit_code(error: UserError | RunFailed) -> int:
    """The exit code of the process that raises ``error`` (:func:`kl_comedy.cli.main.run`)."""
    if isinstance(error, UserError):
        return 2
    if isinstance(error, RunStopped):
        return REQUEUE_EXIT_CODE
    return 1


def _train(sweep: Sweep, cell: Cell) -> None:
    """Train the cell. Raises :class:`UserError` where its config is not the one that was planned."""
    from kl_comedy.cli.summary import train_and_show

    _load_plugins(sweep)
    config = sweep.read_config(cell.index)
    train_and_show(config, Console(stderr=True), sweep.command(cell), folder=sweep.run(cell.index))


def _evaluate(sweep: Sweep, cell: Cell) -> None:
    """Evaluate the cell's trained policy, by the command in the run's summary, with the sweep's overrides."""
    from kl_comedy.cli.evaluation_runs import evaluate_run

    run = sweep.run(cell.index)
    summary = RunDir(path=run).summary()
    if not summary or summary["status"] != "FINISHED":
        raise UserError(f"cell {cell.index} is not trained; {sweep.command(cell)} trains it")
    _load_plugins(sweep)
    file = sweep.evaluation(cell.index)
    rows = evaluate_run(run, summary, sweep.manifest.evaluate or (), file.with_suffix(""), Console(stderr=True))
    atomic_write(file, json.dumps(rows, indent=1) + "\n")


def _load_plugins(sweep: Sweep) -> None:
    """Load the sweep's plugins. Raises :class:`UserError` where one is not as it was when the sweep was planned."""
    load_plugins(sweep.manifest.plugins)
    change = sweep.changed_plugins(sweep.loaded_plugins())
    if change:
        raise UserError(f"{change}; put the older source back, or plan another sweep with --name")
