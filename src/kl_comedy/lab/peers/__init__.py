"""What other systems' KL flags mean: ``system:key=value`` -> equivalent terms, words, no-ops, advice.

    text -> flags.split, flags.resolve -> System.read (systems/NAME.py) -> Reading -> certificates
                                                            System.advice -> advice.advise

Facts were read in the sources of the versions each system names; nothing of theirs is imported.
"""

from __future__ import annotations

from collections.abc import Mapping

from kl_comedy.errors import bad_value
from kl_comedy.lab.peers.advice import GOALS, Advice, Goal, advise
from kl_comedy.lab.peers.flags import Flag, Value, defaults, resolve, split
from kl_comedy.lab.peers.reading import Meaning, Reading, System, reading_of, target_of
from kl_comedy.lab.peers.systems import SYSTEMS

__all__ = [
    "GOALS",
    "SYSTEMS",
    "Advice",
    "Flag",
    "Goal",
    "Meaning",
    "Reading",
    "System",
    "advise",
    "find_system",
    "is_peer",
    "read",
    "switched_on",
    "target_of",
]


def is_peer(text: str) -> bool:
    """Whether a text is meant for this room: it has a colon, or is the bare name of a system."""
    return ":" in text or _normal(text) in SYSTEMS


def find_system(name: str) -> System:
    """The system called ``name``; case and underscores do not matter. A miss names the nearest.

    >>> find_system("NeMo_RL").name
    'nemo-rl'
    """
    found = SYSTEMS.get(_normal(name))
    if found is None:
        raise bad_value("system", name, SYSTEMS)
    return found


def read(text: str) -> Reading:
    """Read ``system:key=value,...``; ``system:`` alone is the system with its defaults.

    Raises:
        UserError: an unknown system, flag or value, or flags that the system itself refuses.

    >>> read("verl:use_kl_loss=true,kl_loss_type=k3+").terms[0].label()
    'k3_reverse_token in loss gradient=k2'
    """
    name, pairs = split(text)
    system = find_system(name)
    return _read(system, resolve(system.name, system.flags, pairs))


def switched_on(reading: Reading) -> Reading | None:
    """The same flags with the KL turned on, where it is off and a flag turns it on."""
    if not reading.switch_on:
        return None
    return _read(SYSTEMS[reading.system], {**reading.given, **reading.switch_on})


def _read(system: System, given: Mapping[str, Value]) -> Reading:
    return reading_of(system, {**defaults(system.flags), **given}, given)


def _normal(name: str) -> str:
    return name.strip().rstrip(":").lower().replace("_", "-")
