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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_comedy.config.validate import option, parse_record
from kl_comedy.errors import UserError, bad_value, unknown_key
from kl_comedy.io import read_yaml

RANGE_KEYS = ("from", "to", "step", "num", "log")
MAX_VALUES = 100_000
"""A range with more values than this is a typing mistake."""
MAX_CELLS = 100_000
RESERVED = {
    "name": "the sweep names its cells",
    "output": "the sweep keeps its runs together",
    "resume": "a cell always resumes",
}


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


@dataclass
class GridFile:
    """The keys of a grid file; ``seeds`` and ``exclude`` are checked further in :func:`read_grid`."""

    base: str
    name: str | None = None
    overrides: dict[str, Any] | None = None
    grid: dict[str, Any] | None = None
    seeds: Any = None
    exclude: Any = None
    rows: dict[str, Any] | None = None
    evaluate: dict[str, Any] | None = None
    max_parallel: int | None = option(None, minimum=1)


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
    if "base" not in raw:
        raise UserError(f"{path}: needs base, the config that every cell starts from")
    file = parse_record(GridFile, raw)
    name = path.stem if file.name is None else file.name
    if slug(name) != name:
        raise bad_value("name", name, "letters, digits, '.', '_' and '-', since it names a folder")
    axes = {key: parse_values(key, item) for key, item in (file.grid or {}).items()}
    rows = {key: settings or {} for key, settings in (file.rows or {}).items()}
    for key, settings in rows.items():
        if not isinstance(settings, dict):
            raise bad_value(f"rows.{key}", settings, "a mapping of config keys to values")
        if slug(key) != key:
            raise bad_value("rows", key, "names of letters, digits, '.', '_' and '-'")
    overrides = file.overrides or {}
    for place, keys in {"overrides": overrides, "grid": axes, **{f"rows.{key}": rows[key] for key in rows}}.items():
        for key in keys:
            if key in RESERVED:
                raise UserError(f"{place}.{key}: cannot be set in a sweep: {RESERVED[key]}")
    seeds = _parse_seeds(file.seeds)
    if seeds is not None and ("seed" in axes or "seed" in overrides):
        raise UserError("seed: is set twice, by seeds and as a key; keep one")
    return Grid(
        name=name,
        base=(path.parent / file.base).resolve(),
        overrides=overrides,
        axes=axes,
        seeds=seeds,
        exclude=_parse_exclusions(file.exclude, axes),
        rows=rows,
        evaluate=file.evaluate,
        max_parallel=file.max_parallel,
    )


def _parse_seeds(seeds: Any) -> tuple[int, ...] | None:
    if seeds is None:
        return None
    if type(seeds) is int and seeds >= 1:
        return tuple(range(seeds))
    if isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds) and len(set(seeds)) == len(seeds):
        return tuple(seeds)
    raise bad_value("seeds", seeds, "how many (at least 1), or a list of different whole numbers")


def _parse_exclusions(rules: Any, axes: Mapping[str, tuple[Value, ...]]) -> tuple[Mapping[str, Any], ...]:
    if rules is None:
        return ()
    if not isinstance(rules, list) or not all(isinstance(rule, dict) and rule for rule in rules):
        raise bad_value("exclude", rules, "a list of mappings, as in [{kl: grpo, optimizer.lr: 1e-4}]")
    for position, rule in enumerate(rules):
        for key in rule:
            if key not in axes and key != "seed":
                raise bad_value(f"exclude.{position}", key, [*axes, "seed"], "an exclusion names keys of the grid")
    return tuple(rules)


# --- values ----------------------------------------------------------------------------------------------------------


def parse_values(key: str, item: Any) -> tuple[Value, ...]:
    """The values of ``key``: a list, a range ``{from, to, step | num | log}``, or a mapping of names to values.

    Raises :class:`UserError` for an empty or impossible range, no values, or a value twice.

    >>> [value.raw for value in parse_values("lr", {"from": 0.01, "to": 1, "log": 3})]
    [0.01, 0.1, 1.0]
    """
    if isinstance(item, Mapping) and ("from" in item or "to" in item):
        values = tuple(Value(raw=number) for number in _parse_range(key, item))
    elif isinstance(item, Mapping):
        for name in item:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", str(name)):
                raise bad_value(f"grid.{key}", name, "names of letters, digits, '.', '_' and '-'")
        values = tuple(Value(raw=raw, label=str(name)) for name, raw in item.items())
    elif isinstance(item, list):
        values = tuple(Value(raw=raw) for raw in item)
    else:
        raise bad_value(f"grid.{key}", item, "a list, a range {from, to, step|num|log}, or {name: value, ...}")
    if not values:
        raise UserError(f"grid.{key}: is empty; give it at least one value, or leave the key out")
    texts = [json.dumps(value.raw, sort_keys=True, default=str) for value in values]
    for position, text in enumerate(texts):
        if text in texts[:position]:
            raise bad_value(f"grid.{key}", values[position].raw, "each value once")
    return values


