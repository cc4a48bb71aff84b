"""Evaluate a policy between updates: completions and their rewards, or the choices of multiple-choice problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kl_comedy.evaluation.likelihood import ChoiceScorer, ChoiceSet
from kl_comedy.evaluation.scores import EvalResult, score_choices
from kl_comedy.phases import phase
from kl_comedy.records import Prompt, Scored
from kl_comedy.rewards import Scorer
from kl_comedy.rollouts import RolloutBackend, Sampling
from kl_comedy.statistics import Interval, clustered_interval

CHUNK = 32
"""Problems evaluated at a time: what a killed process may lose. Another number draws other samples."""


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """A named set of prompts. ``scorer`` and ``sampling`` replace those of the run (suites have their own)."""

    name: str
    prompts: Sequence[Prompt]
    scorer: Scorer | None = None
    sampling: Sampling | None = None


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """How every set of a run is evaluated.

    ``samples``: completions per problem. ``measure``: returns further means of the completions by metric name, as
    ``kl/exact_reverse_token``.
    """

    samples: int
    sampling: Sampling
    measure: Callable[[Sequence[Scored]], Mapping[str, float]] | None = None


def evaluate(
    backend: RolloutBackend, scorer: Scorer, eval_set: EvalSet, settings: EvalSettings, *, seed: int
) -> EvalResult:
    """Sample completions of every problem and score them. Depends on weights, prompts and seed only.

    ``reward`` is the mean over problems and samples; its interval treats problems as the random units. Where the scorer
    has a gold verdict, ``reward`` is the mean of that, and ``proxy`` the mean of what is trained on. ``rows``: the
    completions.
    """
    samples = settings.samples
    sampling = eval_set.sampling or settings.sampling
    rollouts = backend.generate(eval_set.prompts, group_size=samples, sampling=sampling, seed=seed)
    phase("scoring")
    rows = (eval_set.scorer or scorer).score(rollouts)

    trained = [row.reward.value for row in rows]
    golds = [row.reward.gold for row in rows if row.reward.gold is not None]
    lengths = [len(row.rollout.drawn_ids) for row in rows]
    truncated = [row.rollout.stop_reason == "length" for row in rows]
    # The order is that of the table's columns; the first is the main score.
    values: dict[str, Interval | float] = {
        "reward": _mean_over_problems(golds or trained, samples),
        "length": sum(lengths) / len(rows),
        "truncated_share": sum(truncated) / len(rows),
    }
    if golds:
        values["proxy"] = _mean_over_problems(trained, samples)
    if settings.measure is not None:
        phase("measuring the policy")
        # KL and entropy are of the completions that were scored, so that both describe one sample.
        values |= settings.measure(rows)
    return EvalResult(
        name=eval_set.name, problems=len(eval_set.prompts), samples=samples, values=values, rows=tuple(rows)
    )


def _mean_over_problems(values: Sequence[float], samples: int) -> Interval:
    """The mean of the values of ``samples`` completions of each problem, one problem after the other."""
    # Samples of one problem are alike, so they make one cluster.
    return clustered_interval([values[start : start + samples] for start in range(0, len(values), samples)])


def evaluate_choices(scorer: ChoiceScorer, choices: ChoiceSet) -> EvalResult:
    """Accuracy of the likeliest choices. ``rows``: a record per problem.

    Batches are those of ``kl-comedy evaluate``, so the same weights give the same bits.
    """
    return score_choices(choices.name, choices.records(scorer.log_probs(choices, chunk=CHUNK)))
