"""The coefficient of a term: a number, a schedule, or a target in nats held by a controller.

Data and pure functions; :class:`BetaState` is what a checkpoint keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kl_comedy.errors import UserError, bad_value, unknown_key

SHAPES = ("linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class BetaSchedule:
    """From ``start`` to ``end`` over ``steps`` updates, then constant."""

    start: float
    end: float
    steps: int
    shape: str = "linear"

    def at(self, step: int) -> float:
        """The coefficient at an update count.

        >>> BetaSchedule(start=1.0, end=0.0, steps=10).at(5)
        0.5
        """
        done = min(max(step / self.steps, 0.0), 1.0)
        if self.shape == "cosine":
            done = 0.5 * (1.0 - math.cos(math.pi * done))
        return self.start + (self.end - self.start) * done


@dataclass(frozen=True, kw_only=True)
class BetaTarget:
    """Hold the measured sequence KL near ``target`` nats by a proportional controller in log space.

    After each update ``beta *= 1 + gain * clip(kl / target - 1, -0.2, 0.2)`` (Ziegler et al. 2019,
    Sec. 2.2), kept within ``[minimum, maximum]``.
    """

    target: float
    init: float = 0.1
    gain: float = 0.1
    minimum: float = 1e-6
    maximum: float = 1e3

    def next(self, beta: float, measured_kl: float) -> float:
        """The coefficient after an update that measured ``measured_kl`` (nats a completion).

        >>> BetaTarget(target=1.0).next(0.1, 2.0) > 0.1
        True
        """
        error = min(max(measured_kl / self.target - 1.0, -0.2), 0.2)
        return min(max(beta * (1.0 + self.gain * error), self.minimum), self.maximum)


Beta = float | BetaSchedule | BetaTarget


def parse_beta(value: Any, key: str) -> Beta:
    """Read ``beta`` from config: a number, ``{start, end, steps, shape}`` or ``{target, ...}``.

    Raises :class:`UserError` naming the key for anything else, and for numbers that are not finite.
    """
    if isinstance(value, BetaSchedule | BetaTarget):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | Mapping):
        raise bad_value(key, value, "a number, {start, end, steps} or {target: nats}")
    if not isinstance(value, Mapping):
        return _number(value, key)
    kind = BetaTarget if "target" in value else BetaSchedule
    allowed = list(kind.__dataclass_fields__)
    for name in value:
        if name not in allowed:
            raise unknown_key(f"{key}.{name}", value[name], allowed)
    numbers: dict[str, Any] = {
        name: item if name == "shape" else _number(item, f"{key}.{name}") for name, item in value.items()
    }
    if kind is BetaTarget:
        if numbers["target"] <= 0:
            raise bad_value(f"{key}.target", numbers["target"], "nats above 0")
        return BetaTarget(**numbers)
    missing = [name for name in ("start", "end", "steps") if name not in value]
    if missing:
        raise UserError(f"{key}: a schedule needs start, end and steps; missing: {', '.join(missing)}")
    if numbers.get("shape", "linear") not in SHAPES:
        raise bad_value(f"{key}.shape", numbers["shape"], SHAPES)
    if numbers["steps"] < 1:
        raise bad_value(f"{key}.steps", numbers["steps"], "at least 1")
    return BetaSchedule(**{**numbers, "steps": int(numbers["steps"])})


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise bad_value(key, value, "a finite number")
    return float(value)


class BetaState:
    """The current coefficient of one term, advanced once per update."""

    def __init__(self, beta: Beta) -> None:
        self.spec = beta
        self.value = (
            beta.init if isinstance(beta, BetaTarget) else (beta.at(0) if isinstance(beta, BetaSchedule) else beta)
        )

    def advance(self, step: int, measured_kl: float) -> None:
        """Move to the coefficient of update ``step``, given the sequence KL (nats) just measured."""
        if isinstance(self.spec, BetaSchedule):
            self.value = self.spec.at(step)
        elif isinstance(self.spec, BetaTarget) and math.isfinite(measured_kl):
            self.value = self.spec.next(self.value, measured_kl)
