"""Which terms are audited: the config's own, a panel of well-known cells, and recipes by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from kl_comedy.errors import bad_value
from kl_comedy.kl import BetaState, KLTerm
from kl_comedy.registry import RECIPES

PANEL_BETA = 0.05
"""The coefficient at which a panel term is weighed against the policy loss where the config has no term of its own."""

PANEL = (
    KLTerm("k1", placement="reward", credit="total"),
    KLTerm("k1", placement="reward"),
    KLTerm("k1", placement="reward", correction="prefix"),
    KLTerm("k1", placement="loss"),
    KLTerm("k2", placement="loss"),
    KLTerm("k3", placement="loss"),
    KLTerm("k3", placement="reward"),
    KLTerm("k3", placement="loss", correction="token"),
    KLTerm("exact", placement="loss"),
    KLTerm("exact", placement="reward"),
    KLTerm("exact", placement="loss", correction="prefix_previous"),
)
"""The paper's cells, the corrected ones, and the Rao-Blackwellized ones."""


@dataclass(frozen=True, kw_only=True)
class Audited:
    """A term under audit. ``key`` names it in metrics: a config term by position, others by recipe or label.

    ``beta`` is the coefficient in force; ``position`` is that among the config's terms, None for others.
    """

    key: str
    label: str
    term: KLTerm
    beta: float
    position: int | None


def select(
    names: Sequence[str], terms: Sequence[KLTerm], betas: Sequence[float], *, on_policy: bool, key: str
) -> list[Audited]:
    """The terms that ``names`` ask for: ``own``, ``panel``, or recipes. A shape asked for twice is audited once.

    On-policy the panel leaves out ratios, which are one there. Raises :class:`UserError` under ``key`` for another
    name.
    """
    allowed = ["own", "panel", *RECIPES.names()]
    found: list[Audited] = []
    for name in names:
        if name not in allowed:
            raise bad_value(key, name, allowed)
        if name == "own":
            own = zip(terms, betas, strict=True)
            found += [
                Audited(key=f"kl_{n}", label=f"kl.{n}: {term.label()}", term=term, beta=beta, position=n)
                for n, (term, beta) in enumerate(own)
            ]
        elif name == "panel":
            beta = betas[0] if betas else PANEL_BETA
            shown = [term for term in PANEL if not (on_policy and term.correction != "none")]
            found += [
                Audited(key=_plain(term.label()), label=term.label(), term=term, beta=beta, position=None)
                for term in shown
            ]
        else:
            of_recipe = RECIPES.get(name).fn()
            for n, term in enumerate(of_recipe):
                label = name if len(of_recipe) == 1 else f"{name} {n}"
                beta = BetaState(term.beta).value
                found.append(
                    Audited(key=_plain(label), label=f"{label}: {term.label()}", term=term, beta=beta, position=None)
                )
    return _once(sorted(found, key=lambda item: item.position is None))


def _once(found: Sequence[Audited]) -> list[Audited]:
    """Every term of the config, and each further shape (a term whatever its beta) that is not there yet."""
    kept: list[Audited] = []
    shapes: list[KLTerm] = []
    for item in found:
        shape = dataclasses.replace(item.term, beta=1.0)
        if item.position is not None or shape not in shapes:
            kept.append(item)
            shapes.append(shape)
    return kept


def _plain(label: str) -> str:
    """A label as part of a metric's name."""
    return "".join(c if c.isalnum() or c in "_-." else "_" for c in label)
