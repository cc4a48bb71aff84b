"""A grid file: which configurations a sweep runs. YAML in, points out; configs are checked in manifest.py.

name: pocket_beta
base: ../quickstart.yaml            # relative to this file, or a name of `kl-comedy list configs`
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

from kl_comedy.config.load import EXTENDS, parse_override, read_named_config
from kl_comedy.config.schema import Config
from kl_comedy.config.shipped import beside
from kl_comedy.config.validate import field_types, option, parse_record
from kl_comedy.errors import UserError, bad_value, shown, unknown_key
from kl_comedy.io import MAX_KEY_PARTS, MAX_NAME, read_yaml
from kl_comedy.redaction import refuse_secrets

SPACINGS = ("step", "num", "log")
"""How a range says which values are between its ends: by their distance, or by their number."""
RANGE_KEYS = ("from", "to", *SPACINGS)
MAX_VALUES = 100_000
"""A range with more values than this is a typing mistake."""
MAX_CELLS = 100_000
"""The most cells of a grid, and the most seeds."""
MAX_COMPARISONS = 1_000_000
"""Cells times exclusions; a million take about two seconds."""
MAX_AXES = 200
"""The most keys of a grid. Those with several values are at most 16, because of :data:`MAX_CELLS`."""
MAX_NAMESAKES = 100
"""The most cells whose values differ and whose names do not; they are numbered."""
MAX_NUMBER = 1e100
"""The largest number of a range. Differences and powers of larger ones are beyond what a float holds."""
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
        _check_folder_name("name", self.name)
        for row_name in self.rows:
            _check_folder_name("rows", row_name)
        if len(self.grid) > MAX_AXES:
            raise UserError(f"grid: has {len(self.grid):,} keys; allowed: at most {MAX_AXES}")

        for settings in (self.overrides, self.grid, *self.rows.values()):
            for key in settings or {}:
                _check_key(key)
        # In the order of the file, which is the order of the cells: their numbers name journals and tasks.
        self.axes = {key: parse_values(key, item) for key, item in self.grid.items()}

        if self.seeds is not None:
            self.seeds = _parse_seeds(self.seeds)
            if "seed" in self.grid or "seed" in self.overrides:
                raise UserError("seed: is set twice, by seeds and as a key; keep one")

        excludable = [*self.grid, "seed"]
        for position, rule in enumerate(self.exclude):
            for key in rule:
                if key not in excludable:
                    raise bad_value(f"exclude.{position}", key, excludable, "an exclusion names keys of the grid")


def _check_folder_name(key: str, name: str) -> None:
    if slug(name) != name:
        raise bad_value(key, name, f"{NAME_CHARACTERS}, since it names a folder")
    if len(name) > MAX_NAME:
        raise bad_value(key, name, f"at most {MAX_NAME} characters, since it names a folder")


def _check_key(key: str) -> None:
    if key.count(".") >= MAX_KEY_PARTS:
        raise UserError(f"{shown(key)}: no such key; a key has at most {MAX_KEY_PARTS} parts")
    if key in RESERVED:
        raise UserError(f"{key}: cannot be set in a sweep, which sets {', '.join(RESERVED)} itself")


def _parse_seeds(seeds: Any) -> list[int]:
    """The seeds of a number of seeds (0, 1, ...), or of a list. A bool is refused, though it is Python's int."""
    if type(seeds) is int and 1 <= seeds <= MAX_CELLS:
        return list(range(seeds))
    if isinstance(seeds, list) and seeds:
        whole_numbers = all(type(seed) is int for seed in seeds)
        if whole_numbers and len(set(seeds)) == len(seeds):
            return seeds
    raise bad_value("seeds", seeds, f"how many (1 to {MAX_CELLS}), or a list of different whole numbers")


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
            f"{config} is a config, of one run; a sweep needs keys with several values, as seed=0..4 or "
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


WHOLE_RANGE = re.compile(r"(-?[0-9]{1,18})\.\.(-?[0-9]{1,18})")
ANY_RANGE = re.compile(r"[-+0-9.e]*[0-9]\.\.+[-+0-9.e]*[0-9]")
"""What was meant as a range, of whatever numbers; a path such as ``../runs`` has no number before its dots."""


