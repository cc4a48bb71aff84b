"""The answers of the form 'which flag?': what each system's flags optimize, computed before: the page has no server.

Every combination of the values that the form offers is read by the rules of `kl-comedy explain` and certified by
enumeration. Equal answers are stored once, as numbers of lines that are stored once too. The way to an answer is a
table for each flag: most flags change little, and equal rows stand in it once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle.certificate import certify
from kl_comedy.peers.systems import NAMES, SYSTEMS, Flag, Reading, System, Value, format_value, read_flags

REGIMES = ("on_policy", "off_policy")
MOST_ANSWERS = 30_000
"""Combinations of one system. Flags are offered while there are fewer, those that name the KL first."""
ON = 0.01
"""The coefficient that stands for every one above 0: answers depend on whether it is."""


def options_of(flag: Flag) -> list[Value]:
    """The values that the form offers for a flag, its default first."""
    values: list[Value] = [flag.default]
    if flag.choices:
        values += flag.choices
    elif flag.is_switch:
        values += [False, True]
    else:
        values += [0.0, ON]
    if flag.nullable:
        values.append(None)
    # Compared with their types: 0 and false are two answers.
    chosen: dict[str, Value] = {}
    for value in values:
        chosen.setdefault(repr(value), value)
    # One number above 0 is enough, and the default is the better one.
    if _is_number_above_0(flag) and flag.default != ON:
        chosen.pop(repr(ON), None)
    return list(chosen.values())


def offered(system: System) -> list[Flag]:
    """The flags in the form: those with a choice, while the combinations are at most :data:`MOST_ANSWERS`."""
    flags = []
    combinations = 1
    # Stable: within a rank the order is that of the file.
    for flag in sorted(system.flags, key=_rank):
        count = len(options_of(flag))
        if combinations * count > MOST_ANSWERS:
            continue
        combinations *= count
        flags.append(flag)
    return flags


def _rank(flag: Flag) -> int:
    """Which flags come first: those that decide whether and where there is a KL."""
    if _is_number_above_0(flag):
        # On already; a form that leaves it out leaves nothing open.
        return 3
    if "kl" in flag.name or "beta" in flag.name:
        return 0
    if "adv" in flag.name:
        return 1
    return 2


def _is_number_above_0(flag: Flag) -> bool:
    return isinstance(flag.default, float) and flag.default > 0


def answers() -> dict[str, Any]:
    """Everything that the form needs, by system."""
    lines: dict[str, int] = {}
    texts: dict[tuple[int, ...], int] = {}
    systems = {}
    for name in NAMES:
        system = SYSTEMS[name]
        flags = offered(system)
        # The first flag changes slowest, as steps_to expects.
        combinations = itertools.product(*[options_of(flag) for flag in flags])
        numbers = []
        for values in combinations:
            given = {flag.name: value for flag, value in zip(flags, values, strict=True)}
            answer = tuple(lines.setdefault(line, len(lines)) for line in _answer(system, given))
            numbers.append(texts.setdefault(answer, len(texts)))
        options = [len(options_of(flag)) for flag in flags]
        systems[name] = {**described(system), "steps": steps_to(numbers, options)}
    return {"systems": systems, "answers": list(texts), "lines": list(lines)}


def steps_to(numbers: Sequence[int], options: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """A table for each flag, which leads from its row and the option chosen to the row of the next flag's table.

    The first table has one row, and the last one leads to ``numbers``: those of all combinations of ``options`` values,
    the first flag changing slowest.

    >>> steps_to([7, 7, 7, 8], [2, 2])
    [[(0, 1)], [(7, 7), (7, 8)]]
    """
    tables = []
    for count in reversed(options):
        rows: dict[tuple[int, ...], int] = {}
        choices = [tuple(numbers[start : start + count]) for start in range(0, len(numbers), count)]
        numbers = [rows.setdefault(choice, len(rows)) for choice in choices]
        tables.append(list(rows))
    return tables[::-1]


def described(system: System) -> dict[str, Any]:
    """What the form shows of a system beside its answers; ``changes``: what other releases do otherwise."""
    flags = offered(system)
    return {
        "title": system.title,
        "version": system.version,
        "source": system.source.strip(),
        "changes": list(dict.fromkeys(change.says for change in system.versions)),
        "flags": [_flag(flag) for flag in flags],
        "left_out": [flag.where for flag in system.flags if flag not in flags],
    }


def _flag(flag: Flag) -> dict[str, Any]:
    options = [format_value(value) for value in options_of(flag)]
    return {"name": flag.where, "meaning": flag.meaning, "options": options}


def _answer(system: System, given: dict[str, Value]) -> list[str]:
    """The lines of one answer. Each begins with what it is: terms, on_policy, off_policy, note, no effect, refused."""
    try:
        reading = read_flags(system, given)
    except UserError as error:
        return [f"refused: {error}"]
    lines = []
    if reading.terms is None:
        lines.append(f"no KL term: {reading.instead}")
    elif not reading.terms:
        lines.append("terms: none, nothing holds the policy to the reference")
    else:
        labels = [term.label() for term in reading.terms]
        lines.append(f"terms: {' + '.join(labels)}")
        lines += _verdicts(reading)
    lines += [f"no effect: {text}" for text in reading.no_ops]
    lines += [f"note: {text}" for text in reading.notes]
    return [" ".join(line.split()) for line in lines]


def _verdicts(reading: Reading) -> list[str]:
    lines = []
    for regime, verdict in zip(REGIMES, _certified(reading.certified_terms()), strict=True):
        if regime in reading.holds_in:
            lines.append(f"{regime}: {verdict}")
    return lines


@lru_cache(maxsize=4096)
def _certified(terms: tuple[KLTerm, ...]) -> Sequence[str]:
    certificates = {item.regime: item for item in certify("the form", terms, regimes=REGIMES)}
    return [certificates[regime].verdict for regime in REGIMES]


def sizes() -> dict[str, int]:
    """The number of combinations by system."""
    return {name: math.prod(len(options_of(flag)) for flag in offered(SYSTEMS[name])) for name in NAMES}
