"""From a sparse YAML file and ``key=value`` overrides to a checked :class:`Config`.

Every mistake is one :class:`UserError` that names the key, what was given, what is allowed and the
nearest right name.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from kl_comedy.config.combinations import check_combinations
from kl_comedy.config.schema import Config
from kl_comedy.config.validate import check_fields, check_shape, first_line
from kl_comedy.errors import UserError, bad_value
from kl_comedy.io import read_yaml

NOT_IDENTITY = ("output", "resume", "audit", "tracking")
"""Keys that say where a run is kept or what is measured on the way, not what it is; not in the config hash."""

NOT_IDENTITY_WITHIN = {
    "train": ("strategy", "devices", "nodes"),
    "rollout": ("replica_gib", "bucket_mib"),
}
"""The same of keys within rooms: on how many processes a run runs, so that it can go on with another number."""


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read ``path`` (None: defaults only), apply ``key=value`` overrides, check everything.

    Names that live in a registry are checked against it, so the rooms must have been imported.
    Raises :class:`UserError` for any mistake.
    """
    return config_reader(path)(overrides)


def config_reader(path: str | Path | None) -> Callable[[Sequence[str]], Config]:
    """Read and check ``path`` once; what is returned applies overrides to it: many configs from one file."""
    base = OmegaConf.structured(Config)
    if path is not None:
        base = _merge(base, read_yaml(Path(path)), str(path))
    return lambda overrides: _finish(copy.deepcopy(base), overrides)


def _finish(merged: Any, overrides: Sequence[str]) -> Config:
    for text in overrides:
        merged = _override(merged, text)
    try:
        OmegaConf.resolve(merged)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'config'}: {first_line(error)}") from None
    assert isinstance(config, Config)
    check_fields(config, "")
    check_combinations(config)
    return config


def to_plain(config: Config) -> dict[str, Any]:
    """The resolved config as plain data."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """The resolved config as YAML that :func:`load_config` reads back."""
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
    plain = {name: item for name, item in to_plain(config).items() if name not in (*NOT_IDENTITY, *without)}
    for room, names in NOT_IDENTITY_WITHIN.items():
        plain[room] = {name: item for name, item in plain[room].items() if name not in names}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]


def _merge(base: Any, raw: dict[str, Any], origin: str) -> Any:
    check_shape(raw, Config, "")
    try:
        merged = OmegaConf.merge(base, OmegaConf.create({name: item for name, item in raw.items() if name != "kl"}))
        if "kl" in raw:  # a name, a mapping or a list: it replaces the default list, with which only a list could merge
            merged.kl = raw["kl"]
        return merged
    except OmegaConfBaseException as error:
        raise _translated(error, origin) from None


def _override(base: Any, text: str) -> Any:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"override {text!r}: write key=value, as in optimizer.lr=1e-4")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{key}: cannot read the value {value!r}: {' '.join(str(error).split())}") from None
    item = typing.cast(dict[str, Any], parsed)["value"]
    parts = key.split(".")
    if parts[0] == "kl":
        return _override_terms(base, parts[1:], item, key)
    check_shape(_nested(parts, item), Config, "")
    try:
        OmegaConf.update(base, key, item, merge=not _is_free_form(base, key))
    except OmegaConfBaseException as error:
        raise _translated(error, f"override {text!r}") from None
    except (IndexError, ValueError, AssertionError):
        raise UserError(f"{key}: there is no such position in the list; got {value!r}") from None
    return base


def _is_free_form(base: Any, key: str) -> bool:
    """Whether the key holds a mapping without a schema (options, fields, tags): an override replaces it whole."""
    held = OmegaConf.select(base, key, throw_on_missing=False)
    return (
        isinstance(held, DictConfig)
        and OmegaConf.get_type(held) is dict
        and not any(isinstance(item, DictConfig) for item in held.values())
    )


def _override_terms(base: Any, parts: list[str], item: Any, key: str) -> Any:
    """Set ``kl`` as a whole, ``kl.<n>.<field>``, or ``kl.beta`` on a recipe; terms are built and checked later."""
    if not parts:
        base.kl = item
        return base
    terms = base.kl
    if isinstance(terms, str):
        terms = OmegaConf.create({"recipe": terms})
        base.kl = terms
        terms = base.kl
    if isinstance(terms, ListConfig):
        if not parts[0].isdigit() or int(parts[0]) >= len(terms):
            raise bad_value(key, item, [f"kl.{n}" for n in range(len(terms))], f"kl has {len(terms)} term(s)")
        if len(parts) == 1:
            terms[int(parts[0])] = item
            return base
        terms, parts = terms[int(parts[0])], parts[1:]
    if not isinstance(terms, DictConfig):
        raise UserError(f"{key}: kl holds {terms!r}, which has no fields to set")
    OmegaConf.update(terms, ".".join(parts), item, merge=True, force_add=True)
    return base


def _nested(parts: list[str], item: Any) -> Any:
    for part in reversed(parts):
        item = {part: item}
    return item


def _translated(error: OmegaConfBaseException, origin: str) -> UserError:
    return UserError(f"{error.full_key or origin}: {first_line(error)}")
