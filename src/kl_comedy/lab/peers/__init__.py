"""What other systems' KL flags mean: ``system:key=value`` -> equivalent terms, words, no-ops, advice."""

from __future__ import annotations

from kl_comedy.lab.peers.flags import Flag, Value
from kl_comedy.lab.peers.systems import (
    GOALS,
    SYSTEMS,
    Advice,
    Goal,
    Reading,
    System,
    advise,
    find_system,
    is_peer,
    read,
    switched_on,
    target_of,
)

__all__ = [
    "GOALS",
    "SYSTEMS",
    "Advice",
    "Flag",
    "Goal",
    "Reading",
    "System",
    "Value",
    "advise",
    "find_system",
    "is_peer",
    "read",
    "switched_on",
    "target_of",
]
