"""What a shell completes: names of configs, keys of a config, and the values that a key takes.

Typer calls these functions in a process of its own for each press of the tab key; ``kl-comedy --install-completion``
sets the shell up. Nothing here may print, and what needs torch is imported for the keys alone that need it.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

Completion = tuple[str, str]
"""A word, and the text that shells with descriptions show beside it."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a config: its type without None, the rules of its field, and its default as a command line writes it."""

    hint: Any
    rules: Mapping[str, Any]
    default: str | None

    @property
    def doc(self) -> str:
        return str(self.rules.get("doc", ""))


def complete_config(incomplete: str) -> list[Completion]:
    """Configs and grids that come with the package, and the YAML files that the path begun leads to."""
    from kl_comedy.config.shipped import SUFFIXES, shipped_names

    completions = []
    for name in shipped_names():
        completions += [(word, "") for word in dict.fromkeys((name, name.rpartition("/")[2]))]
    folder, slash, _ = incomplete.rpartition("/")
    for path in sorted(Path(folder or ".").glob("*")):
        word = f"{folder}{slash}{path.name}"
        if path.is_dir():
            completions.append((f"{word}/", ""))
        elif path.suffix in SUFFIXES:
            completions.append((word, ""))
    return completions


def complete_override(context: typer.Context, incomplete: str) -> list[Completion]:
    """Keys of a config, or the values of the key that was typed."""
    key, equals, _ = incomplete.partition("=")
    if equals:
        return [(f"{key}={value}", doc) for value, doc in _values_of(key)]
    # bash splits a word at `=` and wants the part behind it.
    key_before = _key_before(context.params.get("overrides") or [])
    if key_before is not None:
        return _values_of(key_before)

    completions = []
    matching = {name: key for name, key in config_keys(incomplete).items() if name.startswith(incomplete)}
    for name, key_of_config in matching.items():
        completions.append((f"{name}=", key_of_config.doc))
    if len(matching) == 1:
        # A second word, or the shell would put a space behind the `=`.
        (name,) = matching
        completions += [(f"{name}={value}", doc) for value, doc in _values_of(name)]
    return completions


def _key_before(words: Sequence[str]) -> str | None:
    """The key of which the next word is the value: of ``key =``, or of ``key`` where the `=` itself is completed."""
    if words and words[-1] == "=":
        return words[-2] if len(words) > 1 else None
    is_value = len(words) > 1 and words[-2] == "="
    if words and "=" not in words[-1] and not is_value:
        return words[-1]
    return None


def _values_of(name: str) -> list[Completion]:
    """The values of a key: those it is limited to, or its default as an example."""
    from kl_comedy.registry import KINDS

    key = config_keys(name).get(name)
    if key is None:
        return []
    if name == "resume":
        return [("never", ""), ("auto", "")]
    if name == "kl":
        return [(recipe, "") for recipe in KINDS["recipes"].names()]
    if "choices" in key.rules:
        return [(str(choice), "") for choice in key.rules["choices"]]
    if "registry" in key.rules:
        return [(entry.name, entry.summary) for entry in KINDS[key.rules["registry"]]]
    if key.hint is bool:
        return [("true", ""), ("false", "")]
    if key.default is None:
        return []
    return [(key.default, "default")]


def config_keys(beginning: str = "") -> dict[str, Key]:
    """The dotted keys of a config. Those of a KL term, which need torch, only where ``beginning`` leads to one."""
    from kl_comedy.config import Config

    keys = dict(_keys_of(Config, ""))
    term = re.match(r"kl\.[0-9]+\.", beginning)
    if term is not None:
        from kl_comedy.kl.term import KLTerm

        keys |= dict(_keys_of(KLTerm, term[0]))
    return keys


def _keys_of(schema: Any, prefix: str) -> Iterator[tuple[str, Key]]:
    """The keys of a dataclass and of those within it. An item of a list is its first one; names of the user's own,
    as those of evaluation sets, are not known."""
    from kl_comedy.config.validate import field_types, without_none

    for item in dataclasses.fields(schema):
        name = f"{prefix}{item.name}"
        hint, _ = without_none(field_types(schema)[item.name])
        items = typing.get_args(hint)
        if dataclasses.is_dataclass(hint):
            yield from _keys_of(hint, f"{name}.")
            continue
        if typing.get_origin(hint) is list and dataclasses.is_dataclass(items[0]):
            yield from _keys_of(items[0], f"{name}.0.")
            continue
        yield name, Key(hint=hint, rules=item.metadata, default=_default_text(item))


def _default_text(item: dataclasses.Field[Any]) -> str | None:
    """The default of a field as an override writes it; None for mappings and lists, and where there is none."""
    default = item.default
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, str | int | float) and default != "":
        return str(default)
    return None
