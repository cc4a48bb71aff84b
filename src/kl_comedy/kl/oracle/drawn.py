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

from kl_comedy.kl.oracle.enumeration import IMPOSSIBLE, IMPOSSIBLE_UNDER, Instance, InstanceSettings, Tree

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


SIZES = ("vocabulary", "length", "ends")
"""The fields of a setting that make its tree."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A tree and the :class:`InstanceSettings` of an instance on it; rewards are normal, times ``reward_scale``."""

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
        # The order of the draws is frozen: a seed in a stored certificate names the settings it was checked in.
        while True:
            vocabulary = rng.randint(2, 5)
            length = rng.randint(2, 7)
            ends = rng.random() < 0.5
            tree = Tree.build(vocabulary=vocabulary, length=length, ends=ends)
            if tree.completions <= MAX_COMPLETIONS:
                break
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
        """The same with one field drawn again; the sizes of the tree are drawn together."""
        other = Setting.draw(rng)
        name = rng.choice([field.name for field in dataclasses.fields(Setting)])
        names: tuple[str, ...] = (name,)
        if name in SIZES:
            # One size of a tree alone could make more completions than are enumerated.
            names = SIZES
        return dataclasses.replace(self, **{changed: getattr(other, changed) for changed in names})

    def instance(self, regime: str) -> Instance:
        """The instance in a regime. The same setting has the same policy, reference and rewards in every regime."""
        tree = Tree.build(vocabulary=self.vocabulary, length=self.length, ends=self.ends)
        settings = InstanceSettings(
            regime=regime,
            seed=self.seed,
            parameters=self.parameters,
            sharpness=self.sharpness,
            distance=self.distance,
            staleness=self.staleness,
            impossible=self.impossible,
        )
        # The rewards of a random instance are 0 or 1; here they have a size, with a generator of their own, so that
        # the tables are those of the same seed elsewhere.
        instance = Instance.random(tree, settings)
        generator = torch.Generator().manual_seed(self.seed)
        reward_N2 = self.reward_scale * torch.randn(tree.prefixes, 2, generator=generator, dtype=torch.float64)
        return dataclasses.replace(instance, reward_N2=reward_N2)

    def __str__(self) -> str:
        """As keyword arguments, to draw it again."""
        texts = []
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, float):
                texts.append(f"{name} {value:.3g}")
            else:
                texts.append(f"{name} {value}")
        return ", ".join(texts)


def drawn_settings(seed: int) -> list[Setting]:
    """One setting for each of :data:`CORNERS`."""
    # Each corner is laid over another draw, so that the other fields differ too.
    rng = random.Random(seed)
    return [dataclasses.replace(Setting.draw(rng), **corner) for corner in CORNERS]


def worst_case(error_of: Callable[[Setting], float], *, seed: int, seconds: float) -> tuple[Setting | None, float, int]:
    """Search for the setting with the largest error, for ``seconds`` or until one exceeds :data:`TOLERANCE`.

    Half of the settings are drawn, half differ from the worst so far in one field. Returns the worst setting, its
    error, and how many settings were tried.
    """
    rng = random.Random(seed)
    worst: Setting | None = None
    largest = 0.0
    tried = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end and largest <= TOLERANCE:
        if worst is None or rng.random() < 0.5:
            setting = Setting.draw(rng)
        else:
            setting = worst.mutate(rng)
        error = error_of(setting)
        tried += 1
        # Not ``error >= largest``: an error of NaN is worse than any number, and compares false with all.
        if not error < largest:
            worst = setting
            largest = error
    return worst, largest, tried


def coverage(instances: Iterable[Instance]) -> dict[str, list[float]]:
    """The least and the largest of what the instances have: tokens, steps, log-ratios (nats), log-probs (nats)."""
    ranges: dict[str, list[float]] = {}
    for instance in instances:
        logp_NV = instance.policy_logp()
        # A token that is impossible under the policy is never drawn, so its log-ratio is not covered.
        possible_NV = logp_NV > IMPOSSIBLE / 2
        log_ratio_NV = (logp_NV - instance.ref_logp_NV)[possible_NV]
        spans: dict[str, tuple[float, float]] = {
            "vocabulary": (instance.tree.vocabulary, instance.tree.vocabulary),
            "steps": (instance.tree.length, instance.tree.length),
            "log_ratios": (float(log_ratio_NV.min()), float(log_ratio_NV.max())),
            "log_probs": (float(logp_NV[possible_NV].min()), float(logp_NV.max())),
        }
        for name, (low, high) in spans.items():
            least, largest = ranges.get(name, (low, high))
            ranges[name] = [min(least, low), max(largest, high)]
    return ranges
