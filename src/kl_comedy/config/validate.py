"""The one validator: plain data (from YAML, JSON or an override) to a dataclass, with errors that name the key.

A schema is a dataclass. Its types are checked and converted; a field made by :func:`option` carries its documentation
and further rules. Records that come by the thousand, or from a process that is not trusted, are checked and not
converted: a table of :class:`Field` and :func:`record_fault`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kl_comedy.errors import UserError, bad_value, error_prefix, unknown_key
from kl_comedy.io import read_json
from kl_comedy.registry import KINDS, OWN_PART

T = TypeVar("T")

# Resolving type hints compiles their texts, and a sweep checks the same schemas thousands of times.
_FIELD_TYPES: dict[type, dict[str, Any]] = {}
_SCALARS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def option(default: Any, doc: str = "", **rules: Any) -> Any:
    """A dataclass field with its documentation and its rules.

    A callable ``default`` makes a new value each time; ``...`` makes the field required.

    Rules: ``choices`` (allowed values), ``registry`` (a kind whose names are allowed), ``minimum``, ``maximum`` and
    ``above`` (bounds of a number), ``parse`` (a function of value and key that returns the value to store), ``check``
    (a function of value and key that raises), ``check_keys`` (the same, of a mapping with keys at fault), ``terms``
    (a kind that says what else than a name is allowed). A value of None is not checked.
    """
    metadata = {"doc": doc, **rules}
    if default is ...:
        return dataclasses.field(metadata=metadata)
    # A list as a default would be shared by all instances, which dataclasses refuse.
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def parse_record(schema: type[T], raw: Any, *, key: str = "", origin: str = "") -> T:
    """The mapping ``raw`` as an instance of ``schema``: types converted, defaults filled in, every rule checked.

    ``key`` is where ``raw`` stands in a larger config and begins the keys of messages; ``origin`` (the name of a file)
    begins the messages. Raises :class:`UserError` for an unknown or missing key and for a value of a wrong kind.

    >>> @dataclasses.dataclass
    ... class Server:
    ...     port: int = option(8000, minimum=1)
    >>> parse_record(Server, {"port": 80}).port
    80
    >>> parse_record(Server, {"prt": 80}, key="servers.0")
    Traceback (most recent call last):
        ...
    kl_comedy.errors.UserError: servers.0.prt: no such key (given 80); did you mean 'port'? allowed: port
    """
    with error_prefix(origin) if origin else contextlib.nullcontext():
        # Before any value: a value may name a registered part, and its table imports torch, which takes seconds.
        _check_keys(schema, raw, key)
        return _record(schema, raw, key)


def check_record(record: Any, key: str = "") -> None:
    """Check types and rules of a dataclass that was built in Python. Raises :class:`UserError`."""
    hints = field_types(type(record))
    for item in dataclasses.fields(record):
        _value(getattr(record, item.name), hints[item.name], _joined(key, item.name), item.metadata)


def field_types(schema: type) -> dict[str, Any]:
    """The resolved type of each field."""
    if schema not in _FIELD_TYPES:
        _FIELD_TYPES[schema] = typing.get_type_hints(schema)
    return _FIELD_TYPES[schema]


def without_none(hint: Any) -> tuple[Any, bool]:
    """The type without None, and whether None is allowed; further alternatives stay a union."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint, False
    args = typing.get_args(hint)
    others = tuple(arg for arg in args if arg is not type(None))
    return typing.Union[others], len(others) < len(args)  # noqa: UP007  (built from data)


