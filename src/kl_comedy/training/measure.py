"""Metrics of an update: sums over micro-batches with their own denominators, reduced once at the end.

Names say estimator, direction and level. ``..._token`` is a mean over tokens, ``..._sequence`` a mean
over completions of the sum over tokens; both in nats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kl_comedy.kl.estimators.log_ratio import k1, k2, k3
from kl_comedy.records import Scored
from kl_comedy.training.prepare import MicroBatch

if TYPE_CHECKING:
    from kl_comedy.models.logprobs import TokenPass

_SAMPLED = {"k1_reverse": k1, "k2_reverse": k2, "k3_reverse": k3}


class Tally:
    """Running sums and maxima; :meth:`values` divides each sum by its own count."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)
        self._maxima: dict[str, float] = {}

    def add(self, name: str, total: float | Tensor, count: float) -> None:
        self._sums[name] += float(total)
        self._counts[name] += count

    def maximum(self, name: str, value: float | Tensor) -> None:
        self._maxima[name] = max(self._maxima.get(name, float("-inf")), float(value))

    def values(self) -> dict[str, float]:
        means = {name: total / self._counts[name] for name, total in self._sums.items() if self._counts[name]}
        return {**means, **self._maxima}


def tally_tokens(tally: Tally, micro: MicroBatch, seen: TokenPass, *, version: int) -> None:
    """KL values against the initial reference, entropy, staleness and the ratio to the sampler."""
    experience = micro.experience
    mask_BT = experience.mask_BT
    tokens, rows = float(mask_BT.sum()), float(mask_BT.shape[0])
    with torch.no_grad():
        logp_BT = seen.logp_BT.detach()
        log_ratio_BT = torch.where(mask_BT, logp_BT - experience.ref_logp_BT, 0.0)
        for name, estimator in _SAMPLED.items():
            total = estimator(log_ratio_BT).double().sum()
            tally.add(f"kl/{name}_token", total, tokens)
            tally.add(f"kl/{name}_sequence", total, rows)
        tally.maximum("kl/log_ratio_max", log_ratio_BT.abs().max())
        for name, exact_BT in (("exact_reverse", seen.kl_BT), ("exact_forward", seen.forward_kl_BT)):
            if exact_BT is not None:
                total = exact_BT.detach().double().sum()
                tally.add(f"kl/{name}_token", total, tokens)
                tally.add(f"kl/{name}_sequence", total, rows)
        if seen.entropy_BT is not None:
            tally.add("policy/entropy", seen.entropy_BT.detach().double().sum(), tokens)
        delta_BT = torch.where(mask_BT, logp_BT - experience.behaviour_logp_BT, 0.0)
        tally.add("kl/k1_behaviour_token", -delta_BT.double().sum(), tokens)
        tally.maximum("policy/behaviour_gap_max", delta_BT.abs().max())
        omega_B = delta_BT.double().sum(-1).exp()
        tally.add("_omega", omega_B.sum(), 1.0)
        tally.add("_omega_square", omega_B.square().sum(), 1.0)
        age_BT = torch.where(mask_BT, version - experience.policy_version_BT, 0)
        tally.add("policy/staleness", age_BT.double().sum(), tokens)


def effective_sample_share(values: dict[str, float], rows: int, micro_batches: int) -> dict[str, float]:
    """Fold the ratio sums into ``policy/ess``: Kish's effective sample size over the number of rows."""
    total = values.pop("_omega") * micro_batches
    squares = values.pop("_omega_square") * micro_batches
    return {**values, "policy/ess": total * total / (squares * rows) if squares > 0 else 0.0}


def row_metrics(rows: Sequence[Scored]) -> dict[str, float]:
    """What is known before any pass: reward, its parts, verifier status, lengths, groups without signal."""
    values = torch.tensor([row.reward.value for row in rows], dtype=torch.float64)
    groups: dict[int, set[float]] = defaultdict(set)
    parts: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        groups[row.rollout.group_id].add(row.reward.value)
        for name, value in row.reward.parts.items():
            parts[name].append(value)
    n = len(rows)
    metrics = {
        "train/reward": float(values.mean()),
        "train/reward_std": float(values.std(correction=0)),
        "train/length": sum(len(row.rollout.completion_ids) for row in rows) / n,
        "train/truncated_share": sum(row.rollout.stop_reason == "length" for row in rows) / n,
        "train/groups_without_signal": sum(len(seen) == 1 for seen in groups.values()) / len(groups),
    }
    for status in ("unparseable", "timeout", "refused"):
        metrics[f"train/verifier_{status}"] = sum(row.reward.status == status for row in rows) / n
    for name, seen in parts.items():
        metrics[f"train/reward/{name}"] = sum(seen) / len(seen)
    return metrics