def _parse_range(key: str, item: Mapping[str, Any]) -> list[float | int]:
    for name, number in item.items():
        if name not in RANGE_KEYS:
            raise unknown_key(f"grid.{key}.{name}", number, RANGE_KEYS)
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise bad_value(f"grid.{key}.{name}", number, "a finite number")
    kinds = [name for name in ("step", "num", "log") if name in item]
    if "from" not in item or "to" not in item or len(kinds) != 1:
        raise bad_value(f"grid.{key}", dict(item), "from, to and one of step, num (points) or log (points)")
    (kind,) = kinds
    first, last, amount = item["from"], item["to"], item[kind]
    if kind == "step":
        if amount == 0 or (last - first) * amount < 0:
            raise UserError(f"grid.{key}: the range from {first:g} to {last:g} by {amount:g} is empty")
        count = math.floor((last - first) / amount + 1e-9) + 1
        if count > MAX_VALUES:
            raise bad_value(f"grid.{key}.step", amount, f"a step that makes at most {MAX_VALUES} values, not {count}")
        whole = all(isinstance(number, int) for number in (first, last, amount))
        steps = (first + position * amount for position in range(count))
        return list(steps) if whole else [_round(number) for number in steps]
    if not isinstance(amount, int) or not 1 <= amount <= MAX_VALUES:
        raise bad_value(f"grid.{key}.{kind}", amount, f"a whole number of points from 1 to {MAX_VALUES}")
    if kind == "log" and (first <= 0 or last <= 0):
        raise bad_value(f"grid.{key}", dict(item), "from and to above 0, since the points are spaced by logarithm")
    if amount == 1 and first != last:
        raise bad_value(f"grid.{key}.{kind}", amount, "at least 2 points, since from and to differ")
    shares = [position / max(amount - 1, 1) for position in range(amount)]
    if kind == "log":
        return [_round(first ** (1 - share) * last**share) for share in shares]
    return [_round(first * (1 - share) + last * share) for share in shares]


def _round(number: float) -> float:
    """Twelve significant digits: 0.1 + 2 * 0.1 is written 0.3."""
    return float(f"{number:.12g}")


def value_label(key: str, value: Value, short_key: str) -> str:
    """The value's part of a cell's name: its label, its text, or the short key with the number.

    Raises :class:`UserError` for a mapping or a nested list without a label.
    """
    raw = value.raw
    if value.label is not None:
        return value.label
    if isinstance(raw, str):
        return slug(raw)
    if isinstance(raw, list) and raw and not any(isinstance(item, list | Mapping) for item in raw):
        return slug(short_key + "_".join(value_text(item) for item in raw))
    if isinstance(raw, list | Mapping):
        raise bad_value(f"grid.{key}", raw, f"a name for it, as in grid: {{{key}: {{my-name: ...}}}}")
    return slug(short_key + value_text(raw))


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
    short = {}
    for key in keys:
        parts = key.split(".")
        tails = (".".join(parts[-length:]) for length in range(1, len(parts) + 1))
        short[key] = next(t for t in tails if t == key or sum(k == t or k.endswith(f".{t}") for k in keys) == 1)
    return short


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


# --- expansion -------------------------------------------------------------------------------------------------------


def expand(grid: Grid) -> list[Point]:
    """Every point, in the order of the file: the product without what is excluded, then the rows.

    Raises :class:`UserError` for an exclusion that excludes nothing and for a grid without points.
    """
    count = math.prod(len(values) for values in grid.axes.values()) * len(grid.seeds or (0,))
    if count > MAX_CELLS:
        raise bad_value("grid", f"{count} cells", f"at most {MAX_CELLS} cells")
    combinations: Iterator[dict[str, Value]] = (
        dict(zip(grid.axes, values, strict=True)) for values in itertools.product(*grid.axes.values())
    )
    if not grid.axes and grid.rows:
        combinations = iter(())
    used = [False] * len(grid.exclude)
    chosen = []
    for combination, seed in itertools.product(combinations, grid.seeds or (None,)):
        excluded = [_matches(rule, combination, seed) for rule in grid.exclude]
        used = [before or now for before, now in zip(used, excluded, strict=True)]
        if not any(excluded):
            chosen.append((combination, seed))
    for rule, matched in zip(grid.exclude, used, strict=True):
        if not matched:
            raise UserError(f"exclude: {dict(rule)} matches no cell of the grid")
    points = _label_points(grid, chosen)
    for name in grid.rows:
        if any(point.label == name for point in points):
            raise UserError(f"rows.{name}: a cell of the grid is called {name} too; choose another name")
    for name, settings in grid.rows.items():
        seeds = (None,) if "seed" in settings or grid.seeds is None else grid.seeds
        points += [Point(label=name, seed=seed, settings=settings, values={"row": name}) for seed in seeds]
    if not points:
        raise UserError("the grid has no cells: everything is excluded")
    return points


def _matches(rule: Mapping[str, Any], combination: Mapping[str, Value], seed: int | None) -> bool:
    for key, wanted in rule.items():
        value = combination.get(key, Value(raw=seed))
        options = wanted if isinstance(wanted, list) else [wanted]
        if value.raw != wanted and not any(option in (value.label, value.raw) for option in options):
            return False
    return True


def _label_points(grid: Grid, chosen: list[tuple[dict[str, Value], int | None]]) -> list[Point]:
    """Points with labels: equal settings share one, different settings never do."""
    short = shorten_keys(list(grid.axes))
    taken: dict[str, dict[str, Value]] = {}
    points = []
    for combination, seed in chosen:
        parts = [value_label(key, value, short[key]) for key, value in combination.items() if len(grid.axes[key]) > 1]
        base = "-".join(parts) or grid.name
        labels = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
        label = next(label for label in labels if taken.setdefault(label, combination) == combination)
        points.append(
            Point(
                label=label,
                seed=seed,
                settings={key: value.raw for key, value in combination.items()},
                values={key: value.label or value_text(value.raw) for key, value in combination.items()},
            )
        )
    return points
