"""Score a policy on held-out problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kl_comedy.records import Prompt, Rollout, Scored
from kl_comedy.rollouts import RolloutBackend, Sampling


class Scorer(Protocol):
    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]: ...


class Result(Protocol):
    """What an evaluation on one set found, with or without completions."""

    @property
    def name(self) -> str: ...

    def metrics(self) -> dict[str, float]:
        """Under ``eval/<set>/...``."""
        ...

    def line(self) -> str:
        """The few numbers worth watching."""
        ...


Measure = Callable[[Sequence[Scored]], Mapping[str, float]]
"""What else to say about completions: means by metric name, as in ``kl/exact_reverse_token``."""


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """A named set of prompts to evaluate on. ``scorer`` and ``sampling``: its own, where it has them (suites)."""

    name: str
    prompts: Sequence[Prompt]
    scorer: Scorer | None = None
    sampling: Sampling | None = None


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Mean reward over problems (each the mean of its samples) with a 95% normal interval over problems.

    ``measured``: what the measure says about the same completions; empty without one.
    """

    name: str
    problems: int
    samples: int
    reward: float
    half_width: float
    length: float
    truncated: float
    measured: Mapping[str, float]
    rows: tuple[Scored, ...]

    def metrics(self) -> dict[str, float]:
        """Under ``eval/<set>/...``."""
        return {
            f"eval/{self.name}/reward": self.reward,
            f"eval/{self.name}/reward_half_width": self.half_width,
            f"eval/{self.name}/length": self.length,
            f"eval/{self.name}/truncated_share": self.truncated,
            **{f"eval/{self.name}/{name}": value for name, value in self.measured.items()},
        }

    def line(self) -> str:
        """The few numbers worth watching."""
        return f"reward {self.reward:.3f} ± {self.half_width:.3f} ({self.problems} problems, length {self.length:.1f})"


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """The mean over problems and half of its 95% normal interval, 1.96 s / sqrt(problems)."""
    n = len(values)
    mean = sum(values) / n
    variance = sum((x - mean) ** 2 for x in values) / max(n - 1, 1)
    return mean, 1.96 * math.sqrt(variance / n)


def evaluate(
    backend: RolloutBackend, scorer: Scorer, held_out: EvalSet, *, samples: int, sampling: Sampling, seed: int,
    measure: Measure | None = None,
) -> EvalResult:  # fmt: skip
    """Draw ``samples`` completions a problem, score and measure them. Depends on weights, prompts and seed only.

    ``scorer`` and ``sampling`` hold where the set has none of its own.
    """
    sampling = held_out.sampling or sampling
    rows = (held_out.scorer or scorer).score(
        backend.generate(held_out.prompts, group_size=samples, sampling=sampling, seed=seed)
    )
    n = len(held_out.prompts)
    means = [sum(row.reward.value for row in rows[i * samples : (i + 1) * samples]) / samples for i in range(n)]
    mean, half_width = mean_and_half_width(means)
    return EvalResult(
        name=held_out.name,
        problems=n,
        samples=samples,
        reward=mean,
        half_width=half_width,
        length=sum(len(row.rollout.completion_ids) for row in rows) / len(rows),
        truncated=sum(row.rollout.stop_reason == "length" for row in rows) / len(rows),
        measured=measure(rows) if measure else {},
        rows=tuple(rows),
    )
