"""Gradients of many losses over the same completions, by enumeration and by sampling in rounds.

:func:`kl_comedy.kl.oracle.exact_moments` answers one loss at a time. A study asks two dozen at a million
completions, so the tables and the scores of a chunk are looked up once for all of them. For policies
with shared parameters. The two are tested against each other.

Legend: ``N`` prefixes, ``V`` tokens, ``D`` parameters, ``B`` completions, ``T`` tokens, ``R`` rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kl_comedy.errors import UserError
from kl_comedy.kl.oracle import Completions, Instance, Loss, Moments, Rows

CHUNK = 2**14
"""Completions in memory at once."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Independent rounds of sampling, for one loss.

    ``gradient_RD`` is the mean gradient of each round; ``variance_R`` the unbiased trace variance of one
    completion's gradient within it.
    """

    gradient_RD: Tensor
    variance_R: Tensor
    samples: int


class Tables:
    """Log-probs, exact KLs and their gradients, and scores of every prefix, computed once for all completions."""

    def __init__(self, setting: Instance) -> None:
        if setting.features_NVD is None:
            raise UserError("tables of gradients need a policy with shared parameters")
        logp_NV = setting.policy_logp()
        p_NV = logp_NV.exp()
        ratio_NV = logp_NV - setting.ref_logp_NV
        features_NVD = setting.features_NVD
        self.setting = setting
        self.p_NV = p_NV
        self.logp_NV = logp_NV
        self.reverse_N, self.forward_N = setting.kl_N
        self.score_NVD = features_NVD - (p_NV[..., None] * features_NVD).sum(1, keepdim=True)
        self.reverse_ND = ((p_NV * ratio_NV)[..., None] * self.score_NVD).sum(1)
        self.forward_ND = -(setting.ref_logp_NV.exp()[..., None] * self.score_NVD).sum(1)

    def gradients(self, completions: Completions, losses: Mapping[str, Loss]) -> dict[str, Tensor]:
        """Each loss's gradient of every completion, ``[B, D]``."""
        at, token, mask_BT = completions.prefix_BT, completions.token_BT, completions.mask_BT
        rows = self._rows(completions)
        score_BTD = self.score_NVD[at, token]
        tables = (score_BTD, self.reverse_ND[at], self.forward_ND[at])
        leaves = (rows.logp_BT, rows.reverse_kl_BT, rows.forward_kl_BT)
        gradients = {}
        for name, loss in losses.items():
            gradient_BD = score_BTD.new_zeros(len(at), score_BTD.shape[-1])
            value = loss(rows)
            if value.requires_grad:
                derivatives = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
                for weight_BT, table_BTD in zip(derivatives, tables, strict=True):
                    if weight_BT is not None:
                        gradient_BD += torch.einsum("bt,btd->bd", torch.where(mask_BT, weight_BT, 0.0), table_BTD)
            gradients[name] = gradient_BD
        return gradients

    def _rows(self, completions: Completions) -> Rows:
        at, token, mask_BT = completions.prefix_BT, completions.token_BT, completions.mask_BT

        def at_tokens(values_BT: Tensor) -> Tensor:
            return torch.where(mask_BT, values_BT, 0.0)

        last_B1 = mask_BT.sum(-1, keepdim=True) - 1
        last_prefix_B = at.gather(1, last_B1)[:, 0]
        return Rows(
            logp_BT=at_tokens(self.logp_NV[at, token]).requires_grad_(True),
            ref_logp_BT=at_tokens(self.setting.ref_logp_NV[at, token]),
            behaviour_logp_BT=at_tokens(self.setting.recorded_logp_NV[at, token]),
            mask_BT=mask_BT,
            reverse_kl_BT=at_tokens(self.reverse_N[at]).requires_grad_(True),
            forward_kl_BT=at_tokens(self.forward_N[at]).requires_grad_(True),
            reward_B=self.setting.reward_N2[last_prefix_B, completions.truncated_B.long()],
            group_B=torch.arange(len(at)),
            truncated_B=completions.truncated_B,
        )


def enumerated(tables: Tables, losses: Mapping[str, Loss], *, chunk: int = CHUNK) -> dict[str, Moments]:
    """The exact mean and trace variance of each loss's gradient over every completion the sampler can draw."""
    setting = tables.setting
    mean = {name: torch.zeros_like(setting.theta_D) for name in losses}
    second = dict.fromkeys(losses, 0.0)
    for completions in setting.tree.chunks(chunk):
        weight_B = setting.probability(completions)
        for name, gradient_BD in tables.gradients(completions, losses).items():
            mean[name] += weight_B @ gradient_BD
            second[name] += float(weight_B @ gradient_BD.square().sum(-1))
    return {
        name: Moments(gradient_D=mean[name], variance=max(second[name] - float(mean[name].square().sum()), 0.0))
        for name in losses
    }


def sampled_in_rounds(
    tables: Tables, losses: Mapping[str, Loss], *, rounds: int, samples: int, generator: torch.Generator
) -> dict[str, Rounds]:
    """``rounds`` independent batches of ``samples`` completions; all losses see the same completions."""
    setting = tables.setting
    at_once = max(1, CHUNK // samples)
    means: dict[str, list[Tensor]] = {name: [] for name in losses}
    variances: dict[str, list[Tensor]] = {name: [] for name in losses}
    for start in range(0, rounds, at_once):
        count = min(at_once, rounds - start)
        completions = setting.tree.sample(setting.sampler_logp_NV, count * samples, generator)
        for name, gradient_BD in tables.gradients(completions, losses).items():
            gradient_RSD = gradient_BD.reshape(count, samples, -1)
            means[name].append(gradient_RSD.mean(1))
            variances[name].append(gradient_RSD.var(1).sum(-1))
    return {
        name: Rounds(gradient_RD=torch.cat(means[name]), variance_R=torch.cat(variances[name]), samples=samples)
        for name in losses
    }
