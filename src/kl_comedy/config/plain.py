"""Plain data (from a YAML file of its own) as a checked dataclass, with the errors that a run's config has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from kl_comedy.config.fields import check_fields, check_shape
from kl_comedy.errors import UserError, nearest

T = TypeVar("T")


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises :class:`UserError` where there is none."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; a config is a file")
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path("configs")
        names = [str(file) for file in sorted(folder.glob("*.y*ml"))]
        near = nearest(str(path), names)
        hint = f"; did you mean {near}?" if near else (f"; there are: {', '.join(names)}" if names else "")
        raise UserError(f"no such config file: {path}{hint}")
    try:
        raw = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, DictConfig):
        raise UserError(f"{path}: a config is a mapping of keys to values, and this file holds a {type(raw).__name__}")
    plain = OmegaConf.to_container(raw, resolve=False)
    assert isinstance(plain, dict)
    return cast(dict[str, Any], plain)


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
