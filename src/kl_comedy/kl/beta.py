"""The coefficient of a term: a number, a schedule, or a controller that aims at a KL in nats.

:class:`BetaState` is the only state; it is part of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kl_comedy.config.validate import check_record, is_finite, option, parse_record
from kl_comedy.errors import bad_value

NEGATIVE = "below 0 the term pays for leaving the reference, and KL has no upper bound"
"""Why a negative coefficient is refused."""
LARGEST_ERROR = 0.2
"""Bound of the controller's relative error: one update measures a KL with noise, and must not move beta far."""
SHAPES = ("linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class BetaSchedule:
    """From ``start`` to ``end`` over ``steps`` updates, then constant."""

    start: float = option(..., "Coefficient of the first update.", minimum=0)
    end: float = option(..., "Coefficient from update `steps` on.", minimum=0)
    steps: int = option(..., "Updates between the two.", minimum=1)
    shape: str = option("linear", "How it moves between the two.", choices=SHAPES)

    def at(self, step: int) -> float:
        """The coefficient at an update count.

        >>> BetaSchedule(start=1.0, end=0.0, steps=10).at(5)
        0.5
        """
        # Clamped: a run may have more updates than the schedule.
        progress = min(max(step / self.steps, 0.0), 1.0)
        if self.shape == "cosine":
            # Half a period of the cosine: slow at both ends.
            progress = 0.5 * (1.0 - math.cos(math.pi * progress))
        return self.start + (self.end - self.start) * progress


@dataclass(frozen=True, kw_only=True)
class BetaTarget:
    """Keep the measured sequence KL to the term's reference near ``target`` nats, by a proportional controller.

    After each update ``beta *= 1 + gain * clip(kl / target - 1, -0.2, 0.2)`` (Ziegler et al. 2019, Sec. 2.2), clamped
    to ``[minimum, maximum]``. A factor and not a step, so that a gain means the same for a beta of 0.001 and of 1.
    """

    target: float = option(..., "Nats per completion.", above=0)
    init: float = option(0.1, "Coefficient of the first update.", above=0)
    gain: float = option(0.1, "Gain of the controller.", minimum=0)
    minimum: float = option(1e-6, "Smallest coefficient.", minimum=0)
    maximum: float = option(1e3, "Largest coefficient.", above=0)

    def next(self, beta: float, measured_kl: float) -> float:
        """The coefficient after an update that measured ``measured_kl`` (nats per completion).

        >>> BetaTarget(target=1.0).next(0.1, 2.0) > 0.1
        True
        """
        # Relative, so that the gain means the same for a target of 0.1 and of 10 nats.
        error = min(max(measured_kl / self.target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
        return min(max(beta * (1.0 + self.gain * error), self.minimum), self.maximum)


Beta = float | BetaSchedule | BetaTarget


def parse_beta(value: Any, key: str, *, signed: bool = False) -> Beta:
    """Read ``beta`` from a config: a number, ``{start, end, steps, shape}`` or ``{target, ...}``.

    ``signed`` allows a plain number below 0; schedules and controllers stay at or above 0. Raises :class:`UserError`,
    which names the key, for anything else and for a number that is not finite.
    """
    if isinstance(value, BetaSchedule | BetaTarget):
        check_record(value, key)
        return value
    if isinstance(value, Mapping):
        # A schedule has no target and a controller no start: one key tells them apart.
        if "target" in value:
            return parse_record(BetaTarget, value, key=key)
        return parse_record(BetaSchedule, value, key=key)
    # True is an int in Python, and no coefficient.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number:
        raise bad_value(key, value, "a number, {start, end, steps} or {target: nats}")
    # NaN would make every loss NaN, and infinity would hide every reward.
    if not is_finite(value):
        raise bad_value(key, value, "a finite number")
    if value < 0 and not signed:
        raise bad_value(key, value, "at least 0", NEGATIVE)
    return float(value)


def first_value(beta: Beta) -> float:
    """The coefficient of the first update."""
    if isinstance(beta, BetaTarget):
        return beta.init
    if isinstance(beta, BetaSchedule):
        return beta.at(0)
    return beta


class BetaState:
    """The current coefficient of one term, advanced once per update."""

    def __init__(self, beta: Beta) -> None:
        self.spec = beta
        self.value = first_value(beta)

    def advance(self, step: int, measured_kl: float) -> None:
        """Move to the coefficient of update ``step``, given the sequence KL (nats) just measured.

        A controller does not move on a KL that is not finite: nothing was measured, or the measurement overflowed.
        """
        if isinstance(self.spec, BetaSchedule):
            self.value = self.spec.at(step)
        elif isinstance(self.spec, BetaTarget) and math.isfinite(measured_kl):
            self.value = self.spec.next(self.value, measured_kl)
