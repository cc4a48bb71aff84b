"""``certify --policy``: policy losses and their off-policy corrections under the oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import RunFailed, UserError, bad_value, unknown_key

if TYPE_CHECKING:
    from kl_comedy.kl.oracle.policy_certificate import PolicyCertificate
    from kl_comedy.objective import PolicyTerm

FIELDS = {"policy_loss": "loss", "policy_loss_options": "options", "correction": "corrections", "proximal": "proximal"}
"""Keys of a mapping after ``--policy``, as under ``algorithm`` in a config."""


def certify_policies(asked: Sequence[str], regimes: Sequence[str], format: str, plugins: Sequence[Path]) -> None:
    """Print one certificate per policy term and regime. Raises :class:`RunFailed` where a claim does not hold."""
    import kl_comedy.training.rooms  # noqa: F401  (fills the registries)
    from kl_comedy.registry import load_plugin_file

    for file in plugins:
        load_plugin_file(file)
    from rich.console import Console
    from rich.progress import track

    from kl_comedy.kl.oracle.policy_certificate import UPDATES, certify_policy

    terms = policy_terms(asked)
    console = Console(stderr=True)
    found: list[PolicyCertificate] = []
    for name, term in track(
        terms.items(), "enumerating", console=console, transient=True, disable=not console.is_terminal
    ):
        found += certify_policy(name, term, regimes=regimes, updates=UPDATES)
    print(_rendered(found, format))
    broken = [
        f"{c.name}, {c.regime}: claims the reward gradient, and the enumerated one is {c.relative_bias:.3g} off it"
        for c in found
        if not c.kept
    ]
    if broken:
        raise RunFailed("claims that do not hold:\n  " + "\n  ".join(broken))


def policy_terms(asked: Sequence[str]) -> dict[str, PolicyTerm]:
    """Names (``all``: every one), YAML mappings and config files to policy terms. Raises :class:`UserError`."""
    from kl_comedy.kl.oracle.policy_certificate import named_policy_terms
    from kl_comedy.objective import check_policy_term

    known = dict(named_policy_terms())
    found: dict[str, PolicyTerm] = {}
    for text in asked:
        if text == "all":
            found |= known
        elif text in known:
            found[text] = known[text]
        elif text.endswith((".yaml", ".yml")):
            found[text] = _of_config(Path(text))
        elif text.lstrip().startswith("{"):
            term = _of_mapping(text)
            found[term.label()] = term
        else:
            raise bad_value("--policy", text, ["all", *known])
    for term in found.values():
        check_policy_term(term)
    return found


def _of_config(path: Path) -> PolicyTerm:
    from kl_comedy.cli.certifying import refuse_dpo
    from kl_comedy.config import load_config
    from kl_comedy.objective import PolicyTerm

    config = load_config(path, [])
    refuse_dpo(str(path), config)
    return PolicyTerm.of(config.algorithm)


def _of_mapping(text: str) -> PolicyTerm:
    from omegaconf import OmegaConf

    from kl_comedy.objective import PolicyTerm

    try:
        value: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except Exception as error:
        raise UserError(f"--policy {text!r}: not a YAML mapping ({str(error).splitlines()[0]})") from None
    for name in value:
        if name not in FIELDS:
            raise unknown_key(f"--policy.{name}", value[name], list(FIELDS))
    return PolicyTerm(**{FIELDS[name]: given for name, given in value.items()})


def _rendered(found: Sequence[PolicyCertificate], format: str) -> str:
    import pandas as pd

    from kl_comedy.tracking.tables import render

    if format == "json":
        return json.dumps([c.row() for c in found], indent=1)
    if format == "csv":
        return render(pd.DataFrame([_flat(c) for c in found]), format)
    return render(pd.DataFrame([_short(c) for c in found]), format)


def _flat(c: PolicyCertificate) -> dict[str, Any]:
    row = c.row()
    return {
        **row,
        "terms": json.dumps(row["terms"]),
        "relative_bias": c.relative_bias,
        "cosine": c.cosine,
    }


def _short(c: PolicyCertificate) -> dict[str, Any]:
    return {
        "name": c.name,
        "regime": c.regime,
        "update": c.update,
        "exact": "yes" if c.exact else "no",
        "bias": "0" if c.relative_bias < 1e-9 else f"{c.relative_bias:.3g}",
        "cosine": f"{c.cosine:.2f}",
        "strength": f"{c.strength:.2f}",
        "variance": f"{c.variance:.3g}",
        "verdict": c.verdict,
    }
