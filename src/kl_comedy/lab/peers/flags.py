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

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_NULL = ("none", "null")


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag of a system that bears on its KL.

    Args:
        name: how :mod:`kl_comedy.lab.peers` calls it; unique in its system.
        meaning: one line.
        default: the system's own default; its type says whether the flag is a switch, a number or a name.
        path: the dotted path it has in the system's config or command line; the name where empty.
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
    def allowed(self) -> str:
        """What the flag takes, in words."""
        kind = ", ".join(self.choices)
        if not kind:
            kind = "true, false" if self._is_switch else "a number, at least 0"
        return kind + (", none" if self.nullable else "")

    @property
    def _is_switch(self) -> bool:
        return isinstance(self.default, bool)

    def answers_to(self, key: str) -> bool:
        """Whether ``key`` (normalised) is the name, an alias, or a tail of the path, in whole components."""
        path = _normal(self.where)
        return key in (self.name, *self.aliases) or path == key or path.endswith(f".{key}")

    def read(self, text: str | None, key: str) -> Value:
        """The value of a text; ``key`` is named in the error."""
        if text is None:
            if self._is_switch:
                return True
            raise bad_value(key, "(nothing)", self.allowed, "only a switch may stand alone")
        plain = text.strip("\"'")
        if self.nullable and plain.lower() in _NULL:
            return None
        if self.choices:
            found = {choice.lower(): choice for choice in self.choices}.get(plain.lower())
            if found is None:
                raise bad_value(key, plain, [*self.choices, *(["none"] if self.nullable else [])])
            return found
        if self._is_switch:
            if plain.lower() in _TRUE + _FALSE:
                return plain.lower() in _TRUE
            raise bad_value(key, plain, self.allowed)
        return self._number(plain, key)

    def _number(self, plain: str, key: str) -> float:
        try:
            number = float(plain)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < 0:
            raise bad_value(key, plain, self.allowed)
        return number

    def row(self) -> dict[str, str]:
        """The flag as one row of ``kl-comedy list peers``."""
        return {"flag": self.where, "allowed": self.allowed, "default": written(self.default), "meaning": self.meaning}


def written(value: Value) -> str:
    """A value as one types it.

    >>> written(True), written(None), written(0.001)
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
    words = re.sub(r"\s*=\s*", "=", rest).replace(",", " ").split()
    pairs: list[Pair] = []
    waiting: str | None = None
    for word in words:
        key, equals, value = word.partition("=")
        if equals:
            pairs += [(waiting, None)] if waiting else []
            pairs.append((_normal(key), value))
            waiting = None
        elif word.startswith("--"):
            pairs += [(waiting, None)] if waiting else []
            waiting = _normal(word)
        elif waiting:
            pairs.append((waiting, word))
            waiting = None
        else:
            raise bad_value(
                f"{system.strip()}:", word, "key=value, --key value or --switch, with commas or spaces between"
            )
    pairs += [(waiting, None)] if waiting else []
    return system.strip(), pairs


def resolve(system: str, flags: Sequence[Flag], pairs: Sequence[Pair]) -> dict[str, Value]:
    """The values of the flags that were given, by name.

    Raises:
        UserError: a key no flag answers to, or several do; a key given twice; a value that is not allowed.
    """
    given: dict[str, Value] = {}
    for key, text in pairs:
        flag = _find(system, flags, key, text)
        if flag.name in given:
            raise UserError(f"{system}.{key}: given twice (flag {flag.where})")
        given[flag.name] = flag.read(text, f"{system}.{key}")
    return given


def defaults(flags: Sequence[Flag]) -> dict[str, Value]:
    return {flag.name: flag.default for flag in flags}


def render(system: str, flags: Sequence[Flag], given: Mapping[str, Value]) -> str:
    """Values back to the text that :func:`split` and :func:`resolve` read, with the system's own paths."""
    paths = {flag.name: flag.where for flag in flags}
    return f"{system}:" + ",".join(f"{paths[name]}={written(value)}" for name, value in given.items())


def _find(system: str, flags: Sequence[Flag], key: str, text: str | None) -> Flag:
    named = [flag for flag in flags if key == flag.name]
    found = named or [flag for flag in flags if flag.answers_to(key)]
    if len(found) == 1:
        return found[0]
    if found:
        paths = ", ".join(flag.where for flag in found)
        raise bad_value(f"{system}.{key}", "the bare key", paths, "several flags end like this")
    tail = key.rsplit(".", 1)[-1]
    misplaced = [flag.where for flag in flags if "." in key and flag.answers_to(tail)]
    if misplaced:
        raise UserError(f"{system}.{key}: no such key (given {text!r}); the flag is at {' or '.join(misplaced)}")
    raise unknown_key(f"{system}.{key}", text if text is not None else "true", [flag.name for flag in flags])


def _normal(key: str) -> str:
    """``--kl-loss-type`` and ``+kl_loss_type`` are ``kl_loss_type``."""
    return key.strip("\"' ").lstrip("-+").replace("-", "_")
