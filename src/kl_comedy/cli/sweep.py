"""``kl-comedy sweep``, ``status``, ``resubmit``, ``cancel``: grids of runs on SLURM or on this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kl_comedy.cli.common import (
    Plugins,
    TableOrJson,
    load_plugins,
    message,
    plain_table,
    print_frame,
    stderr_console,
    stdout_console,
)
from kl_comedy.cli.completion import complete_config, complete_override
from kl_comedy.cli.sweep_progress import sweep_progress
from kl_comedy.config import Config
from kl_comedy.config.combinations import is_off_policy
from kl_comedy.config.load import identity, may_change
from kl_comedy.config.shipped import find_config
from kl_comedy.errors import RunFailed, UserError, error_prefix
from kl_comedy.io import file_lock
from kl_comedy.plugins import PluginSet
from kl_comedy.slurm import local as local_runs
from kl_comedy.slurm import submit
from kl_comedy.slurm.grid import read_grid, split_axes
from kl_comedy.slurm.manifest import (
    FILE,
    SUBMIT_LOCK,
    SUBMIT_WAIT_S,
    Cell,
    Plan,
    Sweep,
    plan,
    read_sweep,
    write_sweep,
)
from kl_comedy.slurm.profile import Profile, profile_file, read_profile
from kl_comedy.slurm.scripts import array_ranges, scripts
from kl_comedy.slurm.status import CellStatus, SweepStatus, missing_work, read_status, seeds_table
from kl_comedy.slurm.submit import Work
from kl_comedy.training.run_plugins import plugins_of

SweepArgument = Annotated[Path, typer.Argument(metavar="SWEEP", help="A sweep's folder, or its name under sweeps/")]
Slurm = Annotated[str | None, typer.Option(help="Site profile: a name in slurm/profiles, or a .yaml file")]
Local = Annotated[int | None, typer.Option(min=1, help="Run on this machine, N cells at a time")]
Output = Annotated[Path | None, typer.Option(help="The sweep's folder; default: sweeps/NAME")]
Name = Annotated[str | None, typer.Option(help="The sweep's name and tag; default: the grid's")]
FinishedIn = Annotated[
    str | None, typer.Option(metavar="URI", help="A store or export; cells with a finished run there are left out")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print scripts and cells; write and submit nothing")]


def sweep(
    grid: Annotated[
        str,
        typer.Argument(
            help="A grid file, a config, or a name of `kl-comedy list configs`, e.g. pocket_beta",
            autocompletion=complete_config,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="key=value for every cell; key=a,b makes cells of each value",
            autocompletion=complete_override,
        ),
    ] = None,
    slurm: Slurm = None,
    local: Local = None,
    dry_run: DryRun = False,
    output: Output = None,
    name: Name = None,
    finished_in: FinishedIn = None,
    plugin: Plugins = None,
    format: TableOrJson = "table",
) -> None:
    """Expand GRID into cells, check each cell's config, and run them all: on SLURM as arrays, or here.

    GRID may be a config: the keys with several values on the command line make the grid.

    Running it again runs what is missing or failed; another grid under the same name, or a changed plugin, is refused.

    Example: `kl-comedy sweep configs/sweeps/pocket_beta.yaml --slurm gpu --dry-run`

    Example: `kl-comedy sweep configs/sweeps/pocket_beta.yaml --local 2`

    Example: `kl-comedy sweep quickstart seed=0,1 kl.0.beta=0.01,0.03 --local 2`
    """
    place = Place(slurm=slurm, workers=local)
    nowhere = slurm is None and local is None
    if place.is_ambiguous or (nowhere and not dry_run):
        raise UserError("say where: --slurm PROFILE for a cluster, or --local N for this machine")
    profile = place.read_profile()
    load_plugins(plugin)
    axes, extra = split_axes(overrides or [])
    planned = read_grid(find_config(grid), name, axes)
    made = plan(planned, directory=Path.cwd(), plugins=plugin or [], extra=extra)
    manifest = made.manifest

    # Everything that can be refused is refused before anything is written.
    _check_suites(made)
    _check_sizes(manifest.cells, profile, local)
    _check_servers(made, profile)
    folder = output or Path("sweeps") / manifest.name
    planned_sweep = Sweep(path=folder.resolve(), manifest=manifest)
    # By their settings: a store does not know which sweep a run belongs to.
    finished_elsewhere = frozenset[int]()
    if finished_in is not None:
        finished_elsewhere = cells_finished_in(made, finished_in)
    _warn_of_idle_terms(made)
    if dry_run:
        _print_plan(planned_sweep, profile, format)
        return
    if profile is not None:
        scripts(planned_sweep, profile, manifest.cells)  # raises for a path that no script can hold
    if (folder / FILE).is_file():
        _check_plugins(read_sweep(folder), made.plugins)

    written = write_sweep(folder, made)
    message(f"{len(manifest.cells)} cells in {written.path}")
    _run_missing(written, place, finished_elsewhere=finished_elsewhere)


def status(sweep: SweepArgument, format: TableOrJson = "table") -> None:
    """Show every cell: state, step, last reward, node, and why it failed.

    Example: `kl-comedy status pocket_beta`
    """
    loaded = read_sweep(sweep)
    sweep_status = _read_status(loaded)
    if format == "json":
        print(json.dumps([asdict(row) for row in sweep_status.rows], indent=1))
        return
    columns = ["cell", "name", "seed", "state", "step", "reward", "node", "job", "tries", "evaluated", "why"]
    if loaded.manifest.evaluate is None:
        columns.remove("evaluated")
    table = plain_table(*columns)
    for row in sweep_status.rows:
        reward = "" if row.reward is None else f"{row.reward:.3f}"
        texts = {
            **asdict(row),
            "step": f"{row.step}/{row.steps}",
            "reward": reward,
            "tries": row.attempts,
            "evaluated": evaluation_state(row, sweep_status),
        }
        table.add_row(*(texts[column] for column in columns))
    console = stdout_console()
    console.print(table)
    console.print(sweep_status.summary(), highlight=False)


def evaluation_state(row: CellStatus, sweep_status: SweepStatus) -> str:
    """Whether a cell is evaluated, in a word or two."""
    if row.evaluated:
        return "yes"
    if row.cell in sweep_status.evaluating:
        # Submitted together with the training, and begins after it.
        if row.state != "FINISHED":
            return "waits"
        return "under way"
    return "no"


def resubmit(sweep: SweepArgument, slurm: Slurm = None, local: Local = None, dry_run: DryRun = False) -> None:
    """Run what is missing or failed, and nothing else; each cell resumes from its last checkpoint.

    Where it ran before, unless --slurm or --local says otherwise. Running it twice submits once.

    Example: `kl-comedy resubmit pocket_beta`
    """
    place = Place(slurm=slurm, workers=local)
    if place.is_ambiguous:
        raise UserError("say where: either --slurm PROFILE or --local N")
    place.read_profile()  # a mistake in it is refused before SLURM is asked anything
    _run_missing(read_sweep(sweep), place, dry_run=dry_run)


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
    submit.scancel(jobs)
    # A local manager stops its cells as SLURM does, by a signal after which they save.
    for pid in managers:
        os.kill(pid, signal.SIGTERM)
    cancelled = f"cancelled {len(jobs)} jobs"
    if managers:
        cancelled += f" and {len(managers)} local managers"
    message(cancelled)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where cells run: ``slurm``, a profile's name or file, or ``workers`` cells at a time on this machine."""

    slurm: str | None = None
    workers: int | None = None

    @property
    def is_ambiguous(self) -> bool:
        """Whether both are given."""
        return self.slurm is not None and self.workers is not None

    def read_profile(self) -> Profile | None:
        """The SLURM profile; None for this machine. Raises :class:`UserError` for one that cannot be read."""
        return None if self.slurm is None else read_profile(self.slurm)


