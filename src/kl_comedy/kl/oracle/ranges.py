"""Error, noise and strength of KL terms over many drawn policies, of 4 and of 8 tokens: ``kl-comedy certify --range``.

A certificate's figures are means over three policies of three tokens. Another vocabulary and another distance give
other numbers; here are the least, the median and the largest of them, with the distances that they are of. Off-policy
the sampler differs from the policy by drawn noise, or is the policy some updates of training before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, exact_moments_by_loss, target_gradient, terms_loss
from kl_comedy.kl.oracle.certificate import Question, yardsticks_of
from kl_comedy.kl.oracle.certificate_record import Certificate
from kl_comedy.kl.oracle.gradients import Moments
from kl_comedy.kl.oracle.trajectory import sampled_by_an_older_policy

TREES = (Tree.build(vocabulary=4, length=3), Tree.build(vocabulary=8, length=3))
POLICIES = 50
PARAMETERS = 12
"""Shared by all prefixes, as in a language model."""
UPDATES = 20
"""Updates of Adam between the reference and a trained policy."""
AGES = (1, 4, 10)
"""How many updates before the policy its sampler is."""

Span = tuple[float, float, float]
"""The least, the median and the largest."""


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """The ranges of one list of terms in one regime; ``noise`` is None where a certificate has none.

    ``age``: the updates that the sampler is behind; None where it differs by drawn noise, or not at all. ``error``,
    ``strength``: against the gradient of the certificate's :attr:`~Certificate.stated` target. ``noise``: the variance
    over that of the least noisy unbiased term on the same policy. ``kl_per_prefix`` (nats): of the policies from the
    reference.
    """

    age: int | None
    policies: int
    vocabulary: tuple[int, ...]
    steps: int
    kl_per_prefix: Span
    error: Span
    strength: Span
    noise: Span | None


@lru_cache(maxsize=8)
def drawn_policies(regime: str, seed: int) -> tuple[Instance, ...]:
    """As many of each tree, with logit noise of 0.1 to 1 nats to the reference and of 0.1 to 0.6 to the sampler."""
    rng = random.Random(seed)
    instances = []
    for number in range(POLICIES):
        settings = InstanceSettings(
            regime=regime,
            seed=rng.getrandbits(31),
            parameters=PARAMETERS,
            sharpness=10 ** rng.uniform(-0.5, 0.0),
            distance=10 ** rng.uniform(-1, 0),
            staleness=rng.uniform(0.1, 0.6),
        )
        instances.append(Instance.random(TREES[number % len(TREES)], settings))
    return tuple(instances)


def drawn_starts(count: int, seed: int) -> list[tuple[Instance, float]]:
    """Policies of each tree to train from, as the reference, and a rate of Adam for each.

    Rates from 10^-2.5 to 10^-1.5 put a policy after 20 updates about as far away as :func:`drawn_policies`.
    """
    rng = random.Random(seed)
    starts = []
    for number in range(count):
        settings = InstanceSettings(
            regime="on_policy",
            seed=rng.getrandbits(31),
            parameters=PARAMETERS,
            sharpness=10 ** rng.uniform(-0.5, 0.0),
        )
        start = Instance.random(TREES[number % len(TREES)], settings)
        starts.append((start, 10 ** rng.uniform(-2.5, -1.5)))
    return starts


@lru_cache(maxsize=8)
def trained_policies(age: int, seed: int) -> tuple[Instance, ...]:
    """As many, after :data:`UPDATES` updates on the reward from the reference; the sampler is ``age`` updates old."""
    instances = []
    for start, rate in drawn_starts(POLICIES, seed):
        instances.append(sampled_by_an_older_policy(start, age=age, updates=UPDATES, lr=rate))
    return tuple(instances)


def kl_per_prefix(instance: Instance) -> float:
    """The mean over prefixes of the exact KL to the reference (nats)."""
    reverse_N, _ = instance.kl_N
    return float(reverse_N.mean())


def all_ranges(certificate: Certificate, *, seed: int = 0) -> list[Ranges]:
    """:func:`ranges` over drawn policies; off-policy also over trained ones, of each age in :data:`AGES`."""
    by_age = [ranges(certificate, drawn_policies(certificate.regime, seed))]
    if certificate.regime == "off_policy":
        for age in AGES:
            by_age.append(ranges(certificate, trained_policies(age, seed), age=age))
    return by_age


def ranges(certificate: Certificate, policies: Sequence[Instance], *, age: int | None = None) -> Ranges:
    """The ranges of a certificate's terms over some policies; it says what the noise is measured against."""
    question = Question.of(certificate.terms, certificate.regime)
    losses = {"": terms_loss(question.enumerated)}
    hit = certificate.target or certificate.near_target or certificate.stated
    has_noise = certificate.variance_ratio is not None
    if has_noise:
        losses |= {term.label(): terms_loss((term,)) for term in yardsticks_of(hit)}
    distances, errors, strengths, noises = [], [], [], []
    for instance in policies:
        moments = exact_moments_by_loss(instance, losses)
        target_D = target_gradient(instance, certificate.stated)
        distances.append(kl_per_prefix(instance))
        errors.append(moments[""].relative_bias(target_D))
        strengths.append(moments[""].strength(target_D))
        if has_noise:
            noises.append(moments[""].variance / _least(moments, yardsticks_of(hit), instance, hit))
    return Ranges(
        age=age,
        policies=len(distances),
        vocabulary=tuple(tree.vocabulary for tree in TREES),
        steps=TREES[0].length,
        kl_per_prefix=_span(distances),
        error=_span(errors),
        strength=_span(strengths),
        noise=_span(noises) if noises else None,
    )


def _least(moments: dict[str, Moments], yardsticks: Sequence[KLTerm], instance: Instance, hit: str) -> float:
    """The variance of the least noisy term whose expected gradient is that of ``hit``."""
    hit_D = target_gradient(instance, hit)
    by_label = [moments[term.label()] for term in yardsticks]
    return min(item.variance for item in by_label if item.equals(hit_D))


def _span(values: Sequence[float]) -> Span:
    return min(values), median(values), max(values)
