"""What a reward function is, and how its options are checked before a run begins.

A reward function is pure: the same text, answer, meta and options give the same verdict. Options are keyword-only
parameters with defaults; :func:`check_options` checks their annotations. Facts declared beside ``source``:

- ``isolated``: the completion can make it slow or large, so it runs in the worker pool, on a clock;
- ``imports``: modules the worker imports before the clock starts;
- ``examples``: cases ``{completion, answer, value, meta?, options?, status?}`` that hold for it. A new worker runs
  them first, they validate the options of cheap functions, and the tests run them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, NewType, Protocol

from kl_comedy.config.validate import option, parse_record, without_none
from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.records import STATUSES, Reward
from kl_comedy.registry import REWARDS, Entry

Meta = Mapping[str, Any]
Regex = NewType("Regex", str)
"""Annotation of an option that holds a regular expression; it is compiled when the options are checked."""


class BadGold(UserError):
    """The answer of a problem cannot be read by the verifier: the data's fault.

    In a run it costs the item (value 0, status refused) and a warning; :meth:`RewardSum.check` raises it before.
    """


TIMEOUT_OPTION = "timeout_s"
"""Every isolated reward takes this option: seconds of CPU time an item may cost."""


class RewardFunction(Protocol):
    """A function from one completion to its reward."""

    def __call__(self, completion: str, answer: str, meta: Meta, /, **options: Any) -> Reward | float:
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


def example_call(example: Mapping[str, Any]) -> tuple[str, str, Meta]:
    return example["completion"], example["answer"], example.get("meta", {})


def check_options(
    name: str, options: Mapping[str, Any], *, key: str = "rewards"
) -> tuple[Entry[Callable[..., Any]], dict[str, Any]]:
    """The entry called ``name``, and ``options`` converted to the types of its keyword-only parameters.

    Functions that import nothing heavy are also called once on their first declared example, so that
    contradictions between options surface before a run. Raises :class:`UserError`.
    """
    entry = REWARDS.get(name, key=f"{key}.name")
    record = parse_record(_options_schema(entry.fn, bool(entry.facts.get("isolated"))), options, key=f"{key}.options")
    checked = {option: getattr(record, option) for option in options}
    if not entry.facts.get("imports"):
        passed = {option: value for option, value in checked.items() if option != TIMEOUT_OPTION}
        for example in entry.facts.get("examples", ())[:1]:
            try:
                entry.fn(*example_call(example), **passed)
            except UserError as error:
                raise UserError(f"{key}: reward {name}: {error}") from error
    return entry, checked


@functools.cache
def _options_schema(function: Callable[..., Any], isolated: bool) -> type:
    """A dataclass with the keyword-only parameters of ``function``, for the validator."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    fields = [(p.name, *_typed(hints.get(p.name, Any))) for p in parameters if p.kind is p.KEYWORD_ONLY]
    if isolated:
        fields.append((TIMEOUT_OPTION, float, option(None, above=0)))
    return dataclasses.make_dataclass("Options", fields)


def _typed(hint: Any) -> tuple[Any, Any]:
    """The type and the rules of an option; the validator knows neither :data:`Regex` nor ``Literal``."""
    inner, _ = without_none(hint)
    if inner is Regex:
        return str | None, option(None, parse=_regex)
    if typing.get_origin(inner) is Literal:
        return str | None, option(None, choices=typing.get_args(inner))
    return hint, option(None)


def _regex(value: Any, key: str) -> str | None:
    try:
        re.compile(value or "")
    except (re.error, TypeError) as error:
        raise bad_value(key, value, "a regular expression", str(error)) from error
    return None if value is None else str(value)