# --- checks before anything is written -------------------------------------------------------------------------------


def _check_suites(made: Plan) -> None:
    """Raise :class:`UserError` for suites of the evaluation that do not exist, or whose local files do not match.

    Suites without a local file are checked by name only: nothing is downloaded to submit a sweep.
    """
    config = made.evaluation
    if config is None:
        return
    from kl_comedy.evaluation.suites import get_suite, suite_problems

    root = None if config.eval.data_root is None else Path(config.eval.data_root)
    for name in config.eval.suites:
        suite = get_suite(name, key="evaluate: eval.suites")
        # A suite of the hub has no file to check.
        if suite.file is None:
            continue
        if root is not None or Path(suite.file.path).is_file():
            suite_problems(suite, root=root)


def _check_sizes(cells: Sequence[Cell], profile: Profile | None, workers: int | None) -> None:
    """Raise :class:`UserError` for a cell that fits neither a shape of the profile nor this one machine."""
    for cell in cells:
        if profile is not None:
            profile.shape_for(cell)
        if workers is not None and cell.nodes > 1:
            raise UserError(
                f"cell {cell.index} ({cell.name}): train.nodes is {cell.nodes}, and --local is one machine; "
                "use --slurm PROFILE, or train.nodes=1"
            )


def _check_servers(made: Plan, profile: Profile | None) -> None:
    """Raise :class:`UserError` for a cell whose sampler cannot use the servers that the profile starts beside it."""
    if profile is None:
        return
    # Cells of one name differ in their seed only, so that one of them is checked.
    cells_by_name = {cell.name: cell for cell in made.manifest.cells}
    # Collected first: checking them imports torch, which a profile without servers should not cost.
    served: list[tuple[Cell, int]] = []
    for cell in cells_by_name.values():
        servers = profile.shape_for(cell).servers
        # What a command of the profile starts is unknown here.
        if servers and not servers.command:
            served.append((cell, servers.gpus))
    if not served:
        return
    from kl_comedy.rollouts.engines.jobs import check_job_servers

    for cell, gpus in served:
        with error_prefix(f"cell {cell.index} ({cell.name})"):
            check_job_servers(made.configs[cell.index], gpus)


