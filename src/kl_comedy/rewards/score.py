"""Scores: one reward over a batch of texts, or the weighted sum of several over rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kl_comedy.config.schema import RewardConfig
from kl_comedy.errors import UserError, bad_value
from kl_comedy.records import STATUSES, Problem, Reward, Rollout, Scored
from kl_comedy.registry import Entry
from kl_comedy.rewards.base import TIMEOUT_OPTION, BadGold, check_options, normalized
from kl_comedy.rewards.pool import TIMEOUT_S, Job, RewardPool, shared_pool


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

    ``options`` are the reward's own; isolated rewards also take ``timeout_s``, the CPU seconds an item
    may cost. Works from any thread. Raises :class:`UserError` for unknown names or options and for
    lists that do not pair up.
    """
    entry = check_options(name, options, key=f"score({name!r})")
    metas = [{}] * len(completions) if metas is None else metas
    for key, texts in (("completions", completions), ("answers", answers)):
        if isinstance(texts, str):
            raise bad_value(key, texts[:40], "a list of strings")
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise bad_value(f"{key}[{index}]", text, "a string")
    if not len(completions) == len(answers) == len(metas):
        raise UserError(
            f"score: {len(completions)} completions, {len(answers)} answers and {len(metas)} metas do not pair up"
        )
    return _run(entry, options, completions, answers, metas, pool)


def _run(
    entry: Entry[Any],
    options: Mapping[str, Any],
    completions: Sequence[str],
    answers: Sequence[str],
    metas: Sequence[Mapping[str, Any]],
    pool: RewardPool | None,
) -> list[Reward]:
    passed = {key: value for key, value in options.items() if key != TIMEOUT_OPTION}
    items = zip(completions, answers, metas, strict=True)
    pool = pool or shared_pool()
    if entry.facts.get("isolated"):
        timeout_s = float(options.get(TIMEOUT_OPTION, TIMEOUT_S))
        return pool.run(
            [
                Job(name=entry.name, completion=text, answer=answer, meta=meta, options=passed, timeout_s=timeout_s)
                for text, answer, meta in items
            ]
        )
    rewards = []
    for text, answer, meta in items:
        try:
            reward = normalized(entry.fn(text, answer, meta, **passed), name=entry.name)
        except BadGold as error:
            pool.warn_bad_gold(str(error))
            reward = Reward(value=0.0, status="refused")
        parts = {entry.name: reward.value, **reward.parts}
        rewards.append(Reward(value=reward.value, status=reward.status, parts=parts))
    return rewards


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One summand: its label in the parts, and what it takes to compute it."""

    label: str
    weight: float
    entry: Entry[Any]
    options: Mapping[str, Any]


class RewardSum:
    """The weighted sum of configured rewards over rollouts.

    ``Reward.value`` is ``sum_i weight_i * value_i``, ``Reward.parts`` holds each unweighted ``value_i``
    under the reward's name (the second of a name is ``name_2``) and what a reward reports besides under
    ``name/...``; the status is the worst of all, in the order of ``STATUSES``. Names, weights and options
    are checked when it is built. Brings its own pool unless given one; a context manager.
    """

    def __init__(self, configs: Sequence[RewardConfig], *, pool: RewardPool | None = None) -> None:
        if not configs:
            raise UserError("rewards: needs at least one reward, as in [{name: math_verify}]")
        self.parts: list[_Part] = []
        for index, config in enumerate(configs):
            key = f"rewards.{index}"
            entry = check_options(config.name, config.options, key=key)
            if isinstance(config.weight, bool) or not math.isfinite(config.weight):
                raise bad_value(f"{key}.weight", config.weight, "a finite number")
            earlier = sum(part.entry.name == config.name for part in self.parts)
            label = f"{config.name}_{earlier + 1}" if earlier else config.name
            self.parts.append(
                _Part(label=label, weight=float(config.weight), entry=entry, options=dict(config.options))
            )
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
        problems = [rollout.prompt.problem for rollout in rollouts]
        rewards = self.rewards([rollout.text for rollout in rollouts], problems)
        return [Scored(rollout=rollout, reward=reward) for rollout, reward in zip(rollouts, rewards, strict=True)]

    def rewards(self, completions: Sequence[str], problems: Sequence[Problem]) -> list[Reward]:
        """The reward of each text as a completion of the problem at the same place."""
        answers, metas = [problem.answer for problem in problems], [problem.meta for problem in problems]
        columns = [_run(part.entry, part.options, completions, answers, metas, self.pool) for part in self.parts]
        return [self._sum(row) for row in zip(*columns, strict=True)]

    def check(self, problems: Sequence[Problem]) -> None:
        """Raise :class:`UserError` naming the problems whose answers the rewards cannot work with.

        Every reward judges each gold answer given as a completion: tens of milliseconds a problem with
        ``math_verify``. Meant for the beginning of a run, on all problems or a sample.
        """
        for part in self.parts:
            boxed = part.entry.facts.get("boxed", True)
            golds = [f"\\boxed{{{problem.answer}}}" if boxed else problem.answer for problem in problems]
            answers, metas = [problem.answer for problem in problems], [problem.meta for problem in problems]
            verdicts = _run(part.entry, part.options, golds, answers, metas, self.pool)
            bad = [p for p, verdict in zip(problems, verdicts, strict=True) if verdict.status in ("refused", "timeout")]
            if bad:
                shown = ", ".join(f"{problem.id} ({problem.answer[:60]!r})" for problem in bad[:3])
                raise UserError(
                    f"rewards: {part.label} cannot judge the answers of {len(bad)} of {len(problems)} problems: {shown}"
                )

    def _sum(self, row: Sequence[Reward]) -> Reward:
        parts: dict[str, float] = {}
        for part, reward in zip(self.parts, row, strict=True):
            parts[part.label] = reward.value
            parts |= {f"{part.label}/{key}": value for key, value in reward.parts.items() if key != part.entry.name}
        return Reward(
            value=math.fsum(part.weight * reward.value for part, reward in zip(self.parts, row, strict=True)),
            status=max((reward.status for reward in row), key=STATUSES.index),
            parts=parts,
        )
