"""The values a grid key takes: lists, ranges, named values; how each is called and written on a command line.

A grid file: which cells a sweep has. Pure: YAML data in, points out; configs are checked by the plan.

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
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_comedy.errors import UserError, bad_value, unknown_key
from kl_comedy.io import read_yaml

RANGE_KEYS = ("from", "to", "step", "num", "log")
MOST_VALUES = 100_000
"""A range with more values than this is a slip of the pen."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """One value of a key. ``label`` is its name where the user gave one, else None."""

    raw: Any
    label: str | None = None


def values_of(key: str, given: Any) -> tuple[Value, ...]:
    """The values of ``key``: a list, a range ``{from, to, step | num | log}``, or a mapping of names to values.

    Raises :class:`UserError` for an empty or impossible range, no values, or a value twice.

    >>> [value.raw for value in values_of("lr", {"from": 0.01, "to": 1, "log": 3})]
    [0.01, 0.1, 1.0]
    """
    if isinstance(given, Mapping):
        if "from" in given or "to" in given:
            found = tuple(Value(raw=raw) for raw in _range(key, given))
        else:
            found = tuple(Value(raw=raw, label=_name(key, name)) for name, raw in given.items())
    elif isinstance(given, list):
        found = tuple(Value(raw=raw) for raw in given)
    else:
        raise bad_value(f"grid.{key}", given, "a list, a range {from, to, step|num|log}, or {name: value, ...}")
    if not found:
        raise UserError(f"grid.{key}: is empty; give it at least one value, or leave the key out")
    texts = [json.dumps(value.raw, sort_keys=True, default=str) for value in found]
    for position, text in enumerate(texts):
        if text in texts[:position]:
            raise bad_value(f"grid.{key}", found[position].raw, "each value once")
    return found


def _range(key: str, given: Mapping[str, Any]) -> list[float | int]:
    for name, item in given.items():
        if name not in RANGE_KEYS:
            raise unknown_key(f"grid.{key}.{name}", item, RANGE_KEYS)
        if isinstance(item, bool) or not isinstance(item, int | float) or not math.isfinite(item):
            raise bad_value(f"grid.{key}.{name}", item, "a finite number")
    kinds = [name for name in ("step", "num", "log") if name in given]
    if "from" not in given or "to" not in given or len(kinds) != 1:
        raise bad_value(f"grid.{key}", dict(given), "from, to and one of step, num (points) or log (points)")
    first, last, how = given["from"], given["to"], given[kinds[0]]
    if kinds == ["step"]:
        return _stepped(key, first, last, how)
    if not isinstance(how, int) or not 1 <= how <= MOST_VALUES:
        raise bad_value(f"grid.{key}.{kinds[0]}", how, f"a whole number of points from 1 to {MOST_VALUES}")
    if kinds == ["log"] and (first <= 0 or last <= 0):
        raise bad_value(f"grid.{key}", dict(given), "from and to above 0, since the points are spaced by logarithm")
    if how == 1 and first != last:
        raise bad_value(f"grid.{key}.{kinds[0]}", how, "at least 2 points, since from and to differ")
    shares = [position / (how - 1) for position in range(how)] if how > 1 else [0.0]
    if kinds == ["log"]:
        return [_round(first ** (1 - share) * last**share) for share in shares]
    return [_round(first * (1 - share) + last * share) for share in shares]


def _stepped(key: str, first: float, last: float, step: float) -> list[float | int]:
    """From ``first`` in steps up to and including ``last``."""
    if step == 0 or (last - first) * step < 0:
        raise UserError(f"grid.{key}: the range from {first:g} to {last:g} by {step:g} is empty")
    count = math.floor((last - first) / step + 1e-9) + 1
    if count > MOST_VALUES:
        raise bad_value(f"grid.{key}.step", step, f"a step that makes at most {MOST_VALUES} values, not {count}")
    if all(isinstance(number, int) for number in (first, last, step)):
        return [first + position * step for position in range(count)]
    return [_round(first + position * step) for position in range(count)]


def _round(number: float) -> float:
    """Twelve significant digits: 0.1 + 2 * 0.1 is written 0.3."""
    return float(f"{number:.12g}")


def _name(key: str, name: Any) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", str(name)):
        raise bad_value(f"grid.{key}", name, "names of letters, digits, '.', '_' and '-'")
    return str(name)


def label_of(key: str, value: Value, short: str) -> str:
    """How a value is called in a cell's name: its name, its text, or the short key with the number.

    Raises :class:`UserError` for a value too long to read that has no name.
    """
    if value.label is not None:
        return value.label
    if isinstance(value.raw, str):
        return clean(value.raw)
    if isinstance(value.raw, list) and value.raw and not any(isinstance(item, list | Mapping) for item in value.raw):
        return clean(short + "_".join(text_of(item) for item in value.raw))
    if isinstance(value.raw, list | Mapping):
        raise bad_value(f"grid.{key}", value.raw, f"a name for it, as in grid: {{{key}: {{my-name: ...}}}}")
    return clean(short + text_of(value.raw))


def text_of(item: Any) -> str:
    """A value as a table shows it."""
    if isinstance(item, bool) or item is None:
        return str(item).lower()
    return f"{item:g}" if isinstance(item, float) else str(item)


def clean(text: str) -> str:
    """Text as part of a folder's name: other characters become '-'.

    >>> clean("comedy/k1 in reward")
    'comedy-k1-in-reward'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._") or "x"


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Each dotted key by its last parts, as few as tell the keys apart.

    >>> short_keys(["kl.0.beta", "kl.1.beta", "optimizer.lr"])
    {'kl.0.beta': '0.beta', 'kl.1.beta': '1.beta', 'optimizer.lr': 'lr'}
    """
    found = {}
    for key in keys:
        parts = key.split(".")
        for length in range(1, len(parts) + 1):
            tail = ".".join(parts[-length:])
            if sum(other == tail or other.endswith(f".{tail}") for other in keys) == 1:
                break
        found[key] = tail
    return found


def override(key: str, raw: Any) -> str:
    """``key=value`` as ``kl-comedy train`` reads it back to the same value.

    >>> override("kl.0.estimator", "k1"), override("seed", 3), override("name", "1e-4")
    ('kl.0.estimator=k1', 'seed=3', 'name="1e-4"')
    """
    from omegaconf import OmegaConf

    text = raw if isinstance(raw, str) else json.dumps(raw, ensure_ascii=False)
    if isinstance(raw, str):
        plain = re.fullmatch(r"[A-Za-z_/.][\w./:@+-]*", raw) is not None
        if not plain or OmegaConf.from_dotlist([f"value={raw}"]).value != raw:
            text = json.dumps(raw, ensure_ascii=False)
    return f"{key}={text}"


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
    for place, keys in (
        ("overrides", grid.overrides),
        ("grid", grid.axes),
        *((f"rows.{n}", r) for n, r in grid.rows.items()),
    ):
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
