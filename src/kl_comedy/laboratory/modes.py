"""Does a KL term bring back a mode of the reference that the policy has lost, and give up one it has invented?

Two completions, A and B, earn the same reward, everything else earns nothing. *Lost*: the reference gives A
and B the same probability, and the policy starts with next to none on B. *Invented*: the reference gives B
next to none, and the policy starts with as much on B as on A. As rewards are equal, the optimum keeps the
ratio of A to B that the reference has, whatever beta is. They part at the first token.

Legend: ``S`` games side by side, ``N`` prefixes, ``V`` tokens, ``B`` completions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.errors import bad_value
from kl_comedy.kl.oracle import Tree, prefix_log_probs
from kl_comedy.laboratory.configurations import RECOVERING, Terms
from kl_comedy.laboratory.descent import Descent, descend
from kl_comedy.laboratory.games import Games

if TYPE_CHECKING:
    import pandas as pd

TREE = Tree.build(vocabulary=3, length=3, ends=False)
RARE = (1e-1, 1e-2, 1e-3, 1e-6)
"""Probabilities of the first token of the mode that is rare."""
BETA = 0.3
KINDS = ("lost", "invented")
BATCH = 256
SHARE = 0.5
"""A lost mode is back once B has this share of its optimal probability; an invented one is given up once
what B has beyond its optimal probability is down to this share of what it began with."""

SETTINGS: dict[str, Descent] = {
    "expected gradients, gradient descent": Descent(steps=3000, rate=1.0, rule="gd"),
    "expected gradients, Adam": Descent(steps=2000, rate=0.02, decays=False),
    "batches of 256, gradient descent": Descent(steps=2000, rate=1.0, rule="gd", batch=BATCH),
    "batches of 256, Adam": Descent(steps=2000, rate=0.02, decays=False, batch=BATCH),
}


def mode_games(kind: str, *, rare: tuple[float, ...] = RARE, beta: float = BETA, copies: int = 1) -> Games:
    """``copies`` games per probability in ``rare``. A is 000, B is 111, and the third branch earns nothing.

    Raises :class:`UserError` for an unknown kind.
    """
    if kind not in KINDS:
        raise bad_value("kind", kind, KINDS)
    start, reference = [], []
    for p in rare * copies:
        even_NV, scarce_NV = _modes(0.45), _modes(p)
        start.append(scarce_NV if kind == "lost" else even_NV)
        reference.append(even_NV if kind == "lost" else scarce_NV)
    reward_B = torch.zeros(TREE.completions, dtype=torch.float64)
    reward_B[[_number(0), _number(1)]] = 1.0
    return Games(
        tree=TREE,
        ref_logp_SNV=torch.stack(reference),
        start_SNV=torch.stack(start),
        reward_SB=reward_B.repeat(len(start), 1),
        beta_S=torch.full((len(start),), beta, dtype=torch.float64),
    )


def _modes(first_B: float) -> Tensor:
    """Log-probs ``[N, V]``: first ``first_B`` on B, 0.1 on the third branch, the rest on A; then 0.8 on the same."""
    logp_NV = torch.full((TREE.prefixes, TREE.vocabulary), 1 / 3, dtype=torch.float64)
    logp_NV[0] = torch.tensor([0.9 - first_B, first_B, 0.1], dtype=torch.float64)
    for token in range(TREE.vocabulary):
        along = torch.full((TREE.vocabulary,), 0.1, dtype=torch.float64)
        along[token] = 0.8
        logp_NV[TREE.first(1) + token] = along
        logp_NV[TREE.first(2) + TREE.vocabulary * token + token] = along
    return logp_NV.log()


def _number(token: int) -> int:
    """The number of the completion that repeats one token."""
    return sum(token * TREE.vocabulary**t for t in range(TREE.length))


def mode_study(
    *, seeds: int = 5, settings: Mapping[str, Descent] = SETTINGS, configurations: Mapping[str, Terms] = RECOVERING,
    rare: tuple[float, ...] = RARE, done: Callable[[], None] = lambda: None,
) -> pd.DataFrame:  # fmt: skip
    """One row per setting, kind, configuration, rare probability and seed (one seed where nothing is drawn).

    ``step`` is the first one at which the mode was back (or given up), NaN if never; ``mode`` and ``other``
    are the probabilities of B and A at the end, ``optimal_mode`` that of B at the optimum.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for setting, how in settings.items():
        for kind in KINDS:
            games = mode_games(kind, rare=rare, copies=1 if how.batch is None else seeds)
            for name, terms in configurations.items():
                about = {"setting": setting, "kind": kind, "configuration": name}
                rows += [{**about, **row} for row in _followed(games, terms, how, kind, rare)]
                done()
    return pd.DataFrame(rows)


def _followed(games: Games, terms: Terms, how: Descent, kind: str, rare: tuple[float, ...]) -> list[dict[str, Any]]:
    best_S = games.optimum()[:, _number(1)].exp()
    began_S = _probability(games, games.start_SNV, 1)
    first_S = torch.full((games.count,), float("nan"), dtype=torch.float64)

    def watch(step: int, logits_SNV: Tensor) -> None:
        mode_S = _probability(games, logits_SNV, 1)
        there_S = mode_S >= SHARE * best_S if kind == "lost" else mode_S - best_S <= SHARE * (began_S - best_S)
        first_S[there_S & first_S.isnan()] = step

    path = descend(games, terms, how, watch)
    mode_S, other_S = (_probability(games, path.logits_SNV, token) for token in (1, 0))
    return [
        {
            "rare": rare[s % len(rare)], "seed": s // len(rare), "step": float(first_S[s]), "steps": how.steps,
            "mode": float(mode_S[s]), "other": float(other_S[s]), "optimal_mode": float(best_S[s]),
            "finite": bool(path.finite_S[s]),
        }
        for s in range(games.count)
    ]  # fmt: skip


def _probability(games: Games, logits_SNV: Tensor, token: int) -> Tensor:
    """The probability of the completion that repeats ``token``, ``[S]``."""
    return games.of_completions(prefix_log_probs(logits_SNV))[:, _number(token)].exp()
