"""Config keys of earlier versions: read with a warning under their new names, and kept in the config hash.

Stored runs resume, and sweeps find their cells, by a hash over the plain config. Its bytes are those of version 0.1:
:func:`in_layout_of_0_1` puts what has moved since back where it was. tests/config/test_hashes.py holds 77 hashes.
"""

from __future__ import annotations

import logging
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kl_comedy.config.schema import TrainConfig
from kl_comedy.errors import UserError, bad_value

log = logging.getLogger("kl_comedy")


@dataclass(frozen=True)
class Moved:
    """Keys of one section that are in another now."""

    section: str
    """The section that had the keys."""
    names: tuple[str, ...]
    options: str
    """The section that has them now, under the same names."""
    schema: type
    """Where their defaults are."""

    def default(self, name: str) -> Any:
        return getattr(self.schema(), name)


MOVED = (Moved("rollout", ("replica_gib", "bucket_mib"), "train", TrainConfig),)

REMOVED: dict[str, tuple[Any, str]] = {
    "lag.silence_limit_s": (60.0, "see rollout.options.request_timeout_s"),
    "lag.answer_limit_s": (3600.0, "see rollout.options.request_timeout_s"),
    "audit.sketch": (65536, "`kl-comedy audit --sketch` has it for a finished run"),
    "audit.blocks": (8, "`kl-comedy audit --blocks` has it for a finished run"),
    "tracking.flush_every": (10, "metrics are written to the store every 10 steps"),
}
"""Keys without effect: their defaults, and what a user who set another value is told."""

_WHOLE_DISTRIBUTION = "training samples from the whole distribution; evaluations take eval.sampling"

FIXED: dict[str, tuple[Any, str]] = {
    "model.lora.dropout": (0.0, "with dropout the trained policy is not the one that samples"),
    "rollout.top_p": (1.0, _WHOLE_DISTRIBUTION),
    "rollout.top_k": (0, _WHOLE_DISTRIBUTION),
    "rollout.min_p": (0.0, _WHOLE_DISTRIBUTION),
}
"""Keys that could have one value only, with the reason. They are still refused with it, rather than as unknown."""


def default_params() -> dict[str, Any]:
    """Dotted names of all old keys with their defaults: the values of runs that were stored without them."""
    defaults = {key: default for key, (default, _) in (REMOVED | FIXED).items()}
    for moved in MOVED:
        for name in moved.names:
            defaults[f"{moved.section}.{name}"] = moved.default(name)
    return defaults


def old_names_of(key: str) -> list[str]:
    """The keys of earlier versions that are read as the dotted ``key``."""
    old_keys = []
    options, _, name = key.rpartition(".")
    for moved in MOVED:
        if moved.options == options and name in moved.names:
            old_keys.append(f"{moved.section}.{name}")
    return old_keys


def current_name(old_key: str) -> str:
    """The key that a key of an earlier version is read as; a key that has not moved is its own.

    >>> current_name("rollout.bucket_mib"), current_name("train.steps")
    ('train.bucket_mib', 'train.steps')
    """
    for moved in MOVED:
        for name in moved.names:
            if f"{old_key}.".startswith(f"{moved.section}.{name}."):
                return f"{moved.options}.{old_key.removeprefix(f'{moved.section}.')}"
    return old_key


def read_old_names(plain: dict[str, Any]) -> None:
    """Put values of old keys where they belong now, in place, with one line of warning for each that was set.

    Sections are not checked yet: one that is not a mapping is left to the validator, which names the error. Raises
    :class:`UserError` for a value that a key must not have any more, and where old and new name say two things.
    """
    train = plain["train"]
    if isinstance(train, dict) and train.get("strategy") == "fsdp1":
        log.warning("train.strategy: fsdp1 is now called fsdp")
        train["strategy"] = "fsdp"
    for key, (default, advice) in REMOVED.items():
        section_name, _, name = key.rpartition(".")
        section = _section(plain, section_name)
        value = section.pop(name, default)
        if value != default:
            log.warning("%s is not used any more; %s", key, advice)
    for key, (only_value, why) in FIXED.items():
        section_name, _, name = key.rpartition(".")
        section = _section(plain, section_name)
        value = section.pop(name, only_value)
        if value != only_value:
            raise bad_value(key, value, str(only_value), why)
    for moved in MOVED:
        section = _section(plain, moved.section)
        for name in moved.names:
            if name in section:
                _move(plain, moved, name, section.pop(name))


def _move(plain: dict[str, Any], moved: Moved, name: str, value: Any) -> None:
    # A stored config has every key; most are at their defaults, and are nothing to report.
    default = moved.default(name)
    if value == default:
        return
    old_key = f"{moved.section}.{name}"
    new_key = f"{moved.options}.{name}"
    section = _section(plain, moved.options)
    if section.get(name, default) not in (default, value):
        raise UserError(f"{old_key}: got {value!r}, and {new_key} says {section[name]!r}; the first is its old name")
    log.warning("%s is now called %s", old_key, new_key)
    section[name] = value


def in_layout_of_0_1(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a whole plain config with every key where version 0.1 had it; the config hash is over this."""
    layout: dict[str, Any] = _copy(plain)
    for moved in MOVED:
        options = _section(layout, moved.options)
        for name in moved.names:
            value = options.pop(name, moved.default(name))
            _section(layout, moved.section)[name] = value
    for key, (default, _advice) in (REMOVED | FIXED).items():
        section_name, _, name = key.rpartition(".")
        # The default even where a file sets another value, since the key has no effect any more. A run without an
        # adapter gets no dropout of one: see above.
        _section(layout, section_name)[name] = default
    return layout


def _section(plain: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The mapping at a dotted key of ``plain``; where there is none (null, or not a mapping), a new one that is not
    part of ``plain``."""
    section: Any = plain
    for part in key.split("."):
        section = section.get(part)
        if not isinstance(section, dict):
            return {}
    return typing.cast(dict[str, Any], section)


def _copy(value: Any) -> Any:
    """``value`` with new mappings, so that keys can be moved in it."""
    if isinstance(value, Mapping):
        return {name: _copy(item) for name, item in value.items()}
    return value
