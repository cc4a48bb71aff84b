"""Environments: what answers the policy between its turns, in the workers of rewards.

    problem -> reset -> state;   state, a turn of the policy -> step -> Step(observation, done, state, parts)

An environment is a class, registered in ``ENVIRONMENTS``. Keyword parameters of its constructor are its options, and
the fact ``parts`` names the parts of reward that its steps give. It has no memory of its own: what it needs at the next
turn it returns as ``state``, because any worker may answer that turn, and one that hangs is killed. A dialogue whose
environment hangs, raises, or returns anything else than a :class:`Step` ends there, with a :class:`Failure`.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from kl_comedy.config.schema import EnvironmentConfig
from kl_comedy.config.validate import parse_record
from kl_comedy.errors import RunFailed, bad_value
from kl_comedy.records import Problem, Step
from kl_comedy.registry import ENVIRONMENTS, Entry
from kl_comedy.rewards.base import MAX_PARTS, options_schema
from kl_comedy.rewards.pool import Failure, RewardPool, Turn

logger = logging.getLogger(__name__)


class Environment(Protocol):
    """What a registered class makes."""

    def reset(self, problem: Problem) -> Any:
        """The state before the first turn, as JSON holds it. The problem's prompt is what the policy reads first."""
        ...

    def step(self, state: Any, text: str) -> Step:
        """The answer to ``text``, the policy's turn, which is hostile input.

        Raises :class:`UserError` for options or meta that cannot work, which ends the run. Any other error sets the
        dialogue aside: what a policy may write by mistake, an environment answers with an observation.
        """
        ...


def checked_step(step: Any, entry: Entry[Any]) -> Step:
    """``step`` with finite Python floats. Raises :class:`RunFailed` where an environment returned anything else."""
    declared = entry.facts.get("parts", ())
    if not isinstance(step, Step) or not isinstance(step.observation, str) or not isinstance(step.done, bool):
        raise RunFailed(f"environment {entry.name!r} returned {step!r:.400}: a Step of text, true or false, and state")
    parts = {str(name): float(value) for name, value in step.parts.items()}
    unknown = sorted(parts.keys() - set(declared))
    if unknown:
        raise RunFailed(f"environment {entry.name!r} returned the parts {unknown!r:.200}; it declares {declared}")
    if len(parts) > MAX_PARTS or not all(math.isfinite(value) for value in parts.values()):
        raise RunFailed(f"environment {entry.name!r} returned {parts!r:.400}: at most {MAX_PARTS} finite parts")
    try:
        json.dumps(step.state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RunFailed(f"environment {entry.name!r} returned a state that JSON does not hold: {error}") from None
    return replace(step, parts=parts)


def check_environment(config: EnvironmentConfig) -> dict[str, Any]:
    """The options of ``config``, converted to the types of the environment's parameters.

    Raises :class:`UserError` for an unknown option, and for a weight of a part that the environment does not declare.
    """
    entry = ENVIRONMENTS.get(config.name, key="environment.name")
    record: Any = parse_record(options_schema(entry.fn, False), config.options, key="environment.options")
    declared = entry.facts.get("parts", ())
    for part, weight in config.weights.items():
        if part not in declared:
            raise bad_value("environment.weights", part, declared or "none", f"the parts of {config.name}")
        if not math.isfinite(weight):
            raise bad_value(f"environment.weights.{part}", weight, "a finite number")
    return {name: getattr(record, name) for name in config.options}


class Answers(Protocol):
    """What answers the turns of many dialogues: a :class:`ContainedEnvironment`, or the ranks of a run together."""

    def answer(self, turns: Sequence[Turn]) -> list[Step | Failure]: ...


class ContainedEnvironment:
    """The environment of a config, in the workers of ``pool``. Raises :class:`UserError` as check_environment."""

    def __init__(self, config: EnvironmentConfig, pool: RewardPool) -> None:
        self._name = config.name
        self._options = check_environment(config)
        self._timeout_s = config.timeout_s
        self._pool = pool
        self._shown: set[str] = set()

    def answer(self, turns: Sequence[Turn]) -> list[Step | Failure]:
        """A step for each of ``turns``, of which problem, text and state count; its ``state`` is JSON text."""
        jobs = []
        for turn in turns:
            jobs.append(replace(turn, name=self._name, options=self._options, timeout_s=self._timeout_s))
        answers: list[Step | Failure] = []
        for job, reply in zip(jobs, self._pool.replies(jobs), strict=True):
            outcome = _outcome(reply, self._timeout_s)
            if isinstance(outcome, Failure):
                self._warn(outcome, job.text)
            answers.append(outcome)
        return answers

    def _warn(self, failure: Failure, text: str) -> None:
        """Warn of the first failure of each kind, with the policy's turn."""
        if failure.kind in self._shown:
            return
        self._shown.add(failure.kind)
        logger.warning(
            "the environment %s failed on a turn: %s; such dialogues are left out of the loss and counted "
            "(train/environment_failed); further failures of this kind are not shown. The turn: %r",
            self._name,
            failure,
            text[-300:],
        )


def _outcome(reply: Mapping[str, Any], timeout_s: float) -> Step | Failure:
    """The step in a worker's reply, or why there is none."""
    if "failed" in reply:
        return Failure(reply["failed"])
    if reply["status"] == "timeout":
        return Failure(f"timeout: it took more than its time (environment.timeout_s={timeout_s:g})")
    missing = {"observation", "done", "state"} - reply.keys()
    if missing:
        return Failure(f"refused: it left a process behind, or its reply lacks {sorted(missing)}")
    return Step(observation=reply["observation"], done=reply["done"], state=reply["state"], parts=reply["parts"])


# --- the built-in one -------------------------------------------------------------------------------------------------

_SUM = re.compile(r"(\d{1,40})([-+*])(\d{1,40})$")
_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}


@ENVIRONMENTS.register("calculator", source="calculator annotations of GSM8K (2110.14168)", parts=("calls",))
class Calculator:
    """Computes ``a+b==`` (also - and *) at the end of a turn; any other turn ends the dialogue.

    ``call`` is what ends a call (a text of ``rollout.stop``), ``after`` what follows each result.
    """

    def __init__(self, *, call: str = "==", after: str = "") -> None:
        self.call = call
        self.after = after

    def reset(self, problem: Problem) -> None:
        """Nothing to remember."""

    def step(self, state: None, text: str) -> Step:
        """The result, and the text ``after`` it; the latter alone where the call has no two numbers."""
        if not text.endswith(self.call):
            return Step(done=True)
        numbers = _SUM.search(text.removesuffix(self.call))
        result = ""
        if numbers is not None:
            left, sign, right = numbers.groups()
            result = str(_OPERATIONS[sign](int(left), int(right)))
        return Step(observation=f"{result}{self.after}", parts={"calls": 1.0})
