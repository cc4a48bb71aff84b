"""A sweep's folder: the manifest, frozen in one JSON file, its cells, and the journal of submissions and attempts.

    sweeps/NAME/             manifest.json  plugins/  *.sbatch  submissions.jsonl  logs/  report/
    sweeps/NAME/cells/0007/  config.yaml  attempts.jsonl  run/  evaluation.json  evaluation/

A cell trains its own config.yaml, which was resolved and checked when the sweep was planned: no job dies of a typo, and
all cells train what was planned, whenever they start. The manifest and the configs are written once: planning the same
grid again leaves them unchanged, planning another one under its name is refused. A line of a journal is one ``write``,
so that concurrent writers do not tear each other's; a line cut by a kill is skipped and counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import kl_comedy
from kl_comedy.config import Config, config_reader, stored_text
from kl_comedy.config.load import differing_keys, identity, stored_reader
from kl_comedy.config.validate import parse_record
from kl_comedy.errors import REQUEUE_EXIT_CODE, UserError, bad_value, error_prefix, nearest
from kl_comedy.io import (
    atomic_write,
    check_tree,
    decode_json,
    file_lock,
    json_line,
    open_file,
    read_json,
)
from kl_comedy.plugins import PACKAGES, PLUGIN_FILES, PluginPackage, PluginSet, listed, plugin_sources
from kl_comedy.slurm.grid import RESERVED, Grid, GridPoint, expand, override
from kl_comedy.training.run_plugins import (
    PLUGIN_FOLDER,
    PLUGINS,
    differing_plugins,
    plugins_of,
    stored_record,
    write_plugins,
)

T = TypeVar("T")
VERSION = 2
STAGES = ("train", "evaluate", "report")
FILE = "manifest.json"
CELLS = "cells"
CONFIG = "config.yaml"
ATTEMPTS = "attempts.jsonl"
EVALUATION = "evaluation.json"
SUBMISSIONS = "submissions.jsonl"
SUBMIT_LOCK = ".submit.lock"
"""Held while the sweep is written, and while its missing cells are submitted."""
SUBMIT_WAIT_S = 600.0
RESUMABLE_EXIT_CODES = (REQUEUE_EXIT_CODE, -signal.SIGUSR1)
"""Saved and asks to resume; or signalled before it had a handler, when there was nothing to save."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run, by its number. ``name`` is shared by its seeds; ``values`` are those of the grid, as texts.

    ``nodes`` and ``devices`` (processes on each) are its config's ``train.nodes`` and ``train.devices``.
    """

    index: int
    name: str
    seed: int
    steps: int
    values: Mapping[str, str]
    nodes: int = 1
    devices: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """Nodes, and processes on each."""
        return self.nodes, self.devices


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A planned sweep. Its fields are the keys of manifest.json."""

    name: str
    directory: str
    """Paths in configs are relative to it."""
    plugins: tuple[str, ...]
    """The files of ``--plugin``."""
    evaluate: tuple[str, ...] | None
    """Overrides of the evaluation of a cell; None: cells are not evaluated."""
    max_parallel: int | None
    stores: tuple[tuple[str, ...], ...]
    """Pairs of an MLflow uri and an experiment."""
    package_version: str
    cells: tuple[Cell, ...]

    @cached_property
    def digest(self) -> str:
        """sha256 (12 hex digits) of everything in it."""
        return hashlib.sha256(json.dumps(self.data(), sort_keys=True).encode()).hexdigest()[:12]

    def data(self) -> dict[str, Any]:
        """As written to the file."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A sweep that is not written yet."""

    manifest: Manifest
    configs: tuple[Config, ...]
    """That of each cell."""
    evaluation: Config | None
    """The config of the first cell under the overrides of the evaluation; None where cells are not evaluated."""
    plugins: PluginSet
    """What the cells are trained with: the files of ``--plugin``, and the packages whose parts the configs use."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Cells that were given to SLURM, or to a manager process on one machine (``kl-comedy sweep --local``)."""

    stage: str
    indices: tuple[int, ...]
    """The cells; empty for the report."""
    time: float
    """When, in seconds since the epoch."""
    job: str | None = None
    """SLURM's id of the array; None for a local manager."""
    offset: int = 0
    """The array's own index of a cell is the cell's index minus this."""
    profile: str | None = None
    process: Mapping[str, str] = field(default_factory=dict)
    """The tags of the local manager."""
    workers: int | None = None

    @property
    def local(self) -> bool:
        return self.job is None

    def task(self, index: int) -> str:
        """SLURM's name of a cell's array task."""
        return f"{self.job}_{index - self.offset}"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One process that worked on a cell."""

    stage: str
    started: float
    process: Mapping[str, str]
    node: str
    job: str | None = None
    restart: int = 0
    parent: str | None = None
    """The id of the process that started it, which is a local manager's."""
    ended: float | None = None
    code: int | None = None
    """Its exit code, or minus the number of the signal that killed it; None while unknown."""
    reason: str | None = None
    interrupted: bool = False
    """Whether Ctrl-C or SIGTERM ended it, and no fault."""

    @property
    def resumable(self) -> bool:
        """Whether it ended in order to be started again."""
        return self.code in RESUMABLE_EXIT_CODES

    def is_of(self, submission: Submission, index: int) -> bool:
        """Whether this attempt belongs to ``submission``: by job or manager, since the clocks of nodes may differ."""
        if submission.local:
            return self.job is None and self.parent == submission.process.get("process.pid")
        return self.job == submission.task(index)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A manifest and the folder it was written to."""

    path: Path
    manifest: Manifest
    unreadable: dict[str, int] = field(default_factory=dict, compare=False)
    """How many lines of each journal that was read were damaged."""

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def job_names(self) -> list[str]:
        """The names of its SLURM jobs."""
        return [f"{self.manifest.name}-{stage}" for stage in STAGES]

    def folder(self, index: int) -> Path:
        """The folder of a cell."""
        return self.path / CELLS / f"{index:04d}"

    def config(self, index: int) -> Path:
        """The config that a cell trains."""
        return self.folder(index) / CONFIG

    def run(self, index: int) -> Path:
        """The folder of a cell's run, which is there when the cell has begun."""
        return self.folder(index) / "run"

    def evaluation(self, index: int) -> Path:
        """The scores of a cell's evaluation job; the folder of the same name has every sample that suites drew."""
        return self.folder(index) / EVALUATION

    def cell(self, index: int) -> Cell:
        if not 0 <= index < len(self.manifest.cells):
            raise bad_value("cell", index, f"0 to {len(self.manifest.cells) - 1}")
        return self.manifest.cells[index]

    def placed(self, index: int, config: Config) -> Config:
        """The config of a cell, with its folder and the sweep's tags, which do not change what it trains."""
        tags = {**config.tracking.tags, "sweep": self.manifest.name, "cell": str(index)}
        return replace(
            config,
            # Absolute: a job starts in the sweep's working folder, and a user may be anywhere.
            output=str(self.folder(index)),
            resume="auto",
            tracking=replace(config.tracking, tags=tags),
        )

    def read_config(self, index: int) -> Config:
        """The config that a cell trains. Raises as :func:`kl_comedy.config.load.stored_reader`."""
        return stored_reader(self.config(index))([])

    def command(self, cell: Cell) -> str:
        """The command that trains this cell alone, or resumes it."""
        return shlex.join(["kl-comedy", "cell", str(self.path), str(cell.index)])

    def changed_plugins(self, now: PluginSet) -> str | None:
        """A message that names the sources of ``now`` that are not those of the plan; None if all are equal."""
        names = differing_plugins(self.path, now)
        if not names:
            return None
        return f"{listed(names)} changed since {self.path} was planned (the older source is in its folder plugins)"

    def loaded_plugins(self) -> PluginSet:
        """Its plugins as this process has loaded them."""
        packages = [PACKAGES.get(name) or PluginPackage.read(name) for name in self.package_names]
        files: Mapping[str, bytes] = {}
        # Without --plugin, files that this process loaded for something else are not the sweep's.
        if self.manifest.plugins:
            files = PLUGIN_FILES
        return PluginSet(files=files, packages=tuple(packages))

    def plugins_on_disk(self) -> PluginSet:
        """Its plugins as their files are now; without those that are gone. Nothing of them is imported."""
        sources: dict[str, bytes] = {}
        for name in self.manifest.plugins:
            file = Path(name)
            # A plugin that is gone counts as changed, by the name that is missing.
            if file.is_file():
                sources |= plugin_sources(file)
        return PluginSet(files=sources, packages=tuple(PluginPackage.read(name) for name in self.package_names))

    @property
    def package_names(self) -> list[str]:
        """The packages from outside whose parts its configs use."""
        record = stored_record(self.path)
        return [] if record is None else list(record.packages)

    def record_submission(self, submission: Submission) -> None:
        _append(self.path / SUBMISSIONS, asdict(submission))

    def submissions(self) -> list[Submission]:
        """Every submission, oldest first."""
        journal = self.path / SUBMISSIONS
        return self._records(Submission, self._read(journal), journal)

    def record_start(self, index: int, stage: str, process: Mapping[str, str]) -> None:
        """Record that this process starts on a cell; SLURM's ids are taken from the environment."""
        start = {
            "stage": stage,
            "started": time.time(),
            "process": dict(process),
            "parent": str(os.getppid()),
            "node": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
            "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        }
        job = os.environ.get("SLURM_JOB_ID")
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        if array and task:
            # SLURM_JOB_ID is another number for each task of an array, and squeue is asked for array and task.
            job = f"{array}_{task}"
        if job is not None:
            start["job"] = job
        _append(self._journal(index), start)

    def record_end(self, index: int, pid: str, code: int, reason: str | None, *, interrupted: bool = False) -> None:
        """Record how the attempt of process ``pid`` ended; the last record counts. The rest: see :class:`Attempt`."""
        if code < 0 and reason is None:
            reason = f"killed by {signal.Signals(-code).name}"
        row = {"pid": pid, "ended": time.time(), "code": code, "reason": reason}
        if interrupted:
            row["interrupted"] = True
        _append(self._journal(index), row)

    def attempts(self, index: int, stage: str = "train") -> list[Attempt]:
        """The attempts at a cell, oldest first, each with its end where there is one."""
        journal = self._journal(index)
        starts: list[dict[str, Any]] = []
        for row in self._read(journal):
            if "started" in row and isinstance(row.get("process"), dict):
                starts.append(row)
                continue
            pid = row.pop("pid", None)
            starts_of_process = [start for start in starts if start["process"].get("process.pid") == pid]
            if starts_of_process:
                # Process ids are used again: an end belongs to the newest start.
                starts_of_process[-1].update(row)
            else:
                # The line of its start is damaged.
                self.unreadable[str(journal)] += 1
        # Parsed whatever their stage, so that the count of damaged records does not depend on the question.
        return [attempt for attempt in self._records(Attempt, starts, journal) if attempt.stage == stage]

    def _journal(self, index: int) -> Path:
        return self.folder(index) / ATTEMPTS

    def _read(self, path: Path) -> list[dict[str, Any]]:
        """The rows of a journal; lines that cannot be read are counted."""
        if not path.is_file():
            self.unreadable[str(path)] = 0
            return []
        # A journal is created for its first line: an empty one has lost it.
        lines = path.read_bytes().splitlines() or [b""]
        rows = []
        for line in lines:
            with contextlib.suppress(ValueError):
                row = decode_json(line)
                if row.keys() & {"stage", "pid"}:
                    rows.append(row)
        self.unreadable[str(path)] = len(lines) - len(rows)
        return rows

    def _records(self, schema: type[T], rows: Sequence[dict[str, Any]], path: Path) -> list[T]:
        records = []
        for row in rows:
            with contextlib.suppress(UserError):
                records.append(parse_record(schema, row))
        self.unreadable[f"{path}, of {schema.__name__.lower()}s,"] = len(rows) - len(records)
        return records


def _append(path: Path, row: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    # Unbuffered: the line is one write, which O_APPEND does not let another process interrupt.
    with open(open_file(path, flags, link=False), "ab", buffering=0) as file:
        file.write(json_line(row))


def write_sweep(folder: Path, plan: Plan) -> Sweep:
    """Write the manifest and the configs once. The same ones again are fine; others in the same folder are refused."""
    sweep = Sweep(path=folder.resolve(), manifest=plan.manifest)
    try:
        # Two that are planned at the same moment would both find no manifest, and run their cells in one folder.
        with file_lock(sweep.path / SUBMIT_LOCK, wait_s=SUBMIT_WAIT_S):
            if (sweep.path / FILE).exists():
                _check_same(folder, read_sweep(sweep.path), sweep, plan)
            else:
                _write_files(sweep, plan)
    except OSError as error:
        raise UserError(f"--output: cannot write {folder}: {error.strerror}") from None
    return sweep


def _check_same(folder: Path, old: Sweep, new: Sweep, plan: Plan) -> None:
    """Raise :class:`UserError` where ``folder`` has a manifest or a config that differs from the ``new`` ones."""
    difference = None
    if old.manifest.digest != new.manifest.digest:
        difference = _difference(old.manifest, new.manifest)
    else:
        for index, config in enumerate(plan.configs):
            # By its text first: reading a thousand configs takes a minute.
            file = old.config(index)
            text = stored_text(new.placed(index, config)).encode()
            if file.is_file() and file.read_bytes().endswith(b"\n" + text):
                continue
            keys = differing_keys(old.read_config(index), config)
            if keys:
                difference = f"cell {index} has another {', '.join(keys)}"
                break
    if difference is not None:
        raise UserError(
            f"{folder} holds another sweep of this name ({difference}); "
            "give the grid another name, or --output another folder"
        )


def _write_files(sweep: Sweep, plan: Plan) -> None:
    sweep.logs.mkdir(parents=True, exist_ok=True)
    for index, config in enumerate(plan.configs):
        sweep.folder(index).mkdir(parents=True, exist_ok=True)
        atomic_write(sweep.config(index), stored_text(sweep.placed(index, config)), private=True)
    write_plugins(sweep.path, plan.plugins)
    # Written last: a folder without a manifest is not yet a sweep, and planning again writes all of it.
    manifest = sweep.manifest
    text = json.dumps({"version": VERSION, "digest": manifest.digest, **manifest.data()}, indent=1)
    atomic_write(sweep.path / FILE, text + "\n", private=True)


def read_sweep(path: Path) -> Sweep:
    """A sweep's folder, or its name under sweeps/. Raises :class:`UserError` where it cannot be read."""
    folder = _find_sweep(path)
    check_tree(folder, (FILE, SUBMISSIONS, SUBMIT_LOCK, PLUGINS), ("logs", PLUGIN_FOLDER, "report"))
    file = folder / FILE
    try:
        data = read_json(file, "manifest")
    except UserError as error:
        raise UserError(f"{error}; plan the sweep again in another folder") from None
    version = data.pop("version", None)
    digest = data.pop("digest", None)
    if version != VERSION:
        raise bad_value(f"{file}: version", version, str(VERSION), "it was written by another version of kl_comedy")
    # The digest is that of the parsed fields: the layout of the file does not count.
    manifest = parse_record(Manifest, data, origin=str(file))
    if manifest.digest != digest:
        raise UserError(f"{file} was changed by hand; a manifest is written once: plan another sweep instead")
    sweep = Sweep(path=folder.resolve(), manifest=manifest)
    # Not the runs: each is checked by who reads it.
    for cell in manifest.cells:
        check_tree(sweep.folder(cell.index), (CONFIG, ATTEMPTS, EVALUATION), ("evaluation",))
    return sweep


def _find_sweep(path: Path) -> Path:
    """The folder ``path``, or sweeps/``path``. Raises :class:`UserError` that names the sweeps that there are."""
    # The path first: a sweep of the same name may be in the current folder.
    for folder in (path, Path("sweeps") / path):
        if (folder / FILE).is_file():
            return folder
    names = [file.parent.name for file in sorted(Path("sweeps").glob(f"*/{FILE}"))]
    near = nearest(path.name, names)
    hint = ""
    if near:
        hint = f"; did you mean {near!r}?"
    elif names:
        hint = f"; there are: {', '.join(names)}"
    else:
        hint = "; `kl-comedy sweep GRID` makes one, in sweeps/"
    raise UserError(f"no sweep at {path}{hint}")


def _difference(old: Manifest, new: Manifest) -> str:
    """What distinguishes two manifests: the first cell that differs, else the names of the fields."""
    # Before they are compared one by one: an index names another cell when one was inserted.
    if len(old.cells) != len(new.cells):
        return f"{len(old.cells)} cells there, {len(new.cells)} planned now"
    for before, now in zip(old.cells, new.cells, strict=True):
        if before.name != now.name:
            return f"cell {now.index} is {before.name} there and {now.name} now"
        for key in asdict(now):
            if getattr(before, key) != getattr(now, key):
                return f"cell {now.index} has another {key}: {getattr(before, key)} there, {getattr(now, key)} now"
    names = [key for key in asdict(old) if getattr(old, key) != getattr(new, key)]
    return f"another {', '.join(names)}"


# --- planning --------------------------------------------------------------------------------------------------------


class _CheckedConfigs:
    """The configs of a sweep: the base file with overrides, each loaded and checked once."""

    def __init__(self, base: Path) -> None:
        self.packages: dict[str, PluginPackage] = {}
        """The packages from outside whose parts the configs use that have been loaded so far."""
        self._read = config_reader(base)
        self._configs: dict[tuple[str, ...], Config] = {}

    def load(self, overrides: tuple[str, ...]) -> Config:
        """The config of ``overrides``. Raises :class:`UserError` for any mistake in it."""
        if overrides not in self._configs:
            config = self._read(overrides)
            # Imported after the config was read: a typo in it is refused before torch is imported.
            from kl_comedy.training.build import build_run

            build_run(config)
            for package in plugins_of(config).packages:
                self.packages[package.name] = package
            self._configs[overrides] = config
        return self._configs[overrides]


def plan(grid: Grid, *, directory: Path, plugins: Sequence[Path] = (), extra: Sequence[str] = ()) -> Plan:
    """Resolve and check the config of every cell. ``extra``: ``key=value`` for every cell, from the command line.

    The plugins must have been loaded. Raises :class:`UserError` naming the cell for any mistake, and for two cells
    that are the same run.
    """
    from kl_comedy.tracking.store import check_uri

    _check_extra(grid, extra)
    checked = _CheckedConfigs(Path(grid.base))
    common = (*_overrides(grid.overrides), *extra)
    cells: list[Cell] = []
    configs: list[Config] = []
    cells_by_run: dict[str, Cell] = {}
    # A dict and not a set: the order of the stores is part of the digest.
    stores: dict[tuple[str, str], None] = {}
    for index, point in enumerate(expand(grid)):
        cell, config = _plan_cell(index, point, common, checked)
        # Without its name, a config is what the run does: two names for one run would train it twice.
        run = json.dumps(identity(replace(config, name="")))
        if run in cells_by_run:
            twin = cells_by_run[run]
            names = f"{twin.index} ({twin.name}) and {cell.index} ({cell.name})"
            raise UserError(f"cells {names} are the same run, seed {cell.seed}")
        cells_by_run[run] = cell
        cells.append(cell)
        configs.append(config)
        stores[check_uri(config.tracking.uri), config.tracking.experiment] = None

    # An evaluation is checked with one cell: what differs between cells was checked above.
    evaluate = None
    evaluation = None
    if grid.evaluate is not None:
        evaluate = tuple(_overrides(grid.evaluate))
        first = next(iter(expand(grid)))
        # A mistake in them is the same in every cell.
        with error_prefix("evaluate"):
            evaluation = checked.load((*_cell_overrides(first, common), *evaluate))
    manifest = Manifest(
        name=grid.name,
        directory=str(directory.resolve()),
        # Absolute, since jobs load them from other folders.
        plugins=tuple(str(file.resolve()) for file in plugins),
        evaluate=evaluate,
        max_parallel=grid.max_parallel,
        stores=tuple(stores),
        package_version=kl_comedy.__version__,
        cells=tuple(cells),
    )
    # Without --plugin, files that this process loaded for something else are not the sweep's.
    files = dict(PLUGIN_FILES) if plugins else {}
    used = PluginSet(files=files, packages=tuple(checked.packages[name] for name in sorted(checked.packages)))
    return Plan(manifest=manifest, configs=tuple(configs), evaluation=evaluation, plugins=used)


def _check_extra(grid: Grid, extra: Sequence[str]) -> None:
    set_by_sweep = {*grid.axes, *RESERVED}
    if grid.seeds:
        set_by_sweep.add("seed")
    for text in extra:
        key = text.partition("=")[0]
        if key in set_by_sweep:
            raise UserError(f"{text}: {key} is set by the sweep, cell by cell")


def _cell_overrides(point: GridPoint, common: tuple[str, ...]) -> tuple[str, ...]:
    """What makes a cell's config of the base, but for its seed. ``common`` are the overrides of every cell."""
    # Short keys first: kl.0.beta changes a list that kl sets.
    settings = dict(sorted(point.settings.items(), key=lambda item: item[0].count(".")))
    return (*common, override("name", point.label), *_overrides(settings))


def _plan_cell(index: int, point: GridPoint, common: tuple[str, ...], checked: _CheckedConfigs) -> tuple[Cell, Config]:
    """A point as a cell, and its config."""
    with error_prefix(f"cell {index} ({point.label})"):
        config = checked.load(_cell_overrides(point, common))
    if point.seed is not None:
        # After the config was loaded: cells that differ in their seed alone are loaded once.
        config = replace(config, seed=point.seed)
    cell = Cell(
        index=index,
        name=config.name,
        seed=config.seed,
        steps=config.train.steps,
        values=dict(point.values),
        nodes=config.train.nodes,
        devices=config.train.devices,
    )
    return cell, config


def _overrides(settings: Mapping[str, Any]) -> list[str]:
    return [override(key, raw) for key, raw in settings.items()]
