"""Sampling by transformers' own ``generate``: for architectures our loop does not take, and to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kl_comedy.errors import RunFailed
from kl_comedy.records import Prompt
from kl_comedy.rollouts.base import Sampling
from kl_comedy.rollouts.decoding import Drawn
from kl_comedy.rollouts.steps import LogpRecorder, StopOnText, StopStrings, ending, warpers


def generate(
    causal: Any, prompts: Sequence[Prompt], *, sampling: Sampling, ends: Sequence[int], stops: StopStrings, pad_id: int,
    device: torch.device, version: int,
) -> list[Drawn]:  # fmt: skip
    """Draw one completion per prompt, left-padded, every setting ours. Random numbers are torch's global ones.

    Raises :class:`RunFailed` where the distribution is not finite.
    """
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    ids_BP, mask_BP = left_pad(prompts, pad_id=pad_id, device=device)
    width = ids_BP.shape[1]
    neutral = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    settings = GenerationConfig(
        **(neutral if sampling.temperature > 0 else {"do_sample": False}),
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(ends) or None,
        pad_token_id=pad_id,
        use_cache=True,
    )
    recorder = LogpRecorder()
    stopper = StopOnText(stops, prompt_length=width, rows=len(prompts))
    try:
        ids_BS = causal.generate(
            input_ids=ids_BP,
            attention_mask=mask_BP,
            generation_config=settings,
            logits_processor=LogitsProcessorList([*warpers(sampling), recorder]),
            stopping_criteria=StoppingCriteriaList([stopper] if stops else []),
        )
    except RuntimeError as error:
        if "probability tensor" in str(error):
            raise RunFailed("the policy's next-token distribution is not finite; nothing can be sampled") from error
        raise
    new = ids_BS[:, width:].tolist()
    logps = recorder.finish(ids_BS[:, width:]).tolist()
    drawn = []
    for row, ids in enumerate(new):
        length, reason = ending(ids, ends, stopper.length_B[row])
        drawn.append(
            Drawn(ids=ids[:length], logps=logps[row][:length], versions=[version] * length, stop_reason=reason)
        )
    return drawn


def left_pad(prompts: Sequence[Prompt], *, pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask ``[B, P]`` (int64), padded on the left to the longest prompt."""
    width = max(len(prompt.token_ids) for prompt in prompts)
    ids_BP = torch.full((len(prompts), width), pad_id, dtype=torch.long)
    mask_BP = torch.zeros_like(ids_BP)
    for row, prompt in enumerate(prompts):
        size = len(prompt.token_ids)
        ids_BP[row, width - size :] = torch.tensor(prompt.token_ids)
        mask_BP[row, width - size :] = 1
    return ids_BP.to(device), mask_BP.to(device)
