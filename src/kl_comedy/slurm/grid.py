"""A grid file: which configurations a sweep runs. YAML in, points out; configs are checked in manifest.py.

name: pocket_beta
base: ../quickstart.yaml            # relative to this file, or a name of `kl-comedy list configs`
overrides: {train.steps: 60}        # in every cell
grid:                               # the product of these lists; a mapping gives its values names
  kl: {k1-reward: [{estimator: k1, placement: reward, beta: 0.05}], grpo: grpo}
  optimizer.lr: [1e-4, 3e-4]
seeds: 5                            # 0..4, or a list
exclude: [{kl: grpo, optimizer.lr: 3e-4}]
rows: {no-kl: {kl: none}}           # single points beside the product, each with all seeds
evaluate: {eval.samples: 8}         # a dependent evaluation of every cell
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kl_comedy.config.load import EXTENDS, parse_override, read_named_config
from kl_comedy.config.schema import Config
from kl_comedy.config.shipped import beside
from kl_comedy.config.validate import field_types, option, parse_record
from kl_comedy.errors import UserError, bad_value
from kl_comedy.io import MAX_NAME, read_yaml
from kl_comedy.redaction import refuse_secrets

MAX_CELLS = 100_000
"""The most cells of a grid, and the most seeds."""
RESERVED = ("name", "output", "resume")
"""Keys of a config that a sweep sets itself."""
NAME_CHARACTERS = "letters, digits, '.', '_' and '-'"


@dataclass(frozen=True, kw_only=True)
class Value:
    """One value of a key."""

    raw: Any
    label: str | None = None
    """The name that the user gave it, if any."""


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """One configuration to run with one seed."""

    label: str
    """The name of the configuration, which its seeds share."""
    seed: int | None
    """None: the seed of the base."""
    settings: Mapping[str, Any]
    values: Mapping[str, str]
    """For each key, the label of its value, as tables show it."""


@dataclass(kw_only=True)
class Grid:
    """A grid file. Shapes and names are checked here, keys and values of configs when the sweep is planned."""

    base: str
    name: str
    overrides: dict[str, Any] = option(dict)
    grid: dict[str, Any] = option(dict)
    seeds: Any = None
    exclude: list[dict[str, Any]] = option(list)
    rows: dict[str, dict[str, Any] | None] = option(dict)
    evaluate: dict[str, Any] | None = None
    max_parallel: int | None = option(None, "cells that train or are evaluated at a time", minimum=1)
    axes: dict[str, list[Value]] = field(init=False)

    def __post_init__(self) -> None:
        if slug(self.name) != self.name or len(self.name) > MAX_NAME:
            raise bad_value("name", self.name, f"{NAME_CHARACTERS}, at most {MAX_NAME}, since it names a folder")
        for settings in (self.overrides, self.grid, *self.rows.values()):
            for key in settings or {}:
                if key in RESERVED:
                    raise UserError(f"{key}: cannot be set in a sweep, which sets {', '.join(RESERVED)} itself")
        # In the order of the file, which is the order of the cells: their numbers name journals and tasks.
        self.axes = {key: _parse_values(key, item) for key, item in self.grid.items()}

        if self.seeds is not None:
            self.seeds = _parse_seeds(self.seeds)
            if "seed" in self.grid or "seed" in self.overrides:
                raise UserError("seed: is set twice, by seeds and as a key; keep one")

        excludable = [*self.grid, "seed"]
        for position, rule in enumerate(self.exclude):
            for key in rule:
                if key not in excludable:
                    raise bad_value(f"exclude.{position}", key, excludable, "an exclusion names keys of the grid")


def _parse_values(key: str, item: Any) -> list[Value]:
    """The values of ``key``: a list, or a mapping of names to values. Raises :class:`UserError` for a value twice."""
    if isinstance(item, list):
        values = [Value(raw=raw) for raw in item]
    elif isinstance(item, Mapping):
        values = [Value(raw=raw, label=str(name)) for name, raw in item.items()]
    else:
        raise bad_value(f"grid.{key}", item, "a list, or {name: value, ...}")
    if not values:
        raise UserError(f"grid.{key}: is empty; give it at least one value, or leave the key out")
    for value in values:
        if value.label is not None and slug(value.label) != value.label:
            raise bad_value(f"grid.{key}", value.label, f"names of {NAME_CHARACTERS}")
    # Compared as text: values may be lists and mappings, and Python's 1, 1.0 and True are equal.
    texts = Counter(json.dumps(value.raw, sort_keys=True, default=str) for value in values)
    for text, count in texts.items():
        if count > 1:
            raise bad_value(f"grid.{key}", json.loads(text), "each value once")
    return values


def _parse_seeds(seeds: Any) -> list[int]:
    """The seeds of a number of seeds (0, 1, ...), or of a list. A bool is refused, though it is Python's int."""
    if type(seeds) is int and 1 <= seeds <= MAX_CELLS:
        return list(range(seeds))
    if isinstance(seeds, list) and seeds:
        whole_numbers = all(type(seed) is int for seed in seeds)
        if whole_numbers and len(set(seeds)) == len(seeds):
            return seeds
    raise bad_value("seeds", seeds, f"how many (1 to {MAX_CELLS}), or a list of different whole numbers")


