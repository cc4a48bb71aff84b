"""What a launch file sets, whatever its syntax: settings with their origin, and what it leaves to others."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kl_comedy.errors import UserError, shown
from kl_comedy.io import MAX_FILE_BYTES, MAX_KEY_PARTS, MAX_VALUES
from kl_comedy.peers.launch_shell import CERTAIN, Origin, Word
from kl_comedy.peers.systems import flag_key

Reader = Callable[[str, "Parsed"], None]
"""Adds what a text sets."""


@dataclass(frozen=True)
class Setting:
    """A key with its text: None for a lone ``--key``. ``literal``: whether the text is the value.

    ``scope`` is the class or function of Python that gets it; empty elsewhere. ``is_added``: written as Hydra's
    ``+key``, which is an error for a key that the config has. ``is_next_word``: the text is the word that follows
    ``--key``, which may be an argument of its own.
    """

    key: str
    text: str | None
    literal: bool = True
    origin: Origin = CERTAIN
    scope: str = ""
    is_added: bool = False
    is_next_word: bool = False


@dataclass(frozen=True)
class Unread:
    """Something that the file leaves to others: ``what`` it is, and the ``scope`` that it may set."""

    what: str
    scope: str = ""
    may_hold_all: bool = False
    """Whether it may hold all settings: a config that a command names, ``**options`` of a class."""


@dataclass
class Parsed:
    """Everything that a file sets, in order, and by which other words its system can be told."""

    settings: list[Setting] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    """Programs, modules and arguments of commands, and pairs of such words, as ``swift sft``."""
    calls: list[str] = field(default_factory=list)
    """Classes and functions that Python calls, and base classes."""
    imports: list[str] = field(default_factory=list)
    sections: set[str] = field(default_factory=set)
    """Every prefix of a key."""
    unread: list[Unread] = field(default_factory=list)
    configs: list[Word] = field(default_factory=list)
    """Files that a command takes settings from."""
    started: list[str] = field(default_factory=list)
    """Scripts and modules that a command starts: what they set is not read."""
    own_modules: list[str] = field(default_factory=list)
    """Modules from which a Python program imports a function that trains, by its name."""
    is_config: bool = False
    """Whether the file is YAML, JSON or TOML, and no program."""
    is_pasted: bool = False
    """Whether it is a text in place of a file."""
    is_imported: bool = False
    """Whether the file is a Python module that only defines classes and functions: another program imports it."""
    idle_trainer: str = ""
    """The class of a trainer that a Python program makes and never starts."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that a job or the script around a command gives it."""
    written_files: list[str] = field(default_factory=list)
    """Words of commands that write a here-document: the file is among them."""
    origin: Origin = CERTAIN
    """That of everything which is being read: a command inside a command has the origin of its word."""
    readers: Mapping[str, Reader] = field(default_factory=dict)
    """The readers of texts inside a file, by suffix; that of "" is for every other suffix."""
    documents: int = 0
    files: int = 0
    """Base configs and configs of commands that were read."""
    characters: int = 0
    """Of those files together."""
    written: int = 0

    def add(self, setting: Setting) -> None:
        if setting.key.count(".") >= MAX_KEY_PARTS:
            raise UserError(f"the key {shown(setting.key)} has more than {MAX_KEY_PARTS} parts")
        key = flag_key(setting.key)
        origin = setting.origin
        # The loop around a command bears on those of its words that are one of the loop's values.
        if self.origin.kind != "loop" or str(setting.text) in re.split(r"[ ,]", self.origin.why):
            origin = origin.within(self.origin)
        is_added = setting.key.startswith("+") and not setting.key.startswith("++")
        self.settings.append(replace(setting, key=key, origin=origin, is_added=is_added))
        parts = key.split(".")
        for n in range(1, len(parts)):
            self.sections.add(".".join(parts[:n]))
        if len(self.settings) > MAX_VALUES:
            raise UserError(f"sets more than {MAX_VALUES:,} keys; a launch script or config is expected")

    def read(self, text: str, suffix: str) -> None:
        """Add what a text sets, by the suffix of its file."""
        self.readers.get(suffix, self.readers[""])(text, self)

    @contextlib.contextmanager
    def within(self, origin: Origin) -> Iterator[None]:
        """While this lasts, what is added has at most the certainty of ``origin``."""
        before = self.origin
        self.origin = origin.within(before)
        try:
            yield
        finally:
            self.origin = before

    def count_written(self, text: str) -> str:
        """``text``, the value of a variable at one place: lines such as ``a=$a$a`` double it each time."""
        self.written += len(text)
        if self.written > MAX_FILE_BYTES:
            raise UserError(f"its variables stand for more than {MAX_FILE_BYTES:,} characters")
        return text


def plain_text(value: Any) -> tuple[str, bool]:
    """A value as one types it, and whether it is a literal that a flag can have."""
    if isinstance(value, str):
        return value, True
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value).replace("null", "none"), True
    return type(value).__name__, False


def is_literal(text: str) -> bool:
    """Whether a value is its own text: no variable of OmegaConf, and none of a template."""
    return "${" not in text and "{{" not in text
