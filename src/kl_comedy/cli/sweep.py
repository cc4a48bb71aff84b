"""``kl-comedy sweep``, ``status``, ``resubmit``, ``cancel``: grids of runs on SLURM or on this machine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kl_comedy.cli.common import Plugins, TableOrJson, load_plugins, message
from kl_comedy.config import standalone_text
from kl_comedy.errors import RunFailed, UserError, error_prefix
from kl_comedy.io import file_lock
from kl_comedy.redaction import printable
from kl_comedy.registry import PluginPackage, PluginSet, plugin_sources
from kl_comedy.slurm import local as local_runs
from kl_comedy.slurm import submit
from kl_comedy.slurm.grid import read_grid
from kl_comedy.slurm.manifest import FILE, Cell, Manifest, Sweep, plan, read_sweep, write_sweep
from kl_comedy.slurm.profile import Profile, profile_file, read_profile
from kl_comedy.slurm.scripts import array_ranges, scripts
from kl_comedy.slurm.status import SweepStatus, missing_work, read_status

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
    name: Annotated[str | None, typer.Option(help="The sweep's name and tag; default: the grid's")] = None,
    finished_in: Annotated[
        str | None, typer.Option(metavar="URI", help="A store or export; cells with a finished run there are left out")
    ] = None,
    plugin: Plugins = None,
    format: TableOrJson = "table",
) -> None:
    """Expand GRID into cells, check each cell's config, and run them all: on SLURM as arrays, or here.

    Running it again runs what is missing or failed; another grid under the same name, or a changed plugin, is refused.

    Example: `kl-comedy sweep configs/sweeps/pocket_beta.yaml --slurm gpu --dry-run`

    Example: `kl-comedy sweep configs/sweeps/pocket_beta.yaml --local 2`
    """
    if (slurm is None) == (local is None) and not (dry_run and slurm is None):
        raise UserError("say where: --slurm PROFILE for a cluster, or --local N for this machine")
    profile = None if slurm is None else read_profile(slurm)
    load_plugins(plugin)
    planned = read_grid(grid, name)
    manifest = plan(planned, directory=Path.cwd(), plugins=plugin or [], extra=overrides or [])
    _check_suites(manifest)
    _check_sizes(manifest.cells, profile, local)  # before anything is written
    _check_servers(manifest, profile, Path(planned.base))
    folder = output or Path("sweeps") / manifest.name
    planned_sweep = Sweep(path=folder.resolve(), manifest=manifest)
    elsewhere = frozenset[int]() if finished_in is None else _finished_in(manifest, finished_in)
    if dry_run:
        _print_plan(planned_sweep, profile, format)
        return
    if profile is not None:
        scripts(planned_sweep, profile, manifest.cells)  # a path that no script can hold is refused here
    if (folder / FILE).is_file():
        _check_plugins(read_sweep(folder), manifest.plugin_hashes)
    written = write_sweep(folder, manifest, standalone_text(Path(planned.base)))
    message(f"{len(manifest.cells)} cells in {written.path}")
    _run_missing(written, slurm, local, elsewhere=elsewhere)


def status(sweep: SweepArgument, format: TableOrJson = "table") -> None:
    """Show every cell: state, step, last reward, node, and why it failed.

    Example: `kl-comedy status pocket_beta`
    """
    loaded = read_sweep(sweep)
    cells = _read_status(loaded)
    if format == "json":
        print(json.dumps([asdict(row) for row in cells.rows], indent=1))
        return
    columns = ["cell", "name", "seed", "state", "step", "reward", "node", "job", "tries", "evaluated", "why"]
    if loaded.manifest.evaluate is None:
        columns.remove("evaluated")
    table = Table(*columns)
    for row in cells.rows:
        values = {
            **asdict(row),
            "step": f"{row.step}/{row.steps}",
            "reward": "" if row.reward is None else f"{row.reward:.3f}",
            "tries": row.attempts,
            "evaluated": "yes" if row.evaluated else "under way" if row.cell in cells.evaluating else "no",
        }
        table.add_row(*(printable(str(values[column])) for column in columns))
    console = _stdout_console()
    console.print(table)
    console.print(cells.summary(), highlight=False)


def resubmit(sweep: SweepArgument, slurm: Slurm = None, local: Local = None, dry_run: DryRun = False) -> None:
    """Run what is missing or failed, and nothing else; each cell resumes from its last checkpoint.

    Where it ran before, unless --slurm or --local says otherwise. Running it twice submits once.

    Example: `kl-comedy resubmit pocket_beta`
    """
    if slurm is not None and local is not None:
        raise UserError("say where: either --slurm PROFILE or --local N")
    if slurm is not None:
        read_profile(slurm)  # before SLURM is asked anything
    _run_missing(read_sweep(sweep), slurm, local, dry_run=dry_run)


def cancel(sweep: SweepArgument) -> None:
    """Cancel the sweep's jobs, waiting and running, on SLURM and on this machine; running cells save first.

    Example: `kl-comedy cancel pocket_beta`
    """
    loaded = read_sweep(sweep)
    managers = local_runs.local_managers(loaded)
    jobs = submit.active_jobs(loaded)
    if not jobs and not managers:
        message("nothing to cancel: no job of this sweep waits or runs")
        return
    submit.cancel(loaded, jobs)
    for pid in managers:
        os.kill(pid, signal.SIGTERM)
    message(f"cancelled {len(jobs)} jobs" + (f" and {len(managers)} local managers" if managers else ""))


# --- checks before anything is written -------------------------------------------------------------------------------


def _check_suites(manifest: Manifest) -> None:
    """Raise :class:`UserError` for suites of the evaluation that do not exist, or whose local files do not match.

    Suites without a local file are checked by name only: nothing is downloaded to submit a sweep.
    """
    if manifest.evaluate is None:
        return
    from kl_comedy.config import load_config
    from kl_comedy.evaluation.suites import get_suite, suite_problems

    config = load_config(manifest.base, [*manifest.cells[0].overrides, *manifest.evaluate])
    root = None if config.eval.data_root is None else Path(config.eval.data_root)
    for name in config.eval.suites:
        suite = get_suite(name, key="evaluate: eval.suites")
        if suite.file is not None and (root is not None or Path(suite.file.path).is_file()):
            suite_problems(suite, root=root)


def _check_sizes(cells: Sequence[Cell], profile: Profile | None, workers: int | None) -> None:
    """Raise :class:`UserError` for a cell that fits neither a shape of the profile nor this one machine."""
    for cell in cells:
        if profile is not None:
            profile.shape_for(cell)
        if workers is not None and cell.nodes > 1:
            where = f"cell {cell.index} ({cell.name}): train.nodes is {cell.nodes}, and --local is one machine"
            raise UserError(f"{where}; use --slurm PROFILE, or train.nodes=1")


def _check_servers(manifest: Manifest, profile: Profile | None, base: Path) -> None:
    """Raise :class:`UserError` for a cell whose sampler cannot use the servers that the profile starts beside it."""
    shapes = {} if profile is None else {cell.name: (cell, profile.shape_for(cell)) for cell in manifest.cells}
    served = [(cell, shape.servers) for cell, shape in shapes.values() if shape.servers and not shape.servers.command]
    if not served:
        return
    from kl_comedy.config import config_reader
    from kl_comedy.rollouts.engines.jobs import check_job_servers

    read = config_reader(base)
    for cell, servers in served:
        with error_prefix(f"cell {cell.index} ({cell.name})"):
            check_job_servers(read(cell.overrides), servers.gpus)


def _check_plugins(sweep: Sweep, now: Mapping[str, str], *, missing: bool = True) -> None:
    """Say which cells are of older plugins than ``now``. Raises :class:`UserError` where cells are ``missing``."""
    change = sweep.changed_plugins(now)
    if change is None:
        return
    trained = array_ranges(row.cell for row in read_status(sweep).rows if row.run is not None)
    cells = f"cells {trained} were trained with the older source" if trained else "none of its cells was trained yet"
    again = "to train all cells with the new source: kl-comedy sweep GRID --name ANOTHER"
    if missing:
        raise UserError(f"{change}: {cells}; to finish this sweep, put the older source back; {again}")
    message(f"note: {change}: {cells}; {again}")


def _plugin_hashes_now(sweep: Sweep) -> dict[str, str]:
    """Of the sweep's plugins and packages as their files are now; without those that are gone."""
    sources: dict[str, bytes] = {}
    for file in map(Path, sweep.manifest.plugins):
        sources |= plugin_sources(file) if file.is_file() else {}
    packages = tuple(PluginPackage.read(name) for name in sweep.manifest.packages)
    return PluginSet(files=sources, packages=packages).hashes