# --- reading ---------------------------------------------------------------------------------------------------------


def read_grid(path: Path, name: str | None = None, axes: Mapping[str, list[Any]] | None = None) -> Grid:
    """Read a grid file, or make the grid of ``axes`` over a config's file; ``name`` replaces its name.

    ``axes`` are the keys that the command line gives several values (:func:`split_axes`). Those of a grid file are
    added to its own. Raises :class:`UserError` that names the key at fault.
    """
    if name is not None and slug(name) != name:
        raise bad_value("--name", name, f"{NAME_CHARACTERS}, since it names a folder")
    axes = axes or {}
    # A key without a value is as good as absent: its default counts.
    raw = {key: item for key, item in read_yaml(path, "grid").items() if item is not None}
    origin = str(path)
    if _is_config(raw):
        raw = _grid_over(path, axes)
        origin = ""  # what can be wrong now was typed on the command line
    else:
        _add_axes(raw, axes)
    # Its settings are copied into the manifest.
    refuse_secrets(raw)
    raw.setdefault("name", path.stem)
    if name:
        raw["name"] = name
    grid = parse_record(Grid, raw, origin=origin)

    # Relative to the grid file, not to where the command runs: a grid is shared with its base.
    base = beside(path.parent, grid.base).resolve()
    if base.is_file():
        # Its own mistakes are reported now; that it is missing is reported when the sweep is planned.
        read_named_config(base)
    grid.base = str(base)
    return grid


def _is_config(raw: Mapping[str, Any]) -> bool:
    """Whether a file is a config: it has a key that only configs have, and none that only grids have."""
    grid_keys = set(field_types(Grid))
    config_keys = {EXTENDS, *field_types(Config)}
    keys = set(raw)
    return bool(keys & (config_keys - grid_keys)) and not keys & (grid_keys - config_keys)


def _grid_over(config: Path, axes: Mapping[str, list[Any]]) -> dict[str, Any]:
    """What a grid file over ``config`` with the ``axes`` would hold. Raises :class:`UserError` where there are none."""
    if not axes:
        raise UserError(
            f"{config} is a config, of one run; a sweep needs keys with several values, as seed=0,1,2 or "
            "kl.0.beta=0.01,0.03, or a grid file (`kl-comedy init grid`)"
        )
    short_keys = shorten_keys(list(axes))
    # Named by its keys: sweeps over one config by different keys have folders of their own.
    name = slug("-".join([config.stem, *(short_keys[key] for key in axes)]))
    raw: dict[str, Any] = {"base": str(config.resolve()), "name": name}
    _add_axes(raw, axes)
    return raw


