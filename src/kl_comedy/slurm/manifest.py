"""The manifest: what a sweep is, frozen in one JSON file, and the folder it lives in.

    sweeps/NAME/  manifest.json  base.yaml  *.sbatch  submissions.jsonl  cells/  logs/  runs/  evaluations/  report/

Every cell is the base file plus overrides, and its config hash. Every config is loaded and checked when the sweep is
planned, so that no job dies of a typo. The manifest is written once: planning the same grid again leaves it unchanged,
planning another one under its name is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import kl_comedy
from kl_comedy.config import Config, config_hash, config_reader
from kl_comedy.errors import UserError, bad_value, nearest
from kl_comedy.io import atomic_write, sha256_file
from kl_comedy.kl import resolve_terms
from kl_comedy.objective import PolicyTerm, check_policy_term
from kl_comedy.slurm.grid import RESERVED, Grid, expand, override

VERSION = 1
STAGES = ("train", "evaluate", "report")
FILE = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: ``overrides`` on the base make a config with ``config_hash``. ``name`` is shared by its seeds.

    ``nodes`` and ``devices`` (processes on each) are its config's ``train.nodes`` and ``train.devices``.
    """

    index: int
    name: str
    seed: int
    steps: int
    config_hash: str
    values: Mapping[str, str]
    overrides: tuple[str, ...]
    nodes: int = 1
    devices: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """Nodes, and processes on each."""
        return self.nodes, self.devices

    @property
    def run_stem(self) -> str:
        """The name of its run's folder without the number at the end."""
        return f"{self.name}-{self.config_hash}"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A planned sweep. Paths in configs are relative to ``directory``; ``stores``: (MLflow uri, experiment) pairs."""

    name: str
    directory: str
    base: str
    base_sha256: str
    plugins: tuple[str, ...]
    evaluate: tuple[str, ...] | None
    max_parallel: int | None
    stores: tuple[tuple[str, str], ...]
    package_version: str
    cells: tuple[Cell, ...]

    @cached_property
    def digest(self) -> str:
        """sha256 (12 hex digits) of everything in it."""
        return hashlib.sha256(json.dumps(self.data(), sort_keys=True).encode()).hexdigest()[:12]

    def data(self) -> dict[str, Any]:
        """As written to the file. Sizes of 1 are left out, as in manifests written before cells had sizes."""
        data = asdict(self)
        for cell in data["cells"]:
            for key in ("nodes", "devices"):
                if cell[key] == 1:
                    del cell[key]
        return data


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A manifest and the folder it was written to."""

    path: Path
    manifest: Manifest

    @property
    def base(self) -> Path:
        return self.path / "base.yaml"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def job_names(self) -> list[str]:
        """The names of its SLURM jobs."""
        return [f"{self.manifest.name}-{stage}" for stage in STAGES]

    def evaluation(self, index: int) -> Path:
        """The scores of a cell's evaluation job."""
        return self.path / "evaluations" / f"{index:05d}.json"

    def records(self, index: int) -> Path:
        """The folder of every sample that suites drew of a cell."""
        return self.path / "evaluations" / f"{index:05d}"

    def cell(self, index: int) -> Cell:
        if not 0 <= index < len(self.manifest.cells):
            raise bad_value("cell", index, f"0 to {len(self.manifest.cells) - 1}")
        return self.manifest.cells[index]

    def overrides(self, cell: Cell) -> list[str]:
        """The cell's overrides, with its output folder and tags, which are not part of the config hash."""
        return [
            *cell.overrides,
            override("output", str(self.runs)),
            "resume=auto",
            override("tracking.tags.sweep", self.manifest.name),
            override("tracking.tags.cell", str(cell.index)),
        ]

    def command(self, cell: Cell) -> str:
        """The command that trains this cell alone."""
        plugins = [word for file in self.manifest.plugins for word in ("--plugin", file)]
        return shlex.join(["kl-comedy", "train", str(self.base), *self.overrides(cell), *plugins])


def write_sweep(folder: Path, manifest: Manifest, base_text: str) -> Sweep:
    """Write the manifest once. The same one again is fine; another one in the same folder is refused."""
    sweep = Sweep(path=folder.resolve(), manifest=manifest)
    if (sweep.path / FILE).exists():
        old = read_sweep(sweep.path).manifest
        if old.digest != manifest.digest:
            raise UserError(
                f"{folder} holds another sweep of this name ({_difference(old, manifest)}); "
                "give the grid another name, or --output another folder"
            )
        return sweep
    try:
        for name in ("cells", "logs", "runs", "evaluations"):
            (sweep.path / name).mkdir(parents=True, exist_ok=True)
        sweep.base.write_text(base_text)
        text = json.dumps({"version": VERSION, "digest": manifest.digest, **manifest.data()}, indent=1)
        atomic_write(sweep.path / FILE, text + "\n")
    except OSError as error:
        raise UserError(f"--output: cannot write {folder}: {error.strerror}") from None
    return sweep


