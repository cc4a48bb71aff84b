"""From a sparse YAML file and ``key=value`` overrides to a checked :class:`Config`.

    defaults <- file <- overrides (plain data)  -> interpolations -> parse_record -> check_combinations -> Config

Every mistake is one :class:`UserError` that names the key, what was given, what is allowed and the nearest right name.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import logging
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kl_comedy.config.combinations import check_combinations
from kl_comedy.config.schema import Config
from kl_comedy.config.validate import field_types, parse_record, without_none
from kl_comedy.errors import UserError, bad_value
from kl_comedy.io import read_yaml

log = logging.getLogger("kl_comedy")

RENAMED_VALUES: dict[tuple[str, str], dict[str, str]] = {("train", "strategy"): {"fsdp1": "fsdp"}}
"""Values of earlier versions and what they are called now; read with a warning."""

NOT_IDENTITY = ("output", "resume", "audit", "tracking")
"""Keys that say where a run is stored or what is measured on the way, not what it is; not in the config hash."""

NOT_IDENTITY_WITHIN = {
    "train": ("strategy", "devices", "nodes"),
    "rollout": ("replica_gib", "bucket_mib"),
}
"""Nested keys that are not in the hash: a run may resume on another number of processes."""

NOT_IDENTITY_WHERE_EMPTY = ("callbacks", "trainer")
"""Keys not in the hash at their default, so that runs from before these keys existed keep their hash."""


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read ``path`` (None: defaults only), apply ``key=value`` overrides, check everything.

    Raises :class:`UserError` for any mistake. Names of registered parts are checked; plugins must be loaded before.
    """
    return config_reader(path)(overrides)


def config_reader(path: str | Path | None) -> Callable[[Sequence[str]], Config]:
    """Read ``path`` once; the function returned applies overrides to it: many configs from one file."""
    base = to_plain(Config())
    if path is not None:
        for name, item in read_yaml(Path(path)).items():
            _merge(base, name, item, _schema_within(Config, name))
    return lambda overrides: _finish(copy.deepcopy(base), overrides)


def _finish(plain: dict[str, Any], overrides: Sequence[str]) -> Config:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for text in overrides:
        _override(plain, text)
    try:
        plain = typing.cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(plain), resolve=True))
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'config'}: {str(error).strip().splitlines()[0]}") from None
    _rename(plain)
    config = parse_record(Config, plain)
    check_combinations(config)
    return config


def to_plain(config: Config) -> dict[str, Any]:
    """The resolved config as plain data."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """The resolved config as YAML that :func:`load_config` reads back."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(to_plain(config)))


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys to leaves.

    >>> flatten({"a": {"b": 1}, "c": [2]})
    {'a.b': 1, 'c.0': 2}
    """
    if isinstance(value, Mapping) and value:
        items = [(str(name), item) for name, item in value.items()]
    elif isinstance(value, list | tuple) and value:
        items = [(str(position), item) for position, item in enumerate(value)]
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for name, item in items:
        flat |= flatten(item, f"{prefix}.{name}" if prefix else name)
    return flat


def config_hash(config: Config, *, without: Sequence[str] = ()) -> str:
    """sha256 (first 12 hex digits) of what the run is; ``without=("seed",)`` makes seeds share a hash."""
    plain = to_plain(config)
    for name in (*NOT_IDENTITY, *without):
        del plain[name]
    for name in NOT_IDENTITY_WHERE_EMPTY:
        if not plain[name]:
            del plain[name]
    for section, names in NOT_IDENTITY_WITHIN.items():
        plain[section] = {name: item for name, item in plain[section].items() if name not in names}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]


def _override(plain: dict[str, Any], text: str) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"override {text!r}: write key=value, as in optimizer.lr=1e-4")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{key}: cannot read the value {value!r}: {' '.join(str(error).split())}") from None
    _set(plain, Config, key.split("."), typing.cast(dict[str, Any], parsed)["value"], key)


def _set(node: Any, schema: Any, parts: Sequence[str], item: Any, key: str) -> None:
    """Set what ``parts`` names within ``node``. Setting ``kl.beta`` on a recipe's name makes it a mapping."""
    name: Any = parts[0]
    if isinstance(node, list):
        if not name.isdigit() or int(name) >= len(node):
            there = f"a position in the list, which has {len(node)} item(s)"
            raise bad_value(key, item, there, f"{name!r} is none")
        name = int(name)
    part_schema = _schema_within(schema, parts[0])
    if len(parts) == 1:
        _merge(node, name, item, part_schema)
        return
    child = node[name] if isinstance(node, list) else node.get(name)
    if isinstance(child, str) and key.startswith("kl."):
        child = {"recipe": child}
    node[name] = child = child if isinstance(child, dict | list) else {}
    _set(child, part_schema, parts[1:], item, key)


def _merge(node: Any, name: Any, item: Any, schema: Any) -> None:
    """Set ``node[name]``. A mapping with a schema is merged; a list or a free-form mapping replaces what was there."""
    current = node[name] if isinstance(node, list) else node.get(name)
    of_records = typing.get_origin(schema) is dict and dataclasses.is_dataclass(typing.get_args(schema)[1])
    if isinstance(item, dict) and isinstance(current, dict) and (dataclasses.is_dataclass(schema) or of_records):
        for part, value in item.items():
            _merge(current, part, value, _schema_within(schema, part))
    else:
        node[name] = item


def _schema_within(schema: Any, name: str) -> Any:
    """The type of a field of a dataclass, or of an item of a mapping or list; Any where there is none."""
    if dataclasses.is_dataclass(schema):
        return without_none(field_types(typing.cast(type, schema)).get(name, Any))[0]
    args = typing.get_args(schema)
    return args[-1] if args and typing.get_origin(schema) in (dict, list) else Any


def _rename(plain: dict[str, Any]) -> None:
    for (section, name), names in RENAMED_VALUES.items():
        values = plain[section]
        if isinstance(values, dict) and values.get(name) in names:
            log.warning("%s.%s: %s is now called %s", section, name, values[name], names[values[name]])
            values[name] = names[values[name]]
