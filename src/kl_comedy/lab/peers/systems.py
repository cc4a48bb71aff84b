"""The KL flags of other systems as data (``systems/NAME.yaml``), and what a setting of them means.

    text -> flags.split, flags.resolve -> the rules of the system -> Reading -> certificates

A rule is a mapping. It applies where every condition of its ``when`` holds, and then, in this order: ``set`` gives
values to variables, ``terms``, ``notes`` and ``no_ops`` are appended, ``switch_on`` is merged, ``policy_ratio`` and
``holds_in`` are replaced, ``refuse`` raises, ``rules`` are applied, and ``instead`` or ``stop`` ends the reading.

A condition compares a flag, a variable, or ``terms`` (the number of terms so far) with a value, a list (any of it),
``{not: ...}`` or ``{above: number}``. ``$name`` stands for the value of a flag, variable or shared sentence, ``{name}``
inside a text for the value as one types it, ``{of: name, value: result, else: result}`` for a table, and
``{twice: name}`` for twice a number. A term is ``{loss: estimator, ...}`` (differentiated), ``{cost: estimator, ...}``
(a cost in the reward, from the log-probs at rollout) or the fields of a :class:`~kl_comedy.kl.KLTerm`.

Facts were read in the sources of the versions that the files name; no code of those systems is imported.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl import REGIMES, KLTerm
from kl_comedy.kl.oracle.certificate import Certificate, certify
from kl_comedy.lab.peers.flags import Flag, Value, format_value, render, resolve, split

Rules = Sequence[Mapping[str, Any]]
EFFECTS = ("set", "terms", "notes", "no_ops", "switch_on", "policy_ratio", "holds_in", "refuse", "rules", "instead")
NAMES = (
    *("trl", "verl", "openrlhf", "nemo-rl", "slime", "skyrl", "open-instruct", "prime-rl", "pipelinerl", "areal"),
    *("roll", "tinker", "trinity", "oat", "torchforge", "ms-swift"),
)


@dataclass(frozen=True, kw_only=True)
class System:
    """A system: its KL flags, and the rules that say what they do.

    ``advice`` holds, per goal of :data:`GOALS`, the flags that reach it, or why none do.
    """

    name: str
    title: str
    version: str
    source: str
    flags: tuple[Flag, ...]
    rules: Rules
    advice: Mapping[str, Mapping[str, Value] | str]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a system does with its flags set.

    Args:
        flags: all flags, defaults included; ``given``: those of the text.
        terms: the equivalent terms; empty where no KL acts; None where no term is equivalent (then ``instead`` says
            what is done).
        notes: what a user has to know beside the terms.
        no_ops: flags that were given or are on, and do nothing.
        holds_in: the regimes in which the terms are what the system does.
        policy_ratio: the ratio with which the policy loss weights a cost inside the reward: ``none``, ``token`` or
            ``sequence``. Certificates count it, clips not.
        switch_on: the flags that turn the KL on, where it is off.
    """

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
    switch_on: Mapping[str, Value]

    def certified_terms(self) -> tuple[KLTerm, ...]:
        """The terms as the policy loss leaves them: a cost inside the reward carries its ratio."""
        return tuple(
            term
            if term.baseline != "before" or self.policy_ratio == "none"
            else dataclasses.replace(term, baseline="after", correction=self.policy_ratio)
            for term in self.terms or ()
        )

    def certificates(self, regimes: Sequence[str] = REGIMES) -> dict[str, Certificate]:
        """By regime, for those in which the terms hold; empty where there are no terms."""
        if not self.terms:
            return {}
        covered = [regime for regime in regimes if regime in self.holds_in]
        return {c.regime: c for c in certify(self.text, self.certified_terms(), regimes=covered)}


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a user may want: ``target`` hit in ``regime``; ``recipe`` is ours for it."""

    name: str
    words: str
    target: str
    regime: str
    recipe: str


GOALS: dict[str, Goal] = {
    goal.name: goal
    for goal in (
        Goal(
            name="sequence",
            words="the reverse KL of whole completions, as the objective states it, on-policy",
            target="sequence_reverse",
            regime="on_policy",
            recipe="rb/full",
        ),
        Goal(
            name="off_policy",
            words="a per-token reverse KL that stays right on stale batches",
            target="token_reverse",
            regime="off_policy",
            recipe="rb/token",
        ),
        Goal(
            name="low_noise",
            words="little noise, per token, on-policy",
            target="token_reverse",
            regime="on_policy",
            recipe="rb/token",
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """For one goal: the flags (text that :func:`read` reads), or None and why. Tests certify that they reach it."""

    goal: Goal
    flags: str | None
    given: Mapping[str, Value]
    why_not: str


# --- questions ----------------------------------------------------------------------------------------------------
def is_peer(text: str) -> bool:
    """Whether a text is about another system: it has a colon, or is the bare name of one."""
    return ":" in text or _normalize(text) in SYSTEMS


def find_system(name: str) -> System:
    """The system called ``name``; case and underscores do not matter. A miss names the nearest.

    >>> find_system("NeMo_RL").name
    'nemo-rl'
    """
    if _normalize(name) not in SYSTEMS:
        raise bad_value("system", name, SYSTEMS)
    return SYSTEMS[_normalize(name)]


def read(text: str) -> Reading:
    """Read ``system:key=value,...``; ``system:`` alone is the system with its defaults.

    Raises:
        UserError: an unknown system, flag or value, or flags that the system itself refuses.

    >>> read("verl:use_kl_loss=true,kl_loss_type=k3+").terms[0].label()
    'k3_reverse_token in loss gradient=k2'
    """
    name, pairs = split(text)
    system = find_system(name)
    return read_flags(system, resolve(system.name, system.flags, pairs))


def switched_on(reading: Reading) -> Reading | None:
    """The same flags with the KL turned on, where it is off and a flag turns it on."""
    if not reading.switch_on:
        return None
    return read_flags(SYSTEMS[reading.system], {**reading.given, **reading.switch_on})


def advise(system: System) -> tuple[Advice, ...]:
    """The advice of a system, in the order of :data:`GOALS`."""
    advice = []
    for name, goal in GOALS.items():
        answer = system.advice[name]
        given, why_not = ({}, answer) if isinstance(answer, str) else (answer, "")
        text = None if why_not else render(system.name, system.flags, given)
        advice.append(Advice(goal=goal, flags=text, given=given, why_not=why_not))
    return tuple(advice)


def target_of(certificate: Certificate) -> str | None:
    """The target hit while no clamp and no cap acts."""
    return certificate.target or certificate.near_target


# --- rules --------------------------------------------------------------------------------------------------------
def read_flags(system: System, given: Mapping[str, Value]) -> Reading:
    """Apply the rules of a system to its flags, defaults included. Raises :class:`UserError` where a rule refuses."""
    flags = {**{flag.name: flag.default for flag in system.flags}, **given}
    result = _Rules({**SENTENCES, **dict.fromkeys(_variables(system.rules)), **flags}, system.name)
    result.apply(system.rules)
    if {"reward", "loss"} <= {term.placement for term in result.terms if _from_rollout(term)}:
        result.notes.append(SENTENCES["both"])
    return Reading(
        system=system.name,
        version=system.version,
        source=system.source,
        text=render(system.name, system.flags, given),
        flags=flags,
        given=given,
        terms=None if result.instead else tuple(result.terms),
        instead=result.instead,
        notes=tuple(result.notes),
        no_ops=tuple(result.no_ops),
        holds_in=tuple(result.holds_in),
        policy_ratio=result.policy_ratio,
        switch_on=result.switch_on,
    )


def _from_rollout(term: KLTerm) -> bool:
    return term.placement == "loss" or term.anchor == "behaviour"


@dataclass
class _Rules:
    """The rules of one system at work: values by name, and what was collected so far."""

    values: dict[str, Any]
    system: str
    terms: list[KLTerm] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    no_ops: list[str] = field(default_factory=list)
    switch_on: dict[str, Value] = field(default_factory=dict)
    policy_ratio: str = "none"
    holds_in: Sequence[str] = REGIMES
    instead: str = ""

    def apply(self, rules: Rules) -> bool:
        """Apply rules in order. Returns False where one of them ends the reading."""
        for rule in rules:
            if not all(self._holds(name, wanted) for name, wanted in rule.get("when", {}).items()):
                continue
            for name, value in rule.get("set", {}).items():
                self.values[name] = self._value(value)
            self.terms += [self._term(item) for item in rule.get("terms", ())]
            self.notes += [self._value(text) for text in rule.get("notes", ())]
            self.no_ops += [self._value(text) for text in rule.get("no_ops", ())]
            self.switch_on |= {name: self._value(value) for name, value in rule.get("switch_on", {}).items()}
            self.policy_ratio = rule.get("policy_ratio", self.policy_ratio)
            self.holds_in = rule.get("holds_in", self.holds_in)
            if "refuse" in rule:
                raise UserError(f"{self.system}: {rule['refuse']}")
            if not self.apply(rule.get("rules", ())):
                return False
            self.instead = self._value(rule.get("instead", ""))
            if self.instead or rule.get("stop"):
                return False
        return True

    def _holds(self, name: str, wanted: Any) -> bool:
        value = len(self.terms) if name == "terms" else self.values[name]
        if isinstance(wanted, dict) and "above" in wanted:
            return bool(value > wanted["above"])
        if isinstance(wanted, dict):
            return not self._holds(name, wanted["not"])
        return value in wanted if isinstance(wanted, list) else bool(value == self._value(wanted))

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict) and "twice" in value:
            return 2 * self.values[value["twice"]]
        if isinstance(value, dict):
            key = self.values[value["of"]]
            return value[key] if key in value else value.get("else")
        if not isinstance(value, str):
            return value
        if value.startswith("$"):
            return self.values[value[1:]]
        return re.sub(r"\{(\w+)\}", lambda match: format_value(self.values[match[1]]), value)

    def _term(self, item: Mapping[str, Any]) -> KLTerm:
        fields = {name: self._value(value) for name, value in item.items()}
        if "loss" in fields:
            return KLTerm(fields.pop("loss"), placement="loss", **fields)
        if "cost" in fields:  # after the baseline a cost stands alone, and carries the token ratio itself
            correction = "token" if fields["baseline"] == "after" else "none"
            estimator = fields.pop("cost")
            return KLTerm(estimator, placement="reward", correction=correction, anchor="behaviour", **fields)
        return KLTerm(**fields)


def _variables(rules: Rules) -> set[str]:
    """Every name that a rule sets; it is None until then."""
    names = {name for rule in rules for name in rule.get("set", {})}
    return names.union(*(_variables(rule.get("rules", ())) for rule in rules))


# --- files --------------------------------------------------------------------------------------------------------
def _load(name: str) -> Any:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is six times as fast, and optional
    return yaml.load((Path(__file__).parent / "systems" / f"{name}.yaml").read_text("utf-8"), loader)


def _load_system(name: str) -> System:
    data = _load(name)
    flags = tuple(
        Flag(**{"name": flag, **{key: tuple(v) if isinstance(v, list) else v for key, v in facts.items()}})
        for flag, facts in data.pop("flags").items()
    )
    return System(name=name, flags=flags, **data)


def _normalize(name: str) -> str:
    return name.strip().rstrip(":").lower().replace("_", "-")


SENTENCES: dict[str, str] = _load("sentences")
SYSTEMS: dict[str, System] = {name: _load_system(name) for name in NAMES}