# --- submission ------------------------------------------------------------------------------------------------------


def _finished_in(manifest: Manifest, uri: str) -> frozenset[int]:
    """The cells that have a finished run with their config hash in the store or export at ``uri``."""
    from kl_comedy.tracking.runs import read_runs

    runs = read_runs(uri)
    hashes = set() if runs.empty else {*runs.loc[runs["status"] == "FINISHED", "tags.config.hash"]}
    cells = frozenset(cell.index for cell in manifest.cells if cell.config_hash in hashes)
    message(f"{len(cells)} of {len(manifest.cells)} cells are finished in {uri}")
    return cells


def _run_missing(
    sweep: Sweep,
    slurm: str | None,
    local: int | None,
    *,
    dry_run: bool = False,
    elsewhere: frozenset[int] = frozenset(),
) -> None:
    """Run what is missing but the cells ``elsewhere``. The lock makes two of these at the same time submit it once."""
    with file_lock(sweep.path / ".submit.lock", wait_s=600):
        if slurm is not None or (local is None and any(not item.local for item in sweep.submissions())):
            for submission in submit.adopt_unrecorded_jobs(sweep):
                message(f"note: job {submission.job} belongs to this sweep, from a submission that was not recorded")
        cells = _read_status(sweep)
        work = missing_work(sweep, cells)
        work = replace(work, train=tuple(index for index in work.train if index not in elsewhere))
        _check_plugins(sweep, _plugin_hashes_now(sweep), missing=bool(work.train or work.evaluate))
        if not work.train and not work.evaluate:
            message(f"nothing to submit: {cells.summary()}")
            return
        profile_name, workers = (slurm, local) if slurm or local else _last_place(sweep)
        profile = None if profile_name is None else read_profile(profile_name)
        _check_sizes([sweep.cell(index) for index in work.train], profile, workers)
        if dry_run:
            train, evaluate = (", ".join(map(str, indices)) or "none" for indices in (work.train, work.evaluate))
            message(f"to train: {train}; to evaluate: {evaluate}")
            return
        submit.create_stores(sweep.manifest)
        if profile is not None:
            for submission in submit.submit(sweep, profile, profile_file(str(profile_name)), work):
                what = f"{len(submission.indices)} cells" if submission.indices else "report"
                message(f"{submission.stage}: job {submission.job}, {what}")
                print(submission.job)
            message(f"watch with: kl-comedy status {sweep.path}")
            return
        assert workers is not None
        local_runs.record_local_submission(sweep, work, workers)
    try:
        local_runs.run_local(sweep, work, workers, message)
    except KeyboardInterrupt:
        raise RunFailed(f"stopped; resume with: kl-comedy resubmit {sweep.path}") from None
    unfinished = sum(row.state != "FINISHED" and row.cell not in elsewhere for row in read_status(sweep).rows)
    if unfinished:
        raise RunFailed(
            f"{unfinished} of {len(sweep.manifest.cells)} cells did not finish; "
            f"see: kl-comedy status {sweep.path}; then: kl-comedy resubmit {sweep.path}"
        )


