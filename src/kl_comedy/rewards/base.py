"""What a reward function is, and how its options are checked before a run begins.

A reward function is pure: the same text, answer, meta and options give the same verdict. Options are keyword-only
parameters with defaults; :func:`check_options` checks their annotations. Facts declared beside ``source``:

- ``isolated``: the completion can make it slow or large, so it runs in the worker pool, on a clock;
- ``imports``: modules the worker imports before the clock starts;
- ``examples``: cases ``{completion, answer, value, meta?, options?, status?}`` that hold for it. A new worker runs
  them first, they validate the options of cheap functions, and the tests run them.
"""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, NewType, Protocol

from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.records import STATUSES, Reward
from kl_comedy.registry import REWARDS, Entry

Regex = NewType("Regex", str)
"""Annotation of an option that holds a regular expression; it is compiled when the options are checked."""


class BadGold(UserError):
    """The answer of a problem cannot be read by the verifier: a fault of the data, not of the completion.

    In the middle of a run it costs the item (value 0, status refused) and one warning that names the
    answer, never the run; :meth:`RewardSum.check` finds such answers before a run and raises.
    """


TIMEOUT_OPTION = "timeout_s"
"""Every isolated reward takes this option: seconds of CPU time an item may cost."""


class RewardFunction(Protocol):
    """A function from one completion to its reward."""

    def __call__(self, completion: str, answer: str, meta: Mapping[str, Any], /, **options: Any) -> Reward | float:
        """Judge ``completion`` against ``answer``; a bare number is a :class:`Reward` with status ok.

        The completion is hostile input. Raises :class:`UserError` for options or meta that cannot work.
        """
        ...


def normalized(outcome: Reward | float, *, name: str) -> Reward:
    """``outcome`` as a :class:`Reward` with a finite value and a known status.

    Raises :class:`RunFailed` where a function returns anything else: that is its bug.
    """
    reward = outcome if isinstance(outcome, Reward) else Reward(value=float(outcome))
    if reward.status not in STATUSES or not all(map(math.isfinite, (reward.value, *reward.parts.values()))):
        raise RunFailed(f"reward {name!r} returned {outcome!r}: the value must be finite, the status in {STATUSES}")
    return reward


def example_call(example: Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any]]:
    """The positional arguments of a declared example."""
    return example["completion"], example["answer"], example.get("meta", {})


def check_options(name: str, options: Mapping[str, Any], *, key: str = "rewards") -> Entry[Callable[..., Any]]:
    """The entry called ``name``, once ``options`` are known to fit its keyword-only parameters.

    Functions that import nothing heavy are also called once on their first declared example, so that
    contradictions between options surface before a run. Raises :class:`UserError`.
    """
    entry = REWARDS.get(name, key=f"{key}.name")
    hints = typing.get_type_hints(entry.fn)
    allowed = {
        parameter.name: hints.get(parameter.name, Any)
        for parameter in inspect.signature(entry.fn).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    if entry.facts.get("isolated"):
        allowed[TIMEOUT_OPTION] = float
    for option, value in options.items():
        if option not in allowed:
            raise bad_value(f"{key}.options", option, sorted(allowed), f"options of reward {name}")
        _check_type(f"{key}.options.{option}", value, allowed[option])
    if not entry.facts.get("imports"):
        passed = {option: value for option, value in options.items() if option != TIMEOUT_OPTION}
        for example in entry.facts.get("examples", ())[:1]:
            try:
                entry.fn(*example_call(example), **passed)
            except UserError as error:
                raise UserError(f"{key}: reward {name}: {error}") from error
    return entry


def _check_type(key: str, value: Any, hint: Any) -> None:
    if not _fits(value, hint):
        raise bad_value(key, value, _readable(hint))
    if hint is Regex or (value is not None and Regex in typing.get_args(hint)):
        try:
            re.compile(value)
        except re.error as error:
            raise bad_value(key, value, "a regular expression", str(error)) from error
    if key.endswith(f".{TIMEOUT_OPTION}") and not 0 < value < math.inf:
        raise bad_value(key, value, "a number of seconds above 0")


def _fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` is of type ``hint``: plain types, unions, Literal, tuple[X, ...] and list[X]."""
    if hint is Any:
        return True
    if hint is Regex:
        return isinstance(value, str)
    if hint is None or hint is type(None):
        return value is None
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in args)
    if origin is Literal:
        return value in args
    if origin in (tuple, list):
        return isinstance(value, (tuple, list)) and all(_fits(item, args[0]) for item in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _readable(hint: Any) -> list[str] | str:
    """How an error message names a hint."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return [str(arg) for arg in args]
    if origin in (typing.Union, types.UnionType):
        names = [_readable(part) for part in args]
        return [name for part in names for name in ([part] if isinstance(part, str) else part)]
    if origin in (tuple, list):
        return f"a list of {args[0].__name__}"
    if hint is Regex:
        return "a regular expression"
    return "null" if hint is type(None) else {float: "a number", int: "an integer"}.get(hint, hint.__name__)
