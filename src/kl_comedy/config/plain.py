"""Plain data (from a YAML file of its own) as a checked dataclass, with the errors that a run's config has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kl_comedy.config import load
from kl_comedy.errors import UserError

T = TypeVar("T")


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises :class:`UserError` where there is none."""
    return load._read(path)


def record_of(schema: type[T], raw: Mapping[str, Any], *, origin: str) -> T:
    """``raw`` as ``schema``, defaults filled in and every field checked. ``origin`` begins each message."""
    try:
        load._check_shape(raw, schema, "")
        merged = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.create(dict(raw)))
        OmegaConf.resolve(merged)
        found = OmegaConf.to_object(merged)
        assert isinstance(found, schema)
        load._check_fields(found, "")
    except OmegaConfBaseException as error:
        raise UserError(f"{origin}: {error.full_key or 'it'}: {load._first_line(error)}") from None
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None
    return found