def _add_axes(raw: dict[str, Any], axes: Mapping[str, list[Any]]) -> None:
    """Add the axes of the command line to the content of a grid file, as its author would write them there."""
    for key, values in axes.items():
        if key == "seed":
            is_set = "seeds" in raw
            raw.setdefault("seeds", values)
        else:
            axes_of_file = raw.setdefault("grid", {})
            # Another kind of value is refused with the other mistakes of the file.
            is_set = isinstance(axes_of_file, Mapping) and key in axes_of_file
            if isinstance(axes_of_file, dict):
                axes_of_file.setdefault(key, values)
        if is_set:
            raise UserError(f"{key}: is set by the grid, cell by cell, and on the command line; keep one")


def split_axes(words: Sequence[str]) -> tuple[dict[str, list[Any]], list[str]]:
    """The ``key=value`` words with several values, as axes of a grid, and the others.

    ``key=a,b`` has the values of the YAML list ``[a,b]``, so that a comma within brackets, braces or quotes belongs
    to its value.

    >>> split_axes(["seed=0,1", "kl.0.beta=0.01,0.03", "optimizer.betas=[0.9,0.99]"])
    ({'seed': [0, 1], 'kl.0.beta': [0.01, 0.03]}, ['optimizer.betas=[0.9,0.99]'])
    """
    axes: dict[str, list[Any]] = {}
    others = []
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip()
        if not equals or "," not in text:
            others.append(word)
            continue
        values = parse_override(key, f"[{text}]")
        if len(values) == 1:
            others.append(word)
            continue
        if key in axes:
            raise UserError(f"{key}: has several values twice; put them into one list")
        axes[key] = values
    return axes, others


# --- expansion -------------------------------------------------------------------------------------------------------


def expand(grid: Grid) -> list[GridPoint]:
    """Every point, in the order of the file: the product without what is excluded, then the rows.

    Raises :class:`UserError` for an exclusion that excludes nothing and for a grid without points.
    """
    seeds: Sequence[int | None] = grid.seeds or (None,)
    cells = len(seeds)
    for values in grid.axes.values():
        cells *= len(values)
        # Before the product is built: 200 keys of two values would fill the memory.
        if cells > MAX_CELLS:
            raise UserError(f"grid: has more than {MAX_CELLS} cells")
    points = []
    if grid.axes or not grid.rows:
        # The product of no axes is one cell, the base itself. A grid of rows alone does not ask for it.
        points = _product(grid, seeds)
    labels = {point.label for point in points}
    # After the product: the numbers of its cells do not change when a row is added.
    for name, row in grid.rows.items():
        if name in labels:
            raise UserError(f"rows.{name}: a cell of the grid is called {name} too; choose another name")
        settings = row or {}
        row_seeds = seeds
        if "seed" in settings:
            row_seeds = (None,)
        for seed in row_seeds:
            points.append(GridPoint(label=name, seed=seed, settings=settings, values={"row": name}))
    if not points:
        raise UserError("the grid has no cells: everything is excluded")
    return points


def _product(grid: Grid, seeds: Sequence[int | None]) -> list[GridPoint]:
    """The product of the axes, each combination with each seed, without what is excluded."""
    short_keys = shorten_keys(list(grid.axes))
    unused = set(range(len(grid.exclude)))
    names: Counter[str] = Counter()
    points = []
    for values in itertools.product(*grid.axes.values()):
        combination = dict(zip(grid.axes, values, strict=True))
        seeds_to_run = []
        for seed in seeds:
            matching = {number for number, rule in enumerate(grid.exclude) if _matches(rule, combination, seed)}
            unused -= matching
            if not matching:
                seeds_to_run.append(seed)
        if not seeds_to_run:
            continue
        label = _label(grid, combination, short_keys)
        names[label] += 1
        # Two values may have one text: the slugs of "verl/k3" and "verl-k3" are equal.
        if names[label] > 1:
            label = f"{label}-{names[label]}"
            names[label] += 1
        if names[label] > 1:
            raise bad_value("grid", label, "names that differ; name the values, as in grid: {key: {my-name: ...}}")
        settings = {key: value.raw for key, value in combination.items()}
        texts = {key: value.label or value_text(value.raw) for key, value in combination.items()}
        points += [GridPoint(label=label, seed=seed, settings=settings, values=texts) for seed in seeds_to_run]
    for number in sorted(unused):
        raise UserError(f"exclude: {grid.exclude[number]} matches no cell of the grid")
    return points


