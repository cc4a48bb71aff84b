"""Instances drawn at random: sizes, skew, distance, staleness and impossible tokens; and a search for the worst one."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kl_comedy.kl.oracle.enumeration import IMPOSSIBLE, IMPOSSIBLE_UNDER, Instance, Tree

MAX_COMPLETIONS = 300
TOLERANCE = 1e-6
"""Error up to which a drawn setting hits a target: scores of nearly deterministic policies are differences of nearly
equal numbers, and an impossible token multiplies their rounding by 1e4."""
CORNERS: tuple[dict[str, Any], ...] = (
    {"distance": 10.0, "impossible": "no token"},
    {"distance": 10.0, "sharpness": 10.0, "impossible": "no token"},
    {"impossible": "reference"},
    {"impossible": "all", "staleness": 3.0},
)
"""What is set in the first settings that are drawn: far from the reference, nearly deterministic, impossible tokens."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The arguments of :meth:`Tree.build` and :meth:`Instance.random`; rewards are normal, times ``reward_scale``."""

    vocabulary: int
    length: int
    ends: bool
    parameters: int | None
    sharpness: float
    distance: float
    staleness: float
    impossible: str
    reward_scale: float
    seed: int

    @classmethod
    def draw(cls, rng: random.Random) -> Setting:
        """2 to 5 tokens, 2 to 7 steps, noise of 0.01 to 10 logits, staleness of up to 3, rewards of 0.1 to 100."""
        vocabulary, length, ends = 5, 7, False
        while Tree.build(vocabulary=vocabulary, length=length, ends=ends).completions > MAX_COMPLETIONS:
            vocabulary, length, ends = rng.randint(2, 5), rng.randint(2, 7), rng.random() < 0.5
        return cls(
            vocabulary=vocabulary,
            length=length,
            ends=ends,
            parameters=rng.choice((None, 4, 8)),
            sharpness=10 ** rng.uniform(-1, 1),
            distance=10 ** rng.uniform(-2, 1),
            staleness=10 ** rng.uniform(-2, math.log10(3)),
            impossible=rng.choice(IMPOSSIBLE_UNDER),
            reward_scale=10 ** rng.uniform(-1, 2),
            seed=rng.getrandbits(31),
        )

    def mutate(self, rng: random.Random) -> Setting:
        """The same with one field drawn again, or with other tables."""
        other, name = Setting.draw(rng), rng.choice([field.name for field in dataclasses.fields(Setting)])
        names = ("vocabulary", "length", "ends") if name in ("vocabulary", "length", "ends") else (name,)
        return dataclasses.replace(self, **{each: getattr(other, each) for each in names})

    def instance(self, regime: str) -> Instance:
        fields = dataclasses.asdict(self)
        tree = Tree.build(**{name: fields.pop(name) for name in ("vocabulary", "length", "ends")})
        scale = fields.pop("reward_scale")
        instance = Instance.random(tree, regime=regime, **fields)
        generator = torch.Generator().manual_seed(self.seed)
        reward_N2 = scale * torch.randn(tree.prefixes, 2, generator=generator, dtype=torch.float64)
        return dataclasses.replace(instance, reward_N2=reward_N2)

    def __str__(self) -> str:
        """As keyword arguments, to draw it again."""
        fields = dataclasses.asdict(self).items()
        return ", ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in fields
        )


def drawn_settings(seed: int) -> list[Setting]:
    """One setting for each of :data:`CORNERS`."""
    rng = random.Random(seed)
    return [dataclasses.replace(Setting.draw(rng), **corner) for corner in CORNERS]


def worst_case(error_of: Callable[[Setting], float], *, seed: int, seconds: float) -> tuple[Setting | None, float, int]:
    """Search for the setting with the largest error until one exceeds :data:`TOLERANCE` or the time is over.

    Half of the settings are drawn, half differ from the worst so far in one field. Returns it, its error, and how many
    were tried.
    """
    rng, worst, largest, tried = random.Random(seed), None, 0.0, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end and largest <= TOLERANCE:
        setting = Setting.draw(rng) if worst is None or rng.random() < 0.5 else worst.mutate(rng)
        error, tried = error_of(setting), tried + 1
        if not error < largest:  # NaN too
            worst, largest = setting, error
    return worst, largest, tried


def coverage(instances: Iterable[Instance]) -> dict[str, list[float]]:
    """The least and the largest of what the instances have: tokens, steps, log-ratios (nats), probabilities."""
    ranges: dict[str, list[float]] = {}
    for instance in instances:
        logp_NV = instance.policy_logp()
        possible_NV = logp_NV > IMPOSSIBLE / 2
        log_ratio_NV = (logp_NV - instance.ref_logp_NV)[possible_NV]
        for name, low, high in (
            ("vocabulary", instance.tree.vocabulary, instance.tree.vocabulary),
            ("steps", instance.tree.length, instance.tree.length),
            ("log_ratios", float(log_ratio_NV.min()), float(log_ratio_NV.max())),
            ("log_probs", float(logp_NV[possible_NV].min()), float(logp_NV.max())),
        ):
            span = ranges.setdefault(name, [low, high])
            ranges[name] = [min(span[0], low), max(span[1], high)]
    return ranges
