"""The records of a chunk of problems: completions drawn and judged, or the log-probs of choices compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from kl_comedy.evaluation.canonical import canonical
from kl_comedy.evaluation.comparing import ask, compared
from kl_comedy.evaluation.likelihood import ChoicePasses
from kl_comedy.evaluation.plan import Plan, Shard
from kl_comedy.evaluation.records import Records, Row
from kl_comedy.records import Scored
from kl_comedy.rewards import RewardPool, RewardSum
from kl_comedy.rollouts import RolloutBackend

GOLDS_CHECKED = 256
"""Answers that the verifier must be able to judge before anything is drawn: evenly spaced, a few seconds."""


class Drawer(Protocol):
    def __call__(self, chunk: int) -> list[Row]:
        """The records of a chunk's problems, in order."""
        ...


def run_chunks(records: Records, drawer: Drawer, shard: Shard, advance: Callable[[int], None]) -> int:
    """Draw and write the shard's chunks that are missing; ``advance(problems)`` after each. How many there were."""
    todo = [chunk for chunk in records.missing() if shard.takes(chunk)]
    for chunk in todo:
        records.write(chunk, drawer(chunk))
        advance(len(records.plan.part(chunk)))
    return len(todo)


@contextmanager
def generating(plan: Plan, backend: RolloutBackend, pool: RewardPool | None = None) -> Iterator[Drawer]:
    """A drawer for suites of kind ``generate``.

    Raises :class:`~kl_comedy.errors.UserError` where the verifier cannot judge the gold answers.
    """
    suite = plan.suite
    with RewardSum([suite.reward], pool=pool) as scorer:
        problems = [prompt.problem for prompt in plan.prompts]
        scorer.check(problems[:: max(len(problems) // GOLDS_CHECKED, 1)])

        def draw(chunk: int) -> list[Row]:
            part = plan.part(chunk)
            rollouts = backend.generate(
                plan.prompts[part.start : part.stop], group_size=plan.samples, sampling=plan.sampling,
                seed=plan.seeds(f"suite/{suite.name}", chunk),
            )  # fmt: skip
            places = [(index, sample) for index in part for sample in range(plan.samples)]
            return [
                _record(plan, index, sample, scored)
                for (index, sample), scored in zip(places, scorer.score(rollouts), strict=True)
            ]

        yield draw


def _record(plan: Plan, index: int, sample: int, scored: Scored) -> Row:
    rollout, reward = scored.rollout, scored.reward
    problem = rollout.prompt.problem
    return {
        "index": index, "id": problem.id, "sample": sample, "gold": problem.answer,
        "correct": reward.value >= plan.suite.solved_at, "reward": reward.value, "status": reward.status,
        "answer": canonical(rollout.text, plan.suite.answer, problem.meta.get("choices", ())),
        "tokens": len(rollout.completion_ids), "stop_reason": rollout.stop_reason,
        "prompt": rollout.prompt.text, "completion": rollout.text,
    }  # fmt: skip


def likelihood_drawer(plan: Plan, passes: ChoicePasses) -> Drawer:
    """A drawer for suites of kind ``likelihood``."""

    def draw(chunk: int) -> list[Row]:
        part = plan.part(chunk)
        prompts = plan.prompts[part.start : part.stop]
        asked = ask(plan.suite, prompts, passes.loaded, template=plan.template)
        return compared(asked, passes(asked.spelled), first=part.start)

    return draw
