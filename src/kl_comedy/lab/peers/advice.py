"""Which flags of a system do what its user most likely wants, and which recipe of ours does.

A promise is checked by test: the advised flags are read back, and the certificate of the reading must hit
the goal's target in the goal's regime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kl_comedy.lab.peers.flags import Value, render
from kl_comedy.lab.peers.reading import System


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a user may want: ``target`` hit in ``regime``; ``recipe`` is ours for it."""

    name: str
    words: str
    target: str
    regime: str
    recipe: str


GOALS: dict[str, Goal] = {
    goal.name: goal
    for goal in (
        Goal(
            name="sequence",
            words="the reverse KL of whole completions, as the objective states it, on-policy",
            target="sequence_reverse",
            regime="on_policy",
            recipe="rb/full",
        ),
        Goal(
            name="off_policy",
            words="a per-token reverse KL that stays right on stale batches",
            target="token_reverse",
            regime="off_policy",
            recipe="rb/token",
        ),
        Goal(
            name="low_noise",
            words="little noise, per token, on-policy",
            target="token_reverse",
            regime="on_policy",
            recipe="rb/token",
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """For one goal: the flags (text that :func:`kl_comedy.lab.peers.read` reads), or None and why."""

    goal: Goal
    flags: str | None
    given: Mapping[str, Value]
    why_not: str


def advise(system: System) -> tuple[Advice, ...]:
    """The advice of a system, in the order of :data:`GOALS`."""
    found = []
    for name, goal in GOALS.items():
        answer = system.advice[name]
        if isinstance(answer, str):
            found.append(Advice(goal=goal, flags=None, given={}, why_not=answer))
        else:
            text = render(system.name, system.flags, answer)
            found.append(Advice(goal=goal, flags=text, given=answer, why_not=""))
    return tuple(found)