def split_axes(words: Sequence[str]) -> tuple[dict[str, list[Any]], list[str]]:
    """The ``key=value`` words with several values, as axes of a grid, and the others.

    Values are separated by commas; ``0..4`` are the whole numbers 0 to 4. A comma within brackets, braces or quotes
    belongs to its value. Raises :class:`UserError` for an empty value and for a range that cannot be counted.

    >>> split_axes(["seed=0..2", "kl.0.beta=0.01,0.03", "optimizer.betas=[0.9,0.99]"])
    ({'seed': [0, 1, 2], 'kl.0.beta': [0.01, 0.03]}, ['optimizer.betas=[0.9,0.99]'])
    """
    axes: dict[str, list[Any]] = {}
    others = []
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip()
        parts = _split_at_commas(text)
        is_axis = len(parts) > 1 or ANY_RANGE.fullmatch(text.strip()) is not None
        if not equals or not is_axis:
            others.append(word)
            continue
        if key in axes:
            raise UserError(f"{key}: has several values twice; put them into one list")
        values: list[Any] = []
        for part in parts:
            values += _values_of(key, part.strip(), text)
        axes[key] = values
    return axes, others


def _split_at_commas(text: str) -> list[str]:
    """The parts of ``text`` between commas that are not within brackets, braces or quotes."""
    parts = [""]
    depth = 0
    quote = ""
    for character in text:
        if quote:
            if character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        is_separator = character == "," and depth == 0 and not quote
        if is_separator:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _values_of(key: str, part: str, text: str) -> list[Any]:
    """The values of one part of ``text``: a range of whole numbers, or one value."""
    allowed = "values with commas, as 0.01,0.03, or whole numbers from..to, as 0..4"
    if not part:
        raise bad_value(key, text, allowed, "a value is empty")
    ends = WHOLE_RANGE.fullmatch(part)
    if ends is None:
        if ANY_RANGE.fullmatch(part):
            raise bad_value(key, text, allowed)
        return [parse_override(key, part)]
    first = int(ends[1])
    last = int(ends[2])
    if last < first:
        raise UserError(f"{key}: the range {part} is empty; write the smaller number first")
    if last - first >= MAX_VALUES:
        raise bad_value(key, text, f"a range of at most {MAX_VALUES} values")
    return list(range(first, last + 1))


def parse_values(key: str, item: Any) -> list[Value]:
    """The values of ``key``: a list, a range ``{from, to, step | num | log}``, or a mapping of names to values.

    Raises :class:`UserError` for an empty or impossible range, no values, or a value twice.

    >>> [value.raw for value in parse_values("lr", {"from": 0.01, "to": 1, "log": 3})]
    [0.01, 0.1, 1.0]
    """
    values = _read_values(key, item)
    if not values:
        raise UserError(f"grid.{key}: is empty; give it at least one value, or leave the key out")
    # Compared as text: values may be lists and mappings, and Python's 1, 1.0 and True are equal.
    texts = [json.dumps(value.raw, sort_keys=True, default=str) for value in values]
    for text, count in Counter(texts).items():
        if count > 1:
            raise bad_value(f"grid.{key}", values[texts.index(text)].raw, "each value once")
    return values


def _read_values(key: str, item: Any) -> list[Value]:
    if isinstance(item, list):
        return [Value(raw=raw) for raw in item]
    if not isinstance(item, Mapping):
        raise bad_value(f"grid.{key}", item, "a list, a range {from, to, step|num|log}, or {name: value, ...}")
    # A mapping is a range or named values; a name that is called from or to would be ambiguous.
    if "from" in item or "to" in item:
        return [Value(raw=number) for number in _parse_range(f"grid.{key}", item)]
    for name in item:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", str(name)):
            raise bad_value(f"grid.{key}", name, f"names of {NAME_CHARACTERS}")
    return [Value(raw=raw, label=str(name)) for name, raw in item.items()]


