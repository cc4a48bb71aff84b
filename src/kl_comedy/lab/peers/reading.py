"""What the flags of a system mean: equivalent terms, words, and what does nothing.

``System.read(flags) -> Meaning`` is a pure function per system (:mod:`kl_comedy.lab.peers.systems`);
:func:`kl_comedy.lab.peers.read` puts the system's facts around it and returns a :class:`Reading`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kl_comedy.kl import REGIMES, KLTerm
from kl_comedy.kl.oracle.certificate import Certificate, certify
from kl_comedy.lab.peers.flags import Flag, Value, render
from kl_comedy.lab.peers.notes import BOTH

Given = Mapping[str, Any]
_NOTHING: Given = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What a system does with all its flags set.

    Args:
        terms: the equivalent terms; empty where no KL acts; None where no term says it (then ``instead`` does).
        instead: what is done, in words, where ``terms`` is None.
        notes: what a user has to know beside the terms.
        no_ops: flags that were given or are on, and do nothing.
        holds_in: the regimes in which the terms are what the system does.
        policy_ratio: the ratio with which the policy loss weights a cost inside the reward: ``none``,
            ``token`` or ``sequence``. Certificates count it, clips not.
        switch_on: the flags that turn the KL on, where it is off.
    """

    terms: tuple[KLTerm, ...] | None
    instead: str = ""
    notes: tuple[str, ...] = ()
    no_ops: tuple[str, ...] = ()
    holds_in: tuple[str, ...] = REGIMES
    policy_ratio: str = "none"
    switch_on: Given = field(default_factory=lambda: _NOTHING)


@dataclass(frozen=True, kw_only=True)
class System:
    """A system: its KL flags, and the function that says what they do.

    ``advice`` holds, per goal (:data:`kl_comedy.lab.peers.advice.GOALS`), the flags that reach it, or why none do.
    """

    name: str
    title: str
    version: str
    source: str
    flags: tuple[Flag, ...]
    read: Callable[[Given], Meaning]
    advice: Mapping[str, Given | str]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A :class:`Meaning` with what it was read from: the system, its version, all its flags, those given."""

    system: str
    version: str
    source: str
    text: str
    flags: Mapping[str, Value]
    given: Mapping[str, Value]
    terms: tuple[KLTerm, ...] | None
    instead: str
    notes: tuple[str, ...]
    no_ops: tuple[str, ...]
    holds_in: tuple[str, ...]
    policy_ratio: str
    switch_on: Given

    def certified_terms(self) -> tuple[KLTerm, ...]:
        """The terms as the policy loss leaves them: a cost inside the reward carries its ratio."""
        return tuple(self._weighted(term) for term in self.terms or ())

    def _weighted(self, term: KLTerm) -> KLTerm:
        if term.baseline != "before" or self.policy_ratio == "none":
            return term
        return dataclasses.replace(term, baseline="after", correction=self.policy_ratio)

    def certificates(self, regimes: Sequence[str] = REGIMES) -> dict[str, Certificate]:
        """By regime, for those in which the terms hold; empty where no KL acts or no term says it."""
        if not self.terms:
            return {}
        held = [regime for regime in regimes if regime in self.holds_in]
        return {c.regime: c for c in certify(self.text, self.certified_terms(), regimes=held)}


def target_of(certificate: Certificate) -> str | None:
    """The target hit while no clamp and no cap acts."""
    return certificate.target or certificate.near_target


def reading_of(system: System, flags: Mapping[str, Value], given: Mapping[str, Value]) -> Reading:
    """Read a system's flags, defaults included."""
    meaning = system.read(flags)
    fields = {item.name: getattr(meaning, item.name) for item in dataclasses.fields(Meaning)}
    places = {term.placement for term in meaning.terms or () if term.placement == "loss" or term.anchor == "behaviour"}
    if len(places) == 2:
        fields["notes"] = (*meaning.notes, BOTH)
    return Reading(
        system=system.name,
        version=system.version,
        source=system.source,
        text=render(system.name, system.flags, given),
        flags=flags,
        given=given,
        **fields,
    )


def in_loss(estimator: str, beta: float, **fields: Any) -> KLTerm:
    """A differentiated term."""
    return KLTerm(estimator, placement="loss", beta=beta, **fields)


def in_reward(estimator: str, beta: float, *, credit: str, baseline: str, **fields: Any) -> KLTerm:
    """A cost from the log-probs at rollout. After the baseline it stands alone and carries the token ratio itself."""
    correction = "token" if baseline == "after" else "none"
    return KLTerm(
        estimator,
        placement="reward",
        credit=credit,
        baseline=baseline,
        correction=correction,
        anchor="behaviour",
        beta=beta,
        **fields,
    )
