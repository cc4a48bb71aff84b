"""Policies of any length whose KL per token does not depend on the length.

Legend: ``N`` prefixes, ``V`` tokens, ``D`` parameters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kl_comedy.errors import bad_value
from kl_comedy.kl.oracle import Setting, Tree, prefix_log_probs

PARAMETERS = 6
PERSISTENCE = 0.7
"""Correlation of a prefix's features with those of the prefix one token longer."""


def shared_setting(
    tree: Tree, *, seed: int, distance: float, staleness: float = 0.0,
    parameters: int = PARAMETERS, persistence: float = PERSISTENCE,
) -> Setting:  # fmt: skip
    """Policy, reference and sampler as three parameter vectors over the same features of the prefix.

    Logits are ``features[h, v] @ theta``; the reference has ``theta + distance * u``, the sampler
    ``theta + staleness * w``, where ``theta``, ``u`` and ``w`` are random directions of norm ``sqrt(D)``.
    Features have variance ``1 / D``, so a logit of the policy has variance one, and one of the reference is
    ``distance`` away from it (standard deviation, nats). Along a
    completion features keep their variance and are correlated by ``persistence`` from one prefix to the
    next, so the KL per token is the same at every length, and what is still to come depends on what was
    said. The same seed gives the same policy at every length, longer trees only go on, and distances
    scale one direction.

    Raises :class:`UserError` for a persistence outside 0..1 or fewer than one parameter.
    """
    if not 0 <= persistence <= 1:
        raise bad_value("persistence", persistence, "a number from 0 to 1")
    if parameters < 1:
        raise bad_value("parameters", parameters, "at least 1")
    generator = torch.Generator().manual_seed(seed)
    theta_D, away_D, stale_D = _directions(3, parameters, generator)
    features_NVD = _features(tree, parameters, persistence, generator)

    def logp(parameters_D: Tensor) -> Tensor:
        return prefix_log_probs(features_NVD @ parameters_D)

    sampler_logp_NV = logp(theta_D + staleness * stale_D)
    return Setting(
        tree=tree,
        features_NVD=features_NVD,
        theta_D=theta_D,
        ref_logp_NV=logp(theta_D + distance * away_D),
        sampler_logp_NV=sampler_logp_NV,
        recorded_logp_NV=sampler_logp_NV,
        reward_N2=torch.zeros(tree.prefixes, 2, dtype=torch.float64),
    )


def _directions(count: int, parameters: int, generator: torch.Generator) -> Tensor:
    """Random directions of norm ``sqrt(D)``, ``[count, D]``."""
    normal_CD = torch.randn(count, parameters, generator=generator, dtype=torch.float64)
    size_C1 = torch.linalg.vector_norm(normal_CD, dim=1, keepdim=True)
    return math.sqrt(parameters) * normal_CD / size_C1


def _features(tree: Tree, parameters: int, persistence: float, generator: torch.Generator) -> Tensor:
    """A stationary walk down the tree, ``[N, V, D]``, drawn level by level."""
    levels: list[Tensor] = []
    for depth in range(tree.length):
        fresh = torch.randn(
            tree.width(depth), tree.vocabulary, parameters, generator=generator, dtype=torch.float64
        ) / math.sqrt(parameters)
        if levels:
            inherited = levels[-1].repeat_interleave(tree.goes_on, 0)
            fresh = persistence * inherited + math.sqrt(1 - persistence**2) * fresh
        levels.append(fresh)
    return torch.cat(levels)
