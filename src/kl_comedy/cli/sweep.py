"""The HTML page of a sweep: what ``kl-comedy results report`` makes of its runs, one for each store.

The tables that ``kl-comedy sweep --dry-run`` and ``kl-comedy status`` print.

``kl-comedy sweep``, ``status``, ``resubmit``, ``cancel``: grids of runs on SLURM or on this machine.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.slurm.manifest import Sweep
from kl_comedy.slurm.status import Board

if TYPE_CHECKING:
    from kl_comedy.slurm.manifest import Cell, Manifest, Sweep
    from kl_comedy.slurm.profile import Profile
    from kl_comedy.slurm.status import Board
    from kl_comedy.slurm.submit import Todo


def write_pages(found: Sweep) -> Iterator[Path]:
    """Write report/report.html (``report-2.html``, ... where cells log to several stores) and yield their paths.

    A store that cannot be read, or holds no finished run of the sweep, is told on stderr; report.md has every cell
    whatever the stores say.
    """
    from kl_comedy.cli.results import report

    stores = [(uri, experiment) for uri, experiment in found.manifest.stores if uri != "none"]
    for number, (uri, experiment) in enumerate(stores, start=1):
        page = found.path / "report" / ("report.html" if number == 1 else f"report-{number}.html")
        try:
            with contextlib.chdir(found.manifest.directory), contextlib.redirect_stdout(sys.stderr):
                report(
                    out=page,
                    title=f"Sweep {found.manifest.name}",
                    uri=uri,
                    experiment=experiment,
                    where=f"tags.sweep = '{found.manifest.name}'",
                )
        except UserError as error:
            print(f"no {page.name}: {error}", file=sys.stderr)
            continue
        yield page


PIPE_WIDTH = 200
"""Columns where stdout is no terminal, so that nothing is cut."""


def show_cells(planned: Sweep) -> None:
    """Every cell: number, name, seed, updates, values, config hash; nodes and processes on each where some differ."""
    cells = planned.manifest.cells
    sized = len({cell.size for cell in cells}) > 1
    keys = list(dict.fromkeys(key for cell in cells for key in cell.values))
    sizes = ["nodes x processes"] if sized else []
    table = Table(
        "cell", "name", "seed", "updates", *sizes, *keys, "config", title=f"{planned.path}: {len(cells)} cells"
    )
    for cell in cells:
        values = [cell.values.get(key, "") for key in keys]
        size = [f"{cell.nodes} x {cell.devices}"] if sized else []
        table.add_row(str(cell.index), cell.name, str(cell.seed), str(cell.steps), *size, *values, cell.config_hash)
    _console().print(table)


def show_status(found: Sweep, seen: Board) -> None:
    """Every cell's state, and the count of each state."""
    evaluates = found.manifest.evaluate is not None
    headers = ["cell", "name", "seed", "state", "step", "reward", "node", "job", "tries"]
    table = Table(*headers, *(["evaluated"] if evaluates else []), "why")
    for row in seen.rows:
        reward = "" if row.reward is None else f"{row.reward:.3f}"
        evaluated = "yes" if row.evaluated else "under way" if row.cell in seen.evaluating else "no"
        table.add_row(
            str(row.cell),
            row.name,
            str(row.seed),
            row.state,
            f"{row.step}/{row.steps}",
            reward,
            row.node,
            row.job,
            str(row.attempts),
            *([evaluated] if evaluates else []),
            row.why,
        )
    console = _console()
    console.print(table)
    console.print(", ".join(f"{number} {state.lower()}" for state, number in seen.counts().items()), highlight=False)


def _console() -> Console:
    console = Console(markup=False)
    return console if console.is_terminal else Console(width=PIPE_WIDTH, markup=False)