def _last_place(sweep: Sweep) -> tuple[str | None, int | None]:
    """The profile or the number of workers of the last submission."""
    submissions = sweep.submissions()
    for submission in reversed(submissions):
        if submission.profile is not None or submission.workers is not None:
            return submission.profile, submission.workers
    known = "it is not known with which profile this sweep was submitted; say it: --slurm PROFILE"
    raise UserError(known if submissions else "this sweep never ran; say where: --slurm PROFILE or --local N")


# --- output ----------------------------------------------------------------------------------------------------------


def _print_plan(sweep: Sweep, profile: Profile | None, format: str) -> None:
    """The exact scripts and the table of cells, on stdout."""
    cells = sweep.manifest.cells
    texts = {} if profile is None else scripts(sweep, profile, cells)
    commands = [] if profile is None else submit.planned_commands(sweep, profile)
    if format == "json":
        rows = [{**asdict(cell), "command": sweep.command(cell)} for cell in cells]
        plan = {"name": sweep.manifest.name, "scripts": texts, "commands": commands, "cells": rows}
        print(json.dumps(plan, indent=1))
        return
    for name, text in texts.items():
        print(f"### {name}.sbatch\n{text}")
    for command in commands:
        print(f"$ {command}")
    keys = list(dict.fromkeys(key for cell in cells for key in cell.values))
    sizes = ["nodes x processes"] if len({cell.size for cell in cells}) > 1 else []
    title = f"{sweep.path}: {len(cells)} cells"
    table = Table("cell", "name", "seed", "updates", *sizes, *keys, "config", title=title)
    for cell in cells:
        values = ["{} x {}".format(*cell.size) for _ in sizes] + [cell.values.get(key, "") for key in keys]
        table.add_row(str(cell.index), cell.name, str(cell.seed), str(cell.steps), *values, cell.config_hash)
    _stdout_console().print(table)


def _stdout_console() -> Console:
    console = Console(markup=False)
    return console if console.is_terminal else Console(width=PIPE_WIDTH, markup=False)


def _read_status(sweep: Sweep) -> SweepStatus:
    """The state of every cell; what could not be asked is printed."""
    cells = read_status(sweep)
    for note in cells.notes:
        message(f"note: {note}")
    return cells
