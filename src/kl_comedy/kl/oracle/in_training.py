"""What is left of the terms once an algorithm is around them: baselines, normalization, clipping, dropped rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kl_comedy.kl.oracle.expectation import target_gradient
from kl_comedy.kl.oracle.policies import Tree
from kl_comedy.kl.oracle.setting import Setting
from kl_comedy.kl.oracle.surroundings import Surroundings, kl_effect
from kl_comedy.kl.term import KLTerm

TREE = Tree.build(vocabulary=3, length=3)
SEEDS = (0, 1)
SHARED = 6
LARGEST_GROUP = 3
"""Groups beyond this are not enumerated: a baseline over three shows what one over eight does, less of it."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The KL part of a whole loss against the sequence-level reverse KL, in one regime.

    ``strength`` is the effective beta for a beta of 1: the multiple of the sequence-level reverse-KL
    gradient that the algorithm passes on. It is what makes betas comparable between placements.
    """

    name: str
    around: str
    regime: str
    strength: float
    relative_bias: float
    cosine: float

    def row(self) -> dict[str, Any]:
        return dict(self.__dict__)


def effects(
    name: str, terms: Sequence[KLTerm], around: Surroundings, *, regimes: Sequence[str] = ("on_policy", "off_policy")
) -> list[Effect]:
    """One row per regime; every group of ``around.group_size`` completions of a small tree is enumerated."""
    return [_effect(name, terms, around, regime) for regime in regimes]


def _effect(name: str, terms: Sequence[KLTerm], around: Surroundings, regime: str) -> Effect:
    strength = bias = cosine = 0.0
    for seed in SEEDS:
        setting = Setting.random(TREE, regime=regime, seed=seed, parameters=SHARED)
        target_D = target_gradient(setting, "sequence_reverse")
        moments = kl_effect(setting, terms, around)
        strength += float(moments.gradient_D @ target_D) / float(target_D.square().sum()) / len(SEEDS)
        bias += moments.relative_bias(target_D) / len(SEEDS)
        cosine += moments.cosine(target_D) / len(SEEDS)
    words = f"{around.advantage}, {around.policy_loss}, {around.reduction}, groups of {around.group_size}"
    if around.drop_truncated:
        words += ", truncated dropped"
    return Effect(name=name, around=words, regime=regime, strength=strength, relative_bias=bias, cosine=cosine)
