"""Scores: one reward over a batch of texts, or the weighted sum of several over rollouts."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kl_comedy.config.schema import EnvironmentConfig, GoldConfig, RewardConfig
from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.records import GOLD, STATUSES, Problem, Reward, Rollout, Scored
from kl_comedy.registry import Entry
from kl_comedy.rewards.base import (
    DRAWN_TOKENS,
    TIMEOUT_OPTION,
    BadGold,
    check_options,
    described,
    failed,
    failure_verdict,
    normalized,
)
from kl_comedy.rewards.pool import TIMEOUT_S, Failure, Job, RewardPool, shared_pool

logger = logging.getLogger(__name__)

Item = tuple[str, str, Mapping[str, Any]]
"""A completion, the gold answer, and the problem's meta."""


def score(
    name: str,
    *,
    completions: Sequence[str],
    answers: Sequence[str],
    metas: Sequence[Mapping[str, Any]] | None = None,
    pool: RewardPool | None = None,
    **options: Any,
) -> list[Reward]:
    """Judge each completion against its answer by the registered reward ``name``, in order.

    ``metas`` are the other columns of the problems. ``options`` are those of the reward; a reward that runs in a
    process of its own also takes ``timeout_s``, the CPU seconds that an item may cost, and an item that fails or takes
    longer has the status of that in its :class:`Reward`. May be called from any thread. Raises :class:`UserError` for
    unknown names or options and for lists that do not pair up.
    """
    entry, checked_options = check_options(name, options, key=f"score({name!r})")
    part = _Part(name, 1.0, entry, checked_options)
    if metas is None:
        metas = [{}] * len(completions)
    for key, texts in (("completions", completions), ("answers", answers)):
        # A string is a sequence of strings, too: its letters would be judged one by one.
        if isinstance(texts, str):
            raise bad_value(key, texts[:40], "a list of strings")
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise bad_value(f"{key}[{index}]", text, "a string")
    if not len(completions) == len(answers) == len(metas):
        raise UserError(
            f"score: {len(completions)} completions, {len(answers)} answers and {len(metas)} metas do not pair up"
        )
    problems = []
    for index, (answer, meta) in enumerate(zip(answers, metas, strict=True)):
        problems.append(Problem(id=str(index), text="", answer=answer, meta=meta))
    return part.judge(completions, problems, pool or shared_pool())


