"""``kl-comedy cell``: what an array task (or a local worker) runs; ``kl-comedy sweep-report``: its last job."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kl_comedy.errors import REQUEUE_EXIT_CODE, RunFailed, RunStopped, UserError

if TYPE_CHECKING:
    from kl_comedy.config import Config
    from kl_comedy.slurm.manifest import Cell, Sweep


def cell(
    sweep: Annotated[Path, typer.Argument(metavar="SWEEP", help="A sweep's folder")],
    index: Annotated[int, typer.Argument(help="The cell's number")],
    evaluate: Annotated[bool, typer.Option("--evaluate", help="Evaluate the trained cell instead")] = False,
) -> None:
    """Train one cell of a sweep, from where it is; what every task of the array runs.

    Example: `kl-comedy cell sweeps/pocket_beta 3`
    """
    from kl_comedy.slurm.manifest import read_sweep
    from kl_comedy.slurm.servers import await_servers
    from kl_comedy.training.callbacks import stop_requests

    with stop_requests():  # before the heavy imports: a signal that comes now is kept
        found = read_sweep(sweep)
        chosen = found.cell(index)
        with _attempt(found, chosen, "evaluate" if evaluate else "train"):
            await_servers()
            (_evaluate if evaluate else _train)(found, chosen)


def sweep_report(sweep: Annotated[Path, typer.Argument(metavar="SWEEP", help="A sweep's folder or name")]) -> None:
    """Write SWEEP/report: every cell, means with intervals over seeds, and the page of `kl-comedy results report`.

    Example: `kl-comedy sweep-report pocket_beta`
    """
    from kl_comedy.cli.sweep import write_pages
    from kl_comedy.slurm.manifest import read_sweep
    from kl_comedy.slurm.status import board, write_report

    found = read_sweep(sweep)
    print(write_report(found, board(found)))
    for page in write_pages(found):
        print(page)


@contextlib.contextmanager
def _attempt(found: Sweep, chosen: Cell, stage: str) -> Iterator[None]:
    """Record that it began and how it ended; the main process of a job with several does."""
    from kl_comedy.slurm.status import main_process, record_end, record_start
    from kl_comedy.tracking.provenance import process_tags

    if not main_process():
        yield
        return
    process = process_tags()
    record_start(found, chosen.index, stage, process)
    code, reason = 1, "interrupted"
    try:
        yield
        code, reason = 0, ""
    except RunStopped as error:
        code, reason = REQUEUE_EXIT_CODE, _without_advice(error)
        raise
    except (UserError, RunFailed) as error:
        code, reason = (2 if isinstance(error, UserError) else 1), _without_advice(error)
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        record_end(found, chosen.index, process, code, reason or None)


def _without_advice(error: Exception) -> str:
    """What happened; how to go on is the sweep's business."""
    return str(error).split("; go on with: ")[0]


def _train(found: Sweep, chosen: Cell) -> None:
    config = _config(found, chosen)
    from rich.console import Console

    from kl_comedy.cli.summary import show_outcome
    from kl_comedy.training.run import train

    console = Console(stderr=True)
    show_outcome(train(config, console=console, command=found.command(chosen)), console)


def _config(found: Sweep, chosen: Cell) -> Config:
    """The cell's config, which must be the one that was planned: same base file, same hash."""
    from kl_comedy.config import config_hash, load_config

    _load_parts(found)
    if hashlib.sha256(found.base.read_bytes()).hexdigest() != found.manifest.base_sha256:
        raise UserError(f"{found.base} was changed after the sweep was planned; plan another sweep")
    config = load_config(found.base, found.overrides(chosen))
    if config_hash(config) != chosen.config_hash:
        raise UserError(
            f"cell {chosen.index}: its config is {config_hash(config)} now and was planned as {chosen.config_hash}; "
            f"kl_comedy {found.manifest.package_version} planned it, and what a config means has changed since"
        )
    return config


def _evaluate(found: Sweep, chosen: Cell) -> None:
    """Evaluate what the cell's run left, by the command that the run itself names, with the sweep's overrides."""
    from rich.console import Console

    from kl_comedy.cli.evaluate import evaluate_run
    from kl_comedy.io import atomic_write
    from kl_comedy.slurm.status import newest_run

    run = newest_run(found, chosen)
    summary = json.loads((run / "summary.json").read_text()) if run and (run / "summary.json").exists() else {}
    if run is None or summary.get("status") != "FINISHED":
        raise UserError(f"cell {chosen.index} is not trained; kl-comedy cell {found.path} {chosen.index} trains it")
    _load_parts(found)
    rows = evaluate_run(run, summary, found.manifest.evaluate or (), found.records(chosen.index), Console(stderr=True))
    atomic_write(found.evaluation(chosen.index), (json.dumps(rows, indent=1) + "\n").encode())


def _load_parts(found: Sweep) -> None:
    from kl_comedy.registry import load_plugin_file

    for file in found.manifest.plugins:
        load_plugin_file(Path(file))