def _matches(rule: Mapping[str, Any], combination: Mapping[str, Value], seed: int | None) -> bool:
    """Whether a combination has, for each key of the rule, the value or one of the values that the rule names.

    A value that has a name is named by it.
    """
    for key, wanted in rule.items():
        value = combination.get(key, Value(raw=seed))
        actual = value.raw
        if value.label is not None:
            actual = value.label
        alternatives = wanted if isinstance(wanted, list) else [wanted]
        # Python's True == 1 would drop what a rule does not name.
        if not any(actual == other and isinstance(actual, bool) == isinstance(other, bool) for other in alternatives):
            return False
    return True


def _label(grid: Grid, combination: Mapping[str, Value], short_keys: Mapping[str, str]) -> str:
    """The values of the axes that have several, joined; the grid's name where no axis has."""
    parts = []
    for key, value in combination.items():
        # A key of one value does not tell cells apart.
        if len(grid.axes[key]) > 1:
            parts.append(_label_part(key, value, short_keys[key]))
    return "-".join(parts) or grid.name


def _label_part(key: str, value: Value, short_key: str) -> str:
    """The value's part of a cell's name: its label, its text, or the short key with the number.

    Raises :class:`UserError` for a mapping or a nested list without a label.
    """
    raw = value.raw
    if value.label is not None:
        return value.label
    if isinstance(raw, str):
        return slug(raw)
    items = raw if isinstance(raw, list) and raw else [raw]
    if any(isinstance(item, list | Mapping) for item in items):
        raise bad_value(f"grid.{key}", raw, f"a name for it, as in grid: {{{key}: {{my-name: ...}}}}")
    # Not with commas or spaces, which would be replaced by the separator of the keys.
    number = "_".join(value_text(item) for item in items)
    return slug(short_key + number)


def value_text(raw: Any) -> str:
    """A value as a table shows it."""
    if isinstance(raw, bool) or raw is None:
        return str(raw).lower()
    if isinstance(raw, float):
        return f"{raw:g}"
    return str(raw)


def slug(text: str) -> str:
    """Text as part of a folder's name: other characters become '-'.

    >>> slug("comedy/k1 in reward")
    'comedy-k1-in-reward'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._") or "x"


def shorten_keys(keys: Sequence[str]) -> dict[str, str]:
    """Each dotted key by its last parts, as few as tell the keys apart.

    >>> shorten_keys(["kl.0.beta", "kl.1.beta", "optimizer.lr"])
    {'kl.0.beta': '0.beta', 'kl.1.beta': '1.beta', 'optimizer.lr': 'lr'}
    """
    return {key: _shortest_tail(key, keys) for key in keys}


def _shortest_tail(key: str, keys: Sequence[str]) -> str:
    parts = key.split(".")
    for length in range(1, len(parts)):
        tail = ".".join(parts[-length:])
        # The dot in front keeps "lr" from fitting "kl.clr".
        keys_with_tail = [other for other in keys if f".{other}".endswith(f".{tail}")]
        if len(keys_with_tail) == 1:
            return tail
    # Each tail fits another key too, as a short key that is the end of a longer one.
    return key


def override(key: str, raw: Any) -> str:
    """``key=value`` as ``kl-comedy train`` reads it back to the same value.

    >>> override("kl.0.estimator", "k1"), override("seed", 3), override("name", "1e-4")
    ('kl.0.estimator=k1', 'seed=3', 'name="1e-4"')
    """
    from omegaconf import OmegaConf

    # Text without quotes is easier to read, but "1e-4" or "null" would be read back as something else.
    plain = isinstance(raw, str) and re.fullmatch(r"[A-Za-z_/.][\w./:@+-]*", raw) is not None
    if plain and OmegaConf.from_dotlist([f"value={raw}"]).value == raw:
        return f"{key}={raw}"
    return f"{key}={json.dumps(raw, ensure_ascii=False)}"
