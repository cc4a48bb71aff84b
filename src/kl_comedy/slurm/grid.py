"""A grid file: which configurations a sweep runs. YAML in, points out; configs are checked in manifest.py.

name: pocket_beta
base: ../quickstart.yaml            # relative to this file
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
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kl_comedy.config.load import read_named_config
from kl_comedy.config.validate import option, parse_record
from kl_comedy.errors import UserError, bad_value, shown, unknown_key
from kl_comedy.io import MAX_KEY_PARTS, MAX_NAME, read_yaml
from kl_comedy.redaction import refuse_secrets

RANGE_KEYS = ("from", "to", "step", "num", "log")
MAX_VALUES = 100_000
"""A range with more values than this is a typing mistake."""
MAX_CELLS = 100_000
"""Also the most seeds."""
MAX_COMPARISONS = 1_000_000
"""Cells times exclusions; a million take about two seconds."""
MAX_AXES = 200
"""Keys of a grid. Those with several values are at most 16, by the number of cells."""
MAX_NAMESAKES = 100
"""Cells whose values differ and whose names do not."""
MAX_NUMBER = 1e100
"""Of a range: differences and powers of larger numbers are beyond what a float holds."""
RESERVED = ("name", "output", "resume")
"""Keys that a sweep sets itself."""
NAME = "letters, digits, '.', '_' and '-'"


@dataclass(frozen=True, kw_only=True)
class Value:
    """One value of a key. ``label`` is its name where the user gave one, else None."""

    raw: Any
    label: str | None = None


@dataclass(frozen=True, kw_only=True)
class Point:
    """One configuration to run with one seed (None: the base's). ``values``: key to the value's label."""

    label: str
    seed: int | None
    settings: Mapping[str, Any]
    values: Mapping[str, str]


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
    max_parallel: int | None = option(None, minimum=1)
    axes: dict[str, list[Value]] = field(init=False)

    def __post_init__(self) -> None:
        for key, name in (("name", self.name), *(("rows", name) for name in self.rows)):
            if slug(name) != name:
                raise bad_value(key, name, f"{NAME}, since it names a folder")
            if len(name) > MAX_NAME:
                raise bad_value(key, name, f"at most {MAX_NAME} characters, since it names a folder")
        if len(self.grid) > MAX_AXES:
            raise UserError(f"grid: has {len(self.grid):,} keys; allowed: at most {MAX_AXES}")
        for key in [*self.overrides, *self.grid, *(key for row in self.rows.values() for key in row or ())]:
            if key.count(".") >= MAX_KEY_PARTS:
                raise UserError(f"{shown(key)}: no such key; a key has at most {MAX_KEY_PARTS} parts")
            if key in RESERVED:
                raise UserError(f"{key}: cannot be set in a sweep, which sets {', '.join(RESERVED)} itself")
        self.axes = {key: parse_values(key, item) for key, item in self.grid.items()}
        self.seeds = None if self.seeds is None else _parse_seeds(self.seeds)
        if self.seeds is not None and ("seed" in self.grid or "seed" in self.overrides):
            raise UserError("seed: is set twice, by seeds and as a key; keep one")
        for position, rule in enumerate(self.exclude):
            for key in set(rule) - {*self.grid, "seed"}:
                raise bad_value(f"exclude.{position}", key, [*self.grid, "seed"], "an exclusion names keys of the grid")


def _parse_seeds(seeds: Any) -> list[int]:
    if type(seeds) is int and 1 <= seeds <= MAX_CELLS:
        return list(range(seeds))
    if isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds) and len(set(seeds)) == len(seeds):
        return seeds
    raise bad_value("seeds", seeds, f"how many (1 to {MAX_CELLS}), or a list of different whole numbers")


def read_grid(path: Path, name: str | None = None) -> Grid:
    """Read a grid file; ``name`` replaces its name. Raises :class:`UserError` naming the key at fault."""
    if name is not None and slug(name) != name:
        raise bad_value("--name", name, f"{NAME}, since it names a folder")
    raw = {key: item for key, item in read_yaml(path, "grid").items() if item is not None}
    refuse_secrets(raw)
    grid = parse_record(Grid, {"name": path.stem, **raw, **({"name": name} if name else {})}, origin=str(path))
    base = (path.parent / grid.base).resolve()
    if base.is_file():
        read_named_config(base)
    grid.base = str(base)
    return grid


def parse_values(key: str, item: Any) -> list[Value]:
    """The values of ``key``: a list, a range ``{from, to, step | num | log}``, or a mapping of names to values.

    Raises :class:`UserError` for an empty or impossible range, no values, or a value twice.

    >>> [value.raw for value in parse_values("lr", {"from": 0.01, "to": 1, "log": 3})]
    [0.01, 0.1, 1.0]
    """
    if isinstance(item, Mapping) and ("from" in item or "to" in item):
        values = [Value(raw=number) for number in _parse_range(f"grid.{key}", item)]
    elif isinstance(item, Mapping):
        for name in item:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", str(name)):
                raise bad_value(f"grid.{key}", name, f"names of {NAME}")
        values = [Value(raw=raw, label=str(name)) for name, raw in item.items()]
    elif isinstance(item, list):
        values = [Value(raw=raw) for raw in item]
    else:
        raise bad_value(f"grid.{key}", item, "a list, a range {from, to, step|num|log}, or {name: value, ...}")
    if not values:
        raise UserError(f"grid.{key}: is empty; give it at least one value, or leave the key out")
    texts = [json.dumps(value.raw, sort_keys=True, default=str) for value in values]
    for text, count in Counter(texts).items():
        if count > 1:
            raise bad_value(f"grid.{key}", values[texts.index(text)].raw, "each value once")
    return values


def _parse_range(key: str, item: Mapping[str, Any]) -> list[float | int]:
    for name, number in item.items():
        if name not in RANGE_KEYS:
            raise unknown_key(f"{key}.{name}", number, RANGE_KEYS)
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= MAX_NUMBER:
            raise bad_value(f"{key}.{name}", number, f"a finite number, at most {MAX_NUMBER:g} in size")
    kinds = [name for name in ("step", "num", "log") if name in item]
    if "from" not in item or "to" not in item or len(kinds) != 1:
        raise bad_value(key, dict(item), "from, to and one of step, num (points) or log (points)")
    first, last, amount = item["from"], item["to"], item[kinds[0]]
    if kinds == ["step"]:
        if amount == 0 or (last - first) * amount < 0:
            raise UserError(f"{key}: the range from {first:g} to {last:g} by {amount:g} is empty")
        steps = (last - first) / amount
        if steps >= MAX_VALUES:  # infinity too
            raise bad_value(f"{key}.step", amount, f"a step that makes at most {MAX_VALUES} values, not {steps:g}")
        count = math.floor(steps + 1e-9) + 1
        numbers = [first + position * amount for position in range(count)]
        if all(isinstance(number, int) for number in item.values()):
            return numbers
    else:
        if not isinstance(amount, int) or not (2 if first != last else 1) <= amount <= MAX_VALUES:
            allowed = f"a whole number of points, 1 (2 if they differ) to {MAX_VALUES}"
            raise bad_value(f"{key}.{kinds[0]}", amount, allowed)
        shares = [position / max(amount - 1, 1) for position in range(amount)]
        numbers = [first * (1 - share) + last * share for share in shares]
        if kinds == ["log"]:
            if first <= 0 or last <= 0:
                raise bad_value(key, dict(item), "from and to above 0, since the points are spaced by logarithm")
            numbers = [first ** (1 - share) * last**share for share in shares]
    return [float(f"{number:.12g}") for number in numbers]  # 0.1 + 2 * 0.1 is written 0.3


def value_label(key: str, value: Value, short_key: str) -> str:
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
    return slug(short_key + "_".join(map(value_text, items)))


def value_text(raw: Any) -> str:
    """A value as a table shows it."""
    if isinstance(raw, bool) or raw is None:
        return str(raw).lower()
    return f"{raw:g}" if isinstance(raw, float) else str(raw)


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

    def shorten(key: str) -> str:
        parts = key.split(".")
        tails = (".".join(parts[-length:]) for length in range(1, len(parts)))
        return next((tail for tail in tails if sum(f".{other}".endswith(f".{tail}") for other in keys) == 1), key)

    return {key: shorten(key) for key in keys}


def override(key: str, raw: Any) -> str:
    """``key=value`` as ``kl-comedy train`` reads it back to the same value.

    >>> override("kl.0.estimator", "k1"), override("seed", 3), override("name", "1e-4")
    ('kl.0.estimator=k1', 'seed=3', 'name="1e-4"')
    """
    from omegaconf import OmegaConf

    plain = isinstance(raw, str) and re.fullmatch(r"[A-Za-z_/.][\w./:@+-]*", raw) is not None
    if plain and OmegaConf.from_dotlist([f"value={raw}"]).value == raw:
        return f"{key}={raw}"
    return f"{key}={json.dumps(raw, ensure_ascii=False)}"


def expand(grid: Grid) -> list[Point]:
    """Every point, in the order of the file: the product without what is excluded, then the rows.

    Raises :class:`UserError` for an exclusion that excludes nothing and for a grid without points.
    """
    seeds = grid.seeds or (None,)
    count = len(seeds)
    for values in grid.axes.values():
        count *= len(values)
        if count > MAX_CELLS:
            raise UserError(f"grid: has more than {MAX_CELLS} cells")
    if count * len(grid.exclude) > MAX_COMPARISONS:
        raise UserError(f"exclude: {count} cells times {len(grid.exclude)} exclusions are more than {MAX_COMPARISONS}")
    combinations = [dict(zip(grid.axes, values, strict=True)) for values in itertools.product(*grid.axes.values())]
    if not grid.axes and grid.rows:
        combinations = []
    unused, chosen = list(grid.exclude), []
    for combination, seed in itertools.product(combinations, seeds):
        matching = [rule for rule in grid.exclude if _matches(rule, combination, seed)]
        unused = [rule for rule in unused if rule not in matching]
        if not matching:
            chosen.append((combination, seed))
    if unused:
        raise UserError(f"exclude: {unused[0]} matches no cell of the grid")
    points = _label_points(grid, chosen)
    for name, settings in grid.rows.items():
        if any(point.label == name and "row" not in point.values for point in points):
            raise UserError(f"rows.{name}: a cell of the grid is called {name} too; choose another name")
        for seed in (None,) if "seed" in (settings or {}) else seeds:
            points.append(Point(label=name, seed=seed, settings=settings or {}, values={"row": name}))
    if not points:
        raise UserError("the grid has no cells: everything is excluded")
    return points


def _matches(rule: Mapping[str, Any], combination: Mapping[str, Value], seed: int | None) -> bool:
    """Whether a combination has, for each key of the rule, the value or one of the values that the rule names."""
    for key, wanted in rule.items():
        value = combination.get(key, Value(raw=seed))
        allowed = wanted if isinstance(wanted, list) else [wanted]
        by_value = any(_same_value(value.raw, each) for each in [wanted, *allowed])
        # The label of a value without one is None, and null in a rule is the value null, not "no label".
        by_label = value.label is not None and value.label in allowed
        if not by_value and not by_label:
            return False
    return True


def _same_value(raw: Any, wanted: Any) -> bool:
    """Equal, and both or neither of them true or false: Python's ``True == 1`` would drop what a rule does not name."""
    return bool(raw == wanted) and isinstance(raw, bool) == isinstance(wanted, bool)


def _label_points(grid: Grid, chosen: Sequence[tuple[dict[str, Value], int | None]]) -> list[Point]:
    """Points with labels: equal settings share one, different settings never do."""
    short = shorten_keys(list(grid.axes))
    taken: dict[str, dict[str, Value]] = {}
    points = []
    for combination, seed in chosen:
        parts = [value_label(key, value, short[key]) for key, value in combination.items() if len(grid.axes[key]) > 1]
        base = "-".join(parts) or grid.name
        if len(base) > MAX_NAME:
            allowed = f"names of at most {MAX_NAME} characters, since they name folders; name values, as in"
            raise bad_value("grid", base, f"{allowed} grid: {{key: {{my-name: ...}}}}")
        labels = [base, *(f"{base}-{number}" for number in range(2, MAX_NAMESAKES + 1))]
        label = next((label for label in labels if taken.setdefault(label, combination) == combination), None)
        if label is None:
            allowed = f"at most {MAX_NAMESAKES} cells of one name"
            raise bad_value("grid", base, f"{allowed}; name values, as in grid: {{key: {{my-name: ...}}}}")
        settings = {key: value.raw for key, value in combination.items()}
        values = {key: value.label or value_text(value.raw) for key, value in combination.items()}
        points.append(Point(label=label, seed=seed, settings=settings, values=values))
    return points
