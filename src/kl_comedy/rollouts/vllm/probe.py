"""The probe: after every update the engine must give a few tokens the log-probs that the trainer gives them.

    fixed tokens -> engine: their log-probs (untempered), and a few tokens sampled at the training temperature
                 -> trainer: the same, from its own logits -> the largest gap in nats

The fixed tokens spread over the vocabulary, so a stale head shows on them; the sampled ones go the way that rollouts
go, so log-probs taken before the temperature show on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kl_comedy.rollouts.base import Policy

LENGTH = 12
SAMPLED = 4
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
"""Nats. float32: 25 times the largest gap seen between right weights (4e-5, SmolLM2-135M on CPU); the corruptions this
looks for begin above 1. The narrow types round logits of some tens at 2^-11 and 2^-8 of their size."""


@dataclass(frozen=True, kw_only=True)
class ProbeAnswer:
    """Engine's log-probs (nats) of the probe's tokens but the first, and of what it sampled after them."""

    fixed: tuple[float, ...]
    sampled_ids: tuple[int, ...]
    sampled: tuple[float, ...]


def probe_ids(vocabulary: int) -> list[int]:
    """The probe's tokens: the same for every engine, spread over the vocabulary.

    >>> probe_ids(16)[:4]
    [1, 8, 15, 6]
    """
    return [(1 + n * 7919) % vocabulary for n in range(LENGTH)]


def tolerance(dtype: str, given: float | None) -> float:
    """What gap is tolerated for an engine in ``dtype``, in nats."""
    return TOLERANCE[dtype] if given is None else given


@torch.no_grad()
def gap(loaded: Policy, ids: Sequence[int], answer: ProbeAnswer, *, temperature: float) -> float:
    """Largest difference (nats) between the engine's log-probs and the trainer's; infinite where one is not finite.

    The trainer's are of its weights as they are, outside of any autocast.
    """
    whole = torch.tensor([[*ids, *answer.sampled_ids]], device=loaded.device)
    was_training = loaded.model.training
    loaded.model.eval()
    try:
        with torch.autocast(loaded.device.type, enabled=False):
            logits_SV = loaded.causal(input_ids=whole, use_cache=False).logits[0, :-1].to(torch.float64)
    finally:
        loaded.model.train(was_training)
    split = len(ids) - 1
    fixed_SV = logits_SV[:split].log_softmax(-1)
    sampled_SV = (logits_SV[split:] / temperature).log_softmax(-1)
    trainer = torch.cat([fixed_SV, sampled_SV]).gather(1, whole[0, 1:, None])[:, 0].cpu()
    engine = torch.tensor([*answer.fixed, *answer.sampled], dtype=torch.float64)
    return float((trainer - engine).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def vocabulary_of(loaded: Policy) -> int:
    """Size of the vocabulary that the head predicts."""
    return int(loaded.causal.get_output_embeddings().weight.shape[0])


def fields(temperature: float) -> dict[str, object]:
    """``SamplingParams`` of the probe: log-probs of the prompt, and a few tokens sampled at ``temperature``."""
    return {
        "n": 1, "temperature": temperature, "max_tokens": SAMPLED, "seed": 0, "logprobs": 0, "prompt_logprobs": 0,
        "ignore_eos": True, "detokenize": False,
    }  # fmt: skip


def message(who: str, version: int, found: float, allowed: float) -> str:
    """What a failed probe says."""
    return (
        f"{who} does not have the trainer's weights after the update to version {version}: log-probs of the probe "
        f"differ by up to {found:.3g} nats, at most {allowed:.3g} are tolerated (rollout.options.probe_tolerance)"
    )
