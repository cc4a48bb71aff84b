"""DPO in training: the check of its config, and the weights of an update's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kl_comedy.config.schema import AlgorithmConfig
from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl import KLTerm
from kl_comedy.objective.preferences import Preferences, preferences
from kl_comedy.records import Scored
from kl_comedy.training.distributed import Ranks
from kl_comedy.training.packing import Packed

if TYPE_CHECKING:
    from kl_comedy.models.logprobs import TokenPass


WITHOUT_VERDICT = ("timeout", "refused")
"""Statuses of completions that were not judged; these enter no pair."""

_UNUSED = (
    "advantage",
    "value",
    "policy_loss",
    "policy_loss_options",
    "correction",
    "proximal",
    "reduction",
    "reduction_constant",
)


def check_dpo(algorithm: AlgorithmConfig, terms: Sequence[KLTerm], group_size: int) -> None:
    """Raise :class:`UserError` for settings that have no effect or no meaning with ``algorithm.dpo``."""
    if algorithm.dpo is None:
        return
    neutral = AlgorithmConfig()
    for name in _UNUSED:
        if getattr(algorithm, name) != getattr(neutral, name):
            raise UserError(
                f"algorithm.{name}: algorithm.dpo takes the place of the policy term, so this would do nothing; "
                "remove one of the two"
            )
    if terms:
        raise UserError(
            f"kl: got {len(terms)} term(s); with algorithm.dpo it must be [] (its strength is algorithm.dpo.beta)"
        )
    if group_size < 2:
        raise bad_value(
            "rollout.group_size", group_size, "at least 2", "algorithm.dpo compares completions of one prompt"
        )


def pair_weights(
    rows: Sequence[Scored],
    splits: Sequence[Sequence[int] | None],
    packs: Sequence[Packed],
    passes: Sequence[Mapping[str, Any]],
    policy_pass: Callable[..., TokenPass],
    *,
    algorithm: AlgorithmConfig,
    ranks: Ranks,
) -> Preferences:
    """The preferences of an update under the current policy. Every rank must call, without gradient.

    ``rows`` are those of all ranks, ``splits`` this rank's share of them (None: a micro-batch that does not count).
    Log-ratios of tokens are in float32 or wider; their sum over a completion is in float64.
    """
    assert algorithm.dpo is not None
    device = packs[0].ids_BT.device
    log_ratio_B = torch.zeros(len(rows), dtype=torch.float64, device=device)
    for split, packed, reference_passes in zip(splits, packs, passes, strict=True):
        logp_BT = policy_pass(packed.model_inputs(), None, ()).logp_BT
        if split:
            log_ratio_BT = torch.where(packed.mask_BT, logp_BT - reference_passes["initial"].logp_BT, 0.0)
            log_ratio_B[split] = log_ratio_BT.double().sum(-1)
    ranks.sum(log_ratio_B)
    judged = [
        row.reward.status not in WITHOUT_VERDICT
        and not (algorithm.mask_truncated and row.rollout.stop_reason == "length")
        for row in rows
    ]
    return preferences(
        log_ratio_B,
        torch.tensor([row.reward.value for row in rows], dtype=torch.float64, device=device),
        torch.tensor([row.rollout.group_id for row in rows], device=device),
        torch.tensor(judged, device=device),
        beta=algorithm.dpo.beta,
    )


def pair_metrics(pairs: Preferences) -> dict[str, float]:
    """The metrics of an update's pairs; only the counts where there is no pair."""
    counts = {"dpo/pairs": float(pairs.pairs), "dpo/prompts": float(pairs.prompts)}
    if not pairs.pairs:
        return counts
    return {**counts, "dpo/loss": pairs.loss, "dpo/accuracy": pairs.accuracy, "dpo/margin": pairs.margin}