@dataclass(frozen=True)
class _Part:
    """One summand; ``label`` names it in the parts."""

    label: str
    weight: float
    entry: Entry[Any]
    options: Mapping[str, Any]

    def judge(self, completions: Sequence[str], problems: Sequence[Problem], pool: RewardPool) -> list[Reward]:
        """The rewards of the completions; the value of each is also its part under the entry's name.

        Raises as :meth:`RewardPool.run`, and where the reward fails on every item and on a gold answer too: then the
        fault is the reward's, and not that of the texts.
        """
        rewards = self._judge(completions, problems, pool)
        # Failures on some texts may be the texts' fault; failures on all of them hardly are.
        if rewards and all(failed(reward) for reward in rewards):
            self._judge_a_gold(problems[0], len(rewards), pool)
        return rewards

    def gold_completion(self, answer: str) -> str:
        """The text that the reward must accept as right."""
        if self.entry.facts.get("boxed", True):
            return f"\\boxed{{{answer}}}"
        return answer

    def _judge(self, completions: Sequence[str], problems: Sequence[Problem], pool: RewardPool) -> list[Reward]:
        name = self.entry.name
        options = dict(self.options)
        # The pool's option, not the function's.
        timeout_s = options.pop(TIMEOUT_OPTION, TIMEOUT_S)
        if self.entry.facts.get("isolated"):
            jobs = []
            for completion, problem in zip(completions, problems, strict=True):
                jobs.append(Job(name, completion, problem.answer, problem.meta, options=options, timeout_s=timeout_s))
            return pool.run(jobs)

        if self.entry.facts.get("batched"):
            outcomes = self._outcomes_of_batch(completions, problems, options)
            verdicts = [functools.partial(normalized, outcome, name=name) for outcome in outcomes]
        else:
            verdicts = []
            for completion, problem in zip(completions, problems, strict=True):
                item = (completion, problem.answer, problem.meta)
                verdicts.append(functools.partial(self._judge_here, item, options))
        return [
            self._contained(verdict, completion, problem.answer, pool)
            for verdict, completion, problem in zip(verdicts, completions, problems, strict=True)
        ]

    def _judge_here(self, item: Item, options: Mapping[str, Any]) -> Reward:
        """The verdict on one item by a reward that needs no worker."""
        return normalized(self.entry.fn(*item, **options), name=self.entry.name)

    def _outcomes_of_batch(
        self, completions: Sequence[str], problems: Sequence[Problem], options: Mapping[str, Any]
    ) -> list[Reward | float]:
        """What a reward returns that judges a whole batch. What it raises is no text's fault, and ends the run."""
        try:
            outcomes: list[Reward | float] = self.entry.fn(completions, problems, **options)
        except UserError as error:
            raise UserError(f"reward {self.label}: {error}") from error
        return outcomes

    def _contained(self, verdict: Callable[[], Reward], completion: str, answer: str, pool: RewardPool) -> Reward:
        """The verdict on one item in this process; the same verdicts on errors as a worker's."""
        name = self.entry.name
        try:
            reward = verdict()
        except BadGold as error:
            pool.warn_bad_gold(str(error))
            reward = Reward(value=0.0, status="refused")
        except UserError:
            # Options or meta that cannot work: the same on every item.
            raise
        except Exception as error:
            pool.warn_failure(name, Failure(described(error)), completion, answer)
            reward = failure_verdict(name)
        return replace(reward, parts={name: reward.value, **reward.parts})

    def _judge_a_gold(self, problem: Problem, count: int, pool: RewardPool) -> None:
        """Tell apart a reward that does not work from ``count`` texts that it fails on, by one gold answer."""
        name = self.entry.name
        failure = pool.last_failure
        (verdict,) = self._judge([self.gold_completion(problem.answer)], [problem], pool)
        if not failed(verdict):
            message = "the reward %s failed on all %d completions of a batch (%s), and not on the gold answer %r"
            logger.warning(message, name, count, failure, problem.answer[:60])
            return
        # The gold's own failure says more than that of a completion.
        failure = pool.last_failure or failure
        if failure is not None and failure.kind == "ModuleNotFoundError":
            raise UserError(f"reward {name!r} needs a package that is not installed: {failure.error}")
        text = ""
        if failure is not None:
            text = failure.text
        raise RunFailed(f"reward {name!r} failed on every item of a batch, and on a gold answer:\n{text}")


