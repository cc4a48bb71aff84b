"""The flags of other systems as users paste them: ``verl:actor.use_kl_loss=True,kl_loss_type=k3``.

A key may be the flag's name, an alias, or any tail of its dotted path; ``--key value`` and a lone ``--key``
(true) are read too. Whatever is not understood is a :class:`~kl_comedy.errors.UserError`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kl_comedy.errors import UserError, bad_value, unknown_key

Value = bool | float | str | None
Pair = tuple[str, str | None]
"""A key and its text; None for a lone switch."""

SWITCH = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag of a system that bears on its KL.

    Args:
        name: the short name; unique in its system.
        meaning: one line.
        default: the system's own default; its type says whether the flag is a switch, a number or a name.
        path: the dotted path in the system's config or command line; the name where empty.
        choices: the names it takes, for a flag that takes names.
        nullable: whether ``none`` is a value.
        aliases: other names that users paste (older versions, other entry points).
    """

    name: str
    meaning: str
    default: Value
    path: str = ""
    choices: tuple[str, ...] = ()
    nullable: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The path to write in the system's own config."""
        return self.path or self.name

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)

    @property
    def allowed(self) -> str:
        """What the flag takes, in words."""
        kind = ", ".join(self.choices) or ("true, false" if self.is_switch else "a number, at least 0")
        return kind + (", none" if self.nullable else "")

    def matches(self, key: str) -> bool:
        """Whether a normalized key is the name, an alias, or a tail of the path, in whole components."""
        return key in (self.name, *self.aliases) or f".{_normalize(self.where)}".endswith(f".{key}")

    def parse(self, text: str | None, key: str) -> Value:
        """The value of a text; ``key`` is named in the error."""
        if text is None:
            if self.is_switch:
                return True
            raise bad_value(key, "(nothing)", self.allowed, "only a switch may stand alone")
        plain = text.strip("\"'")
        lower = plain.lower()
        if self.nullable and lower in ("none", "null"):
            return None
        if self.choices:
            for choice in self.choices:
                if choice.lower() == lower:
                    return choice
            raise bad_value(key, plain, [*self.choices, *(["none"] if self.nullable else [])])
        if self.is_switch:
            if lower not in SWITCH:
                raise bad_value(key, plain, self.allowed)
            return SWITCH[lower]
        try:
            number = float(plain)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < 0:
            raise bad_value(key, plain, self.allowed)
        return number

    def row(self) -> dict[str, str]:
        """The flag as one row of ``kl-comedy list peers``."""
        return {
            "flag": self.where,
            "allowed": self.allowed,
            "default": format_value(self.default),
            "meaning": self.meaning,
        }


def format_value(value: Value) -> str:
    """A value as one types it.

    >>> format_value(True), format_value(None), format_value(0.001)
    ('true', 'none', '0.001')
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float | int) else value


def split(text: str) -> tuple[str, list[Pair]]:
    """``system:flags`` to the system's name and pairs of key and text.

    >>> split("verl: use_kl_loss=true, kl_loss_type = k3")
    ('verl', [('use_kl_loss', 'true'), ('kl_loss_type', 'k3')])
    >>> split("openrlhf:--algo.kl.use_loss --algo.kl.estimator k3")
    ('openrlhf', [('algo.kl.use_loss', None), ('algo.kl.estimator', 'k3')])
    """
    system, _, rest = text.partition(":")
    system = system.strip()
    pairs: list[Pair] = []
    option = ""  # a --key whose value may be the next word
    for word in re.sub(r"\s*=\s*", "=", rest).replace(",", " ").split():
        key, equals, value = word.partition("=")
        if option and (equals or word.startswith("--")):
            pairs.append((option, None))
            option = ""
        if equals:
            pairs.append((_normalize(key), value))
        elif word.startswith("--"):
            option = _normalize(word)
        elif option:
            pairs.append((option, word))
            option = ""
        else:
            raise bad_value(f"{system}:", word, "key=value, --key value or --switch, with commas or spaces between")
    return system, pairs + ([(option, None)] if option else [])


def resolve(system: str, flags: Sequence[Flag], pairs: Sequence[Pair]) -> dict[str, Value]:
    """The values of the flags that were given, by name.

    Raises:
        UserError: a key that matches no flag, or several; a flag given twice; a value that is not allowed.
    """
    given: dict[str, Value] = {}
    for key, text in pairs:
        flag = _find(system, flags, key, text)
        if flag.name in given:
            raise UserError(f"{system}.{key}: given twice (flag {flag.where})")
        given[flag.name] = flag.parse(text, f"{system}.{key}")
    return given


def render(system: str, flags: Sequence[Flag], given: Mapping[str, Value]) -> str:
    """Values back to the text that :func:`split` and :func:`resolve` read, with the system's own paths."""
    paths = {flag.name: flag.where for flag in flags}
    return f"{system}:" + ",".join(f"{paths[name]}={format_value(value)}" for name, value in given.items())


def _find(system: str, flags: Sequence[Flag], key: str, text: str | None) -> Flag:
    named = [flag for flag in flags if key == flag.name]
    matching = named or [flag for flag in flags if flag.matches(key)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        paths = ", ".join(flag.where for flag in matching)
        raise bad_value(f"{system}.{key}", "the bare key", paths, "several flags end like this")
    tail = key.rsplit(".", 1)[-1]
    misplaced = [flag.where for flag in flags if "." in key and flag.matches(tail)]
    if misplaced:
        raise UserError(f"{system}.{key}: no such key (given {text!r}); the flag is at {' or '.join(misplaced)}")
    raise unknown_key(f"{system}.{key}", text if text is not None else "true", [flag.name for flag in flags])


def _normalize(key: str) -> str:
    """``--kl-loss-type`` and ``+kl_loss_type`` are ``kl_loss_type``."""
    return key.strip("\"' ").lstrip("-+").replace("-", "_")
