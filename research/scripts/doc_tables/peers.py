"""Tables of docs/peers.md, from the readings of flags and their certificates."""

from __future__ import annotations

from collections.abc import Callable

from doc_tables.common import code_span, table
from doc_tables.kl_terms import noise, outcome

from kl_comedy.peers.systems import SYSTEMS, Advice, Reading, advise, format_value, read, switched_on

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
    for system in SYSTEMS:
        default = read(f"{system}:")
        # A default without KL says nothing: the table shows what the system does once its KL is switched on.
        with_kl = switched_on(default)
        if with_kl is None:
            rows.append(_row(default, "the default"))
        else:
            rows.append(_row(with_kl, "(off by default)"))
        for text in SETTINGS:
            if text.startswith(f"{system}:"):
                rows.append(_row(read(text), ""))
    return table(("system", "flags", "equivalent term", "on-policy", "off-policy"), rows)


def _row(reading: Reading, heading: str) -> tuple[str, str, str, str, str]:
    """System, flags, equivalent terms, and the outcome on-policy and off-policy."""
    flags = heading
    if reading.given:
        flags = f"{heading} {_flags(reading)}".strip()

    # None: no term of ours is what the flags do. Empty: the flags switch KL off.
    if reading.terms is None:
        return reading.system, flags, "none", "", ""
    if not reading.terms:
        return reading.system, flags, "no KL", "-", "-"

    label = " + ".join(code_span(term.label()) for term in reading.terms)
    certificates = reading.certificates()
    return reading.system, flags, label, outcome(certificates["on_policy"]), outcome(certificates["off_policy"])


def _flags(reading: Reading) -> str:
    """The flags that were set, by short names."""
    flags = ",".join(f"{name}={format_value(value)}" for name, value in reading.given.items())
    return code_span(flags)


def systems() -> str:
    """A row per system: its version and the recommended flags for each goal."""
    rows = []
    for system in SYSTEMS.values():
        advice_of_goal = {advice.goal.name: _advice_cell(advice) for advice in advise(system)}
        cells = [advice_of_goal[goal] for goal in ("sequence", "off_policy", "low_noise")]
        rows.append((system.name, f"{system.title} {system.version}", *cells))
    return table(("system", "version", "sequence", "stale", "token"), rows)


def _advice_cell(advice: Advice) -> str:
    """The flags that reach the goal, with the noise of their gradient; ``-`` if no flags do."""
    if not advice.flags:
        return "-"
    regime = advice.goal.regime
    certificate = read(advice.flags).certificates([regime])[regime]
    return f"{code_span(advice.flags)} ({noise(certificate)})"


PARTS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "systems": systems,
}