class Scorer(Protocol):
    """What scores rollouts: a :class:`RewardSum`, or the ranks of a run together."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]: ...


class RewardSum:
    """The weighted sum of configured rewards over rollouts; a context manager. Has its own pool unless given one.

    ``Reward.value`` is ``sum_i weight_i * value_i``, ``Reward.parts`` holds each unweighted ``value_i`` under the
    reward's name (the second of a name is ``name_2``) and what a reward reports besides under ``name/...``; the status
    is the worst of all, in the order of ``STATUSES``. Names, weights and options are checked here.

    ``gold`` judges the same completions and is not in the sum: its verdict is the part ``gold``. Parts that an
    ``environment`` gave are in the sum by its ``weights``; the others are reported as ``environment/...``.
    """

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        *,
        gold: GoldConfig | None = None,
        pool: RewardPool | None = None,
        environment: EnvironmentConfig | None = None,
    ) -> None:
        # Of the parts that the environment gave, which are in the rollouts already.
        self.environment_weights: Mapping[str, float] = {}
        if environment is not None:
            self.environment_weights = environment.weights
        self.parts: list[_Part] = []
        for index, config in enumerate(configs):
            key = f"rewards.{index}"
            checked = check_options(config.name, config.options, key=key)
            if not math.isfinite(config.weight):
                raise bad_value(f"{key}.weight", config.weight, "a finite number")
            label = config.name
            # The same reward may be asked for twice with other options: both need a name in the parts.
            earlier = sum(part.entry.name == config.name for part in self.parts)
            if earlier:
                label = f"{config.name}_{earlier + 1}"
            if label == GOLD:
                raise bad_value(f"{key}.name", label, "another name", "this part of a reward is the verdict of `gold`")
            if label in self.environment_weights:
                raise bad_value("environment.weights", label, "parts with other names than rewards")
            self.parts.append(_Part(label, float(config.weight), *checked))
        self._judges = list(self.parts)
        if gold is not None:
            # Its weight is 0, and it is last: the sum does not depend on it.
            self._judges.append(_Part(GOLD, 0.0, *check_options(gold.name, gold.options, key=GOLD)))
        # A given pool may serve others, and is its owner's to close.
        self._closes_pool = pool is None
        self.pool = pool or RewardPool()

    def __enter__(self) -> RewardSum:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, unless the pool was given."""
        if self._closes_pool:
            self.pool.close()

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """Each rollout with its reward, in order."""
        problems = [_with_drawn_tokens(rollout.prompt.problem, len(rollout.drawn_ids)) for rollout in rollouts]
        rewards = self.rewards([rollout.text for rollout in rollouts], problems)
        scored = []
        for rollout, reward in zip(rollouts, rewards, strict=True):
            scored.append(Scored(rollout=rollout, reward=self._with_environment(reward, rollout.parts)))
        return scored

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each summand by its name in the parts."""
        return {**{part.label: part.weight for part in self.parts}, **self.environment_weights}

    def _with_environment(self, reward: Reward, environment_parts: Mapping[str, float]) -> Reward:
        """``reward`` and the parts that the environment gave."""
        if not environment_parts and not self.environment_weights:
            return reward
        parts = dict(reward.parts)
        value = reward.value
        for name, part in environment_parts.items():
            if name not in self.environment_weights:
                parts[f"environment/{name}"] = part
        for name, weight in self.environment_weights.items():
            # Texts that no environment has seen, as gold answers, have none.
            parts[name] = environment_parts.get(name, 0.0)
            value += weight * parts[name]
        return replace(reward, value=value, parts=parts)

    def rewards(self, completions: Sequence[str], problems: Sequence[Problem]) -> list[Reward]:
        """The reward of each text as a completion of the problem at the same place."""
        if not self._judges:
            return [Reward(value=0.0) for _ in completions]
        # Part by part, so that a part's isolated jobs fill all workers at once.
        columns = [part.judge(completions, problems, self.pool) for part in self._judges]
        return [self._sum(row) for row in zip(*columns, strict=True)]

    def check(self, problems: Sequence[Problem]) -> None:
        """Raise :class:`UserError` naming problems whose gold answers, given as completions, a reward cannot judge.

        Takes tens of milliseconds per problem with ``math_verify``.
        """
        # A gold answer is a text that no policy drew.
        problems = [_with_drawn_tokens(problem, 0) for problem in problems]
        for part in self._judges:
            golds = [part.gold_completion(problem.answer) for problem in problems]
            verdicts = part.judge(golds, problems, self.pool)
            bad = []
            for problem, verdict in zip(problems, verdicts, strict=True):
                # A gold in a completion may still be judged wrong; that it cannot be judged is a mistake of the data.
                if verdict.status in ("refused", "timeout"):
                    bad.append(problem)
            if not bad:
                continue
            examples = ", ".join(f"{problem.id} ({problem.answer[:60]!r})" for problem in bad[:3])
            failures = sum(failed(verdict) for verdict in verdicts)
            reason = ""
            if failures:
                reason = f"; on {failures} it failed: {self.pool.last_failure}"
            raise UserError(
                f"rewards: {part.label} cannot judge the answers of {len(bad)} of {len(problems)} problems: "
                f"{examples}{reason}"
            )

    def _sum(self, row: Sequence[Reward]) -> Reward:
        """The reward of one item from those of the parts."""
        parts: dict[str, float] = {}
        weighted = []
        for part, reward in zip(self._judges, row, strict=True):
            weighted.append(part.weight * reward.value)
            parts[part.label] = reward.value
            for key, value in reward.parts.items():
                # The value itself stands there under the entry's name, and is in the sum under its label.
                if key != part.entry.name:
                    parts[f"{part.label}/{key}"] = value
        # One refused part makes the sum doubtful, whatever the others say.
        status = max((reward.status for reward in row), key=STATUSES.index)
        # fsum: the sum does not depend on the order of the parts.
        return Reward(value=math.fsum(weighted), status=status, parts=parts)


def _with_drawn_tokens(problem: Problem, count: int) -> Problem:
    return replace(problem, meta={**problem.meta, DRAWN_TOKENS: count})
