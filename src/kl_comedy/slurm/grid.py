"""A grid file: which cells a sweep has. Pure: YAML data in, points out; configs are checked by the plan.

name: pocket_beta
base: ../quickstart.yaml            # beside this file
overrides: {train.steps: 60}        # in every cell
grid:                               # the product of all of these
  kl: {k1-reward: [{estimator: k1, placement: reward, beta: 0.05}], grpo: grpo}
  optimizer.lr: [1e-4, 3e-4]
  kl.0.beta: {from: 0.01, to: 1, log: 3}
seeds: 5                            # 0..4, or a list
exclude: [{kl: grpo, optimizer.lr: 3e-4}]
rows: {no-kl: {kl: none}}           # single points beside the product, each with all seeds
evaluate: {eval.samples: 8}         # a dependent evaluation of every cell
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_comedy.errors import UserError, bad_value, nearest, unknown_key
from kl_comedy.slurm.values import Value, clean, label_of, short_keys, text_of, values_of

KEYS = ("name", "base", "overrides", "grid", "seeds", "exclude", "rows", "evaluate", "max_parallel")
RESERVED = {
    "name": "a cell is named by the sweep",
    "output": "the sweep keeps its runs together",
    "resume": "a cell always goes on where it was",
}
MOST_CELLS = 100_000


@dataclass(frozen=True, kw_only=True)
class Point:
    """One configuration to run with one seed (None: the base's). ``values``: key to the value's label."""

    label: str
    seed: int | None
    settings: Mapping[str, Any]
    values: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A grid file as read: shapes and names are checked, keys and values of configs are not yet."""

    name: str
    base: Path
    overrides: Mapping[str, Any]
    axes: Mapping[str, tuple[Value, ...]]
    seeds: tuple[int, ...] | None
    exclude: tuple[Mapping[str, Any], ...]
    rows: Mapping[str, Mapping[str, Any]]
    evaluate: Mapping[str, Any] | None
    max_parallel: int | None


def read_grid(path: Path) -> Grid:
    """Read a grid file. Raises :class:`UserError` naming the key at fault and the nearest right name."""
    raw = read_yaml(path, "grid")
    for key, item in raw.items():
        if key not in KEYS:
            raise unknown_key(str(key), item, KEYS)
    if "base" not in raw:
        raise UserError(f"{path}: needs base, the config that every cell starts from")
    if not isinstance(raw["base"], str):
        raise bad_value("base", raw["base"], "the path of one config file")
    name = str(raw.get("name", path.stem))
    if clean(name) != name:
        raise bad_value("name", name, "letters, digits, '.', '_' and '-', since it names a folder")
    axes = {str(key): values_of(str(key), item) for key, item in _mapping(raw, "grid").items()}
    rows = {str(key): dict(_mapping(_mapping(raw, "rows"), key, "rows.")) for key in _mapping(raw, "rows")}
    grid = Grid(
        name=name,
        base=(path.parent / str(raw["base"])).resolve(),
        overrides=_mapping(raw, "overrides"),
        axes=axes,
        seeds=_seeds(raw.get("seeds")),
        exclude=_exclusions(raw.get("exclude"), axes),
        rows=rows,
        evaluate=_mapping(raw, "evaluate") if "evaluate" in raw else None,
        max_parallel=raw.get("max_parallel"),
    )
    _check(grid)
    return grid


def expand(grid: Grid) -> list[Point]:
    """Every point, in the order of the file: the product without what is excluded, then the rows.

    Raises :class:`UserError` for an exclusion that excludes nothing and for a grid without points.
    """
    count = math.prod(len(values) for values in grid.axes.values()) * len(grid.seeds or (0,))
    if count > MOST_CELLS:
        raise bad_value("grid", f"{count} cells", f"at most {MOST_CELLS} cells")
    used = [0] * len(grid.exclude)
    points = []
    for chosen, seed in itertools.product(_product(grid), grid.seeds or (None,)):
        hits = [n for n, rule in enumerate(grid.exclude) if _matches(rule, chosen, seed)]
        for position in hits:
            used[position] += 1
        if not hits:
            points.append((chosen, seed))
    for rule, times in zip(grid.exclude, used, strict=True):
        if not times:
            raise UserError(f"exclude: {dict(rule)} matches no cell of the grid")
    named = _named(grid, points)
    for name in grid.rows:
        if any(point.label == name for point in named):
            raise UserError(f"rows.{name}: a cell of the grid is called {name} too; choose another name")
    named += _row_points(grid)
    if not named:
        raise UserError("the grid has no cells: everything is excluded")
    return named


def read_yaml(path: Path, kind: str) -> dict[str, Any]:
    """A YAML mapping. Raises :class:`UserError` with the nearest file name, or what is wrong with the text."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if path.is_dir():
        raise UserError(f"{path} is a folder; a {kind} is a file")
    if not path.is_file():
        others = [str(file) for file in sorted(path.parent.glob("*.y*ml"))] if path.parent.is_dir() else []
        near = nearest(str(path), others)
        hint = f"; did you mean {near}?" if near else (f"; there are: {', '.join(others)}" if others else "")
        raise UserError(f"no such {kind} file: {path}{hint}")
    try:
        plain = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(plain, dict):
        raise UserError(f"{path}: a {kind} is a mapping of keys to values, and this file holds a list")
    return {str(key): item for key, item in plain.items()}


def _product(grid: Grid) -> Iterator[dict[str, Value]]:
    if not grid.axes and grid.rows:
        return
    for combination in itertools.product(*grid.axes.values()):
        yield dict(zip(grid.axes, combination, strict=True))


def _named(grid: Grid, points: list[tuple[dict[str, Value], int | None]]) -> list[Point]:
    """Points with labels: equal settings share one, different settings never do."""
    short = short_keys(list(grid.axes))
    taken: dict[str, dict[str, Value]] = {}
    found = []
    for chosen, seed in points:
        labels = [label_of(key, value, short[key]) for key, value in chosen.items() if len(grid.axes[key]) > 1]
        values = {key: value.label or text_of(value.raw) for key, value in chosen.items()}
        base = "-".join(labels) or grid.name
        label, number = base, 1
        while taken.setdefault(label, chosen) != chosen:
            number += 1
            label = f"{base}-{number}"
        settings = {key: value.raw for key, value in chosen.items()}
        found.append(Point(label=label, seed=seed, settings=settings, values=values))
    return found


def _row_points(grid: Grid) -> Iterator[Point]:
    for name, settings in grid.rows.items():
        seeds = (None,) if "seed" in settings or grid.seeds is None else grid.seeds
        for seed in seeds:
            yield Point(label=name, seed=seed, settings=settings, values={"row": name})


def _matches(rule: Mapping[str, Any], chosen: Mapping[str, Value], seed: int | None) -> bool:
    for key, wanted in rule.items():
        value = chosen[key] if key in chosen else Value(raw=seed)
        options = wanted if isinstance(wanted, list) else [wanted]
        if not any(value.label == option or value.raw == option for option in options) and value.raw != wanted:
            return False
    return True


def _seeds(given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
        return tuple(range(given))
    whole = isinstance(given, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in given)
    if whole and given and len(set(given)) == len(given):
        return tuple(given)
    raise bad_value("seeds", given, "how many (at least 1), or a list of different whole numbers")


def _exclusions(given: Any, axes: Mapping[str, tuple[Value, ...]]) -> tuple[Mapping[str, Any], ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(rule, dict) and rule for rule in given):
        raise bad_value("exclude", given, "a list of mappings, as in [{kl: grpo, optimizer.lr: 1e-4}]")
    for position, rule in enumerate(given):
        for key in rule:
            if key not in axes and key != "seed":
                raise bad_value(f"exclude.{position}", key, [*axes, "seed"], "an exclusion names keys of the grid")
    return tuple(given)


def _mapping(raw: Mapping[str, Any], key: str, prefix: str = "") -> dict[str, Any]:
    item = raw.get(key)
    if item is None:
        return {}
    if not isinstance(item, dict):
        raise bad_value(f"{prefix}{key}", item, "a mapping of config keys to values")
    return {str(name): value for name, value in item.items()}


def _check(grid: Grid) -> None:
    for place, keys in (("overrides", grid.overrides), ("grid", grid.axes), *((f"rows.{n}", r) for n, r in
                        grid.rows.items())):  # fmt: skip
        for key in keys:
            if key in RESERVED:
                raise UserError(f"{place}.{key}: is not yours to set in a sweep: {RESERVED[key]}")
    if grid.seeds is not None and ("seed" in grid.axes or "seed" in grid.overrides):
        raise UserError("seed: is set twice, by seeds and as a key; keep one")
    for name in grid.rows:
        if clean(name) != name:
            raise bad_value("rows", name, "names of letters, digits, '.', '_' and '-'")
    limit = grid.max_parallel
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise bad_value("max_parallel", limit, "a whole number of at least 1")
