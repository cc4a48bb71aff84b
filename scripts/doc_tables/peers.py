"""Tables of docs/peers.md, made from readings and their certificates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from doc_tables.common import table
from doc_tables.kl_terms import noise, outcome

from kl_comedy.lab.peers import SYSTEMS, Advice, Reading, System, advise, read, switched_on
from kl_comedy.lab.peers.flags import format_value
from kl_comedy.lab.peers.systems import SENTENCES

SETTINGS: tuple[str, ...] = (
    "trl:beta=0.04,use_bias_correction_kl=false",
    "trl:beta=0.04,importance_sampling_level=sequence",
    "trl:trainer=rloo",
    "verl:use_kl_loss=true,kl_loss_type=k3+",
    "verl:use_kl_loss=true,kl_loss_type=k1",
    "verl:use_kl_in_reward=true,adv_estimator=grpo",
    "openrlhf:use_loss=true,kl_estimator=k3",
    "openrlhf:use_loss=true,kl_estimator=k3,unbiased_gradient=true",
    "openrlhf:policy_loss_type=gspo",
    "nemo-rl:reference_policy_kl_type=k2",
    "nemo-rl:use_on_policy_kl_approximation=true",
    "nemo-rl:use_kl_in_reward=true",
    "slime:use_kl_loss=true,kl_loss_coef=0.01,kl_loss_type=k3,use_unbiased_kl=true",
    "slime:use_kl_loss=true,kl_loss_coef=0.01,kl_loss_type=k2,use_unbiased_kl=true",
    "slime:kl_coef=0.01",
    "open-instruct:kl_estimator=3",
    "pipelinerl:kl_coef=0.001,policy_loss=gspo",
    "areal:ref=set",
    "roll:use_kl_loss=true,kl_loss_coef=0.01",
    "tinker:kl_penalty_coef=0.01,kl_discount_factor=1",
    "trinity:kl_loss_fn=corrected_k3",
    "oat:kl_penalty_coef=0.05,beta=0",
    "ms-swift:advantage_estimator=rloo",
)
"""Shown beside the defaults."""


def settings() -> str:
    """Each system's default (switched on, if its default has no KL), then its other settings."""
    rows = []
    for name in SYSTEMS:
        default = read(f"{name}:")
        acting = switched_on(default)
        if acting is None:
            rows.append(_row(default, "the default"))
        else:
            rows.append(_row(acting, "(off by default)"))
        rows += [_row(read(text), "") for text in SETTINGS if text.startswith(f"{name}:")]
    return table(("system", "flags", "equivalent term", "on-policy", "off-policy"), rows)


def _row(reading: Reading, heading: str) -> tuple[str, ...]:
    flags = f"{heading} {_flags(reading)}".strip() if reading.given else heading
    if reading.terms is None:
        return f"[{reading.system}](#{reading.system})", flags, "none", "", ""
    if not reading.terms:
        return reading.system, flags, "no KL", "-", "-"
    label = " + ".join(f"`{term.label()}`" for term in reading.terms)
    certificates = reading.certificates()
    if all(term.reference == "sampler" for term in reading.terms):
        return reading.system, flags, label, "zero", "towards the sampler"
    return reading.system, flags, label, *(outcome(certificates[regime]) for regime in ("on_policy", "off_policy"))


def common_notes() -> str:
    """The sentences that several systems share, by name."""
    return "\n".join(f"- **{name}**: {sentence}." for name, sentence in SENTENCES.items())


def systems() -> str:
    """Per system: notes, flags without effect, and advised flags."""
    return "\n\n".join(_section(system) for system in SYSTEMS.values())


def _section(system: System) -> str:
    default = read(f"{system.name}:")
    readings = [default, switched_on(default), *(read(text) for text in SETTINGS if text.startswith(f"{system.name}:"))]
    there = [reading for reading in readings if reading is not None]
    parts = [f"### {system.name}", f"{system.title} {system.version}. Source: `{_modules(system.source)}`."]
    lines = [
        f"- {_flags(reading)} has no equivalent term: {reading.instead}." for reading in there if reading.terms is None
    ]
    lines += _notes(there, lambda reading: reading.notes, "")
    lines += _notes(there, lambda reading: reading.no_ops, "no effect: ")
    by_advice: dict[str, list[str]] = {}
    for each in advise(system):
        setting = f"`{each.flags}` (noise {_noise(each)})" if each.flags else each.why_not
        by_advice.setdefault(setting, []).append(GOAL_WORDS[each.goal.name])
    lines += [f"- {', '.join(goals)}: {setting}." for setting, goals in by_advice.items()]
    return "\n\n".join([*parts, "\n".join(lines)])


GOAL_WORDS = {
    "sequence": "**sequence**",
    "off_policy": "**stale**",
    "low_noise": "**token**",
}


def _notes(readings: Iterable[Reading], notes: Callable[[Reading], tuple[str, ...]], prefix: str) -> list[str]:
    """Each note once, under the flags that first have it; a shared sentence by its name."""
    names = {sentence: f"[{name}](#common-notes)" for name, sentence in SENTENCES.items()}
    listed: set[str] = set()
    lines = []
    for reading in readings:
        new = [note for note in notes(reading) if note not in listed]
        listed.update(new)
        if new:
            lines.append(f"- {_flags(reading)}: {prefix}{'; '.join(names.get(note, note) for note in new)}.")
    return lines


def _flags(reading: Reading) -> str:
    """What was given, by short names."""
    given = ",".join(f"{name}={format_value(value)}" for name, value in reading.given.items())
    return f"`{given}`" if given else "the default"


def _modules(source: str) -> str:
    """Files of another repository, without endings: the pages name files of ours with theirs."""
    return re.sub(r"\.(py|yaml)\b", "", source)


def _noise(advice: Advice) -> str:
    if advice.flags is None:
        return "-"
    return noise(read(advice.flags).certificates([advice.goal.regime])[advice.goal.regime])


PARTS: dict[str, Callable[[], str]] = {"settings": settings, "common notes": common_notes, "systems": systems}
