"""Learning-rate schedules, as a factor of the configured rate."""

from __future__ import annotations

import math

from kl_comedy.config import OptimizerConfig


def lr_factor(settings: OptimizerConfig, step: int, steps: int) -> float:
    """The factor at update ``step`` of ``steps``: linear warm-up, then constant, linear or cosine to zero.

    >>> lr_factor(OptimizerConfig(schedule="linear", warmup_steps=0), 5, 10)
    0.5
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    done = min((step - settings.warmup_steps) / max(steps - settings.warmup_steps, 1), 1.0)
    return 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
