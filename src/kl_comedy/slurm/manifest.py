"""The manifest: what a sweep is, frozen in one JSON file, and the folder it lives in.

    sweeps/NAME/  manifest.json  base.yaml  *.sbatch  submissions.jsonl  cells/  logs/  runs/  evaluations/  report/

Every cell is the base file plus overrides, and its config hash. It is written once: planning the same grid again
finds it unchanged, planning another one under its name is refused.

From a grid to a manifest: every cell's config is loaded and checked now, so that no job dies of a typo.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import kl_comedy
from kl_comedy.config import Config, config_hash, config_reader
from kl_comedy.errors import UserError, bad_value, nearest
from kl_comedy.kl import resolve_terms
from kl_comedy.objective import PolicyTerm, check_policy_term
from kl_comedy.slurm.grid import RESERVED, Grid, Point, expand, override

VERSION = 1
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
        """As it is written. A cell of one process says nothing of its size, as before there were others."""
        whole = asdict(self)
        for cell in whole["cells"]:
            for key in ("nodes", "devices"):
                if cell[key] == 1:
                    del cell[key]
        return whole


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

    def evaluation(self, index: int) -> Path:
        return self.path / "evaluations" / f"{index:05d}.json"

    def records(self, index: int) -> Path:
        """What suites drew of a cell, sample by sample."""
        return self.path / "evaluations" / f"{index:05d}"

    def cell(self, index: int) -> Cell:
        if not 0 <= index < len(self.manifest.cells):
            raise bad_value("cell", index, f"0 to {len(self.manifest.cells) - 1}")
        return self.manifest.cells[index]

    def overrides(self, cell: Cell) -> list[str]:
        """The cell's overrides and where the sweep keeps it; the latter is no part of the config hash."""
        from kl_comedy.slurm.grid import override

        return [
            *cell.overrides,
            override("output", str(self.runs)),
            "resume=auto",
            override("tracking.tags.sweep", self.manifest.name),
            override("tracking.tags.cell", str(cell.index)),
        ]

    def command(self, cell: Cell) -> str:
        """What a person types to train this cell alone."""
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
        draft = sweep.path / f".{FILE}.tmp"
        draft.write_text(text + "\n")
        draft.replace(sweep.path / FILE)
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
    for one, other in zip(old.cells, new.cells, strict=True):
        if one != other:
            return (
                f"cell {one.index} is {one.name} seed {one.seed} there and {other.name} seed {other.seed} now"
                if (one.name, one.seed) != (other.name, other.seed)
                else f"cell {one.index} has other settings"
            )
    keys = [key for key in asdict(old) if getattr(old, key) != getattr(new, key)]
    return f"another {', '.join(keys)}"


Reader = Callable[[Sequence[str]], Config]


def plan(grid: Grid, *, directory: Path, plugins: Sequence[Path] = (), extra: Sequence[str] = ()) -> Manifest:
    """Check every cell and freeze them. ``extra``: ``key=value`` for every cell, from the command line.

    The rooms must have been imported and the plugins loaded, since configs name their parts. Raises
    :class:`UserError` naming the cell for any mistake, and for two cells that are the same run.
    """
    from kl_comedy.tracking.store import check_uri

    for text in extra:
        if (key := text.partition("=")[0]) in {*grid.axes, *RESERVED, *(["seed"] if grid.seeds else [])}:
            raise UserError(f"{text}: {key} is set by the sweep, cell by cell")
    read = config_reader(grid.base)
    common = [*_overrides(grid.overrides.items()), *extra]
    cells: list[Cell] = []
    seen: dict[str, Cell] = {}
    stores: dict[tuple[str, str], None] = {}
    for point, overrides, config in _configs(expand(grid), common, read):
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
        twin = seen.setdefault(config_hash(dataclasses.replace(config, name="")), cell)
        if twin is not cell:
            raise UserError(
                f"cells {twin.index} ({twin.name}) and {cell.index} ({cell.name}) are the same run, seed {cell.seed}"
            )
        cells.append(cell)
        stores[(check_uri(config.tracking.uri), config.tracking.experiment)] = None
    if grid.evaluate is not None:
        _try(read, [*cells[0].overrides, *_overrides(grid.evaluate.items())], "evaluate")
    content = grid.base.read_bytes()
    return Manifest(
        name=grid.name,
        directory=str(directory.resolve()),
        base=str(grid.base),
        base_sha256=hashlib.sha256(content).hexdigest(),
        plugins=tuple(str(file.resolve()) for file in plugins),
        evaluate=None if grid.evaluate is None else tuple(_overrides(grid.evaluate.items())),
        max_parallel=grid.max_parallel,
        stores=tuple(stores),
        package_version=kl_comedy.__version__,
        cells=tuple(cells),
    )


def _configs(points: Sequence[Point], common: Sequence[str], read: Reader) -> Iterator[tuple[Point, list[str], Config]]:
    """Each point with its overrides and checked config; points that differ in the seed alone are loaded once."""
    loaded: dict[tuple[str, ...], Config] = {}
    for index, point in enumerate(points):
        settings = sorted(point.settings.items(), key=lambda item: item[0].count("."))
        overrides = [*common, override("name", point.label), *_overrides(settings)]
        key = tuple(overrides)
        if key not in loaded:
            loaded[key] = _try(read, overrides, f"cell {index} ({point.label})")
        config = loaded[key]
        if point.seed is not None:
            overrides.append(override("seed", point.seed))
            config = dataclasses.replace(config, seed=point.seed)
        yield point, overrides, config


def _try(read: Reader, overrides: Sequence[str], where: str) -> Config:
    try:
        config = read(overrides)
        resolve_terms(config.kl)
        check_policy_term(PolicyTerm.of(config.algorithm))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return config


def _overrides(settings: Iterable[tuple[str, object]]) -> list[str]:
    return [override(key, raw) for key, raw in settings]
