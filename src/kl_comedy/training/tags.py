"""A run's tags for its KL terms and its policy term: labels for tables, and certificates by enumeration."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from kl_comedy.config import Config
from kl_comedy.config.combinations import is_off_policy
from kl_comedy.kl import KLTerm
from kl_comedy.objective import PolicyTerm

log = logging.getLogger("kl_comedy")

ROUNDING = 1e-9
"""Biases below this are rounding of the enumeration in float64, and shown as 0."""


def kl_label(terms: Sequence[KLTerm]) -> str:
    """The name of a KL configuration in tables: the coefficient and the label of each term."""
    if not terms:
        return "no KL"
    labels = []
    for term in terms:
        coefficient = term.beta if isinstance(term.beta, float) else "scheduled"
        labels.append(f"{coefficient} {term.label()}")
    return " + ".join(labels)


def term_tags(config: Config, terms: Sequence[KLTerm]) -> dict[str, str]:
    """A run's tags for its KL configuration: a label for tables, and its certificates by enumeration.

    ``kl.*`` is the certificate of the whole list in the run's regime, ``kl.N.*`` that of each term alone; bias, cosine
    and variance are against the sequence-level reverse KL, to the sampler where all terms are. Warns where a declared
    claim does not hold.
    """
    # Imported here, because the oracle is needed where a run starts, and not by what only reads labels.
    from kl_comedy.kl.oracle.certificate import certify

    regime = _kl_regime(config)
    tags = {"kl.label": kl_label(terms), "kl.regime": regime}
    certified: dict[str, tuple[KLTerm, ...]] = {"kl": tuple(terms)}
    for position, term in enumerate(terms):
        certified[f"kl.{position}"] = (term,)
    for name, listed in certified.items():
        (certificate,) = certify(name, listed, regimes=(regime,))
        target = certificate.target or "none"
        tags[f"{name}.verdict"] = f"{target}: {certificate.verdict}"
        tags[f"{name}.target"] = target
        tags[f"{name}.strength"] = _rounded(certificate.strength)
        tags[f"{name}.variance"] = _rounded(certificate.variance)
        tags[f"{name}.relative_bias"] = _rounded(certificate.relative_bias[certificate.stated])
        tags[f"{name}.cosine"] = _rounded(certificate.cosine[certificate.stated])
        # The certificate of a list of one is that of its term, which warns below.
        is_repeated = name == "kl" and len(terms) == 1
        acts = any(term.beta != 0.0 for term in listed)
        if acts and not is_repeated and not certificate.claim_holds:
            claim = f"{kl_label(listed)} claims {certificate.claimed} {regime.replace('_', '-')}"
            log.warning(f"{name}: {claim}, and the enumeration says: {certificate.verdict}")
    return tags


def _kl_regime(config: Config) -> str:
    if config.lag.in_flight:
        return "mixed"  # weights change inside completions
    return _policy_regime(config)


def _policy_regime(config: Config) -> str:
    return "off_policy" if is_off_policy(config) else "on_policy"


def policy_tags(config: Config) -> dict[str, str]:
    """A run's tags for its policy term: a label, and its certificate against the reward gradient in its regime."""
    from kl_comedy.kl.oracle.policy_certificate import certify_policy

    # DPO's pairs are no estimator of the reward's gradient, so there is nothing to certify.
    if config.algorithm.dpo is not None:
        return {"policy.label": f"dpo, beta {config.algorithm.dpo.beta:g}"}
    term = PolicyTerm.of(config.algorithm)
    (certificate,) = certify_policy("policy", term, regimes=(_policy_regime(config),))
    return {
        "policy.label": term.label(),
        "policy.verdict": certificate.verdict,
        "policy.relative_bias": _rounded(certificate.relative_bias),
        "policy.cosine": f"{certificate.cosine:.4g}",
    }


def description(tags: Mapping[str, str]) -> str:
    """A run's description in Markdown, from its tags: what it optimizes, and the commands that run it again.

    >>> tags = {"kl.label": "no KL", "kl.verdict": "none: no term", "kl.regime": "on_policy"}
    >>> print(description({**tags, "run.command": "kl-comedy train c.yaml", "git.commit": "unknown"}))
    KL terms: `no KL`
    <BLANKLINE>
    Certificate (on-policy): none: no term
    <BLANKLINE>
    ```
    kl-comedy train c.yaml
    ```
    """
    # As code, because Markdown would take the underscores of a label for italics.
    parts = [f"KL terms: `{tags['kl.label']}`"]
    regime = tags["kl.regime"].replace("_", "-")
    parts.append(f"Certificate ({regime}): {tags['kl.verdict']}")
    if "policy.label" in tags:
        policy = f"Policy term: `{tags['policy.label']}`"
        if "policy.verdict" in tags:
            policy += f"; {tags['policy.verdict']}"
        parts.append(policy)
    commands = []
    if tags.get("git.commit", "unknown") != "unknown":
        commands.append(f"git checkout {tags['git.commit']}")
        if tags.get("git.dirty") == "true":
            commands.append("git apply code.diff  # of the artifacts, folder provenance")
    commands.append(tags["run.command"])
    parts.append("\n".join(["```", *commands, "```"]))
    return "\n\n".join(parts)


def _rounded(value: float) -> str:
    """Four digits, and 0 for what is rounding."""
    if abs(value) < ROUNDING:
        value = 0.0
    return f"{value:.4g}"
