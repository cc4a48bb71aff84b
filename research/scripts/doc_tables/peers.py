"""Tables of docs/peers.md, from the readings of flags and their certificates."""

from __future__ import annotations

from collections.abc import Callable

from doc_tables.common import table
from doc_tables.kl_terms import noise, outcome

from kl_comedy.lab.peers import SYSTEMS, Advice, Reading, advise, format_value, read, switched_on

SETTINGS: tuple[str, ...] = (
    "verl:use_kl_loss=true,kl_loss_type=k1",
    "verl:use_kl_in_reward=true,adv_estimator=grpo",
    "openrlhf:use_loss=true,kl_estimator=k3",
    "nemo-rl:reference_policy_kl_type=k2",
    "nemo-rl:use_kl_in_reward=true",
    "slime:use_kl_loss=true,kl_loss_coef=0.01,kl_loss_type=k2,use_unbiased_kl=true",
    "slime:kl_coef=0.01",
    "pipelinerl:kl_coef=0.001,policy_loss=gspo",
    "areal:ref=set",
    "roll:use_kl_loss=true,kl_loss_coef=0.01",
)
"""Settings in the table in addition to the defaults: common ones, and those that do not do what their name says."""


def settings() -> str:
    """Each system's default (with KL switched on if it is off by default), then its other settings."""
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
        return reading.system, flags, "none", "", ""
    if not reading.terms:
        return reading.system, flags, "no KL", "-", "-"
    label = " + ".join(f"`{term.label()}`" for term in reading.terms)
    certificates = reading.certificates()
    if all(term.reference == "sampler" for term in reading.terms):
        return reading.system, flags, label, "zero", "towards the sampler"
    return reading.system, flags, label, *(outcome(certificates[regime]) for regime in ("on_policy", "off_policy"))


def systems() -> str:
    """A row per system: its version and the recommended flags for each goal."""
    rows = []
    for system in SYSTEMS.values():
        settings = {
            advice.goal.name: f"`{advice.flags}` ({_noise(advice)})" if advice.flags else "-"
            for advice in advise(system)
        }
        cells = [settings[goal] for goal in ("sequence", "off_policy", "low_noise")]
        rows.append((system.name, f"{system.title} {system.version}", *cells))
    return table(("system", "version", "sequence", "stale", "token"), rows)


def _flags(reading: Reading) -> str:
    """The flags of a reading, by short names."""
    flags = ",".join(f"{name}={format_value(value)}" for name, value in reading.given.items())
    return f"`{flags}`" if flags else "the default"


def _noise(advice: Advice) -> str:
    if advice.flags is None:
        return "-"
    return noise(read(advice.flags).certificates([advice.goal.regime])[advice.goal.regime])


PARTS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "systems": systems,
}