FORMATS = ("table", "json")
SweepArgument = Annotated[Path, typer.Argument(metavar="SWEEP", help="A sweep's folder, or its name under sweeps/")]
Slurm = Annotated[str | None, typer.Option(help="Site profile: a name in slurm/profiles, or a .yaml file")]
Local = Annotated[int | None, typer.Option(min=1, help="Run on this machine, so many cells at a time")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print script and cells; write and submit nothing")]
Format = Annotated[str, typer.Option(help="table or json")]


def mount(app: typer.Typer) -> None:
    """Add the commands to the application."""
    from kl_comedy.cli import sweep_job as celling

    app.command()(sweep)
    app.command()(status)
    app.command()(resubmit)
    app.command()(cancel)
    app.command(name="cell")(celling.cell)
    app.command(name="sweep-report")(celling.sweep_report)


def sweep(
    grid: Annotated[Path, typer.Argument(help="A grid file, as configs/sweeps/pocket_beta.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for every cell")] = None,
    slurm: Slurm = None,
    local: Local = None,
    dry_run: DryRun = False,
    output: Annotated[Path | None, typer.Option(help="The sweep's folder; default: sweeps/NAME")] = None,
    plugin: Annotated[list[Path] | None, typer.Option("--plugin", help="A Python file that registers parts")] = None,
    format: Format = "table",
) -> None:
    """Expand GRID into cells, check each cell's config, and run them all: on SLURM as an array, or here.

    Doing it again runs what is missing or failed; another grid under the same name is refused.

    Example: `kl-comedy sweep configs/sweeps/pocket_beta.yaml --slurm gpu --dry-run`

    Example: `kl-comedy sweep configs/sweeps/pocket_beta.yaml --local 2`
    """
    _check_format(format)
    if (slurm is None) == (local is None) and not (dry_run and slurm is None):
        raise UserError("say where: --slurm PROFILE for a cluster, or --local N for this machine")
    from kl_comedy.slurm.manifest import write_sweep
    from kl_comedy.slurm.profile import read_profile

    profile = None if slurm is None else read_profile(slurm)
    manifest, base_text = _plan(grid, overrides or [], plugin or [])
    _check_sizes(manifest.cells, profile, local)  # a mistake is told before anything is written
    folder = output or Path("sweeps") / manifest.name
    if dry_run:
        _dry_run(manifest, folder, profile, format)
        return
    made = write_sweep(folder, manifest, base_text)
    _say(f"{len(manifest.cells)} cells in {made.path}")
    _go(made, slurm, local)


def status(sweep: SweepArgument, format: Format = "table") -> None:
    """Show every cell: state, step, last reward, node, and why it failed.

    Example: `kl-comedy status pocket_beta`
    """
    _check_format(format)
    pass
    from kl_comedy.slurm.manifest import read_sweep
    from kl_comedy.slurm.status import board

    found = read_sweep(sweep)
    seen = board(found)
    _tell(seen)
    if format == "json":
        print(json.dumps([asdict(row) for row in seen.rows], indent=1))
        return
    show_status(found, seen)


def resubmit(sweep: SweepArgument, slurm: Slurm = None, local: Local = None, dry_run: DryRun = False) -> None:
    """Run again what is missing or failed, and nothing else; from the last checkpoint where there is one.

    Where it ran before, unless --slurm or --local says otherwise. Doing it twice does it once.

    Example: `kl-comedy resubmit pocket_beta`
    """
    from kl_comedy.slurm.manifest import read_sweep
    from kl_comedy.slurm.profile import read_profile

    if slurm is not None and local is not None:
        raise UserError("say where: either --slurm PROFILE or --local N")
    if slurm is not None:
        read_profile(slurm)  # a mistake in it is told before SLURM is asked anything
    _go(read_sweep(sweep), slurm, local, dry_run=dry_run)


def cancel(sweep: SweepArgument) -> None:
    """End the sweep's jobs, waiting and running, on SLURM and on this machine; running cells save first.

    Example: `kl-comedy cancel pocket_beta`
    """
    from kl_comedy.slurm import local as here
    from kl_comedy.slurm import submit
    from kl_comedy.slurm.manifest import read_sweep

    found = read_sweep(sweep)
    managers = here.local_managers(found)
    jobs = submit.active_jobs(found)
    if not jobs and not managers:
        _say("nothing to cancel: no job of this sweep waits or runs")
        return
    submit.cancel(found, jobs)
    here.stop_local(found)
    _say(f"cancelled {len(jobs)} jobs" + (f" and {len(managers)} local managers" if managers else ""))


def _plan(grid_file: Path, overrides: list[str], plugins: list[Path]) -> tuple[Manifest, str]:
    """The manifest and the text of the base config it stands on."""
    from kl_comedy.cli.evaluate import check_suites
    from kl_comedy.registry import load_plugin_file
    from kl_comedy.slurm.grid import read_grid
    from kl_comedy.slurm.manifest import plan

    for file in plugins:
        load_plugin_file(file)
    grid = read_grid(grid_file)
    manifest = plan(grid, directory=Path.cwd(), plugins=plugins, extra=overrides)
    check_suites(manifest, grid.base)
    return manifest, grid.base.read_text()


def _check_sizes(cells: Sequence[Cell], profile: Profile | None, local: int | None) -> None:
    """Whether every cell has a place to run: a shape of the profile, or this one machine."""
    from kl_comedy.slurm.render import shape_of

    for cell in cells:
        if profile is not None:
            shape_of(cell, profile)
        if local is not None and cell.nodes > 1:
            raise UserError(
                f"cell {cell.index} ({cell.name}): train.nodes is {cell.nodes}, and --local is one machine; "
                "use --slurm PROFILE, or train.nodes=1"
            )


def _dry_run(manifest: Manifest, folder: Path, profile: Profile | None, format: str) -> None:
    """The exact scripts and the table of cells, on stdout."""
    pass
    from kl_comedy.slurm.manifest import Sweep
    from kl_comedy.slurm.render import scripts as scripts_of
    from kl_comedy.slurm.submit import planned_commands

    planned = Sweep(path=folder.resolve(), manifest=manifest)
    scripts = {} if profile is None else scripts_of(planned, profile, manifest.cells)
    commands = [] if profile is None else planned_commands(planned, profile)
    if format == "json":
        cells = [{**asdict(cell), "command": planned.command(cell)} for cell in manifest.cells]
        print(json.dumps({"name": manifest.name, "scripts": scripts, "commands": commands, "cells": cells}, indent=1))
        return
    for name, text in scripts.items():
        print(f"### {name}.sbatch\n{text}")
    for command in commands:
        print(f"$ {command}")
    show_cells(planned)


def _go(found: Sweep, slurm: str | None, local: int | None, *, dry_run: bool = False) -> None:
    """Run what is to be done, under a lock, so that two of these at the same time submit it once."""
    from kl_comedy.io import file_lock
    from kl_comedy.slurm import submit
    from kl_comedy.slurm.local import enlist
    from kl_comedy.slurm.profile import profile_file, read_profile
    from kl_comedy.slurm.status import board, submissions

    with file_lock(found.path / ".submit.lock", wait_s=600):
        to_slurm = slurm is not None or (local is None and any(not one.local for one in submissions(found)))
        for one in submit.adopt(found) if to_slurm else ():
            _say(f"note: job {one.job} is this sweep's, by an earlier submission that did not hear of it")
        seen = board(found)
        _tell(seen)
        work = submit.todo(found, seen)
        if not work:
            counts = ", ".join(f"{number} {state.lower()}" for state, number in seen.counts().items())
            _say(f"nothing to submit: {counts}")
            return
        profile_name, workers = _where(found, slurm, local)
        profile = None if profile_name is None else read_profile(profile_name)
        _check_sizes([found.cell(index) for index in work.train], profile, workers)
        if dry_run:
            _say(
                f"to train: {', '.join(map(str, work.train)) or 'none'}; "
                f"to evaluate: {', '.join(map(str, work.evaluate)) or 'none'}"
            )
            return
        submit.create_stores(found.manifest)
        if profile is not None:
            _submit(found, profile, profile_file(str(profile_name)), work)
            return
        assert workers is not None
        enlist(found, work, workers)
    _run_here(found, work, workers)


def _submit(found: Sweep, profile: Profile, file: Path, work: Todo) -> None:
    from kl_comedy.slurm import submit

    for one in submit.submit(found, profile, file, work):
        what = f"{len(one.indices)} cells" if one.indices else "report"
        _say(f"{one.stage}: job {one.job}, {what}")
        print(one.job)
    _say(f"watch with: kl-comedy status {found.path}")


def _run_here(found: Sweep, work: Todo, workers: int) -> None:
    from kl_comedy.slurm.local import run_local
    from kl_comedy.slurm.status import board

    try:
        run_local(found, work, workers, _say)
    except KeyboardInterrupt:
        raise RunFailed(f"stopped; go on with: kl-comedy resubmit {found.path}") from None
    bad = [row for row in board(found).rows if row.state != "FINISHED"]
    if bad:
        raise RunFailed(
            f"{len(bad)} of {len(found.manifest.cells)} cells did not finish; see kl-comedy status {found.path}, "
            f"then kl-comedy resubmit {found.path}"
        )


def _where(found: Sweep, slurm: str | None, local: int | None) -> tuple[str | None, int | None]:
    """Profile or workers: as asked, else as last time."""
    from kl_comedy.slurm.status import submissions

    if slurm is not None or local is not None:
        return slurm, local
    earlier = submissions(found)
    if not earlier:
        raise UserError("this sweep never ran; say where: --slurm PROFILE or --local N")
    last = next((one for one in reversed(earlier) if one.profile is not None or one.workers is not None), None)
    if last is None:
        raise UserError("it is not known with which profile this sweep was submitted; say it: --slurm PROFILE")
    return last.profile, last.workers


def _tell(seen: Board) -> None:
    for note in seen.notes:
        _say(f"note: {note}")


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise bad_value("--format", format, FORMATS)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