def _joined(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def _check_keys(hint: Any, raw: Any, key: str) -> None:
    """Raise :class:`UserError` for an unknown key in ``raw`` or in a record within it. No value is checked."""
    hint, _ = without_none(hint)
    args = typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(raw, Mapping):
        schema = typing.cast(Any, hint)
        hints = field_types(schema)
        fields = {item.name: item for item in dataclasses.fields(schema) if item.init}
        for name, item in raw.items():
            if name not in fields:
                raise unknown_key(_joined(key, name), item, fields)
            rules = fields[name].metadata
            if isinstance(item, Mapping):
                _check_keys(hints[name], item, _joined(key, name))
                if "check_keys" in rules:
                    rules["check_keys"](item, _joined(key, name))
            else:
                _check_keys(hints[name], item, _joined(key, name))
    elif isinstance(raw, Mapping) and len(args) == 2:
        for name, item in raw.items():
            _check_keys(args[1], item, f"{key}.{name}")
    elif isinstance(raw, list | tuple) and args:
        for position, item in enumerate(raw):
            _check_keys(args[0], item, f"{key}.{position}")


def _record(schema: type[T], raw: Any, key: str) -> T:
    hints = field_types(schema)
    fields = {item.name: item for item in dataclasses.fields(typing.cast(Any, schema)) if item.init}
    if not isinstance(raw, Mapping):
        raise bad_value(key or "config", raw, _describe(schema))
    values: dict[str, Any] = {}
    # Unknown keys first: a misspelled one would else be reported as a required key that is missing.
    for name, item in raw.items():
        if name not in fields:
            raise unknown_key(_joined(key, name), item, fields)
        values[str(name)] = _value(item, hints[name], _joined(key, name), fields[name].metadata)
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise _missing_key(key, name, field.metadata)
    try:
        return schema(**values)
    except UserError as error:
        # Raised by __post_init__, which knows the field's name but not where the record stands in the config.
        text = str(error)
        first_name = text.split(":")[0].split(".")[0]
        if first_name in fields:
            text = _joined(key, text)
        elif key:
            text = f"{key}: {text}"
        raise UserError(text) from None


def _missing_key(key: str, name: str, rules: Mapping[str, Any]) -> UserError:
    """The error for a required field ``name`` that the record at ``key`` does not set."""
    allowed = rules.get("choices", ())
    if "registry" in rules:
        allowed = KINDS[rules["registry"]].names()
    hint = ""
    if allowed:
        hint = f"; allowed: {', '.join(allowed)}"
    if "registry" in rules:
        hint = f"{hint} ({OWN_PART})"
    return UserError(f"{key or 'config'}: needs {name}{hint}")


def _value(value: Any, hint: Any, key: str, rules: Mapping[str, Any]) -> Any:
    # Its function decides about everything, types included.
    if "parse" in rules:
        return rules["parse"](value, key)
    inner, optional = without_none(hint)
    if value is None and (optional or inner is Any):
        return None
    value = _typed(value, inner, key)
    check_rules(value, rules, key)
    return value


def _typed(value: Any, hint: Any, key: str) -> Any:
    """``value`` as ``hint``, which excludes None."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    # A record that was built in Python is as good as a mapping.
    if hint is Any or (isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, hint)):
        return value
    if dataclasses.is_dataclass(hint):
        return _record(typing.cast(type, hint), value, key)
    if origin in (types.UnionType, typing.Union):
        return value  # the field's parse or check rule decides
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise bad_value(key, value, "a mapping")
        return {str(name): _value(item, args[1], f"{key}.{name}", {}) for name, item in value.items()}
    if origin in (list, tuple):
        # A text is a sequence of letters to Python.
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise bad_value(key, value, "a list")
        return origin(_value(item, args[0], f"{key}.{position}", {}) for position, item in enumerate(value))
    return scalar(value, hint, key)


def scalar(value: Any, hint: Any, key: str) -> Any:
    """``value`` as a ``hint`` of str, bool or number. Raises :class:`UserError`."""
    if hint is float and isinstance(value, str):  # YAML reads 1e-4 as text
        try:
            value = float(value)
        except ValueError:
            raise bad_value(key, value, _SCALARS[float]) from None
    # 100.0 and 1.0e+3 are floats in YAML; as a number of steps they are whole.
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    accepted = {float: int | float, str: str | int | float}.get(hint, hint)
    # Python's bool is an int, so `steps: true` would be read as 1.
    if hint is str and isinstance(value, bool):
        raise bad_value(key, value, _SCALARS[str], "YAML reads yes, no, on and off as true and false: quote the text")
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise bad_value(key, value, _SCALARS.get(hint, str(hint)))
    # No setting has a meaning at infinity, and NaN would pass every bound below.
    if hint is float and not is_finite(value):
        raise bad_value(key, value, "a finite number")
    if hint is bool:
        return value
    return hint(value)


def is_finite(value: float) -> bool:
    """Whether a number is neither NaN nor infinite; False for an integer above the largest float.

    >>> is_finite(1e300), is_finite(10**400), is_finite(float("nan"))
    (True, False, False)
    """
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_rules(value: Any, rules: Mapping[str, Any], key: str) -> None:
    if "choices" in rules and value not in rules["choices"]:
        raise bad_value(key, value, rules["choices"])
    if "registry" in rules:
        KINDS[rules["registry"]].get(value, key=key)
    if "minimum" in rules and value < rules["minimum"]:
        raise bad_value(key, value, f"at least {rules['minimum']:g}")
    if "maximum" in rules and value > rules["maximum"]:
        raise bad_value(key, value, f"at most {rules['maximum']:g}")
    if "above" in rules and value <= rules["above"]:
        raise bad_value(key, value, f"above {rules['above']:g}")
    if rules.get("whole") and value != int(value):
        raise bad_value(key, value, "a whole number")
    if "check" in rules:
        rules["check"](value, key)
    if "terms" in rules:
        KINDS[rules["terms"]].check(value, key)


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a record that is checked and not converted. ``kind``: the type of its column in a file of columns."""

    meaning: str
    accepts: Callable[[Any], bool]
    required: bool = True
    kind: str = ""


def record_fault(record: Mapping[str, Any], fields: Mapping[str, Field], *, others: bool = False) -> str | None:
    """The first thing that makes ``record`` unusable; None where there is none. ``others``: it may have more fields.

    >>> record_fault({"n": "1"}, {"n": Field("a count", is_count)}), record_fault({}, {"n": Field("a count", is_count)})
    ('n is not a count: 1', 'n is missing (a count)')
    """
    for name, field in fields.items():
        value = record.get(name)
        if value is None:
            if field.required:
                return f"{name} is missing ({field.meaning})"
        elif not field.accepts(value):
            return f"{name} is not {field.meaning}: {str(value)[:60]}"
    unknown = record.keys() - fields.keys()
    if unknown and not others:
        return f"{min(unknown)[:60]} is no field of it"
    return None


def read_fields(path: Path, kind: str, fields: Mapping[str, Field], *, root: Path | None = None) -> dict[str, Any]:
    """The JSON object in a file, which has ``fields`` and may have more. ``kind`` names it in messages.

    Raises :class:`UserError` for any other file, and for a link that leads out of ``root``.
    """
    content = read_json(path, kind, root=root)
    fault = record_fault(content, fields, others=True)
    if fault is not None:
        raise UserError(f"{path} is not a readable {kind} ({fault})")
    return content


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number of a size that a float has."""
    # By type, not isinstance: a bool is an int, and no number here.
    return type(value) in (int, float) and is_finite(value)


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def is_numbers_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(is_number(item) for item in value.values())


def fields_with_registry(record: Any) -> Iterator[tuple[str, str]]:
    """Kind and name in each field with the rule ``registry`` of a dataclass, of those within it too."""
    if isinstance(record, Mapping):
        record = list(record.values())
    if isinstance(record, list | tuple):
        for item in record:
            yield from fields_with_registry(item)
    if not dataclasses.is_dataclass(record) or isinstance(record, type):
        return
    for item in dataclasses.fields(record):
        value = getattr(record, item.name)
        if "registry" in item.metadata:
            yield item.metadata["registry"], value
        yield from fields_with_registry(value)


def _describe(hint: Any) -> str:
    if dataclasses.is_dataclass(hint):
        return "a mapping with the keys " + ", ".join(item.name for item in dataclasses.fields(hint))
    return _SCALARS.get(hint, str(hint))