def _parse_range(key: str, item: Mapping[str, Any]) -> list[float | int]:
    """The numbers of a range. Raises :class:`UserError` for one that is not bounded, or whose end is not reached."""
    for name, number in item.items():
        if name not in RANGE_KEYS:
            raise unknown_key(f"{key}.{name}", number, RANGE_KEYS)
        # Written so that NaN, which compares with nothing, is refused too.
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not abs(number) <= MAX_NUMBER:
            raise bad_value(f"{key}.{name}", number, f"a finite number, at most {MAX_NUMBER:g} in size")
    spacings = [name for name in SPACINGS if name in item]
    if "from" not in item or "to" not in item or len(spacings) != 1:
        raise bad_value(key, dict(item), "from, to and one of step, num (points) or log (points)")

    first = item["from"]
    last = item["to"]
    spacing = spacings[0]
    if spacing == "step":
        numbers = _numbers_by_step(key, first, last, item["step"])
        # Whole numbers stay whole: keys such as train.steps take no 3.0.
        if all(isinstance(number, int) for number in item.values()):
            return numbers
    else:
        shares = _shares(f"{key}.{spacing}", item[spacing], may_be_one=first == last)
        if spacing == "num":
            # Not first + share * (last - first), which may miss the end by a rounding.
            numbers = [first * (1 - share) + last * share for share in shares]
        else:
            if first <= 0 or last <= 0:
                raise bad_value(key, dict(item), "from and to above 0, since the points are spaced by logarithm")
            numbers = [first ** (1 - share) * last**share for share in shares]
    # 12 digits, or 0.1 + 2 * 0.1 would name its cell 0.30000000000000004.
    return [float(f"{number:.12g}") for number in numbers]


def _numbers_by_step(key: str, first: float, last: float, step: float) -> list[float]:
    if step == 0 or (last - first) * step < 0:
        raise UserError(f"{key}: the range from {first:g} to {last:g} by {step:g} is empty")
    steps = (last - first) / step
    if steps >= MAX_VALUES:  # infinity too
        raise bad_value(f"{key}.step", step, f"a step that makes at most {MAX_VALUES} values, not {steps:g}")
    # The addend keeps the last value: (0.3 - 0.1) / 0.1 is 1.9999999999999998.
    count = math.floor(steps + 1e-9) + 1
    return [first + position * step for position in range(count)]


def _shares(key: str, points: float, *, may_be_one: bool) -> list[float]:
    """The shares of the way, 0 to 1, at which that many points stand. A range of one number may have one point."""
    fewest = 2
    if may_be_one:
        fewest = 1
    if not isinstance(points, int) or not fewest <= points <= MAX_VALUES:
        raise bad_value(key, points, f"a whole number of points, 1 (2 if they differ) to {MAX_VALUES}")
    return [position / max(points - 1, 1) for position in range(points)]


def value_label(key: str, value: Value, short_key: str) -> str:
    """The value's part of a cell's name: its label, its text, or the short key with the number.

    Raises :class:`UserError` for a mapping or a nested list without a label.
    """
    raw = value.raw
    if value.label is not None:
        return value.label
    if isinstance(raw, str):
        return slug(raw)
    items = [raw]
    if isinstance(raw, list) and raw:
        items = raw
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


def expand(grid: Grid) -> list[GridPoint]:
    """Every point, in the order of the file: the product without what is excluded, then the rows.

    Raises :class:`UserError` for an exclusion that excludes nothing and for a grid without points.
    """
    seeds: Sequence[int | None] = grid.seeds or (None,)
    _check_size(grid, len(seeds))
    # The product before the rows: the numbers of its cells do not change when a row is added.
    points = _label_points(grid, _combinations(grid, seeds))
    labels = {point.label for point in points}
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


def _check_size(grid: Grid, seeds: int) -> None:
    """Refuse a grid that is too large, before its product is built: 200 keys of two values would fill the memory."""
    cells = seeds
    for values in grid.axes.values():
        cells *= len(values)
        if cells > MAX_CELLS:
            raise UserError(f"grid: has more than {MAX_CELLS} cells")
    if cells * len(grid.exclude) > MAX_COMPARISONS:
        raise UserError(f"exclude: {cells} cells times {len(grid.exclude)} exclusions are more than {MAX_COMPARISONS}")