def _warn_of_idle_terms(made: Plan) -> None:
    """Say in one line which cells have no KL term that leads back to its reference (:func:`idle_terms`)."""
    from kl_comedy.kl import resolve_terms
    from kl_comedy.kl.pull import idle_terms

    cells = made.manifest.cells
    # Cells of one name differ in their seed only.
    words_by_name: dict[str, str] = {}
    idle_cells: list[Cell] = []
    for cell in cells:
        if cell.name not in words_by_name:
            config = made.configs[cell.index]
            words_by_name[cell.name] = idle_terms(resolve_terms(config.kl), off_policy=is_off_policy(config))
        if words_by_name[cell.name]:
            idle_cells.append(cell)
    if not idle_cells:
        return
    first = idle_cells[0]
    count = f"{len(idle_cells)} of {len(cells)} cells"
    numbers = array_ranges(cell.index for cell in idle_cells)
    message(f"warning: no KL acts in {count} ({numbers}), as in cell {first.index}: {words_by_name[first.name]}")


def _check_plugins(sweep: Sweep, now: PluginSet, *, missing: bool = True) -> None:
    """Print which cells were trained with older plugins than those of ``now``.

    Raises :class:`UserError` instead where cells are ``missing``, which would be trained with other plugins.
    """
    change = sweep.changed_plugins(now)
    if change is None:
        return
    trained = array_ranges(row.cell for row in read_status(sweep).rows if row.run is not None)
    if trained:
        cells = f"cells {trained} were trained with the older source"
    else:
        cells = "none of its cells was trained yet"
    again = "to train all cells with the new source: kl-comedy sweep GRID --name ANOTHER"
    # Cells of one sweep are compared with each other: they must be trained by the same code.
    if missing:
        raise UserError(f"{change}: {cells}; to finish this sweep, put the older source back; {again}")
    message(f"note: {change}: {cells}; {again}")


# --- submission ------------------------------------------------------------------------------------------------------


