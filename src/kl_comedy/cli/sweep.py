"""``kl-comedy sweep``, ``status``, ``resubmit``, ``cancel``: grids of runs on SLURM or on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kl_comedy.cli.common import Plugins, TableOrJson, check_choice, load_plugins
from kl_comedy.errors import RunFailed, UserError

if TYPE_CHECKING:
    from kl_comedy.slurm.manifest import Cell, Manifest, Sweep
    from kl_comedy.slurm.profile import Profile
    from kl_comedy.slurm.status import SweepStatus

PIPE_WIDTH = 200
"""Columns where stdout is no terminal, so that nothing is cut."""

SweepArgument = Annotated[Path, typer.Argument(metavar="SWEEP", help="A sweep's folder, or its name under sweeps/")]
Slurm = Annotated[str | None, typer.Option(help="Site profile: a name in slurm/profiles, or a .yaml file")]
Local = Annotated[int | None, typer.Option(min=1, help="Run on this machine, N cells at a time")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print scripts and cells; write and submit nothing")]


def sweep(
    grid: Annotated[Path, typer.Argument(help="A grid file, as configs/sweeps/pocket_beta.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for every cell")] = None,
    slurm: Slurm = None,
    local: Local = None,
    dry_run: DryRun = False,
    output: Annotated[Path | None, typer.Option(help="The sweep's folder; default: sweeps/NAME")] = None,
    plugin: Plugins = None,
    format: TableOrJson = "table",
) -> None:
    """Expand GRID into cells, check each cell's config, and run them all: on SLURM as arrays, or here.

    Running it again runs what is missing or failed; another grid under the same name is refused.

    Example: `kl-comedy sweep configs/sweeps/pocket_beta.yaml --slurm gpu --dry-run`

    Example: `kl-comedy sweep configs/sweeps/pocket_beta.yaml --local 2`
    """
    check_choice("--format", format)
    if (slurm is None) == (local is None) and not (dry_run and slurm is None):
        raise UserError("say where: --slurm PROFILE for a cluster, or --local N for this machine")
    from kl_comedy.slurm.grid import read_grid
    from kl_comedy.slurm.manifest import plan, write_sweep
    from kl_comedy.slurm.profile import read_profile

    profile = None if slurm is None else read_profile(slurm)
    load_plugins(plugin)
    planned = read_grid(grid)
    manifest = plan(planned, directory=Path.cwd(), plugins=plugin or [], extra=overrides or [])
    _check_suites(manifest, planned.base)
    _check_sizes(manifest.cells, profile, local)  # before anything is written
    folder = output or Path("sweeps") / manifest.name
    if dry_run:
        _print_plan(manifest, folder, profile, format)
        return
    written = write_sweep(folder, manifest, planned.base.read_text())
    _message(f"{len(manifest.cells)} cells in {written.path}")
    _run_missing(written, slurm, local)


def status(sweep: SweepArgument, format: TableOrJson = "table") -> None:
    """Show every cell: state, step, last reward, node, and why it failed.

    Example: `kl-comedy status pocket_beta`
    """
    check_choice("--format", format)
    from kl_comedy.slurm.manifest import read_sweep
    from kl_comedy.slurm.status import read_status

    loaded = read_sweep(sweep)
    sweep_status = read_status(loaded)
    _print_notes(sweep_status)
    if format == "json":
        print(json.dumps([asdict(row) for row in sweep_status.rows], indent=1))
    else:
        _print_status(loaded, sweep_status)


def resubmit(sweep: SweepArgument, slurm: Slurm = None, local: Local = None, dry_run: DryRun = False) -> None:
    """Run what is missing or failed, and nothing else; each cell resumes from its last checkpoint.

    Where it ran before, unless --slurm or --local says otherwise. Running it twice submits once.

    Example: `kl-comedy resubmit pocket_beta`
    """
    from kl_comedy.slurm.manifest import read_sweep
    from kl_comedy.slurm.profile import read_profile

    if slurm is not None and local is not None:
        raise UserError("say where: either --slurm PROFILE or --local N")
    if slurm is not None:
        read_profile(slurm)  # before SLURM is asked anything
    _run_missing(read_sweep(sweep), slurm, local, dry_run=dry_run)


def cancel(sweep: SweepArgument) -> None:
    """Cancel the sweep's jobs, waiting and running, on SLURM and on this machine; running cells save first.

    Example: `kl-comedy cancel pocket_beta`
    """
    from kl_comedy.slurm import submit
    from kl_comedy.slurm.local import local_managers, stop_local
    from kl_comedy.slurm.manifest import read_sweep

    loaded = read_sweep(sweep)
    managers = local_managers(loaded)
    jobs = submit.active_jobs(loaded)
    if not jobs and not managers:
        _message("nothing to cancel: no job of this sweep waits or runs")
        return
    submit.cancel(loaded, jobs)
    stop_local(loaded)
    _message(f"cancelled {len(jobs)} jobs" + (f" and {len(managers)} local managers" if managers else ""))


def mount(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (sweep, status, resubmit, cancel):
        app.command()(command)


# --- checks before anything is written -------------------------------------------------------------------------------


def _check_suites(manifest: Manifest, base: Path) -> None:
    """Raise :class:`UserError` for suites of the evaluation that do not exist, or whose local files do not match.

    Suites without a local file are checked by name only: nothing is downloaded to submit a sweep.
    """
    if manifest.evaluate is None:
        return
    from kl_comedy.config import load_config
    from kl_comedy.evaluation.suites import get_suite, suite_problems

    config = load_config(base, [*manifest.cells[0].overrides, *manifest.evaluate])
    root = None if config.eval.data_root is None else Path(config.eval.data_root)
    for name in config.eval.suites:
        suite = get_suite(name, key="evaluate: eval.suites")
        if suite.file is not None and (root is not None or Path(suite.file.path).is_file()):
            suite_problems(suite, root=root)


def _check_sizes(cells: Sequence[Cell], profile: Profile | None, local: int | None) -> None:
    """Raise :class:`UserError` for a cell that fits neither a shape of the profile nor this one machine."""
    from kl_comedy.slurm.render import shape_for

    for cell in cells:
        if profile is not None:
            shape_for(cell, profile)
        if local is not None and cell.nodes > 1:
            raise UserError(
                f"cell {cell.index} ({cell.name}): train.nodes is {cell.nodes}, and --local is one machine; "
                "use --slurm PROFILE, or train.nodes=1"
            )


# --- submission ------------------------------------------------------------------------------------------------------


def _run_missing(sweep: Sweep, slurm: str | None, local: int | None, *, dry_run: bool = False) -> None:
    """Run what is missing. The lock makes two of these at the same time submit it once."""
    from kl_comedy.io import file_lock
    from kl_comedy.slurm import submit
    from kl_comedy.slurm.journal import read_submissions
    from kl_comedy.slurm.local import record_local_submission
    from kl_comedy.slurm.profile import profile_file, read_profile
    from kl_comedy.slurm.status import read_status

    with file_lock(sweep.path / ".submit.lock", wait_s=600):
        if slurm is not None or (local is None and any(not item.local for item in read_submissions(sweep))):
            for submission in submit.adopt_unrecorded_jobs(sweep):
                _message(f"note: job {submission.job} belongs to this sweep, from a submission that was not recorded")
        sweep_status = read_status(sweep)
        _print_notes(sweep_status)
        work = submit.missing_work(sweep, sweep_status)
        if not work:
            _message(f"nothing to submit: {sweep_status.summary()}")
            return
        profile_name, workers = (slurm, local) if slurm or local else _last_place(sweep)
        profile = None if profile_name is None else read_profile(profile_name)
        _check_sizes([sweep.cell(index) for index in work.train], profile, workers)
        if dry_run:
            train, evaluate = (", ".join(map(str, cells)) or "none" for cells in (work.train, work.evaluate))
            _message(f"to train: {train}; to evaluate: {evaluate}")
            return
        submit.create_stores(sweep.manifest)
        if profile is not None:
            for submission in submit.submit(sweep, profile, profile_file(str(profile_name)), work):
                what = f"{len(submission.indices)} cells" if submission.indices else "report"
                _message(f"{submission.stage}: job {submission.job}, {what}")
                print(submission.job)
            _message(f"watch with: kl-comedy status {sweep.path}")
            return
        assert workers is not None
        record_local_submission(sweep, work, workers)
    from kl_comedy.slurm.local import run_local

    try:
        run_local(sweep, work, workers, _message)
    except KeyboardInterrupt:
        raise RunFailed(f"stopped; resume with: kl-comedy resubmit {sweep.path}") from None
    unfinished = [row for row in read_status(sweep).rows if row.state != "FINISHED"]
    if unfinished:
        raise RunFailed(
            f"{len(unfinished)} of {len(sweep.manifest.cells)} cells did not finish; "
            f"see: kl-comedy status {sweep.path}; then: kl-comedy resubmit {sweep.path}"
        )


def _last_place(sweep: Sweep) -> tuple[str | None, int | None]:
    """The profile or the number of workers of the last submission."""
    from kl_comedy.slurm.journal import read_submissions

    submissions = read_submissions(sweep)
    if not submissions:
        raise UserError("this sweep never ran; say where: --slurm PROFILE or --local N")
    for submission in reversed(submissions):
        if submission.profile is not None or submission.workers is not None:
            return submission.profile, submission.workers
    raise UserError("it is not known with which profile this sweep was submitted; say it: --slurm PROFILE")


# --- output ----------------------------------------------------------------------------------------------------------


def _print_plan(manifest: Manifest, folder: Path, profile: Profile | None, format: str) -> None:
    """The exact scripts and the table of cells, on stdout."""
    from kl_comedy.slurm.manifest import Sweep
    from kl_comedy.slurm.render import scripts
    from kl_comedy.slurm.submit import planned_commands

    planned = Sweep(path=folder.resolve(), manifest=manifest)
    texts = {} if profile is None else scripts(planned, profile, manifest.cells)
    commands = [] if profile is None else planned_commands(planned, profile)
    if format == "json":
        cells = [{**asdict(cell), "command": planned.command(cell)} for cell in manifest.cells]
        print(json.dumps({"name": manifest.name, "scripts": texts, "commands": commands, "cells": cells}, indent=1))
        return
    for name, text in texts.items():
        print(f"### {name}.sbatch\n{text}")
    for command in commands:
        print(f"$ {command}")
    keys = list(dict.fromkeys(key for cell in manifest.cells for key in cell.values))
    sizes = ["nodes x processes"] if len({cell.size for cell in manifest.cells}) > 1 else []
    title = f"{planned.path}: {len(manifest.cells)} cells"
    table = Table("cell", "name", "seed", "updates", *sizes, *keys, "config", title=title)
    for cell in manifest.cells:
        values = [*([f"{cell.nodes} x {cell.devices}"] if sizes else []), *(cell.values.get(key, "") for key in keys)]
        table.add_row(str(cell.index), cell.name, str(cell.seed), str(cell.steps), *values, cell.config_hash)
    _stdout_console().print(table)


def _print_status(sweep: Sweep, sweep_status: SweepStatus) -> None:
    """The table of cells, and the count of each state."""
    evaluates = sweep.manifest.evaluate is not None
    headers = ["cell", "name", "seed", "state", "step", "reward", "node", "job", "tries"]
    table = Table(*headers, *(["evaluated"] if evaluates else []), "why")
    for row in sweep_status.rows:
        evaluated = "yes" if row.evaluated else "under way" if row.cell in sweep_status.evaluating else "no"
        table.add_row(
            str(row.cell),
            row.name,
            str(row.seed),
            row.state,
            f"{row.step}/{row.steps}",
            "" if row.reward is None else f"{row.reward:.3f}",
            row.node,
            row.job,
            str(row.attempts),
            *([evaluated] if evaluates else []),
            row.why,
        )
    console = _stdout_console()
    console.print(table)
    console.print(sweep_status.summary(), highlight=False)


def _stdout_console() -> Console:
    console = Console(markup=False)
    return console if console.is_terminal else Console(width=PIPE_WIDTH, markup=False)


def _print_notes(sweep_status: SweepStatus) -> None:
    for note in sweep_status.notes:
        _message(f"note: {note}")


def _message(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