def _combinations(grid: Grid, seeds: Sequence[int | None]) -> list[tuple[dict[str, Value], int | None]]:
    """The product of the axes, each combination with each seed, without what is excluded.

    Raises :class:`UserError` for an exclusion that matches nothing: it is a typing mistake.
    """
    combinations = [dict(zip(grid.axes, values, strict=True)) for values in itertools.product(*grid.axes.values())]
    if not grid.axes and grid.rows:
        # The product of no axes is one cell, the base itself. A grid of rows alone does not ask for it.
        combinations = []
    used = [False] * len(grid.exclude)
    chosen = []
    for combination in combinations:
        for seed in seeds:
            excluded = False
            # All rules are tried, also after a match: one that a second rule covers is not a mistake.
            for position, rule in enumerate(grid.exclude):
                if _matches(rule, combination, seed):
                    used[position] = True
                    excluded = True
            if not excluded:
                chosen.append((combination, seed))
    for rule, is_used in zip(grid.exclude, used, strict=True):
        if not is_used:
            raise UserError(f"exclude: {rule} matches no cell of the grid")
    return chosen


def _matches(rule: Mapping[str, Any], combination: Mapping[str, Value], seed: int | None) -> bool:
    """Whether a combination has, for each key of the rule, the value or one of the values that the rule names."""
    for key, wanted in rule.items():
        value = combination.get(key, Value(raw=seed))
        alternatives = [wanted]
        if isinstance(wanted, list):
            alternatives = wanted
        # A list may also be the value itself.
        by_value = any(_same_value(value.raw, candidate) for candidate in (wanted, *alternatives))
        # The label of a value without one is None, and null in a rule is the value null, not "no label".
        by_label = value.label is not None and value.label in alternatives
        if not by_value and not by_label:
            return False
    return True


def _same_value(raw: Any, wanted: Any) -> bool:
    """Equal, and both or neither of them true or false: Python's ``True == 1`` would drop what a rule does not name."""
    return bool(raw == wanted) and isinstance(raw, bool) == isinstance(wanted, bool)


def _label_points(grid: Grid, chosen: Sequence[tuple[dict[str, Value], int | None]]) -> list[GridPoint]:
    """Points with labels: equal settings share one, different settings never do."""
    short_keys = shorten_keys(list(grid.axes))
    # The combination that each label belongs to.
    labelled: dict[str, dict[str, Value]] = {}
    points = []
    for combination, seed in chosen:
        base_label = _base_label(grid, combination, short_keys)
        label = base_label
        number = 1
        # Two values may have one text: the slugs of "verl/k3" and "verl-k3" are equal.
        while labelled.setdefault(label, combination) != combination:
            number += 1
            if number > MAX_NAMESAKES:
                allowed = f"at most {MAX_NAMESAKES} cells of one name"
                raise bad_value("grid", base_label, f"{allowed}; name values, as in grid: {{key: {{my-name: ...}}}}")
            # The number depends on the order of the file alone, so that planning again gives the same names.
            label = f"{base_label}-{number}"
        settings = {}
        values = {}
        for key, value in combination.items():
            settings[key] = value.raw
            values[key] = value.label or value_text(value.raw)
        points.append(GridPoint(label=label, seed=seed, settings=settings, values=values))
    return points


def _base_label(grid: Grid, combination: Mapping[str, Value], short_keys: Mapping[str, str]) -> str:
    """The values of the axes that have several, joined; the grid's name where no axis has."""
    parts = []
    for key, value in combination.items():
        # A key of one value does not tell cells apart.
        if len(grid.axes[key]) > 1:
            parts.append(value_label(key, value, short_keys[key]))
    label = "-".join(parts) or grid.name
    if len(label) > MAX_NAME:
        allowed = f"names of at most {MAX_NAME} characters, since they name folders; name values, as in"
        raise bad_value("grid", label, f"{allowed} grid: {{key: {{my-name: ...}}}}")
    return label
