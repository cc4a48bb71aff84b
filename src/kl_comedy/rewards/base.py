"""What a reward function is, and how its options are checked before a run begins.

A reward function is pure: the same text, answer, meta and options give the same verdict. Options are keyword-only
parameters with defaults; :func:`check_options` checks their annotations. Facts declared beside ``source``:

- ``isolated``: the completion can make it slow or large, so it runs in the worker pool, on a clock;
- ``batched``: it is a function of all completions and their problems at once, in the trainer's process, where torch is;
- ``check``: a function of options and key that raises :class:`UserError` for files that cannot work, where they are;
- ``imports``: modules the worker imports before the clock starts;
- ``examples``: cases ``{completion, answer, value, meta?, options?, status?}`` that hold for it. A new worker runs
  them first, they validate the options of cheap functions, and the tests run them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import os
import re
import signal
import traceback
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


DRAWN_TOKENS = "drawn_tokens"
"""The entry of ``meta`` that says how many tokens of a completion the policy drew; a tool's are not among them."""


class BadGold(UserError):
    """The answer of a problem cannot be read by the verifier: the data's fault.

    In a run it costs the item (value 0, status refused) and a warning; :meth:`RewardSum.check` raises it before.
    """


TIMEOUT_OPTION = "timeout_s"
"""Every isolated reward takes this option: seconds of CPU time an item may cost."""
FAILED = "verifier_failed"
"""The part of a verdict whose verifier raised an error, or returned something else than a reward; its value is 1."""
MAX_REPLY = 1 << 16
"""The longest verdict from a worker, in bytes. A verdict has a few hundred; a longer frame is a broken worker's."""
JUDGE_ENDED = b"the judge has ended"
"""What a worker sends when the process that judged for it has been killed."""
MAX_PARTS = 64
"""How many further values a reward may report about an item."""


def failed(reward: Reward) -> bool:
    """Whether the verifier failed on the item; in a sum of rewards, whether one of them did.

    >>> failed(Reward(value=0.0, status="refused", parts={"math_verify": 0.0, "math_verify/verifier_failed": 1.0}))
    True
    """
    return any(is_failed_part(key) for key in reward.parts)


def is_failed_part(key: str) -> bool:
    """Whether ``key`` names the part :data:`FAILED`, of one reward or in a sum of rewards."""
    return key.rpartition("/")[2] == FAILED


def failure_verdict(name: str) -> Reward:
    """The verdict on an item on which the reward ``name`` failed."""
    return Reward(value=0.0, status="refused", parts={name: 0.0, FAILED: 1.0})


def described(error: BaseException) -> str:
    """The traceback of an error, without those of its causes; never an error itself.

    ``__str__`` of an error, or a line of source that cannot be read, may raise in turn.
    """
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-12, chain=False))
    except Exception:
        return f"{type(error).__name__} (its message cannot be shown)"


def in_child(function: Callable[[], float]) -> float:
    """``function()``, computed in a fork of this process that is killed as soon as it has answered.

    For functions that evaluate text: whatever the text has done to the process is gone before anything else is judged.
    Raises the UserError or MemoryError that the function raised, and :class:`RunFailed` for any other end.
    """
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            # Descriptors from 4 on are closed, the pipes of this worker among them: evaluated text that runs code must
            # not write to the trainer. It can still write its own score to descriptor 3, which is why such text is
            # parsed by an allow-list first. A child that does not answer is ended with its worker, at the time limit.
            os.dup2(write_fd, 3)
            os.closerange(4, 4096)
            os.write(3, _outcome(function))
        finally:
            # Whatever happens, the child must not return into the caller's code.
            os._exit(0)
    # While this process holds the writing end too, a child that dies without a word would never end the read.
    os.close(write_fd)
    try:
        body = os.read(read_fd, _MAX_OUTCOME)
    finally:
        os.close(read_fd)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return _score_of(body)


_MAX_OUTCOME = 1024


def _score_of(body: bytes) -> float:
    """The score in what :func:`_outcome` wrote. Raises the error that it names, and RunFailed for anything else."""
    kind, _, text = body.decode(errors="replace").partition(" ")
    if kind == "user":
        raise UserError(text)
    if kind == "memory":
        raise MemoryError(text)
    score = math.nan
    if kind == "score":
        # The text may have written to the pipe itself.
        with contextlib.suppress(ValueError):
            score = float(text)
    if not math.isfinite(score):
        raise RunFailed(f"the process that scored the answer ended with {body[:200]!r}")
    return score


