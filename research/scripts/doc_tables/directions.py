"""How far the gradient of each convention is off its target's direction, by enumeration: one shape of table.

Settings that all these tables share, and the table: a row for each convention, a column for each part of the loss in
each regime, with the median over drawn instances and the largest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from doc_tables.common import table

from kl_comedy.kl.oracle import InstanceSettings

GROUP = 2
"""Completions of a prompt, which are an update."""
INSTANCES = 8
REGIMES = ("on_policy", "off_policy")
EXACT = 1e-7
"""What is left of a direction by rounding: a cosine of 1 is known to 1e-16, its angle to the root of that."""


class Convention(Protocol):
    """A row. ``used``: who does so, by code that was read."""

    @property
    def name(self) -> str: ...
    @property
    def used(self) -> str: ...


Cosines = Callable[[str, int], Mapping[str, Mapping[str, float]]]
"""From a regime and a seed, by part of the loss and name of the convention, to the cosine between gradient and target.
Where there is one part only, its name is empty."""


def settings_of(regime: str, seed: int) -> InstanceSettings:
    return InstanceSettings(regime=regime, seed=seed, parameters=6, distance=0.7, staleness=0.5)


def direction_table(title: str, conventions: Sequence[Convention], cosines: Cosines) -> str:
    """The table; ``title`` is that of its first column."""
    distances: dict[tuple[str, str, str], list[float]] = {}
    parts: dict[str, None] = {}
    for regime in REGIMES:
        for seed in range(INSTANCES):
            for part, by_name in cosines(regime, seed).items():
                parts[part] = None
                for name, cosine in by_name.items():
                    distances.setdefault((name, part, regime), []).append(off_direction(cosine))
    columns = [(part, regime) for part in parts for regime in REGIMES]
    head = [title]
    for part, regime in columns:
        words = regime.replace("_", "-")
        head.append(f"{part}, {words}" if part else words)
    rows = []
    for convention in conventions:
        cells = [_cell(distances[convention.name, part, regime]) for part, regime in columns]
        rows.append([convention.name, *cells, convention.used])
    return table([*head, "so in"], rows)


def off_direction(cosine: float) -> float:
    """The least distance of any multiple of a gradient to the target, over the target's length."""
    if cosine <= 0:
        return 1.0
    return math.sqrt(max(0.0, 1.0 - cosine * cosine))


def _cell(distances: Sequence[float]) -> str:
    if max(distances) < EXACT:
        return "0"
    return f"{statistics.median(distances):.0%} ({max(distances):.0%})"
