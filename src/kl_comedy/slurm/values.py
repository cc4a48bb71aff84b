"""The values a grid key takes: lists, ranges, named values; how each is called and written on a command line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kl_comedy.errors import UserError, bad_value, unknown_key

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
