"""The number of config keys, which may shrink: a setting of one choice of another key is an option of that choice."""

import dataclasses
import typing

from kl_comedy.config import Config
from kl_comedy.config.validate import field_types, without_none


def keys_of(schema, prefix=""):
    """Every key that a config may set; those of a record within a list or a mapping once, options not at all."""
    keys = []
    for name, hint in field_types(schema).items():
        record, _ = without_none(hint)
        key = f"{prefix}{name}"
        if typing.get_origin(record) in (list, dict):
            record = typing.get_args(record)[-1]
            key = f"{key}.NAME"
        if dataclasses.is_dataclass(record):
            keys += keys_of(record, f"{key}.")
        else:
            keys.append(key)
    return keys


def test_there_are_no_more_keys_than_in_0_2():
    keys = keys_of(Config)
    assert len(keys) <= 120
    # The sets of data.eval have the keys of data.train, which a user learns once.
    assert len([key for key in keys if not key.startswith("data.eval.")]) <= 111
