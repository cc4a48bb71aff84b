"""The probe: after every update the engine must give a few tokens the log-probs that the trainer gives them.

    fixed tokens -> engine: their log-probs (untempered), and a few draws of the next token at the run's temperature
                 -> trainer: the same, from its own logits -> the largest gap in nats

The fixed tokens spread over the vocabulary, so a stale head shows on them; the draws show log-probs that were taken
before the temperature was applied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kl_comedy.errors import RunFailed
from kl_comedy.rollouts.base import Policy

LENGTH = 12
DRAWS = 4
TOLERANCE = {"float32": 1e-2, "float16": 0.05, "bfloat16": 0.3}
"""Nats. float32: ten times the largest gap measured between equal weights (SmolLM2-135M on CPU: 4e-5 with AVX2,
1.03e-3 with AVX-512); the corruptions this looks for begin above 1.
The narrow types round logits of some tens at 2^-11 and 2^-8 of their size."""


@dataclass(frozen=True, kw_only=True)
class ProbeAnswer:
    """Engine's log-probs (nats) of the probe's tokens but the first, and of what it drew as the next token."""

    fixed: tuple[float, ...]
    sampled_ids: tuple[int, ...]
    sampled: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The trainer's side: ``ids`` of the probe, log-probs of all but the first ``[S]``, of the next token ``[V]``.

    ``tolerance`` in nats.
    """

    ids: tuple[int, ...]
    fixed_S: Tensor
    next_V: Tensor
    temperature: float
    tolerance: float

    def sampling_fields(self) -> dict[str, object]:
        """``SamplingParams`` of the probe: log-probs of the prompt, and a few draws of the next token."""
        return {
            "n": DRAWS,
            "temperature": self.temperature,
            "max_tokens": 1,
            "seed": 0,
            "logprobs": 0,
            "prompt_logprobs": 0,
            "ignore_eos": True,
            "detokenize": False,
        }

    def gap(self, answer: ProbeAnswer) -> float:
        """Largest difference (nats) of the engine's log-probs to the trainer's; infinite where one is not finite."""
        trainer = torch.cat([self.fixed_S, self.next_V[list(answer.sampled_ids)]])
        engine = torch.tensor([*answer.fixed, *answer.sampled], dtype=torch.float64)
        return float((trainer - engine).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max())

    def check(self, answer: ProbeAnswer, engine: str, version: int) -> None:
        """Raise :class:`RunFailed` where ``engine`` does not have the trainer's weights of ``version``."""
        gap = self.gap(answer)
        if not gap <= self.tolerance:
            raise RunFailed(
                f"{engine} does not have the trainer's weights after the update to version {version}: log-probs of "
                f"the probe differ by up to {gap:.3g} nats, at most {self.tolerance:.3g} are tolerated "
                "(rollout.options.probe_tolerance)"
            )


def probe_ids(vocabulary: int) -> list[int]:
    """The probe's tokens: the same for every engine, spread over the vocabulary.

    >>> probe_ids(16)[:4]
    [1, 0, 15, 14]
    """
    return [(1 + n * 7919) % vocabulary for n in range(LENGTH)]


@torch.no_grad()
def make_probe(loaded: Policy, *, temperature: float, dtype: str, tolerance: float | None) -> Probe:
    """The trainer's log-probs of the probe with its weights as they are now, outside of any autocast.

    ``tolerance`` None: that of an engine in ``dtype``.
    """
    ids = probe_ids(int(loaded.causal.get_output_embeddings().weight.shape[0]))
    was_training = loaded.model.training
    loaded.model.eval()
    try:
        with torch.autocast(loaded.device.type, enabled=False):
            logits_BSV = loaded.causal(input_ids=torch.tensor([ids], device=loaded.device), use_cache=False).logits
    finally:
        loaded.model.train(was_training)
    logits_SV = logits_BSV[0].to(torch.float64).cpu()
    return Probe(
        ids=tuple(ids),
        fixed_S=logits_SV[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0],
        next_V=(logits_SV[-1] / temperature).log_softmax(-1),
        temperature=temperature,
        tolerance=TOLERANCE[dtype] if tolerance is None else tolerance,
    )
