"""From a grid to a manifest: every cell's config is loaded and checked now, so that no job dies of a typo."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import kl_comedy
from kl_comedy.config import Config, config_hash, config_reader
from kl_comedy.errors import UserError
from kl_comedy.kl import resolve_terms
from kl_comedy.objective import PolicyTerm, check_policy_term
from kl_comedy.slurm.grid import RESERVED, Grid, Point, expand
from kl_comedy.slurm.manifest import Cell, Manifest
from kl_comedy.slurm.values import override

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
            index=len(cells), name=config.name, seed=config.seed, steps=config.train.steps,
            config_hash=config_hash(config), values=dict(point.values), overrides=tuple(overrides),
            nodes=config.train.nodes, devices=config.train.devices,
        )  # fmt: skip
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
        name=grid.name, directory=str(directory.resolve()), base=str(grid.base),
        base_sha256=hashlib.sha256(content).hexdigest(), plugins=tuple(str(file.resolve()) for file in plugins),
        evaluate=None if grid.evaluate is None else tuple(_overrides(grid.evaluate.items())),
        max_parallel=grid.max_parallel, stores=tuple(stores), package_version=kl_comedy.__version__, cells=tuple(cells),
    )  # fmt: skip


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