def _outcome(function: Callable[[], float]) -> bytes:
    """What :func:`in_child` reads: at most one write's worth, so that it arrives whole."""
    try:
        text = f"score {float(function())!r}"
    except UserError as error:
        text = f"user {error}"
    except MemoryError as error:
        text = f"memory {error}"
    except BaseException as error:
        # Only the class: __str__ of an error may raise in turn.
        text = f"error {type(error).__name__}"
    return text.encode(errors="replace")[:_MAX_OUTCOME]


class RewardFunction(Protocol):
    """A function from one completion to its reward."""

    def __call__(self, completion: str, answer: str, meta: Meta, /, **options: Any) -> Reward | float:
        """Judge ``completion`` against ``answer``; a bare number is a :class:`Reward` with status ok.

        ``meta`` is that of the problem; of a rollout it also has :data:`DRAWN_TOKENS`.

        The completion is hostile input. Raises :class:`UserError` for options or meta that cannot work, which ends
        the run. Any other error is the verdict on this item: value 0, status ``refused``, part :data:`FAILED`.
        """
        ...


def normalized(outcome: Reward | float, *, name: str) -> Reward:
    """``outcome`` as a :class:`Reward` of finite Python floats with a known status.

    Raises :class:`RunFailed` where a function returns anything else: it has failed on the item.
    """
    if isinstance(outcome, Reward):
        reward = outcome
    else:
        reward = Reward(value=float(outcome))
    # float() of numpy and sympy numbers: verdicts travel as JSON.
    value = float(reward.value)
    parts = {str(key): float(part) for key, part in reward.parts.items()}
    finite = math.isfinite(value) and all(math.isfinite(part) for part in parts.values())
    known_status = reward.status in STATUSES
    if not known_status or not finite or len(parts) > MAX_PARTS:
        raise RunFailed(
            f"reward {name!r} returned {outcome!r:.400}: the value and at most {MAX_PARTS} parts must be finite, "
            f"the status in {STATUSES}"
        )
    return Reward(value=value, status=reward.status, parts=parts)


def example_call(example: Mapping[str, Any]) -> tuple[str, str, Meta]:
    """The positional arguments of a declared example."""
    return example["completion"], example["answer"], example.get("meta", {})


def check_options(
    name: str, options: Mapping[str, Any], *, key: str = "rewards"
) -> tuple[Entry[Callable[..., Any]], dict[str, Any]]:
    """The entry called ``name``, and ``options`` converted to the types of its keyword-only parameters.

    Functions that import nothing heavy are also called once on their first declared example, so that
    contradictions between options surface before a run. Raises :class:`UserError`.
    """
    entry = REWARDS.get(name, key=f"{key}.name")
    record: Any = parse_record(
        options_schema(entry.fn, bool(entry.facts.get("isolated"))), options, key=f"{key}.options"
    )
    checked = {option: getattr(record, option) for option in options}
    # With imports the call would take seconds in the trainer; the workers' own examples come later.
    examples = entry.facts.get("examples", ())
    if examples and not entry.facts.get("imports"):
        passed = dict(checked)
        passed.pop(TIMEOUT_OPTION, None)
        try:
            entry.fn(*example_call(examples[0]), **passed)
        except UserError as error:
            raise UserError(f"{key}: reward {name}: {error}") from error
    return entry, checked


@functools.cache
def options_schema(function: Callable[..., Any], isolated: bool) -> type:
    """A dataclass with the keyword-only parameters of ``function``, or of a class, for the validator."""
    hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    fields = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            option_type, rules = _typed(hints.get(parameter.name, Any))
            fields.append((parameter.name, option_type, rules))
    if isolated:
        fields.append((TIMEOUT_OPTION, float, option(None, above=0)))
    return dataclasses.make_dataclass("Options", fields)


def _typed(hint: Any) -> tuple[Any, Any]:
    """The type and the rules of an option; the validator knows neither :data:`Regex` nor ``Literal``."""
    inner, _ = without_none(hint)
    if inner is Regex:
        return str | None, option(None, parse=_regex)
    # `choices` gives the message with the nearest name.
    if typing.get_origin(inner) is Literal:
        return str | None, option(None, choices=typing.get_args(inner))
    return hint, option(None)


def _regex(value: Any, key: str) -> str | None:
    """``value`` where it is a regular expression or None. Raises :class:`UserError`."""
    try:
        re.compile(value or "")
    except (re.error, TypeError) as error:
        raise bad_value(key, value, "a regular expression", str(error)) from error
    if value is None:
        return None
    return str(value)