def cells_finished_in(made: Plan, uri: str) -> frozenset[int]:
    """The cells that have a finished run of the same settings and plugins in the store or export at ``uri``."""
    from kl_comedy.results.runs import read_runs
    from kl_comedy.tracking.store import param_texts

    def settings(values: Mapping[str, Any], plugins: str) -> frozenset[tuple[str, str]]:
        """What a run is, without its defaults: a run from before a key existed has none for it."""
        texts = {key: text for key, text in param_texts(values).items() if defaults.get(key) != text}
        return frozenset({**texts, "plugins": plugins}.items())

    defaults = param_texts(identity(Config()))
    finished = set()
    for run in read_runs(uri).to_dict("records"):
        if run["status"] != "FINISHED":
            continue
        params = {}
        for column, value in run.items():
            key = str(column).removeprefix("params.")
            if str(column).startswith("params.") and isinstance(value, str) and not may_change(key):
                params[key] = value
        plugins = run.get("tags.plugins")
        finished.add(settings(params, plugins if isinstance(plugins, str) else ""))
    cells = []
    for cell in made.manifest.cells:
        config = made.configs[cell.index]
        plugins = plugins_of(config).tags().get("plugins", "")
        if settings(identity(config), plugins) in finished:
            cells.append(cell.index)
    message(f"{len(cells)} of {len(made.manifest.cells)} cells are finished in {uri}")
    return frozenset(cells)


def _run_missing(
    sweep: Sweep,
    place: Place,
    *,
    dry_run: bool = False,
    finished_elsewhere: frozenset[int] = frozenset(),
) -> None:
    """Run the cells that are missing or failed, except those that are ``finished_elsewhere``.

    ``place`` may name none: then they run where they ran last. Raises :class:`UserError` where that is not known, and
    :class:`RunFailed` where cells that ran here did not finish.
    """
    # Two calls at the same time submit each cell once: the second one finds the jobs of the first in the journal.
    with file_lock(sweep.path / SUBMIT_LOCK, wait_s=SUBMIT_WAIT_S):
        _adopt_jobs(sweep, place)
        sweep_status = _read_status(sweep)
        work = missing_work(sweep, sweep_status)
        work = replace(work, train=tuple(index for index in work.train if index not in finished_elsewhere))
        is_missing = bool(work.train or work.evaluate)
        _check_plugins(sweep, sweep.plugins_on_disk(), missing=is_missing)
        if not is_missing:
            message(f"nothing to submit: {sweep_status.summary()}")
            return

        if place.slurm is None and place.workers is None:
            # resubmit needs no option: a sweep continues where it was started.
            place = _last_place(sweep)
        profile = place.read_profile()
        _check_sizes([sweep.cell(index) for index in work.train], profile, place.workers)
        if dry_run:
            message(f"to train: {_listed(work.train)}; to evaluate: {_listed(work.evaluate)}")
            return
        submit.create_stores(sweep.manifest)
        if profile is not None:
            _submit(sweep, profile, profile_file(str(place.slurm)), work)
            return
        workers = place.workers
        assert workers is not None
        local_runs.record_local_submission(sweep, work, workers)

    # Not under the lock: the cells run for hours, and another `resubmit` would wait for it all that time.
    _run_here(sweep, work, workers, finished_elsewhere)


def _adopt_jobs(sweep: Sweep, place: Place) -> None:
    """Record the jobs of a submission that was interrupted before it recorded them. Asks SLURM, where it may run."""
    submitted_to_slurm = any(not item.local for item in sweep.submissions())
    if place.slurm is None and (place.workers is not None or not submitted_to_slurm):
        return
    for submission in submit.adopt_unrecorded_jobs(sweep):
        message(f"note: job {submission.job} belongs to this sweep, from a submission that was not recorded")


def _submit(sweep: Sweep, profile: Profile, file: Path, work: Work) -> None:
    for submission in submit.submit(sweep, profile, file, work):
        content = f"{len(submission.indices)} cells" if submission.indices else "report"
        message(f"{submission.stage}: job {submission.job}, {content}")
        # For scripts; on a terminal the line above has just said it.
        if not sys.stdout.isatty():
            print(submission.job)
    message(f"watch with: kl-comedy status {sweep.path}")


