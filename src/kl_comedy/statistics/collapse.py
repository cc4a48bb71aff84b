"""When a run counts as collapsed. A rule is stated with every table that uses it; collapsed runs are counted and shown.

A run collapsed when it FAILED with a non-finite loss or gradient, when a metric the rule names is not finite at its
end, or when any of the rule's conditions holds there. A condition compares a metric's last value with a number or with
a share of the metric's own first value.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kl_comedy.errors import UserError

DEFAULT_RULE = "eval/heldout/reward < 0.5 start"
"""Half of what the run began with is lost. Written as ``--collapse`` takes it."""

_CONDITION = re.compile(r"\s*(?P<metric>\S+)\s*(?P<sign><=|>=|<|>)\s*(?P<bound>\S+?)\s*(?P<start>\bstart)?\s*")
_SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """``metric sign bound``, the bound times the first value where ``of_start``."""

    metric: str
    sign: str
    bound: float
    of_start: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CollapseRule:
    """Any of ``conditions`` suffices. ``text`` is how it was written, for captions."""

    text: str
    conditions: tuple[Condition, ...]

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(condition.metric for condition in self.conditions))

    @property
    def starts(self) -> tuple[str, ...]:
        """Metrics whose first value is needed."""
        return tuple(dict.fromkeys(condition.metric for condition in self.conditions if condition.of_start))

    def collapsed(
        self, *, last: Mapping[str, float], first: Mapping[str, float], status: str = "FINISHED", reason: str = ""
    ) -> bool | None:
        """Whether a run with these values collapsed; None where nothing the rule names was measured.

        >>> rule = parse_rule("reward < 0.5 start, kl > 20")
        >>> rule.collapsed(last={"reward": 0.1, "kl": 3.0}, first={"reward": 0.4})
        True
        """
        if status == "FAILED" and re.search(r"\b(nan|inf|non-?finite|not finite)\b", reason.lower()):
            return True
        found = [self._holds(condition, last, first) for condition in self.conditions]
        if any(holds for holds in found if holds is not None):
            return True
        return None if all(holds is None for holds in found) else False

    @staticmethod
    def _holds(condition: Condition, last: Mapping[str, float], first: Mapping[str, float]) -> bool | None:
        value = last.get(condition.metric)
        if value is None:
            return None
        if not math.isfinite(value):
            return True
        start = first.get(condition.metric) if condition.of_start else 1.0
        if start is None or not math.isfinite(start):
            return None
        return _SIGNS[condition.sign](value, condition.bound * start)


def parse_rule(text: str) -> CollapseRule:
    """``METRIC < NUMBER [start]``, several with commas. Raises :class:`UserError` with an example."""
    conditions = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        try:
            bound = float(match["bound"]) if match else math.nan
        except ValueError:
            bound = math.nan
        if match is None or not math.isfinite(bound):
            raise UserError(
                f"--collapse: cannot read {part.strip()!r}; allowed: METRIC < NUMBER, or METRIC < SHARE start, "
                f"joined by commas, as in {DEFAULT_RULE!r} or 'kl/exact_reverse_sequence > 20'"
            )
        conditions.append(
            Condition(metric=match["metric"], sign=match["sign"], bound=bound, of_start=match["start"] is not None)
        )
    return CollapseRule(text=text.strip(), conditions=tuple(conditions))