def read_sweep(path: Path) -> Sweep:
    """A sweep's folder, or its name under sweeps/. Raises :class:`UserError` where it cannot be read."""
    folder = next((place for place in (path, Path("sweeps") / path) if (place / FILE).is_file()), None)
    if folder is None:
        others = [file.parent.name for file in sorted(Path("sweeps").glob(f"*/{FILE}"))]
        near = nearest(path.name, others)
        hint = f"; did you mean {near!r}?" if near else (f"; there are: {', '.join(others)}" if others else "")
        raise UserError(f"no sweep at {path}{hint}")
    file = folder / FILE
    try:
        data = json.loads(file.read_text())
        version = data.pop("version")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{file} is not a manifest; plan the sweep again in another folder") from None
    if version != VERSION:
        raise bad_value(f"{file}: version", version, str(VERSION), "it was written by another version of kl_comedy")
    digest = data.pop("digest", None)
    try:
        manifest = _manifest(data)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{file} is not a whole manifest; plan the sweep again in another folder") from None
    if manifest.digest != digest:
        raise UserError(f"{file} was changed by hand; a manifest is written once: plan another sweep instead")
    return Sweep(path=folder.resolve(), manifest=manifest)


def _manifest(data: dict[str, Any]) -> Manifest:
    cells = tuple(Cell(**{**cell, "overrides": tuple(cell["overrides"])}) for cell in data.pop("cells"))
    evaluate = data.pop("evaluate")
    return Manifest(
        cells=cells,
        evaluate=None if evaluate is None else tuple(evaluate),
        plugins=tuple(data.pop("plugins")),
        stores=tuple((uri, experiment) for uri, experiment in data.pop("stores")),
        **data,
    )


def _difference(old: Manifest, new: Manifest) -> str:
    if len(old.cells) != len(new.cells):
        return f"{len(old.cells)} cells there, {len(new.cells)} planned now"
    for before, now in zip(old.cells, new.cells, strict=True):
        if (before.name, before.seed) != (now.name, now.seed):
            return f"cell {now.index} is {before.name} seed {before.seed} there and {now.name} seed {now.seed} now"
        if before != now:
            return f"cell {now.index} has other settings"
    return f"another {', '.join(key for key in asdict(old) if getattr(old, key) != getattr(new, key))}"


def plan(grid: Grid, *, directory: Path, plugins: Sequence[Path] = (), extra: Sequence[str] = ()) -> Manifest:
    """Check every cell and write them down. ``extra``: ``key=value`` for every cell, from the command line.

    Plugins must have been loaded. Raises :class:`UserError` naming the cell for any mistake, and for two cells that
    are the same run.
    """
    from kl_comedy.tracking.store import check_uri

    for text in extra:
        if (key := text.partition("=")[0]) in {*grid.axes, *RESERVED, *(["seed"] if grid.seeds else [])}:
            raise UserError(f"{text}: {key} is set by the sweep, cell by cell")
    read = config_reader(grid.base)
    common = [*_overrides(grid.overrides), *extra]
    cells: list[Cell] = []
    by_hash: dict[str, Cell] = {}
    stores: dict[tuple[str, str], None] = {}
    loaded: dict[tuple[str, ...], Config] = {}
    for point in expand(grid):
        settings = dict(sorted(point.settings.items(), key=lambda item: item[0].count(".")))
        overrides = [*common, override("name", point.label), *_overrides(settings)]
        key_of_config = tuple(overrides)
        if key_of_config not in loaded:  # points that differ in the seed alone are loaded once
            loaded[key_of_config] = _load(read, overrides, f"cell {len(cells)} ({point.label})")
        config = loaded[key_of_config]
        if point.seed is not None:
            overrides.append(override("seed", point.seed))
            config = dataclasses.replace(config, seed=point.seed)
        cell = Cell(
            index=len(cells),
            name=config.name,
            seed=config.seed,
            steps=config.train.steps,
            config_hash=config_hash(config),
            values=dict(point.values),
            overrides=tuple(overrides),
            nodes=config.train.nodes,
            devices=config.train.devices,
        )
        same = by_hash.setdefault(config_hash(dataclasses.replace(config, name="")), cell)
        if same is not cell:
            raise UserError(
                f"cells {same.index} ({same.name}) and {cell.index} ({cell.name}) are the same run, seed {cell.seed}"
            )
        cells.append(cell)
        stores[(check_uri(config.tracking.uri), config.tracking.experiment)] = None
    if grid.evaluate is not None:
        _load(read, [*cells[0].overrides, *_overrides(grid.evaluate)], "evaluate")
    return Manifest(
        name=grid.name,
        directory=str(directory.resolve()),
        base=str(grid.base),
        base_sha256=sha256_file(grid.base),
        plugins=tuple(str(file.resolve()) for file in plugins),
        evaluate=None if grid.evaluate is None else tuple(_overrides(grid.evaluate)),
        max_parallel=grid.max_parallel,
        stores=tuple(stores),
        package_version=kl_comedy.__version__,
        cells=tuple(cells),
    )


def _load(read: Callable[[Sequence[str]], Config], overrides: Sequence[str], where: str) -> Config:
    try:
        config = read(overrides)
        resolve_terms(config.kl)
        check_policy_term(PolicyTerm.of(config.algorithm))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return config


def _overrides(settings: Mapping[str, Any]) -> list[str]:
    return [override(key, raw) for key, raw in settings.items()]