def _run_here(sweep: Sweep, work: Work, workers: int, finished_elsewhere: frozenset[int]) -> None:
    """Run cells on this machine until they end. Raises :class:`RunFailed` where some did not finish."""
    try:
        with sweep_progress(sweep, stderr_console()) as watch:
            local_runs.run_local(sweep, work, workers, message, watch)
    except KeyboardInterrupt:
        raise RunFailed(f"stopped; resume with: kl-comedy resubmit {sweep.path}") from None
    sweep_status = read_status(sweep)
    _print_results(sweep, sweep_status)
    unfinished = 0
    for row in sweep_status.rows:
        if row.state != "FINISHED" and row.cell not in finished_elsewhere:
            unfinished += 1
    if unfinished:
        raise RunFailed(
            f"{unfinished} of {len(sweep.manifest.cells)} cells did not finish; "
            f"see: kl-comedy status {sweep.path}; then: kl-comedy resubmit {sweep.path}"
        )


def _print_results(sweep: Sweep, sweep_status: SweepStatus) -> None:
    """Print the table of the sweep's report, and where the report is."""
    message(sweep_status.summary())
    table = seeds_table(sweep, sweep_status)
    if table is not None:
        print_frame(table)
    # The page with figures where a store has the runs, else the page of tables.
    for name in ("report.html", "report.md"):
        page = sweep.path / "report" / name
        if page.is_file():
            message(f"report: {page}")
            return


def _last_place(sweep: Sweep) -> Place:
    """Where the last submission ran. Raises :class:`UserError` where that is not known."""
    submissions = sweep.submissions()
    # From the newest; adopted jobs have neither a profile nor workers.
    for submission in reversed(submissions):
        if submission.profile is not None or submission.workers is not None:
            return Place(slurm=submission.profile, workers=submission.workers)
    if submissions:
        raise UserError("the profile of this sweep's submission was not recorded; name it: --slurm PROFILE")
    raise UserError("this sweep never ran; say where: --slurm PROFILE or --local N")


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices)) or "none"


# --- output ----------------------------------------------------------------------------------------------------------


def _print_plan(sweep: Sweep, profile: Profile | None, format: str) -> None:
    """The exact scripts and the table of cells, on stdout."""
    cells = sweep.manifest.cells
    texts: Mapping[str, str] = {}
    commands: Sequence[str] = []
    if profile is not None:
        texts = scripts(sweep, profile, cells)
        commands = submit.planned_commands(sweep, profile)
    if format == "json":
        rows = [{**asdict(cell), "command": sweep.command(cell)} for cell in cells]
        plan = {"name": sweep.manifest.name, "scripts": texts, "commands": commands, "cells": rows}
        print(json.dumps(plan, indent=1))
        return
    for name, text in texts.items():
        print(f"### {name}.sbatch\n{text}")
    for command in commands:
        print(f"$ {command}")
    stdout_console().print(_cells_table(sweep))


def _cells_table(sweep: Sweep) -> Table:
    """One row per cell, with a column for each key of the grid; sizes where they differ."""
    cells = sweep.manifest.cells
    # A dict and not a set: in the order of the grid.
    keys: dict[str, None] = {}
    for cell in cells:
        keys |= dict.fromkeys(cell.values)
    # A column that says the same in every row is left out.
    sizes_differ = len({cell.size for cell in cells}) > 1
    columns = ["cell", "name", "seed", "updates"]
    if sizes_differ:
        columns.append("nodes x processes")
    table = plain_table(*columns, *keys, title=f"{sweep.path}: {len(cells)} cells")
    for cell in cells:
        texts = [str(cell.index), cell.name, str(cell.seed), str(cell.steps)]
        if sizes_differ:
            nodes, processes = cell.size
            texts.append(f"{nodes} x {processes}")
        texts += [cell.values.get(key, "") for key in keys]
        table.add_row(*texts)
    return table


def _read_status(sweep: Sweep) -> SweepStatus:
    """The state of every cell; prints what could not be found out."""
    sweep_status = read_status(sweep)
    for note in sweep_status.notes:
        message(f"note: {note}")
    return sweep_status
