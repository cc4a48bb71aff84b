"""Suites as data: YAML files of the package by name, a user's own by path.

    YAML -> (extends: another, merged over it) -> SuiteConfig -> registry ``suites``

A suite is read when it is asked for; registering reads the files' heads only once, on import.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kl_comedy.data  # noqa: F401  (a suite may name any of its datasets)
from kl_comedy.config.plain import read_mapping, record_of
from kl_comedy.config.suites import SuiteConfig
from kl_comedy.errors import UserError, bad_value
from kl_comedy.registry import SUITES
from kl_comedy.rewards import check_options

DEFINITIONS = Path(__file__).with_name("definitions")
SUFFIXES = (".yaml", ".yml")


def register_suite(path: str | Path) -> str:
    """File the suite of a YAML file under its name, for scripts and plugins. Returns the name."""
    file = Path(path)
    raw = _with_base(read_mapping(file), file)
    suite = _built(raw, file)
    facts = {"kind_of_suite": suite.kind, "group": suite.group, "items": suite.items, "licence": suite.licence}
    SUITES.register(suite.name, source=suite.source, summary=suite.summary, raw=lambda: raw, file=str(file), **facts)(
        lambda: _built(raw, file)
    )
    return suite.name


def get_suite(name: str, *, key: str = "--suite") -> SuiteConfig:
    """The suite called ``name``, or that of a YAML file by path. Raises :class:`UserError` for a miss or a mistake."""
    if name.endswith(SUFFIXES):
        file = Path(name)
        if not file.is_file():
            raise bad_value(key, name, "an existing YAML file, or a name", f"known: {', '.join(SUITES.names())}")
        return _built(_with_base(read_mapping(file), file), file)
    suite: SuiteConfig = SUITES.get(name, key=key).fn()
    return suite


def _with_base(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """``raw`` merged over the suite it ``extends`` (mappings key by key; ``null`` takes a key away)."""
    own = dict(raw)
    named = own.pop("extends", None)
    if named is None:
        return own
    if not isinstance(named, str):
        raise bad_value(f"{file}: extends", named, "the name of a suite")
    if named not in SUITES and (DEFINITIONS / f"{named}.yaml").is_file() and file.parent == DEFINITIONS:
        base = _with_base(read_mapping(DEFINITIONS / f"{named}.yaml"), file)  # not registered yet
    else:
        base = copy.deepcopy(SUITES.get(named, key=f"{file}: extends").facts["raw"]())
    return _merged(base, own)


def _merged(base: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in own.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = _merged(dict(result[key]), value)
        else:
            result[key] = value
    return result


def _built(raw: Mapping[str, Any], file: Path) -> SuiteConfig:
    """The suite of checked data; what a suite cannot be is refused here."""
    suite = record_of(SuiteConfig, raw, origin=f"suite {file}")
    suite.name = suite.name or file.stem
    if not suite.name.replace("_", "").replace("-", "").replace(".", "").isalnum():
        raise bad_value(f"suite {file}: name", suite.name, "letters, digits, '.', '_' and '-', since it names a folder")
    suite.summary = suite.summary or f"the suite of {file.name}"
    suite.source = suite.source or str(file)
    if suite.data is None and (suite.file is None or not suite.file.path):
        raise UserError(f"suite {file}: it names no problems; give data (a dataset) or file.path")
    if suite.file is not None and (beside := file.parent / suite.file.path).is_file():
        suite.file.path = str(beside.resolve())
    if suite.kind == "generate":
        check_options(suite.reward.name, suite.reward.options, key=f"suite {file}: reward")
    return suite


for _file in sorted(DEFINITIONS.glob("*.yaml")):
    register_suite(_file)
