"""Evaluate a policy between updates: completions and their rewards, or the choices of multiple-choice problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kl_comedy.evaluation.likelihood import ChoiceScorer, ChoiceSet
from kl_comedy.evaluation.scores import EvalResult, score_choices
from kl_comedy.records import Prompt, Scored
from kl_comedy.rewards import Scorer
from kl_comedy.rollouts import RolloutBackend, Sampling
from kl_comedy.statistics import clustered_interval

CHUNK = 32
"""Problems evaluated at a time: what a killed process may lose."""


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """A named set of prompts. ``scorer`` and ``sampling`` replace those of the run (suites have their own)."""

    name: str
    prompts: Sequence[Prompt]
    scorer: Scorer | None = None
    sampling: Sampling | None = None


def evaluate(
    backend: RolloutBackend,
    scorer: Scorer,
    eval_set: EvalSet,
    *,
    samples: int,
    sampling: Sampling,
    seed: int,
    measure: Callable[[Sequence[Scored]], Mapping[str, float]] | None = None,
) -> EvalResult:
    """Sample ``samples`` completions per problem and score them. Depends on weights, prompts and seed only.

    ``reward`` is the mean over problems and samples; its interval treats problems as the random units. ``measure``
    returns further means of the completions by metric name, as ``kl/exact_reverse_token``. ``rows``: the completions.
    """
    sampling = eval_set.sampling or sampling
    rollouts = backend.generate(eval_set.prompts, group_size=samples, sampling=sampling, seed=seed)
    rows = (eval_set.scorer or scorer).score(rollouts)
    rewards = [row.reward.value for row in rows]
    return EvalResult(
        name=eval_set.name,
        problems=len(eval_set.prompts),
        samples=samples,
        values={
            "reward": clustered_interval([rewards[i : i + samples] for i in range(0, len(rows), samples)]),
            "length": sum(len(row.rollout.completion_ids) for row in rows) / len(rows),
            "truncated_share": sum(row.rollout.stop_reason == "length" for row in rows) / len(rows),
            **(measure(rows) if measure else {}),
        },
        rows=tuple(rows),
    )


def evaluate_choices(scorer: ChoiceScorer, choices: ChoiceSet) -> EvalResult:
    """Accuracy of the likeliest choices. ``rows``: a record per problem.

    Batches are those of ``kl-comedy evaluate``, so the same weights give the same bits.
    """
    return score_choices(choices.name, choices.records(scorer.log_probs(choices, chunk=CHUNK)))
