"""The closed-form optimum, reached or missed by descending each configuration to its end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.kl.oracle import Tree
from kl_comedy.laboratory.configurations import DESCENDED, Terms
from kl_comedy.laboratory.descent import Descent, descend
from kl_comedy.laboratory.games import Games, random_games, standing

if TYPE_CHECKING:
    import pandas as pd

TREE = Tree.build(vocabulary=3, length=4)
BETAS = (0.2, 0.5)
STEPS, RATE = 3000, 0.05
LAG = 20
BATCH, BATCH_STEPS, BATCH_RATE = 64, 1500, 0.02
REACHED = 1e-6
"""KL to the optimum (nats) at which it counts as reached."""
STATIONARY = 1e-5
"""Norm of the expected gradient below which descent has come to rest (rewards are in 0..1)."""
WATCHED = 60
"""Points kept of each path, evenly spread over the logarithm of the step."""

SETTINGS: dict[str, Descent] = {
    "on-policy": Descent(steps=STEPS, rate=RATE),
    "sampler 20 steps old": Descent(steps=STEPS, rate=RATE, sampler="lagging", lag=LAG),
    "sampler is the reference": Descent(steps=STEPS, rate=RATE, sampler="reference"),
    "batches of 64, on-policy": Descent(steps=BATCH_STEPS, rate=BATCH_RATE, batch=BATCH),
}


def optimum_study(
    *, seeds: int = 5, betas: tuple[float, ...] = BETAS, settings: Mapping[str, Descent] = SETTINGS,
    configurations: Mapping[str, Terms] = DESCENDED, done: Callable[[], None] = lambda: None,
) -> tuple[pd.DataFrame, pd.DataFrame]:  # fmt: skip
    """Ends (one row per setting, configuration, beta and seed) and paths (KL to the optimum along the way).

    ``done`` is called after each configuration of each setting.
    """
    import pandas as pd

    ends: list[dict[str, Any]] = []
    paths: list[dict[str, Any]] = []
    games = random_games(TREE, seeds=seeds, betas=betas)
    for setting, how in settings.items():
        for name, terms in configurations.items():
            end, path = _descended(games, terms, how, seeds)
            ends += [{"setting": setting, "configuration": name, **row} for row in end]
            paths += [{"setting": setting, "configuration": name, **row} for row in path]
            done()
    return pd.DataFrame(ends), pd.DataFrame(paths)


def _descended(
    games: Games, terms: Terms, how: Descent, seeds: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    watched = set(_spread(how.steps))
    path: list[dict[str, Any]] = []

    def watch(step: int, logits_SNV: Tensor) -> None:
        if step in watched:
            now = standing(games, logits_SNV)
            path.extend(
                {**_game(games, s, seeds), "step": step, "to_optimum": float(now.to_optimum_S[s])}
                for s in range(games.count)
            )

    found = descend(games, terms, how, watch)
    last = standing(games, found.logits_SNV)
    halved = standing(dataclasses.replace(games, beta_S=games.beta_S / 2), found.logits_SNV)
    ends = []
    for s in range(games.count):
        row = {
            **_game(games, s, seeds),
            "to_optimum": float(last.to_optimum_S[s]),
            "gap": float(last.gap_S[s]),
            "to_forward_optimum": float(last.to_forward_optimum_S[s]),
            "to_half_beta_optimum": float(halved.to_optimum_S[s]),
            "to_ref": float(last.to_ref_S[s]),
            "entropy": float(last.entropy_S[s]),
            "reward": float(last.reward_S[s]),
            "gradient": float(found.gradient_S[s]),
            "finite": bool(found.finite_S[s]),
        }
        ends.append({**row, "verdict": "noisy" if how.batch is not None else verdict(row)})
    return ends, path


def verdict(row: Mapping[str, Any]) -> str:
    """``reached`` the optimum, came to rest elsewhere (``missed``), still moves (``drifts``), or ``diverged``."""
    if not (row["finite"] and math.isfinite(row["to_optimum"]) and math.isfinite(row["gradient"])):
        return "diverged"
    if row["to_optimum"] < REACHED:
        return "reached"
    return "missed" if row["gradient"] < STATIONARY else "drifts"


def _game(games: Games, s: int, seeds: int) -> dict[str, Any]:
    return {"beta": float(games.beta_S[s]), "seed": s % seeds}


def _spread(steps: int) -> Sequence[int]:
    exponents = torch.linspace(0, math.log(steps + 1), WATCHED, dtype=torch.float64)
    return sorted({0, steps, *(round(float(e.exp())) - 1 for e in exponents)})
