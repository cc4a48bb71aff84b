"""Data beside a schema of dataclasses: unknown keys, values of the wrong kind, and what a field's metadata allows.

Plain data (from a YAML file of its own) as a checked dataclass, with the errors that a run's config has.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kl_comedy.errors import UserError, bad_value, unknown_key
from kl_comedy.registry import KINDS

_PLAIN = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def check_shape(raw: Any, expected: Any, key: str) -> None:
    """Walk raw data beside the schema: unknown keys, and values of the wrong kind."""
    inner = _not_none(expected)
    if raw is None:
        if inner is expected and expected is not Any:
            raise bad_value(key, None, _describe(expected))
        return
    if isinstance(raw, str) and "${" in raw:
        return
    origin = typing.get_origin(inner)
    if dataclasses.is_dataclass(inner):
        if not isinstance(raw, Mapping):
            raise bad_value(key, raw, _describe(inner))
        hints = typing.get_type_hints(inner)
        for name, item in raw.items():
            full = f"{key}.{name}" if key else str(name)
            if name not in hints:
                raise unknown_key(full, item, hints)
            check_shape(item, hints[name], full)
    elif origin is dict:
        if not isinstance(raw, Mapping):
            raise bad_value(key, raw, "a mapping")
        for name, item in raw.items():
            check_shape(item, typing.get_args(inner)[1], f"{key}.{name}")
    elif origin is list:
        _check_list(raw, typing.get_args(inner)[0], key)
    elif inner in _PLAIN and not _fits(raw, inner):
        raise bad_value(key, raw, _PLAIN[inner])


def _check_list(raw: Any, item_type: Any, key: str) -> None:
    if isinstance(raw, Mapping):  # an override such as rewards.0.weight=2
        for name, item in raw.items():
            if not str(name).isdigit():
                raise bad_value(f"{key}.{name}", item, "a position in the list, as in " + f"{key}.0")
            check_shape(item, item_type, f"{key}.{name}")
        return
    if not isinstance(raw, list):
        raise bad_value(key, raw, "a list")
    for position, item in enumerate(raw):
        check_shape(item, item_type, f"{key}.{position}")


def _not_none(expected: Any) -> Any:
    if isinstance(expected, types.UnionType) or typing.get_origin(expected) is typing.Union:
        return next(arg for arg in typing.get_args(expected) if arg is not type(None))
    return expected


def _fits(raw: Any, wanted: type) -> bool:
    if wanted is float:
        if isinstance(raw, str):
            try:
                float(raw)
            except ValueError:
                return False
            return True
        return isinstance(raw, int | float) and not isinstance(raw, bool)
    if wanted is int:
        return isinstance(raw, int) and not isinstance(raw, bool)
    if wanted is str:
        return isinstance(raw, str | int | float) and not isinstance(raw, bool)
    return isinstance(raw, wanted)


def _describe(expected: Any) -> str:
    inner = _not_none(expected)
    if dataclasses.is_dataclass(inner):
        return "a mapping with the keys " + ", ".join(typing.get_type_hints(inner))
    if typing.get_origin(inner) in (dict, list):
        return "a mapping" if typing.get_origin(inner) is dict else "a list"
    return _PLAIN.get(inner, str(inner))


def check_fields(node: Any, key: str) -> None:
    """Check each field's declared choices, registry and bounds, all the way down."""
    for item in dataclasses.fields(node):
        value = getattr(node, item.name)
        full = f"{key}.{item.name}" if key else item.name
        if dataclasses.is_dataclass(value):
            check_fields(value, full)
        elif isinstance(value, list | dict):
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            for name, child in inner:
                if dataclasses.is_dataclass(child):
                    check_fields(child, f"{full}.{name}")
        elif value is not None:
            _check_value(value, item.metadata, full)


def _check_value(value: Any, facts: Mapping[str, Any], key: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise bad_value(key, value, "a finite number")
    if "choices" in facts and value not in facts["choices"]:
        raise bad_value(key, value, facts["choices"])
    if "registry" in facts:
        KINDS[facts["registry"]].get(value, key=key)
    if "minimum" in facts and value < facts["minimum"]:
        raise bad_value(key, value, f"at least {facts['minimum']:g}")
    if "maximum" in facts and value > facts["maximum"]:
        raise bad_value(key, value, f"at most {facts['maximum']:g}")
    if "above" in facts and value <= facts["above"]:
        raise bad_value(key, value, f"above {facts['above']:g}")


T = TypeVar("T")


def record_of(schema: type[T], raw: Mapping[str, Any], *, origin: str) -> T:
    """``raw`` as ``schema``, defaults filled in and every field checked. ``origin`` begins each message."""
    try:
        check_shape(raw, schema, "")
        merged = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.create(dict(raw)))
        OmegaConf.resolve(merged)
        found = OmegaConf.to_object(merged)
        assert isinstance(found, schema)
        check_fields(found, "")
    except OmegaConfBaseException as error:
        raise UserError(f"{origin}: {error.full_key or 'it'}: {first_line(error)}") from None
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None
    return found


def first_line(error: OmegaConfBaseException) -> str:
    """What OmegaConf says, without the object it prints below."""
    return str(error).strip().split("\n")[0]
